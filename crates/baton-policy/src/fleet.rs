use std::time::Duration;

use baton_cost::{StepCoefficients, StepLoad};
use baton_units::{Blocks, DurationMs, ReplicaId, RequestId, Time, Tokens};

use crate::{Discipline, LoadReport, ReplicaSpec, ReplicaState, delay::Backlog, ledger::Ledger, truth::Truth};

/// Weight of the latest response in the mean.
const RESPONSE_GAIN: f64 = 0.1;
/// A report older than this says nothing of free blocks.
const REPORT_TRUSTED: Duration = Duration::from_secs(5);

/// The replicas by their dense ids.
#[derive(Debug, Default)]
pub(crate) struct Replicas(Vec<Option<Replica>>);

impl Replicas {
    pub(crate) fn get(&self, id: ReplicaId) -> Option<&Replica> {
        self.0.get(id.index())?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: ReplicaId) -> Option<&mut Replica> {
        self.0.get_mut(id.index())?.as_mut()
    }

    pub(crate) fn insert(&mut self, replica: Replica) {
        let place = replica.spec.id.index();
        if self.0.len() <= place {
            self.0.resize_with(place + 1, || None);
        }
        self.0[place] = Some(replica);
    }

    pub(crate) fn remove(&mut self, id: ReplicaId) -> Option<Replica> {
        self.0.get_mut(id.index())?.take()
    }

    /// In order of ids.
    pub(crate) fn values(&self) -> impl Iterator<Item = &Replica> {
        self.0.iter().flatten()
    }

    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut Replica> {
        self.0.iter_mut().flatten()
    }

    /// One more than the largest id that was ever here.
    pub(crate) fn places(&self) -> usize {
        self.0.len()
    }
}

impl std::ops::Index<ReplicaId> for Replicas {
    type Output = Replica;

    fn index(&self, id: ReplicaId) -> &Replica {
        self.get(id).expect("a replica that is asked for by index is there")
    }
}

/// The prefill that was worked out last. A long prompt has many chunks, and a fleet has many engines that are alike and hold none of it.
#[derive(Debug, Default)]
pub(crate) struct LastPrefill(Option<(StepCoefficients, Discipline, Tokens, Tokens, f64)>);

impl LastPrefill {
    /// As [`Replica::prefill_ms`].
    pub(crate) fn ms(&mut self, replica: &Replica, prompt: Tokens, hit: Tokens) -> f64 {
        let ReplicaSpec { step, discipline, .. } = replica.spec;
        match self.0 {
            Some((its_step, its_discipline, its_prompt, its_hit, ms))
                if (its_prompt, its_hit, its_discipline) == (prompt, hit, discipline) && its_step == step =>
            {
                ms
            }
            _ => {
                let ms = replica.prefill_ms(prompt, hit);
                self.0 = Some((step, discipline, prompt, hit, ms));
                ms
            }
        }
    }
}

/// One replica as the router books it.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) spec: ReplicaSpec,
    pub(crate) state: ReplicaState,
    pub(crate) ledger: Ledger,
    pub(crate) report: Option<LoadReport>,
    /// Blocks that the latest report has in use beyond those of this router's requests.
    pub(crate) foreign_blocks: u32,
    /// Requests sent and not ended, in no order.
    pub(crate) flights: Vec<RequestId>,
    /// Requests past their first token, and tokens of context that they read a step.
    pub(crate) decoding: u32,
    pub(crate) context: u64,
    /// Requests in flight that ask for quiet.
    pub(crate) quiet: u32,
    /// Blocks that requests in flight own besides the full blocks of their prompts.
    pub(crate) private_blocks: u32,
    pub(crate) response_ms: f64,
    pub(crate) losses: Losses,
    /// What reports of hits have shown of its events.
    pub(crate) truth: Truth,
}

/// Expected work to compute again the first block that the replica would evict, the first two, and so on, where no other has them.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    pub(crate) at: Time,
    pub(crate) sums_ms: Vec<f64>,
}

impl Replica {
    pub(crate) fn new(spec: ReplicaSpec) -> Self {
        Self {
            spec,
            state: ReplicaState::Ready,
            ledger: Ledger::default(),
            report: None,
            foreign_blocks: 0,
            flights: Vec::new(),
            decoding: 0,
            context: 0,
            quiet: 0,
            private_blocks: 0,
            response_ms: 0.0,
            truth: Truth::default(),
            losses: Losses::default(),
        }
    }

    pub(crate) fn in_flight(&self) -> u32 {
        self.flights.len() as u32
    }

    pub(crate) fn advance(&mut self, now: Time) {
        let chunk = self.long_chunk_ms();
        self.ledger.advance(chunk, now);
    }

    /// Tokens of a prompt that a hit of `blocks` saves; the last token is always computed, since its logits are needed.
    pub(crate) fn hit_tokens(&self, blocks: u32, prompt: Tokens) -> Tokens {
        let size = self.spec.block_size;
        let most = Tokens(prompt.0.saturating_sub(1)).full_blocks(size);
        Blocks(blocks).min(most).to_tokens(size)
    }

    /// Prefill of a prompt after a hit, as this replica's engine runs it.
    pub(crate) fn prefill_ms(&self, prompt: Tokens, hit: Tokens) -> f64 {
        self.spec.prefill_ms(prompt, hit)
    }

    /// Work to compute the block at `depth` of a chain again.
    pub(crate) fn block_ms(&self, depth: u32) -> f64 {
        let size = self.spec.block_size;
        self.spec.step.prefill_ms(Blocks(1).to_tokens(size), Blocks(depth).to_tokens(size))
    }

    pub(crate) fn backlog(&self) -> Backlog {
        let ms = self.ledger.backlog_ms();
        match self.long_chunk_ms() {
            None => Backlog::in_order(ms),
            Some(chunk) => {
                Backlog { ms, short_ms: self.ledger.short_wait_ms(chunk), long_chunk_ms: chunk, has_long: self.ledger.has_long(chunk) }
            }
        }
    }

    /// A long prompt's chunk of a step, at half the longest context.
    fn long_chunk_ms(&self) -> Option<f64> {
        match self.spec.discipline {
            Discipline::Serial | Discipline::Chunked { .. } => None,
            Discipline::Interleaved { long_chunk, .. } => {
                let context = Tokens(self.spec.max_model_len.0 / 2);
                Some(self.spec.step.step_s(&StepLoad::prefill(long_chunk, context)) * 1e3)
            }
        }
    }

    /// One decode step of the requests that run, with `more` sequences of `context` tokens altogether.
    pub(crate) fn decode_step_ms(&self, more: u32, context: u64) -> f64 {
        let rows = self.decoding + more;
        if rows == 0 {
            return 0.0;
        }
        self.spec.step.step_s(&StepLoad::decode(f64::from(rows), (self.context + context) as f64)) * 1e3
    }

    /// Blocks that a new request could take, by the ledger and the latest report; requests in flight keep `pinned` blocks of prompts.
    pub(crate) fn blocks_free(&self, pinned: usize, now: Time) -> Blocks {
        let booked = self.spec.kv_blocks.saturating_sub(Blocks(pinned as u32 + self.private_blocks));
        match self.fresh_report(now) {
            Some(report) => booked.min(report.kv_blocks_free),
            None => booked,
        }
    }

    /// The replica's own word, unless it is old.
    pub(crate) fn fresh_report(&self, now: Time) -> Option<LoadReport> {
        self.report.filter(|report| now.since(report.taken_at) <= REPORT_TRUSTED)
    }

    pub(crate) fn responded(&mut self, took: Duration) {
        let gain = if self.response_ms == 0.0 { 1.0 } else { RESPONSE_GAIN };
        self.response_ms += gain * (took.as_ms() - self.response_ms);
    }

    pub(crate) fn first_token(&mut self, request: RequestId, context: Tokens) {
        self.ledger.remove(request);
        self.decoding += 1;
        self.context += u64::from(context.0);
    }
}
