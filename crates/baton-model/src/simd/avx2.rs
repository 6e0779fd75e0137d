#![allow(clippy::wildcard_imports)] // Intrinsics have their prefix as a namespace.
// SAFETY (all of this file): the only constructor of `Avx2` is `detect`, which returns one only on a machine with the features
// that the intrinsics need; loads and stores go through pointers into references to arrays that hold all bytes read or written.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes, Simd};

/// AVX2 with FMA: 16 registers of 8 lanes, two to a vector.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Pair(__m256, __m256);

#[derive(Clone, Copy)]
pub(crate) struct Words(__m256i, __m256i);

#[inline(never)] // The caller may lack the features; a kernel is large enough to be called.
#[target_feature(enable = "avx2,fma,f16c")]
fn run<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx2 {
    type V = Pair;
    type Nibbles = Words;
    const REGISTERS: usize = 8;

    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: see the head of the file.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Pair {
        // SAFETY: see the head of the file.
        let half = unsafe { _mm256_set1_ps(value) };
        Pair(half, half)
    }

    #[inline(always)]
    fn load(self, from: &Lanes) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from.as_ptr().add(8))) }
    }

    #[inline(always)]
    fn store(self, value: Pair, to: &mut Lanes) {
        // SAFETY: see the head of the file.
        unsafe {
            _mm256_storeu_ps(to.as_mut_ptr(), value.0);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), value.1);
        }
    }

    #[inline(always)]
    fn add(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_add_ps(a.0, b.0), _mm256_add_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn sub(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_sub_ps(a.0, b.0), _mm256_sub_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn mul(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_mul_ps(a.0, b.0), _mm256_mul_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn div(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_div_ps(a.0, b.0), _mm256_div_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn max(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_max_ps(a.0, b.0), _mm256_max_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn min(self, a: Pair, b: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_min_ps(a.0, b.0), _mm256_min_ps(a.1, b.1)) }
    }

    #[inline(always)]
    fn fma(self, a: Pair, b: Pair, c: Pair) -> Pair {
        // SAFETY: see the head of the file.
        unsafe { Pair(_mm256_fmadd_ps(a.0, b.0, c.0), _mm256_fmadd_ps(a.1, b.1, c.1)) }
    }

    #[inline(always)]
    fn scale_by_power(self, value: Pair, rounded: Pair) -> Pair {
        // SAFETY: see the head of the file.
        let half = |value, rounded| unsafe {
            let power = _mm256_slli_epi32::<23>(_mm256_castps_si256(rounded));
            _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(value), power))
        };
        Pair(half(value.0, rounded.0), half(value.1, rounded.1))
    }

    #[inline(always)]
    fn zero_below(self, x: Pair, limit: Pair, value: Pair) -> Pair {
        // SAFETY: see the head of the file.
        let half = |x, limit, value| unsafe { _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x, limit), value) };
        Pair(half(x.0, limit.0, value.0), half(x.1, limit.1, value.1))
    }

    #[inline(always)]
    fn load_f16(self, from: &[u8; 32]) -> Pair {
        // SAFETY: see the head of the file.
        unsafe {
            let low = _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast()));
            Pair(low, _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().add(16).cast())))
        }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u8; 32]) -> Pair {
        // SAFETY: see the head of the file.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().add(16).cast()));
            Pair(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)))
        }
    }

    #[inline(always)]
    fn load_i8(self, from: &[u8; LANES]) -> Pair {
        // SAFETY: see the head of the file.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.as_ptr().add(8).cast()));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    fn load_nibbles(self, from: &[u8; 64]) -> Words {
        // SAFETY: see the head of the file.
        unsafe { Words(_mm256_loadu_si256(from.as_ptr().cast()), _mm256_loadu_si256(from.as_ptr().add(32).cast())) }
    }

    #[inline(always)]
    fn nibble(self, words: Words, index: u32) -> Pair {
        // SAFETY: see the head of the file.
        unsafe {
            let up = _mm256_set1_epi32(28 - 4 * index.cast_signed());
            let low = _mm256_srai_epi32::<28>(_mm256_sllv_epi32(words.0, up));
            let high = _mm256_srai_epi32::<28>(_mm256_sllv_epi32(words.1, up));
            Pair(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }
}
