//! Products of activations and packed weights.
//!
//! Few rows use weights straight from their packed form; many rows first turn a pair of panels into floats once and reuse them.
//! Both do the same operations per element in the same order (see [`crate::format`]), so they agree to the bit.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

use crate::format::{Format, SUM_BLOCK};
use crate::kernels::activations::{Activations, Tile};
use crate::matrix::{Matrix, with_format};
use crate::pool::SharedRows;
use crate::simd::{Kernel, LANES, Lanes, Simd};

/// Heights of tiles for few and for many rows, by the size of the register file.
pub(crate) fn tile_heights(registers: usize, rows: usize) -> &'static [usize] {
    match (registers, rows) {
        (32.., ..=8) => &[1, 2, 4, 8],
        (32.., _) => &[4, 8, 12],
        (_, ..=4) => &[1, 2, 4],
        (_, _) => &[2, 4, 6],
    }
}

/// Whether activations packed by [`tile_heights`] are for the kernels that read packed weights directly.
fn is_direct(registers: usize, rows: usize) -> bool {
    rows <= if registers >= 32 { 8 } else { 4 }
}

/// `output[row][n] = sum over k of input[row][k] * weights[n][k]` for the features of some panels.
pub(crate) struct Multiply<'a> {
    pub(crate) weights: &'a Matrix,
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
        with_format!(self.weights.kind(), F => {
            if is_direct(S::REGISTERS, self.input.rows()) {
                self.direct::<S, F>(simd);
            } else {
                SLAB.with_borrow_mut(|slab| self.widened::<S, F>(simd, slab));
            }
        });
    }
}

// Each height and format is dispatched on its own: as one function they would take the compiler minutes.
impl Multiply<'_> {
    #[inline(always)]
    fn direct<S: Simd, F: Format>(&self, simd: S) {
        let Some(&tile) = self.input.tiles().first() else { return };
        match (S::REGISTERS >= 32, tile.height) {
            (true, 1) => simd.dispatch(Direct::<F, 1, 4>::new(self, tile)),
            (true, 2) => simd.dispatch(Direct::<F, 2, 4>::new(self, tile)),
            (true, 4) => simd.dispatch(Direct::<F, 4, 2>::new(self, tile)),
            (true, 8) => simd.dispatch(Direct::<F, 8, 2>::new(self, tile)),
            (false, 1) => simd.dispatch(Direct::<F, 1, 2>::new(self, tile)),
            (false, 2) => simd.dispatch(Direct::<F, 2, 2>::new(self, tile)),
            (false, 4) => simd.dispatch(Direct::<F, 4, 1>::new(self, tile)),
            (_, height) => unreachable!("no kernel has {height} rows"),
        }
    }

    #[inline(always)]
    fn widened<S: Simd, F: Format>(&self, simd: S, slab: &mut Slab) {
        let mut panel = self.panels.start;
        while panel < self.panels.end {
            let wide = S::REGISTERS >= 32 && panel + 2 <= self.panels.end;
            let count = if wide { 2 } else { 1 };
            simd.dispatch(Widen::<F>::new(slab, self.weights, panel..panel + count));
            for &tile in self.input.tiles() {
                match (wide, tile.height) {
                    (true, 4) => self.from_slab::<S, F, 4, 2>(simd, slab, tile, panel),
                    (true, 8) => self.from_slab::<S, F, 8, 2>(simd, slab, tile, panel),
                    (true, 12) => self.from_slab::<S, F, 12, 2>(simd, slab, tile, panel),
                    (false, 2) => self.from_slab::<S, F, 2, 1>(simd, slab, tile, panel),
                    (false, 4) => self.from_slab::<S, F, 4, 1>(simd, slab, tile, panel),
                    (false, 6) => self.from_slab::<S, F, 6, 1>(simd, slab, tile, panel),
                    (false, 8) => self.from_slab::<S, F, 8, 1>(simd, slab, tile, panel),
                    (false, 12) => self.from_slab::<S, F, 12, 1>(simd, slab, tile, panel),
                    (_, height) => unreachable!("no kernel has {height} rows"),
                }
            }
            panel += count;
        }
    }

    #[inline(always)]
    fn from_slab<S: Simd, F: Format, const R: usize, const P: usize>(&self, simd: S, slab: &Slab, tile: Tile, panel: usize) {
        let mut out = [[[0.0; LANES]; P]; R];
        let (values, sums) = (self.input.values::<R>(tile), self.input.sums::<R>(tile));
        if F::BLOCK == SUM_BLOCK {
            simd.dispatch(FromSlab::<SUM_BLOCK, R, P> { slab, values, sums, mins: F::MIN, out: &mut out });
        } else {
            simd.dispatch(FromSlab::<16, R, P> { slab, values, sums, mins: F::MIN, out: &mut out });
        }
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
    for (index, values) in values.chunks_exact(F::BLOCK).enumerate() {
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
                    let sum = sums[index * F::BLOCK / SUM_BLOCK][r];
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
}

impl Slab {
    const fn new() -> Self {
        Self { values: Vec::new(), scales: Vec::new(), mins: Vec::new() }
    }
}

/// Fills a slab with some panels.
struct Widen<'a, F> {
    slab: &'a mut Slab,
    weights: &'a Matrix,
    panels: Range<usize>,
    format: PhantomData<F>,
}

impl<'a, F> Widen<'a, F> {
    fn new(slab: &'a mut Slab, weights: &'a Matrix, panels: Range<usize>) -> Self {
        Self { slab, weights, panels, format: PhantomData }
    }
}

impl<F: Format> Kernel for Widen<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (columns, blocks) = (self.weights.columns(), self.weights.columns() / F::BLOCK);
        self.slab.values.resize(self.panels.len() * columns, [0.0; LANES]);
        self.slab.scales.resize(self.panels.len() * blocks, [0.0; LANES]);
        self.slab.mins.resize(self.panels.len() * blocks, [0.0; LANES]);
        for (p, panel) in self.panels.enumerate() {
            let values = &mut self.slab.values[p * columns..][..columns];
            let bytes = self.weights.panel(panel);
            for (index, values) in values.chunks_exact_mut(F::BLOCK).enumerate() {
                let block = &bytes[index * F::BYTES..][..F::BYTES];
                for (group, values) in values.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let loaded = F::group(simd, block, group);
                    for (k, value) in values.iter_mut().enumerate() {
                        simd.store(F::value(simd, loaded, k), value);
                    }
                }
                let (scale, min) = F::scales(simd, block);
                simd.store(scale, &mut self.slab.scales[p * blocks + index]);
                simd.store(min, &mut self.slab.mins[p * blocks + index]);
            }
        }
    }
}

/// Products of `R` rows and the `P` panels of a slab, whose blocks are `BLOCK` long; `out` is zero before.
struct FromSlab<'a, const BLOCK: usize, const R: usize, const P: usize> {
    slab: &'a Slab,
    values: &'a [[f32; R]],
    sums: &'a [[f32; R]],
    mins: bool,
    out: &'a mut [[Lanes; P]; R],
}

impl<const BLOCK: usize, const R: usize, const P: usize> Kernel for FromSlab<'_, BLOCK, R, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (columns, blocks) = (self.slab.values.len() / P, self.slab.scales.len() / P);
        for (index, values) in self.values.as_chunks::<BLOCK>().0.iter().enumerate() {
            let mut weights: [&[Lanes; BLOCK]; P] = [&[[0.0; LANES]; BLOCK]; P];
            for p in 0..P {
                weights[p] = self.slab.values[p * columns + index * BLOCK..].first_chunk().expect("the slab holds all blocks");
            }
            let partial = block_product(simd, values, &weights);
            for p in 0..P {
                let scale = simd.load(&self.slab.scales[p * blocks + index]);
                let min = simd.load(&self.slab.mins[p * blocks + index]);
                for r in 0..R {
                    let mut total = simd.load(&self.out[r][p]);
                    if self.mins {
                        let sum = self.sums[index * BLOCK / SUM_BLOCK][r];
                        total = simd.fma(min, simd.splat(sum), total);
                    }
                    simd.store(simd.fma(scale, partial[r][p], total), &mut self.out[r][p]);
                }
            }
        }
    }
}

/// Sums over one block of floats, each a chain in the order of k.
#[inline(always)]
fn block_product<S: Simd, const BLOCK: usize, const R: usize, const P: usize>(
    simd: S,
    values: &[[f32; R]; BLOCK],
    weights: &[&[Lanes; BLOCK]; P],
) -> [[S::V; P]; R] {
    let mut partial = [[simd.splat(0.0); P]; R];
    for k in 0..BLOCK {
        let mut w = [simd.splat(0.0); P];
        for p in 0..P {
            w[p] = simd.load(&weights[p][k]);
        }
        for r in 0..R {
            let a = simd.splat(values[k][r]);
            for p in 0..P {
                partial[r][p] = simd.fma(a, w[p], partial[r][p]);
            }
        }
    }
    partial
}
