//! Paths that the gateway does not understand itself (`/v1/audio/speech`, `/tokenize`, …): sent to an engine that
//! serves the model and has the path, answered as the engine answers.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use axum::{
    BoxError,
    body::{Body, to_bytes},
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use baton_session::{End, Fault};
use baton_wire::openai::ErrorBody;
use bytes::Bytes;
use futures_util::stream::try_unfold;
use http::{HeaderMap, HeaderName, Method, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use memchr::memmem;
use serde::Deserialize;
use tokio::time::timeout;

use crate::{
    api::{choose_model, read_body},
    engine::{Engine, Health},
    fleet::{REPLICA_HEADER, Stage},
    gateway::Shared,
    json::RawObject,
    priced,
    refusal::Refusal,
    reserved,
    tenants::Grant,
    upstream,
};

/// Paths outside `/v1` that engines answer for clients. All others of an engine are its operator's business.
const ROOT_PATHS: [&str; 4] = ["/tokenize", "/detokenize", "/version", "/score"];

/// What computes no KV.
const UNSALTED_PATHS: [&str; 3] = ["/tokenize", "/detokenize", "/version"];

/// Of an engine's error, read whole to see what it says.
const ERROR_BYTES_MAX: usize = 64 << 10;

/// Of an answer's end, kept to find its usage. The usage is the last but a few short fields of it.
const TAIL_BYTES: usize = 4 << 10;

/// What a token has, about, in a body that is not tokenized here.
const BYTES_PER_TOKEN: usize = 4;

/// Headers of a client that an engine gets to see. Credentials are not among them.
const TO_ENGINE: [HeaderName; 4] =
    [header::CONTENT_TYPE, header::ACCEPT, HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];

/// Headers of an engine that a client gets to see.
const TO_CLIENT: [HeaderName; 3] = [header::CONTENT_TYPE, header::CONTENT_LENGTH, header::RETRY_AFTER];

pub(crate) async fn forward(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let arrived = shared.fleet.clock.now();
    let (response, outcome) = match pass(&shared, &head, body).await {
        Ok(response) if response.status().is_success() => (response, "finished"),
        Ok(response) => (response, "rejected"),
        Err(refusal) => (refusal.into_response(), "refused"),
    };
    let took = shared.fleet.clock.now().since(arrived);
    shared.fleet.metrics.request_ended("passthrough", outcome, took);
    response
}

async fn pass(shared: &Arc<Shared>, head: &Parts, body: Body) -> Result<Response, Refusal> {
    let fleet = &shared.fleet;
    let path = head.uri.path();
    // Adapters and caches are loaded by operators, at the engine.
    let for_operators = path.ends_with("_lora_adapter");
    if !(path.starts_with("/v1/") && !for_operators || ROOT_PATHS.contains(&path)) {
        return Err(Refusal::NoSuchPath);
    }
    if fleet.stage() != Stage::Serving {
        return Err(Refusal::Draining);
    }
    let mut grant = fleet.enter(&head.headers)?;
    let bytes = read_body(body, &fleet.front()).await?;
    if let Some(grant) = &mut grant {
        grant.reserve(estimate(bytes.len()))?;
    }
    let terms = grant.as_ref().map(|grant| grant.tenant().terms());
    let tenant = grant.as_ref().map(|grant| grant.tenant().name().to_owned()).unwrap_or_default();
    let mut salt = None;
    // Only what is posted is computed; what is looked up has a usage that was counted before.
    let mut meter = grant.filter(|_| head.method == Method::POST).map(|grant| Meter::new(grant, bytes.len()));
    let (mut model, mut rewritten, mut prompt, mut home) = (None, None, None, priced::response_in(path).map(str::to_owned));
    if let Ok(mut object) = serde_json::from_slice::<RawObject>(&bytes) {
        let stripped = reserved::stripped(fleet.front().client_chat_template).filter(|field| object.remove(field)).count();
        let own_salt = object.read::<String>("cache_salt").ok().flatten();
        let hidden = ["cache_salt", "cache_public", "priority"].into_iter().filter(|field| object.remove(field)).count();
        salt = terms.as_ref().filter(|_| !UNSALTED_PATHS.contains(&path)).and_then(|terms| terms.salt(own_salt.as_deref()));
        if let Some(salt) = &salt {
            object.set("cache_salt", salt);
        }
        model = object.read::<String>("model").ok().flatten();
        rewritten = (stripped + hidden > 0 || salt.is_some()).then(|| object.to_vec());
        prompt = priced::prompt(path, &object);
        home = home.or_else(|| object.read("previous_response_id").ok().flatten());
    }
    let known = home.as_deref().and_then(|response| shared.responses.home(&tenant, response));
    if let (Some(response), None, Some(_)) = (&home, known, &terms) {
        return Err(Refusal::Body(ErrorBody::new(404, "NotFoundError", None, format!("there is no response {response:?}"))));
    }
    let home = known;
    let bytes = rewritten.map_or(bytes, Bytes::from);
    if let Some(source) = prompt {
        let catalogue = fleet.catalogue();
        let asked = priced::Asked { source, tenant, terms, salt, home };
        let response = priced::pass(shared, head, &bytes, asked, choose_model(&catalogue, model.as_deref())?, &mut meter).await?;
        return if response.status() == StatusCode::NOT_FOUND { explained(response).await } else { Ok(response) };
    }
    if let Some(model) = &model {
        choose_model(&fleet.catalogue(), Some(model))?;
    }
    let mut engines: Vec<Arc<Engine>> = fleet.engines();
    engines.retain(|engine| engine.facts().health == Health::Ready);
    engines.retain(|engine| model.as_ref().is_none_or(|model| engine.model(model).is_some()));
    if engines.is_empty() {
        return Err(Refusal::NoReplica { retry_after: fleet.retry_after() });
    }
    let turn = shared.turn.fetch_add(1, Ordering::Relaxed) % engines.len();
    engines.rotate_left(turn);
    engines.sort_by_key(|engine| Some(engine.id) != home);
    let mut last = None;
    for engine in engines {
        match send(shared, &engine, head, &bytes, &mut meter).await? {
            // Another kind of engine may have what this one lacks.
            Some(response) if lacks_path(response.status()) => last = Some(response),
            Some(response) => return Ok(response),
            None => {}
        }
    }
    match last {
        Some(response) if response.status() == StatusCode::NOT_FOUND => explained(response).await,
        Some(response) => Ok(response),
        None => Err(Refusal::NoReplica { retry_after: fleet.retry_after() }),
    }
}

/// A 404 that says what was not found; the bare one of an engine's web framework says nothing that a client's library could show.
async fn explained(response: Response) -> Result<Response, Refusal> {
    let (head, body) = response.into_parts();
    let bytes = to_bytes(body, ERROR_BYTES_MAX).await.map_err(|_| Refusal::NoSuchPath)?;
    let says_what = serde_json::from_slice::<RawObject>(&bytes).is_ok_and(|object| object.given("error").is_some());
    if says_what { Ok(Response::from_parts(head, bytes.into())) } else { Err(Refusal::NoSuchPath) }
}

pub(crate) fn lacks_path(status: StatusCode) -> bool {
    matches!(status, StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_IMPLEMENTED)
}

/// One try; `None` when the engine was not reached. Dropping the response's body closes the connection to the engine.
///
/// A good answer takes the meter along.
pub(crate) async fn send(
    shared: &Shared,
    engine: &Engine,
    head: &Parts,
    body: &Bytes,
    meter: &mut Option<Meter>,
) -> Result<Option<Response>, Refusal> {
    let path = head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let method: Method = head.method.clone();
    let request = upstream::request(engine, method, path).body(Full::new(body.clone()));
    let Ok(mut request) = request else { return Ok(None) };
    copy_headers(&head.headers, request.headers_mut(), &TO_ENGINE);
    let limit = shared.fleet.front().request_timeout;
    let answer = match timeout(limit, shared.fleet.upstream.forward(engine, request)).await {
        Ok(Ok(answer)) => answer,
        // What takes so long here would take as long elsewhere.
        Err(_) => return Err(Refusal::Ended(End::TimedOut(limit))),
        Ok(Err(error)) => {
            tracing::debug!(replica = %engine.name, %error, "no answer to a request passed through");
            shared.fleet.suspect(engine.id, Fault::Unreachable);
            return Ok(None);
        }
    };
    let (parts, body) = answer.into_parts();
    let meter = if parts.status.is_success() { meter.take() } else { None };
    let mut response = Response::new(bounded(body, shared.fleet.front().stall_timeout, meter));
    *response.status_mut() = parts.status;
    copy_headers(&parts.headers, response.headers_mut(), &TO_CLIENT);
    if let Some(name) = shared.fleet.shown_name(engine) {
        response.headers_mut().insert(REPLICA_HEADER, name);
    }
    Ok(Some(response))
}

/// An engine's body that breaks off when nothing comes for `stall`.
fn bounded(body: Incoming, stall: Duration, meter: Option<Meter>) -> Body {
    Body::from_stream(try_unfold((body, meter), move |(mut body, mut meter)| async move {
        while let Some(frame) = timeout(stall, body.frame()).await.map_err(|_| BoxError::from(Fault::Stalled(stall)))? {
            if let Ok(data) = frame?.into_data() {
                if let Some(meter) = &mut meter {
                    meter.pass(&data);
                }
                return Ok::<_, BoxError>(Some((data, (body, meter))));
            }
        }
        Ok(None)
    }))
}

/// Tokens of a body that nobody tokenized.
fn estimate(bytes: usize) -> u64 {
    (bytes / BYTES_PER_TOKEN) as u64
}

/// Counts an answer's tokens for its tenant: as the engine tells them at its end, else by the request's length.
pub(crate) struct Meter {
    /// `None` once it is told.
    grant: Option<Grant>,
    estimate: u64,
    /// The answer's end, where the usage is.
    tail: Vec<u8>,
}

impl Meter {
    fn new(grant: Grant, request_bytes: usize) -> Self {
        Self { grant: Some(grant), estimate: estimate(request_bytes), tail: Vec::new() }
    }

    fn pass(&mut self, data: &[u8]) {
        let data = &data[data.len().saturating_sub(TAIL_BYTES)..];
        let excess = (self.tail.len() + data.len()).saturating_sub(TAIL_BYTES);
        self.tail.drain(..excess);
        self.tail.extend_from_slice(data);
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        let Some(grant) = self.grant.take() else { return };
        // Nothing came of a request without an answer.
        if !self.tail.is_empty() {
            let (prompt, output) = last_usage(&self.tail).unwrap_or((self.estimate, 0));
            grant.end(prompt, output);
        }
    }
}

/// Prompt and output tokens of the last usage in the text, under OpenAI's older or newer names, or Anthropic's.
fn last_usage(text: &[u8]) -> Option<(u64, u64)> {
    #[derive(Deserialize)]
    struct Usage {
        #[serde(alias = "input_tokens")]
        prompt_tokens: u64,
        #[serde(default, alias = "output_tokens")]
        completion_tokens: u64,
    }
    memmem::rfind_iter(text, b"\"usage\"").find_map(|place| {
        let value = text[place + b"\"usage\"".len()..].trim_ascii_start().strip_prefix(b":")?;
        let usage = serde_json::Deserializer::from_slice(value).into_iter::<Usage>().next()?.ok()?;
        Some((usage.prompt_tokens, usage.completion_tokens))
    })
}

fn copy_headers(from: &HeaderMap, to: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.insert(name, value.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_usage_counts_under_each_of_its_names() {
        let older = br#"{"data":[],"usage":{"prompt_tokens":7,"total_tokens":7}}"#;
        let newer = br#"data: {"response":{"usage" : {"input_tokens":5,"output_tokens":3,"total_tokens":8},"user":null}}"#;
        let stream = br#"data: {"usage":{"prompt_tokens":1,"completion_tokens":2}} data: {"usage":null}"#;
        assert_eq!([last_usage(older), last_usage(newer), last_usage(stream)], [Some((7, 0)), Some((5, 3)), Some((1, 2))]);
        assert_eq!([last_usage(b"{}"), last_usage(br#"{"usage"#)], [None, None]);
    }
}
