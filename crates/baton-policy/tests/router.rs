//! The router through its public API: feasibility, books, orders of preference, held requests.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::{sync::Arc, time::Duration};

use baton_cost::{StepCoefficients, StepLoad};
use baton_kv::{BlockKey, EngineHash, KeyDomain, KvEvent, KvEventBatch, Matched, Snapshot, SnapshotError, chain_keys};
use baton_policy::{
    Arrival, Discipline, LoadReport, Outcome, PolicyName, PrefixCopy, PriceWeights, PriorityClass, Refusal, ReplicaSpec, ReplicaState,
    Router, RouterConfig, Share, Slo, Trust, Verdict,
};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};
use proptest::prelude::*;

const SIZE: BlockSize = BlockSize::DEFAULT;
const OWN_ONLY: PriceWeights = PriceWeights { delay: 0.0, eviction: 0.0, memory: 0.0, waste: 0.0, decode: 0.0 };

/// The reference machine: 14.2 ms for 512 tokens, 129.4 ms for 4,096.
fn step() -> StepCoefficients {
    let (flops, bytes_per_s) = (494.5e12, 3.35e12);
    StepCoefficients {
        fixed_s: 0.0025,
        per_token_s: 2.0 * 6.74e9 / flops,
        per_attended_s: 4.0 * 32.0 * 4096.0 / flops,
        per_kv_token_s: 131_072.0 / bytes_per_s,
        weights_s: 13.48e9 / bytes_per_s,
    }
}

fn spec(id: u32) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId(id),
        incarnation: Incarnation(1),
        block_size: SIZE,
        kv_blocks: Blocks(2000),
        max_model_len: Tokens(20_000),
        max_running: 64,
        discipline: Discipline::Serial,
        step: step(),
    }
}

fn router(policy: PolicyName, weights: PriceWeights, replicas: u32) -> Router {
    let mut router = Router::new(RouterConfig { policy, weights, bind_within: None, ..RouterConfig::default() }, 7);
    for id in 0..replicas {
        router.upsert_replica(spec(id), Time::ZERO);
    }
    router
}

fn class(from: i32, start_within_s: f64) -> PriorityClass {
    PriorityClass {
        name: format!("from {from}"),
        from: Priority(from),
        start_within: Duration::from_secs_f64(start_within_s),
        slo_ttft: None,
    }
}

fn keys(text: u32, tokens: u32) -> Arc<[BlockKey]> {
    let tokens: Vec<u32> = (0..tokens).map(|place| text * 100_000 + place).collect();
    chain_keys(KeyDomain { model: "", adapter: None, salt: None }.root(), &tokens, SIZE).into()
}

fn arrival(request: u64, text: u32, tokens: u32) -> Arrival {
    Arrival {
        request: RequestId(request),
        keys: keys(text, tokens),
        prompt: Tokens(tokens),
        max_output: None,
        session: None,
        program: None,
        share: None,
        priority: Priority(0),
        slo: Slo::default(),
        excluded: Vec::new(),
    }
}

/// The same whose first `shared` tokens are those of all others.
fn arrival_of(request: u64, text: u32, shared: u32, tokens: u32) -> Arrival {
    let ids: Vec<u32> = (0..tokens).map(|place| if place < shared { place } else { (text + 1) * 100_000 + place }).collect();
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    Arrival { keys: chain_keys(root, &ids, SIZE).into(), ..arrival(request, text, tokens) }
}

/// Sends a request to one replica of `replicas` by excluding the others.
fn send(router: &mut Router, request: u64, text: u32, tokens: u32, to: u32, replicas: u32, now: Time) {
    let excluded = (0..replicas).filter(|id| *id != to).map(ReplicaId).collect();
    assert_eq!(chosen(&router.place(Arrival { excluded, ..arrival(request, text, tokens) }, now)), to);
}

/// Of a replica with much work that another router sent.
fn send_report(router: &mut Router, now: Time) {
    let prefill_backlog = Tokens(100_000);
    router.report(ReplicaId(0), LoadReport { taken_at: now, waiting: 9, running: 1, kv_blocks_free: Blocks(2000), prefill_backlog }, now);
}

fn end(router: &mut Router, request: u64, now: Time) {
    router.first_token(RequestId(request), None, now);
    router.output_tokens(RequestId(request), 1, now);
    router.finished(RequestId(request), Outcome::Finished, None, now);
}

fn chosen(verdict: &Verdict) -> u32 {
    match verdict {
        Verdict::Run(placed) => placed.replica.0,
        Verdict::Hold | Verdict::Refuse(_) => panic!("not placed: {verdict:?}"),
    }
}

fn total_ms(router: &Router, request: u64, replica: u32) -> f64 {
    let record = router.decision(RequestId(request)).unwrap();
    record.quotes.iter().find(|quote| quote.replica == ReplicaId(replica)).unwrap().total_ms
}

fn ms(ms: f64) -> Time {
    Time::from_ms(ms)
}

#[test]
fn two_replicas_follow_the_lecture() {
    // Warm when the queues differ by less than the prefill that the hit saves: all but the last block of 4,400 tokens.
    let saved = step().prefill_ms(Tokens(4400), Tokens(0)) - step().prefill_ms(Tokens(16), Tokens(4384));
    for queue_tokens in [2000u32, 4200, 4600, 6000] {
        let mut router = router(PolicyName::Price, OWN_ONLY, 2);
        send(&mut router, 1, 1, 4400, 0, 2, Time::ZERO);
        end(&mut router, 1, ms(500.0));
        send(&mut router, 2, 2, queue_tokens, 0, 2, ms(1000.0));
        let queue = step().prefill_ms(Tokens(queue_tokens), Tokens(0));
        let warm = chosen(&router.place(arrival(3, 1, 4400), ms(1000.0))) == 0;
        assert_eq!(warm, queue < saved, "queue {queue} ms, saved {saved} ms");
    }
}

#[test]
fn a_request_that_no_replica_can_hold_is_refused_with_what_would_fit() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 2);
    assert_eq!(
        router.place(arrival(1, 1, 20_000), Time::ZERO),
        Verdict::Refuse(Refusal::TooLong { prompt: Tokens(20_000), limit: Tokens(20_000) })
    );
    for id in 0..2 {
        router.upsert_replica(ReplicaSpec { kv_blocks: Blocks(100), ..spec(id) }, Time::ZERO);
    }
    let refusal = Refusal::NeverFits { needed: Blocks(101), limit: Blocks(100), fits: Tokens(1600) };
    assert!(refusal.to_string().contains("1600 tokens"));
    assert_eq!(router.place(arrival(2, 1, 1600), Time::ZERO), Verdict::Refuse(refusal));
    let asks_too_much = Arrival { max_output: Some(Tokens(1000)), ..arrival(3, 1, 800) };
    assert!(matches!(router.place(asks_too_much, Time::ZERO), Verdict::Refuse(Refusal::NeverFits { .. })));
    assert!(matches!(router.place(arrival(4, 1, 1599), Time::ZERO), Verdict::Run(_)));
}

#[test]
fn a_prompt_goes_to_the_only_replica_that_can_hold_it() {
    for policy in PolicyName::ALL {
        let mut router = router(*policy, PriceWeights::default(), 3);
        router.upsert_replica(ReplicaSpec { kv_blocks: Blocks(40), ..spec(0) }, Time::ZERO);
        router.upsert_replica(ReplicaSpec { max_model_len: Tokens(600), ..spec(2) }, Time::ZERO);
        for request in 0..20 {
            let session = Some(request);
            let verdict = router.place(Arrival { session, ..arrival(request, 1, 1000) }, ms(request as f64));
            assert_eq!(chosen(&verdict), 1, "{policy}");
        }
    }
}

#[test]
fn blocks_in_use_are_waited_for_or_avoided() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    // Replica 0 runs a request that holds nearly all its blocks; it is past its prefill, so its queue is empty.
    send(&mut router, 1, 1, 18_000, 0, 2, Time::ZERO);
    router.first_token(RequestId(1), None, ms(900.0));
    router.output_tokens(RequestId(1), 1, ms(900.0));
    send(&mut router, 2, 2, 300, 1, 2, ms(1000.0));
    assert_eq!(chosen(&router.place(arrival(3, 3, 16_000), ms(1000.0))), 1);
    let record = router.decision(RequestId(3)).unwrap();
    assert!(record.quotes[0].terms.wait > 0.0, "{record:?}");
}

#[test]
fn replicas_that_are_not_ready_or_excluded_get_nothing() {
    for policy in PolicyName::ALL {
        let mut router = router(*policy, PriceWeights::default(), 5);
        router.set_state(ReplicaId(0), ReplicaState::Draining, Time::ZERO);
        router.set_state(ReplicaId(1), ReplicaState::Suspect, Time::ZERO);
        router.set_state(ReplicaId(2), ReplicaState::Dead, Time::ZERO);
        for request in 0..40 {
            let excluded = vec![ReplicaId(3)];
            let verdict = router.place(Arrival { excluded, session: Some(request), ..arrival(request, 1, 200) }, ms(request as f64));
            assert_eq!(chosen(&verdict), 4, "{policy}");
        }
    }
}

#[test]
fn held_requests_leave_by_importance_when_a_replica_is_back_and_are_shed_when_none_is() {
    let config = RouterConfig { held_max: 2, classes: vec![class(i32::MIN, 5.0)], ..RouterConfig::default() };
    let mut router = Router::new(config, 1);
    assert_eq!(router.place(arrival(0, 1, 100), Time::ZERO), Verdict::Refuse(Refusal::NoReplica));
    router.upsert_replica(spec(0), Time::ZERO);
    router.set_state(ReplicaId(0), ReplicaState::Suspect, Time::ZERO);
    assert_eq!(router.place(Arrival { priority: Priority(5), ..arrival(1, 1, 100) }, Time::ZERO), Verdict::Hold);
    assert_eq!(router.place(arrival(2, 2, 100), ms(10.0)), Verdict::Hold);
    assert!(matches!(router.place(arrival(3, 3, 100), ms(20.0)), Verdict::Refuse(Refusal::Overloaded { .. })), "the queue is full");
    assert!(router.released(ms(100.0)).is_empty());
    router.set_state(ReplicaId(0), ReplicaState::Ready, ms(200.0));
    let order: Vec<u64> = router.released(ms(200.0)).iter().map(|(request, _)| request.0).collect();
    assert_eq!(order, [2, 1]);

    router.set_state(ReplicaId(0), ReplicaState::Suspect, ms(300.0));
    assert_eq!(router.place(arrival(4, 4, 100), ms(300.0)), Verdict::Hold);
    let deadline = router.next_timeout().unwrap();
    assert_eq!(deadline, ms(5300.0));
    assert!(matches!(router.released(deadline)[..], [(RequestId(4), Verdict::Refuse(Refusal::Overloaded { .. }))]));
    assert_eq!((router.held(), router.next_timeout()), (0, None));
}

#[test]
fn a_request_is_not_bound_to_a_long_queue_before_it_shortens() {
    let mut router = Router::new(RouterConfig { bind_within: Some(Duration::from_millis(200)), ..RouterConfig::default() }, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    assert_eq!(chosen(&router.place(arrival(1, 1, 10_000), Time::ZERO)), 0);
    assert_eq!(router.place(arrival(2, 2, 500), ms(1.0)), Verdict::Hold);
    assert!(router.released(ms(2.0)).is_empty());
    // 10,000 tokens take 385 ms; at 185 ms of them the rest is within the bound.
    let at = router.next_timeout().unwrap();
    assert!(at > ms(150.0) && at < ms(250.0), "{at}");
    assert!(matches!(router.released(at)[..], [(RequestId(2), Verdict::Run(_))]));
}

#[test]
fn an_overload_turns_away_the_less_important_first_and_says_when_to_come_back() {
    let classes = vec![class(i32::MIN, 20.0), class(1, 4.0)];
    let mut router = Router::new(RouterConfig { bind_within: Some(Duration::from_millis(50)), classes, ..RouterConfig::default() }, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    // Each takes 149 ms; the first is bound and the rest waits its turn.
    let mut now_ms = 0.0;
    let mut offer = |request: u64, priority: i32| {
        now_ms += 1.0;
        router.place(Arrival { priority: Priority(priority), ..arrival(request, request as u32, 4600) }, ms(now_ms))
    };
    let verdicts: Vec<Verdict> = (0..60).map(|request| offer(request, 5)).collect();
    let let_in = verdicts.iter().filter(|verdict| !matches!(verdict, Verdict::Refuse(_))).count();
    assert!((20..28).contains(&let_in), "4 s of work are let in: {let_in}");
    let after = |verdict: &Verdict| {
        if let Verdict::Refuse(Refusal::Overloaded { retry_after }) = verdict { Some(*retry_after) } else { None }
    };
    let told: Vec<Duration> = verdicts.iter().filter_map(after).collect();
    assert_eq!(let_in + told.len(), verdicts.len());
    assert!(told.is_sorted() && *told.last().unwrap() > Duration::from_secs(4), "those told do not come back all at once: {told:?}");
    // What matters more still gets in, before those who wait.
    assert_eq!(offer(100, 0), Verdict::Hold);
    let sheds: Vec<u64> = router.sheds().map(|(_, count)| count).collect();
    assert_eq!(sheds, [0, told.len() as u64]);
    end(&mut router, 0, ms(400.0));
    assert!(matches!(router.released(ms(400.0))[..], [(RequestId(100), Verdict::Run(_)), ..]));
}

/// A tenant that floods the fleet delays its own requests, not those of another.
#[test]
fn a_flood_of_one_tenant_does_not_delay_another() {
    let classes = vec![class(i32::MIN, 4.0)];
    let mut router = Router::new(RouterConfig { bind_within: Some(Duration::from_millis(50)), classes, ..RouterConfig::default() }, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    let mut now_ms = 0.0;
    let mut offer = |router: &mut Router, request: u64, tenant: u64, tokens: u32| {
        now_ms += 1.0;
        let share = Some(Share { tenant, weight: 1.0 });
        router.place(Arrival { share, ..arrival(request, request as u32, tokens) }, ms(now_ms))
    };
    let flood: Vec<Verdict> = (0..60).map(|request| offer(&mut router, request, 1, 4600)).collect();
    assert!(flood.iter().any(|verdict| matches!(verdict, Verdict::Refuse(_))), "more than can start in time");
    // The other's first requests find no more before them than one that runs.
    for request in 1000..1003 {
        assert_eq!(offer(&mut router, request, 2, 4600), Verdict::Hold);
    }
    let mut left = Vec::new();
    for (ended, at_ms) in [(0, 400.0), (1000, 800.0), (1, 1200.0)] {
        end(&mut router, left.last().copied().unwrap_or(ended), ms(at_ms));
        left.extend(router.released(ms(at_ms)).iter().map(|(request, _)| request.0));
    }
    let others = left.iter().filter(|request| **request >= 1000).count();
    assert!(left[0] >= 1000 && others * 2 >= left.len(), "{left:?}");
    // With as much as it had itself, the flood takes turns with it.
    assert!(left.iter().any(|request| *request < 1000), "{left:?}");
}

#[test]
fn a_full_queue_makes_room_for_a_tenant_whose_turn_is_before_the_last() {
    let mut router = Router::new(RouterConfig { held_max: 2, ..RouterConfig::default() }, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    router.set_state(ReplicaId(0), ReplicaState::Suspect, Time::ZERO);
    let offer = |router: &mut Router, request: u64, tenant: u64| {
        let share = Some(Share { tenant, weight: 1.0 });
        router.place(Arrival { share, ..arrival(request, request as u32, 100) }, ms(request as f64))
    };
    let is_full = |verdict: &Verdict| matches!(verdict, Verdict::Refuse(Refusal::Overloaded { .. }));
    assert_eq!([offer(&mut router, 1, 1), offer(&mut router, 2, 1)], [Verdict::Hold, Verdict::Hold]);
    assert!(is_full(&offer(&mut router, 3, 1)), "its own turn is last");
    assert_eq!(offer(&mut router, 4, 2), Verdict::Hold);
    assert!(is_full(&offer(&mut router, 5, 3)), "no more than one has to go before it has gone");
    let gone = router.released(ms(6.0));
    assert!(matches!(gone[..], [(RequestId(2), Verdict::Refuse(Refusal::Overloaded { .. }))]), "{gone:?}");
    assert_eq!(router.held(), 2);
    router.set_state(ReplicaId(0), ReplicaState::Ready, ms(10.0));
    let order: Vec<u64> = router.released(ms(10.0)).iter().map(|(request, _)| request.0).collect();
    assert_eq!(order, [1, 4]);
}

#[test]
fn newcomers_do_not_overtake_those_who_wait() {
    let mut router = Router::new(RouterConfig { bind_within: Some(Duration::from_millis(100)), ..RouterConfig::default() }, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    router.place(arrival(1, 1, 4600), Time::ZERO);
    assert_eq!(router.place(arrival(2, 2, 4600), ms(1.0)), Verdict::Hold);
    // By now the first is nearly done: whoever asks is placed, but the one who waits is first.
    assert_eq!(router.place(arrival(3, 3, 100), ms(140.0)), Verdict::Hold);
    let order: Vec<u64> = router.released(ms(140.0)).iter().map(|(request, _)| request.0).collect();
    assert_eq!(order.first(), Some(&2));
}

#[test]
fn a_request_whose_time_is_over_is_turned_away_and_not_sent_late() {
    let config =
        RouterConfig { bind_within: Some(Duration::from_millis(100)), classes: vec![class(i32::MIN, 1.0)], ..RouterConfig::default() };
    let mut router = Router::new(config, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    router.place(arrival(1, 1, 4600), Time::ZERO);
    assert_eq!(router.place(arrival(2, 2, 4600), ms(1.0)), Verdict::Hold);
    // The replica hangs: its prompt is never done.
    send_report(&mut router, ms(900.0));
    assert!(matches!(router.released(ms(1001.0))[..], [(RequestId(2), Verdict::Refuse(Refusal::Overloaded { .. }))]));
}

#[test]
fn a_retry_books_once() {
    let mut router = router(PolicyName::LeastOutstanding, PriceWeights::default(), 2);
    let first = chosen(&router.place(arrival(1, 1, 500), Time::ZERO));
    let excluded = vec![ReplicaId(first)];
    let second = chosen(&router.place(Arrival { excluded, ..arrival(1, 1, 500) }, ms(5.0)));
    assert_ne!(first, second);
    assert_eq!(router.fleet(ms(5.0)).iter().map(|replica| replica.in_flight).sum::<u32>(), 1);
    router.finished(RequestId(1), Outcome::Finished, None, ms(9.0));
    assert!(router.fleet(ms(9.0)).iter().all(|replica| replica.in_flight == 0));
}

#[test]
fn what_a_lost_replica_had_not_computed_is_not_believed_to_be_there() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    send(&mut router, 1, 1, 4000, 0, 2, Time::ZERO);
    router.finished(RequestId(1), Outcome::Failed, None, ms(10.0));
    assert_eq!(router.index().matches(&keys(1, 4000)), [0, 0]);
    // Of a request that reached its first token, the prompt is there.
    send(&mut router, 2, 2, 4000, 0, 2, ms(20.0));
    router.first_token(RequestId(2), None, ms(200.0));
    router.finished(RequestId(2), Outcome::Cancelled, None, ms(210.0));
    assert_eq!(router.index().matches(&keys(2, 4000))[0], 250);
}

#[test]
fn nothing_is_believed_to_be_on_a_dead_replica() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    for request in 0..2 {
        send(&mut router, request, request as u32, 4000, 0, 2, Time::ZERO);
    }
    router.first_token(RequestId(0), None, ms(200.0));
    router.set_state(ReplicaId(0), ReplicaState::Dead, ms(210.0));
    for request in 0..2 {
        router.finished(RequestId(request), Outcome::Failed, None, ms(220.0));
        assert_eq!(router.index().matches(&keys(request as u32, 4000)), [0, 0]);
    }
    assert_eq!(router.fleet(ms(220.0))[0].in_flight, 0);
}

#[test]
fn a_new_incarnation_begins_with_empty_books_and_old_flights_end_quietly() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 1);
    assert_eq!(chosen(&router.place(arrival(1, 1, 4000), Time::ZERO)), 0);
    router.upsert_replica(ReplicaSpec { incarnation: Incarnation(2), ..spec(0) }, ms(10.0));
    let fleet = router.fleet(ms(10.0));
    assert_eq!((fleet[0].in_flight, fleet[0].kv_blocks_indexed), (0, 0));
    router.first_token(RequestId(1), None, ms(11.0));
    router.finished(RequestId(1), Outcome::Failed, None, ms(12.0));
    assert_eq!(router.fleet(ms(12.0))[0].in_flight, 0);
}

#[test]
fn events_correct_what_dispatches_made_the_router_believe() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    send(&mut router, 1, 1, 1600, 0, 2, Time::ZERO);
    end(&mut router, 1, ms(100.0));
    let tokens: Vec<u32> = (0..1600).map(|place| 100_000 + place).collect();
    let stored =
        KvEvent::Stored { hashes: (0..100).map(EngineHash).collect(), parent: None, tokens, block_size: SIZE, adapter: None, salt: None };
    let removed = KvEvent::Removed { hashes: (60..100).rev().map(EngineHash).collect() };
    let batch = KvEventBatch { sequence: 0, timestamp_s: 0.0, events: vec![stored, removed], dp_rank: None };
    router.kv_events(ReplicaId(0), Incarnation(1), &batch, ms(200.0));
    router.place(arrival(2, 1, 1600), ms(300.0));
    let record = router.decision(RequestId(2)).unwrap();
    assert_eq!(record.quotes[0].hit_tokens, Tokens(960));
}

#[test]
fn what_was_known_of_a_cache_outlives_the_router_and_counts_half_until_its_stream_goes_on() {
    let batch = |sequence: u64, text: u32| KvEventBatch {
        sequence,
        timestamp_s: sequence as f64,
        events: vec![KvEvent::Stored {
            hashes: keys(text, 1600).iter().map(|key| EngineHash(key.0)).collect(),
            parent: None,
            tokens: (0..1600).map(|place| text * 100_000 + place).collect(),
            block_size: SIZE,
            adapter: None,
            salt: None,
        }],
        dp_rank: None,
    };
    let mut before = router(PolicyName::Price, OWN_ONLY, 2);
    before.kv_events(ReplicaId(1), Incarnation(1), &batch(0, 1), ms(10.0));
    let snapshot = before.index().snapshot(ReplicaId(1), ms(60.0)).unwrap();
    let restore = |router: &mut Router, now| {
        router.begin_restore(ReplicaId(1), Snapshot::read(&snapshot).unwrap(), Duration::from_secs(5), now)?;
        router.take_in(ReplicaId(1), usize::MAX, now);
        Ok::<usize, SnapshotError>(router.index().blocks_held(ReplicaId(1)))
    };

    let mut after = router(PolicyName::Price, OWN_ONLY, 2);
    assert_eq!(restore(&mut after, Time::ZERO), Ok(100));
    assert_eq!(after.index().next_sequence(ReplicaId(1)), 1);
    let (cold, warm) = (step().prefill_ms(Tokens(1610), Tokens(0)), step().prefill_ms(Tokens(10), Tokens(1600)));
    after.place(arrival(1, 1, 1610), ms(1.0));
    assert!((total_ms(&after, 1, 1) - 0.5 * (cold + warm)).abs() < 1e-9, "doubtful");
    end(&mut after, 1, ms(2.0));
    after.kv_events(ReplicaId(1), Incarnation(1), &batch(1, 2), ms(500.0));
    after.place(arrival(2, 1, 1610), ms(1000.0));
    assert!((total_ms(&after, 2, 1) - warm).abs() < 1e-9, "certain again");
    let next_life = ReplicaSpec { incarnation: Incarnation(2), ..spec(1) };
    after.upsert_replica(next_life, ms(1100.0));
    assert!(restore(&mut after, ms(1100.0)).is_err(), "of a former life");
    assert_eq!(after.index().blocks_held(ReplicaId(1)), 0);
}

#[test]
fn a_match_from_before_the_lock_credits_no_replica_with_what_it_lost_since() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    send(&mut router, 1, 1, 1600, 0, 2, Time::ZERO);
    end(&mut router, 1, ms(100.0));
    let reader = router.index().reader();
    let place = |router: &mut Router, request, matched: &Matched, now| {
        router.decide(arrival(request, 1, 1600), Some(matched.clone()), now);
        router.keep_books();
        router.decision(RequestId(request)).unwrap().quotes[0].hit_tokens
    };
    let early = reader.matches(&keys(1, 1600));
    router.set_state(ReplicaId(1), ReplicaState::Suspect, ms(100.0));
    assert_eq!(place(&mut router, 2, &early, ms(200.0)), Tokens(1584), "nothing happened");
    router.upsert_replica(ReplicaSpec { incarnation: Incarnation(2), ..spec(0) }, ms(300.0));
    assert_eq!(place(&mut router, 3, &early, ms(300.0)), Tokens(0), "it began anew");
    // The request is placed again before its first token: what it would have computed is not there.
    let own = reader.matches(&keys(1, 1600));
    assert_eq!(place(&mut router, 3, &own, ms(310.0)), Tokens(0));
}

#[test]
fn a_decision_is_in_the_index_before_anything_else_is_asked() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    let reader = router.index().reader();
    let decide = |router: &mut Router, request, now| {
        let matched = reader.matches(&keys(1, 1600));
        match router.decide(arrival(request, 1, 1600), Some(matched), now) {
            Verdict::Run(placed) => placed.replica,
            other @ (Verdict::Hold | Verdict::Refuse(_)) => panic!("{other:?}"),
        }
    };
    let first = decide(&mut router, 1, ms(0.0));
    assert_eq!(router.index().blocks_held(first), 0, "not yet: the request is to be sent first");
    router.keep_books();
    assert_eq!(router.index().blocks_held(first), 100);
    router.keep_books();
    assert_eq!(router.index().blocks_pinned(first), 100, "once");
    end(&mut router, 1, ms(200.0));
    // One that nobody kept the books of ends: neither pins nor expectations of it are left.
    let second = decide(&mut router, 2, ms(300.0));
    router.finished(RequestId(2), Outcome::Cancelled, None, ms(301.0));
    assert_eq!(router.index().blocks_pinned(second), 0);
    // And one whose replica begins anew leaves nothing in the next life.
    let third = decide(&mut router, 3, ms(400.0));
    router.upsert_replica(ReplicaSpec { incarnation: Incarnation(2), ..spec(third.0) }, ms(401.0));
    router.keep_books();
    assert_eq!((router.index().blocks_held(third), router.index().blocks_pinned(third)), (0, 0));
}

#[test]
fn a_reported_hit_corrects_the_index_and_its_error_is_known() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 1);
    for (request, tokens) in [(1, 1600), (2, 800)] {
        send(&mut router, request, 1, tokens, 0, 1, ms(0.0));
        end(&mut router, request, ms(100.0));
    }
    // The engine evicted all but the first ten blocks, so the longer chain cannot be there.
    send(&mut router, 3, 1, 800, 0, 1, ms(200.0));
    router.first_token(RequestId(3), Some(Tokens(160)), ms(210.0));
    assert_eq!(router.index().matches(&keys(1, 1600)), [50]);
    router.cached_tokens(RequestId(3), Tokens(0));
    let error = router.index().hit_error(ReplicaId(0));
    assert_eq!((error.requests, error.believed, error.reported, error.missing), (1, 49, 10, 39), "the last block is always computed");
}

#[test]
fn a_hit_counts_half_while_events_are_missing() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 1);
    assert_eq!(chosen(&router.place(arrival(1, 1, 4000), Time::ZERO)), 0);
    end(&mut router, 1, ms(200.0));
    let batch = KvEventBatch { sequence: 3, timestamp_s: 0.0, events: vec![], dp_rank: None };
    router.kv_events(ReplicaId(0), Incarnation(1), &batch, ms(300.0));
    router.place(arrival(2, 1, 4000), ms(300.0));
    let record = router.decision(RequestId(2)).unwrap();
    let (hit, miss) = (step().prefill_ms(Tokens(16), Tokens(3984)), step().prefill_ms(Tokens(4000), Tokens(0)));
    assert!((record.quotes[0].terms.prefill - f64::midpoint(hit, miss)).abs() < 1e-6);
    assert!(router.fleet(ms(300.0))[0].index_doubtful);
}

/// Its events are of another engine: none of what they tell is found.
#[test]
fn a_replica_whose_events_lie_is_priced_without_them_until_reports_bear_them_out() {
    let batch = |sequence: u64| KvEventBatch {
        sequence,
        timestamp_s: sequence as f64,
        events: vec![KvEvent::Stored {
            hashes: keys(1, 1600).iter().map(|key| EngineHash(key.0)).collect(),
            parent: None,
            tokens: (0..1600).map(|place| 100_000 + place).collect(),
            block_size: SIZE,
            adapter: None,
            salt: None,
        }],
        dp_rank: None,
    };
    let mut router = router(PolicyName::Price, OWN_ONLY, 1);
    let (cold, warm) = (step().prefill_ms(Tokens(1610), Tokens(0)), step().prefill_ms(Tokens(10), Tokens(1600)));
    let mut request = 0;
    // The price that the next request is quoted, of which the engine then finds so much.
    let mut priced = |router: &mut Router, found: u32, now: Time| {
        request += 1;
        router.place(arrival(request, 1, 1610), now);
        let price = total_ms(router, request, 0);
        router.cached_tokens(RequestId(request), Tokens(found));
        router.take_in(ReplicaId(0), usize::MAX, now);
        end(router, request, now);
        price
    };
    let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
    let mut sequence = 0;
    let mut tell = |router: &mut Router, now: Time| {
        router.kv_events(ReplicaId(0), Incarnation(1), &batch(sequence), now);
        sequence += 1;
    };
    tell(&mut router, ms(1.0));
    let mut lies = 0;
    while router.trust(ReplicaId(0), ms(2.0)) == Trust::Trusted {
        assert!(near(priced(&mut router, 0, ms(2.0)), warm) && lies < 20);
        lies += 1;
        tell(&mut router, ms(2.0));
    }
    assert_eq!(router.trust(ReplicaId(0), ms(2.0)), Trust::Quarantined);
    // Its events count from where its engine's replay begins.
    router.kv_events(ReplicaId(0), Incarnation(1), &batch(0), ms(2.5));
    assert!(near(priced(&mut router, 1600, ms(3.0)), cold), "it counts for nothing");
    let later = ms(20_000.0);
    assert_eq!(router.trust(ReplicaId(0), later), Trust::Probation);
    assert!(near(priced(&mut router, 1600, later), 0.5 * (cold + warm)), "it counts half");
    for _ in 0..8 {
        priced(&mut router, 1600, later);
    }
    assert_eq!(router.trust(ReplicaId(0), later), Trust::Trusted);
    assert!(near(priced(&mut router, 1600, later), warm));
}

#[test]
fn a_record_tells_quotes_outcome_and_regret() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 2);
    let replica = chosen(&router.place(arrival(1, 1, 4096), Time::ZERO));
    router.first_token(RequestId(1), Some(Tokens(0)), ms(200.0));
    router.output_tokens(RequestId(1), 9, ms(300.0));
    router.finished(RequestId(1), Outcome::Finished, None, ms(400.0));
    let record = router.decision(RequestId(1)).unwrap();
    assert_eq!((record.chosen.0, record.runner_up.unwrap().0), (replica, 1 - replica));
    assert_eq!((record.realised.output_tokens, record.realised.outcome), (9, Some("finished")));
    // The other one was idle, too: 129.4 ms predicted there.
    assert!((record.regret_ms.unwrap() - (200.0 - 129.4)).abs() < 0.1, "{:?}", record.regret_ms);
    assert!((record.predicted_ttft_ms - 129.4).abs() < 0.1);
}

#[test]
fn the_log_keeps_the_latest_decisions_only() {
    let config = RouterConfig { decisions_kept: 3, ..RouterConfig::default() };
    let mut router = Router::new(config, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    for request in 0..10 {
        router.place(arrival(request, 1, 100), ms(request as f64));
    }
    let latest: Vec<u64> = router.decisions(100).iter().map(|record| record.request.0).collect();
    assert_eq!(latest, [9, 8, 7]);
    assert!(router.decision(RequestId(2)).is_none());
}

#[test]
fn a_reported_backlog_of_others_is_part_of_the_wait() {
    let mut router = router(PolicyName::Price, OWN_ONLY, 2);
    let report = LoadReport { taken_at: ms(5.0), waiting: 3, running: 0, kv_blocks_free: Blocks(2000), prefill_backlog: Tokens(10_000) };
    router.report(ReplicaId(0), report, ms(5.0));
    for request in 0..2 {
        assert_eq!(chosen(&router.place(arrival(request, request as u32, 1000), ms(6.0))), 1);
    }
}

#[test]
fn sessions_stay_and_start_where_fewest_live() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 4);
    let place = |router: &mut Router, session: u64, step: u64, now: f64| {
        let request = session * 100 + step;
        let tokens = 1000 + 400 * step as u32;
        let verdict = router.place(Arrival { session: Some(session), ..arrival(request, session as u32, tokens) }, ms(now));
        end(router, request, ms(now + 200.0));
        chosen(&verdict)
    };
    let homes: Vec<u32> = (0..12).map(|session| place(&mut router, session, 0, 300.0 * session as f64)).collect();
    let mut count = [0; 4];
    for home in &homes {
        count[*home as usize] += 1;
    }
    assert_eq!(count, [3; 4]);
    for step in 1..4 {
        for session in 0..12 {
            let now = 4000.0 * step as f64 + 300.0 * session as f64;
            assert_eq!(place(&mut router, session, step, now), homes[session as usize]);
        }
    }
}

/// Forty requests that share 4,096 tokens, faster than one replica takes them; the copies that they buy.
fn shared_burst(router: &mut Router, from_ms: f64) -> Vec<PrefixCopy> {
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    let shared = |own: u32| -> Arc<[BlockKey]> {
        let tokens: Vec<u32> = (0..4096).chain((0..320).map(|place| 1_000_000 + own * 1000 + place)).collect();
        chain_keys(root, &tokens, SIZE).into()
    };
    let mut copies = Vec::new();
    for request in 0..40 {
        // The first two make the prefix and its branch; the others come faster than one replica takes them.
        let at = from_ms + if request < 2 { 300.0 * request as f64 } else { 600.0 + 6.0 * request as f64 };
        let wanted = Arrival { keys: shared(request as u32), ..arrival(request, 0, 4416) };
        let Verdict::Run(placed) = router.place(wanted, ms(at)) else { panic!("placed") };
        copies.extend(placed.copy);
        if request < 2 {
            end(router, request, ms(at + 200.0));
        }
    }
    copies
}

#[test]
fn a_shared_prefix_under_load_is_copied_and_the_copy_is_booked_and_let_go() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 3);
    let in_flight = |router: &Router| router.fleet(ms(900.0)).iter().map(|replica| replica.in_flight).sum::<u32>();
    let copies = shared_burst(&mut router, 0.0);
    let copy = copies.first().expect("the queue's rent has bought a copy");
    assert_eq!(copy.blocks, 256);
    assert_eq!(in_flight(&router) as usize, 38 + copies.len());
    for copy in &copies {
        router.finished(copy.request, Outcome::Cancelled, None, ms(900.0));
    }
    assert_eq!(in_flight(&router), 38);
}

#[test]
fn a_copy_is_not_bought_at_the_cost_of_those_who_decode_where_it_would_go() {
    const RESIDENTS: u64 = 480;
    let copies = |decode: f64| {
        let mut router = router(PolicyName::Price, PriceWeights { decode, ..PriceWeights::default() }, 0);
        for id in 0..3 {
            let discipline = Discipline::Chunked { budget: Tokens(2048) };
            router.upsert_replica(ReplicaSpec { discipline, max_running: 512, kv_blocks: Blocks(20_000), ..spec(id) }, Time::ZERO);
        }
        // The shared prefix lands on replica 0, which is idle; the streams of the others go on.
        for request in 1000..1000 + RESIDENTS {
            send(&mut router, request, request as u32, 64, 1 + request as u32 % 2, 3, ms(100.0 * (request - 1000) as f64));
            router.first_token(RequestId(request), None, ms(100.0 * (request - 1000) as f64 + 20.0));
        }
        shared_burst(&mut router, 1e5).len()
    };
    assert!(copies(0.0) > 0, "the queue would buy one");
    assert_eq!(copies(1.0), 0);
}

#[test]
fn running_requests_are_priced_by_what_each_of_their_tokens_is_late() {
    /// Before any output was seen.
    const MEAN_OUTPUT: f64 = 64.0;
    let decode_ms = |residents: u64, max_output: Option<Tokens>| {
        let mut router = Router::new(RouterConfig { bind_within: None, ..RouterConfig::default() }, 7);
        router.upsert_replica(ReplicaSpec { discipline: Discipline::Chunked { budget: Tokens(2048) }, ..spec(0) }, Time::ZERO);
        for request in 0..residents {
            router.place(arrival(request, request as u32, 1000), Time::ZERO);
            router.first_token(RequestId(request), None, ms(500.0));
        }
        router.place(Arrival { max_output, ..arrival(9, 9, 3000) }, ms(1000.0));
        let terms = router.decision(RequestId(9)).unwrap().quotes[0].terms;
        (terms.decode, terms.prefill)
    };
    let step_ms = |rows: u32, context: u32| step().step_s(&StepLoad::decode(f64::from(rows), f64::from(context))) * 1e3;
    assert!(decode_ms(0, None).0.abs() < 1e-12);
    for (residents, max_output) in [(1u32, None), (5, None), (5, Some(16u32))] {
        let slower = step_ms(residents + 1, residents * 1000 + 3000) - step_ms(residents, residents * 1000);
        let (decode, prefill) = decode_ms(residents.into(), max_output.map(Tokens));
        let output = max_output.map_or(MEAN_OUTPUT, f64::from);
        let own = (step_ms(residents + 1, residents * 1000 + 3000) - step_ms(1, 3000)) * output;
        let expected = (f64::from(residents) * (prefill + slower * output) + own) / MEAN_OUTPUT;
        assert!((decode - expected).abs() < 1e-9 * expected, "{decode} for {expected}");
    }
}

/// Steps are as long as they have rows, as on a CPU. The prompt's first block is where nine streams are: 128 ms of prefill are saved
/// there, 73 ms are taken from the streams, and 72 ms are lost to them.
#[test]
fn what_a_request_loses_to_those_it_would_decode_with_counts() {
    let mut router = router(PolicyName::Price, PriceWeights { decode: 1.0, ..OWN_ONLY }, 0);
    let per_row = StepCoefficients { fixed_s: 1e-3, per_token_s: 8e-3, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 4e-3 };
    for id in 0..2 {
        router
            .upsert_replica(ReplicaSpec { step: per_row, discipline: Discipline::Chunked { budget: Tokens(64) }, ..spec(id) }, Time::ZERO);
    }
    for request in 0..9 {
        send(&mut router, request, 1, 17, 0, 2, ms(1000.0 * request as f64));
        router.first_token(RequestId(request), None, ms(1000.0 * request as f64 + 500.0));
    }
    let verdict = router.place(arrival(9, 1, 17), ms(20_000.0));
    let terms = |id: usize| router.decision(RequestId(9)).unwrap().quotes[id].terms;
    assert!(terms(1).prefill - terms(0).prefill > 120.0, "{:?} {:?}", terms(0), terms(1));
    assert!((terms(0).decode - (9.0 * (terms(0).prefill + 8.0 * 64.0) / 64.0 + 72.0)).abs() < 1e-9, "{:?}", terms(0));
    assert_eq!(chosen(&verdict), 1);
}

/// Eight sessions live on a replica, which so has the beginning that all share. Where sessions go on for long, the company costs more than the beginning
/// saves.
#[test]
fn a_long_session_starts_where_it_is_alone_though_its_beginning_is_elsewhere() {
    let starts = |requests: u64| {
        let mut router = router(PolicyName::Price, PriceWeights::default(), 0);
        for id in 0..2 {
            router.upsert_replica(ReplicaSpec { discipline: Discipline::Chunked { budget: Tokens(2048) }, ..spec(id) }, Time::ZERO);
        }
        let ask = |request: u64, session: u64, tokens: u32| Arrival {
            session: Some(session),
            ..arrival_of(request, session as u32, 512, tokens)
        };
        let mut now = Time::ZERO;
        for request in 0..8 * requests {
            let session = request % 8;
            let excluded = vec![ReplicaId(1)];
            router.place(Arrival { excluded, ..ask(request, session, 832 + 32 * (request / 8) as u32) }, now);
            router.first_token(RequestId(request), None, now + Duration::from_millis(20));
            router.output_tokens(RequestId(request), 64, now + Duration::from_millis(90));
            router.finished(RequestId(request), Outcome::Finished, None, now + Duration::from_millis(90));
            now += Duration::from_millis(100);
        }
        let verdict = router.place(ask(1000, 99, 832), now);
        let terms = |id: usize| router.decision(RequestId(1000)).unwrap().quotes[id].terms;
        assert!(terms(1).prefill > terms(0).prefill + 5.0, "its beginning saves something there");
        assert!(terms(1).company.abs() < 1e-12, "nobody lives there");
        (chosen(&verdict), terms(0).company)
    };
    let (short, long) = (starts(1), starts(12));
    assert_eq!((short.0, long.0), (0, 1), "{short:?} {long:?}");
    assert!(long.1 > 5.0 * short.1);
}

/// The replica with the fewest streams takes those who come, but for an important one there, whose quiet costs what it is worth: less than a
/// long queue elsewhere.
#[test]
fn others_leave_its_quiet_to_an_important_request_as_long_as_there_is_room() {
    let beside = |quiet_from: Option<Priority>| {
        let mut router = Router::new(RouterConfig { quiet_from, bind_within: None, ..RouterConfig::default() }, 7);
        for id in 0..3 {
            router.upsert_replica(ReplicaSpec { discipline: Discipline::Chunked { budget: Tokens(2048) }, ..spec(id) }, Time::ZERO);
        }
        for request in 10..30 {
            send(&mut router, request, request as u32, 1500, 1 + request as u32 % 2, 3, ms(100.0 * request as f64));
            router.first_token(RequestId(request), None, ms(100.0 * request as f64 + 99.0));
        }
        let important = Arrival { priority: Priority(-1), ..arrival(1, 1, 500) };
        assert_eq!(chosen(&router.place(important, ms(9000.0))), 0);
        router.first_token(RequestId(1), None, ms(9100.0));
        let mut came = 0;
        for request in 40..50 {
            let now = ms(9200.0 + 200.0 * (request - 40) as f64);
            came += u32::from(chosen(&router.place(arrival(request, request as u32, 3000), now)) == 0);
            router.first_token(RequestId(request), None, now + Duration::from_millis(199));
        }
        (3..7).for_each(|request| send(&mut router, request, request as u32, 6000, 1 + request as u32 % 2, 3, ms(12_000.0)));
        (came, chosen(&router.place(arrival(60, 60, 500), ms(12_000.0))))
    };
    assert_eq!(beside(Some(Priority(-1))), (0, 0));
    let (came, _) = beside(None);
    assert!(came > 3, "{came}");
}

#[test]
fn the_asked_output_length_beyond_the_mean_changes_no_quote() {
    let quotes = |max_output: Option<Tokens>| {
        let mut router = router(PolicyName::Price, PriceWeights::default(), 3);
        for request in 0..6 {
            router.place(arrival(request, request as u32, 2000), ms(10.0 * request as f64));
        }
        end(&mut router, 0, ms(100.0));
        router.place(Arrival { max_output, ..arrival(9, 9, 500) }, ms(120.0));
        router.decision(RequestId(9)).unwrap().quotes.clone()
    };
    assert_eq!(quotes(None), quotes(Some(Tokens(5000))));
}

#[test]
fn the_last_free_replica_is_kept_for_prompts_as_new_as_those_before() {
    let mut router = router(PolicyName::Price, PriceWeights { delay: 1.0, ..OWN_ONLY }, 2);
    // Prompts that nobody had seen came each 5 ms; all are done, and their KV is on replica 0.
    for request in 0..8 {
        let now = ms(1e4 + 5.0 * request as f64);
        send(&mut router, request, request as u32, 4096, 0, 2, now);
        end(&mut router, request, now);
    }
    let now = ms(1e4 + 45.0);
    send(&mut router, 100, 50, 4096, 0, 2, now);
    // Its follower could be computed on the other replica 10 ms earlier than it is behind it, but the next new prompt would wait.
    let follower = arrival(101, 50, 4096);
    let verdict = router.place(follower, ms(1e4 + 46.0));
    assert_eq!(chosen(&verdict), 0);
    assert!(router.decision(RequestId(101)).unwrap().quotes[1].terms.delay > 100.0);
}

#[test]
fn of_a_large_fleet_the_holder_and_the_idle_are_quoted_and_equals_share_the_load() {
    let mut router = router(PolicyName::Price, PriceWeights::default(), 200);
    // A prefix on the last replica, then on it some more work: its followers go there all the same.
    send(&mut router, 1, 1, 8000, 199, 200, Time::ZERO);
    end(&mut router, 1, ms(300.0));
    assert_eq!(chosen(&router.place(arrival(2, 1, 8000), ms(301.0))), 199);
    let record = router.decision(RequestId(2)).unwrap();
    assert_eq!(record.quotes.len(), 16);
    assert!(record.quotes.iter().any(|quote| quote.replica == ReplicaId(199) && quote.hit_tokens > Tokens(7000)));
    // New prompts go each to an idle replica, whichever; not to the first ones.
    let places: Vec<u32> = (10..60).map(|request| chosen(&router.place(arrival(request, request as u32, 4000), ms(302.0)))).collect();
    let distinct: std::collections::BTreeSet<u32> = places.iter().copied().collect();
    assert_eq!(distinct.len(), places.len());
    assert!(places.iter().filter(|place| **place >= 100).count() > 10, "{places:?}");
}

#[test]
fn each_baseline_follows_its_own_signal() {
    let pick = |policy: PolicyName| {
        let mut router = router(policy, PriceWeights::default(), 3);
        // 0: warm and busy; 1: two small requests; 2: one that holds most blocks.
        send(&mut router, 1, 1, 3000, 0, 3, Time::ZERO);
        for request in 2..5 {
            send(&mut router, request, request as u32 + 10, 40, 0, 3, Time::ZERO);
        }
        for request in 5..7 {
            send(&mut router, request, request as u32 + 10, 40, 1, 3, Time::ZERO);
        }
        send(&mut router, 7, 30, 19_000, 2, 3, Time::ZERO);
        chosen(&router.place(arrival(20, 1, 15_000), ms(1.0)))
    };
    assert_eq!(pick(PolicyName::LongestPrefix), 0);
    assert_eq!(pick(PolicyName::LeastOutstanding), 2);
    assert_eq!(pick(PolicyName::LeastKv), 1);
    assert_eq!(pick(PolicyName::CheapSignals), 1, "what does not fit on 2 outweighs any queue");
}

proptest! {
    /// Any life of requests leaves no trace in the books.
    #[test]
    fn the_books_are_empty_when_nothing_is_in_flight(
        lives in prop::collection::vec((0u32..4, 40u32..3000, 0u8..6, 1u32..40), 1..40),
        discipline in prop_oneof![
            Just(Discipline::Serial),
            Just(Discipline::Chunked { budget: Tokens(512) }),
            Just(Discipline::Interleaved { budget: Tokens(512), long_chunk: Tokens(256) }),
        ],
        seed in any::<u64>(),
    ) {
        let mut router = Router::new(RouterConfig { bind_within: Some(Duration::from_millis(50)), ..RouterConfig::default() }, seed);
        for id in 0..3 {
            router.upsert_replica(ReplicaSpec { discipline, kv_blocks: Blocks(300), ..spec(id) }, Time::ZERO);
        }
        let mut now = 0.0;
        let mut open: Vec<RequestId> = Vec::new();
        let take = |verdict: &Verdict, request: RequestId, open: &mut Vec<RequestId>| {
            if let Verdict::Run(placed) = verdict {
                open.extend(placed.copy.as_ref().map(|copy| copy.request));
            }
            open.push(request);
        };
        for (place, (text, tokens, life, output)) in lives.into_iter().enumerate() {
            now += f64::from(tokens) / 20.0;
            let request = RequestId(place as u64);
            let verdict = router.place(Arrival { session: (text > 1).then_some(u64::from(text)), ..arrival(request.0, text, tokens) }, ms(now));
            take(&verdict, request, &mut open);
            if life > 0 && let Some(oldest) = open.first().copied() {
                if life > 1 {
                    router.output_tokens(oldest, u32::from(life == 5), ms(now));
                    router.first_token(oldest, None, ms(now));
                    router.output_tokens(oldest, output, ms(now));
                }
                let outcome = [Outcome::Failed, Outcome::Cancelled, Outcome::Finished][usize::from(life % 3)];
                router.finished(oldest, outcome, None, ms(now));
                open.remove(0);
            }
            for (request, verdict) in router.released(ms(now)) {
                prop_assert!(matches!(verdict, Verdict::Run(_)));
                open.retain(|other| *other != request);
                take(&verdict, request, &mut open);
            }
        }
        for request in open {
            router.finished(request, Outcome::Cancelled, None, ms(now));
        }
        prop_assert_eq!(router.held(), 0);
        for replica in router.fleet(ms(now)) {
            prop_assert_eq!((replica.in_flight, replica.prefilling), (0, 0));
            prop_assert!(replica.queue_ms == 0.0);
            prop_assert_eq!(replica.kv_blocks_free, replica.kv_blocks_total);
        }
    }

    /// The other replicas stay idle, so that the least wait is zero in both worlds.
    #[test]
    fn a_longer_queue_never_lowers_a_quote(queued in 100u32..8000, tokens in 100u32..8000) {
        let quote = |waits: bool| {
            let mut router = router(PolicyName::Price, PriceWeights::default(), 3);
            send(&mut router, 1, 1, queued, 0, 3, Time::ZERO);
            if !waits {
                end(&mut router, 1, ms(0.5));
            }
            router.place(arrival(2, 2, tokens), ms(1.0));
            total_ms(&router, 2, 0)
        };
        prop_assert!(quote(true) >= quote(false) - 1e-9, "{} under {}", quote(true), quote(false));
    }

    #[test]
    fn a_longer_hit_never_raises_a_quote(hit_blocks in 1u32..200, more in 0u32..50) {
        let quote = |blocks: u32| {
            let mut router = router(PolicyName::Price, PriceWeights::default(), 3);
            send(&mut router, 1, 1, blocks * 16, 0, 3, Time::ZERO);
            end(&mut router, 1, ms(300.0));
            router.place(arrival(2, 1, 250 * 16 + 5), ms(1000.0));
            let record = router.decision(RequestId(2)).unwrap();
            record.quotes[0].terms.wait + record.quotes[0].terms.prefill + record.quotes[0].terms.delay
        };
        prop_assert!(quote(hit_blocks + more) <= quote(hit_blocks) + 1e-6);
    }

    #[test]
    fn names_of_replicas_do_not_matter(
        queues in prop::collection::vec(50u32..6000, 4),
        tokens in 100u32..6000,
        rotation in 0u32..4,
    ) {
        // The mean output is unknown, so ties are the only draws; quotes within a tie are left out.
        let world = |shift: u32| {
            let mut router = router(PolicyName::Price, PriceWeights::default(), 4);
            for (place, queued) in queues.iter().enumerate() {
                send(&mut router, place as u64, place as u32, *queued, (place as u32 + shift) % 4, 4, Time::ZERO);
            }
            let to = chosen(&router.place(arrival(9, 9, tokens), ms(1.0)));
            let mut totals: Vec<f64> = (0..4).map(|place| total_ms(&router, 9, (place + shift) % 4)).collect();
            let original = (to + 4 - shift) % 4;
            let by_place = totals.clone();
            totals.sort_by(f64::total_cmp);
            (original, by_place, totals[1] - totals[0])
        };
        let (here, quotes, margin) = world(0);
        let (there, rotated, _) = world(rotation);
        for (a, b) in quotes.iter().zip(&rotated) {
            prop_assert!((a - b).abs() < 1e-6 * (1.0 + a.abs()));
        }
        if margin > 1.5 {
            prop_assert_eq!(here, there);
        }
    }

    #[test]
    fn equal_seeds_decide_equally(policy in prop::sample::select(PolicyName::ALL), tokens in prop::collection::vec(40u32..2000, 1..30), seed in any::<u64>()) {
        let decisions = || {
            let mut router = Router::new(RouterConfig { policy, ..RouterConfig::default() }, seed);
            for id in 0..5 {
                router.upsert_replica(spec(id), Time::ZERO);
            }
            tokens.iter().enumerate().map(|(place, tokens)| router.place(arrival(place as u64, place as u32 % 3, *tokens), ms(place as f64))).collect::<Vec<_>>()
        };
        prop_assert_eq!(decisions(), decisions());
    }
}

/// What a request wants for itself turns it away where it would be late, and lets it wait no longer than its class does.
#[test]
fn a_request_with_an_objective_of_its_own_starts_in_time_or_not_at_all() {
    let config =
        RouterConfig { bind_within: Some(Duration::from_millis(50)), classes: vec![class(i32::MIN, 4.0)], ..RouterConfig::default() };
    let mut router = Router::new(config, 1);
    router.upsert_replica(spec(0), Time::ZERO);
    let within = |ms| Slo { ttft: Some(Duration::from_millis(ms)), tpot: None };
    // Each takes 149 ms; the first is bound and the rest waits its turn.
    let mut offer = |request: u64, slo: Slo| router.place(Arrival { slo, ..arrival(request, request as u32, 4600) }, ms(request as f64));
    assert!(matches!(offer(0, Slo::default()), Verdict::Run(_)));
    assert!((1..6).all(|request| offer(request, Slo::default()) == Verdict::Hold));
    assert!(matches!(offer(6, within(500)), Verdict::Refuse(Refusal::Overloaded { .. })), "0.9 s of work are before it");
    assert_eq!(offer(7, within(2000)), Verdict::Hold);
    (8..60).for_each(|request| _ = offer(request, Slo::default()));
    assert!(matches!(offer(60, within(60_000)), Verdict::Refuse(Refusal::Overloaded { .. })), "its class waits 4 s");
    // Its time is over while the others may still wait.
    let released = router.released(ms(1900.0));
    assert!(matches!(released[..], [(RequestId(7), Verdict::Refuse(Refusal::Overloaded { .. })), ..]), "{released:?}");
    assert!(released[1..].iter().all(|(_, verdict)| matches!(verdict, Verdict::Run(_))), "{released:?}");
}

#[test]
fn a_request_s_own_objectives_choose_its_replica() {
    let mut router = Router::new(RouterConfig { weights: OWN_ONLY, bind_within: None, ..RouterConfig::default() }, 7);
    for id in 0..2 {
        router.upsert_replica(ReplicaSpec { discipline: Discipline::Chunked { budget: Tokens(2048) }, ..spec(id) }, Time::ZERO);
    }
    // The first has slow steps, the second a queue.
    for request in 10..30 {
        send(&mut router, request, request as u32, 1500, 0, 2, ms(100.0 * request as f64));
        router.first_token(RequestId(request), None, ms(100.0 * request as f64 + 99.0));
    }
    send(&mut router, 1, 1, 2000, 1, 2, ms(4000.0));
    let alone_s = step().step_s(&StepLoad::decode(1.0, 100.0));
    let tpot = Some(Duration::from_secs_f64(alone_s + 1e-4));
    let mut place = |request: u64, slo: Slo| chosen(&router.place(Arrival { slo, ..arrival(request, request as u32, 100) }, ms(4000.0)));
    assert_eq!(place(2, Slo::default()), 0);
    assert_eq!(place(3, Slo { ttft: None, tpot }), 1);
    assert_eq!(place(4, Slo { ttft: Some(Duration::from_millis(30)), tpot }), 0, "its first token is later there than all others earlier");
    let record = router.decision(RequestId(4)).unwrap();
    assert_eq!((record.slo_ttft_ms, record.slo_tpot_ms.is_some()), (Some(30.0), true));
}
