use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::chain_keys;

const SIZE: BlockSize = BlockSize::new(2).unwrap();
const LIFETIME: Duration = Duration::from_millis(10);
const REPLICAS: u32 = 3;

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

#[derive(Debug, Clone)]
enum Op {
    Expect(u32, Vec<u32>),
    Store(u32, Vec<u32>),
    RemoveTail(u32, Vec<u32>),
    Forget(u32, Vec<u32>),
    Clear(u32),
    Restart(u32),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let digits = || prop::collection::vec(0u32..3, 1..5);
    let replica = || 0..REPLICAS;
    prop_oneof![
        4 => (replica(), digits()).prop_map(|(replica, digits)| Op::Expect(replica, digits)),
        6 => (replica(), digits()).prop_map(|(replica, digits)| Op::Store(replica, digits)),
        5 => (replica(), digits()).prop_map(|(replica, digits)| Op::RemoveTail(replica, digits)),
        2 => (replica(), digits()).prop_map(|(replica, digits)| Op::Forget(replica, digits)),
        1 => replica().prop_map(Op::Clear),
        1 => replica().prop_map(Op::Restart),
        3 => (1u64..8).prop_map(Op::Wait),
    ]
}

/// The slow and obvious index: copies of each block by replica, and the times until which others are expected.
#[derive(Default)]
struct Naive {
    copies: BTreeMap<(u32, BlockKey), u32>,
    expected: BTreeMap<(u32, BlockKey), Time>,
}

impl Naive {
    fn holds(&self, replica: u32, key: BlockKey, now: Time) -> bool {
        self.copies.get(&(replica, key)).is_some_and(|copies| *copies > 0)
            || self.expected.get(&(replica, key)).is_some_and(|until| *until > now)
    }

    fn depth(&self, replica: u32, keys: &[BlockKey], now: Time) -> u32 {
        keys.iter().take_while(|key| self.holds(replica, **key, now)).count() as u32
    }

    fn drop_all(&mut self, replica: u32) {
        self.copies.retain(|(of, _), _| *of != replica);
        self.expected.retain(|(of, _), _| *of != replica);
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
        let places = REPLICAS as usize;
        Self {
            index: FleetIndex::new("m", LIFETIME),
            naive: Naive::default(),
            sequences: vec![0; places],
            lives: vec![1; places],
            now: Time::ZERO,
        }
    }

    fn publish(&mut self, replica: u32, event: KvEvent) -> Applied {
        let place = replica as usize;
        let batch = KvEventBatch { sequence: self.sequences[place], timestamp_s: 0.0, events: vec![event], dp_rank: None };
        self.sequences[place] += 1;
        self.index.apply(ReplicaId(replica), Incarnation(self.lives[place]), &batch, self.now)
    }

    fn play(&mut self, op: Op) {
        match op {
            Op::Expect(replica, digits) => {
                let keys = keys(&digits);
                self.index.expect(ReplicaId(replica), &keys, self.now);
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
                self.index.forget(ReplicaId(replica), key);
                self.naive.expected.remove(&(replica, key));
            }
            Op::Clear(replica) => {
                self.publish(replica, KvEvent::Cleared);
                self.naive.drop_all(replica);
            }
            Op::Restart(replica) => {
                self.lives[replica as usize] += 1;
                self.sequences[replica as usize] = 0;
                self.index.restart(ReplicaId(replica), Incarnation(self.lives[replica as usize]));
                self.naive.drop_all(replica);
            }
            Op::Wait(ms) => {
                self.now += Duration::from_millis(ms);
                self.index.expire(self.now);
            }
        }
    }

    /// Stores what of the chain hangs on a stored parent, as an engine does: from the first block it lacks, the last one again if it lacks none.
    fn store(&mut self, replica: u32, digits: &[u32]) {
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
        for replica in 0..REPLICAS {
            let depth = depths.get(replica as usize).copied().unwrap_or(0);
            assert_eq!(depth, self.naive.depth(replica, &keys, self.now), "replica {replica} of {digits:?}");
            for key in &keys {
                assert_eq!(self.index.holds(ReplicaId(replica), *key), self.naive.holds(replica, *key, self.now));
                let elsewhere = (0..REPLICAS).any(|other| other != replica && self.naive.holds(other, *key, self.now));
                assert_eq!(self.index.held_elsewhere(*key, ReplicaId(replica)), elsewhere);
            }
        }
        assert!(self.index.still_matches(&keys, &depths));
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
            .chain(pair.naive.expected.iter().filter(|(_, until)| **until > pair.now).map(|((_, key), _)| *key))
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
        let (mut lossless, mut lossy) = (FleetIndex::new("m", LIFETIME), FleetIndex::new("m", LIFETIME));
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

    #[test]
    fn a_set_of_slots_is_a_set(slots in prop::collection::btree_set(0usize..200, 0..20), other in prop::collection::btree_set(0usize..200, 0..20)) {
        let build = |slots: &BTreeSet<usize>| {
            let mut set = ReplicaSet::default();
            for slot in slots {
                set.insert(*slot);
            }
            set
        };
        let (mut set, others) = (build(&slots), build(&other));
        for slot in 0..210 {
            prop_assert_eq!(set.contains(slot), slots.contains(&slot));
            prop_assert_eq!(set.any_but(slot), slots.iter().any(|held| *held != slot));
        }
        let mut gone = BTreeSet::new();
        set.keep_common(&others, |slot| { gone.insert(slot); });
        prop_assert_eq!(gone, &slots - &other);
        prop_assert_eq!(set.is_empty(), slots.is_disjoint(&other));
        let mut emptied = build(&slots);
        for slot in &slots {
            emptied.remove(*slot);
        }
        prop_assert!(emptied.is_empty());
    }
}

#[test]
fn a_prefix_branches_where_two_different_blocks_follow_it() {
    let mut index = FleetIndex::new("m", LIFETIME);
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
