use std::time::Duration;

use baton_kv::{BlockId, BlockKey, OutOfBlocks};
use baton_units::{Blocks, RequestId, Tokens};
use serde::{Deserialize, Serialize};

use crate::{FinishReason, NewRequest, SequenceId, SubmitError};

/// All that an engine needs to go on with a sequence of another engine; with equal [`Numerics`](crate::Numerics), which the owners of
/// both compare, it goes on with the same tokens and log-probabilities. Its KV travels apart, or is computed anew from the tokens.
///
/// All that a sequence of this engine can be is in it: draws are keyed by the request's seed and indices, penalties are rebuilt from
/// the tokens, and lengths count from the first output token. What the engine does not know (stop strings, text, deadlines, tenants,
/// who may use an adapter) is its owner's to move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SequenceState {
    /// The sequence as a request of its own. Its first choice is the sequence's; there are more only as long as those are to be made
    /// from it. Without a seed one is drawn, which is exact only if nothing was drawn before.
    pub request: NewRequest,
    /// Output so far.
    pub output: Vec<u32>,
    /// The model as the fleet names it: [`EngineConfig::model`](crate::EngineConfig::model).
    pub model: String,
    /// What ends the output besides the request's own parameters; `None` leaves it to the engine that goes on.
    pub ends: Option<OutputEnds>,
    /// Leading tokens whose KV exists: 0 while it waits, all but the last while it decodes.
    pub computed: Tokens,
    pub history: History,
}

/// What ends an output besides the request's own parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputEnds {
    /// The model's end-of-sequence tokens, ascending.
    pub eos: Vec<u32>,
    /// Prompt and output tokens that the sequence reaches at most, by the request's `max_tokens` and by the lengths of the engines that
    /// it was in.
    pub length_limit: Tokens,
}

/// What a sequence went through, for its record and its place among others. Spans are from then until the state was taken, since
/// engines share no clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// Since its request arrived, which decides its place.
    pub age: Duration,
    pub since_first_scheduled: Option<Duration>,
    pub since_first_token: Option<Duration>,
    /// Prompt tokens found in the prefix cache when it was first admitted.
    pub cached: Option<Tokens>,
    /// A later choice of a request, whose prompt its first choice computed.
    pub forked: bool,
    pub preemptions: u32,
}

impl History {
    /// As of so much later.
    #[must_use]
    pub fn aged(self, span: Duration) -> Self {
        Self {
            age: self.age + span,
            since_first_scheduled: self.since_first_scheduled.map(|since| since + span),
            since_first_token: self.since_first_token.map(|since| since + span),
            ..self
        }
    }
}

impl SequenceState {
    /// A request that goes on after the output that its client has, wherever that came from. A seed that was drawn for it must be in
    /// the request; the history is that of a request that just came.
    pub fn restart(request: NewRequest, output: Vec<u32>, model: &str) -> Self {
        let (model, history) = (model.to_owned(), History::default());
        Self { request, output, model, ends: None, computed: Tokens::ZERO, history }
    }

    /// Prompt, then output.
    pub fn tokens(&self) -> Vec<u32> {
        [&self.request.prompt[..], &self.output].concat()
    }

    /// Count of the [`tokens`](Self::tokens).
    pub fn total(&self) -> Tokens {
        Tokens((self.request.prompt.len() + self.output.len()) as u32)
    }

    /// What cannot be so in any engine.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        let several = self.request.choices > 1;
        match () {
            () if self.computed >= self.total() => Some("the KV of the last token is never computed before the next one is drawn"),
            () if several && !self.output.is_empty() => Some("choices are made with the first output token, so output is of one choice"),
            () if several && self.history.forked => Some("a choice that was made from another one makes none"),
            () => None,
        }
    }
}

/// Where a sequence stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Has no KV: not admitted yet, or preempted. Moves by its tokens alone.
    Waiting,
    /// Has KV of a part of its known tokens.
    Prefilling,
    /// Has KV of all but the last token.
    Decoding,
}

/// A sequence of an engine, as of the last step that was booked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceView<'a> {
    pub id: SequenceId,
    pub request: RequestId,
    pub choice: u32,
    pub phase: Phase,
    pub frozen: bool,
    /// Tokens of prompt and output.
    pub total: Tokens,
    /// Leading tokens whose KV exists.
    pub computed: Tokens,
    /// Where the KV of the computed tokens lies: position `p` in `blocks[p / block_size]`. The full ones neither move nor change while
    /// the sequence runs, so they can be copied; a partly filled one is written until the sequence is frozen. A preemption takes all of
    /// them: what was copied before stays right, as KV depends on the tokens alone, but what is missing lies elsewhere, if anywhere.
    pub blocks: &'a [BlockId],
    /// Keys of the full ones of `blocks`.
    pub keys: &'a [BlockKey],
    /// How often its blocks were taken from it: whoever copies them compares it before each round.
    pub preemptions: u32,
}

/// Blocks that a target holds for a sequence to come. Never used twice in one engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PreparedId(pub u64);

/// A prefix by itself: all that decides the KV of its full blocks, and no request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prefix {
    /// The model as the fleet names it: [`EngineConfig::model`](crate::EngineConfig::model).
    pub model: String,
    /// From the first on; those behind the last full block count for nothing.
    pub tokens: Vec<u32>,
    pub adapter: Option<String>,
    pub salt: Option<String>,
    /// As in a [request](NewRequest::public).
    pub public: Tokens,
}

/// What a target has prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreparedView<'a> {
    pub id: PreparedId,
    /// The sequence's; `None` of a prefix, which takes no place among those that run.
    pub request: Option<RequestId>,
    /// Leading blocks whose KV was here already; others share them, so they must not be written.
    pub held: Blocks,
    /// Where each block is to lie, in order of position, the held ones included.
    pub blocks: &'a [BlockId],
}

/// Why an engine does not take a sequence in. Nothing has changed then.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MoveRefusal {
    #[error("the sequence is of model \"{source_model}\", this engine runs \"{target_model}\"")]
    Model { source_model: String, target_model: String },
    #[error("outputs end with tokens {source_eos:?} at the source and with {target_eos:?} here; the stream might end elsewhere")]
    Eos { source_eos: Vec<u32>, target_eos: Vec<u32> },
    #[error("the sequence may reach {needed}, and at most {limit} are held here")]
    TooLong { needed: Tokens, limit: Tokens },
    /// With the reason of its end.
    #[error("the output is complete; nothing is left to compute")]
    Complete(FinishReason),
    #[error("the state contradicts itself: {0}")]
    Contradiction(&'static str),
    #[error("{limit} sequences run, are frozen or are prepared for, which is the most that may; retry later")]
    NoPlace { limit: u32 },
    #[error(transparent)]
    NoRoom(#[from] OutOfBlocks),
    #[error("nothing is prepared as {}", .0.0)]
    NotPrepared(PreparedId),
    #[error("the first {held} are not those that were prepared for")]
    OtherTokens { held: Tokens },
    #[error("{computed} have KV, and room was made for {room}; make room for the rest and copy it first")]
    Incomplete { computed: Tokens, room: Tokens },
    /// As a request it would be refused too.
    #[error(transparent)]
    Request(#[from] SubmitError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_grow_while_a_state_travels_and_what_has_not_happened_has_none() {
        let second = Duration::from_secs(1);
        let history =
            History { age: 3 * second, since_first_scheduled: Some(second), cached: Some(Tokens(5)), preemptions: 2, ..History::default() };
        let later = History { age: 5 * second, since_first_scheduled: Some(3 * second), ..history };
        assert_eq!(history.aged(2 * second), later);
        assert_eq!(history.aged(second).aged(second), later);
    }
}
