//! The index against a captured session of a vLLM 0.32 server (SmolLM2-135M, 128 blocks of 32 tokens).

#![allow(clippy::unwrap_used, reason = "a malformed fixture should stop the test")]
use std::{collections::BTreeMap, time::Duration};

use baton_kv::{Applied, BlockKey, EngineHash, FleetIndex, KeyDomain, KvEvent, KvEventBatch, chain_keys};
use baton_units::{BlockSize, Bytes, Incarnation, ReplicaId, Time};
use serde_json::Value;

const REPLICA: ReplicaId = ReplicaId(2);
const LIFE: Incarnation = Incarnation(1);

fn session() -> Vec<KvEventBatch> {
    include_str!("fixtures/vllm-kv-events.jsonl").lines().map(|line| batch(&serde_json::from_str(line).unwrap())).collect()
}

fn batch(line: &Value) -> KvEventBatch {
    let [timestamp, events, _] = line["batch"].as_array().unwrap().as_slice() else { panic!("three fields") };
    KvEventBatch {
        sequence: line["seq"].as_u64().unwrap(),
        timestamp_s: timestamp.as_f64().unwrap(),
        events: events.as_array().unwrap().iter().map(event).collect(),
        dp_rank: Some(0),
    }
}

fn event(event: &Value) -> KvEvent {
    let hashes = || event["block_hashes"].as_array().unwrap().iter().map(|hash| EngineHash(hash.as_u64().unwrap())).collect();
    match event["type"].as_str().unwrap() {
        "BlockStored" => {
            let adapter = event["lora_name"].as_str().map(str::to_owned);
            let salt = event["extra_keys"][0][0].as_str().filter(|_| adapter.is_none()).map(str::to_owned);
            let tokens = event["token_ids"].as_array().unwrap().iter().map(|token| token.as_u64().unwrap() as u32).collect();
            KvEvent::Stored {
                hashes: hashes(),
                parent: event["parent_block_hash"].as_u64().map(EngineHash),
                tokens,
                block_size: BlockSize::new(event["block_size"].as_u64().unwrap() as u32).unwrap(),
                adapter,
                salt,
            }
        }
        "BlockRemoved" => KvEvent::Removed { hashes: hashes() },
        "AllBlocksCleared" => KvEvent::Cleared,
        other => panic!("unknown event {other}"),
    }
}

fn index() -> FleetIndex {
    FleetIndex::new("smollm2-135m", Duration::from_mins(2), Bytes(1 << 20))
}

/// Keys of the tokens that a batch's first event stored, from the chain's start.
fn keys_stored(batch: &KvEventBatch, salt: Option<&str>) -> Vec<BlockKey> {
    let KvEvent::Stored { tokens, block_size, .. } = &batch.events[0] else { panic!("no Stored") };
    chain_keys(KeyDomain { model: "smollm2-135m", adapter: None, salt }.root(), tokens, *block_size)
}

#[test]
fn every_batch_leaves_as_many_blocks_as_the_engine_counts() {
    let mut index = index();
    let mut copies: BTreeMap<EngineHash, u32> = BTreeMap::new();
    for batch in session() {
        assert_eq!(index.apply(REPLICA, LIFE, &batch, Time::ZERO), Applied::Ok, "batch {}", batch.sequence);
        for event in &batch.events {
            match event {
                KvEvent::Stored { hashes, .. } => hashes.iter().for_each(|hash| *copies.entry(*hash).or_default() += 1),
                KvEvent::Removed { hashes } => hashes.iter().for_each(|hash| *copies.get_mut(hash).unwrap() -= 1),
                KvEvent::Cleared => copies.clear(),
            }
        }
        let stored = copies.values().filter(|copies| **copies > 0).count();
        assert_eq!(index.blocks_held(REPLICA), stored, "batch {}", batch.sequence);
        assert_eq!(index.orphans(REPLICA), 0);
    }
    assert_eq!(index.blocks_held(REPLICA), 6);
}

#[test]
fn a_hash_stored_three_times_is_gone_only_after_three_removals() {
    let mut index = index();
    let session = session();
    let chain = {
        let (KvEvent::Stored { tokens: first, block_size, .. }, KvEvent::Stored { tokens: second, .. }) =
            (&session[4].events[0], &session[5].events[0])
        else {
            panic!("no Stored")
        };
        let root = KeyDomain { model: "smollm2-135m", adapter: None, salt: None }.root();
        chain_keys(root, &[first.as_slice(), second].concat(), *block_size)
    };
    for batch in &session[..24] {
        index.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    // Batch 23 removed two of three copies.
    assert_eq!(index.matches(&chain), [0, 0, 2]);
    index.apply(REPLICA, LIFE, &session[24], Time::ZERO);
    assert_eq!(index.matches(&chain), [0, 0, 0]);
}

#[test]
fn salted_blocks_are_found_only_with_their_salt() {
    let mut index = index();
    let session = session();
    for batch in &session[..8] {
        index.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    // The same tokens were stored in the public domain before, where the tenant must not find them.
    let (public, salted) = (keys_stored(&session[8], None), keys_stored(&session[8], Some("tenant-a")));
    assert_eq!((index.matches(&public), index.matches(&salted)), (vec![0, 0, 1], vec![0, 0, 0]));
    index.apply(REPLICA, LIFE, &session[8], Time::ZERO);
    assert_eq!(index.matches(&salted), [0, 0, 1]);
}

#[test]
fn a_late_clear_drops_what_came_before_and_keeps_what_follows_in_its_batch() {
    let mut index = index();
    let session = session();
    for batch in &session[..27] {
        index.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    assert_eq!(index.blocks_held(REPLICA), 2);
    assert_eq!(index.matches(&keys_stored(&session[0], None)), [0, 0, 2]);
}

#[test]
fn a_sequence_from_zero_without_a_marker_is_a_restart() {
    let mut index = index();
    let session = session();
    for batch in &session[..20] {
        index.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    assert_eq!(index.apply(REPLICA, LIFE, &session[3], Time::ZERO), Applied::Ignored, "a replayed batch has its old time");
    let restart = KvEventBatch { sequence: 0, timestamp_s: session[19].timestamp_s + 60.0, ..session[3].clone() };
    assert_eq!(index.apply(REPLICA, LIFE, &restart, Time::ZERO), Applied::Restarted);
    assert_eq!(index.blocks_held(REPLICA), 1);
}

#[test]
fn a_gap_is_doubtful_until_the_missing_batches_are_replayed() {
    let (mut whole, mut repaired) = (index(), index());
    let session = session();
    for batch in &session {
        whole.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    for batch in &session[..5] {
        repaired.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    for batch in &session[8..] {
        let got = batch.sequence;
        assert_eq!(repaired.apply(REPLICA, LIFE, batch, Time::ZERO), Applied::Gap { expected: 5, got });
    }
    assert!(repaired.doubtful(REPLICA));
    for batch in &session[5..8] {
        repaired.apply(REPLICA, LIFE, batch, Time::ZERO);
    }
    assert!(!repaired.doubtful(REPLICA));
    assert_eq!(repaired.blocks_held(REPLICA), whole.blocks_held(REPLICA));
    assert_eq!(repaired.len(), whole.len());
}

#[test]
fn a_gap_given_up_stays_doubtful_until_the_cache_is_cleared() {
    let mut index = index();
    let session = session();
    index.apply(REPLICA, LIFE, &session[1], Time::ZERO);
    index.skip_gap(REPLICA, Time::ZERO);
    assert!(index.doubtful(REPLICA) && index.orphans(REPLICA) == 1, "its parent was in the missing batch");
    for batch in &session[2..26] {
        assert_eq!(index.apply(REPLICA, LIFE, batch, Time::ZERO), Applied::Ok);
    }
    assert!(index.doubtful(REPLICA));
    index.apply(REPLICA, LIFE, &session[26], Time::ZERO);
    assert!(!index.doubtful(REPLICA));
}
