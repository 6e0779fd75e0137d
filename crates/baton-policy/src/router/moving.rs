//! Moves as the router sees them: what its books say of the fleet, and what a move changes in them.

use std::collections::BTreeMap;

use baton_cost::Link;
use baton_units::{Blocks, Priority, ReplicaId, RequestId, Time, Tokens};

use super::{Flight, Progress, Router, end_flight, live_replica, private_blocks};
use crate::{
    ReplicaState, Share,
    fleet::Replica,
    held::Waiting,
    mover::{FleetFacts, ReplicaFacts, RunningFacts, WaitingFacts},
    quoting::backlog_at_ms,
};

/// Programs whose service is kept; beyond, the one that was served longest ago is forgotten.
const PROGRAMS_MAX: usize = 4096;
/// What an output token counts for in attained service, in uncached prompt tokens (VTC, OSDI 2024: `w_q / w_p`).
pub(super) const OUTPUT_SERVICE: f64 = 2.0;

/// What a replica told about moves when it attached, beside its [`ReplicaSpec`](crate::ReplicaSpec).
#[derive(Debug, Clone, PartialEq)]
pub struct MoveTerms {
    /// As in [`ReplicaFacts::numerics`].
    pub numerics: u64,
    pub kv_bytes_per_token: f64,
    pub link: Link,
    /// Blocks that its engine keeps free when it admits.
    pub watermark: Blocks,
}

/// Service that programs attained, in uncached prompt tokens.
#[derive(Debug, Default)]
pub(crate) struct Programs(BTreeMap<u64, (f64, Time)>);

impl Programs {
    pub(crate) fn serve(&mut self, program: u64, service: f64, now: Time) {
        let (attained, last) = self.0.entry(program).or_default();
        (*attained, *last) = (*attained + service, now);
        if self.0.len() > PROGRAMS_MAX
            && let Some(oldest) = self.0.iter().min_by_key(|(_, (_, last))| *last).map(|(program, _)| *program)
        {
            self.0.remove(&oldest);
        }
    }

    pub(crate) fn prompt(&mut self, program: Option<u64>, uncached: Tokens, now: Time) {
        if let Some(program) = program {
            self.serve(program, uncached.as_f64(), now);
        }
    }

    pub(crate) fn output(&mut self, program: Option<u64>, count: u32, now: Time) {
        if let Some(program) = program {
            self.serve(program, OUTPUT_SERVICE * f64::from(count), now);
        }
    }
}

/// What of a replica's memory and places is left, as its engine admits in the order of arrival.
struct Room {
    blocks: f64,
    places: u32,
    /// Somebody waits; whoever does not decode waits behind.
    queued: bool,
}

impl Router {
    /// The fleet by these books, for [`Mover::plan`](crate::mover::Mover::plan). `terms` tells what each replica said of moves; one without
    /// takes no part. Which requests run and which wait is not known but worked out, as an engine would by arrival and blocks.
    pub fn fleet_facts(&self, terms: impl Fn(ReplicaId) -> Option<MoveTerms>, now: Time) -> FleetFacts {
        let replicas = self.replicas.values().filter_map(|replica| Some(self.facts_of(replica, terms(replica.spec.id)?, now)));
        FleetFacts {
            replicas: replicas.collect(),
            held: self.held_for_memory(now),
            programs: self.programs.0.iter().map(|(program, (attained, _))| (*program, *attained)).collect(),
        }
    }

    /// One replica of [`Self::fleet_facts`], for callers that let others at the router between two replicas. What all of them tell is of one
    /// fleet as long as [`Self::relocations`] stays the same; else a request may be in two of them, or in none.
    pub fn replica_facts(&self, id: ReplicaId, terms: MoveTerms, now: Time) -> Option<ReplicaFacts> {
        self.replicas.get(id).map(|replica| self.facts_of(replica, terms, now))
    }

    /// Requests in flight that went on at another replica so far.
    pub fn relocations(&self) -> u64 {
        self.relocations
    }

    /// Leading tokens of a request in flight whose KV a replica has in its cache, as far as the index knows: of its prompt alone. None of
    /// them count on a replica whose events have a gap or are not believed.
    pub fn cached(&self, request: RequestId, on: ReplicaId) -> Tokens {
        let (Some(flight), Some(replica)) = (self.flights.get(&request), self.replicas.get(on)) else { return Tokens::ZERO };
        if self.credence(on) < 1.0 {
            return Tokens::ZERO;
        }
        let depth = self.index.matches(&flight.keys).get(on.index()).copied().unwrap_or(0);
        Blocks(depth).to_tokens(replica.spec.block_size)
    }

    /// The first held request, if it is memory that it waits for.
    fn held_for_memory(&self, now: Time) -> Option<WaitingFacts> {
        let Waiting { arrival, since, .. } = self.held.first()?;
        if !self.someone_is_free(now) {
            return None;
        }
        let size = self.replicas.values().next()?.spec.block_size;
        // What a quote wants to be free.
        let output = Tokens(self.mean_output.ceil().max(1.0) as u32);
        Some(WaitingFacts {
            request: arrival.request,
            tokens: arrival.prompt,
            demand: (arrival.prompt + output).to_blocks(size),
            priority: arrival.priority,
            program: arrival.program,
            arrived: *since,
            left_at_most: arrival.max_output,
            fresh: true,
            movable: false,
        })
    }

    fn facts_of(&self, replica: &Replica, terms: MoveTerms, now: Time) -> ReplicaFacts {
        let spec = &replica.spec;
        let mut flights: Vec<(RequestId, &Flight)> =
            replica.flights.iter().filter_map(|request| Some((*request, self.flights.get(request)?))).collect();
        flights.sort_by_key(|(request, flight)| (flight.sent_at, *request));
        // Blocks that several requests share count once: each pays its part.
        let pinned = self.index.blocks_pinned(spec.id) as f64;
        let prompts: usize = flights.iter().map(|(_, flight)| flight.keys.len()).sum();
        let part = if prompts == 0 { 1.0 } else { (pinned / prompts as f64).min(1.0) };
        let mut room = Room { blocks: spec.kv_blocks.as_f64(), places: spec.max_running, queued: false };
        let (mut running, mut waiting) = (Vec::new(), Vec::new());
        for (request, flight) in flights {
            let own = part * flight.keys.len() as f64 + f64::from(flight.private_blocks);
            if room.admits(own, flight.decodes(), terms.watermark) {
                running.push(flight.as_running(request, Blocks(own.ceil() as u32)));
            } else {
                waiting.push(flight.as_waiting(request, Blocks(own.ceil() as u32)));
            }
        }
        let booked = Blocks((spec.kv_blocks.as_f64() - room.blocks).ceil() as u32);
        ReplicaFacts {
            id: spec.id,
            state: replica.state,
            numerics: terms.numerics,
            block_size: spec.block_size,
            blocks_total: spec.kv_blocks,
            // What others sent is in the replica's word, if there is a fresh one.
            blocks_used: booked + replica.fresh_report(now).map_or(Blocks::ZERO, |_| Blocks(replica.foreign_blocks)),
            watermark: terms.watermark,
            max_running: spec.max_running,
            step: spec.step,
            kv_bytes_per_token: terms.kv_bytes_per_token,
            link: terms.link,
            queue_s: backlog_at_ms(replica, now) / 1e3,
            running,
            waiting,
        }
    }

    /// A request in flight goes on at `to`: takes all that was booked for it at its source off, and books it there. Its prompt stays in the
    /// source's cache if it was computed. False, and nothing changes, where the request is not in flight, is there already, or `to` is
    /// dead or not in the fleet.
    pub fn moved(&mut self, request: RequestId, to: ReplicaId, now: Time) -> bool {
        self.relocate(request, to, false, now)
    }

    /// As [`Self::moved`], by its tokens alone: what the target lacks of prompt and output is booked there as prefill until its next
    /// token.
    pub fn moved_anew(&mut self, request: RequestId, to: ReplicaId, now: Time) -> bool {
        self.relocate(request, to, true, now)
    }

    fn relocate(&mut self, request: RequestId, to: ReplicaId, anew: bool, now: Time) -> bool {
        self.keep_books();
        let Some(target) = self.replicas.get(to).filter(|target| target.state != ReplicaState::Dead) else { return false };
        let incarnation = target.spec.incarnation;
        let Some(mut flight) = self.flights.remove(&request) else { return false };
        if (flight.replica, flight.incarnation) == (to, incarnation) {
            self.flights.insert(request, flight);
            return false;
        }
        self.relocations += 1;
        self.held.stale = true;
        if let Some(source) = live_replica(&mut self.replicas, &flight) {
            source.advance(now);
            end_flight(source, request, &flight);
            let dead = source.state == ReplicaState::Dead;
            let computed = !dead && flight.decodes();
            self.index.unpin(flight.replica, &flight.keys, if dead { &[] } else { &flight.keys }, computed, now);
            if !dead && !computed {
                self.index.forget_unused(flight.replica, &flight.keys[flight.depth as usize..]);
            }
            self.trim(flight.replica, now);
        }
        let mut depths = std::mem::take(&mut self.scratch.depths);
        self.index.matches_into(&flight.keys, &mut depths);
        flight.depth = depths.get(to.index()).copied().unwrap_or(0);
        // What it finds there is a prompt and an output, of which nothing is reported.
        flight.told = 0;
        self.scratch.depths = depths;
        let target = self.replicas.get_mut(to).expect("the target was just seen");
        target.advance(now);
        (flight.replica, flight.incarnation) = (to, incarnation);
        flight.private_blocks = private_blocks(&target.spec, flight.prompt, flight.keys.len(), flight.output.max(1));
        target.flights.push(request);
        target.quiet += u32::from(flight.attributes.quiet);
        target.private_blocks += flight.private_blocks;
        if anew && flight.decodes() {
            flight.progress = Progress::Resumes;
        }
        let tokens = flight.prompt + Tokens(flight.output);
        if flight.decodes() {
            target.decoding += 1;
            target.context += u64::from(tokens.0);
        } else {
            let prefill_ms = target.prefill_ms(tokens, target.hit_tokens(flight.depth, tokens));
            target.ledger.add(request, prefill_ms, tokens, now);
        }
        self.chains.relocate(flight.session, &flight.keys, to);
        self.make_room(flight.keys.len(), now);
        self.index.pin(to, &flight.keys, now, |seen| self.reuse.see(seen));
        self.trim(to, now);
        self.flights.insert(request, flight);
        true
    }
}

impl Room {
    /// Takes what a request wants, if it is not one that waits.
    fn admits(&mut self, blocks: f64, decodes: bool, watermark: Blocks) -> bool {
        let reserve = if decodes { 0.0 } else { watermark.as_f64() };
        let runs = self.places > 0 && blocks + reserve <= self.blocks && (decodes || !self.queued);
        if runs {
            self.blocks -= blocks;
            self.places -= 1;
        } else {
            self.queued = true;
        }
        runs
    }
}

impl Flight {
    /// Output that its client's bound still allows.
    fn left_at_most(&self) -> Option<Tokens> {
        self.attributes.max_output.map(|most| most.saturating_sub(Tokens(self.output)))
    }

    fn as_running(&self, request: RequestId, blocks: Blocks) -> RunningFacts {
        RunningFacts {
            request,
            tokens: self.prompt + Tokens(self.output),
            blocks,
            priority: self.attributes.priority,
            program: self.attributes.program,
            started_at: self.sent_at,
            left_at_most: self.left_at_most(),
            prefilling: !self.decodes(),
            movable: !self.copy,
        }
    }

    fn as_waiting(&self, request: RequestId, demand: Blocks) -> WaitingFacts {
        WaitingFacts {
            request,
            tokens: self.prompt + Tokens(self.output),
            demand: demand + Blocks(1),
            priority: self.attributes.priority,
            program: self.attributes.program,
            arrived: self.sent_at,
            left_at_most: self.left_at_most(),
            fresh: self.output == 0,
            movable: !self.copy,
        }
    }
}

/// Importance, program, tenant and bound, which the books keep of an arrival for moves alone.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attributes {
    pub(crate) priority: Priority,
    pub(crate) program: Option<u64>,
    pub(crate) share: Option<Share>,
    pub(crate) max_output: Option<Tokens>,
    /// It asks for quiet.
    pub(crate) quiet: bool,
}
