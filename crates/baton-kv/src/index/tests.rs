use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use baton_units::{BlockSize, Blocks};

use super::*;
use crate::{CacheDomain, EngineHash, KvPool, chain_keys};

const SIZE: BlockSize = BlockSize::new(2).unwrap();
const LIFETIME: Duration = Duration::from_millis(10);
const BYTES: Bytes = Bytes(1 << 20);
const REPLICAS: usize = 3;
/// The last one makes sets of two words.
const IDS: [ReplicaId; REPLICAS] = [ReplicaId(0), ReplicaId(1), ReplicaId(70)];

/// Chains that share beginnings: every digit is one block of two equal tokens.
fn chain(digits: &[u32]) -> Vec<u32> {
    digits.iter().flat_map(|digit| [*digit, *digit]).collect()
}

fn root() -> BlockKey {
    KeyDomain { model: "m", adapter: None, salt: None }.root()
}

fn keys(digits: &[u32]) -> Vec<BlockKey> {
    chain_keys(root(), &chain(digits), SIZE)
}

fn hash(key: BlockKey) -> EngineHash {
    EngineHash(key.0.rotate_left(7))
}

fn still_matches(index: &FleetIndex, keys: &[BlockKey], depths: &[u32]) -> bool {
    let mut ends = MatchEnds::default();
    index.ends_into(depths, &mut ends);
    index.still_matches(keys, &ends)
}

#[derive(Debug, Clone)]
enum Op {
    Expect(usize, Vec<u32>),
    Store(usize, Vec<u32>),
    RemoveTail(usize, Vec<u32>),
    Forget(usize, Vec<u32>),
    /// A request is sent; the oldest of those in flight ends, well or before its first token.
    Send(usize, Vec<u32>),
    End(bool),
    Clear(usize),
    Restart(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let digits = || prop::collection::vec(0u32..2, 1..10);
    let replica = || 0..REPLICAS;
    prop_oneof![
        4 => (replica(), digits()).prop_map(|(replica, digits)| Op::Expect(replica, digits)),
        6 => (replica(), digits()).prop_map(|(replica, digits)| Op::Store(replica, digits)),
        5 => (replica(), digits()).prop_map(|(replica, digits)| Op::RemoveTail(replica, digits)),
        2 => (replica(), digits()).prop_map(|(replica, digits)| Op::Forget(replica, digits)),
        4 => (replica(), digits()).prop_map(|(replica, digits)| Op::Send(replica, digits)),
        3 => any::<bool>().prop_map(Op::End),
        1 => replica().prop_map(Op::Clear),
        1 => replica().prop_map(Op::Restart),
        3 => (1u64..8).prop_map(Op::Wait),
    ]
}

/// The slow and obvious index: copies of each block by replica, the times until which others are expected, and what is in flight.
#[derive(Default)]
struct Naive {
    copies: BTreeMap<(usize, BlockKey), u32>,
    expected: BTreeMap<(usize, BlockKey), Time>,
    flights: Vec<(usize, Vec<BlockKey>)>,
}

impl Naive {
    fn holds(&self, replica: usize, key: BlockKey, now: Time) -> bool {
        self.copies.get(&(replica, key)).is_some_and(|copies| *copies > 0)
            || self.expected.get(&(replica, key)).is_some_and(|until| *until > now || self.kept(replica, key))
    }

    /// Whether a request in flight has it in its prompt.
    fn kept(&self, replica: usize, key: BlockKey) -> bool {
        self.flights.iter().any(|(on, keys)| *on == replica && keys.contains(&key))
    }

    /// Ends what is over, so that a later request does not keep it.
    fn expire(&mut self, now: Time) {
        let kept: Vec<(usize, BlockKey)> = self.expected.keys().copied().filter(|(replica, key)| self.kept(*replica, *key)).collect();
        self.expected.retain(|entry, until| *until > now || kept.contains(entry));
    }

    fn depth(&self, replica: usize, keys: &[BlockKey], now: Time) -> u32 {
        keys.iter().take_while(|key| self.holds(replica, **key, now)).count() as u32
    }

    fn drop_all(&mut self, replica: usize) {
        self.copies.retain(|(of, _), _| *of != replica);
        self.expected.retain(|(of, _), _| *of != replica);
        self.flights.retain(|(of, _)| *of != replica);
    }
}

struct Pair {
    index: FleetIndex,
    naive: Naive,
    sequences: Vec<u64>,
    lives: Vec<u64>,
    now: Time,
}

impl Pair {
    fn new() -> Self {
        let places = REPLICAS;
        Self {
            index: FleetIndex::new("m", LIFETIME, BYTES),
            naive: Naive::default(),
            sequences: vec![0; places],
            lives: vec![1; places],
            now: Time::ZERO,
        }
    }

    fn publish(&mut self, replica: usize, event: KvEvent) -> Applied {
        let batch = KvEventBatch { sequence: self.sequences[replica], timestamp_s: 0.0, events: vec![event], dp_rank: None };
        self.sequences[replica] += 1;
        self.index.apply(IDS[replica], Incarnation(self.lives[replica]), &batch, self.now)
    }

    fn play(&mut self, op: Op) {
        self.naive.expire(self.now);
        match op {
            Op::Expect(replica, digits) => {
                let keys = keys(&digits);
                self.index.expect(IDS[replica], &keys, self.now);
                for key in keys {
                    self.naive.expected.insert((replica, key), self.now + LIFETIME);
                }
            }
            Op::Store(replica, digits) => self.store(replica, &digits),
            Op::RemoveTail(replica, digits) => {
                let key = *keys(&digits).last().unwrap();
                self.publish(replica, KvEvent::Removed { hashes: vec![hash(key)] });
                if let Some(copies) = self.naive.copies.get_mut(&(replica, key)).filter(|copies| **copies > 0) {
                    *copies -= 1;
                    if *copies == 0 {
                        // The engine's word ends what was only expected, too.
                        self.naive.expected.remove(&(replica, key));
                    }
                }
            }
            Op::Forget(replica, digits) => {
                let key = *keys(&digits).last().unwrap();
                self.index.forget(IDS[replica], key);
                self.naive.expected.remove(&(replica, key));
            }
            Op::Send(replica, digits) => {
                let keys = keys(&digits);
                self.index.pin(IDS[replica], &keys, self.now, |_| {});
                for key in &keys {
                    self.naive.expected.insert((replica, *key), self.now + LIFETIME);
                }
                self.naive.flights.push((replica, keys));
            }
            Op::End(well) => {
                if self.naive.flights.is_empty() {
                    return;
                }
                let (replica, keys) = self.naive.flights.remove(0);
                self.index.unpin(IDS[replica], &keys, &keys, well, self.now);
                if well {
                    for key in keys {
                        self.naive.expected.insert((replica, key), self.now + LIFETIME);
                    }
                } else {
                    self.index.forget_unused(IDS[replica], &keys);
                    for key in keys {
                        if !self.naive.kept(replica, key) {
                            self.naive.expected.remove(&(replica, key));
                        }
                    }
                }
            }
            Op::Clear(replica) => {
                self.publish(replica, KvEvent::Cleared);
                self.naive.drop_all(replica);
            }
            Op::Restart(replica) => {
                self.lives[replica] += 1;
                self.sequences[replica] = 0;
                self.index.restart(IDS[replica], Incarnation(self.lives[replica]));
                self.naive.drop_all(replica);
            }
            Op::Wait(ms) => {
                self.now += Duration::from_millis(ms);
                self.index.expire(self.now);
                self.naive.expire(self.now);
            }
        }
    }

    /// Stores what of the chain hangs on a stored parent, as an engine does: from the first block it lacks, the last one again if it lacks none.
    fn store(&mut self, replica: usize, digits: &[u32]) {
        let (keys, tokens) = (keys(digits), chain(digits));
        let stored = |key: &BlockKey| self.naive.copies.get(&(replica, *key)).is_some_and(|copies| *copies > 0);
        let from = keys.iter().take_while(|key| stored(key)).count().min(keys.len() - 1);
        let event = KvEvent::Stored {
            hashes: keys[from..].iter().map(|key| hash(*key)).collect(),
            parent: from.checked_sub(1).map(|before| hash(keys[before])),
            tokens: tokens[from * 2..].to_vec(),
            block_size: SIZE,
            adapter: None,
            salt: None,
        };
        assert_eq!(self.publish(replica, event), Applied::Ok);
        for key in &keys[from..] {
            *self.naive.copies.entry((replica, *key)).or_default() += 1;
        }
    }

    fn check(&self, digits: &[u32]) {
        let keys = keys(digits);
        let depths = self.index.matches(&keys);
        for (replica, id) in IDS.into_iter().enumerate() {
            let depth = depths.get(id.index()).copied().unwrap_or(0);
            assert_eq!(depth, self.naive.depth(replica, &keys, self.now), "replica {replica} of {digits:?}");
            for key in &keys {
                assert_eq!(self.index.holds(id, *key), self.naive.holds(replica, *key, self.now));
                let elsewhere = (0..REPLICAS).any(|other| other != replica && self.naive.holds(other, *key, self.now));
                assert_eq!(self.index.held_elsewhere(*key, id), elsewhere);
            }
        }
        assert!(still_matches(&self.index, &keys, &depths));
    }
}

proptest! {
    #[test]
    fn the_index_agrees_with_a_scan_of_all_that_was_stored(
        ops in prop::collection::vec(op(), 1..60),
        probe in prop::collection::vec(0u32..3, 1..6),
    ) {
        let mut pair = Pair::new();
        for op in ops {
            pair.play(op);
            pair.check(&probe);
        }
        let held: BTreeSet<BlockKey> = pair.naive.copies.iter().filter(|(_, copies)| **copies > 0).map(|((_, key), _)| *key)
            .chain(pair.naive.expected.iter().filter(|((replica, key), until)| **until > pair.now || pair.naive.kept(*replica, *key)).map(|((_, key), _)| *key))
            .collect();
        prop_assert_eq!(pair.index.len(), held.len(), "blocks that nobody holds are dropped");
    }

    #[test]
    fn missing_batches_change_nothing_once_they_are_replayed(
        chains in prop::collection::vec(prop::collection::vec(0u32..3, 1..5), 2..20),
        lost in prop::collection::vec(any::<bool>(), 20),
    ) {
        let batches: Vec<KvEventBatch> = chains.iter().enumerate().map(|(sequence, digits)| KvEventBatch {
            sequence: sequence as u64,
            timestamp_s: sequence as f64,
            events: vec![KvEvent::Stored {
                hashes: keys(digits).into_iter().map(hash).collect(),
                parent: None,
                tokens: chain(digits),
                block_size: SIZE,
                adapter: None,
                salt: None,
            }],
            dp_rank: None,
        }).collect();
        let (replica, life) = (ReplicaId(0), Incarnation(1));
        let (mut lossless, mut lossy) = (FleetIndex::new("m", LIFETIME, BYTES), FleetIndex::new("m", LIFETIME, BYTES));
        for (batch, lost) in batches.iter().zip(&lost) {
            lossless.apply(replica, life, batch, Time::ZERO);
            if *lost {
                continue;
            }
            if let Applied::Gap { expected, got } = lossy.apply(replica, life, batch, Time::ZERO) {
                prop_assert!(lossy.doubtful(replica));
                for missing in &batches[expected as usize..got as usize] {
                    lossy.apply(replica, life, missing, Time::ZERO);
                }
            }
            prop_assert!(!lossy.doubtful(replica));
            for digits in &chains {
                prop_assert_eq!(lossy.matches(&keys(digits)), lossless.matches(&keys(digits)));
            }
        }
    }
}

proptest! {
    /// Against a list of keys from the least recently used on: what requests keep is skipped, and a chain goes from its end.
    #[test]
    fn a_cache_evicts_what_a_plain_list_would(
        uses in prop::collection::vec((0u32..6, 1usize..5, any::<bool>()), 1..60),
        limit in 1usize..12,
    ) {
        let (replica, mut index) = (ReplicaId(0), FleetIndex::new("m", Duration::from_hours(1), BYTES));
        let mut list: Vec<BlockKey> = Vec::new();
        let mut kept: Vec<Vec<BlockKey>> = Vec::new();
        let used = |kept: &[Vec<BlockKey>], key: &BlockKey| kept.iter().flatten().any(|other| other == key);
        for (moment, (from, count, keep)) in uses.into_iter().enumerate() {
            let chain = keys(&(0..count as u32).map(|place| from << 8 | place).collect::<Vec<_>>());
            let now = Time(moment as u64 * 1_000_000);
            let touch = |list: &mut Vec<BlockKey>, chain: &[BlockKey]| {
                list.retain(|other| !chain.contains(other));
                list.extend(chain.iter().rev());
            };
            index.pin(replica, &chain, now, |_| {});
            touch(&mut list, &chain);
            kept.push(chain);
            // One request ends after others began, and is as young as they are then.
            let ends = if keep { (kept.len() > 3).then_some(0) } else { Some(kept.len() - 1) };
            if let Some(place) = ends {
                let chain = kept.remove(place);
                index.unpin(replica, &chain, &chain, true, now + Duration::from_nanos(1));
                touch(&mut list, &chain);
            }
            let mut told = 0;
            index.evict_to(replica, limit, now + Duration::from_nanos(2), |seen| told += seen.blocks);
            let over = list.len().saturating_sub(limit);
            let gone: Vec<BlockKey> = list.iter().filter(|key| !used(&kept, key)).take(over).copied().collect();
            list.retain(|key| !gone.contains(key));
            prop_assert_eq!(told as usize, gone.len());
            prop_assert!(gone.iter().all(|key| !index.holds(replica, *key)), "the wrong ones are left");
            prop_assert_eq!(index.blocks_resident(replica), list.len());
            prop_assert_eq!(index.blocks_held(replica), list.len());
            prop_assert_eq!(index.blocks_pinned(replica), list.iter().filter(|key| used(&kept, key)).count());
            prop_assert_eq!(index.victims(replica, now).count(), list.len() - index.blocks_pinned(replica));
            for from in 0..6 {
                let asked = keys(&(0..6).map(|place| from << 8 | place).collect::<Vec<_>>());
                let pinned = asked.iter().take_while(|key| used(&kept, key)).count();
                prop_assert!((0..=asked.len()).all(|guess| index.pinned_prefix(replica, &asked, guess) == pinned));
            }
        }
    }

    /// A bisection finds what a walk would, whatever holes there are.
    #[test]
    fn a_match_of_a_long_chain_is_what_a_walk_finds(
        lengths in prop::collection::vec(0usize..200, 1..140),
        holes in prop::collection::vec((0usize..140, 0usize..200), 0..6),
        asked in 1usize..200,
    ) {
        let mut index = FleetIndex::new("m", LIFETIME, Bytes(64 << 20));
        let keys = keys(&(0..200).collect::<Vec<_>>());
        for (replica, length) in lengths.iter().enumerate() {
            index.expect(ReplicaId(replica as u32), &keys[..*length], Time::ZERO);
        }
        for (replica, hole) in holes {
            index.forget(ReplicaId(replica as u32), keys[hole]);
        }
        let walk: Vec<u32> = (0..lengths.len())
            .map(|replica| keys[..asked].iter().take_while(|key| index.holds(ReplicaId(replica as u32), **key)).count() as u32)
            .collect();
        let found = index.matches(&keys[..asked]);
        prop_assert_eq!(&found, &walk);
        prop_assert!(still_matches(&index, &keys[..asked], &found));
        let other: Vec<u32> = found.iter().map(|depth| depth.saturating_sub(1)).collect();
        prop_assert!(other == found || !still_matches(&index, &keys[..asked], &other));
    }

    /// However much is put in, memory stays within the bound, nothing that a request keeps goes, and all counts agree.
    #[test]
    fn memory_is_bounded_and_the_least_worth_goes_first(
        uses in prop::collection::vec((0usize..3, 0u32..400, any::<bool>()), 1..200),
    ) {
        let mut index = FleetIndex::new("m", Duration::from_hours(1), Bytes(0));
        let bound = index.blocks_max();
        let mut kept: Vec<(ReplicaId, Vec<BlockKey>)> = Vec::new();
        for (moment, (replica, text, keep)) in uses.into_iter().enumerate() {
            let (replica, now) = (ReplicaId(replica as u32), Time(moment as u64));
            let chain = keys(&(0..60).map(|place| text << 8 | place).collect::<Vec<_>>());
            index.make_room(chain.len(), now, |_, victim| f64::from(victim.depth));
            index.pin(replica, &chain, now, |_| {});
            kept.push((replica, chain));
            if !keep || kept.len() > 3 {
                let (replica, chain) = kept.remove(0);
                index.unpin(replica, &chain, &chain, true, now);
            }
            let held: usize = (0..3).map(|replica| index.blocks_held(ReplicaId(replica))).sum();
            prop_assert!(held <= bound);
            for (replica, chain) in &kept {
                let walk = chain.iter().take_while(|key| index.holds(*replica, **key)).count();
                prop_assert_eq!(walk, chain.len());
                prop_assert_eq!(index.matches(chain)[replica.index()] as usize, walk);
            }
        }
    }
}

/// Readers beside the writer, over growth and widening of the table: what lies still is matched exactly all the time.
#[test]
fn matches_of_what_lies_still_are_exact_while_the_index_changes() {
    let mut index = FleetIndex::new("m", Duration::from_hours(1), Bytes(64 << 20));
    let still = keys(&(0..100).collect::<Vec<_>>());
    let lengths = [100, 40, 0, 73];
    for (replica, length) in lengths.iter().enumerate() {
        index.expect(ReplicaId(replica as u32), &still[..*length], Time::ZERO);
    }
    let (reader, done) = (index.reader(), std::sync::atomic::AtomicBool::new(false));
    std::thread::scope(|scope| {
        let matching = scope.spawn(|| {
            let (mut depths, mut rounds) = (Vec::new(), 0);
            while rounds < 100 || !done.load(Ordering::Relaxed) {
                reader.matches_into(&still, &mut depths);
                if depths[..4] != [100, 40, 0, 73] {
                    return Err(depths);
                }
                rounds += 1;
            }
            Ok(())
        });
        for text in 1..400u32 {
            let chain = keys(&(0..20).map(|place| text << 16 | place).collect::<Vec<_>>());
            index.expect(ReplicaId(text % 130), &chain, Time::ZERO);
            for key in chain.iter().rev().take(10) {
                index.forget(ReplicaId(text % 130), *key);
            }
        }
        done.store(true, Ordering::Relaxed);
        assert_eq!(matching.join().expect("the reader ends"), Ok(()));
    });
}

/// Chains that all part right before an anchor: more anchors than there is room for. None is used until the surplus is gone.
#[test]
fn matches_are_exact_with_more_anchors_than_there_is_room_for() {
    let mut index = FleetIndex::new("m", Duration::from_hours(1), BYTES);
    let chain_of = |last: u32| {
        let mut digits = vec![0; anchors::SPACING - 1];
        digits.extend([last, 9]);
        keys(&digits)
    };
    let replica = ReplicaId(0);
    let all = index.blocks_max() as u32 / 2 - 10;
    let missing = |index: &FleetIndex| index.caches.anchors.shared().missing.load(Ordering::Relaxed);
    for last in 0..all {
        index.expect(replica, &chain_of(last), Time::ZERO);
    }
    assert_eq!(index.evicted_for_room(), 0);
    assert!(missing(&index) == 0, "half of all blocks, as there is room for");
    for last in 0..all {
        index.forget(replica, chain_of(last)[anchors::SPACING]);
    }
    for last in all..2 * all - 10 {
        index.expect(replica, &chain_of(last)[..anchors::SPACING], Time::ZERO);
    }
    assert_eq!(index.evicted_for_room(), 0);
    assert!(missing(&index) > 0);
    let depth = anchors::SPACING as u32;
    assert!((0..2 * all - 10).all(|last| index.matches(&chain_of(last)) == [depth]));
    let surplus = missing(&index) as u32;
    // The last ones came when there was no more room.
    for last in 2 * all - 10 - surplus..2 * all - 10 {
        index.forget(replica, chain_of(last)[anchors::SPACING - 1]);
    }
    assert_eq!(missing(&index), 0);
    assert_eq!(index.matches(&chain_of(0)), [depth]);
    assert_eq!(index.matches(&chain_of(2 * all - 11)), [depth - 1]);
    index.restart(replica, Incarnation(2));
    assert_eq!(index.caches.anchors.shared().missing.load(Ordering::Relaxed), 0);
    assert_eq!(index.matches(&chain_of(0)), [0]);
}

#[test]
fn where_chains_part_is_found_from_the_end() {
    let mut index = FleetIndex::new("m", LIFETIME, BYTES);
    let (long, other) = (keys(&[1, 2, 3, 4, 5, 6]), keys(&[1, 2, 3, 9]));
    index.expect(ReplicaId(0), &long, Time::ZERO);
    assert_eq!(index.deepest_branch(ReplicaId(0), &long, 6), None);
    index.expect(ReplicaId(1), &other, Time::ZERO);
    assert_eq!(index.deepest_branch(ReplicaId(0), &long, 6), Some(3), "seen on another replica");
    assert_eq!(index.deepest_branch(ReplicaId(1), &long, 3), Some(3));
    assert_eq!(index.deepest_branch(ReplicaId(0), &long, 2), None);
    index.expect(ReplicaId(2), &long[..4], Time::ZERO);
    assert_eq!(index.deepest_branch(ReplicaId(2), &long, 4), Some(3), "seen before it came here");
}

proptest! {
    #[test]
    fn where_long_chains_part_is_where_the_last_of_them_does(
        length in 1u32..400,
        partings in prop::collection::vec((0u32..400, 0u32..3, any::<bool>()), 0..6),
        held in 0usize..400,
    ) {
        let mut index = FleetIndex::new("m", LIFETIME, BYTES);
        let long = keys(&(0..length).collect::<Vec<_>>());
        index.expect(ReplicaId(0), &long, Time::ZERO);
        let mut expected = 0;
        for (number, (at, replica, late)) in partings.into_iter().enumerate() {
            let at = at.min(length - 1);
            let held = held.min(long.len()) as u32;
            // Where it parts after its first block, and before the chain's last.
            if at > 0 && at <= held && at < length {
                expected = expected.max(at);
            }
            let other: Vec<u32> = (0..at).chain([1000 + number as u32]).collect();
            index.expect(ReplicaId(replica), &keys(&other), Time::ZERO);
            if late {
                // The chain's end comes anew to the replica.
                index.forget(ReplicaId(0), long[long.len() - 1]);
                index.expect(ReplicaId(0), &long, Time::ZERO);
            }
        }
        let found = index.deepest_branch(ReplicaId(0), &long, held.min(long.len()));
        prop_assert_eq!(found.unwrap_or(0) as u32, expected);
    }
}

#[test]
fn what_is_worth_least_goes_over_all_replicas() {
    let mut index = FleetIndex::new("m", Duration::from_hours(1), Bytes(0));
    let text = |text: u32, blocks: u32| keys(&(0..blocks).map(|place| text << 16 | place).collect::<Vec<_>>());
    let half = index.blocks_max() as u32 / 2;
    let (cheap, dear) = (text(1, half), text(2, half));
    // The dear one is older, so plain age would choose it.
    index.expect(ReplicaId(0), &dear, Time(1));
    index.expect(ReplicaId(1), &cheap, Time(2));
    index.make_room(100, Time(3), |replica, _| if replica == ReplicaId(0) { 2.0 } else { 1.0 });
    assert_eq!(index.matches(&dear)[0], half);
    assert_eq!(index.matches(&cheap)[1], half - 100 + (index.blocks_max() as u32 - 2 * half));
    assert_eq!(index.evicted_for_room(), 100 - (index.blocks_max() as u64 - 2 * u64::from(half)));
}

#[test]
fn memory_of_many_blocks_is_within_the_configured_bytes() {
    let mut index = FleetIndex::new("m", Duration::from_hours(1), Bytes(2 << 20));
    for text in 0..300u32 {
        let chain = keys(&(0..100).map(|place| text << 16 | place).collect::<Vec<_>>());
        index.expect(ReplicaId(text % 5), &chain, Time(u64::from(text)));
        assert!(index.bytes() <= Bytes(2 << 20), "{}", index.bytes());
    }
    assert!(index.evicted_for_room() > 0 && index.len() > index.blocks_max() / 2);
}

/// Caches that fill and then change their blocks over and over, by the engines' words and names of their own.
#[test]
fn nothing_grows_after_room_was_reserved() {
    let (replicas, chains, depth) = (3u32, 40u32, 25u32);
    let mut index = FleetIndex::new("m", Duration::from_hours(1), BYTES);
    for replica in 0..replicas {
        index.restart(ReplicaId(replica), Incarnation(1));
    }
    let empty = index.bytes();
    index.reserve((replicas * chains * depth) as usize);
    let (reserved, reader) = (index.bytes(), index.reader());
    let table = reader.holders.load_full();
    assert!(reserved > empty && reserved <= BYTES, "{empty} {reserved}");
    for text in 0..6 * chains {
        let digits = |text: u32| (0..depth).map(|place| text << 16 | place).collect::<Vec<_>>();
        for replica in 0..replicas {
            let mut batch = stored(u64::from(text), &digits(text));
            if let Some(old) = text.checked_sub(chains) {
                batch.events.insert(0, KvEvent::Removed { hashes: keys(&digits(old)).into_iter().map(hash).collect() });
            }
            assert_eq!(index.apply(ReplicaId(replica), Incarnation(1), &batch, Time(u64::from(text))), Applied::Ok);
        }
        assert_eq!(index.bytes(), reserved, "after {text}");
    }
    assert_eq!(index.blocks_held(ReplicaId(0)), (chains * depth) as usize);
    assert!(Arc::ptr_eq(&table, &index.reader().holders.load_full()), "the table was built anew");
}

/// A batch that stores a chain from its start.
fn stored(sequence: u64, digits: &[u32]) -> KvEventBatch {
    let event = KvEvent::Stored {
        hashes: keys(digits).into_iter().map(hash).collect(),
        parent: None,
        tokens: chain(digits),
        block_size: SIZE,
        adapter: None,
        salt: None,
    };
    KvEventBatch { sequence, timestamp_s: sequence as f64, events: vec![event], dp_rank: None }
}

proptest! {
    /// What comes back from a snapshot is believed as before and goes in the same order, and the engine's names are still known.
    #[test]
    fn a_snapshot_brings_everything_back(
        chains in prop::collection::vec((prop::collection::vec(0u32..3, 1..8), any::<bool>(), any::<bool>()), 1..30),
        cut in 0usize..10_000,
    ) {
        let (replica, life, lifetime) = (ReplicaId(3), Incarnation(7), Duration::from_mins(10));
        let mut index = FleetIndex::new("m", lifetime, BYTES);
        index.restart(replica, life);
        let (mut sequence, mut now) = (0, Time::ZERO);
        for (digits, told, keep) in &chains {
            now += Duration::from_secs(1);
            if *told {
                index.apply(replica, life, &stored(sequence, digits), now);
                sequence += 1;
            } else {
                index.pin(replica, &keys(digits), now, |_| {});
                if !keep {
                    index.unpin(replica, &keys(digits), &keys(digits), true, now);
                }
            }
        }
        let bytes = index.snapshot(replica, now).unwrap();
        // The other run has just begun, and some time has passed.
        let (age, begin) = (Duration::from_secs(20), Time(5));
        let mut other = FleetIndex::new("m", lifetime, BYTES);
        other.restart(replica, life);
        let held = other.restore(replica, &bytes, age, begin).unwrap();
        prop_assert_eq!(held, index.blocks_held(replica));
        prop_assert_eq!(other.next_sequence(replica), sequence);
        prop_assert_eq!(other.doubtful(replica), sequence > 0, "nothing is certain before the stream goes on");
        for (digits, ..) in &chains {
            prop_assert_eq!(other.matches(&keys(digits)), index.matches(&keys(digits)));
            for key in keys(digits) {
                prop_assert_eq!(other.confirmed(replica, key), index.confirmed(replica, key));
            }
        }
        // Every name is known: the engine can take all of it back.
        if sequence > 0 {
            let hashes = chains.iter().flat_map(|(digits, ..)| keys(digits)).map(hash);
            let hashes: Vec<EngineHash> = hashes.flat_map(|hash| std::iter::repeat_n(hash, chains.len())).collect();
            let removed = KvEventBatch { sequence, timestamp_s: 1e9, events: vec![KvEvent::Removed { hashes }], dp_rank: None };
            prop_assert_eq!(other.apply(replica, life, &removed, begin), Applied::Ok);
            index.apply(replica, life, &removed, now);
            prop_assert!(!other.doubtful(replica));
        }
        let order = |index: &FleetIndex, now| index.victims(replica, now).map(|victim| (victim.depth, victim.reused)).collect::<Vec<_>>();
        if chains.iter().all(|(_, told, keep)| *told || !keep) {
            prop_assert_eq!(order(&other, begin), order(&index, now));
        }
        // What is told by nobody ends when it would have.
        other.expire(begin + lifetime.saturating_sub(age));
        prop_assert_eq!(other.blocks_held(replica), 0);
        // Damage is noticed wherever it is.
        let mut damaged = bytes.clone();
        let at = cut % damaged.len();
        damaged[at] ^= 1;
        prop_assert_eq!(FleetIndex::new("m", lifetime, BYTES).restore(replica, &damaged, age, begin), Err(SnapshotError::Malformed));
        prop_assert_eq!(FleetIndex::new("m", lifetime, BYTES).restore(replica, &bytes[..at], age, begin), Err(SnapshotError::Malformed));
    }
}

fn restored(bytes: &[u8], life: u64) -> (FleetIndex, Result<usize, SnapshotError>) {
    let mut index = FleetIndex::new("m", LIFETIME, BYTES);
    index.restart(ReplicaId(0), Incarnation(life));
    let outcome = index.restore(ReplicaId(0), bytes, Duration::from_secs(3), Time::ZERO);
    (index, outcome)
}

fn snapshot_of_two_batches() -> Vec<u8> {
    let (mut index, replica) = (FleetIndex::new("m", LIFETIME, BYTES), ReplicaId(0));
    index.restart(replica, Incarnation(4));
    index.apply(replica, Incarnation(4), &stored(0, &[1, 2]), Time::ZERO);
    index.apply(replica, Incarnation(4), &stored(1, &[1, 3]), Time::ZERO);
    index.snapshot(replica, Time::ZERO).unwrap()
}

#[test]
fn a_snapshot_of_another_life_is_dropped() {
    let (index, outcome) = restored(&snapshot_of_two_batches(), 5);
    assert_eq!(outcome, Err(SnapshotError::OtherIncarnation { expected: Incarnation(5), found: Incarnation(4) }));
    assert!(index.is_empty());
}

#[test]
fn a_restored_replica_is_doubtful_until_its_stream_is_seen_to_go_on() {
    let (replica, life, bytes) = (ReplicaId(0), Incarnation(4), snapshot_of_two_batches());
    let begin = || {
        let (index, outcome) = restored(&bytes, 4);
        assert_eq!((outcome, index.next_sequence(replica), index.doubtful(replica)), (Ok(3), 2, true));
        index
    };
    // Nothing was missed: the next batch is the one after, or the engine repeats its last one.
    let mut index = begin();
    assert_eq!(index.apply(replica, life, &stored(2, &[1, 2, 2]), Time::ZERO), Applied::Ok);
    assert!(!index.doubtful(replica));
    let mut index = begin();
    assert_eq!(index.apply(replica, life, &stored(0, &[1, 2]), Time::ZERO), Applied::Ignored);
    assert!(index.doubtful(replica), "an old batch proves nothing of the last one");
    assert_eq!(index.apply(replica, life, &stored(1, &[1, 3]), Time::ZERO), Applied::Ignored);
    assert!(!index.doubtful(replica));
    // Batches were missed, and come by replay.
    let mut index = begin();
    assert_eq!(index.apply(replica, life, &stored(4, &[2]), Time::ZERO), Applied::Gap { expected: 2, got: 4 });
    for sequence in [2, 3] {
        assert!(index.doubtful(replica));
        index.apply(replica, life, &stored(sequence, &[3, 3]), Time::ZERO);
    }
    assert!(!index.doubtful(replica) && index.matches(&keys(&[2])) == [1]);
    // They cannot be had: it stays doubtful until its cache is cleared.
    let mut index = begin();
    index.apply(replica, life, &stored(4, &[2]), Time::ZERO);
    index.skip_gap(replica, Time::ZERO);
    index.apply(replica, life, &stored(5, &[2]), Time::ZERO);
    assert!(index.doubtful(replica));
    let cleared = KvEventBatch { events: vec![KvEvent::Cleared], ..stored(6, &[2]) };
    index.apply(replica, life, &cleared, Time::ZERO);
    assert!(!index.doubtful(replica) && index.is_empty());
    // Its engine began anew without a word.
    let mut index = begin();
    let anew = KvEventBatch { timestamp_s: 99.0, ..stored(0, &[2]) };
    assert_eq!(index.apply(replica, life, &anew, Time::ZERO), Applied::Restarted);
    assert_eq!((index.blocks_held(replica), index.doubtful(replica)), (1, false));
}

#[test]
fn a_reported_hit_proves_and_disproves_blocks() {
    let (replica, now) = (ReplicaId(0), Time::ZERO);
    let mut index = FleetIndex::new("m", Duration::from_mins(1), BYTES);
    let (asked, beside, told) = (keys(&[1, 2, 3, 4]), keys(&[1, 2, 5, 6]), keys(&[1, 2, 7]));
    index.expect(replica, &beside, now);
    index.apply(replica, Incarnation(0), &stored(0, &[1, 2, 7]), now);
    index.pin(replica, &asked, now, |_| {});
    index.report_hit(replica, &asked, 2, 1, now);
    assert_eq!(index.matches(&asked), [4], "the request computes its prompt");
    assert_eq!(index.matches(&beside), [2], "what hung on the missing block is gone");
    assert_eq!(index.matches(&told), [3], "the engine's own word counts more");
    index.forget(replica, asked[3]);
    index.report_hit(replica, &asked, 3, 4, now);
    assert_eq!(index.matches(&asked), [4]);
    assert_eq!(index.hit_error(replica), HitError { requests: 2, believed: 5, reported: 5, missing: 1, unforeseen: 1 });
}

#[test]
fn a_prefix_branches_where_two_different_blocks_follow_it() {
    let mut index = FleetIndex::new("m", LIFETIME, BYTES);
    index.expect(ReplicaId(0), &keys(&[1, 2, 0]), Time::ZERO);
    assert!(!index.branches(keys(&[1, 2])[1]));
    index.expect(ReplicaId(1), &keys(&[1, 2, 0, 1]), Time::ZERO);
    assert!(!index.branches(keys(&[1, 2])[1]), "the same chain, longer, is no branch");
    index.expect(ReplicaId(1), &keys(&[1, 2, 1]), Time::ZERO);
    assert!(index.branches(keys(&[1, 2])[1]) && !index.branches(keys(&[1])[0]));
}

#[test]
fn a_former_incarnation_has_no_say() {
    let mut pair = Pair::new();
    pair.play(Op::Restart(0));
    pair.store(0, &[1, 2]);
    let stale = KvEventBatch { sequence: 1, timestamp_s: 9.0, events: vec![KvEvent::Cleared], dp_rank: None };
    assert_eq!(pair.index.apply(ReplicaId(0), Incarnation(1), &stale, Time::ZERO), Applied::Ignored);
    pair.check(&[1, 2]);
}

/// What happens to a replica whose events are taken in whole in one index and in slices in another.
#[derive(Debug, Clone)]
enum Told {
    /// A batch comes; of what is begun, so many blocks are taken in, in slices of so many.
    Batch {
        events: Vec<KvEvent>,
        lost: bool,
        slice: usize,
        slices: usize,
    },
    /// Batches that went missing are given up for lost.
    SkipGap,
    /// The engine begins anew without a marker.
    Anew,
    Restart,
    Send(Vec<u32>),
}

fn event() -> impl Strategy<Value = KvEvent> {
    let digits = || prop::collection::vec(0u32..3, 1..12);
    prop_oneof![
        6 => (digits(), 0usize..4).prop_map(|(digits, from)| {
            let (keys, from) = (keys(&digits), from.min(digits.len() - 1));
            KvEvent::Stored {
                hashes: keys[from..].iter().map(|key| hash(*key)).collect(),
                parent: from.checked_sub(1).map(|before| hash(keys[before])),
                tokens: chain(&digits[from..]),
                block_size: SIZE,
                adapter: None,
                salt: None,
            }
        }),
        3 => digits().prop_map(|digits| KvEvent::Removed { hashes: keys(&digits).into_iter().rev().map(hash).collect() }),
        1 => Just(KvEvent::Removed { hashes: Vec::new() }),
        1 => Just(KvEvent::Cleared),
    ]
}

fn told() -> impl Strategy<Value = Told> {
    let batch = (prop::collection::vec(event(), 0..5), prop::bool::weighted(0.1), 1usize..9, 0usize..6);
    prop_oneof![
        12 => batch.prop_map(|(events, lost, slice, slices)| Told::Batch { events, lost, slice, slices }),
        1 => Just(Told::SkipGap),
        1 => Just(Told::Anew),
        1 => Just(Told::Restart),
        2 => prop::collection::vec(0u32..3, 1..6).prop_map(Told::Send),
    ]
}

proptest! {
    /// However the slices are cut, whatever queues behind them, and if the replica begins anew in between.
    #[test]
    fn events_in_slices_are_events_at_once(history in prop::collection::vec(told(), 1..30)) {
        let (replica, now) = (ReplicaId(1), Time(5));
        let index = || FleetIndex::new("m", Duration::from_mins(1), BYTES);
        let (mut whole, mut sliced) = (index(), index());
        let (mut life, mut sequence, mut timestamp_s) = (1, 0, 0.0);
        whole.restart(replica, Incarnation(life));
        sliced.restart(replica, Incarnation(life));
        for step in history {
            match step {
                Told::Batch { events, lost, slice, slices } => {
                    timestamp_s += 1.0;
                    let batch = KvEventBatch { sequence, timestamp_s, events, dp_rank: None };
                    sequence += 1;
                    if lost {
                        continue;
                    }
                    let applied = whole.apply(replica, Incarnation(life), &batch, now);
                    prop_assert_eq!(sliced.begin(replica, Incarnation(life), Arc::new(batch), now), applied);
                    for _ in 0..slices {
                        let adding = sliced.adding(replica, slice);
                        let before = sliced.len();
                        sliced.advance(replica, slice, now);
                        prop_assert!(adding <= slice && sliced.len() <= before + adding);
                    }
                }
                Told::SkipGap => {
                    whole.skip_gap(replica, now);
                    sliced.begin_skip_gap(replica);
                }
                Told::Anew => sequence = 0,
                Told::Restart => {
                    (life, sequence) = (life + 1, 0);
                    whole.restart(replica, Incarnation(life));
                    sliced.restart(replica, Incarnation(life));
                    prop_assert!(sliced.is_empty());
                }
                // What a request is seen to need depends on what is there: only after all is taken in.
                Told::Send(digits) => {
                    sliced.advance(replica, usize::MAX, now);
                    for index in [&mut whole, &mut sliced] {
                        index.expect(replica, &keys(&digits), now);
                    }
                }
            }
            prop_assert_eq!(sliced.next_sequence(replica), whole.next_sequence(replica));
            prop_assert_eq!(sliced.doubtful(replica), whole.doubtful(replica));
            prop_assert_eq!(sliced.publishes(replica), whole.publishes(replica));
        }
        while sliced.advance(replica, 1, now) {}
        prop_assert_eq!(sliced.orphans(replica), whole.orphans(replica));
        prop_assert_eq!(sliced.len(), whole.len());
        let victims = |index: &FleetIndex| index.victims(replica, now).collect::<Vec<_>>();
        prop_assert_eq!(victims(&sliced), victims(&whole));
        // Keys, names and copies of all blocks.
        let entries = |index: &FleetIndex| format!("{:?}", Snapshot::read(&index.snapshot(replica, now).unwrap()));
        prop_assert_eq!(entries(&sliced), entries(&whole));
    }

    /// Requests come and go while a cache is copied: what the engine told of comes back with all its copies, and nothing else is
    /// believed that was never there.
    #[test]
    fn a_snapshot_taken_in_parts_keeps_the_engines_word(
        told in prop::collection::vec(prop::collection::vec(0u32..3, 1..8), 1..20),
        sent in prop::collection::vec((prop::collection::vec(0u32..3, 1..8), 0u8..3), 0..20),
        part in 1usize..9,
    ) {
        let (replica, life, now) = (ReplicaId(2), Incarnation(1), Time(9));
        let index = || {
            let mut index = FleetIndex::new("m", Duration::from_mins(1), BYTES);
            index.restart(replica, life);
            index
        };
        let mut live = index();
        for (sequence, digits) in told.iter().enumerate() {
            live.apply(replica, life, &stored(sequence as u64, digits), now);
        }
        let mut copying = live.begin_copy([replica], now);
        let mut requests = sent.iter();
        while live.copy_some(&mut copying, part) {
            let Some((digits, how)) = requests.next() else { continue };
            let keys = keys(digits);
            live.pin(replica, &keys, now, |_| {});
            if *how > 0 {
                live.unpin(replica, &keys, &keys, *how == 1, now);
                live.forget_unused(replica, &keys);
            }
        }
        let mut restored = index();
        let held = restored.restore(replica, &copying.take(replica).unwrap(), Duration::ZERO, now).unwrap();
        prop_assert_eq!(restored.next_sequence(replica), told.len() as u64);
        let engine: BTreeSet<BlockKey> = told.iter().flat_map(|digits| keys(digits)).collect();
        let asked: BTreeSet<BlockKey> = sent.iter().flat_map(|(digits, _)| keys(digits)).collect();
        prop_assert!(held <= engine.union(&asked).count());
        prop_assert!(engine.iter().all(|key| restored.confirmed(replica, *key)));
        prop_assert!(asked.difference(&engine).all(|key| !restored.confirmed(replica, *key)));
        // The engine takes back each copy: the last one ends the belief, and none before.
        let hashes = |digits: &Vec<u32>| keys(digits).into_iter().rev().map(hash).collect();
        for (sequence, digits) in told.iter().enumerate() {
            prop_assert!(keys(digits).iter().all(|key| restored.confirmed(replica, *key)));
            let events = vec![KvEvent::Removed { hashes: hashes(digits) }];
            let batch = KvEventBatch { sequence: (told.len() + sequence) as u64, timestamp_s: 1e9, events, dp_rank: None };
            prop_assert_eq!(restored.apply(replica, life, &batch, now), Applied::Ok);
        }
        prop_assert!(!engine.iter().any(|key| restored.confirmed(replica, *key)));
    }
}

/// What an engine tells of a tenant's chain is found by that tenant's keys, its public blocks by any other's, and the rest by nobody else's.
#[test]
fn behind_public_blocks_a_chain_is_found_with_its_salt_only() {
    let (replica, life, now) = (ReplicaId(0), Incarnation(0), Time::ZERO);
    let domain = |salt, public| CacheDomain::with_public(KeyDomain { model: "m", adapter: None, salt }, Blocks(public));
    let (tokens, shared) = (chain(&[1, 2, 3, 4, 5]), domain(Some("a"), 2));
    let mut pool = KvPool::new(Blocks(16), SIZE);
    let mut table = pool.new_table(Arc::new(shared.clone()));
    pool.reserve(&mut table, 0..10, &mut Vec::new()).unwrap();
    pool.commit(&mut table, &shared.keys(&tokens, SIZE), &tokens);
    let batch = KvEventBatch { sequence: 0, timestamp_s: 0.0, events: pool.take_events(), dp_rank: None };
    pool.release(table);
    for slice in 1..6 {
        let mut index = FleetIndex::new("m", LIFETIME, BYTES);
        index.begin(replica, life, Arc::new(batch.clone()), now);
        while index.advance(replica, slice, now) {}
        let found = |domain: &CacheDomain| index.matches(&domain.keys(&tokens, SIZE))[0];
        assert_eq!(found(&shared), 5);
        assert_eq!([found(&domain(Some("b"), 2)), found(&domain(None, 0)), found(&domain(Some("a"), 1))], [2, 2, 1], "slices of {slice}");
        assert_eq!([found(&domain(Some("a"), 0)), found(&domain(Some("b"), 0))], [0, 0]);
    }
}

#[test]
fn no_snapshot_is_made_of_a_batch_that_is_half_taken_in() {
    let (replica, life, now) = (ReplicaId(0), Incarnation(0), Time::ZERO);
    let mut index = FleetIndex::new("m", LIFETIME, BYTES);
    index.apply(replica, life, &stored(0, &[1, 2, 3]), now);
    index.begin(replica, life, Arc::new(stored(1, &[2, 2, 2])), now);
    assert!(index.advance(replica, 2, now));
    assert_eq!(index.snapshot(replica, now), None);
    assert!(!index.advance(replica, 2, now));
    let mut copying = index.begin_copy([replica], now);
    assert!(index.copy_some(&mut copying, 2));
    index.apply(replica, life, &stored(2, &[3]), now);
    index.copy_some(&mut copying, 100);
    assert_eq!(copying.take(replica), None, "its events went on");
}

#[test]
fn what_a_reader_found_does_not_outlive_the_entries() {
    let (life, now, chain) = (Incarnation(1), Time::ZERO, keys(&[1, 2, 3]));
    let mut index = FleetIndex::new("m", Duration::from_mins(1), BYTES);
    let reader = index.reader();
    let settled = |index: &FleetIndex, matched: Matched| {
        let mut depths = Vec::new();
        index.settle(Some(matched), &chain, &mut depths);
        depths
    };
    for id in [0, 1] {
        index.restart(ReplicaId(id), life);
        index.expect(ReplicaId(id), &chain, now);
    }
    assert_eq!(settled(&index, reader.matches(&chain)), [3, 3]);
    // It may be a moment old, also over a table that is wider, and with replicas that it never heard of.
    let early = reader.matches(&chain);
    index.forget(ReplicaId(1), chain[2]);
    index.expect(ReplicaId(70), &chain, now);
    assert_eq!(settled(&index, early), [3, 3]);
    assert_eq!(settled(&index, reader.matches(&chain))[..2], [3, 2]);
    // But not about one that began anew since, or left, or is being cleared.
    let early = reader.matches(&chain);
    index.restart(ReplicaId(0), Incarnation(2));
    index.expect(ReplicaId(0), &chain[..1], now);
    assert_eq!(settled(&index, early)[..2], [1, 2]);
    let early = reader.matches(&chain);
    index.begin_clear(ReplicaId(1));
    assert!(index.advance(ReplicaId(1), 1, now));
    let midway = reader.matches(&chain);
    assert_eq!(index.matches(&chain)[..2], [1, 0]);
    for matched in [early.clone(), midway.clone()] {
        assert_eq!(settled(&index, matched)[..2], [1, 0]);
    }
    assert!(!index.advance(ReplicaId(1), 9, now));
    index.expect(ReplicaId(1), &chain[..1], now);
    for matched in [early, midway] {
        assert_eq!(settled(&index, matched)[..2], [1, 1]);
    }
}

#[test]
fn a_cleared_cache_is_not_matched_while_its_entries_go() {
    let (replica, life, now) = (ReplicaId(0), Incarnation(0), Time::ZERO);
    let mut index = FleetIndex::new("m", LIFETIME, BYTES);
    index.apply(replica, life, &stored(0, &[1, 2, 3, 4]), now);
    let mut batch = stored(1, &[1, 2]);
    batch.events.insert(0, KvEvent::Cleared);
    index.begin(replica, life, Arc::new(batch), now);
    assert_eq!(index.matches(&keys(&[1, 2, 3])), [3], "not yet begun");
    assert!(index.advance(replica, 1, now));
    assert_eq!((index.matches(&keys(&[1, 2, 3])), index.blocks_held(replica)), (vec![0], 3));
    while index.advance(replica, 2, now) {}
    assert_eq!((index.matches(&keys(&[1, 2, 3])), index.blocks_held(replica)), (vec![2], 2));
}
