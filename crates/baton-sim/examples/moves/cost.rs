//! What one look at the fleet costs: the facts from the router's books, for which it is locked a replica at a time, and the plan.

use std::time::Instant;

use baton_kv::{BlockKey, KeyDomain, chain_keys};
use baton_policy::{
    Arrival, Discipline, MoveTerms, PolicyName, ReplicaSpec, Router, RouterConfig, Slo,
    mover::{FleetFacts, Mover},
};
use baton_sim::{Moves, percentile, reference_step};
use baton_units::{BlockSize, Blocks, Incarnation, Priority, ReplicaId, RequestId, Time, Tokens};

const LOOKS: usize = 50;

/// Prints the medians in us, for replicas that all have `requests` decoding ones and little memory left.
pub(crate) fn print(replicas: u32, requests: u32) {
    let (router, now) = full(replicas, requests);
    let moves = Moves::over("ethernet");
    let terms = MoveTerms { numerics: 1, kv_bytes_per_token: moves.kv_bytes_per_token, link: moves.link, watermark: Blocks(10) };
    let (mut facts, mut told_us, mut slice_us, mut planned_us, mut planned) =
        (FleetFacts::default(), Vec::new(), Vec::new(), Vec::new(), 0);
    let us = |since: Instant| since.elapsed().as_secs_f64() * 1e6;
    for _ in 0..LOOKS {
        let start = Instant::now();
        facts = router.fleet_facts(|_| None, now);
        for id in 0..replicas {
            let slice = Instant::now();
            facts.replicas.extend(router.replica_facts(ReplicaId(id), terms.clone(), now));
            slice_us.push(us(slice));
        }
        told_us.push(us(start));
        let mut mover = Mover::new(moves.mover.clone());
        let start = Instant::now();
        planned = mover.plan(&facts, &|request, on| router.cached(request, on), now).len();
        planned_us.push(us(start));
    }
    for sorted in [&mut told_us, &mut slice_us, &mut planned_us] {
        sorted.sort_by(f64::total_cmp);
    }
    let (told, slice, planning) = (percentile(&told_us, 0.5), percentile(&slice_us, 0.99), percentile(&planned_us, 0.5));
    println!(
        "{replicas:>5} replicas with {requests} requests each: facts {told:.0} us, p99 of a replica's {slice:.0} us, \
         plan {planning:.0} us, {planned} moves"
    );
    drop(facts);
}

/// Every second replica is nearly out of blocks.
fn full(replicas: u32, requests: u32) -> (Router, Time) {
    let config = RouterConfig { policy: PolicyName::RoundRobin, bind_within: None, decisions_kept: 0, ..RouterConfig::default() };
    let mut router = Router::new(config, 1);
    let prompt = 512;
    let spec = |id: u32| ReplicaSpec {
        id: ReplicaId(id),
        incarnation: Incarnation(1),
        block_size: BlockSize::DEFAULT,
        kv_blocks: Blocks(requests * (prompt / 16 + 2) + if id.is_multiple_of(2) { 20 } else { 4000 }),
        max_model_len: Tokens(1 << 15),
        max_running: 256,
        discipline: Discipline::Chunked { budget: Tokens(2048) },
        step: reference_step(),
    };
    (0..replicas).for_each(|id| router.upsert_replica(spec(id), Time::ZERO));
    let root = KeyDomain { model: "", adapter: None, salt: None }.root();
    for request in 0..replicas * requests {
        let tokens: Vec<u32> = (0..prompt).map(|place| request << 10 | place).collect();
        let keys: Vec<BlockKey> = chain_keys(root, &tokens, BlockSize::DEFAULT);
        let id = RequestId(u64::from(request));
        let arrival = Arrival {
            request: id,
            keys: keys.into(),
            prompt: Tokens(prompt),
            max_output: None,
            session: None,
            program: None,
            share: None,
            priority: Priority(0),
            slo: Slo::default(),
            excluded: Vec::new(),
        };
        let now = Time(u64::from(request));
        router.place(arrival, now);
        router.first_token(id, None, now);
        router.output_tokens(id, 20, now);
    }
    (router, Time::from_ms(1000.0))
}
