//! Paths whose requests compute a prompt, though the gateway does not speak their API (`/v1/messages`, `/v1/responses`, `/v1/embeddings`,
//! `/v1/rerank`, `/v1/score`): placed by the policy like the others, booked while they run, and passed on as they are.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use axum::{BoxError, body::Body, response::Response};
use baton_policy::{Arrival, Outcome, Placed, Verdict};
use baton_units::{ReplicaId, RequestId, Time, Tokens};
use baton_wire::openai::Prompt;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{header::CONTENT_LENGTH, request::Parts};
use serde_json::{Value, json};

use crate::{
    exchange::refusal_of,
    fleet::{Booked, Fleet, Listed, Placing},
    gateway::Shared,
    identity::{Identity, client_request_id},
    intake::{ChatPrompt, PromptSource},
    json::RawObject,
    live::{Live, LiveState},
    passthrough::{Meter, lacks_path, send},
    prompt::KeyChain,
    refusal::{NO_REPLICA_RETRY, Refusal},
    slo,
    tenants::Terms,
    trace::Trace,
};

/// Responses of which it is known where they live.
const RESPONSES_KEPT: usize = 1 << 16;
const RESPONSES: &str = "/v1/responses";

/// Which engine keeps which response (`previous_response_id`); the latest ones.
#[derive(Debug, Default)]
pub(crate) struct Responses(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    homes: HashMap<String, ReplicaId>,
    order: VecDeque<String>,
}

impl Responses {
    /// Of a response that a client of this tenant made.
    pub(crate) fn home(&self, tenant: &str, id: &str) -> Option<ReplicaId> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).homes.get(&owned(tenant, id)).copied()
    }

    fn keep(&self, tenant: &str, id: &str, home: ReplicaId) {
        let id = owned(tenant, id);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.homes.insert(id.clone(), home).is_none() {
            kept.order.push_back(id);
        }
        if kept.order.len() > RESPONSES_KEPT
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.homes.remove(&oldest);
        }
    }
}

/// A response's id with its tenant, empty where there are none: nobody goes on with another's.
fn owned(tenant: &str, id: &str) -> String {
    format!("{tenant}\0{id}")
}

/// What is known of a request whose API is not spoken here.
pub(crate) struct Asked {
    pub(crate) source: PromptSource,
    /// Empty where there are none.
    pub(crate) tenant: String,
    pub(crate) terms: Option<Arc<Terms>>,
    pub(crate) salt: Option<String>,
    /// Where the response lives that it continues.
    pub(crate) home: Option<ReplicaId>,
}

/// The response that a path below `/v1/responses/` is about.
pub(crate) fn response_in(path: &str) -> Option<&str> {
    path.strip_prefix(RESPONSES)?.strip_prefix('/')?.split('/').next().filter(|id| !id.is_empty())
}

/// The prompt that a request of the path has computed; `None` where the path computes none, or none that can be read.
pub(crate) fn prompt(path: &str, object: &RawObject<'_>) -> Option<PromptSource> {
    match path {
        "/v1/messages" => messages(object.read("system").ok()?, object.read("messages").ok()??),
        RESPONSES => {
            let instructions = object.read::<Value>("instructions").ok().flatten();
            let input = object.read::<Value>("input").ok()??;
            let items = input.as_array().cloned().unwrap_or_else(|| vec![json!({ "role": "user", "content": input })]);
            messages(instructions, items)
        }
        "/v1/embeddings" => Some(PromptSource::Completion { prompt: object.read("input").ok()??, add_special: true }),
        "/v1/rerank" | "/rerank" | "/v2/rerank" => pairs(object, "query", "documents"),
        "/v1/score" | "/score" => pairs(object, "text_1", "text_2").or_else(|| pairs(object, "queries", "documents")),
        _ => None,
    }
}

/// A conversation as its chat template takes it, text alone.
fn messages(system: Option<Value>, messages: Vec<Value>) -> Option<PromptSource> {
    let system = system.map(|content| json!({ "role": "system", "content": content }));
    let plain = |mut message: Value| {
        if let Some(text) = message.get("content").and_then(text_of) {
            message["content"] = Value::String(text);
        }
        serde_json::to_vec(&message).ok().map(Bytes::from)
    };
    let messages = system.into_iter().chain(messages).map(plain).collect::<Option<Vec<_>>>()?;
    Some(PromptSource::Chat(ChatPrompt {
        messages,
        tools: None,
        kwargs: None,
        add_generation_prompt: true,
        continues: false,
        add_special: false,
    }))
}

/// The text of content that comes in parts.
fn text_of(content: &Value) -> Option<String> {
    let parts = content.as_array()?;
    let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
    (texts.len() == parts.len()).then(|| texts.join("\n"))
}

/// Each text of one field is computed with each of the other.
fn pairs(object: &RawObject<'_>, one: &str, other: &str) -> Option<PromptSource> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let texts = |field: &str| {
        let value = object.read::<Value>(field).ok()??;
        Some(value.as_array().map_or_else(|| vec![text(&value)], |texts| texts.iter().map(text).collect()))
    };
    let (ones, others): (Vec<String>, Vec<String>) = (texts(one)?, texts(other)?);
    let prompts = ones.iter().flat_map(|one| others.iter().map(move |other| format!("{one}{other}"))).collect::<Vec<_>>();
    (!prompts.is_empty()).then_some(PromptSource::Completion { prompt: Prompt::Texts(prompts), add_special: true })
}

/// Places the request and passes it to its engine, or to another one where that is not reached.
pub(crate) async fn pass(
    shared: &Arc<Shared>,
    head: &Parts,
    body: &Bytes,
    Asked { source, tenant, terms, salt, home }: Asked,
    Listed { card, lacking, .. }: &Listed,
    meter: &mut Option<Meter>,
) -> Result<Response, Refusal> {
    let fleet = &shared.fleet;
    let slo = slo::asked(&head.headers)?;
    let text_domain = terms.as_ref().map_or(0, |terms| terms.text_domain());
    let tokenized = shared.tokenization.tokenize(&source, text_domain).await;
    let adapter = card.parent.is_some().then_some(card.id.as_str());
    let chain = KeyChain::new(adapter, salt.as_deref(), Tokens::ZERO, fleet.block_size(), tokenized.tokens);
    let id = fleet.mint();
    let client_id = client_request_id(&head.headers).map_or_else(|| fleet.client_id(id), str::to_owned);
    let live = Live::new(id, client_id, card.id.clone(), fleet.clock.now(), tokenized.count).traced(Trace::read(&head.headers));
    let live = Arc::new(live);
    let mut identity = Identity::of_headers(&head.headers);
    if let Some(terms) = &terms {
        identity.belong_to(&tenant);
        identity.priority = terms.priority(identity.priority);
    }
    let mut running = Running::new(fleet.clone(), live.clone());
    let mut excluded = lacking.clone();
    if let Some(home) = home {
        excluded.extend(fleet.engines().iter().map(|engine| engine.id).filter(|id| *id != home));
    }
    let mut last = None;
    for _ in 0..fleet.front().attempts {
        let arrival = Arrival {
            request: id,
            keys: chain.keys(),
            prompt: tokenized.count,
            max_output: None,
            session: identity.session,
            program: identity.program,
            share: terms.as_ref().map(|terms| terms.share()),
            priority: identity.priority,
            slo,
            excluded: excluded.clone(),
        };
        live.set(LiveState::Held, None);
        let verdict = match fleet.place(arrival) {
            Placing::Now(verdict) => verdict,
            Placing::Later(told) => told.await.map_err(|_| Refusal::NoReplica { retry_after: NO_REPLICA_RETRY })?,
        };
        let replica = match verdict {
            Verdict::Run(placed) => settle(fleet, id, placed),
            Verdict::Refuse(refusal) => return last.map_or_else(|| Err(refusal_of(&refusal, fleet.retry_after())), Ok),
            Verdict::Hold => return Err(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY }),
        };
        live.set(LiveState::Prefill, Some(replica));
        fleet.keep_books();
        let Some(engine) = fleet.engine(replica) else {
            excluded.push(replica);
            continue;
        };
        fleet.metrics.attempt(replica);
        match send(shared, &engine, head, body, meter).await? {
            // Another kind of engine may have the path.
            Some(response) if lacks_path(response.status()) => last = Some(response),
            Some(response) => {
                let (parts, body) = response.into_parts();
                let learns = (head.uri.path() == RESPONSES && parts.status.is_success()).then(|| (shared.clone(), tenant.clone(), replica));
                running.left = parts.headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
                return Ok(Response::from_parts(parts, running.watched(body, learns)));
            }
            None => {}
        }
        excluded.push(replica);
    }
    running.end(Outcome::Failed);
    last.ok_or_else(|| Refusal::NoReplica { retry_after: fleet.retry_after() })
}

/// What is placed with the request is not made: a copy ahead, or a prefix that travels, would need its tokens.
fn settle(fleet: &Fleet, request: RequestId, Placed { replica, copy, fetch }: Placed) -> ReplicaId {
    if let Some(copy) = copy {
        fleet.finished(copy.request, Outcome::Cancelled, None);
    }
    if fetch.is_some() {
        fleet.with_router(|router, now| router.fetched(request, false, now));
    }
    replica
}

/// A request in the books, until its answer has ended or its client has left.
struct Running {
    fleet: Arc<Fleet>,
    live: Arc<Live>,
    booked: Option<Booked>,
    first_at: Option<Time>,
    /// Bytes of the answer that are to come, where that is known: nobody asks for the end of such a body.
    left: Option<u64>,
}

impl Running {
    fn new(fleet: Arc<Fleet>, live: Arc<Live>) -> Self {
        let booked = Some(fleet.admit(live.clone()));
        Self { fleet, live, booked, first_at: None, left: None }
    }

    /// The answer, of which each piece is booked as it passes. `learns`: the engine keeps it under the id that it begins with.
    fn watched(mut self, body: Body, learns: Option<(Arc<Shared>, String, ReplicaId)>) -> Body {
        let mut learns = learns;
        let data = body.into_data_stream().map(Some).chain(stream::once(async { None }));
        Body::from_stream(data.filter_map(move |piece| {
            let passed = match piece {
                Some(Ok(data)) => {
                    self.passes(&data);
                    if let Some((shared, tenant, replica)) = learns.take()
                        && let Some(id) = response_id(&data)
                    {
                        shared.responses.keep(&tenant, &id, replica);
                    }
                    Some(Ok::<_, BoxError>(data))
                }
                Some(Err(error)) => {
                    self.end(Outcome::Failed);
                    Some(Err(error.into()))
                }
                None => {
                    self.end(Outcome::Finished);
                    None
                }
            };
            std::future::ready(passed)
        }))
    }

    fn passes(&mut self, data: &[u8]) {
        let now = self.fleet.clock.now();
        let tokens = events_of_output(data);
        self.live.add_output(tokens);
        let request = self.live.id;
        let is_first = self.first_at.is_none();
        self.first_at.get_or_insert(now);
        self.fleet.with_router(|router, now| {
            if is_first {
                router.first_token(request, None, now);
            }
            router.output_tokens(request, tokens.max(u32::from(is_first)), now);
        });
        if is_first {
            let (_, replica) = self.live.state();
            self.live.set(LiveState::Decode, replica);
            self.fleet.metrics.first_token(now.since(self.live.arrived));
        }
        self.left = self.left.map(|left| left.saturating_sub(data.len() as u64));
        if self.left == Some(0) {
            self.end(Outcome::Finished);
        }
    }

    fn end(&mut self, outcome: Outcome) {
        if self.booked.take().is_some() {
            self.fleet.finished(self.live.id, outcome, None);
            self.fleet.retire(self.live.id);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end(Outcome::Cancelled);
        }
    }
}

/// Events that add text, as Anthropic's and OpenAI's newer API name them; each is about a token.
fn events_of_output(data: &[u8]) -> u32 {
    let adds = |line: &[u8]| {
        line.trim_ascii_end().strip_prefix(b"event: ").is_some_and(|name| name.ends_with(b"delta") && name != b"message_delta")
    };
    data.split(|&byte| byte == b'\n').filter(|line| adds(line)).count() as u32
}

/// The id that an answer of the responses API has, which comes first in it.
fn response_id(data: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(data).ok()?;
    let id = text.split("\"id\":").nth(1)?.trim_start().strip_prefix('"')?.split('"').next()?;
    id.starts_with("resp_").then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(path: &str, body: &str) -> Vec<Value> {
        match prompt(path, &serde_json::from_str(body).unwrap()) {
            Some(PromptSource::Chat(chat)) => chat.messages.iter().map(|message| serde_json::from_slice(message).unwrap()).collect(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn conversations_of_other_apis_are_read_as_their_template_takes_them() {
        let user = |text: &str| json!({ "role": "user", "content": text });
        let system = json!({ "role": "system", "content": "be brief" });
        assert_eq!(chat("/v1/messages", r#"{"messages":[{"role":"user","content":"hi"}]}"#), [user("hi")]);
        let parts = r#"{"system":[{"type":"text","text":"be brief"}],"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]}"#;
        assert_eq!(chat("/v1/messages", parts), [system.clone(), user("a\nb")]);
        assert_eq!(chat("/v1/responses", r#"{"instructions":"be brief","input":"hi"}"#), [system, user("hi")]);
        assert_eq!(chat("/v1/responses", r#"{"input":[{"role":"user","content":[{"type":"input_text","text":"hi"}]}]}"#), [user("hi")]);
    }

    #[test]
    fn what_is_embedded_or_compared_is_computed_text_by_text() {
        let texts = |path: &str, body: &str| match prompt(path, &serde_json::from_str(body).unwrap()) {
            Some(PromptSource::Completion { prompt, .. }) => prompt.len(),
            other => panic!("{other:?}"),
        };
        assert_eq!(texts("/v1/embeddings", r#"{"input":["a","b"]}"#), 2);
        assert_eq!(texts("/v1/rerank", r#"{"query":"q","documents":["a","b","c"]}"#), 3);
        assert_eq!(texts("/score", r#"{"text_1":"q","text_2":["a","b"]}"#), 2);
        assert!(prompt("/v1/audio/speech", &serde_json::from_str(r#"{"input":"a"}"#).unwrap()).is_none());
    }

    #[test]
    fn a_response_is_known_by_its_id_and_its_path() {
        let event = b"event: response.created\ndata: {\"response\":{\"id\":\"resp_1\",\"created_at\":5}}\n\n";
        assert_eq!(response_id(event).as_deref(), Some("resp_1"));
        assert_eq!(response_id(br#"{"id": "chatcmpl-1"}"#), None);
        assert_eq!([response_in("/v1/responses/resp_1/cancel"), response_in("/v1/responses")], [Some("resp_1"), None]);
        let responses = Responses::default();
        (0..=RESPONSES_KEPT).for_each(|number| responses.keep("a", &format!("resp_{number}"), ReplicaId(1)));
        assert_eq!((responses.home("a", "resp_0"), responses.home("a", "resp_1")), (None, Some(ReplicaId(1))));
        assert_eq!(responses.home("b", "resp_1"), None, "it is another tenant's");
    }

    #[test]
    fn output_is_counted_by_the_events_that_add_to_it() {
        let data =
            b"event: content_block_delta\ndata: {}\n\nevent: message_delta\ndata: {}\n\nevent: response.output_text.delta\r\ndata: {}\n\n";
        assert_eq!(events_of_output(data), 2);
    }
}
