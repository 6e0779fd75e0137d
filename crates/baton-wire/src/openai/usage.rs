use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Omittable, omittable};

/// Token counts of one answer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub total_tokens: u32,
    #[serde(default)]
    pub completion_tokens: u32,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub prompt_tokens_details: Omittable<PromptTokensDetails>,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Omittable<Value>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    /// Prompt tokens whose KV was there.
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Omittable<u32>,
    /// Prompt tokens whose KV this request put into the prefix cache.
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub created_cache_tokens: Omittable<u32>,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub multimodal_tokens: Omittable<u32>,
}

impl Usage {
    /// Counts alone, as in each chunk of a completion stream with `continuous_usage_stats`.
    pub fn counts(prompt_tokens: u32, completion_tokens: u32) -> Self {
        Self { prompt_tokens, total_tokens: prompt_tokens + completion_tokens, completion_tokens, ..Self::default() }
    }

    /// As in each chunk of a chat stream with `continuous_usage_stats`.
    pub fn chat_continuous(prompt_tokens: u32, completion_tokens: u32) -> Self {
        Self { completion_tokens_details: Some(None), ..Self::counts(prompt_tokens, completion_tokens) }
    }

    /// As in a chat answer that is not streamed. `created_cache_tokens`: see [`PromptTokensDetails`].
    pub fn chat(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32, created_cache_tokens: u32) -> Self {
        Self::whole(prompt_tokens, completion_tokens, cached_tokens, Some(created_cache_tokens))
    }

    /// As in a completion that is not streamed.
    pub fn completion(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        Self::whole(prompt_tokens, completion_tokens, cached_tokens, None)
    }

    /// As in the last chunk of a chat stream.
    pub fn chat_stream(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32, created_cache_tokens: u32) -> Self {
        let details =
            PromptTokensDetails { created_cache_tokens: Some(Some(created_cache_tokens)), ..PromptTokensDetails::cached(cached_tokens) };
        Self { prompt_tokens_details: Some(Some(details)), ..Self::counts(prompt_tokens, completion_tokens) }
    }

    /// As in the last chunk of a completion stream.
    pub fn completion_stream(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32) -> Self {
        let details = PromptTokensDetails::cached(cached_tokens);
        Self { prompt_tokens_details: Some(Some(details)), ..Self::counts(prompt_tokens, completion_tokens) }
    }

    /// Prompt tokens served from the cache, where the server says so.
    pub fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref()?.as_ref()?.cached_tokens.flatten()
    }

    fn whole(prompt_tokens: u32, completion_tokens: u32, cached_tokens: u32, created_cache_tokens: Option<u32>) -> Self {
        let details = PromptTokensDetails {
            created_cache_tokens: Some(created_cache_tokens),
            multimodal_tokens: Some(None),
            ..PromptTokensDetails::cached(cached_tokens)
        };
        Self {
            prompt_tokens_details: Some(Some(details)),
            completion_tokens_details: Some(None),
            ..Self::counts(prompt_tokens, completion_tokens)
        }
    }
}

impl PromptTokensDetails {
    fn cached(tokens: u32) -> Self {
        Self { cached_tokens: Some(Some(tokens)), ..Self::default() }
    }
}
