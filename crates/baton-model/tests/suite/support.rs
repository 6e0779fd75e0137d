//! A driver for tests: sequences over blocks of one executor, one call per step.

use baton_engine::{Batch, BatchRow, SampleRequest, SamplingOptions, SamplingParams, SequenceId};
use baton_kv::BlockId;
use baton_model::{CpuConfig, KernelPath};

pub(crate) fn config() -> CpuConfig {
    CpuConfig { threads: 1, block_size: 16, blocks: 256, kernel: None, max_model_len: None }
}

/// Kernel paths of this machine.
pub(crate) fn kernel_paths() -> Vec<KernelPath> {
    #[cfg(target_arch = "x86_64")]
    {
        let has = |path: &KernelPath| match path {
            KernelPath::Portable => true,
            KernelPath::Avx2 => std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma"),
            KernelPath::Avx512 => std::arch::is_x86_feature_detected!("avx512f"),
        };
        KernelPath::ALL.into_iter().filter(has).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    vec![KernelPath::Portable]
}

pub(crate) fn greedy() -> SamplingParams {
    SamplingParams::new(SamplingOptions { temperature: 0.0, logprobs: Some(3), ..SamplingOptions::default() })
        .expect("greedy options are valid")
}

/// One sequence: its tokens, how many of them have KV, and its blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    pub(crate) computed: usize,
    pub(crate) blocks: Vec<BlockId>,
}

impl Sequence {
    pub(crate) fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.to_vec(), computed: 0, blocks: Vec::new() }
    }

    /// Takes blocks from `free` until `tokens` fit.
    pub(crate) fn reserve(&mut self, tokens: usize, block_size: usize, free: &mut Vec<BlockId>) {
        while self.blocks.len() * block_size < tokens {
            self.blocks.push(free.pop().expect("the test has blocks enough"));
        }
    }

    /// A row for the next `count` tokens, which samples if they are the last.
    pub(crate) fn row<'a>(&'a self, count: usize, params: &'a SamplingParams) -> BatchRow<'a> {
        let end = self.computed + count;
        let request = SampleRequest {
            params,
            seed: 1,
            prompt_index: 0,
            choice_index: 0,
            output_index: 0,
            prompt: &self.tokens,
            output: &[],
            suppressed: &[],
        };
        BatchRow {
            sequence: SequenceId(0),
            tokens: &self.tokens[self.computed..end],
            start: self.computed as u32,
            blocks: &self.blocks,
            sample: (end == self.tokens.len()).then_some(request),
        }
    }
}

pub(crate) fn batch(rows: Vec<BatchRow<'_>>) -> Batch<'_> {
    Batch { rows }
}

/// Block ids 0 to `count`, to be popped.
pub(crate) fn free_blocks(count: u32) -> Vec<BlockId> {
    (0..count).rev().map(BlockId).collect()
}
