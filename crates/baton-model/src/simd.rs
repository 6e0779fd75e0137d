//! Sixteen f32 lanes on every machine: the vocabulary in which all kernels are written once.
//!
//! Each operation is exactly rounded per lane and no operation mixes lanes, so a kernel gives the same bits on every
//! implementor, as IEEE 754 leaves no choice. NaN payloads are the exception; finite weights give none.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

use crate::{KernelPath, ModelError};

/// Lanes of a vector, whatever the machine's width.
pub(crate) const LANES: usize = 16;

/// Memory of one vector.
pub(crate) type Lanes = [f32; LANES];

/// Adding and subtracting it rounds a float below 2^22 to an integer, left in the low bits of the sum: 1.5 * 2^23.
pub(crate) const ROUND: f32 = 12_582_912.0;

/// Proof that the machine has some instructions, and the operations made of them.
pub(crate) trait Simd: Copy + Send + Sync {
    /// One value per lane.
    type V: Copy;
    /// Sixteen 32-bit words of packed nibbles.
    type Nibbles: Copy;
    /// Vectors that the register file holds, which decides the shape of tiles but no bit of the result.
    const REGISTERS: usize;

    /// Runs `kernel` compiled for these instructions.
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, value: f32) -> Self::V;
    fn load(self, from: &Lanes) -> Self::V;
    fn store(self, value: Self::V, to: &mut Lanes);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// `value * 2^n` where `rounded` is `n + ROUND`; value and result must be normal.
    fn scale_by_power(self, value: Self::V, rounded: Self::V) -> Self::V;
    /// `value` where `x >= limit`, else 0.
    fn zero_below(self, x: Self::V, limit: Self::V, value: Self::V) -> Self::V;

    /// Sixteen little-endian IEEE half floats.
    fn load_f16(self, from: &[u8; 32]) -> Self::V;
    /// Sixteen little-endian bfloat16.
    fn load_bf16(self, from: &[u8; 32]) -> Self::V;
    /// Sixteen signed bytes.
    fn load_i8(self, from: &[u8; 16]) -> Self::V;
    fn load_nibbles(self, from: &[u8; 64]) -> Self::Nibbles;
    /// The `index`-th nibble of each word, lowest first, as a two's complement number of four bits.
    fn nibble(self, words: Self::Nibbles, index: u32) -> Self::V;
}

/// A computation to be compiled once per [`Simd`]. `run` must be `#[inline(always)]`, as must all that it calls in a hot loop,
/// or it is compiled without the instructions that it was given.
pub(crate) trait Kernel {
    type Output;
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// The chosen instructions.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Machine {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
}

impl Machine {
    /// The asked path, or the fastest one that this machine has.
    pub(crate) fn choose(path: Option<KernelPath>) -> Result<Self, ModelError> {
        let Some(path) = path else { return Ok(Self::fastest()) };
        Self::available(path).ok_or(ModelError::NoKernel { path })
    }

    fn fastest() -> Self {
        [KernelPath::Avx512, KernelPath::Avx2].into_iter().find_map(Self::available).unwrap_or(Self::Portable(Portable))
    }

    #[cfg(target_arch = "x86_64")]
    fn available(path: KernelPath) -> Option<Self> {
        match path {
            KernelPath::Portable => Some(Self::Portable(Portable)),
            KernelPath::Avx2 => Avx2::detect().map(Self::Avx2),
            KernelPath::Avx512 => Avx512::detect().map(Self::Avx512),
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn available(path: KernelPath) -> Option<Self> {
        (path == KernelPath::Portable).then_some(Self::Portable(Portable))
    }

    pub(crate) fn path(self) -> KernelPath {
        match self {
            Self::Portable(_) => KernelPath::Portable,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => KernelPath::Avx2,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => KernelPath::Avx512,
        }
    }

    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            Self::Portable(simd) => simd.dispatch(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.dispatch(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.dispatch(kernel),
        }
    }
}
