//! Following one engine's KV events: a SUB socket for what comes, a DEALER for what was missed.

use std::{convert::Infallible, sync::Arc, time::Duration};

use baton_kv::Applied;
use baton_units::{Incarnation, ReplicaId};
use baton_wire::kv_events::{Message, decode, replay_request};
use bytes::Bytes;
use tokio::time::{Instant, sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

use crate::{config::EngineKind, engine::Engine, fleet::Fleet};

/// Longest wait for the next message of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// Before a broken subscription is made anew: at first, and at most.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(30);
/// A subscription that lasted this long broke of something new.
const LASTED: Duration = Duration::from_mins(1);
/// After subscribing: what was published before the subscription took effect is fetched once more.
const SETTLE: Duration = Duration::from_millis(300);

/// One life of one engine's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stream {
    life: Incarnation,
    address: Address,
    replay: Option<String>,
    topic: String,
}

/// Which side of the PUB-SUB pair binds.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Address {
    Connect(String),
    Bind(String),
}

#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Zmq(#[from] ZmqError),
    #[error("a replay without its next message for {REPLAY_TIMEOUT:?}")]
    ReplayTimeout,
}

impl Stream {
    /// The stream of an engine as it is known at the moment.
    pub(super) fn of(engine: &Engine, life: Incarnation) -> Option<Self> {
        let facts = engine.facts();
        let source = facts.kv_source.as_ref()?;
        let host = facts.url.host();
        // vLLM and SGLang connect to a concrete TCP host themselves, and expect the subscriber to bind it.
        let engine_dials = matches!(engine.config.kind, EngineKind::Vllm | EngineKind::Sglang) && engine.config.kv_events.is_none();
        Some(Self {
            life,
            address: address(&source.endpoint, host, engine_dials),
            replay: source.replay_endpoint.as_deref().map(|endpoint| reachable(endpoint, host)),
            topic: source.topic.clone(),
        })
    }
}

fn address(endpoint: &str, host: &str, engine_dials: bool) -> Address {
    let concrete = endpoint.starts_with("tcp://") && wildcard_port(endpoint).is_none();
    if engine_dials && concrete { Address::Bind(endpoint.to_owned()) } else { Address::Connect(reachable(endpoint, host)) }
}

/// An endpoint as seen from here: a wildcard is replaced by the engine's host.
fn reachable(endpoint: &str, host: &str) -> String {
    wildcard_port(endpoint).map_or_else(|| endpoint.to_owned(), |port| format!("tcp://{host}:{port}"))
}

/// Where the rank publishes of an engine whose first one does so here: vLLM and SGLang add the rank to the port.
pub(crate) fn of_rank(endpoint: &str, rank: u32) -> Option<String> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    let port = port.parse::<u16>().ok()?.checked_add(u16::try_from(rank).ok()?)?;
    Some(format!("tcp://{host}:{port}"))
}

fn wildcard_port(endpoint: &str) -> Option<&str> {
    let (host, port) = endpoint.strip_prefix("tcp://")?.rsplit_once(':')?;
    matches!(host, "*" | "0.0.0.0" | "[::]" | "::").then_some(port)
}

/// Keeps the index informed until the task is stopped.
pub(super) async fn follow(fleet: Arc<Fleet>, replica: ReplicaId, stream: Stream) {
    let follower = Follower { fleet, replica, stream };
    let mut failures = 0;
    loop {
        let began = Instant::now();
        let Err(error) = follower.subscribe_and_read().await;
        failures = if began.elapsed() < LASTED { failures + 1 } else { 1 };
        let pause = retry_pause(failures);
        tracing::warn!(%replica, %error, ?pause, "KV events interrupted");
        sleep(pause).await;
    }
}

/// What cannot be had is asked for, and complained of, ever less often.
fn retry_pause(failures: u32) -> Duration {
    RETRY_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY_PAUSE_MAX)
}

struct Follower {
    fleet: Arc<Fleet>,
    replica: ReplicaId,
    stream: Stream,
}

impl Follower {
    async fn subscribe_and_read(&self) -> Result<Infallible, StreamError> {
        let mut socket = SubSocket::new();
        socket.subscribe(&self.stream.topic).await?;
        match &self.stream.address {
            Address::Connect(endpoint) => socket.connect(endpoint).await?,
            Address::Bind(endpoint) => _ = socket.bind(endpoint).await?,
        }
        self.replay_from(self.known()).await;
        let mut settle = std::pin::pin!(sleep(SETTLE));
        let mut settled = false;
        loop {
            let message = tokio::select! {
                message = socket.recv() => message?,
                () = &mut settle, if !settled => {
                    settled = true;
                    self.replay_from(self.known()).await;
                    continue;
                }
            };
            if let Some(Applied::Gap { expected, .. }) = self.take(&message).await {
                self.replay_from(expected).await;
            }
        }
    }

    /// The last batch that the index took in, which proves that the stream is the one that it knows; 0 before any.
    fn known(&self) -> u64 {
        self.fleet.peek_router(|router, _| router.index().next_sequence(self.replica)).saturating_sub(1)
    }

    /// Takes in one message; `None` for one that is no batch.
    async fn take(&self, message: &ZmqMessage) -> Option<Applied> {
        let frames: Vec<&Bytes> = message.iter().collect();
        let decoded = Message::from_frames(&frames).and_then(|message| decode(message.sequence, message.payload));
        let decoded = match decoded {
            Ok(decoded) => decoded,
            Err(error) => {
                tracing::warn!(replica = %self.replica, %error, "unreadable KV event message");
                return None;
            }
        };
        let applied = self.fleet.kv_events(self.replica, self.stream.life, decoded.batch).await;
        self.fleet.metrics.kv_batch(self.replica, matches!(applied, Applied::Gap { .. }), decoded.skipped);
        Some(applied)
    }

    /// Fetches what was missed, or goes on without it where nobody has it.
    async fn replay_from(&self, start: u64) {
        let outcome = match &self.stream.replay {
            Some(endpoint) => self.replay(endpoint, start).await,
            None => Ok(()),
        };
        if let Err(error) = outcome {
            tracing::warn!(replica = %self.replica, %error, start, "KV events cannot be replayed");
        }
        // Whatever still waits for a predecessor waits in vain.
        self.fleet.skip_kv_gap(self.replica).await;
    }

    async fn replay(&self, endpoint: &str, start: u64) -> Result<(), StreamError> {
        let mut socket = DealerSocket::new();
        timeout(REPLAY_TIMEOUT, socket.connect(endpoint)).await.map_err(|_| StreamError::ReplayTimeout)??;
        let frames: Vec<Bytes> = replay_request(start).into_iter().map(Bytes::from).collect();
        let request = ZmqMessage::try_from(frames).expect("two frames are a message");
        timeout(REPLAY_TIMEOUT, socket.send(request)).await.map_err(|_| StreamError::ReplayTimeout)??;
        loop {
            let message = timeout(REPLAY_TIMEOUT, socket.recv()).await.map_err(|_| StreamError::ReplayTimeout)??;
            let frames: Vec<&Bytes> = message.iter().collect();
            if Message::from_frames(&frames).is_ok_and(|message| message.is_replay_end()) {
                return Ok(());
            }
            self.take(&message).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_cannot_be_had_is_tried_ever_less_often() {
        assert_eq!([1, 2, 3, 7, u32::MAX].map(|failures| retry_pause(failures).as_millis()), [500, 1000, 2000, 30_000, 30_000]);
    }

    #[test]
    fn the_side_that_binds_follows_vllms_rule() {
        let connect = |endpoint: &str| Address::Connect(endpoint.to_owned());
        assert_eq!(address("tcp://*:5557", "10.0.0.5", true), connect("tcp://10.0.0.5:5557"));
        assert_eq!(address("tcp://127.0.0.1:5560", "10.0.0.5", true), Address::Bind("tcp://127.0.0.1:5560".into()));
        assert_eq!(address("tcp://127.0.0.1:5560", "10.0.0.5", false), connect("tcp://127.0.0.1:5560"));
        assert_eq!(address("ipc://events.sock", "10.0.0.5", true), connect("ipc://events.sock"));
        assert_eq!(reachable("tcp://[::]:5558", "h"), "tcp://h:5558");
    }

    #[test]
    fn each_rank_publishes_at_a_port_of_its_own() {
        assert_eq!(of_rank("tcp://*:5557", 0).as_deref(), Some("tcp://*:5557"));
        assert_eq!(of_rank("tcp://[::1]:5557", 3).as_deref(), Some("tcp://[::1]:5560"));
        assert_eq!(["tcp://*:65535", "tcp://*", "ipc://events.sock"].map(|endpoint| of_rank(endpoint, 1)), [None, None, None]);
    }
}
