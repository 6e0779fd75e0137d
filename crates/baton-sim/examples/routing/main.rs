//! Routing policies on the lab's three workloads, in virtual time: 8 replicas, paired seeds, TTFT percentiles and hit rates.
//!
//! `routing [engine=serial|scheduler] [workloads=agent,shared,mix] [policies=price,…|all] [seeds=11..20] [replicas=8]
//! [sessions=yes|no|both] [events=yes|no] [off=delay,eviction,memory,waste,decode,copies] [bind_ms=N|never] [json=yes]`
#![allow(clippy::print_stdout, reason = "a program")]

use std::{collections::BTreeMap, time::Duration};

use baton_policy::{PolicyName, RouterConfig};
use baton_sim::{EngineModel, Interval, Link, Outcome, Scenario, Shape, WorkloadName, run};
use baton_units::Tokens;
use serde::Serialize;

/// One line of the table: means over the seeds.
#[derive(Serialize)]
struct Row {
    engine: String,
    workload: String,
    policy: String,
    session_ids: bool,
    seeds: usize,
    ttft_ms_p50: Interval,
    ttft_ms_p90: Interval,
    ttft_ms_p99: Interval,
    ttft_ms_mean: Interval,
    hit_rate: Interval,
    requests_max_over_mean: Interval,
    copies: Interval,
    held: Interval,
    failed: f64,
    violations: Vec<String>,
}

fn main() {
    let options = Options::from_args();
    let mut rows = Vec::new();
    if !options.json {
        println!(
            "{:<10}{:<8}{:<22}{:<9}{:>17}{:>18}{:>20}{:>9}{:>13}{:>6}{:>8}{:>7}",
            "engine", "load", "policy", "sessions", "p50 ms", "p90 ms", "p99 ms", "mean", "hit %", "imb", "copies", "held"
        );
    }
    for workload in options.list("workloads", "agent,shared,mix") {
        let workload: WorkloadName = workload.parse().expect("a workload");
        for policy in options.policies() {
            for sessions in options.sessions(workload) {
                let row = options.row(workload, policy, sessions);
                if !options.json {
                    print_row(&row);
                }
                rows.push(row);
            }
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&rows).expect("rows are plain data"));
    }
}

fn print_row(row: &Row) {
    let span = |interval: &Interval| format!("{:.1} ±{:.1}", interval.mean, interval.half_width);
    println!(
        "{:<10}{:<8}{:<22}{:<9}{:>17}{:>18}{:>20}{:>9.1}{:>13}{:>6.2}{:>8.0}{:>7.0}",
        row.engine,
        row.workload,
        row.policy,
        if row.session_ids { "yes" } else { "no" },
        span(&row.ttft_ms_p50),
        span(&row.ttft_ms_p90),
        span(&row.ttft_ms_p99),
        row.ttft_ms_mean.mean,
        format!("{:.1} ±{:.1}", 100.0 * row.hit_rate.mean, 100.0 * row.hit_rate.half_width),
        row.requests_max_over_mean.mean,
        row.copies.mean,
        row.held.mean,
    );
    for violation in &row.violations {
        println!("  BROKEN LAW: {violation}");
    }
}

struct Options {
    given: BTreeMap<String, String>,
    json: bool,
}

impl Options {
    fn from_args() -> Self {
        let pair = |argument: String| {
            let (key, value) = argument.split_once('=').unwrap_or_else(|| panic!("`{argument}` is not key=value"));
            (key.to_owned(), value.to_owned())
        };
        let given: BTreeMap<String, String> = std::env::args().skip(1).map(pair).collect();
        let json = given.get("json").is_some_and(|value| value == "yes");
        Self { given, json }
    }

    fn get<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        self.given.get(key).map_or(default, String::as_str)
    }

    fn list<'a>(&'a self, key: &str, default: &'a str) -> impl Iterator<Item = &'a str> {
        self.get(key, default).split(',').filter(|name| !name.is_empty())
    }

    fn policies(&self) -> Vec<PolicyName> {
        if self.get("policies", "all") == "all" {
            return PolicyName::ALL.to_vec();
        }
        self.list("policies", "").map(|name| name.parse().expect("a policy")).collect()
    }

    fn sessions(&self, workload: WorkloadName) -> Vec<bool> {
        match (workload, self.get("sessions", "both")) {
            (WorkloadName::Shared | WorkloadName::Mix, _) | (WorkloadName::Agent, "no") => vec![false],
            (WorkloadName::Agent, "yes") => vec![true],
            (WorkloadName::Agent, _) => vec![false, true],
        }
    }

    fn seeds(&self) -> std::ops::RangeInclusive<u64> {
        let (from, to) = self.get("seeds", "11..20").split_once("..").expect("a range of seeds, as 11..20");
        from.parse().expect("a number")..=to.parse().expect("a number")
    }

    fn number(&self, key: &str, default: &str) -> f64 {
        self.get(key, default).parse().expect("a number")
    }

    fn scenario(&self, workload: WorkloadName, policy: PolicyName, sessions: bool, seed: u64) -> Scenario {
        let engine = match self.get("engine", "serial") {
            "serial" => EngineModel::Serial,
            "scheduler" => EngineModel::Scheduler { budget: Tokens(self.number("budget", "2048") as u32) },
            other => panic!("no engine is called `{other}`"),
        };
        let mut router = RouterConfig { policy, decisions_kept: 0, ..RouterConfig::default() };
        for term in self.list("off", "") {
            match term {
                "delay" => router.weights.delay = 0.0,
                "eviction" => router.weights.eviction = 0.0,
                "memory" => router.weights.memory = 0.0,
                "waste" => router.weights.waste = 0.0,
                "decode" => router.weights.decode = 0.0,
                "copies" => router.copies = false,
                other => panic!("no term is called `{other}`"),
            }
        }
        if let Some(weight) = self.given.get("decode") {
            router.weights.decode = weight.parse().expect("a number");
        }
        match self.given.get("bind_ms").map(String::as_str) {
            Some("never") => router.bind_within = None,
            Some(ms) => router.bind_within = Some(Duration::from_millis(ms.parse().expect("a number"))),
            None => {}
        }
        let mut scenario = Scenario::lab(workload, engine, router, seed);
        scenario.replicas = self.number("replicas", "8") as usize;
        scenario.shape = Shape { session_ids: sessions, ..Shape::lab(workload, scenario.replicas) };
        if self.get("events", "no") == "yes" {
            scenario.events = Some(Link::with_delay(Duration::from_millis(1)));
            scenario.reports = Some((Link::with_delay(Duration::from_millis(1)), Duration::from_millis(100)));
        }
        scenario
    }

    fn row(&self, workload: WorkloadName, policy: PolicyName, session_ids: bool) -> Row {
        let outcomes: Vec<Outcome> = self.seeds().map(|seed| run(&self.scenario(workload, policy, session_ids, seed))).collect();
        let over = |value: &dyn Fn(&Outcome) -> f64| Interval::of(&outcomes.iter().map(value).collect::<Vec<f64>>());
        let mean = |outcome: &Outcome| {
            let all = outcome.ttft_ms();
            all.iter().sum::<f64>() / all.len() as f64
        };
        Row {
            engine: self.get("engine", "serial").to_owned(),
            workload: workload.to_string(),
            policy: policy.to_string(),
            session_ids,
            seeds: outcomes.len(),
            ttft_ms_p50: over(&|outcome| outcome.ttft_percentile_ms(0.5)),
            ttft_ms_p90: over(&|outcome| outcome.ttft_percentile_ms(0.9)),
            ttft_ms_p99: over(&|outcome| outcome.ttft_percentile_ms(0.99)),
            ttft_ms_mean: over(&mean),
            hit_rate: over(&Outcome::hit_rate),
            requests_max_over_mean: over(&Outcome::imbalance),
            copies: over(&|outcome| f64::from(outcome.copies)),
            held: over(&|outcome| f64::from(outcome.held)),
            failed: over(&|outcome| outcome.requests.iter().filter(|request| request.failed || request.refused).count() as f64).mean,
            violations: outcomes.iter().flat_map(|outcome| outcome.violations.iter().cloned()).take(5).collect(),
        }
    }
}
