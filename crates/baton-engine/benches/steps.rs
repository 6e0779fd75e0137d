//! Engine steps per second with an executor that computes nothing: what a simulation of one replica costs.
//!
//! `cargo bench -p baton-engine`

// Measuring needs a clock and somewhere to print to; the crate itself has neither.
#![allow(clippy::disallowed_methods, clippy::print_stdout)]

use std::time::Instant;

use baton_cost::{Device, ModelShape, StepCoefficients};
use baton_engine::{Engine, EngineConfig, NewRequest, SamplingOptions, SamplingParams, Timed, TokenBudget, TokenSource};
use baton_units::{Blocks, RequestId, Time, Tokens};

fn main() {
    let shape = ModelShape::preset("llama-2-7b-gqa8").expect("a preset");
    let reference = StepCoefficients::from_profile(&shape, &Device::preset("h100").expect("a preset"));
    run("agent: 20 sessions of 10 steps, 2,000 + 300 tokens, 64 out", reference, 20, 10, 2_000, 300, 64);
    run("chat: 200 sessions of 1 step, 300 tokens, 200 out", reference, 200, 1, 300, 0, 200);
    run("long: 4 sessions of 4 steps, 100,000 + 1,000 tokens, 100 out", reference, 4, 4, 100_000, 1_000, 100);
}

fn run(name: &str, step: StepCoefficients, sessions: u64, steps: u64, first: u32, more: u32, output: u32) {
    let config =
        EngineConfig { budget: TokenBudget::Fixed(Tokens(2_048)), ..EngineConfig::new("m", Blocks(30_000), Tokens(200_000), step) };
    let mut executor = Timed::new(step, config.blocks, config.block_size, TokenSource::Text, Vec::new());
    let mut engine = Engine::new(config).expect("a valid config");
    let options = SamplingOptions { temperature: 0.0, max_tokens: Some(output), ..SamplingOptions::default() };
    let params = SamplingParams::new(options).expect("valid options");
    let (mut now, mut rows) = (Time::ZERO, 0);
    let start = Instant::now();
    for step in 0..steps {
        for session in 0..sessions {
            let len = first + more * step as u32;
            let prompt = (0..len).map(|token| token ^ (session as u32) << 20).collect();
            engine.submit(NewRequest::new(RequestId(session), prompt, params.clone()), now).expect("it fits");
        }
        while let Some(plan) = engine.plan(now) {
            rows += plan.batch.rows.len();
            let result = plan.run(&mut executor);
            now += result.elapsed;
            engine.complete(result, now);
            engine.take_events();
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let counters = engine.status().counters;
    println!(
        "{name}: {:.0} steps/s, {:.0} rows/s, {:.2} M tokens computed/s, {:.0}x real time",
        counters.steps as f64 / elapsed,
        rows as f64 / elapsed,
        counters.computed_tokens as f64 / elapsed / 1e6,
        now.as_ms() / 1e3 / elapsed
    );
}
