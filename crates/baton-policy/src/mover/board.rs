//! The fleet as a plan changes it.

use baton_cost::{Link, MoveCase, MovePrice};
use baton_units::{BlockSize, Blocks, ReplicaId, RequestId, Tokens};

use super::{Cached, FleetFacts, MoverConfig, Ongoing, ReplicaFacts, RunningFacts, WaitingFacts};
use crate::ReplicaState;

/// How many more steps a replica's batch can decode until memory ends, or how many tokens are missing for its queue's head where that
/// does not fit: negative, and not divided by the batch, since then one more request would raise it.
///
/// Virtual usage after Llumnix (OSDI 2024, section 4.4): what requests have, what the head of the queue wants, what requests on their way
/// here will take, and the quiet that an important one asks for. A replica that is not `Ready` has none; one without requests has no end.
pub fn freeness(replica: &ReplicaFacts, config: &MoverConfig) -> f64 {
    Load::new(replica, config).freeness()
}

/// Steps for which blocks that are left last, where each of `rows` takes a token a step; tokens that are missing where they are too few.
pub(crate) fn steps_or_tokens(blocks_left: f64, rows: f64, size: BlockSize) -> f64 {
    let tokens = blocks_left * f64::from(size.get());
    if tokens >= 0.0 { tokens / rows } else { tokens }
}

/// One replica with the moves of this plan, and those under way, done.
#[derive(Debug, Clone)]
pub(super) struct Load<'a> {
    pub(super) facts: &'a ReplicaFacts,
    /// Blocks in use, those of requests on their way here included.
    pub(super) used: f64,
    pub(super) rows: f64,
    /// Seconds of a step that decodes what ran here when the plan began.
    pub(super) step_s: f64,
    /// Of the waiting ones, how many left, all from the front.
    pub(super) heads_gone: usize,
    /// Waiting ones that came.
    heads_come: Option<f64>,
    /// The blocks that important requests leave to others, where there are such requests.
    quiet: Option<f64>,
    leaves: Traffic,
    comes: Traffic,
}

/// What goes one way at a replica.
#[derive(Debug, Clone, Copy, Default)]
struct Traffic {
    /// A request, with or without KV.
    any: bool,
    /// A copy of KV.
    copy: bool,
}

impl<'a> Load<'a> {
    pub(super) fn new(facts: &'a ReplicaFacts, config: &MoverConfig) -> Self {
        let important = |priority| config.quiet_from.is_some_and(|from| priority <= from);
        let quiet = facts.running.iter().any(|request| important(request.priority));
        Self {
            facts,
            used: facts.blocks_used.as_f64(),
            rows: facts.running.len() as f64,
            step_s: facts.step_s(),
            heads_gone: 0,
            heads_come: None,
            quiet: quiet.then(|| facts.quiet_blocks().as_f64()),
            leaves: Traffic::default(),
            comes: Traffic::default(),
        }
    }

    pub(super) fn freeness(&self) -> f64 {
        self.freeness_within(self.quiet.map_or(self.capacity(), |quiet| quiet.min(self.capacity())))
    }

    /// As if nobody asked for quiet.
    pub(super) fn freeness_of_memory(&self) -> f64 {
        self.freeness_within(self.capacity())
    }

    fn freeness_within(&self, limit: f64) -> f64 {
        if self.facts.state != ReplicaState::Ready {
            return f64::NEG_INFINITY;
        }
        let head = self.head().map(|head| head.demand.as_f64()).or(self.heads_come);
        let rows = self.rows + f64::from(head.is_some());
        if rows == 0.0 {
            return f64::INFINITY;
        }
        steps_or_tokens(limit - self.used - head.unwrap_or(0.0), rows, self.facts.block_size)
    }

    fn capacity(&self) -> f64 {
        self.facts.capacity().as_f64()
    }

    /// The first request that waits here.
    pub(super) fn head(&self) -> Option<&'a WaitingFacts> {
        self.facts.waiting.get(self.heads_gone)
    }

    /// Blocks that a request could take.
    pub(super) fn free(&self) -> f64 {
        self.capacity() - self.used
    }

    pub(super) fn has_place(&self) -> bool {
        self.rows < f64::from(self.facts.max_running)
    }

    pub(super) fn fits(&self, demand: Blocks) -> bool {
        self.has_place() && demand.as_f64() <= self.free()
    }

    pub(super) fn with(&self, blocks: Blocks) -> Self {
        Self { used: self.used + blocks.as_f64(), rows: self.rows + 1.0, ..self.clone() }
    }

    pub(super) fn without(&self, request: &RunningFacts) -> Self {
        Self { used: (self.used - request.blocks.as_f64()).max(0.0), rows: self.rows - 1.0, ..self.clone() }
    }

    /// A waiting request came: it is admitted at once if it fits, and waits else.
    fn take_waiting(&mut self, demand: Blocks) {
        if self.head().is_none() && self.heads_come.is_none() && self.fits(demand) {
            *self = self.with(demand);
        } else {
            self.heads_come = self.heads_come.or(Some(demand.as_f64()));
        }
    }
}

impl Traffic {
    fn add(&mut self, copy: bool) {
        (self.any, self.copy) = (true, self.copy || copy);
    }
}

/// All replicas.
pub(super) struct Board<'a> {
    pub(super) loads: Vec<Load<'a>>,
    cached: Cached<'a>,
}

impl<'a> Board<'a> {
    /// With the moves that are under way done.
    pub(super) fn new<'b>(
        facts: &'a FleetFacts,
        config: &MoverConfig,
        ongoing: impl Iterator<Item = (&'b RequestId, &'b Ongoing)>,
        cached: Cached<'a>,
    ) -> Self {
        let mut board = Self { loads: facts.replicas.iter().map(|replica| Load::new(replica, config)).collect(), cached };
        for (request, ongoing) in ongoing {
            if let Some(source) = board.place(ongoing.from) {
                board.loads[source].leaves.add(ongoing.copies);
                let own = board.loads[source].facts.running.iter().find(|own| own.request == *request);
                if let Some(own) = own {
                    board.loads[source] = board.loads[source].without(own);
                }
                if board.loads[source].head().is_some_and(|head| head.request == *request) {
                    board.loads[source].heads_gone += 1;
                }
            }
            // Where the target has booked it already, it is in the facts.
            if let Some(target) = board.place(ongoing.to) {
                board.loads[target].comes.add(ongoing.copies);
                let here = board.loads[target].facts;
                let booked =
                    here.running.iter().any(|own| own.request == *request) || here.waiting.iter().any(|own| own.request == *request);
                if !booked {
                    board.loads[target] = board.loads[target].with(ongoing.blocks);
                }
            }
        }
        board
    }

    pub(super) fn place(&self, id: ReplicaId) -> Option<usize> {
        self.loads.iter().position(|load| load.facts.id == id)
    }

    pub(super) fn ready(&self) -> impl Iterator<Item = usize> {
        (0..self.loads.len()).filter(|&place| self.loads[place].facts.state == ReplicaState::Ready)
    }

    /// Whether a copy may go from one to the other: each replica sends one and takes one at a time.
    pub(super) fn may_copy(&self, from: usize, to: usize) -> bool {
        !self.loads[from].leaves.copy && !self.loads[to].comes.copy && self.may_go(from, to)
    }

    /// Whether requests may go from one to the other: none both gives and takes, so that no two moves undo each other.
    pub(super) fn may_go(&self, from: usize, to: usize) -> bool {
        let (source, target) = (&self.loads[from], &self.loads[to]);
        from != to && target.facts.state == ReplicaState::Ready && !source.comes.any && !target.leaves.any
    }

    /// The freest replica that satisfies `may`, ties to the lower id.
    pub(super) fn freest(&self, may: impl Fn(usize) -> bool) -> Option<usize> {
        let mut best: Option<(usize, f64)> = None;
        for place in self.ready().filter(|&place| may(place)) {
            let freeness = self.loads[place].freeness();
            if best.is_none_or(|(_, most)| freeness > most) {
                best = Some((place, freeness));
            }
        }
        best.map(|(place, _)| place)
    }

    pub(super) fn same_numerics(&self, from: usize, to: usize) -> bool {
        self.loads[from].facts.numerics == self.loads[to].facts.numerics
    }

    /// What it costs that a request of so many computed tokens goes on at `to`: what that has of them in its cache does not travel.
    pub(super) fn price(&self, from: usize, to: usize, request: RequestId, tokens: Tokens, decodes: bool) -> MovePrice {
        let (source, target) = (&self.loads[from], &self.loads[to]);
        let (ours, theirs) = (&source.facts.link, &target.facts.link);
        let slower = if ours.bytes_per_s < theirs.bytes_per_s { ours } else { theirs };
        let link = Link { latency_s: ours.latency_s.max(theirs.latency_s), ..slower.clone() };
        MovePrice::of(&MoveCase {
            kv_bytes_per_token: source.facts.kv_bytes_per_token,
            block_size: source.facts.block_size,
            link: &link,
            step: &target.facts.step,
            step_s: source.step_s.max(target.step_s),
            tokens,
            held: (self.cached)(request, target.facts.id).min(tokens),
            decodes,
            queue_s: target.facts.queue_s,
        })
    }

    /// A running request goes.
    pub(super) fn copy(&mut self, from: usize, to: usize, request: &RunningFacts) {
        let demand = request.demand(self.loads[to].facts.block_size);
        self.loads[from] = self.loads[from].without(request);
        self.loads[to] = self.loads[to].with(demand);
        self.loads[from].leaves.add(true);
        self.loads[to].comes.add(true);
    }

    /// The head of a queue goes, or what waits behind it.
    pub(super) fn pass_on(&mut self, from: usize, to: usize, demand: Blocks) {
        self.loads[from].heads_gone += 1;
        self.loads[from].leaves.add(false);
        self.loads[to].take_waiting(demand);
        self.loads[to].comes.add(false);
    }
}
