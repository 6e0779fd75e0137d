use std::{ops::Range, time::Duration};

use baton_cost::StepCoefficients;
use baton_kv::{BlockKey, EngineHash, KeyDomain, KvEvent, chain_keys};
use baton_policy::{Discipline, Slo};
use baton_units::{Blocks, Incarnation, Priority, Tokens};

use super::*;

const REPLICAS: u32 = 3;
const BURST: Range<u64> = 2..14;
const SHARED: u32 = 4096;
const OWN: u32 = 320;

/// 10 µs for each token of a prompt.
fn spec(id: u32) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId(id),
        incarnation: Incarnation(1),
        block_size: BlockSize::default(),
        kv_blocks: Blocks(20_000),
        max_model_len: Tokens(20_000),
        max_running: 256,
        discipline: Discipline::Chunked { budget: Tokens(2048) },
        step: StepCoefficients { fixed_s: 0.0, per_token_s: 1e-5, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 },
    }
}

fn tokens(request: u64) -> Vec<u32> {
    let own = 10_000 + request as u32 * 1000;
    (0..SHARED).chain(own..own + OWN).collect()
}

/// A request whose prompt begins like all others'.
fn arrival(request: u64) -> Arrival {
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    let keys: Vec<BlockKey> = chain_keys(root, &tokens(request), BlockSize::default());
    Arrival {
        request: RequestId(request),
        keys: keys.into(),
        prompt: Tokens(SHARED + OWN),
        max_output: None,
        session: None,
        program: None,
        share: None,
        priority: Priority(0),
        slo: Slo::default(),
        excluded: Vec::new(),
    }
}

fn set_all(fleet: &Fleet, state: ReplicaState) {
    fleet.with_router(|router, now| (0..REPLICAS).for_each(|id| router.set_state(ReplicaId(id), state, now)));
}

fn in_flight(fleet: &Fleet) -> u32 {
    fleet.peek_router(|router, now| router.fleet(now).iter().map(|status| status.in_flight).sum())
}

/// A fleet in which one replica knows a prefix and none is ready, and a burst of requests that wait for one.
fn burst() -> (Fleet, Vec<oneshot::Receiver<Verdict>>) {
    let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
    (0..REPLICAS).for_each(|id| fleet.engine_ready(spec(id), None));
    for request in 0..2 {
        assert!(matches!(fleet.place(arrival(request)), Placing::Now(Verdict::Run(_))));
        fleet.with_router(|router, now| router.first_token(RequestId(request), None, now));
        fleet.finished(RequestId(request), Outcome::Finished, None);
    }
    set_all(&fleet, ReplicaState::Suspect);
    let waiting = BURST.map(|request| match fleet.place(arrival(request)) {
        Placing::Later(told) => told,
        Placing::Now(verdict) => panic!("{verdict:?}"),
    });
    let waiting = waiting.collect();
    (fleet, waiting)
}

#[test]
fn verdicts_for_a_burst_bring_a_copy() {
    let (fleet, waiting) = burst();
    set_all(&fleet, ReplicaState::Ready);
    let verdicts = waiting.into_iter().map(|mut told| told.try_recv().unwrap());
    let copies = verdicts.filter(|verdict| matches!(verdict, Verdict::Run(Placed { copy: Some(_), .. }))).count() as u32;
    assert!(copies > 0);
    assert_eq!(in_flight(&fleet), BURST.count() as u32 + copies);
}

#[test]
fn a_copy_that_nobody_hears_of_is_let_go() {
    // They left before the verdict, without a word yet.
    let (fleet, waiting) = burst();
    drop(waiting);
    set_all(&fleet, ReplicaState::Ready);
    BURST.for_each(|request| fleet.finished(RequestId(request), Outcome::Cancelled, None));
    assert_eq!(in_flight(&fleet), 0);

    // They left with the verdict on its way.
    let (fleet, waiting) = burst();
    set_all(&fleet, ReplicaState::Ready);
    for told in waiting {
        fleet.decline(told);
    }
    BURST.for_each(|request| fleet.finished(RequestId(request), Outcome::Cancelled, None));
    assert_eq!(in_flight(&fleet), 0);
}

/// A batch that stores `chains` chains of the blocks of requests' prompts.
fn batch(sequence: u64, chains: Range<u64>) -> KvEventBatch {
    let stored = |request| {
        let (keys, tokens) = (arrival(request).keys, tokens(request));
        let hashes = keys.iter().map(|key| EngineHash(key.0)).collect();
        KvEvent::Stored { hashes, parent: None, tokens, block_size: BlockSize::default(), adapter: None, salt: None }
    };
    KvEventBatch { sequence, timestamp_s: sequence as f64, events: chains.map(stored).collect(), dp_rank: None }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_the_index_holds_whole_batches_whenever_it_is_made() {
    let fleet = Arc::new(Fleet::new(FrontConfig::default(), &PolicyConfig::default()));
    fleet.engine_ready(spec(0), None);
    let (id, life, sent) = (ReplicaId(0), Incarnation(1), 20u64);
    let follower = tokio::spawn({
        let fleet = fleet.clone();
        async move {
            for sequence in 0..sent {
                assert_eq!(fleet.kv_events(id, life, batch(sequence, 10 * sequence..10 * (sequence + 1))).await, Applied::Ok);
            }
        }
    });
    let mut seen = 0;
    while seen < sent {
        let fleet = fleet.clone();
        let bytes = tokio::task::spawn_blocking(move || fleet.copy_index(&[id]).take(id)).await.unwrap();
        let other = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
        other.engine_ready(spec(0), None);
        other.with_router(|router, now| {
            router.begin_restore(id, Snapshot::read(&bytes.unwrap()).unwrap(), Duration::ZERO, now).unwrap();
            router.take_in(id, usize::MAX, now);
            seen = router.index().next_sequence(id);
            // The shared prefix, and what each chain of the batches has of its own.
            let blocks = if seen == 0 { 0 } else { u64::from(SHARED / 16) + 10 * seen * u64::from(OWN / 16) };
            assert_eq!(router.index().blocks_held(id) as u64, blocks, "after {seen} batches");
        });
    }
    follower.await.unwrap();
}

#[tokio::test]
async fn what_a_stopped_follower_left_of_a_batch_is_in_the_copy() {
    let fleet = Arc::new(Fleet::new(FrontConfig::default(), &PolicyConfig::default()));
    fleet.engine_ready(spec(0), None);
    let (id, life) = (ReplicaId(0), Incarnation(1));
    fleet.with_router(|router, now| {
        router.begin_kv_events(id, life, Arc::new(batch(0, 0..10)), now);
        assert!(router.take_in(id, 5, now));
        assert!(router.index().begin_copy([id], now).take(id).is_none());
    });
    let copier = fleet.clone();
    assert!(tokio::task::spawn_blocking(move || copier.copy_index(&[id]).take(id)).await.unwrap().is_some());
    fleet.peek_router(|router, _| assert_eq!(router.index().blocks_held(id), (SHARED / 16 + 10 * OWN / 16) as usize));
}

#[test]
fn an_engine_that_dies_or_leaves_takes_no_requests_while_its_entries_go() {
    let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
    (0..2).for_each(|id| fleet.engine_ready(spec(id), None));
    let batch = batch(0, 0..10);
    fleet.with_router(|router, now| router.kv_events(ReplicaId(0), Incarnation(1), &batch, now));
    fleet.clear_ahead(ReplicaId(0), Some(Incarnation(1)));
    fleet.peek_router(|router, _| assert!(router.index().blocks_held(ReplicaId(0)) > 0, "its own life"));
    fleet.clear_ahead(ReplicaId(0), None);
    fleet.peek_router(|router, now| {
        assert_eq!(router.index().blocks_held(ReplicaId(0)), 0);
        assert_eq!(router.fleet(now)[0].state, ReplicaState::Suspect);
    });
    assert!(matches!(fleet.place(arrival(1)), Placing::Now(Verdict::Run(Placed { replica: ReplicaId(1), .. }))));
}

#[test]
fn what_still_runs_at_an_engine_that_left_is_not_taken_for_its_successors() {
    let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
    let join = |port: u16| {
        let config = EngineConfig::new(format!("http://127.0.0.1:{port}").parse().unwrap(), crate::config::EngineKind::Vllm);
        let engine = fleet.set_engines([config]).fresh.remove(0);
        engine.facts().life.0 += 1;
        let spec = ReplicaSpec { incarnation: engine.facts().life, ..spec(engine.id.0) };
        fleet.engine_ready(spec, None);
        spec
    };
    let run = |request| {
        assert!(matches!(fleet.place(arrival(request)), Placing::Now(Verdict::Run(_))));
        fleet.keep_books();
    };
    let free = || fleet.peek_router(|router, now| router.fleet(now)[0].kv_blocks_free);
    let gone = join(1);
    run(1);
    let spec = join(2);
    assert!(spec.id == gone.id && spec.incarnation > gone.incarnation, "its place is another one's");
    run(2);
    let with_one = free();
    assert!(with_one < spec.kv_blocks);
    fleet.with_router(|router, now| router.first_token(RequestId(1), None, now));
    fleet.finished(RequestId(1), Outcome::Finished, None);
    assert_eq!((in_flight(&fleet), free()), (1, with_one));
    fleet.finished(RequestId(2), Outcome::Cancelled, None);
    assert_eq!((in_flight(&fleet), free()), (0, spec.kv_blocks));
}

#[test]
fn a_late_word_of_an_engine_that_left_does_not_bring_it_back() {
    let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
    let config = EngineConfig::new("http://127.0.0.1:1".parse().unwrap(), crate::config::EngineKind::Vllm);
    let engine = fleet.set_engines([config]).fresh.remove(0);
    engine.facts().life.0 += 1;
    fleet.engine_ready(spec(0), None);
    assert_eq!(fleet.peek_router(|router, now| router.fleet(now).len()), 1);
    assert_eq!(fleet.set_engines([] as [EngineConfig; 0]).gone, [ReplicaId(0)]);
    fleet.engine_ready(spec(0), None);
    assert_eq!(fleet.peek_router(|router, now| router.fleet(now).len()), 0);
}

#[test]
fn a_request_whose_task_panics_is_let_go() {
    let fleet = Arc::new(Fleet::new(FrontConfig::default(), &PolicyConfig::default()));
    fleet.engine_ready(spec(0), None);
    let begin = |request: u64| {
        assert!(matches!(fleet.place(arrival(request)), Placing::Now(Verdict::Run(_))));
        fleet.admit(Arc::new(Live::new(RequestId(request), format!("r{request}"), "m".into(), fleet.clock.now(), Tokens(1))))
    };
    drop(begin(1));
    assert_eq!((in_flight(&fleet), fleet.live().len()), (1, 1), "its own end books it");
    let booked = begin(2);
    let task = std::thread::spawn(move || {
        let _booked = booked;
        panic!("on purpose");
    });
    assert!(task.join().is_err());
    assert_eq!((in_flight(&fleet), fleet.live().len()), (1, 1));
}
