use std::collections::BTreeMap;

use baton_cost::StepCoefficients;
use baton_engine::{Engine, EngineConfig, KvMemory, NewRequest, SamplingParams, StepResult, Timed, TokenBudget, TokenSource};
use baton_kv::{BlockId, BlockKey, EngineHash, KvEvent};
use baton_policy::LoadReport;
use baton_units::{BlockSize, Blocks, DurationMs, Time, Tokens};

use crate::{EngineOutput, EngineRequest, TimedEngine};

/// The production scheduler over an executor that computes nothing and takes the time that the cost model says.
pub struct ScheduledEngine {
    engine: Engine,
    executor: Timed,
    in_flight: Option<(StepResult, Time)>,
    /// Copies of each block, by the engine's own events.
    stored: BTreeMap<EngineHash, u32>,
    events: Vec<KvEvent>,
    publishes: bool,
    busy_ms: f64,
}

/// What a [`ScheduledEngine`] is built from.
#[derive(Debug, Clone)]
pub struct EngineShape {
    pub model: String,
    pub block_size: BlockSize,
    pub blocks: Blocks,
    pub max_model_len: Tokens,
    /// Tokens of one step.
    pub budget: Tokens,
    pub step: StepCoefficients,
    /// Whether cache events are kept for [`TimedEngine::take_events`].
    pub publishes: bool,
}

impl ScheduledEngine {
    pub fn new(shape: &EngineShape) -> Self {
        let config = EngineConfig {
            block_size: shape.block_size,
            budget: TokenBudget::Fixed(shape.budget),
            ..EngineConfig::new(&shape.model, shape.blocks, shape.max_model_len, shape.step)
        };
        Self {
            engine: Engine::new(config).expect("the shape of a simulated engine is sound"),
            executor: Timed::new(shape.step, shape.blocks, shape.block_size, TokenSource::Vocabulary(1 << 31), Vec::new()),
            in_flight: None,
            stored: BTreeMap::new(),
            events: Vec::new(),
            publishes: shape.publishes,
            busy_ms: 0.0,
        }
    }

    /// Whether no step is in flight, so that sequences can come and go.
    pub(crate) fn between_steps(&self) -> bool {
        self.in_flight.is_none()
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// For what may only be done between two steps; [`Self::start`] afterwards.
    pub(crate) fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// Bytes of KV blocks, as they travel.
    pub(crate) fn read_blocks(&self, blocks: &[BlockId]) -> Vec<u8> {
        blocks.iter().flat_map(|block| KvMemory::block(&self.executor, *block)).copied().collect()
    }

    pub(crate) fn write_blocks(&mut self, blocks: &[BlockId], bytes: &[u8]) {
        for (block, bytes) in blocks.iter().zip(bytes.chunks_exact(bytes.len() / blocks.len().max(1))) {
            self.executor.block_mut(*block).copy_from_slice(bytes);
        }
    }

    /// Books the step in flight if it has ended, and begins no other.
    pub(crate) fn complete(&mut self, now: Time) -> Vec<EngineOutput> {
        let mut outputs = Vec::new();
        if let Some((result, _)) = self.in_flight.take_if(|(_, ends_at)| *ends_at <= now) {
            outputs.extend(self.engine.complete(result, now).into_iter().map(|output| EngineOutput {
                request: output.request,
                cached: (output.index == 0).then_some(output.cached_tokens),
                tokens: vec![output.token],
                finished: output.finish.is_some(),
            }));
        }
        outputs
    }

    /// Begins the next step if none is in flight.
    pub(crate) fn start(&mut self, now: Time) {
        if self.in_flight.is_none()
            && let Some(plan) = self.engine.plan(now)
        {
            let result = plan.run(&mut self.executor);
            self.busy_ms += result.elapsed.as_ms();
            let ends_at = now + result.elapsed;
            self.in_flight = Some((result, ends_at));
        }
        self.keep_events();
    }

    fn keep_events(&mut self) {
        for event in self.engine.take_events() {
            match &event {
                KvEvent::Stored { hashes, .. } => {
                    for hash in hashes {
                        *self.stored.entry(*hash).or_default() += 1;
                    }
                }
                KvEvent::Removed { hashes } => {
                    for hash in hashes {
                        let copies = self.stored.get_mut(hash).expect("what is removed was stored");
                        *copies -= 1;
                        if *copies == 0 {
                            self.stored.remove(hash);
                        }
                    }
                }
                KvEvent::Cleared => self.stored.clear(),
            }
            if self.publishes {
                self.events.push(event);
            }
        }
    }
}

impl TimedEngine for ScheduledEngine {
    fn submit(&mut self, request: EngineRequest, now: Time) {
        let params = SamplingParams::greedy(request.output).expect("a positive number of tokens");
        let submitted = self.engine.submit(NewRequest::new(request.id, request.prompt.to_vec(), params), now);
        submitted.expect("the router sends what fits");
        self.start(now);
    }

    fn next_at(&self) -> Option<Time> {
        self.in_flight.as_ref().map(|(_, ends_at)| *ends_at)
    }

    fn advance(&mut self, now: Time) -> Vec<EngineOutput> {
        let outputs = self.complete(now);
        self.start(now);
        outputs
    }

    fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    fn load(&self, now: Time) -> LoadReport {
        let status = self.engine.status();
        LoadReport {
            taken_at: now,
            waiting: status.waiting,
            running: status.running,
            kv_blocks_free: status.blocks_free + status.blocks_reclaimable,
            prefill_backlog: status.prefill_backlog,
        }
    }

    fn holds(&self, key: BlockKey) -> bool {
        self.stored.contains_key(&EngineHash(key.0))
    }

    fn check_blocks(&self) -> Result<(), String> {
        let status = self.engine.status();
        if status.blocks_free + status.blocks_reclaimable <= status.blocks_total {
            return Ok(());
        }
        Err(format!("{} free and {} reclaimable of {}", status.blocks_free, status.blocks_reclaimable, status.blocks_total))
    }

    fn blocks_in_use(&self) -> Blocks {
        let status = self.engine.status();
        status.blocks_total.saturating_sub(status.blocks_free + status.blocks_reclaimable)
    }

    fn preemptions(&self) -> u64 {
        self.engine.status().counters.preemptions
    }

    fn movable(&mut self) -> Option<&mut ScheduledEngine> {
        Some(self)
    }

    fn busy_ms(&self) -> f64 {
        self.busy_ms
    }
}
