//! Counters and histograms under vLLM's names, in Prometheus' text form. Every time is model time.

use std::{fmt::Write as _, sync::Mutex, time::Duration};

use baton_engine::{Counters, SequenceRecord, Status};

const SECONDS_TTFT: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0];
const SECONDS_TOKEN: &[f64] = &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const SECONDS_REQUEST: &[f64] =
    &[0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0];
const STEP_TOKENS: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const REQUEST_TOKENS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0, 100_000.0, 200_000.0];

/// What the engine thread observes beside the engine's own counters. One lock a step and one a scrape, so it is never waited for.
#[derive(Debug, Default)]
pub(crate) struct Metrics(Mutex<Observed>);

#[derive(Debug)]
struct Observed {
    /// Choices that ended because the engine failed.
    errors: u64,
    step_tokens: Histogram,
    ttft: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    end_to_end: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    pacing_lag: Duration,
}

impl Default for Observed {
    fn default() -> Self {
        Self {
            errors: 0,
            step_tokens: Histogram::new(STEP_TOKENS),
            ttft: Histogram::new(SECONDS_TTFT),
            inter_token: Histogram::new(SECONDS_TOKEN),
            per_output_token: Histogram::new(SECONDS_TOKEN),
            end_to_end: Histogram::new(SECONDS_REQUEST),
            queue: Histogram::new(SECONDS_REQUEST),
            prefill: Histogram::new(SECONDS_REQUEST),
            decode: Histogram::new(SECONDS_REQUEST),
            prompt_tokens: Histogram::new(REQUEST_TOKENS),
            generation_tokens: Histogram::new(REQUEST_TOKENS),
            pacing_lag: Duration::ZERO,
        }
    }
}

/// What the exposition says beside the observations.
#[derive(Debug, Clone)]
pub(crate) struct Exposed {
    pub(crate) model: String,
    pub(crate) status: Status,
    pub(crate) block_size: u32,
    pub(crate) start_unix_s: f64,
}

impl Metrics {
    fn update(&self, change: impl FnOnce(&mut Observed)) {
        change(&mut self.0.lock().expect("no update panics"));
    }

    /// A step computed this many tokens and ended this far behind the clock.
    pub(crate) fn step(&self, tokens: u32, lag: Duration) {
        self.update(|observed| {
            observed.step_tokens.observe(f64::from(tokens));
            observed.pacing_lag = lag;
        });
    }

    pub(crate) fn first_token(&self, ttft: Duration) {
        self.update(|observed| observed.ttft.observe(ttft.as_secs_f64()));
    }

    pub(crate) fn next_token(&self, gap: Duration) {
        self.update(|observed| observed.inter_token.observe(gap.as_secs_f64()));
    }

    pub(crate) fn finished(&self, record: &SequenceRecord) {
        self.update(|observed| {
            observed.end_to_end.observe(record.finished.since(record.arrival).as_secs_f64());
            observed.prompt_tokens.observe(record.prompt_tokens.as_f64());
            observed.generation_tokens.observe(record.output_tokens.as_f64());
            let Some(scheduled) = record.first_scheduled else { return };
            observed.queue.observe(scheduled.since(record.arrival).as_secs_f64());
            let Some(first) = record.first_token else { return };
            observed.prefill.observe(first.since(scheduled).as_secs_f64());
            let decode = record.finished.since(first).as_secs_f64();
            observed.decode.observe(decode);
            if record.output_tokens.0 > 1 {
                observed.per_output_token.observe(decode / f64::from(record.output_tokens.0 - 1));
            }
        });
    }

    /// Choices that ended because the engine failed.
    pub(crate) fn failed(&self, choices: u64) {
        self.update(|observed| observed.errors += choices);
    }

    /// The whole exposition.
    pub(crate) fn render(&self, exposed: &Exposed) -> String {
        let observed = self.0.lock().expect("no update panics");
        let mut page = Page { text: String::new(), labels: format!("engine=\"0\",model_name=\"{}\"", escape(&exposed.model)) };
        page.gauges(exposed, observed.pacing_lag);
        page.counters(&exposed.status.counters, observed.errors);
        page.histograms(&observed);
        page.text
    }
}

#[derive(Debug)]
struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last is above them all.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    fn observe(&mut self, value: f64) {
        self.counts[self.bounds.partition_point(|&bound| bound < value)] += 1;
        self.sum += value;
    }
}

struct Page {
    text: String,
    labels: String,
}

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        self.line(format_args!("# HELP {name} {help}\n# TYPE {name} {kind}"));
    }

    fn line(&mut self, line: std::fmt::Arguments<'_>) {
        writeln!(self.text, "{line}").expect("writing to a string succeeds");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.head(name, kind, help);
        let labels = self.labels.clone();
        self.line(format_args!("{name}{{{labels}}} {value:?}"));
    }

    fn gauges(&mut self, exposed: &Exposed, lag: Duration) {
        let status = &exposed.status;
        self.head("process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds.");
        self.line(format_args!("process_start_time_seconds {:?}", exposed.start_unix_s));
        self.single("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", status.running.into());
        self.single("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", status.waiting.into());
        let used = status.blocks_total.saturating_sub(status.blocks_free).saturating_sub(status.blocks_reclaimable);
        let usage = used.as_f64() / status.blocks_total.as_f64().max(1.0);
        self.single("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", usage);
        self.head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig");
        let (size, blocks) = (exposed.block_size, status.blocks_total.0);
        let tokens = u64::from(size) * u64::from(blocks);
        self.line(format_args!(
            "vllm:cache_config_info{{block_size=\"{size}\",enable_prefix_caching=\"True\",engine=\"0\",kv_cache_size_tokens=\"{tokens}\",\
             num_cpu_blocks=\"None\",num_gpu_blocks=\"{blocks}\"}} 1.0"
        ));
        let help = "How far the last step of an emulated engine ended behind the clock, in model seconds.";
        self.single("baton:pacing_lag_seconds", "gauge", help, lag.as_secs_f64());
    }

    fn counters(&mut self, counters: &Counters, errors: u64) {
        let lines = [
            ("vllm:prefix_cache_queries_total", "Prefix cache queries, in terms of number of queried tokens.", counters.prefix_queries),
            ("vllm:prefix_cache_hits_total", "Prefix cache hits, in terms of number of cached tokens.", counters.prefix_hits),
            ("vllm:num_preemptions_total", "Cumulative number of preemption from the engine.", counters.preemptions),
            ("vllm:prompt_tokens_total", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("vllm:prompt_tokens_cached_total", "Number of cached prompt tokens (local + external).", counters.prompt_tokens_cached),
            ("vllm:generation_tokens_total", "Number of generation tokens processed.", counters.generation_tokens),
            ("baton:engine_steps_total", "Engine steps.", counters.steps),
            ("baton:computed_tokens_total", "Tokens whose KV was computed, again after a preemption too.", counters.computed_tokens),
        ];
        for (name, help, value) in lines {
            self.single(name, "counter", help, value as f64);
        }
        self.head("vllm:request_success_total", "counter", "Count of successfully processed requests.");
        let ended =
            [("stop", counters.finished_stop), ("length", counters.finished_length), ("abort", counters.finished_abort), ("error", errors)];
        let labels = self.labels.clone();
        for (reason, count) in ended {
            self.line(format_args!("vllm:request_success_total{{{labels},finished_reason=\"{reason}\"}} {:?}", count as f64));
        }
    }

    fn histograms(&mut self, observed: &Observed) {
        let all = [
            ("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", &observed.step_tokens),
            ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", &observed.ttft),
            ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", &observed.inter_token),
            (
                "vllm:request_time_per_output_token_seconds",
                "Histogram of time_per_output_token_seconds per request.",
                &observed.per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", &observed.end_to_end),
            ("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", &observed.queue),
            ("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", &observed.prefill),
            ("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", &observed.decode),
            ("vllm:request_prompt_tokens", "Number of prefill tokens processed.", &observed.prompt_tokens),
            ("vllm:request_generation_tokens", "Number of generation tokens processed.", &observed.generation_tokens),
        ];
        for (name, help, histogram) in all {
            self.histogram(name, help, histogram);
        }
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.head(name, "histogram", help);
        let labels = self.labels.clone();
        let mut below = 0;
        let bounds = histogram.bounds.iter().map(|bound| format!("{bound:?}")).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&histogram.counts) {
            below += count;
            self.line(format_args!("{name}_bucket{{{labels},le=\"{bound}\"}} {:?}", below as f64));
        }
        self.line(format_args!("{name}_count{{{labels}}} {:?}", below as f64));
        self.line(format_args!("{name}_sum{{{labels}}} {:?}", histogram.sum));
    }
}

/// A label value as Prometheus wants it.
fn escape(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use baton_cost::StepCoefficients;
    use baton_units::{Blocks, Time, Tokens};

    use super::*;

    fn exposed() -> Exposed {
        let free = StepCoefficients { fixed_s: 0.0, per_token_s: 0.0, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
        let counters = Counters { prefix_queries: 41, prefix_hits: 32, generation_tokens: 2, finished_length: 1, ..Counters::default() };
        let status = Status {
            waiting: 3,
            running: 2,
            prefill_backlog: Tokens(0),
            blocks_total: Blocks(128),
            blocks_free: Blocks(64),
            blocks_reclaimable: Blocks(32),
            token_budget: Tokens(1),
            step_fit: free,
            step_prior: free,
            step_error: 0.0,
            counters,
        };
        Exposed { model: "m\"1".into(), status, block_size: 32, start_unix_s: 1.5 }
    }

    #[test]
    fn a_histogram_counts_a_bound_as_below_it() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [1.0, 1.5, 2.0, 9.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.counts, [1, 2, 1]);
        assert!((histogram.sum - 13.5).abs() < 1e-12);
    }

    #[test]
    fn the_page_has_vllms_names_and_labels() {
        let metrics = Metrics::default();
        metrics.first_token(Duration::from_millis(30));
        metrics.next_token(Duration::from_millis(20));
        metrics.finished(&SequenceRecord {
            arrival: Time::ZERO,
            first_scheduled: Some(Time::from_ms(10.0)),
            first_token: Some(Time::from_ms(30.0)),
            finished: Time::from_ms(50.0),
            prompt_tokens: Tokens(41),
            output_tokens: Tokens(2),
            cached_tokens: Tokens(32),
            preemptions: 0,
        });
        let page = metrics.render(&exposed());
        let labels = r#"{engine="0",model_name="m\"1"}"#;
        for line in [
            format!("vllm:num_requests_running{labels} 2.0"),
            format!("vllm:kv_cache_usage_perc{labels} 0.25"),
            format!("vllm:prefix_cache_queries_total{labels} 41.0"),
            format!("vllm:prefix_cache_hits_total{labels} 32.0"),
            format!("vllm:generation_tokens_total{labels} 2.0"),
            r#"vllm:request_success_total{engine="0",model_name="m\"1",finished_reason="length"} 1.0"#.to_owned(),
            r#"vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m\"1",le="0.02"} 0.0"#.to_owned(),
            r#"vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m\"1",le="0.04"} 1.0"#.to_owned(),
            r#"vllm:time_to_first_token_seconds_bucket{engine="0",model_name="m\"1",le="+Inf"} 1.0"#.to_owned(),
            r#"vllm:e2e_request_latency_seconds_sum{engine="0",model_name="m\"1"} 0.05"#.to_owned(),
            r#"vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m\"1"} 1.0"#.to_owned(),
            "process_start_time_seconds 1.5".to_owned(),
        ] {
            assert!(page.lines().any(|found| found == line), "{line} is missing in\n{page}");
        }
    }
}
