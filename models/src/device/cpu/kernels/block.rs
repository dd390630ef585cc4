//! A block of a product whose operands fit the second cache level.

use pulp::Simd;

use super::pack::{Matrix, Panels};
use super::tile::{Start, Tile, rows};

/// Rows of A times packed panels of B.
pub(super) struct Block {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// Rows contiguous in k.
    pub a: Matrix,
    pub panels: *const f32,
    pub c: *mut f32,
    pub c_row: usize,
    pub alpha: f32,
    pub start: Start,
    pub stream: bool,
    /// The part of B that is packed next, if it should come nearer meanwhile.
    pub next: Option<Matrix>,
}

impl Block {
    /// Computes the block tile by tile.
    ///
    /// # Safety
    /// The pointers must be valid for what the fields describe; C overlaps neither A nor the panels.
    #[inline(always)]
    pub unsafe fn multiply<S: Simd>(self, simd: S) {
        let tile = |i: usize, j: usize, columns: usize| {
            let panel = self.panels.wrapping_add(self.k * j);
            Tile {
                k: self.k,
                a: self.a.at(i, 0).data,
                a_stride: self.a.row,
                b: panel,
                b_stride: columns.next_multiple_of(S::F32_LANES),
                c: self.c.wrapping_add(i * self.c_row + j),
                c_stride: self.c_row,
                rows: rows::<S>().min(self.m - i),
                columns,
                alpha: self.alpha,
                start: match self.start {
                    Start::Bias(bias) => Start::Bias(bias.wrapping_add(i)),
                    start => start,
                },
                stream: self.stream,
                ahead: panel,
                ahead_stride: 0,
            }
        };
        if self.stream {
            // Along the rows of C, so that whole pages of it are written at a time.
            for i in (0..self.m).step_by(rows::<S>()) {
                for (j, columns) in Panels::new::<S>(self.n) {
                    // SAFETY: the tile lies inside the block.
                    unsafe { tile(i, j, columns).run(simd) };
                }
            }
            return;
        }
        let mut line = 0;
        for (j, columns) in Panels::new::<S>(self.n) {
            for i in (0..self.m).step_by(rows::<S>()) {
                let mut tile = tile(i, j, columns);
                if let Some(next) = self.next {
                    tile.ahead = next.at(0, line * 16).data;
                    tile.ahead_stride = next.row;
                    line += 1;
                }
                // SAFETY: the tile lies inside the block.
                unsafe { tile.run(simd) };
            }
        }
    }
}
