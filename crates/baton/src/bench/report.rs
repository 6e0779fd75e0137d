//! Numbers of a run, as JSON and as tables.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

use super::{client::Ending, drive::Run, workload::Workload};

/// What a request must meet to count as good.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slo {
    pub(crate) ttft: Duration,
    pub(crate) tpot: Duration,
}

/// One run's numbers. Latencies are of finished requests only and stand beside the counts of the others.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) workload: Workload,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) policy: Option<String>,
    pub(crate) seed: u64,
    pub(crate) scale_shape: f64,
    /// Sessions (tasks, conversations, single requests) per second.
    pub(crate) rate: f64,
    pub(crate) sessions: usize,
    pub(crate) requests: usize,
    pub(crate) finished: usize,
    pub(crate) errors: usize,
    pub(crate) refused: usize,
    pub(crate) abandoned: usize,
    pub(crate) ttft_ms: Summary,
    /// Requests that found part of their session in a cache, in the best case: every one but the first of its session.
    pub(crate) ttft_warm_ms: Summary,
    pub(crate) tpot_ms: Summary,
    pub(crate) itl_ms: Summary,
    pub(crate) e2e_ms: Summary,
    /// Cached over all prompt tokens; null when the target does not report them.
    pub(crate) hit_rate: Option<f64>,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
    pub(crate) output_tokens_per_s: f64,
    pub(crate) slo_ttft_ms: f64,
    pub(crate) slo_tpot_ms: f64,
    /// Share of all requests, abandoned ones too, that met both objectives.
    pub(crate) goodput: f64,
    pub(crate) goodput_per_s: f64,
    pub(crate) wall_s: f64,
    /// Requests per replica, where the target is a Baton gateway whose admin API answers.
    pub(crate) replicas: BTreeMap<String, usize>,
    /// Messages of errors with their counts, at most 10.
    pub(crate) error_messages: BTreeMap<String, usize>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub(crate) count: u64,
    pub(crate) mean: Option<f64>,
    pub(crate) p50: Option<f64>,
    pub(crate) p90: Option<f64>,
    pub(crate) p99: Option<f64>,
    pub(crate) max: Option<f64>,
}

/// What the plan says of a run.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) workload: Workload,
    pub(crate) policy: Option<String>,
    pub(crate) seed: u64,
    pub(crate) scale_shape: f64,
    pub(crate) rate: f64,
    pub(crate) sessions: usize,
    pub(crate) slo: Slo,
}

/// Latencies to within 0.1 %, with an exact mean.
struct Latencies {
    histogram: Histogram<u64>,
    sum: Duration,
}

impl Latencies {
    fn of(spans: impl Iterator<Item = Duration>) -> Self {
        let histogram = Histogram::new_with_max(3_600_000_000, 3).expect("bounds of a histogram of microseconds up to an hour");
        let mut latencies = Self { histogram, sum: Duration::ZERO };
        for span in spans {
            latencies.histogram.saturating_record(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
            latencies.sum += span;
        }
        latencies
    }

    fn summary(&self) -> Summary {
        let count = self.histogram.len();
        let some = |value: f64| (count > 0).then_some(value);
        let quantile = |quantile| some(self.histogram.value_at_quantile(quantile) as f64 / 1e3);
        Summary {
            count,
            mean: some(self.sum.as_secs_f64() * 1e3 / count as f64),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            max: quantile(1.0),
        }
    }
}

impl Report {
    pub(crate) fn new(setting: Setting, run: &Run) -> Self {
        let finished = || run.samples.iter().filter(|sample| sample.ending == Ending::Finished);
        let summary = |spans: &mut dyn Iterator<Item = Duration>| Latencies::of(spans).summary();
        let reported = || finished().filter_map(|sample| Some((sample.prompt_tokens?, sample.cached_tokens?)));
        let (reported_prompt, cached) =
            reported().fold((0u64, 0u64), |(prompt, cached), (p, c)| (prompt + u64::from(p), cached + u64::from(c)));
        let good = finished().filter(|sample| {
            sample.ttft.is_some_and(|ttft| ttft <= setting.slo.ttft) && sample.tpot().is_none_or(|tpot| tpot <= setting.slo.tpot)
        });
        let good = good.count();
        let output_tokens = finished().map(|sample| u64::from(sample.output_tokens)).sum::<u64>();
        let requests = run.samples.len() + run.abandoned;
        let wall_s = run.wall.as_secs_f64();
        Self {
            workload: setting.workload,
            policy: setting.policy,
            seed: setting.seed,
            scale_shape: setting.scale_shape,
            rate: setting.rate,
            sessions: setting.sessions,
            requests,
            finished: finished().count(),
            errors: run.samples.iter().filter(|sample| matches!(sample.ending, Ending::Error(_))).count(),
            refused: run.samples.iter().filter(|sample| sample.ending == Ending::Refused).count(),
            abandoned: run.abandoned,
            ttft_ms: summary(&mut finished().filter_map(|sample| sample.ttft)),
            ttft_warm_ms: summary(&mut finished().filter(|sample| sample.turn > 0).filter_map(|sample| sample.ttft)),
            tpot_ms: summary(&mut finished().filter_map(super::drive::Sample::tpot)),
            itl_ms: summary(&mut finished().flat_map(|sample| sample.gaps.iter().copied())),
            e2e_ms: summary(&mut finished().map(|sample| sample.e2e)),
            hit_rate: (reported_prompt > 0).then(|| cached as f64 / reported_prompt as f64),
            prompt_tokens: finished().filter_map(|sample| sample.prompt_tokens).map(u64::from).sum(),
            cached_tokens: cached,
            output_tokens,
            output_tokens_per_s: output_tokens as f64 / wall_s,
            slo_ttft_ms: setting.slo.ttft.as_secs_f64() * 1e3,
            slo_tpot_ms: setting.slo.tpot.as_secs_f64() * 1e3,
            goodput: if requests == 0 { 0.0 } else { good as f64 / requests as f64 },
            goodput_per_s: good as f64 / wall_s,
            wall_s,
            replicas: run.replicas.clone(),
            error_messages: error_messages(run),
        }
    }

    /// Latencies of one run, a row each, then the counts.
    pub(crate) fn table(&self) -> String {
        let mut text = format!("{:<10} {:>9} {:>9} {:>9} {:>9} {:>9}\n", "ms", "mean", "p50", "p90", "p99", "max");
        for (name, summary) in self.latencies() {
            let _ = write!(text, "{name:<10}");
            for value in [summary.mean, summary.p50, summary.p90, summary.p99, summary.max] {
                let _ = write!(text, " {:>9}", cell(value, 1));
            }
            text.push('\n');
        }
        let _ = writeln!(
            text,
            "\n{} requests: {} finished, {} errors, {} refused, {} abandoned; {:.1} s",
            self.requests, self.finished, self.errors, self.refused, self.abandoned, self.wall_s
        );
        let _ = writeln!(text, "hit rate {} of {} prompt tokens", percent(self.hit_rate), self.prompt_tokens);
        let _ = writeln!(
            text,
            "goodput {} ({:.2}/s) with TTFT <= {:.0} ms and TPOT <= {:.0} ms; {:.1} output tokens/s",
            percent(Some(self.goodput)),
            self.goodput_per_s,
            self.slo_ttft_ms,
            self.slo_tpot_ms,
            self.output_tokens_per_s
        );
        if !self.replicas.is_empty() {
            let shares: Vec<String> = self.replicas.iter().map(|(replica, requests)| format!("{replica} {requests}")).collect();
            let _ = writeln!(text, "requests per replica: {}", shares.join(", "));
        }
        for (message, times) in &self.error_messages {
            let _ = writeln!(text, "{times} x error: {message}");
        }
        text
    }

    fn latencies(&self) -> [(&'static str, &Summary); 5] {
        [
            ("TTFT", &self.ttft_ms),
            ("TTFT warm", &self.ttft_warm_ms),
            ("TPOT", &self.tpot_ms),
            ("ITL", &self.itl_ms),
            ("end to end", &self.e2e_ms),
        ]
    }

    /// Part of the requests that went to one replica, at the most.
    fn busiest_share(&self) -> Option<f64> {
        let all: usize = self.replicas.values().sum();
        self.replicas.values().max().map(|most| *most as f64 / all as f64)
    }

    fn name(&self) -> &str {
        self.policy.as_deref().unwrap_or("run")
    }
}

/// Runs side by side, and each later one over the first.
pub(crate) fn comparison(reports: &[Report]) -> String {
    let Some((first, others)) = reports.split_first() else { return String::new() };
    let width = reports.iter().map(|report| report.name().len()).max().unwrap_or(0).max(9);
    let mut text = format!("{:<16}", "");
    for report in reports {
        let _ = write!(text, " {:>width$}", report.name());
    }
    for other in others {
        let _ = write!(text, "  {}", ratio_title(first, other));
    }
    text.push('\n');
    for (row, values) in rows(reports) {
        let _ = write!(text, "{row:<16}");
        for value in &values {
            let _ = write!(
                text,
                " {:>width$}",
                cell(*value, if row.ends_with("rate") || row.ends_with("share") || row == "goodput" { 3 } else { 1 })
            );
        }
        for (other, value) in others.iter().zip(&values[1..]) {
            let ratio = values[0].zip(*value).filter(|(first, _)| *first > 0.0).map(|(first, value)| value / first);
            let title = ratio_title(first, other).len();
            let _ = write!(text, "  {:>title$}", ratio.map_or("-".into(), |ratio| format!("{ratio:.2}x")));
        }
        text.push('\n');
    }
    text
}

fn ratio_title(first: &Report, other: &Report) -> String {
    format!("{} / {}", other.name(), first.name())
}

fn rows(reports: &[Report]) -> Vec<(String, Vec<Option<f64>>)> {
    let mut rows = Vec::new();
    for (index, (name, _)) in reports[0].latencies().into_iter().enumerate() {
        let of = |pick: fn(&Summary) -> Option<f64>| reports.iter().map(|report| pick(report.latencies()[index].1)).collect();
        rows.push((format!("{name} mean"), of(|summary| summary.mean)));
        rows.push((format!("{name} p50"), of(|summary| summary.p50)));
        rows.push((format!("{name} p90"), of(|summary| summary.p90)));
        rows.push((format!("{name} p99"), of(|summary| summary.p99)));
    }
    let mut row = |name: &str, pick: fn(&Report) -> Option<f64>| rows.push((name.into(), reports.iter().map(pick).collect()));
    row("hit rate", |report| report.hit_rate);
    row("goodput", |report| Some(report.goodput));
    row("finished", |report| Some(report.finished as f64));
    row("errors", |report| Some(report.errors as f64));
    row("refused", |report| Some(report.refused as f64));
    row("wall s", |report| Some(report.wall_s));
    row("busiest share", Report::busiest_share);
    rows
}

fn cell(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".into(), |value| format!("{value:.digits$}"))
}

fn percent(share: Option<f64>) -> String {
    share.map_or("not reported".into(), |share| format!("{:.1} %", share * 100.0))
}

fn count(names: impl Iterator<Item = String>) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for name in names {
        *counts.entry(name).or_default() += 1;
    }
    counts
}

fn error_messages(run: &Run) -> BTreeMap<String, usize> {
    let messages = run.samples.iter().filter_map(|sample| match &sample.ending {
        Ending::Error(message) => Some(message.clone()),
        Ending::Finished | Ending::Refused => None,
    });
    count(messages).into_iter().take(10).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::drive::Sample, *};

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn sample(ttft: u64, gap: u64, turn: usize) -> Sample {
        Sample {
            turn,
            ending: Ending::Finished,
            ttft: Some(ms(ttft)),
            e2e: ms(ttft + 2 * gap),
            gaps: vec![ms(gap), ms(gap)],
            prompt_tokens: Some(100),
            cached_tokens: Some(if turn > 0 { 90 } else { 0 }),
            output_tokens: 3,
        }
    }

    fn setting(policy: &str) -> Setting {
        let slo = Slo { ttft: ms(50), tpot: ms(20) };
        Setting { workload: Workload::Agent, policy: Some(policy.into()), seed: 1, scale_shape: 1.0, rate: 1.0, sessions: 1, slo }
    }

    fn run(samples: Vec<Sample>) -> Run {
        Run { samples, wall: Duration::from_secs(10), abandoned: 1, replicas: BTreeMap::from([("r0".to_owned(), 2)]) }
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_values() {
        let summary = Latencies::of((1..=100).map(ms)).summary();
        assert_eq!(summary.count, 100);
        assert!((summary.mean.unwrap() - 50.5).abs() < 1e-9);
        for (value, exact) in [(summary.p50, 50.0), (summary.p90, 90.0), (summary.p99, 99.0), (summary.max, 100.0)] {
            assert!((value.unwrap() / exact - 1.0).abs() < 1e-3, "{value:?} {exact}");
        }
        let empty = Latencies::of(std::iter::empty()).summary();
        assert_eq!((empty.count, empty.mean, empty.p99), (0, None, None));
    }

    #[test]
    fn goodput_counts_every_request_that_was_meant_to_be_sent() {
        let slow_first = sample(60, 10, 0);
        let slow_tokens = sample(10, 30, 1);
        let good = sample(10, 10, 2);
        let failed = Sample { ending: Ending::Error("x".into()), ttft: None, ..sample(1, 1, 3) };
        let refused = Sample { ending: Ending::Refused, ttft: None, ..sample(1, 1, 4) };
        let report = Report::new(setting("price"), &run(vec![slow_first, slow_tokens, good, failed, refused]));
        assert_eq!((report.requests, report.finished, report.errors, report.refused, report.abandoned), (6, 3, 1, 1, 1));
        assert!((report.goodput - 1.0 / 6.0).abs() < 1e-12 && (report.goodput_per_s - 0.1).abs() < 1e-12);
        assert!((report.hit_rate.unwrap() - 0.6).abs() < 1e-12);
        assert_eq!((report.ttft_ms.count, report.ttft_warm_ms.count, report.itl_ms.count), (3, 2, 6));
        assert_eq!(report.error_messages, BTreeMap::from([("x".to_owned(), 1)]));
        assert!(report.table().contains("requests per replica: r0 2"));
    }

    #[test]
    fn json_has_the_names_that_others_read() {
        let json = serde_json::to_value(Report::new(setting("price"), &run(vec![sample(10, 10, 0)]))).unwrap();
        for pointer in ["/ttft_ms/mean", "/ttft_ms/p50", "/ttft_ms/p90", "/ttft_ms/p99", "/tpot_ms/mean", "/itl_ms/p50", "/e2e_ms/p99"] {
            assert!(json.pointer(pointer).is_some_and(serde_json::Value::is_number), "{pointer}");
        }
        for name in ["hit_rate", "requests", "errors", "refused", "goodput"] {
            assert!(json[name].is_number(), "{name}");
        }
    }

    #[test]
    fn a_comparison_sets_later_runs_over_the_first() {
        let reports = [Report::new(setting("a"), &run(vec![sample(10, 10, 0)])), Report::new(setting("b"), &run(vec![sample(25, 10, 0)]))];
        let text = comparison(&reports);
        let row = text.lines().find(|line| line.starts_with("TTFT p50")).unwrap();
        assert!(row.ends_with("2.50x"), "{text}");
        assert!(text.lines().next().unwrap().ends_with("b / a"), "{text}");
    }
}
