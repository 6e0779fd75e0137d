//! A completion request as it came in: checked, its reserved fields taken out, its prompt and wishes understood.

use std::{borrow::Cow, collections::VecDeque};

use baton_kv::KeyDomain;
use baton_openai::template_arguments;
use baton_policy::{Share, Slo};
use baton_units::Tokens;
use baton_wire::openai::{ErrorBody, Prompt, PublicTokens, StreamOptions};
use bytes::Bytes;
use http::{HeaderMap, header::CONTENT_TYPE};
use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use crate::{
    body::{Edit, JsonBody},
    config::{EngineKind, FrontConfig},
    identity::Identity,
    refusal::Refusal,
    reserved, slo,
    tenants::Tenant,
    token_api::TokenApi,
};

/// Fields that are done here, or belong to the chat API, where an engine is sent tokens.
const NOT_OF_TOKENS: [&str; 18] = [
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "max_completion_tokens",
    "response_format",
    "logprobs",
    "top_logprobs",
    "return_tokens_as_token_ids",
    "echo",
    "n",
    "stop",
    "include_stop_str_in_output",
];

/// Fields of a request for plain text that mean to all engines what they mean here; see [`Intake::is_plain`].
const PLAIN: [&str; 26] = [
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "ignore_eos",
    "seed",
    "stop",
    "n",
    "user",
    "priority",
    "cache_salt",
    "prompt_cache_key",
    "return_token_ids",
];

/// Which of the two generation APIs a request speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    Chat,
    Completions,
}

impl Api {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }

    /// What an answer's id begins with.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Self::Chat => "chatcmpl-",
            Self::Completions => "cmpl-",
        }
    }
}

/// What the client wants to see of an answer; the engine is asked for more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(clippy::struct_excessive_bools, reason = "four independent wishes")]
pub(crate) struct Wishes {
    pub(crate) stream: bool,
    pub(crate) usage: bool,
    pub(crate) continuous_usage: bool,
    pub(crate) token_ids: bool,
}

/// How a request is sent to its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Streamed from the engine, streamed to the client.
    Stream,
    /// Streamed from the engine, assembled into one answer here.
    Assemble,
    /// Answered in one piece.
    Whole,
}

/// The prompt, not yet tokens.
#[derive(Debug, Clone)]
pub(crate) enum PromptSource {
    Chat(ChatPrompt),
    Completion { prompt: Prompt, add_special: bool },
}

/// Parts of the body, as JSON.
#[derive(Debug, Clone)]
pub(crate) struct ChatPrompt {
    pub(crate) messages: Vec<Bytes>,
    pub(crate) tools: Option<Bytes>,
    pub(crate) kwargs: Option<Bytes>,
    pub(crate) add_generation_prompt: bool,
    /// The last message goes on.
    pub(crate) continues: bool,
    pub(crate) add_special: bool,
}

/// One request of a client.
#[derive(Debug)]
pub(crate) struct Intake {
    pub(crate) api: Api,
    /// As the client named it; `None` when it named none.
    pub(crate) model: Option<String>,
    pub(crate) wishes: Wishes,
    /// Choices in the answer: `n` for each prompt.
    pub(crate) choices: u32,
    pub(crate) max_output: Option<Tokens>,
    pub(crate) identity: Identity,
    pub(crate) slo: Slo,
    /// Of the client's tenant, or derived from the client's `cache_salt`; see the reserved fields.
    pub(crate) salt: Option<String>,
    /// How far the salt does not count.
    pub(crate) public: Option<PublicTokens>,
    /// Of the client's tenant.
    pub(crate) share: Option<Share>,
    /// Who may find out that its text was seen before.
    pub(crate) text_domain: u64,
    pub(crate) prompt: PromptSource,
    /// Nothing in it keeps the answer from being put together from a stream.
    streams_fully: bool,
    body: JsonBody,
    /// What is stripped of it, whatever the engine.
    stripped: Vec<&'static str>,
}

impl Intake {
    /// Reads and checks a body; the error is what the client gets.
    pub(crate) fn read(api: Api, headers: &HeaderMap, bytes: &Bytes, front: &FrontConfig) -> Result<Self, Refusal> {
        if headers.get(CONTENT_TYPE).is_some_and(|kind| !is_json(kind.as_bytes())) {
            return Err(Refusal::Body(ErrorBody::unsupported_media_type()));
        }
        let list = (api == Api::Chat).then_some("messages");
        let body = JsonBody::parse(bytes.clone(), list).map_err(|_| Refusal::Body(complaint(bytes)))?;
        let stripped = reserved::stripped(front.client_chat_template).filter(|field| body.has(field)).collect();
        let wishes = wishes(&body)?;
        let prompt = match api {
            Api::Chat => PromptSource::Chat(chat_prompt(&body)?),
            Api::Completions => completion_prompt(&body)?,
        };
        let choices = u64::from(read::<u32>(&body, "n")?.unwrap_or(1).max(1)) * prompt.count();
        if choices > u64::from(front.choices_limit) {
            return Err(Refusal::TooManyChoices { choices, limit: front.choices_limit });
        }
        let max_output = match api {
            Api::Chat => read::<u32>(&body, "max_completion_tokens")?.or(read(&body, "max_tokens")?),
            Api::Completions => read(&body, "max_tokens")?,
        };
        Ok(Self {
            api,
            model: read::<String>(&body, "model")?.filter(|model| !model.is_empty()),
            wishes,
            choices: choices as u32,
            max_output: max_output.map(Tokens),
            identity: Identity::read(headers, &body),
            slo: slo::asked(headers)?,
            salt: read::<String>(&body, "cache_salt")?.map(|salt| derived_salt(&salt)),
            public: None,
            share: None,
            text_domain: 0,
            prompt,
            streams_fully: streams_fully(&body),
            body,
            stripped,
        })
    }

    /// It is of a client of this tenant, and gets what the tenant allows.
    pub(crate) fn belong_to(&mut self, tenant: &Tenant) {
        self.identity.belong_to(tenant.name());
        let terms = tenant.terms();
        self.identity.priority = terms.priority(self.identity.priority);
        self.share = Some(terms.share());
        self.text_domain = terms.text_domain();
        // It was read as a text before.
        let own = self.body.read::<String>("cache_salt").ok().flatten();
        self.salt = terms.salt(own.as_deref()).or(self.salt.take());
    }

    /// Output tokens that it allows itself, over all choices; `None` where it sets no bound.
    pub(crate) fn output_max(&self) -> Option<u64> {
        self.max_output.map(|each| u64::from(each.0) * u64::from(self.choices))
    }

    /// How to send it to an engine of that kind.
    pub(crate) fn mode(&self, kind: EngineKind, assemble: bool) -> Mode {
        match self.wishes.stream {
            true => Mode::Stream,
            false if assemble && kind.streams_fully() && self.streams_fully => Mode::Assemble,
            false => Mode::Whole,
        }
    }

    /// The body for an answer that is made here, without its prompt, of which the tokens are known.
    pub(crate) fn carried_body(&self, takes_priority: bool, model: &str) -> Vec<u8> {
        let mut edits = self.common_edits(EngineKind::Baton, takes_priority, model);
        edits.push(match self.api {
            Api::Chat => Edit::set("messages", &[(); 0]),
            Api::Completions => Edit::set("prompt", &""),
        });
        Vec::from(self.body.edited(&edits)).concat()
    }

    /// The body for an engine, in pieces.
    pub(crate) fn upstream_body(&self, kind: EngineKind, takes_priority: bool, model: &str, mode: Mode) -> VecDeque<Bytes> {
        let mut edits = self.common_edits(kind, takes_priority, model);
        if mode == Mode::Whole {
            edits.extend([Edit::remove("stream"), Edit::remove("stream_options")]);
            return self.body.edited(&edits);
        }
        edits.push(Edit::set("stream", &true));
        if kind.gives_usage() {
            let continuous_usage_stats = self.wishes.continuous_usage.then_some(true);
            edits.push(Edit::set("stream_options", &StreamOptions { include_usage: Some(true), continuous_usage_stats }));
        }
        if kind.gives_token_ids(self.api) {
            edits.push(Edit::set("return_token_ids", &true));
        }
        self.body.edited(&edits)
    }

    /// The body for an engine that is to go on after prompt and `output`, all of it as token ids, until the output has `max_tokens`. Its text
    /// is made here, and so stop strings are found here.
    pub(crate) fn tokens_body(
        &self,
        api: TokenApi,
        (kind, takes_priority): (EngineKind, bool),
        model: &str,
        (prompt, output): (&[u32], &[u32]),
        (max_tokens, slot): (u32, Option<u32>),
    ) -> VecDeque<Bytes> {
        let mut edits = self.common_edits(kind, takes_priority, model);
        edits.extend(NOT_OF_TOKENS.map(Edit::remove));
        let taken = output.len() as u32;
        if let Ok(Some(least)) = self.body.read::<u32>("min_tokens") {
            edits.push(Edit::set("min_tokens", &least.saturating_sub(taken)));
        }
        edits.extend(api.edits(&[prompt, output].concat(), max_tokens.saturating_sub(taken)));
        edits.extend(slot.map(|slot| Edit::set("id_slot", &slot)));
        self.body.edited(&edits)
    }

    /// Whether it asks for text and no more, in words that mean the same here and at every engine: of conversations in plain text whose next
    /// message is wanted, and of prompts whose output has a bound. Then its answer may be made here from tokens.
    pub(crate) fn is_plain(&self) -> bool {
        let known = [&PLAIN[..], &self.stripped[..]].concat();
        let prompt = match &self.prompt {
            PromptSource::Chat(chat) => chat.is_plain(),
            PromptSource::Completion { .. } => self.max_output.is_some(),
        };
        prompt && self.body.has_only(&known)
    }

    /// What the gateway changes however the request is sent.
    fn common_edits(&self, kind: EngineKind, takes_priority: bool, model: &str) -> Vec<Edit> {
        let mut edits: Vec<Edit> = self.stripped.iter().map(|field| Edit::remove(field)).collect();
        if self.model.as_deref() != Some(model) {
            edits.push(Edit::set("model", &model));
        }
        edits.push(match &self.salt {
            Some(salt) if kind.takes_salt() => Edit::set("cache_salt", salt),
            Some(_) | None => Edit::remove("cache_salt"),
        });
        edits.push(match &self.public {
            Some(public) if kind.takes_public() => Edit::set("cache_public", public),
            Some(_) | None => Edit::remove("cache_public"),
        });
        edits.push(match self.identity.priority.0 {
            priority if takes_priority && priority != 0 => Edit::set("priority", &priority),
            _ => Edit::remove("priority"),
        });
        edits
    }
}

impl PromptSource {
    /// Prompts in the request.
    pub(crate) fn count(&self) -> u64 {
        match self {
            Self::Chat(_) => 1,
            Self::Completion { prompt, .. } => prompt.len() as u64,
        }
    }
}

impl ChatPrompt {
    fn is_plain(&self) -> bool {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Message<'a> {
            #[serde(borrow)]
            role: Cow<'a, str>,
            #[serde(borrow)]
            content: &'a RawValue,
        }
        fn role(message: &Bytes) -> Option<Cow<'_, str>> {
            let Message { role, content } = serde_json::from_slice(message).ok()?;
            content.get().starts_with('"').then_some(role)
        }
        let roles: Option<Vec<Cow<'_, str>>> = self.messages.iter().map(role).collect();
        roles.is_some_and(|roles| roles.last().is_some_and(|last| last != "assistant"))
    }
}

/// A field of its type, or vLLM's kind of complaint about it.
fn read<T: serde::de::DeserializeOwned>(body: &JsonBody, field: &str) -> Result<Option<T>, Refusal> {
    body.read(field).map_err(|error| Refusal::Body(ErrorBody::validation("type_error", &format!("body.{field}"), &error.to_string())))
}

/// Why a body is none, in vLLM's words.
fn complaint(bytes: &[u8]) -> ErrorBody {
    match baton_wire::openai::parse::<serde_json::Map<String, Value>>(bytes) {
        Err(error) => error,
        // An object, so its messages are no list.
        Ok(object) if object.get("messages").is_none_or(Value::is_null) => ErrorBody::missing_field("messages"),
        Ok(_) => ErrorBody::validation("list_type", "body.messages", "Input should be a valid list"),
    }
}

fn wishes(body: &JsonBody) -> Result<Wishes, Refusal> {
    let options = read::<StreamOptions>(body, "stream_options")?.unwrap_or_default();
    Ok(Wishes {
        stream: read(body, "stream")?.unwrap_or(false),
        usage: options.include_usage.unwrap_or(false),
        continuous_usage: options.continuous_usage_stats.unwrap_or(false),
        token_ids: read(body, "return_token_ids")?.unwrap_or(false),
    })
}

fn chat_prompt(body: &JsonBody) -> Result<ChatPrompt, Refusal> {
    if !body.has("messages") {
        return Err(Refusal::Body(ErrorBody::missing_field("messages")));
    }
    let continues = read::<bool>(body, "continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = read(body, "add_generation_prompt")?.unwrap_or(!continues);
    if continues && add_generation_prompt {
        let message = "Cannot set both `continue_final_message` and `add_generation_prompt` to True.";
        return Err(Refusal::Body(ErrorBody::bad_request(message)));
    }
    Ok(ChatPrompt {
        messages: body.elements().collect(),
        tools: body.given("tools"),
        kwargs: arguments(body)?,
        add_generation_prompt,
        continues,
        add_special: read(body, "add_special_tokens")?.unwrap_or(false),
    })
}

/// Arguments of the template. They are read again when it is rendered; what is wrong with them is told here.
fn arguments(body: &JsonBody) -> Result<Option<Bytes>, Refusal> {
    let own = read(body, "chat_template_kwargs")?;
    let (documents, effort) = (read(body, "documents")?, read(body, "reasoning_effort")?);
    if documents.is_none() && effort.is_none() {
        return Ok(body.given("chat_template_kwargs"));
    }
    let all = template_arguments(own, documents, effort);
    Ok((!all.is_empty()).then(|| Value::Object(all).to_string().into()))
}

fn completion_prompt(body: &JsonBody) -> Result<PromptSource, Refusal> {
    let prompt = read::<Prompt>(body, "prompt")?.ok_or_else(|| Refusal::Body(ErrorBody::missing_field("prompt")))?;
    let source = PromptSource::Completion { prompt, add_special: read(body, "add_special_tokens")?.unwrap_or(true) };
    if source.count() == 0 {
        return Err(Refusal::Body(ErrorBody::bad_request("You must pass at least one prompt")));
    }
    Ok(source)
}

/// Echoed prompts, prompt logprobs and searches over several candidates come whole or not at all.
fn streams_fully(body: &JsonBody) -> bool {
    let asked = |field: &&str| body.given(field).is_some_and(|value| value != "false");
    !["echo", "prompt_logprobs", "best_of", "use_beam_search", "suffix", "audio"].iter().any(asked)
}

/// A salt that stands for the client's without being it: equal salts share, and nobody can name a domain that the gateway made.
fn derived_salt(salt: &str) -> String {
    format!("client-{:016x}", KeyDomain { model: "client salt", adapter: None, salt: Some(salt) }.root().0)
}

fn is_json(content_type: &[u8]) -> bool {
    let essence = content_type.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    essence.eq_ignore_ascii_case(b"application/json") || essence.to_ascii_lowercase().ends_with(b"+json")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_chat(body: &str) -> Result<Intake, Refusal> {
        Intake::read(Api::Chat, &HeaderMap::new(), &body.to_owned().into(), &FrontConfig::default())
    }

    fn upstream(body: &str, kind: EngineKind) -> String {
        let intake = read_chat(body).unwrap();
        let mode = intake.mode(kind, true);
        let pieces = intake.upstream_body(kind, kind == EngineKind::Baton, "m", mode);
        String::from_utf8(Vec::from(pieces).concat()).unwrap()
    }

    #[test]
    fn unknown_fields_pass_and_reserved_ones_do_not() {
        let body = r#"{"model":"m","messages":[],"x_new":{"a":1e-3},"kv_transfer_params":{},"request_id":"r","chat_template":"t","temperature":0.7}"#;
        assert_eq!(upstream(body, EngineKind::OpenAi), r#"{"model":"m","messages":[],"x_new":{"a":1e-3},"temperature":0.7}"#);
    }

    #[test]
    fn an_engine_that_can_is_asked_for_tokens_and_usage() {
        let body = r#"{"model":"m","messages":[]}"#;
        let streamed = r#"{"model":"m","messages":[],"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true}"#;
        assert_eq!(upstream(body, EngineKind::Vllm), streamed);
        assert_eq!(upstream(body, EngineKind::LlamaCpp), body);
    }

    #[test]
    fn stream_options_do_not_stay_without_a_stream() {
        let body = r#"{"model":"m","messages":[],"echo":true,"stream":false,"stream_options":{"include_usage":true}}"#;
        assert_eq!(upstream(body, EngineKind::Vllm), r#"{"model":"m","messages":[],"echo":true}"#);
    }

    #[test]
    fn plain_is_what_asks_for_text_alone() {
        let plain = r#"{"model":"m","messages":[{"role":"system","content":"x"},{"role":"user","content":"hi"}],"stream":true,"temperature":0,"tools":null,"id_slot":1}"#;
        assert!(read_chat(plain).unwrap().is_plain());
        for (place, more) in [
            ("\"temperature\":0", "\"response_format\":{\"type\":\"json_object\"}"),
            ("\"temperature\":0", "\"grammar\":\"g\""),
            ("\"tools\":null", "\"tools\":[{}]"),
            ("\"temperature\":0", "\"x_new\":1"),
            ("{\"role\":\"user\",\"content\":\"hi\"}", "{\"role\":\"assistant\",\"content\":\"hi\"}"),
            ("\"content\":\"hi\"", "\"content\":[{\"type\":\"text\",\"text\":\"hi\"}]"),
            ("\"content\":\"hi\"", "\"content\":\"hi\",\"tool_call_id\":\"c\""),
        ] {
            assert!(!read_chat(&plain.replace(place, more)).unwrap().is_plain(), "{more}");
        }
        let completion =
            |body: &str| Intake::read(Api::Completions, &HeaderMap::new(), &body.to_owned().into(), &FrontConfig::default()).unwrap();
        assert!(completion(r#"{"prompt":"a","max_tokens":3}"#).is_plain());
        assert!(!completion(r#"{"prompt":"a"}"#).is_plain(), "engines have bounds of their own");
    }

    #[test]
    fn sglang_is_asked_for_ids_where_it_has_a_place_for_them() {
        let body = r#"{"model":"m","messages":[],"stream":true}"#;
        assert!(!upstream(body, EngineKind::Sglang).contains("return_token_ids"));
        let read =
            |body: &str| Intake::read(Api::Completions, &HeaderMap::new(), &body.to_owned().into(), &FrontConfig::default()).unwrap();
        let intake = read(r#"{"model":"m","prompt":"x","stream":true}"#);
        let body = Vec::from(intake.upstream_body(EngineKind::Sglang, false, "m", Mode::Stream)).concat();
        assert!(String::from_utf8(body).unwrap().contains(r#""return_token_ids":true"#));
        let whole = read(r#"{"model":"m","prompt":"x"}"#);
        assert_eq!(whole.mode(EngineKind::Sglang, true), Mode::Whole);
    }

    #[test]
    fn a_salt_is_replaced_by_one_derived_from_it() {
        let body = |salt: &str| format!(r#"{{"model":"m","messages":[],"stream":true,"cache_salt":"{salt}"}}"#);
        let sent = upstream(&body("a"), EngineKind::Vllm);
        assert!(sent.contains(r#""cache_salt":"client-"#) && sent != upstream(&body("b"), EngineKind::Vllm));
        assert!(!upstream(&body("a"), EngineKind::LlamaCpp).contains("salt"));
    }

    #[test]
    fn how_far_a_salt_does_not_count_is_told_to_engines_that_know_it_and_by_no_client() {
        let body = r#"{"model":"m","messages":[],"stream":true,"cache_salt":"s","cache_public":{"tokens":9,"digest":1}}"#;
        let sent = |public: Option<PublicTokens>, kind: EngineKind| {
            let intake = Intake { public, ..read_chat(body).unwrap() };
            String::from_utf8(Vec::from(intake.upstream_body(kind, false, "m", Mode::Stream)).concat()).unwrap()
        };
        assert!(!sent(None, EngineKind::Baton).contains("cache_public"));
        let public = PublicTokens::new(&[1, 2]);
        let told = format!(r#""cache_public":{}"#, serde_json::to_string(&public).unwrap());
        assert!(sent(Some(public), EngineKind::Baton).contains(&told));
        assert!(
            !sent(Some(public), EngineKind::Vllm).contains("cache_public") && sent(Some(public), EngineKind::Vllm).contains("cache_salt")
        );
    }

    #[test]
    fn a_priority_goes_only_to_engines_that_order_by_it() {
        let body = r#"{"model":"m","messages":[],"priority":-5000}"#;
        assert!(upstream(body, EngineKind::Baton).contains(r#""priority":-1000"#));
        assert!(!upstream(body, EngineKind::Vllm).contains("priority"));
    }

    #[test]
    fn bad_bodies_are_answered_as_vllm_answers_them() {
        let message = |body: &str| match read_chat(body) {
            Err(Refusal::Body(error)) => (error.code, error.param.unwrap_or_default(), error.message),
            other => panic!("{other:?}"),
        };
        assert!(message(r#"{"model": "m", "messages": ["#).2.contains("JSON decode error"));
        assert_eq!(message(r#"{"model":"m"}"#).1, "body.messages");
        assert_eq!(message(r#"{"messages":{}}"#).1, "body.messages");
        assert_eq!(message(r#"{"messages":[],"stream":"yes"}"#).1, "body.stream");
        assert_eq!(message("[1]").0, 400);
    }

    #[test]
    fn choices_are_counted_over_prompts_and_bounded() {
        let read = |body: &str| Intake::read(Api::Completions, &HeaderMap::new(), &body.to_owned().into(), &FrontConfig::default());
        assert_eq!(read(r#"{"prompt":["a","b"],"n":3}"#).unwrap().choices, 6);
        assert_eq!(read(r#"{"prompt":[1,2,3]}"#).unwrap().choices, 1);
        assert!(matches!(read(r#"{"prompt":"a","n":129}"#), Err(Refusal::TooManyChoices { choices: 129, limit: 128 })));
        assert!(matches!(read(r#"{"prompt":[]}"#), Err(Refusal::Body(_))));
    }
}
