use std::{
    collections::{BTreeMap, VecDeque},
    hash::Hasher,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use baton_units::{Bytes, Incarnation, ReplicaId, Time};

use crate::{BlockKey, KeyDomain, KvEvent, KvEventBatch, chain_keys};
use caches::Caches;
use holders::Holders;
use snapshot::Restoring;

pub use caches::{Use, Victim};
pub use search::MatchEnds;
pub use snapshot::{Copying, Snapshot, SnapshotError};

mod anchors;
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
    /// Slots whose entries are being dropped: nothing of theirs is found.
    hidden: Vec<usize>,
    /// Counts how often a replica's entries were dropped, each time when they are gone.
    drops: Arc<AtomicU64>,
    errors: Vec<HitError>,
}

/// Matches from any thread while the index changes elsewhere: nobody waits, and a match sees each block as it is or was a moment ago.
#[derive(Debug, Clone)]
pub struct IndexReader {
    holders: Arc<ArcSwap<Holders>>,
    anchors: Arc<ArcSwap<Holders>>,
    drops: Arc<AtomicU64>,
}

impl IndexReader {
    /// As [`FleetIndex::matches_into`].
    pub fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        search::matches(&self.holders.load(), &self.anchors.load(), keys, depths);
    }

    /// Matches for [`FleetIndex::settle`], which tells whether they may still be used.
    pub fn matches(&self, keys: &[BlockKey]) -> Matched {
        // Read before the look-ups: what is dropped after this shows as a different count, what was dropped before is not found.
        let drops = self.drops.load(Ordering::Acquire);
        let mut depths = Vec::new();
        self.matches_into(keys, &mut depths);
        Matched { depths, drops }
    }
}

/// What an [`IndexReader`] found a moment ago.
#[derive(Debug, Clone)]
pub struct Matched {
    depths: Vec<u32>,
    drops: u64,
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
    pending: BTreeMap<u64, Arc<KvEventBatch>>,
    /// Accepted and not yet taken in, in order. All else here is as if it were.
    work: VecDeque<Work>,
    /// Counts what was taken in, and what dropped all entries.
    changes: u64,
    orphans: u64,
}

/// What is to be done to a replica's entries.
#[derive(Debug)]
enum Work {
    /// Drop them.
    Clear,
    /// Take in the entries of a snapshot.
    Restore(Restoring),
    /// Take in what follows this block of this event.
    Batch { batch: Arc<KvEventBatch>, event: usize, block: usize },
}

impl Stream {
    fn doubtful(&self) -> bool {
        self.lost || self.unproven || !self.pending.is_empty()
    }

    /// The next batch in order.
    fn accept(&mut self, batch: Arc<KvEventBatch>) {
        (self.next_sequence, self.last_timestamp_s) = (batch.sequence + 1, batch.timestamp_s);
        if batch.events.contains(&KvEvent::Cleared) {
            (self.lost, self.unproven) = (false, false);
        }
        self.work.push_back(Work::Batch { batch, event: 0, block: 0 });
    }

    /// Batches that waited for the last one.
    fn accept_pending(&mut self) {
        self.pending.retain(|sequence, _| *sequence >= self.next_sequence);
        while let Some(batch) = self.pending.remove(&self.next_sequence) {
            self.accept(batch);
        }
    }
}

impl FleetIndex {
    /// `model` is the name in the [`KeyDomain`] of requests; `lifetime` is how long an expected entry lasts without a word of the
    /// engine; `bytes` bounds the memory of all entries.
    pub fn new(model: &str, lifetime: Duration, bytes: Bytes) -> Self {
        let bytes = usize::try_from(bytes.0).unwrap_or(usize::MAX);
        Self {
            model: model.to_owned(),
            caches: Caches::new(lifetime, bytes),
            streams: Vec::new(),
            hidden: Vec::new(),
            drops: Arc::default(),
            errors: Vec::new(),
        }
    }

    // Engine events

    /// Takes in one batch of a replica's events, and what was left of earlier ones.
    pub fn apply(&mut self, replica: ReplicaId, incarnation: Incarnation, batch: &KvEventBatch, now: Time) -> Applied {
        let applied = self.begin(replica, incarnation, Arc::new(batch.clone()), now);
        self.advance(replica, usize::MAX, now);
        applied
    }

    /// As [`Self::apply`], but what the batch tells is only put at the end of what [`Self::advance`] is to take in (where far too much
    /// is, all of it is taken in). A restart of the replica drops what is left.
    pub fn begin(&mut self, replica: ReplicaId, incarnation: Incarnation, batch: Arc<KvEventBatch>, now: Time) -> Applied {
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
            self.begin_clear(replica);
        }
        let stream = self.stream(replica);
        stream.publishes = true;
        stream.incarnation = incarnation;
        let expected = stream.next_sequence;
        stream.unproven &= batch.sequence != expected;
        if batch.sequence > expected {
            let got = batch.sequence;
            stream.pending.insert(got, batch);
            if stream.pending.len() > PENDING_BATCHES_MAX {
                self.begin_skip_gap(replica);
            }
            return Applied::Gap { expected, got };
        }
        stream.accept(batch);
        stream.accept_pending();
        if stream.work.len() > PENDING_BATCHES_MAX {
            self.advance(replica, usize::MAX, now);
        }
        if restarted { Applied::Restarted } else { Applied::Ok }
    }

    /// Takes in what was begun, `blocks` blocks of it (an event without any counts as one). Tells whether more is left.
    pub fn advance(&mut self, replica: ReplicaId, blocks: usize, now: Time) -> bool {
        let (slot, mut left) = (replica.index(), blocks);
        while left > 0
            && let Some(stream) = self.streams.get_mut(slot)
            && let Some(work) = stream.work.pop_front()
        {
            stream.changes += 1;
            if let Some(work) = self.work(replica, work, &mut left, now) {
                self.streams[slot].work.push_front(work);
            }
        }
        self.streams.get(slot).is_some_and(|stream| !stream.work.is_empty())
    }

    /// Blocks that the next [`Self::advance`] by `blocks` can add, at most.
    pub fn adding(&self, replica: ReplicaId, blocks: usize) -> usize {
        let mut adding = 0;
        for work in self.streams.get(replica.index()).into_iter().flat_map(|stream| &stream.work) {
            match work {
                Work::Clear => {}
                Work::Restore(restoring) => adding += restoring.left(),
                Work::Batch { batch, event, block } => {
                    let mut before = *block;
                    for event in &batch.events[*event..] {
                        if let KvEvent::Stored { hashes, .. } = event {
                            adding += hashes.len() - before;
                        }
                        before = 0;
                        if adding >= blocks {
                            return blocks;
                        }
                    }
                }
            }
        }
        adding.min(blocks)
    }

    /// Goes on without the missing batches. The replica stays doubtful until its engine clears its cache or restarts.
    pub fn skip_gap(&mut self, replica: ReplicaId, now: Time) {
        self.begin_skip_gap(replica);
        self.advance(replica, usize::MAX, now);
    }

    /// As [`Self::skip_gap`], for [`Self::advance`] to take in the batches that waited.
    pub fn begin_skip_gap(&mut self, replica: ReplicaId) {
        let stream = self.stream(replica);
        stream.lost |= !stream.pending.is_empty();
        // With the batches that are given up for lost, the question is answered: the stream went on, and not from there.
        stream.unproven &= stream.pending.is_empty();
        while let Some((_, batch)) = stream.pending.pop_first() {
            stream.accept(batch);
        }
    }

    /// Drops all entries of a replica, which is gone or begins anew; its events count from 0 again.
    pub fn restart(&mut self, replica: ReplicaId, incarnation: Incarnation) {
        self.begin_clear(replica);
        self.advance(replica, usize::MAX, Time::ZERO);
        let stream = self.stream(replica);
        stream.incarnation = incarnation;
        stream.publishes = false;
    }

    /// Begins to drop all entries of a replica, which [`Self::advance`] goes on with; none of them is matched from here on. What was
    /// left to take in is dropped too, and events count from 0 again.
    pub fn begin_clear(&mut self, replica: ReplicaId) {
        let stream = self.stream(replica);
        *stream = Stream {
            incarnation: stream.incarnation,
            publishes: stream.publishes,
            changes: stream.changes + 1,
            work: [Work::Clear].into(),
            ..Stream::default()
        };
        self.hide(replica.index());
    }

    /// Forgets every belief and keeps the replicas' places in their event streams.
    pub fn forget_all(&mut self) {
        for slot in 0..self.caches.replicas() {
            self.caches.clear(slot);
        }
        for stream in &mut self.streams {
            stream.changes += 1;
            stream.work.retain(|work| !matches!(work, Work::Restore(_)));
        }
        self.drops.fetch_add(1, Ordering::Release);
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

    /// As [`Self::matches`], into a vector that is kept between calls. At most `4 log2(keys)` look-ups for each different depth.
    pub fn matches_into(&self, keys: &[BlockKey], depths: &mut Vec<u32>) {
        search::matches(self.caches.holders.shared(), self.caches.anchors.shared(), keys, depths);
        self.hide_dropped(depths);
    }

    /// For matches from other threads.
    pub fn reader(&self) -> IndexReader {
        IndexReader {
            holders: self.caches.holders.published().clone(),
            anchors: self.caches.anchors.published().clone(),
            drops: self.drops.clone(),
        }
    }

    /// As [`Self::matches_into`], from what a reader of this index found for `keys`: as old as that is, but for replicas whose entries
    /// were dropped meanwhile. Those that joined since have no depth.
    pub fn settle(&self, matched: Option<Matched>, keys: &[BlockKey], depths: &mut Vec<u32>) {
        match matched.filter(|matched| matched.drops == self.drops.load(Ordering::Relaxed)) {
            Some(matched) => {
                *depths = matched.depths;
                self.hide_dropped(depths);
            }
            None => self.matches_into(keys, depths),
        }
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

    fn hide(&mut self, slot: usize) {
        if !self.hidden.contains(&slot) {
            self.hidden.push(slot);
        }
    }

    fn hide_dropped(&self, depths: &mut [u32]) {
        for slot in &self.hidden {
            if let Some(depth) = depths.get_mut(*slot) {
                *depth = 0;
            }
        }
    }

    fn begin_use(&mut self, replica: ReplicaId, blocks: usize, now: Time) {
        self.stream(replica);
        self.caches.make_room(blocks, now, |_, victim| -victim.idle.as_secs_f64());
    }

    /// Does up to `left` blocks of the work, and takes them off; gives back what is left of it.
    fn work(&mut self, replica: ReplicaId, work: Work, left: &mut usize, now: Time) -> Option<Work> {
        match work {
            Work::Clear => (!self.clear_some(replica.index(), left)).then_some(Work::Clear),
            Work::Restore(mut restoring) => {
                let count = restoring.left().min(*left);
                *left -= count;
                self.begin_use(replica, count, now);
                restoring.next(count, |entry, parent, used| self.caches.restore(replica.index(), entry, parent, used));
                (restoring.left() > 0).then_some(Work::Restore(restoring))
            }
            Work::Batch { batch, mut event, mut block } => {
                while let Some(told) = batch.events.get(event) {
                    if *left == 0 {
                        return Some(Work::Batch { batch, event, block });
                    }
                    block = self.take_in(replica, told, block, left, now);
                    event += usize::from(block == 0);
                }
                None
            }
        }
    }

    /// Takes in of an event what follows `block`; returns the block to go on with, 0 when it is done.
    fn take_in(&mut self, replica: ReplicaId, event: &KvEvent, block: usize, left: &mut usize, now: Time) -> usize {
        match event {
            KvEvent::Stored { .. } => self.store(replica, event, block, left, now),
            KvEvent::Removed { hashes } => {
                let end = hashes.len().min(block.saturating_add(*left));
                *left -= (end - block).max(1);
                for hashes in hashes[block..end].chunks(AT_ONCE) {
                    self.caches.warm_removed(replica.index(), hashes);
                    for hash in hashes {
                        self.caches.remove(replica.index(), *hash);
                    }
                }
                if end == hashes.len() { 0 } else { end }
            }
            KvEvent::Cleared => {
                self.hide(replica.index());
                let gone = self.clear_some(replica.index(), left);
                if gone {
                    self.stream(replica).orphans = 0;
                }
                usize::from(!gone)
            }
        }
    }

    /// Drops up to `left` of a hidden replica's blocks; tells whether it is empty, and no longer hidden.
    fn clear_some(&mut self, slot: usize, left: &mut usize) -> bool {
        let gone = self.caches.clear_some(slot, *left);
        *left = if gone { *left - 1 } else { 0 };
        if gone {
            self.hidden.retain(|hidden| *hidden != slot);
            // Release: whoever reads the new count finds none of them.
            self.drops.fetch_add(1, Ordering::Release);
        }
        gone
    }

    /// Stores what of the event's chain follows `block`; as [`Self::take_in`].
    fn store(&mut self, replica: ReplicaId, event: &KvEvent, block: usize, left: &mut usize, now: Time) -> usize {
        let KvEvent::Stored { hashes, parent, tokens, block_size, adapter, salt } = event else { return 0 };
        let slot = replica.index();
        let size = block_size.get() as usize;
        let total = hashes.len().min(tokens.len() / size);
        let end = total.min(block.saturating_add(*left));
        *left -= (end - block).max(1);
        let parent = if block == 0 { *parent } else { Some(hashes[block - 1]) };
        self.begin_use(replica, end - block, now);
        let mut place = parent.and_then(|hash| self.caches.place_of(slot, hash));
        if parent.is_some() && place.is_none() {
            self.streams[slot].orphans += (hashes.len() - block) as u64;
            return 0;
        }
        let domain = || KeyDomain { model: &self.model, adapter: adapter.as_deref(), salt: salt.as_deref() };
        let before = match place.map(|place| self.caches.key_at(place)) {
            None => domain().root(),
            // Behind public blocks the salt enters.
            Some(before) => salt.as_deref().filter(|_| block == 0).map_or(before, |salt| before.salted(salt)),
        };
        let keys = chain_keys(before, &tokens[block * size..end * size], *block_size);
        let mut unnamed = total - block;
        for (keys, hashes) in keys.chunks(AT_ONCE).zip(hashes[block..end].chunks(AT_ONCE)) {
            self.caches.warm_stored(slot, keys, hashes);
            for (key, hash) in keys.iter().zip(hashes) {
                place = self.caches.confirm(slot, *key, *hash, place, now);
                if place.is_none() {
                    self.streams[slot].orphans += unnamed as u64;
                    return 0;
                }
                unnamed -= 1;
            }
        }
        if end == total { 0 } else { end }
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
