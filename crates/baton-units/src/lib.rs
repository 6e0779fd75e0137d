//! Units and names that every crate shares: counts of tokens, blocks and bytes, moments, and ids.
//!
//! Spans are [`std::time::Duration`]; moments are [`Time`]. Counts that meet (tokens, blocks, bytes) are newtypes, so that
//! they cannot be mixed up. This crate computes no cost and knows no policy.

mod counts;
mod ids;
mod time;

pub use counts::{BlockSize, Blocks, Bytes, Tokens};
pub use ids::{Incarnation, Priority, ReplicaId, RequestId};
pub use time::{DurationMs, Time};
