//! Doors for this crate's tests, which lie outside so that the kernels are compiled once. Not an interface.

use baton_gguf::TensorKind;

use crate::KernelPath;
use crate::kernels::activations::Activations;
use crate::kernels::multiply::{Heights, Multiply};
use crate::kernels::pointwise::exp;
use crate::matrix::{Arena, packed_bytes};
use crate::pool::{Pool, SharedRows};
use crate::simd::{Kernel, LANES, Machine, Simd};

/// Values of whole blocks, one by one.
pub fn dequantise(kind: TensorKind, bytes: &[u8]) -> Vec<f32> {
    let mut floats = vec![0.0; bytes.len() / kind.block_bytes() * kind.block_len()];
    crate::quant::dequantise(kind, bytes, &mut floats);
    floats
}

/// `input [rows][columns]` times the transpose of packed weights `[features][columns]`, by the kernels of one path.
pub fn multiply(path: KernelPath, kind: TensorKind, weights: &[u8], columns: usize, input: &[f32]) -> Vec<f32> {
    let machine = Machine::choose(Some(path)).expect("the test asks for what the machine has");
    let features = weights.len() / (columns / kind.block_len() * kind.block_bytes());
    let mut arena = Arena::new(packed_bytes(kind, features, columns)).expect("a test's weights are small");
    let matrix = arena.pack(kind, [features, columns], weights, |row| row);
    let rows = input.len() / columns;
    let mut packed = Activations::default();
    packed.resize(rows, columns, machine.run(Heights { rows }));
    machine.run(Pack { rows: input, packed: &mut packed });
    let mut output = vec![0.0; rows * features];
    let shared = SharedRows::new(&mut output, features);
    machine.run(Multiply { weights: arena.view(matrix), panels: 0..matrix.panels(), input: &packed, output: &shared });
    output
}

struct Pack<'a> {
    rows: &'a [f32],
    packed: &'a mut Activations,
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (index, row) in self.rows.chunks_exact(self.packed.columns()).enumerate() {
            self.packed.set_row(simd, index, row);
        }
    }
}

/// e^x of sixteen numbers.
pub fn exponentials(path: KernelPath, x: [f32; LANES]) -> [f32; LANES] {
    Machine::choose(Some(path)).expect("the test asks for what the machine has").run(Exp(x))
}

struct Exp([f32; LANES]);

impl Kernel for Exp {
    type Output = [f32; LANES];

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        simd.store(exp(simd, simd.load(&self.0)), &mut out);
        out
    }
}

/// How often each part of some works was run by a pool.
pub fn pool_counts(threads: usize, works: &[usize]) -> Vec<Vec<usize>> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let pool = Pool::new(threads);
    let count = |&parts: &usize| {
        let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
        pool.run(parts, |part| {
            counts[part].fetch_add(1, Ordering::Relaxed);
        });
        counts.into_iter().map(AtomicUsize::into_inner).collect()
    };
    works.iter().map(count).collect()
}
