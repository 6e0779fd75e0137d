//! Prefixes that idle replicas fetch from busy ones, in virtual time.

use std::time::Duration;

use baton_cost::Link as Wire;
use baton_policy::{PolicyName, RouterConfig};
use baton_sim::{ClientRequest, EngineModel, Fault, Link, Outcome, Peers, RequestOutcome, Scenario, Shape, WorkloadName, percentile, run};
use baton_units::{Blocks, Time, Tokens};

const SHARED: usize = 8192;
const OWN: usize = 128;

/// Requests that all begin with the same 8,192 tokens: one that computes them, and many at once when they are there.
fn burst(replicas: usize, seed: u64) -> Scenario {
    let shared = ClientRequest::alone(Time::ZERO, 1, SHARED, 2);
    let begins_shared = |number: u64, at: Time| {
        let mut request = ClientRequest::alone(at, 100 + number, OWN, 40);
        request.prompt = shared.prompt.iter().chain(request.prompt.iter()).copied().collect();
        request
    };
    let at = |number: u64| Time::ZERO + Duration::from_secs(1) + Duration::from_millis(2 * number);
    let many: Vec<ClientRequest> = (0..24).map(|number| begins_shared(number, at(number))).collect();
    let also = [shared.clone()].into_iter().chain(many).collect();
    let router = RouterConfig { policy: PolicyName::Price, decisions_kept: 64, ..RouterConfig::default() };
    let engine = EngineModel::Scheduler { budget: Tokens(2048) };
    let base = Scenario::lab(WorkloadName::Shared, engine, router, seed);
    let shape = Shape { requests: 0, ..base.shape };
    Scenario { replicas, shape, also, events: Some(Link::with_delay(Duration::from_millis(1))), ..base }
}

fn over(scenario: Scenario, link: Wire) -> Scenario {
    Scenario { peers: Some(Peers::over(link)), ..scenario }
}

fn check(outcome: &Outcome) {
    assert_eq!(outcome.violations, Vec::<String>::new());
    assert_eq!((outcome.left_in_flight, outcome.left_in_use), (0, Blocks(0)), "something leaks");
    for request in &outcome.requests {
        assert!(request.finished.is_some() || request.failed || request.refused.is_some(), "{request:?}");
    }
}

/// Of first tokens, in ms; the first request is the one that all others begin with.
fn p99_ms(outcome: &Outcome) -> f64 {
    let mut ttft: Vec<f64> = outcome.requests[1..].iter().filter_map(RequestOutcome::ttft_ms).collect();
    assert_eq!(ttft.len(), outcome.requests.len() - 1);
    ttft.sort_by(f64::total_cmp);
    percentile(&ttft, 0.99)
}

#[test]
fn a_fast_link_to_a_busy_holder_shortens_the_tail_and_changes_no_token() {
    for seed in 1..4 {
        let (alone, fetching) = (run(&burst(4, seed)), run(&over(burst(4, seed), Wire::preset("nvlink").unwrap())));
        check(&alone);
        check(&fetching);
        assert!(alone.fetches == 0 && fetching.fetches > 0, "seed {seed}: {} fetches", fetching.fetches);
        let (without, with) = (p99_ms(&alone), p99_ms(&fetching));
        assert!(with < without, "seed {seed}: p99 {with} ms with, {without} without");
        let digests = |outcome: &Outcome| outcome.requests.iter().map(|request| request.output_digest).collect::<Vec<_>>();
        assert_eq!(digests(&alone), digests(&fetching), "seed {seed}");
    }
}

#[test]
fn a_link_that_is_slower_than_the_arithmetic_changes_nothing() {
    let (alone, slow) = (run(&burst(4, 1)), run(&over(burst(4, 1), Wire::custom(0.01))));
    assert_eq!(alone, slow);
    let (alone, single) = (run(&burst(1, 1)), run(&over(burst(1, 1), Wire::preset("nvlink").unwrap())));
    assert_eq!(alone, single, "nor does one where there is nobody else");
}

#[test]
fn what_is_fetched_is_a_hit_of_the_request_that_waited_for_it() {
    let fetching = run(&over(burst(4, 1), Wire::preset("nvlink").unwrap()));
    let hits = fetching.requests[1..].iter().filter(|request| request.cached == Some(Tokens(SHARED as u32))).count();
    assert_eq!(hits, fetching.requests.len() - 1, "nobody computes the shared part again");
}

/// Holders and targets that die while prefixes travel.
#[test]
fn deaths_while_prefixes_travel_lose_no_request() {
    let mut fetched = 0;
    for seed in 0..6 {
        // The holder last.
        let fault = |place: usize| Fault {
            replica: (place + 1) % 4,
            dies_at: Time::from_ms(1_003.0 + 4.0 * place as f64 + 1.7 * seed as f64),
            returns_at: Time::from_ms(1_030.0 + 4.0 * place as f64 + 1.7 * seed as f64),
        };
        let scenario = over(burst(4, seed), Wire::preset("nvlink").unwrap().with_latency(4e-3));
        let outcome = run(&Scenario { faults: (0..4).map(fault).collect(), tries: 10, ..scenario });
        check(&outcome);
        fetched += outcome.fetches;
    }
    assert!(fetched > 0);
}
