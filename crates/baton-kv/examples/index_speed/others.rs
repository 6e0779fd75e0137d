//! The maps behind a lock, for readers in other threads; and a concurrent map from block to holders alone, without anything of the
//! replicas: what the table of holders is measured against.

use std::sync::{
    Arc, RwLock,
    atomic::{AtomicU64, Ordering},
};

use baton_kv::{BlockKey, KvEvent, KvEventBatch};
use baton_units::{ReplicaId, Time};

use crate::{DOMAIN, Subject, maps::Maps};

#[derive(Default)]
pub(crate) struct Locked(Arc<RwLock<Maps>>);

const SOUND: &str = "nobody panicked";

impl Subject for Locked {
    fn apply(&mut self, replica: ReplicaId, batch: &KvEventBatch, now: Time) {
        self.0.write().expect(SOUND).apply(replica, batch, now);
    }

    fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.0.read().expect(SOUND).holds(replica, key)
    }

    fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        self.0.read().expect(SOUND).matches_into(keys, depths);
    }

    fn book(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time) {
        self.0.write().expect(SOUND).book(replica, keys, now);
    }

    fn reader(&self) -> impl FnMut(&[BlockKey], &mut Vec<u32>) + Send + 'static {
        let maps = self.0.clone();
        move |keys, depths| maps.read().expect(SOUND).matches_into(keys, depths)
    }
}

/// Up to 64 replicas.
#[derive(Default)]
pub(crate) struct Papaya(Arc<papaya::HashMap<u64, AtomicU64>>);

impl Subject for Papaya {
    fn apply(&mut self, replica: ReplicaId, batch: &KvEventBatch, _now: Time) {
        let (map, bit) = (self.0.pin(), 1 << replica.index());
        for event in &batch.events {
            match event {
                KvEvent::Stored { tokens, block_size, .. } => {
                    for key in baton_kv::chain_keys(DOMAIN.root(), tokens, *block_size) {
                        map.get_or_insert_with(key.0, || AtomicU64::new(0)).fetch_or(bit, Ordering::Relaxed);
                    }
                }
                KvEvent::Removed { hashes } => {
                    // The bench's hashes tell the key.
                    for key in hashes.iter().map(|hash| hash.0.rotate_right(7)) {
                        if map.get(&key).is_some_and(|set| set.fetch_and(!bit, Ordering::Relaxed) == bit) {
                            map.remove(&key);
                        }
                    }
                }
                KvEvent::Cleared => unreachable!("no engine here clears its cache"),
            }
        }
    }

    fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.0.pin().get(&key.0).is_some_and(|set| set.load(Ordering::Relaxed) >> replica.index() & 1 == 1)
    }

    fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        walk(&self.0, keys, depths);
    }

    fn book(&mut self, replica: ReplicaId, keys: &[BlockKey], _now: Time) {
        let map = self.0.pin();
        for key in keys {
            map.get_or_insert_with(key.0, || AtomicU64::new(0)).fetch_or(1 << replica.index(), Ordering::Relaxed);
        }
    }

    fn reader(&self) -> impl FnMut(&[BlockKey], &mut Vec<u32>) + Send + 'static {
        let map = self.0.clone();
        move |keys, depths| walk(&map, keys, depths)
    }
}

fn walk(map: &papaya::HashMap<u64, AtomicU64>, keys: &[BlockKey], depths: &mut Vec<u32>) {
    depths.clear();
    depths.resize(64, 0);
    let map = map.pin();
    let mut left = u64::MAX;
    for (depth, key) in keys.iter().enumerate() {
        let both = left & map.get(&key.0).map_or(0, |set| set.load(Ordering::Relaxed));
        let mut gone = left ^ both;
        while gone != 0 {
            depths[gone.trailing_zeros() as usize] = depth as u32;
            gone &= gone - 1;
        }
        left = both;
        if left == 0 {
            return;
        }
    }
    (0..64).filter(|slot| left >> slot & 1 == 1).for_each(|slot| depths[slot] = keys.len() as u32);
}
