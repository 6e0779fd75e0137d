//! Sequences that move between engines: the laws, under random interleavings.

mod examples;

use proptest::prelude::*;

use super::{
    laws::{Submission, any_config, submission},
    *,
};
use crate::{Prefix, PreparedId, SequenceState};

/// Copies blocks of a sequence at the source, from one of the prepared blocks on.
fn copy(source: &World, sequence: SequenceId, target: &mut World, prepared: PreparedId, blocks: std::ops::Range<usize>) {
    let from = source.engine.look(sequence).unwrap().blocks;
    let to = target.engine.prepared(prepared).unwrap();
    assert!(blocks.start >= to.held.0 as usize, "held blocks are not written");
    let (bytes, memory) = (source.executor.kv().unwrap(), target.executor.kv_mut().unwrap());
    for index in blocks {
        memory.block_mut(to.blocks[index]).copy_from_slice(bytes.block(from[index]));
    }
}

/// As over a wire.
fn travelled(state: &SequenceState) -> SequenceState {
    let arrived = serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap();
    assert_eq!(*state, arrived);
    arrived
}

/// What was told of the sequence is continued at the target.
fn hand_over(source: &mut World, target: &mut World, state: &SequenceState) {
    let choice = (state.request.id.0, state.request.first_choice);
    if let Some(told) = source.told.remove(&choice) {
        target.told.insert(choice, told);
    }
}

/// Moves one choice with its KV at once; gives its blocks and how many of them were at the target.
fn migrate(source: &mut World, target: &mut World, request: u64, choice: u32) -> (Blocks, Blocks) {
    let id = source.engine.find(RequestId(request), choice).unwrap();
    let prepared = target.engine.prepare(&source.engine.export(id, source.now).unwrap()).unwrap();
    assert!(source.engine.freeze(id));
    let state = travelled(&source.engine.export(id, source.now).unwrap());
    target.engine.grow(prepared, state.computed).unwrap();
    let (held, blocks) = (target.engine.prepared(prepared).unwrap().held, source.engine.look(id).unwrap().blocks.len());
    copy(source, id, target, prepared, held.0 as usize..blocks);
    target.check();
    target.engine.join(prepared, &state, target.now).unwrap();
    assert!(source.engine.release(id));
    hand_over(source, target, &state);
    source.check();
    target.check();
    (Blocks(blocks as u32), held)
}

fn two(config: &EngineConfig) -> (World, World) {
    (World::new(config.clone()), World::new(config.clone()))
}

/// One thing that happens to a fleet.
#[derive(Debug, Clone)]
enum Happening {
    Submit(usize, Submission),
    Step(usize),
    Abort(usize),
    Reset(usize),
    /// A move of the `sequence`-th of one engine to another begins.
    Prepare {
        source: usize,
        sequence: usize,
        target: usize,
    },
    /// What is full is copied.
    Copy(usize),
    Freeze(usize),
    Join(usize),
    GiveUp(usize),
    /// The `sequence`-th moves by its tokens alone.
    Resume {
        source: usize,
        sequence: usize,
        target: usize,
    },
    /// What a cache has of the `request`-th prompt begins to be copied.
    HoldPrefix {
        source: usize,
        request: usize,
        target: usize,
    },
    /// And is installed, or given up.
    EndPrefix(usize, bool),
}

fn happening() -> impl Strategy<Value = Happening> {
    let pair = || (0usize..3, 0usize..12, 0usize..3);
    prop_oneof![
        5 => (0usize..3, submission()).prop_map(|(world, submission)| Happening::Submit(world, submission)),
        14 => (0usize..3).prop_map(Happening::Step),
        1 => (0usize..20).prop_map(Happening::Abort),
        1 => (0usize..3).prop_map(Happening::Reset),
        6 => pair().prop_map(|(source, sequence, target)| Happening::Prepare { source, sequence, target }),
        5 => (0usize..8).prop_map(Happening::Copy),
        2 => (0usize..8).prop_map(Happening::Freeze),
        6 => (0usize..8).prop_map(Happening::Join),
        1 => (0usize..8).prop_map(Happening::GiveUp),
        1 => pair().prop_map(|(source, sequence, target)| Happening::Resume { source, sequence, target }),
        4 => pair().prop_map(|(source, request, target)| Happening::HoldPrefix { source, request, target }),
        4 => (0usize..8, prop::bool::weighted(0.8)).prop_map(|(copy, installs)| Happening::EndPrefix(copy, installs)),
    ]
}

/// A move between its preparation and its end.
#[derive(Clone, Copy)]
struct Migration {
    source: usize,
    target: usize,
    sequence: SequenceId,
    prepared: PreparedId,
    /// Of the source when the copy began.
    preemptions: u32,
    /// Leading blocks that are at the target.
    copied: usize,
}

/// A prefix that is held at two engines for its copy: the engine, and under what.
#[derive(Clone, Copy)]
struct PrefixCopy {
    from: (usize, PreparedId),
    to: (usize, PreparedId),
}

struct Fleet {
    worlds: Vec<World>,
    migrations: Vec<Migration>,
    copies: Vec<PrefixCopy>,
    accepted: Vec<(NewRequest, EngineConfig)>,
    aborted: BTreeSet<u64>,
}

impl Fleet {
    /// Engines of one model, block size and length, and otherwise different. The length is what the smallest pool holds.
    fn new(configs: Vec<EngineConfig>) -> Self {
        let block_size = configs[0].block_size;
        let configs = configs.into_iter().map(|config| EngineConfig { block_size, ..config });
        let max_model_len = configs.clone().map(|config| config.length_limit()).min().unwrap();
        let worlds = configs.map(|config| World::new(EngineConfig { max_model_len, ..config })).collect();
        Self { worlds, migrations: Vec::new(), copies: Vec::new(), accepted: Vec::new(), aborted: BTreeSet::new() }
    }

    fn happen(&mut self, happening: Happening, id: u64) {
        match happening {
            Happening::Submit(world, submission) => {
                let request = submission.request(id);
                let world = &mut self.worlds[world];
                if world.engine.submit(request.clone(), world.now).is_ok() {
                    self.accepted.push((request, world.engine.config.clone()));
                }
            }
            Happening::Step(world) => _ = self.worlds[world].step(),
            Happening::Abort(index) => self.abort(index),
            Happening::Reset(world) => self.worlds[world].engine.reset_prefix_cache(),
            Happening::Prepare { source, sequence, target } => self.prepare(source, sequence, target),
            Happening::Copy(index) => self.with_migration(index, Self::copy_full),
            Happening::Freeze(index) => self.with_migration(index, |fleet, migration| {
                fleet.worlds[migration.source].engine.freeze(migration.sequence);
                Some(migration)
            }),
            Happening::Join(index) => self.with_migration(index, Self::join),
            Happening::GiveUp(index) => self.with_migration(index, Self::give_up),
            Happening::Resume { source, sequence, target } => self.resume(source, sequence, target),
            Happening::HoldPrefix { source, request, target } => self.hold_prefix(source, request, target),
            Happening::EndPrefix(index, installs) => self.end_prefix(index, installs),
        }
        self.worlds.iter_mut().for_each(World::check);
    }

    fn abort(&mut self, index: usize) {
        let Some((request, _)) = self.accepted.get(index % self.accepted.len().max(1)) else { return };
        let id = request.id;
        for world in &mut self.worlds {
            if world.engine.abort(id) {
                self.aborted.insert(id.0);
            }
        }
    }

    /// The `index`-th sequence of an engine that does not move yet.
    fn pick(&self, source: usize, index: usize) -> Option<SequenceId> {
        let ids: Vec<_> = self.worlds[source].engine.sequences().map(|view| view.id).collect();
        let id = *ids.get(index % ids.len().max(1))?;
        (!self.migrations.iter().any(|migration| migration.source == source && migration.sequence == id)).then_some(id)
    }

    fn prepare(&mut self, source: usize, sequence: usize, target: usize) {
        let Some(id) = self.pick(source, sequence).filter(|_| source != target) else { return };
        let state = self.worlds[source].engine.export(id, self.worlds[source].now).unwrap();
        let engine = &mut self.worlds[target].engine;
        let before = (engine.pool.free(), engine.pool.reclaimable());
        match engine.prepare(&travelled(&state)) {
            Ok(prepared) => {
                let copied = engine.prepared(prepared).unwrap().held.0 as usize;
                self.migrations.push(Migration { source, target, sequence: id, prepared, preemptions: state.history.preemptions, copied });
            }
            Err(_) => assert_eq!((engine.pool.free(), engine.pool.reclaimable()), before, "a refusal changes nothing"),
        }
    }

    fn with_migration(&mut self, index: usize, act: impl FnOnce(&mut Self, Migration) -> Option<Migration>) {
        if self.migrations.is_empty() {
            return;
        }
        let migration = self.migrations.swap_remove(index % self.migrations.len());
        let migration = act(self, migration);
        self.migrations.extend(migration);
    }

    /// Whether the source still has what was copied.
    fn stands(&self, migration: &Migration) -> bool {
        self.worlds[migration.source].engine.look(migration.sequence).is_some_and(|view| view.preemptions == migration.preemptions)
    }

    fn copy_full(&mut self, migration: Migration) -> Option<Migration> {
        if !self.stands(&migration) {
            return self.give_up(migration);
        }
        let full = self.worlds[migration.source].engine.look(migration.sequence).unwrap().keys.len();
        self.copy_until(migration, full)
    }

    fn copy_until(&mut self, mut migration: Migration, until: usize) -> Option<Migration> {
        let size = self.worlds[migration.target].engine.config.block_size;
        if self.worlds[migration.target].engine.grow(migration.prepared, Blocks(until as u32).to_tokens(size)).is_err() {
            return self.give_up(migration);
        }
        let [source, target] = self.worlds.get_disjoint_mut([migration.source, migration.target]).unwrap();
        copy(source, migration.sequence, target, migration.prepared, migration.copied..until.max(migration.copied));
        migration.copied = migration.copied.max(until);
        Some(migration)
    }

    fn join(&mut self, migration: Migration) -> Option<Migration> {
        self.worlds[migration.source].engine.freeze(migration.sequence);
        if !self.stands(&migration) {
            return self.give_up(migration);
        }
        let until = self.worlds[migration.source].engine.look(migration.sequence).unwrap().blocks.len();
        let migration = self.copy_until(migration, until)?;
        let [source, target] = self.worlds.get_disjoint_mut([migration.source, migration.target]).unwrap();
        let state = travelled(&source.engine.export(migration.sequence, source.now).unwrap());
        match target.engine.join(migration.prepared, &state, target.now) {
            Ok(_) => {
                assert!(source.engine.release(migration.sequence));
                hand_over(source, target, &state);
                None
            }
            Err(error) => panic!("{error}: what was prepared for joins"),
        }
    }

    fn give_up(&mut self, migration: Migration) -> Option<Migration> {
        let engine = &mut self.worlds[migration.target].engine;
        let blocks = engine.prepared(migration.prepared).unwrap().blocks;
        let alone = blocks.iter().filter(|&&block| engine.pool.references(block) == 1).count() as u32;
        let used = engine.pool.used() - Blocks(alone);
        assert!(engine.abandon(migration.prepared) && !engine.abandon(migration.prepared));
        assert_eq!(engine.pool.used(), used, "what nobody else uses can be had again");
        self.worlds[migration.source].engine.thaw(migration.sequence);
        None
    }

    fn resume(&mut self, source: usize, sequence: usize, target: usize) {
        let Some(id) = self.pick(source, sequence).filter(|_| source != target) else { return };
        let [source, target] = self.worlds.get_disjoint_mut([source, target]).unwrap();
        let state = travelled(&source.engine.export(id, source.now).unwrap());
        assert!(source.engine.freeze(id) && !source.engine.freeze(id));
        if target.engine.resume(&state, target.now).is_ok() {
            assert!(source.engine.release(id));
            hand_over(source, target, &state);
        } else {
            assert!(source.engine.thaw(id) && !source.engine.thaw(id));
        }
    }

    fn hold_prefix(&mut self, source: usize, request: usize, target: usize) {
        let Some((request, _)) = self.accepted.get(request).filter(|_| source != target) else { return };
        let NewRequest { prompt: tokens, adapter, salt, public, .. } = request.clone();
        let prefix = Prefix { model: "m".to_owned(), tokens, adapter, salt, public };
        // What is there already takes references, and no room.
        let from = self.worlds[source].engine.hold_prefix(&prefix, Blocks::ZERO).unwrap();
        let found = self.worlds[source].engine.prepared(from).unwrap();
        assert_eq!(found.held.0 as usize, found.blocks.len());
        let held = found.held;
        let engine = &mut self.worlds[target].engine;
        let before = (engine.pool.free(), engine.pool.reclaimable());
        if let Ok(to) = engine.hold_prefix(&prefix, held) {
            self.copies.push(PrefixCopy { from: (source, from), to: (target, to) });
        } else {
            assert_eq!((engine.pool.free(), engine.pool.reclaimable()), before, "a refusal changes nothing");
            assert!(self.worlds[source].engine.abandon(from));
        }
    }

    fn end_prefix(&mut self, index: usize, installs: bool) {
        if self.copies.is_empty() {
            return;
        }
        let PrefixCopy { from, to } = self.copies.swap_remove(index % self.copies.len());
        let [source, target] = self.worlds.get_disjoint_mut([from.0, to.0]).unwrap();
        if installs {
            let (here, there) = (source.engine.prepared(from.1).unwrap(), target.engine.prepared(to.1).unwrap());
            let (bytes, memory) = (source.executor.kv().unwrap(), target.executor.kv_mut().unwrap());
            for index in there.held.0 as usize..here.blocks.len() {
                memory.block_mut(there.blocks[index]).copy_from_slice(bytes.block(here.blocks[index]));
            }
            let blocks = there.blocks.len() as u32;
            assert!(target.engine.install(to.1).unwrap() <= Blocks(blocks));
            assert!(target.engine.install(to.1).is_err(), "once");
        } else {
            assert!(target.engine.abandon(to.1));
        }
        assert!(source.engine.abandon(from.1));
    }

    /// Ends what is under way, and lets all engines run until nothing is left.
    fn run(&mut self) {
        while !self.copies.is_empty() {
            self.end_prefix(0, false);
        }
        while let Some(migration) = self.migrations.pop() {
            self.give_up(migration);
        }
        self.worlds.iter_mut().for_each(World::run);
    }

    fn check_outputs(&self) {
        for (request, config) in &self.accepted {
            for choice in 0..request.choices {
                let expected = alone(config, request, choice);
                let told: Vec<_> = self.worlds.iter().filter_map(|world| world.told.get(&(request.id.0, choice))).collect();
                assert!(told.len() <= 1, "one owner");
                let told = told.first().copied().cloned().unwrap_or_default();
                if self.aborted.contains(&request.id.0) && told.finish.is_none() {
                    assert!(expected.tokens.starts_with(&told.tokens));
                } else {
                    assert_eq!((told.tokens, told.finish), (expected.tokens, expected.finish), "{request:?}");
                }
            }
        }
    }

    fn check_end(&self) {
        let (mut ended, mut moved_in, mut moved_out, mut prompt_tokens) = (0, 0, 0, 0);
        for World { engine, .. } in &self.worlds {
            assert!(engine.is_idle() && engine.frozen.is_empty() && engine.prepared.is_empty());
            assert_eq!(engine.pool.available(), engine.pool.total());
            let counters = &engine.counters;
            ended += counters.finished_stop + counters.finished_length + counters.finished_abort;
            (moved_in, moved_out) = (moved_in + counters.moved_in, moved_out + counters.moved_out);
            prompt_tokens += counters.prompt_tokens;
        }
        assert_eq!(moved_in, moved_out);
        // A prompt counts once, where its first token was drawn.
        let told = |request: &NewRequest| self.worlds.iter().any(|world| world.told.contains_key(&(request.id.0, 0)));
        let prompts = self.accepted.iter().filter(|(request, _)| told(request)).map(|(request, _)| request.prompt.len() as u64);
        assert_eq!(prompt_tokens, prompts.sum::<u64>());
        assert_eq!(ended, self.accepted.iter().map(|(request, _)| u64::from(request.choices)).sum::<u64>());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    /// After every event blocks are conserved, references are tables (of running, frozen and prepared sequences), full blocks stay
    /// where they are, and events replayed are the caches' content; at the end nothing is left, every choice ended once, and all
    /// outputs are those of sequences that never moved.
    #[test]
    fn the_laws_hold_wherever_sequences_move(
        configs in prop::collection::vec(any_config(), 3),
        happenings in prop::collection::vec(happening(), 1..160),
    ) {
        let mut fleet = Fleet::new(configs);
        for (id, happening) in (0..).zip(happenings) {
            fleet.happen(happening, id);
        }
        fleet.run();
        fleet.check_outputs();
        fleet.check_end();
    }
}
