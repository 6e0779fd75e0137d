//! One fleet under one load: the axes of the sweep, and the suites.

use std::{collections::BTreeMap, time::Duration};

use baton_policy::PolicyName;
use baton_sim::{EngineModel, Link, Scenario, Shape, WorkloadName, reference_step};
use baton_units::{Blocks, Tokens};

use crate::rule::Rule;

/// Axes with their defaults, in the order in which a cell's name has them. Where the default is empty, the lab's own figure for the
/// workload holds.
const AXES: [(&str, &str); 18] = [
    ("engine", "serial"),
    ("workload", "mix"),
    // Tokens a step of the scheduler.
    ("budget", "2048"),
    ("replicas", "8"),
    // Share of the fleet's time that open requests ask for; or their rate a second.
    ("load", ""),
    ("rate", ""),
    ("requests", ""),
    // Agents at a time on each replica; whether they name their session.
    ("agents", "5"),
    ("sessions", "no"),
    // Share of long prompts, and their length.
    ("long", ""),
    ("long_tokens", ""),
    ("prefixes", ""),
    ("zipf", ""),
    ("own", ""),
    ("output", ""),
    ("blocks", ""),
    // Delay of cache events, and period and delay of load reports, in ms.
    ("events", "no"),
    ("reports", "no"),
];

/// Cells of the named suites; a list of values stands for a cell each.
pub(crate) const SUITES: [(&str, &[&str]); 3] = [
    ("lab", &["engine=serial,scheduler workload=agent sessions=no,yes", "engine=serial,scheduler workload=shared,mix"]),
    (
        "quick",
        &[
            "engine=serial,scheduler workload=mix load=0.5,0.83",
            "engine=serial,scheduler workload=shared load=0.7",
            "engine=serial,scheduler workload=agent agents=10",
            "engine=serial,scheduler workload=agent-mix",
        ],
    ),
    (
        "sweep",
        &[
            "engine=serial,scheduler workload=mix load=0.5,0.7,0.83,0.95",
            "engine=serial,scheduler workload=mix load=0.7 long=0.01,0.02,0.1,0.2",
            "engine=serial,scheduler workload=mix load=0.7 replicas=4,16",
            "engine=serial,scheduler workload=mix load=0.7 replicas=64",
            "engine=serial,scheduler workload=mix load=0.7 prefixes=60 zipf=0,1.5",
            "engine=serial,scheduler workload=mix load=0.7 blocks=3456",
            "engine=serial,scheduler workload=mix load=0.7 output=256",
            "engine=serial,scheduler workload=mix load=0.7 events=1 reports=100",
            "engine=serial,scheduler workload=mix load=0.7 events=2000 reports=5000",
            "engine=serial,scheduler workload=shared load=0.25,0.5,0.7,0.85,0.95",
            "engine=serial,scheduler workload=shared load=0.5 prefixes=60 zipf=0,1.5",
            "engine=serial,scheduler workload=shared load=0.5 prefixes=160 zipf=0 requests=2000",
            "engine=serial,scheduler workload=shared load=0.5 blocks=1728",
            "engine=serial,scheduler workload=shared load=0.5 output=256",
            "engine=serial,scheduler workload=shared load=0.5 replicas=4,64",
            "engine=serial,scheduler workload=agent agents=5,10,15 sessions=no,yes",
            "engine=serial,scheduler workload=agent blocks=3456",
            "engine=serial,scheduler workload=agent replicas=4,16",
            "engine=serial,scheduler workload=agent events=1 reports=100",
            "engine=serial,scheduler workload=agent-mix sessions=no,yes",
        ],
    ),
];

/// A point of the sweep. Its name is what to type to run it again.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    given: BTreeMap<String, String>,
}

impl Cell {
    pub(crate) fn knows(axis: &str) -> bool {
        AXES.iter().any(|(name, _)| *name == axis)
    }

    /// All combinations of the values given for each axis.
    pub(crate) fn product(given: &BTreeMap<String, String>) -> Vec<Self> {
        let mut cells = vec![Self { given: BTreeMap::new() }];
        for (axis, _) in AXES {
            let Some(values) = given.get(axis) else { continue };
            cells = cells.iter().flat_map(|cell| values.split(',').map(|value| cell.with(axis, value)).collect::<Vec<_>>()).collect();
        }
        cells
    }

    fn with(&self, axis: &str, value: &str) -> Self {
        let mut given = self.given.clone();
        given.insert(axis.to_owned(), value.to_owned());
        Self { given }
    }

    /// The cells of a suite, with what was `given` on the command line in place of theirs.
    pub(crate) fn suite(name: &str, given: &BTreeMap<String, String>) -> Vec<Self> {
        let (_, lines) = SUITES.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no suite is called `{name}`"));
        let mut cells: Vec<Self> = Vec::new();
        for line in *lines {
            let mut axes: BTreeMap<String, String> = line.split(' ').map(split_pair).collect();
            axes.extend(given.iter().map(|(axis, value)| (axis.clone(), value.clone())));
            for cell in Self::product(&axes) {
                if cells.iter().all(|known| known.name() != cell.name()) {
                    cells.push(cell);
                }
            }
        }
        cells
    }

    pub(crate) fn name(&self) -> String {
        let shown = AXES.iter().filter_map(|(axis, default)| {
            let value = self.given.get(*axis).map_or(*default, String::as_str);
            let always = ["engine", "workload"].contains(axis);
            (always || value != *default).then(|| format!("{axis}={value}"))
        });
        shown.collect::<Vec<_>>().join(" ")
    }

    fn get(&self, axis: &str) -> &str {
        let (_, default) = AXES.iter().find(|(name, _)| *name == axis).expect("an axis");
        self.given.get(axis).map_or(*default, String::as_str)
    }

    fn number(&self, axis: &str) -> Option<f64> {
        let value = self.get(axis);
        (!value.is_empty()).then(|| value.parse().unwrap_or_else(|_| panic!("{axis}={value} is no number")))
    }

    fn workload(&self) -> WorkloadName {
        self.get("workload").parse().unwrap_or_else(|error| panic!("{error}"))
    }

    /// What is worth comparing here: rules that see no difference between its requests are left out.
    pub(crate) fn rules(&self) -> Vec<Rule> {
        let policies = |names: &[PolicyName]| names.iter().map(|name| Rule::Policy(*name)).collect::<Vec<_>>();
        let mut rules = policies(&[PolicyName::Price]);
        rules.push(Rule::OwnCost);
        rules.extend(policies(&[PolicyName::LeastOutstanding, PolicyName::RoundRobin]));
        match self.workload() {
            WorkloadName::Agent | WorkloadName::AgentMix if self.get("sessions") == "yes" => {
                rules.extend(policies(&[PolicyName::SessionHash]));
            }
            WorkloadName::Agent | WorkloadName::Tails => {}
            WorkloadName::Shared => rules.extend(policies(&[PolicyName::CheapSignals])),
            WorkloadName::Mix | WorkloadName::AgentMix => {
                let replicas = self.number("replicas").expect("it has a default") as usize;
                rules.extend([replicas.div_ceil(8), replicas.div_ceil(4)].map(Rule::Sita));
                rules.dedup();
            }
        }
        rules
    }

    pub(crate) fn scenario(&self, rule: &Rule, seed: u64) -> Scenario {
        let engine = match self.get("engine") {
            "serial" => EngineModel::Serial,
            "scheduler" => EngineModel::Scheduler { budget: Tokens(self.number("budget").expect("it has a default") as u32) },
            other => panic!("no engine is called `{other}`"),
        };
        let workload = self.workload();
        let mut scenario = Scenario::lab(workload, engine, rule.router(), seed);
        scenario.replicas = self.number("replicas").expect("it has a default") as usize;
        scenario.shape = self.shape(workload, scenario.replicas);
        if let Some(blocks) = self.number("blocks") {
            scenario.blocks = Blocks(blocks as u32);
        }
        let delay = |axis: &str| match self.get(axis) {
            "no" => None,
            ms => Some(Duration::from_millis(ms.parse().unwrap_or_else(|_| panic!("{axis}={ms} is no number of ms")))),
        };
        scenario.events = delay("events").map(Link::with_delay);
        scenario.reports = delay("reports").map(|period| (Link::with_delay(period), period));
        rule.apply(&mut scenario);
        scenario
    }

    fn shape(&self, workload: WorkloadName, replicas: usize) -> Shape {
        let mut shape = Shape::lab(workload, replicas);
        shape.concurrent = self.number("agents").expect("it has a default") as usize * replicas;
        shape.tasks = 2 * shape.concurrent;
        shape.session_ids = self.get("sessions") == "yes";
        if replicas > 8 {
            // As long a run as with eight, as far as the time for it allows.
            shape.requests = (shape.requests * replicas / 8).min(3 * shape.requests);
        }
        let set = |place: &mut usize, axis: &str| {
            if let Some(value) = self.number(axis) {
                *place = value as usize;
            }
        };
        set(&mut shape.requests, "requests");
        set(&mut shape.long_tokens, "long_tokens");
        set(&mut shape.prefixes, "prefixes");
        set(&mut shape.own_tokens, "own");
        shape.long_share = self.number("long").unwrap_or(shape.long_share);
        shape.zipf = self.number("zipf").unwrap_or(shape.zipf);
        shape.output = self.number("output").map_or(shape.output, |output| output as u32);
        if let Some(load) = self.number("load") {
            shape.rate_per_s = shape.rate_for_load(load, replicas, &reference_step());
        }
        shape.rate_per_s = self.number("rate").unwrap_or(shape.rate_per_s);
        shape
    }
}

/// `key=value` as typed.
pub(crate) fn split_pair(pair: &str) -> (String, String) {
    let (key, value) = pair.split_once('=').unwrap_or_else(|| panic!("`{pair}` is not key=value"));
    (key.to_owned(), value.to_owned())
}
