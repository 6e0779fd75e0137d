use std::ops::Range;

use baton_units::{BlockSize, Bytes};

use crate::ModelError;
use crate::memory::Memory;
use crate::simd::LANES;

/// Where keys and values lie: `[block][layer]`, and in it keys `[kv head][group][dimension][16 positions]`, so that a vector of
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

    /// Where a block's bytes lie.
    fn block_range(self, block: u32) -> Range<usize> {
        let len = self.block_len() * size_of::<f32>();
        block as usize * len..(block as usize + 1) * len
    }

    #[inline(always)]
    fn layer_start(self, block: u32, layer: usize) -> usize {
        (block as usize * self.layers + layer) * (self.keys_len() + self.values_len())
    }

    /// Keys of one group, `[dimension][16 positions]`.
    #[inline(always)]
    pub(crate) fn keys(self, block: u32, layer: usize, kv_head: usize, group: usize) -> Range<usize> {
        let len = self.head_dim * LANES;
        let start = self.layer_start(block, layer) + (kv_head * self.groups() + group) * len;
        start..start + len
    }

    /// Values of one block, `[position][dimension]`.
    #[inline(always)]
    pub(crate) fn values(self, block: u32, layer: usize, kv_head: usize) -> Range<usize> {
        let len = self.block_size * self.head_dim;
        let start = self.layer_start(block, layer) + self.keys_len() + kv_head * len;
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
            block_bytes: Bytes((layout.block_len() * size_of::<f32>()) as u64),
        }
    }
}

/// Keys and values of all blocks in f32.
pub(crate) struct KvCache {
    layout: KvLayout,
    memory: Memory,
}

impl KvCache {
    pub(crate) fn new(layout: KvLayout, blocks: usize) -> Result<Self, ModelError> {
        let block_bytes = layout.block_len() * size_of::<f32>();
        let bytes = block_bytes.checked_mul(blocks).filter(|&bytes| isize::try_from(bytes).is_ok());
        let memory = bytes.and_then(|bytes| Memory::zeroed(bytes).ok());
        let memory = memory.ok_or(ModelError::KvTooLarge { blocks, block_bytes })?;
        Ok(Self { layout, memory })
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    /// All of it, in the order of the layout.
    pub(crate) fn floats(&self) -> &[f32] {
        self.memory.floats()
    }

    /// Stores one token's keys and values of one layer, each `[kv head][dimension]`.
    pub(crate) fn write(&mut self, layer: usize, blocks: &[u32], position: usize, keys: &[f32], values: &[f32]) {
        let layout = self.layout;
        let (block, offset) = (blocks[position / layout.block_size], position % layout.block_size);
        let memory = self.memory.floats_mut();
        for (kv_head, key) in keys.chunks_exact(layout.head_dim).enumerate() {
            let group = &mut memory[layout.keys(block, layer, kv_head, offset / LANES)];
            for (lanes, &value) in group.chunks_exact_mut(LANES).zip(key) {
                lanes[offset % LANES] = value;
            }
        }
        for (kv_head, value) in values.chunks_exact(layout.head_dim).enumerate() {
            let values = &mut memory[layout.values(block, layer, kv_head)];
            values[offset * layout.head_dim..][..layout.head_dim].copy_from_slice(value);
        }
    }

    /// The bytes of a whole block.
    pub(crate) fn block(&self, block: u32) -> &[u8] {
        &self.memory.bytes()[self.layout.block_range(block)]
    }

    pub(crate) fn block_mut(&mut self, block: u32) -> &mut [u8] {
        &mut self.memory.bytes_mut()[self.layout.block_range(block)]
    }

    /// Copies a whole block.
    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        let len = self.layout.block_len();
        self.memory.floats_mut().copy_within(from as usize * len..(from as usize + 1) * len, to as usize * len);
    }
}
