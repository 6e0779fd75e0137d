//! The side of a move that a sequence leaves.

use std::{collections::BTreeMap, ops::Range};

use baton_units::{RequestId, Time, Tokens};

use super::{
    Engine,
    sequence::{Rank, Sequence},
};
use crate::{History, NewRequest, OutputEnds, Phase, SequenceId, SequenceState, SequenceView};

impl Engine {
    /// All sequences: those that run in the order of rank, then those that wait, then the frozen ones.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceView<'_>> {
        self.all().map(|sequence| self.view(sequence))
    }

    /// The sequence that computes a choice; before the choices of a request are made, its first one stands for all. Costs a pass over the
    /// running ones.
    pub fn find(&self, request: RequestId, choice: u32) -> Option<SequenceId> {
        let live = self.requests.get(&request)?;
        self.of_request(live.first).find(|sequence| sequence.choices().contains(&choice)).map(|sequence| sequence.id)
    }

    /// A sequence as of the last step that was booked; `None` when it is not here, or ended.
    pub fn look(&self, id: SequenceId) -> Option<SequenceView<'_>> {
        self.get(id).map(|sequence| self.view(sequence))
    }

    /// All that another engine needs to go on with a sequence, as of the last step that was booked; `None` when it is not here, or ended.
    /// Before it is frozen this serves to prepare the target, afterwards to join it.
    pub fn export(&self, id: SequenceId, now: Time) -> Option<SequenceState> {
        self.get(id).map(|sequence| self.state(sequence, now))
    }

    /// Takes a sequence out of what is scheduled and preempted, or out of the queue; it keeps its blocks and its place. False when it is
    /// not here, or frozen already.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn freeze(&mut self, id: SequenceId) -> bool {
        self.assert_between_steps();
        let sequence = match self.running.iter().position(|sequence| sequence.id == id) {
            Some(index) => Some(self.running.remove(index)),
            None => rank_of(&self.waiting, id).and_then(|rank| self.waiting.remove(&rank)),
        };
        let Some(sequence) = sequence else { return false };
        self.frozen.insert(sequence.rank, sequence);
        true
    }

    /// Puts a frozen sequence back to where it was. False when it is not frozen here.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn thaw(&mut self, id: SequenceId) -> bool {
        self.assert_between_steps();
        let Some(sequence) = rank_of(&self.frozen, id).and_then(|rank| self.frozen.remove(&rank)) else { return false };
        if sequence.table.is_some() {
            self.insert_running(sequence);
        } else {
            self.waiting.insert(sequence.rank, sequence);
        }
        true
    }

    /// Lets go of a frozen sequence that goes on elsewhere: nothing is told of it, and its full blocks stay in the prefix cache, the last
    /// to be evicted. False when it is not frozen here.
    ///
    /// # Panics
    /// While a step is in flight.
    pub fn release(&mut self, id: SequenceId) -> bool {
        self.assert_between_steps();
        let Some(sequence) = rank_of(&self.frozen, id).and_then(|rank| self.frozen.remove(&rank)) else { return false };
        self.counters.moved_out += u64::from(sequence.choices_here());
        self.dismiss(sequence);
        true
    }

    /// The model's end-of-sequence tokens, ascending.
    pub(super) fn eos(&self) -> Vec<u32> {
        let mut eos = self.config.eos.clone();
        eos.sort_unstable();
        eos.dedup();
        eos
    }

    /// Whether one of these choices of a request is here.
    pub(super) fn holds(&self, request: RequestId, choices: &Range<u32>) -> bool {
        let Some(live) = self.requests.get(&request) else { return false };
        let overlap = |here: Range<u32>| here.start < choices.end && choices.start < here.end;
        self.of_request(live.first).any(|sequence| overlap(sequence.choices()))
    }

    pub(super) fn assert_between_steps(&self) {
        assert!(self.in_flight.is_none(), "sequences move between two steps, not during one");
    }

    fn all(&self) -> impl Iterator<Item = &Sequence> {
        self.running.iter().filter(|sequence| !sequence.ended).chain(self.waiting.values()).chain(self.frozen.values())
    }

    /// The sequences of a request, by the rank of any of its choices.
    fn of_request(&self, rank: Rank) -> impl Iterator<Item = &Sequence> {
        let choices = rank.choices();
        let running = self.running.iter().filter(move |sequence| !sequence.ended && rank.choices().contains(&sequence.rank));
        running.chain(self.waiting.range(choices.clone()).chain(self.frozen.range(choices)).map(|(_, sequence)| sequence))
    }

    pub(super) fn get(&self, id: SequenceId) -> Option<&Sequence> {
        self.all().find(|sequence| sequence.id == id)
    }

    fn view<'a>(&'a self, sequence: &'a Sequence) -> SequenceView<'a> {
        let (size, computed) = (self.config.block_size, Tokens(sequence.computed));
        let blocks = sequence.table.as_ref().map_or(&[][..], |table| &table.blocks()[..computed.to_blocks(size).0 as usize]);
        SequenceView {
            id: sequence.id,
            request: sequence.shared.request,
            choice: sequence.choice,
            phase: match (&sequence.table, sequence.remaining()) {
                (None, _) => Phase::Waiting,
                (Some(_), 1) => Phase::Decoding,
                (Some(_), _) => Phase::Prefilling,
            },
            frozen: self.frozen.contains_key(&sequence.rank),
            total: Tokens(sequence.len()),
            computed,
            blocks,
            keys: &sequence.keys[..computed.full_blocks(size).0 as usize],
            preemptions: sequence.preemptions,
        }
    }

    fn state(&self, sequence: &Sequence, now: Time) -> SequenceState {
        let shared = &*sequence.shared;
        let (prompt, output) = sequence.tokens.split_at(shared.prompt_len as usize);
        let domain = &shared.domain;
        let most = shared.params.max_tokens.map_or(u32::MAX, |max| shared.prompt_len.saturating_add(max));
        SequenceState {
            request: NewRequest {
                id: shared.request,
                prompt: prompt.to_vec(),
                params: shared.params.clone(),
                choices: sequence.choices_here(),
                seed: Some(shared.seed),
                prompt_index: shared.prompt_index,
                first_choice: sequence.choice,
                priority: shared.priority,
                adapter: domain.adapter.clone(),
                salt: domain.salt.clone(),
                public: domain.public().to_tokens(self.config.block_size),
            },
            output: output.to_vec(),
            model: domain.model.clone(),
            ends: Some(OutputEnds { eos: self.eos(), length_limit: Tokens(shared.length_limit.0.min(most)) }),
            computed: Tokens(sequence.computed),
            history: History {
                age: now.since(shared.arrival),
                since_first_scheduled: sequence.first_scheduled.map(|moment| now.since(moment)),
                since_first_token: sequence.first_token.map(|moment| now.since(moment)),
                cached: sequence.cached.map(Tokens),
                forked: sequence.forked,
                preemptions: sequence.preemptions,
            },
        }
    }
}

fn rank_of(sequences: &BTreeMap<Rank, Sequence>, id: SequenceId) -> Option<Rank> {
    sequences.iter().find(|(_, sequence)| sequence.id == id).map(|(&rank, _)| rank)
}
