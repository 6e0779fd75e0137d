//! What requests wait for while the index is written: the time of `place` through the gateway's fleet, quiet, while an engine publishes
//! large batches of events as fast as they are taken in, while snapshots are made one after the other, and with both.
//!
//! `replicas=8 blocks=50000 batch=10000 seconds=4`: replicas, the blocks that each holds, blocks of a batch, and how long each row takes.

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a program that measures")]

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use baton_cost::StepCoefficients;
use baton_gateway::{PolicyConfig, measure::Placements};
use baton_kv::{Applied, BlockKey, EngineHash, KeyDomain, KvEvent, KvEventBatch, chain_keys};
use baton_policy::{Arrival, Discipline, ReplicaSpec, Slo};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Tokens};

const SIZE: BlockSize = BlockSize::DEFAULT;
const LIFE: Incarnation = Incarnation(1);
/// Blocks of a chain that an engine tells of, and of a request's prompt.
const CHAIN: u32 = 200;
/// Requests that are in flight at a time, by each of those who send them.
const IN_FLIGHT: usize = 8;
const SENDERS: u64 = 2;

fn spec(id: u32, blocks: u32) -> ReplicaSpec {
    ReplicaSpec {
        id: ReplicaId(id),
        incarnation: LIFE,
        block_size: SIZE,
        kv_blocks: Blocks(blocks),
        max_model_len: Tokens(100_000),
        max_running: 256,
        discipline: Discipline::Chunked { budget: Tokens(2048) },
        step: StepCoefficients { fixed_s: 0.0, per_token_s: 1e-8, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 },
    }
}

fn tokens(text: u32) -> Vec<u32> {
    let length = CHAIN * SIZE.get();
    (0..length).map(|place| text.wrapping_mul(length) + place).collect()
}

fn keys(text: u32) -> Vec<BlockKey> {
    chain_keys(KeyDomain { model: "", adapter: None, salt: None }.root(), &tokens(text), SIZE)
}

fn hashes(keys: Vec<BlockKey>) -> Vec<EngineHash> {
    keys.into_iter().map(|key| EngineHash(key.0.rotate_left(9))).collect()
}

fn stored(text: u32) -> KvEvent {
    KvEvent::Stored { hashes: hashes(keys(text)), parent: None, tokens: tokens(text), block_size: SIZE, adapter: None, salt: None }
}

/// An engine whose cache is full: each batch tells of new chains and of as many that went.
struct Engine {
    id: ReplicaId,
    sequence: u64,
    texts: VecDeque<u32>,
    next_text: u32,
}

impl Engine {
    fn batch(&mut self, chains: u32, full: usize) -> KvEventBatch {
        let mut events = Vec::new();
        for _ in 0..chains {
            if self.texts.len() >= full {
                let old = self.texts.pop_front().unwrap();
                events.push(KvEvent::Removed { hashes: hashes(keys(old)).into_iter().rev().collect() });
            }
            events.push(stored(self.next_text));
            self.texts.push_back(self.next_text);
            self.next_text += 1;
        }
        let sequence = self.sequence;
        self.sequence += 1;
        KvEventBatch { sequence, timestamp_s: sequence as f64, events, dp_rank: None }
    }
}

/// Sends requests one after the other until told to stop; returns how long each `place` took, in ns.
async fn send(placements: Placements, sender: u64, known: u32, requests: Arc<AtomicU64>, stop: Arc<AtomicBool>) -> Vec<u64> {
    let mut rng = fastrand::Rng::with_seed(sender);
    let prompts: Vec<Arc<[BlockKey]>> = (0..64).map(|_| keys(rng.u32(..known)).into()).collect();
    let (mut flights, mut took) = (VecDeque::new(), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let request = RequestId(requests.fetch_add(1, Ordering::Relaxed));
        let arrival = Arrival {
            request,
            keys: rng.choice(&prompts).unwrap().clone(),
            prompt: Tokens(CHAIN * SIZE.get() + 1),
            max_output: Some(Tokens(16)),
            session: None,
            program: None,
            share: None,
            priority: Priority(0),
            slo: Slo::default(),
            excluded: Vec::new(),
        };
        let began = Instant::now();
        let placed = placements.place(arrival);
        took.push(began.elapsed().as_nanos() as u64);
        assert!(placed.is_some(), "there is room");
        flights.push_back(request);
        if flights.len() > IN_FLIGHT {
            placements.finish(flights.pop_front().unwrap());
        }
        tokio::task::yield_now().await;
    }
    for request in flights {
        placements.finish(request);
    }
    took
}

#[tokio::main(flavor = "multi_thread", worker_threads = 4)]
async fn main() {
    let given: BTreeMap<String, u64> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.split_once('=').map(|(name, value)| (name.to_owned(), value.parse().expect("a number"))))
        .collect();
    let number = |name: &str, default: u64| given.get(name).copied().unwrap_or(default);
    let (replicas, blocks) = (number("replicas", 8) as u32, number("blocks", 50_000) as u32);
    let (batch, seconds) = (number("batch", 10_000) as u32, number("seconds", 4));

    let placements = Placements::new(&PolicyConfig::default(), (0..replicas).map(|id| spec(id, blocks)));
    let known = blocks / CHAIN;
    let engine = |id: u32| Engine { id: ReplicaId(id), sequence: 0, texts: VecDeque::new(), next_text: id * 1000 };
    let mut engines: Vec<Engine> = (0..replicas).map(engine).collect();
    for engine in &mut engines {
        let batch = engine.batch(known, usize::MAX);
        assert_eq!(placements.kv_events(engine.id, LIFE, batch).await, Applied::Ok);
    }
    let ids: Arc<[ReplicaId]> = engines.iter().map(|engine| engine.id).collect();
    let mut publisher = engines.remove(0);
    publisher.next_text = 1_000_000;
    let requests = Arc::new(AtomicU64::new(1));
    println!(
        "| {replicas} replicas of {blocks} blocks | decisions/s | place p50 us | p99 | p99.9 | max | blocks/s of events | snapshots/s |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for (row, events, snapshots) in
        [("quiet", false, false), ("events", true, false), ("snapshots", false, true), ("events and snapshots", true, true)]
    {
        let stop = Arc::new(AtomicBool::new(false));
        let senders: Vec<_> =
            (0..SENDERS).map(|sender| tokio::spawn(send(placements.clone(), sender, known, requests.clone(), stop.clone()))).collect();
        let copier = snapshots.then(|| {
            let (placements, ids, stop) = (placements.clone(), ids.clone(), stop.clone());
            tokio::task::spawn_blocking(move || {
                let mut made = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    assert!(placements.snapshot(&ids) > 0);
                    made += 1;
                }
                made
            })
        });
        let began = Instant::now();
        let mut told = 0u64;
        while began.elapsed() < Duration::from_secs(seconds) {
            if events {
                let batch = publisher.batch(batch / CHAIN, known as usize);
                told += batch.events.len() as u64 * u64::from(CHAIN);
                assert_eq!(placements.kv_events(publisher.id, LIFE, batch).await, Applied::Ok);
            } else {
                // A row without events: only until its time is over.
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let elapsed_s = began.elapsed().as_secs_f64();
        let mut took = Vec::new();
        for sender in senders {
            took.extend(sender.await.unwrap());
        }
        let made = match copier {
            Some(copier) => copier.await.unwrap(),
            None => 0,
        };
        took.sort_unstable();
        let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize] as f64 / 1e3;
        println!(
            "| {row} | {:.0} | {:.1} | {:.1} | {:.1} | {:.0} | {:.0} | {:.1} |",
            took.len() as f64 / elapsed_s,
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
            told as f64 / elapsed_s,
            f64::from(made) / elapsed_s
        );
    }
}
