use baton_gguf::TensorKind;
use half::f16;

use crate::ModelError;
use crate::format::{
    BLOCK, Brain, Bytes, CENTRE, FineBytes, Format, Half, HalfScale, HalfScaleMin, Nibbles, Packed, Single, SingleScaleMin, Unscaled,
};
use crate::memory::Memory;
use crate::quant::{self, Decoded};
use crate::simd::LANES;

/// F32 as in the file.
pub(crate) type F32 = Packed<Single, Unscaled>;
pub(crate) type F16 = Packed<Half, Unscaled>;
pub(crate) type BF16 = Packed<Brain, Unscaled>;
/// Q4_0.
pub(crate) type I4 = Packed<Nibbles, HalfScale>;
/// Q4_1.
pub(crate) type I4Min = Packed<Nibbles, HalfScaleMin>;
/// Q4_K: products of two scales need more than a half float.
pub(crate) type I4Fine = Packed<Nibbles, SingleScaleMin>;
/// Q8_0, and Q5_0 widened.
pub(crate) type I8 = Packed<Bytes, HalfScale>;
/// Q6_K widened.
pub(crate) type I8Fine = FineBytes;

/// Calls `$body` with `$format` naming the packed form of tensors of `$kind`.
macro_rules! with_format {
    ($kind:expr, $format:ident => $body:expr) => {
        match $kind {
            baton_gguf::TensorKind::F32 => {
                type $format = $crate::matrix::F32;
                $body
            }
            baton_gguf::TensorKind::F16 => {
                type $format = $crate::matrix::F16;
                $body
            }
            baton_gguf::TensorKind::BF16 => {
                type $format = $crate::matrix::BF16;
                $body
            }
            baton_gguf::TensorKind::Q4_0 => {
                type $format = $crate::matrix::I4;
                $body
            }
            baton_gguf::TensorKind::Q4_1 => {
                type $format = $crate::matrix::I4Min;
                $body
            }
            baton_gguf::TensorKind::Q4_K => {
                type $format = $crate::matrix::I4Fine;
                $body
            }
            baton_gguf::TensorKind::Q5_0 | baton_gguf::TensorKind::Q8_0 => {
                type $format = $crate::matrix::I8;
                $body
            }
            baton_gguf::TensorKind::Q6_K => {
                type $format = $crate::matrix::I8Fine;
                $body
            }
        }
    };
}
pub(crate) use with_format;

/// Weights `[rows][columns]` (outputs by inputs) in panels of [`LANES`] rows; rows past the last are zero. The panels lie in an
/// [`Arena`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix {
    kind: TensorKind,
    rows: usize,
    columns: usize,
    start: usize,
    panel_bytes: usize,
}

/// Room for the packed weights of a model, in one piece so that huge pages serve.
pub(crate) struct Arena {
    memory: Memory,
    used: usize,
}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Result<Self, ModelError> {
        let memory = Memory::zeroed(bytes).map_err(|_| ModelError::WeightsTooLarge { bytes })?;
        Ok(Self { memory, used: 0 })
    }

    /// Packs row-major bytes of the file. `order` gives, for each row of the matrix, the row of the file.
    ///
    /// `columns` must be a multiple of the file's block and of 32.
    pub(crate) fn pack(&mut self, kind: TensorKind, [rows, columns]: [usize; 2], bytes: &[u8], order: impl Fn(usize) -> usize) -> Matrix {
        let row_bytes = columns / kind.block_len() * kind.block_bytes();
        let panel_bytes = panel_bytes(kind, columns);
        let matrix = Matrix { kind, rows, columns, start: self.used, panel_bytes };
        self.used += packed_bytes(kind, rows, columns);
        for row in 0..rows {
            let from = &bytes[order(row) * row_bytes..][..row_bytes];
            let panel = &mut self.memory.bytes_mut()[matrix.start + row / LANES * panel_bytes..][..panel_bytes];
            with_format!(kind, F => pack_row::<F>(kind, from, row % LANES, panel));
        }
        matrix
    }

    pub(crate) fn view(&self, matrix: Matrix) -> Weights<'_> {
        Weights { matrix, panels: &self.memory.bytes()[matrix.start..][..matrix.panels() * matrix.panel_bytes] }
    }
}

/// A multiple of a cache line.
fn panel_bytes(kind: TensorKind, columns: usize) -> usize {
    with_format!(kind, F => columns / BLOCK * F::BYTES).next_multiple_of(64)
}

/// What [`Arena::pack`] takes for a matrix.
pub(crate) fn packed_bytes(kind: TensorKind, rows: usize, columns: usize) -> usize {
    rows.div_ceil(LANES) * panel_bytes(kind, columns)
}

impl Matrix {
    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }
}

/// A matrix with its panels.
#[derive(Clone, Copy)]
pub(crate) struct Weights<'a> {
    matrix: Matrix,
    panels: &'a [u8],
}

impl<'a> Weights<'a> {
    pub(crate) fn kind(&self) -> TensorKind {
        self.matrix.kind
    }

    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        self.matrix.rows
    }

    /// Input features.
    pub(crate) fn columns(&self) -> usize {
        self.matrix.columns
    }

    #[inline(always)]
    pub(crate) fn panel(&self, index: usize) -> &'a [u8] {
        &self.panels[index * self.matrix.panel_bytes..][..self.matrix.panel_bytes]
    }
}

/// Writes one row of the file into one lane of a panel.
fn pack_row<F: Format>(kind: TensorKind, row: &[u8], lane: usize, panel: &mut [u8]) {
    let blocks = row.len() / kind.block_bytes() * kind.block_len() / BLOCK;
    for (index, block) in panel.chunks_exact_mut(F::BYTES).take(blocks).enumerate() {
        let raw = &row[index * BLOCK / kind.block_len() * kind.block_bytes()..];
        match kind {
            TensorKind::F32 => pack_floats::<4>(raw, lane, block),
            TensorKind::F16 | TensorKind::BF16 => pack_floats::<2>(raw, lane, block),
            TensorKind::Q4_0 => {
                let decoded = quant::q4_0(raw);
                pack_nibbles(decoded.q, lane, block);
                pack_half(decoded.scale, lane, &mut block[256..]);
            }
            TensorKind::Q4_1 => {
                let decoded = quant::q4_1(raw);
                pack_nibbles(decoded.q.map(|q| q - 8), lane, block);
                pack_half(decoded.scale, lane, &mut block[256..]);
                pack_half(decoded.min, lane, &mut block[288..]);
            }
            TensorKind::Q4_K => {
                let decoded = quant::q4_k(raw, index % 8);
                pack_nibbles(decoded.q.map(|q| q - 8), lane, block);
                pack_single(decoded.scale, lane, &mut block[256..]);
                pack_single(CENTRE.mul_add(decoded.scale, decoded.min), lane, &mut block[320..]);
            }
            TensorKind::Q5_0 => pack_bytes_half(&quant::q5_0(raw), lane, block),
            TensorKind::Q8_0 => pack_bytes_half(&quant::q8_0(raw), lane, block),
            TensorKind::Q6_K => {
                for half in 0..2 {
                    let decoded = quant::q6_k(raw, index % 8 * 2 + half);
                    pack_bytes(&decoded.q, lane, &mut block[half * 16 * LANES..]);
                    pack_single(decoded.scale, lane, &mut block[FineBytes::SCALES + half * 64..]);
                }
            }
        }
    }
}

fn pack_floats<const N: usize>(raw: &[u8], lane: usize, block: &mut [u8]) {
    for (k, value) in raw.as_chunks::<N>().0[..32].iter().enumerate() {
        block[(k * LANES + lane) * N..][..N].copy_from_slice(value);
    }
}

fn pack_nibbles(q: [i8; 32], lane: usize, block: &mut [u8]) {
    for (group, q) in q.as_chunks::<8>().0.iter().enumerate() {
        let word = q.iter().enumerate().fold(0u32, |word, (i, &q)| word | (u32::from(q.cast_unsigned()) & 15) << (4 * i));
        block[group * 64 + lane * 4..][..4].copy_from_slice(&word.to_le_bytes());
    }
}

fn pack_bytes(q: &[i8], lane: usize, block: &mut [u8]) {
    for (k, q) in q.iter().enumerate() {
        block[k * LANES + lane] = q.cast_unsigned();
    }
}

fn pack_bytes_half(decoded: &Decoded<32>, lane: usize, block: &mut [u8]) {
    pack_bytes(&decoded.q, lane, block);
    pack_half(decoded.scale, lane, &mut block[32 * LANES..]);
}

/// The scale came from a half float, so nothing is lost.
fn pack_half(scale: f32, lane: usize, scales: &mut [u8]) {
    scales[lane * 2..][..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
}

fn pack_single(scale: f32, lane: usize, scales: &mut [u8]) {
    scales[lane * 4..][..4].copy_from_slice(&scale.to_le_bytes());
}
