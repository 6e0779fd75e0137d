use serde::{Deserialize, Serialize};

use super::{
    FrameError,
    body::{body, read},
};

/// What to run: all that a replica must know of a request besides its output, as it travels with a start and in a plan.
///
/// A `MessagePack` map by the names of the fields; what is left out has its default. A sequence of its own: one prompt, one choice.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunRequest {
    /// As the fleet names it; a replica runs no other.
    pub model: String,
    pub prompt: Vec<u32>,
    #[serde(default)]
    pub sampling: RunSampling,
    /// Keys the random draws with the indices below; drawn by whoever admits the request, so that it is the same wherever it runs.
    pub seed: u64,
    #[serde(default)]
    pub prompt_index: u32,
    #[serde(default)]
    pub choice_index: u32,
    #[serde(default)]
    pub priority: i32,
    #[serde(default)]
    pub adapter: Option<String>,
    /// Only requests of the same salt share cached prefixes.
    #[serde(default)]
    pub salt: Option<String>,
    /// Leading tokens of the prompt that are no secret: the salt counts from the first block on that is not wholly of them.
    #[serde(default)]
    pub public: u32,
    /// What ended the output at the replica that it was at; none leaves it to the one that goes on.
    #[serde(default)]
    pub ends: Option<RunEnds>,
    #[serde(default)]
    pub progress: RunProgress,
}

/// How tokens are drawn and when an output ends, in the OpenAI API's words; the defaults are neutral.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunSampling {
    pub temperature: f32,
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub logit_bias: Vec<(u32, f32)>,
    pub stop_token_ids: Vec<u32>,
    pub ignore_eos: bool,
    /// Counts, as `max_tokens`, from the first output token, wherever it was computed.
    pub min_tokens: u32,
    pub max_tokens: Option<u32>,
    pub logprobs: Option<u32>,
}

impl Default for RunSampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            min_tokens: 0,
            max_tokens: None,
            logprobs: None,
        }
    }
}

/// What ends an output besides its request's own parameters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunEnds {
    /// The model's end-of-sequence tokens, ascending.
    pub eos: Vec<u32>,
    /// Prompt and output tokens at most.
    pub length_limit: u32,
}

/// How far it has come, in a plan: its KV, and its life for its record and its place among others. Spans are until the plan was made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunProgress {
    /// Leading tokens of prompt and output whose KV exists at the source.
    pub computed: u32,
    /// Since it arrived.
    pub age_us: u64,
    pub since_first_scheduled_us: Option<u64>,
    pub since_first_token_us: Option<u64>,
    /// Prompt tokens found in the prefix cache when it was first admitted.
    pub cached: Option<u32>,
    pub preemptions: u32,
}

impl RunRequest {
    pub fn to_bytes(&self) -> Vec<u8> {
        rmp_serde::to_vec_named(self).expect("plain values serialize")
    }

    /// # Errors
    /// With what cannot be read, in words.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        rmp_serde::from_slice(bytes).map_err(|error| error.to_string())
    }
}

/// What a source is told with the order to move: where the target takes KV, and what it showed it by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveTo {
    /// `host:port`.
    pub kv_address: String,
    /// As the target was told with the announcement of the attempt.
    pub nonce: [u8; 16],
}

impl MoveTo {
    pub fn to_bytes(&self) -> Vec<u8> {
        body(self)
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, FrameError> {
        read(super::control::MOVE_KIND, bytes)
    }
}
