use std::{collections::HashMap, hash::BuildHasherDefault, sync::Arc};

use baton_units::BlockSize;

use crate::{BlockId, BlockKey, EngineHash, KeyDomain, KeyHasher, KvEvent};

/// What besides the tokens decides the KV of a chain of blocks, with its root key; the owned form of [`KeyDomain`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDomain {
    pub model: String,
    pub adapter: Option<String>,
    pub salt: Option<String>,
    root: BlockKey,
}

impl CacheDomain {
    pub fn new(domain: KeyDomain<'_>) -> Self {
        Self {
            model: domain.model.to_owned(),
            adapter: domain.adapter.map(str::to_owned),
            salt: domain.salt.map(str::to_owned),
            root: domain.root(),
        }
    }

    /// The parent key of a chain's first block.
    pub fn root(&self) -> BlockKey {
        self.root
    }
}

/// The block that a cached block continues. The physical block is meant, not its key: see [`PrefixCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parent {
    Root(Arc<CacheDomain>),
    Block(BlockId),
}

#[derive(Debug, Clone)]
struct Content {
    key: BlockKey,
    parent: Parent,
}

/// Finds full blocks by content, and tells of what it gained and lost.
///
/// A key only speeds the search up. A block is found when its stored tokens, its parent block and, at the chain's root, its domain
/// are those asked for; the parent was found in the same way, so by induction the whole prefix and the domain are equal. A second
/// content whose key collides with a cached one is not cached at all.
///
/// The parent may be compared by its place in memory because a parent outlives its children in the cache: whoever uses a block
/// uses its parent too, blocks are freed from the deepest, and eviction goes in order of freeing.
#[derive(Debug, Clone)]
pub(crate) struct PrefixCache {
    size: BlockSize,
    by_key: HashMap<BlockKey, BlockId, BuildHasherDefault<KeyHasher>>,
    contents: Vec<Option<Content>>,
    /// Tokens of each cached block: `[blocks, block size]`.
    tokens: Vec<u32>,
    /// `None` when nobody listens.
    events: Option<Vec<KvEvent>>,
}

impl PrefixCache {
    pub(crate) fn new(blocks: u32, size: BlockSize) -> Self {
        Self {
            size,
            by_key: HashMap::default(),
            contents: vec![None; blocks as usize],
            tokens: vec![0; blocks as usize * size.get() as usize],
            events: Some(Vec::new()),
        }
    }

    pub(crate) fn holds(&self, block: BlockId) -> bool {
        self.contents[block.index()].is_some()
    }

    pub(crate) fn key_taken(&self, key: BlockKey) -> bool {
        self.by_key.contains_key(&key)
    }

    /// The block that holds `tokens` after `parent`.
    pub(crate) fn find(&self, key: BlockKey, parent: &Parent, tokens: &[u32]) -> Option<BlockId> {
        let block = *self.by_key.get(&key)?;
        let content = self.contents[block.index()].as_ref().expect("a key leads to a block with content");
        (self.tokens_of(block) == tokens && content.parent == *parent).then_some(block)
    }

    /// Caches a block whose key no other has.
    pub(crate) fn insert(&mut self, block: BlockId, key: BlockKey, parent: Parent, tokens: &[u32], domain: &CacheDomain) {
        let first = block.index() * self.size.get() as usize;
        self.tokens[first..first + tokens.len()].copy_from_slice(tokens);
        self.tell_stored(key, &parent, tokens, domain);
        self.contents[block.index()] = Some(Content { key, parent });
        let before = self.by_key.insert(key, block);
        debug_assert!(before.is_none(), "the caller asked whether the key is taken");
    }

    /// Forgets a cached block.
    pub(crate) fn remove(&mut self, block: BlockId) {
        let content = self.contents[block.index()].take().expect("only cached blocks are removed");
        self.by_key.remove(&content.key);
        let Some(events) = &mut self.events else { return };
        let hash = EngineHash(content.key.0);
        match events.last_mut() {
            Some(KvEvent::Removed { hashes }) => hashes.push(hash),
            Some(KvEvent::Stored { .. } | KvEvent::Cleared) | None => events.push(KvEvent::Removed { hashes: vec![hash] }),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.by_key.clear();
        self.contents.fill(None);
        if let Some(events) = &mut self.events {
            events.push(KvEvent::Cleared);
        }
    }

    pub(crate) fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub(crate) fn stop_telling(&mut self) {
        self.events = None;
    }

    fn tokens_of(&self, block: BlockId) -> &[u32] {
        let size = self.size.get() as usize;
        &self.tokens[block.index() * size..][..size]
    }

    /// Lengthens the last event when this block continues it, so that a prompt is one event rather than one per block.
    fn tell_stored(&mut self, key: BlockKey, parent: &Parent, tokens: &[u32], domain: &CacheDomain) {
        let Some(events) = &mut self.events else { return };
        let parent_hash = match parent {
            Parent::Root(_) => None,
            Parent::Block(block) => {
                let parent = self.contents[block.index()].as_ref().expect("a parent is cached as long as its children");
                Some(EngineHash(parent.key.0))
            }
        };
        if let (Some(parent), Some(KvEvent::Stored { hashes, tokens: stored, .. })) = (parent_hash, events.last_mut())
            && hashes.last() == Some(&parent)
        {
            hashes.push(EngineHash(key.0));
            stored.extend_from_slice(tokens);
            return;
        }
        events.push(KvEvent::Stored {
            hashes: vec![EngineHash(key.0)],
            parent: parent_hash,
            tokens: tokens.to_vec(),
            block_size: self.size,
            adapter: domain.adapter.clone(),
            salt: if parent_hash.is_none() { domain.salt.clone() } else { None },
        });
    }
}
