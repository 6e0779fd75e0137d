use baton_units::{Blocks, Tokens};

use super::{Engine, sequence::Sequence};
use crate::budget::StepBudget;

impl Engine {
    /// Decides what each sequence computes in the next step: sets `scheduled`, gives and takes blocks.
    pub(super) fn schedule(&mut self) -> StepBudget {
        let mut budget = StepBudget::new(self.config.budget, self.calibrator.fit());
        let preemptions = self.counters.preemptions;
        self.schedule_decodes(&mut budget);
        self.schedule_prefills(&mut budget);
        // Whoever was preempted must not come back in the same step; unless nothing else is left, which is so when the only
        // running sequence had to give up.
        if self.counters.preemptions == preemptions || budget.planned == 0 {
            self.admit(&mut budget);
        }
        budget
    }

    fn schedule_decodes(&mut self, budget: &mut StepBudget) {
        let mut index = 0;
        while index < self.running.len() && budget.room_for_decode() > 0 {
            if self.running[index].remaining() == 1 {
                self.schedule_row(index, 1, budget);
            }
            index += 1;
        }
    }

    fn schedule_prefills(&mut self, budget: &mut StepBudget) {
        let mut index = 0;
        while index < self.running.len() {
            let sequence = &self.running[index];
            if sequence.remaining() > 1 {
                let want = self.chunk(sequence.remaining(), sequence.computed, budget);
                if want == 0 {
                    return;
                }
                self.schedule_row(index, want, budget);
            }
            index += 1;
        }
    }

    /// Tokens that a sequence may compute in this step.
    fn chunk(&self, remaining: u32, computed: u32, budget: &StepBudget) -> u32 {
        let threshold = self.config.long_prefill.map_or(u32::MAX, |tokens| tokens.0);
        budget.room_for_prefill(remaining.min(threshold), computed)
    }

    /// Schedules `want` tokens of a running sequence, preempting from the last in rank, at worst the sequence itself.
    fn schedule_row(&mut self, index: usize, want: u32, budget: &mut StepBudget) {
        loop {
            let sequence = &mut self.running[index];
            let table = sequence.table.as_mut().expect("a running sequence has a table");
            if self.pool.reserve(table, sequence.computed..sequence.computed + want, &mut self.copies).is_ok() {
                sequence.scheduled = want;
                budget.add(want, sequence.computed);
                return;
            }
            self.preempt_last(budget);
            if index == self.running.len() {
                return;
            }
        }
    }

    /// Sends the last running sequence back to wait in its rank. Its full blocks stay in the prefix cache as long as they can.
    fn preempt_last(&mut self, budget: &mut StepBudget) {
        let mut sequence = self.running.pop().expect("whoever needs a block is running");
        if sequence.scheduled > 0 {
            budget.give_back(sequence.scheduled, sequence.computed);
        }
        self.pool.release(sequence.table.take().expect("a running sequence has a table"));
        (sequence.scheduled, sequence.computed) = (0, 0);
        sequence.preemptions += 1;
        self.counters.preemptions += 1;
        self.waiting.insert(sequence.rank, sequence);
    }

    fn admit(&mut self, budget: &mut StepBudget) {
        while self.places_taken() < self.config.max_running as usize && self.admit_first(budget) {}
    }

    /// Admits the first waiting sequence; false when there is none or it must wait.
    fn admit_first(&mut self, budget: &mut StepBudget) -> bool {
        // A sequence that runs alone may have all blocks: nobody else could need the reserve.
        let reserve = if self.running.is_empty() { Blocks::ZERO } else { self.config.watermark_blocks() };
        let Some((_, first)) = self.waiting.first_key_value() else { return false };
        // Before the cache is searched: more context leaves less room.
        if budget.room_for_prefill(1, 0) == 0 || self.pool.available() <= reserve {
            return false;
        }
        let size = self.config.block_size;
        // The last token is computed in any case, for its logits.
        let limit = Tokens(first.len() - 1).full_blocks(size);
        let prefix = self.pool.find_prefix(&first.shared.domain, &first.keys, &first.tokens, limit);
        let hit = prefix.len().to_tokens(size).0;
        let want = self.chunk(first.len() - hit, hit, budget);
        let needed = Tokens(hit + want).to_blocks(size) - prefix.len() + prefix.reclaimable;
        if want == 0 || needed + reserve > self.pool.available() {
            return false;
        }
        let (_, mut sequence) = self.waiting.pop_first().expect("the first waiting sequence was just seen");
        let mut table = self.pool.take_prefix(prefix);
        self.pool.reserve(&mut table, hit..hit + want, &mut self.copies).expect("the needed blocks were counted");
        sequence.table = Some(table);
        (sequence.computed, sequence.scheduled) = (hit, want);
        if sequence.cached.is_none() {
            // A request that began elsewhere may find its output too.
            sequence.cached = Some(hit.min(sequence.shared.prompt_len));
            self.counters.prefix_queries += u64::from(sequence.shared.prompt_len);
            self.counters.prefix_hits += u64::from(hit.min(sequence.shared.prompt_len));
        }
        budget.add(want, hit);
        self.insert_running(sequence);
        true
    }

    /// A new choice runs at once if there is a place; else it waits, and finds the prompt in the prefix cache.
    pub(super) fn start_fork(&mut self, mut fork: Sequence) {
        if self.places_taken() < self.config.max_running as usize {
            self.insert_running(fork);
        } else {
            self.pool.release(fork.table.take().expect("a fork shares its sibling's blocks"));
            fork.computed = 0;
            self.waiting.insert(fork.rank, fork);
        }
    }

    pub(super) fn insert_running(&mut self, sequence: Sequence) {
        let place = self.running.partition_point(|other| other.rank < sequence.rank);
        self.running.insert(place, sequence);
    }
}
