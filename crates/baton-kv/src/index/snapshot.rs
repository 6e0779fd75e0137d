//! What is known of one replica's cache, as bytes: little-endian, each entry after its parent, ended by a checksum.

use std::time::Duration;

use baton_units::{Incarnation, ReplicaId, Time};
use xxhash_rust::xxh3::xxh3_64;

use super::{FleetIndex, Stream};
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

impl FleetIndex {
    /// The replica's entries and its place in its stream of events. Some 24 bytes a block, 32 where the engine has hashes of its own.
    pub fn snapshot(&self, replica: ReplicaId, now: Time) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(model_hash(&self.model).to_le_bytes());
        let nothing = Stream::default();
        let stream = self.streams.get(replica.index()).unwrap_or(&nothing);
        bytes.extend(stream.incarnation.0.to_le_bytes());
        bytes.extend(stream.next_sequence.to_le_bytes());
        bytes.extend(stream.last_timestamp_s.to_le_bytes());
        bytes.push(if stream.publishes { PUBLISHES } else { 0 } | if stream.doubtful() { DOUBTFUL } else { 0 });
        let entries = self.caches.entries(replica.index(), now);
        bytes.extend((entries.len() as u32).to_le_bytes());
        for entry in &entries {
            write_entry(&mut bytes, entry);
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Takes a snapshot in that was made `age` ago, for a replica that has no entries yet. It must be of the replica's present
    /// incarnation: another one's says nothing of this one. Returns the blocks that are believed in again.
    ///
    /// Where the engine publishes events, the replica is doubtful until the stream is seen to go on: until the batch after the
    /// snapshot's last one comes, live or replayed (ask for [`Self::next_sequence`] on), or the engine repeats the last one. What the
    /// engine did not tell, expected blocks, ends with its lifetime, of which `age` is over.
    pub fn restore(&mut self, replica: ReplicaId, bytes: &[u8], age: Duration, now: Time) -> Result<usize, SnapshotError> {
        let (stream, entries) = read(bytes, model_hash(&self.model))?;
        let expected = self.stream(replica).incarnation;
        if stream.incarnation != expected {
            return Err(SnapshotError::OtherIncarnation { expected, found: stream.incarnation });
        }
        if self.blocks_resident(replica) > 0 || self.publishes(replica) {
            return Err(SnapshotError::NotEmpty);
        }
        self.begin_use(replica, entries.len(), now);
        self.streams[replica.index()] = stream;
        self.caches.restore(replica.index(), &entries, age, now);
        self.expire(now);
        Ok(self.blocks_held(replica))
    }

    /// The first batch of the replica's events that is not taken in.
    pub fn next_sequence(&self, replica: ReplicaId) -> u64 {
        self.streams.get(replica.index()).map_or(0, |stream| stream.next_sequence)
    }
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

fn read(bytes: &[u8], model: u64) -> Result<(Stream, Vec<Entry>), SnapshotError> {
    let (body, checksum) = bytes.split_last_chunk::<CHECKSUM>().ok_or(SnapshotError::Malformed)?;
    if xxh3_64(body) != u64::from_le_bytes(*checksum) {
        return Err(SnapshotError::Malformed);
    }
    let mut reader = Reader(body);
    if reader.take::<8>()? != *MAGIC {
        return Err(SnapshotError::Malformed);
    }
    if reader.u64()? != model {
        return Err(SnapshotError::OtherModel);
    }
    let mut stream = Stream {
        incarnation: Incarnation(reader.u64()?),
        next_sequence: reader.u64()?,
        last_timestamp_s: f64::from_bits(reader.u64()?),
        ..Stream::default()
    };
    let flags = reader.u8()?;
    stream.publishes = flags & PUBLISHES != 0;
    // What was missing then is not to be had any more.
    stream.lost = flags & DOUBTFUL != 0;
    stream.unproven = stream.publishes;
    let count = reader.u32()?;
    let mut entries = Vec::new();
    for place in 0..count {
        entries.push(reader.entry(place)?);
    }
    if reader.0.is_empty() { Ok((stream, entries)) } else { Err(SnapshotError::Malformed) }
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
