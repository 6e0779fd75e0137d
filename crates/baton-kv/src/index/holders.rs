use std::sync::{
    Arc,
    atomic::{AtomicU32, AtomicU64, Ordering},
};

use arc_swap::ArcSwap;

use crate::BlockKey;

/// Entries of one bucket; with up to 64 replicas a bucket is one cache line.
const WAYS: usize = 4;
/// Words of a cache line.
const LINE: usize = 8;
/// Most words of a set of replicas, for 4,096 of them.
pub(super) const WORDS_MAX: usize = 64;
/// Entries that are moved for one insertion before the table counts as full. At the load below, a dozen do.
const MOVES_MAX: u32 = 256;
/// Largest share of places taken. Two choices of four places work up to 0.97, ever slower.
pub(super) const LOAD_MAX: f64 = 0.8;
const BUCKETS_MIN: usize = 64;
/// Stands for key 0, since 0 marks a free place.
const ZERO_KEY: u64 = 0x9e37_79b9_7f4a_7c15;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Line([AtomicU64; LINE]);

/// Which replicas hold a block, for every block that one holds: a cuckoo table of two choices of buckets, in atomics, so that any
/// number of readers look keys up while the one writer changes it.
///
/// A reader finds a key's set as it is or was a moment ago, never another key's: it reads the key again after the set, and looks
/// again when entries moved while it found nothing. Nobody waits for anybody.
#[derive(Debug)]
pub(super) struct Holders {
    lines: Box<[Line]>,
    buckets: usize,
    /// Words of one set.
    words: usize,
    lines_per_bucket: usize,
    /// Counts moves of entries, each between its copy and its erasure.
    moves: AtomicU64,
    /// (Key, replica) pairs that there was no room for.
    pub(super) missing: AtomicU64,
    /// Replicas known.
    replicas: AtomicU32,
    /// Replicas that hold a block whose parent they do not hold: their blocks must be looked at one by one.
    holes: Box<[AtomicU64]>,
}

impl Holders {
    fn new(buckets: usize, words: usize) -> Self {
        let lines_per_bucket = (WAYS * (1 + words)).div_ceil(LINE);
        Self {
            lines: (0..buckets * lines_per_bucket).map(|_| Line::default()).collect(),
            buckets,
            words,
            lines_per_bucket,
            moves: AtomicU64::new(0),
            missing: AtomicU64::new(0),
            replicas: AtomicU32::new(0),
            holes: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(super) fn words(&self) -> usize {
        self.words
    }

    pub(super) fn replicas(&self) -> usize {
        self.replicas.load(Ordering::Relaxed) as usize
    }

    pub(super) fn holes<const W: usize>(&self) -> [u64; W] {
        std::array::from_fn(|word| self.holes[word].load(Ordering::Relaxed))
    }

    /// The set of replicas that hold the block; empty when none does. `W` is [`Self::words`].
    pub(super) fn get<const W: usize>(&self, key: BlockKey) -> [u64; W] {
        let key = stored(key);
        loop {
            let moves = self.moves.load(Ordering::Acquire);
            for bucket in self.choices(key) {
                let Some(place) = self.way_of(bucket, key, Ordering::Acquire) else { continue };
                let set = std::array::from_fn(|word| self.word(place, word).load(Ordering::Acquire));
                if self.key(place).load(Ordering::Relaxed) == key {
                    return set;
                }
            }
            // An entry is copied, then the move is counted, then it is erased: whoever met neither copy sees the count changed.
            if self.moves.load(Ordering::Acquire) == moves {
                return [0; W];
            }
        }
    }

    /// One word of the set, for the writer.
    pub(super) fn contains(&self, key: BlockKey, slot: usize) -> bool {
        slot / 64 < self.words
            && self.find(key).is_some_and(|place| self.word(place, slot / 64).load(Ordering::Relaxed) >> (slot % 64) & 1 == 1)
    }

    /// Loads what look-ups of the keys will need, all at the same time: a look-up waits for its first bucket before it turns to the
    /// second, and the processor guesses which.
    pub(super) fn warm(&self, keys: impl Iterator<Item = BlockKey>) {
        let load = |bucket| self.key(Place { bucket, way: 0 }).load(Ordering::Relaxed);
        let loaded = keys.map(|key| self.choices(stored(key))).fold(0, |loaded, [first, second]| loaded ^ load(first) ^ load(second));
        std::hint::black_box(loaded);
    }

    fn find(&self, key: BlockKey) -> Option<Place> {
        let key = stored(key);
        let [first, second] = self.choices(key);
        self.way_of(first, key, Ordering::Relaxed).or_else(|| self.way_of(second, key, Ordering::Relaxed))
    }

    /// Where in the bucket the key is. All ways are compared before a branch: which one it is cannot be predicted, and a wrong guess
    /// would keep the processor from looking the next key up at the same time.
    fn way_of(&self, bucket: usize, key: u64, ordering: Ordering) -> Option<Place> {
        let keys = &self.lines[bucket * self.lines_per_bucket].0;
        let found = (0..WAYS).fold(0u32, |found, way| found | u32::from(keys[way].load(ordering) == key) << way);
        (found != 0).then(|| Place { bucket, way: found.trailing_zeros() as usize })
    }

    fn choices(&self, key: u64) -> [usize; 2] {
        // Keys are hashes; the products spread those of tests as well. The high bits of a product depend on all of the key's.
        let among = |hash: u64| ((u128::from(hash) * self.buckets as u128) >> 64) as usize;
        let first = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let second = (key ^ key >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
        [among(first), among(second)]
    }

    fn key(&self, place: Place) -> &AtomicU64 {
        &self.lines[place.bucket * self.lines_per_bucket].0[place.way]
    }

    fn word(&self, place: Place, word: usize) -> &AtomicU64 {
        let at = WAYS + place.way * self.words + word;
        &self.lines[place.bucket * self.lines_per_bucket + at / LINE].0[at % LINE]
    }
}

fn stored(key: BlockKey) -> u64 {
    if key.0 == 0 { ZERO_KEY } else { key.0 }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    bucket: usize,
    way: usize,
}

/// The writer's side of [`Holders`], and what only it needs to know of a block.
#[derive(Debug)]
pub(super) struct HolderTable {
    shared: Arc<Holders>,
    /// Where readers find the present table.
    published: Arc<ArcSwap<Holders>>,
    /// Of each place: a fingerprint of the block that followed it, and whether two different ones did.
    follow: Vec<u32>,
    len: usize,
    /// Picks which entry moves.
    walk: u32,
}

impl HolderTable {
    pub(super) fn new() -> Self {
        Self::sized(BUCKETS_MIN, 1)
    }

    fn sized(buckets: usize, words: usize) -> Self {
        let shared = Arc::new(Holders::new(buckets, words));
        Self { published: Arc::new(ArcSwap::new(shared.clone())), shared, follow: vec![0; buckets * WAYS], len: 0, walk: 1 }
    }

    pub(super) fn shared(&self) -> &Arc<Holders> {
        &self.shared
    }

    pub(super) fn published(&self) -> &Arc<ArcSwap<Holders>> {
        &self.published
    }

    pub(super) fn knows(&self, key: BlockKey) -> bool {
        self.shared.find(key).is_some()
    }

    /// Distinct blocks.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes taken.
    pub(super) fn bytes(&self) -> usize {
        bytes(self.shared.buckets, self.shared.words)
    }

    /// Bytes that a table for `blocks` blocks and `words` words takes at most, its growth included.
    pub(super) fn bytes_for(blocks: usize, words: usize) -> usize {
        let buckets = buckets_for(blocks);
        // Grown by half: the last table but one lives beside the last while entries are taken over.
        bytes(buckets * 3 / 2, words) + bytes(buckets, words)
    }

    /// Makes room for `blocks` distinct blocks. Where that takes a new table, it is half as large again as the last one at least, so that
    /// a fleet that joins one by one makes few.
    pub(super) fn reserve(&mut self, blocks: usize) {
        let buckets = buckets_for(blocks);
        if buckets > self.shared.buckets {
            self.rebuild(buckets.max(self.shared.buckets * 3 / 2 + 1), self.shared.words);
        }
    }

    /// Makes room for replicas up to `count`, in a new table if the sets get wider. Tells whether the table is another.
    pub(super) fn set_replicas(&mut self, count: usize) -> bool {
        let words = count.div_ceil(64).next_power_of_two().max(1);
        assert!(words <= WORDS_MAX, "a fleet has at most {} replicas", WORDS_MAX * 64);
        let wider = words > self.shared.words;
        if wider {
            self.rebuild(self.shared.buckets, words);
        }
        self.shared.replicas.store(count as u32, Ordering::Release);
        wider
    }

    pub(super) fn set_holes(&mut self, slot: usize, has: bool) {
        let word = &self.shared.holes[slot / 64];
        let (bit, old) = (1 << (slot % 64), word.load(Ordering::Relaxed));
        word.store(if has { old | bit } else { old & !bit }, Ordering::Release);
    }

    /// Adds a holder. Tells whether two different blocks were seen after this one.
    pub(super) fn insert(&mut self, key: BlockKey, slot: usize) -> bool {
        let place = match self.shared.find(key) {
            Some(place) => place,
            None => self.add(key, slot),
        };
        let word = self.shared.word(place, slot / 64);
        word.store(word.load(Ordering::Relaxed) | 1 << (slot % 64), Ordering::Release);
        self.follow[place.bucket * WAYS + place.way] & 1 == 1
    }

    /// Takes a holder away; a block without one goes.
    pub(super) fn remove(&mut self, key: BlockKey, slot: usize) {
        let Some(place) = self.shared.find(key) else { return };
        let word = self.shared.word(place, slot / 64);
        let left = word.load(Ordering::Relaxed) & !(1 << (slot % 64));
        word.store(left, Ordering::Release);
        if left == 0 && (0..self.shared.words).all(|word| self.shared.word(place, word).load(Ordering::Relaxed) == 0) {
            self.shared.key(place).store(0, Ordering::Release);
            self.follow[place.bucket * WAYS + place.way] = 0;
            self.len -= 1;
        }
    }

    /// Loads what look-ups and changes of the keys will need.
    pub(super) fn warm(&self, keys: impl Iterator<Item = BlockKey> + Clone) {
        self.shared.warm(keys.clone());
        let buckets = keys.flat_map(|key| self.shared.choices(stored(key)));
        std::hint::black_box(buckets.fold(0, |loaded, bucket| loaded ^ self.follow[bucket * WAYS]));
    }

    /// Notes that `next` came after `key`. Tells whether `key` branches only since this call.
    pub(super) fn follow(&mut self, key: BlockKey, next: BlockKey) -> bool {
        let Some(place) = self.shared.find(key) else { return false };
        let follow = &mut self.follow[place.bucket * WAYS + place.way];
        // 31 bits: one branch in two thousand million goes unseen.
        let fingerprint = (next.0 >> 32) as u32 | 1;
        let fingerprint = fingerprint & !1 | u32::from(fingerprint == 1) << 1;
        if *follow == 0 {
            *follow = fingerprint;
        }
        let branches = *follow & 1 == 1 || *follow & !1 != fingerprint;
        let new = branches && *follow & 1 == 0;
        *follow |= u32::from(branches);
        new
    }

    pub(super) fn branches(&self, key: BlockKey) -> bool {
        self.shared.find(key).is_some_and(|place| self.follow[place.bucket * WAYS + place.way] & 1 == 1)
    }

    /// Slots of the holders.
    pub(super) fn holders(&self, key: BlockKey) -> impl Iterator<Item = usize> {
        let place = self.shared.find(key);
        place.into_iter().flat_map(move |place| {
            (0..self.shared.words).flat_map(move |word| {
                let mut left = self.shared.word(place, word).load(Ordering::Relaxed);
                std::iter::from_fn(move || {
                    let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
                    left &= left - 1;
                    Some(word * 64 + bit)
                })
            })
        })
    }

    /// Whether a replica other than `slot` holds the block.
    pub(super) fn held_elsewhere(&self, key: BlockKey, slot: usize) -> bool {
        let Some(place) = self.shared.find(key) else { return false };
        (0..self.shared.words).any(|word| {
            let own = if word == slot / 64 { 1 << (slot % 64) } else { 0 };
            self.shared.word(place, word).load(Ordering::Relaxed) & !own != 0
        })
    }

    fn add(&mut self, key: BlockKey, slot: usize) -> Place {
        if self.len as f64 >= LOAD_MAX * (self.shared.buckets * WAYS) as f64 {
            self.grow();
        }
        let place = loop {
            if let Some(place) = self.free_place(stored(key)) {
                break place;
            }
            self.grow();
        };
        for word in 0..self.shared.words {
            let bit = if word == slot / 64 { 1 << (slot % 64) } else { 0 };
            // Release, so that whoever sees the new word sees the former key erased.
            self.shared.word(place, word).store(bit, Ordering::Release);
        }
        self.shared.key(place).store(stored(key), Ordering::Release);
        self.len += 1;
        place
    }

    /// A free place for the key, by moving others if need be; `None` when too many would have to move.
    fn free_place(&mut self, key: u64) -> Option<Place> {
        let [first, second] = self.shared.choices(key);
        if let Some(place) = self.free_way(first).or_else(|| self.free_way(second)) {
            return Some(place);
        }
        // A random walk: each entry on it can go to the other bucket of its own.
        let mut path = Vec::new();
        let mut bucket = first;
        for _ in 0..MOVES_MAX {
            self.walk = self.walk.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let way = (self.walk >> 30) as usize;
            let place = Place { bucket, way };
            // Walking in a circle would move an entry that is no longer there.
            if path.contains(&place) {
                continue;
            }
            path.push(place);
            let [a, b] = self.shared.choices(self.shared.key(place).load(Ordering::Relaxed));
            bucket = if a == bucket { b } else { a };
            if let Some(free) = self.free_way(bucket) {
                let mut to = free;
                while let Some(from) = path.pop() {
                    self.move_entry(from, to);
                    to = from;
                }
                return Some(to);
            }
        }
        None
    }

    fn free_way(&self, bucket: usize) -> Option<Place> {
        self.shared.way_of(bucket, 0, Ordering::Relaxed)
    }

    fn move_entry(&mut self, from: Place, to: Place) {
        let shared = &self.shared;
        for word in 0..shared.words {
            shared.word(to, word).store(shared.word(from, word).load(Ordering::Relaxed), Ordering::Release);
        }
        shared.key(to).store(shared.key(from).load(Ordering::Relaxed), Ordering::Release);
        shared.moves.fetch_add(1, Ordering::AcqRel);
        shared.key(from).store(0, Ordering::Release);
        let (from, to) = (from.bucket * WAYS + from.way, to.bucket * WAYS + to.way);
        self.follow[to] = std::mem::take(&mut self.follow[from]);
    }

    fn grow(&mut self) {
        self.rebuild(self.shared.buckets * 3 / 2 + 1, self.shared.words);
    }

    fn rebuild(&mut self, buckets: usize, words: usize) {
        let mut new = Self::sized(buckets, words);
        new.shared.replicas.store(self.shared.replicas.load(Ordering::Relaxed), Ordering::Relaxed);
        new.shared.missing.store(self.shared.missing.load(Ordering::Relaxed), Ordering::Relaxed);
        for (to, from) in new.shared.holes.iter().zip(&self.shared.holes) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        new.walk = self.walk;
        for bucket in 0..self.shared.buckets {
            for way in 0..WAYS {
                let from = Place { bucket, way };
                let key = self.shared.key(from).load(Ordering::Relaxed);
                if key == 0 {
                    continue;
                }
                let place = new.add(BlockKey(key), 0);
                for word in 0..self.shared.words {
                    let set = self.shared.word(from, word).load(Ordering::Relaxed);
                    new.shared.word(place, word).store(set, Ordering::Relaxed);
                }
                new.follow[place.bucket * WAYS + place.way] = self.follow[bucket * WAYS + way];
            }
        }
        new.published = self.published.clone();
        new.published.store(new.shared.clone());
        *self = new;
    }
}

/// Buckets in which `blocks` blocks find their places.
fn buckets_for(blocks: usize) -> usize {
    (blocks as f64 / LOAD_MAX / WAYS as f64).ceil() as usize + BUCKETS_MIN
}

fn bytes(buckets: usize, words: usize) -> usize {
    buckets * ((WAYS * (1 + words)).div_ceil(LINE) * size_of::<Line>() + WAYS * size_of::<u32>())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    /// Small keys, zero among them, and ones like hashes.
    fn key(number: u64) -> BlockKey {
        if number.is_multiple_of(2) { BlockKey(number / 2) } else { scattered(number) }
    }

    fn scattered(number: u64) -> BlockKey {
        BlockKey(1).child(&[number as u32])
    }

    proptest! {
        /// Against a map of sets, over growth and widening.
        #[test]
        fn the_table_is_a_map_from_keys_to_sets_of_slots(
            ops in prop::collection::vec((0u64..400, 0usize..130, any::<bool>()), 1..1500),
        ) {
            let mut table = HolderTable::new();
            let mut map: BTreeMap<u64, BTreeSet<usize>> = BTreeMap::new();
            let mut replicas = 0;
            for (number, slot, insert) in ops {
                if slot >= replicas {
                    replicas = slot + 1;
                    table.set_replicas(replicas);
                }
                if insert {
                    table.insert(key(number), slot);
                    map.entry(number).or_default().insert(slot);
                } else {
                    table.remove(key(number), slot);
                    if let Some(set) = map.get_mut(&number) {
                        set.remove(&slot);
                    }
                    map.retain(|_, set| !set.is_empty());
                }
                prop_assert_eq!(table.len(), map.len());
            }
            for number in 0..400 {
                let set = map.get(&number).cloned().unwrap_or_default();
                let found = match table.shared().words() {
                    1 => bits(&table.shared().get::<1>(key(number))),
                    2 => bits(&table.shared().get::<2>(key(number))),
                    _ => bits(&table.shared().get::<4>(key(number))),
                };
                prop_assert_eq!(&found, &set);
                prop_assert_eq!(&table.holders(key(number)).collect::<BTreeSet<_>>(), &set);
                prop_assert_eq!(table.held_elsewhere(key(number), 0), set.iter().any(|slot| *slot != 0));
                prop_assert_eq!(table.shared().contains(key(number), 3), set.contains(&3));
            }
        }
    }

    fn bits(words: &[u64]) -> BTreeSet<usize> {
        (0..words.len() * 64).filter(|slot| words[slot / 64] >> (slot % 64) & 1 == 1).collect()
    }

    /// Readers beside the writer: blocks that are held all the time are always found with their holder, whatever comes, goes and moves.
    #[test]
    fn a_reader_finds_what_is_there_while_the_writer_works() {
        let (kept, others) = (0..2000u64, 2000..6000u64);
        let mut table = HolderTable::sized(2000, 1);
        table.set_replicas(2);
        for number in kept.clone() {
            table.insert(scattered(number), 1);
        }
        let shared = table.shared().clone();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (0..50).all(|_| kept.clone().all(|number| shared.get::<1>(scattered(number)) == [2])));
            for _ in 0..20 {
                for number in others.clone() {
                    table.insert(scattered(number), 0);
                }
                for number in others.clone() {
                    table.remove(scattered(number), 0);
                }
            }
            assert!(reader.join().expect("the reader ends"));
        });
        assert!(Arc::ptr_eq(&shared, table.shared()), "the table did not have to grow");
        assert!(shared.moves.load(Ordering::Relaxed) > 0, "entries had to move");
    }
}
