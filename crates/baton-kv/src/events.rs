use baton_units::BlockSize;

/// A block's hash as its engine names it: opaque, comparable only within one engine's stream. A 32-byte digest is represented by
/// its last 8 bytes, which is what vLLM itself sends in its short form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EngineHash(pub u64);

/// What an engine's cache tells of its blocks. Order within a batch matters: an engine may clear and store in one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks were filled and can be hit. The same hash may be stored several times (one copy a request) and is then removed as often.
    Stored {
        hashes: Vec<EngineHash>,
        /// The block before the first of `hashes`; `None` at a chain's start.
        parent: Option<EngineHash>,
        /// Tokens of all blocks, in order.
        tokens: Vec<u32>,
        block_size: BlockSize,
        adapter: Option<String>,
        /// Of the first of `hashes`: that of its whole chain at a chain's start, as in vLLM's `extra_keys`; behind a parent, one that enters
        /// there, since what comes before is public.
        salt: Option<String>,
    },
    Removed {
        hashes: Vec<EngineHash>,
    },
    /// The engine dropped its whole prefix cache.
    Cleared,
}

/// Events of one scheduler step.
#[derive(Debug, Clone, PartialEq)]
pub struct KvEventBatch {
    /// Counts from 0 in each incarnation of the engine; a restart begins again without a marker.
    pub sequence: u64,
    /// Engine's clock, seconds since the Unix epoch.
    pub timestamp_s: f64,
    pub events: Vec<KvEvent>,
    pub dp_rank: Option<u32>,
}
