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
use bytes::Bytes;
use futures_util::stream::try_unfold;
use http::{HeaderMap, HeaderName, Method, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::{
    api::{choose_model, read_body},
    engine::{Engine, Health},
    fleet::Stage,
    gateway::Shared,
    json::RawObject,
    priced,
    refusal::{NO_REPLICA_RETRY, Refusal},
    reserved, upstream,
};

/// Paths outside `/v1` that engines answer for clients. All others of an engine are its operator's business.
const ROOT_PATHS: [&str; 4] = ["/tokenize", "/detokenize", "/version", "/score"];

/// Of an engine's error, read whole to see what it says.
const ERROR_BYTES_MAX: usize = 64 << 10;

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
    let bytes = read_body(body, &fleet.front()).await?;
    let (mut model, mut rewritten, mut prompt, mut home) = (None, None, None, priced::response_in(path).map(str::to_owned));
    if let Ok(mut object) = serde_json::from_slice::<RawObject>(&bytes) {
        let stripped = reserved::stripped(fleet.front().client_chat_template).filter(|field| object.remove(field)).count();
        let hidden = ["cache_salt", "priority"].into_iter().filter(|field| object.remove(field)).count();
        model = object.read::<String>("model").ok().flatten();
        rewritten = (stripped + hidden > 0).then(|| object.to_vec());
        prompt = priced::prompt(path, &object);
        home = home.or_else(|| object.read("previous_response_id").ok().flatten());
    }
    let home = home.and_then(|response| shared.responses.home(&response));
    let bytes = rewritten.map_or(bytes, Bytes::from);
    if let Some(prompt) = prompt {
        let catalogue = fleet.catalogue();
        let response = priced::pass(shared, head, &bytes, &prompt, choose_model(&catalogue, model.as_deref())?, home).await?;
        return if response.status() == StatusCode::NOT_FOUND { explained(response).await } else { Ok(response) };
    }
    if let Some(model) = &model {
        choose_model(&fleet.catalogue(), Some(model))?;
    }
    let mut engines: Vec<Arc<Engine>> = fleet.engines();
    engines.retain(|engine| engine.facts().health == Health::Ready);
    engines.retain(|engine| model.as_ref().is_none_or(|model| engine.model(model).is_some()));
    if engines.is_empty() {
        return Err(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY });
    }
    let turn = shared.turn.fetch_add(1, Ordering::Relaxed) % engines.len();
    engines.rotate_left(turn);
    engines.sort_by_key(|engine| Some(engine.id) != home);
    let mut last = None;
    for engine in engines {
        match send(shared, &engine, head, &bytes).await? {
            // Another kind of engine may have what this one lacks.
            Some(response) if lacks_path(response.status()) => last = Some(response),
            Some(response) => return Ok(response),
            None => {}
        }
    }
    match last {
        Some(response) if response.status() == StatusCode::NOT_FOUND => explained(response).await,
        Some(response) => Ok(response),
        None => Err(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY }),
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
pub(crate) async fn send(shared: &Shared, engine: &Engine, head: &Parts, body: &Bytes) -> Result<Option<Response>, Refusal> {
    let path = head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    let method: Method = head.method.clone();
    let request = upstream::request(method, engine.url().join(path), engine.config.key()).body(Full::new(body.clone()));
    let Ok(mut request) = request else { return Ok(None) };
    copy_headers(&head.headers, request.headers_mut(), &TO_ENGINE);
    let limit = shared.fleet.front().request_timeout;
    let answer = match timeout(limit, shared.fleet.upstream.forward(request)).await {
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
    let mut response = Response::new(bounded(body, shared.fleet.front().stall_timeout));
    *response.status_mut() = parts.status;
    copy_headers(&parts.headers, response.headers_mut(), &TO_CLIENT);
    Ok(Some(response))
}

/// An engine's body that breaks off when nothing comes for `stall`.
fn bounded(body: Incoming, stall: Duration) -> Body {
    Body::from_stream(try_unfold(body, move |mut body| async move {
        while let Some(frame) = timeout(stall, body.frame()).await.map_err(|_| BoxError::from(Fault::Stalled(stall)))? {
            if let Ok(data) = frame?.into_data() {
                return Ok::<_, BoxError>(Some((data, body)));
            }
        }
        Ok(None)
    }))
}

fn copy_headers(from: &HeaderMap, to: &mut HeaderMap, names: &[HeaderName]) {
    for name in names {
        if let Some(value) = from.get(name) {
            to.insert(name, value.clone());
        }
    }
}
