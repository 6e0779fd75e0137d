//! KV events as vLLM and SGLang publish them over ZMQ: three frames (topic, sequence as u64 big-endian, msgpack payload).
//!
//! The payload is `[timestamp, [events], dp_rank]`. In vLLM 0.32 and SGLang 0.5.23 an event is a map with a `type`; in older vLLM it
//! is an array with the tag first. Both are read. What [`KvEvent`] cannot say (another memory tier than the GPU, a second KV group,
//! blocks whose content depends on an image) is left out and counted, so that no reader believes in a hit that would not come.

mod payload;

use baton_kv::{KvEvent, KvEventBatch};

/// Sequence of the message that ends a replay.
pub const REPLAY_END: u64 = u64::MAX;

/// How [`encode`] writes an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// A map with a `type`, as vLLM 0.32 and SGLang 0.5.23 do.
    Map,
    /// Fields by position after the tag, as vLLM up to 0.11 did.
    Positional,
}

/// A batch as far as [`KvEvent`] can say it.
#[derive(Debug, Clone, PartialEq)]
pub struct Decoded {
    pub batch: KvEventBatch,
    /// Events left out: of another memory tier, KV group or kind, or of blocks that tokens alone do not name.
    pub skipped: usize,
}

#[derive(Debug, thiserror::Error)]
pub enum KvEventError {
    #[error("a KV event message has {got} frames; expected topic, sequence and payload")]
    Frames { got: usize },
    #[error("the sequence frame of a KV event message has {got} bytes; expected 8")]
    Sequence { got: usize },
    #[error("the payload is not a KV event batch of vLLM or SGLang: {0}")]
    Payload(#[from] rmp_serde::decode::Error),
}

/// Reads the payload of one message.
pub fn decode(sequence: u64, payload: &[u8]) -> Result<Decoded, KvEventError> {
    let raw: payload::RawBatch = rmp_serde::from_slice(payload)?;
    let count = raw.events.len();
    let events: Vec<KvEvent> = raw.events.into_iter().filter_map(payload::RawEvent::into_event).collect();
    let skipped = count - events.len();
    Ok(Decoded { batch: KvEventBatch { sequence, timestamp_s: raw.timestamp_s, events, dp_rank: raw.dp_rank }, skipped })
}

/// Writes the payload of one message.
pub fn encode(batch: &KvEventBatch, form: Form) -> Vec<u8> {
    payload::encode(batch, form)
}

/// A message of the PUB socket, or one answer to a replay request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    pub topic: &'a [u8],
    pub sequence: u64,
    pub payload: &'a [u8],
}

impl<'a> Message<'a> {
    /// Reads the frames of a PUB message, or those of a replay answer with its empty first frame.
    pub fn from_frames<F: AsRef<[u8]>>(frames: &'a [F]) -> Result<Self, KvEventError> {
        let (topic, sequence, payload) = match frames {
            [topic, sequence, payload] => (topic, sequence, payload),
            [delimiter, topic, sequence, payload] if delimiter.as_ref().is_empty() => (topic, sequence, payload),
            _ => return Err(KvEventError::Frames { got: frames.len() }),
        };
        let (topic, sequence, payload) = (topic.as_ref(), sequence.as_ref(), payload.as_ref());
        let sequence = sequence.try_into().map(u64::from_be_bytes).map_err(|_| KvEventError::Sequence { got: sequence.len() })?;
        Ok(Self { topic, sequence, payload })
    }

    /// Frames of a PUB message.
    pub fn to_frames(&self) -> [Vec<u8>; 3] {
        [self.topic.to_vec(), self.sequence.to_be_bytes().to_vec(), self.payload.to_vec()]
    }

    /// Frames of an answer to a replay request, without the identity that a ROUTER socket puts before them.
    pub fn to_replay_frames(&self) -> [Vec<u8>; 4] {
        let [topic, sequence, payload] = self.to_frames();
        [Vec::new(), topic, sequence, payload]
    }

    /// The message after the last one of a replay.
    pub fn replay_end() -> Message<'static> {
        Message { topic: &[], sequence: REPLAY_END, payload: &[] }
    }

    pub fn is_replay_end(&self) -> bool {
        self.sequence == REPLAY_END && self.payload.is_empty()
    }
}

/// Frames that a DEALER socket sends to get every batch from `start` on. A start that the engine no longer holds is no error there:
/// check that the first answer has the sequence asked for.
pub fn replay_request(start: u64) -> [Vec<u8>; 2] {
    [Vec::new(), start.to_be_bytes().to_vec()]
}

/// First sequence that a replay request asks for, from its frames without the identity.
pub fn parse_replay_request<F: AsRef<[u8]>>(frames: &[F]) -> Result<u64, KvEventError> {
    let start = match frames {
        [delimiter, start] if delimiter.as_ref().is_empty() => start.as_ref(),
        _ => return Err(KvEventError::Frames { got: frames.len() }),
    };
    start.try_into().map(u64::from_be_bytes).map_err(|_| KvEventError::Sequence { got: start.len() })
}

#[cfg(test)]
mod tests;
