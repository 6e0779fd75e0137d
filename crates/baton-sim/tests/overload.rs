//! More work than the fleet can do: what is let in is served in time, the rest is told at once when to come back, and comes.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use baton_policy::{PriorityClass, RouterConfig};
use baton_sim::{Burst, EngineModel, Outcome, RequestOutcome, Returns, Scenario, Shape, WorkloadName, percentile, run};
use baton_units::{Priority, Time, Tokens};

const START_WITHIN: Duration = Duration::from_secs(4);
/// Of the longest prompt here, cold; what a first token takes after its prompt began.
const PREFILL_MS: f64 = 250.0;
const ENGINES: [EngineModel; 2] = [EngineModel::Serial, EngineModel::Scheduler { budget: Tokens(2048) }];
const RETURNS: Option<Returns> = Some(Returns { attempts: 4, jitter: Duration::from_millis(500) });
/// Long enough that arrivals at random differ by few per cent from one to the next.
const WINDOW_S: f64 = 5.0;
/// Of the fleet's rate, what those told to come back get at least.
const RETURNS_SHARE: f64 = 0.25;

fn class(name: &str, from: i32, start_within: Duration) -> PriorityClass {
    PriorityClass { name: name.to_owned(), from: Priority(from), start_within, slo_ttft: None }
}

fn scenario(engine: EngineModel, rate_per_s: f64, requests: f64, start_within: Duration, seed: u64) -> Scenario {
    let router = RouterConfig {
        classes: vec![class("all", i32::MIN, start_within)],
        held_max: usize::MAX,
        decisions_kept: 0,
        ..RouterConfig::default()
    };
    let mut scenario = Scenario::lab(WorkloadName::Shared, engine, router, seed);
    scenario.replicas = 2;
    scenario.shape = Shape { rate_per_s, requests: requests as usize, own_tokens: 1500, ..scenario.shape };
    scenario
}

fn finished(outcome: &Outcome) -> usize {
    outcome.requests.iter().filter(|request| request.finished.is_some()).count()
}

/// Requests a second that the fleet can do when there is always another one.
fn capacity(engine: EngineModel) -> f64 {
    let outcome = run(&scenario(engine, 1000.0, 1000.0, Duration::from_hours(1), 1));
    assert_eq!(finished(&outcome), outcome.requests.len(), "nobody is turned away");
    finished(&outcome) as f64 / (outcome.ended_at.as_ms() / 1e3)
}

/// Whoever is let in has the first token in time, all others are told when to come back.
fn check_word_kept(outcome: &Outcome, start_within: Duration, name: &str) {
    for request in &outcome.requests {
        match request.ttft_ms() {
            Some(ttft) => assert!(ttft <= start_within.as_secs_f64() * 1e3 + PREFILL_MS, "{name}: first token after {ttft:.0} ms"),
            None => assert!(request.refused.is_some() && request.retry_after.is_some(), "{name}: {request:?}"),
        }
    }
    assert!(outcome.violations.is_empty(), "{name}: {:?}", outcome.violations);
    assert_eq!(outcome.left_in_flight, 0, "{name}");
}

/// How many requests have their time `at` in each window from `from_s` to `to_s`.
fn per_window(outcome: &Outcome, from_s: f64, to_s: f64, at: impl Fn(&RequestOutcome) -> Option<Time>) -> Vec<f64> {
    let mut counts = vec![0.0; ((to_s - from_s) / WINDOW_S) as usize];
    for time in outcome.requests.iter().filter_map(at) {
        let place = (time.as_ms() / 1e3 - from_s) / WINDOW_S;
        if place >= 0.0
            && let Some(count) = counts.get_mut(place as usize)
        {
            *count += 1.0;
        }
    }
    counts
}

fn deviation(values: &[f64]) -> f64 {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    (values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

fn between(request: &RequestOutcome, from_s: f64, to_s: f64) -> bool {
    (from_s * 1e3..to_s * 1e3).contains(&request.arrived.as_ms())
}

/// Percentile of the time to first token of those served that arrived between.
fn ttft(outcome: &Outcome, share: f64, from_s: f64, to_s: f64) -> f64 {
    let arrived = outcome.requests.iter().filter(|request| between(request, from_s, to_s));
    let mut all: Vec<f64> = arrived.filter_map(RequestOutcome::ttft_ms).collect();
    all.sort_by(f64::total_cmp);
    percentile(&all, share)
}

#[test]
fn an_overloaded_fleet_does_its_work_and_keeps_its_word() {
    for engine in ENGINES {
        let capacity = capacity(engine);
        let rate = 1.5 * capacity;
        let outcome = run(&scenario(engine, rate, 40.0 * rate, START_WITHIN, 2));
        let goodput = finished(&outcome) as f64 / (outcome.ended_at.as_ms() / 1e3);
        assert!(goodput >= 0.95 * capacity, "{engine:?}: {goodput:.0}/s of {capacity:.0}/s");
        check_word_kept(&outcome, START_WITHIN, &format!("{engine:?}"));
    }
}

/// Two and a half minutes in which those who are turned away come back when told. Nothing may swing: not what is served, not how many
/// are turned away, not the queue.
#[test]
fn an_overload_of_clients_that_come_back_does_not_oscillate() {
    for engine in ENGINES {
        let capacity = capacity(engine);
        let (rate, warm_s, end_s) = (1.5 * capacity, 20.0, 150.0);
        let outcome = run(&Scenario { returns: RETURNS, ..scenario(engine, rate, end_s * rate, START_WITHIN, 2) });
        check_word_kept(&outcome, START_WITHIN, &format!("{engine:?}"));
        let windows = |at: &dyn Fn(&RequestOutcome) -> Option<Time>| per_window(&outcome, warm_s, end_s, at);
        let (served, refused) = (windows(&|request| request.finished), windows(&|request| request.refused));
        let fresh = windows(&|request| (request.attempt == 1).then_some(request.arrived));
        let returned = windows(&|request| (request.attempt > 1).then_some(request.arrived));
        for (window, served) in served.iter().enumerate() {
            assert!(*served >= 0.95 * capacity * WINDOW_S, "{engine:?} window {window}: {served} of {:.0}", capacity * WINDOW_S);
        }
        // The fleet feels less of it than what the arrivals' own chance brings, and who is turned away is that chance and the returns'.
        assert!(deviation(&served) < 0.5 * deviation(&fresh), "{engine:?}: {served:?}");
        assert!(deviation(&refused) < 2.0 * deviation(&fresh), "{engine:?}: {refused:?}");
        // Who cannot be served is not made to ask in vain over and over.
        let (fresh, returned): (f64, f64) = (fresh.iter().sum(), returned.iter().sum());
        assert!(returned < RETURNS_SHARE * fresh, "{engine:?}: {returned} came back beside {fresh}");
        // The queue is never empty and never too long.
        for window in 0..served.len() {
            let from_s = warm_s + window as f64 * WINDOW_S;
            let wait = ttft(&outcome, 0.5, from_s, from_s + WINDOW_S);
            assert!((1000.0..4000.0).contains(&wait), "{engine:?} window {window}: {wait} ms");
        }
        // Whoever is let in can count on it.
        let settled = || outcome.requests.iter().filter(|request| between(request, warm_s, end_s));
        let late = settled().filter(|request| request.refused.is_some_and(|at| at > request.arrived)).count();
        assert!(late * 100 <= settled().count(), "{engine:?}: {late} waited and were turned away then");
    }
}

/// Three times the capacity for 20 s, then 0.7 times: when it is over, whoever comes back at the told time is let in, and all is as if
/// nothing had been once the burst's excess has been worked off.
#[test]
fn a_burst_is_over_when_its_excess_is_worked_off() {
    let (burst_s, factor, load, end_s) = (20.0, 3.0, 0.7, 210.0);
    for engine in ENGINES {
        let capacity = capacity(engine);
        let burst = Burst { until: Time::from_ms(burst_s * 1e3), factor: factor / load };
        let calm = scenario(engine, load * capacity, load * capacity * end_s, START_WITHIN, 3);
        let requests = (factor * burst_s + load * (end_s - burst_s)) * capacity;
        let shape = Shape { burst: Some(burst), requests: requests as usize, ..calm.shape };
        let usual = ttft(&run(&calm), 0.99, burst_s, end_s);

        // Without returns there is the queue alone, which holds no more than may start in time.
        let given_up = run(&Scenario { shape, ..calm.clone() });
        let settled_s = burst_s + START_WITHIN.as_secs_f64() / (1.0 - load);
        let after = ttft(&given_up, 0.99, settled_s, end_s);
        assert!(after < 2.0 * usual, "{engine:?}: {after:.0} ms, {usual:.0} ms without the burst");
        assert!(given_up.requests.iter().filter(|request| between(request, settled_s, end_s)).all(|request| request.refused.is_none()));

        let outcome = run(&Scenario { shape, returns: RETURNS, ..calm });
        check_word_kept(&outcome, START_WITHIN, &format!("{engine:?}"));
        let back = || outcome.requests.iter().filter(|request| request.attempt == 2 && between(request, burst_s, f64::INFINITY));
        let let_in = back().filter(|request| request.refused.is_none()).count();
        assert!(let_in * 100 >= back().count() * 95, "{engine:?}: {let_in} of {} were let in when they came back", back().count());
        // The excess leaves at what the usual load leaves free, or as fast as those told come back.
        let settled_s = burst_s + (factor - 1.0) * burst_s / RETURNS_SHARE.min(1.0 - load);
        let after = ttft(&outcome, 0.99, settled_s, end_s);
        assert!(after < 2.0 * usual, "{engine:?}: {after:.0} ms, {usual:.0} ms without the burst");
        let last = outcome.requests.iter().filter(|request| request.attempt > 1).map(|request| request.arrived).max().unwrap();
        assert!(last.as_ms() / 1e3 <= settled_s + 1.5, "{engine:?}: {last}");
    }
}

/// Half as much again as the fleet can do, half of it of the least importance.
#[test]
fn the_important_do_not_feel_an_overload_and_the_rest_is_told() {
    let within = [2, 4, 20].map(Duration::from_secs);
    for engine in ENGINES {
        let capacity = capacity(engine);
        let (rate, warm_s, end_s) = (1.5 * capacity, 20.0, 120.0);
        let mut scenario = scenario(engine, rate, end_s * rate, START_WITHIN, 4);
        scenario.router.classes = vec![class("first", i32::MIN, within[0]), class("second", 1, within[1]), class("third", 2, within[2])];
        let priorities = [0, 1, 2].map(Priority);
        scenario.priorities = priorities.into_iter().zip([0.3, 0.4, 0.8]).collect();
        scenario.returns = RETURNS;
        let outcome = run(&scenario);
        let of = |place: usize| {
            let mut outcome = outcome.clone();
            outcome.requests.retain(|request| request.priority == priorities[place]);
            check_word_kept(&outcome, within[place], &format!("{engine:?} class {place}"));
            outcome
        };
        let [first, second, third] = [0, 1, 2].map(of);
        for class in [&first, &second] {
            assert_eq!(finished(class), class.requests.len(), "{engine:?}: none is turned away");
        }
        // They find no more before them than what is bound to the replicas.
        let bound_ms = scenario.router.bind_within.unwrap().as_secs_f64() * 1e3;
        let p99 = ttft(&first, 0.99, 0.0, end_s);
        assert!(p99 <= bound_ms + PREFILL_MS, "{engine:?}: {p99:.0} ms");
        // The third class has what is left, all the time.
        let left = (1.0 - 0.3 - 0.4) * capacity * WINDOW_S;
        let served = per_window(&third, warm_s, end_s, |request| request.finished);
        assert!(served.iter().sum::<f64>() >= 0.95 * left * served.len() as f64, "{engine:?}: {served:?}");
        assert!(served.iter().all(|served| *served >= 0.5 * left), "{engine:?}: {left:.0} are left, {served:?}");
    }
}
