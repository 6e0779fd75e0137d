//! Times on the reference machine: a 7B model with 8 KV heads on an H100.

use baton_cost::{Device, ModelShape};

use super::*;

fn reference() -> StepCoefficients {
    StepCoefficients::from_profile(&ModelShape::preset("llama-2-7b-gqa8").unwrap(), &Device::preset("h100").unwrap())
}

fn machine(budget: TokenBudget) -> World {
    World::new(EngineConfig { budget, step_prior: reference(), ..config(8_192, 16, 32_768) })
}

fn latency(target_ms: u64) -> TokenBudget {
    TokenBudget::Latency { target: Duration::from_millis(target_ms), least: Tokens(64), most: Tokens(16_384) }
}

/// Times between the tokens of one choice, ms.
fn gaps_ms(told: &Told) -> Vec<f64> {
    told.token_times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect()
}

fn percentile(mut values: Vec<f64>, share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * share).round() as usize]
}

#[test]
fn an_agent_step_falls_from_157_to_12_and_a_half_ms() {
    let mut world = machine(TokenBudget::Fixed(Tokens(8_192)));
    let fixed_ms = reference().fixed_s * 1e3;
    let mut ttft_ms = |id: u64, len: u32| {
        let start = world.now;
        world.submit(request(id, &prompt(0, len), greedy(1)));
        world.run();
        (world.now - start).as_secs_f64() * 1e3 - fixed_ms
    };
    // The session's former step filled the cache up to token 4465; the cold one is another session's.
    ttft_ms(1, 4_465);
    let warm = ttft_ms(2, 4_850);
    world.engine.reset_prefix_cache();
    let mut ttft_ms = |id: u64, len: u32| {
        let start = world.now;
        world.submit(request(id, &prompt(0, len), greedy(1)));
        world.run();
        (world.now - start).as_secs_f64() * 1e3 - fixed_ms
    };
    let cold = ttft_ms(3, 4_850);
    assert!((cold - 157.1).abs() < 0.5, "{cold} ms");
    assert!((warm - 12.5).abs() < 0.1, "{warm} ms");
}

/// Sarathi's property: with the budget derived from a time between tokens, a long prompt delays nobody's next token beyond it.
#[test]
fn a_decode_is_never_stalled_by_a_whole_prefill() {
    let longest_gap = |budget| {
        let mut world = machine(budget);
        world.submit(request(1, &prompt(0, 100), greedy(100)));
        for _ in 0..5 {
            world.step();
        }
        world.submit(request(2, &prompt(1, 16_384), greedy(1)));
        world.run();
        percentile(gaps_ms(&world.told[&(1, 0)]), 1.0)
    };
    let whole = longest_gap(TokenBudget::Fixed(Tokens(32_768)));
    assert!(whole > 730.0, "{whole} ms");
    let chunked = longest_gap(latency(30));
    assert!(chunked <= 30.01, "{chunked} ms");
}

#[test]
fn chunking_cuts_the_99th_percentile_of_gaps_at_least_threefold_at_equal_load() {
    let run = |budget| {
        let mut world = machine(budget);
        let mut rng = fastrand::Rng::with_seed(1);
        let mut next = Time::ZERO;
        let mut id = 0;
        while id < 60 || !world.engine.is_idle() {
            while id < 60 && next <= world.now {
                id += 1;
                let len = if id % 4 == 0 { 8_000 } else { 300 };
                world.submit(request(id, &prompt(id as u32 * 31, len), greedy(60)));
                next += Duration::from_secs_f64(-0.12 * (1.0 - rng.f64()).ln());
            }
            if !world.step() {
                world.now = next.max(world.now);
            }
        }
        let gaps: Vec<f64> = world.told.values().flat_map(gaps_ms).collect();
        (percentile(gaps, 0.99), world.now.as_ms())
    };
    let (whole, whole_end) = run(TokenBudget::Fixed(Tokens(16_384)));
    let (chunked, chunked_end) = run(latency(40));
    assert!(whole > 3.0 * chunked, "{whole} ms whole, {chunked} ms chunked");
    assert!(chunked_end < 1.1 * whole_end, "at equal load: {chunked_end} and {whole_end} ms");
}

#[test]
fn continuous_batching_at_least_doubles_static_batching() {
    let mut rng = fastrand::Rng::with_seed(3);
    // Outputs of very different lengths, as chats have.
    let lengths: Vec<u32> = (0..256).map(|_| (-60.0 * (1.0 - rng.f64()).ln()) as u32 + 2).collect();
    let small = |max_running| World::new(EngineConfig { max_running, step_prior: reference(), ..config(4_096, 16, 4_096) });
    let submit = |world: &mut World, index: usize| {
        world.submit(request(index as u64, &prompt(index as u32, 32), greedy(lengths[index])));
    };
    let mut continuous = small(8);
    for index in 0..lengths.len() {
        submit(&mut continuous, index);
    }
    continuous.run();
    let mut fixed = small(8);
    for group in 0..lengths.len() / 8 {
        for index in 8 * group..8 * (group + 1) {
            submit(&mut fixed, index);
        }
        fixed.run();
    }
    let gain = fixed.now.as_ms() / continuous.now.as_ms();
    assert!(gain > 2.0, "{gain}");
}

/// The budget follows what steps take, not what was expected of them.
#[test]
fn the_budget_comes_from_measured_steps() {
    let mut world = machine(latency(30));
    let before = world.engine.status().token_budget;
    world.executor.0.set_coefficients(reference().scaled(3.0));
    for id in 0..20 {
        world.submit(request(id, &prompt(id as u32, 2_000), greedy(20)));
    }
    world.run();
    let status = world.engine.status();
    assert!(status.token_budget < Tokens(before.0 / 2), "{before} before, {} after", status.token_budget);
    assert_eq!(status.step_prior, reference());
    assert!(status.step_error < 0.2, "{}", status.step_error);
    // A prompt that arrives beside a decode now meets the target on the slow machine.
    world.submit(request(100, &prompt(7, 50), greedy(40)));
    world.step();
    world.submit(request(101, &prompt(3, 9_000), greedy(1)));
    world.run();
    let gap = percentile(gaps_ms(&world.told[&(100, 0)]), 1.0);
    assert!(gap < 36.0, "{gap} ms");
}
