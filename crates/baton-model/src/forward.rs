//! The forward pass over a few spans of tokens.

use std::ops::Range;

use crate::kernels::activations::Activations;
use crate::kernels::attention::{Context, attend};
use crate::kernels::multiply::{Heights, Multiply};
use crate::kernels::pointwise::{add, rms_norm, rms_norm_in_place, rotate, silu_gate};
use crate::kv::KvCache;
use crate::matrix::Matrix;
use crate::model::{Layer, Model, Projection};
use crate::pool::{Pool, SharedRows};
use crate::simd::{Kernel, LANES, Machine, Simd};

/// Consecutive tokens of one sequence.
pub(crate) struct Span<'a> {
    pub(crate) tokens: &'a [u32],
    /// Position of the first.
    pub(crate) start: usize,
    /// Block table of the sequence.
    pub(crate) blocks: &'a [u32],
}

/// Space for one forward pass, kept between steps. Rows are tokens.
#[derive(Default)]
pub(crate) struct Scratch {
    /// `[token][hidden]`: the residual stream.
    pub(crate) hidden: Vec<f32>,
    input: Activations,
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    attention: Vec<f32>,
    projected: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
}

/// What a forward pass runs on.
#[derive(Clone, Copy)]
pub(crate) struct Forward<'a> {
    pub(crate) model: &'a Model,
    pub(crate) machine: Machine,
    pub(crate) pool: &'a Pool,
}

impl Forward<'_> {
    /// Computes and stores the KV of all tokens and leaves their last hidden states in `scratch.hidden`.
    pub(crate) fn run(self, spans: &[Span<'_>], kv: &mut KvCache, scratch: &mut Scratch) {
        let hidden = self.model.architecture.hidden;
        let tokens: usize = spans.iter().map(|span| span.tokens.len()).sum();
        scratch.hidden.resize(tokens * hidden, 0.0);
        let rows = scratch.hidden.chunks_exact_mut(hidden);
        for (row, &token) in rows.zip(spans.iter().flat_map(|span| span.tokens)) {
            self.model.embed(token, row);
        }
        for (index, layer) in self.model.layers.iter().enumerate() {
            self.attention(index, layer, spans, kv, scratch);
            self.feed_forward(layer, scratch);
        }
    }

    /// Logits `[row][vocabulary]` of rows of last hidden states.
    pub(crate) fn logits(self, hidden: &[f32], input: &mut Activations, logits: &mut Vec<f32>) {
        self.pack_normed(hidden, &self.model.output_norm, input);
        self.multiply(input, &mut [(&self.model.head, logits)]);
    }

    fn attention(self, index: usize, layer: &Layer, spans: &[Span<'_>], kv: &mut KvCache, scratch: &mut Scratch) {
        let Scratch { hidden, input, query, key, value, attention, projected, .. } = scratch;
        self.pack_normed(hidden, &layer.attention_norm, input);
        let products = &mut [(&layer.query.weights, &mut *query), (&layer.key.weights, &mut *key), (&layer.value.weights, &mut *value)];
        self.multiply(input, products);
        self.machine.run(Finish { model: self.model, layer, spans, query, key, value });
        store(index, spans, kv, key, value);
        attention.resize(query.len(), 0.0);
        self.attend(index, spans, kv, query, attention);
        self.pack(attention, layer.attention_output.columns(), input);
        self.multiply(input, &mut [(&layer.attention_output, projected)]);
        self.machine.run(Add { to: hidden, from: projected });
    }

    fn attend(self, index: usize, spans: &[Span<'_>], kv: &KvCache, query: &[f32], attention: &mut [f32]) {
        let layout = kv.layout();
        let width = query.len() / spans.iter().map(|span| span.tokens.len()).sum::<usize>();
        let group = width / layout.kv_heads;
        let output = SharedRows::new(attention, width);
        let tokens: Vec<(&Span<'_>, usize)> = spans.iter().flat_map(|span| (0..span.tokens.len()).map(move |i| (span, i))).collect();
        self.pool.run(tokens.len() * layout.kv_heads, |part| {
            let (token, kv_head) = (part / layout.kv_heads, part % layout.kv_heads);
            let (span, offset) = tokens[token];
            let columns = kv_head * group..(kv_head + 1) * group;
            let context = Context {
                layout,
                kv,
                layer: index,
                blocks: span.blocks,
                kv_head,
                positions: span.start + offset + 1,
                scale: 1.0 / (layout.head_dim as f32).sqrt(),
            };
            let queries = &query[token * width..][columns.clone()];
            // SAFETY: each part is one token and one KV head, whose columns no other part has.
            let output = unsafe { output.part(token, columns) };
            attend(self.machine, context, queries, output);
        });
    }

    fn feed_forward(self, layer: &Layer, scratch: &mut Scratch) {
        let Scratch { hidden, input, projected, gate, up, .. } = scratch;
        self.pack_normed(hidden, &layer.ffn_norm, input);
        self.multiply(input, &mut [(&layer.gate, &mut *gate), (&layer.up, &mut *up)]);
        self.machine.run(Gate { gate, up });
        self.pack(gate, layer.down.columns(), input);
        self.multiply(input, &mut [(&layer.down, projected)]);
        self.machine.run(Add { to: hidden, from: projected });
    }

    fn pack_normed(self, rows: &[f32], weight: &[f32], input: &mut Activations) {
        let eps = self.model.architecture.rms_eps;
        self.pack_rows(rows, weight.len(), Some((weight, eps)), input);
    }

    fn pack(self, rows: &[f32], columns: usize, input: &mut Activations) {
        self.pack_rows(rows, columns, None, input);
    }

    fn pack_rows(self, rows: &[f32], columns: usize, norm: Option<(&[f32], f32)>, input: &mut Activations) {
        let count = rows.len() / columns;
        input.resize(count, columns, self.machine.run(Heights { rows: count }));
        self.machine.run(Pack { rows, columns, norm, input });
    }

    /// Products of one input with several weights, each to its own rows.
    fn multiply(self, input: &Activations, products: &mut [(&Matrix, &mut Vec<f32>)]) {
        let mut parts: Vec<(usize, Range<usize>)> = Vec::new();
        let mut outputs = Vec::new();
        for (index, (weights, output)) in products.iter_mut().enumerate() {
            parts.extend(shares(weights.panels(), self.pool.threads()).map(|panels| (index, panels)));
            output.resize(input.rows() * weights.rows(), 0.0);
            outputs.push((*weights, SharedRows::new(output, weights.rows())));
        }
        self.pool.run(parts.len(), |part| {
            let (index, panels) = parts[part].clone();
            let (weights, output) = &outputs[index];
            let weights = self.model.packed(weights);
            self.machine.run(Multiply { weights, panels, input, output });
        });
    }
}

/// Cuts panels into shares: one for one thread, else several for each, so that a slow thread takes fewer.
fn shares(panels: usize, threads: usize) -> impl Iterator<Item = Range<usize>> {
    // Kernels take four panels at a time.
    let len = if threads == 1 { panels } else { panels.div_ceil(threads * 4).next_multiple_of(4) };
    (0..panels).step_by(len.max(1)).map(move |start| start..(start + len).min(panels))
}

/// Stores keys and values of all tokens in the blocks of their sequences.
fn store(layer: usize, spans: &[Span<'_>], kv: &mut KvCache, keys: &[f32], values: &[f32]) {
    let width = kv.layout().kv_heads * kv.layout().head_dim;
    let mut rows = keys.chunks_exact(width).zip(values.chunks_exact(width));
    for span in spans {
        for (offset, (key, value)) in rows.by_ref().take(span.tokens.len()).enumerate() {
            kv.write(layer, span.blocks, span.start + offset, key, value);
        }
    }
}

/// Packs rows, normed or as they are.
struct Pack<'a> {
    rows: &'a [f32],
    columns: usize,
    norm: Option<(&'a [f32], f32)>,
    input: &'a mut Activations,
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mut normed = vec![0.0; self.columns];
        for (index, row) in self.rows.chunks_exact(self.columns).enumerate() {
            if let Some((weight, eps)) = self.norm {
                rms_norm(simd, row, weight, eps, &mut normed);
                self.input.set_row(simd, index, &normed);
            } else {
                self.input.set_row(simd, index, row);
            }
        }
    }
}

/// Bias, head norms and rotary positions.
struct Finish<'a> {
    model: &'a Model,
    layer: &'a Layer,
    spans: &'a [Span<'a>],
    query: &'a mut [f32],
    key: &'a mut [f32],
    value: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (head_dim, eps) = (self.model.architecture.head_dim, self.model.architecture.rms_eps);
        for (values, projection) in [(self.query, &self.layer.query), (self.key, &self.layer.key)] {
            add_bias(simd, values, projection);
            let mut rows = values.chunks_exact_mut(projection.weights.rows());
            let positions = self.spans.iter().flat_map(|span| span.start..span.start + span.tokens.len());
            for (row, position) in rows.by_ref().zip(positions) {
                let (cosines, sines) = self.model.rope.at(position);
                for head in row.chunks_exact_mut(head_dim) {
                    if let Some(weight) = &projection.norm {
                        rms_norm_in_place(simd, head, weight, eps);
                    }
                    rotate(head, cosines, sines);
                }
            }
        }
        add_bias(simd, self.value, &self.layer.value);
    }
}

#[inline(always)]
fn add_bias<S: Simd>(simd: S, values: &mut [f32], projection: &Projection) {
    let Some(bias) = &projection.bias else { return };
    for row in values.chunks_exact_mut(bias.len()) {
        add(simd, row, bias);
    }
}

struct Add<'a> {
    to: &'a mut [f32],
    from: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        add(simd, self.to, self.from);
    }
}

struct Gate<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        silu_gate(simd, self.gate, self.up);
    }
}

// Rows are whole vectors, so that pointwise kernels leave no tail.
const _: () = assert!(32 % LANES == 0);
