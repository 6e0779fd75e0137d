mod prefix;
mod schedule;
mod sequence;
mod source;
mod target;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use baton_cost::{Calibrator, StepLoad};
use baton_kv::{BlockId, CacheDomain, KeyDomain, KvEvent, KvPool};
use baton_units::{RequestId, Time, Tokens};

use crate::{
    Batch, ConfigError, Counters, EngineConfig, Executor, FinishReason, NewRequest, Order, Output, PreparedId, SequenceId, Status,
    StepResult, SubmitError, budget::StepBudget,
};
use sequence::{Rank, Sequence, Shared};
use target::Preparation;

/// The scheduler of one replica: continuous batching with chunked prefill, paged KV, prefix cache, preemption by recomputation.
///
/// [`plan`](Self::plan) says what the next step computes, the caller lets an [`Executor`] do it, [`complete`](Self::complete) books
/// the result; any time may pass between. After Orca (OSDI'22), vLLM (SOSP'23) and Sarathi-Serve (OSDI'24):
///
/// - In each step running sequences come first: those that decode, then prefills, cut to what the token budget leaves. So a decode
///   never waits for a whole prefill.
/// - A running sequence that needs a block when none can be had takes it from the last one in rank, which waits again and later
///   computes anew what the prefix cache has not kept.
///   Thus the first in rank goes on (a choice that is alone and lacks the block for its copy starts again from the prefix cache),
///   and every admitted sequence ends.
/// - Unless that happened, waiting sequences are admitted in rank while budget, blocks and `max_running` allow. Nobody passes the
///   first, so that a large one is not starved by small ones.
/// - The rank is arrival, or priority and then arrival; choices of one request follow each other.
/// - Between two steps a sequence can leave for another engine: its state and its blocks are read while it runs, it is frozen for the
///   rest, and then released or thawed. The other engine prepares blocks, lets it join its running sequences, or abandons it. What is
///   frozen or prepared keeps its blocks and its place among `max_running`: until that ends, a sequence that needs those blocks waits,
///   the first in rank too.
///
/// Equal calls give equal results; no hash map is iterated and no clock is read.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    /// Tokens of one sequence at most.
    length_limit: Tokens,
    pool: KvPool,
    /// By ascending rank.
    running: Vec<Sequence>,
    waiting: BTreeMap<Rank, Sequence>,
    /// Neither scheduled nor preempted.
    frozen: BTreeMap<Rank, Sequence>,
    prepared: BTreeMap<PreparedId, Preparation>,
    requests: BTreeMap<RequestId, Live>,
    in_flight: Option<StepLoad>,
    copies: Vec<(BlockId, BlockId)>,
    calibrator: Calibrator,
    rng: fastrand::Rng,
    next_sequence: u64,
    next_order: u64,
    next_prepared: u64,
    counters: Counters,
}

/// A request that has choices here.
#[derive(Debug, Clone, Copy)]
struct Live {
    /// Rank of its choice 0; the others' differ in the choice only.
    first: Rank,
    /// Choices here.
    choices: u32,
}

/// What the next step does: first the copies, then the batch.
#[derive(Debug)]
pub struct Plan<'a> {
    pub copies: &'a [(BlockId, BlockId)],
    pub batch: Batch<'a>,
}

impl Plan<'_> {
    pub fn run(&self, executor: &mut dyn Executor) -> StepResult {
        if !self.copies.is_empty() {
            executor.copy_blocks(self.copies);
        }
        executor.step(&self.batch)
    }
}

/// A step that was planned, executed and booked.
#[derive(Debug)]
pub struct Step {
    pub outputs: Vec<Output>,
    pub elapsed: Duration,
}

impl Engine {
    pub fn new(config: EngineConfig) -> Result<Self, ConfigError> {
        config.check()?;
        let pool = KvPool::new(config.blocks, config.block_size);
        Ok(Self {
            length_limit: config.length_limit(),
            pool: if config.kv_events { pool } else { pool.without_events() },
            running: Vec::new(),
            waiting: BTreeMap::new(),
            frozen: BTreeMap::new(),
            prepared: BTreeMap::new(),
            requests: BTreeMap::new(),
            in_flight: None,
            copies: Vec::new(),
            calibrator: Calibrator::new(config.step_prior),
            rng: fastrand::Rng::with_seed(config.seed),
            next_sequence: 0,
            next_order: 0,
            next_prepared: 0,
            counters: Counters::default(),
            config,
        })
    }

    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Prompt and output tokens of one sequence at most: the configured length, or less if the pool holds less.
    pub fn max_model_len(&self) -> Tokens {
        self.length_limit
    }

    /// Queues a request; its choices after the first are made once the prompt is computed.
    pub fn submit(&mut self, request: NewRequest, now: Time) -> Result<(), SubmitError> {
        self.check(&request, &[])?;
        if self.requests.contains_key(&request.id) {
            return Err(SubmitError::Duplicate(request.id));
        }
        self.check_queue()?;
        let sequence = self.new_sequence(request, &[], now, self.length_limit);
        self.book(&sequence);
        self.waiting.insert(sequence.rank, sequence);
        Ok(())
    }

    /// Ends all choices of a request; nothing more is told of it. False when it is not here.
    pub fn abort(&mut self, request: RequestId) -> bool {
        let ended = self.end(request, None);
        self.counters.finished_abort += u64::from(ended);
        ended > 0
    }

    /// Ends one choice whose text is complete, as when a stop string was found in it. False when that choice is not here or has no
    /// output yet.
    pub fn stop(&mut self, request: RequestId, choice: u32) -> bool {
        let ended = self.end(request, Some(choice));
        self.counters.finished_stop += u64::from(ended);
        ended > 0
    }

    /// Decides the next step; `None` when there is nothing to compute, or all of it needs blocks or places of sequences that are frozen
    /// or prepared for. The step is in flight until [`complete`](Self::complete).
    pub fn plan(&mut self, now: Time) -> Option<Plan<'_>> {
        assert!(self.in_flight.is_none(), "a step is completed before the next is planned");
        self.copies.clear();
        let budget = self.schedule();
        if budget.planned == 0 {
            return None;
        }
        let mut rows = Vec::with_capacity(self.running.len());
        for sequence in &mut self.running {
            if sequence.scheduled > 0 {
                sequence.first_scheduled.get_or_insert(now);
            }
        }
        rows.extend(self.running.iter().filter(|sequence| sequence.scheduled > 0).map(Sequence::row));
        self.in_flight = Some(budget.load);
        Some(Plan { copies: &self.copies, batch: Batch { rows } })
    }

    /// Books the step in flight, whose result was there at `now`, and returns its tokens in the order of rank.
    ///
    /// # Panics
    /// When no step is in flight, or the result is not that of its plan.
    pub fn complete(&mut self, result: StepResult, now: Time) -> Vec<Output> {
        let load = self.in_flight.take().expect("a step is planned before it is completed");
        self.calibrator.observe(&load, result.elapsed.as_secs_f64());
        self.counters.steps += 1;
        self.counters.computed_tokens += load.new_tokens as u64;
        let (mut outputs, mut forks) = (Vec::with_capacity(result.samples.len()), Vec::new());
        let mut samples = result.samples.into_iter();
        for sequence in self.running.iter_mut().filter(|sequence| sequence.scheduled > 0) {
            let sample = samples.next().expect("a step has one result for each row");
            sequence.advance(&mut self.pool);
            if sequence.ended || sequence.remaining() > 0 {
                continue;
            }
            let output = sequence.append(sample.expect("a sample was asked for"), &self.config.eos, now);
            if output.index == 0 && !sequence.forked {
                self.counters.prompt_tokens += u64::from(sequence.shared.prompt_len);
                self.counters.prompt_tokens_cached += u64::from(output.cached_tokens.0);
            }
            sequence.ended = output.finish.is_some();
            outputs.push(output);
            if sequence.is_to_be_forked() {
                for choice in 1..sequence.shared.choices {
                    self.next_sequence += 1;
                    let id = SequenceId(self.next_sequence);
                    forks.push(sequence.fork(id, sequence.shared.first_choice + choice, &mut self.pool));
                }
            }
        }
        self.count(&outputs);
        self.remove_ended();
        for fork in forks {
            self.start_fork(fork);
        }
        outputs
    }

    /// Plans a step, lets the executor do it, and books it at `now` plus the time it took.
    pub fn step(&mut self, executor: &mut dyn Executor, now: Time) -> Option<Step> {
        let result = self.plan(now)?.run(executor);
        let elapsed = result.elapsed;
        Some(Step { outputs: self.complete(result, now + elapsed), elapsed })
    }

    /// Changes of the prefix cache since the last call, in the order in which they happened.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.pool.take_events()
    }

    /// Forgets all cached prefixes. What runs goes on, and is not cached.
    pub fn reset_prefix_cache(&mut self) {
        self.pool.reset_cache();
    }

    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Where the engine stands. Costs a pass over all sequences.
    pub fn status(&self) -> Status {
        let mut budget = StepBudget::new(self.config.budget, self.calibrator.fit());
        for sequence in self.running.iter().filter(|sequence| sequence.remaining() == 1) {
            budget.add(1, sequence.computed);
        }
        let prefilling = self.running.iter().filter(|sequence| sequence.remaining() > 1);
        let backlog: u64 = prefilling.chain(self.waiting.values()).map(|sequence| u64::from(sequence.remaining())).sum();
        Status {
            waiting: self.waiting.len() as u32,
            running: self.running.len() as u32,
            prefill_backlog: Tokens(u32::try_from(backlog).unwrap_or(u32::MAX)),
            blocks_total: self.pool.total(),
            blocks_free: self.pool.free(),
            blocks_reclaimable: self.pool.reclaimable(),
            token_budget: Tokens(budget.planned + budget.room_for_prefill(u32::MAX, 0)),
            step_fit: self.calibrator.fit(),
            step_prior: self.calibrator.prior(),
            step_error: self.calibrator.error(),
            counters: self.counters,
        }
    }

    /// Whether a request that has put out `output` could run here.
    fn check(&self, request: &NewRequest, output: &[u32]) -> Result<(), SubmitError> {
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if request.choices == 0 {
            return Err(SubmitError::NoChoices);
        }
        let (prompt, fits) = (Tokens(request.prompt.len() as u32), self.length_limit - Tokens(1));
        if prompt > fits {
            return Err(SubmitError::NeverFits { prompt, fits });
        }
        let size = self.config.vocabulary;
        if let Some(&token) = request.prompt.iter().chain(output).find(|&&token| token >= size) {
            return Err(SubmitError::OutOfVocabulary { token, size });
        }
        request.params.check_vocabulary(size)?;
        Ok(())
    }

    fn check_queue(&self) -> Result<(), SubmitError> {
        if self.waiting.len() >= self.config.max_waiting as usize {
            return Err(SubmitError::QueueFull { limit: self.config.max_waiting });
        }
        Ok(())
    }

    /// The first choice of a request that has put out `output` elsewhere; nothing of it is computed here.
    fn new_sequence(&mut self, request: NewRequest, output: &[u32], arrival: Time, length_limit: Tokens) -> Sequence {
        let domain = self.domain(&request);
        let priority = match self.config.order {
            Order::Arrival => 0,
            Order::Priority => request.priority.0,
        };
        self.next_order += 1;
        let first = Rank { priority, arrival, order: self.next_order, choice: 0 };
        let first = self.requests.get(&request.id).map_or(first, |live| live.first);
        let suppressed = self.suppressed(&request);
        let prompt_len = request.prompt.len() as u32;
        let mut tokens = request.prompt;
        tokens.extend_from_slice(output);
        Sequence {
            id: self.new_sequence_id(),
            rank: Rank { choice: request.first_choice, ..first },
            choice: request.first_choice,
            computed: 0,
            scheduled: 0,
            keys: domain.keys(&tokens, self.config.block_size),
            table: None,
            cached: None,
            forked: false,
            ended: false,
            preemptions: 0,
            first_scheduled: None,
            first_token: None,
            shared: Arc::new(Shared {
                request: request.id,
                seed: request.seed.unwrap_or_else(|| self.rng.u64(..)),
                prompt_index: request.prompt_index,
                prompt_len,
                first_choice: request.first_choice,
                choices: request.choices,
                domain,
                suppressed,
                params: request.params,
                priority: request.priority,
                arrival,
                length_limit,
            }),
            tokens,
        }
    }

    fn domain(&self, request: &NewRequest) -> Arc<CacheDomain> {
        // Output is never public, whatever a request says.
        let public = request.public.min(Tokens(request.prompt.len() as u32));
        self.domain_of(request.adapter.as_deref(), request.salt.as_deref(), public)
    }

    fn domain_of(&self, adapter: Option<&str>, salt: Option<&str>, public: Tokens) -> Arc<CacheDomain> {
        let domain = KeyDomain { model: &self.config.model, adapter, salt };
        Arc::new(CacheDomain::with_public(domain, public.full_blocks(self.config.block_size)))
    }

    fn suppressed(&self, request: &NewRequest) -> Vec<u32> {
        if request.params.min_tokens == 0 {
            return Vec::new();
        }
        let mut tokens = [&self.config.eos[..], &request.params.stop_token_ids].concat();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    fn new_sequence_id(&mut self) -> SequenceId {
        self.next_sequence += 1;
        SequenceId(self.next_sequence)
    }

    /// Ends one choice that has output, or all of them; says how many.
    fn end(&mut self, request: RequestId, choice: Option<u32>) -> u32 {
        let Some(&Live { first, .. }) = self.requests.get(&request) else { return 0 };
        let matches = |sequence: &Sequence| {
            !sequence.ended
                && sequence.shared.request == request
                && choice.is_none_or(|choice| sequence.choice == choice && sequence.output_len() > 0)
        };
        let ranks = |sequences: &BTreeMap<Rank, Sequence>| -> Vec<Rank> {
            sequences.range(first.choices()).filter(|(_, sequence)| matches(sequence)).map(|(&rank, _)| rank).collect()
        };
        let (waiting, frozen) = (ranks(&self.waiting), ranks(&self.frozen));
        let waiting = waiting.iter().filter_map(|rank| self.waiting.remove(rank));
        let frozen = frozen.iter().filter_map(|rank| self.frozen.remove(rank));
        let mut ended = 0;
        for sequence in waiting.chain(frozen).collect::<Vec<_>>() {
            ended += sequence.choices_here();
            self.dismiss(sequence);
        }
        for sequence in self.running.iter_mut().filter(|sequence| matches(sequence)) {
            sequence.ended = true;
            ended += sequence.choices_here();
        }
        if self.in_flight.is_none() {
            self.remove_ended();
        }
        ended
    }

    /// Takes ended sequences out of the running ones and gives their blocks back.
    fn remove_ended(&mut self) {
        for index in (0..self.running.len()).rev() {
            if self.running[index].ended {
                let sequence = self.running.remove(index);
                self.dismiss(sequence);
            }
        }
    }

    /// Books the end of a sequence here and gives its blocks back; the full ones stay in the prefix cache as long as they can.
    fn dismiss(&mut self, mut sequence: Sequence) {
        self.forget(&sequence);
        if let Some(table) = sequence.table.take() {
            self.pool.release(table);
        }
    }

    /// Books the choices that come with a sequence.
    fn book(&mut self, sequence: &Sequence) {
        let first = Rank { choice: 0, ..sequence.rank };
        self.requests.entry(sequence.shared.request).or_insert(Live { first, choices: 0 }).choices += sequence.choices_here();
    }

    /// Books the end of choices of a request.
    fn forget(&mut self, sequence: &Sequence) {
        let request = sequence.shared.request;
        let live = self.requests.get_mut(&request).expect("a sequence belongs to a live request");
        live.choices -= sequence.choices_here();
        if live.choices == 0 {
            self.requests.remove(&request);
        }
    }

    /// Places among `max_running` that are taken.
    fn places_taken(&self) -> usize {
        let frozen = self.frozen.values().filter(|sequence| sequence.table.is_some()).count();
        let prepared = self.prepared.values().filter(|preparation| preparation.request.is_some()).count();
        self.running.len() + frozen + prepared
    }

    fn count(&mut self, outputs: &[Output]) {
        self.counters.generation_tokens += outputs.len() as u64;
        for finish in outputs.iter().filter_map(|output| output.finish.as_ref()) {
            match finish.reason {
                FinishReason::EndOfSequence | FinishReason::StopToken(_) => self.counters.finished_stop += 1,
                FinishReason::Length => self.counters.finished_length += 1,
            }
        }
    }
}

#[cfg(test)]
mod tests;
