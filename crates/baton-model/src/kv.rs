use std::ops::Range;

use crate::ModelError;
use crate::simd::LANES;

/// Where keys and values of one layer lie.
///
/// Keys are `[block][kv head][group][dimension][16 positions]`, so that a vector of scores is one chain over dimensions; values
/// are `[block][kv head][position][dimension]`. A group is 16 positions of a block, the last one padded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvLayout {
    pub(crate) block_size: usize,
    pub(crate) kv_heads: usize,
    /// A multiple of [`LANES`].
    pub(crate) head_dim: usize,
}

impl KvLayout {
    pub(crate) fn groups(self) -> usize {
        self.block_size.div_ceil(LANES)
    }

    fn key_block_len(self) -> usize {
        self.kv_heads * self.groups() * self.head_dim * LANES
    }

    fn value_block_len(self) -> usize {
        self.kv_heads * self.block_size * self.head_dim
    }

    /// Keys of one group, `[dimension][16 positions]`.
    #[inline(always)]
    pub(crate) fn keys(self, block: u32, kv_head: usize, group: usize) -> Range<usize> {
        let len = self.head_dim * LANES;
        let start = block as usize * self.key_block_len() + (kv_head * self.groups() + group) * len;
        start..start + len
    }

    /// Values of one block, `[position][dimension]`.
    #[inline(always)]
    pub(crate) fn values(self, block: u32, kv_head: usize) -> Range<usize> {
        let len = self.block_size * self.head_dim;
        let start = block as usize * self.value_block_len() + kv_head * len;
        start..start + len
    }
}

/// Keys and values of all layers in f32.
pub(crate) struct KvCache {
    layout: KvLayout,
    layers: Vec<KvLayer>,
}

pub(crate) struct KvLayer {
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl KvCache {
    /// The memory is zeroed by the system when first touched, so a block costs nothing before it is used.
    pub(crate) fn new(layers: usize, layout: KvLayout, blocks: usize) -> Result<Self, ModelError> {
        let block_bytes = layers * (layout.key_block_len() + layout.value_block_len()) * size_of::<f32>();
        if block_bytes.checked_mul(blocks).is_none_or(|bytes| bytes > isize::MAX as usize) {
            return Err(ModelError::KvTooLarge { blocks, block_bytes });
        }
        let layer = || KvLayer { keys: vec![0.0; blocks * layout.key_block_len()], values: vec![0.0; blocks * layout.value_block_len()] };
        Ok(Self { layout, layers: (0..layers).map(|_| layer()).collect() })
    }

    pub(crate) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(crate) fn layer(&self, layer: usize) -> &KvLayer {
        &self.layers[layer]
    }

    /// Stores one token's keys and values, each `[kv head][dimension]`.
    pub(crate) fn write(&mut self, layer: usize, blocks: &[u32], position: usize, keys: &[f32], values: &[f32]) {
        let layout = self.layout;
        let (block, offset) = (blocks[position / layout.block_size], position % layout.block_size);
        let layer = &mut self.layers[layer];
        for (kv_head, key) in keys.chunks_exact(layout.head_dim).enumerate() {
            let group = &mut layer.keys[layout.keys(block, kv_head, offset / LANES)];
            for (lanes, &value) in group.chunks_exact_mut(LANES).zip(key) {
                lanes[offset % LANES] = value;
            }
        }
        for (kv_head, value) in values.chunks_exact(layout.head_dim).enumerate() {
            layer.values[layout.values(block, kv_head)][offset * layout.head_dim..][..layout.head_dim].copy_from_slice(value);
        }
    }

    /// Copies a whole block of every layer.
    pub(crate) fn copy(&mut self, from: u32, to: u32) {
        let (key_len, value_len) = (self.layout.key_block_len(), self.layout.value_block_len());
        for layer in &mut self.layers {
            layer.keys.copy_within(from as usize * key_len..(from as usize + 1) * key_len, to as usize * key_len);
            layer.values.copy_within(from as usize * value_len..(from as usize + 1) * value_len, to as usize * value_len);
        }
    }
}
