//! Tokens of text that was seen before.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Tokens remembered in either of two generations; 4 bytes each, so at most 32 MiB in all.
const GENERATION_TOKENS: usize = 4 << 20;
/// What a piece costs beside its tokens, in tokens.
const PIECE_TOKENS: usize = 24;

/// Pieces by the 128-bit hash of their text: two equal ones by chance are not to be expected, and would mislead a belief only.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    generations: Mutex<Generations>,
}

type Map = HashMap<u128, Arc<[u32]>, BuildHasherDefault<Hashed>>;

#[derive(Debug, Default)]
pub(crate) struct Generations {
    young: Map,
    old: Map,
    young_tokens: usize,
}

impl Pieces {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    pub(crate) fn get(&mut self, key: u128) -> Option<&Arc<[u32]>> {
        if !self.young.contains_key(&key) {
            let piece = self.old.remove(&key)?;
            self.insert(key, piece);
        }
        // A piece that began a new generation is in the old one already.
        self.young.get(&key).or_else(|| self.old.get(&key))
    }

    /// Bounded by two generations: what was not used during the last one is forgotten.
    pub(crate) fn insert(&mut self, key: u128, piece: Arc<[u32]>) {
        self.young_tokens += piece.len() + PIECE_TOKENS;
        self.young.insert(key, piece);
        if self.young_tokens > GENERATION_TOKENS {
            self.old = std::mem::take(&mut self.young);
            self.young_tokens = 0;
        }
    }
}

/// Takes keys that are hashes as they are.
#[derive(Default)]
pub(crate) struct Hashed(u64);

impl Hasher for Hashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.0);
    }

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_and_keeps_what_is_used() {
        let mut pieces = Generations::default();
        let piece: Arc<[u32]> = vec![0; GENERATION_TOKENS / 4].into();
        for key in 0..40 {
            pieces.insert(key, piece.clone());
            pieces.get(0).expect("it is used all the time");
            assert!(pieces.young.len() + pieces.old.len() <= 12);
        }
        assert!(pieces.get(20).is_none());
    }
}
