//! Moving requests, and emptying replicas.

use std::{sync::Arc, time::UNIX_EPOCH};

use axum::{
    Json,
    extract::{Path, Query, State, rejection::QueryRejection},
};
use baton_units::{DurationMs, ReplicaId};
use baton_wire::openai::ErrorBody;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Page;
use crate::{
    carry::{MoveOutcome, MoveRecord},
    engine::{Drain, DrainOrder, Engine},
    fleet::Fleet,
    gateway::Shared,
    refusal::Refusal,
};

const MOVES_DEFAULT: usize = 100;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Target {
    /// A replica's name.
    to: String,
}

/// Moves a running request and waits until it is there, or stays.
pub(super) async fn migrate(State(shared): State<Arc<Shared>>, Path(id): Path<String>, body: bytes::Bytes) -> Result<Json<Value>, Refusal> {
    let fleet = &shared.fleet;
    let target: Target = baton_wire::openai::parse(&body).map_err(Refusal::Body)?;
    let to = replica_named(fleet, &target.to)?;
    let unknown = || Refusal::NotFound(format!("no running request {id}; `GET /baton/v1/requests` lists them"));
    let by_number = || id.trim_start_matches('q').parse().ok().map(baton_units::RequestId);
    let request = fleet.request_named(&id).or_else(by_number).ok_or_else(unknown)?;
    if !fleet.live().iter().any(|live| live.id == request) {
        return Err(unknown());
    }
    let (reason, told) = fleet.order_move(request, to.id).map_err(|error| Refusal::Conflict(error.to_string()))?;
    // The desk tells every end of a move; without one the gateway is going.
    let records = told.await.map_err(|_| Refusal::Draining)?;
    let last = records.last().ok_or_else(|| Refusal::Conflict("the request ended before it moved".into()))?;
    if last.outcome != MoveOutcome::Moved {
        let why = last.why.clone().unwrap_or_else(|| format!("the request {}", last.outcome.name()));
        return Err(Refusal::Conflict(format!("{}: {why}", last.outcome.name())));
    }
    let sum = |value: fn(&MoveRecord) -> u64| records.iter().map(value).sum::<u64>();
    let most = |value: fn(&MoveRecord) -> Option<f64>| records.iter().filter_map(value).reduce(f64::max);
    Ok(Json(json!({
        "outcome": last.outcome,
        "reason": reason,
        "bytes_sent": sum(|record| record.bytes_sent),
        "blocks_already_held": sum(|record| u64::from(record.blocks_already_held)),
        "gap_ms": most(|record| record.gap_ms),
        "compute_gap_ms": most(|record| record.compute_gap_ms),
        "took_ms": sum_ms(&records),
    })))
}

fn sum_ms(records: &[MoveRecord]) -> f64 {
    records.iter().map(|record| record.took_ms).sum()
}

/// The latest moves, newest first.
pub(super) async fn moves(State(shared): State<Arc<Shared>>, page: Result<Query<Page>, QueryRejection>) -> Result<Json<Value>, Refusal> {
    let Query(page) = page.map_err(|error| Refusal::Body(ErrorBody::bad_request(error.body_text())))?;
    let fleet = &shared.fleet;
    let records = fleet.with_desk(|desk, _| desk.moves(page.limit.unwrap_or(MOVES_DEFAULT)));
    let names = fleet.names();
    let name = |id: ReplicaId| fleet.engine(id).map(|engine| engine.name.clone());
    let row = |record: MoveRecord| {
        json!({
            "at": record.at.duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64()),
            "request": record.request,
            "x_request_id": names.get(&record.request).map(|named| named.client_id.as_str()),
            "choice": record.choice,
            "from": name(record.from),
            "to": name(record.to),
            "kind": record.kind,
            "reason": record.reason,
            "outcome": record.outcome,
            "why": record.why,
            "tokens": record.tokens,
            "bytes_sent": record.bytes_sent,
            "blocks_already_held": record.blocks_already_held,
            "rounds": record.rounds,
            "copied_ms": record.copied_ms,
            "compute_gap_ms": record.compute_gap_ms,
            "gap_ms": record.gap_ms,
            "took_ms": record.took_ms,
            "expected_ms": record.expected_ms,
        })
    };
    Ok(Json(json!({ "moves": records.into_iter().map(row).collect::<Vec<_>>() })))
}

/// New requests go elsewhere from here on, and running ones leave as they can.
pub(super) async fn drain(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    let fleet = &shared.fleet;
    let engine = replica_named(fleet, &id)?;
    if fleet.engines().iter().all(|other| other.id == engine.id || !other.facts().takes_requests()) {
        return Err(Refusal::Conflict(format!("{id} is the only replica that takes requests; start or undrain another one first")));
    }
    fleet.begin_drain(&engine, DrainOrder::Operator);
    Ok(Json(status(fleet, &engine)))
}

pub(super) async fn undrain(State(shared): State<Arc<Shared>>, Path(id): Path<String>) -> Result<Json<Value>, Refusal> {
    let fleet = &shared.fleet;
    let engine = replica_named(fleet, &id)?;
    fleet.set_draining(&engine, None);
    tracing::info!(replica = engine.name, "takes requests again");
    Ok(Json(status(fleet, &engine)))
}

fn status(fleet: &Fleet, engine: &Engine) -> Value {
    let (health, drain) = {
        let facts = engine.facts();
        (facts.health, facts.draining)
    };
    json!({
        "id": engine.name,
        "state": health,
        "in_flight": fleet.in_flight(engine.id),
        "drain": drain.map(|drain| drain_json(&drain, fleet)),
    })
}

/// A drain under way or done.
pub(super) fn drain_json(drain: &Drain, fleet: &Fleet) -> Value {
    json!({
        "since_ms": fleet.clock.now().since(drain.since).as_ms(),
        "by": drain.by,
        "forecast_ms": drain.forecast.map(|forecast| forecast.finishes_in.as_ms()),
        "forecast_moves": drain.forecast.map(|forecast| forecast.moves),
        "forecast_stays": drain.forecast.map(|forecast| forecast.stays),
        "forecast_stays_ms": drain.forecast.and_then(|forecast| forecast.stays_for).map(|stays| stays.as_ms()),
        "emptied_ms": drain.emptied.map(|at| at.since(drain.since).as_ms()),
    })
}

fn replica_named(fleet: &Fleet, name: &str) -> Result<Arc<Engine>, Refusal> {
    let engines = fleet.engines();
    engines.iter().find(|engine| engine.name == name).cloned().ok_or_else(|| {
        let names: Vec<&str> = engines.iter().map(|engine| engine.name.as_str()).collect();
        Refusal::NotFound(format!("no replica {name}; this fleet has {}", names.join(", ")))
    })
}
