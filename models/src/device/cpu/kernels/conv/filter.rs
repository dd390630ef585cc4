//! Gradient of the filter: the sum over samples of patches times the output's gradient.

use pulp::{Simd, WithSimd};

use super::super::block::Block;
use super::super::matmul::{K_BLOCK, M_BLOCK};
use super::super::pack::{Matrix, copy, pack_panels};
use super::super::patches::{Geometry, Layout, Patches};
use super::super::scratch;
use super::super::tile::Start;
use crate::device::params::Conv;

/// See the module; one call for a run of samples.
pub struct Filter<'a> {
    pub p: &'a Conv,
    pub input: &'a [f32],
    pub grad: &'a [f32],
    pub filter_grad: &'a mut [f32],
}

impl WithSimd for Filter<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let p = self.p;
        let g = Geometry::forward(&p.window);
        let (channels, n) = (p.in_channels / p.groups, p.out_channels / p.groups);
        let (m, positions) = (channels * g.taps(), g.positions());
        if m * n == 0 {
            return;
        }
        let (image_len, grad_len) = (channels * g.input_len(), n * positions);
        assert_eq!(self.input.len(), p.batch * p.groups * image_len);
        assert_eq!(self.grad.len(), p.batch * p.groups * grad_len);
        assert_eq!(self.filter_grad.len(), p.groups * m * n);

        // The inner products run over the positions of all samples: a block of them is a part of one
        // sample's or all of several samples'.
        let parts = positions.div_ceil(K_BLOCK).max(1);
        let part = positions.div_ceil(parts).max(1);
        let samples = if parts > 1 {
            1
        } else {
            (K_BLOCK / part).clamp(1, p.batch.max(1))
        };
        let row = (samples * part).next_multiple_of(16) + 16;
        let panel_size = samples * part * n.next_multiple_of(S::F32_LANES);
        let layout = Layout::new(g);
        let image_size = layout.len::<S>(channels).next_multiple_of(16);
        let patches_size = M_BLOCK.min(m) * row + S::F32_LANES;
        let result_size = (m * n).next_multiple_of(16);
        let size = result_size + patches_size + samples * image_size + panel_size;
        let mut moves = Vec::new();
        for group in 0..p.groups {
            scratch::with(size, |memory| {
                let (result, memory) = memory.split_at_mut(result_size);
                let (patches, memory) = memory.split_at_mut(patches_size);
                let (image_memory, panels) = memory.split_at_mut(samples * image_size);
                result.fill(0.0);
                for s0 in (0..p.batch).step_by(samples) {
                    let s_len = samples.min(p.batch - s0);
                    let images: Vec<&[f32]> = (s0..s0 + s_len)
                        .zip(image_memory.chunks_exact_mut(image_size))
                        .map(|(s, memory)| {
                            let images = &self.input[(s * p.groups + group) * image_len..];
                            layout.lay_out(simd, images, channels, memory)
                        })
                        .collect();
                    for q0 in (0..positions).step_by(part) {
                        let q_len = part.min(positions - q0);
                        let k = s_len * q_len;
                        for s in 0..s_len {
                            let grad =
                                &self.grad[((s0 + s) * p.groups + group) * grad_len..][..grad_len];
                            let grad = Matrix {
                                data: grad.as_ptr(),
                                row: 1,
                                column: positions,
                            };
                            // SAFETY: a panel of k rows takes q_len rows of each sample.
                            unsafe {
                                pack_panels(
                                    simd,
                                    grad.at(q0, 0),
                                    n,
                                    q_len,
                                    panels.as_mut_ptr(),
                                    k,
                                    s * q_len,
                                );
                            }
                        }
                        for m0 in (0..m).step_by(M_BLOCK) {
                            let m_len = M_BLOCK.min(m - m0);
                            for (s, image) in images.iter().enumerate() {
                                let patches = Patches {
                                    layout: &layout,
                                    image,
                                    first_row: m0,
                                    rows: m_len,
                                    first_column: q0,
                                    columns: q_len,
                                    to: patches[s * q_len..].as_mut_ptr(),
                                    to_row: row,
                                    moves: &mut moves,
                                };
                                // SAFETY: a row holds k elements and a vector more.
                                unsafe { patches.pack(simd) };
                            }
                            let block = Block {
                                m: m_len,
                                n,
                                k,
                                a: Matrix {
                                    data: patches.as_ptr(),
                                    row,
                                    column: 1,
                                },
                                panels: panels.as_ptr(),
                                c: result[m0 * n..].as_mut_ptr(),
                                c_row: n,
                                alpha: 1.0,
                                start: Start::Add,
                                stream: false,
                                next: None,
                            };
                            // SAFETY: the patches, the panels and the result were measured above.
                            unsafe { block.multiply(simd) };
                        }
                    }
                }
                let from = Matrix {
                    data: result.as_ptr(),
                    row: 1,
                    column: n,
                };
                let to = self.filter_grad[group * m * n..][..m * n].as_mut_ptr();
                // SAFETY: n rows of m elements on both sides.
                unsafe { copy(from, n, m, to, m) };
            });
        }
    }
}
