use std::{any::Any, fmt, sync::Arc};

use baton_kv::BlockId;
use baton_units::{BlockSize, Bytes};
use serde::{Deserialize, Serialize};

use crate::Executor;

/// Memory for the bytes of one KV block.
pub trait KvBytes: Any + Send + Sync {
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];

    /// XXH3 (64 bits, seed 0) of the bytes, where it is known without reading them.
    fn checksum(&self) -> Option<u64> {
        None
    }
}

impl KvBytes for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

/// The bytes of an executor's KV blocks, where they lie. Blocks of replicas whose [`Numerics`] are equal may be copied byte by byte.
///
/// A block is one piece of memory with the keys and values of all layers for [`BlockSize`] tokens. Positions that were not computed
/// hold anything, and travel with the others.
pub trait KvMemory {
    fn layout(&self) -> KvLayout;

    /// A block's bytes, as many as [`KvLayout::block_bytes`].
    ///
    /// # Panics
    /// When the executor has no such block.
    fn block(&self, block: BlockId) -> &[u8];

    /// The same, to be written: only those of a preparation that were not held when it was made.
    ///
    /// # Panics
    /// When the executor has no such block.
    fn block_mut(&mut self, block: BlockId) -> &mut [u8];

    /// A block's bytes as they are now, for other threads: what is written to the block later is not seen in them. An executor whose blocks
    /// lie apart hands them out without copying.
    ///
    /// # Panics
    /// When the executor has no such block.
    fn share(&self, block: BlockId) -> Arc<dyn KvBytes> {
        Arc::new(self.block(block).to_vec())
    }

    /// Memory for one block, to be filled by other threads and [`put`](Self::put); its content may be anything.
    fn spare(&self) -> Box<dyn KvBytes> {
        Box::new(vec![0; self.layout().block_bytes.0 as usize])
    }

    /// Makes these the bytes of a block, by the rule of [`block_mut`](Self::block_mut), and gives memory for another one back. An
    /// executor whose blocks lie apart takes memory that it made by [`spare`](Self::spare) without copying.
    ///
    /// # Panics
    /// When the executor has no such block, or a block has another number of bytes.
    fn put(&mut self, block: BlockId, bytes: Box<dyn KvBytes>) -> Box<dyn KvBytes> {
        self.block_mut(block).copy_from_slice(bytes.bytes());
        bytes
    }

    /// What moving one block is priced at: its bytes, or in an executor that emulates a model, those of that model's blocks.
    fn priced_block_bytes(&self) -> Bytes {
        self.layout().block_bytes
    }
}

/// How the values of a KV block lie; replicas with equal layouts read each other's blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayout {
    /// Names order, type and counts of the values, and the rule by which they lie.
    pub format: String,
    pub block_size: BlockSize,
    /// Bytes of one block.
    pub block_bytes: Bytes,
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\" in blocks of {} tokens and {}", self.format, self.block_size.get(), self.block_bytes)
    }
}

/// What decides the bits of a sequence besides the sequence itself: two replicas compare it before KV moves between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Numerics {
    /// The executor's [`numerics_id`](Executor::numerics_id).
    pub id: String,
    /// `None` when the executor hands out no KV.
    pub kv: Option<KvLayout>,
}

impl Numerics {
    pub fn of(executor: &dyn Executor) -> Self {
        Self { id: executor.numerics_id().to_owned(), kv: executor.kv().map(KvMemory::layout) }
    }

    /// Whether sequences of `source` go on here by their tokens alone, with equal tokens and log-probabilities.
    pub fn check(&self, source: &Self) -> Result<(), NumericsError> {
        if self.id != source.id {
            return Err(NumericsError::Results { source_id: source.id.clone(), target_id: self.id.clone() });
        }
        Ok(())
    }

    /// Whether KV blocks of `source` can be used here as they are.
    pub fn check_kv(&self, source: &Self) -> Result<(), NumericsError> {
        self.check(source)?;
        match (&self.kv, &source.kv) {
            (Some(target), Some(source)) if target == source => Ok(()),
            (Some(target), Some(source)) => Err(NumericsError::Layout { source_kv: source.clone(), target_kv: target.clone() }),
            (None, _) | (_, None) => Err(NumericsError::NoKv),
        }
    }
}

/// Why a move between two replicas would not be exact.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NumericsError {
    #[error("the source computes as \"{source_id}\" and the target as \"{target_id}\"; a moved stream would not be that of one replica")]
    Results { source_id: String, target_id: String },
    #[error("the source keeps KV as {source_kv}, the target as {target_kv}; the tokens can move, to be computed anew")]
    Layout { source_kv: KvLayout, target_kv: KvLayout },
    #[error("source or target hands out no KV; the tokens can move, to be computed anew")]
    NoKv,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numerics(id: &str, format: Option<&str>) -> Numerics {
        let layout = |format: &str| KvLayout { format: format.to_owned(), block_size: BlockSize::DEFAULT, block_bytes: Bytes(64) };
        Numerics { id: id.to_owned(), kv: format.map(layout) }
    }

    #[test]
    fn tokens_move_between_equal_results_and_kv_between_equal_layouts() {
        let here = numerics("a", Some("f32"));
        assert_eq!(here.check_kv(&here), Ok(()));
        assert!(matches!(here.check(&numerics("b", Some("f32"))), Err(NumericsError::Results { .. })));
        assert!(matches!(here.check_kv(&numerics("b", Some("f32"))), Err(NumericsError::Results { .. })));
        assert_eq!(here.check(&numerics("a", Some("f16"))), Ok(()));
        let error = here.check_kv(&numerics("a", Some("f16"))).unwrap_err();
        let text = "the source keeps KV as \"f16\" in blocks of 16 tokens and 64 bytes, the target as \"f32\" in blocks of 16 tokens and \
                    64 bytes; the tokens can move, to be computed anew";
        assert_eq!(error.to_string(), text);
        assert_eq!(here.check_kv(&numerics("a", None)), Err(NumericsError::NoKv));
        assert_eq!(numerics("a", None).check_kv(&here), Err(NumericsError::NoKv));
    }
}
