//! The routes that clients of a model use.

use std::{convert::Infallible, pin::Pin, sync::Arc};

use axum::{
    BoxError, Json, Router,
    extract::{Path, Request, State},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{any, get},
};
use baton_units::Tokens;
use baton_wire::openai::{ErrorBody, ModelCard, ModelList, PublicTokens};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{body::Incoming, service::Service};
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use tokio::time::timeout;

use crate::{
    admin,
    config::FrontConfig,
    exchange::{self, Admitted},
    fleet::{Catalogue, Fleet, Listed, Stage},
    gateway::Shared,
    identity::client_request_id,
    intake::{Api, Intake},
    live::Live,
    passthrough,
    prompt::{KeyChain, Tokenized},
    refusal::{NO_REPLICA_RETRY, Refusal},
    tenants::Padding,
    trace::Trace,
};

pub(crate) fn routes(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    Router::new()
        .route(Api::Chat.path(), any(async || Refusal::MethodNotAllowed))
        .route(Api::Completions.path(), any(async || Refusal::MethodNotAllowed))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route_layer(from_fn_with_state(shared.clone(), authenticate))
        .route("/health", get(health))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .fallback(passthrough::forward)
}

/// Whoever is no client of a tenant learns nothing of the fleet.
async fn authenticate(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if let Err(refusal) = shared.fleet.tenants().of(request.headers()) {
        return refusal.into_response();
    }
    next.run(request).await
}

/// Where requests come in: generations, which are nearly all, go their way without the router of the other paths.
#[derive(Clone)]
pub(crate) struct Door {
    shared: Arc<Shared>,
    others: TowerToHyperService<Router>,
}

impl Door {
    /// `others` are the paths of [`routes`] and whatever else is served.
    pub(crate) fn new(shared: Arc<Shared>, others: Router) -> Self {
        Self { shared, others: TowerToHyperService::new(others) }
    }
}

impl Service<http::Request<Incoming>> for Door {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: http::Request<Incoming>) -> Self::Future {
        let api = [Api::Chat, Api::Completions].into_iter().find(|api| api.path() == request.uri().path());
        match api.filter(|_| request.method() == Method::POST) {
            Some(api) => {
                let shared = self.shared.clone();
                Box::pin(async move { Ok(generate(shared, api, request).await) })
            }
            None => Box::pin(self.others.call(request)),
        }
    }
}

async fn generate(shared: Arc<Shared>, api: Api, request: http::Request<Incoming>) -> Response {
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
    body: Incoming,
    id: baton_units::RequestId,
    client_id: &str,
) -> Result<Admitted, Refusal> {
    let fleet = &shared.fleet;
    let mut grant = fleet.enter(headers)?;
    if fleet.stage() != Stage::Serving {
        return Err(Refusal::Draining);
    }
    let front = fleet.front();
    let bytes = read_body(body, &front).await?;
    let arrived = fleet.clock.now();
    let mut intake = Intake::read(api, headers, &bytes, &front)?;
    if let Some(grant) = &grant {
        intake.belong_to(grant.tenant());
    }
    let catalogue = fleet.catalogue();
    let listed = choose_model(&catalogue, intake.model.as_deref());
    let Listed { card, lacking, takes_public } = listed.inspect_err(|refusal| note_unknown(fleet, refusal))?;
    let mut tokenized = shared.tokenization.tokenize(&intake.prompt, intake.text_domain).await;
    let prompt = believable(&tokenized, catalogue.longest_context);
    if let Some(grant) = &mut grant {
        grant.reserve(u64::from(prompt.0) + intake.output_max().unwrap_or(0))?;
    }
    // Blocks that no replica can hold would stay in the books of the one that refuses them.
    tokenized.tokens.truncate(prompt.0 as usize);
    let adapter = card.parent.is_some().then_some(card.id.as_str());
    // Of several prompts each would have a public part of its own.
    if *takes_public && tokenized.exact && tokenized.further.is_empty() && intake.salt.is_some() {
        let prefixes = fleet.public_prefixes();
        let public = prefixes.of(&tokenized.tokens);
        intake.public = (!public.is_empty()).then(|| PublicTokens::new(public));
    }
    let public = intake.public.map_or(Tokens::ZERO, |public| public.of(&tokenized.tokens));
    let chain = KeyChain::new(adapter, intake.salt.as_deref(), public, fleet.block_size(), tokenized.tokens);
    let padding = grant.as_ref().and_then(|grant| grant.tenant().padding(&chain, arrived));
    let padding = if tokenized.further.is_empty() { padding } else { padding.map(Padding::beside_others) };
    fleet.metrics.intake(fleet.clock.now().since(arrived));
    let live = Live::new(id, client_id.to_owned(), card.id.clone(), arrived, prompt).traced(Trace::read(headers));
    let live = Arc::new(live);
    Ok(Admitted { intake, live, chain, further: tokenized.further, exact: tokenized.exact, excluded: lacking.clone(), grant, padding })
}

/// The whole body, within its limits.
pub(crate) async fn read_body<B>(body: B, front: &FrontConfig) -> Result<Bytes, Refusal>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
{
    let (limit, within) = (front.body_limit, front.receive_timeout);
    let read = timeout(within, Limited::new(body, limit).collect()).await.map_err(|_| Refusal::BodyLate { within })?;
    match read {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Refusal::BodyTooLarge { limit }),
        // A client that left has nobody to read this; one whose chunks make no sense has.
        Err(_) => Err(Refusal::Body(ErrorBody::bad_request("the body broke off or is not framed as HTTP/1.1 says"))),
    }
}

/// The model asked for, or the only base model when none is named.
pub(crate) fn choose_model<'a>(catalogue: &'a Catalogue, named: Option<&str>) -> Result<&'a Listed, Refusal> {
    let models = &catalogue.models;
    if models.is_empty() {
        return Err(Refusal::NoReplica { retry_after: NO_REPLICA_RETRY });
    }
    if let Some(named) = named {
        let unknown = || Refusal::UnknownModel { model: named.to_owned(), models: models.keys().cloned().collect() };
        return models.get(named).ok_or_else(unknown);
    }
    let mut base = models.values().filter(|listed| listed.card.parent.is_none());
    match (base.next(), base.next()) {
        (Some(only), None) => Ok(only),
        (only, other) => {
            let names = only.into_iter().chain(other).chain(base).map(|listed| listed.card.id.clone()).collect();
            Err(Refusal::NoModelNamed { models: names })
        }
    }
}

/// An adapter may have been loaded since the engines were asked.
fn note_unknown(fleet: &Fleet, refusal: &Refusal) {
    if matches!(refusal, Refusal::UnknownModel { .. }) {
        fleet.miss_model();
    }
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
    choose_model(&shared.fleet.catalogue(), Some(&id)).map(|listed| Json(listed.card.clone()))
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

/// Tenants must not see each other's numbers, of which some show what is cached: where there are any, the page is their operator's.
async fn metrics(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Response {
    if !shared.fleet.tenants().is_open() {
        let at_loopback = shared.fleet.front().admin_bind.is_none() && shared.is_loopback();
        if let Err(refusal) = admin::admit(&shared, &headers, at_loopback) {
            return refusal.into_response();
        }
    }
    metrics_page(State(shared)).await
}

pub(crate) async fn metrics_page(State(shared): State<Arc<Shared>>) -> Response {
    let page = shared.fleet.metrics.render(&shared.fleet, shared.tokenization.cached_bytes());
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
