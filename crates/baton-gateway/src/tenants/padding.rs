//! Time to the first token that says nothing of what other tenants have cached.
//!
//! Of a prompt that a tenant has not sent itself of late, the first token comes when it would have come had nobody else sent it either: as much
//! later as the found prefix saved, and then at the end of a cell of time, found or not, since no price is exact. Where the cells of a prompt
//! end nobody outside can tell, and trying again tells nothing new. What a tenant has sent itself comes at once.

use std::{
    collections::HashSet,
    hash::BuildHasherDefault,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use baton_kv::{BlockKey, KeyHasher};
use baton_units::{BlockSize, Blocks, Time, Tokens};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A tenant's own prefixes are its own for this long after it used them, and at most for twice as long: an engine may have dropped them by
/// then, and got them again from somebody else.
const OWN_FOR: Duration = Duration::from_mins(5);
/// Blocks of each of the two generations that are remembered of a tenant: a million tokens, and some 2 MiB.
const BLOCKS_MAX: usize = 1 << 16;

/// What a tenant has had computed or found of late.
#[derive(Debug)]
pub(super) struct Sent {
    generations: Mutex<Generations>,
    /// Decides where the cells of a prompt end.
    seed: u64,
}

#[derive(Debug, Default)]
struct Generations {
    young: Keys,
    old: Keys,
    since: Time,
}

type Keys = HashSet<BlockKey, BuildHasherDefault<KeyHasher>>;

impl Sent {
    pub(super) fn new() -> Self {
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).expect("the system has random numbers");
        Self { generations: Mutex::default(), seed: u64::from_le_bytes(seed) }
    }

    /// The tenant has a prompt, or an answer, with these blocks.
    fn note(&self, keys: &[BlockKey], now: Time) {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.turn(now);
        for key in keys {
            if generations.young.len() >= BLOCKS_MAX {
                generations.next(now);
            }
            generations.young.insert(*key);
        }
    }

    /// Leading blocks that it sent itself.
    fn own(&self, keys: &[BlockKey], now: Time) -> usize {
        let mut generations = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        generations.turn(now);
        keys.iter().take_while(|key| generations.young.contains(key) || generations.old.contains(key)).count()
    }
}

impl Generations {
    fn turn(&mut self, now: Time) {
        if now.since(self.since) >= 2 * OWN_FOR {
            self.young.clear();
        }
        if now.since(self.since) >= OWN_FOR {
            self.next(now);
        }
    }

    fn next(&mut self, now: Time) {
        self.old = std::mem::take(&mut self.young);
        self.since = now;
    }
}

/// How one request's first token is held back.
#[derive(Debug)]
pub(crate) struct Padding {
    sent: Arc<Sent>,
    cell: Duration,
    /// Where the cells of this prompt end, of any span.
    phase: u64,
    /// Of the prompt, until its client sees the first token.
    unseen: Option<Arc<[BlockKey]>>,
    /// Leading tokens that the tenant sent itself; none of a request with several prompts, of which only the first one's blocks are known.
    pub(crate) own: Tokens,
    /// No block of it can be known from others.
    is_own: bool,
}

impl Padding {
    /// Of a prompt with these full blocks, of `size` tokens each.
    pub(super) fn new(cell: Duration, sent: &Arc<Sent>, keys: Arc<[BlockKey]>, size: BlockSize, now: Time) -> Self {
        let own = sent.own(&keys, now);
        let last = keys.last().map_or(0, |key| key.0);
        let phase = xxh3_64_with_seed(&last.to_le_bytes(), sent.seed);
        let is_own = own == keys.len();
        Self { sent: sent.clone(), cell, phase, unseen: Some(keys), own: Blocks(own as u32).to_tokens(size), is_own }
    }

    /// With further prompts beside this one.
    pub(crate) fn beside_others(self) -> Self {
        Self { own: Tokens::ZERO, is_own: false, ..self }
    }

    /// The client sees the first token, so the prompt is its tenant's own from here on. Not before: whoever asks twice at once would be told by
    /// the second answer when the first one was made.
    pub(crate) fn seen(&mut self, now: Time) {
        if let Some(keys) = self.unseen.take() {
            self.sent.note(&keys, now);
        }
    }

    /// The client has seen the whole answer, whose blocks and the prompt's are these.
    pub(crate) fn seen_whole(&self, keys: &[BlockKey], now: Time) {
        self.sent.note(keys, now);
    }

    /// How much later than after `took` the first token is to come, where `saved` is what others' prefix saved of it.
    pub(crate) fn delay(&self, took: Duration, saved: Duration) -> Duration {
        if self.is_own {
            return Duration::ZERO;
        }
        let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
        let (least, cell) = (nanos(took.saturating_add(saved)), nanos(self.cell).max(1));
        let past = (least % cell + cell - self.phase % cell) % cell;
        let due = least.saturating_add((cell - past) % cell);
        Duration::from_nanos(due).saturating_sub(took)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(from: u64, to: u64) -> Arc<[BlockKey]> {
        (from..to).map(|key| BlockKey(key.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect()
    }

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    proptest! {
        /// Found or not, a prompt's first token comes at the end of the same cell, as long as the price is right to within it.
        #[test]
        fn what_others_sent_comes_in_the_same_cells_as_what_nobody_sent(
            cold_us in 1u64..1_000_000, saved_us in 0u64..1_000_000, cell_us in 1u64..200_000, prompt in 0u64..1000,
        ) {
            let (cold, saved, cell) = (Duration::from_micros(cold_us), Duration::from_micros(saved_us.min(cold_us)), Duration::from_micros(cell_us));
            let padding = Padding::new(cell, &Arc::new(Sent::new()), keys(prompt, prompt + 9), BlockSize::DEFAULT, Time::ZERO);
            let without = cold + padding.delay(cold, Duration::ZERO);
            let found = cold.saturating_sub(saved);
            let with = found + padding.delay(found, saved);
            prop_assert_eq!(with, without);
            prop_assert!(without >= cold && without < cold + cell);
        }
    }

    #[test]
    fn what_a_tenant_sent_itself_comes_at_once_until_that_is_long_ago() {
        let sent = Arc::new(Sent::new());
        let padding = |blocks: u64, now: Time| Padding::new(ms(50), &sent, keys(0, blocks), BlockSize::DEFAULT, now);
        assert_eq!(padding(8, Time::ZERO).own, Tokens(0));
        assert!(padding(8, Time::ZERO).delay(ms(10), ms(40)) >= ms(40));
        sent.note(&keys(0, 8), Time::ZERO);
        assert_eq!((padding(8, Time::ZERO).own, padding(8, Time::ZERO).delay(ms(10), ms(40))), (Tokens(128), ms(0)));
        assert_eq!(padding(12, Time::ZERO).own, Tokens(128), "and a longer one's beginning is its own");
        assert!(padding(12, Time::ZERO).delay(ms(10), ms(40)) >= ms(40));
        let later = |spans: u32| Time::ZERO + spans * OWN_FOR;
        assert_eq!(padding(8, later(1)).own, Tokens(128));
        assert_eq!(padding(8, later(3)).own, Tokens(0));
        assert_eq!(padding(0, later(3)).delay(ms(10), ms(40)), ms(0), "less than a block is never found");
        assert!(padding(0, later(3)).beside_others().delay(ms(10), ms(40)) >= ms(40));
    }

    #[test]
    fn the_memory_of_a_tenant_is_bounded() {
        let sent = Sent::new();
        sent.note(&keys(0, 4 * BLOCKS_MAX as u64), Time::ZERO);
        let generations = sent.generations.lock().unwrap();
        assert!(generations.young.len() <= BLOCKS_MAX && generations.old.len() <= BLOCKS_MAX);
    }
}
