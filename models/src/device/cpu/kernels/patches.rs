//! Patches of a sample as a matrix, made piece by piece where a product needs them.
//!
//! Row (channel, kernel row, kernel column), column (output row, output column): the matrix that im2col
//! would write out in full. Only the block in work ever exists, in cache.
//!
//! A sample is first laid out with its padding, and with the columns of each row sorted by their
//! remainder modulo the stride ([`Layout`]). Whatever the padding, stride and dilation, a run of
//! outputs along a row then reads a run of elements, and which runs a piece needs is the same for every
//! row of the matrix but for an offset.

use pulp::{Simd, WithSimd};

use super::tile::{load, store};
use crate::device::params::Window;

/// How a kernel moves over the planes of an image.
#[derive(Clone, Copy)]
pub(super) struct Geometry {
    /// Extent of the input plane.
    pub input: [usize; 2],
    /// Extent of the output plane.
    pub output: [usize; 2],
    pub kernel: [usize; 2],
    pub strides: [usize; 2],
    pub dilations: [usize; 2],
    /// Zeros before the first element; negative: elements that no kernel position reaches.
    pub pads: [isize; 2],
}

impl Geometry {
    pub fn forward(window: &Window) -> Self {
        let plain = Geometry {
            input: window.input,
            output: window.output,
            kernel: window.kernel,
            strides: window.strides,
            dilations: window.dilations,
            pads: window.pads_begin.map(|pad| pad as isize),
        };
        if window.kernel == [1, 1] && window.strides == [1, 1] && window.input == window.output {
            // Rows of a plane follow each other in input and output alike: one long row.
            let positions = window.input[0] * window.input[1];
            return Geometry {
                input: [1, positions],
                output: [1, positions],
                ..plain
            };
        }
        plain
    }

    /// The convolution that takes gradients of the outputs, with the kernel turned by 180 degrees, to
    /// gradients of the inputs. Only for strides of 1.
    pub fn turned(window: &Window) -> Self {
        let forward = Geometry::forward(window);
        let pad = |axis: usize| {
            (forward.dilations[axis] * (forward.kernel[axis] - 1)) as isize - forward.pads[axis]
        };
        Geometry {
            input: forward.output,
            output: forward.input,
            pads: [pad(0), pad(1)],
            ..forward
        }
    }

    /// Elements of an input plane.
    pub fn input_len(&self) -> usize {
        self.input[0] * self.input[1]
    }

    /// Output positions.
    pub fn positions(&self) -> usize {
        self.output[0] * self.output[1]
    }

    /// Kernel elements per channel.
    pub fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }
}

/// One sample with its padding, rows sorted by column modulo stride.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    geometry: Geometry,
    /// Elements of a row with the same remainder.
    phase: usize,
    /// Elements of a row.
    row: usize,
    /// Elements of a plane.
    plane: usize,
}

impl Layout {
    pub fn new(geometry: Geometry) -> Self {
        let g = &geometry;
        let reach = |axis: usize| {
            (g.output[axis].max(1) - 1) * g.strides[axis]
                + g.dilations[axis] * (g.kernel[axis] - 1)
                + 1
        };
        let phase = reach(1).div_ceil(g.strides[1]);
        let row = phase * g.strides[1];
        Layout {
            geometry,
            phase,
            row,
            plane: reach(0) * row,
        }
    }

    /// Elements of `channels` planes and what may be read behind them.
    pub fn len<S: Simd>(&self, channels: usize) -> usize {
        channels * self.plane + S::F32_LANES
    }

    /// Whether a sample lies in this layout already.
    fn is_plain(&self) -> bool {
        let g = &self.geometry;
        g.pads == [0, 0]
            && g.strides[1] == 1
            && self.row == g.input[1]
            && self.plane == g.input_len()
    }

    /// Lays out the first `channels` planes of `images` in `memory`, unless they can be used as they are.
    #[inline(always)]
    pub fn lay_out<'a, S: Simd>(
        &self,
        _: S,
        images: &'a [f32],
        channels: usize,
        memory: &'a mut [f32],
    ) -> &'a [f32] {
        let len = self.len::<S>(channels);
        if self.is_plain() && images.len() >= len {
            return &images[..len];
        }
        let g = &self.geometry;
        let stride = g.strides[1];
        let pad = g.pads[1];
        for channel in 0..channels {
            let image = &images[channel * g.input_len()..][..g.input_len()];
            let plane = &mut memory[channel * self.plane..][..self.plane];
            for (h, row) in plane.chunks_exact_mut(self.row).enumerate() {
                let from = h as isize - g.pads[0];
                if from < 0 || from >= g.input[0] as isize {
                    row.fill(0.0);
                    continue;
                }
                let from = &image[from as usize * g.input[1]..][..g.input[1]];
                for (remainder, row) in row.chunks_exact_mut(self.phase).enumerate() {
                    // Element i of the phase is column i * stride + remainder - pad of the image.
                    let shift = remainder as isize - pad;
                    let bound = |end: isize| {
                        ((end - shift + stride as isize - 1).div_euclid(stride as isize))
                            .clamp(0, row.len() as isize) as usize
                    };
                    let (first, end) = (bound(0), bound(g.input[1] as isize));
                    row[..first].fill(0.0);
                    row[end.max(first)..].fill(0.0);
                    if first < end {
                        let from = &from[((first * stride) as isize + shift) as usize..];
                        let row = &mut row[first..end];
                        if stride == 1 {
                            row.copy_from_slice(&from[..row.len()]);
                        } else {
                            row.iter_mut()
                                .zip(from.iter().step_by(stride))
                                .for_each(|(to, &x)| *to = x);
                        }
                    }
                }
            }
        }
        &memory[..len]
    }

    /// Offset of a row of the patch matrix.
    #[inline(always)]
    fn row_offset(&self, row: usize) -> usize {
        let g = &self.geometry;
        let (channel, tap) = (row / g.taps(), row % g.taps());
        let (h, w) = (
            tap / g.kernel[1] * g.dilations[0],
            tap % g.kernel[1] * g.dilations[1],
        );
        channel * self.plane + h * self.row + w % g.strides[1] * self.phase + w / g.strides[1]
    }

    /// Offset of a column of the patch matrix.
    #[inline(always)]
    fn column_offset(&self, column: usize) -> usize {
        let g = &self.geometry;
        column / g.output[1] * g.strides[0] * self.row + column % g.output[1]
    }
}

/// A vector to copy, as offsets from the source and destination of a matrix row.
#[derive(Clone, Copy)]
pub(super) struct Move {
    from: u32,
    to: u32,
}

/// A piece of the patch matrix, and where it goes.
///
/// Whole vectors are written, so up to a vector behind each row is overwritten; rows are written in
/// order, each from left to right.
pub(super) struct Patches<'a> {
    pub layout: &'a Layout,
    /// What [`Layout::lay_out`] gave.
    pub image: &'a [f32],
    pub first_row: usize,
    pub rows: usize,
    pub first_column: usize,
    pub columns: usize,
    pub to: *mut f32,
    /// Elements from one written row to the next.
    pub to_row: usize,
    /// Working memory.
    pub moves: &'a mut Vec<Move>,
}

impl Patches<'_> {
    /// Writes the piece.
    ///
    /// # Safety
    /// `to` must be writable for all rows and a vector behind each.
    #[inline(always)]
    pub unsafe fn pack<S: Simd>(self, simd: S) {
        simd.vectorize(self);
    }
}

impl WithSimd for Patches<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let layout = self.layout;
        let width = layout.geometry.output[1];
        self.moves.clear();
        let mut done = 0;
        while done < self.columns {
            let column = self.first_column + done;
            let run = (self.columns - done).min(width - column % width);
            let from = layout.column_offset(column);
            self.moves
                .extend((0..run).step_by(S::F32_LANES).map(|i| Move {
                    from: (from + i) as u32,
                    to: (done + i) as u32,
                }));
            done += run;
        }
        let moves = self.moves.as_slice();
        let mut to = self.to;
        for row in self.first_row..self.first_row + self.rows {
            let from = self.image[layout.row_offset(row)..].as_ptr();
            for &Move {
                from: source,
                to: target,
            } in moves
            {
                // SAFETY: the layout holds every element of a patch and a vector behind the last; the
                // caller promises the same for the destination.
                unsafe {
                    store(
                        simd,
                        to.add(target as usize),
                        load(simd, from.add(source as usize)),
                    );
                }
            }
            to = to.wrapping_add(self.to_row);
        }
    }
}
