use std::{collections::HashMap, hash::BuildHasherDefault, sync::Arc};

use baton_units::{BlockSize, Blocks};

use crate::{BlockId, BlockKey, EngineHash, KeyDomain, KeyHasher, KvEvent};

/// What besides the tokens decides the KV of a chain of blocks and who may find it, with its root key; the owned form of [`KeyDomain`], in
/// which the salt may enter behind the first blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDomain {
    pub model: String,
    pub adapter: Option<String>,
    pub salt: Option<String>,
    /// Leading blocks that are found whatever the salt; none where there is no salt.
    public: Blocks,
    root: BlockKey,
}

impl CacheDomain {
    pub fn new(domain: KeyDomain<'_>) -> Self {
        Self::with_public(domain, Blocks::ZERO)
    }

    /// One whose first `public` blocks are those of the domain without salt.
    pub fn with_public(domain: KeyDomain<'_>, public: Blocks) -> Self {
        let public = if domain.salt.is_some() { public } else { Blocks::ZERO };
        let first = if public == Blocks::ZERO { domain } else { KeyDomain { salt: None, ..domain } };
        Self {
            model: domain.model.to_owned(),
            adapter: domain.adapter.map(str::to_owned),
            salt: domain.salt.map(str::to_owned),
            public,
            root: first.root(),
        }
    }

    /// Leading blocks that any salt shares.
    pub fn public(&self) -> Blocks {
        self.public
    }

    /// The parent key of a chain's first block.
    pub fn root(&self) -> BlockKey {
        self.root
    }

    /// The parent key of the chain's block number `index`, of which the one before has the key `before`.
    fn parent_key(&self, index: usize, before: BlockKey) -> BlockKey {
        self.salt_at(index).map_or(before, |salt| before.salted(salt))
    }

    /// The key of the chain's next block behind those with the keys `before`.
    pub fn next_key(&self, before: &[BlockKey], tokens: &[u32]) -> BlockKey {
        let last = before.last().copied().unwrap_or(self.root);
        self.parent_key(before.len(), last).child(tokens)
    }

    /// Keys of the full blocks of `tokens`, first block first; a last part that fills no block has no key.
    pub fn keys(&self, tokens: &[u32], size: BlockSize) -> Vec<BlockKey> {
        let blocks = tokens.chunks_exact(size.get() as usize).enumerate();
        let next = |before: &mut BlockKey, (index, tokens): (usize, &[u32])| {
            *before = self.parent_key(index, *before).child(tokens);
            Some(*before)
        };
        blocks.scan(self.root, next).collect()
    }

    /// The salt that enters with the chain's block number `index`, other than the first.
    fn salt_at(&self, index: usize) -> Option<&str> {
        self.salt.as_deref().filter(|_| index > 0 && index == self.public.0 as usize)
    }

    /// The salt of the first block.
    fn first_salt(&self) -> Option<&str> {
        self.salt.as_deref().filter(|_| self.public == Blocks::ZERO)
    }
}

/// The block that a cached block continues. The physical block is meant, not its key: see [`PrefixCache`].
#[derive(Debug, Clone)]
pub(crate) enum Parent {
    Root(Arc<CacheDomain>),
    /// The last public block of a chain that goes on under a salt.
    Public(BlockId, Arc<CacheDomain>),
    Block(BlockId),
}

impl Parent {
    /// Of the block number `index` in a chain of the domain, behind `before`.
    pub(crate) fn of(domain: &Arc<CacheDomain>, index: usize, before: Option<BlockId>) -> Self {
        match before {
            None => Self::Root(domain.clone()),
            Some(block) if domain.salt_at(index).is_some() => Self::Public(block, domain.clone()),
            Some(block) => Self::Block(block),
        }
    }

    fn block(&self) -> Option<BlockId> {
        match self {
            Self::Root(_) => None,
            Self::Public(block, _) | Self::Block(block) => Some(*block),
        }
    }

    /// The salt that enters the chain here.
    fn salt(&self) -> Option<&str> {
        match self {
            Self::Root(domain) => domain.first_salt(),
            Self::Public(_, domain) => domain.salt.as_deref(),
            Self::Block(_) => None,
        }
    }
}

/// Whether what continues the one may be served as what continues the other.
impl PartialEq for Parent {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Root(one), Self::Root(other)) => {
                one.model == other.model && one.adapter == other.adapter && one.first_salt() == other.first_salt()
            }
            (Self::Public(block, domain), Self::Public(other, other_domain)) => block == other && domain.salt == other_domain.salt,
            (Self::Block(block), Self::Block(other)) => block == other,
            _ => false,
        }
    }
}

#[derive(Debug, Clone)]
struct Content {
    key: BlockKey,
    parent: Parent,
}

/// Finds full blocks by content, and tells of what it gained and lost.
///
/// A key only speeds the search up. A block is found when its stored tokens, its parent block and, at the chain's root, its domain
/// are those asked for, and where a salt enters the chain behind public blocks, the salt; the parent was found in the same way, so by
/// induction the whole prefix and the domain are equal. A second content whose key collides with a cached one is not cached at all.
///
/// The parent may be compared by its place in memory because a parent outlives its children in the cache: whoever uses a block
/// uses its parent too, blocks are freed from the deepest, and eviction goes in order of freeing.
#[derive(Debug, Clone)]
pub(crate) struct PrefixCache {
    /// Tokens of a block, or 1 where names stand for them.
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

    pub(crate) fn size(&self) -> BlockSize {
        self.size
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
        let parent_hash = parent.block().map(|block| {
            let parent = self.contents[block.index()].as_ref().expect("a parent is cached as long as its children");
            EngineHash(parent.key.0)
        });
        if let (Parent::Block(_), Some(parent), Some(KvEvent::Stored { hashes, tokens: stored, .. })) =
            (parent, parent_hash, events.last_mut())
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
            salt: parent.salt().map(str::to_owned),
        });
    }
}
