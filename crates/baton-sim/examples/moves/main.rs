//! The loop that moves running requests, in virtual time: the same load with and without it, means over the seeds.
//!
//! `moves [policies=price,least-outstanding] [rates=20,30] [seeds=11..13] [link=ethernet] [replicas=8] [blocks=N] [own=1024] [output=800]
//! [sigma=1] [longest=8000] [scv=4] [seconds=60] [low=48] [log=N]`. Rates are arrivals a second of the fleet, for `seconds`; `blocks` are those
//! that fit beside the weights unless they are given; outputs are log-normal with median `output`; `scv` is the squared coefficient of
//! variation of the times between arrivals; `low` is the loop's threshold of freeness; `log` prints the first decisions in words.
//! `moves cost` prints what one look at the fleet costs on this machine.
#![allow(clippy::print_stdout, clippy::disallowed_methods, reason = "a program that measures")]

mod cost;

use std::{collections::BTreeMap, str::FromStr};

use baton_policy::{PolicyName, RouterConfig};
use baton_sim::{EngineModel, MoveRecord, Moves, Outcome, OutputTail, Scenario, Shape, WorkloadName, percentile, reference_blocks, run};
use baton_units::{Blocks, DurationMs, Tokens};

fn main() {
    if std::env::args().nth(1).as_deref() == Some("cost") {
        return [8, 64, 256].into_iter().for_each(|replicas| cost::print(replicas, 100));
    }
    let options = Options::from_args();
    println!(
        "means of {} runs; TTFT and time per output token in ms; whole: from arrival to the last token, in s; preempted: a run's; gap: nobody \
         computes it, p50/p99 ms",
        options.seeds().len()
    );
    println!(
        "{:<18} {:>6} {:<4} {:>6} {:>7} {:>7} {:>9} {:>11} {:>9} {:>9} {:>7} {:>7} {:>11}  moves by reason",
        "rule", "rate/s", "loop", "p50", "p90", "p99", "tpot p99", "whole mean", "whole p99", "preempted", "moved", "stayed", "gap"
    );
    for policy in options.list::<PolicyName>("policies", "price,least-outstanding") {
        for rate in options.list::<f64>("rates", "30") {
            for with in [false, true] {
                let outcomes: Vec<Outcome> =
                    options.seeds().into_iter().map(|seed| run(&options.scenario(policy, rate, with, seed))).collect();
                print_row(policy, rate, with, &outcomes);
                for record in outcomes.iter().flat_map(|outcome| outcome.moves.iter().take(options.number("log", 0.0) as usize)) {
                    println!(
                        "  {} {}{}",
                        record.decided,
                        record.text,
                        record.stayed.map_or(String::new(), |why| format!("; stayed: {why}"))
                    );
                }
            }
        }
    }
}

struct Options {
    given: BTreeMap<String, String>,
}

const KEYS: [&str; 14] =
    ["policies", "rates", "seeds", "link", "replicas", "blocks", "own", "output", "sigma", "longest", "scv", "seconds", "low", "log"];

impl Options {
    fn from_args() -> Self {
        let pair = |pair: String| pair.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned())).expect("key=value");
        let given: BTreeMap<String, String> = std::env::args().skip(1).map(pair).collect();
        let unknown = given.keys().find(|key| !KEYS.contains(&key.as_str()));
        assert!(unknown.is_none(), "no option is called `{}`", unknown.map_or("", String::as_str));
        Self { given }
    }

    fn text<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        self.given.get(key).map_or(default, String::as_str)
    }

    fn number(&self, key: &str, default: f64) -> f64 {
        self.given.get(key).map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{key}={value} is no number")))
    }

    fn list<T: FromStr>(&self, key: &str, default: &str) -> Vec<T> {
        self.text(key, default).split(',').map(|one| one.parse().unwrap_or_else(|_| panic!("{key}: `{one}` is not known"))).collect()
    }

    fn seeds(&self) -> Vec<u64> {
        let (first, last) = self.text("seeds", "11..13").split_once("..").expect("a range of seeds, as 11..13");
        (first.parse().expect("a number")..=last.parse().expect("a number")).collect()
    }

    fn scenario(&self, policy: PolicyName, rate_per_s: f64, with: bool, seed: u64) -> Scenario {
        let router = RouterConfig { policy, decisions_kept: 0, ..RouterConfig::default() };
        let engine = EngineModel::Scheduler { budget: Tokens(2048) };
        let replicas = self.number("replicas", 8.0) as usize;
        let shape = Shape {
            rate_per_s,
            requests: (self.number("seconds", 60.0) * rate_per_s) as usize,
            own_tokens: self.number("own", 1024.0) as usize,
            output: self.number("output", 800.0) as u32,
            output_tail: Some(OutputTail { sigma: self.number("sigma", 1.0), longest: self.number("longest", 8000.0) as u32 }),
            arrivals_scv: self.number("scv", 4.0),
            ..Shape::lab(WorkloadName::Tails, replicas)
        };
        let mut moves = Moves::over(self.text("link", "ethernet"));
        moves.mover.freeness_low = self.number("low", moves.mover.freeness_low);
        Scenario {
            replicas,
            shape,
            blocks: Blocks(self.number("blocks", reference_blocks().as_f64()) as u32),
            moves: with.then_some(moves),
            ..Scenario::lab(WorkloadName::Tails, engine, router, seed)
        }
    }
}

fn print_row(policy: PolicyName, rate: f64, with: bool, outcomes: &[Outcome]) {
    let mean = |of: &dyn Fn(&Outcome) -> f64| outcomes.iter().map(of).sum::<f64>() / outcomes.len() as f64;
    let moves = |of: fn(&MoveRecord) -> bool| mean(&|outcome| outcome.moves.iter().filter(|record| of(record)).count() as f64);
    let records = || outcomes.iter().flat_map(|outcome| &outcome.moves);
    let mut gaps: Vec<f64> = records().filter_map(|record| record.gap).map(|gap| gap.as_ms()).collect();
    gaps.sort_by(f64::total_cmp);
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    for record in records().filter(|record| record.stayed.is_none()) {
        *reasons.entry(record.reason).or_default() += 1;
    }
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|share| mean(&|outcome| outcome.ttft_percentile_ms(share)));
    let (tpot, preempted) = (mean(&|outcome| percentile(&outcome.tpot_ms(), 0.99)), mean(&|outcome| outcome.preemptions as f64));
    let whole = |of: fn(&[f64]) -> f64| mean(&|outcome| of(&outcome.whole_ms()) / 1e3);
    let (whole_mean, whole_p99) = (whole(|ms| ms.iter().sum::<f64>() / ms.len() as f64), whole(|ms| percentile(ms, 0.99)));
    let (moved, stayed) = (moves(|record| record.stayed.is_none()), moves(|record| record.stayed.is_some()));
    let gap = format!("{:.0}/{:.0}", percentile(&gaps, 0.5), percentile(&gaps, 0.99));
    let (policy, with) = (policy.to_string(), if with { "yes" } else { "no" });
    println!(
        "{policy:<18} {rate:>6} {with:<4} {p50:>6.0} {p90:>7.0} {p99:>7.0} {tpot:>9.1} {whole_mean:>11.2} {whole_p99:>9.2} {preempted:>9.1} {moved:>7.1} {stayed:>7.1} {gap:>11}  {reasons:?}"
    );
    for outcome in outcomes {
        assert!(outcome.violations.is_empty(), "laws were broken: {:?}", outcome.violations);
    }
}
