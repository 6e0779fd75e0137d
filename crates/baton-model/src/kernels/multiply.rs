//! Products of activations and packed weights.
//!
//! Few rows use weights straight from their packed form; many rows first turn a pair of panels into floats once and reuse them.
//! Both do the same operations per element in the same order (see [`crate::format`]), so they agree to the bit.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use baton_gguf::TensorKind;

use crate::format::{BLOCK, Format};
use crate::kernels::activations::{Activations, Tile};
use crate::matrix::{I4, I4Fine, I4Min, I8, Weights, with_format};
use crate::pool::SharedRows;
use crate::simd::{Kernel, LANES, Lanes, Simd};

/// Heights of tiles that a machine has kernels for, ascending: those that read packed weights, and those that read a slab.
///
/// Instances cost compile time, so a path has few, and the portable one has none for packed weights.
const fn heights<S: Simd>(direct: bool) -> &'static [usize] {
    match (S::REGISTERS, direct) {
        (32, true) => &[1, 4, 8],
        (32, false) => &[1, 4, 8, 12],
        (8, false) => &[1, 4, 6],
        _ => &[1, 4],
    }
}

/// Rows at most for which packed weights are read directly: beyond, turning them into floats once is cheaper.
const fn direct_rows<S: Simd>() -> usize {
    match S::REGISTERS {
        32 => 8,
        8 => 4,
        _ => 0,
    }
}

/// Formats that have kernels reading them directly: those worth their compile time in the decoding of few rows.
fn is_direct<S: Simd>(kind: TensorKind, rows: usize) -> bool {
    let common = match kind {
        TensorKind::Q4_0 | TensorKind::Q4_1 | TensorKind::Q4_K | TensorKind::Q5_0 | TensorKind::Q8_0 => true,
        TensorKind::F32 | TensorKind::F16 | TensorKind::BF16 | TensorKind::Q6_K => false,
    };
    common && rows <= direct_rows::<S>()
}

/// Heights of the tiles in which `rows` are to be packed for any product.
pub(crate) struct Heights {
    pub(crate) rows: usize,
}

impl Kernel for Heights {
    type Output = &'static [usize];

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> &'static [usize] {
        heights::<S>(self.rows <= direct_rows::<S>())
    }
}

/// `output[row][n] = sum over k of input[row][k] * weights[n][k]` for the features of some panels.
pub(crate) struct Multiply<'a> {
    pub(crate) weights: Weights<'a>,
    pub(crate) panels: Range<usize>,
    pub(crate) input: &'a Activations,
    /// One row per row of input, at least as long as the weights have rows.
    pub(crate) output: &'a SharedRows<'a>,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        debug_assert_eq!(self.input.columns(), self.weights.columns());
        let kind = self.weights.kind();
        if is_direct::<S>(kind, self.input.rows()) {
            match kind {
                TensorKind::Q4_0 => self.direct::<S, I4>(simd),
                TensorKind::Q4_1 => self.direct::<S, I4Min>(simd),
                TensorKind::Q4_K => self.direct::<S, I4Fine>(simd),
                TensorKind::Q5_0 | TensorKind::Q8_0 => self.direct::<S, I8>(simd),
                TensorKind::F32 | TensorKind::F16 | TensorKind::BF16 | TensorKind::Q6_K => unreachable!("{kind} has no direct kernel"),
            }
        } else {
            SLAB.with_borrow_mut(|slab| self.widened(simd, slab));
        }
    }
}

// Each height and format is dispatched on its own: as one function they would take the compiler minutes.
impl Multiply<'_> {
    #[inline(always)]
    fn direct<S: Simd, F: Format>(&self, simd: S) {
        let Some(&tile) = self.input.tiles().first() else { return };
        match (S::REGISTERS, tile.height) {
            (32, 1) => simd.dispatch(Direct::<F, 1, 4>::new(self, tile)),
            (32, 4) => simd.dispatch(Direct::<F, 4, 2>::new(self, tile)),
            (32, 8) => simd.dispatch(Direct::<F, 8, 2>::new(self, tile)),
            (8, 1) => simd.dispatch(Direct::<F, 1, 2>::new(self, tile)),
            (8, 4) => simd.dispatch(Direct::<F, 4, 1>::new(self, tile)),
            (_, height) => unreachable!("no kernel has {height} rows"),
        }
    }

    #[inline(always)]
    fn widened<S: Simd>(&self, simd: S, slab: &mut Slab) {
        let step = if S::REGISTERS == 32 { 2 } else { 1 };
        for panel in self.panels.clone().step_by(step) {
            for p in 0..step {
                // Past the end the last panel is computed again and dropped.
                let bytes = self.weights.panel((panel + p).min(self.panels.end - 1));
                with_format!(self.weights.kind(), F => simd.dispatch(Widen::<F> { slab, part: p, of: step, blocks: self.weights.columns() / BLOCK, bytes, format: PhantomData }));
            }
            for &tile in self.input.tiles() {
                match (S::REGISTERS, tile.height) {
                    (32, 1) => self.multiply_slab::<S, 1, 2>(simd, slab, tile, panel),
                    (32, 4) => self.multiply_slab::<S, 4, 2>(simd, slab, tile, panel),
                    (32, 8) => self.multiply_slab::<S, 8, 2>(simd, slab, tile, panel),
                    (32, 12) => self.multiply_slab::<S, 12, 2>(simd, slab, tile, panel),
                    (8 | 16, 1) => self.multiply_slab::<S, 1, 1>(simd, slab, tile, panel),
                    (8 | 16, 4) => self.multiply_slab::<S, 4, 1>(simd, slab, tile, panel),
                    (8, 6) => self.multiply_slab::<S, 6, 1>(simd, slab, tile, panel),
                    (_, height) => unreachable!("no kernel has {height} rows"),
                }
            }
        }
    }

    #[inline(always)]
    fn multiply_slab<S: Simd, const R: usize, const P: usize>(&self, simd: S, slab: &Slab, tile: Tile, panel: usize) {
        let mut out = [[[0.0; LANES]; P]; R];
        let (values, sums) = (self.input.values::<R>(tile), self.input.sums::<R>(tile));
        simd.dispatch(FromSlab::<R, P> { slab, values, sums, out: &mut out });
        self.write(tile, panel, &out);
    }

    /// Copies the real rows and features of a tile to the output.
    #[inline(always)]
    fn write<const R: usize, const P: usize>(&self, tile: Tile, panel: usize, out: &[[Lanes; P]; R]) {
        let start = panel * LANES;
        let len = ((panel + P).min(self.panels.end) * LANES).min(self.weights.rows()) - start;
        for (row, from) in out[..tile.rows].iter().enumerate() {
            // SAFETY: these features of these rows belong to these panels alone, and panels are shared out without overlap.
            let to = unsafe { self.output.part(tile.first + row, start..start + len) };
            to.copy_from_slice(&from.as_flattened()[..len]);
        }
    }
}

/// One tile of few rows by all panels, `P` at a time.
struct Direct<'a, F, const R: usize, const P: usize> {
    product: &'a Multiply<'a>,
    tile: Tile,
    format: PhantomData<F>,
}

impl<'a, F, const R: usize, const P: usize> Direct<'a, F, R, P> {
    fn new(product: &'a Multiply<'a>, tile: Tile) -> Self {
        Self { product, tile, format: PhantomData }
    }
}

impl<F: Format, const R: usize, const P: usize> Kernel for Direct<'_, F, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { product, tile, .. } = self;
        let (values, sums) = (product.input.values::<R>(tile), product.input.sums::<R>(tile));
        let mut panel = product.panels.start;
        while panel < product.panels.end {
            let mut panels = [product.weights.panel(panel); P];
            for (i, bytes) in panels.iter_mut().enumerate() {
                // Past the end the last panel is computed again and dropped.
                *bytes = product.weights.panel((panel + i).min(product.panels.end - 1));
            }
            let mut out = [[[0.0; LANES]; P]; R];
            packed_product::<S, F, R, P>(simd, panels, values, sums, &mut out);
            product.write(tile, panel, &out);
            panel += P;
        }
    }
}

/// Products of `R` rows and `P` panels straight from packed weights.
#[inline(always)]
fn packed_product<S: Simd, F: Format, const R: usize, const P: usize>(
    simd: S,
    panels: [&[u8]; P],
    values: &[[f32; R]],
    sums: &[[f32; R]],
    out: &mut [[Lanes; P]; R],
) {
    let zero = simd.splat(0.0);
    let mut totals = [[zero; P]; R];
    for (index, values) in values.as_chunks::<BLOCK>().0.iter().enumerate() {
        let mut blocks = [panels[0]; P];
        for p in 0..P {
            blocks[p] = &panels[p][index * F::BYTES..][..F::BYTES];
        }
        let mut partial = [[zero; P]; R];
        for (group, values) in values.as_chunks::<8>().0.iter().enumerate() {
            eight::<S, F, R, P>(simd, blocks, group, values, &mut partial);
        }
        for p in 0..P {
            let (scale, min) = F::scales(simd, blocks[p]);
            for r in 0..R {
                if F::MIN {
                    let sum = sums[index][r];
                    totals[r][p] = simd.fma(min, simd.splat(sum), totals[r][p]);
                }
                totals[r][p] = simd.fma(scale, partial[r][p], totals[r][p]);
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            simd.store(totals[r][p], &mut out[r][p]);
        }
    }
}

/// Eight values of k.
#[inline(always)]
fn eight<S: Simd, F: Format, const R: usize, const P: usize>(
    simd: S,
    blocks: [&[u8]; P],
    group: usize,
    values: &[[f32; R]; 8],
    partial: &mut [[S::V; P]; R],
) {
    let first = F::group(simd, blocks[0], group);
    let mut groups = [first; P];
    for p in 1..P {
        groups[p] = F::group(simd, blocks[p], group);
    }
    // Written out, because a shift by a loop's counter is slower than one by a constant and the compiler need not unroll.
    macro_rules! step {
        ($($k:literal)*) => {$({
            let mut weights = [simd.splat(0.0); P];
            for p in 0..P {
                weights[p] = F::value(simd, groups[p], $k);
            }
            for r in 0..R {
                let a = simd.splat(values[$k][r]);
                for p in 0..P {
                    partial[r][p] = simd.fma(a, weights[p], partial[r][p]);
                }
            }
        })*};
    }
    step!(0 1 2 3 4 5 6 7);
}

thread_local! {
    static SLAB: RefCell<Slab> = const { RefCell::new(Slab::new()) };
}

/// Some panels as unscaled floats, with their scales.
struct Slab {
    /// `[panel][k]`.
    values: Vec<Lanes>,
    /// `[panel][block]`.
    scales: Vec<Lanes>,
    mins: Vec<Lanes>,
    /// Whether mins are not all zero.
    min: bool,
}

impl Slab {
    const fn new() -> Self {
        Self { values: Vec::new(), scales: Vec::new(), mins: Vec::new(), min: false }
    }
}

/// Fills one part of a slab with one panel.
struct Widen<'a, F> {
    slab: &'a mut Slab,
    part: usize,
    /// Parts that the slab has.
    of: usize,
    /// Blocks of a panel.
    blocks: usize,
    bytes: &'a [u8],
    format: PhantomData<F>,
}

impl<F: Format> Kernel for Widen<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { slab, part, of, blocks, bytes, .. } = self;
        slab.values.resize(of * blocks * BLOCK, [0.0; LANES]);
        slab.scales.resize(of * blocks, [0.0; LANES]);
        slab.mins.resize(of * blocks, [0.0; LANES]);
        slab.min = F::MIN;
        let values = &mut slab.values[part * blocks * BLOCK..][..blocks * BLOCK];
        for (index, values) in values.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            let block = &bytes[index * F::BYTES..][..F::BYTES];
            for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let loaded = F::group(simd, block, group);
                for (k, value) in values.iter_mut().enumerate() {
                    simd.store(F::value(simd, loaded, k), value);
                }
            }
            let (scale, min) = F::scales(simd, block);
            simd.store(scale, &mut slab.scales[part * blocks + index]);
            simd.store(min, &mut slab.mins[part * blocks + index]);
        }
    }
}

/// Products of `R` rows and the `P` panels of a slab; `out` is zero before.
struct FromSlab<'a, const R: usize, const P: usize> {
    slab: &'a Slab,
    values: &'a [[f32; R]],
    sums: &'a [[f32; R]],
    out: &'a mut [[Lanes; P]; R],
}

impl<const R: usize, const P: usize> Kernel for FromSlab<'_, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (columns, blocks) = (self.slab.values.len() / P, self.slab.scales.len() / P);
        for (index, values) in self.values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut weights: [&[Lanes]; P] = [&[]; P];
            for p in 0..P {
                weights[p] = &self.slab.values[p * columns + index * BLOCK..][..BLOCK];
            }
            let partial = block_product(simd, values, &weights);
            for p in 0..P {
                let scale = simd.load(&self.slab.scales[p * blocks + index]);
                let min = simd.load(&self.slab.mins[p * blocks + index]);
                for r in 0..R {
                    let mut total = simd.load(&self.out[r][p]);
                    if self.slab.min {
                        total = simd.fma(min, simd.splat(self.sums[index][r]), total);
                    }
                    simd.store(simd.fma(scale, partial[r][p], total), &mut self.out[r][p]);
                }
            }
        }
    }
}

/// Sums over one block of floats, each a chain in the order of k.
#[inline(always)]
fn block_product<S: Simd, const R: usize, const P: usize>(simd: S, values: &[[f32; R]; BLOCK], weights: &[&[Lanes]; P]) -> [[S::V; P]; R] {
    let mut partial = [[simd.splat(0.0); P]; R];
    for (k, a) in values.iter().enumerate() {
        let mut w = [simd.splat(0.0); P];
        for p in 0..P {
            w[p] = simd.load(&weights[p][k]);
        }
        for r in 0..R {
            let a = simd.splat(a[r]);
            for p in 0..P {
                partial[r][p] = simd.fma(a, w[p], partial[r][p]);
            }
        }
    }
    partial
}
