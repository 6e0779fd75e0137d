//! KV events as a router takes them: subscribed to, and replayed.

use std::time::Duration;

use crate::support::{Replica, config};
use baton_kv::{KvEvent, KvEventBatch};
use baton_wire::kv_events::{Message, decode, replay_request};
use bytes::Bytes;
use serde_json::json;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

async fn receive(socket: &mut impl SocketRecv) -> Vec<Bytes> {
    tokio::time::timeout(Duration::from_mins(1), socket.recv()).await.expect("a message comes").unwrap().into_vec()
}

/// Everything that the replica holds from `start` on.
async fn replayed(endpoint: &str, start: u64) -> Vec<KvEventBatch> {
    let mut dealer = DealerSocket::new();
    dealer.connect(endpoint).await.unwrap();
    let frames: Vec<Bytes> = replay_request(start).into_iter().map(Bytes::from).collect();
    dealer.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let frames = receive(&mut dealer).await;
        assert_eq!((frames.len(), frames[0].len()), (4, 0));
        let message = Message::from_frames(&frames).unwrap();
        if message.is_replay_end() {
            assert!(message.topic.is_empty());
            return batches;
        }
        assert!(message.topic.is_empty());
        let decoded = decode(message.sequence, message.payload).unwrap();
        assert_eq!(decoded.skipped, 0);
        batches.push(decoded.batch);
    }
}

/// Blocks of 32 tokens that a batch stores.
fn stored(batch: &KvEventBatch) -> Vec<Vec<u32>> {
    let blocks = batch.events.iter().filter_map(|event| match event {
        KvEvent::Stored { tokens, .. } => Some(tokens.chunks(32).map(<[u32]>::to_vec)),
        KvEvent::Removed { .. } | KvEvent::Cleared => None,
    });
    blocks.flatten().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_published_in_sequence_and_can_be_replayed() {
    let replica = Replica::start(config()).await;
    let source = replica.report().await.kv_events.unwrap();
    let mut subscriber = SubSocket::new();
    subscriber.connect(&source.endpoint).await.unwrap();
    subscriber.subscribe("").await.unwrap();
    let prompt: Vec<u32> = (0..100).collect();
    let body = json!({ "prompt": prompt, "max_tokens": 60, "temperature": 0, "return_token_ids": true });
    let answer = replica.post("/v1/completions", &body).await.json();
    let output: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();

    let endpoint = source.replay_endpoint.unwrap();
    let batches = replayed(&endpoint, 0).await;
    let sequences: Vec<u64> = batches.iter().map(|batch| batch.sequence).collect();
    assert_eq!(sequences, (0..batches.len() as u64).collect::<Vec<_>>());
    // Prompt and output blocks as they fill up; the last token drawn has no KV.
    let all = [&prompt[..], &output[..59]].concat();
    let blocks: Vec<Vec<u32>> = batches.iter().flat_map(stored).collect();
    assert_eq!(blocks, all.chunks_exact(32).map(<[u32]>::to_vec).collect::<Vec<_>>());

    assert_eq!(replayed(&endpoint, 1).await, batches[1..]);
    assert_eq!(replayed(&endpoint, 1000).await, []);

    // A subscriber may join late but then misses nothing: what comes next is the next sequence.
    replica.post("/reset_prefix_cache", &json!({})).await;
    let mut last = None;
    let cleared = loop {
        let frames = receive(&mut subscriber).await;
        let message = Message::from_frames(&frames).unwrap();
        assert!(last.is_none_or(|last| message.sequence == last + 1));
        last = Some(message.sequence);
        let batch = decode(message.sequence, message.payload).unwrap().batch;
        if batch.events.contains(&KvEvent::Cleared) {
            break batch;
        }
    };
    assert_eq!(replayed(&endpoint, cleared.sequence).await, [cleared]);
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_source_is_told_as_by_a_vllm_that_binds_it() {
    let replica = Replica::start(config()).await;
    let told = replica.get("/kv_event_sources").await.json()["0"]["endpoint"].as_str().unwrap().to_owned();
    let bound = replica.report().await.kv_events.unwrap().endpoint;
    assert_eq!(told.strip_prefix("tcp://*:"), bound.strip_prefix("tcp://127.0.0.1:"));
    replica.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_without_events_names_no_source() {
    let mut config = config();
    config.kv_events = None;
    let replica = Replica::start(config).await;
    assert_eq!(replica.get("/kv_event_sources").await.json(), json!({}));
    assert_eq!(replica.report().await.kv_events, None);
    replica.stop().await.unwrap();
}
