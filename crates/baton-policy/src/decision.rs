use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use baton_units::{ReplicaId, RequestId, Time, Tokens};
use serde::Serialize;

use crate::PolicyName;

/// Why a request went where it went, and what came of it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DecisionRecord {
    pub request: RequestId,
    pub time: Time,
    pub policy: PolicyName,
    pub prompt: Tokens,
    pub session: Option<u64>,
    pub program: Option<u64>,
    /// The request's own objectives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_ttft_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slo_tpot_ms: Option<f64>,
    /// Time in the router before this decision.
    pub held_ms: f64,
    /// The chosen one's and those of the best others, in order of replicas.
    pub quotes: Vec<Quote>,
    pub chosen: ReplicaId,
    pub reason: Reason,
    /// Candidate with the lowest total beside the chosen one.
    pub runner_up: Option<ReplicaId>,
    /// Wait and prefill at the chosen replica.
    pub predicted_ttft_ms: f64,
    pub realised: Realised,
    /// Realised TTFT less the lowest one predicted for any other candidate, at least zero; `None` until the first token.
    pub regret_ms: Option<f64>,
}

/// Why the chosen replica, which need not have the lowest total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// Its total is the lowest.
    Lowest,
    /// The lowest total is less than the model's own error away; fewer requests in flight or a draw decided.
    Tie,
    /// The session is there, and leaving would gain too little.
    Stays,
    /// The session begins, and of those that cost little more than the lowest this one has the fewest sessions.
    Starts,
    /// Another policy than `price`, which goes by its name.
    Rule,
}

/// What one candidate would cost.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Quote {
    pub replica: ReplicaId,
    pub total_ms: f64,
    pub terms: Terms,
    /// Prompt tokens whose KV is there when it starts, those that are fetched included.
    pub hit_tokens: Tokens,
    /// What of them would be brought from a peer before; `None` where that is not possible, or dearer than to compute them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetch: Option<FetchQuote>,
    pub in_flight: u32,
}

/// A peer as source of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct FetchQuote {
    pub from: ReplicaId,
    pub tokens: Tokens,
    /// On the link, while the request waits in any case.
    pub ms: f64,
    /// What the prefill would take without.
    pub recompute_ms: f64,
}

/// Parts of a quote, in ms. Policies other than `price` leave what they do not price at zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Terms {
    /// Until the prompt starts: work ahead of it, or blocks that must free first.
    pub wait: f64,
    pub prefill: f64,
    /// Delay of requests yet to come.
    pub delay: f64,
    /// Memory that live sessions there will want.
    pub memory: f64,
    /// Server time wasted, at the shadow price of the fleet's utilisation.
    pub waste: f64,
    /// Work to compute evicted prefixes again.
    pub eviction: f64,
    /// Slower tokens of the requests that run there.
    pub decode: f64,
    /// Of a session that begins: what it and those that live there will cost each other from its second request on.
    pub company: f64,
    /// Lateness beyond what this request or its class allows, and the classes of those yet to come, at the price that an objective has.
    pub late: f64,
}

impl Terms {
    pub fn total(&self) -> f64 {
        self.wait + self.prefill + self.delay + self.memory + self.waste + self.eviction + self.decode + self.company + self.late
    }
}

/// What really happened; fields fill as it does.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Realised {
    /// From this decision to the first token.
    pub ttft_ms: Option<f64>,
    /// As reported by the engine.
    pub cached_tokens: Option<Tokens>,
    pub output_tokens: u32,
    pub finished_ms: Option<f64>,
    pub outcome: Option<&'static str>,
}

/// The latest decisions, a bounded ring.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    kept: usize,
    order: VecDeque<RequestId>,
    records: HashMap<RequestId, Arc<DecisionRecord>>,
}

impl DecisionLog {
    pub(crate) fn new(kept: usize) -> Self {
        Self { kept, order: VecDeque::new(), records: HashMap::new() }
    }

    /// A request that is decided again, as on a retry, keeps its place and gets the new record.
    pub(crate) fn push(&mut self, record: DecisionRecord) {
        if self.kept == 0 {
            return;
        }
        let request = record.request;
        if self.records.insert(request, Arc::new(record)).is_none() {
            self.order.push_back(request);
        }
        if self.order.len() > self.kept
            && let Some(oldest) = self.order.pop_front()
        {
            self.records.remove(&oldest);
        }
    }

    pub(crate) fn update(&mut self, request: RequestId, change: impl FnOnce(&mut DecisionRecord)) {
        if let Some(record) = self.records.get_mut(&request) {
            change(Arc::make_mut(record));
        }
    }

    pub(crate) fn latest(&self, limit: usize) -> Vec<Arc<DecisionRecord>> {
        self.order.iter().rev().take(limit).filter_map(|request| self.records.get(request).cloned()).collect()
    }

    pub(crate) fn get(&self, request: RequestId) -> Option<Arc<DecisionRecord>> {
        self.records.get(&request).cloned()
    }

    pub(crate) fn clear(&mut self) {
        self.order.clear();
        self.records.clear();
    }
}
