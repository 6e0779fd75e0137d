#![allow(clippy::wildcard_imports)] // Intrinsics have their prefix as a namespace.
// SAFETY (all of this file): the only constructor of `Avx512` is `detect`, which returns one only on a machine with the features
// that the intrinsics need; loads and stores go through references to arrays of the full width and need no alignment.

use std::arch::x86_64::*;

use super::{Kernel, LANES, Lanes, Simd};

/// AVX-512 (foundation) with 32 registers of 16 lanes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// What each 4-bit two's complement number is as a float.
static NIBBLES: Lanes = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0];

#[inline(never)] // The caller may lack the features; a kernel is large enough to be called.
#[target_feature(enable = "avx512f,avx2,fma,f16c")]
fn run<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
    kernel.run(simd)
}

impl Simd for Avx512 {
    type V = __m512;
    type Nibbles = __m512i;
    const REGISTERS: usize = 32;

    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: see the head of the file.
        unsafe { run(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, from: &Lanes) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, value: __m512, to: &mut Lanes) {
        // SAFETY: see the head of the file.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn scale_by_power(self, value: __m512, rounded: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe {
            let power = _mm512_slli_epi32::<23>(_mm512_castps_si512(rounded));
            _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(value), power))
        }
    }

    #[inline(always)]
    fn zero_below(self, x: __m512, limit: __m512, value: __m512) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, limit), value) }
    }

    #[inline(always)]
    fn load_f16(self, from: &[u8; 32]) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, from: &[u8; 32]) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }

    #[inline(always)]
    fn load_i8(self, from: &[u8; LANES]) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_nibbles(self, from: &[u8; 64]) -> __m512i {
        // SAFETY: see the head of the file.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    /// The permutation reads only the low four bits of each word, so the shift needs no mask.
    #[inline(always)]
    fn nibble(self, words: __m512i, index: u32) -> __m512 {
        // SAFETY: see the head of the file.
        unsafe {
            let low = _mm512_srlv_epi32(words, _mm512_set1_epi32(4 * index.cast_signed()));
            _mm512_permutexvar_ps(low, _mm512_loadu_ps(NIBBLES.as_ptr()))
        }
    }
}
