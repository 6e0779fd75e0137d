use std::{collections::HashMap, hash::BuildHasherDefault};

use baton_kv::{BlockKey, KeyHasher};
use baton_units::Time;

use crate::reuse::Reuse;

const NONE: u32 = u32::MAX;

/// Order in which one replica would evict its blocks, as far as the router can tell: touched at dispatch and at a response's end,
/// corrected by the engine's events.
#[derive(Debug)]
pub(crate) struct Mirror {
    nodes: Vec<Node>,
    unused: Vec<u32>,
    places: HashMap<BlockKey, u32, BuildHasherDefault<KeyHasher>>,
    oldest: u32,
    youngest: u32,
    pinned: usize,
}

/// A block in the mirror.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node {
    pub(crate) key: BlockKey,
    pub(crate) last_used: Time,
    /// Blocks before it in its chain.
    pub(crate) depth: u32,
    pub(crate) reused: bool,
    /// Requests in flight whose prompt has it.
    pins: u32,
    older: u32,
    younger: u32,
}

impl Default for Mirror {
    fn default() -> Self {
        Self { nodes: Vec::new(), unused: Vec::new(), places: HashMap::default(), oldest: NONE, youngest: NONE, pinned: 0 }
    }
}

impl Mirror {
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Distinct blocks pinned by requests in flight.
    pub(crate) fn pinned(&self) -> usize {
        self.pinned
    }

    pub(crate) fn is_pinned(&self, key: BlockKey) -> bool {
        self.places.get(&key).is_some_and(|&place| self.nodes[place as usize].pins > 0)
    }

    /// A request with this prompt was sent: its blocks are in use from now on.
    pub(crate) fn pin(&mut self, keys: &[BlockKey], reuse: &mut Reuse, now: Time) {
        // From the chain's end, so that heads are younger and a chain goes from its tail.
        for (depth, key) in keys.iter().enumerate().rev() {
            let (place, existed) = self.touch(*key, depth as u32, now, |node| {
                if now > node.last_used {
                    reuse.see(node.reused, now.since(node.last_used), true);
                }
            });
            let node = &mut self.nodes[place as usize];
            node.reused |= existed;
            node.pins += 1;
            self.pinned += usize::from(node.pins == 1);
        }
    }

    /// The request ended: its prompt's blocks are unpinned, and all blocks of prompt and output are as young as can be.
    pub(crate) fn unpin(&mut self, prompt: &[BlockKey], all: &[BlockKey], now: Time) {
        for (depth, key) in all.iter().enumerate().rev() {
            self.touch(*key, depth as u32, now, |_| {});
        }
        for key in prompt {
            let Some(&place) = self.places.get(key) else { continue };
            let node = &mut self.nodes[place as usize];
            if node.pins > 0 {
                node.pins -= 1;
                self.pinned -= usize::from(node.pins == 0);
            }
        }
    }

    /// The engine says that it has the block.
    pub(crate) fn confirm(&mut self, key: BlockKey, now: Time) {
        if !self.places.contains_key(&key) {
            self.touch(key, 0, now, |_| {});
        }
    }

    pub(crate) fn remove(&mut self, key: BlockKey) {
        if let Some(place) = self.places.remove(&key) {
            self.unlink(place);
            self.pinned -= usize::from(self.nodes[place as usize].pins > 0);
            self.unused.push(place);
        }
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Removes the oldest unpinned blocks until `limit` are left, and tells each.
    pub(crate) fn evict_to(&mut self, limit: usize, reuse: &mut Reuse, now: Time, mut on_evicted: impl FnMut(BlockKey)) {
        let mut place = self.oldest;
        while self.len() > limit && place != NONE {
            let node = self.nodes[place as usize];
            place = node.younger;
            if node.pins == 0 {
                reuse.see(node.reused, now.since(node.last_used), false);
                self.remove(node.key);
                on_evicted(node.key);
            }
        }
    }

    /// Unpinned blocks, the next to be evicted first.
    pub(crate) fn victims(&self) -> impl Iterator<Item = &Node> {
        let next = |place: u32| (place != NONE).then(|| &self.nodes[place as usize]);
        std::iter::successors(next(self.oldest), move |node| next(node.younger)).filter(|node| node.pins == 0)
    }

    fn touch(&mut self, key: BlockKey, depth: u32, now: Time, on_old: impl FnOnce(&Node)) -> (u32, bool) {
        if let Some(&place) = self.places.get(&key) {
            on_old(&self.nodes[place as usize]);
            self.unlink(place);
            self.nodes[place as usize].last_used = now;
            self.link(place);
            return (place, true);
        }
        let node = Node { key, last_used: now, depth, reused: false, pins: 0, older: NONE, younger: NONE };
        let place = self.unused.pop().unwrap_or(self.nodes.len() as u32);
        if place as usize == self.nodes.len() {
            self.nodes.push(node);
        } else {
            self.nodes[place as usize] = node;
        }
        self.places.insert(key, place);
        self.link(place);
        (place, false)
    }

    fn link(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.youngest, place);
        self.nodes[place as usize].older = older;
        self.nodes[place as usize].younger = NONE;
        if older == NONE {
            self.oldest = place;
        } else {
            self.nodes[older as usize].younger = place;
        }
    }

    fn unlink(&mut self, place: u32) {
        let Node { older, younger, .. } = self.nodes[place as usize];
        if older == NONE {
            self.oldest = younger;
        } else {
            self.nodes[older as usize].younger = younger;
        }
        if younger == NONE {
            self.youngest = older;
        } else {
            self.nodes[younger as usize].older = older;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn keys(from: u64, count: usize) -> Vec<BlockKey> {
        (0..count as u64).map(|place| BlockKey((from << 8) + place)).collect()
    }

    proptest! {
        /// Against a list of keys from oldest to youngest.
        #[test]
        fn the_mirror_evicts_what_a_plain_list_would(
            uses in prop::collection::vec((0u64..6, 1usize..5, any::<bool>()), 1..60),
            limit in 1usize..12,
        ) {
            let (mut mirror, mut reuse) = (Mirror::default(), Reuse::default());
            let mut list: Vec<BlockKey> = Vec::new();
            let mut pinned: Vec<Vec<BlockKey>> = Vec::new();
            for (moment, (from, count, keep)) in uses.into_iter().enumerate() {
                let (chain, now) = (keys(from, count), Time(moment as u64 * 1_000_000));
                let touch = |list: &mut Vec<BlockKey>| {
                    for key in chain.iter().rev() {
                        list.retain(|other| other != key);
                        list.push(*key);
                    }
                };
                mirror.pin(&chain, &mut reuse, now);
                touch(&mut list);
                if keep {
                    pinned.push(chain.clone());
                } else {
                    mirror.unpin(&chain, &chain, now);
                    touch(&mut list);
                }
                if pinned.len() > 3 {
                    let chain = pinned.remove(0);
                    mirror.unpin(&chain, &[], now);
                }
                let used = |key: &BlockKey| pinned.iter().flatten().any(|other| other == key);
                let mut evicted = Vec::new();
                mirror.evict_to(limit, &mut reuse, now, |key| evicted.push(key));
                let over = list.len().saturating_sub(limit);
                let expected: Vec<BlockKey> = list.iter().filter(|key| !used(key)).take(over).copied().collect();
                prop_assert_eq!(&evicted, &expected);
                list.retain(|key| !expected.contains(key));
                prop_assert_eq!(mirror.victims().map(|node| node.key).collect::<Vec<_>>(), list.iter().filter(|key| !used(key)).copied().collect::<Vec<_>>());
                prop_assert_eq!(mirror.pinned(), list.iter().filter(|key| used(key)).count());
            }
        }
    }
}
