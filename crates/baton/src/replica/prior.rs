//! What a step of this engine on this machine costs, before the first request.

use baton_cost::{Device, StepCoefficients};
use baton_engine::{Batch, BatchRow, Executor, SequenceId};
use baton_kv::BlockId;
use baton_model::CpuExecutor;
use baton_units::{BlockSize, Blocks, Tokens};

/// Runs of each step, of which the shortest counts: what else the machine does, such as the other replicas' own measuring, only adds
/// time, and a replica that takes itself for slow gets no requests that would teach it better.
const RUNS: usize = 3;
/// Tokens of the longer of the two steps that are measured: enough to show the cost of a token, a fraction of a second on one core.
const TOKENS: u32 = 33;

/// The model's formulas, with the device's speed taken from two short steps. Writes into the first KV blocks, which nothing has
/// read yet and whatever gets them first overwrites.
pub(super) fn measure(executor: &mut CpuExecutor, blocks: Blocks, block_size: BlockSize) -> StepCoefficients {
    let tokens = TOKENS.min(blocks.to_tokens(block_size).0).min(executor.max_model_len());
    // The first step pays for pages of weights that no step has touched.
    step_s(executor, 1, block_size);
    let one_s = least_step_s(executor, 1, block_size);
    let per_token_s = ((least_step_s(executor, tokens, block_size) - one_s) / f64::from((tokens - 1).max(1))).max(1e-9);
    let shape = executor.shape();
    let flops = shape.flops_per_token() / per_token_s / Device::MFU;
    let device = Device::measured("cpu", flops, shape.weight_bytes() / one_s.max(1e-9), 0.0);
    StepCoefficients::from_profile(&shape, &device)
}

fn least_step_s(executor: &mut CpuExecutor, tokens: u32, block_size: BlockSize) -> f64 {
    (0..RUNS).map(|_| step_s(executor, tokens, block_size)).fold(f64::INFINITY, f64::min)
}

fn step_s(executor: &mut CpuExecutor, tokens: u32, block_size: BlockSize) -> f64 {
    let ids = vec![0; tokens as usize];
    let blocks: Vec<BlockId> = (0..Tokens(tokens).to_blocks(block_size).0).map(BlockId).collect();
    let row = BatchRow { sequence: SequenceId(u64::MAX), tokens: &ids, start: 0, blocks: &blocks, sample: None };
    executor.step(&Batch { rows: vec![row] }).elapsed.as_secs_f64()
}
