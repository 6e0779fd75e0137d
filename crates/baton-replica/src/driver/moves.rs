//! What the engine thread does for requests of the migration protocol: it runs them, takes them out of the batch and puts them back, and
//! hands their KV out and in between two steps.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use baton_engine::{Engine, Executor, FinishReason, KvBytes, MoveRefusal, Output, Prefix, PreparedId, SequenceId, SequenceState};
use baton_units::{Blocks, RequestId, Time, Tokens};
use tokio::sync::{mpsc, oneshot};

use crate::metrics::Metrics;

/// KV that is handed out or taken in between two steps keeps some core busy, with checksums and sockets, for this part of the time of steps;
/// a block is let through whole. The engine's own thread only exchanges references. While no step is computed nothing is held back.
const SHARE_OF_STEP: f64 = 0.04;
/// Bytes of KV that a core checks and gives to a socket, or takes from one.
const COPIED_PER_S: f64 = 2e9;
/// Bytes of blocks that come before the engine has taken them, at most: enough that the next ones travel while a step is computed.
pub(crate) const WINDOW: u64 = 16 << 20;
/// Blocks of memory that are made for a target to read into, at most; it makes more where it needs them.
const SPARES_MAX: u64 = 64;

/// Blocks that a target has beyond those that it knows of, where they are free, so that the last ones find room: a request fills one in as
/// many steps as it has tokens, while it is copied.
const MARGIN: Blocks = Blocks(2);

/// Memory for the bytes of one block, as the executor makes it.
pub(crate) type Storage = Box<dyn KvBytes>;

/// A run is one time that the engine has a request, under an id of its own: what is told of an older run of a request is known as such.
pub(crate) enum MoveCommand {
    /// Runs by the tokens alone. The state's request bears the run's id.
    Run(Box<SequenceState>),
    /// Runs with the KV that was prepared, blocks that wait to be written included; where that cannot be used, by the tokens alone.
    Join(PreparedId, Box<SequenceState>),
    /// Takes it out of the batch.
    Hold(RequestId),
    /// As before, and tells of it when it is done, which comes after all output of before. The answer is what is left to copy from this
    /// block on; `None` when it is not here, or has ended.
    Freeze(RequestId, u32, oneshot::Sender<Option<Rest>>),
    /// Puts it back.
    Go(RequestId),
    /// It has moved: lets go of it, and keeps its full blocks as prefix.
    Release(RequestId),
    /// Ends it.
    End(RequestId),
    /// `None` when it is not here, or has ended.
    Export(RequestId, oneshot::Sender<Option<Exported>>),
    /// Its full blocks from the first of these on, as many as may go between two steps.
    Read(RequestId, Range<u32>, oneshot::Sender<Option<Slice>>),
    /// The answer has some memory for blocks to come.
    Prepare(Box<SequenceState>, oneshot::Sender<Result<(Room, Vec<Storage>), MoveRefusal>>),
    /// Blocks by their numbers in the request; makes room for them where there is none. Where that fails nothing stays prepared.
    Write(PreparedId, Vec<(u32, Storage)>, oneshot::Sender<Result<Written, MoveRefusal>>),
    Abandon(PreparedId),
    /// Keeps what is cached of a prefix, with room for the rest up to so many blocks.
    HoldPrefix(Box<Prefix>, Blocks, oneshot::Sender<Result<HeldPrefix, MoveRefusal>>),
    /// Blocks of a held prefix from the first of these on, as many as may go between two steps; `None` when it is not here.
    ReadPrefix(PreparedId, Range<u32>, oneshot::Sender<Option<Vec<Arc<dyn KvBytes>>>>),
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

/// Some blocks of a run as they were, and where it stood then.
pub(crate) struct Slice {
    pub(crate) blocks: Vec<Arc<dyn KvBytes>>,
    pub(crate) progress: Progress,
}

/// What a frozen run has beyond the blocks that were copied before.
pub(crate) struct Rest {
    /// As of `at`, in model time.
    pub(crate) exported: Exported,
    pub(crate) at: Time,
    /// The last one partly filled.
    pub(crate) blocks: Vec<Arc<dyn KvBytes>>,
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
    /// Blocks that have room.
    pub(crate) blocks: Blocks,
}

/// Blocks are where they are to lie.
pub(crate) struct Written {
    /// Memory for as many others.
    pub(crate) spares: Vec<Storage>,
    /// Blocks that have room now.
    pub(crate) room: Blocks,
}

/// What is held of a prefix.
pub(crate) struct HeldPrefix {
    pub(crate) room: Room,
    /// Memory for blocks to come.
    pub(crate) spares: Vec<Storage>,
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
    pace: Pace,
    /// When the last step ended, and whether there was one to compute.
    boundary: Instant,
    stepped: bool,
    /// Copies that wait for the end of the next step; each copier has one under way.
    deferred: VecDeque<MoveCommand>,
}

/// How much KV goes and comes between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Pace {
    /// Bytes since the last step, and those that went beyond their share before, since blocks are whole.
    moved: usize,
    allowed: usize,
}

impl Pace {
    const FREE: Self = Self { moved: 0, allowed: usize::MAX };

    /// After a step that took so long.
    fn after_step(self, took: Duration) -> Self {
        let share = took.as_secs_f64() * SHARE_OF_STEP * COPIED_PER_S;
        Self { moved: self.moved.saturating_sub(self.allowed), allowed: share as usize }
    }

    fn is_spent(self) -> bool {
        self.moved >= self.allowed
    }
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
        Self { events, runs: BTreeMap::new(), pace: Pace::FREE, boundary: Instant::now(), stepped: false, deferred: VecDeque::new() }
    }

    /// Whether a copy waits that could be made at once if no step were planned.
    pub(super) fn has_deferred(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Whether the engine had something to compute.
    pub(super) fn stepped(&mut self, computed: bool) {
        self.stepped = computed;
    }

    /// As if all had gone that may go before the next step.
    #[cfg(test)]
    pub(super) fn spend(&mut self) {
        self.pace = Pace { moved: 1, allowed: 1 };
    }

    /// A step has ended, or there is none to wait for.
    pub(super) fn next_boundary(&mut self, bench: &mut Bench<'_>) {
        let now = Instant::now();
        let took = now.duration_since(std::mem::replace(&mut self.boundary, now));
        self.pace = if self.stepped { self.pace.after_step(took) } else { Pace::FREE };
        for command in std::mem::take(&mut self.deferred) {
            self.obey(command, bench);
        }
    }

    pub(super) fn obey(&mut self, command: MoveCommand, bench: &mut Bench<'_>) {
        let reads = matches!(&command, MoveCommand::Read(_, blocks, _) if !blocks.is_empty());
        let copies = reads || matches!(command, MoveCommand::ReadPrefix(..) | MoveCommand::Write(..));
        if copies && self.pace.is_spent() {
            self.deferred.push_back(command);
        } else {
            self.carry_out(command, bench);
        }
    }

    fn carry_out(&mut self, command: MoveCommand, bench: &mut Bench<'_>) {
        match command {
            MoveCommand::Run(state) => self.run(*state, bench),
            MoveCommand::Join(prepared, state) => self.join(prepared, *state, bench),
            MoveCommand::Hold(run) => drop(self.hold(run, bench)),
            MoveCommand::Freeze(run, from, answer) => {
                let frozen = self.hold(run, bench);
                drop(answer.send(if frozen { self.rest(run, from, bench) } else { None }));
                if frozen {
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
                if let Err(Ok((room, _))) = answer.send(prepare(&state, bench)) {
                    bench.engine.abandon(room.id);
                }
            }
            MoveCommand::Write(prepared, blocks, answer) => {
                let written = self.write(prepared, blocks, bench);
                if written.is_err() {
                    bench.engine.abandon(prepared);
                }
                let _ = answer.send(written);
            }
            MoveCommand::Abandon(prepared) => drop(bench.engine.abandon(prepared)),
            MoveCommand::HoldPrefix(prefix, blocks, answer) => {
                if let Err(Ok(held)) = answer.send(hold_prefix(&prefix, blocks, bench)) {
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
        let is_for_it = |command: &MoveCommand| matches!(command, MoveCommand::Write(to, ..) if *to == prepared);
        while let Some(index) = self.deferred.iter().position(is_for_it) {
            let write = self.deferred.remove(index).expect("it is at its place");
            self.carry_out(write, bench);
        }
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
        let ready = view.computed.full_blocks(bench.engine.config().block_size);
        let mut shared = Vec::new();
        for index in blocks.start..blocks.end.min(ready.0) {
            let block = bench.executor.kv()?.share(view.blocks[index as usize]);
            self.pace.moved += block.bytes().len();
            shared.push(block);
            if self.pace.is_spent() {
                break;
            }
        }
        Some(Slice { blocks: shared, progress })
    }

    fn read_prefix(&mut self, held: PreparedId, blocks: Range<u32>, bench: &Bench<'_>) -> Option<Vec<Arc<dyn KvBytes>>> {
        let view = bench.engine.prepared(held)?;
        let mut shared = Vec::new();
        for &block in view.blocks.get(blocks.start as usize..view.held.0.min(blocks.end) as usize)? {
            let block = bench.executor.kv()?.share(block);
            self.pace.moved += block.bytes().len();
            shared.push(block);
            if self.pace.is_spent() {
                break;
            }
        }
        Some(shared)
    }

    /// All at once: while it stands still its client waits.
    fn rest(&mut self, run: RequestId, from: u32, bench: &Bench<'_>) -> Option<Rest> {
        let exported = self.export(run, bench)?;
        let view = bench.engine.look(self.sequence(run, bench.engine)?)?;
        let kv = bench.executor.kv()?;
        let left = view.blocks.get(from as usize..).unwrap_or_default();
        let blocks: Vec<_> = left.iter().map(|&block| kv.share(block)).collect();
        self.pace.moved += blocks.iter().map(|block| block.bytes().len()).sum::<usize>();
        Some(Rest { exported, at: bench.now, blocks })
    }

    fn write(&mut self, prepared: PreparedId, blocks: Vec<(u32, Storage)>, bench: &mut Bench<'_>) -> Result<Written, MoveRefusal> {
        let (size, limit) = (bench.engine.config().block_size, bench.engine.max_model_len());
        let last = blocks.iter().map(|&(index, _)| index).max().unwrap_or(0);
        if last >= limit.to_blocks(size).0 {
            return Err(MoveRefusal::TooLong { needed: Tokens(last).max(limit + Tokens(1)), limit });
        }
        bench.engine.grow(prepared, Blocks(last + 1).to_tokens(size))?;
        widen(prepared, Blocks(last + 1), bench.engine);
        let view = bench.engine.prepared(prepared).ok_or(MoveRefusal::NotPrepared(prepared))?;
        let mut spares = Vec::with_capacity(blocks.len());
        for (index, block) in blocks {
            if index < view.held.0 {
                return Err(MoveRefusal::Contradiction("blocks that others share are not written"));
            }
            let len = block.bytes().len();
            let kv = bench.executor.kv_mut().filter(|kv| kv.layout().block_bytes.0 == len as u64);
            let kv = kv.ok_or(MoveRefusal::Contradiction("a block has the bytes of one block"))?;
            spares.push(kv.put(view.blocks[index as usize], block));
            self.pace.moved += len;
        }
        Ok(Written { spares, room: Blocks(view.blocks.len() as u32) })
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

fn prepare(state: &SequenceState, bench: &mut Bench<'_>) -> Result<(Room, Vec<Storage>), MoveRefusal> {
    let id = bench.engine.prepare(state)?;
    widen(id, state.computed.to_blocks(bench.engine.config().block_size), bench.engine);
    Ok(room_of(id, bench))
}

fn hold_prefix(prefix: &Prefix, blocks: Blocks, bench: &mut Bench<'_>) -> Result<HeldPrefix, MoveRefusal> {
    let id = bench.engine.hold_prefix(prefix, blocks)?;
    let (room, spares) = room_of(id, bench);
    Ok(HeldPrefix { room, spares, keys: bench.engine.keys_of(prefix).iter().map(|key| key.0).collect() })
}

/// What was just prepared, with memory to read the first blocks into.
fn room_of(id: PreparedId, bench: &Bench<'_>) -> (Room, Vec<Storage>) {
    let view = bench.engine.prepared(id).expect("it was just prepared");
    let room = Room { id, held: view.held, blocks: Blocks(view.blocks.len() as u32) };
    let spares = bench.executor.kv().map_or_else(Vec::new, |kv| {
        let in_window = WINDOW / kv.layout().block_bytes.0.max(1) + 2;
        let missing = u64::from((room.blocks - room.held).0).min(in_window).min(SPARES_MAX);
        (0..missing).map(|_| kv.spare()).collect()
    });
    (room, spares)
}

/// Takes room for some more than these, if it can be had.
fn widen(prepared: PreparedId, blocks: Blocks, engine: &mut Engine) {
    let tokens = (blocks + MARGIN).to_tokens(engine.config().block_size).min(engine.max_model_len());
    let _ = engine.grow(prepared, tokens);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_goes_at_a_part_of_the_time_of_steps_whatever_their_length_and_the_blocks_size() {
        for (step_ms, block) in [(1, 700_000), (15, 700_000), (15, 128), (40, 8 << 20)] {
            let (mut pace, mut total) = (Pace::FREE, 0);
            let steps = 40_000 / step_ms;
            for _ in 0..steps {
                pace = pace.after_step(Duration::from_millis(step_ms));
                while !pace.is_spent() {
                    pace.moved += block;
                    total += block;
                }
            }
            let allowed = SHARE_OF_STEP * COPIED_PER_S * (steps * step_ms) as f64 / 1e3;
            // Each share is rounded down to a byte, and the last block may go beyond.
            assert!((total as f64 - allowed).abs() <= block as f64 + steps as f64, "{total} bytes, and {allowed} are allowed");
        }
        assert!(!Pace::FREE.is_spent());
    }
}
