use half::{bf16, f16};

use super::{Kernel, LANES, Lanes, Simd};

/// Plain Rust. Where the machine has no fused multiply-add this is slow (a library call per lane) but gives the same bits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Portable;

#[inline(always)]
fn each(mut f: impl FnMut(usize) -> f32) -> Lanes {
    let mut out = [0.0; LANES];
    for (i, lane) in out.iter_mut().enumerate() {
        *lane = f(i);
    }
    out
}

/// On its own where the machine type guarantees no such instruction: sixteen library calls in each place would bloat the kernels.
#[cfg_attr(all(target_arch = "x86_64", not(target_feature = "fma")), inline(never))]
#[cfg_attr(not(all(target_arch = "x86_64", not(target_feature = "fma"))), inline(always))]
fn fused(a: &Lanes, b: &Lanes, c: &Lanes) -> Lanes {
    each(|i| a[i].mul_add(b[i], c[i]))
}

impl Simd for Portable {
    type V = Lanes;
    type Nibbles = [u32; LANES];
    const REGISTERS: usize = 16;

    #[inline(never)]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Lanes {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, from: &Lanes) -> Lanes {
        *from
    }

    #[inline(always)]
    fn store(self, value: Lanes, to: &mut Lanes) {
        *to = value;
    }

    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| a[i] / b[i])
    }

    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn fma(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        fused(&a, &b, &c)
    }

    #[inline(always)]
    fn scale_by_power(self, value: Lanes, rounded: Lanes) -> Lanes {
        each(|i| f32::from_bits(value[i].to_bits().wrapping_add(rounded[i].to_bits() << 23)))
    }

    #[inline(always)]
    fn zero_below(self, x: Lanes, limit: Lanes, value: Lanes) -> Lanes {
        each(|i| if x[i] >= limit[i] { value[i] } else { 0.0 })
    }

    #[inline(always)]
    fn load_f16(self, from: &[u8; 32]) -> Lanes {
        each(|i| f16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32())
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u8; 32]) -> Lanes {
        each(|i| bf16::from_le_bytes([from[2 * i], from[2 * i + 1]]).to_f32())
    }

    #[inline(always)]
    fn load_i8(self, from: &[u8; 16]) -> Lanes {
        each(|i| f32::from(from[i].cast_signed()))
    }

    #[inline(always)]
    fn load_nibbles(self, from: &[u8; 64]) -> [u32; LANES] {
        let mut words = [0; LANES];
        for (word, bytes) in words.iter_mut().zip(from.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        words
    }

    #[inline(always)]
    fn nibble(self, words: [u32; LANES], index: u32) -> Lanes {
        each(|i| ((words[i] << (28 - 4 * index)).cast_signed() >> 28) as f32)
    }
}
