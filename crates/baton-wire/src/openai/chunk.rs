use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ChatLogprobs, CompletionLogprobs, FinishReason, Head, Omittable, Usage, omittable};

/// One event of a chat stream.
///
/// vLLM's order of events: a role chunk per choice with empty content; content chunks; the finish, on the last content chunk or on one
/// of its own with an empty delta; with `include_usage` a chunk without choices; `[DONE]`. The fingerprint stands in the usage chunk,
/// or without one in the chunk of the finish.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChunk {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChunkChoice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Omittable<Vec<u32>>,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub prompt_text: Omittable<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: Delta,
    #[serde(default)]
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<FinishReason>,
    /// Left out before the finish.
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub stop_reason: Omittable<Value>,
    /// Left out of the role chunk; null unless `return_token_ids` was asked for.
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub token_ids: Omittable<Vec<u32>>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Delta {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub role: Option<String>,
    #[serde(default, deserialize_with = "omittable", skip_serializing_if = "Option::is_none")]
    pub content: Omittable<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
}

/// The first one of a call has id, type and name; later ones add to the arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCallDelta {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    pub index: u32,
    pub function: FunctionDelta,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionDelta {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
}

/// One event of a completion stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionChunk {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChunkChoice>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub system_fingerprint: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionChunkChoice {
    pub index: u32,
    pub text: String,
    #[serde(default)]
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<FinishReason>,
    #[serde(default)]
    pub stop_reason: Option<Value>,
    /// In the first chunk of each choice, when `return_token_ids` was asked for.
    #[serde(default)]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub token_ids: Option<Vec<u32>>,
}

impl ChatChunk {
    /// A chunk with these choices; the caller adds usage and, at the end, the fingerprint.
    pub fn new(head: &Head, choices: Vec<ChatChunkChoice>) -> Self {
        Self {
            id: head.id.clone(),
            object: "chat.completion.chunk".into(),
            created: head.created,
            model: head.model.clone(),
            choices,
            usage: None,
            prompt_token_ids: None,
            prompt_text: None,
            system_fingerprint: None,
        }
    }

    /// The first chunk of choice `index`; the prompt's tokens are sent when the client asked for token ids.
    pub fn role(head: &Head, index: u32, prompt_token_ids: Option<Vec<u32>>) -> Self {
        let delta = Delta { role: Some("assistant".into()), ..Delta::text("") };
        let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: None };
        Self { prompt_token_ids: Some(prompt_token_ids), prompt_text: Some(None), ..Self::new(head, vec![choice]) }
    }

    /// The chunk before `[DONE]` when the client asked for usage.
    pub fn usage(head: &Head, usage: Usage) -> Self {
        Self { usage: Some(usage), system_fingerprint: head.system_fingerprint.clone(), ..Self::new(head, Vec::new()) }
    }

    #[must_use]
    pub fn with_fingerprint(self, head: &Head) -> Self {
        Self { system_fingerprint: head.system_fingerprint.clone(), ..self }
    }
}

impl ChatChunkChoice {
    /// A piece of the answer.
    pub fn delta(index: u32, delta: Delta) -> Self {
        Self { index, delta, logprobs: None, finish_reason: None, stop_reason: None, token_ids: Some(None) }
    }

    /// Marks the end of the answer on this piece, which may be empty.
    #[must_use]
    pub fn finished(self, reason: FinishReason, stop_reason: Option<Value>) -> Self {
        Self { finish_reason: Some(reason), stop_reason: Some(stop_reason), ..self }
    }
}

impl Delta {
    pub fn text(content: &str) -> Self {
        Self { content: Some(Some(content.into())), ..Self::default() }
    }

    /// Content is null beside a tool call, as vLLM sends it.
    pub fn tool_call(call: ToolCallDelta) -> Self {
        Self { content: Some(None), tool_calls: vec![call], ..Self::default() }
    }
}

impl ToolCallDelta {
    /// Opens call `index`.
    pub fn open(index: u32, id: String, name: String) -> Self {
        Self { id: Some(id), kind: Some("function".into()), index, function: FunctionDelta { name: Some(name), arguments: None } }
    }

    pub fn arguments(index: u32, text: String) -> Self {
        Self { id: None, kind: None, index, function: FunctionDelta { name: None, arguments: Some(text) } }
    }
}

impl CompletionChunk {
    /// A chunk with these choices; the caller adds usage and, at the end, the fingerprint.
    pub fn new(head: &Head, choices: Vec<CompletionChunkChoice>) -> Self {
        Self {
            id: head.id.clone(),
            object: "text_completion".into(),
            created: head.created,
            model: head.model.clone(),
            choices,
            usage: None,
            system_fingerprint: None,
        }
    }

    /// The chunk before `[DONE]` when the client asked for usage.
    pub fn usage(head: &Head, usage: Usage) -> Self {
        Self { usage: Some(usage), system_fingerprint: head.system_fingerprint.clone(), ..Self::new(head, Vec::new()) }
    }

    #[must_use]
    pub fn with_fingerprint(self, head: &Head) -> Self {
        Self { system_fingerprint: head.system_fingerprint.clone(), ..self }
    }
}

impl CompletionChunkChoice {
    /// A piece of the answer.
    pub fn text(index: u32, text: String) -> Self {
        Self { index, text, logprobs: None, finish_reason: None, stop_reason: None, prompt_token_ids: None, token_ids: None }
    }

    /// Marks the end of the answer on this piece, which may be empty.
    #[must_use]
    pub fn finished(self, reason: FinishReason, stop_reason: Option<Value>) -> Self {
        Self { finish_reason: Some(reason), stop_reason, ..self }
    }
}
