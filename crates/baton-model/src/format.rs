//! How packed weights lie in memory and become floats inside a kernel.
//!
//! Sixteen output features lie side by side (a panel), so that a vector lane is one feature and k runs in its own order. A panel
//! is a run of blocks over k, each its quants and then its scales. The value of a block is `scale * sum(a * q) + min * sum(a)`
//! per lane, each sum one chain of fused multiply-adds in the order of k; blocks are added in the order of k. That is the
//! reduction rule of every product, whatever the tile, the path or the thread, and [`REDUCTION_RULE`] names it.

use std::marker::PhantomData;

use crate::simd::{LANES, Simd};

/// Part of `numerics_id`; to be raised whenever any result may change a bit.
pub(crate) const REDUCTION_RULE: u32 = 1;

/// Values of k per block.
pub(crate) const BLOCK: usize = 32;

/// One kind of packed weights.
pub(crate) trait Format {
    /// Bytes of a block of [`LANES`] features.
    const BYTES: usize;
    /// Whether weights have a min beside the scale.
    const MIN: bool;
    /// What is loaded at once for eight values of k.
    type Group<S: Simd>: Copy;

    /// Loads values `8 * index ..` of a block.
    fn group<S: Simd>(simd: S, block: &[u8], index: usize) -> Self::Group<S>;
    /// The `index`-th of eight, as unscaled floats.
    fn value<S: Simd>(simd: S, group: Self::Group<S>, index: usize) -> S::V;
    /// Scale and min of a block.
    fn scales<S: Simd>(simd: S, block: &[u8]) -> (S::V, S::V);
}

/// Quants of one kind with scales of one kind.
pub(crate) struct Packed<Q, C>(PhantomData<(Q, C)>);

impl<Q: Quants, C: Scales> Format for Packed<Q, C> {
    const BYTES: usize = Q::BYTES * BLOCK + C::BYTES;
    const MIN: bool = C::MIN;
    type Group<S: Simd> = Q::Group<S>;

    #[inline(always)]
    fn group<S: Simd>(simd: S, block: &[u8], index: usize) -> Q::Group<S> {
        Q::group(simd, &block[index * 8 * Q::BYTES..][..8 * Q::BYTES])
    }

    #[inline(always)]
    fn value<S: Simd>(simd: S, group: Q::Group<S>, index: usize) -> S::V {
        Q::value(simd, group, index)
    }

    #[inline(always)]
    fn scales<S: Simd>(simd: S, block: &[u8]) -> (S::V, S::V) {
        C::load(simd, &block[Q::BYTES * BLOCK..][..C::BYTES])
    }
}

/// How unscaled values lie.
pub(crate) trait Quants {
    /// Bytes of [`LANES`] values.
    const BYTES: usize;
    type Group<S: Simd>: Copy;
    fn group<S: Simd>(simd: S, bytes: &[u8]) -> Self::Group<S>;
    fn value<S: Simd>(simd: S, group: Self::Group<S>, index: usize) -> S::V;
}

#[inline(always)]
fn fixed<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..at + N].try_into().expect("the range has this length")
}

#[inline(always)]
fn load_f32<S: Simd>(simd: S, bytes: &[u8; 64]) -> S::V {
    let mut lanes = [0.0; LANES];
    for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *lane = f32::from_le_bytes(*bytes);
    }
    simd.load(&lanes)
}

/// Eight values that lie apart, as `[k][lane]`.
macro_rules! apart {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$simd:ident, $from:ident| $load:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl Quants for $name {
            const BYTES: usize = $bytes;
            type Group<S: Simd> = [S::V; 8];

            #[inline(always)]
            fn group<S: Simd>($simd: S, bytes: &[u8]) -> [S::V; 8] {
                let mut group = [$simd.splat(0.0); 8];
                for (i, value) in group.iter_mut().enumerate() {
                    let $from = fixed::<$bytes>(bytes, i * $bytes);
                    *value = $load;
                }
                group
            }

            #[inline(always)]
            fn value<S: Simd>(_: S, group: [S::V; 8], index: usize) -> S::V {
                group[index]
            }
        }
    };
}

apart!(
    /// f32.
    Single, 64, |simd, from| load_f32(simd, from)
);
apart!(
    /// IEEE half floats.
    Half, 32, |simd, from| simd.load_f16(from)
);
apart!(
    /// bfloat16.
    Brain, 32, |simd, from| simd.load_bf16(from)
);
apart!(
    /// Signed bytes.
    Bytes, 16, |simd, from| simd.load_i8(from)
);

/// Two's complement nibbles, eight values of k of one feature in a 32-bit word, as `[k / 8][lane]`.
pub(crate) struct Nibbles;

impl Quants for Nibbles {
    const BYTES: usize = 8;
    type Group<S: Simd> = S::Nibbles;

    #[inline(always)]
    fn group<S: Simd>(simd: S, bytes: &[u8]) -> S::Nibbles {
        simd.load_nibbles(fixed(bytes, 0))
    }

    #[inline(always)]
    fn value<S: Simd>(simd: S, group: S::Nibbles, index: usize) -> S::V {
        simd.nibble(group, index as u32)
    }
}

/// How scales and mins lie.
pub(crate) trait Scales {
    const BYTES: usize;
    const MIN: bool;
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> (S::V, S::V);
}

/// Plain floats have none.
pub(crate) struct Unscaled;

impl Scales for Unscaled {
    const BYTES: usize = 0;
    const MIN: bool = false;

    #[inline(always)]
    fn load<S: Simd>(simd: S, _: &[u8]) -> (S::V, S::V) {
        (simd.splat(1.0), simd.splat(0.0))
    }
}

/// A half-float scale.
pub(crate) struct HalfScale;

impl Scales for HalfScale {
    const BYTES: usize = 32;
    const MIN: bool = false;

    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> (S::V, S::V) {
        (simd.load_f16(fixed(bytes, 0)), simd.splat(0.0))
    }
}

/// How far packed nibbles lie below the file's where the file's start at 0: centred, little cancels between sum and min.
pub(crate) const CENTRE: f32 = 8.0;

/// A half-float scale and the min of quants that were not centred yet in the file.
pub(crate) struct HalfScaleMin;

impl Scales for HalfScaleMin {
    const BYTES: usize = 64;
    const MIN: bool = true;

    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> (S::V, S::V) {
        let scale = simd.load_f16(fixed(bytes, 0));
        let min = simd.load_f16(fixed(bytes, 32));
        (scale, simd.fma(simd.splat(CENTRE), scale, min))
    }
}

/// An f32 scale and the min of centred quants.
pub(crate) struct SingleScaleMin;

impl Scales for SingleScaleMin {
    const BYTES: usize = 128;
    const MIN: bool = true;

    #[inline(always)]
    fn load<S: Simd>(simd: S, bytes: &[u8]) -> (S::V, S::V) {
        (load_f32(simd, fixed(bytes, 0)), load_f32(simd, fixed(bytes, 64)))
    }
}

/// Bytes with one f32 scale per 16 values (Q6_K), which are scaled one by one: the partial sum is of weights, not of quants.
pub(crate) struct FineBytes;

impl FineBytes {
    pub(crate) const SCALES: usize = BLOCK * LANES;
}

impl Format for FineBytes {
    const BYTES: usize = Self::SCALES + BLOCK / 16 * 64;
    const MIN: bool = false;
    type Group<S: Simd> = [S::V; 8];

    #[inline(always)]
    fn group<S: Simd>(simd: S, block: &[u8], index: usize) -> [S::V; 8] {
        let scale = load_f32(simd, fixed(block, Self::SCALES + index / 2 * 64));
        let mut group = Bytes::group(simd, &block[index * 8 * Bytes::BYTES..][..8 * Bytes::BYTES]);
        for value in &mut group {
            *value = simd.mul(scale, *value);
        }
        group
    }

    #[inline(always)]
    fn value<S: Simd>(_: S, group: [S::V; 8], index: usize) -> S::V {
        group[index]
    }

    #[inline(always)]
    fn scales<S: Simd>(simd: S, _: &[u8]) -> (S::V, S::V) {
        Unscaled::load(simd, &[])
    }
}
