//! KV blocks: their keys, the pool and prefix cache of one replica, and the router's index of the fleet.
//!
//! An engine serves KV on a hit only after comparing tokens, parent and domain; the 64-bit [`BlockKey`] alone decides nothing but
//! a belief in the router's index. This crate moves no bytes of KV: it counts and names blocks.

mod block_table;
mod events;
mod index;
mod keys;
mod lru;
mod pool;
mod prefix_cache;

pub use block_table::BlockTable;
pub use events::{EngineHash, KvEvent, KvEventBatch};
pub use index::{Applied, Copying, FleetIndex, HitError, IndexReader, KeyHasher, MatchEnds, Matched, Snapshot, SnapshotError, Use, Victim};
pub use keys::{BlockKey, KeyDomain, chain_keys};
pub use pool::{BlockId, CachedPrefix, KvPool, OutOfBlocks};
pub use prefix_cache::CacheDomain;
