//! Gradient of the input for strides other than 1: patches of it, added back to where they belong.

use pulp::{Simd, WithSimd};

use super::super::matmul::Product;
use super::super::pack::Matrix;
use super::super::patches::Geometry;
use super::super::scratch;
use crate::device::params::Conv;

/// Gradient of the input for strides other than 1.
pub struct Scatter<'a> {
    pub p: &'a Conv,
    pub filter: &'a [f32],
    pub grad: &'a [f32],
    pub input_grad: &'a mut [f32],
}

impl WithSimd for Scatter<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        let g = Geometry::forward(&p.window);
        let (channels, k) = (p.in_channels / p.groups, p.out_channels / p.groups);
        let (m, n) = (channels * g.taps(), g.positions());
        self.input_grad.fill(0.0);
        if m * n * k == 0 {
            return;
        }
        let (image_len, grad_len) = (channels * g.input_len(), k * n);
        assert_eq!(self.input_grad.len(), p.batch * p.groups * image_len);
        assert_eq!(self.grad.len(), p.batch * p.groups * grad_len);
        assert_eq!(self.filter.len(), p.groups * m * k);
        let rows = g.output[1];
        // Output rows whose patches take about a quarter of the second cache level.
        let rows_block = ((1 << 16) / (m * rows)).clamp(1, g.output[0]);
        let n_block = rows_block * rows;
        scratch::with(m * n_block, |patches| {
            let images = self.input_grad.chunks_exact_mut(image_len);
            for (i, (image, grad)) in images.zip(self.grad.chunks_exact(grad_len)).enumerate() {
                let filter = &self.filter[i % p.groups * m * k..][..m * k];
                for n0 in (0..n).step_by(n_block) {
                    let n_len = n_block.min(n - n0);
                    Product {
                        m,
                        n: n_len,
                        k,
                        a: Matrix {
                            data: filter.as_ptr(),
                            row: 1,
                            column: m,
                        },
                        b: Matrix {
                            data: grad[n0..].as_ptr(),
                            row: n,
                            column: 1,
                        },
                        c: patches.as_mut_ptr(),
                        c_row: n_len,
                        alpha: 1.0,
                        add: false,
                    }
                    .with_simd(simd);
                    for (r, patch) in patches.chunks_exact(n_len).take(m).enumerate() {
                        let (channel, tap) = (r / g.taps(), r % g.taps());
                        let (h_first, h_end, h_shift) = reach(&g, 0, tap / g.kernel[1]);
                        let (w_first, w_end, w_shift) = reach(&g, 1, tap % g.kernel[1]);
                        let plane = &mut image[channel * g.input_len()..][..g.input_len()];
                        for (oh, patch) in (n0 / rows..).zip(patch.chunks_exact(rows)) {
                            if (h_first..h_end).contains(&oh) && w_first < w_end {
                                let ih = ((oh * g.strides[0]) as isize + h_shift) as usize;
                                let iw = ((w_first * g.strides[1]) as isize + w_shift) as usize;
                                let row = plane[ih * g.input[1] + iw..]
                                    .iter_mut()
                                    .step_by(g.strides[1]);
                                row.zip(&patch[w_first..w_end])
                                    .for_each(|(to, &from)| *to += from);
                            }
                        }
                    }
                }
            }
        });
    }
}

/// Outputs along an axis for which `tap` falls inside the input, and where it falls for output 0.
fn reach(g: &Geometry, axis: usize, tap: usize) -> (usize, usize, isize) {
    let stride = g.strides[axis] as isize;
    let shift = (tap * g.dilations[axis]) as isize - g.pads[axis];
    let bound = |end: isize| {
        (end - shift + stride - 1)
            .div_euclid(stride)
            .clamp(0, g.output[axis] as isize) as usize
    };
    (bound(0), bound(g.input[axis] as isize), shift)
}
