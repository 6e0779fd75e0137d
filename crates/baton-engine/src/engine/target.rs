//! The side of a move that a sequence comes to.

use std::time::Duration;

use baton_kv::{BlockTable, CacheDomain, OutOfBlocks};
use baton_units::{BlockSize, Blocks, RequestId, Time, Tokens};

use super::{
    Engine,
    sequence::{Sequence, end_reason},
};
use crate::{MoveRefusal, OutputEnds, PreparedId, PreparedView, SequenceId, SequenceState, SubmitError};

/// Blocks for a sequence to come, which count as used.
#[derive(Debug)]
pub(super) struct Preparation {
    /// `None` of a prefix.
    pub(super) request: Option<RequestId>,
    /// Leading blocks that were cached here.
    pub(super) held: Blocks,
    /// What the held blocks hold; of a prefix, what all its blocks are to hold.
    pub(super) tokens: Vec<u32>,
    pub(super) table: BlockTable,
}

impl Engine {
    /// Makes ready for a sequence whose state at its source was `state` at some moment: takes references on the blocks of its prefix that
    /// are cached here, compared token by token, and allocates the rest up to its computed tokens. Blocks and a place among `max_running`
    /// are taken until it [joins](Self::join) or is [abandoned](Self::abandon). Nobody is preempted for it, and it does not wait behind
    /// those who wait here.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn prepare(&mut self, state: &SequenceState) -> Result<PreparedId, MoveRefusal> {
        self.assert_between_steps();
        self.check_state(state)?;
        if self.places_taken() >= self.config.max_running as usize {
            return Err(MoveRefusal::NoPlace { limit: self.config.max_running });
        }
        let (size, domain) = (self.config.block_size, self.domain(&state.request));
        let mut tokens = state.tokens();
        // The last token is computed in any case, for its logits.
        let limit = (state.total() - Tokens(1)).full_blocks(size);
        let prefix = self.pool.find_prefix(&domain, &domain.keys(&tokens, size), &tokens, limit);
        let held = prefix.len();
        let room = state.computed.max(held.to_tokens(size));
        let reserve = if self.running.is_empty() { Blocks::ZERO } else { self.config.watermark_blocks() };
        let (needed, available) = (room.to_blocks(size) - held + prefix.reclaimable + reserve, self.pool.available());
        if needed > available {
            return Err(OutOfBlocks { needed, available }.into());
        }
        let mut table = self.pool.take_prefix(prefix);
        let missing = held.to_tokens(size).0..room.0;
        self.pool.reserve(&mut table, missing, &mut Vec::new()).expect("the needed blocks were counted");
        tokens.truncate(held.to_tokens(size).0 as usize);
        self.next_prepared += 1;
        let id = PreparedId(self.next_prepared);
        self.prepared.insert(id, Preparation { request: Some(state.request.id), held, tokens, table });
        Ok(id)
    }

    /// What is prepared under an id, for the bytes to be written into its blocks.
    pub fn prepared(&self, id: PreparedId) -> Option<PreparedView<'_>> {
        self.prepared.get(&id).map(|preparation| preparation.view(id))
    }

    /// All that is prepared, oldest first.
    pub fn preparations(&self) -> impl Iterator<Item = PreparedView<'_>> {
        self.prepared.iter().map(|(&id, preparation)| preparation.view(id))
    }

    /// Allocates what is missing for this many leading tokens, for a sequence that grew since it was prepared for.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn grow(&mut self, id: PreparedId, tokens: Tokens) -> Result<(), MoveRefusal> {
        self.assert_between_steps();
        let preparation = self.prepared.get_mut(&id).ok_or(MoveRefusal::NotPrepared(id))?;
        let room = preparation.room(self.config.block_size);
        if tokens > room {
            if preparation.request.is_none() {
                return Err(MoveRefusal::TooLong { needed: tokens, limit: room });
            }
            self.pool.reserve(&mut preparation.table, room.0..tokens.0, &mut Vec::new())?;
        }
        Ok(())
    }

    /// Lets a sequence go on here that was prepared for: it runs from the next step on, whoever waits. The KV of its computed tokens must
    /// lie in the prepared blocks, but for the held ones; full blocks are cached and told of as if they had been computed here.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn join(&mut self, id: PreparedId, state: &SequenceState, now: Time) -> Result<SequenceId, MoveRefusal> {
        self.assert_between_steps();
        self.check_state(state)?;
        let size = self.config.block_size;
        let preparation = self.prepared.get(&id).ok_or(MoveRefusal::NotPrepared(id))?;
        preparation.check(state, &self.domain(&state.request), size)?;
        let Preparation { held, mut table, .. } = self.prepared.remove(&id).expect("the preparation was just seen");
        let mut sequence = self.incoming(state, now);
        let computed = state.computed.max(held.to_tokens(size));
        self.pool.commit(&mut table, &sequence.keys[..computed.full_blocks(size).0 as usize], &sequence.tokens);
        (sequence.computed, sequence.table) = (computed.0, Some(table));
        let id = self.take_in(&sequence);
        self.insert_running(sequence);
        Ok(id)
    }

    /// Gives the blocks of a preparation back. False when there is none under this id.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn abandon(&mut self, id: PreparedId) -> bool {
        self.assert_between_steps();
        let Some(preparation) = self.prepared.remove(&id) else { return false };
        self.pool.release(preparation.table);
        true
    }

    /// Queues a sequence that comes without KV, by the age of its request. What the prefix cache does not hold of its prompt and output is
    /// computed anew, and then it goes on after its output.
    pub fn resume(&mut self, state: &SequenceState, now: Time) -> Result<SequenceId, MoveRefusal> {
        self.check_state(state)?;
        self.check_queue()?;
        let sequence = self.incoming(state, now);
        let id = self.take_in(&sequence);
        self.waiting.insert(sequence.rank, sequence);
        Ok(id)
    }

    /// Whether a sequence can be here exactly what it was.
    fn check_state(&self, state: &SequenceState) -> Result<(), MoveRefusal> {
        if state.model != self.config.model {
            let (source_model, target_model) = (state.model.clone(), self.config.model.clone());
            return Err(MoveRefusal::Model { source_model, target_model });
        }
        if let Some(OutputEnds { eos, .. }) = &state.ends
            && *eos != self.eos()
        {
            return Err(MoveRefusal::Eos { source_eos: eos.clone(), target_eos: self.eos() });
        }
        let (request, limit) = (&state.request, self.length_limit_of(state));
        if let Some(contradiction) = state.contradiction() {
            return Err(MoveRefusal::Contradiction(contradiction));
        }
        if let Some(reason) = end_reason(&request.params, &state.output, state.total(), &self.config.eos, limit) {
            return Err(MoveRefusal::Complete(reason));
        }
        let needed = state.ends.as_ref().map_or(Tokens::ZERO, |ends| ends.length_limit).max(state.total() + Tokens(1));
        if needed > self.length_limit {
            return Err(MoveRefusal::TooLong { needed, limit: self.length_limit });
        }
        self.check(request, &state.output)?;
        let choices = request.first_choice..request.first_choice.saturating_add(request.choices);
        if self.holds(request.id, &choices) {
            return Err(SubmitError::Duplicate(request.id).into());
        }
        Ok(())
    }

    /// The sequence of a state that was checked, without KV.
    fn incoming(&mut self, state: &SequenceState, now: Time) -> Sequence {
        let (history, limit) = (state.history, self.length_limit_of(state));
        let before_now = |span: Duration| Time(now.0.saturating_sub(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)));
        let sequence = self.new_sequence(state.request.clone(), &state.output, before_now(history.age), limit);
        Sequence {
            cached: history.cached.map(|tokens| tokens.0),
            forked: history.forked,
            preemptions: history.preemptions,
            first_scheduled: history.since_first_scheduled.map(before_now),
            first_token: history.since_first_token.map(before_now),
            ..sequence
        }
    }

    fn length_limit_of(&self, state: &SequenceState) -> Tokens {
        state.ends.as_ref().map_or(self.length_limit, |ends| ends.length_limit)
    }

    fn take_in(&mut self, sequence: &Sequence) -> SequenceId {
        self.book(sequence);
        self.counters.moved_in += u64::from(sequence.choices_here());
        sequence.id
    }
}

impl Preparation {
    /// Whether the state can use what was prepared.
    fn check(&self, state: &SequenceState, domain: &CacheDomain, size: BlockSize) -> Result<(), MoveRefusal> {
        let (held, room) = (self.held.to_tokens(size), self.room(size));
        let equal = held < state.total() && state.tokens().starts_with(&self.tokens) && **self.table.domain() == *domain;
        if !equal {
            return Err(MoveRefusal::OtherTokens { held });
        }
        if state.computed > room {
            return Err(MoveRefusal::Incomplete { computed: state.computed, room });
        }
        Ok(())
    }

    /// Tokens that the blocks hold.
    fn room(&self, size: BlockSize) -> Tokens {
        Blocks(self.table.blocks().len() as u32).to_tokens(size)
    }

    fn view(&self, id: PreparedId) -> PreparedView<'_> {
        PreparedView { id, request: self.request, held: self.held, blocks: self.table.blocks() }
    }
}
