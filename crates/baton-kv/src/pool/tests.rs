//! The pool beside a slow, obvious model, with a memory that shows what a block really holds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use proptest::prelude::*;

use super::*;
use crate::{CacheDomain, EngineHash, KeyDomain};

const SIZE: BlockSize = BlockSize::new(2).unwrap();
const TOTAL: u32 = 12;

fn domain(index: usize) -> Arc<CacheDomain> {
    let public = KeyDomain { model: "m", adapter: None, salt: None };
    let salted = KeyDomain { salt: Some("tenant"), ..public };
    let domains = [public, salted, KeyDomain { adapter: Some("lora"), ..public }, salted, KeyDomain { salt: Some("other"), ..public }];
    Arc::new(CacheDomain::with_public(domains[index], Blocks(if index < FIRST_SHARING { 0 } else { PUBLIC })))
}

/// Domains from this one on share their first blocks with the one without salt.
const FIRST_SHARING: usize = 3;
const PUBLIC: u32 = 2;

fn keys(domain: &CacheDomain, tokens: &[u32]) -> Vec<BlockKey> {
    domain.keys(tokens, SIZE)
}

/// Whose block number `at` of a chain in the domain is.
fn owner(domain: usize, at: usize) -> usize {
    if domain >= FIRST_SHARING && at < PUBLIC as usize { 0 } else { domain }
}

/// Domain and all tokens up to the end of a block: what the block is found by.
type Prefix = (usize, Vec<u32>);

/// Of the last block of these tokens.
fn prefix(domain: usize, tokens: &[u32]) -> Prefix {
    (owner(domain, tokens.len() / SIZE.get() as usize - 1), tokens.to_vec())
}

/// What the pool tells, with contents in place of hashes.
#[derive(Debug, PartialEq)]
enum Told {
    Stored(BlockKey),
    Removed(BlockKey),
    Cleared,
}

/// Blocks as numbers that are never used again; references are counted, not kept.
#[derive(Default)]
struct Model {
    next: u64,
    cached: BTreeMap<Prefix, u64>,
    /// Least recently used first.
    unused: Vec<u64>,
    told: Vec<Told>,
}

struct Sequence {
    table: BlockTable,
    domain: usize,
    tokens: Vec<u32>,
    model: Vec<u64>,
    /// Leading blocks that were cached or tried.
    tried: usize,
    before_reset: bool,
}

struct Harness {
    pool: KvPool,
    model: Model,
    sequences: Vec<Sequence>,
    /// Domain and token of each position, written and copied as an executor would.
    memory: Vec<Vec<(usize, u32)>>,
    replayed: BTreeSet<EngineHash>,
}

impl Harness {
    fn new() -> Self {
        Self {
            pool: KvPool::new(Blocks(TOTAL), SIZE),
            model: Model::default(),
            sequences: Vec::new(),
            memory: vec![vec![(usize::MAX, 0); SIZE.get() as usize]; TOTAL as usize],
            replayed: BTreeSet::new(),
        }
    }

    fn used(&self) -> BTreeSet<u64> {
        self.sequences.iter().flat_map(|sequence| sequence.model.iter().copied()).collect()
    }

    fn key(prefix: &Prefix) -> BlockKey {
        *keys(&domain(prefix.0), &prefix.1).last().unwrap()
    }

    fn prefix_of(&self, block: u64) -> Option<Prefix> {
        self.model.cached.iter().find(|entry| *entry.1 == block).map(|entry| entry.0.clone())
    }

    /// Model of an allocation: evict if no block is free.
    fn allocate(&mut self) -> u64 {
        if self.used().len() + self.model.unused.len() == TOTAL as usize {
            let victim = self.model.unused.remove(0);
            let victim = self.prefix_of(victim).unwrap();
            self.model.cached.remove(&victim);
            self.model.told.push(Told::Removed(Self::key(&victim)));
        }
        self.model.next += 1;
        self.model.next
    }

    /// Model of a block that lost a reference.
    fn dropped(&mut self, block: u64) {
        if !self.used().contains(&block) && self.prefix_of(block).is_some() {
            self.model.unused.push(block);
        }
    }

    fn admit(&mut self, domain_index: usize, tokens: &[u32]) {
        let domain = domain(domain_index);
        let keys = keys(&domain, tokens);
        let limit = Blocks((tokens.len() as u32).saturating_sub(1) / SIZE.get());
        let found = self.pool.find_prefix(&domain, &keys, tokens, limit);
        let expected: Vec<u64> = (1..=limit.0 as usize)
            .map_while(|blocks| self.model.cached.get(&prefix(domain_index, &tokens[..blocks * SIZE.get() as usize])).copied())
            .collect();
        assert_eq!(found.len().0 as usize, expected.len(), "the hit is the longest cached prefix of the domain");
        let hit = expected.len() * SIZE.get() as usize;
        self.model.unused.retain(|block| !expected.contains(block));
        self.sequences.push(Sequence {
            table: self.pool.take_prefix(found),
            domain: domain_index,
            tokens: tokens[..hit].to_vec(),
            tried: expected.len(),
            model: expected,
            before_reset: false,
        });
        let index = self.sequences.len() - 1;
        if !self.append(index, &tokens[hit..]) {
            self.release(index);
        }
    }

    /// Computes tokens of a sequence; false when the pool is out of blocks, and then nothing may have changed.
    fn append(&mut self, index: usize, tokens: &[u32]) -> bool {
        let sequence = &self.sequences[index];
        let (start, size) = (sequence.tokens.len(), SIZE.get() as usize);
        let end = start + tokens.len();
        let shares = |block: u64| self.sequences.iter().filter(|other| other.model.contains(&block)).count() > 1;
        let copied: Vec<usize> = (start / size..sequence.model.len().min(end.div_ceil(size)))
            .filter(|&at| shares(sequence.model[at]) || self.prefix_of(sequence.model[at]).is_some())
            .collect();
        let needed = end.div_ceil(size).saturating_sub(sequence.model.len()) + copied.len();
        let available = TOTAL as usize - self.used().len();
        let mut copies = Vec::new();
        let sequence = &mut self.sequences[index];
        let reserved = self.pool.reserve(&mut sequence.table, start as u32..end as u32, &mut copies);
        if needed > available {
            assert_eq!(reserved, Err(OutOfBlocks { needed: Blocks(needed as u32), available: Blocks(available as u32) }));
            return false;
        }
        assert_eq!(reserved, Ok(()));
        for &at in copied.iter().rev() {
            let before = self.sequences[index].model[at];
            let copy = self.allocate();
            self.sequences[index].model[at] = copy;
            self.sequences[index].tried = self.sequences[index].tried.min(at);
            self.dropped(before);
        }
        while self.sequences[index].model.len() < end.div_ceil(size) {
            let block = self.allocate();
            self.sequences[index].model.push(block);
        }
        self.execute(index, tokens, &copies);
        self.commit(index);
        true
    }

    fn execute(&mut self, index: usize, tokens: &[u32], copies: &[(BlockId, BlockId)]) {
        for (from, to) in copies {
            self.memory[to.index()] = self.memory[from.index()].clone();
        }
        let sequence = &mut self.sequences[index];
        for &token in tokens {
            let position = sequence.tokens.len();
            let block = sequence.table.blocks()[position / SIZE.get() as usize];
            assert_eq!(self.pool.references(block), 1, "a shared block is never written");
            assert!(!self.pool.is_cached(block), "a cached block is never written");
            let owner = owner(sequence.domain, position / SIZE.get() as usize);
            self.memory[block.index()][position % SIZE.get() as usize] = (owner, token);
            sequence.tokens.push(token);
        }
    }

    fn commit(&mut self, index: usize) {
        let sequence = &mut self.sequences[index];
        let keys = keys(sequence.table.domain(), &sequence.tokens);
        self.pool.commit(&mut sequence.table, &keys, &sequence.tokens);
        if sequence.before_reset {
            return;
        }
        let tried = std::mem::replace(&mut sequence.tried, keys.len());
        for at in tried..keys.len() {
            let sequence = &self.sequences[index];
            let prefix = prefix(sequence.domain, &sequence.tokens[..(at + 1) * SIZE.get() as usize]);
            let own = sequence.model[at];
            if at > 0 && self.prefix_of(sequence.model[at - 1]).is_none() {
                break;
            }
            match self.model.cached.get(&prefix).copied() {
                None => {
                    self.model.told.push(Told::Stored(Self::key(&prefix)));
                    self.model.cached.insert(prefix, own);
                }
                Some(cached) if cached != own => {
                    self.sequences[index].model[at] = cached;
                    self.model.unused.retain(|&block| block != cached);
                    self.dropped(own);
                }
                Some(_) => {}
            }
        }
    }

    fn fork(&mut self, index: usize) {
        let parent = &self.sequences[index];
        let table = self.pool.fork(&parent.table);
        let &Sequence { domain, tried, before_reset, .. } = parent;
        let child = Sequence { table, domain, tokens: parent.tokens.clone(), model: parent.model.clone(), tried, before_reset };
        self.sequences.push(child);
    }

    fn release(&mut self, index: usize) {
        let sequence = self.sequences.remove(index);
        self.pool.release(sequence.table);
        for block in sequence.model.into_iter().rev() {
            self.dropped(block);
        }
    }

    fn reset(&mut self) {
        self.pool.reset_cache();
        for sequence in &mut self.sequences {
            sequence.before_reset = true;
        }
        self.model.cached.clear();
        self.model.unused.clear();
        self.model.told.push(Told::Cleared);
    }

    fn check(&mut self) {
        let pool = &self.pool;
        assert_eq!(pool.free() + pool.used() + pool.reclaimable(), pool.total());
        assert_eq!(pool.used().0 as usize, self.used().len());
        assert_eq!(pool.reclaimable().0 as usize, self.model.unused.len());
        for block in (0..TOTAL).map(BlockId) {
            let tables = self.sequences.iter().filter(|sequence| sequence.table.blocks().contains(&block)).count();
            assert_eq!(pool.references(block) as usize, tables, "references are tables");
        }
        self.check_sharing();
        for sequence in &self.sequences {
            let read = sequence.table.blocks().iter().flat_map(|block| self.memory[block.index()].iter().copied());
            let owners = (0..).map(|position: usize| owner(sequence.domain, position / SIZE.get() as usize));
            let expected = owners.zip(sequence.tokens.iter().copied());
            assert!(read.take(sequence.tokens.len()).eq(expected), "a table reads back its own tokens");
        }
        self.check_events();
    }

    /// Tables share blocks exactly as in the model.
    fn check_sharing(&self) {
        let (mut forward, mut back) = (BTreeMap::new(), BTreeMap::new());
        for sequence in &self.sequences {
            assert_eq!(sequence.table.blocks().len(), sequence.model.len());
            for (&block, &model) in sequence.table.blocks().iter().zip(&sequence.model) {
                assert_eq!(*forward.entry(model).or_insert(block), block);
                assert_eq!(*back.entry(block).or_insert(model), model);
                assert_eq!(self.pool.is_cached(block), self.prefix_of(model).is_some());
            }
        }
    }

    fn check_events(&mut self) {
        let mut told = Vec::new();
        for event in self.pool.take_events() {
            match event {
                KvEvent::Stored { hashes, parent, tokens, .. } => {
                    assert_eq!(tokens.len(), hashes.len() * SIZE.get() as usize);
                    assert!(parent.is_none_or(|parent| self.replayed.contains(&parent)), "a stored block's parent is cached");
                    for hash in hashes {
                        assert!(self.replayed.insert(hash), "stored once");
                        told.push(Told::Stored(BlockKey(hash.0)));
                    }
                }
                KvEvent::Removed { hashes } => {
                    for hash in hashes {
                        assert!(self.replayed.remove(&hash), "removed once, after it was stored");
                        told.push(Told::Removed(BlockKey(hash.0)));
                    }
                }
                KvEvent::Cleared => {
                    self.replayed.clear();
                    told.push(Told::Cleared);
                }
            }
        }
        assert_eq!(told, std::mem::take(&mut self.model.told), "events in the order in which things happen");
        let content: BTreeSet<_> = self.model.cached.keys().map(|prefix| EngineHash(Self::key(prefix).0)).collect();
        assert_eq!(self.replayed, content, "events replayed are the content");
    }
}

#[derive(Debug, Clone)]
enum Operation {
    Admit(usize, Vec<u32>),
    Append(usize, Vec<u32>),
    /// Computes the last tokens again, as a forked choice does with the prompt's last one.
    Rewrite(usize),
    Fork(usize),
    Release(usize),
    Reset,
}

fn operation() -> impl Strategy<Value = Operation> {
    let tokens = |most| prop::collection::vec(0u32..2, 1..most);
    prop_oneof![
        6 => (0usize..5, tokens(12)).prop_map(|(domain, tokens)| Operation::Admit(domain, tokens)),
        6 => (0usize..8, tokens(4)).prop_map(|(index, tokens)| Operation::Append(index, tokens)),
        2 => (0usize..8).prop_map(Operation::Rewrite),
        3 => (0usize..8).prop_map(Operation::Fork),
        5 => (0usize..8).prop_map(Operation::Release),
        1 => Just(Operation::Reset),
    ]
}

impl Harness {
    fn apply(&mut self, operation: Operation) {
        let count = self.sequences.len();
        match operation {
            Operation::Admit(domain, tokens) => self.admit(domain, &tokens),
            Operation::Reset => self.reset(),
            Operation::Append(..) | Operation::Rewrite(_) | Operation::Fork(_) | Operation::Release(_) if count == 0 => {}
            Operation::Append(index, tokens) => _ = self.append(index % count, &tokens),
            Operation::Rewrite(index) => self.rewrite(index % count),
            Operation::Fork(index) => self.fork(index % count),
            Operation::Release(index) => self.release(index % count),
        }
    }

    fn rewrite(&mut self, index: usize) {
        if let Some(token) = self.sequences[index].tokens.pop()
            && !self.append(index, &[token])
        {
            self.sequences[index].tokens.push(token);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]
    #[test]
    fn the_pool_agrees_with_a_slow_model(operations in prop::collection::vec(operation(), 1..60)) {
        let mut harness = Harness::new();
        for operation in operations {
            harness.apply(operation);
            harness.check();
        }
        while !harness.sequences.is_empty() {
            harness.release(0);
            harness.check();
        }
        prop_assert_eq!(harness.pool.available(), harness.pool.total());
    }
}

/// Fills a table with tokens whose blocks have the given keys.
fn fill(pool: &mut KvPool, domain_index: usize, keys: &[BlockKey], tokens: &[u32]) -> BlockTable {
    let mut table = pool.new_table(domain(domain_index));
    pool.reserve(&mut table, 0..tokens.len() as u32, &mut Vec::new()).unwrap();
    pool.commit(&mut table, keys, tokens);
    table
}

fn hit(pool: &KvPool, domain_index: usize, keys: &[BlockKey], tokens: &[u32]) -> u32 {
    pool.find_prefix(&domain(domain_index), keys, tokens, Blocks(u32::MAX)).len().0
}

#[test]
fn a_colliding_key_never_serves_other_tokens_another_parent_or_another_domain() {
    let mut pool = KvPool::new(Blocks(8), SIZE);
    let forced = [BlockKey(1), BlockKey(2)];
    let first = fill(&mut pool, 0, &forced, &[10, 11, 12, 13]);
    assert_eq!(hit(&pool, 0, &forced, &[10, 11, 12, 13]), 2);
    assert_eq!(hit(&pool, 0, &forced, &[10, 99, 12, 13]), 0, "other tokens under the same key");
    assert_eq!(hit(&pool, 0, &forced, &[10, 11, 12, 99]), 1, "other tokens in the second block");
    assert_eq!(hit(&pool, 0, &forced[1..], &[12, 13]), 0, "equal tokens at another place in the chain");
    assert_eq!(hit(&pool, 1, &forced, &[10, 11, 12, 13]), 0, "another salt");
    assert_eq!(hit(&pool, 2, &forced, &[10, 11, 12, 13]), 0, "another adapter");
    // The loser of a collision is not cached, nor what follows it, and takes nothing of the winner's.
    let second = fill(&mut pool, 1, &forced, &[10, 11, 12, 13]);
    assert!(second.blocks().iter().all(|block| !first.blocks().contains(block) && !pool.is_cached(*block)));
    let third = fill(&mut pool, 0, &[BlockKey(3), BlockKey(2)], &[20, 21, 12, 13]);
    assert!(pool.is_cached(third.blocks()[0]) && !pool.is_cached(third.blocks()[1]));
    assert_eq!(hit(&pool, 0, &[BlockKey(3), BlockKey(2)], &[20, 21, 12, 13]), 1);
    for table in [first, second, third] {
        pool.release(table);
    }
    assert_eq!((pool.reclaimable(), pool.free()), (Blocks(3), Blocks(5)));
}

/// A name is all of a block's content, whatever its size, and tells what it follows as tokens do.
#[test]
fn names_stand_for_the_tokens_of_their_blocks() {
    let mut pool = KvPool::with_names(Blocks(6), SIZE);
    let chain = |names: &[u32]| domain(0).keys(names, pool.content_size());
    let (names, other) = ([7, 8, 9], [7, 1, 9]);
    let (chains, others) = (chain(&names), chain(&other));
    let mut table = pool.new_table(domain(0));
    pool.reserve(&mut table, 0..6, &mut Vec::new()).unwrap();
    pool.commit(&mut table, &chains[..2], &names);
    assert_eq!((hit(&pool, 0, &chains, &names), hit(&pool, 0, &others, &other), pool.used()), (2, 1, Blocks(3)));
    pool.commit(&mut table, &chains, &names);
    assert_eq!(hit(&pool, 0, &chains, &names), 3);
    let told: Vec<(Vec<u32>, BlockSize)> = pool
        .take_events()
        .into_iter()
        .filter_map(|event| match event {
            KvEvent::Stored { tokens, block_size, .. } => Some((tokens, block_size)),
            KvEvent::Removed { .. } | KvEvent::Cleared => None,
        })
        .collect();
    assert_eq!(told, [(names.to_vec(), BlockSize::ONE)]);
    pool.release(table);
    assert_eq!(pool.reclaimable(), Blocks(3));
}

#[test]
fn tails_are_evicted_before_heads_and_older_chains_before_newer_ones() {
    let mut pool = KvPool::new(Blocks(6), SIZE);
    let chain = |first: u32| -> Vec<u32> { (first..first + 6).collect() };
    let all = |pool: &KvPool, first: u32| hit(pool, 0, &keys(&domain(0), &chain(first)), &chain(first));
    for first in [100, 200] {
        let table = fill(&mut pool, 0, &keys(&domain(0), &chain(first)), &chain(first));
        pool.release(table);
    }
    let mut lost = Vec::new();
    for blocks in 1..=6u32 {
        let mut table = pool.new_table(domain(0));
        pool.reserve(&mut table, 0..blocks * SIZE.get(), &mut Vec::new()).unwrap();
        lost.push((all(&pool, 100), all(&pool, 200)));
        pool.release(table);
        // The blocks come back free, so each round evicts one more.
    }
    assert_eq!(lost, [(2, 3), (1, 3), (0, 3), (0, 2), (0, 1), (0, 0)]);
}

#[test]
fn a_salt_travels_with_a_chain_s_first_block_and_an_adapter_with_every_event() {
    let mut pool = KvPool::new(Blocks(8), SIZE);
    let salted = fill(&mut pool, 1, &keys(&domain(1), &[1, 2, 3, 4]), &[1, 2, 3, 4]);
    let mut lora = fill(&mut pool, 2, &keys(&domain(2), &[1, 2]), &[1, 2]);
    pool.reserve(&mut lora, 2..4, &mut Vec::new()).unwrap();
    let events = pool.take_events();
    pool.commit(&mut lora, &keys(&domain(2), &[1, 2, 3, 4]), &[1, 2, 3, 4]);
    let hash = |domain_index, tokens: &[u32]| EngineHash(keys(&domain(domain_index), tokens).last().unwrap().0);
    let stored = |hashes, parent, tokens: &[u32], adapter: Option<&str>, salt: Option<&str>| KvEvent::Stored {
        hashes,
        parent,
        tokens: tokens.to_vec(),
        block_size: SIZE,
        adapter: adapter.map(str::to_owned),
        salt: salt.map(str::to_owned),
    };
    let whole = stored(vec![hash(1, &[1, 2]), hash(1, &[1, 2, 3, 4])], None, &[1, 2, 3, 4], None, Some("tenant"));
    assert_eq!(events, [whole, stored(vec![hash(2, &[1, 2])], None, &[1, 2], Some("lora"), None)]);
    let tail = stored(vec![hash(2, &[1, 2, 3, 4])], Some(hash(2, &[1, 2])), &[3, 4], Some("lora"), None);
    assert_eq!(pool.take_events(), [tail]);
    pool.release(salted);
    pool.release(lora);
}

#[test]
fn a_salt_behind_public_blocks_travels_with_the_first_block_that_it_hides() {
    let mut pool = KvPool::new(Blocks(8), SIZE);
    let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
    let mine = fill(&mut pool, 3, &keys(&domain(3), &tokens), &tokens);
    let hashes: Vec<EngineHash> = keys(&domain(3), &tokens).iter().map(|key| EngineHash(key.0)).collect();
    let stored = |from: usize, to: usize, salt: Option<&str>| KvEvent::Stored {
        hashes: hashes[from..to].to_vec(),
        parent: from.checked_sub(1).map(|before| hashes[before]),
        tokens: tokens[2 * from..2 * to].to_vec(),
        block_size: SIZE,
        adapter: None,
        salt: salt.map(str::to_owned),
    };
    assert_eq!(pool.take_events(), [stored(0, 2, None), stored(2, 4, Some("tenant"))]);
    // The public blocks are shared with another salt, which has its own copy of the others.
    let theirs = fill(&mut pool, 4, &keys(&domain(4), &tokens), &tokens);
    assert_eq!(mine.blocks()[..2], theirs.blocks()[..2]);
    assert!(theirs.blocks()[2..].iter().all(|block| !mine.blocks().contains(block) && pool.is_cached(*block)));
    assert!(
        matches!(&pool.take_events()[..], [KvEvent::Stored { parent: Some(parent), salt: Some(salt), .. }] if *parent == hashes[1] && salt == "other")
    );
    // A forced collision of keys at the place where the salts enter serves neither the other's.
    assert_eq!(hit(&pool, 4, &keys(&domain(3), &tokens), &tokens), 2);
    assert_eq!(hit(&pool, 0, &keys(&domain(3), &tokens), &tokens), 2);
    pool.release(mine);
    pool.release(theirs);
}

#[test]
fn a_pool_that_nobody_listens_to_keeps_no_events() {
    let mut pool = KvPool::new(Blocks(4), SIZE).without_events();
    let table = fill(&mut pool, 0, &keys(&domain(0), &[1, 2]), &[1, 2]);
    pool.release(table);
    pool.reset_cache();
    assert_eq!(pool.take_events(), []);
}
