use baton_migration::Entry;
use serde::{Deserialize, Serialize};

/// What stands at one output index.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum OutputEntry {
    #[serde(rename = "t")]
    Token { id: u32, logprobs: Option<TokenLogprobs> },
    #[serde(rename = "f")]
    Finish(FinishReason),
}

/// Natural logarithms of probabilities, where the request asked for them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    pub chosen: f32,
    /// The most likely tokens, likeliest first.
    pub top: Vec<(u32, f32)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// The model's end-of-sequence token.
    #[serde(rename = "eos")]
    EndOfSequence,
    /// One of the request's stop tokens.
    #[serde(rename = "stop")]
    StopToken(u32),
    /// `max_tokens`, or the longest sequence that the replica holds.
    #[serde(rename = "length")]
    Length,
}

/// By what the client sees at the index; log-probabilities come beside it.
impl PartialEq for OutputEntry {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Token { id, .. }, Self::Token { id: other, .. }) => id == other,
            (Self::Finish(reason), Self::Finish(other)) => reason == other,
            _ => false,
        }
    }
}

impl Entry for OutputEntry {
    fn is_finish(&self) -> bool {
        matches!(self, Self::Finish(_))
    }
}
