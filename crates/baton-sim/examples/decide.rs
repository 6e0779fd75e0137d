//! What one decision of `price` costs, term by term: `decide [replicas=8,64,1024] [tokens=2048,8192,102400]`.
//!
//! Full caches, sessions of which each decision continues one, half of the replicas busy. A row is the median of a whole decision on
//! this machine, of those that found nine tenths of the prompt where they went, and of what follows when the request is on its way:
//! its blocks' entry in the index, of which a miss adds every one and takes as many out. The columns beside them are the match alone,
//! what `session-hash` takes where it finds as much (matching, own wait and prefill, so that the rest is the price of others), and
//! what a decision is faster without one term.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program that measures")]

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use baton_kv::{BlockKey, KeyDomain, chain_keys};
use baton_policy::{Arrival, Discipline, Outcome, PolicyName, PriceWeights, ReplicaSpec, Router, RouterConfig, Slo, Verdict};
use baton_sim::{percentile, reference_step};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};

const SHARED_TOKENS: u32 = 512;
const DECISIONS: u64 = 4000;
const WARM_UP: u64 = 2000;

fn main() {
    let given: BTreeMap<String, String> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())))
        .collect();
    let list = |key: &str, default: &str| -> Vec<u32> {
        let text = given.get(key).map_or(default, String::as_str);
        text.split(',').map(|number| number.parse().expect("a number")).collect()
    };
    println!("us a decision, p50 (p99 of the whole)");
    println!(
        "{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>9}{:>11}{:>9}{:>9}{:>9}{:>9}{:>9}",
        "replicas",
        "tokens",
        "match",
        "whole",
        "p99",
        "held",
        "booking",
        "misses",
        "hashed",
        "delay",
        "eviction",
        "memory",
        "waste",
        "decode",
        "copies"
    );
    for replicas in list("replicas", "8,64,1024") {
        for tokens in list("tokens", "2048,8192,102400") {
            let whole = measure(replicas, tokens, RouterConfig::default());
            let hashed = measure(replicas, tokens, RouterConfig { policy: PolicyName::SessionHash, ..RouterConfig::default() });
            let without = |change: fn(&mut PriceWeights)| {
                let mut config = RouterConfig::default();
                change(&mut config.weights);
                whole.decision - measure(replicas, tokens, config).decision
            };
            println!(
                "{replicas:>9}{tokens:>9}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>8.0}%{:>9.1}{:>11.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}{:>9.1}",
                whole.matched,
                whole.decision,
                whole.decision_p99,
                whole.held,
                whole.booking,
                whole.misses * 100.0,
                hashed.held,
                without(|weights| weights.delay = 0.0),
                without(|weights| weights.eviction = 0.0),
                without(|weights| weights.memory = 0.0),
                without(|weights| weights.waste = 0.0),
                without(|weights| weights.decode = 0.0),
                whole.decision - measure(replicas, tokens, RouterConfig { copies: false, ..RouterConfig::default() }).decision,
            );
        }
    }
}

struct Cost {
    matched: f64,
    decision: f64,
    decision_p99: f64,
    /// Of those that found nine tenths of their prompt.
    held: f64,
    /// Of those too.
    booking: f64,
    misses: f64,
}

fn measure(replicas: u32, tokens: u32, config: RouterConfig) -> Cost {
    let blocks = tokens.div_ceil(16);
    // As many sessions as fill every cache once over.
    let kv_blocks = 2 * blocks.max(512);
    let sessions = u64::from((3 * replicas).max(96));
    // A request that is held is not booked: here each is placed at once.
    let mut router = Router::new(RouterConfig { decisions_kept: 256, bind_within: None, ..config }, 1);
    for id in 0..replicas {
        let spec = ReplicaSpec {
            id: ReplicaId(id),
            incarnation: Incarnation(1),
            block_size: BlockSize::DEFAULT,
            kv_blocks: Blocks(kv_blocks),
            max_model_len: Tokens(1 << 20),
            max_running: 256,
            discipline: Discipline::Chunked { budget: Tokens(2048) },
            step: reference_step(),
        };
        router.upsert_replica(spec, Time::ZERO);
    }
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    let shared = SHARED_TOKENS.min(tokens / 2);
    let chain = |session: u64| -> Arc<[BlockKey]> {
        let own = (shared..tokens).map(|place| (session as u32) << 20 ^ place ^ 0x8000_0000);
        chain_keys(root, &(0..shared).chain(own).collect::<Vec<u32>>(), BlockSize::DEFAULT).into()
    };
    let chains: Vec<Arc<[BlockKey]>> = (0..sessions.min(1024)).map(chain).collect();
    let (mut matched_us, mut decision_us, mut held_us, mut booking_us) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut running: std::collections::VecDeque<RequestId> = std::collections::VecDeque::new();
    let mut depths = Vec::new();
    for request in 0..WARM_UP + DECISIONS {
        let now = Time::from_ms(500.0 + 2.0 * request as f64 / f64::from(replicas) * 8.0);
        let session = fastrand::Rng::with_seed(request).u64(..chains.len() as u64);
        let arrival = Arrival {
            request: RequestId(request),
            keys: chains[session as usize].clone(),
            prompt: Tokens(tokens),
            max_output: None,
            session: Some(session),
            program: None,
            share: None,
            priority: Priority(0),
            slo: Slo::default(),
            excluded: Vec::new(),
        };
        let keys = arrival.keys.clone();
        let start = Instant::now();
        router.index().matches_into(&keys, &mut depths);
        let matched = start.elapsed();
        let start = Instant::now();
        let verdict = router.decide(arrival, None, now);
        let took = start.elapsed();
        let start = Instant::now();
        router.keep_books();
        let booked = start.elapsed();
        if request >= WARM_UP {
            matched_us.push(matched.as_secs_f64() * 1e6);
            decision_us.push(took.as_secs_f64() * 1e6);
            let depth = |id: ReplicaId| depths.get(id.index()).map_or(0, |depth| *depth as usize);
            if matches!(&verdict, Verdict::Run(placed) if 10 * depth(placed.replica) >= 9 * keys.len()) {
                held_us.push(took.as_secs_f64() * 1e6);
                booking_us.push(booked.as_secs_f64() * 1e6);
            }
        }
        if let Verdict::Run(placed) = verdict {
            running.extend(placed.copy.map(|copy| copy.request).into_iter().chain([RequestId(request)]));
        }
        while running.len() > replicas as usize / 2 {
            let done = running.pop_front().expect("it is not empty");
            router.first_token(done, None, now);
            router.output_tokens(done, 1, now);
            router.finished(done, Outcome::Finished, None, now);
        }
        router.released(now);
    }
    for all in [&mut matched_us, &mut decision_us, &mut held_us, &mut booking_us] {
        all.sort_by(f64::total_cmp);
    }
    Cost {
        matched: percentile(&matched_us, 0.5),
        decision: percentile(&decision_us, 0.5),
        decision_p99: percentile(&decision_us, 0.99),
        held: percentile(&held_us, 0.5),
        booking: percentile(&booking_us, 0.5),
        misses: 1.0 - held_us.len() as f64 / decision_us.len() as f64,
    }
}
