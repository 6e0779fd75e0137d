//! OpenAI's HTTP API in the shape that a vLLM server gives it: field names, their order, which are null and which are left out are
//! those of vLLM 0.32, so that a client or router written for vLLM sees no difference.

mod chunk;
mod error;
mod logprobs;
mod models;
mod request;
mod response;
mod tokenize;
mod usage;

pub use chunk::{ChatChunk, ChatChunkChoice, CompletionChunk, CompletionChunkChoice, Delta, FunctionDelta, ToolCallDelta};
pub use error::{ErrorBody, ErrorResponse, parse};
pub use logprobs::{ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob, prompt_logprobs};
pub use models::{ModelCard, ModelList, ModelPermission};
pub use request::{ChatRequest, CompletionRequest, Prompt, PublicTokens, Sampling, Stop, StreamOptions};
pub use response::{ChatChoice, ChatCompletion, Completion, CompletionChoice, FinishReason, FunctionCall, Message, ToolCall};
pub use tokenize::{DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse};
pub use usage::{PromptTokensDetails, Usage};

use serde::{Deserialize, Deserializer};

/// What every object of one answer begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Head {
    /// `chatcmpl-…` or `cmpl-…`.
    pub id: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub model: String,
    /// Names the build of the server; vLLM sends it with the last chunk only.
    pub system_fingerprint: Option<String>,
}

/// A field that vLLM leaves out in some places and sends as null in others: `None` is left out, `Some(None)` is null.
pub type Omittable<T> = Option<Option<T>>;

/// Keeps an explicit null apart from a field that is not there.
#[allow(clippy::option_option, reason = "serde's way to tell null from absent")]
fn omittable<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Omittable<T>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests;
