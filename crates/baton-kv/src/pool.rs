use std::{ops::Range, sync::Arc};

use baton_units::{BlockSize, Blocks, Tokens};

use crate::{
    BlockKey, BlockTable, CacheDomain, KvEvent,
    lru::LruList,
    prefix_cache::{Parent, PrefixCache},
};

/// A block of KV in one replica's memory: an index below the pool's size, and the row of the executor's KV storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

impl BlockId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The pool cannot give the blocks asked for; nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{needed} more are needed and {available} can be had; free some or wait")]
pub struct OutOfBlocks {
    pub needed: Blocks,
    pub available: Blocks,
}

/// The KV blocks of one replica: who uses them, and what the unused ones still hold.
///
/// A block is in exactly one of three states: *used* (in at least one block table; its reference count is the number of tables),
/// *reclaimable* (in no table, but cached: full, findable by content, evicted when blocks run out), *free*.
///
/// - **Eviction** takes the least recently used reclaimable block. A released table frees its deepest block first, so a chain is
///   evicted from its tail and a cached block's parent is always cached.
/// - **One copy of each content**: when a sequence fills a block whose content is cached already (two requests computed the same
///   prefix at the same time), its table takes the cached block and its own is freed. vLLM keeps both and tells of both; one copy
///   leaves more room, and every hash is stored once and removed once. It is exact because the executor's KV depends on the tokens
///   alone.
/// - **Copy on write**: forked tables share all blocks; [`reserve`](Self::reserve) gives the one that writes first a copy.
#[derive(Debug, Clone)]
pub struct KvPool {
    size: BlockSize,
    /// Tables that contain the block.
    references: Vec<u32>,
    /// Blocks in no table and without content; the last is given first.
    free: Vec<BlockId>,
    reclaimable: LruList,
    cache: PrefixCache,
    /// Counts resets of the cache, so that a table knows which of them it has outlived.
    epoch: u64,
}

impl KvPool {
    pub fn new(blocks: Blocks, size: BlockSize) -> Self {
        Self::of(blocks, size, size)
    }

    /// A pool whose blocks are told apart by one number each, a name, in place of their tokens, for an engine that computes nothing:
    /// wherever tokens are asked for, names are given, and events tell of blocks of one token.
    pub fn with_names(blocks: Blocks, size: BlockSize) -> Self {
        Self::of(blocks, size, BlockSize::ONE)
    }

    fn of(blocks: Blocks, size: BlockSize, content: BlockSize) -> Self {
        Self {
            size,
            references: vec![0; blocks.0 as usize],
            free: (0..blocks.0).rev().map(BlockId).collect(),
            reclaimable: LruList::new(blocks.0),
            cache: PrefixCache::new(blocks.0, content),
            epoch: 0,
        }
    }

    /// Tells no events: for an engine whose events nobody takes, where they would pile up.
    #[must_use]
    pub fn without_events(mut self) -> Self {
        self.cache.stop_telling();
        self
    }

    pub fn block_size(&self) -> BlockSize {
        self.size
    }

    pub fn total(&self) -> Blocks {
        Blocks(self.references.len() as u32)
    }

    /// Numbers that tell a block's content: its tokens, or its name.
    pub fn content_size(&self) -> BlockSize {
        self.cache.size()
    }

    /// Blocks that hold nothing.
    pub fn free(&self) -> Blocks {
        Blocks(self.free.len() as u32)
    }

    /// Cached blocks that no table uses.
    pub fn reclaimable(&self) -> Blocks {
        Blocks(self.reclaimable.len())
    }

    /// Blocks that can be had: free or reclaimable.
    pub fn available(&self) -> Blocks {
        self.free() + self.reclaimable()
    }

    /// Blocks in at least one table.
    pub fn used(&self) -> Blocks {
        self.total() - self.available()
    }

    /// Number of tables that contain the block.
    pub fn references(&self, block: BlockId) -> u32 {
        self.references[block.index()]
    }

    pub fn is_cached(&self, block: BlockId) -> bool {
        self.cache.holds(block)
    }

    /// A table without blocks for a sequence of this domain.
    pub fn new_table(&self, domain: Arc<CacheDomain>) -> BlockTable {
        BlockTable { blocks: Vec::new(), committed: 0, epoch: self.epoch, domain }
    }

    /// The longest cached prefix of `tokens` in this domain, in full blocks and at most `limit` of them. `keys` are the domain's keys
    /// of the full blocks of `tokens`.
    pub fn find_prefix(&self, domain: &Arc<CacheDomain>, keys: &[BlockKey], tokens: &[u32], limit: Blocks) -> CachedPrefix {
        let mut prefix = CachedPrefix { domain: domain.clone(), blocks: Vec::new(), reclaimable: Blocks::ZERO };
        let chunks = tokens.chunks_exact(self.content_size().get() as usize);
        for (key, tokens) in keys.iter().zip(chunks).take(limit.0 as usize) {
            let parent = Parent::of(domain, prefix.blocks.len(), prefix.blocks.last().copied());
            let Some(block) = self.cache.find(*key, &parent, tokens) else { break };
            prefix.blocks.push(block);
            prefix.reclaimable += Blocks(u32::from(self.references[block.index()] == 0));
        }
        prefix
    }

    /// A table that begins with a prefix found since the pool last changed.
    pub fn take_prefix(&mut self, prefix: CachedPrefix) -> BlockTable {
        for &block in &prefix.blocks {
            self.take_reference(block);
        }
        let committed = prefix.blocks.len() as u32;
        BlockTable { blocks: prefix.blocks, committed, epoch: self.epoch, domain: prefix.domain }
    }

    /// Makes the positions `range` of a table writable: adds blocks, evicting cached ones where the pool is out of free ones, and
    /// replaces shared or cached blocks in the range by copies. Each copy to be made is appended to `copies` as (from, to); the
    /// bytes must be copied in order before the next step writes. The range must reach past every cached block of the table. On an
    /// error nothing has changed.
    pub fn reserve(&mut self, table: &mut BlockTable, range: Range<u32>, copies: &mut Vec<(BlockId, BlockId)>) -> Result<(), OutOfBlocks> {
        let needed = self.blocks_needed(table, range.clone());
        if needed > self.available() {
            return Err(OutOfBlocks { needed, available: self.available() });
        }
        if needed == Blocks::ZERO {
            return Ok(());
        }
        debug_assert!(table.committed <= range.end.div_ceil(self.size.get()), "a cached block would lose its parent");
        // From the deepest, so that parents stay behind their children in the order of eviction.
        for index in self.existing(table, &range).rev() {
            let shared = table.blocks[index];
            if self.is_writable(shared) {
                continue;
            }
            let copy = self.allocate();
            table.blocks[index] = copy;
            table.committed = table.committed.min(index as u32);
            copies.push((shared, copy));
            self.drop_reference(shared);
        }
        while (table.blocks.len() as u32) < Tokens(range.end).to_blocks(self.size).0 {
            let block = self.allocate();
            table.blocks.push(block);
        }
        Ok(())
    }

    /// Blocks that [`reserve`](Self::reserve) would allocate.
    pub fn blocks_needed(&self, table: &BlockTable, range: Range<u32>) -> Blocks {
        let copied = self.existing(table, &range).filter(|&index| !self.is_writable(table.blocks[index])).count() as u32;
        Tokens(range.end).to_blocks(self.size).saturating_sub(Blocks(table.blocks.len() as u32)) + Blocks(copied)
    }

    /// A table that shares all blocks of this one.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        for &block in &table.blocks {
            self.references[block.index()] += 1;
        }
        BlockTable { blocks: table.blocks.clone(), domain: table.domain.clone(), ..*table }
    }

    /// Caches the blocks of a table that have become full: `keys` are its domain's keys of all full blocks of `tokens`, whose KV
    /// exists. Nothing is cached behind a block that is not cached itself (its key collided), nor
    /// anything of a table that is older than the last reset.
    pub fn commit(&mut self, table: &mut BlockTable, keys: &[BlockKey], tokens: &[u32]) {
        if table.epoch != self.epoch {
            return;
        }
        let size = self.content_size().get() as usize;
        for index in table.committed as usize..keys.len() {
            let before = index.checked_sub(1).map(|before| table.blocks[before]);
            if before.is_some_and(|before| !self.cache.holds(before)) {
                break;
            }
            let parent = Parent::of(&table.domain, index, before);
            let tokens = &tokens[index * size..][..size];
            let own = table.blocks[index];
            if let Some(cached) = self.cache.find(keys[index], &parent, tokens) {
                if cached != own {
                    self.take_reference(cached);
                    table.blocks[index] = cached;
                    self.drop_reference(own);
                }
            } else if !self.cache.key_taken(keys[index]) {
                self.cache.insert(own, keys[index], parent, tokens, &table.domain);
            }
        }
        table.committed = table.committed.max(keys.len() as u32);
    }

    /// Gives a table's references back, deepest block first.
    pub fn release(&mut self, table: BlockTable) {
        for block in table.blocks.into_iter().rev() {
            self.drop_reference(block);
        }
    }

    /// Forgets all cached content, as when the weights change. Tables keep their blocks, but what they hold is never found again,
    /// nor what is computed on top of it.
    pub fn reset_cache(&mut self) {
        while let Some(block) = self.reclaimable.pop() {
            self.free.push(block);
        }
        self.cache.clear();
        self.epoch += 1;
    }

    /// Events since the last call, in the order in which they happened.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.cache.take_events()
    }

    /// Indices of the table's blocks that hold positions of the range.
    fn existing(&self, table: &BlockTable, range: &Range<u32>) -> Range<usize> {
        let size = self.size.get();
        (range.start / size) as usize..table.blocks.len().min(range.end.div_ceil(size) as usize)
    }

    fn is_writable(&self, block: BlockId) -> bool {
        self.references[block.index()] == 1 && !self.cache.holds(block)
    }

    fn allocate(&mut self) -> BlockId {
        let block = self.free.pop().unwrap_or_else(|| {
            let block = self.reclaimable.pop().expect("the caller counted the available blocks");
            self.cache.remove(block);
            block
        });
        self.references[block.index()] = 1;
        block
    }

    fn take_reference(&mut self, block: BlockId) {
        if self.references[block.index()] == 0 {
            self.reclaimable.remove(block);
        }
        self.references[block.index()] += 1;
    }

    fn drop_reference(&mut self, block: BlockId) {
        let references = &mut self.references[block.index()];
        *references -= 1;
        match (*references, self.cache.holds(block)) {
            (0, true) => self.reclaimable.push(block),
            (0, false) => self.free.push(block),
            _ => {}
        }
    }
}

/// A cached prefix; valid until the pool next changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedPrefix {
    domain: Arc<CacheDomain>,
    blocks: Vec<BlockId>,
    /// How many of the blocks no table uses yet: taking the prefix makes that many fewer available.
    pub reclaimable: Blocks,
}

impl CachedPrefix {
    pub fn len(&self) -> Blocks {
        Blocks(self.blocks.len() as u32)
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}

#[cfg(test)]
mod tests;
