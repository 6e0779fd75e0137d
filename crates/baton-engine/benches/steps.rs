//! Engine steps per second with an executor that computes nothing: what a simulation of one replica costs. And draws per second.
//!
//! `cargo bench -p baton-engine`

// Measuring needs a clock and somewhere to print to; the crate itself has neither.
#![allow(clippy::disallowed_methods, clippy::print_stdout)]

use std::time::Instant;

use baton_cost::{Device, ModelShape, StepCoefficients};
use baton_engine::{
    Engine, EngineConfig, NewRequest, SampleRequest, SamplingOptions, SamplingParams, Timed, TokenBudget, TokenSource, sample,
};
use baton_units::{Blocks, RequestId, Time, Tokens};

fn main() {
    let shape = ModelShape::preset("llama-2-7b-gqa8").expect("a preset");
    let reference = StepCoefficients::from_profile(&shape, &Device::preset("h100").expect("a preset"));
    run("agent: 20 sessions of 10 steps, 2,000 + 300 tokens, 64 out", reference, 20, 10, 2_000, 300, 64);
    run("chat: 200 sessions of 1 step, 300 tokens, 200 out", reference, 200, 1, 300, 0, 200);
    run("long: 4 sessions of 4 steps, 100,000 + 1,000 tokens, 100 out", reference, 4, 4, 100_000, 1_000, 100);
    draw("greedy", SamplingOptions { temperature: 0.0, ..SamplingOptions::default() });
    draw("temperature 1", SamplingOptions::default());
    draw("temperature 1, top-p 0.95", SamplingOptions { top_p: 0.95, ..SamplingOptions::default() });
    draw("temperature 1, top-k 40", SamplingOptions { top_k: 40, ..SamplingOptions::default() });
    draw("greedy with 5 log-probabilities", SamplingOptions { temperature: 0.0, logprobs: Some(5), ..SamplingOptions::default() });
}

fn draw(name: &str, options: SamplingOptions) {
    let params = SamplingParams::new(options).expect("valid options");
    let logits: Vec<f32> = (0..49_152u32).map(|token| (token.wrapping_mul(2_654_435_761) >> 16) as f32 / 6_553.6).collect();
    let start = Instant::now();
    let mut checksum = 0;
    for output_index in 0..1_000 {
        let request = SampleRequest {
            params: &params,
            seed: 1,
            prompt_index: 0,
            choice_index: 0,
            output_index,
            prompt: &[],
            output: &[],
            suppressed: &[],
        };
        checksum ^= sample(&mut logits.clone(), &request).token;
    }
    println!("{name}, 49,152 logits: {:.0} us a draw ({checksum})", start.elapsed().as_secs_f64() * 1e3);
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
