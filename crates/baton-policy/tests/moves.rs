//! Moves in the router's books.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use baton_cost::{Device, Link, ModelShape, StepCoefficients};
use baton_kv::{BlockKey, KeyDomain, chain_keys};
use baton_policy::{
    Arrival, Discipline, LoadReport, MoveTerms, Outcome, ReplicaSpec, ReplicaState, Router, RouterConfig, Slo, Verdict,
    mover::{FleetFacts, MoveReason, Mover, MoverConfig, ReplicaFacts},
};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};
use proptest::prelude::*;

const SIZE: BlockSize = BlockSize::DEFAULT;

fn spec(id: u32, incarnation: u64) -> ReplicaSpec {
    let shape = ModelShape::preset("llama-2-7b-gqa8").unwrap();
    ReplicaSpec {
        id: ReplicaId(id),
        incarnation: Incarnation(incarnation),
        block_size: SIZE,
        kv_blocks: Blocks(1000),
        max_model_len: Tokens(15_000),
        max_running: 64,
        discipline: Discipline::Chunked { budget: Tokens(2048) },
        step: StepCoefficients::from_profile(&shape, &Device::preset("h100").unwrap()),
    }
}

fn router(replicas: u32) -> Router {
    let mut router = Router::new(RouterConfig::default(), 7);
    (0..replicas).for_each(|id| router.upsert_replica(spec(id, 1), Time::ZERO));
    router
}

fn keys(text: u32, tokens: u32) -> Arc<[BlockKey]> {
    let tokens: Vec<u32> = (0..tokens).map(|place| text * 100_000 + place).collect();
    chain_keys(KeyDomain { model: "", adapter: None, salt: None }.root(), &tokens, SIZE).into()
}

/// Places a request on one replica by excluding the others.
fn send(router: &mut Router, request: u64, text: u32, tokens: u32, to: u32, replicas: u32, now: Time) {
    let arrival = Arrival {
        request: RequestId(request),
        keys: keys(text, tokens),
        prompt: Tokens(tokens),
        max_output: None,
        session: None,
        program: Some(u64::from(text)),
        share: None,
        priority: Priority(0),
        slo: Slo::default(),
        excluded: (0..replicas).filter(|id| *id != to).map(ReplicaId).collect(),
    };
    assert!(matches!(router.place(arrival, now), Verdict::Run(placed) if placed.replica.0 == to));
}

fn facts(router: &Router, now: Time) -> FleetFacts {
    let terms = MoveTerms { numerics: 1, kv_bytes_per_token: 131_072.0, link: Link::preset("ethernet").unwrap(), watermark: Blocks(10) };
    router.fleet_facts(|_| Some(terms.clone()), now)
}

fn at(ms: f64) -> Time {
    Time::from_ms(ms)
}

/// What is booked on each replica: prefill in ms, requests, prompts being computed, blocks free.
fn books(router: &Router, now: Time) -> Vec<(u64, u32, u32, Blocks)> {
    let books = router.fleet(now).into_iter();
    books.map(|replica| (replica.queue_ms.round() as u64, replica.in_flight, replica.prefilling, replica.kv_blocks_free)).collect()
}

#[test]
fn a_move_takes_all_that_was_booked_along() {
    let mut router = router(2);
    send(&mut router, 1, 1, 4096, 0, 2, at(0.0));
    let cold = books(&router, at(0.0))[0];
    assert!(cold.0 > 120 && cold.1 == 1 && cold.2 == 1 && cold.3 == Blocks(1000 - 257), "{cold:?}");
    // Before its first token: the prefill goes along.
    assert!(router.moved(RequestId(1), ReplicaId(1), at(0.0)));
    assert_eq!(books(&router, at(0.0)), [(0, 0, 0, Blocks(1000)), cold]);
    router.first_token(RequestId(1), Some(Tokens(0)), at(150.0));
    router.output_tokens(RequestId(1), 20, at(500.0));
    let decoding = books(&router, at(500.0))[1];
    assert_eq!(decoding, (0, 1, 0, Blocks(1000 - 258)));
    // Afterwards: its context. What was computed stays as cache.
    assert!(router.moved(RequestId(1), ReplicaId(0), at(500.0)));
    assert_eq!(books(&router, at(500.0)), [decoding, (0, 0, 0, Blocks(1000))]);
    assert_eq!(router.index().matches(&keys(1, 4096))[1], 256);
    let attained = facts(&router, at(500.0)).programs[&1];
    assert!((attained - (4096.0 + 2.0 * 20.0)).abs() < 1e-9, "{attained}");
    router.finished(RequestId(1), Outcome::Finished, None, at(600.0));
    assert!(books(&router, at(600.0)).iter().all(|books| *books == (0, 0, 0, Blocks(1000))));
}

/// By its tokens alone it decodes nowhere until the target's first token: prompt and output are prefill there, less what its cache has.
#[test]
fn a_move_without_kv_books_its_prefill_at_the_target() {
    let mut router = router(2);
    send(&mut router, 1, 1, 4096, 0, 2, at(0.0));
    router.first_token(RequestId(1), Some(Tokens(0)), at(150.0));
    router.output_tokens(RequestId(1), 900, at(5000.0));
    let decoding = books(&router, at(5000.0))[0];
    assert!(router.moved_anew(RequestId(1), ReplicaId(1), at(5000.0)));
    let prefill_ms =
        |tokens: u32, held: u32| spec(0, 1).step.prefill_chunked_ms(Tokens(tokens - held), Tokens(held), Tokens(2048)).round() as u64;
    assert_eq!(books(&router, at(5000.0)), [(0, 0, 0, Blocks(1000)), (prefill_ms(4996, 0), 1, 1, decoding.3)]);
    let there = facts(&router, at(5000.0)).replicas.remove(1);
    assert!(there.running[0].prefilling, "{there:?}");
    // Back to where its prompt is still cached, before it was computed.
    assert!(router.moved_anew(RequestId(1), ReplicaId(0), at(5000.0)));
    assert_eq!(books(&router, at(5000.0)), [(prefill_ms(4996, 4096), 1, 1, decoding.3), (0, 0, 0, Blocks(1000))]);
    assert_eq!(router.index().matches(&keys(1, 4096)), [256, 0], "it computed nothing there");
    // Its next token, not the first one again, ends the prefill.
    router.first_token(RequestId(1), None, at(5050.0));
    assert_eq!(books(&router, at(5000.0))[0].2, 1);
    router.output_tokens(RequestId(1), 1, at(5050.0));
    assert_eq!(books(&router, at(5050.0))[0], decoding);
    router.finished(RequestId(1), Outcome::Finished, None, at(6000.0));
    assert!(books(&router, at(6000.0)).iter().all(|books| *books == (0, 0, 0, Blocks(1000))));
}

#[test]
fn what_cannot_be_a_move_changes_nothing() {
    let mut router = router(3);
    send(&mut router, 1, 1, 1024, 0, 3, at(0.0));
    router.set_state(ReplicaId(2), ReplicaState::Dead, at(0.0));
    let before = books(&router, at(0.0));
    for (request, to) in [(1, 0), (1, 2), (1, 9), (5, 1)] {
        assert!(!router.moved(RequestId(request), ReplicaId(to), at(0.0)), "{request} to {to}");
        assert_eq!(books(&router, at(0.0)), before);
    }
}

/// The books know arrivals and tokens only; an engine that admits in order of arrival has the rest of it.
#[test]
fn the_books_tell_who_runs_and_who_waits() {
    let mut router = router(2);
    for request in 0..4 {
        send(&mut router, request, request as u32, 3840, 0, 2, at(request as f64));
        if request < 2 {
            router.first_token(RequestId(request), None, at(request as f64));
            router.output_tokens(RequestId(request), 1, at(request as f64));
        }
    }
    // 241 blocks each: three and the watermark fit into 1,000, four do not.
    let ids = |replica: &ReplicaFacts| {
        let running: Vec<(u64, bool)> = replica.running.iter().map(|one| (one.request.0, one.prefilling)).collect();
        (running, replica.waiting.iter().map(|one| one.request.0).collect::<Vec<_>>(), replica.blocks_used)
    };
    let told = facts(&router, at(10.0));
    assert_eq!(ids(&told.replicas[0]), (vec![(0, false), (1, false), (2, true), (3, true)], vec![], Blocks(964)));
    send(&mut router, 9, 9, 3840, 0, 2, at(9.0));
    let told = facts(&router, at(10.0));
    assert_eq!(ids(&told.replicas[0]).1, [9]);
    assert_eq!(told.replicas[0].waiting[0].demand, Blocks(242));
    // The loop sends it to where it fits, for free.
    let moves = Mover::new(MoverConfig::default()).plan(&told, &|request, to| router.cached(request, to), at(10.0));
    assert!(matches!(moves[0].reason, MoveReason::Defragment { head: RequestId(9), .. }), "{moves:?}");
    assert!(router.moved(RequestId(9), moves[0].to, at(10.0)));
    assert_eq!(ids(&facts(&router, at(10.0)).replicas[0]).1, Vec::<u64>::new());
}

#[test]
fn prompts_that_are_shared_count_once() {
    let mut router = router(1);
    (0..8).for_each(|request| send(&mut router, request, 1, 3200, 0, 1, at(0.0)));
    let told = &facts(&router, at(0.0)).replicas[0];
    assert!((208..=216).contains(&told.blocks_used.0), "200 shared and one of each: {}", told.blocks_used);
    assert_eq!((told.running.len(), told.running[0].blocks), (8, Blocks(26)));
}

/// Two requests of one text: the second one's prompt is where the first one ran, as far as that reached.
#[test]
fn the_index_tells_what_a_target_has_of_a_prompt() {
    let mut router = router(2);
    send(&mut router, 1, 1, 1600, 0, 2, at(0.0));
    router.first_token(RequestId(1), None, at(100.0));
    router.finished(RequestId(1), Outcome::Finished, None, at(200.0));
    send(&mut router, 2, 1, 3200, 1, 2, at(300.0));
    assert_eq!([0, 1].map(|id| router.cached(RequestId(2), ReplicaId(id))), [Tokens(1600), Tokens(3200)]);
    assert_eq!([router.cached(RequestId(2), ReplicaId(7)), router.cached(RequestId(9), ReplicaId(0))], [Tokens(0); 2]);
}

#[test]
fn a_replica_at_a_time_tells_the_same_until_a_request_moves() {
    let mut router = router(3);
    (0..9).for_each(|request| send(&mut router, request, request as u32, 640, request as u32 % 3, 3, at(request as f64)));
    let terms = MoveTerms { numerics: 1, kv_bytes_per_token: 131_072.0, link: Link::preset("ethernet").unwrap(), watermark: Blocks(10) };
    let apart = |router: &Router| (0..4).filter_map(|id| router.replica_facts(ReplicaId(id), terms.clone(), at(9.0))).collect::<Vec<_>>();
    assert_eq!(apart(&router), facts(&router, at(9.0)).replicas);
    let before = router.relocations();
    assert!(!router.moved(RequestId(0), ReplicaId(0), at(9.0)) && router.relocations() == before, "it is there");
    assert!(router.moved(RequestId(0), ReplicaId(1), at(9.0)) && router.relocations() > before);
}

/// Another gateway's requests are told by the replica; a report from before a move does not bring the moved one back.
#[test]
fn a_report_adds_what_others_sent() {
    let mut router = router(2);
    send(&mut router, 1, 1, 3200, 0, 2, at(0.0));
    router.first_token(RequestId(1), None, at(100.0));
    let word = |free| LoadReport { taken_at: at(200.0), waiting: 0, running: 2, kv_blocks_free: Blocks(free), prefill_backlog: Tokens(0) };
    let used = |router: &Router, ms: f64| facts(router, at(ms)).replicas.iter().map(|replica| replica.blocks_used.0).collect::<Vec<_>>();
    router.report(ReplicaId(0), word(799), at(200.0));
    assert_eq!(used(&router, 210.0), [201, 0], "all of it is ours");
    router.report(ReplicaId(0), word(500), at(200.0));
    assert_eq!(used(&router, 210.0), [500, 0]);
    assert!(router.moved(RequestId(1), ReplicaId(1), at(210.0)));
    assert_eq!(used(&router, 210.0), [299, 201]);
    assert_eq!(used(&router, 9_000.0), [0, 201], "an old word says nothing");
}

#[derive(Debug, Clone)]
enum Step {
    Send { to: u32, tokens: u32, text: u32 },
    First(usize),
    Output(usize, u32),
    Move(usize, u32),
    Anew(usize, u32),
    End(usize, Outcome),
    Restart(u32),
    Die(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    let outcome = prop_oneof![Just(Outcome::Finished), Just(Outcome::Cancelled), Just(Outcome::Failed)];
    prop_oneof![
        4 => (0u32..3, 1u32..1200, 0u32..3).prop_map(|(to, tokens, text)| Step::Send { to, tokens, text }),
        3 => (0usize..20).prop_map(Step::First),
        3 => (0usize..20, 1u32..60).prop_map(|(place, count)| Step::Output(place, count)),
        4 => (0usize..20, 0u32..3).prop_map(|(place, to)| Step::Move(place, to)),
        2 => (0usize..20, 0u32..3).prop_map(|(place, to)| Step::Anew(place, to)),
        2 => (0usize..20, outcome).prop_map(|(place, outcome)| Step::End(place, outcome)),
        1 => (0u32..3).prop_map(Step::Restart),
        1 => (0u32..3).prop_map(Step::Die),
    ]
}

proptest! {
    /// Whatever moves, dies and ends: when nothing is in flight, nothing is booked, and no block is kept.
    #[test]
    fn the_ledger_goes_to_zero(steps in prop::collection::vec(any_step(), 1..120)) {
        let (mut router, mut live, mut incarnation) = (router(3), Vec::new(), 1);
        for (place, step) in steps.into_iter().enumerate() {
            let now = at(place as f64 * 7.0);
            let pick = |live: &Vec<RequestId>, place: usize| live.get(place % live.len().max(1)).copied();
            match step {
                Step::Send { to, tokens, text } => {
                    let request = RequestId(place as u64);
                    let arrival = Arrival {
                        request,
                        keys: keys(text, tokens),
                        prompt: Tokens(tokens),
                        max_output: None,
                        session: (text == 2).then_some(5),
                        program: Some(1),
                        share: None,
                        priority: Priority(0),
                        slo: Slo::default(),
                        excluded: vec![ReplicaId(to)],
                    };
                    if let Verdict::Run(placed) = router.place(arrival, now) {
                        live.push(request);
                        live.extend(placed.copy.map(|copy| copy.request));
                    } else {
                        router.finished(request, Outcome::Cancelled, None, now);
                    }
                }
                Step::First(place) => if let Some(request) = pick(&live, place) { router.first_token(request, None, now) },
                Step::Output(place, count) => if let Some(request) = pick(&live, place) { router.output_tokens(request, count, now) },
                Step::Move(place, to) => if let Some(request) = pick(&live, place) { router.moved(request, ReplicaId(to), now); },
                Step::Anew(place, to) => if let Some(request) = pick(&live, place) { router.moved_anew(request, ReplicaId(to), now); },
                Step::End(place, outcome) => if let Some(request) = pick(&live, place) {
                    router.finished(request, outcome, None, now);
                    live.retain(|other| *other != request);
                },
                Step::Restart(id) => {
                    incarnation += 1;
                    router.upsert_replica(spec(id, incarnation), now);
                }
                Step::Die(id) => router.set_state(ReplicaId(id), ReplicaState::Dead, now),
            }
            let told = facts(&router, now);
            let used = |replica: &ReplicaFacts| replica.running.iter().map(|one| one.blocks).sum::<Blocks>();
            prop_assert!(told.replicas.iter().all(|replica| replica.blocks_used <= used(replica)), "{told:?}");
        }
        for request in live {
            router.finished(request, Outcome::Finished, None, at(2000.0));
        }
        for replica in router.fleet(at(2000.0)) {
            prop_assert_eq!((replica.queue_ms, replica.in_flight, replica.prefilling, replica.kv_blocks_free), (0.0, 0, 0, Blocks(1000)));
            prop_assert_eq!(router.index().blocks_pinned(replica.id), 0);
        }
    }
}
