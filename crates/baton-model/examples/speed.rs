//! Tokens per CPU-second of this engine: a prompt of 512 tokens, and decoding at batch 1 and 8 after it.
//!
//! `cargo run --release -p baton-model --example speed -- [MODEL] [--threads N] [--kernel portable|avx2|avx512]`; without a model it
//! takes the weights that the tests use. Pin it to one core (`taskset -c 1`) when other work runs.

#![allow(clippy::print_stdout)] // Printing the table is what it is for.

use std::path::PathBuf;

use baton_engine::{Batch, BatchRow, Executor, SampleRequest, SamplingParams, SequenceId};
use baton_kv::BlockId;
use baton_model::{CpuConfig, CpuExecutor};

const PROMPT: usize = 512;
const BLOCK_SIZE: usize = 16;
const STEPS: usize = 64;
const ROUNDS: usize = 3;

fn main() {
    let (path, config) = arguments();
    let start = cpu_seconds();
    let mut executor = CpuExecutor::load(&path, &config).expect("the model loads");
    println!(
        "{} ({} threads, {}), loaded in {:.2} CPU-seconds",
        path.display(),
        config.threads,
        executor.kernel_path(),
        cpu_seconds() - start
    );
    println!("| what | best tokens / CPU-second | all rounds |");
    println!("| --- | --- | --- |");
    report("prefill, 512 tokens", || prefill(&mut executor));
    (0..8).for_each(|row| fill(&mut executor, row));
    report("decode, batch 1", || decode(&mut executor, 1));
    report("decode, batch 8", || decode(&mut executor, 8));
}

fn arguments() -> (PathBuf, CpuConfig) {
    let mut path = None;
    let mut config =
        CpuConfig { threads: 1, block_size: BLOCK_SIZE, blocks: 8 * (PROMPT + STEPS) / BLOCK_SIZE, kernel: None, max_model_len: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().expect("the option has a value");
        match argument.as_str() {
            "--threads" => config.threads = value().parse().expect("a number of threads"),
            "--kernel" => config.kernel = Some(value().parse().expect("a kernel path")),
            _ => path = Some(PathBuf::from(argument)),
        }
    }
    (path.unwrap_or_else(baton_testkit::smollm2), config)
}

fn report(what: &str, mut round: impl FnMut() -> f64) {
    let rates: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
    let best = rates.iter().copied().fold(0.0, f64::max);
    let all: Vec<String> = rates.iter().map(|rate| format!("{rate:.0}")).collect();
    println!("| {what} | {best:.0} | {} |", all.join(", "));
}

fn prefill(executor: &mut CpuExecutor) -> f64 {
    let start = cpu_seconds();
    fill(executor, 0);
    PROMPT as f64 / (cpu_seconds() - start)
}

/// Every round decodes the same positions again, after the prompts of [`fill`].
fn decode(executor: &mut CpuExecutor, batch: usize) -> f64 {
    let start = cpu_seconds();
    let mut tokens: Vec<u32> = (0..batch as u32).collect();
    for step in 0..STEPS {
        let rows = tokens.iter().enumerate().map(|(row, token)| (row, std::slice::from_ref(token), PROMPT + step)).collect();
        tokens = run(executor, rows);
    }
    (STEPS * batch) as f64 / (cpu_seconds() - start)
}

/// Computes a prompt of arbitrary tokens into the blocks of one row.
fn fill(executor: &mut CpuExecutor, row: usize) {
    let tokens: Vec<u32> = (0..PROMPT).map(|i| ((i * 7919 + row * 31) % executor.vocab_size() as usize) as u32).collect();
    run(executor, vec![(row, &tokens, 0)]);
}

/// One step of (row, tokens, start), greedy; the drawn tokens.
fn run(executor: &mut CpuExecutor, rows: Vec<(usize, &[u32], usize)>) -> Vec<u32> {
    let params = SamplingParams::greedy(1).expect("valid options");
    let per_row = (PROMPT + STEPS) / BLOCK_SIZE;
    let blocks: Vec<Vec<BlockId>> =
        (0..8).map(|row| (row * per_row..(row + 1) * per_row).map(|block| BlockId(block as u32)).collect()).collect();
    let row = |(row, tokens, start): (usize, _, usize)| BatchRow {
        sequence: SequenceId(row as u64),
        tokens,
        start: start as u32,
        blocks: &blocks[row],
        sample: Some(SampleRequest {
            params: &params,
            seed: 0,
            prompt_index: 0,
            choice_index: 0,
            output_index: 0,
            prompt: &[],
            output: &[],
            suppressed: &[],
        }),
    };
    let result = executor.step(&Batch { rows: rows.into_iter().map(row).collect() });
    result.samples.into_iter().map(|sample| sample.expect("every row samples").token).collect()
}

/// User and system time of this process.
fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to a `rusage`, which the call fills; all zeros are a valid one in any case.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
