use std::sync::{Arc, atomic::Ordering};

use arc_swap::ArcSwap;

use super::holders::{HolderTable, Holders};
use crate::BlockKey;

/// Blocks from one anchor of a chain to the next; few in tests, so that short chains have some.
pub(super) const SPACING: usize = if cfg!(test) { 4 } else { 64 };
/// Anchors have room for this many times their share of all blocks.
const SPACE: usize = 2;

/// The holders of each chain's every 64th block once more: a table so small that the processor's caches keep it, so that a match waits
/// for memory only between the two anchors where it ends.
///
/// Anchors are put in after their block and taken away before it: an anchor's holders are holders of the block.
#[derive(Debug)]
pub(super) struct Anchors {
    table: HolderTable,
    /// More are not taken in, and none is used until the surplus is gone: a fleet whose chains all part right before an anchor has one
    /// for every block.
    most: usize,
}

impl Anchors {
    pub(super) fn new() -> Self {
        Self { table: HolderTable::new(), most: 0 }
    }

    pub(super) fn shared(&self) -> &Arc<Holders> {
        self.table.shared()
    }

    pub(super) fn published(&self) -> &Arc<ArcSwap<Holders>> {
        self.table.published()
    }

    pub(super) fn bytes(&self) -> usize {
        self.table.bytes()
    }

    /// Bytes that the anchors of `blocks` blocks take at most.
    pub(super) fn bytes_for(blocks: usize, words: usize) -> usize {
        HolderTable::bytes_for(most_of(blocks), words)
    }

    /// There will be no more than `blocks` blocks.
    pub(super) fn bound(&mut self, blocks: usize) {
        self.most = most_of(blocks);
    }

    pub(super) fn reserve(&mut self, blocks: usize) {
        self.table.reserve(most_of(blocks));
    }

    pub(super) fn set_replicas(&mut self, count: usize) {
        self.table.set_replicas(count);
    }

    /// The replica holds the block, which has `depth` blocks before it.
    pub(super) fn insert(&mut self, key: BlockKey, depth: u32, slot: usize) {
        if !is_anchor(depth as usize) {
            return;
        }
        if self.table.len() < self.most || self.table.knows(key) {
            self.table.insert(key, slot);
        } else {
            self.table.shared().missing.fetch_add(1, Ordering::Release);
        }
    }

    /// The replica will no longer hold the block.
    pub(super) fn remove(&mut self, key: BlockKey, depth: u32, slot: usize) {
        if !is_anchor(depth as usize) {
            return;
        }
        if self.table.shared().contains(key, slot) {
            self.table.remove(key, slot);
        } else {
            self.table.shared().missing.fetch_sub(1, Ordering::Release);
        }
    }
}

fn is_anchor(depth: usize) -> bool {
    depth % SPACING == SPACING - 1
}

fn most_of(blocks: usize) -> usize {
    SPACE * blocks.div_ceil(SPACING)
}
