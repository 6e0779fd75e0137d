//! `/baton/v1`: what the fleet is, where requests went and why, and the few things that can be changed at run time.

mod moving;

use std::{net::IpAddr, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    middleware::{Next, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use baton_policy::{DecisionRecord, PolicyName, ReplicaStatus};
use baton_units::{DurationMs, RequestId};
use baton_wire::openai::ErrorBody;
use http::{HeaderMap, Method, header, uri::Authority};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    api::metrics_page,
    config::EngineKind,
    engine::{Engine, Health},
    fleet::{Fleet, Named},
    gateway::Shared,
    refusal::Refusal,
};

/// The API's description, kept by hand; a test compares it with the routes.
const OPENAPI: &str = include_str!("admin/openapi.json");
const DECISIONS_DEFAULT: usize = 100;
const RESET_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) fn routes(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    guarded(shared, api_routes())
}

/// As [`routes`], at an address of their own.
pub(crate) fn own_routes(shared: &Arc<Shared>) -> Router<Arc<Shared>> {
    guarded(shared, api_routes().route("/metrics", get(metrics_page)))
}

fn guarded(shared: &Arc<Shared>, routes: Router<Arc<Shared>>) -> Router<Arc<Shared>> {
    routes.route_layer(from_fn_with_state(shared.clone(), authorize))
}

fn api_routes() -> Router<Arc<Shared>> {
    Router::new()
        .route("/baton/v1/fleet", get(fleet))
        .route("/baton/v1/requests", get(requests))
        .route("/baton/v1/requests/{id}/migrate", post(moving::migrate))
        .route("/baton/v1/replicas/{id}/drain", post(moving::drain))
        .route("/baton/v1/replicas/{id}/undrain", post(moving::undrain))
        .route("/baton/v1/moves", get(moving::moves))
        .route("/baton/v1/decisions", get(decisions))
        .route("/baton/v1/decisions/{id}", get(decision))
        .route("/baton/v1/policy", get(policy).put(set_policy))
        .route("/baton/v1/reset", post(reset))
        .route("/baton/v1/openapi.json", get(openapi))
}

async fn authorize(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    match admit(&shared, request.headers(), shared.is_loopback()) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Whether who sent these headers may see what operators see. Without a key that is so at a loopback address only.
pub(crate) fn admit(shared: &Shared, headers: &HeaderMap, at_loopback: bool) -> Result<(), Refusal> {
    let allowed = match &shared.fleet.front().admin_key {
        Some(key) => {
            let given = headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
            given.is_some_and(|given| equal_in_constant_time(given, key.reveal().as_bytes()))
        }
        None if at_loopback => !is_from_elsewhere(headers),
        None => return Err(Refusal::NoSuchPath),
    };
    if allowed { Ok(()) } else { Err(Refusal::Unauthorized) }
}

/// A web page of another site, in a browser on this machine: it would name its own origin, or reach us under its own host name.
fn is_from_elsewhere(headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let host = text(header::HOST).and_then(|host| host.parse::<Authority>().ok());
    let local = host.as_ref().is_some_and(|host| {
        let name = host.host().trim_matches(['[', ']']);
        name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    });
    // Over TLS or not, its scheme is that by which the page reached this address.
    let own_origin = text(header::ORIGIN).is_none_or(|origin| origin.split_once("://").map(|(_, host)| host) == text(header::HOST));
    !(local && own_origin)
}

fn equal_in_constant_time(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

async fn fleet(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let fleet = &shared.fleet;
    let statuses = fleet.peek_router(|router, now| router.fleet(now));
    let replicas: Vec<Value> =
        fleet.engines().iter().map(|engine| replica(fleet, engine, statuses.iter().find(|status| status.id == engine.id))).collect();
    let (policy, held) = fleet.peek_router(|router, _| (router.policy(), router.held()));
    let sources: Vec<Value> = fleet
        .metrics
        .sources()
        .into_iter()
        .map(|(label, source)| json!({ "source": label, "engines": source.engines, "refused": source.refused, "failing": source.failing }))
        .collect();
    Json(json!({
        "replicas": replicas, "sources": sources, "policy": policy.to_string(), "held": held, "block_size": fleet.block_size(),
    }))
}

fn replica(fleet: &Fleet, engine: &Engine, status: Option<&ReplicaStatus>) -> Value {
    let numerics = fleet.with_desk(|desk, _| desk.numerics_of(engine.id).map(str::to_owned));
    let link = fleet.link(engine.id);
    let rests = engine.rests_for(fleet.clock.now());
    let facts = engine.facts();
    let spec = facts.spec;
    let models: Vec<&str> = facts.models.iter().map(|card| card.id.as_str()).collect();
    json!({
        "id": engine.name,
        "index": engine.id,
        "url": facts.url,
        "data_parallel_rank": engine.rank,
        "source": facts.source.as_deref(),
        "engine": engine.config.kind.as_str(),
        "state": facts.health,
        "life": facts.life.0 - engine.before.0,
        "models": models,
        "queue_ms": status.map(|status| status.queue_ms),
        "in_flight": status.map(|status| status.in_flight),
        "prefilling": status.map(|status| status.prefilling),
        "kv_blocks_total": status.map(|status| status.kv_blocks_total),
        "kv_blocks_free": status.map(|status| status.kv_blocks_free),
        "kv_blocks_indexed": status.map(|status| status.kv_blocks_indexed),
        "index_doubtful": status.map(|status| status.index_doubtful),
        "tokens": facts.tokens,
        "index_trust": status.map(|status| status.index_trust),
        "kv_events": facts.kv_source.is_some(),
        "block_size": spec.map(|spec| spec.block_size),
        "max_model_len": spec.map(|spec| spec.max_model_len),
        "max_running": spec.map(|spec| spec.max_running),
        "step": spec.map(|spec| spec.step),
        "step_error": facts.step_error,
        "rests_ms": rests.map(|rests| rests.as_ms()),
        "report": facts.load,
        "drain": facts.draining.map(|drain| moving::drain_json(&drain, fleet)),
        "migration": facts.migration.is_some().then(|| json!({ "connected": numerics.is_some(), "numerics_id": numerics, "link_bytes_per_s": link.bytes_per_s, "link_latency_ms": link.latency_s * 1e3 })),
    })
}

async fn requests(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let fleet = &shared.fleet;
    let now = fleet.clock.now();
    let requests: Vec<Value> = fleet
        .live()
        .iter()
        .map(|live| {
            let (state, replica) = live.state();
            json!({
                "id": live.id,
                "x_request_id": live.client_id,
                "trace_id": live.trace_id(),
                "model": live.model,
                "replica": replica.and_then(|id| fleet.engine(id)).map(|engine| engine.name.clone()),
                "state": state,
                "prompt_tokens": live.prompt,
                "output_tokens": live.output(),
                "age_ms": now.since(live.arrived).as_ms(),
                "movable": fleet.with_desk(|desk, _| desk.is_movable(live.id)),
            })
        })
        .collect();
    Json(json!({ "requests": requests }))
}

#[derive(Debug, Deserialize)]
struct Page {
    limit: Option<usize>,
}

async fn decisions(State(shared): State<Arc<Shared>>, page: Result<Query<Page>, QueryRejection>) -> Result<Json<Value>, Refusal> {
    let Query(page) = page.map_err(|error| Refusal::Body(ErrorBody::bad_request(error.body_text())))?;
    let limit = page.limit.unwrap_or(DECISIONS_DEFAULT);
    let records = shared.fleet.peek_router(|router, _| router.decisions(limit));
    let names = shared.fleet.names();
    let decisions: Vec<Value> = records.iter().map(|record| named(record, names.get(&record.request))).collect();
    Ok(Json(json!({ "decisions": decisions })))
}

/// By the client's `x-request-id`, or by the gateway's own number.
async fn decision(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    let by_number = || id.trim_start_matches('q').parse().ok().map(RequestId);
    let request = shared.fleet.request_named(&id).or_else(by_number);
    let record = request.and_then(|request| shared.fleet.peek_router(|router, _| router.decision(request)));
    let record = record.ok_or_else(|| Refusal::NotFound(format!("no decision on record for {id}; the latest ones are kept")))?;
    Ok(Json(named(&record, shared.fleet.names().get(&record.request))))
}

fn named(record: &DecisionRecord, named: Option<&Named>) -> Value {
    let mut value = serde_json::to_value(record).expect("a record is plain data");
    value["x_request_id"] = named.map(|named| named.client_id.as_str()).into();
    if let Some(trace_id) = named.and_then(|named| named.trace_id.as_deref()) {
        value["trace_id"] = trace_id.into();
    }
    value
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PolicyChoice {
    name: String,
}

async fn policy(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let name = shared.fleet.peek_router(|router, _| router.policy());
    let known: Vec<String> = PolicyName::ALL.iter().map(ToString::to_string).collect();
    Json(json!({ "name": name.to_string(), "known": known }))
}

async fn set_policy(State(shared): State<Arc<Shared>>, body: bytes::Bytes) -> Result<Json<Value>, Refusal> {
    let choice: PolicyChoice = baton_wire::openai::parse(&body).map_err(Refusal::Body)?;
    let invalid = |error: baton_policy::UnknownPolicy| Refusal::Body(ErrorBody::invalid("name", &choice.name, &error.to_string()));
    let name: PolicyName = choice.name.parse().map_err(invalid)?;
    shared.fleet.with_router(|router, _| router.set_policy(name));
    tracing::info!(policy = %name, "policy changed");
    Ok(policy(State(shared)).await)
}

/// Empties the router's index and the engines' prefix caches, as between compared runs.
async fn reset(State(shared): State<Arc<Shared>>) -> Json<Value> {
    let mut engines = Vec::new();
    for engine in shared.fleet.engines() {
        let outcome = reset_engine(&shared, &engine).await;
        engines.push(json!({ "id": engine.name, "reset": outcome.is_ok(), "error": outcome.err() }));
    }
    shared.fleet.with_router(|router, _| router.reset());
    Json(json!({ "engines": engines }))
}

async fn reset_engine(shared: &Shared, engine: &Engine) -> Result<(), String> {
    let path = match engine.config.kind {
        EngineKind::Baton | EngineKind::Vllm => "/reset_prefix_cache",
        EngineKind::Sglang => "/flush_cache",
        EngineKind::LlamaCpp | EngineKind::OpenAi => return Err("this kind of engine has no way to empty its cache".into()),
    };
    if engine.facts().health != Health::Ready {
        return Err("not ready".into());
    }
    let reset = shared.fleet.upstream.fetch(engine, Method::POST, path, RESET_TIMEOUT);
    reset.await.map(|_| ()).map_err(|error| error.to_string())
}

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described_and_nothing_else() {
        let page: Value = serde_json::from_str(OPENAPI).unwrap();
        let described: Vec<String> = page["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, item)| item.as_object().unwrap().keys().map(move |method| format!("{method} {path}")))
            .collect();
        let mut routed: Vec<String> = Vec::new();
        // The routes as written in this file.
        for line in include_str!("admin.rs").lines().filter_map(|line| line.trim().strip_prefix(".route(\"")) {
            let (path, handlers) = line.split_once('"').unwrap();
            for method in ["get", "put", "post"].into_iter().filter(|method| handlers.contains(&format!("{method}("))) {
                routed.push(format!("{method} {path}"));
            }
        }
        assert_eq!(described, routed);
    }

    #[test]
    fn pages_of_other_sites_are_kept_out() {
        let elsewhere = |host: &str, origin: Option<&str>| {
            let mut headers = HeaderMap::from_iter([(header::HOST, host.parse().unwrap())]);
            headers.extend(origin.map(|origin| (header::ORIGIN, origin.parse().unwrap())));
            is_from_elsewhere(&headers)
        };
        assert!(!elsewhere("127.0.0.1:8080", None) && !elsewhere("localhost:8080", Some("http://localhost:8080")));
        assert!(!elsewhere("[::1]:8080", None) && !elsewhere("localhost:8080", Some("https://localhost:8080")));
        assert!(elsewhere("127.0.0.1:8080", Some("http://evil.example")) && elsewhere("evil.example", None));
        assert!(elsewhere("127.0.0.1:8080", Some("null")));
    }

    #[test]
    fn keys_are_compared_whole() {
        assert!(equal_in_constant_time(b"abc", b"abc"));
        assert!(!equal_in_constant_time(b"abc", b"abd") && !equal_in_constant_time(b"abc", b"ab"));
    }
}
