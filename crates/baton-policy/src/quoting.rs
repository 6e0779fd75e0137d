use std::time::Duration;

use baton_cost::StepLoad;
use baton_units::{Blocks, DurationMs, ReplicaId, Time, Tokens};

use crate::{
    Arrival, Discipline, ReplicaSpec, ReplicaState, Terms,
    chains::ChainId,
    delay::{Backlog, Coming, Delays},
    fleet::{LastPrefill, Losses, Replica},
    mover::{QUIET_STEP, quiet_blocks, steps_or_tokens},
    peers::Fetch,
    policy::Candidate,
    router::Router,
};

/// Candidates priced in full.
const PRICED_MAX: usize = 64;
/// Victims looked at one by one; more are priced like these.
const VICTIMS_MAX: usize = 256;
/// At least so many at a time.
const VICTIMS_MIN: usize = 32;
/// So long the price of a replica's victims counts. A cache's tail changes more slowly than requests come, and its price more slowly
/// still.
const LOSSES_AGE: Duration = Duration::from_millis(500);
/// A ms of lateness beyond an objective weighs as much as this many within it: enough that the objective decides where it can, and what
/// is alike by it is chosen as without one.
const LATE_WEIGHT: f64 = 100.0;

/// With fewer steps of freeness left the loop gives requests away: its own default threshold.
const QUIET_STEPS: f64 = 48.0;

/// What one decision computes once for all candidates; kept between decisions for its memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(crate) ids: Vec<ReplicaId>,
    pub(crate) depths: Vec<u32>,
    candidates: Vec<Candidate>,
    backlogs: Vec<Backlog>,
    work_ms: Vec<f64>,
    delays: Delays,
    lateness: Delays,
    costs: Vec<f64>,
    /// Depths of one of the window's requests before they changed.
    former: Vec<u32>,
    elsewhere: Vec<f64>,
    last_prefill: LastPrefill,
    /// Backlogs of eligible replicas that are not priced in full, by their index; infinite for all else. Empty when there are none.
    others: Vec<f64>,
    /// Not the home, own cost, a draw, place.
    order: Vec<(bool, f64, u32, usize)>,
}

/// The candidates of one decision with their quotes.
#[derive(Debug)]
pub(crate) struct Quoted {
    pub(crate) candidates: Vec<Candidate>,
    pub(crate) chain: Option<ChainId>,
}

impl Scratch {
    /// Keeps the memory of quotes that are done with.
    pub(crate) fn take_back(&mut self, quoted: Quoted) {
        self.candidates = quoted.candidates;
    }
}

impl Router {
    /// Quotes the request, whose depths are known, on each of `ids`, which are in order.
    pub(crate) fn quote(&mut self, arrival: &Arrival, ids: &[ReplicaId], prices_others: bool, now: Time) -> Quoted {
        for replica in self.replicas.values_mut() {
            replica.advance(now);
        }
        let deepest = self.scratch.depths.iter().copied().max().unwrap_or(0) as usize;
        let chain = self.chains.find(arrival.session, &arrival.keys, deepest);
        self.chains.expire(self.reuse.live_age(), now);
        self.scratch.backlogs.clear();
        self.scratch.work_ms.clear();
        let mut candidates = std::mem::take(&mut self.scratch.candidates);
        candidates.clear();
        self.peers.holders.clear();
        if prices_others && self.config.copies && !self.peers.is_empty() {
            self.find_holders(arrival);
        }
        candidates.extend(ids.iter().map(|id| self.own_terms(arrival, *id, now)));
        self.scratch.others.clear();
        if prices_others {
            self.shortlist(&mut candidates, chain.and_then(|chain| self.chains.home(chain)));
            self.price_others(arrival, &mut candidates, self.starts(arrival, chain), now);
        }
        Quoted { candidates, chain }
    }

    /// Keeps those with the least wait and prefill, and the chain's home. What the placement costs others is never negative and most of
    /// it grows with the wait and the prefill, so the rest would hardly be chosen; it still serves those who come later.
    fn shortlist(&mut self, candidates: &mut Vec<Candidate>, home: Option<ReplicaId>) {
        if candidates.len() <= PRICED_MAX {
            return;
        }
        let Scratch { backlogs, work_ms, others, order, .. } = &mut self.scratch;
        order.clear();
        // Among equals a draw, and none by place.
        order.extend(candidates.iter().enumerate().map(|(place, candidate)| {
            let own = candidate.terms.wait + candidate.terms.prefill;
            (candidate.replica != home.unwrap_or(ReplicaId(u32::MAX)), own, self.rng.u32(..), place)
        }));
        order.select_nth_unstable_by(PRICED_MAX - 1, |a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
        others.resize(self.replicas.places(), f64::INFINITY);
        for &(.., place) in &order[PRICED_MAX..] {
            others[candidates[place].replica.index()] = backlogs[place].ms;
        }
        order.truncate(PRICED_MAX);
        order.sort_unstable_by_key(|&(.., place)| place);
        for (kept, &(.., place)) in order.iter().enumerate() {
            candidates[kept] = candidates[place];
            backlogs[kept] = backlogs[place];
            work_ms[kept] = work_ms[place];
        }
        candidates.truncate(PRICED_MAX);
        backlogs.truncate(PRICED_MAX);
        work_ms.truncate(PRICED_MAX);
    }

    /// Who has the most of the request's prompt and can bring it to others: what is still being computed there does not count.
    fn find_holders(&mut self, arrival: &Arrival) {
        for place in 0..self.replicas.places() {
            let id = ReplicaId(place as u32);
            let depth = self.depth(id);
            let ready = self.replicas.get(id).is_some_and(|replica| replica.state == ReplicaState::Ready);
            if !ready || !self.peers.is_better(id, depth) || self.credence(id) < 1.0 {
                continue;
            }
            let Some(&end) = arrival.keys.get((depth - 1) as usize) else { continue };
            if self.warming_ms(id, end, depth as usize) == 0.0 {
                self.peers.offer(id, depth);
            }
        }
    }

    /// Wait and prefill of the request itself.
    fn own_terms(&mut self, arrival: &Arrival, id: ReplicaId, now: Time) -> Candidate {
        let replica = &self.replicas[id];
        let hit = replica.hit_tokens(self.depth(id), arrival.prompt);
        let mut prefill = self.scratch.last_prefill.ms(replica, arrival.prompt, hit);
        let credence = if hit.0 > 0 { self.credence(id) } else { 1.0 };
        if credence < 1.0 {
            prefill = credence * prefill + (1.0 - credence) * replica.prefill_ms(arrival.prompt, Tokens::ZERO);
        }
        let backlog = replica.backlog();
        let (memory_wait, mut hit) = (self.memory_wait_ms(replica, arrival, now), hit);
        let mut wait = backlog.wait_ms(prefill).max(memory_wait);
        let fetch = if self.peers.holders.is_empty() || memory_wait > 0.0 { None } else { self.peers.quote(replica, arrival.prompt, hit) };
        let fetch = fetch.and_then(|fetch| {
            let after = self.scratch.last_prefill.ms(replica, arrival.prompt, hit + fetch.tokens);
            (fetch.ms + after < prefill).then_some((Fetch { recompute_ms: prefill, saves_ms: prefill - after, ..fetch }, after))
        });
        let fetch = fetch.map(|(fetch, after)| {
            // It travels while others are computed.
            (wait, prefill, hit) = (backlog.wait_ms(after).max(fetch.ms), after, hit + fetch.tokens);
            fetch
        });
        let candidate = Candidate {
            replica: id,
            in_flight: replica.in_flight(),
            queued: replica.ledger.prefilling() as u32,
            hit,
            fetch,
            blocks_free: replica.blocks_free(self.index.blocks_pinned(id), now),
            blocks_total: replica.spec.kv_blocks,
            blocks_needed: arrival.prompt.to_blocks(replica.spec.block_size),
            response_ms: replica.response_ms,
            sessions: self.chains.alive_on(id),
            terms: Terms { wait, prefill, ..Terms::default() },
        };
        self.scratch.backlogs.push(backlog);
        self.scratch.work_ms.push(prefill);
        candidate
    }

    /// What the placement costs those who are there or come later (algorithm q: each price in ms, weight one).
    fn price_others(&mut self, arrival: &Arrival, candidates: &mut [Candidate], starts: bool, now: Time) {
        let weights = self.config.weights;
        let shadow = weights.waste * self.demand.shadow_price();
        self.reuse.refresh();
        self.scratch.delays.clear();
        if weights.delay > 0.0 {
            self.gather_recent(candidates);
            self.price_delay(candidates.len());
        }
        self.price_lateness(arrival, candidates);
        let least = |term: fn(&Terms) -> f64| candidates.iter().map(|candidate| term(&candidate.terms)).fold(f64::INFINITY, f64::min);
        let (least_wait, least_prefill) = (least(|terms| terms.wait), least(|terms| terms.prefill));
        for (place, candidate) in candidates.iter_mut().enumerate() {
            let new = arrival.keys.len().saturating_sub(self.depth(candidate.replica) as usize);
            let eviction = self.eviction_ms(candidate.replica, new, now);
            let replica = &self.replicas[candidate.replica];
            let terms = &mut candidate.terms;
            terms.delay = weights.delay * self.scratch.delays.at(place);
            terms.memory = weights.memory * terms.prefill * self.memory_share(replica);
            terms.waste = shadow * (terms.wait - least_wait + terms.prefill - least_prefill);
            terms.eviction = weights.eviction * (1.0 + shadow) * eviction;
            let prefill_ms = terms.prefill;
            terms.decode =
                weights.decode * (self.decode_delay_ms(replica, arrival, prefill_ms) + self.quiet_ms(replica, arrival, prefill_ms));
            terms.company = if starts { weights.decode * self.company_ms(replica, arrival, candidate.sessions) } else { 0.0 };
        }
    }

    /// Depth of the prefix of the request being quoted, in blocks.
    pub(crate) fn depth(&self, id: ReplicaId) -> u32 {
        self.scratch.depths.get(id.index()).copied().unwrap_or(0)
    }

    /// Share of the replica's memory that its live sessions will want.
    pub(crate) fn memory_share(&self, replica: &Replica) -> f64 {
        (self.chains.blocks_wanted(replica.spec.id) / replica.spec.kv_blocks.as_f64().max(1.0)).min(1.0)
    }

    /// Expected work to compute again what `new` more blocks push out, where no other replica has it.
    pub(crate) fn eviction_ms(&mut self, id: ReplicaId, new: usize, now: Time) -> f64 {
        let replica = &self.replicas[id];
        let free = (replica.spec.kv_blocks.0 as usize).saturating_sub(self.index.blocks_resident(id));
        let victims = new.saturating_sub(free);
        if victims == 0 {
            return 0.0;
        }
        let looked_at = victims.min(VICTIMS_MAX);
        if replica.losses.at + LOSSES_AGE <= now || replica.losses.sums_ms.len() < looked_at {
            let mut sum = 0.0;
            let sums = self.index.victims(id, now).take(looked_at.max(VICTIMS_MIN)).map(|victim| {
                if victim.unique {
                    sum += self.reuse.probability(victim.reused, victim.idle) * replica.block_ms(victim.depth);
                }
                sum
            });
            let losses = Losses { at: now, sums_ms: sums.collect() };
            self.replicas.get_mut(id).expect("it was there").losses = losses;
        }
        let sums = &self.replicas[id].losses.sums_ms;
        // Fewer than asked for: all the rest is in use, and costs its wait.
        let last = sums.get(looked_at - 1).or(sums.last()).copied().unwrap_or(0.0);
        last * victims as f64 / looked_at as f64
    }

    /// By how much the time between tokens grows for those who decode there and for the request among them, summed: what the request's
    /// prefill steps and its slowing of later steps push a resident's last token back, and what the residents push back its own, over a
    /// stream's tokens. So a token is a token: a millisecond before each next one of a running stream counts like a millisecond before a
    /// first one. Numbers of tokens are the mean of what ended before.
    fn decode_delay_ms(&self, replica: &Replica, arrival: &Arrival, prefill_ms: f64) -> f64 {
        if replica.decoding == 0 {
            return 0.0;
        }
        let context = u64::from(arrival.prompt.0);
        let output = self.mean_output.min(arrival.max_output.map_or(f64::INFINITY, Tokens::as_f64));
        let together = replica.decode_step_ms(1, context);
        let slower = together - replica.decode_step_ms(0, 0);
        let alone = replica.spec.step.step_s(&StepLoad::decode(1.0, context as f64)) * 1e3;
        self.prefill_in_decode_ms(replica, prefill_ms + slower * output) + self.per_token_ms(replica, (together - alone) * output)
    }

    /// What a session that begins there and the `sessions` that live there will cost each other: the requests that are expected to follow, times
    /// what one of them meets on average. Where so many others send requests at the fleet's mean pace, it finds some of them decoding, which slow each other by the rule of
    /// [`Self::decode_delay_ms`], and so that a step must end before its prompt is taken up; and now and then another one's prompt, or that one finds its own.
    fn company_ms(&self, replica: &Replica, arrival: &Arrival, sessions: u32) -> f64 {
        if sessions == 0 {
            return 0.0;
        }
        let (output, context) = (self.mean_output, arrival.prompt.as_f64());
        let step_ms = |rows: f64| replica.spec.step.step_s(&StepLoad::decode(rows, rows * context)) * 1e3;
        let prefill = self.scratch.delays.mean_least();
        let per_ms = f64::from(sessions) * self.demand.rate() / self.chains.alive().max(1) as f64;
        let streams = per_ms * output * step_ms(1.0);
        let (alone, together) = (step_ms(1.0), step_ms(1.0 + streams));
        let slower = (together - step_ms(streams)).max(0.0);
        let decode =
            streams * self.per_token_ms(replica, prefill + slower * output) + self.per_token_ms(replica, (together - alone) * output);
        let step = match replica.spec.discipline {
            Discipline::Serial => 0.0,
            Discipline::Chunked { .. } | Discipline::Interleaved { .. } => (1.0 - (-streams).exp()) * together / 2.0,
        };
        self.chains.further(arrival.session) * (decode + step + per_ms * prefill * prefill)
    }

    /// The same, of `ms` that are put between the steps of the replica's streams.
    pub(crate) fn prefill_in_decode_ms(&self, replica: &Replica, ms: f64) -> f64 {
        f64::from(replica.decoding) * self.per_token_ms(replica, ms)
    }

    /// A stream's delay over its tokens, where streams share steps at all.
    fn per_token_ms(&self, replica: &Replica, ms: f64) -> f64 {
        match replica.spec.discipline {
            Discipline::Serial => 0.0,
            Discipline::Chunked { .. } | Discipline::Interleaved { .. } => ms / self.mean_output.max(1.0),
        }
    }

    /// What it takes from those who ask for quiet there, or from the others if it asks itself: steps of freeness, by the virtual usage of
    /// Llumnix (OSDI 2024, section 4.4), in which who asks for quiet uses all blocks beyond the load at which decode speed is near ideal.
    /// It is the benefit, with the other sign, for which the loop would move it off again ([`crate::mover`]). Its prefill uses up what
    /// so many steps may be longer than alone.
    fn quiet_ms(&self, replica: &Replica, arrival: &Arrival, prefill_ms: f64) -> f64 {
        if replica.quiet == 0 && !self.config.wants_quiet(arrival.priority) {
            return 0.0;
        }
        let ReplicaSpec { step, block_size, kv_blocks, .. } = &replica.spec;
        let limit = quiet_blocks(step, *block_size, *kv_blocks).as_f64();
        let used = f64::from(self.index.blocks_pinned(replica.spec.id) as u32 + replica.private_blocks);
        let rows = f64::from(replica.in_flight());
        let freeness = |blocks: f64, rows: f64| steps_or_tokens(limit - blocks, rows, *block_size).min(QUIET_STEPS);
        let before = if replica.quiet > 0 { freeness(used, rows) } else { QUIET_STEPS };
        let after = freeness(used + (arrival.prompt + Tokens(1)).to_blocks(*block_size).as_f64(), rows + 1.0);
        let alone_ms = step.step_s(&StepLoad::decode(1.0, 0.0)) * 1e3;
        let prefills = if replica.quiet > 0 { prefill_ms / ((QUIET_STEP - 1.0) * alone_ms) } else { 0.0 };
        (before - after + prefills) * replica.decode_step_ms(1, u64::from(arrival.prompt.0))
    }

    /// Until enough blocks free for the prompt and its expected output; zero when they fit.
    fn memory_wait_ms(&self, replica: &Replica, arrival: &Arrival, now: Time) -> f64 {
        let output = arrival.max_output.map_or(self.mean_output, |most| most.as_f64().min(self.mean_output.max(1.0)));
        let needed = Tokens(arrival.prompt.0 + output.ceil() as u32).to_blocks(replica.spec.block_size);
        let free = replica.blocks_free(self.index.blocks_pinned(replica.spec.id), now);
        let slots = replica.spec.max_running > replica.in_flight();
        // Where nobody is, nobody leaves.
        if slots && needed <= free || replica.flights.is_empty() {
            return 0.0;
        }
        let held = self.depth(replica.spec.id) as usize;
        let shared = if held == 0 { 0 } else { self.index.pinned_prefix(replica.spec.id, &arrival.keys, held) as u32 };
        let mut missing = needed.saturating_sub(free).saturating_sub(Blocks(shared));
        if slots && missing == Blocks::ZERO {
            return 0.0;
        }
        let step_ms = replica.decode_step_ms(0, 0);
        let mut leaving: Vec<(f64, Blocks)> = replica
            .flights
            .iter()
            .filter_map(|request| self.flights.get(request))
            .map(|flight| {
                let left = (self.mean_output - f64::from(flight.output)).max(1.0);
                let start = if flight.decodes() { 0.0 } else { replica.ledger.backlog_ms() };
                (start + left * step_ms, Blocks(flight.keys.len() as u32 + flight.private_blocks))
            })
            .collect();
        leaving.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let mut last = 0.0;
        for (after_ms, blocks) in leaving {
            last = after_ms;
            missing = missing.saturating_sub(blocks);
            if missing == Blocks::ZERO {
                break;
            }
        }
        last
    }

    /// Costs of the window's requests on the candidates, one row a request; rows are computed again where the index changed.
    fn gather_recent(&mut self, candidates: &[Candidate]) {
        let Scratch { costs, elsewhere, others, former, last_prefill, .. } = &mut self.scratch;
        let least_busy = others.iter().enumerate().min_by(|a, b| a.1.total_cmp(b.1)).map(|(place, _)| ReplicaId(place as u32));
        costs.clear();
        elsewhere.clear();
        for recent in &mut self.demand.recent {
            let priced = recent.version == self.costs_version;
            if !priced || !self.index.still_matches(&recent.keys, &recent.ends) {
                std::mem::swap(&mut recent.depths, former);
                self.index.matches_into(&recent.keys, &mut recent.depths);
                self.index.ends_into(&recent.depths, &mut recent.ends);
                recent.find_holders();
                if priced {
                    recent.forget_costs(former);
                } else {
                    recent.version = self.costs_version;
                    recent.costs.clear();
                    recent.costs.resize(self.replicas.places(), f64::NAN);
                }
            }
            costs.extend(candidates.iter().map(|candidate| recent.cost_ms(candidate.replica, &self.replicas, last_prefill)));
            // Of the others, the first that will be free and those that have something of it; where all have, some.
            let mut best = f64::INFINITY;
            if let Some(id) = least_busy {
                best = others[id.index()] + recent.cost_ms(id, &self.replicas, last_prefill);
                let count = recent.holders.len();
                let mut at = self.rng.usize(..count.max(1));
                for _ in 0..count.min(PRICED_MAX) {
                    let id = recent.holders[at];
                    if others[id.index()] < best {
                        best = best.min(others[id.index()] + recent.cost_ms(id, &self.replicas, last_prefill));
                    }
                    at = if at + 1 == count { 0 } else { at + 1 };
                }
            }
            elsewhere.push(best);
        }
    }

    fn price_delay(&mut self, candidates: usize) {
        let Scratch { backlogs, work_ms, delays, costs, elsewhere, .. } = &mut self.scratch;
        let rows = costs.chunks_exact(candidates).zip(&*elsewhere);
        let coming = rows.map(|(costs, &elsewhere)| Coming { costs, elsewhere, in_time_ms: 0.0 });
        delays.compute(backlogs, work_ms, coming, self.demand.rate());
    }

    /// Lateness of the request itself, where it or its class has an objective, and of those who come later, where their classes have one:
    /// what a client wants for itself is not kept free of others' work.
    fn price_lateness(&mut self, arrival: &Arrival, candidates: &mut [Candidate]) {
        let ttft_ms = arrival.slo.ttft.map_or_else(|| self.config.slo_ttft_ms(arrival.priority), |slo| slo.as_ms());
        let tpot_ms = arrival.slo.tpot.map_or(f64::INFINITY, |slo| slo.as_ms());
        for candidate in &mut *candidates {
            let mut late_ms = (candidate.terms.wait + candidate.terms.prefill - ttft_ms).max(0.0);
            if tpot_ms.is_finite() {
                // Each token is late by as much, and so is the mean one.
                let step_ms = self.replicas[candidate.replica].decode_step_ms(1, u64::from(arrival.prompt.0));
                late_ms += (step_ms - tpot_ms).max(0.0);
            }
            candidate.terms.late = LATE_WEIGHT * late_ms;
        }
        if self.config.weights.delay <= 0.0 || self.config.classes.iter().all(|class| class.slo_ttft.is_none()) {
            return;
        }
        let Scratch { backlogs, work_ms, lateness, costs, elsewhere, .. } = &mut self.scratch;
        let rows = costs.chunks_exact(candidates.len()).zip(&*elsewhere).zip(&self.demand.recent);
        let coming = rows.filter(|(_, recent)| recent.slo_ttft_ms.is_finite()).map(|((costs, &elsewhere), recent)| Coming {
            costs,
            elsewhere,
            in_time_ms: recent.slo_ttft_ms,
        });
        let share = self.demand.rate() / self.demand.recent.len().max(1) as f64;
        lateness.integrate(backlogs, work_ms, coming, share);
        for (place, candidate) in candidates.iter_mut().enumerate() {
            candidate.terms.late += LATE_WEIGHT * lateness.at(place);
        }
    }

    /// What a copy of `work_ms` on the candidate at `place` costs those who come later; after [`Self::quote`].
    pub(crate) fn delay_of_copy_ms(&mut self, place: usize, work_ms: f64) -> f64 {
        if self.config.weights.delay <= 0.0 {
            return 0.0;
        }
        let candidates = self.scratch.work_ms.len();
        self.scratch.work_ms.fill(0.0);
        self.scratch.work_ms[place] = work_ms;
        self.price_delay(candidates);
        self.scratch.delays.at(place)
    }
}

/// Backlog dead-reckoned to `now` without booking it.
pub(crate) fn backlog_at_ms(replica: &Replica, now: Time) -> f64 {
    let elapsed = now.since(replica.ledger.at()).as_ms();
    (replica.ledger.backlog_ms() - elapsed).max(0.0)
}
