use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Chat form: one entry per output token. A logprob is an `f32` of the engine widened to `f64`, as vLLM prints it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatLogprobs {
    pub content: Vec<TokenLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub token: String,
    pub logprob: f64,
    /// The token's own bytes, which may be part of a character.
    pub bytes: Option<Vec<u8>>,
    /// The most probable tokens, best first, as many as asked for.
    #[serde(default)]
    pub top_logprobs: Vec<TopLogprob>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopLogprob {
    pub token: String,
    pub logprob: f64,
    pub bytes: Option<Vec<u8>>,
}

/// Completions form: parallel lists, one entry per token. The first prompt token of an echo has no logprob.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CompletionLogprobs {
    /// Characters (not bytes) before each token in the text returned.
    pub text_offset: Vec<usize>,
    pub token_logprobs: Vec<Option<f64>>,
    pub tokens: Vec<String>,
    /// Token text to logprob, best first, with the sampled token added when it is not among the best.
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
}

/// One candidate at one prompt position.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprob {
    pub logprob: f64,
    /// 1 is the most probable.
    pub rank: Option<u32>,
    pub decoded_token: Option<String>,
}

/// vLLM's `prompt_logprobs`: per position a map from token id to its logprob, in the order given; null for the first position.
pub fn prompt_logprobs(positions: impl IntoIterator<Item = Option<Vec<(u32, PromptLogprob)>>>) -> Value {
    let position = |candidates: Vec<(u32, PromptLogprob)>| {
        let entry = |(token, logprob): (u32, PromptLogprob)| (token.to_string(), serde_json::to_value(logprob).expect("plain values"));
        Value::Object(candidates.into_iter().map(entry).collect())
    };
    positions.into_iter().map(|candidates| candidates.map_or(Value::Null, position)).collect()
}
