//! The exposition parses, and what vLLM exposes under a name has the same kind here.

use std::collections::BTreeMap;

use crate::support::{Replica, config};
use serde_json::json;

/// Kinds by name, from the TYPE lines.
fn kinds(page: &str) -> BTreeMap<&str, &str> {
    page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
}

/// Value of the series whose name and labels begin with `series`.
fn value(page: &str, series: &str) -> f64 {
    let line = page.lines().find(|line| line.starts_with(series)).unwrap_or_else(|| panic!("{series} is missing in\n{page}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_vllms_and_count_what_was_served() {
    let replica = Replica::start(config()).await;
    let prompt: Vec<u32> = (100..170).collect();
    let body = json!({ "prompt": prompt, "max_tokens": 5, "temperature": 0 });
    for _ in 0..2 {
        assert_eq!(replica.post("/v1/completions", &body).await.status, 200);
    }
    let answer = replica.get("/metrics").await;
    let page = String::from_utf8(answer.body).unwrap();
    let theirs = include_str!("../fixtures/metrics-fresh.txt");
    let (ours, theirs) = (kinds(&page), kinds(theirs));
    for (name, kind) in ours.iter().filter(|(name, _)| !name.starts_with("baton:")) {
        assert_eq!(theirs.get(name), Some(kind), "{name}");
    }
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (series, number) = line.rsplit_once(' ').unwrap();
        assert!(number.parse::<f64>().is_ok(), "{line}");
        let name = series.split('{').next().unwrap();
        let family = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name);
        assert!(ours.contains_key(name) || ours.contains_key(family), "{line} has no TYPE line");
    }
    let counted = |name: &str| value(&page, &format!("{name}{{engine=\"0\",model_name=\"smollm2-135m\""));
    assert_eq!(counted("vllm:generation_tokens_total"), 10.0);
    assert_eq!(counted("vllm:prompt_tokens_total"), 140.0);
    assert_eq!(counted("vllm:prefix_cache_queries_total"), 140.0);
    assert_eq!(counted("vllm:prefix_cache_hits_total"), 64.0);
    assert_eq!(counted("vllm:num_requests_running"), 0.0);
    assert_eq!(counted("vllm:time_to_first_token_seconds_count"), 2.0);
    assert_eq!(counted("vllm:inter_token_latency_seconds_count"), 8.0);
    // Steps of one model millisecond, whatever the clock on the wall did.
    assert!((counted("vllm:inter_token_latency_seconds_sum") - 0.008).abs() < 1e-9);
    let length = "vllm:request_success_total{engine=\"0\",model_name=\"smollm2-135m\",finished_reason=\"length\"}";
    assert_eq!(value(&page, length), 2.0);
    replica.stop().await.unwrap();
}
