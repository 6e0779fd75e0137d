use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    time::Duration,
};

use baton_units::{BlockSize, Incarnation, ReplicaId, Time};

use crate::{BlockKey, EngineHash, KeyDomain, KvEvent, KvEventBatch};

/// Batches kept while an earlier one is missing; one more and the index goes on without the missing ones.
const PENDING_BATCHES_MAX: usize = 1024;

/// The router's belief of which replica holds which block, over the whole fleet.
///
/// Two sources feed it: engine events (*confirmed* entries, counted as often as the engine stored them) and the router's own
/// dispatches (*expected* entries, which end with their lifetime unless the engine confirms them). A replica whose events have a
/// gap is *doubtful* until the missing batches are applied or the engine clears its cache or restarts.
///
/// Replica ids are dense (their index is a bit position); memory is one entry a distinct block plus one a (replica, block).
#[derive(Debug)]
pub struct FleetIndex {
    model: String,
    lifetime: Duration,
    blocks: HashMap<BlockKey, Block, BuildHasherDefault<KeyHasher>>,
    replicas: Vec<Holder>,
}

/// What became of a batch of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    Ok,
    /// Batches are missing; this one waits for them. Replay `expected..got` through `apply`, or give up with `skip_gap`.
    Gap {
        expected: u64,
        got: u64,
    },
    /// The engine began anew: all entries of its former life were dropped, then the batch was applied.
    Restarted,
    /// A batch seen before, or of a former incarnation.
    Ignored,
}

/// A change of one replica's entries, for those who mirror them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// The engine confirmed a block that was absent or only expected.
    Confirmed(BlockKey),
    Removed(BlockKey),
    /// Everything of the replica was dropped.
    Dropped,
}

#[derive(Debug, Default)]
struct Block {
    holders: ReplicaSet,
    follower: Option<BlockKey>,
    branches: bool,
}

#[derive(Debug, Default)]
struct Holder {
    incarnation: Incarnation,
    next_sequence: u64,
    last_timestamp_s: f64,
    publishes: bool,
    doubtful: bool,
    /// Batches were given up for lost: doubt ends only with the entries.
    lost: bool,
    pending: BTreeMap<u64, KvEventBatch>,
    stored: HashMap<EngineHash, Stored, BuildHasherDefault<KeyHasher>>,
    held: HashMap<BlockKey, Held, BuildHasherDefault<KeyHasher>>,
    expiries: BinaryHeap<Reverse<(Time, BlockKey)>>,
    orphans: u64,
}

/// A block as the engine names it: it may hold several copies of the same content, and removes each by itself.
#[derive(Debug)]
struct Stored {
    key: BlockKey,
    copies: u32,
}

#[derive(Debug, Default)]
struct Held {
    /// Engine hashes of this content that are stored.
    confirmed: u32,
    expected_until: Time,
    queued: bool,
}

impl FleetIndex {
    /// `model` is the name in the [`KeyDomain`] of requests; `lifetime` is how long an expected entry lasts without a word of the engine.
    pub fn new(model: &str, lifetime: Duration) -> Self {
        Self { model: model.to_owned(), lifetime, blocks: HashMap::default(), replicas: Vec::new() }
    }

    /// Takes in one batch of a replica's events.
    pub fn apply(&mut self, replica: ReplicaId, incarnation: Incarnation, batch: &KvEventBatch, now: Time) -> Applied {
        self.apply_with(replica, incarnation, batch, now, &mut |_| {})
    }

    /// As [`Self::apply`], and tells each change in order.
    pub fn apply_with(
        &mut self,
        replica: ReplicaId,
        incarnation: Incarnation,
        batch: &KvEventBatch,
        now: Time,
        on_change: &mut impl FnMut(Change),
    ) -> Applied {
        self.expire(now);
        let holder = self.holder(replica);
        let began = holder.publishes;
        let restarted = match incarnation.cmp(&holder.incarnation) {
            std::cmp::Ordering::Less => return Applied::Ignored,
            std::cmp::Ordering::Greater => began,
            std::cmp::Ordering::Equal if batch.sequence < holder.next_sequence => {
                // A restart without a marker counts from 0 again, under a later clock; a replayed batch has its old one.
                if batch.timestamp_s <= holder.last_timestamp_s {
                    return Applied::Ignored;
                }
                true
            }
            std::cmp::Ordering::Equal => false,
        };
        if restarted {
            self.drop_entries(replica);
            on_change(Change::Dropped);
        }
        let holder = self.holder(replica);
        holder.publishes = true;
        holder.incarnation = incarnation;
        let expected = holder.next_sequence;
        if batch.sequence > expected {
            holder.doubtful = true;
            holder.pending.insert(batch.sequence, batch.clone());
            if holder.pending.len() > PENDING_BATCHES_MAX {
                self.skip_gap(replica, on_change);
            }
            return Applied::Gap { expected, got: batch.sequence };
        }
        self.take_in(replica, batch, on_change);
        self.apply_pending(replica, on_change);
        if restarted { Applied::Restarted } else { Applied::Ok }
    }

    /// Goes on without the missing batches. The replica stays doubtful until its engine clears its cache or restarts.
    pub fn skip_gap(&mut self, replica: ReplicaId, on_change: &mut impl FnMut(Change)) {
        let holder = self.holder(replica);
        holder.lost |= holder.doubtful;
        while let Some((_, batch)) = self.holder(replica).pending.pop_first() {
            self.take_in(replica, &batch, on_change);
        }
    }

    /// Notes that `keys`, a whole chain from its start, are about to be computed on `replica`, or were used there.
    pub fn expect(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time) {
        let until = now + self.lifetime;
        self.holder(replica);
        let holder = &mut self.replicas[replica.index()];
        for (place, key) in keys.iter().enumerate() {
            let block = self.blocks.entry(*key).or_default();
            block.holders.insert(replica.index());
            if let Some(follower) = keys.get(place + 1) {
                block.follow(*follower);
            }
            let held = holder.held.entry(*key).or_default();
            if held.confirmed == 0 {
                held.expected_until = until;
                if !held.queued {
                    held.queued = true;
                    holder.expiries.push(Reverse((until, *key)));
                }
            }
        }
    }

    /// Drops an expected entry before its time, as when the replica's cache must have evicted it. A confirmed one stays.
    pub fn forget(&mut self, replica: ReplicaId, key: BlockKey) {
        let Some(holder) = self.replicas.get_mut(replica.index()) else { return };
        if let Entry::Occupied(held) = holder.held.entry(key)
            && held.get().confirmed == 0
        {
            held.remove();
            release(&mut self.blocks, key, replica.index());
        }
    }

    /// Ends the expected entries whose lifetime is over.
    pub fn expire(&mut self, now: Time) {
        for (slot, holder) in self.replicas.iter_mut().enumerate() {
            while let Some(&Reverse((at, key))) = holder.expiries.peek() {
                if at > now {
                    break;
                }
                holder.expiries.pop();
                let Entry::Occupied(mut held) = holder.held.entry(key) else { continue };
                held.get_mut().queued = false;
                if held.get().confirmed > 0 {
                    continue;
                }
                if held.get().expected_until > now {
                    held.get_mut().queued = true;
                    holder.expiries.push(Reverse((held.get().expected_until, key)));
                } else {
                    held.remove();
                    release(&mut self.blocks, key, slot);
                }
            }
        }
    }

    /// Leading blocks of `keys` that each replica holds, by the index of its id; shorter than the fleet when the last ones hold none.
    pub fn matches(&self, keys: &[BlockKey]) -> Vec<u32> {
        let mut depths = Vec::new();
        self.matches_into(keys, &mut depths);
        depths
    }

    /// As [`Self::matches`], into a vector that is kept between calls. One look-up a block until no replica is left.
    pub fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        depths.clear();
        depths.resize(self.replicas.len(), 0);
        let Some(first) = keys.first().and_then(|key| self.blocks.get(key)) else { return };
        let mut left = first.holders.clone();
        let mut depth = 1;
        for key in &keys[1..] {
            let Some(block) = self.blocks.get(key) else { break };
            left.keep_common(&block.holders, |slot| depths[slot] = depth);
            if left.is_empty() {
                return;
            }
            depth += 1;
        }
        left.keep_common(&ReplicaSet::default(), |slot| depths[slot] = depth);
    }

    /// Whether `depths` still look like [`Self::matches`] of `keys`: checks only the blocks where a depth ends, so it can miss a hole
    /// before one. For values that may be a little stale.
    pub fn still_matches(&self, keys: &[BlockKey], depths: &[u32]) -> bool {
        if depths.len() != self.replicas.len() {
            return false;
        }
        let mut last_checked = None;
        depths.iter().all(|&depth| {
            if last_checked == Some(depth) {
                return true;
            }
            last_checked = Some(depth);
            let holds = |place: usize| keys.get(place).and_then(|key| self.blocks.get(key)).map(|block| &block.holders);
            let (end, next) = (depth.checked_sub(1).and_then(|place| holds(place as usize)), holds(depth as usize));
            depths.iter().enumerate().all(|(slot, &other)| {
                (other < depth || depth == 0 || end.is_some_and(|set| set.contains(slot)))
                    && (other != depth || !next.is_some_and(|set| set.contains(slot)))
            })
        })
    }

    /// Whether a replica other than `except` holds the block.
    pub fn held_elsewhere(&self, key: BlockKey, except: ReplicaId) -> bool {
        self.blocks.get(&key).is_some_and(|block| block.holders.any_but(except.index()))
    }

    pub fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.blocks.get(&key).is_some_and(|block| block.holders.contains(replica.index()))
    }

    /// Whether the engine itself said that it holds the block.
    pub fn confirmed(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.replicas.get(replica.index()).and_then(|holder| holder.held.get(&key)).is_some_and(|held| held.confirmed > 0)
    }

    /// Whether two different blocks were seen after this one: it ends a prefix that is shared.
    pub fn branches(&self, key: BlockKey) -> bool {
        self.blocks.get(&key).is_some_and(|block| block.branches)
    }

    /// Whether batches of the replica's events are missing.
    pub fn doubtful(&self, replica: ReplicaId) -> bool {
        self.replicas.get(replica.index()).is_some_and(|holder| holder.doubtful)
    }

    /// Whether the replica ever sent events in its present life.
    pub fn publishes(&self, replica: ReplicaId) -> bool {
        self.replicas.get(replica.index()).is_some_and(|holder| holder.publishes)
    }

    /// Blocks believed to be on the replica.
    pub fn blocks_held(&self, replica: ReplicaId) -> usize {
        self.replicas.get(replica.index()).map_or(0, |holder| holder.held.len())
    }

    /// Blocks stored under a parent that the index never saw; they cannot be named. Only a gap makes them.
    pub fn orphans(&self, replica: ReplicaId) -> u64 {
        self.replicas.get(replica.index()).map_or(0, |holder| holder.orphans)
    }

    /// Distinct blocks known in the fleet.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Drops all entries of a replica, which is gone or begins anew; its events count from 0 again.
    pub fn restart(&mut self, replica: ReplicaId, incarnation: Incarnation) {
        self.drop_entries(replica);
        let holder = self.holder(replica);
        holder.incarnation = incarnation;
        holder.publishes = false;
    }

    /// Forgets every belief and keeps the replicas' places in their event streams.
    pub fn forget_all(&mut self) {
        self.blocks.clear();
        for holder in &mut self.replicas {
            holder.stored.clear();
            holder.held.clear();
            holder.expiries.clear();
        }
    }

    fn holder(&mut self, replica: ReplicaId) -> &mut Holder {
        if self.replicas.len() <= replica.index() {
            self.replicas.resize_with(replica.index() + 1, Holder::default);
        }
        &mut self.replicas[replica.index()]
    }

    fn drop_entries(&mut self, replica: ReplicaId) {
        let held = std::mem::take(&mut self.holder(replica).held);
        let mut keys: Vec<BlockKey> = held.into_keys().collect();
        keys.sort_unstable();
        for key in keys {
            release(&mut self.blocks, key, replica.index());
        }
        let holder = self.holder(replica);
        let (incarnation, publishes) = (holder.incarnation, holder.publishes);
        *holder = Holder { incarnation, publishes, ..Holder::default() };
    }

    fn apply_pending(&mut self, replica: ReplicaId, on_change: &mut impl FnMut(Change)) {
        loop {
            let holder = self.holder(replica);
            let next = holder.next_sequence;
            holder.pending.retain(|sequence, _| *sequence >= next);
            let Some(batch) = holder.pending.remove(&next) else { break };
            self.take_in(replica, &batch, on_change);
        }
        let holder = self.holder(replica);
        holder.doubtful = holder.lost || !holder.pending.is_empty();
    }

    fn take_in(&mut self, replica: ReplicaId, batch: &KvEventBatch, on_change: &mut impl FnMut(Change)) {
        let holder = self.holder(replica);
        holder.next_sequence = batch.sequence + 1;
        holder.last_timestamp_s = batch.timestamp_s;
        for event in &batch.events {
            match event {
                KvEvent::Stored { hashes, parent, tokens, block_size, adapter, salt } => {
                    let model = self.model.clone();
                    let domain = KeyDomain { model: &model, adapter: adapter.as_deref(), salt: salt.as_deref() };
                    self.store(replica, &domain, hashes, *parent, tokens, *block_size, on_change);
                }
                KvEvent::Removed { hashes } => hashes.iter().for_each(|hash| self.remove(replica, *hash, on_change)),
                KvEvent::Cleared => {
                    let (sequence, timestamp_s) = (batch.sequence, batch.timestamp_s);
                    let pending = std::mem::take(&mut self.holder(replica).pending);
                    self.drop_entries(replica);
                    let holder = self.holder(replica);
                    (holder.next_sequence, holder.last_timestamp_s) = (sequence + 1, timestamp_s);
                    holder.doubtful = !pending.is_empty();
                    holder.pending = pending;
                    on_change(Change::Dropped);
                }
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one event")]
    fn store(
        &mut self,
        replica: ReplicaId,
        domain: &KeyDomain<'_>,
        hashes: &[EngineHash],
        parent: Option<EngineHash>,
        tokens: &[u32],
        block_size: BlockSize,
        on_change: &mut impl FnMut(Change),
    ) {
        let holder = &mut self.replicas[replica.index()];
        let (mut before, mut chained) = match parent.map(|hash| holder.stored.get(&hash)) {
            None => (domain.root(), false),
            Some(Some(stored)) => (stored.key, true),
            Some(None) => {
                holder.orphans += hashes.len() as u64;
                return;
            }
        };
        for (hash, tokens) in hashes.iter().zip(tokens.chunks_exact(block_size.get() as usize)) {
            let key = before.child(tokens);
            if chained && let Some(block) = self.blocks.get_mut(&before) {
                block.follow(key);
            }
            (before, chained) = (key, true);
            let stored = holder.stored.entry(*hash).or_insert(Stored { key, copies: 0 });
            stored.copies += 1;
            if stored.copies > 1 {
                continue;
            }
            let key = stored.key;
            let held = holder.held.entry(key).or_default();
            held.confirmed += 1;
            if held.confirmed == 1 {
                self.blocks.entry(key).or_default().holders.insert(replica.index());
                on_change(Change::Confirmed(key));
            }
        }
    }

    fn remove(&mut self, replica: ReplicaId, hash: EngineHash, on_change: &mut impl FnMut(Change)) {
        let holder = &mut self.replicas[replica.index()];
        // A hash that was stored in a missing batch, or is an orphan, says nothing of what is known.
        let Entry::Occupied(mut stored) = holder.stored.entry(hash) else { return };
        stored.get_mut().copies -= 1;
        if stored.get().copies > 0 {
            return;
        }
        let key = stored.remove().key;
        let Entry::Occupied(mut held) = holder.held.entry(key) else { return };
        held.get_mut().confirmed -= 1;
        if held.get().confirmed == 0 {
            held.remove();
            release(&mut self.blocks, key, replica.index());
            on_change(Change::Removed(key));
        }
    }
}

impl Block {
    fn follow(&mut self, key: BlockKey) {
        match self.follower {
            None => self.follower = Some(key),
            Some(follower) => self.branches |= follower != key,
        }
    }
}

fn release(blocks: &mut HashMap<BlockKey, Block, BuildHasherDefault<KeyHasher>>, key: BlockKey, slot: usize) {
    if let Entry::Occupied(mut block) = blocks.entry(key) {
        block.get_mut().holders.remove(slot);
        if block.get().holders.is_empty() {
            block.remove();
        }
    }
}

/// A set of replica slots: one word for fleets up to 64, more words after.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct ReplicaSet {
    first: u64,
    rest: Vec<u64>,
}

impl ReplicaSet {
    fn insert(&mut self, slot: usize) {
        let word = slot / 64;
        if word > self.rest.len() {
            self.rest.resize(word, 0);
        }
        *self.word_mut(word) |= 1 << (slot % 64);
    }

    fn remove(&mut self, slot: usize) {
        if slot / 64 <= self.rest.len() {
            *self.word_mut(slot / 64) &= !(1 << (slot % 64));
        }
    }

    fn contains(&self, slot: usize) -> bool {
        self.word(slot / 64) >> (slot % 64) & 1 == 1
    }

    fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|word| *word == 0)
    }

    fn any_but(&self, slot: usize) -> bool {
        (0..=self.rest.len()).any(|word| {
            let mask = if word == slot / 64 { !(1 << (slot % 64)) } else { u64::MAX };
            self.word(word) & mask != 0
        })
    }

    /// Keeps what `other` has too and tells which slots go.
    fn keep_common(&mut self, other: &Self, mut on_gone: impl FnMut(usize)) {
        for word in 0..=self.rest.len() {
            let both = self.word(word) & other.word(word);
            let mut gone = self.word(word) ^ both;
            while gone != 0 {
                on_gone(word * 64 + gone.trailing_zeros() as usize);
                gone &= gone - 1;
            }
            *self.word_mut(word) = both;
        }
    }

    fn word(&self, word: usize) -> u64 {
        if word == 0 { self.first } else { self.rest.get(word - 1).copied().unwrap_or(0) }
    }

    fn word_mut(&mut self, word: usize) -> &mut u64 {
        if word == 0 { &mut self.first } else { &mut self.rest[word - 1] }
    }
}

/// Block keys are hashes already; hashing them again would double the cost of a match.
#[derive(Debug, Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

#[cfg(test)]
mod tests;
