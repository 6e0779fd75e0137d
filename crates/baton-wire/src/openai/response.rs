use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ChatLogprobs, CompletionLogprobs, Head, Usage};

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    Stop,
    Length,
    ToolCalls,
    /// The server was told to give the request up; vLLM's own.
    Abort,
    /// The server failed on this request; vLLM's own.
    Error,
    #[serde(untagged)]
    Other(String),
}

/// An answer to `POST /v1/chat/completions` that is not streamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletion {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    #[serde(default)]
    pub service_tier: Option<String>,
    #[serde(default)]
    pub system_fingerprint: Option<String>,
    #[serde(default)]
    pub usage: Usage,
    #[serde(default)]
    pub prompt_logprobs: Option<Value>,
    #[serde(default)]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub prompt_text: Option<String>,
    #[serde(default)]
    pub kv_transfer_params: Option<Value>,
    #[serde(default)]
    pub ec_transfer_params: Option<Value>,
    #[serde(default)]
    pub metrics: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    pub index: u32,
    pub message: Message,
    #[serde(default)]
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<FinishReason>,
    /// The stop string or stop token id that ended it; null for the end-of-sequence token.
    #[serde(default)]
    pub stop_reason: Option<Value>,
    #[serde(default)]
    pub token_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub routed_experts: Option<Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    #[serde(default)]
    pub content: Option<String>,
    #[serde(default)]
    pub refusal: Option<String>,
    #[serde(default)]
    pub annotations: Option<Value>,
    #[serde(default)]
    pub audio: Option<Value>,
    #[serde(default)]
    pub function_call: Option<Value>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    #[serde(default)]
    pub reasoning: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type")]
    pub kind: String,
    pub function: FunctionCall,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON as text.
    pub arguments: String,
}

/// An answer to `POST /v1/completions` that is not streamed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Completion {
    pub id: String,
    pub object: String,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    #[serde(default)]
    pub service_tier: Option<String>,
    #[serde(default)]
    pub system_fingerprint: Option<String>,
    #[serde(default)]
    pub usage: Usage,
    #[serde(default)]
    pub kv_transfer_params: Option<Value>,
    #[serde(default)]
    pub ec_transfer_params: Option<Value>,
    #[serde(default)]
    pub metrics: Option<Value>,
}

/// With several prompts and several choices each, `index` counts the choices of the first prompt first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CompletionChoice {
    pub index: u32,
    pub text: String,
    #[serde(default)]
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<FinishReason>,
    #[serde(default)]
    pub stop_reason: Option<Value>,
    #[serde(default)]
    pub token_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub prompt_logprobs: Option<Value>,
    #[serde(default)]
    pub prompt_token_ids: Option<Vec<u32>>,
    #[serde(default)]
    pub routed_experts: Option<Value>,
}

impl ChatCompletion {
    pub fn new(head: Head, choices: Vec<ChatChoice>, usage: Usage) -> Self {
        Self {
            id: head.id,
            object: "chat.completion".into(),
            created: head.created,
            model: head.model,
            choices,
            service_tier: None,
            system_fingerprint: head.system_fingerprint,
            usage,
            prompt_logprobs: None,
            prompt_token_ids: None,
            prompt_text: None,
            kv_transfer_params: None,
            ec_transfer_params: None,
            metrics: None,
        }
    }
}

impl ChatChoice {
    pub fn new(index: u32, message: Message, finish_reason: FinishReason) -> Self {
        Self {
            index,
            message,
            logprobs: None,
            finish_reason: Some(finish_reason),
            stop_reason: None,
            token_ids: None,
            routed_experts: None,
        }
    }
}

impl Message {
    /// What the model said.
    pub fn assistant(content: Option<String>) -> Self {
        Self {
            role: "assistant".into(),
            content,
            refusal: None,
            annotations: None,
            audio: None,
            function_call: None,
            tool_calls: Vec::new(),
            reasoning: None,
        }
    }
}

impl ToolCall {
    /// `arguments`: JSON as text.
    pub fn function(id: String, name: String, arguments: String) -> Self {
        Self { id, kind: "function".into(), function: FunctionCall { name, arguments } }
    }
}

impl Completion {
    pub fn new(head: Head, choices: Vec<CompletionChoice>, usage: Usage) -> Self {
        Self {
            id: head.id,
            object: "text_completion".into(),
            created: head.created,
            model: head.model,
            choices,
            service_tier: None,
            system_fingerprint: head.system_fingerprint,
            usage,
            kv_transfer_params: None,
            ec_transfer_params: None,
            metrics: None,
        }
    }
}

impl CompletionChoice {
    pub fn new(index: u32, text: String, finish_reason: FinishReason) -> Self {
        Self {
            index,
            text,
            logprobs: None,
            finish_reason: Some(finish_reason),
            stop_reason: None,
            token_ids: None,
            prompt_logprobs: None,
            prompt_token_ids: None,
            routed_experts: None,
        }
    }
}
