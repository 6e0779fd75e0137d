use crate::format::BLOCK;
use crate::simd::Simd;

/// Rows of inputs to a product, cut into tiles of some rows side by side: `[tile][k][row]`, so that a kernel walks one pointer.
///
/// Tiles are padded with zero rows up to a height that kernels exist for.
#[derive(Default)]
pub(crate) struct Activations {
    rows: usize,
    columns: usize,
    tiles: Vec<Tile>,
    data: Vec<f32>,
    /// Sums over [`BLOCK`] values of k, `[tile][k / BLOCK][row]`.
    sums: Vec<f32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tile {
    /// First row.
    pub(crate) first: usize,
    /// Rows that are real.
    pub(crate) rows: usize,
    /// Rows with padding; the kernels' `R`.
    pub(crate) height: usize,
    /// Padded rows before this tile.
    start: usize,
}

impl Activations {
    /// Sets the size; contents are then given row by row with [`Activations::set_row`].
    ///
    /// `heights` are the heights that kernels exist for, ascending. As many tiles as possible have the last one.
    pub(crate) fn resize(&mut self, rows: usize, columns: usize, heights: &[usize]) {
        (self.rows, self.columns) = (rows, columns);
        self.tiles.clear();
        let tallest = *heights.last().expect("kernels have a height");
        let (mut first, mut start) = (0, 0);
        while first < rows {
            let left = (rows - first).min(tallest);
            let height = *heights.iter().find(|&&height| height >= left).expect("the tallest holds what is left");
            self.tiles.push(Tile { first, rows: left, height, start });
            first += left;
            start += height;
        }
        self.data.clear();
        self.data.resize(start * columns, 0.0);
        self.sums.clear();
        self.sums.resize(start * columns / BLOCK, 0.0);
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    pub(crate) fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Values `[k][row]` of a tile.
    #[inline(always)]
    pub(crate) fn values<const R: usize>(&self, tile: Tile) -> &[[f32; R]] {
        self.data[tile.start * self.columns..][..R * self.columns].as_chunks().0
    }

    /// Sums `[k / BLOCK][row]` of a tile.
    #[inline(always)]
    pub(crate) fn sums<const R: usize>(&self, tile: Tile) -> &[[f32; R]] {
        let columns = self.columns / BLOCK;
        self.sums[tile.start * columns..][..R * columns].as_chunks().0
    }

    #[inline(always)]
    pub(crate) fn set_row<S: Simd>(&mut self, simd: S, row: usize, values: &[f32]) {
        let tallest = self.tiles[0].rows;
        let tile = self.tiles[row / tallest];
        let (offset, height) = (row - tile.first, tile.height);
        let data = &mut self.data[tile.start * self.columns..][..height * self.columns];
        let sums = &mut self.sums[tile.start * self.columns / BLOCK..][..height * self.columns / BLOCK];
        for (to, &from) in data.chunks_exact_mut(height).zip(values) {
            to[offset] = from;
        }
        for (to, block) in sums.chunks_exact_mut(height).zip(values.as_chunks::<BLOCK>().0) {
            to[offset] = block_sum(simd, block);
        }
    }
}

/// Sum of a block: first and second half by lanes, then the lanes as [`sum_lanes`] does.
#[inline(always)]
fn block_sum<S: Simd>(simd: S, block: &[f32; BLOCK]) -> f32 {
    let halves = block.as_chunks().0;
    sum_lanes(simd, simd.add(simd.load(&halves[0]), simd.load(&halves[1])))
}

/// Sum of the lanes by halves: lane i and i + 8, then i + 4, i + 2, i + 1. The tree of every sum over lanes.
#[inline(always)]
pub(crate) fn sum_lanes<S: Simd>(simd: S, v: S::V) -> f32 {
    let mut lanes = [0.0; 16];
    simd.store(v, &mut lanes);
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
