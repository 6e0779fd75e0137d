//! Requests that leave one engine and join another while they run: the engines' own calls, with the time that messages and KV take.
//!
//! The steps are those of the migration protocol (`docs/migration-protocol.md`): prepare, copy rounds while the source decodes, freeze, the
//! gateway's word, join, release. The register and the seats that make it safe under any faults are not in the way here: messages of a
//! move arrive once and in order, and a death is known at once.

use std::{collections::BTreeMap, time::Duration};

use baton_cost::MoveWay;
use baton_engine::{Phase, PreparedId, SequenceId, SequenceState, SequenceView};
use baton_policy::{
    MoveTerms, ReplicaState,
    mover::{Move, Mover, drain_forecast},
};
use baton_units::{Blocks, ReplicaId, RequestId, Time, Tokens};

use super::{Event, Simulation};
use crate::{DrainRecord, MoveRecord, Moves, ScheduledEngine};

/// When the source freezes: with so many blocks left, or in so manieth a round.
const LAST_BLOCKS: usize = 16;
const ROUNDS_MAX: u32 = 3;

/// The loop, and the moves under way.
pub(super) struct Moving {
    mover: Mover,
    attempts: BTreeMap<RequestId, Attempt>,
    /// Place of a request's latest move among the records.
    next: u64,
    pub(super) records: Vec<MoveRecord>,
}

/// A move under way.
struct Attempt {
    id: u64,
    record: usize,
    way: MoveWay,
    /// It ran when the loop looked.
    runs: bool,
    from: (usize, u64),
    to: (usize, u64),
    prepared: Option<PreparedId>,
    /// Leading blocks that are at the target, or on their way.
    copied: usize,
    rounds: u32,
    preemptions: u32,
    frozen_at: Option<Time>,
    /// The gateway has made the target the owner.
    committed: bool,
}

/// What happens to a move next; each names where it does.
#[derive(Debug)]
pub(super) enum Stage {
    /// The source hears of it.
    Asked,
    /// The target makes room, at the end of a step.
    Prepare(Box<SequenceState>),
    /// The source copies what is full, or freezes.
    Round,
    /// Blocks have arrived.
    Write {
        from: usize,
        until: usize,
        bytes: Vec<u8>,
    },
    /// The source takes it out of its batch, at the end of a step.
    Freeze,
    /// The last blocks and the state have arrived.
    Last {
        from: usize,
        bytes: Vec<u8>,
        state: Box<SequenceState>,
    },
    /// The gateway is asked to make the target the owner.
    Commit(Box<SequenceState>),
    /// The target may run it.
    Start(Box<SequenceState>),
    /// The source lets go, or goes on.
    Release,
    Thaw,
    /// The target lets go.
    Abandon(PreparedId),
    /// The source gives a request without KV away, at the end of a step.
    Give,
    /// It is queued here.
    Resume(Box<SequenceState>),
}

impl Stage {
    /// Whether it changes the engine's batch, which it does between two steps.
    fn at_boundary(&self) -> bool {
        match self {
            Self::Asked | Self::Round | Self::Commit(_) => false,
            Self::Prepare(_)
            | Self::Write { .. }
            | Self::Freeze
            | Self::Last { .. }
            | Self::Start(_)
            | Self::Release
            | Self::Thaw
            | Self::Abandon(_)
            | Self::Give
            | Self::Resume(_) => true,
        }
    }
}

/// A stage and the place where it happens.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) request: RequestId,
    attempt: u64,
    place: (usize, u64),
    stage: Stage,
}

impl Moving {
    pub(super) fn new(moves: &Moves) -> Self {
        Self { mover: Mover::new(moves.mover.clone()), attempts: BTreeMap::new(), next: 0, records: Vec::new() }
    }
}

impl Simulation<'_> {
    /// The loop's turn.
    pub(super) fn look_for_moves(&mut self, now: Time) {
        let (Some(settings), Some(terms)) = (&self.scenario.moves, self.terms()) else { return };
        // The loop ends with the last request, else the run never would.
        if self.live.is_empty() && self.arrivals_due == 0 {
            return;
        }
        self.queue.schedule(now + settings.period, Event::LookForMoves);
        let facts = self.router.fleet_facts(|_| Some(terms.clone()), now);
        let (router, Some(moving)) = (&self.router, &mut self.moving) else { return };
        for decided in moving.mover.plan(&facts, &|request, on| router.cached(request, on), now) {
            self.begin_move(&decided, now);
        }
    }

    pub(super) fn begin_drain(&mut self, replica: usize, now: Time) {
        let id = ReplicaId(replica as u32);
        self.router.set_state(id, ReplicaState::Draining, now);
        let forecast = self.terms().zip(self.scenario.moves.as_ref()).and_then(|(terms, settings)| {
            let facts = self.router.fleet_facts(|_| Some(terms.clone()), now);
            drain_forecast(&facts, id, &settings.mover, &|request, on| self.router.cached(request, on), settings.period)
        });
        let had = self.on(replica) as u32;
        let forecast = forecast.map(|forecast| forecast.finishes_in);
        self.tally.drains.push(DrainRecord { replica, began: now, had, forecast, empty: None });
        self.note_empty(now);
    }

    /// Notes which of the replicas that drain are empty.
    pub(super) fn note_empty(&mut self, now: Time) {
        for place in 0..self.tally.drains.len() {
            if self.tally.drains[place].empty.is_none() && self.on(self.tally.drains[place].replica) == 0 {
                self.tally.drains[place].empty = Some(now);
            }
        }
    }

    /// Requests that a replica has, by the gateway.
    fn on(&self, replica: usize) -> usize {
        self.live.values().filter(|live| live.sent_to.is_some_and(|(place, _)| place == replica)).count()
    }

    fn terms(&self) -> Option<MoveTerms> {
        let settings = self.scenario.moves.as_ref()?;
        // What the engines keep free.
        let watermark = Blocks((0.01 * self.scenario.blocks.as_f64()).ceil() as u32);
        Some(MoveTerms { numerics: 1, kv_bytes_per_token: settings.kv_bytes_per_token, link: settings.link.clone(), watermark })
    }

    fn begin_move(&mut self, decided: &Move, now: Time) {
        let place = |id: ReplicaId| (id.index(), self.replicas[id.index()].incarnation);
        let (from, to) = (place(decided.from), place(decided.to));
        let Some(moving) = &mut self.moving else { return };
        moving.next += 1;
        moving.records.push(MoveRecord {
            decided: now,
            request: decided.request,
            reason: decided.reason.name(),
            text: decided.to_string(),
            gap: None,
            stayed: None,
        });
        let attempt = Attempt {
            id: moving.next,
            record: moving.records.len() - 1,
            way: decided.way,
            runs: decided.price.kv.is_some(),
            from,
            to,
            prepared: None,
            copied: 0,
            rounds: 0,
            preemptions: 0,
            frozen_at: None,
            committed: false,
        };
        moving.attempts.insert(decided.request, attempt);
        self.after(self.scenario.requests.delay, decided.request, from, Stage::Asked, now);
    }

    /// Lets a stage of a request's move happen at a place after a while.
    fn after(&mut self, delay: Duration, request: RequestId, place: (usize, u64), stage: Stage, now: Time) {
        let attempt = self.moving.as_ref().and_then(|moving| moving.attempts.get(&request)).map_or(0, |attempt| attempt.id);
        self.queue.schedule(now + delay, Event::Move(Moment { request, attempt, place, stage }));
    }

    /// A moment of a move has come: at once, or when the step that runs there has ended.
    pub(super) fn take_moment(&mut self, moment: Moment, now: Time) {
        let (replica, incarnation) = moment.place;
        if matches!(moment.stage, Stage::Commit(_)) {
            return self.perform(moment, now);
        }
        // What was at a replica that died went with it.
        if !self.lives(replica, incarnation) {
            return;
        }
        let busy = self.replicas[replica].engine.movable().is_some_and(|engine| !engine.between_steps());
        if moment.stage.at_boundary() && (busy || !self.replicas[replica].at_boundary.is_empty()) {
            self.replicas[replica].at_boundary.push(moment);
            return;
        }
        self.perform(moment, now);
        self.go_on_at(replica, now);
    }

    /// Between two steps of a replica that has moves to take part in.
    pub(super) fn cross_boundary(&mut self, replica: usize, now: Time) {
        for moment in std::mem::take(&mut self.replicas[replica].at_boundary) {
            self.perform(moment, now);
        }
    }

    pub(super) fn go_on_at(&mut self, replica: usize, now: Time) {
        if let Some(engine) = self.replicas[replica].engine.movable() {
            engine.start(now);
        }
        self.after_engine(replica, now);
    }

    fn engine(&mut self, replica: usize) -> &mut ScheduledEngine {
        self.replicas[replica].engine.movable().expect("moves are for the scheduler's engines")
    }

    fn attempt(&mut self, moment: &Moment) -> Option<&mut Attempt> {
        self.moving.as_mut()?.attempts.get_mut(&moment.request).filter(|attempt| attempt.id == moment.attempt)
    }

    fn perform(&mut self, moment: Moment, now: Time) {
        let (request, replica) = (moment.request, moment.place.0);
        let current = self.attempt(&moment).is_some();
        match moment.stage {
            // These settle what was taken, whatever became of the move.
            Stage::Release | Stage::Thaw => {
                let engine = self.engine(replica).engine_mut();
                if let Some(id) = engine.find(request, 0) {
                    _ = if matches!(moment.stage, Stage::Release) { engine.release(id) } else { engine.thaw(id) };
                }
            }
            Stage::Abandon(prepared) => _ = self.engine(replica).engine_mut().abandon(prepared),
            Stage::Resume(state) => self.resume(request, replica, &state, now),
            Stage::Prepare(state) => {
                let prepared = self.engine(replica).engine_mut().prepare(&state);
                match prepared {
                    // A move that ended meanwhile leaves nothing behind.
                    Ok(prepared) if !current => _ = self.engine(replica).engine_mut().abandon(prepared),
                    Ok(prepared) => self.have(request, prepared, now),
                    Err(_) => self.stay(request, "the target has no room", now),
                }
            }
            Stage::Asked
            | Stage::Round
            | Stage::Write { .. }
            | Stage::Freeze
            | Stage::Last { .. }
            | Stage::Commit(_)
            | Stage::Start(_)
            | Stage::Give
                if !current => {}
            Stage::Asked => self.asked(request, now),
            Stage::Round => self.round(request, now),
            Stage::Write { from, until, bytes } => _ = self.write(request, from, until, &bytes, now),
            Stage::Freeze => self.freeze(request, now),
            Stage::Last { from, bytes, state } => {
                let until = state.computed.to_blocks(self.scenario.block_size).0 as usize;
                if self.write(request, from, until, &bytes, now) {
                    // PREPARED to the source, and its word to the gateway.
                    let delay = self.link_latency() + self.scenario.requests.delay;
                    self.after(delay, request, moment.place, Stage::Commit(state), now);
                }
            }
            Stage::Commit(state) => self.commit(request, state, now),
            Stage::Start(state) => self.join(request, &state, now),
            Stage::Give => self.give(request, now),
        }
    }

    /// The sequence where it is, if it still stands as it did when the move began.
    fn standing(&mut self, request: RequestId) -> Option<(SequenceId, usize, usize, u32)> {
        let attempt = &self.moving.as_ref()?.attempts[&request];
        let (from, rounds, preemptions) = (attempt.from.0, attempt.rounds, attempt.preemptions);
        let engine = self.engine(from).engine();
        let view = engine.look(engine.find(request, 0)?)?;
        let stands = view.phase == Phase::Decoding && !view.frozen && (rounds == 0 || view.preemptions == preemptions);
        stands.then_some((view.id, view.keys.len(), view.blocks.len(), view.preemptions))
    }

    fn asked(&mut self, request: RequestId, now: Time) {
        let attempt = &self.moving_mut().attempts[&request];
        let (way, from, to) = (attempt.way, attempt.from, attempt.to);
        if way != MoveWay::Kv {
            return self.after(Duration::ZERO, request, from, Stage::Give, now);
        }
        let Some((id, .., preemptions)) = self.standing(request) else { return self.stay(request, "it decodes no more", now) };
        self.attempt_mut(request).preemptions = preemptions;
        let state = self.engine(from.0).engine().export(id, now).expect("it was just looked at");
        self.after(self.link_latency(), request, to, Stage::Prepare(Box::new(state)), now);
    }

    fn have(&mut self, request: RequestId, prepared: PreparedId, now: Time) {
        let to = self.moving_mut().attempts[&request].to.0;
        let held = self.engine(to).engine().prepared(prepared).expect("it was just prepared").held;
        let attempt = self.attempt_mut(request);
        (attempt.prepared, attempt.copied) = (Some(prepared), held.0 as usize);
        let from = attempt.from;
        self.after(self.link_latency(), request, from, Stage::Round, now);
    }

    fn round(&mut self, request: RequestId, now: Time) {
        let Some((id, full, blocks, _)) = self.standing(request) else { return self.stay(request, "it ended or lost its blocks", now) };
        let attempt = self.attempt_mut(request);
        let (from, to, copied) = (attempt.from, attempt.to, attempt.copied);
        attempt.rounds += 1;
        if blocks.saturating_sub(copied) <= LAST_BLOCKS || attempt.rounds >= ROUNDS_MAX {
            return self.after(Duration::ZERO, request, from, Stage::Freeze, now);
        }
        attempt.copied = full.max(copied);
        let bytes = self.read(from.0, id, copied, full);
        let delay = self.link_time(full.saturating_sub(copied));
        self.after(delay, request, to, Stage::Write { from: copied, until: full, bytes }, now);
        self.after(delay, request, from, Stage::Round, now);
    }

    fn freeze(&mut self, request: RequestId, now: Time) {
        let Some((id, _, blocks, _)) = self.standing(request) else { return self.stay(request, "it ended or lost its blocks", now) };
        let attempt = self.attempt_mut(request);
        attempt.frozen_at = Some(now);
        let (from, to, copied) = (attempt.from, attempt.to, attempt.copied);
        let engine = self.engine(from.0).engine_mut();
        engine.freeze(id);
        let state = engine.export(id, now).expect("it was just frozen");
        let bytes = self.read(from.0, id, copied, blocks);
        let delay = self.link_time(blocks.saturating_sub(copied));
        self.after(delay, request, to, Stage::Last { from: copied, bytes, state: Box::new(state) }, now);
    }

    fn read(&mut self, replica: usize, id: SequenceId, from: usize, until: usize) -> Vec<u8> {
        let engine = self.engine(replica);
        let blocks = engine.engine().look(id).map_or(&[][..], |view: SequenceView<'_>| view.blocks);
        engine.read_blocks(blocks.get(from..until).unwrap_or(&[]))
    }

    /// Whether the target had room for what arrived.
    fn write(&mut self, request: RequestId, from: usize, until: usize, bytes: &[u8], now: Time) -> bool {
        let attempt = &self.moving_mut().attempts[&request];
        let (to, Some(prepared)) = (attempt.to.0, attempt.prepared) else { return false };
        let tokens = Blocks(until as u32).to_tokens(self.scenario.block_size);
        let engine = self.engine(to);
        if engine.engine_mut().grow(prepared, tokens).is_err() {
            self.stay(request, "the target has no room", now);
            return false;
        }
        let blocks = engine.engine().prepared(prepared).map_or_else(Vec::new, |view| view.blocks.get(from..until).unwrap_or(&[]).to_vec());
        if !blocks.is_empty() {
            engine.write_blocks(&blocks, bytes);
        }
        true
    }

    /// The register's part: from here on the target's tokens count.
    fn commit(&mut self, request: RequestId, state: Box<SequenceState>, now: Time) {
        let attempt = &self.moving_mut().attempts[&request];
        let (way, from, to) = (attempt.way, attempt.from, attempt.to);
        let target = ReplicaId(to.0 as u32);
        let is_booked = self.lives(to.0, to.1)
            && if way == MoveWay::Kv { self.router.moved(request, target, now) } else { self.router.moved_anew(request, target, now) };
        if !is_booked {
            if way != MoveWay::Kv {
                // It left its queue and has nowhere else to go.
                self.after(self.scenario.requests.delay, request, from, Stage::Resume(state), now);
            }
            return self.stay(request, "the target is gone", now);
        }
        self.attempt_mut(request).committed = true;
        if let Some(live) = self.live.get_mut(&request) {
            live.sent_to = Some(to);
            if live.client.is_some() {
                self.outcomes[live.place].replica = Some(to.0 as u32);
                self.outcomes[live.place].moves += 1;
            }
        }
        self.note_empty(now);
        let delay = self.scenario.requests.delay;
        if way == MoveWay::Kv {
            self.moving_mut().mover.ended(request);
            self.after(delay, request, to, Stage::Start(state), now);
        } else {
            self.end_move(request, None, now);
            self.after(delay, request, to, Stage::Resume(state), now);
        }
    }

    fn join(&mut self, request: RequestId, state: &SequenceState, now: Time) {
        let attempt = &self.moving_mut().attempts[&request];
        let (to, prepared, frozen_at, record) = (attempt.to.0, attempt.prepared, attempt.frozen_at, attempt.record);
        let prepared = prepared.expect("a target is told to start what it prepared");
        let joined = self.engine(to).engine_mut().join(prepared, state, now);
        joined.expect("all of it was copied");
        self.moving_mut().records[record].gap = frozen_at.map(|at| now.since(at));
    }

    fn give(&mut self, request: RequestId, now: Time) {
        let attempt = &self.moving_mut().attempts[&request];
        let (from, runs) = (attempt.from, attempt.runs);
        let engine = self.engine(from.0).engine_mut();
        let phase = if runs { Phase::Decoding } else { Phase::Waiting };
        let view = engine.find(request, 0).and_then(|id| engine.look(id)).filter(|view| view.phase == phase);
        let Some(id) = view.map(|view| view.id) else { return self.stay(request, "it waits no more", now) };
        engine.freeze(id);
        let state = engine.export(id, now).expect("it was just frozen");
        engine.release(id);
        self.attempt_mut(request).frozen_at = Some(now);
        let state = Box::new(SequenceState { computed: Tokens::ZERO, ..state });
        self.after(self.scenario.requests.delay, request, from, Stage::Commit(state), now);
    }

    fn resume(&mut self, request: RequestId, replica: usize, state: &SequenceState, now: Time) {
        // Its client was told meanwhile that it is lost.
        if self.live.get(&request).is_none_or(|live| live.sent_to.is_none_or(|(place, _)| place != replica)) {
            return;
        }
        let resumed = self.engine(replica).engine_mut().resume(state, now);
        resumed.expect("the router sends what fits");
    }

    /// The first token of a target came, by which the gateway knows that it runs.
    pub(super) fn settle_move(&mut self, request: RequestId, replica: usize, now: Time) {
        let Some(moving) = &self.moving else { return };
        let Some(attempt) = moving.attempts.get(&request).filter(|attempt| attempt.committed && attempt.to.0 == replica) else { return };
        let from = attempt.from;
        self.after(self.scenario.requests.delay, request, from, Stage::Release, now);
        self.end_move(request, None, now);
    }

    /// A move comes to nothing: each side lets go of what it did for it.
    fn stay(&mut self, request: RequestId, why: &'static str, now: Time) {
        let Some(attempt) = self.moving.as_ref().and_then(|moving| moving.attempts.get(&request)) else { return };
        let (from, to, prepared, frozen) =
            (attempt.from, attempt.to, attempt.prepared, attempt.frozen_at.is_some() && attempt.way == MoveWay::Kv);
        let delay = self.link_latency();
        if let Some(prepared) = prepared {
            self.after(delay, request, to, Stage::Abandon(prepared), now);
        }
        if frozen {
            self.after(delay, request, from, Stage::Thaw, now);
        }
        self.end_move(request, Some(why), now);
    }

    fn end_move(&mut self, request: RequestId, stayed: Option<&'static str>, _now: Time) {
        let moving = self.moving_mut();
        moving.mover.ended(request);
        if let Some(attempt) = moving.attempts.remove(&request) {
            moving.records[attempt.record].stayed = stayed;
        }
    }

    /// A replica died: the moves that it took part in end. A request that its target had not begun to run goes on at its source.
    pub(super) fn end_moves_of(&mut self, replica: usize, now: Time) {
        let Some(moving) = &self.moving else { return };
        let with = |attempt: &&Attempt| attempt.from.0 == replica || attempt.to.0 == replica;
        let involved: Vec<RequestId> = moving.attempts.iter().filter(|(_, attempt)| with(attempt)).map(|(request, _)| *request).collect();
        for request in involved {
            let attempt = &self.moving_mut().attempts[&request];
            let (from, committed) = (attempt.from, attempt.committed);
            if !committed && attempt.way != MoveWay::Kv && attempt.frozen_at.is_some() && from.0 != replica {
                // On its way by its tokens alone: the gateway will see that its target is gone.
            } else if !committed {
                self.stay(request, "a replica died", now);
            } else if from.0 == replica {
                self.end_move(request, None, now);
            } else {
                // Its spare is as far as its client is: nothing of the target's arrived.
                self.router.moved(request, ReplicaId(from.0 as u32), now);
                if let Some(live) = self.live.get_mut(&request) {
                    live.sent_to = Some(from);
                }
                self.after(self.scenario.requests.delay, request, from, Stage::Thaw, now);
                self.end_move(request, Some("the target died"), now);
            }
        }
    }

    fn moving_mut(&mut self) -> &mut Moving {
        self.moving.as_mut().expect("a move is of a run with moves")
    }

    fn attempt_mut(&mut self, request: RequestId) -> &mut Attempt {
        self.moving_mut().attempts.get_mut(&request).expect("the move is under way")
    }

    fn link_latency(&self) -> Duration {
        Duration::from_secs_f64(self.scenario.moves.as_ref().map_or(0.0, |moves| moves.link.latency_s))
    }

    fn link_time(&self, blocks: usize) -> Duration {
        let tokens = Blocks(blocks as u32).to_tokens(self.scenario.block_size).as_f64();
        Duration::from_secs_f64(self.scenario.moves.as_ref().map_or(0.0, |moves| moves.link.seconds(tokens * moves.kv_bytes_per_token)))
    }
}
