use std::{collections::BTreeMap, hash::Hasher, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use baton_units::{BlockSize, Bytes, Incarnation, ReplicaId, Time};

use crate::{BlockKey, EngineHash, KeyDomain, KvEvent, KvEventBatch, chain_keys};
use caches::Caches;
use holders::Holders;

pub use caches::{Use, Victim};
pub use search::MatchEnds;
pub use snapshot::SnapshotError;

mod caches;
mod holders;
mod search;
mod snapshot;

/// Batches kept while an earlier one is missing; one more and the index goes on without the missing ones.
const PENDING_BATCHES_MAX: usize = 1024;
/// Blocks of an event whose entries are loaded from memory together.
const AT_ONCE: usize = 32;

/// The router's belief of which replica holds which block, over the whole fleet, and of what each replica's cache would let go next.
///
/// Two sources feed it: engine events (*confirmed* entries, counted as often as the engine stored them) and the router's own
/// dispatches (*expected* entries, which end with their lifetime unless the engine confirms them or a request keeps them). A replica
/// whose events have a gap is *doubtful* until the missing batches are applied or the engine clears its cache or restarts.
///
/// Replica ids are dense (their index is a bit position) and below 4,096. Memory is bounded: see [`Self::make_room`].
#[derive(Debug)]
pub struct FleetIndex {
    model: String,
    caches: Caches,
    streams: Vec<Stream>,
    errors: Vec<HitError>,
}

/// Matches from any thread while the index changes elsewhere: nobody waits, and a match sees each block as it is or was a moment ago.
#[derive(Debug, Clone)]
pub struct IndexReader {
    holders: Arc<ArcSwap<Holders>>,
}

impl IndexReader {
    /// As [`FleetIndex::matches_into`].
    pub fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        search::matches(&self.holders.load(), keys, depths);
    }
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

/// How far the hits that engines report were from those believed, in blocks, summed over the requests of a replica.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HitError {
    pub requests: u64,
    pub believed: u64,
    pub reported: u64,
    /// Believed and not found.
    pub missing: u64,
    /// Found and not believed.
    pub unforeseen: u64,
}

/// A replica's place in its stream of events.
#[derive(Debug, Default)]
struct Stream {
    incarnation: Incarnation,
    next_sequence: u64,
    last_timestamp_s: f64,
    publishes: bool,
    /// Batches were given up for lost: doubt ends only with the entries.
    lost: bool,
    /// Taken from a snapshot, and not yet seen to go on from there.
    unproven: bool,
    pending: BTreeMap<u64, KvEventBatch>,
    orphans: u64,
}

impl Stream {
    fn doubtful(&self) -> bool {
        self.lost || self.unproven || !self.pending.is_empty()
    }
}

impl FleetIndex {
    /// `model` is the name in the [`KeyDomain`] of requests; `lifetime` is how long an expected entry lasts without a word of the
    /// engine; `bytes` bounds the memory of all entries.
    pub fn new(model: &str, lifetime: Duration, bytes: Bytes) -> Self {
        let bytes = usize::try_from(bytes.0).unwrap_or(usize::MAX);
        Self { model: model.to_owned(), caches: Caches::new(lifetime, bytes), streams: Vec::new(), errors: Vec::new() }
    }

    // Engine events

    /// Takes in one batch of a replica's events.
    pub fn apply(&mut self, replica: ReplicaId, incarnation: Incarnation, batch: &KvEventBatch, now: Time) -> Applied {
        self.expire(now);
        let stream = self.stream(replica);
        let began = stream.publishes;
        let restarted = match incarnation.cmp(&stream.incarnation) {
            std::cmp::Ordering::Less => return Applied::Ignored,
            std::cmp::Ordering::Greater => began,
            std::cmp::Ordering::Equal if batch.sequence < stream.next_sequence => {
                // A restart without a marker counts from 0 again, under a later clock; a replayed batch has its old one.
                if batch.timestamp_s <= stream.last_timestamp_s {
                    // The last one that was taken in, repeated: the engine's stream is the one that is known.
                    stream.unproven &= batch.sequence + 1 != stream.next_sequence || batch.timestamp_s < stream.last_timestamp_s;
                    return Applied::Ignored;
                }
                true
            }
            std::cmp::Ordering::Equal => false,
        };
        if restarted {
            self.drop_entries(replica);
        }
        let stream = self.stream(replica);
        stream.publishes = true;
        stream.incarnation = incarnation;
        let expected = stream.next_sequence;
        stream.unproven &= batch.sequence != expected;
        if batch.sequence > expected {
            stream.pending.insert(batch.sequence, batch.clone());
            if stream.pending.len() > PENDING_BATCHES_MAX {
                self.skip_gap(replica, now);
            }
            return Applied::Gap { expected, got: batch.sequence };
        }
        self.take_in(replica, batch, now);
        self.apply_pending(replica, now);
        if restarted { Applied::Restarted } else { Applied::Ok }
    }

    /// Goes on without the missing batches. The replica stays doubtful until its engine clears its cache or restarts.
    pub fn skip_gap(&mut self, replica: ReplicaId, now: Time) {
        let stream = self.stream(replica);
        stream.lost |= !stream.pending.is_empty();
        // With the batches that are given up for lost, the question is answered: the stream went on, and not from there.
        stream.unproven &= stream.pending.is_empty();
        while let Some((_, batch)) = self.stream(replica).pending.pop_first() {
            self.take_in(replica, &batch, now);
        }
    }

    /// Drops all entries of a replica, which is gone or begins anew; its events count from 0 again.
    pub fn restart(&mut self, replica: ReplicaId, incarnation: Incarnation) {
        self.drop_entries(replica);
        let stream = self.stream(replica);
        stream.incarnation = incarnation;
        stream.publishes = false;
    }

    /// Forgets every belief and keeps the replicas' places in their event streams.
    pub fn forget_all(&mut self) {
        for slot in 0..self.caches.replicas() {
            self.caches.clear(slot);
        }
    }

    // The router's own dispatches

    /// Notes that `keys`, a whole chain from its start, were used on `replica` and are there.
    pub fn expect(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time) {
        self.begin_use(replica, keys.len(), now);
        self.caches.touch(replica.index(), keys, true, now);
    }

    /// A request with this prompt is sent to `replica`: its blocks are expected there, and stay until [`Self::unpin`]. Tells `see` how
    /// long the blocks had been idle.
    pub fn pin(&mut self, replica: ReplicaId, keys: &[BlockKey], now: Time, mut see: impl FnMut(Use)) {
        self.begin_use(replica, keys.len(), now);
        self.caches.pin(replica.index(), keys, now, &mut see);
    }

    /// The request ended. `all` is its chain with the blocks of its output, used just now; with `believe` they are there.
    pub fn unpin(&mut self, replica: ReplicaId, prompt: &[BlockKey], all: &[BlockKey], believe: bool, now: Time) {
        self.begin_use(replica, if believe { all.len() } else { 0 }, now);
        self.caches.unpin(replica.index(), prompt, all, believe, now);
    }

    /// Drops an expected block before its time. A confirmed one stays.
    pub fn forget(&mut self, replica: ReplicaId, key: BlockKey) {
        if replica.index() < self.caches.replicas() {
            self.caches.forget(replica.index(), key);
        }
    }

    /// Drops of a chain's blocks those that no request keeps and the engine did not confirm, from the chain's end.
    pub fn forget_unused(&mut self, replica: ReplicaId, keys: &[BlockKey]) {
        if replica.index() < self.caches.replicas() {
            for key in keys.iter().rev().filter(|key| !self.caches.is_pinned(replica.index(), **key)).collect::<Vec<_>>() {
                self.caches.forget(replica.index(), *key);
            }
        }
    }

    /// Ends the expected entries whose lifetime is over.
    pub fn expire(&mut self, now: Time) {
        self.caches.expire(now);
    }

    /// Lets the least recently used blocks of a replica go until at most `limit` take memory there, as its engine would; tells `see`
    /// of each idle time that this cuts short.
    pub fn evict_to(&mut self, replica: ReplicaId, limit: usize, now: Time, mut see: impl FnMut(Use)) {
        if replica.index() < self.caches.replicas() {
            self.caches.evict_to(replica.index(), limit, now, &mut see);
        }
    }

    /// Takes the memory for `blocks` (replica, block) pairs in all, as far as the bound allows: until there are more, nothing grows, which
    /// would take some 0.2 s for each million of blocks.
    pub fn reserve(&mut self, blocks: usize) {
        self.caches.reserve(blocks);
    }

    /// Makes room in the index for `blocks` more: where the bound is reached, those go whose memory is worth least by `worth`, in ms
    /// that a block saves by being known. Without a call of this, the least recently used of the fleet go. Returns the idle times that
    /// this cuts short.
    pub fn make_room(&mut self, blocks: usize, now: Time, worth: impl Fn(ReplicaId, Victim) -> f64) -> Vec<Use> {
        self.caches.make_room(blocks, now, |slot, victim| worth(ReplicaId(slot as u32), victim))
    }

    /// The engine told how much of a prompt it had, of a request that it is serving: `reported` leading blocks of `keys` where
    /// `believed` were expected. What it proves is put in, what it disproves goes: with a missing block all that hangs on it, unless
    /// the engine's events say otherwise. The prompt itself is there by now in any case.
    pub fn report_hit(&mut self, replica: ReplicaId, keys: &[BlockKey], believed: usize, reported: usize, now: Time) {
        let (believed, reported) = (believed.min(keys.len()), reported.min(keys.len()));
        if self.errors.len() <= replica.index() {
            self.errors.resize_with(replica.index() + 1, HitError::default);
        }
        let error = &mut self.errors[replica.index()];
        error.requests += 1;
        error.believed += believed as u64;
        error.reported += reported as u64;
        error.missing += believed.saturating_sub(reported) as u64;
        error.unforeseen += reported.saturating_sub(believed) as u64;
        if reported > believed {
            self.expect(replica, &keys[..reported], now);
        } else if reported < believed {
            self.stream(replica);
            self.caches.disprove(replica.index(), &keys[reported..]);
        }
    }

    // Questions

    /// Leading blocks of `keys` that each replica holds, by the index of its id; shorter than the fleet when the last ones hold none.
    pub fn matches(&self, keys: &[BlockKey]) -> Vec<u32> {
        let mut depths = Vec::new();
        self.matches_into(keys, &mut depths);
        depths
    }

    /// As [`Self::matches`], into a vector that is kept between calls. Some `log2(keys)` look-ups for each different depth.
    pub fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        search::matches(self.caches.holders.shared(), keys, depths);
    }

    /// For matches from other threads.
    pub fn reader(&self) -> IndexReader {
        IndexReader { holders: self.caches.holders.published().clone() }
    }

    /// Where the depths of a match end, for [`Self::still_matches`].
    pub fn ends_into(&self, depths: &[u32], ends: &mut MatchEnds) {
        ends.find(self.caches.holders.shared(), depths);
    }

    /// Whether the depths with these `ends` still look like [`Self::matches`] of `keys`: checks only the blocks where a depth ends, so it
    /// can miss a hole before one. For values that may be a little stale.
    pub fn still_matches(&self, keys: &[BlockKey], ends: &MatchEnds) -> bool {
        search::still_matches(self.caches.holders.shared(), keys, ends)
    }

    /// Whether a replica other than `except` holds the block.
    pub fn held_elsewhere(&self, key: BlockKey, except: ReplicaId) -> bool {
        self.caches.holders.held_elsewhere(key, except.index())
    }

    pub fn holds(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.caches.holders.shared().contains(key, replica.index())
    }

    /// Whether the engine itself said that it holds the block.
    pub fn confirmed(&self, replica: ReplicaId, key: BlockKey) -> bool {
        self.caches.confirmed(replica.index(), key)
    }

    /// Whether two different blocks were seen after this one: it ends a prefix that is shared.
    pub fn branches(&self, key: BlockKey) -> bool {
        self.caches.holders.branches(key)
    }

    /// Length of the longest prefix of `keys[..held]`, of which the replica holds all, that ends where chains part.
    pub fn deepest_branch(&self, replica: ReplicaId, keys: &[BlockKey], held: usize) -> Option<usize> {
        self.caches.deepest_branch(replica.index(), keys, held)
    }

    /// Blocks of the replica that no request in flight keeps, in the order in which its engine would let them go.
    pub fn victims(&self, replica: ReplicaId, now: Time) -> impl Iterator<Item = Victim> {
        self.caches.victims(replica.index(), now)
    }

    /// Blocks that take memory of the replica, as far as is known; some may no longer be believed in.
    pub fn blocks_resident(&self, replica: ReplicaId) -> usize {
        self.caches.get(replica.index()).map_or(0, caches::Cache::resident)
    }

    /// Distinct blocks that requests in flight keep on the replica.
    pub fn blocks_pinned(&self, replica: ReplicaId) -> usize {
        self.caches.get(replica.index()).map_or(0, caches::Cache::pinned)
    }

    /// Leading blocks of the chain that requests in flight keep on the replica; found soonest where it has `guess` of them.
    pub fn pinned_prefix(&self, replica: ReplicaId, keys: &[BlockKey], guess: usize) -> usize {
        self.caches.pinned_prefix(replica.index(), keys, guess)
    }

    /// Blocks believed to be on the replica.
    pub fn blocks_held(&self, replica: ReplicaId) -> usize {
        self.caches.get(replica.index()).map_or(0, caches::Cache::held)
    }

    /// Whether batches of the replica's events are missing.
    pub fn doubtful(&self, replica: ReplicaId) -> bool {
        self.streams.get(replica.index()).is_some_and(Stream::doubtful)
    }

    /// Whether the replica ever sent events in its present life.
    pub fn publishes(&self, replica: ReplicaId) -> bool {
        self.streams.get(replica.index()).is_some_and(|stream| stream.publishes)
    }

    /// Blocks stored under a parent that the index never saw, or no longer has; they cannot be named. A gap makes them, or the bound.
    pub fn orphans(&self, replica: ReplicaId) -> u64 {
        self.streams.get(replica.index()).map_or(0, |stream| stream.orphans)
    }

    /// How wrong the index was about the replica since the fleet was set up.
    pub fn hit_error(&self, replica: ReplicaId) -> HitError {
        self.errors.get(replica.index()).copied().unwrap_or_default()
    }

    /// Distinct blocks known in the fleet.
    pub fn len(&self) -> usize {
        self.caches.holders.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Memory of all entries.
    pub fn bytes(&self) -> Bytes {
        Bytes(self.caches.bytes() as u64)
    }

    /// (replica, block) pairs that the bound has room for, if every block is on one replica only.
    pub fn blocks_max(&self) -> usize {
        self.caches.blocks_max()
    }

    /// Blocks that went because the bound was reached.
    pub fn evicted_for_room(&self) -> u64 {
        self.caches.evicted_for_room()
    }

    fn stream(&mut self, replica: ReplicaId) -> &mut Stream {
        self.caches.ensure(replica.index());
        if self.streams.len() <= replica.index() {
            self.streams.resize_with(replica.index() + 1, Stream::default);
        }
        &mut self.streams[replica.index()]
    }

    fn begin_use(&mut self, replica: ReplicaId, blocks: usize, now: Time) {
        self.stream(replica);
        self.caches.make_room(blocks, now, |_, victim| -victim.idle.as_secs_f64());
    }

    fn drop_entries(&mut self, replica: ReplicaId) {
        let stream = self.stream(replica);
        *stream = Stream { incarnation: stream.incarnation, publishes: stream.publishes, ..Stream::default() };
        self.caches.clear(replica.index());
    }

    fn apply_pending(&mut self, replica: ReplicaId, now: Time) {
        loop {
            let stream = self.stream(replica);
            let next = stream.next_sequence;
            stream.pending.retain(|sequence, _| *sequence >= next);
            let Some(batch) = stream.pending.remove(&next) else { break };
            self.take_in(replica, &batch, now);
        }
    }

    fn take_in(&mut self, replica: ReplicaId, batch: &KvEventBatch, now: Time) {
        let stream = self.stream(replica);
        stream.next_sequence = batch.sequence + 1;
        stream.last_timestamp_s = batch.timestamp_s;
        for event in &batch.events {
            match event {
                KvEvent::Stored { hashes, parent, tokens, block_size, adapter, salt } => {
                    self.begin_use(replica, hashes.len(), now);
                    let domain = KeyDomain { model: &self.model, adapter: adapter.as_deref(), salt: salt.as_deref() };
                    let root = domain.root();
                    self.store(replica, root, hashes, *parent, tokens, *block_size, now);
                }
                KvEvent::Removed { hashes } => {
                    for hashes in hashes.chunks(AT_ONCE) {
                        self.caches.warm_removed(replica.index(), hashes);
                        for hash in hashes {
                            self.caches.remove(replica.index(), *hash);
                        }
                    }
                }
                KvEvent::Cleared => {
                    let pending = std::mem::take(&mut self.stream(replica).pending);
                    self.drop_entries(replica);
                    let stream = self.stream(replica);
                    (stream.next_sequence, stream.last_timestamp_s) = (batch.sequence + 1, batch.timestamp_s);
                    stream.pending = pending;
                }
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one event")]
    fn store(
        &mut self,
        replica: ReplicaId,
        root: BlockKey,
        hashes: &[EngineHash],
        parent: Option<EngineHash>,
        tokens: &[u32],
        block_size: BlockSize,
        now: Time,
    ) {
        let slot = replica.index();
        let mut place = parent.and_then(|hash| self.caches.place_of(slot, hash));
        if parent.is_some() && place.is_none() {
            self.streams[slot].orphans += hashes.len() as u64;
            return;
        }
        let before = place.map_or(root, |place| self.caches.key_at(place));
        let keys = chain_keys(before, tokens, block_size);
        let mut left = hashes.len().min(keys.len());
        for (keys, hashes) in keys.chunks(AT_ONCE).zip(hashes.chunks(AT_ONCE)) {
            self.caches.warm_stored(slot, keys, hashes);
            for (key, hash) in keys.iter().zip(hashes) {
                place = self.caches.confirm(slot, *key, *hash, place, now);
                if place.is_none() {
                    self.streams[slot].orphans += left as u64;
                    return;
                }
                left -= 1;
            }
        }
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
