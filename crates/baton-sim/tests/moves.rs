//! Requests that move between engines while they run, in virtual time.

use std::time::Duration;

use baton_policy::{PolicyName, RouterConfig};
use baton_sim::{EngineModel, Fault, Link, Moves, Outcome, Scenario, Shape, WorkloadName, run};
use baton_units::{Blocks, Time, Tokens};

const SCHEDULER: EngineModel = EngineModel::Scheduler { budget: Tokens(2048) };

/// A small fleet whose memory is short for what its requests grow to.
fn tight(policy: PolicyName, seed: u64) -> Scenario {
    let router = RouterConfig { policy, decisions_kept: 0, ..RouterConfig::default() };
    let lab = Shape::lab(WorkloadName::Tails, 4);
    let shape = Shape { requests: 200, rate_per_s: 30.0, own_tokens: 400, output: 150, ..lab };
    Scenario { replicas: 4, shape, blocks: Blocks(900), ..Scenario::lab(WorkloadName::Tails, SCHEDULER, router, seed) }
}

fn moving(scenario: Scenario, link: &str) -> Scenario {
    Scenario { moves: Some(Moves::over(link)), ..scenario }
}

fn check(outcome: &Outcome, name: &str) {
    assert_eq!(outcome.violations, Vec::<String>::new(), "{name}");
    assert_eq!((outcome.left_in_flight, outcome.left_in_use), (0, Blocks(0)), "{name}: something leaks");
    for (place, request) in outcome.requests.iter().enumerate() {
        let ends = u32::from(request.finished.is_some()) + u32::from(request.refused.is_some()) + u32::from(request.failed);
        assert_eq!(ends, 1, "{name}: request {place} ends once: {request:?}");
    }
}

fn made(outcome: &Outcome) -> usize {
    outcome.moves.iter().filter(|record| record.stayed.is_none()).count()
}

#[test]
fn a_move_changes_no_token_and_leaks_nothing() {
    for policy in [PolicyName::Price, PolicyName::LeastOutstanding] {
        for seed in 0..3 {
            let still = run(&tight(policy, seed));
            let moved = run(&moving(tight(policy, seed), "ethernet"));
            check(&moved, &format!("{policy} seed {seed}"));
            eprintln!("{policy} {seed}: {} moves of {}, preemptions {} {}, p99 {:.0} {:.0} p50 {:.0} {:.0}", made(&moved), moved.moves.len(), still.preemptions, moved.preemptions, still.ttft_percentile_ms(0.99), moved.ttft_percentile_ms(0.99),  still.ttft_percentile_ms(0.5), moved.ttft_percentile_ms(0.5));
            let digests = |outcome: &Outcome| outcome.requests.iter().map(|request| request.output_digest).collect::<Vec<_>>();
            assert_eq!(digests(&still), digests(&moved), "{policy} seed {seed}");
            assert!(made(&moved) > 10, "{policy} seed {seed}: {:?}", moved.moves.len());
        }
    }
}

/// Replicas die while requests move from, to and between them, and messages take their time.
#[test]
fn deaths_during_moves_lose_no_more_than_what_ran_there() {
    let mut moves = 0;
    for seed in 0..8 {
        let fault = |replica, dies_s: f64| Fault {
            replica,
            dies_at: Time::from_ms(dies_s * 1e3),
            returns_at: Time::from_ms(dies_s * 1e3 + 900.0),
        };
        let scenario = Scenario {
            requests: Link::with_delay(Duration::from_millis(1)),
            events: Some(Link { delay: Duration::from_millis(5), loss: 0.1 }),
            reports: Some((Link::with_delay(Duration::from_millis(3)), Duration::from_millis(50))),
            faults: (0..16).map(|place| fault(place % 4, 0.6 + 0.377 * place as f64)).collect(),
            ..tight(PolicyName::LeastOutstanding, seed)
        };
        let mut scenario = moving(scenario, "ethernet");
        scenario.moves.as_mut().expect("just set").link.latency_s = 0.004;
        let outcome = run(&scenario);
        check(&outcome, &format!("seed {seed}"));
        moves += made(&outcome);
        assert_eq!(serde_json::to_string(&outcome).ok(), serde_json::to_string(&run(&scenario)).ok(), "equal seeds, equal bytes");
    }
    assert!(moves > 20, "{moves}");
}
