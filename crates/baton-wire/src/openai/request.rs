use std::fmt;

use baton_kv::BlockKey;
use baton_units::Tokens;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};
use serde_json::{Map, Value};

/// `POST /v1/chat/completions`. Fields that Baton's own replica understands are typed; all others are kept in `rest`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ChatRequest {
    /// An array; what is in a message is the chat template's business.
    pub messages: Value,
    #[serde(flatten)]
    pub sampling: Sampling,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_completion_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_choice: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_generation_prompt: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continue_final_message: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_kwargs: Option<Map<String, Value>>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// `POST /v1/completions`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionRequest {
    pub prompt: Prompt,
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Candidates to report per token beside the sampled one; 0 reports the sampled one alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub echo: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suffix: Option<String>,
    #[serde(flatten)]
    pub rest: Map<String, Value>,
}

/// What both kinds of request share. Defaults are the server's: 1 choice, temperature 1, top-p 1.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_tokens: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stream_options: Option<StreamOptions>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    /// 0 or -1: all tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub presence_penalty: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frequency_penalty: Option<f64>,
    /// Token id as text to bias, -100 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_bias: Option<Map<String, Value>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_token_ids: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop: Option<Stop>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_token_ids: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_stop_str_in_output: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignore_eos: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub skip_special_tokens: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub add_special_tokens: Option<bool>,
    /// Candidates to report per prompt position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_token_ids: Option<bool>,
    /// Write a token in logprobs as `token_id:N`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub return_tokens_as_token_ids: Option<bool>,
    /// Separates prefixes that must not be shared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_salt: Option<String>,
    /// How far the salt does not count; Baton's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_public: Option<PublicTokens>,
    /// Lower is more important.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_transfer_params: Option<Value>,
}

/// Leading tokens of a prompt that are no secret: its salt counts from the first block on that is not wholly of them. Whoever says so has
/// seen the tokens, and names them by a digest, since an engine that makes others of the same text would share what was not meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicTokens {
    tokens: u32,
    digest: u64,
}

impl PublicTokens {
    /// All of these.
    pub fn new(tokens: &[u32]) -> Self {
        Self { tokens: tokens.len() as u32, digest: BlockKey(0).child(tokens).0 }
    }

    /// How many of the prompt's tokens are public: none where they are others than those that were meant.
    pub fn of(self, prompt: &[u32]) -> Tokens {
        let begins = prompt.get(..self.tokens as usize).is_some_and(|public| Self::new(public) == self);
        if begins { Tokens(self.tokens) } else { Tokens::ZERO }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamOptions {
    /// A last chunk with the usage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub include_usage: Option<bool>,
    /// Usage so far in every chunk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub continuous_usage_stats: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a string or an array of strings")]
pub enum Stop {
    One(String),
    Many(Vec<String>),
}

/// One prompt or several, as text or as token ids.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

impl Sampling {
    /// Answers per prompt.
    pub fn choices(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    pub fn is_stream(&self) -> bool {
        self.stream == Some(true)
    }

    pub fn includes_usage(&self) -> bool {
        self.stream_options.is_some_and(|options| options.include_usage == Some(true))
    }

    pub fn includes_continuous_usage(&self) -> bool {
        self.includes_usage() && self.stream_options.is_some_and(|options| options.continuous_usage_stats == Some(true))
    }

    pub fn stop_strings(&self) -> &[String] {
        match &self.stop {
            None => &[],
            Some(Stop::One(stop)) => std::slice::from_ref(stop),
            Some(Stop::Many(stops)) => stops,
        }
    }
}

impl ChatRequest {
    /// The output limit that the client set, under either of its names.
    pub fn output_limit(&self) -> Option<u32> {
        self.max_completion_tokens.or(self.sampling.max_tokens)
    }
}

impl Prompt {
    /// Count of prompts.
    pub fn len(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<'de> Deserialize<'de> for Prompt {
    /// By hand, since an untagged enum would first copy each of a long prompt's token ids into a dynamic value.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptVisitor;

        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected token ids from 0 to 4294967295, strings, or arrays of token ids")]
        enum First {
            Token(u32),
            Text(String),
            Tokens(Vec<u32>),
        }

        fn collect<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(first: T, mut seq: A) -> Result<Vec<T>, A::Error> {
            let mut list = vec![first];
            while let Some(next) = seq.next_element()? {
                list.push(next);
            }
            Ok(list)
        }

        impl<'de> Visitor<'de> for PromptVisitor {
            type Value = Prompt;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, an array of strings, an array of token ids, or an array of such arrays")
            }

            fn visit_str<E>(self, text: &str) -> Result<Prompt, E> {
                Ok(Prompt::Text(text.to_owned()))
            }

            fn visit_string<E>(self, text: String) -> Result<Prompt, E> {
                Ok(Prompt::Text(text))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
                match seq.next_element()? {
                    // vLLM takes an empty array for a list without prompts.
                    None => Ok(Prompt::Texts(Vec::new())),
                    Some(First::Token(token)) => collect(token, seq).map(Prompt::Tokens),
                    Some(First::Text(text)) => collect(text, seq).map(Prompt::Texts),
                    Some(First::Tokens(tokens)) => collect(tokens, seq).map(Prompt::TokenLists),
                }
            }
        }
        deserializer.deserialize_any(PromptVisitor)
    }
}
