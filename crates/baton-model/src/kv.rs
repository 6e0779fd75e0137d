use std::{io, ops::Range, sync::Arc};

use baton_units::{BlockSize, Bytes};

use crate::ModelError;
use crate::memory::Memory;
use crate::simd::LANES;
use crate::spares::{Spare, Spares};

/// Where in a block keys and values lie: `[layer]`, and in it keys `[kv head][group][dimension][16 positions]`, so that a vector of
/// scores is one chain over dimensions, then values `[kv head][position][dimension]`.
///
/// A group is 16 positions of a block, the last one padded. A block is one piece of memory over all layers, to be copied whole. As
/// blocks travel between replicas, whoever changes this changes `FORMAT` too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvLayout {
    pub(crate) layers: usize,
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    /// A multiple of [`LANES`].
    pub(crate) head_dim: usize,
}

impl KvLayout {
    /// Groups of a block.
    #[inline(always)]
    pub(crate) fn groups(self) -> usize {
        self.block_size.div_ceil(LANES)
    }

    fn keys_len(self) -> usize {
        self.kv_heads * self.groups() * self.head_dim * LANES
    }

    fn values_len(self) -> usize {
        self.kv_heads * self.block_size * self.head_dim
    }

    fn block_len(self) -> usize {
        self.layers * (self.keys_len() + self.values_len())
    }

    fn block_bytes(self) -> usize {
        self.block_len() * size_of::<f32>()
    }

    #[inline(always)]
    fn layer_start(self, layer: usize) -> usize {
        layer * (self.keys_len() + self.values_len())
    }

    /// Where in a block the keys of one group lie, `[dimension][16 positions]`.
    #[inline(always)]
    pub(crate) fn keys(self, layer: usize, kv_head: usize, group: usize) -> Range<usize> {
        let len = self.head_dim * LANES;
        let start = self.layer_start(layer) + (kv_head * self.groups() + group) * len;
        start..start + len
    }

    /// Where in a block its values lie, `[position][dimension]`.
    #[inline(always)]
    pub(crate) fn values(self, layer: usize, kv_head: usize) -> Range<usize> {
        let len = self.block_size * self.head_dim;
        let start = self.layer_start(layer) + self.keys_len() + kv_head * len;
        start..start + len
    }
}

/// Names this order of values.
const FORMAT: &str = "baton-cpu-1";
/// Values lie as the machine has them.
const VALUES: &str = if cfg!(target_endian = "little") { "f32le" } else { "f32be" };

impl From<KvLayout> for baton_engine::KvLayout {
    fn from(layout: KvLayout) -> Self {
        let KvLayout { layers, block_size, kv_heads, head_dim } = layout;
        Self {
            format: format!("{FORMAT}/{VALUES}/layers={layers}/kv_heads={kv_heads}/head_dim={head_dim}"),
            block_size: BlockSize::new(block_size as u32).expect("checked when the executor was made"),
            block_bytes: Bytes(layout.block_bytes() as u64),
        }
    }
}

/// Keys and values of all blocks in f32.
///
/// Each block is memory of its own, so that one can be lent to other threads and exchanged for one that they filled, without copying. The
/// system puts mappings that are made one after another side by side, and makes them one: huge pages span blocks. Their pages are taken at
/// once, so that no request waits for them.
pub(crate) struct KvCache {
    layout: KvLayout,
    blocks: Vec<Arc<Memory>>,
    spares: Arc<Spares>,
}

impl KvCache {
    pub(crate) fn new(layout: KvLayout, blocks: usize) -> Result<Self, ModelError> {
        let block_bytes = layout.block_bytes();
        let too_large = || ModelError::KvTooLarge { blocks, block_bytes };
        block_bytes.checked_mul(blocks).filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(too_large)?;
        let memory = (0..blocks).map(|_| Memory::zeroed(block_bytes).map(Arc::new)).collect::<io::Result<Vec<_>>>();
        let memory = memory.map_err(|_| too_large())?;
        let spares = Spares::new(block_bytes, blocks).map_err(|_| too_large())?;
        // When all are mapped: a huge page spans several.
        for block in &memory {
            block.touch();
        }
        spares.touch();
        Ok(Self { layout, blocks: memory, spares: Arc::new(spares) })
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// A whole block, in the order of the layout.
    #[inline(always)]
    pub(crate) fn floats(&self, block: u32) -> &[f32] {
        self.blocks[block as usize].floats()
    }

    /// Stores one token's keys and values of one layer, each `[kv head][dimension]`.
    pub(crate) fn write(&mut self, layer: usize, blocks: &[u32], position: usize, keys: &[f32], values: &[f32]) {
        let layout = self.layout;
        let (block, offset) = (blocks[position / layout.block_size], position % layout.block_size);
        let memory = self.owned(block).floats_mut();
        for (kv_head, key) in keys.chunks_exact(layout.head_dim).enumerate() {
            let group = &mut memory[layout.keys(layer, kv_head, offset / LANES)];
            for (lanes, &value) in group.chunks_exact_mut(LANES).zip(key) {
                lanes[offset % LANES] = value;
            }
        }
        for (kv_head, value) in values.chunks_exact(layout.head_dim).enumerate() {
            let values = &mut memory[layout.values(layer, kv_head)];
            values[offset * layout.head_dim..][..layout.head_dim].copy_from_slice(value);
        }
    }

    /// The bytes of a whole block.
    pub(crate) fn block(&self, block: u32) -> &[u8] {
        self.blocks[block as usize].bytes()
    }

    pub(crate) fn block_mut(&mut self, block: u32) -> &mut [u8] {
        self.owned(block).bytes_mut()
    }

    /// Copies a whole block.
    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        let from = Arc::clone(&self.blocks[from as usize]);
        self.block_mut(to).copy_from_slice(from.bytes());
    }

    /// A block as it is now; what is written to it later goes to a copy.
    pub(crate) fn share(&self, block: u32) -> Arc<Memory> {
        Arc::clone(&self.blocks[block as usize])
    }

    /// Memory for one block.
    ///
    /// # Panics
    /// When the system has none.
    pub(crate) fn spare(&self) -> Spare {
        Spares::take(&self.spares)
    }

    /// Exchanges a block's memory for other of its length; gives back the former one, or where that is lent, another spare.
    pub(crate) fn put(&mut self, block: u32, spare: Spare) -> Spare {
        let memory = spare.into_memory();
        assert_eq!(memory.len(), self.layout.block_bytes(), "a block has the bytes of one block");
        let former = std::mem::replace(&mut self.blocks[block as usize], Arc::new(memory));
        Arc::into_inner(former).map_or_else(|| self.spare(), |former| Spares::hold(&self.spares, former))
    }

    /// No more tokens come to the block.
    pub(crate) fn seal(&mut self, block: u32) {
        // What is lent has its checksum, or its reader takes it.
        if let Some(memory) = Arc::get_mut(&mut self.blocks[block as usize]) {
            memory.seal();
        }
    }

    /// To be written: what is lent stays as it was, and this becomes a copy of it.
    fn owned(&mut self, block: u32) -> &mut Memory {
        Arc::make_mut(&mut self.blocks[block as usize])
    }
}
