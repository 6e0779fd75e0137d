//! More work than the fleet can do: what is let in is served in time, the rest is told at once when to come back.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use baton_policy::{PriorityClass, RouterConfig};
use baton_sim::{EngineModel, Outcome, Scenario, Shape, WorkloadName, run};
use baton_units::Tokens;

const START_WITHIN: Duration = Duration::from_secs(4);
/// Of the longest prompt here, cold; what a first token takes after its prompt began.
const PREFILL_MS: f64 = 250.0;

fn scenario(engine: EngineModel, rate_per_s: f64, seconds: f64, start_within: Duration, seed: u64) -> Scenario {
    let router = RouterConfig {
        classes: vec![PriorityClass { start_within, ..PriorityClass::default() }],
        held_max: usize::MAX,
        decisions_kept: 0,
        ..RouterConfig::default()
    };
    let mut scenario = Scenario::lab(WorkloadName::Shared, engine, router, seed);
    scenario.replicas = 2;
    scenario.shape = Shape { rate_per_s, requests: (rate_per_s * seconds) as usize, ..scenario.shape };
    scenario
}

fn finished(outcome: &Outcome) -> usize {
    outcome.requests.iter().filter(|request| request.finished.is_some()).count()
}

/// Requests a second that the fleet can do when there is always another one.
fn capacity(engine: EngineModel) -> f64 {
    let outcome = run(&scenario(engine, 1000.0, 10.0, Duration::from_hours(1), 1));
    assert_eq!(finished(&outcome), outcome.requests.len(), "nobody is turned away");
    finished(&outcome) as f64 / (outcome.ended_at.as_ms() / 1e3)
}

#[test]
fn an_overloaded_fleet_does_its_work_and_keeps_its_word() {
    for engine in [EngineModel::Serial, EngineModel::Scheduler { budget: Tokens(2048) }] {
        let capacity = capacity(engine);
        let (rate, seconds) = (1.5 * capacity, 40.0);
        let outcome = run(&scenario(engine, rate, seconds, START_WITHIN, 2));
        let goodput = finished(&outcome) as f64 / (outcome.ended_at.as_ms() / 1e3);
        assert!(goodput >= 0.95 * capacity, "{engine:?}: {goodput:.0}/s of {capacity:.0}/s");
        let refused = outcome.requests.iter().filter(|request| request.refused).count();
        assert_eq!(finished(&outcome) + refused, outcome.requests.len(), "finished or told");
        let latest = outcome.ttft_ms().last().copied().unwrap();
        assert!(latest <= START_WITHIN.as_secs_f64() * 1e3 + PREFILL_MS, "{engine:?}: first token after {latest:.0} ms");
        assert!(outcome.violations.is_empty(), "{:?}", outcome.violations);
        assert_eq!(outcome.left_in_flight, 0);
    }
}
