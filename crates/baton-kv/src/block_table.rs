use std::sync::Arc;

use crate::{BlockId, CacheDomain};

/// The blocks of one sequence in order of position: token `p` lives in block `p / block_size`.
///
/// Holds one reference on each of its blocks; give it back with [`KvPool::release`](crate::KvPool::release). Made and changed by the
/// pool only: see [`KvPool::new_table`](crate::KvPool::new_table).
#[derive(Debug, PartialEq, Eq)]
pub struct BlockTable {
    pub(crate) blocks: Vec<BlockId>,
    /// Leading blocks that are cached, or were found not to be cacheable.
    pub(crate) committed: u32,
    /// The pool's epoch when the table was made.
    pub(crate) epoch: u64,
    pub(crate) domain: Arc<CacheDomain>,
}

impl BlockTable {
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub fn domain(&self) -> &Arc<CacheDomain> {
        &self.domain
    }
}
