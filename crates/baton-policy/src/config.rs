use std::time::Duration;

use baton_units::{Bytes, DurationMs, Priority};
use documented::{Documented, DocumentedFields};
use serde::{Deserialize, Serialize};

use crate::PolicyName;

/// What a [`crate::Router`] is told once.
#[derive(Debug, Clone, PartialEq)]
pub struct RouterConfig {
    pub policy: PolicyName,
    /// Model name in the key domain of requests; block keys made from engine events use it.
    pub model: String,
    /// Requests held when no replica can take them at once; one more is refused.
    pub held_max: usize,
    /// Who is served before whom, and how soon; never empty, in order of importance.
    pub classes: Vec<PriorityClass>,
    /// Late binding (`price` only): a request whose wait at its best replica would exceed this stays in the router until one frees.
    /// Lower keeps more choice for later and makes the router's queue matter more; `None` binds at arrival or turns away.
    pub bind_within: Option<Duration>,
    /// How long a prefix sent to a replica is believed to be there without a word of its engine.
    pub belief_lifetime: Duration,
    /// Memory of the index of what is cached where, at most. Lower: blocks that save least are forgotten, and their hits go unseen.
    pub index_bytes: Bytes,
    /// Whether `price` may ask for a shared prefix to be computed on another replica as well.
    pub copies: bool,
    /// Decisions kept for inspection, newest first to last.
    pub decisions_kept: usize,
    pub weights: PriceWeights,
    /// Requests of this priority and more important ones ask for quiet (`price` only): what takes their replica beyond the load at which
    /// it decodes at nearly full speed pays for it. `None`: none do.
    pub quiet_from: Option<Priority>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            policy: PolicyName::Price,
            model: String::new(),
            held_max: 4096,
            classes: vec![PriorityClass::default()],
            // Neutral with one router and exact estimates (mixed work: within noise from 500 ms to never).
            bind_within: Some(Duration::from_secs(1)),
            // Dynamo's default for engines without events.
            belief_lifetime: Duration::from_mins(2),
            // Some 8 million blocks: 128 million tokens of KV.
            index_bytes: Bytes(1 << 30),
            copies: true,
            decisions_kept: 4096,
            weights: PriceWeights::default(),
            quiet_from: None,
        }
    }
}

/// Requests of one importance and their deadline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PriorityClass {
    pub name: String,
    /// The most important priority of the class, the lowest number; it reaches to where the next class begins.
    pub from: Priority,
    /// The prompt starts to be computed within this, or the request is turned away: at once if the router can tell, with the time
    /// after which it would be let in.
    pub start_within: Duration,
    /// Objective (`price` only): a first token is late after this, and the mean lateness counts above all else. Where not all tails can
    /// be short, it chooses whose are: a short one keeps replicas free of long prompts, a long one lets all wait a little.
    pub slo_ttft: Option<Duration>,
}

impl Default for PriorityClass {
    fn default() -> Self {
        Self { name: "default".to_owned(), from: Priority(i32::MIN), start_within: Duration::from_secs(30), slo_ttft: None }
    }
}

impl RouterConfig {
    /// Place of the class that a priority belongs to; more important than all is in the first.
    pub fn class_of(&self, priority: Priority) -> usize {
        self.classes.iter().rposition(|class| class.from <= priority).unwrap_or(0)
    }

    /// Whether requests of this priority ask for quiet.
    pub(crate) fn wants_quiet(&self, priority: Priority) -> bool {
        self.quiet_from.is_some_and(|from| priority <= from)
    }

    /// When a first token is late, in ms; never without an objective.
    pub(crate) fn slo_ttft_ms(&self, priority: Priority) -> f64 {
        self.classes[self.class_of(priority)].slo_ttft.map_or(f64::INFINITY, |slo| slo.as_ms())
    }
}

/// Weights of what `price` charges for others, beside the request's own wait and prefill: all in ms of one token's lateness, so 1 each.
/// Zero switches a term off.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Documented, DocumentedFields)]
#[serde(default, deny_unknown_fields)]
pub struct PriceWeights {
    /// Delay imposed on requests yet to come.
    pub delay: f64,
    /// Recomputation of what must be evicted.
    pub eviction: f64,
    /// Memory that live sessions of the replica will want.
    pub memory: f64,
    /// Server time wasted by waiting beside an idle replica or by computing a prefix again.
    pub waste: f64,
    /// Growth of the time between tokens of running requests.
    ///
    /// What else it could be was tried on chunked engines, seeds 11-20, p90/p99 ms of first tokens on mixed and on shared work: the
    /// delay of last tokens gives 41/2,099 on mixed work; the mean lateness of all tokens, the request's own included, 33/1,932 and
    /// 25/71; server time at the shadow price 38/1,616 and 20/62, and arrivals during its stay times the slowing 40/1,617 and 20/63,
    /// both of which see no running stream; nothing 39/1,620 and 20/62. This one: 39/1,622 and 20/63. On seeds 21-30, which chose
    /// nothing: 41/1,629 and 20/76, against 35/1,675 and 20/74 of last tokens at a bare weight of 0.1; within each other's intervals.
    pub decode: f64,
}

impl Default for PriceWeights {
    fn default() -> Self {
        Self { delay: 1.0, eviction: 1.0, memory: 1.0, waste: 1.0, decode: 1.0 }
    }
}
