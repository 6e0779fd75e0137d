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
