use std::time::Duration;

/// Why one attempt at a replica came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("the replica could not be reached")]
    Unreachable,
    /// The replica answered with an HTTP status that says it cannot serve at the moment.
    #[error("the replica answered with status {0}")]
    Status(u16),
    #[error("the replica gave no first token within {0:?}")]
    NoFirstToken(Duration),
    #[error("the replica gave nothing for {0:?}")]
    Stalled(Duration),
    /// An error object inside a stream that had begun with status 200; a `[DONE]` after it means nothing.
    #[error("the replica reported an error inside its stream")]
    InBand,
    /// The stream ended before every choice had finished.
    #[error("the replica's stream ended before its end")]
    Truncated,
    /// `finish_reason: "abort"` that nobody here asked for.
    #[error("the replica aborted the request")]
    Aborted,
    /// An index was skipped, or the stream could not be read.
    #[error("the replica's stream could not be understood")]
    Garbled,
}

impl Fault {
    /// Whether the replica itself is in doubt, so that new requests should avoid it until a probe succeeds. One that says it is
    /// too busy (429), that it lacks the model (404), or that it dropped the request (an operator may have asked for that), is alive.
    pub fn casts_doubt(self) -> bool {
        !matches!(self, Self::Status(404 | 429) | Self::Aborted | Self::Garbled)
    }
}
