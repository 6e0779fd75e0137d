//! Attention of one token over the blocks of its sequence, read where they lie.
//!
//! A score is one chain over the head's dimensions; weights are summed in 16 lanes by position modulo 16 and then by the lane
//! tree; values are added in the order of positions. All of it is in terms of absolute positions, so neither the block size nor
//! the chunk that a token came in changes a bit.

use std::cell::RefCell;

use crate::kernels::activations::sum_lanes;
use crate::kernels::pointwise::exp;
use crate::kv::{KvCache, KvLayout};
use crate::simd::{Kernel, LANES, Lanes, Machine, Simd};

/// Query heads computed side by side at most.
const MAX_HEADS: usize = 4;

/// What is attended to.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) layout: KvLayout,
    pub(crate) kv: &'a KvCache,
    pub(crate) layer: usize,
    /// Block table of the sequence.
    pub(crate) blocks: &'a [u32],
    pub(crate) kv_head: usize,
    /// Positions to attend to: the token's own and all before.
    pub(crate) positions: usize,
    /// 1 / sqrt(head dimension).
    pub(crate) scale: f32,
}

thread_local! {
    static SCORES: RefCell<Vec<Lanes>> = const { RefCell::new(Vec::new()) };
}

/// Writes the attention of one token and one KV head to `output`; see [`Attend`] for the shapes.
pub(crate) fn attend(machine: Machine, context: Context<'_>, queries: &[f32], output: &mut [f32]) {
    let dim = context.layout.head_dim;
    // One more vector than the positions need, as the last group of a block is stored whole.
    let stride = context.positions.div_ceil(LANES) + 1;
    SCORES.with_borrow_mut(|scores| {
        scores.resize(scores.len().max(MAX_HEADS * stride), [0.0; LANES]);
        for (queries, output) in queries.chunks(MAX_HEADS * dim).zip(output.chunks_mut(MAX_HEADS * dim)) {
            let scores = &mut scores[..queries.len() / dim * stride];
            match queries.len() / dim {
                1 => machine.run(Attend::<1> { context, queries, output, scores }),
                2 => machine.run(Attend::<2> { context, queries, output, scores }),
                3 => machine.run(Attend::<3> { context, queries, output, scores }),
                _ => machine.run(Attend::<MAX_HEADS> { context, queries, output, scores }),
            }
        }
    });
}

/// One token and `R` query heads of one KV head.
struct Attend<'a, const R: usize> {
    context: Context<'a>,
    /// `[query head][dimension]`.
    queries: &'a [f32],
    /// As `queries`.
    output: &'a mut [f32],
    /// `[query head][position]`, with one vector more than the positions need.
    scores: &'a mut [Lanes],
}

impl<const R: usize> Kernel for Attend<'_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        attend_heads::<S, R>(simd, self.context, self.queries, self.output, self.scores);
    }
}

#[inline(always)]
fn attend_heads<S: Simd, const R: usize>(simd: S, context: Context<'_>, queries: &[f32], output: &mut [f32], scores: &mut [Lanes]) {
    let stride = scores.len() / R;
    if S::REGISTERS >= 32 {
        score::<S, R, 2>(simd, context, queries, scores);
    } else {
        score::<S, R, 1>(simd, context, queries, scores);
    }
    let mut inverse = [0.0; R];
    for (row, inverse) in scores.chunks_exact_mut(stride).zip(&mut inverse) {
        *inverse = 1.0 / soften(simd, row, context.positions);
    }
    let vectors = context.layout.head_dim / LANES;
    let mut vector = 0;
    while vector < vectors {
        if S::REGISTERS >= 32 && vector + 4 <= vectors {
            mix::<S, R, 4>(simd, context, vector, scores, &inverse, output);
            vector += 4;
        } else if vector + 2 <= vectors {
            mix::<S, R, 2>(simd, context, vector, scores, &inverse, output);
            vector += 2;
        } else {
            mix::<S, R, 1>(simd, context, vector, scores, &inverse, output);
            vector += 1;
        }
    }
}

/// Scaled scores of `R` heads, `G` groups of positions at a time, to `scores[head][position]`.
#[inline(always)]
fn score<S: Simd, const R: usize, const G: usize>(simd: S, context: Context<'_>, queries: &[f32], scores: &mut [Lanes]) {
    let layout = context.layout;
    let (dim, stride) = (layout.head_dim, scores.len() / R);
    let whole_blocks = context.positions / layout.block_size;
    let rest = context.positions % layout.block_size;
    let groups = whole_blocks * layout.groups() + rest.div_ceil(LANES);
    let scale = simd.splat(context.scale);
    let mut group = 0;
    while group < groups {
        let mut keys: [&[Lanes]; G] = [&[]; G];
        let mut firsts = [0; G];
        for g in 0..G {
            // Past the end the last group is computed again; it is stored twice with the same result.
            let index = (group + g).min(groups - 1);
            let (block, within) = (index / layout.groups(), index % layout.groups());
            firsts[g] = block * layout.block_size + within * LANES;
            let floats = context.kv.floats(context.blocks[block]);
            keys[g] = &floats[layout.keys(context.layer, context.kv_head, within)].as_chunks().0[..dim];
        }
        let mut sums = [[simd.splat(0.0); G]; R];
        for d in 0..dim {
            let mut k = [simd.splat(0.0); G];
            for g in 0..G {
                k[g] = simd.load(&keys[g][d]);
            }
            for r in 0..R {
                let q = simd.splat(queries[r * dim + d]);
                for g in 0..G {
                    sums[r][g] = simd.fma(q, k[g], sums[r][g]);
                }
            }
        }
        for r in 0..R {
            let row = scores[r * stride..][..stride].as_flattened_mut();
            for g in 0..G {
                let to = row[firsts[g]..].first_chunk_mut().expect("there is room for one more vector");
                simd.store(simd.mul(sums[r][g], scale), to);
            }
        }
        group += G;
    }
}

/// Turns scores into e^(score - highest) and returns their sum.
#[inline(always)]
fn soften<S: Simd>(simd: S, scores: &mut [Lanes], positions: usize) -> f32 {
    scores.as_flattened_mut()[positions..].fill(f32::NEG_INFINITY);
    let mut highest = simd.splat(f32::NEG_INFINITY);
    for lanes in scores.iter() {
        highest = simd.max(highest, simd.load(lanes));
    }
    let mut lanes = [0.0; LANES];
    simd.store(highest, &mut lanes);
    let highest = simd.splat(lanes.into_iter().fold(f32::NEG_INFINITY, f32::max));
    let mut sums = simd.splat(0.0);
    for lanes in scores.iter_mut() {
        let weight = exp(simd, simd.sub(simd.load(lanes), highest));
        sums = simd.add(sums, weight);
        simd.store(weight, lanes);
    }
    sum_lanes(simd, sums)
}

/// `C` vectors of dimensions of the weighted sum of values, times `inverse`.
#[inline(always)]
fn mix<S: Simd, const R: usize, const C: usize>(
    simd: S,
    context: Context<'_>,
    vector: usize,
    scores: &[Lanes],
    inverse: &[f32; R],
    output: &mut [f32],
) {
    let layout = context.layout;
    let (dim, stride) = (layout.head_dim, scores.len() / R * LANES);
    let weights = scores.as_flattened();
    let mut sums = [[simd.splat(0.0); C]; R];
    let mut first = 0;
    for &block in context.blocks {
        if first >= context.positions {
            break;
        }
        let values = &context.kv.floats(block)[layout.values(context.layer, context.kv_head)];
        let len = layout.block_size.min(context.positions - first);
        for (offset, value) in values.chunks_exact(dim).take(len).enumerate() {
            let value = &value.as_chunks::<LANES>().0[vector..vector + C];
            for r in 0..R {
                let weight = simd.splat(weights[r * stride + first + offset]);
                for c in 0..C {
                    sums[r][c] = simd.fma(weight, simd.load(&value[c]), sums[r][c]);
                }
            }
        }
        first += layout.block_size;
    }
    for r in 0..R {
        let to = output[r * dim..][..dim].as_chunks_mut::<LANES>().0;
        for c in 0..C {
            simd.store(simd.mul(sums[r][c], simd.splat(inverse[r])), &mut to[vector + c]);
        }
    }
}
