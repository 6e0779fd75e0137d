//! The same load under several policies of a Baton gateway, each on cold caches.

use anyhow::{Context, Result};
use http::Method;
use serde_json::{Map, Value, json};

use super::{Bench, report::Report};
use crate::cli::BadInput;

const POLICY: &str = "/baton/v1/policy";

/// Runs the load once per policy, in the order given; the gateway gets its own policy back, also after an error or Ctrl-C.
pub(super) async fn run(bench: &Bench, policies: &[String]) -> Result<Vec<Report>> {
    let client = &bench.target.client;
    let before = client.admin(Method::GET, POLICY, None).await.context("--compare needs a Baton gateway with its admin API")?;
    let before = before["name"].as_str().context("the gateway does not name its policy")?.to_owned();
    let runs = async {
        let mut reports = Vec::new();
        for policy in policies {
            set_policy(bench, policy).await.map_err(|error| BadInput(format!("--compare {policy}: {error:#}")))?;
            warn_of_warm(&client.admin(Method::POST, "/baton/v1/reset", None).await?);
            reports.push(bench.run(Some(policy)).await);
        }
        anyhow::Ok(reports)
    };
    let reports = tokio::select! {
        reports = runs => reports,
        _ = tokio::signal::ctrl_c() => Err(anyhow::anyhow!("stopped before all policies were measured")),
    };
    set_policy(bench, &before).await.with_context(|| format!("the gateway's policy could not be set back to {before}"))?;
    reports
}

async fn set_policy(bench: &Bench, policy: &str) -> Result<()> {
    bench.target.client.admin(Method::PUT, POLICY, Some(json!({"name": policy}))).await.map(drop)
}

/// A cache that stays warm favours whichever policy comes later.
fn warn_of_warm(reset: &Value) {
    for engine in reset["engines"].as_array().into_iter().flatten().filter(|engine| engine["reset"] != true) {
        eprintln!("the cache of {} could not be cleared ({}); later runs find it warm", engine["id"], engine["error"]);
    }
}

/// All runs, and for each after the first its numbers over the first's.
pub(super) fn json(reports: &[Report]) -> Value {
    let ratio = |of: &dyn Fn(&Report) -> Option<f64>, report: &Report| {
        of(&reports[0]).zip(of(report)).filter(|(first, _)| *first > 0.0).map(|(first, value)| value / first)
    };
    let ratios: Map<String, Value> = reports
        .iter()
        .skip(1)
        .map(|report| {
            let name = report.policy.clone().unwrap_or_default();
            let ratios = json!({
                "ttft_ms_p50": ratio(&|report| report.ttft_ms.p50, report),
                "ttft_ms_mean": ratio(&|report| report.ttft_ms.mean, report),
                "ttft_warm_ms_p50": ratio(&|report| report.ttft_warm_ms.p50, report),
                "ttft_warm_ms_mean": ratio(&|report| report.ttft_warm_ms.mean, report),
                "tpot_ms_mean": ratio(&|report| report.tpot_ms.mean, report),
                "e2e_ms_mean": ratio(&|report| report.e2e_ms.mean, report),
                "hit_rate": ratio(&|report| report.hit_rate, report),
                "goodput": ratio(&|report| Some(report.goodput), report),
            });
            (name, ratios)
        })
        .collect();
    json!({"runs": reports, "ratios_to_first": ratios})
}
