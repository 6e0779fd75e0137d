use std::cmp::Reverse;

use baton_cost::fetch_s;
use baton_units::{Blocks, ReplicaId, RequestId, Tokens};

use crate::fleet::Replica;

/// How a replica gives cached prefixes to others, and takes theirs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerTerms {
    /// Names what decides the bits of its KV and how they lie: replicas read each other's KV where it is the same.
    pub group: u64,
    pub kv_bytes_per_token: f64,
    /// What a copy from the replica takes beside its bytes, as measured.
    pub latency_s: f64,
    /// Of its link, alone on it, as measured.
    pub bytes_per_s: f64,
}

/// A prefix that is to be brought to the replica of a request before the request starts there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fetch {
    pub(crate) from: ReplicaId,
    /// Leading blocks that are to be there then.
    pub(crate) blocks: Blocks,
    /// That travel.
    pub(crate) tokens: Tokens,
    pub(crate) ms: f64,
    /// Prefill where it does not come.
    pub(crate) recompute_ms: f64,
    /// Of that, what it would take to compute what is brought.
    pub(crate) saves_ms: f64,
}

/// The peer that has the most of the prompt being quoted, among those that read each other's KV.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Holder {
    pub(crate) from: ReplicaId,
    terms: PeerTerms,
    /// Leading blocks that it has.
    depth: u32,
    flows: u32,
}

/// Who can bring what to whom.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    terms: Vec<Option<PeerTerms>>,
    /// Copies under way out of each replica.
    flows: Vec<u32>,
    /// One of each group, of the prompt being quoted. Kept for its memory.
    pub(crate) holders: Vec<Holder>,
    /// Requests that wait for what they fetch.
    pub(crate) waiting: Vec<RequestId>,
    /// Replicas to which something of the prompt being quoted is on its way.
    pub(crate) awaiting: Vec<ReplicaId>,
}

impl Peers {
    pub(crate) fn set(&mut self, id: ReplicaId, terms: Option<PeerTerms>) {
        if self.terms.len() <= id.index() {
            self.terms.resize(id.index() + 1, None);
            self.flows.resize(id.index() + 1, 0);
        }
        self.terms[id.index()] = terms;
    }

    /// Whether nobody can bring anything to anybody.
    pub(crate) fn is_empty(&self) -> bool {
        self.terms.iter().flatten().count() < 2
    }

    pub(crate) fn terms(&self, id: ReplicaId) -> Option<&PeerTerms> {
        self.terms.get(id.index())?.as_ref()
    }

    /// Whether a replica that has `depth` blocks has more than the best of its group so far; of equals the one that sends to fewer.
    pub(crate) fn is_better(&self, from: ReplicaId, depth: u32) -> bool {
        let Some(terms) = self.terms(from).filter(|_| depth > 0) else { return false };
        let best = self.holders.iter().find(|holder| holder.terms.group == terms.group);
        best.is_none_or(|best| (depth, Reverse(self.flows[from.index()])) > (best.depth, Reverse(best.flows)))
    }

    /// Makes a replica that has `depth` blocks the holder of its group.
    pub(crate) fn offer(&mut self, from: ReplicaId, depth: u32) {
        let Some(&terms) = self.terms(from) else { return };
        self.holders.retain(|holder| holder.terms.group != terms.group);
        self.holders.push(Holder { from, terms, depth, flows: self.flows[from.index()] });
    }

    /// What a replica that has `held` tokens of the prompt would fetch, before it is compared with computing it. Algorithm c.3b.
    pub(crate) fn quote(&self, replica: &Replica, prompt: Tokens, held: Tokens) -> Option<Fetch> {
        let id = replica.spec.id;
        let group = self.terms(id).filter(|_| !self.awaiting.contains(&id))?.group;
        let holder = self.holders.iter().find(|holder| holder.terms.group == group && holder.from != id)?;
        let there = replica.hit_tokens(holder.depth, prompt);
        let tokens = there.saturating_sub(held);
        if tokens == Tokens::ZERO {
            return None;
        }
        let PeerTerms { kv_bytes_per_token, latency_s, bytes_per_s, .. } = holder.terms;
        let ms = fetch_s(kv_bytes_per_token * tokens.as_f64(), latency_s, bytes_per_s, holder.flows) * 1e3;
        Some(Fetch { from: holder.from, blocks: there.full_blocks(replica.spec.block_size), tokens, ms, recompute_ms: 0.0, saves_ms: 0.0 })
    }

    pub(crate) fn begin(&mut self, request: RequestId, from: ReplicaId) {
        self.flows[from.index()] += 1;
        self.waiting.push(request);
    }

    pub(crate) fn end(&mut self, request: RequestId, from: ReplicaId) {
        self.waiting.retain(|other| *other != request);
        let flows = &mut self.flows[from.index()];
        *flows = flows.checked_sub(1).expect("a copy that ends has begun");
    }
}
