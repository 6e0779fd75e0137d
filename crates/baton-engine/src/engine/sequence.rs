use std::{
    ops::{Range, RangeInclusive},
    sync::Arc,
};

use baton_kv::{BlockKey, BlockTable, CacheDomain, KvPool};
use baton_units::{Priority, RequestId, Time, Tokens};

use crate::{BatchRow, Finish, FinishReason, Output, SampleRequest, Sampled, SamplingParams, SequenceId, SequenceRecord};

/// Place among all sequences: lower ranks are admitted and served first and preempted last. `order` is that of coming here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rank {
    pub(super) priority: i32,
    pub(super) arrival: Time,
    pub(super) order: u64,
    pub(super) choice: u32,
}

impl Rank {
    /// Those of all choices of the request.
    pub(super) fn choices(self) -> RangeInclusive<Self> {
        Self { choice: 0, ..self }..=Self { choice: u32::MAX, ..self }
    }
}

/// What the choices of one request share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) request: RequestId,
    pub(super) params: SamplingParams,
    pub(super) seed: u64,
    pub(super) prompt_index: u32,
    pub(super) prompt_len: u32,
    pub(super) first_choice: u32,
    pub(super) choices: u32,
    pub(super) domain: Arc<CacheDomain>,
    /// End-of-sequence and stop tokens if `min_tokens` keeps them away for a while, else empty.
    pub(super) suppressed: Vec<u32>,
    pub(super) priority: Priority,
    pub(super) arrival: Time,
    /// Prompt and output tokens at most, as far as an engine that it was in decides it.
    pub(super) length_limit: Tokens,
}

/// One choice of one request.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    pub(super) rank: Rank,
    pub(super) shared: Arc<Shared>,
    pub(super) choice: u32,
    /// Prompt, then output.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose KV exists in the table's blocks.
    pub(super) computed: u32,
    /// Tokens that the step in flight computes.
    pub(super) scheduled: u32,
    /// Keys of the full blocks of `tokens`, as far as they were needed; at submission those of the prompt.
    pub(super) keys: Vec<BlockKey>,
    /// `Some` while running, or frozen then.
    pub(super) table: Option<BlockTable>,
    /// Prefix hit of the first admission.
    pub(super) cached: Option<u32>,
    /// Made by a fork: its prompt was computed by its sibling.
    pub(super) forked: bool,
    /// Ended by its owner while a step with it was in flight.
    pub(super) ended: bool,
    pub(super) preemptions: u32,
    pub(super) first_scheduled: Option<Time>,
    pub(super) first_token: Option<Time>,
}

impl Sequence {
    pub(super) fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens known and not computed.
    pub(super) fn remaining(&self) -> u32 {
        self.len() - self.computed
    }

    pub(super) fn output_len(&self) -> u32 {
        self.len() - self.shared.prompt_len
    }

    /// The row of the step in flight.
    pub(super) fn row(&self) -> BatchRow<'_> {
        let end = self.computed + self.scheduled;
        BatchRow {
            sequence: self.id,
            tokens: &self.tokens[self.computed as usize..end as usize],
            start: self.computed,
            blocks: self.table.as_ref().expect("a running sequence has a table").blocks(),
            sample: (end == self.len()).then(|| self.sample_request()),
        }
    }

    fn sample_request(&self) -> SampleRequest<'_> {
        let shared = &*self.shared;
        let (prompt, output) = self.tokens.split_at(shared.prompt_len as usize);
        SampleRequest {
            params: &shared.params,
            seed: shared.seed,
            prompt_index: shared.prompt_index,
            choice_index: self.choice,
            output_index: output.len() as u32,
            prompt,
            output,
            suppressed: if (output.len() as u32) < shared.params.min_tokens { &shared.suppressed } else { &[] },
        }
    }

    /// Books the step in flight: the scheduled tokens' KV exists, and blocks that became full are cached.
    pub(super) fn advance(&mut self, pool: &mut KvPool) {
        let size = pool.block_size().get();
        let full_before = self.computed / size;
        self.computed += std::mem::take(&mut self.scheduled);
        let full = (self.computed / size) as usize;
        if full as u32 == full_before {
            return;
        }
        self.extend_keys(full, size as usize);
        let table = self.table.as_mut().expect("a running sequence has a table");
        pool.commit(table, &self.keys[..full], &self.tokens);
    }

    fn extend_keys(&mut self, full: usize, size: usize) {
        while self.keys.len() < full {
            let key = self.shared.domain.next_key(&self.keys, &self.tokens[self.keys.len() * size..][..size]);
            self.keys.push(key);
        }
    }

    /// Appends a drawn token and says what to tell of it.
    pub(super) fn append(&mut self, sampled: Sampled, eos: &[u32], now: Time) -> Output {
        self.first_token.get_or_insert(now);
        self.tokens.push(sampled.token);
        let shared = &*self.shared;
        let output = &self.tokens[shared.prompt_len as usize..];
        let reason = end_reason(&shared.params, output, Tokens(self.len()), eos, shared.length_limit);
        let finish = reason.map(|reason| Finish { reason, record: self.record(now) });
        Output {
            request: self.shared.request,
            choice: self.choice,
            index: self.output_len() - 1,
            token: sampled.token,
            logprob: sampled.logprob,
            top: sampled.top,
            cached_tokens: Tokens(self.cached.unwrap_or(0)),
            first_scheduled: self.first_scheduled,
            finish,
        }
    }

    pub(super) fn record(&self, now: Time) -> SequenceRecord {
        SequenceRecord {
            arrival: self.shared.arrival,
            first_scheduled: self.first_scheduled,
            first_token: self.first_token,
            finished: now,
            prompt_tokens: Tokens(self.shared.prompt_len),
            output_tokens: Tokens(self.output_len()),
            cached_tokens: Tokens(self.cached.unwrap_or(0)),
            preemptions: self.preemptions,
        }
    }

    /// Whether the request's other choices are to be made from this one, whose first token was just drawn.
    pub(super) fn is_to_be_forked(&self) -> bool {
        !self.forked && self.output_len() == 1 && self.choice == self.shared.first_choice && self.shared.choices > 1
    }

    /// Choices that end with this sequence: all of its request as long as they wait for its first token to be made.
    pub(super) fn choices_here(&self) -> u32 {
        if self.forked || self.output_len() > 0 { 1 } else { self.shared.choices }
    }

    /// Indices of those choices.
    pub(super) fn choices(&self) -> Range<u32> {
        self.choice..self.choice.saturating_add(self.choices_here())
    }

    /// Another choice: it shares the prompt's blocks and computes the prompt's last token again, for its own first draw.
    pub(super) fn fork(&self, id: SequenceId, choice: u32, pool: &mut KvPool) -> Self {
        let prompt_len = self.shared.prompt_len;
        Self {
            id,
            rank: Rank { choice, ..self.rank },
            shared: self.shared.clone(),
            choice,
            tokens: self.tokens[..prompt_len as usize].to_vec(),
            computed: prompt_len - 1,
            scheduled: 0,
            keys: self.keys.clone(),
            table: self.table.as_ref().map(|table| pool.fork(table)),
            cached: self.cached,
            forked: true,
            ended: false,
            preemptions: 0,
            first_scheduled: self.first_scheduled,
            first_token: None,
        }
    }
}

/// Why an output of `total` tokens with its prompt ends with its last token; `None` when it goes on.
pub(super) fn end_reason(
    params: &SamplingParams,
    output: &[u32],
    total: Tokens,
    eos: &[u32],
    length_limit: Tokens,
) -> Option<FinishReason> {
    let by_request = params.end_after(*output.last()?, output.len() as u32, eos);
    by_request.or_else(|| (total >= length_limit).then_some(FinishReason::Length))
}
