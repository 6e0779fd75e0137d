//! The scheduler against an executor that notices every wrong block, with the laws checked after every step.

mod examples;
mod laws;
mod moves;
mod speed;

use std::collections::{BTreeMap, BTreeSet};

use baton_cost::StepCoefficients;
use baton_kv::{EngineHash, KvEvent, chain_keys};
use baton_units::{BlockSize, Blocks};

use super::*;
use crate::{BatchRow, KvMemory, SamplingOptions, SamplingParams, Timed, TokenBudget, TokenSource};

/// Time is not what most tests are about: a step takes 1 ms and 10 us a token.
const STEP: StepCoefficients =
    StepCoefficients { fixed_s: 1e-3, per_token_s: 1e-5, per_attended_s: 0.0, per_kv_token_s: 0.0, weights_s: 0.0 };
const EOS: u32 = 3;
const VOCABULARY: u32 = 40;

fn config(blocks: u32, block_size: u32, max_model_len: u32) -> EngineConfig {
    EngineConfig {
        block_size: BlockSize::new(block_size).unwrap(),
        budget: TokenBudget::Fixed(Tokens(2048)),
        watermark: 0.0,
        eos: vec![EOS],
        vocabulary: VOCABULARY,
        ..EngineConfig::new("m", Blocks(blocks), Tokens(max_model_len), STEP)
    }
}

fn greedy(max_tokens: u32) -> SamplingOptions {
    SamplingOptions { temperature: 0.0, max_tokens: Some(max_tokens), ..SamplingOptions::default() }
}

fn request(id: u64, prompt: &[u32], options: SamplingOptions) -> NewRequest {
    let params = SamplingParams::new(options).unwrap();
    NewRequest { seed: Some(id), ..NewRequest::new(RequestId(id), prompt.to_vec(), params) }
}

/// Numbers that differ from each other and stay in the vocabulary.
fn prompt(first: u32, len: u32) -> Vec<u32> {
    (first..first + len).map(|token| 4 + token * 7 % (VOCABULARY - 4)).collect()
}

/// [`Timed`], and a look at all of a row's context, which `Timed` itself sees only through the last slot.
struct Checked(Timed);

impl Checked {
    fn new(config: &EngineConfig) -> Self {
        let tokens = TokenSource::Vocabulary(config.vocabulary);
        Self(Timed::new(config.step_prior, config.blocks, config.block_size, tokens, config.eos.clone()))
    }

    fn check_context(&self, row: &BatchRow<'_>) {
        let Some(sample) = &row.sample else { return };
        assert_eq!(sample.output_index as usize, sample.output.len(), "a draw is keyed by its place");
        let mut history = 0;
        for (position, &token) in (0..).zip([sample.prompt, sample.output].concat().iter()) {
            history = Timed::history_after(history, token);
            assert_eq!(self.0.history_at(row.blocks, position), history, "position {position} of {:?}", row.sequence);
        }
    }
}

/// No row writes to a block that another row sees.
fn check_writes(batch: &Batch<'_>, block_size: u32) {
    for (index, row) in batch.rows.iter().enumerate() {
        let end = row.start + row.tokens.len() as u32;
        assert!(row.blocks.len() as u32 * block_size >= end, "the table covers what is computed");
        let written = &row.blocks[(row.start / block_size) as usize..end.div_ceil(block_size) as usize];
        for (_, other) in batch.rows.iter().enumerate().filter(|&(other, _)| other != index) {
            assert!(written.iter().all(|block| !other.blocks.contains(block)), "a shared block is written");
        }
    }
}

impl Executor for Checked {
    fn step(&mut self, batch: &Batch<'_>) -> StepResult {
        let result = self.0.step(batch);
        for row in &batch.rows {
            self.check_context(row);
        }
        result
    }

    fn copy_blocks(&mut self, pairs: &[(BlockId, BlockId)]) {
        self.0.copy_blocks(pairs);
    }

    fn numerics_id(&self) -> &str {
        self.0.numerics_id()
    }

    fn kv(&self) -> Option<&dyn KvMemory> {
        self.0.kv()
    }

    fn kv_mut(&mut self) -> Option<&mut dyn KvMemory> {
        self.0.kv_mut()
    }
}

/// What a choice has put out: tokens with their log-probabilities, and its end.
#[derive(Debug, Clone, Default, PartialEq)]
struct Told {
    tokens: Vec<(u32, Option<f32>)>,
    finish: Option<FinishReason>,
    cached: u32,
    preemptions: u32,
    token_times: Vec<Time>,
}

/// An engine with its executor, in virtual time; checks every law at every step.
struct World {
    engine: Engine,
    executor: Checked,
    now: Time,
    told: BTreeMap<(u64, u32), Told>,
    replayed: BTreeSet<EngineHash>,
    events: Vec<KvEvent>,
    progress: BTreeMap<SequenceId, Progress>,
}

/// How far a sequence was when it was last looked at.
#[derive(Default)]
struct Progress {
    computed: Tokens,
    preemptions: u32,
    full: Vec<BlockId>,
}

impl World {
    fn new(config: EngineConfig) -> Self {
        Self {
            executor: Checked::new(&config),
            engine: Engine::new(config).unwrap(),
            now: Time::ZERO,
            told: BTreeMap::new(),
            replayed: BTreeSet::new(),
            events: Vec::new(),
            progress: BTreeMap::new(),
        }
    }

    fn submit(&mut self, request: NewRequest) {
        self.engine.submit(request, self.now).unwrap();
    }

    /// One step, during which `during` happens; false when there was nothing to do.
    fn step_during(&mut self, during: impl FnOnce(&mut Engine)) -> bool {
        let preemptions = self.engine.counters.preemptions;
        let before: Vec<_> = self.engine.running.iter().map(|sequence| (sequence.rank, sequence.preemptions)).collect();
        let Some(plan) = self.engine.plan(self.now) else {
            let held = !self.engine.frozen.is_empty() || !self.engine.prepared.is_empty();
            assert!(self.engine.is_idle() || held, "nothing was planned though {:?} waits", self.engine.waiting.keys().next());
            return false;
        };
        check_writes(&plan.batch, self.executor.0.block_size());
        let (tokens, load) = (plan.batch.tokens(), plan.batch.load());
        let result = plan.run(&mut self.executor);
        assert_eq!(self.engine.in_flight, Some(load));
        self.check_budget(tokens, &load);
        let after: Vec<_> = self.engine.running.iter().map(|sequence| (sequence.rank, sequence.preemptions)).collect();
        let kept: Vec<bool> = before.iter().map(|sequence| after.contains(sequence)).collect();
        assert!(kept.is_sorted_by(|a, b| a >= b), "nobody is preempted while one later in rank goes on");
        let admits = after.iter().any(|sequence| !before.contains(sequence));
        let preempts = self.engine.counters.preemptions > preemptions;
        assert!(!(admits && preempts && kept.contains(&true)), "a step admits nobody after it preempted, unless all were");
        self.now += result.elapsed;
        during(&mut self.engine);
        let outputs = self.engine.complete(result, self.now);
        self.take(outputs);
        self.check();
        true
    }

    fn step(&mut self) -> bool {
        self.step_during(|_| {})
    }

    fn run(&mut self) {
        // Each step computes at least one token, and each preemption makes at most one sequence compute its tokens again.
        for _ in 0..100_000 {
            if !self.step() {
                return;
            }
        }
        panic!("no end in sight");
    }

    fn take(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            let told = self.told.entry((output.request.0, output.choice)).or_default();
            assert_eq!(output.index as usize, told.tokens.len(), "each index once and in order");
            assert_eq!(told.finish, None, "nothing comes after the end");
            told.tokens.push((output.token, output.logprob));
            told.token_times.push(self.now);
            told.cached = output.cached_tokens.0;
            if let Some(finish) = output.finish {
                told.finish = Some(finish.reason);
                told.preemptions = finish.record.preemptions;
                assert_eq!(finish.record.output_tokens.0 as usize, told.tokens.len());
            }
        }
    }

    fn check_budget(&self, tokens: Tokens, load: &StepLoad) {
        match self.engine.config.budget {
            TokenBudget::Fixed(most) => assert!(tokens <= most),
            TokenBudget::Latency { target, least, most } => {
                assert!(tokens <= most);
                let decodes_only = load.decode_rows == load.new_tokens;
                let predicted = self.engine.calibrator.fit().step_s(load);
                assert!(tokens <= least || decodes_only || predicted <= target.as_secs_f64() * (1.0 + 1e-9));
            }
        }
    }

    fn check(&mut self) {
        let engine = &self.engine;
        let pool = &engine.pool;
        assert_eq!(pool.free() + pool.reclaimable() + pool.used(), pool.total());
        let mut references = vec![0; pool.total().0 as usize];
        assert!(engine.running.iter().all(|sequence| sequence.table.is_some()));
        let tables = engine.running.iter().chain(engine.frozen.values()).filter_map(|sequence| sequence.table.as_ref());
        for table in tables.chain(engine.prepared.values().map(|preparation| &preparation.table)) {
            for block in table.blocks() {
                references[block.index()] += 1;
            }
        }
        for (index, tables) in references.into_iter().enumerate() {
            assert_eq!(pool.references(BlockId(index as u32)), tables, "references are tables");
        }
        assert!(engine.places_taken() <= engine.config.max_running as usize);
        assert!(engine.running.is_sorted_by_key(|sequence| sequence.rank));
        for view in engine.sequences() {
            assert!(view.computed < view.total && view.total <= engine.length_limit);
            let progress = self.progress.entry(view.id).or_default();
            if view.preemptions == progress.preemptions {
                assert!(view.computed >= progress.computed || engine.get(view.id).unwrap().forked);
                assert!(view.blocks.starts_with(&progress.full), "full blocks stay where they are");
            }
            let full = view.blocks[..view.keys.len()].to_vec();
            *progress = Progress { computed: view.computed, preemptions: view.preemptions, full };
        }
        assert!(engine.waiting.values().all(|sequence| sequence.computed == 0 && sequence.table.is_none()));
        self.replay();
    }

    fn replay(&mut self) {
        for event in self.engine.take_events() {
            match &event {
                KvEvent::Stored { hashes, parent, .. } => {
                    assert!(parent.is_none_or(|parent| self.replayed.contains(&parent)));
                    for hash in hashes {
                        assert!(self.replayed.insert(*hash), "stored twice");
                    }
                }
                KvEvent::Removed { hashes } => {
                    for hash in hashes {
                        assert!(self.replayed.remove(hash), "removed without having been stored");
                    }
                }
                KvEvent::Cleared => self.replayed.clear(),
            }
            self.events.push(event);
        }
        let pool = &self.engine.pool;
        let cached = (0..pool.total().0).filter(|&block| pool.is_cached(BlockId(block))).count();
        assert_eq!(self.replayed.len(), cached, "events replayed are the pool's content");
        for sequence in &self.engine.running {
            for (block, key) in sequence.table.as_ref().unwrap().blocks().iter().zip(&sequence.keys) {
                assert!(!pool.is_cached(*block) || self.replayed.contains(&EngineHash(key.0)));
            }
        }
    }

    fn tokens(&self, request: u64, choice: u32) -> Vec<u32> {
        self.told[&(request, choice)].tokens.iter().map(|&(token, _)| token).collect()
    }
}

/// The output of one choice when it has an engine for itself.
fn alone(config: &EngineConfig, request: &NewRequest, choice: u32) -> Told {
    let mut request = request.clone();
    (request.choices, request.first_choice) = (1, request.first_choice + choice);
    let choice = request.first_choice;
    let id = request.id.0;
    let roomy = EngineConfig {
        blocks: Blocks(64),
        block_size: BlockSize::DEFAULT,
        max_model_len: config.length_limit(),
        budget: TokenBudget::Fixed(Tokens(4096)),
        long_prefill: None,
        ..config.clone()
    };
    let mut world = World::new(roomy);
    world.submit(request);
    world.run();
    world.told.remove(&(id, choice)).unwrap()
}
