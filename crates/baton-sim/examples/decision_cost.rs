//! Wall-clock cost of one decision of `price`: `decision_cost [replicas=8] [tokens=8192]`, on a warm index with 32 recent requests.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program that measures")]

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use baton_kv::{BlockKey, KeyDomain, chain_keys};
use baton_policy::{Arrival, Discipline, Outcome, ReplicaSpec, Router, RouterConfig, Verdict};
use baton_sim::{percentile, reference_step};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};

const DECISIONS: u64 = 4000;
const SESSIONS: u64 = 200;

fn main() {
    let given: BTreeMap<String, u32> = std::env::args()
        .skip(1)
        .filter_map(|argument| argument.split_once('=').map(|(key, value)| (key.to_owned(), value.parse().expect("a number"))))
        .collect();
    let (replicas, tokens) = (given.get("replicas").copied().unwrap_or(8), given.get("tokens").copied().unwrap_or(8192));
    let mut router = Router::new(RouterConfig::default(), 1);
    for id in 0..replicas {
        let spec = ReplicaSpec {
            id: ReplicaId(id),
            incarnation: Incarnation(1),
            block_size: BlockSize::DEFAULT,
            kv_blocks: Blocks(30_000),
            max_model_len: Tokens(131_072),
            max_running: 256,
            discipline: Discipline::Chunked { budget: Tokens(2048) },
            step: reference_step(),
        };
        router.upsert_replica(spec, Time::ZERO);
    }
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    let chains: Vec<Arc<[BlockKey]>> = (0..SESSIONS as u32)
        .map(|session| {
            let own = (512..tokens).map(|place| session << 20 | place);
            chain_keys(root, &(0..512.min(tokens)).chain(own).collect::<Vec<u32>>(), BlockSize::DEFAULT).into()
        })
        .collect();
    let mut took_us = Vec::new();
    for request in 0..DECISIONS {
        let now = Time::from_ms(500.0 + 5.0 * request as f64);
        let arrival = Arrival {
            request: RequestId(request),
            keys: chains[(request % SESSIONS) as usize].clone(),
            prompt: Tokens(tokens),
            max_output: None,
            session: Some(request % SESSIONS),
            program: None,
            priority: Priority(0),
            excluded: Vec::new(),
        };
        let start = Instant::now();
        let verdict = router.place(arrival, now);
        took_us.push(start.elapsed().as_secs_f64() * 1e6);
        if let Verdict::Run(placed) = verdict {
            for done in placed.copy.map(|copy| copy.request).into_iter().chain([RequestId(request)]) {
                router.first_token(done, None, now);
                router.output_tokens(done, 1, now);
                router.finished(done, Outcome::Finished, None, now);
            }
        }
    }
    let mut warm = took_us.split_off(took_us.len() / 2);
    warm.sort_by(f64::total_cmp);
    println!("{replicas} replicas, {tokens} tokens: p50 {:.0} us, p99 {:.0} us", percentile(&warm, 0.5), percentile(&warm, 0.99));
}
