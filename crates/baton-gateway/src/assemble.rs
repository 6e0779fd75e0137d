//! One whole answer from the chunks of a stream, in the shape in which the engine would have given it (vLLM's, with every field that
//! it sends). Logprobs, stop reasons and counts keep the engine's bytes.

use std::{borrow::Cow, collections::BTreeMap};

use baton_session::Fault;
use baton_wire::openai::Usage;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    chunk::Chunk,
    intake::{Api, Wishes},
    json::RawObject,
    plain::Plain,
};

type Raw = Option<Box<RawValue>>;

/// A string that is borrowed where it has no escapes.
#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// Collects the chunks of one attempt.
#[derive(Debug)]
pub(crate) struct Assembler {
    api: Api,
    wishes: Wishes,
    id: String,
    created: Raw,
    model: Raw,
    fingerprint: Raw,
    service_tier: Raw,
    usage: Option<Usage>,
    prompt_token_ids: Raw,
    prompt_text: Raw,
    choices: BTreeMap<u32, Choice>,
}

#[derive(Debug, Default)]
struct Choice {
    text: String,
    reasoning: Option<String>,
    tool_calls: BTreeMap<u32, ToolCall>,
    chat_logprobs: Option<ChatLogprobs>,
    completion_logprobs: Option<CompletionLogprobs>,
    finish_reason: Raw,
    stop_reason: Raw,
    token_ids: Vec<u32>,
    prompt_token_ids: Raw,
}

#[derive(Debug, Default, Serialize)]
struct ToolCall {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    function: Function,
}

#[derive(Debug, Default, Serialize)]
struct Function {
    name: String,
    arguments: String,
}

#[derive(Debug, Default, Serialize)]
struct ChatLogprobs {
    content: Vec<Box<RawValue>>,
}

#[derive(Debug, Default, Serialize)]
struct CompletionLogprobs {
    text_offset: Vec<Box<RawValue>>,
    token_logprobs: Vec<Box<RawValue>>,
    tokens: Vec<Box<RawValue>>,
    top_logprobs: Vec<Box<RawValue>>,
}

#[derive(Serialize)]
struct ChatAnswer<'a> {
    id: &'a str,
    object: &'static str,
    created: Raw,
    model: Raw,
    choices: Vec<ChatChoice>,
    service_tier: Raw,
    system_fingerprint: Raw,
    usage: Option<Usage>,
    prompt_logprobs: (),
    prompt_token_ids: Raw,
    prompt_text: Raw,
    kv_transfer_params: (),
    ec_transfer_params: (),
    metrics: (),
}

#[derive(Serialize)]
struct ChatChoice {
    index: u32,
    message: Message,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Raw,
    stop_reason: Raw,
    token_ids: Option<Vec<u32>>,
    routed_experts: (),
}

#[derive(Serialize)]
struct Message {
    role: &'static str,
    content: Option<String>,
    refusal: (),
    annotations: (),
    audio: (),
    function_call: (),
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
    reasoning: Option<String>,
}

#[derive(Serialize)]
struct CompletionAnswer<'a> {
    id: &'a str,
    object: &'static str,
    created: Raw,
    model: Raw,
    choices: Vec<CompletionChoice>,
    service_tier: Raw,
    system_fingerprint: Raw,
    usage: Option<Usage>,
    kv_transfer_params: (),
    ec_transfer_params: (),
    metrics: (),
}

#[derive(Serialize)]
struct CompletionChoice {
    index: u32,
    text: String,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Raw,
    stop_reason: Raw,
    token_ids: Option<Vec<u32>>,
    prompt_logprobs: (),
    prompt_token_ids: Raw,
    routed_experts: (),
}

impl Assembler {
    pub(crate) fn new(api: Api, wishes: Wishes, id: String) -> Self {
        Self {
            api,
            wishes,
            id,
            created: None,
            model: None,
            fingerprint: None,
            service_tier: None,
            usage: None,
            prompt_token_ids: None,
            prompt_text: None,
            choices: BTreeMap::new(),
        }
    }

    /// Whether what an answer begins with is known, so that plain chunks add to it all that they have.
    pub(crate) fn has_begun(&self) -> bool {
        self.created.is_some() && self.model.is_some()
    }

    /// Adds output to an answer that has begun.
    pub(crate) fn push_plain(&mut self, plain: &Plain<'_>) -> Result<(), Fault> {
        let choice = self.choices.entry(plain.choice).or_default();
        choice.token_ids.extend(plain.token_ids());
        let text: Cow<'_, str> = serde_json::from_slice::<Text<'_>>(plain.text()).map_err(|_| Fault::Garbled)?.0;
        choice.text.push_str(&text);
        Ok(())
    }

    pub(crate) fn push(&mut self, chunk: &Chunk<'_>) -> Result<(), Fault> {
        let object = &chunk.object;
        keep_first(&mut self.created, object, "created");
        keep_first(&mut self.model, object, "model");
        keep_first(&mut self.fingerprint, object, "system_fingerprint");
        keep_first(&mut self.service_tier, object, "service_tier");
        keep_first(&mut self.prompt_token_ids, object, "prompt_token_ids");
        keep_first(&mut self.prompt_text, object, "prompt_text");
        if let Some(usage) = &chunk.usage {
            self.usage = Some(usage.clone());
        }
        for (choice, piece) in chunk.choices.iter().zip(&chunk.pieces) {
            let state = self.choices.entry(piece.choice).or_default();
            state.token_ids.extend_from_slice(&piece.token_ids);
            state.push(self.api, choice).map_err(|_| Fault::Garbled)?;
        }
        Ok(())
    }

    /// The answer's body.
    pub(crate) fn finish(self) -> Vec<u8> {
        let body = match self.api {
            Api::Chat => serde_json::to_vec(&ChatAnswer {
                id: &self.id,
                object: "chat.completion",
                created: self.created,
                model: self.model,
                choices: self.choices.into_iter().map(|(index, choice)| choice.chat(index, self.wishes)).collect(),
                service_tier: self.service_tier,
                system_fingerprint: self.fingerprint,
                usage: self.usage.map(|usage| whole(usage, Api::Chat)),
                prompt_logprobs: (),
                prompt_token_ids: self.prompt_token_ids.filter(|_| self.wishes.token_ids),
                prompt_text: self.prompt_text,
                kv_transfer_params: (),
                ec_transfer_params: (),
                metrics: (),
            }),
            Api::Completions => serde_json::to_vec(&CompletionAnswer {
                id: &self.id,
                object: "text_completion",
                created: self.created,
                model: self.model,
                choices: self.choices.into_iter().map(|(index, choice)| choice.completion(index, self.wishes)).collect(),
                service_tier: self.service_tier,
                system_fingerprint: self.fingerprint,
                usage: self.usage.map(|usage| whole(usage, Api::Completions)),
                kv_transfer_params: (),
                ec_transfer_params: (),
                metrics: (),
            }),
        };
        body.expect("plain values serialize")
    }
}

impl Choice {
    fn push(&mut self, api: Api, choice: &RawObject<'_>) -> Result<(), serde_json::Error> {
        if choice.given("finish_reason").is_some() {
            self.finish_reason = choice.raw("finish_reason").map(ToOwned::to_owned);
        }
        if choice.given("stop_reason").is_some() {
            self.stop_reason = choice.raw("stop_reason").map(ToOwned::to_owned);
        }
        keep_first(&mut self.prompt_token_ids, choice, "prompt_token_ids");
        let logprobs: Option<RawObject<'_>> = choice.read("logprobs")?;
        match api {
            Api::Completions => {
                self.text.push_str(&choice.read::<String>("text")?.unwrap_or_default());
                if let Some(logprobs) = logprobs {
                    self.completion_logprobs.get_or_insert_default().push(&logprobs)?;
                }
            }
            Api::Chat => {
                self.push_delta(&choice.read("delta")?.unwrap_or_default())?;
                if let Some(logprobs) = logprobs {
                    append(&mut self.chat_logprobs.get_or_insert_default().content, &logprobs, "content")?;
                }
            }
        }
        Ok(())
    }

    fn push_delta(&mut self, delta: &RawObject<'_>) -> Result<(), serde_json::Error> {
        self.text.push_str(&delta.read::<String>("content")?.unwrap_or_default());
        let reasoning = delta.read::<String>("reasoning")?.or(delta.read("reasoning_content")?);
        if let Some(reasoning) = reasoning {
            self.reasoning.get_or_insert_default().push_str(&reasoning);
        }
        for call in delta.read::<Vec<RawObject<'_>>>("tool_calls")?.unwrap_or_default() {
            self.tool_calls.entry(call.read("index")?.unwrap_or(0)).or_default().push(&call)?;
        }
        Ok(())
    }

    fn chat(self, index: u32, wishes: Wishes) -> ChatChoice {
        let calls_only = self.text.is_empty() && !self.tool_calls.is_empty();
        ChatChoice {
            index,
            message: Message {
                role: "assistant",
                content: (!calls_only).then_some(self.text),
                refusal: (),
                annotations: (),
                audio: (),
                function_call: (),
                tool_calls: self.tool_calls.into_values().collect(),
                reasoning: self.reasoning,
            },
            logprobs: self.chat_logprobs,
            finish_reason: self.finish_reason,
            stop_reason: self.stop_reason,
            token_ids: wishes.token_ids.then_some(self.token_ids),
            routed_experts: (),
        }
    }

    fn completion(self, index: u32, wishes: Wishes) -> CompletionChoice {
        CompletionChoice {
            index,
            text: self.text,
            logprobs: self.completion_logprobs,
            finish_reason: self.finish_reason,
            stop_reason: self.stop_reason,
            token_ids: wishes.token_ids.then_some(self.token_ids),
            prompt_logprobs: (),
            prompt_token_ids: self.prompt_token_ids.filter(|_| wishes.token_ids),
            routed_experts: (),
        }
    }
}

impl ToolCall {
    /// The first piece of a call has id, type and name; later ones add to the arguments.
    fn push(&mut self, delta: &RawObject<'_>) -> Result<(), serde_json::Error> {
        if let Some(id) = delta.read("id")? {
            self.id = id;
        }
        if let Some(kind) = delta.read("type")? {
            self.kind = kind;
        }
        let function: RawObject<'_> = delta.read("function")?.unwrap_or_default();
        self.function.name.push_str(&function.read::<String>("name")?.unwrap_or_default());
        self.function.arguments.push_str(&function.read::<String>("arguments")?.unwrap_or_default());
        Ok(())
    }
}

impl CompletionLogprobs {
    fn push(&mut self, logprobs: &RawObject<'_>) -> Result<(), serde_json::Error> {
        append(&mut self.text_offset, logprobs, "text_offset")?;
        append(&mut self.token_logprobs, logprobs, "token_logprobs")?;
        append(&mut self.tokens, logprobs, "tokens")?;
        append(&mut self.top_logprobs, logprobs, "top_logprobs")
    }
}

fn append(list: &mut Vec<Box<RawValue>>, object: &RawObject<'_>, field: &str) -> Result<(), serde_json::Error> {
    list.extend(object.read::<Vec<Box<RawValue>>>(field)?.unwrap_or_default());
    Ok(())
}

fn keep_first(slot: &mut Raw, object: &RawObject<'_>, field: &str) {
    if slot.is_none() {
        *slot = object.given(field).map(ToOwned::to_owned);
    }
}

/// The usage of a stream with the fields that vLLM has only in a whole answer.
fn whole(mut usage: Usage, api: Api) -> Usage {
    usage.completion_tokens_details.get_or_insert(None);
    let details = usage.prompt_tokens_details.get_or_insert(None);
    if let Some(details) = details {
        details.multimodal_tokens.get_or_insert(None);
        if api == Api::Completions {
            details.created_cache_tokens.get_or_insert(None);
        }
    }
    usage
}

#[cfg(test)]
mod tests;
