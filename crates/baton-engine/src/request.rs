use baton_units::{Priority, RequestId, Time, Tokens};
use serde::{Deserialize, Serialize};

use crate::{SamplingError, SamplingParams};

/// A request as it is submitted: one prompt, one or more choices.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NewRequest {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    /// Outputs to make; they share the prompt's KV.
    pub choices: u32,
    /// `None`: drawn at admission.
    pub seed: Option<u64>,
    /// Which prompt of its client's request this is, and the index of the first choice; they key the random draws.
    pub prompt_index: u32,
    pub first_choice: u32,
    pub priority: Priority,
    pub adapter: Option<String>,
    /// Only requests of the same salt share cached prefixes.
    pub salt: Option<String>,
    /// Leading tokens of the prompt that are no secret: the salt counts from the first block on that is not wholly of them.
    pub public: Tokens,
}

impl NewRequest {
    /// One choice of the base model in the public domain, with a seed drawn at admission.
    pub fn new(id: RequestId, prompt: Vec<u32>, params: SamplingParams) -> Self {
        Self {
            id,
            prompt,
            params,
            choices: 1,
            seed: None,
            prompt_index: 0,
            first_choice: 0,
            priority: Priority::default(),
            adapter: None,
            salt: None,
            public: Tokens::ZERO,
        }
    }
}

/// Why a request was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    #[error("the number of choices is 0; ask for at least 1")]
    NoChoices,
    /// The prompt and one output token exceed the model's length or the whole KV pool.
    #[error("the prompt has {prompt}, and at most {fits} fit beside the first output token; shorten the prompt")]
    NeverFits { prompt: Tokens, fits: Tokens },
    #[error("token {token} is outside the vocabulary of {size} tokens")]
    OutOfVocabulary { token: u32, size: u32 },
    #[error("request {0} is here already")]
    Duplicate(RequestId),
    #[error("{limit} requests are waiting, which is the most that may; retry later")]
    QueueFull { limit: u32 },
    #[error(transparent)]
    Sampling(#[from] SamplingError),
}

/// One token for a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    pub request: RequestId,
    pub choice: u32,
    /// Index of the token among the choice's output, from 0.
    pub index: u32,
    pub token: u32,
    /// As in [`Sampled`](crate::Sampled).
    pub logprob: Option<f32>,
    pub top: Vec<(u32, f32)>,
    /// Prompt tokens whose KV was found in the prefix cache when the request was first admitted.
    pub cached_tokens: Tokens,
    /// Start of the first step that computed something for the choice, in this engine or before it came here.
    pub first_scheduled: Option<Time>,
    /// Set with the choice's last token.
    pub finish: Option<Finish>,
}

/// How a choice ended by itself, and what it took.
#[derive(Debug, Clone, PartialEq)]
pub struct Finish {
    pub reason: FinishReason,
    pub record: SequenceRecord,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end-of-sequence token.
    EndOfSequence,
    /// One of the request's stop tokens.
    StopToken(u32),
    /// `max_tokens`, or the longest sequence that model and pool hold.
    Length,
}

/// The life of one choice; moments are those of the steps that it was in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceRecord {
    pub arrival: Time,
    /// Start of the first step that computed something for it.
    pub first_scheduled: Option<Time>,
    pub first_token: Option<Time>,
    pub finished: Time,
    pub prompt_tokens: Tokens,
    pub output_tokens: Tokens,
    pub cached_tokens: Tokens,
    pub preemptions: u32,
}
