//! One look at an engine, by what its kind shows.

use std::{collections::BTreeMap, time::Duration};

use baton_cost::StepCoefficients;
use baton_policy::{Discipline, LoadReport, ReplicaSpec};
use baton_units::{BlockSize, Blocks, Incarnation, Time, Tokens};
use baton_wire::{
    openai::{ModelCard, ModelList},
    replica::{KvEventSource, MigrationSource, Report},
};
use bytes::Bytes;
use http::Method;
use serde::Deserialize;

use super::{kv_events::of_rank, prometheus::Page};
use crate::{
    carry::link::Destination,
    config::EngineKind,
    engine::{Engine, Facts},
    upstream::{FetchError, Upstream},
};

/// What an engine showed of itself; what it does not show is `None`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Sighting {
    /// Differs in each life of the process.
    pub(super) mark: Option<u64>,
    block_size: Option<u32>,
    kv_blocks: Option<u32>,
    kv_blocks_free: Option<u32>,
    max_model_len: Option<u32>,
    max_running: Option<u32>,
    token_budget: Option<u32>,
    /// In real seconds.
    pub(super) step: Option<StepCoefficients>,
    pub(super) step_error: Option<f64>,
    pub(super) steps: u64,
    waiting: Option<u32>,
    running: Option<u32>,
    prefill_backlog: Option<u32>,
    pub(super) kv_source: Option<KvEventSource>,
    pub(super) migration: Option<Destination>,
}

/// Asks an engine how it is.
pub(super) async fn probe(upstream: &Upstream, engine: &Engine, timeout: Duration) -> Result<Sighting, FetchError> {
    let get = |path: &'static str| get(upstream, engine, path, timeout);
    match engine.config.kind {
        EngineKind::Baton => {
            let report: Report = read(&get("/baton/v1/replica").await?)?;
            Ok(Sighting::of_report(&report))
        }
        EngineKind::Vllm => {
            // /metrics answers even when the engine core is dead.
            get("/health").await?;
            let page = get("/metrics").await?;
            Ok(Sighting::of_vllm(Page::of_rank(&String::from_utf8_lossy(&page), "engine", engine.rank)))
        }
        EngineKind::Sglang => {
            get("/health").await?;
            let page = get("/metrics").await.unwrap_or_default();
            Ok(Sighting::of_sglang(Page::of_rank(&String::from_utf8_lossy(&page), "dp_rank", engine.rank)))
        }
        EngineKind::LlamaCpp => {
            get("/health").await?;
            let props = get("/props").await.ok().and_then(|props| read(&props).ok()).unwrap_or_default();
            let page = get("/metrics").await.unwrap_or_default();
            Ok(Sighting::of_llamacpp(&props, Page::new(&String::from_utf8_lossy(&page))))
        }
        EngineKind::OpenAi => get("/v1/models").await.map(|_| Sighting::default()),
    }
}

/// The models that an engine lists.
pub(super) async fn models(upstream: &Upstream, engine: &Engine, timeout: Duration) -> Result<Vec<ModelCard>, FetchError> {
    Ok(read::<ModelList>(&get(upstream, engine, "/v1/models", timeout).await?)?.data)
}

/// Has it compute one token, for nobody.
pub(super) async fn one_token(upstream: &Upstream, engine: &Engine, model: &str, timeout: Duration) -> Result<(), FetchError> {
    let body = serde_json::json!({ "model": model, "prompt": "a", "max_tokens": 1, "temperature": 0 }).to_string();
    upstream.post(engine, "/v1/completions", body.into(), timeout).await.map(drop)
}

/// The engine's version, where it tells one; of llama.cpp the file and its number format as well, since its models have no other root.
pub(super) async fn version(upstream: &Upstream, engine: &Engine, timeout: Duration) -> Option<String> {
    #[derive(Deserialize)]
    struct Version {
        version: String,
    }
    match engine.config.kind {
        EngineKind::Vllm => {
            let body = get(upstream, engine, "/version", timeout).await.ok()?;
            read::<Version>(&body).ok().map(|answer| answer.version)
        }
        EngineKind::LlamaCpp => {
            let body = get(upstream, engine, "/props", timeout).await.ok()?;
            read::<LlamaProps>(&body).ok().map(|props| props.version())
        }
        EngineKind::Baton | EngineKind::Sglang | EngineKind::OpenAi => None,
    }
}

/// Where a vLLM engine takes part in migration, as what runs beside it tells (`python/baton-vllm`). A report that does not come says nothing.
pub(super) async fn migration(upstream: &Upstream, engine: &Engine, timeout: Duration) -> Result<Option<Destination>, FetchError> {
    #[derive(Deserialize)]
    struct Beside {
        incarnation: u64,
        migration: Option<MigrationSource>,
    }
    // What runs beside it has one address for all ranks.
    if engine.config.kind != EngineKind::Vllm || engine.rank.is_some() {
        return Ok(None);
    }
    let beside: Beside = match get(upstream, engine, "/baton/v1/replica", timeout).await {
        Ok(body) => read(&body)?,
        // Nothing runs beside it.
        Err(FetchError::Status(_)) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(beside.migration.map(|source| Destination::of(&source, beside.incarnation)))
}

/// Where an engine publishes its KV events: as configured, else as vLLM tells.
pub(super) async fn kv_source(upstream: &Upstream, engine: &Engine, timeout: Duration) -> Option<KvEventSource> {
    let rank = engine.rank.unwrap_or(0);
    if let Some(endpoint) = &engine.config.kv_events {
        let of_rank = |endpoint: &String| if rank == 0 { Some(endpoint.clone()) } else { of_rank(endpoint, rank) };
        let replay_endpoint = engine.config.kv_replay.as_ref().and_then(of_rank);
        return Some(KvEventSource { endpoint: of_rank(endpoint)?, replay_endpoint, topic: String::new() });
    }
    if engine.config.kind != EngineKind::Vllm {
        return None;
    }
    // Absent in older releases and where events are off: then the router's own ledger has to do.
    let body = get(upstream, engine, "/kv_event_sources", timeout).await.ok()?;
    vllm_source(&body, rank)
}

async fn get(upstream: &Upstream, engine: &Engine, path: &str, timeout: Duration) -> Result<Bytes, FetchError> {
    upstream.fetch(engine, Method::GET, path, timeout).await
}

fn read<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, FetchError> {
    serde_json::from_slice(body).map_err(|error| FetchError::Unreadable(error.to_string()))
}

fn vllm_source(body: &[u8], rank: u32) -> Option<KvEventSource> {
    #[derive(Deserialize)]
    struct Source {
        endpoint: Option<String>,
        replay_endpoint: Option<String>,
        #[serde(default)]
        topic: String,
        #[serde(default)]
        enable_kv_cache_events: bool,
    }
    // By data-parallel rank.
    let mut sources: BTreeMap<String, Source> = serde_json::from_slice(body).ok()?;
    let source = sources.remove(&rank.to_string()).filter(|source| source.enable_kv_cache_events)?;
    Some(KvEventSource { endpoint: source.endpoint?, replay_endpoint: source.replay_endpoint, topic: source.topic })
}

/// What llama.cpp's `/props` says.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LlamaProps {
    total_slots: Option<u32>,
    default_generation_settings: LlamaSettings,
    build_info: String,
    model_ftype: String,
    model_path: String,
}

impl LlamaProps {
    fn version(&self) -> String {
        let file = self.model_path.rsplit(['/', '\\']).next().unwrap_or_default();
        format!("{} {} {file}", self.build_info, self.model_ftype)
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct LlamaSettings {
    /// Context of one slot.
    n_ctx: Option<u32>,
}

impl Sighting {
    fn of_report(report: &Report) -> Self {
        Self {
            mark: Some(report.incarnation),
            block_size: Some(report.block_size),
            kv_blocks: Some(report.kv_blocks_total),
            kv_blocks_free: Some(report.kv_blocks_free),
            max_model_len: Some(report.max_model_len),
            max_running: Some(report.max_running),
            token_budget: Some(report.token_budget),
            step: Some(report.step.scaled(report.time_scale)),
            step_error: Some(report.step_error),
            steps: report.steps,
            waiting: Some(report.waiting),
            running: Some(report.running),
            prefill_backlog: Some(u32::try_from(report.prefill_backlog_tokens).unwrap_or(u32::MAX)),
            kv_source: report.kv_events.clone(),
            migration: report.migration.as_ref().map(|source| Destination::of(source, report.incarnation)),
        }
    }

    fn of_vllm(page: Page<'_>) -> Self {
        let count = |name| page.sum(name).map(|value| value as u32);
        let info = |label| page.label("vllm:cache_config_info", label).and_then(|value| value.parse::<u32>().ok());
        let kv_blocks = info("num_gpu_blocks");
        let used = page.sum("vllm:kv_cache_usage_perc");
        Self {
            mark: page.sum("process_start_time_seconds").map(f64::to_bits),
            block_size: info("block_size"),
            kv_blocks,
            kv_blocks_free: kv_blocks.zip(used).map(|(blocks, used)| (f64::from(blocks) * (1.0 - used)) as u32),
            waiting: count("vllm:num_requests_waiting"),
            running: count("vllm:num_requests_running"),
            ..Self::default()
        }
    }

    fn of_sglang(page: Page<'_>) -> Self {
        let count = |name| page.sum(name).map(|value| value as u32);
        let info = |label| page.label("sglang:cache_config_info", label).and_then(|value| value.parse::<u32>().ok());
        let kv_blocks = info("num_pages");
        let used = page.sum("sglang:token_usage");
        Self {
            mark: page.sum("process_start_time_seconds").map(f64::to_bits),
            block_size: info("page_size"),
            kv_blocks,
            kv_blocks_free: kv_blocks.zip(used).map(|(blocks, used)| (f64::from(blocks) * (1.0 - used)) as u32),
            waiting: count("sglang:num_queue_reqs"),
            running: count("sglang:num_running_reqs"),
            ..Self::default()
        }
    }

    fn of_llamacpp(props: &LlamaProps, page: Page<'_>) -> Self {
        let count = |name| page.sum(name).map(|value| value as u32);
        Self {
            max_model_len: props.default_generation_settings.n_ctx,
            max_running: props.total_slots,
            // Slots hold their context each; blocks are only our way to count it.
            kv_blocks: props.default_generation_settings.n_ctx.zip(props.total_slots).map(|(context, slots)| context / 16 * slots),
            block_size: props.total_slots.map(|_| 16),
            waiting: count("llamacpp:requests_deferred"),
            running: count("llamacpp:requests_processing"),
            ..Self::default()
        }
    }

    /// The shape for the router: shown, else configured, else a stated default.
    pub(super) fn spec(&self, engine: &Engine, facts: &Facts, life: Incarnation) -> ReplicaSpec {
        let config = &engine.config;
        let listed = facts.models.iter().filter_map(|card| card.max_model_len).max();
        let max_model_len = self.max_model_len.or(config.max_model_len).or(listed).unwrap_or(u32::MAX);
        let block_size = self.block_size.or(config.block_size).and_then(BlockSize::new).unwrap_or_default();
        let budget = Tokens(self.token_budget.unwrap_or_else(|| engine.token_budget()));
        ReplicaSpec {
            id: engine.id,
            incarnation: life,
            block_size,
            kv_blocks: Blocks(self.kv_blocks.or(config.kv_blocks).unwrap_or(8192)),
            max_model_len: Tokens(max_model_len),
            max_running: self.max_running.or(config.max_running).unwrap_or(256),
            discipline: Discipline::Chunked { budget },
            step: facts.speed.step(),
        }
    }

    /// The load, where the engine shows all of it; a part would be read as an idle engine.
    pub(super) fn load(&self, taken_at: Time) -> Option<LoadReport> {
        Some(LoadReport {
            taken_at,
            waiting: self.waiting?,
            running: self.running?,
            kv_blocks_free: Blocks(self.kv_blocks_free?),
            prefill_backlog: Tokens(self.prefill_backlog.unwrap_or(0)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vllm_server_shows_its_blocks_and_its_life() {
        let sighting = Sighting::of_vllm(Page::new(include_str!("../../tests/fixtures/metrics-fresh.txt")));
        assert_eq!((sighting.block_size, sighting.kv_blocks, sighting.kv_blocks_free), (Some(32), Some(128), Some(128)));
        assert!(sighting.mark.is_some());
        let load = sighting.load(Time(5)).unwrap();
        assert_eq!((load.waiting, load.running, load.taken_at), (0, 0, Time(5)));
    }

    #[test]
    fn an_engine_that_shows_nothing_gets_the_configured_shape() {
        let mut config = crate::config::EngineConfig::new("http://h:1".parse().unwrap(), EngineKind::OpenAi);
        config.max_model_len = Some(4096);
        config.kv_blocks = Some(77);
        let engine = Engine::new(baton_units::ReplicaId(3), Incarnation(0), config.into(), 1);
        let spec = Sighting::default().spec(&engine, &engine.facts(), Incarnation(2));
        assert_eq!((spec.max_model_len, spec.kv_blocks, spec.incarnation), (Tokens(4096), Blocks(77), Incarnation(2)));
        assert_eq!(Sighting::default().load(Time::ZERO), None);
    }

    #[test]
    fn vllm_tells_where_its_events_are() {
        let recorded = include_str!("../../tests/fixtures/kv-event-sources.resp");
        let source = vllm_source(recorded.split_once("\r\n\r\n").unwrap().1.as_bytes(), 0).unwrap();
        assert_eq!(source.endpoint, "ipc://v1-events.sock");
        assert_eq!(source.replay_endpoint.as_deref(), Some("tcp://127.0.0.1:5558"));
        assert_eq!(source.topic, "kv@smollm2");
        let two = br#"{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"},"1":{"enable_kv_cache_events":true,"endpoint":"tcp://*:5558"}}"#;
        assert_eq!(vllm_source(two, 1).unwrap().endpoint, "tcp://*:5558");
        assert_eq!(vllm_source(two, 2), None);
    }

    #[test]
    fn llamacpp_shows_slots_and_their_context() {
        let props: LlamaProps =
            serde_json::from_str(r#"{"default_generation_settings":{"params":{},"n_ctx":4096},"total_slots":2}"#).unwrap();
        let sighting = Sighting::of_llamacpp(&props, Page::new("llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"));
        assert_eq!((sighting.max_model_len, sighting.max_running, sighting.running), (Some(4096), Some(2), Some(1)));
        assert_eq!(sighting.kv_blocks, Some(512));
        let recorded = include_str!("../../tests/fixtures/llamacpp-props.resp").split_once("\r\n\r\n").unwrap().1;
        let props: LlamaProps = serde_json::from_str(recorded).unwrap();
        assert_eq!(props.version(), "b0-unknown Q4_1 smollm2-135m-instruct-q4_1.gguf");
    }
}
