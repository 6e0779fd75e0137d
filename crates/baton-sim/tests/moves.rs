//! Requests that move between engines while they run, in virtual time.

use std::time::Duration;

use baton_cost::StepLoad;
use baton_policy::{PolicyName, RouterConfig};
use baton_sim::{
    ClientRequest, Drain, DrainRecord, EngineModel, Fault, Link, Moves, Outcome, OutputTail, RequestOutcome, Scenario, Shape, WorkloadName,
    reference_blocks, reference_step, run,
};
use baton_units::{Blocks, Priority, Time, Tokens};

/// Eight replicas of the reference machine with an eighth of its memory for KV, which so fills within seconds: prompts of 512 tokens,
/// outputs by a law with a long tail (median 400, mean above 1,000), arrivals in bursts. At 24 a second memory is nearly full.
fn tails(rate_per_s: f64, policy: PolicyName, seed: u64) -> Scenario {
    let router = RouterConfig { policy, decisions_kept: 0, ..RouterConfig::default() };
    let shape = Shape {
        rate_per_s,
        requests: (60.0 * rate_per_s) as usize,
        own_tokens: 512,
        output: 400,
        output_tail: Some(OutputTail { sigma: 1.5, longest: 8000 }),
        arrivals_scv: 4.0,
        ..Shape::lab(WorkloadName::Tails, 8)
    };
    let engine = EngineModel::Scheduler { budget: Tokens(2048) };
    Scenario { shape, blocks: Blocks(4000), ..Scenario::lab(WorkloadName::Tails, engine, router, seed) }
}

/// A small fleet whose memory is short for what its requests grow to.
fn tight(policy: PolicyName, seed: u64) -> Scenario {
    let scenario = tails(30.0, policy, seed);
    let shape = Shape { requests: 400, ..scenario.shape };
    Scenario { replicas: 4, shape, blocks: Blocks(1500), ..scenario }
}

fn moving(scenario: Scenario) -> Scenario {
    Scenario { moves: Some(Moves::over("ethernet")), ..scenario }
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
        let (still, moved) = (run(&tight(policy, 1)), run(&moving(tight(policy, 1))));
        check(&moved, &format!("{policy}"));
        let digests = |outcome: &Outcome| outcome.requests.iter().map(|request| request.output_digest).collect::<Vec<_>>();
        assert_eq!(digests(&still), digests(&moved), "{policy}");
        let twice = moved.requests.iter().filter(|request| request.moves > 1).count();
        assert!(made(&moved) > 50 && twice > 0, "{policy}: {} moves, {twice} of a request more than once", made(&moved));
    }
}

/// Replicas die while requests move from, to and between them, and messages take their time.
#[test]
fn deaths_during_moves_lose_no_more_than_what_ran_there() {
    let (mut made_in_all, mut cut_short) = (0, 0);
    for seed in 0..4 {
        let fault = |place: u32| Fault {
            replica: place as usize % 4,
            dies_at: Time::from_ms(6000.0 + 1577.0 * f64::from(place)),
            returns_at: Time::from_ms(6400.0 + 1577.0 * f64::from(place)),
        };
        let mut scenario = moving(Scenario {
            requests: Link::with_delay(Duration::from_millis(1)),
            events: Some(Link { delay: Duration::from_millis(5), loss: 0.1 }),
            reports: Some((Link::with_delay(Duration::from_millis(3)), Duration::from_millis(50))),
            faults: (0..8).map(fault).collect(),
            ..tight(PolicyName::LeastOutstanding, seed)
        });
        // Slow, so that moves are under way most of the time.
        scenario.moves.as_mut().expect("it was just set").link = baton_cost::Link::custom(2.0).with_latency(0.004);
        let outcome = run(&scenario);
        check(&outcome, &format!("seed {seed}"));
        made_in_all += made(&outcome);
        cut_short += outcome.moves.iter().filter(|record| record.stayed.is_some_and(|why| why.contains("died"))).count();
        assert_eq!(outcome, run(&scenario), "equal seeds, equal outcomes");
    }
    assert!(made_in_all > 100 && cut_short > 2, "{made_in_all} moves, {cut_short} cut short");
}

/// The reason for all of it, with a router that does not look at memory. The fleet has room in sum: what one replica lacks others have.
#[test]
fn near_the_end_of_memory_moves_shorten_tails_and_spare_preemptions() {
    let (mut p99_ms, mut preemptions) = ([0.0, 0.0], [0, 0]);
    for seed in 13..17 {
        let scenario = tails(24.0, PolicyName::LeastOutstanding, seed);
        let runs = [run(&scenario), run(&moving(scenario))];
        check(&runs[1], &format!("seed {seed}"));
        for (place, outcome) in runs.iter().enumerate() {
            p99_ms[place] += outcome.ttft_percentile_ms(0.99) / 4.0;
            preemptions[place] += outcome.preemptions;
        }
    }
    assert!(p99_ms[0] >= 2.0 * p99_ms[1], "{p99_ms:?} ms");
    assert!(preemptions[0] >= 100 && preemptions[0] >= 5 * preemptions[1], "{preemptions:?}");
}

/// `price` looks at memory when it places, so that first tokens are early with and without; what grows afterwards it cannot know.
#[test]
fn moves_spare_preemptions_that_no_placement_can_foresee() {
    let scenario = tails(24.0, PolicyName::Price, 13);
    let (still, moved) = (run(&scenario), run(&moving(scenario)));
    check(&moved, "price");
    assert!(still.preemptions >= 20 && still.preemptions >= 5 * moved.preemptions, "{} and {}", still.preemptions, moved.preemptions);
}

#[test]
fn at_low_load_nothing_moves() {
    for policy in [PolicyName::Price, PolicyName::LeastOutstanding] {
        let outcome = run(&moving(tails(14.0, policy, 11)));
        check(&outcome, "low load");
        assert_eq!(outcome.moves, [], "{policy}");
    }
}

/// Outputs take tens of seconds; their replica is empty in about as many looks as it has requests.
#[test]
fn a_replica_is_drained_by_moves_as_fast_as_was_predicted() {
    let at = Time::from_ms(20_000.0);
    let scenario = Scenario { drains: vec![Drain { replica: 2, at }], ..tails(16.0, PolicyName::LeastOutstanding, 11) };
    let (still, moved) = (run(&scenario), run(&moving(scenario)));
    check(&moved, "drain");
    let took_ms = |outcome: &Outcome| outcome.drains[0].empty.expect("it became empty").as_ms() - at.as_ms();
    let DrainRecord { had, forecast, .. } = moved.drains[0];
    let forecast_ms = forecast.expect("the loop says so").as_secs_f64() * 1e3;
    assert!(had >= 5 && took_ms(&still) > 10_000.0, "{had} requests, {} ms without moves", took_ms(&still));
    assert!((took_ms(&moved) - forecast_ms).abs() <= 150.0, "{} ms, predicted {forecast_ms}", took_ms(&moved));
    let stayed = moved.requests.iter().filter(|request| request.replica == Some(2));
    assert!(
        stayed.into_iter().all(|request| request.finished <= moved.drains[0].empty),
        "nothing was sent there, and all else went on elsewhere"
    );
}

/// Mean time between tokens of the important requests over that of a request alone, and of all others in ms.
fn tpot_of_classes(outcome: &Outcome) -> (f64, f64) {
    let of = |important: bool| outcome.requests.iter().filter(move |request| (request.priority < Priority(0)) == important);
    let alone_ms = |request: &RequestOutcome| {
        let context = request.prompt.as_f64() + f64::from(request.output) / 2.0;
        reference_step().step_s(&StepLoad::decode(1.0, context)) * 1e3
    };
    let slowed: Vec<f64> = of(true).filter_map(|request| Some(request.tpot_ms()? / alone_ms(request))).collect();
    let others: Vec<f64> = of(false).filter_map(RequestOutcome::tpot_ms).collect();
    assert!(slowed.len() >= 10, "{} important requests", slowed.len());
    (slowed.iter().sum::<f64>() / slowed.len() as f64, others.iter().sum::<f64>() / others.len() as f64)
}

/// Where one request in fifty asks for quiet, it decodes as if alone, nearly, and the others pay little. The loop alone makes room that the
/// next arrivals take again: with their prefill between its tokens it is worse off than without the loop.
#[test]
fn important_requests_decode_at_nearly_full_speed_and_others_pay_little() {
    let quiet_from = Some(Priority(-1));
    let scenario = |in_router: bool, in_loop: bool| {
        let base = tails(17.0, PolicyName::Price, 21);
        let router = RouterConfig { quiet_from: quiet_from.filter(|_| in_router), ..base.router.clone() };
        let priorities = vec![(Priority(-1), 0.02), (Priority(0), 0.98)];
        let mut scenario = moving(Scenario { router, blocks: reference_blocks(), priorities, ..base });
        scenario.moves.as_mut().expect("it was just set").mover.quiet_from = quiet_from.filter(|_| in_loop);
        scenario
    };
    let [none, by_loop, both] = [(false, false), (false, true), (true, true)].map(|(in_router, in_loop)| {
        let outcome = run(&scenario(in_router, in_loop));
        check(&outcome, "quiet");
        tpot_of_classes(&outcome)
    });
    assert!(both.0 <= 1.1 && both.0 < by_loop.0 && both.0 < none.0, "{none:?} {by_loop:?} {both:?}");
    assert!(both.1 <= 1.1 * none.1, "{none:?} {by_loop:?} {both:?}");
}

/// Each of four replicas has room for 2,400 tokens and more, none for 4,096.
#[test]
fn a_request_that_fits_in_pieces_only_starts_at_once() {
    let fleet = |policy| {
        let base = tails(1.0, policy, 1);
        let many = (0..24).map(|place| ClientRequest::alone(Time::ZERO, place, 2112, 2000));
        let late = ClientRequest::alone(Time::from_ms(1200.0), 99, 4096, 8);
        let shape = Shape { requests: 0, ..base.shape };
        let engine = EngineModel::Scheduler { budget: Tokens(8192) };
        Scenario { replicas: 4, shape, engine, blocks: Blocks(1000), also: many.chain([late]).collect(), ..base }
    };
    for policy in [PolicyName::RoundRobin, PolicyName::LeastOutstanding] {
        let (still, moved) = (run(&fleet(policy)), run(&moving(fleet(policy))));
        check(&moved, &format!("{policy}"));
        let ttft = |outcome: &Outcome| outcome.requests.last().and_then(RequestOutcome::ttft_ms);
        // A loop's period, a move, the step that runs, and a prefill of 129 ms.
        assert!(ttft(&moved).is_some_and(|ms| ms < 50.0 + 50.0 + 20.0 + 140.0), "{policy}: {:?}", ttft(&moved));
        assert!(ttft(&still).is_some_and(|ms| ms > 5000.0), "{policy}: {:?}", ttft(&still));
        assert_eq!(moved.moves.first().map(|record| record.reason), Some("defragment"), "{policy}: {:?}", moved.moves);
    }
}
