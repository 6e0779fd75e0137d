use std::sync::Arc;

use axum::{
    body::Body,
    extract::{State, rejection::BytesRejection},
    response::Response,
};
use baton_wire::{
    openai::{ErrorBody, ModelCard, ModelList, parse},
    replica::Report,
};
use bytes::Bytes;
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::{App, answer, json_response, respond};
use crate::{generation::engine_gone, kv_publisher::REPLAY_BATCHES, metrics::Exposed};

/// 200 with an empty body while the engine lives, else 503.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    let mut response = Response::new(Body::empty());
    if app.engine.has_failed() {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

pub(super) async fn load(State(app): State<Arc<App>>) -> Response {
    json_response(StatusCode::OK, &json!({ "server_load": app.engine.generations() }))
}

pub(super) async fn version() -> Response {
    json_response(StatusCode::OK, &json!({ "version": env!("CARGO_PKG_VERSION") }))
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    let page = app.metrics.render(&Exposed {
        model: app.config.models[0].clone(),
        status: app.engine.status(),
        block_size: app.config.engine.block_size.get(),
        start_unix_s: app.clock.start_unix_s(),
    });
    respond(StatusCode::OK, "text/plain; version=1.0.0; charset=utf-8", Body::from(page))
}

pub(super) async fn models(State(app): State<Arc<App>>) -> Response {
    let created = app.clock.start_unix_s() as u64;
    let root = |name: &String| app.config.model_root.clone().unwrap_or_else(|| name.clone());
    let card = |name: &String| ModelCard::new(name, "baton", created, Some(root(name)), app.service.limits.max_model_len);
    json_response(StatusCode::OK, &ModelList::new(app.config.models.iter().map(card).collect()))
}

pub(super) async fn kv_event_sources(State(app): State<Arc<App>>) -> Response {
    let source = app.kv_events.as_ref().map(|source| {
        let rank = json!({
            "enable_kv_cache_events": true,
            "publisher": "zmq",
            "endpoint": bound(&source.endpoint),
            "replay_endpoint": source.replay_endpoint,
            "buffer_steps": REPLAY_BATCHES,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": source.topic,
        });
        ("0".to_owned(), rank)
    });
    json_response(StatusCode::OK, &source.into_iter().collect::<Map<_, _>>())
}

/// The endpoint as vLLM writes one that it binds. A concrete host there means that the publisher connects, and that whoever reads
/// this should bind the address, which is taken.
fn bound(endpoint: &str) -> String {
    endpoint.rsplit_once(':').map_or_else(|| endpoint.to_owned(), |(_, port)| format!("tcp://*:{port}"))
}

#[derive(Debug, Default, Deserialize)]
struct AbortRequests {
    #[serde(default)]
    request_ids: Option<Vec<String>>,
}

/// `POST /abort_requests`; without ids all requests are aborted.
pub(super) async fn abort_requests(State(app): State<Arc<App>>, body: Result<Bytes, BytesRejection>) -> Response {
    answer(aborted(&app, body).await)
}

async fn aborted(app: &App, body: Result<Bytes, BytesRejection>) -> Result<Response, ErrorBody> {
    let body = body.unwrap_or_default();
    let request: AbortRequests = if body.is_empty() { AbortRequests::default() } else { parse(&body)? };
    let names = request.request_ids.filter(|ids| !ids.is_empty());
    let aborted = app.engine.abort_named(names).await.map_err(|_| engine_gone())?;
    Ok(json_response(StatusCode::OK, &json!({ "status": "aborted", "aborted": aborted })))
}

pub(super) async fn reset_prefix_cache(State(app): State<Arc<App>>) -> Response {
    let reset = app.engine.reset_prefix_cache().await;
    let success: Result<Value, ErrorBody> = reset.map(|()| json!({ "success": true })).map_err(|_| engine_gone());
    answer(success.map(|body| json_response(StatusCode::OK, &body)))
}

/// `GET /baton/v1/replica`.
pub(super) async fn report(State(app): State<Arc<App>>) -> Response {
    let status = app.engine.status();
    let config = &app.config;
    let report = Report {
        id: config.id.clone(),
        incarnation: app.incarnation,
        engine: config.pace.engine().to_owned(),
        model: config.models[0].clone(),
        numerics_id: app.numerics_id.clone(),
        block_size: config.engine.block_size.get(),
        kv_blocks_total: status.blocks_total.0,
        kv_blocks_free: status.blocks_free.0 + status.blocks_reclaimable.0,
        waiting: status.waiting,
        running: status.running,
        prefill_backlog_tokens: u64::from(status.prefill_backlog.0),
        max_model_len: app.service.limits.max_model_len,
        max_running: config.engine.max_running,
        token_budget: status.token_budget.0,
        time_scale: config.pace.time_scale(),
        step: status.step_fit,
        step_prior: status.step_prior,
        step_error: status.step_error,
        steps: status.counters.steps,
        kv_events: app.kv_events.clone(),
        migration: app.migration.clone(),
    };
    json_response(StatusCode::OK, &report)
}
