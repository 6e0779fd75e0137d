//! Where not all tails can be short, the operator's objective chooses whose are.

use std::time::Duration;

use baton_policy::{PriorityClass, RouterConfig};
use baton_sim::{EngineModel, Scenario, Shape, WorkloadName, run};
use baton_units::Tokens;

/// TTFTs of four replicas that a stream with some very long prompts keeps busy, over three seeds.
fn ttft_ms(engine: EngineModel, slo_ttft_ms: Option<u64>) -> Vec<f64> {
    let of_seed = |seed| {
        let class = PriorityClass { slo_ttft: slo_ttft_ms.map(Duration::from_millis), ..PriorityClass::default() };
        let router = RouterConfig { classes: vec![class], decisions_kept: 0, ..RouterConfig::default() };
        let mut scenario = Scenario::lab(WorkloadName::Mix, engine, router, seed);
        scenario.shape = Shape { rate_per_s: scenario.shape.rate_per_s * 4.0 / scenario.replicas as f64, ..scenario.shape };
        scenario.replicas = 4;
        run(&scenario).ttft_ms()
    };
    (401..404).flat_map(of_seed).collect()
}

/// Mean lateness in ms, and how many are late.
fn lateness(slo_ms: u64, ttft_ms: &[f64]) -> (f64, usize) {
    let late: Vec<f64> = ttft_ms.iter().map(|ttft| ttft - slo_ms as f64).filter(|late| *late > 0.0).collect();
    (late.iter().sum::<f64>() / ttft_ms.len() as f64, late.len())
}

#[test]
fn first_tokens_are_less_late_by_the_objective_that_was_given() {
    const SHORT: u64 = 100;
    const LONG: u64 = 2500;
    for engine in [EngineModel::Serial, EngineModel::Scheduler { budget: Tokens(2048) }] {
        let all = [None, Some(SHORT), Some(LONG)].map(|slo| ttft_ms(engine, slo));
        assert!(all.iter().all(|ttft| ttft.len() == all[0].len()), "all are served");
        let [plain, short, long] = [0, 1, 2].map(|rule| lateness(LONG, &all[rule]));
        assert!(long.0 < 0.5 * plain.0 && long.0 < 0.5 * short.0, "{engine:?}: {plain:?} {short:?} {long:?}");
        assert!(long.1 < plain.1 && long.1 < short.1, "{engine:?}: {plain:?} {short:?} {long:?}");
        // Without an objective all waiting counts, most of which is lateness by a short one.
        let [plain, short, long] = [0, 1, 2].map(|rule| lateness(SHORT, &all[rule]));
        assert!(short.0 < 1.05 * plain.0 && short.0 < 0.8 * long.0, "{engine:?}: {plain:?} {short:?} {long:?}");
    }
}
