//! Copies of matrix blocks in the order in which tiles read them.

use pulp::Simd;

use super::tile::VECTORS;

/// Cuts columns into tiles: as few as possible, of nearly equal numbers of vectors.
#[derive(Clone, Copy)]
pub(super) struct Panels {
    columns: usize,
    lanes: usize,
    vectors: usize,
    count: usize,
    next: usize,
}

impl Panels {
    #[inline(always)]
    pub fn new<S: Simd>(columns: usize) -> Self {
        let vectors = columns.div_ceil(S::F32_LANES);
        Panels {
            columns,
            lanes: S::F32_LANES,
            vectors,
            count: vectors.div_ceil(VECTORS),
            next: 0,
        }
    }

    fn boundary(&self, panel: usize) -> usize {
        (panel * self.vectors / self.count * self.lanes).min(self.columns)
    }
}

impl Iterator for Panels {
    /// First column, columns.
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        if self.next == self.count {
            return None;
        }
        let first = self.boundary(self.next);
        self.next += 1;
        Some((first, self.boundary(self.next) - first))
    }
}

/// A matrix somewhere in memory.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub data: *const f32,
    /// Elements from one row to the next.
    pub row: usize,
    /// Elements from one column to the next.
    pub column: usize,
}

impl Matrix {
    /// The matrix without its first rows and columns.
    #[inline(always)]
    pub fn at(self, row: usize, column: usize) -> Self {
        Matrix {
            data: self
                .data
                .wrapping_add(row * self.row + column * self.column),
            ..self
        }
    }

    /// The same elements with rows and columns exchanged.
    #[inline(always)]
    pub fn transposed(self) -> Self {
        Matrix {
            data: self.data,
            row: self.column,
            column: self.row,
        }
    }
}

/// Copies `rows` x `columns` elements to `to`, whose rows are `to_row` elements apart and contiguous.
///
/// # Safety
/// Source and destination must be valid for that and must not overlap.
#[inline(always)]
pub(super) unsafe fn copy(from: Matrix, rows: usize, columns: usize, to: *mut f32, to_row: usize) {
    // Source and destination run across each other: a block keeps both in the first cache level, and reads
    // whole lines and writes to the same lines again and again.
    const ROWS: usize = 64;
    const COLUMNS: usize = 16;
    let row = from.row;
    // SAFETY: indices stay below `rows` and `columns`.
    unsafe {
        if from.column == 1 {
            for i in 0..rows {
                from.data
                    .add(i * from.row)
                    .copy_to_nonoverlapping(to.add(i * to_row), columns);
            }
            return;
        }
        for i0 in (0..rows).step_by(ROWS) {
            for j0 in (0..columns).step_by(COLUMNS) {
                for j in j0..(j0 + COLUMNS).min(columns) {
                    let from = from.data.add(j * from.column);
                    for i in i0..(i0 + ROWS).min(rows) {
                        *to.add(i * to_row + j) = *from.add(i * row);
                    }
                }
            }
        }
    }
}

/// Packs `k` rows of B as rows `first..first + k` of panels that have `rows` rows.
///
/// A panel's rows are whole vectors; what stands beyond the last column of the last panel goes into
/// columns of C that are never stored.
///
/// # Safety
/// The block must be readable, the panels writable.
#[inline(always)]
pub(super) unsafe fn pack_panels<S: Simd>(
    _: S,
    b: Matrix,
    n: usize,
    k: usize,
    panels: *mut f32,
    rows: usize,
    first: usize,
) {
    for (j, columns) in Panels::new::<S>(n) {
        let width = columns.next_multiple_of(S::F32_LANES);
        // SAFETY: the caller's promise.
        unsafe {
            copy(
                b.at(0, j),
                k,
                columns,
                panels.add(rows * j + first * width),
                width,
            )
        };
    }
}
