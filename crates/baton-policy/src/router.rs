mod moving;

use std::{collections::HashMap, sync::Arc, time::Duration};

use baton_cost::StepCoefficients;
use baton_kv::{Applied, BlockKey, FleetIndex, KvEventBatch, Matched, Snapshot, SnapshotError};
use baton_units::{Blocks, DurationMs, Incarnation, ReplicaId, RequestId, Time, Tokens};

use crate::{
    Arrival, DecisionRecord, FetchQuote, LoadReport, Outcome, PeerTerms, Placed, PolicyName, PrefixCopy, PrefixFetch, PriorityClass, Quote,
    Realised, Reason, Refusal, ReplicaSpec, ReplicaState, ReplicaStatus, RouterConfig, Trust, Verdict,
    chains::{ChainId, Chains},
    copies::Rents,
    decision::DecisionLog,
    demand::Demand,
    fleet::{Replica, Replicas},
    held::{Held, Waiting},
    peers::{Fetch, Peers},
    policy::{Candidate, Policy, RequestView, price::Price},
    quoting::{Quoted, Scratch, backlog_at_ms},
    reuse::Reuse,
};
pub use moving::MoveTerms;
use moving::{Attributes, OUTPUT_SERVICE, Programs};

/// Quotes on a decision's record: the chosen one and the best others.
const QUOTES_KEPT: usize = 16;
/// Ids that the router mints for copies start here.
const COPY_IDS: u64 = 1 << 63;
/// Held requests quoted at a time in `released`; each quote costs as much as a decision.
const HELD_QUOTED_MAX: usize = 16;
/// Where more chains than this went on, a request without a known one is taken to start one.
const STARTS_CONTINUE: f64 = 0.5;
/// Weight of the latest output length in the mean, and the mean before any output was seen.
const OUTPUT_GAIN: f64 = 0.02;
const OUTPUT_PRIOR: f64 = 64.0;
/// What is believed of an engine that tells its evictions may run ahead of them by this much before the rest counts as evicted.
const TOLD_SLACK: f64 = 1.25;

/// Chooses a replica for each request and keeps the books that the choice rests on.
///
/// Tell it what happens (`upsert_replica`, `report`, `kv_events`, `first_token`, `output_tokens`, `finished`), ask with `place`, and
/// after each call that can free a place, or at `next_timeout`, take up held requests with `released`.
#[derive(Debug)]
pub struct Router {
    pub(crate) config: RouterConfig,
    policy: Box<dyn Policy>,
    pub(crate) rng: fastrand::Rng,
    pub(crate) index: FleetIndex,
    pub(crate) replicas: Replicas,
    /// Asked for by id alone.
    pub(crate) flights: HashMap<RequestId, Flight>,
    pub(crate) demand: Demand,
    pub(crate) reuse: Reuse,
    pub(crate) chains: Chains,
    rents: Rents,
    pub(crate) peers: Peers,
    held: Held,
    /// Requests turned away for the load, by class.
    sheds: Vec<u64>,
    log: DecisionLog,
    programs: Programs,
    relocations: u64,
    /// Mean output length of what ended, in tokens.
    pub(crate) mean_output: f64,
    outputs: u32,
    /// Changes when a replica's coefficients do.
    pub(crate) costs_version: u64,
    pub(crate) scratch: Scratch,
    copies: u64,
    /// Sent, and their blocks not yet in the index; all of the replicas' present lives.
    unbooked: Vec<Unbooked>,
}

/// Blocks that a replica will hold for a request.
#[derive(Debug)]
struct Unbooked {
    replica: ReplicaId,
    keys: Arc<[BlockKey]>,
    sent_at: Time,
}

/// Where a request would go.
#[derive(Debug)]
struct Choice {
    quoted: Quoted,
    view: RequestView,
    chosen: usize,
}

/// Of a hit on a replica whose events have a gap, or are on probation.
const DOUBTFUL_HIT: f64 = 0.5;

impl Choice {
    fn wait_ms(&self) -> f64 {
        self.quoted.candidates[self.chosen].terms.wait
    }

    fn prefill_ms(&self) -> f64 {
        self.quoted.candidates[self.chosen].terms.prefill
    }

    /// Tokens of the prompt that are to be computed: what is cached costs its tenant nothing.
    fn uncached(&self, arrival: &Arrival) -> f64 {
        arrival.prompt.saturating_sub(self.quoted.candidates[self.chosen].hit).as_f64()
    }
}

/// A request sent to a replica and not ended.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) replica: ReplicaId,
    pub(crate) incarnation: Incarnation,
    pub(crate) keys: Arc<[BlockKey]>,
    prompt: Tokens,
    /// Blocks of the prompt believed to be there when it was sent.
    depth: u32,
    /// Of these, leading ones that its engine had told of then.
    told: u32,
    session: Option<u64>,
    sent_at: Time,
    progress: Progress,
    /// Its engine told how much of the prompt it had.
    hit_told: bool,
    pub(crate) output: u32,
    /// Blocks beside the full blocks of the prompt.
    pub(crate) private_blocks: u32,
    attributes: Attributes,
    copy: bool,
    /// On its way to the request, until it is there or given up.
    fetch: Option<Fetching>,
}

/// A prefix on its way to a request.
#[derive(Debug, Clone, Copy)]
struct Fetching {
    from: ReplicaId,
    /// As things are where it does not come.
    depth: u32,
    prefill_ms: f64,
}

/// How far the replica of a request is with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// No token of it came.
    Sent,
    Decodes,
    /// It moved by its tokens alone, and its target has not yet computed a token.
    Resumes,
}

impl Flight {
    /// Its replica has computed what came before its next token.
    pub(crate) fn decodes(&self) -> bool {
        self.progress == Progress::Decodes
    }
}

impl Router {
    pub fn new(config: RouterConfig, seed: u64) -> Self {
        Self {
            policy: config.policy.build(),
            rng: fastrand::Rng::with_seed(seed),
            index: FleetIndex::new(&config.model, config.belief_lifetime, config.index_bytes),
            replicas: Replicas::default(),
            flights: HashMap::new(),
            demand: Demand::default(),
            reuse: Reuse::default(),
            chains: Chains::default(),
            rents: Rents::default(),
            peers: Peers::default(),
            held: Held::default(),
            sheds: vec![0; config.classes.len()],
            log: DecisionLog::new(config.decisions_kept),
            programs: Programs::default(),
            relocations: 0,
            mean_output: OUTPUT_PRIOR,
            outputs: 0,
            costs_version: 1,
            scratch: Scratch::default(),
            copies: 0,
            unbooked: Vec::new(),
            config,
        }
    }

    /// A replica joined, or told its shape again. A new incarnation begins with empty books and is ready.
    pub fn upsert_replica(&mut self, spec: ReplicaSpec, _now: Time) {
        self.keep_books();
        self.costs_version += 1;
        self.held.stale = true;
        let blocks = match self.replicas.get_mut(spec.id) {
            Some(replica) if replica.spec.incarnation == spec.incarnation => std::mem::replace(&mut replica.spec, spec).kv_blocks,
            Some(_) | None => {
                self.index.restart(spec.id, spec.incarnation);
                self.replicas.insert(Replica::new(spec));
                Blocks(0)
            }
        };
        if blocks != spec.kv_blocks {
            self.reserve_index();
        }
    }

    /// Room for all that the replicas can hold, taken before it is needed: a table that grows makes every request wait.
    fn reserve_index(&mut self) {
        let blocks: u64 = self.replicas.values().map(|replica| u64::from(replica.spec.kv_blocks.0)).sum();
        self.index.reserve((blocks as f64 * TOLD_SLACK) as usize);
    }

    /// A dead replica's KV counts as gone; what was sent to it stays booked until `finished`.
    pub fn set_state(&mut self, id: ReplicaId, state: ReplicaState, _now: Time) {
        self.keep_books();
        let Some(replica) = self.replicas.get_mut(id) else { return };
        if state == ReplicaState::Dead && replica.state != ReplicaState::Dead {
            self.index.restart(id, replica.spec.incarnation);
        }
        replica.state = state;
        self.held.stale = true;
    }

    /// The replica left for good; requests still in flight there end as unknown ones.
    pub fn remove_replica(&mut self, id: ReplicaId) {
        self.keep_books();
        if let Some(replica) = self.replicas.remove(id) {
            self.index.restart(id, replica.spec.incarnation);
            self.costs_version += 1;
        }
        self.peers.set(id, None);
    }

    pub fn report(&mut self, id: ReplicaId, report: LoadReport, now: Time) {
        let Some(replica) = self.replicas.get_mut(id) else { return };
        replica.advance(now);
        let ms_per_token = replica.spec.step.per_token_s * 1e3;
        replica.ledger.reconcile(report.prefill_backlog, report.taken_at, ms_per_token, now);
        let booked = self.index.blocks_pinned(id) as u32 + replica.private_blocks;
        replica.foreign_blocks = replica.spec.kv_blocks.0.saturating_sub(report.kv_blocks_free.0).saturating_sub(booked);
        replica.report = Some(report);
        self.held.stale = true;
    }

    /// Takes in events of the replica's cache at once; see [`FleetIndex::apply`] for what to do about a gap.
    pub fn kv_events(&mut self, id: ReplicaId, incarnation: Incarnation, batch: &KvEventBatch, now: Time) -> Applied {
        let applied = self.begin_kv_events(id, incarnation, Arc::new(batch.clone()), now);
        self.take_in(id, usize::MAX, now);
        applied
    }

    /// As [`Self::kv_events`], for [`Self::take_in`] to go on with.
    pub fn begin_kv_events(&mut self, id: ReplicaId, incarnation: Incarnation, batch: Arc<KvEventBatch>, now: Time) -> Applied {
        self.keep_books();
        if self.replicas.get(id).is_none() {
            return Applied::Ignored;
        }
        self.index.begin(id, incarnation, batch, now)
    }

    /// Begins to go on without batches that cannot be replayed, those that waited for them being left to [`Self::take_in`]; the replica's
    /// hits count half until its cache is cleared.
    pub fn begin_skip_kv_gap(&mut self, id: ReplicaId) {
        self.keep_books();
        if self.replicas.get(id).is_some() {
            self.index.begin_skip_gap(id);
        }
    }

    /// Begins to take in what was known of a replica's cache `age` ago, right after the replica joined with the incarnation that it had
    /// then; see [`FleetIndex::restore`]. [`Self::take_in`] goes on with it.
    pub fn begin_restore(&mut self, id: ReplicaId, mut snapshot: Snapshot, age: Duration, now: Time) -> Result<(), SnapshotError> {
        self.keep_books();
        if let Some(replica) = self.replicas.get(id) {
            snapshot.truncate((f64::from(replica.spec.kv_blocks.0) * TOLD_SLACK) as usize);
        }
        self.index.begin_restore(id, snapshot, age, now)
    }

    /// Begins to drop what is known of a replica's cache, unless the replica is in that life; none of it is a hit from here on, and
    /// [`Self::take_in`] goes on. For one that is about to be removed, to be dead or to begin anew, which would drop all of it at once.
    pub fn begin_clear(&mut self, id: ReplicaId, unless: Option<Incarnation>) -> bool {
        self.keep_books();
        let begins = self.replicas.get(id).is_some_and(|replica| Some(replica.spec.incarnation) != unless);
        if begins {
            self.index.begin_clear(id);
        }
        begins
    }

    /// Goes on with what was begun of a replica's cache, by `blocks` blocks. Tells whether more is left.
    pub fn take_in(&mut self, id: ReplicaId, blocks: usize, now: Time) -> bool {
        self.keep_books();
        self.make_room(self.index.adding(id, blocks), now);
        self.index.advance(id, blocks, now)
    }

    pub fn update_step(&mut self, id: ReplicaId, step: StepCoefficients) {
        if let Some(replica) = self.replicas.get_mut(id)
            && replica.spec.step != step
        {
            replica.spec.step = step;
            self.costs_version += 1;
        }
    }

    /// Where the request goes. A request that is placed again, as on a retry, ends its former flight as failed.
    pub fn place(&mut self, arrival: Arrival, now: Time) -> Verdict {
        let verdict = self.decide(arrival, None, now);
        self.keep_books();
        verdict
    }

    /// Enters in the index what the latest decisions send where. Whatever is asked next does so too.
    pub fn keep_books(&mut self) {
        for Unbooked { replica, keys, sent_at } in std::mem::take(&mut self.unbooked) {
            self.make_room(keys.len(), sent_at);
            self.index.pin(replica, &keys, sent_at, |seen| self.reuse.see(seen));
            self.trim(replica, sent_at);
        }
    }

    /// As [`Self::place`], where a reader of the index has already matched the arrival's keys, but without the request's blocks in the
    /// index, which takes longer the more there are: [`Self::keep_books`] is to be called once the request is on its way.
    pub fn decide(&mut self, arrival: Arrival, matched: Option<Matched>, now: Time) -> Verdict {
        self.keep_books();
        // The end of a former flight takes back what was expected of it.
        let matched = matched.filter(|_| !self.flights.contains_key(&arrival.request));
        self.finished(arrival.request, Outcome::Failed, None, now);
        if let Err(refusal) = self.check_feasible(&arrival) {
            return Verdict::Refuse(refusal);
        }
        self.demand.arrive(now);
        self.held.advance(now);
        self.scratch.depths.clear();
        let class = self.config.class_of(arrival.priority);
        // A retry had its turn before.
        let in_turn = !arrival.excluded.is_empty() || !self.held.someone_before(&arrival);
        let choice = self.choose(&arrival, matched, now);
        if arrival.excluded.is_empty() {
            self.held.offer(class, choice.as_ref().map_or_else(|| self.cold_ms(&arrival), Choice::prefill_ms));
        }
        let verdict = match choice {
            Some(choice) if in_turn && choice.wait_ms() <= self.bind_limit_ms(self.start_within(&arrival, choice.prefill_ms())) => {
                self.held.enter(class, choice.prefill_ms());
                self.held.pass(&arrival, choice.uncached(&arrival), choice.prefill_ms());
                Verdict::Run(self.bind(&arrival, choice, Duration::ZERO, now))
            }
            Some(choice) => {
                let (wait_ms, prefill_ms, service) = (choice.wait_ms(), choice.prefill_ms(), choice.uncached(&arrival));
                self.scratch.take_back(choice.quoted);
                self.hold_or_shed(&arrival, class, wait_ms, service, prefill_ms, now)
            }
            None if !self.may_serve_later(&arrival) => Verdict::Refuse(Refusal::NoReplica),
            None => self.hold_or_shed(&arrival, class, 0.0, arrival.prompt.as_f64(), self.cold_ms(&arrival), now),
        };
        let known = self.scratch.depths.iter().copied().max().unwrap_or(0);
        let slo_ttft_ms = self.config.slo_ttft_ms(arrival.priority);
        self.demand.remember(arrival.keys, arrival.prompt, known, slo_ttft_ms);
        verdict
    }

    /// Held requests that got a place, or were turned away, in order.
    pub fn released(&mut self, now: Time) -> Vec<(RequestId, Verdict)> {
        if self.held.is_empty() || !(self.held.stale || self.next_timeout().is_some_and(|at| at <= now)) {
            return Vec::new();
        }
        self.keep_books();
        self.held.advance(now);
        self.held.stale = false;
        let mut out = Vec::new();
        while let Some(late) = self.held.take_late(now) {
            let refusal = if self.may_serve_later(&late.arrival) {
                // One that wanted more than its class says nothing of the others' waits.
                if late.arrival.slo.ttft.is_none() {
                    self.held.missed(self.config.class_of(late.arrival.priority));
                }
                self.shed(&late.arrival, late.work_ms, 0.0)
            } else {
                Refusal::NoReplica
            };
            out.push((late.arrival.request, Verdict::Refuse(refusal)));
        }
        // Again as long as somebody leaves: the next event may be far.
        loop {
            let left = self.held.len();
            for place in self.held.look_at(HELD_QUOTED_MAX) {
                // Quotes are worth their time only while a replica is free.
                if self.ready() > 0 && !self.someone_is_free(now) {
                    return out;
                }
                let Some(Waiting { arrival, since, deadline, .. }) = self.held.get(place).cloned() else { continue };
                match self.choose(&arrival, None, now) {
                    Some(choice) if choice.wait_ms() <= self.bind_limit_ms(deadline.since(now)) => {
                        self.held.release(place);
                        let placed = self.bind(&arrival, choice, now.since(since), now);
                        self.keep_books();
                        out.push((arrival.request, Verdict::Run(placed)));
                    }
                    None if !self.may_serve_later(&arrival) => {
                        self.held.remove(place);
                        out.push((arrival.request, Verdict::Refuse(Refusal::NoReplica)));
                    }
                    Some(choice) => self.scratch.take_back(choice.quoted),
                    None => {}
                }
            }
            if self.held.len() == left || self.held.is_empty() {
                return out;
            }
        }
    }

    /// When `released` is worth a call though nothing happened.
    pub fn next_timeout(&self) -> Option<Time> {
        let deadline = self.held.first_deadline()?;
        let within = self.config.bind_within.map_or(f64::INFINITY, |within| within.as_ms());
        let frees = self.replicas.values().filter(|replica| replica.state == ReplicaState::Ready).filter_map(|replica| {
            let over = replica.ledger.backlog_ms() - within;
            (over > 0.0).then(|| replica.ledger.at() + Duration::from_ms(over.max(1.0)))
        });
        Some(frees.fold(deadline, Time::min))
    }

    /// The first token came; `cached` is what the engine says it had of the prompt.
    pub fn first_token(&mut self, request: RequestId, cached: Option<Tokens>, now: Time) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        if flight.progress != Progress::Sent {
            return;
        }
        flight.progress = Progress::Decodes;
        if let Some(replica) = live_replica(&mut self.replicas, flight) {
            replica.advance(now);
            replica.first_token(request, Tokens(flight.prompt.0 + flight.output));
        }
        let uncached = flight.prompt.saturating_sub(cached.unwrap_or(Tokens::ZERO));
        self.programs.prompt(flight.attributes.program, uncached, now);
        let ttft_ms = now.since(flight.sent_at).as_ms();
        self.log.update(request, |record| {
            record.realised.ttft_ms = Some(ttft_ms);
            record.realised.cached_tokens = cached;
            let others = record.quotes.iter().filter(|quote| quote.replica != record.chosen);
            let best = others.map(|quote| quote.terms.wait + quote.terms.prefill).fold(f64::INFINITY, f64::min);
            record.regret_ms = Some((ttft_ms - best).max(0.0));
        });
        self.held.stale = true;
        if let Some(cached) = cached {
            self.correct_index(request, cached);
        }
    }

    /// The engine told after its first token how much of the prompt it had.
    pub fn cached_tokens(&mut self, request: RequestId, cached: Tokens) {
        self.correct_index(request, cached);
        self.log.update(request, |record| record.realised.cached_tokens = Some(cached));
    }

    /// `count` more tokens came out, the first one included.
    pub fn output_tokens(&mut self, request: RequestId, count: u32, now: Time) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        flight.output += count;
        self.programs.output(flight.attributes.program, count, now);
        self.held.serve(flight.attributes.share, OUTPUT_SERVICE * f64::from(count));
        let before = flight.private_blocks;
        let resumed = count > 0 && flight.progress == Progress::Resumes;
        if resumed {
            flight.progress = Progress::Decodes;
        }
        if let Some(replica) = live_replica(&mut self.replicas, flight) {
            flight.private_blocks = private_blocks(&replica.spec, flight.prompt, flight.keys.len(), flight.output);
            replica.private_blocks = replica.private_blocks + flight.private_blocks - before;
            if resumed {
                replica.advance(now);
                replica.first_token(request, Tokens(flight.prompt.0 + flight.output));
            } else if flight.decodes() {
                replica.context += u64::from(count);
            }
        }
        self.held.stale |= resumed;
        let output = flight.output;
        self.log.update(request, |record| record.realised.output_tokens = output);
    }

    /// The request ended on its replica, or was given up while held. `all_keys` name the full blocks of prompt and output together.
    pub fn finished(&mut self, request: RequestId, outcome: Outcome, all_keys: Option<Arc<[BlockKey]>>, now: Time) {
        self.keep_books();
        if self.held.cancel(request) {
            return;
        }
        let Some(mut flight) = self.flights.remove(&request) else { return };
        if let Some(Fetching { from, depth, .. }) = flight.fetch.take() {
            self.peers.end(request, from);
            flight.depth = depth;
        }
        self.held.stale = true;
        let took = now.since(flight.sent_at);
        self.log.update(request, |record| {
            record.realised.finished_ms = Some(took.as_ms());
            record.realised.outcome = Some(match outcome {
                Outcome::Finished => "finished",
                Outcome::Cancelled => "cancelled",
                Outcome::Failed => "failed",
            });
        });
        let done = outcome == Outcome::Finished;
        let all = all_keys.filter(|_| done).unwrap_or_else(|| flight.keys.clone());
        if let Some(replica) = live_replica(&mut self.replicas, &flight) {
            replica.advance(now);
            end_flight(replica, request, &flight);
            // A dead replica's KV is gone, whatever its streams had reached.
            let dead = replica.state == ReplicaState::Dead;
            if done && !flight.copy {
                replica.responded(took);
            }
            let computed = !dead && (done || flight.decodes());
            self.make_room(all.len(), now);
            self.index.unpin(flight.replica, &flight.keys, if dead { &[] } else { &all }, computed, now);
            if !dead && !computed {
                // Blocks that only it would have filled are not there.
                self.index.forget_unused(flight.replica, &flight.keys[flight.depth as usize..]);
            }
            self.trim(flight.replica, now);
        }
        if done && !flight.copy {
            self.outputs = self.outputs.saturating_add(1);
            let gain = OUTPUT_GAIN.max(1.0 / f64::from(self.outputs));
            self.mean_output += gain * (f64::from(flight.output) - self.mean_output);
        }
        if !flight.copy {
            self.chains.end(flight.session, &flight.keys, &all, now);
        }
    }

    /// Other rule from the next request on.
    pub fn set_policy(&mut self, name: PolicyName) {
        self.config.policy = name;
        self.policy = name.build();
        self.held.stale = true;
    }

    pub fn policy(&self) -> PolicyName {
        self.config.policy
    }

    /// Goes by another configuration from the next request on: rule, weights, classes and the queue's bound. What memory was laid out for
    /// at the start stays as it was: the index and its keys, the decisions that are kept, and who is given quiet.
    pub fn reconfigure(&mut self, config: RouterConfig) {
        let RouterConfig {
            policy,
            held_max,
            classes,
            bind_within,
            belief_lifetime: _,
            index_bytes: _,
            copies,
            decisions_kept: _,
            quiet_from: _,
            weights,
            model: _,
        } = config;
        let bounds = |classes: &[PriorityClass]| classes.iter().map(|class| class.from).collect::<Vec<_>>();
        if bounds(&classes) != bounds(&self.config.classes) {
            // What was seen of a class says nothing of another one that has its place now.
            self.held.forget_classes();
        }
        let shed = |class: &PriorityClass| self.sheds().find_map(|(old, count)| (old.name == class.name).then_some(count));
        self.sheds = classes.iter().map(|class| shed(class).unwrap_or(0)).collect();
        (self.config.held_max, self.config.classes, self.config.bind_within) = (held_max, classes, bind_within);
        (self.config.copies, self.config.weights) = (copies, weights);
        self.set_policy(policy);
    }

    /// Forgets the index and all that was learnt, as between compared runs; requests in flight stay booked.
    pub fn reset(&mut self) {
        self.keep_books();
        self.index.forget_all();
        for replica in self.replicas.values_mut() {
            replica.response_ms = 0.0;
        }
        (self.demand, self.reuse, self.chains, self.rents) = Default::default();
        self.programs = Programs::default();
        (self.mean_output, self.outputs) = (OUTPUT_PRIOR, 0);
        self.log.clear();
        self.policy = self.config.policy.build();
    }

    pub fn fleet(&self, now: Time) -> Vec<ReplicaStatus> {
        self.replicas
            .values()
            .map(|replica| ReplicaStatus {
                id: replica.spec.id,
                incarnation: replica.spec.incarnation,
                state: replica.state,
                queue_ms: backlog_at_ms(replica, now),
                in_flight: replica.in_flight(),
                prefilling: replica.ledger.prefilling() as u32,
                kv_blocks_total: replica.spec.kv_blocks,
                kv_blocks_free: replica.blocks_free(self.index.blocks_pinned(replica.spec.id), now),
                kv_blocks_indexed: self.index.blocks_held(replica.spec.id) as u32,
                index_doubtful: self.index.doubtful(replica.spec.id),
                index_trust: replica.truth.trust(now),
                report: replica.report,
            })
            .collect()
    }

    /// Held requests.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Requests turned away for the load so far, by class.
    pub fn sheds(&self) -> impl Iterator<Item = (&PriorityClass, u64)> {
        self.config.classes.iter().zip(self.sheds.iter().copied())
    }

    /// The latest decisions, newest first.
    pub fn decisions(&self, limit: usize) -> Vec<Arc<DecisionRecord>> {
        self.log.latest(limit)
    }

    pub fn decision(&self, request: RequestId) -> Option<Arc<DecisionRecord>> {
        self.log.get(request)
    }

    /// What the router believes of the fleet's caches.
    pub fn index(&self) -> &FleetIndex {
        &self.index
    }

    /// Turns away what no replica can ever hold. Replicas in any state count, since they may come back.
    fn check_feasible(&self, arrival: &Arrival) -> Result<(), Refusal> {
        let specs = || self.replicas.values().map(|replica| &replica.spec);
        let limit = specs().map(|spec| spec.max_model_len).max().ok_or(Refusal::NoReplica)?;
        if arrival.prompt >= limit {
            return Err(Refusal::TooLong { prompt: arrival.prompt, limit });
        }
        let needs = |spec: &ReplicaSpec| blocks_at_most(spec, arrival);
        if specs().any(|spec| needs(spec) <= spec.kv_blocks) {
            return Ok(());
        }
        let largest = specs().max_by_key(|spec| spec.kv_blocks.to_tokens(spec.block_size)).ok_or(Refusal::NoReplica)?;
        let fits = largest.kv_blocks.to_tokens(largest.block_size);
        Err(Refusal::NeverFits { needed: needs(largest), limit: largest.kv_blocks, fits })
    }

    /// Ready replicas that can hold the request, in order of ids.
    fn find_eligible(&self, arrival: &Arrival, ids: &mut Vec<ReplicaId>) {
        let ready = |replica: &&Replica| {
            let spec = &replica.spec;
            replica.state == ReplicaState::Ready
                && !arrival.excluded.contains(&spec.id)
                && arrival.prompt < spec.max_model_len
                && blocks_at_most(spec, arrival) <= spec.kv_blocks
        };
        ids.clear();
        ids.extend(self.replicas.values().filter(ready).map(|replica| replica.spec.id));
    }

    /// Whether a replica that may become ready could take the request.
    fn may_serve_later(&self, arrival: &Arrival) -> bool {
        self.replicas.values().any(|replica| {
            matches!(replica.state, ReplicaState::Ready | ReplicaState::Suspect) && !arrival.excluded.contains(&replica.spec.id)
        })
    }

    /// Lets a request wait if it will start in time, by all that is known of the queue; turns it away if not.
    fn hold_or_shed(&mut self, arrival: &Arrival, class: usize, wait_ms: f64, service: f64, work_ms: f64, now: Time) -> Verdict {
        let within = self.start_within(arrival, work_ms);
        // It is bound to a replica that has as much work as late binding lets it have, if it ever waits here.
        let bound_to = if self.policy.prices_others() { self.config.bind_within.map_or(0.0, |within| within.as_ms()) } else { 0.0 };
        let start_ms = wait_ms.max(bound_to.min(within.as_ms())) + self.held.wait_ms(arrival, class, self.ready());
        let excess_ms = start_ms - within.as_ms();
        let is_full = self.held.len() >= self.config.held_max;
        if excess_ms > 0.0 || is_full && !self.held.displace_last(arrival, now) {
            return Verdict::Refuse(self.shed(arrival, work_ms, excess_ms.max(0.0)));
        }
        self.held.enter(class, work_ms);
        self.held.push(arrival.clone(), now + within, service, work_ms, now);
        Verdict::Hold
    }

    /// A refusal that says when the request would be let in, as things stand.
    fn shed(&mut self, arrival: &Arrival, work_ms: f64, excess_ms: f64) -> Refusal {
        let class = self.config.class_of(arrival.priority);
        let retry_after = self.held.promise(class, work_ms, excess_ms, self.ready());
        self.sheds[class] += 1;
        Refusal::Overloaded { retry_after }
    }

    /// Within what time its prompt, of `prefill_ms`, must start.
    fn start_within(&self, arrival: &Arrival, prefill_ms: f64) -> Duration {
        let class = self.config.classes[self.config.class_of(arrival.priority)].start_within;
        let own = arrival.slo.ttft.map(|ttft| ttft.saturating_sub(Duration::from_ms(prefill_ms)));
        own.map_or(class, |own| own.min(class))
    }

    /// Wait at which a request is sent to its best replica, when it must start within `left`.
    fn bind_limit_ms(&self, left: Duration) -> f64 {
        let late_binding = self.config.bind_within.filter(|_| self.policy.prices_others());
        late_binding.map_or(left, |within| within.min(left)).as_ms()
    }

    /// Whether some replica has so little to do that late binding would send it more.
    fn someone_is_free(&self, now: Time) -> bool {
        let limit = self.bind_limit_ms(Duration::MAX);
        self.replicas.values().any(|replica| replica.state == ReplicaState::Ready && backlog_at_ms(replica, now) <= limit)
    }

    fn ready(&self) -> usize {
        self.replicas.values().filter(|replica| replica.state == ReplicaState::Ready).count()
    }

    /// Prefill without any hit, where no replica can be quoted.
    fn cold_ms(&self, arrival: &Arrival) -> f64 {
        self.replicas.values().next().map_or(0.0, |replica| replica.prefill_ms(arrival.prompt, Tokens::ZERO))
    }

    /// Quotes all that could take it and picks one; `None` when no replica is eligible.
    fn choose(&mut self, arrival: &Arrival, matched: Option<Matched>, now: Time) -> Option<Choice> {
        let mut ids = std::mem::take(&mut self.scratch.ids);
        self.find_eligible(arrival, &mut ids);
        if !ids.is_empty() {
            self.index.expire(now);
            self.index.settle(matched, &arrival.keys, &mut self.scratch.depths);
            self.hide_fetches(&arrival.keys);
        }
        let quoted = (!ids.is_empty()).then(|| self.quote(arrival, &ids, self.policy.prices_others(), now));
        self.scratch.ids = ids;
        let quoted = quoted?;
        let last_on = quoted.chain.and_then(|chain| self.chains.home(chain));
        let starts = self.starts(arrival, quoted.chain);
        let view = RequestView { session: arrival.session, starts, home: arrival.session.and(last_on) };
        let chosen = self.policy.choose(&view, &quoted.candidates, &mut self.rng);
        Some(Choice { quoted, view, chosen })
    }

    /// Whether others will follow the request that go on with its prompt, as far as can be told, and none came before it.
    pub(crate) fn starts(&self, arrival: &Arrival, chain: Option<ChainId>) -> bool {
        let is_first = chain.and_then(|chain| self.chains.home(chain)).is_none();
        is_first && (arrival.session.is_some() || self.chains.continues() > STARTS_CONTINUE)
    }

    /// Books the choice.
    fn bind(&mut self, arrival: &Arrival, choice: Choice, held_for: Duration, now: Time) -> Placed {
        let Choice { quoted, view, chosen } = &choice;
        let fetch = quoted.candidates[*chosen].fetch;
        // What is fetched is a copy.
        let copies = self.policy.prices_others() && self.config.copies && fetch.is_none();
        let copy = if copies { self.copy_worth(arrival, quoted, *chosen, now) } else { None };
        self.record(arrival, view, quoted, *chosen, held_for, now);
        let replica = quoted.candidates[*chosen].replica;
        self.book(arrival, replica, choice.prefill_ms(), quoted.chain, now);
        let copy = copy.map(|(to, blocks)| self.book_copy(arrival, to, blocks, now));
        self.scratch.take_back(choice.quoted);
        let fetch = fetch.map(|fetch| self.book_fetch(arrival.request, &fetch));
        Placed { replica, copy, fetch }
    }

    /// The request counts as one with the prefix there, until it is known not to come.
    fn book_fetch(&mut self, request: RequestId, fetch: &Fetch) -> PrefixFetch {
        let Fetch { from, blocks, ms, recompute_ms, saves_ms, .. } = *fetch;
        let flight = self.flights.get_mut(&request).expect("it was just booked");
        flight.fetch = Some(Fetching { from, depth: flight.depth, prefill_ms: recompute_ms });
        flight.depth = blocks.0;
        self.peers.begin(request, from);
        PrefixFetch { from, blocks, takes: Duration::from_ms(ms), saves: Duration::from_ms(saves_ms) }
    }

    /// What was to be fetched for a request is there, or will not come; before the request starts.
    pub fn fetched(&mut self, request: RequestId, arrived: bool, now: Time) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let Some(Fetching { from, depth, prefill_ms }) = flight.fetch.take() else { return };
        self.peers.end(request, from);
        if arrived {
            return;
        }
        flight.depth = depth;
        let (prompt, started) = (flight.prompt, flight.progress != Progress::Sent);
        if let Some(replica) = live_replica(&mut self.replicas, flight).filter(|_| !started) {
            replica.advance(now);
            replica.ledger.remove(request);
            replica.ledger.add(request, prefill_ms, prompt, now);
        }
    }

    /// How a replica's cached prefixes can be brought to others; `None` where they cannot. No peer is asked for anything until two are known.
    pub fn set_peer_terms(&mut self, id: ReplicaId, terms: Option<PeerTerms>) {
        self.peers.set(id, terms);
    }

    /// A shared prefix of the request and a replica that lacks it, when the rent paid for the lack has reached a copy's price.
    fn copy_worth(&mut self, arrival: &Arrival, quoted: &Quoted, chosen: usize, now: Time) -> Option<(ReplicaId, usize)> {
        let own = &quoted.candidates[chosen];
        let share = |router: &Self, id: ReplicaId| router.memory_share(&router.replicas[id]);
        // What this one pays where it goes against what it would pay elsewhere if its prefix were there.
        let paid_here = own.terms.wait + own.terms.memory;
        let rent = |router: &Self, place: usize| {
            let other = &quoted.candidates[place];
            paid_here - other.terms.wait - share(router, other.replica) * own.terms.prefill
        };
        if (0..quoted.candidates.len()).all(|place| rent(self, place) <= 0.0) {
            return None;
        }
        let held = self.depth(own.replica) as usize;
        let blocks = self.index.deepest_branch(own.replica, &arrival.keys, held)?;
        let lacks = |candidate: &Candidate| {
            // Whoever wants it there fetches it, or does so already: that makes the copy.
            let fetches = candidate.fetch.is_some() || self.peers.awaiting.contains(&candidate.replica);
            !fetches && (self.depth(candidate.replica) as usize) < blocks
        };
        let target = (0..quoted.candidates.len()).filter(|&place| lacks(&quoted.candidates[place])).min_by(|&a, &b| {
            let key = |place: usize| {
                let candidate = &quoted.candidates[place];
                (candidate.terms.wait, share(self, candidate.replica))
            };
            key(a).partial_cmp(&key(b)).expect("waits and shares are numbers")
        })?;
        let end = arrival.keys[blocks - 1];
        let rent = rent(self, target) - self.warming_ms(own.replica, end, blocks);
        if rent <= 0.0 {
            return None;
        }
        // What others would lose by the work being there and not here is no gain: in a full fleet nobody gains by moving it about.
        let delay_there = self.config.weights.delay * self.delay_of_copy_ms(target, own.terms.prefill);
        let rent = rent - (delay_there - own.terms.delay).max(0.0);
        if rent <= 0.0 {
            return None;
        }
        let paid = self.rents.pay(end, rent, now);
        let to = quoted.candidates[target].replica;
        let missing = blocks - self.depth(to) as usize;
        let evicted = self.eviction_ms(to, missing, now);
        let replica = &self.replicas[to];
        let size = replica.spec.block_size;
        let work = replica.prefill_ms(Blocks(blocks as u32).to_tokens(size), Blocks(self.depth(to)).to_tokens(size));
        let shadow = self.config.weights.waste * self.demand.shadow_price();
        let eviction = self.config.weights.eviction * (1.0 + shadow) * evicted;
        // A copy is a request of one token: it slows those who decode there by its prefill alone.
        let decode = self.config.weights.decode * self.prefill_in_decode_ms(replica, work);
        let price = shadow * work + self.config.weights.delay * self.delay_of_copy_ms(target, work) + decode + eviction;
        if paid < price {
            return None;
        }
        self.rents.settle(end);
        Some((to, blocks))
    }

    /// Work left on the replica of those who are computing the prefix that ends in block `end`: a copy begun later would not be
    /// there sooner, so waiting for it is no rent.
    pub(crate) fn warming_ms(&self, id: ReplicaId, end: BlockKey, blocks: usize) -> f64 {
        let replica = &self.replicas[id];
        let computes = |request: RequestId| {
            let flight = self.flights.get(&request);
            flight.is_some_and(|flight| (flight.depth as usize) < blocks && flight.keys.get(blocks - 1) == Some(&end))
        };
        replica.ledger.left_ms(computes)
    }

    /// What is on its way to a request is there for nobody else before it has come, whatever the index expects.
    fn hide_fetches(&mut self, keys: &[BlockKey]) {
        self.peers.awaiting.clear();
        for request in &self.peers.waiting {
            let Some((flight, fetching)) = self.flights.get(request).and_then(|flight| Some((flight, flight.fetch?))) else { continue };
            let place = fetching.depth as usize;
            // Prefixes are named by their last block.
            if keys.get(place).is_some_and(|key| flight.keys.get(place) == Some(key)) {
                self.peers.awaiting.push(flight.replica);
                if let Some(depth) = self.scratch.depths.get_mut(flight.replica.index()) {
                    *depth = fetching.depth.min(*depth);
                }
            }
        }
    }

    fn record(&mut self, arrival: &Arrival, view: &RequestView, quoted: &Quoted, chosen: usize, held_for: Duration, now: Time) {
        if self.config.decisions_kept == 0 {
            return;
        }
        let quote = |candidate: &&Candidate| Quote {
            replica: candidate.replica,
            total_ms: candidate.terms.total(),
            terms: candidate.terms,
            hit_tokens: candidate.hit,
            fetch: candidate.fetch.map(|Fetch { from, tokens, ms, recompute_ms, .. }| FetchQuote { from, tokens, ms, recompute_ms }),
            in_flight: candidate.in_flight,
        };
        let own = &quoted.candidates[chosen];
        let mut shown: Vec<&Candidate> = quoted.candidates.iter().collect();
        if shown.len() > QUOTES_KEPT {
            let rank = |candidate: &&Candidate| (candidate.replica != own.replica, candidate.terms.total());
            shown.select_nth_unstable_by(QUOTES_KEPT - 1, |a, b| rank(a).partial_cmp(&rank(b)).expect("prices are numbers"));
            shown.truncate(QUOTES_KEPT);
            shown.sort_unstable_by_key(|candidate| candidate.replica);
        }
        let quotes: Vec<Quote> = shown.iter().map(quote).collect();
        let others = quotes.iter().filter(|quote| quote.replica != own.replica);
        let runner_up = others.min_by(|a, b| a.total_ms.total_cmp(&b.total_ms)).map(|quote| quote.replica);
        self.log.push(DecisionRecord {
            request: arrival.request,
            time: now,
            policy: self.config.policy,
            prompt: arrival.prompt,
            session: arrival.session,
            program: arrival.program,
            slo_ttft_ms: arrival.slo.ttft.map(|slo| slo.as_ms()),
            slo_tpot_ms: arrival.slo.tpot.map(|slo| slo.as_ms()),
            held_ms: held_for.as_ms(),
            chosen: own.replica,
            reason: if self.config.policy == PolicyName::Price { Price::reason(view, &quoted.candidates, chosen) } else { Reason::Rule },
            runner_up,
            predicted_ttft_ms: own.terms.wait + own.terms.prefill,
            quotes,
            realised: Realised::default(),
            regret_ms: None,
        });
    }

    fn book(&mut self, arrival: &Arrival, id: ReplicaId, prefill_ms: f64, chain: Option<ChainId>, now: Time) {
        self.chains.extend(chain, arrival.session, &arrival.keys, id);
        let flight = Flight {
            replica: id,
            incarnation: Incarnation::default(),
            keys: arrival.keys.clone(),
            prompt: arrival.prompt,
            depth: self.depth(id),
            told: self.told(id, &arrival.keys),
            session: arrival.session,
            sent_at: now,
            progress: Progress::Sent,
            hit_told: false,
            output: 0,
            private_blocks: 0,
            attributes: Attributes {
                priority: arrival.priority,
                program: arrival.program,
                share: arrival.share,
                max_output: arrival.max_output,
                quiet: self.config.wants_quiet(arrival.priority),
            },
            copy: false,
            fetch: None,
        };
        self.send(arrival.request, flight, prefill_ms, now);
    }

    fn book_copy(&mut self, arrival: &Arrival, to: ReplicaId, blocks: usize, now: Time) -> PrefixCopy {
        let request = RequestId(COPY_IDS + self.copies);
        self.copies += 1;
        let replica = &self.replicas[to];
        let size = replica.spec.block_size;
        let prompt = Tokens(Blocks(blocks as u32).to_tokens(size).0 + 1);
        let prefill_ms = replica.prefill_ms(prompt, Blocks(self.depth(to)).to_tokens(size));
        let flight = Flight {
            replica: to,
            incarnation: Incarnation::default(),
            keys: arrival.keys[..blocks].into(),
            prompt,
            depth: self.depth(to),
            told: 0,
            session: None,
            sent_at: now,
            progress: Progress::Sent,
            hit_told: false,
            output: 0,
            private_blocks: 0,
            attributes: Attributes::default(),
            copy: true,
            fetch: None,
        };
        self.send(request, flight, prefill_ms, now);
        PrefixCopy { request, to, blocks }
    }

    fn send(&mut self, request: RequestId, mut flight: Flight, prefill_ms: f64, now: Time) {
        let fleet = self.replicas.values().filter(|replica| replica.state == ReplicaState::Ready).count();
        let replica = self.replicas.get_mut(flight.replica).expect("a candidate is in the fleet");
        flight.incarnation = replica.spec.incarnation;
        flight.private_blocks = private_blocks(&replica.spec, flight.prompt, flight.keys.len(), 1);
        replica.flights.push(request);
        replica.quiet += u32::from(flight.attributes.quiet);
        replica.private_blocks += flight.private_blocks;
        replica.ledger.add(request, prefill_ms, flight.prompt, now);
        self.demand.dispatch(prefill_ms, now + Duration::from_ms(replica.ledger.backlog_ms()), fleet, now);
        self.unbooked.push(Unbooked { replica: flight.replica, keys: flight.keys.clone(), sent_at: now });
        self.flights.insert(request, flight);
    }

    /// The engine's first word on how much of a prompt it had, of a request in flight.
    fn correct_index(&mut self, request: RequestId, cached: Tokens) {
        self.keep_books();
        let Some(flight) = self.flights.get_mut(&request) else { return };
        if std::mem::replace(&mut flight.hit_told, true) {
            return;
        }
        let (id, keys) = (flight.replica, flight.keys.clone());
        let (depth, told, prompt) = (flight.depth, flight.told, flight.prompt);
        let Some(replica) = live_replica(&mut self.replicas, flight).filter(|replica| replica.state != ReplicaState::Dead) else { return };
        let size = replica.spec.block_size;
        let believed = replica.hit_tokens(depth, prompt).full_blocks(size);
        let now = replica.ledger.at();
        let found = cached.full_blocks(size).0;
        let doubtful = self.index.doubtful(id);
        if replica.truth.report(told.min(believed.0), found, doubtful, now) {
            // Its events begin anew, with what its engine replays; the rest of the dropping is left to `take_in`.
            self.index.begin_clear(id);
            return;
        }
        self.index.report_hit(id, &keys, believed.0 as usize, found as usize, now);
    }

    /// Leading blocks of a match that the replica's engine itself told of.
    fn told(&self, id: ReplicaId, keys: &[BlockKey]) -> u32 {
        let depth = (self.depth(id) as usize).min(keys.len());
        keys[..depth].partition_point(|key| self.index.confirmed(id, *key)) as u32
    }

    /// How far the replica's events are believed.
    pub fn trust(&self, id: ReplicaId, now: Time) -> Trust {
        self.replicas.get(id).map_or(Trust::Trusted, |replica| replica.truth.trust(now))
    }

    /// Chance that a hit is real on a replica, by what is known of its events and by what its engine reported.
    pub(crate) fn credence(&self, id: ReplicaId) -> f64 {
        let (doubtful, Some(replica)) = (self.index.doubtful(id), self.replicas.get(id)) else { return 1.0 };
        match replica.truth.trust(replica.ledger.at()) {
            Trust::Quarantined => 0.0,
            Trust::Trusted if !doubtful || replica.truth.is_proven(doubtful) => 1.0,
            Trust::Trusted | Trust::Probation => DOUBTFUL_HIT,
        }
    }

    /// Lets go in the index of what the replica's engine must have evicted, unless the engine itself tells its evictions.
    fn trim(&mut self, id: ReplicaId, now: Time) {
        let Some(replica) = self.replicas.get(id) else { return };
        let blocks = replica.spec.kv_blocks.0 as usize;
        let limit = if self.index.publishes(id) { (blocks as f64 * TOLD_SLACK) as usize } else { blocks };
        self.index.evict_to(id, limit, now, |seen| self.reuse.see(seen));
    }

    /// Makes room in the index's memory for `blocks` more. A block is worth what knowing it is expected to save: the chance that it is
    /// asked for again, times the work to compute it.
    fn make_room(&mut self, blocks: usize, now: Time) {
        self.reuse.refresh();
        let cut_short = self.index.make_room(blocks, now, |id, victim| {
            let saved_ms = self.replicas.get(id).map_or(0.0, |replica| replica.block_ms(victim.depth));
            self.reuse.probability(victim.reused, victim.idle) * saved_ms
        });
        for seen in cut_short {
            self.reuse.see(seen);
        }
    }
}

/// The flight's replica, unless it left or restarted since.
fn live_replica<'a>(replicas: &'a mut Replicas, flight: &Flight) -> Option<&'a mut Replica> {
    replicas.get_mut(flight.replica).filter(|replica| replica.spec.incarnation == flight.incarnation)
}

fn end_flight(replica: &mut Replica, request: RequestId, flight: &Flight) {
    replica.flights.retain(|other| *other != request);
    replica.quiet -= u32::from(flight.attributes.quiet);
    replica.private_blocks -= flight.private_blocks;
    if flight.decodes() {
        replica.decoding -= 1;
        replica.context -= u64::from(flight.prompt.0 + flight.output);
    } else {
        replica.ledger.remove(request);
    }
}

/// Blocks of a request beside the full blocks of its prompt.
fn private_blocks(spec: &ReplicaSpec, prompt: Tokens, prompt_blocks: usize, output: u32) -> u32 {
    Tokens(prompt.0 + output).to_blocks(spec.block_size).0.saturating_sub(prompt_blocks as u32)
}

/// Most blocks that the request can take: prompt and the output that the client bounds, within the context length.
fn blocks_at_most(spec: &ReplicaSpec, arrival: &Arrival) -> Blocks {
    let output = arrival.max_output.unwrap_or(Tokens(1)).0;
    Tokens(arrival.prompt.0.saturating_add(output).min(spec.max_model_len.0)).to_blocks(spec.block_size)
}
