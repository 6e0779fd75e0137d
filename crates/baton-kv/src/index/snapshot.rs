//! What is known of one replica's cache, as bytes: little-endian, each entry after its parent, ended by a checksum.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    time::Duration,
};

use baton_units::{Incarnation, ReplicaId, Time};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    FleetIndex, Stream, Work,
    caches::{idle, stamp_of},
};
use crate::{BlockKey, EngineHash};

const MAGIC: &[u8; 8] = b"batonix1";
const CHECKSUM: usize = 8;

const PUBLISHES: u8 = 1;
const DOUBTFUL: u8 = 1 << 1;

const CONFIRMED: u8 = 1;
const REUSED: u8 = 1 << 1;
/// The engine's name of the block is its key.
const HASH_IS_KEY: u8 = 1 << 2;

/// Why a snapshot was not taken in. The replica's entries are as before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    #[error("the snapshot is cut short, damaged or of another version")]
    Malformed,
    #[error("the snapshot is of another model's keys")]
    OtherModel,
    #[error("the snapshot is of incarnation {found:?}, the replica lives in {expected:?}")]
    OtherIncarnation { expected: Incarnation, found: Incarnation },
    #[error("the replica already has entries of its own")]
    NotEmpty,
}

/// A believed block, as it is written down.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Place of its parent among the entries.
    pub(super) parent: Option<u32>,
    pub(super) idle: Duration,
    pub(super) reused: bool,
    /// Its engine's name and copies of it, if the engine told of it.
    pub(super) stored: Option<(EngineHash, u32)>,
}

/// A believed block, as it was copied out of the index.
#[derive(Debug, Clone, Copy)]
pub(super) struct CopiedNode {
    pub(super) key: BlockKey,
    pub(super) parent: Option<BlockKey>,
    pub(super) used: u64,
    pub(super) reused: bool,
    pub(super) stored: Option<(EngineHash, u32)>,
}

/// Where a stream of events was.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Position {
    incarnation: Incarnation,
    next_sequence: u64,
    last_timestamp_s: f64,
    publishes: bool,
    doubtful: bool,
}

/// What is known of some replicas' caches, copied out in parts between which the index may change.
///
/// A block that comes or goes meanwhile may be in it or not. But of a replica whose events were taken in, or whose entries were dropped,
/// there is none: names and copies of blocks must be those of its position in its stream.
#[derive(Debug)]
pub struct Copying {
    model: u64,
    /// Up to where the places of the slab were copied.
    at: usize,
    now: Time,
    replicas: BTreeMap<usize, Copied>,
}

#[derive(Debug)]
struct Copied {
    position: Position,
    changes: u64,
    nodes: Vec<CopiedNode>,
}

/// What was known of a replica's cache, read and checked.
#[derive(Debug)]
pub struct Snapshot {
    model: u64,
    position: Position,
    /// The last used first, and each after its parent.
    entries: Vec<Entry>,
}

/// The entries of a snapshot that are still to be taken in.
#[derive(Debug)]
pub(super) struct Restoring {
    entries: Vec<Entry>,
    next: usize,
    /// When the snapshot was made, on the index's clock of uses.
    made: u64,
}

impl FleetIndex {
    /// What is known of the replica's cache and its place in its stream of events, all at once; `None` while events of it are half
    /// taken in. Some 24 bytes a block, 32 where the engine has hashes of its own.
    pub fn snapshot(&self, replica: ReplicaId, now: Time) -> Option<Vec<u8>> {
        let mut copying = self.begin_copy([replica], now);
        self.copy_some(&mut copying, usize::MAX);
        copying.take(replica)
    }

    /// Begins to copy what is known of the replicas; those of which events are half taken in are left out.
    pub fn begin_copy(&self, replicas: impl IntoIterator<Item = ReplicaId>, now: Time) -> Copying {
        let nothing = Stream::default();
        let replicas = replicas.into_iter().filter_map(|replica| {
            let stream = self.streams.get(replica.index()).unwrap_or(&nothing);
            let position = Position {
                incarnation: stream.incarnation,
                next_sequence: stream.next_sequence,
                last_timestamp_s: stream.last_timestamp_s,
                publishes: stream.publishes,
                doubtful: stream.doubtful(),
            };
            let nodes = Vec::with_capacity(self.blocks_held(replica));
            stream.work.is_empty().then_some((replica.index(), Copied { position, changes: stream.changes, nodes }))
        });
        Copying { model: model_hash(&self.model), at: 0, now, replicas: replicas.collect() }
    }

    /// Copies from the next `places` places for a block, of whatever replica. Tells whether more are left.
    pub fn copy_some(&self, copying: &mut Copying, places: usize) -> bool {
        let end = self.caches.places().min(copying.at.saturating_add(places));
        let mut copies: Vec<Option<&mut Vec<CopiedNode>>> = Vec::new();
        copies.resize_with(copying.replicas.last_key_value().map_or(0, |(slot, _)| slot + 1), || None);
        for (slot, copied) in &mut copying.replicas {
            copies[*slot] = Some(&mut copied.nodes);
        }
        self.caches.copy_into(copying.at..end, &mut copies);
        copying.at = end;
        let changes = |slot: usize| self.streams.get(slot).map_or(0, |stream| stream.changes);
        copying.replicas.retain(|slot, copied| changes(*slot) == copied.changes);
        end < self.caches.places()
    }

    /// Takes a snapshot in that was made `age` ago, for a replica that has no entries yet. It must be of the replica's present
    /// incarnation: another one's says nothing of this one. Returns the blocks that are believed in again.
    ///
    /// Where the engine publishes events, the replica is doubtful until the stream is seen to go on: until the batch after the
    /// snapshot's last one comes, live or replayed (ask for [`Self::next_sequence`] on), or the engine repeats the last one. What the
    /// engine did not tell, expected blocks, ends with its lifetime, of which `age` is over.
    pub fn restore(&mut self, replica: ReplicaId, bytes: &[u8], age: Duration, now: Time) -> Result<usize, SnapshotError> {
        self.begin_restore(replica, Snapshot::read(bytes)?, age, now)?;
        self.advance(replica, usize::MAX, now);
        self.expire(now);
        Ok(self.blocks_held(replica))
    }

    /// As [`Self::restore`], for [`Self::advance`] to take the entries in; events that come meanwhile are taken in after them.
    pub fn begin_restore(&mut self, replica: ReplicaId, snapshot: Snapshot, age: Duration, now: Time) -> Result<(), SnapshotError> {
        if snapshot.model != model_hash(&self.model) {
            return Err(SnapshotError::OtherModel);
        }
        let Position { incarnation: found, next_sequence, last_timestamp_s, publishes, doubtful } = snapshot.position;
        let stream = self.stream(replica);
        if found != stream.incarnation {
            return Err(SnapshotError::OtherIncarnation { expected: stream.incarnation, found });
        }
        let (changes, idle) = (stream.changes + 1, stream.work.is_empty());
        if !idle || self.blocks_resident(replica) > 0 || self.publishes(replica) {
            return Err(SnapshotError::NotEmpty);
        }
        let made = stamp_of(now).saturating_sub(nanos(age));
        *self.stream(replica) = Stream {
            incarnation: found,
            next_sequence,
            last_timestamp_s,
            publishes,
            // What was missing then is not to be had any more.
            lost: doubtful,
            unproven: publishes,
            changes,
            work: [Work::Restore(Restoring { entries: snapshot.entries, next: 0, made })].into(),
            ..Stream::default()
        };
        Ok(())
    }

    /// The first batch of the replica's events that has not come.
    pub fn next_sequence(&self, replica: ReplicaId) -> u64 {
        self.streams.get(replica.index()).map_or(0, |stream| stream.next_sequence)
    }
}

impl Copying {
    /// The snapshot of a replica, once all is copied; `None` if there is none.
    pub fn take(&mut self, replica: ReplicaId) -> Option<Vec<u8>> {
        let Copied { position, nodes, .. } = self.replicas.remove(&replica.index())?;
        let entries = in_order(nodes, self.now);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.model.to_le_bytes());
        bytes.extend(position.incarnation.0.to_le_bytes());
        bytes.extend(position.next_sequence.to_le_bytes());
        bytes.extend(position.last_timestamp_s.to_le_bytes());
        bytes.push(if position.publishes { PUBLISHES } else { 0 } | if position.doubtful { DOUBTFUL } else { 0 });
        bytes.extend((entries.len() as u32).to_le_bytes());
        for entry in &entries {
            write_entry(&mut bytes, entry);
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        Some(bytes)
    }
}

/// Each after its parent; one whose parent is not believed in is left out.
fn in_order(mut nodes: Vec<CopiedNode>, now: Time) -> Vec<Entry> {
    // From the youngest on, parents come before children, but for what requests keep.
    nodes.sort_by_key(|node| Reverse(node.used));
    let mut places: HashMap<BlockKey, usize> = HashMap::with_capacity(nodes.len());
    for (place, node) in nodes.iter().enumerate() {
        places.entry(node.key).or_insert(place);
    }
    let mut written: Vec<Option<u32>> = vec![None; nodes.len()];
    let mut entries = Vec::with_capacity(nodes.len());
    let mut path = Vec::new();
    for place in 0..nodes.len() {
        let mut at = Some(places[&nodes[place].key]);
        let mut complete = true;
        while let Some(place) = at.filter(|place| written[*place].is_none()) {
            path.push(place);
            let parent = nodes[place].parent;
            at = parent.and_then(|key| places.get(&key).copied());
            complete = parent.is_none() || at.is_some();
        }
        for place in path.drain(..).rev().filter(|_| complete) {
            let node = &nodes[place];
            let parent = node.parent.and_then(|key| written[places[&key]]);
            written[place] = Some(entries.len() as u32);
            entries.push(Entry { key: node.key, parent, idle: idle(node.used, stamp_of(now)), reused: node.reused, stored: node.stored });
        }
    }
    entries
}

impl Snapshot {
    /// Reads what [`FleetIndex::snapshot`] wrote.
    pub fn read(bytes: &[u8]) -> Result<Self, SnapshotError> {
        let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(SnapshotError::Malformed)?;
        if xxh3_64(body) != u64::from_le_bytes(*checksum) {
            return Err(SnapshotError::Malformed);
        }
        let mut reader = Reader(body);
        if reader.take::<8>()? != *MAGIC {
            return Err(SnapshotError::Malformed);
        }
        let model = reader.u64()?;
        let (incarnation, next_sequence) = (Incarnation(reader.u64()?), reader.u64()?);
        let (last_timestamp_s, flags) = (f64::from_bits(reader.u64()?), reader.u8()?);
        let (publishes, doubtful) = (flags & PUBLISHES != 0, flags & DOUBTFUL != 0);
        let count = reader.u32()?;
        let mut entries: Vec<Entry> = Vec::new();
        for place in 0..count {
            let mut entry = reader.entry(place)?;
            if let Some(parent) = entry.parent {
                // The use of a block is one of all before it.
                entry.idle = entry.idle.max(entries[parent as usize].idle);
            }
            entries.push(entry);
        }
        if !reader.0.is_empty() {
            return Err(SnapshotError::Malformed);
        }
        let position = Position { incarnation, next_sequence, last_timestamp_s, publishes, doubtful };
        Ok(Self { model, position, entries: youngest_first(&entries) })
    }

    /// Leaves out all but the `blocks` blocks last used.
    pub fn truncate(&mut self, blocks: usize) {
        self.entries.truncate(blocks);
    }
}

/// Of one use a chain's start comes first.
fn youngest_first(entries: &[Entry]) -> Vec<Entry> {
    let mut depths: Vec<u32> = Vec::with_capacity(entries.len());
    for entry in entries {
        depths.push(entry.parent.map_or(0, |parent| depths[parent as usize] + 1));
    }
    let mut order: Vec<u32> = (0..entries.len() as u32).collect();
    order.sort_by_key(|place| {
        let entry = &entries[*place as usize];
        (entry.idle, depths[*place as usize], Reverse(entry.key))
    });
    let mut new_places = vec![0; entries.len()];
    for (new, old) in order.iter().enumerate() {
        new_places[*old as usize] = new as u32;
    }
    let moved = |old: &u32| {
        let entry = entries[*old as usize];
        Entry { parent: entry.parent.map(|parent| new_places[parent as usize]), ..entry }
    };
    order.iter().map(moved).collect()
}

impl Restoring {
    pub(super) fn left(&self) -> usize {
        self.entries.len() - self.next
    }

    /// Calls `restore` with the next entries, the key of each one's parent and its last use.
    pub(super) fn next(&mut self, count: usize, mut restore: impl FnMut(&Entry, Option<BlockKey>, u64)) {
        for entry in &self.entries[self.next..self.next + count] {
            let parent = entry.parent.map(|parent| self.entries[parent as usize].key);
            restore(entry, parent, self.made.saturating_sub(nanos(entry.idle)));
        }
        self.next += count;
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn model_hash(model: &str) -> u64 {
    xxh3_64(model.as_bytes())
}

fn write_entry(bytes: &mut Vec<u8>, entry: &Entry) {
    let named = entry.stored.is_some_and(|(hash, _)| hash.0 != entry.key.0);
    let flags = [(CONFIRMED, entry.stored.is_some()), (REUSED, entry.reused), (HASH_IS_KEY, entry.stored.is_some() && !named)];
    bytes.push(flags.iter().filter(|(_, set)| *set).map(|(flag, _)| flag).sum());
    bytes.extend(entry.key.0.to_le_bytes());
    bytes.extend(entry.parent.map_or(u32::MAX, |parent| parent).to_le_bytes());
    bytes.extend((entry.idle.as_millis().min(u128::from(u32::MAX)) as u32).to_le_bytes());
    if let Some((hash, copies)) = entry.stored {
        bytes.extend(copies.to_le_bytes());
        if named {
            bytes.extend(hash.0.to_le_bytes());
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(SnapshotError::Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u8(&mut self) -> Result<u8, SnapshotError> {
        Ok(self.take::<1>()?[0])
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, SnapshotError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn entry(&mut self, place: u32) -> Result<Entry, SnapshotError> {
        let flags = self.u8()?;
        let key = BlockKey(self.u64()?);
        let parent = self.u32()?;
        let idle = Duration::from_millis(u64::from(self.u32()?));
        if parent != u32::MAX && parent >= place {
            return Err(SnapshotError::Malformed);
        }
        let stored = match flags & (CONFIRMED | HASH_IS_KEY) {
            0 => None,
            CONFIRMED => {
                let copies = self.u32()?;
                Some((EngineHash(self.u64()?), copies))
            }
            _ => Some((EngineHash(key.0), self.u32()?)),
        };
        Ok(Entry { key, parent: (parent != u32::MAX).then_some(parent), idle, reused: flags & REUSED != 0, stored })
    }
}
