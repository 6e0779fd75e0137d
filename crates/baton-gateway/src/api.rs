//! The routes that clients of a model use.

use std::{error::Error, sync::Arc};

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::{Path, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use baton_units::Tokens;
use baton_wire::openai::{ErrorBody, ModelCard, ModelList};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use http_body_util::LengthLimitError;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    config::FrontConfig,
    exchange::{self, Admitted},
    fleet::{Fleet, Stage},
    gateway::Shared,
    identity::client_request_id,
    intake::{Api, Intake},
    live::Live,
    passthrough,
    prompt::{KeyChain, Tokenized},
    refusal::{NO_REPLICA_RETRY, Refusal},
};

pub(crate) fn routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(passthrough::forward)
}

async fn chat_completions(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generate(shared, Api::Chat, request).await
}

async fn completions(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    generate(shared, Api::Completions, request).await
}

async fn generate(shared: Arc<Shared>, api: Api, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let fleet = &shared.fleet;
    let id = fleet.mint();
    let client_id = client_request_id(&head.headers).map_or_else(|| fleet.client_id(id), str::to_owned);
    match admit(&shared, api, &head.headers, body, id, &client_id).await {
        Ok(admitted) => exchange::run(shared.fleet.clone(), admitted).await,
        Err(refusal) => {
            fleet.metrics.request_ended(api.path(), "refused", std::time::Duration::ZERO);
            with_request_id(refusal.into_response(), &client_id)
        }
    }
}

/// From bytes to a request that can be placed; the error is what the client gets.
async fn admit(
    shared: &Shared,
    api: Api,
    headers: &HeaderMap,
    body: Body,
    id: baton_units::RequestId,
    client_id: &str,
) -> Result<Admitted, Refusal> {
    let fleet = &shared.fleet;
    if fleet.stage() != Stage::Serving {
        return Err(Refusal::Draining);
    }
    let bytes = read_body(body, &fleet.front).await?;
    let arrived = fleet.clock.now();
    let intake = Intake::read(api, headers, &bytes, &fleet.front)?;
    drop(bytes);
    let card = choose_model(fleet, intake.model.as_deref())?;
    let mut tokenized = shared.tokenization.tokenize(&intake.prompt).await;
    let longest_context = fleet.engines().iter().filter_map(|engine| engine.facts().spec.map(|spec| spec.max_model_len)).max();
    let prompt = believable(&tokenized, longest_context);
    // Blocks that no replica can hold would stay in the books of the one that refuses them.
    tokenized.tokens.truncate(prompt.0 as usize);
    let adapter = card.parent.is_some().then_some(card.id.as_str());
    let chain = KeyChain::new(adapter, intake.salt.as_deref(), fleet.block_size(), tokenized.tokens);
    let excluded = fleet.without_model(&card.id);
    fleet.metrics.intake(fleet.clock.now().since(arrived));
    let live = Arc::new(Live::new(id, client_id.to_owned(), card.id, arrived, prompt));
    Ok(Admitted { intake, live, chain, exact: tokenized.exact, excluded })
}

pub(crate) async fn read_body(body: Body, front: &FrontConfig) -> Result<Bytes, Refusal> {
    let (limit, within) = (front.body_limit, front.receive_timeout);
    let read = timeout(within, to_bytes(body, limit)).await.map_err(|_| Refusal::BodyLate { within })?;
    read.map_err(|error| match error.source() {
        Some(cause) if cause.is::<LengthLimitError>() => Refusal::BodyTooLarge { limit },
        // A client that left has nobody to read this; one whose chunks make no sense has.
        _ => Refusal::Body(ErrorBody::bad_request("the body broke off or is not framed as HTTP/1.1 says")),
    })
}

/// The card of the model asked for, or of the only base model when none is named.
pub(crate) fn choose_model(fleet: &Fleet, named: Option<&str>) -> Result<ModelCard, Refusal> {
    let mut models = fleet.models();
    if models.is_empty() {
        return Err(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY });
    }
    let names = |models: Vec<ModelCard>| models.into_iter().map(|card| card.id).collect();
    if let Some(named) = named {
        let place = models.iter().position(|card| card.id == named);
        return place
            .map(|place| models.swap_remove(place))
            .ok_or_else(|| Refusal::UnknownModel { model: named.to_owned(), models: names(models) });
    }
    models.retain(|card| card.parent.is_none());
    if models.len() == 1 { Ok(models.swap_remove(0)) } else { Err(Refusal::NoModelNamed { models: names(models) }) }
}

/// A length to place by. An estimate never makes a prompt too long, since only the engine knows then; nor do several prompts together,
/// each of which has a context of its own.
fn believable(tokenized: &Tokenized, longest_context: Option<Tokens>) -> Tokens {
    let Some(context) = longest_context else { return tokenized.count };
    if tokenized.exact && tokenized.longest >= context {
        return tokenized.longest;
    }
    tokenized.count.min(context.saturating_sub(Tokens(1)))
}

fn with_request_id(mut response: Response, id: &str) -> Response {
    if let Ok(id) = HeaderValue::from_str(id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

/// A client's id is on every answer, so that it finds its request again whatever became of it.
pub(crate) async fn echo_request_id(request: Request, next: Next) -> Response {
    let id = client_request_id(request.headers()).map(str::to_owned);
    let response = next.run(request).await;
    match id {
        Some(id) if !response.headers().contains_key("x-request-id") => with_request_id(response, &id),
        Some(_) | None => response,
    }
}

async fn models(State(shared): State<Arc<Shared>>) -> Json<ModelList> {
    Json(ModelList::new(shared.fleet.models()))
}

async fn model(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Result<Json<ModelCard>, Refusal> {
    choose_model(&shared.fleet, Some(&id)).map(Json)
}

/// Whether a request would find a replica; a vLLM client waits for this.
async fn health(State(shared): State<Arc<Shared>>) -> Response {
    if shared.fleet.any_ready() {
        return Json(json!({ "status": "ok" })).into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "no replica is ready" }))).into_response()
}

/// The process answers.
async fn live() -> Json<serde_json::Value> {
    Json(json!({ "status": "live" }))
}

/// New requests are welcome: a replica is ready and the gateway is not shutting down.
async fn ready(State(shared): State<Arc<Shared>>) -> Response {
    let reason = match shared.fleet.stage() {
        Stage::Serving if shared.fleet.any_ready() => return Json(json!({ "status": "ready" })).into_response(),
        Stage::Serving => "no replica is ready",
        Stage::Draining | Stage::Closing => "shutting down",
    };
    (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": reason }))).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let page = shared.fleet.metrics.render(&shared.fleet);
    ([(http::header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], page).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_of_several_prompts_has_the_context_to_itself() {
        let placed = |count, longest, exact| {
            let tokenized = Tokenized { count: Tokens(count), longest: Tokens(longest), exact, ..Tokenized::default() };
            believable(&tokenized, Some(Tokens(100))).0
        };
        assert_eq!([placed(60, 60, true), placed(150, 60, true)], [60, 99]);
        assert_eq!([placed(100, 100, true), placed(250, 120, true)], [100, 120], "refused with the length that is at fault");
        assert_eq!(placed(500, 500, false), 99);
    }
}
