//! Counters and histograms in Prometheus's text form. Labels are routes, outcomes and the names of configured engines and tenants: bounded, and
//! never a client's word.

use std::{
    collections::BTreeMap,
    fmt::Write,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use baton_policy::Trust;
use baton_session::Fault;
use baton_units::{ReplicaId, Tokens};

use crate::{
    carry::{MoveOutcome, MoveRecord},
    engine::Health,
    fleet::Fleet,
    tenants::{Limit, Tenants, Usage},
};

/// Upper bounds in seconds, for times from a warm first token to a long answer.
const BOUNDS_S: [f64; 16] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Debug, Default)]
pub(crate) struct Metrics {
    /// By route and outcome.
    requests: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    replicas: Mutex<BTreeMap<ReplicaId, ReplicaCounters>>,
    faults: Mutex<BTreeMap<&'static str, u64>>,
    /// By whether the engines compute the same bits.
    resumed: Mutex<BTreeMap<&'static str, u64>>,
    ttft: Histogram,
    token_gap: Histogram,
    duration: Histogram,
    held: Histogram,
    /// From a request's bytes to its verdict's call, tokenizing included.
    intake: Histogram,
    /// By reason and outcome.
    moves: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    move_bytes: AtomicU64,
    move_blocks_held: AtomicU64,
    move_compute_gap: Histogram,
    move_client_gap: Histogram,
    /// Of engines, by label.
    sources: Mutex<BTreeMap<String, SourceSaid>>,
}

/// What a source of engines said last, and how often it could not.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct SourceSaid {
    /// In the fleet by its word.
    pub(crate) engines: usize,
    /// Named beyond its bound.
    pub(crate) refused: usize,
    pub(crate) failures: u64,
    /// Why it cannot say anything at the moment.
    pub(crate) failing: Option<String>,
}

#[derive(Debug, Default, Clone, Copy)]
struct ReplicaCounters {
    attempts: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    output_tokens: u64,
    hit_believed_tokens: u64,
    hit_missed_tokens: u64,
    hit_surplus_tokens: u64,
    kv_batches: u64,
    kv_gaps: u64,
    kv_skipped: u64,
}

type Count = fn(&ReplicaCounters) -> u64;
type Word = fn(&SourceSaid) -> f64;

#[derive(Debug, Default)]
struct Histogram {
    /// One per bound, not cumulative; what exceeds the last is in the count alone.
    buckets: [AtomicU64; BOUNDS_S.len()],
    count: AtomicU64,
    sum_ns: AtomicU64,
}

impl Metrics {
    pub(crate) fn request_ended(&self, route: &'static str, outcome: &'static str, took: Duration) {
        *lock(&self.requests).entry((route, outcome)).or_default() += 1;
        self.duration.observe(took);
    }

    pub(crate) fn attempt(&self, replica: ReplicaId) {
        self.replica(replica, |counters| counters.attempts += 1);
    }

    pub(crate) fn fault(&self, fault: Fault) {
        *lock(&self.faults).entry(fault_name(fault)).or_default() += 1;
    }

    /// A stream goes on at another engine than it began at; `exact` if that computes the same bits.
    pub(crate) fn resumed(&self, exact: bool) {
        *lock(&self.resumed).entry(if exact { "same" } else { "other" }).or_default() += 1;
    }

    pub(crate) fn first_token(&self, since_arrival: Duration) {
        self.ttft.observe(since_arrival);
    }

    pub(crate) fn token_gap(&self, gap: Duration) {
        self.token_gap.observe(gap);
    }

    pub(crate) fn held(&self, span: Duration) {
        self.held.observe(span);
    }

    pub(crate) fn intake(&self, span: Duration) {
        self.intake.observe(span);
    }

    pub(crate) fn tokens(&self, replica: ReplicaId, prompt: Tokens, cached: Tokens, output: Tokens) {
        self.replica(replica, |counters| {
            counters.prompt_tokens += u64::from(prompt.0);
            counters.cached_tokens += u64::from(cached.0);
            counters.output_tokens += u64::from(output.0);
        });
    }

    /// What the router believed of a prompt's cached part against what the engine says.
    pub(crate) fn hit_predicted(&self, replica: ReplicaId, believed: Tokens, cached: Tokens) {
        self.replica(replica, |counters| {
            counters.hit_believed_tokens += u64::from(believed.0);
            counters.hit_missed_tokens += u64::from(believed.saturating_sub(cached).0);
            counters.hit_surplus_tokens += u64::from(cached.saturating_sub(believed).0);
        });
    }

    pub(crate) fn kv_batch(&self, replica: ReplicaId, gap: bool, skipped: usize) {
        self.replica(replica, |counters| {
            counters.kv_batches += 1;
            counters.kv_gaps += u64::from(gap);
            counters.kv_skipped += skipped as u64;
        });
    }

    /// Engines that are gone: their ids are free for others, whose counts begin at nothing.
    pub(crate) fn forget(&self, gone: &[ReplicaId]) {
        lock(&self.replicas).retain(|id, _| !gone.contains(id));
    }

    /// Sources that there are from here on; those that were before keep what is known of them.
    pub(crate) fn set_sources(&self, labels: impl IntoIterator<Item = String>) {
        let mut sources = lock(&self.sources);
        let mut former = std::mem::take(&mut *sources);
        sources.extend(labels.into_iter().map(|label| {
            let said = former.remove(&label).unwrap_or_default();
            (label, said)
        }));
    }

    /// Changes what is known of a source, and gives it as it was; nothing of one that is not there.
    pub(crate) fn source(&self, label: &str, change: impl FnOnce(&mut SourceSaid)) -> Option<SourceSaid> {
        let mut sources = lock(&self.sources);
        let said = sources.get_mut(label)?;
        let before = said.clone();
        change(said);
        Some(before)
    }

    pub(crate) fn sources(&self) -> BTreeMap<String, SourceSaid> {
        lock(&self.sources).clone()
    }

    fn replica(&self, id: ReplicaId, change: impl FnOnce(&mut ReplicaCounters)) {
        change(lock(&self.replicas).entry(id).or_default());
    }

    /// The page. Gauges are read from the fleet at this moment; `text_cache_bytes` are in use for tokens of known text.
    pub(crate) fn move_ended(&self, record: &MoveRecord) {
        *lock(&self.moves).entry((record.kind, record.outcome.name())).or_default() += 1;
        self.move_bytes.fetch_add(record.bytes_sent, Ordering::Relaxed);
        self.move_blocks_held.fetch_add(u64::from(record.blocks_already_held), Ordering::Relaxed);
        let seconds = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        if let Some(gap) = record.compute_gap_ms.filter(|_| record.outcome == MoveOutcome::Moved) {
            self.move_compute_gap.observe(seconds(gap));
        }
        if let Some(gap) = record.gap_ms {
            self.move_client_gap.observe(seconds(gap));
        }
    }

    pub(crate) fn render(&self, fleet: &Fleet, text_cache_bytes: usize) -> String {
        let mut page = Page::default();
        page.family("baton_requests_total", "counter", "Requests that ended, by route and outcome.");
        for ((route, outcome), count) in lock(&self.requests).iter() {
            page.sample("baton_requests_total", &[("route", route), ("outcome", outcome)], *count as f64);
        }
        page.family("baton_attempt_faults_total", "counter", "Attempts at a replica that came to nothing, by cause.");
        for (fault, count) in lock(&self.faults).iter() {
            page.sample("baton_attempt_faults_total", &[("fault", fault)], *count as f64);
        }
        page.family("baton_streams_resumed_total", "counter", "Streams that went on at another engine from their tokens, by its bits.");
        for (numerics, count) in lock(&self.resumed).iter() {
            page.sample("baton_streams_resumed_total", &[("numerics", numerics)], *count as f64);
        }
        page.histogram("baton_ttft_seconds", "From a request's arrival to its first token.", &self.ttft);
        page.histogram("baton_token_gap_seconds", "Between events with output of one stream.", &self.token_gap);
        page.histogram("baton_request_duration_seconds", "From a request's arrival to its end.", &self.duration);
        page.histogram("baton_held_seconds", "In the router's queue, for requests that did not go at once.", &self.held);
        page.histogram("baton_intake_seconds", "Parsing, tokenizing and keying a request.", &self.intake);
        self.render_moves(&mut page);
        self.render_replicas(&mut page, fleet);
        self.render_sources(&mut page);
        render_index(&mut page, fleet);
        page.family("baton_text_cache_bytes", "gauge", "Memory of the tokens of text that was seen before.");
        page.sample("baton_text_cache_bytes", &[], text_cache_bytes as f64);
        page.family("baton_text_cache_bytes_max", "gauge", "Its bound, gateway.text_cache_bytes.");
        page.sample("baton_text_cache_bytes_max", &[], fleet.front().text_cache_bytes as f64);
        page.family("baton_held_requests", "gauge", "Requests waiting in the router.");
        page.sample("baton_held_requests", &[], fleet.peek_router(|router, _| router.held()) as f64);
        page.family("baton_sheds_total", "counter", "Requests turned away for the load, by class.");
        for (class, count) in fleet.peek_router(|router, _| router.sheds().map(|(class, n)| (class.name.clone(), n)).collect::<Vec<_>>()) {
            page.sample("baton_sheds_total", &[("class", &class)], count as f64);
        }
        render_tenants(&mut page, &fleet.tenants());
        page.family("baton_live_requests", "gauge", "Requests in the gateway.");
        page.sample("baton_live_requests", &[], fleet.live().len() as f64);
        page.text
    }

    fn render_moves(&self, page: &mut Page) {
        page.family("baton_moves_total", "counter", "Moves of running sequences between replicas that ended, by reason and outcome.");
        for ((reason, outcome), count) in lock(&self.moves).iter() {
            page.sample("baton_moves_total", &[("reason", reason), ("outcome", outcome)], *count as f64);
        }
        page.family("baton_move_bytes_total", "counter", "KV that was sent for moves.");
        page.sample("baton_move_bytes_total", &[], self.move_bytes.load(Ordering::Relaxed) as f64);
        page.family("baton_move_blocks_held_total", "counter", "Blocks that were not sent since the target had them.");
        page.sample("baton_move_blocks_held_total", &[], self.move_blocks_held.load(Ordering::Relaxed) as f64);
        page.histogram(
            "baton_move_compute_gap_seconds",
            "From a moving sequence's freeze until it may go on elsewhere.",
            &self.move_compute_gap,
        );
        page.histogram("baton_move_client_gap_seconds", "Between a stream's tokens before and after its move.", &self.move_client_gap);
    }

    fn render_sources(&self, page: &mut Page) {
        let sources = self.sources();
        let families: [(&str, &str, &str, Word); 4] = [
            ("baton_discovery_engines", "gauge", "Replicas that are in the fleet by a source's word.", |said| said.engines as f64),
            ("baton_discovery_refused", "gauge", "Engines that a source names beyond its max_engines.", |said| said.refused as f64),
            ("baton_discovery_failing", "gauge", "1 while a source cannot look; what it said last holds.", |said| {
                f64::from(u8::from(said.failing.is_some()))
            }),
            ("baton_discovery_failures_total", "counter", "Looks of a source that came to nothing.", |said| said.failures as f64),
        ];
        for (name, kind, help, value) in families {
            page.family(name, kind, help);
            for (label, said) in &sources {
                page.sample(name, &[("source", label)], value(said));
            }
        }
    }

    fn render_replicas(&self, page: &mut Page, fleet: &Fleet) {
        let engines = fleet.engines();
        let counters = lock(&self.replicas).clone();
        let of = |id: ReplicaId| counters.get(&id).copied().unwrap_or_default();
        let families: [(&str, &str, Count); 10] = [
            ("baton_attempts_total", "Requests sent to a replica.", |c| c.attempts),
            ("baton_prompt_tokens_total", "Prompt tokens of finished requests.", |c| c.prompt_tokens),
            ("baton_cached_tokens_total", "Of these, tokens whose KV was there, as the engine says.", |c| c.cached_tokens),
            ("baton_output_tokens_total", "Output tokens of finished requests.", |c| c.output_tokens),
            ("baton_hit_believed_tokens_total", "Tokens believed to be cached, where the engine says how many were.", |c| {
                c.hit_believed_tokens
            }),
            ("baton_hit_missed_tokens_total", "Tokens believed to be cached that were not.", |c| c.hit_missed_tokens),
            ("baton_hit_surplus_tokens_total", "Cached tokens that the router did not know of.", |c| c.hit_surplus_tokens),
            ("baton_kv_batches_total", "Batches of KV events taken in.", |c| c.kv_batches),
            ("baton_kv_gaps_total", "Batches that came before their predecessors.", |c| c.kv_gaps),
            ("baton_kv_skipped_total", "KV events that the index cannot use.", |c| c.kv_skipped),
        ];
        for (name, help, value) in families {
            page.family(name, "counter", help);
            for engine in &engines {
                page.sample(name, &[("replica", &engine.name)], value(&of(engine.id)) as f64);
            }
        }
        page.family("baton_replica_ready", "gauge", "1 when the replica takes new requests.");
        for engine in &engines {
            let ready = engine.facts().health == Health::Ready;
            page.sample("baton_replica_ready", &[("replica", &engine.name)], f64::from(u8::from(ready)));
        }
        page.family("baton_replica_step_error", "gauge", "Relative error of predicted step times, moving average.");
        for engine in &engines {
            page.sample("baton_replica_step_error", &[("replica", &engine.name)], engine.facts().step_error);
        }
        let statuses = fleet.peek_router(|router, now| router.fleet(now));
        let names: BTreeMap<ReplicaId, &str> = engines.iter().map(|engine| (engine.id, engine.name.as_str())).collect();
        let name = |id: ReplicaId| names.get(&id).copied().unwrap_or_default();
        page.family("baton_replica_queue_seconds", "gauge", "Predicted wait before a new prompt starts.");
        for status in &statuses {
            page.sample("baton_replica_queue_seconds", &[("replica", name(status.id))], status.queue_ms / 1e3);
        }
        page.family("baton_replica_in_flight", "gauge", "Requests sent and not ended.");
        for status in &statuses {
            page.sample("baton_replica_in_flight", &[("replica", name(status.id))], f64::from(status.in_flight));
        }
        page.family("baton_replica_kv_blocks_free", "gauge", "KV blocks not pinned by running requests, by the router's books.");
        for status in &statuses {
            page.sample("baton_replica_kv_blocks_free", &[("replica", name(status.id))], status.kv_blocks_free.as_f64());
        }
        page.family("baton_replica_kv_blocks_indexed", "gauge", "Blocks believed to be on the replica.");
        for status in &statuses {
            page.sample("baton_replica_kv_blocks_indexed", &[("replica", name(status.id))], f64::from(status.kv_blocks_indexed));
        }
    }
}

/// Use of the fleet by tenant; nothing where there are none.
fn render_tenants(page: &mut Page, tenants: &Tenants) {
    if tenants.is_open() {
        return;
    }
    let usages: Vec<Usage<'_>> = tenants.usage().collect();
    page.family("baton_strangers_total", "counter", "Requests refused since they had no key of a tenant.");
    page.sample("baton_strangers_total", &[], tenants.strangers() as f64);
    page.family("baton_tenant_requests_total", "counter", "Requests let in, by tenant.");
    for usage in &usages {
        page.sample("baton_tenant_requests_total", &[("tenant", usage.name)], usage.requests as f64);
    }
    page.family("baton_tenant_refused_total", "counter", "Requests refused by a limit of their tenant.");
    for usage in &usages {
        for (limit, refused) in Limit::ALL.into_iter().zip(usage.refused) {
            page.sample("baton_tenant_refused_total", &[("tenant", usage.name), ("limit", limit.option())], refused as f64);
        }
    }
    page.family("baton_tenant_tokens_total", "counter", "Tokens of requests that ended, by tenant.");
    for usage in &usages {
        for (kind, tokens) in [("prompt", usage.prompt_tokens), ("output", usage.output_tokens)] {
            page.sample("baton_tenant_tokens_total", &[("tenant", usage.name), ("kind", kind)], tokens as f64);
        }
    }
    page.family("baton_tenant_running", "gauge", "Requests in the gateway, by tenant.");
    for usage in &usages {
        page.sample("baton_tenant_running", &[("tenant", usage.name)], f64::from(usage.running));
    }
}

/// What the router believes of the replicas' caches, and how far it can be trusted.
fn render_index(page: &mut Page, fleet: &Fleet) {
    let engines = fleet.engines();
    let (bytes, evicted, replicas) = fleet.peek_router(|router, now| {
        let index = router.index();
        let of = |id| (index.orphans(id), index.doubtful(id), router.trust(id, now));
        let replicas: Vec<_> = engines.iter().map(|engine| of(engine.id)).collect();
        (index.bytes(), index.evicted_for_room(), replicas)
    });
    page.family("baton_index_bytes", "gauge", "Memory of the index of cached blocks.");
    page.sample("baton_index_bytes", &[], bytes.0 as f64);
    page.family("baton_index_bytes_max", "gauge", "Its bound, policy.index_bytes.");
    page.sample("baton_index_bytes_max", &[], fleet.index_bytes_max as f64);
    page.family("baton_index_evicted_blocks_total", "counter", "Blocks forgotten because the bound was reached.");
    page.sample("baton_index_evicted_blocks_total", &[], evicted as f64);
    page.family(
        "baton_replica_index_orphans",
        "gauge",
        "Blocks told of under a parent that the index does not know, in the replica's present life.",
    );
    for (engine, (orphans, ..)) in engines.iter().zip(&replicas) {
        page.sample("baton_replica_index_orphans", &[("replica", &engine.name)], *orphans as f64);
    }
    page.family("baton_replica_index_doubtful", "gauge", "1 while KV events of the replica are missing, so that its hits count half.");
    for (engine, (_, doubtful, _)) in engines.iter().zip(&replicas) {
        page.sample("baton_replica_index_doubtful", &[("replica", &engine.name)], f64::from(u8::from(*doubtful)));
    }
    page.family(
        "baton_replica_index_trust",
        "gauge",
        "How far the replica's KV events are believed, by what it reports of hits: 1, 0.5 on probation, 0 in quarantine.",
    );
    for (engine, (.., trust)) in engines.iter().zip(&replicas) {
        let value = match trust {
            Trust::Trusted => 1.0,
            Trust::Probation => 0.5,
            Trust::Quarantined => 0.0,
        };
        page.sample("baton_replica_index_trust", &[("replica", &engine.name)], value);
    }
}

impl Histogram {
    fn observe(&self, span: Duration) {
        let seconds = span.as_secs_f64();
        if let Some(bucket) = BOUNDS_S.iter().position(|bound| seconds <= *bound) {
            self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

fn fault_name(fault: Fault) -> &'static str {
    match fault {
        Fault::Unreachable => "unreachable",
        Fault::Status(_) => "status",
        Fault::NoFirstToken(_) => "no-first-token",
        Fault::Stalled(_) => "stalled",
        Fault::InBand => "in-band-error",
        Fault::Truncated => "truncated",
        Fault::Aborted => "aborted",
        Fault::Garbled => "garbled",
    }
}

#[derive(Default)]
struct Page {
    text: String,
}

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}\n"));
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: f64) {
        self.text.push_str(name);
        if !labels.is_empty() {
            let escape = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escape(value))).collect();
            self.line(format_args!("{{{}}}", labels.join(",")));
        }
        self.line(format_args!(" {value}\n"));
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let bucket = format!("{name}_bucket");
        let mut below = 0;
        for (bound, count) in BOUNDS_S.iter().zip(&histogram.buckets) {
            below += count.load(Ordering::Relaxed);
            self.sample(&bucket, &[("le", &bound.to_string())], below as f64);
        }
        let count = histogram.count.load(Ordering::Relaxed) as f64;
        self.sample(&bucket, &[("le", "+Inf")], count);
        self.sample(&format!("{name}_sum"), &[], histogram.sum_ns.load(Ordering::Relaxed) as f64 / 1e9);
        self.sample(&format!("{name}_count"), &[], count);
    }

    fn line(&mut self, arguments: std::fmt::Arguments<'_>) {
        self.text.write_fmt(arguments).expect("writing to a string cannot fail");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use baton_kv::{EngineHash, KvEvent, KvEventBatch};
    use baton_policy::{Discipline, ReplicaSpec};
    use baton_units::{BlockSize, Blocks, Incarnation};

    use super::*;
    use crate::config::{EngineConfig, EngineKind, FrontConfig, PolicyConfig};

    #[test]
    fn a_histogram_counts_cumulatively() {
        let histogram = Histogram::default();
        for ms in [1, 3, 400, 1_000_000] {
            histogram.observe(Duration::from_millis(ms));
        }
        let mut page = Page::default();
        page.histogram("x", "Help.", &histogram);
        assert!(page.text.starts_with("# HELP x Help.\n# TYPE x histogram\nx_bucket{le=\"0.001\"} 1\n"));
        assert!(page.text.contains("x_bucket{le=\"0.005\"} 2\n") && page.text.contains("x_bucket{le=\"300\"} 3\n"));
        assert!(page.text.contains("x_bucket{le=\"+Inf\"} 4\n") && page.text.ends_with("x_count 4\n"));
    }

    #[test]
    fn the_page_tells_how_far_the_index_can_be_trusted_and_what_memory_is_bound_to() {
        let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig { index_bytes: 1 << 20, ..PolicyConfig::default() });
        let engine = |port| EngineConfig::new(format!("http://127.0.0.1:{port}").parse().unwrap(), EngineKind::Vllm);
        let engines = fleet.set_engines(vec![engine(1), engine(2)]).fresh;
        let block_size = BlockSize::new(2).unwrap();
        let mut batch = KvEventBatch { sequence: 0, timestamp_s: 1.0, events: Vec::new(), dp_rank: None };
        let stored = |parent, hashes: &[u64]| KvEvent::Stored {
            hashes: hashes.iter().map(|hash| EngineHash(*hash)).collect(),
            parent,
            tokens: vec![7; 2 * hashes.len()],
            block_size,
            adapter: None,
            salt: None,
        };
        batch.events = vec![stored(None, &[1]), stored(Some(EngineHash(9)), &[10, 11])];
        for engine in &engines {
            let spec = ReplicaSpec {
                id: engine.id,
                incarnation: Incarnation(1),
                block_size,
                kv_blocks: Blocks(1000),
                max_model_len: Tokens(1000),
                max_running: 8,
                discipline: Discipline::Chunked { budget: Tokens(64) },
                step: engine.facts().speed.step(),
            };
            fleet.engine_ready(spec, None);
        }
        let reserved = fleet.peek_router(|router, _| router.index().bytes());
        fleet.with_router(|router, now| router.kv_events(ReplicaId(0), Incarnation(1), &batch, now));
        batch.sequence = 2;
        fleet.with_router(|router, now| router.kv_events(ReplicaId(0), Incarnation(1), &batch, now));
        fleet.metrics.hit_predicted(ReplicaId(1), Tokens(100), Tokens(64));
        fleet.metrics.hit_predicted(ReplicaId(1), Tokens(32), Tokens(48));
        let page = fleet.metrics.render(&fleet, 4096);
        for line in [
            format!("baton_index_bytes {}", reserved.0).as_str(),
            "baton_index_bytes_max 1048576",
            "baton_index_evicted_blocks_total 0",
            "baton_text_cache_bytes 4096",
            "baton_text_cache_bytes_max 100663296",
            "baton_replica_index_orphans{replica=\"r0\"} 2",
            "baton_replica_index_orphans{replica=\"r1\"} 0",
            "baton_replica_index_doubtful{replica=\"r0\"} 1",
            "baton_replica_index_doubtful{replica=\"r1\"} 0",
            "baton_hit_believed_tokens_total{replica=\"r1\"} 132",
            "baton_hit_missed_tokens_total{replica=\"r1\"} 36",
            "baton_hit_surplus_tokens_total{replica=\"r1\"} 16",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
    }

    #[test]
    fn an_engine_that_is_gone_leaves_neither_its_name_nor_its_counts_to_others() {
        let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
        let engine = |port| EngineConfig::new(format!("http://127.0.0.1:{port}").parse().unwrap(), EngineKind::Vllm);
        let spec = |id| ReplicaSpec {
            id,
            incarnation: Incarnation(1),
            block_size: BlockSize::default(),
            kv_blocks: Blocks(1000),
            max_model_len: Tokens(1000),
            max_running: 8,
            discipline: Discipline::Chunked { budget: Tokens(64) },
            step: fleet.engine(id).unwrap().facts().speed.step(),
        };
        for engine in fleet.set_engines([engine(1), engine(2)]).fresh {
            fleet.engine_ready(spec(engine.id), None);
            fleet.metrics.attempt(engine.id);
        }
        fleet.set_engines([engine(2)]);
        let page = fleet.metrics.render(&fleet, 0);
        assert!(page.contains("baton_replica_in_flight{replica=\"r1\"} 0\n") && !page.contains("replica=\"\""), "{page}");
        assert!(page.contains("baton_attempts_total{replica=\"r1\"} 1\n"));
        fleet.set_engines([engine(2), engine(3)]);
        let page = fleet.metrics.render(&fleet, 0);
        assert!(
            page.contains("baton_attempts_total{replica=\"r0\"} 0\n") && page.contains("baton_attempts_total{replica=\"r1\"} 1\n"),
            "{page}"
        );
    }

    #[test]
    fn sources_of_engines_are_on_the_page_for_as_long_as_they_are_configured() {
        let fleet = Fleet::new(FrontConfig::default(), &PolicyConfig::default());
        fleet.metrics.set_sources(["dns:a:1".to_owned(), "file:/b".to_owned()]);
        fleet.metrics.source("dns:a:1", |said| (said.engines, said.refused) = (3, 2));
        fleet.metrics.source("file:/b", |said| (said.failures, said.failing) = (7, Some("no such file".to_owned())));
        assert_eq!(fleet.metrics.source("other", |_| panic!("there is none")), None);
        fleet.metrics.set_sources(["file:/b".to_owned(), "dns:a:1".to_owned()]);
        let page = fleet.metrics.render(&fleet, 0);
        for line in [
            "baton_discovery_engines{source=\"dns:a:1\"} 3",
            "baton_discovery_refused{source=\"dns:a:1\"} 2",
            "baton_discovery_failing{source=\"dns:a:1\"} 0",
            "baton_discovery_failing{source=\"file:/b\"} 1",
            "baton_discovery_failures_total{source=\"file:/b\"} 7",
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is not in\n{page}");
        }
        fleet.metrics.set_sources(["file:/b".to_owned()]);
        assert!(!fleet.metrics.render(&fleet, 0).contains("dns:a:1"));
    }

    #[test]
    fn label_values_are_escaped() {
        let mut page = Page::default();
        page.sample("x", &[("replica", "a\"b\n")], 1.0);
        assert_eq!(page.text, "x{replica=\"a\\\"b\\n\"} 1\n");
    }
}
