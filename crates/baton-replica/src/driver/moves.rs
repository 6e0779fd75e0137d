//! What the engine thread does for requests of the migration protocol: it runs them, takes them out of the batch and puts them back, and
//! hands their KV out and in between two steps.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::Instant,
};

use baton_engine::{Engine, Executor, FinishReason, MoveRefusal, Output, Prefix, PreparedId, SequenceId, SequenceState};
use baton_units::{Blocks, RequestId, Time, Tokens};
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;

/// KV that may be copied between two steps however short they are: below a millisecond's work of one core, fresh pages included.
pub(crate) const COPIED_BETWEEN_STEPS: usize = 2 << 20;
/// After a long step more is copied, as much as makes it longer by this part.
const SHARE_OF_STEP: f64 = 0.04;
/// At the pace by which the first constant is below a millisecond.
const COPIED_PER_S: f64 = 2e9;

/// A run is one time that the engine has a request, under an id of its own: what is told of an older run of a request is known as such.
pub(crate) enum MoveCommand {
    /// Runs by the tokens alone. The state's request bears the run's id.
    Run(Box<SequenceState>),
    /// Runs with the KV that was prepared; where that cannot be used, by the tokens alone.
    Join(PreparedId, Box<SequenceState>),
    /// Takes it out of the batch.
    Hold(RequestId),
    /// As before, and tells of it when it is done, which comes after all output of before.
    Freeze(RequestId),
    /// Puts it back.
    Go(RequestId),
    /// It has moved: lets go of it, and keeps its full blocks as prefix.
    Release(RequestId),
    /// Ends it.
    End(RequestId),
    /// `None` when it is not here, or has ended.
    Export(RequestId, oneshot::Sender<Option<Exported>>),
    /// Its blocks from the first of these on, as many as may be copied between two steps: only full ones, unless it is frozen.
    Read(RequestId, Range<u32>, oneshot::Sender<Option<Slice>>),
    Prepare(Box<SequenceState>, oneshot::Sender<Result<Room, MoveRefusal>>),
    /// Blocks by their numbers in the request; makes room for them where there is none.
    Write(PreparedId, Vec<(u32, Vec<u8>)>, oneshot::Sender<Result<(), MoveRefusal>>),
    Abandon(PreparedId),
    /// Keeps what is cached of a prefix, with room for the rest up to so many blocks.
    HoldPrefix(Box<Prefix>, Blocks, oneshot::Sender<Result<HeldPrefix, MoveRefusal>>),
    /// Blocks of a held prefix from the first of these on, as many as may be copied between two steps; `None` when it is not here.
    ReadPrefix(PreparedId, Range<u32>, oneshot::Sender<Option<Vec<Vec<u8>>>>),
    /// Caches a held prefix, all of which was written, and tells how many blocks of it are cached.
    InstallPrefix(PreparedId, oneshot::Sender<Result<Blocks, MoveRefusal>>),
}

/// What another engine needs to go on with a run.
pub(crate) struct Exported {
    pub(crate) state: SequenceState,
    /// Keys of the full blocks that have KV.
    pub(crate) keys: Vec<u64>,
    pub(crate) progress: Progress,
}

/// Some blocks of a run, copied, and where it stood then.
pub(crate) struct Slice {
    pub(crate) blocks: Vec<Vec<u8>>,
    pub(crate) progress: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Leading tokens that have KV.
    pub(crate) computed: Tokens,
    /// Grows when its blocks were taken from it.
    pub(crate) preemptions: u32,
}

/// What was prepared for a sequence to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    pub(crate) id: PreparedId,
    /// Leading blocks that were here already.
    pub(crate) held: Blocks,
}

/// What is held of a prefix.
#[derive(Debug)]
pub(crate) struct HeldPrefix {
    pub(crate) room: Room,
    /// Names of the prefix's full blocks.
    pub(crate) keys: Vec<u64>,
}

#[derive(Debug)]
pub(crate) enum MoveEvent {
    Output(Output),
    /// Nothing was left to compute after so many tokens.
    Complete {
        run: RequestId,
        tokens: u32,
        reason: FinishReason,
    },
    /// The engine does not run it.
    Refused {
        run: RequestId,
        why: MoveRefusal,
    },
    /// Out of the batch since then.
    Frozen {
        run: RequestId,
        at: Time,
    },
}

/// The engine thread's part of the migration protocol.
pub(super) struct Moves {
    /// Where nobody listens, nothing is run.
    events: Option<mpsc::UnboundedSender<MoveEvent>>,
    runs: BTreeMap<RequestId, Run>,
    /// Bytes of KV since the last step, and how many they may be.
    copied: usize,
    allowed: usize,
    /// When the last step ended.
    boundary: Instant,
    /// Copies that wait for the end of the next step; each copier has one under way.
    deferred: VecDeque<MoveCommand>,
}

struct Run {
    choice: u32,
    arrival: Time,
    last_token: Option<Time>,
}

/// What the thread works with.
pub(super) struct Bench<'a> {
    pub(super) engine: &'a mut Engine,
    pub(super) executor: &'a mut dyn Executor,
    pub(super) now: Time,
}

impl Moves {
    pub(super) fn new(events: Option<mpsc::UnboundedSender<MoveEvent>>) -> Self {
        Self {
            events,
            runs: BTreeMap::new(),
            copied: 0,
            allowed: COPIED_BETWEEN_STEPS,
            boundary: Instant::now(),
            deferred: VecDeque::new(),
        }
    }

    /// Whether a copy waits that could be made at once if no step were planned.
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// A step has ended, or there is none to wait for.
    pub(super) fn next_boundary(&mut self, bench: &mut Bench<'_>) {
        let now = Instant::now();
        let share = now.duration_since(std::mem::replace(&mut self.boundary, now)).as_secs_f64() * SHARE_OF_STEP * COPIED_PER_S;
        (self.copied, self.allowed) = (0, (share as usize).max(COPIED_BETWEEN_STEPS));
        for command in std::mem::take(&mut self.deferred) {
            self.obey(command, bench);
        }
    }

    pub(super) fn obey(&mut self, command: MoveCommand, bench: &mut Bench<'_>) {
        let copies = matches!(command, MoveCommand::Read(..) | MoveCommand::ReadPrefix(..) | MoveCommand::Write(..));
        if copies && self.copied >= self.allowed {
            self.deferred.push_back(command);
            return;
        }
        match command {
            MoveCommand::Run(state) => self.run(*state, bench),
            MoveCommand::Join(prepared, state) => self.join(prepared, *state, bench),
            MoveCommand::Hold(run) => drop(self.hold(run, bench)),
            MoveCommand::Freeze(run) => {
                if self.hold(run, bench) {
                    self.tell(MoveEvent::Frozen { run, at: bench.now });
                }
            }
            MoveCommand::Go(run) => {
                if let Some(sequence) = self.sequence(run, bench.engine) {
                    bench.engine.thaw(sequence);
                }
            }
            MoveCommand::Release(run) => {
                if self.hold(run, bench)
                    && let Some(sequence) = self.sequence(run, bench.engine)
                {
                    bench.engine.release(sequence);
                }
                self.runs.remove(&run);
            }
            MoveCommand::End(run) => {
                bench.engine.abort(run);
                self.runs.remove(&run);
            }
            // Whoever asked and is gone meanwhile needs no answer.
            MoveCommand::Export(run, answer) => drop(answer.send(self.export(run, bench))),
            MoveCommand::Read(run, blocks, answer) => drop(answer.send(self.read(run, blocks, bench))),
            MoveCommand::Prepare(state, answer) => {
                let room = prepare(&state, bench.engine);
                if let Err(Ok(room)) = answer.send(room) {
                    bench.engine.abandon(room.id);
                }
            }
            MoveCommand::Write(prepared, blocks, answer) => drop(answer.send(self.write(prepared, &blocks, bench))),
            MoveCommand::Abandon(prepared) => drop(bench.engine.abandon(prepared)),
            MoveCommand::HoldPrefix(prefix, blocks, answer) => {
                if let Err(Ok(held)) = answer.send(hold_prefix(&prefix, blocks, bench.engine)) {
                    bench.engine.abandon(held.room.id);
                }
            }
            MoveCommand::ReadPrefix(held, blocks, answer) => drop(answer.send(self.read_prefix(held, blocks, bench))),
            MoveCommand::InstallPrefix(held, answer) => drop(answer.send(bench.engine.install(held))),
        }
    }

    /// Output of a request that no client here submitted.
    pub(super) fn deliver(&mut self, output: Output, now: Time, metrics: &Metrics) {
        let Some(run) = self.runs.get_mut(&output.request) else { return };
        match run.last_token {
            None if output.index == 0 => metrics.first_token(now.since(run.arrival)),
            None => {}
            Some(last) => metrics.next_token(now.since(last)),
        }
        run.last_token = Some(now);
        if let Some(finish) = &output.finish {
            metrics.finished(&finish.record);
            self.runs.remove(&output.request);
        }
        self.tell(MoveEvent::Output(output));
    }

    fn run(&mut self, state: SequenceState, bench: &mut Bench<'_>) {
        let state = SequenceState { computed: Tokens::ZERO, ..state };
        let run = state.request.id;
        match bench.engine.resume(&state, bench.now) {
            Ok(_) => self.begin(&state, bench.now),
            Err(MoveRefusal::Complete(reason)) => self.tell(MoveEvent::Complete { run, tokens: state.output.len() as u32, reason }),
            Err(why) => self.tell(MoveEvent::Refused { run, why }),
        }
    }

    fn join(&mut self, prepared: PreparedId, state: SequenceState, bench: &mut Bench<'_>) {
        match bench.engine.join(prepared, &state, bench.now) {
            Ok(_) => self.begin(&state, bench.now),
            Err(why) => {
                tracing::warn!(%why, "a moved request does not go on with its KV; it is computed again");
                bench.engine.abandon(prepared);
                self.run(state, bench);
            }
        }
    }

    fn begin(&mut self, state: &SequenceState, now: Time) {
        let arrival = Time(now.0.saturating_sub(u64::try_from(state.history.age.as_nanos()).unwrap_or(u64::MAX)));
        let run = Run { choice: state.request.first_choice, arrival, last_token: None };
        self.runs.insert(state.request.id, run);
    }

    /// True when it is here, and out of the batch now.
    fn hold(&self, run: RequestId, bench: &mut Bench<'_>) -> bool {
        let sequence = self.sequence(run, bench.engine);
        if let Some(sequence) = sequence {
            bench.engine.freeze(sequence);
        }
        sequence.is_some()
    }

    fn export(&self, run: RequestId, bench: &Bench<'_>) -> Option<Exported> {
        let sequence = self.sequence(run, bench.engine)?;
        let (state, view) = (bench.engine.export(sequence, bench.now)?, bench.engine.look(sequence)?);
        let progress = Progress { computed: view.computed, preemptions: view.preemptions };
        Some(Exported { state, keys: view.keys.iter().map(|key| key.0).collect(), progress })
    }

    fn read(&mut self, run: RequestId, blocks: Range<u32>, bench: &Bench<'_>) -> Option<Slice> {
        let view = bench.engine.look(self.sequence(run, bench.engine)?)?;
        let progress = Progress { computed: view.computed, preemptions: view.preemptions };
        // A partly filled block is written until the sequence is frozen.
        let size = bench.engine.config().block_size;
        let ready = if view.frozen { view.computed.to_blocks(size) } else { view.computed.full_blocks(size) };
        let mut copied = Vec::new();
        for index in blocks.start..blocks.end.min(ready.0) {
            if self.copied >= self.allowed {
                break;
            }
            let bytes = bench.executor.kv()?.block(view.blocks[index as usize]).to_vec();
            self.copied += bytes.len();
            copied.push(bytes);
        }
        Some(Slice { blocks: copied, progress })
    }

    fn read_prefix(&mut self, held: PreparedId, blocks: Range<u32>, bench: &Bench<'_>) -> Option<Vec<Vec<u8>>> {
        let view = bench.engine.prepared(held)?;
        let mut copied = Vec::new();
        for &block in view.blocks.get(blocks.start as usize..view.held.0.min(blocks.end) as usize)? {
            if self.copied >= self.allowed {
                break;
            }
            let bytes = bench.executor.kv()?.block(block).to_vec();
            self.copied += bytes.len();
            copied.push(bytes);
        }
        Some(copied)
    }

    fn write(&mut self, prepared: PreparedId, blocks: &[(u32, Vec<u8>)], bench: &mut Bench<'_>) -> Result<(), MoveRefusal> {
        let (size, limit) = (bench.engine.config().block_size, bench.engine.max_model_len());
        let Some(last) = blocks.iter().map(|&(index, _)| index).max() else { return Ok(()) };
        if last >= limit.to_blocks(size).0 {
            return Err(MoveRefusal::TooLong { needed: Tokens(last).max(limit + Tokens(1)), limit });
        }
        bench.engine.grow(prepared, Blocks(last + 1).to_tokens(size))?;
        let view = bench.engine.prepared(prepared).ok_or(MoveRefusal::NotPrepared(prepared))?;
        for (index, bytes) in blocks {
            if *index < view.held.0 {
                return Err(MoveRefusal::Contradiction("blocks that others share are not written"));
            }
            let to = bench.executor.kv_mut().map(|kv| kv.block_mut(view.blocks[*index as usize]));
            match to.filter(|to| to.len() == bytes.len()) {
                Some(to) => to.copy_from_slice(bytes),
                None => return Err(MoveRefusal::Contradiction("a block has the bytes of one block")),
            }
            self.copied += bytes.len();
        }
        Ok(())
    }

    fn sequence(&self, run: RequestId, engine: &Engine) -> Option<SequenceId> {
        self.runs.get(&run).and_then(|known| engine.find(run, known.choice))
    }

    fn tell(&self, event: MoveEvent) {
        // Nobody listens any more when the replica ends.
        if let Some(events) = &self.events {
            let _ = events.send(event);
        }
    }
}

fn prepare(state: &SequenceState, engine: &mut Engine) -> Result<Room, MoveRefusal> {
    let id = engine.prepare(state)?;
    let held = engine.prepared(id).map_or(Blocks::ZERO, |view| view.held);
    Ok(Room { id, held })
}

fn hold_prefix(prefix: &Prefix, blocks: Blocks, engine: &mut Engine) -> Result<HeldPrefix, MoveRefusal> {
    let id = engine.hold_prefix(prefix, blocks)?;
    let held = engine.prepared(id).map_or(Blocks::ZERO, |view| view.held);
    Ok(HeldPrefix { room: Room { id, held }, keys: engine.keys_of(prefix).iter().map(|key| key.0).collect() })
}
