//! The obvious structure: a hash map from block to holders, and for each replica maps of what it holds, of its engine's names and of
//! the order in which it would evict. A match walks block by block.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    hash::BuildHasherDefault,
    time::Duration,
};

use baton_kv::{BlockKey, EngineHash, KeyHasher, KvEvent, KvEventBatch};
use baton_units::{ReplicaId, Time};

use crate::{DOMAIN, Subject};

type ByKey<V> = HashMap<BlockKey, V, BuildHasherDefault<KeyHasher>>;

const LIFETIME: Duration = Duration::from_mins(2);
const NONE: u32 = u32::MAX;

#[derive(Default)]
pub(crate) struct Maps {
    blocks: ByKey<Block>,
    replicas: Vec<Replica>,
}

#[derive(Default)]
struct Block {
    /// One word for each 64 replicas.
    holders: Vec<u64>,
    follower: Option<BlockKey>,
    branches: bool,
}

struct Replica {
    stored: HashMap<EngineHash, BlockKey>,
    held: ByKey<Held>,
    expiries: BinaryHeap<Reverse<(Time, BlockKey)>>,
    order: Vec<Node>,
    places: ByKey<u32>,
    unused: Vec<u32>,
    oldest: u32,
    youngest: u32,
}

#[derive(Default)]
struct Held {
    confirmed: u32,
    expected_until: Time,
    queued: bool,
}

#[derive(Clone, Copy)]
struct Node {
    last_used: Time,
    pins: u32,
    older: u32,
    younger: u32,
}

impl Default for Replica {
    fn default() -> Self {
        Self {
            stored: HashMap::new(),
            held: ByKey::default(),
            expiries: BinaryHeap::new(),
            order: Vec::new(),
            places: ByKey::default(),
            unused: Vec::new(),
            oldest: NONE,
            youngest: NONE,
        }
    }
}

impl Subject for Maps {
    fn apply(&mut self, replica: ReplicaId, batch: &KvEventBatch, now: Time) {
        let slot = replica.index();
        if self.replicas.len() <= slot {
            self.replicas.resize_with(slot + 1, Replica::default);
        }
        for event in &batch.events {
            match event {
                KvEvent::Stored { hashes, tokens, block_size, .. } => {
                    let mut key = DOMAIN.root();
                    for (place, (hash, tokens)) in hashes.iter().zip(tokens.chunks_exact(block_size.get() as usize)).enumerate() {
                        let before = key;
                        key = key.child(tokens);
                        if place > 0
                            && let Some(block) = self.blocks.get_mut(&before)
                        {
                            block.follow(key);
                        }
                        let of = &mut self.replicas[slot];
                        of.stored.insert(*hash, key);
                        of.held.entry(key).or_default().confirmed += 1;
                        of.touch(key, now);
                        self.blocks.entry(key).or_default().insert(slot);
                    }
                }
                KvEvent::Removed { hashes } => hashes.iter().for_each(|hash| self.remove(slot, *hash)),
                KvEvent::Cleared => unreachable!("no engine here clears its cache"),
            }
        }
    }

    fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.blocks.get(&key).is_some_and(|block| block.contains(replica.index()))
    }

    fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        depths.clear();
        depths.resize(self.replicas.len(), 0);
        let Some(first) = keys.first().and_then(|key| self.blocks.get(key)) else { return };
        let mut left = first.holders.clone();
        left.resize(self.replicas.len().div_ceil(64), 0);
        for (depth, key) in keys.iter().enumerate() {
            let block = self.blocks.get(key);
            for (word, left) in left.iter_mut().enumerate() {
                let both = *left & block.and_then(|block| block.holders.get(word)).copied().unwrap_or(0);
                end(*left ^ both, word, depth, depths);
                *left = both;
            }
            if left.iter().all(|word| *word == 0) {
                return;
            }
        }
        for (word, left) in left.iter().enumerate() {
            end(*left, word, keys.len(), depths);
        }
    }

    fn book(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time) {
        let slot = replica.index();
        let pins = |of: &mut Replica, change: i32| {
            for key in keys.iter().rev() {
                let place = of.touch(*key, now);
                of.order[place as usize].pins = of.order[place as usize].pins.wrapping_add_signed(change);
            }
        };
        pins(&mut self.replicas[slot], 1);
        self.expect(slot, keys, now);
        pins(&mut self.replicas[slot], -1);
        self.expect(slot, keys, now);
    }

    fn reader(&self) -> impl FnMut(&[BlockKey], &mut Vec<u32>) + Send + 'static {
        |_: &[BlockKey], _: &mut Vec<u32>| unreachable!("one thread only: see `locked`")
    }
}

impl Maps {
    fn expect(&mut self, slot: usize, keys: &[BlockKey], now: Time) {
        let until = now + LIFETIME;
        for (place, key) in keys.iter().enumerate() {
            let block = self.blocks.entry(*key).or_default();
            block.insert(slot);
            if let Some(follower) = keys.get(place + 1) {
                block.follow(*follower);
            }
            let held = self.replicas[slot].held.entry(*key).or_default();
            if held.confirmed == 0 {
                held.expected_until = until;
                if !held.queued {
                    held.queued = true;
                    self.replicas[slot].expiries.push(Reverse((until, *key)));
                }
            }
        }
    }

    fn remove(&mut self, slot: usize, hash: EngineHash) {
        let of = &mut self.replicas[slot];
        let Some(key) = of.stored.remove(&hash) else { return };
        of.held.remove(&key);
        if let Some(place) = of.places.remove(&key) {
            of.unlink(place);
            of.unused.push(place);
        }
        if let Some(block) = self.blocks.get_mut(&key) {
            block.holders[slot / 64] &= !(1 << (slot % 64));
            if block.holders.iter().all(|word| *word == 0) {
                self.blocks.remove(&key);
            }
        }
    }
}

impl Block {
    fn insert(&mut self, slot: usize) {
        if self.holders.len() <= slot / 64 {
            self.holders.resize(slot / 64 + 1, 0);
        }
        self.holders[slot / 64] |= 1 << (slot % 64);
    }

    fn contains(&self, slot: usize) -> bool {
        self.holders.get(slot / 64).is_some_and(|word| word >> (slot % 64) & 1 == 1)
    }

    fn follow(&mut self, key: BlockKey) {
        match self.follower {
            None => self.follower = Some(key),
            Some(follower) => self.branches |= follower != key,
        }
    }
}

impl Replica {
    fn touch(&mut self, key: BlockKey, now: Time) -> u32 {
        let place = if let Some(&place) = self.places.get(&key) {
            self.unlink(place);
            place
        } else {
            let node = Node { last_used: now, pins: 0, older: NONE, younger: NONE };
            let place = self.unused.pop().unwrap_or(self.order.len() as u32);
            if place as usize == self.order.len() {
                self.order.push(node);
            } else {
                self.order[place as usize] = node;
            }
            self.places.insert(key, place);
            place
        };
        self.order[place as usize].last_used = now;
        self.link(place);
        place
    }

    fn link(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.youngest, place);
        (self.order[place as usize].older, self.order[place as usize].younger) = (older, NONE);
        if older == NONE {
            self.oldest = place;
        } else {
            self.order[older as usize].younger = place;
        }
    }

    fn unlink(&mut self, place: u32) {
        let Node { older, younger, .. } = self.order[place as usize];
        if older == NONE {
            self.oldest = younger;
        } else {
            self.order[older as usize].younger = younger;
        }
        if younger == NONE {
            self.youngest = older;
        } else {
            self.order[younger as usize].older = older;
        }
    }
}

fn end(mut gone: u64, word: usize, depth: usize, depths: &mut [u32]) {
    while gone != 0 {
        depths[word * 64 + gone.trailing_zeros() as usize] = depth as u32;
        gone &= gone - 1;
    }
}
