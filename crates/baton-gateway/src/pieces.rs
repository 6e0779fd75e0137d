//! Tokens of text that was seen before.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What a piece costs beside its tokens: its place in a table that may be less than half full, and the heads of its allocation.
const PIECE_BYTES: usize = 112;

/// Pieces by the 128-bit hash of their text: two equal ones by chance are not to be expected, and would mislead a belief only.
#[derive(Debug)]
pub(crate) struct Pieces {
    generations: Mutex<Generations>,
}

type Map = HashMap<u128, Arc<[u32]>, BuildHasherDefault<Hashed>>;

#[derive(Debug)]
pub(crate) struct Generations {
    young: Map,
    old: Map,
    young_bytes: usize,
    /// As when it was young: a table does not shrink when pieces leave it.
    old_bytes: usize,
    bytes_max: usize,
}

impl Pieces {
    /// Takes at most `bytes` of memory, beside the moment in which a table grows.
    pub(crate) fn new(bytes: usize) -> Self {
        let generations = Generations { young: Map::default(), old: Map::default(), young_bytes: 0, old_bytes: 0, bytes_max: bytes / 2 };
        Self { generations: Mutex::new(generations) }
    }

    /// Memory in use.
    pub(crate) fn bytes(&self) -> usize {
        let generations = self.lock();
        generations.young_bytes + generations.old_bytes
    }

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
        self.young.get(&key)
    }

    /// Bounded by two generations: what was not used during the last one is forgotten, and a piece larger than one is not remembered.
    pub(crate) fn insert(&mut self, key: u128, piece: Arc<[u32]>) {
        let bytes = size_of_val(&*piece) + PIECE_BYTES;
        if bytes > self.bytes_max {
            return;
        }
        if self.young_bytes + bytes > self.bytes_max {
            self.old = std::mem::take(&mut self.young);
            self.old_bytes = std::mem::take(&mut self.young_bytes);
        }
        if self.young.insert(key, piece).is_none() {
            self.young_bytes += bytes;
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
        let bytes = 1 << 20;
        for length in [0, 1, 5, 1000, 30_000] {
            let pieces = Pieces::new(bytes);
            let piece: Arc<[u32]> = vec![0; length].into();
            let count = 4 * bytes / (4 * length + PIECE_BYTES);
            for key in 0..count as u128 {
                let mut generations = pieces.lock();
                generations.insert(key, piece.iter().copied().collect());
                generations.get(0).expect("it is used all the time");
                // Of a table a seventh stays free, each place has a byte of its own; an allocation of counted memory has two counts.
                let table = |map: &Map| map.capacity() * 8 / 7 * (size_of::<(u128, Arc<[u32]>)>() + 1);
                let tables = table(&generations.young) + table(&generations.old);
                let held = tables + (generations.young.len() + generations.old.len()) * (16 + 4 * length);
                drop(generations);
                // The least tables have four places.
                let told = pieces.bytes() + 256;
                assert!(held <= told && pieces.bytes() <= bytes, "{key}: {held} of {told}");
            }
            assert!(pieces.bytes() > bytes / 3, "it is used: {}", pieces.bytes());
            assert!(pieces.lock().get(1).is_none());
        }
    }

    #[test]
    fn a_piece_that_would_take_all_is_not_remembered() {
        let pieces = Pieces::new(1 << 10);
        pieces.lock().insert(1, vec![0; 10].into());
        pieces.lock().insert(2, vec![0; 1000].into());
        assert!(pieces.lock().get(2).is_none() && pieces.lock().get(1).is_some());
    }
}
