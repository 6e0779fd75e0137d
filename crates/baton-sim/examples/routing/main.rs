//! Routing rules in virtual time, over paired seeds: first tokens, times between tokens and hits of each, and each rule's ratio to the
//! best one of its cell, with 95 % confidence intervals.
//!
//! `routing [suite=lab|quick|sweep] [AXIS=value,…] [policies=price,own-cost,price-no-delay+copies,sita-2,…|all] [seeds=11..20]
//! [threads=N] [json=FILE] [trace=FILE]`, where an axis is one of `AXES` in `cell.rs`, and several values make a cell each. A cell's name
//! is what to type to run it alone. `trace` writes a line of JSON for each request: what the router knew, what it chose, what came of it.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program")]

mod cell;
mod report;
mod rule;

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufWriter, Write as _},
    ops::RangeInclusive,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use baton_policy::PolicyName;
use baton_sim::{Outcome, run};
use serde_json::json;

use crate::{
    cell::{Cell, split_pair},
    report::{Report, Row, Seen},
    rule::Rule,
};

/// Decisions kept of each run when they are traced: those of all its requests.
const TRACED: usize = 1 << 20;

fn main() {
    let options = Options::from_args();
    let mut trace = options.given("trace").map(|path| BufWriter::new(File::create(path).expect("the trace's file")));
    let cells = options.cells();
    let mut reports = Vec::new();
    for (place, cell) in cells.iter().enumerate() {
        let report = compare(cell, &options, &mut trace);
        println!("{report}");
        reports.push(report);
        eprintln!("{} of {} cells", place + 1, cells.len());
    }
    println!("{}", report::ratios(&reports));
    println!("{}", report::findings(&reports));
    if let Some(path) = options.given("json") {
        serde_json::to_writer_pretty(File::create(path).expect("the report's file"), &reports).expect("reports are plain data");
    }
}

/// Plays a cell under all its rules and seeds, with as many threads as asked for.
fn compare(cell: &Cell, options: &Options, trace: &mut Option<BufWriter<File>>) -> Report {
    let rules = options.rules(cell);
    let jobs: Vec<(usize, u64)> = (0..rules.len()).flat_map(|rule| options.seeds().map(move |seed| (rule, seed))).collect();
    let next = AtomicUsize::new(0);
    let traced = trace.is_some();
    let results: Vec<Mutex<Option<Outcome>>> = jobs.iter().map(|_| Mutex::new(None)).collect();
    thread::scope(|scope| {
        for _ in 0..options.threads() {
            scope.spawn(|| {
                loop {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(rule, seed)) = jobs.get(job) else { return };
                    let mut scenario = cell.scenario(&rules[rule], seed);
                    scenario.router.decisions_kept = if traced { TRACED } else { 0 };
                    *results[job].lock().expect("no holder panics") = Some(run(&scenario));
                }
            });
        }
    });
    let mut outcomes = results.into_iter().map(|slot| slot.into_inner().expect("no holder panics").expect("every job ran"));
    let mut rows = Vec::new();
    for rule in &rules {
        let of_rule: Vec<Outcome> = outcomes.by_ref().take(options.seeds().count()).collect();
        if let Some(file) = trace {
            for (outcome, seed) in of_rule.iter().zip(options.seeds()) {
                write_trace(file, cell, rule, seed, outcome).expect("the trace is written");
            }
        }
        rows.push(Row::new(rule, options.seeds().zip(&of_rule).map(|(seed, outcome)| Seen::new(seed, outcome)).collect()));
    }
    Report::new(cell.name(), rows)
}

fn write_trace(file: &mut BufWriter<File>, cell: &Cell, rule: &Rule, seed: u64, outcome: &Outcome) -> std::io::Result<()> {
    let mut decisions = outcome.decisions.iter().peekable();
    for (place, request) in outcome.requests.iter().enumerate() {
        let decision = decisions.next_if(|decision| decision.request.0 == place as u64);
        let line = json!({
            "cell": cell.name(), "rule": rule.to_string(), "seed": seed, "request": place, "arrived_ms": request.arrived.as_ms(),
            "kind": request.kind, "prompt": request.prompt, "cached": request.cached, "replica": request.replica,
            "ttft_ms": request.ttft_ms(), "tpot_ms": request.tpot_ms(), "decision": decision,
        });
        writeln!(file, "{line}")?;
    }
    Ok(())
}

struct Options {
    given: BTreeMap<String, String>,
}

impl Options {
    fn from_args() -> Self {
        let given: BTreeMap<String, String> = std::env::args().skip(1).map(|argument| split_pair(&argument)).collect();
        let others = ["suite", "policies", "seeds", "threads", "json", "trace"];
        let unknown = given.keys().find(|key| !Cell::knows(key) && !others.contains(&key.as_str()));
        assert!(unknown.is_none(), "no option is called `{}`", unknown.map_or("", String::as_str));
        Self { given }
    }

    fn given(&self, key: &str) -> Option<&str> {
        self.given.get(key).map(String::as_str)
    }

    fn cells(&self) -> Vec<Cell> {
        let axes: BTreeMap<String, String> =
            self.given.iter().filter(|(key, _)| Cell::knows(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        match self.given("suite") {
            Some(suite) => Cell::suite(suite, &axes),
            None => Cell::product(&axes),
        }
    }

    fn rules(&self, cell: &Cell) -> Vec<Rule> {
        match self.given("policies") {
            None => cell.rules(),
            Some("all") => PolicyName::ALL.iter().map(|policy| Rule::Policy(*policy)).collect(),
            Some(names) => names.split(',').map(|name| name.parse().unwrap_or_else(|error| panic!("{error}"))).collect(),
        }
    }

    fn seeds(&self) -> RangeInclusive<u64> {
        let (from, to) = self.given("seeds").unwrap_or("11..20").split_once("..").expect("a range of seeds, as 11..20");
        from.parse().expect("a number")..=to.parse().expect("a number")
    }

    fn threads(&self) -> usize {
        let all = || thread::available_parallelism().map_or(1, usize::from);
        self.given("threads").map_or_else(all, |threads| threads.parse().expect("a number"))
    }
}
