//! KV events over ZMQ: a PUB socket for what happens, a ROUTER socket for what a subscriber missed.

use std::{
    collections::VecDeque,
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use baton_kv::{KvEvent, KvEventBatch};
use baton_wire::{
    kv_events::{Form, Message, encode, parse_replay_request},
    replica::KvEventSource,
};
use bytes::Bytes;
use tokio::{sync::mpsc, task::JoinSet};
use zeromq::{PubSocket, RouterSendHalf, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use crate::KvEventsConfig;

/// Batches kept for replay; vLLM's `buffer_steps`.
pub(crate) const REPLAY_BATCHES: usize = 10_000;
/// Batches on their way from the engine thread; it waits when they are this many, which needs a publisher that hangs.
const QUEUED_BATCHES: usize = 1024;
/// Replays answered at once; a request beyond them waits.
const REPLAYS: usize = 8;
/// A peer that takes no answer for this long loses the rest of its replay.
const REPLAY_PATIENCE: Duration = Duration::from_secs(10);

/// Events of one step, with the engine's clock in seconds since 1970.
pub(crate) struct StepEvents {
    pub(crate) timestamp_s: f64,
    pub(crate) events: Vec<KvEvent>,
}

/// The running publisher: where it is, and its way in. Its tasks end when it is dropped.
pub(crate) struct KvPublisher {
    pub(crate) source: KvEventSource,
    pub(crate) sender: mpsc::Sender<StepEvents>,
    _tasks: JoinSet<()>,
}

impl KvPublisher {
    /// Binds both sockets and begins to publish from sequence 0.
    pub(crate) async fn start(config: &KvEventsConfig) -> Result<Self, ZmqError> {
        let mut publisher = PubSocket::new();
        let endpoint = publisher.bind(&address(config.host, config.port)).await?.to_string();
        let mut replayer = RouterSocket::new();
        let replay_endpoint = Some(replayer.bind(&address(config.host, config.replay_port)).await?.to_string());
        let (sender, receiver) = mpsc::channel(QUEUED_BATCHES);
        let ring = Arc::new(Mutex::new(Ring::default()));
        let topic = Bytes::from(config.topic.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(publish(publisher, topic.clone(), Arc::clone(&ring), receiver));
        tasks.spawn(replay(replayer, topic, ring));
        let source = KvEventSource { endpoint, replay_endpoint, topic: config.topic.clone() };
        Ok(Self { source, sender, _tasks: tasks })
    }
}

fn address(host: IpAddr, port: u16) -> String {
    match host {
        IpAddr::V4(host) => format!("tcp://{host}:{port}"),
        IpAddr::V6(host) => format!("tcp://[{host}]:{port}"),
    }
}

/// The last payloads, oldest first.
#[derive(Debug, Default)]
struct Ring {
    /// Sequence of the oldest.
    first: u64,
    payloads: VecDeque<Bytes>,
}

impl Ring {
    fn next_sequence(&self) -> u64 {
        self.first + self.payloads.len() as u64
    }

    fn push(&mut self, payload: Bytes) {
        if self.payloads.len() == REPLAY_BATCHES {
            self.payloads.pop_front();
            self.first += 1;
        }
        self.payloads.push_back(payload);
    }

    /// What is held from `start` on, with sequences.
    fn from(&self, start: u64) -> Vec<(u64, Bytes)> {
        let skip = usize::try_from(start.saturating_sub(self.first)).unwrap_or(usize::MAX);
        (self.first..).zip(&self.payloads).skip(skip).map(|(sequence, payload)| (sequence, payload.clone())).collect()
    }
}

async fn publish(mut socket: PubSocket, topic: Bytes, ring: Arc<Mutex<Ring>>, mut steps: mpsc::Receiver<StepEvents>) {
    while let Some(StepEvents { timestamp_s, events }) = steps.recv().await {
        let (sequence, payload) = {
            let mut ring = ring.lock().expect("no holder panics");
            let sequence = ring.next_sequence();
            let payload = Bytes::from(encode(&KvEventBatch { sequence, timestamp_s, events, dp_rank: Some(0) }, Form::Map));
            // First into the ring: whoever sees a gap in what was published can ask for it at once.
            ring.push(payload.clone());
            (sequence, payload)
        };
        if let Err(error) = socket.send(message([topic.clone(), Bytes::copy_from_slice(&sequence.to_be_bytes()), payload])).await {
            tracing::warn!(%error, sequence, "a batch of KV events was not published; subscribers can have it replayed");
        }
    }
}

async fn replay(socket: RouterSocket, topic: Bytes, ring: Arc<Mutex<Ring>>) {
    let (sender, mut receiver) = socket.split();
    let mut replays = JoinSet::new();
    loop {
        let frames = match receiver.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::warn!(%error, "the replay socket failed; KV events are published without replay from here on");
                return;
            }
        };
        let Some((peer, request)) = frames.split_first() else { continue };
        let start = match parse_replay_request(request) {
            Ok(start) => start,
            Err(error) => {
                tracing::warn!(%error, "a replay request is malformed and gets no answer");
                continue;
            }
        };
        if replays.len() >= REPLAYS {
            replays.join_next().await;
        }
        let batches = ring.lock().expect("no holder panics").from(start);
        tracing::debug!(start, batches = batches.len(), "replaying KV events");
        replays.spawn(answer(sender.clone(), peer.clone(), topic.clone(), batches));
        while replays.try_join_next().is_some() {}
    }
}

async fn answer(mut sender: RouterSendHalf, peer: Bytes, topic: Bytes, batches: Vec<(u64, Bytes)>) {
    let count = batches.len();
    let end = Message::replay_end();
    let frames = batches.into_iter().map(|(sequence, payload)| (topic.clone(), sequence, payload));
    for (sent, (topic, sequence, payload)) in frames.chain([(Bytes::new(), end.sequence, Bytes::new())]).enumerate() {
        let sequence = Bytes::copy_from_slice(&sequence.to_be_bytes());
        let answer = message([peer.clone(), Bytes::new(), topic, sequence, payload]);
        match tokio::time::timeout(REPLAY_PATIENCE, sender.send(answer)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return tracing::debug!(%error, sent, count, "the peer left during its replay"),
            Err(_) => return tracing::warn!(sent, count, "a peer stopped reading its replay"),
        }
    }
}

fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    Vec::from(frames).try_into().expect("a message has frames")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_last_batches_under_their_sequences() {
        let mut ring = Ring::default();
        for batch in 0..REPLAY_BATCHES + 5 {
            assert_eq!(ring.next_sequence(), batch as u64);
            ring.push(Bytes::from(batch.to_string()));
        }
        let held = ring.from(0);
        assert_eq!((held.len(), held[0].0), (REPLAY_BATCHES, 5));
        assert!(held.iter().all(|(sequence, payload)| *payload == sequence.to_string().as_bytes()));
        assert_eq!(ring.from(REPLAY_BATCHES as u64 + 4).len(), 1);
        assert!(ring.from(1 << 40).is_empty());
    }
}
