//! What the bytes of each tensor type mean. Source: `ggml-quants.c` of the ggml project, checked against its `gguf` package.

use baton_gguf::TensorKind;
use half::{bf16, f16};

/// Values of one scale: a weight is `scale * q + min`, exact in f32 but for the last rounding.
pub(crate) struct Decoded<const N: usize> {
    pub(crate) q: [i8; N],
    pub(crate) scale: f32,
    pub(crate) min: f32,
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Low nibbles are the first half of the block, high ones the second.
fn nibbles(packed: &[u8]) -> [i8; 32] {
    let mut q = [0; 32];
    for (i, byte) in packed[..16].iter().enumerate() {
        q[i] = (byte & 15).cast_signed();
        q[i + 16] = (byte >> 4).cast_signed();
    }
    q
}

pub(crate) fn q4_0(block: &[u8]) -> Decoded<32> {
    Decoded { q: nibbles(&block[2..]).map(|q| q - 8), scale: half_at(block, 0), min: 0.0 }
}

pub(crate) fn q4_1(block: &[u8]) -> Decoded<32> {
    Decoded { q: nibbles(&block[4..]), scale: half_at(block, 0), min: half_at(block, 2) }
}

pub(crate) fn q5_0(block: &[u8]) -> Decoded<32> {
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let mut q = nibbles(&block[6..]);
    for (i, q) in q.iter_mut().enumerate() {
        *q += ((high >> i & 1) as i8) * 16 - 16;
    }
    Decoded { q, scale: half_at(block, 0), min: 0.0 }
}

pub(crate) fn q8_0(block: &[u8]) -> Decoded<32> {
    let mut q = [0; 32];
    for (q, byte) in q.iter_mut().zip(&block[2..34]) {
        *q = byte.cast_signed();
    }
    Decoded { q, scale: half_at(block, 0), min: 0.0 }
}

/// The `part`-th 32 values of a block of 256.
pub(crate) fn q4_k(block: &[u8], part: usize) -> Decoded<32> {
    let (scale, min) = q4_k_scales(&block[4..16], part);
    let mut q = [0; 32];
    for (q, byte) in q.iter_mut().zip(&block[16 + part / 2 * 32..]) {
        *q = (byte >> (part % 2 * 4) & 15).cast_signed();
    }
    Decoded { q, scale: half_at(block, 0) * f32::from(scale), min: -(half_at(block, 2) * f32::from(min)) }
}

/// Six bits each: parts 0 to 3 in the low bits of bytes 0 to 7, parts 4 to 7 in nibbles of bytes 8 to 11 and the high bits left over.
fn q4_k_scales(packed: &[u8], part: usize) -> (u8, u8) {
    if part < 4 {
        return (packed[part] & 63, packed[part + 4] & 63);
    }
    let low = packed[part + 4];
    (low & 15 | (packed[part - 4] >> 6) << 4, low >> 4 | (packed[part] >> 6) << 4)
}

/// The `part`-th 16 values of a block of 256.
pub(crate) fn q6_k(block: &[u8], part: usize) -> Decoded<16> {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let mut q = [0; 16];
    for (i, q) in q.iter_mut().enumerate() {
        let at = part * 16 + i;
        let (half, quarter, column) = (at / 128, at % 128 / 32, at % 32);
        let nibble = low[half * 64 + quarter % 2 * 32 + column] >> (quarter / 2 * 4) & 15;
        let top = high[half * 32 + column] >> (2 * quarter) & 3;
        *q = (nibble | top << 4).cast_signed() - 32;
    }
    Decoded { q, scale: half_at(block, 208) * f32::from(scales[part].cast_signed()), min: 0.0 }
}

/// Writes the values of whole blocks in `bytes` to `out`; the scalar reference and the reader of embeddings and norms.
pub(crate) fn dequantise(kind: TensorKind, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(kind.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(kind.block_len())) {
        match kind {
            TensorKind::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            TensorKind::F16 => out[0] = half_at(block, 0),
            TensorKind::BF16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            TensorKind::Q4_0 => write(&q4_0(block), out),
            TensorKind::Q4_1 => write(&q4_1(block), out),
            TensorKind::Q5_0 => write(&q5_0(block), out),
            TensorKind::Q8_0 => write(&q8_0(block), out),
            TensorKind::Q4_K => (0..8).for_each(|part| write(&q4_k(block, part), &mut out[part * 32..][..32])),
            TensorKind::Q6_K => (0..16).for_each(|part| write(&q6_k(block, part), &mut out[part * 16..][..16])),
        }
    }
}

fn write<const N: usize>(block: &Decoded<N>, out: &mut [f32]) {
    for (out, &q) in out.iter_mut().zip(&block.q) {
        *out = block.scale.mul_add(f32::from(q), block.min);
    }
}
