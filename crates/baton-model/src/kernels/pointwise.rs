//! Everything between the products: norms, rotary positions, the gate.

use crate::kernels::activations::sum_lanes;
use crate::simd::{LANES, ROUND, Simd};

/// Below it e^x is taken as 0: the result would leave the normal floats.
const EXP_LOWEST: f32 = -87.0;
/// Above it e^x is taken as e^88.
const EXP_HIGHEST: f32 = 88.0;
/// ln 2 in two parts, the first of few bits, so that `n * LN2_HIGH` is exact (Cephes, `expf`).
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Minimax polynomial of (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2 (Cephes, `expf`), highest power first.
const EXP_POLYNOMIAL: [f32; 6] = [1.987_569_2e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];

/// e^x within 2 units in the last place, the same bits on every machine; 0 below -87.
#[inline(always)]
pub(crate) fn exp<S: Simd>(simd: S, x: S::V) -> S::V {
    let lowest = simd.splat(EXP_LOWEST);
    let clamped = simd.min(simd.max(x, lowest), simd.splat(EXP_HIGHEST));
    let rounded = simd.fma(clamped, simd.splat(std::f32::consts::LOG2_E), simd.splat(ROUND));
    let n = simd.sub(rounded, simd.splat(ROUND));
    let r = simd.fma(n, simd.splat(-LN2_HIGH), clamped);
    let r = simd.fma(n, simd.splat(-LN2_LOW), r);
    let mut p = simd.splat(EXP_POLYNOMIAL[0]);
    for &coefficient in &EXP_POLYNOMIAL[1..] {
        p = simd.fma(p, r, simd.splat(coefficient));
    }
    let p = simd.add(simd.fma(p, simd.mul(r, r), r), simd.splat(1.0));
    simd.zero_below(x, lowest, simd.scale_by_power(p, rounded))
}

/// `out = x / rms(x) * weight`; lengths are equal multiples of [`LANES`].
#[inline(always)]
pub(crate) fn rms_norm<S: Simd>(simd: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = simd.splat(rms_scale(simd, x, eps));
    let lanes = x.as_chunks::<LANES>().0.iter().zip(weight.as_chunks().0).zip(out.as_chunks_mut().0);
    for ((x, weight), out) in lanes {
        simd.store(simd.mul(simd.mul(simd.load(x), scale), simd.load(weight)), out);
    }
}

/// As [`rms_norm`], in place.
#[inline(always)]
pub(crate) fn rms_norm_in_place<S: Simd>(simd: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = simd.splat(rms_scale(simd, x, eps));
    for (x, weight) in x.as_chunks_mut::<LANES>().0.iter_mut().zip(weight.as_chunks().0) {
        simd.store(simd.mul(simd.mul(simd.load(x), scale), simd.load(weight)), x);
    }
}

#[inline(always)]
fn rms_scale<S: Simd>(simd: S, x: &[f32], eps: f32) -> f32 {
    let mut squares = simd.splat(0.0);
    for lanes in x.as_chunks::<LANES>().0 {
        let v = simd.load(lanes);
        squares = simd.fma(v, v, squares);
    }
    1.0 / (sum_lanes(simd, squares) / x.len() as f32 + eps).sqrt()
}

/// Adds `y` to `x`.
#[inline(always)]
pub(crate) fn add<S: Simd>(simd: S, x: &mut [f32], y: &[f32]) {
    for (x, y) in x.as_chunks_mut::<LANES>().0.iter_mut().zip(y.as_chunks().0) {
        simd.store(simd.add(simd.load(x), simd.load(y)), x);
    }
}

/// `gate = gate / (1 + e^-gate) * up`: SiLU and the product of the gated feed-forward (Shazeer, 2020).
#[inline(always)]
pub(crate) fn silu_gate<S: Simd>(simd: S, gate: &mut [f32], up: &[f32]) {
    let (zero, one) = (simd.splat(0.0), simd.splat(1.0));
    for (gate, up) in gate.as_chunks_mut::<LANES>().0.iter_mut().zip(up.as_chunks().0) {
        let g = simd.load(gate);
        let silu = simd.div(g, simd.add(one, exp(simd, simd.sub(zero, g))));
        simd.store(simd.mul(silu, simd.load(up)), gate);
    }
}

/// Turns the pairs (i, i + half) of a head by the angles of one position (Su et al., 2021).
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (low, high) = head.split_at_mut(cosines.len());
    for (((low, high), cosine), sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        let (a, b) = (*low, *high);
        *low = a * cosine - b * sine;
        *high = b * cosine + a * sine;
    }
}
