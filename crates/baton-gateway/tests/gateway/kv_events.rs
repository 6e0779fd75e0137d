//! KV events of a recorded vLLM session, over real ZMQ sockets.

use std::sync::Arc;

use baton_kv::{FleetIndex, KvEventBatch};
use baton_units::{Incarnation, ReplicaId, Time};
use baton_wire::kv_events::{Message, decode, parse_replay_request};
use bytes::Bytes;
use serde_json::json;
use tokio::{sync::watch, task::JoinHandle};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use crate::support::{FakeEngine, Front, config};

const RECORDED: &[u8] = include_bytes!("../fixtures/pub-int-hashes.bin");

/// Frames of each recorded message.
fn recorded() -> Vec<Vec<Bytes>> {
    fn word(bytes: &mut &[u8]) -> usize {
        let (word, rest) = bytes.split_first_chunk::<4>().unwrap();
        *bytes = rest;
        u32::from_be_bytes(*word) as usize
    }
    let mut bytes = RECORDED;
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let frames = word(&mut bytes);
        let mut message = Vec::new();
        for _ in 0..frames {
            let size = word(&mut bytes);
            let (frame, rest) = bytes.split_at(size);
            message.push(Bytes::from_static(frame));
            bytes = rest;
        }
        messages.push(message);
    }
    messages
}

fn batch(frames: &[Bytes]) -> KvEventBatch {
    let message = Message::from_frames(frames).unwrap();
    decode(message.sequence, message.payload).unwrap().batch
}

/// Blocks that an index holds after these messages in order.
fn blocks_after(messages: &[Vec<Bytes>]) -> usize {
    let mut index = FleetIndex::new("", std::time::Duration::from_secs(1), baton_units::Bytes(1 << 20));
    for message in messages {
        index.apply(ReplicaId(0), Incarnation(1), &batch(message), Time(1));
    }
    index.blocks_held(ReplicaId(0))
}

/// Answers replay requests with the first messages, as many as `published` says.
fn replayer(mut socket: RouterSocket, messages: Arc<Vec<Vec<Bytes>>>, published: watch::Receiver<usize>) -> JoinHandle<()> {
    tokio::spawn(async move {
        while let Ok(request) = socket.recv().await {
            let frames = request.into_vec();
            let start = parse_replay_request(&frames[1..]).unwrap();
            let known = *published.borrow();
            let end = Message::replay_end().to_frames().map(Bytes::from).to_vec();
            let held = messages.iter().take(known).filter(|frames| Message::from_frames(frames).unwrap().sequence >= start);
            for answer in held.chain([&end]) {
                let frames: Vec<Bytes> = [frames[0].clone(), Bytes::new()].into_iter().chain(answer.iter().cloned()).collect();
                socket.send(ZmqMessage::try_from(frames).unwrap()).await.unwrap();
            }
        }
    })
}

async fn indexed(front: &Front) -> serde_json::Value {
    front.get("/baton/v1/fleet").await.1["replicas"][0]["kv_blocks_indexed"].clone()
}

#[tokio::test]
async fn the_index_catches_up_by_replay_and_closes_gaps() {
    let messages = Arc::new(recorded());
    assert_eq!(messages.len(), 28);
    let mut publisher = PubSocket::new();
    let port = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string().rsplit(':').next().unwrap().to_owned();
    let mut router = RouterSocket::new();
    let replay = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    let (publish, published) = watch::channel(24);
    let replayer = replayer(router, messages.clone(), published);

    let engine = FakeEngine::start().await;
    let source =
        json!({ "enable_kv_cache_events": true, "endpoint": format!("tcp://*:{port}"), "replay_endpoint": replay, "topic": "kv@smollm2" });
    *engine.kv_sources.lock().unwrap() = json!({ "0": source }).to_string();
    let front = Front::with(config(&[&engine])).await;
    let first = blocks_after(&messages[..24]);
    assert!(first > 0);
    while indexed(&front).await != first {}

    // The last message alone arrives; those between have to be asked for. It is sent until the subscription has taken effect.
    publish.send(28).unwrap();
    let all = blocks_after(&messages);
    assert_ne!(first, all);
    let last = ZmqMessage::try_from(messages[27].clone()).unwrap();
    while indexed(&front).await != all {
        publisher.send(last.clone()).await.unwrap();
    }
    assert_eq!(front.get("/baton/v1/fleet").await.1["replicas"][0]["index_doubtful"], false);
    replayer.abort();
}
