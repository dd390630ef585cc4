//! Layer norm, row by row: a row stays in the first cache level while it is read again.

use super::{arch, sum};
use crate::device::params::LayerNorm;

/// Rows whose gradients of scale and bias are summed in single precision before double takes over.
const ROWS: usize = 128;

/// `output = (x - mean) * inv_std * scale + bias` per row; gives mean and inverse deviation of each row too.
pub fn forward(
    p: &LayerNorm,
    x: &[f32],
    scale: Option<&[f32]>,
    bias: Option<&[f32]>,
    output: &mut [f32],
    (mean, inv_std): (&mut [f32], &mut [f32]),
) {
    let len = p.len as f64;
    arch().dispatch(
        #[inline(always)]
        || {
            for row in 0..p.rows {
                let x = &x[row * p.len..][..p.len];
                let output = &mut output[row * p.len..][..p.len];
                let m = match p.centered {
                    true => (sum::of(x, |x| x) / len) as f32,
                    false => 0.0,
                };
                let variance = sum::of(x, |x| (x - m) * (x - m)) / len;
                let s = (1.0 / (variance + f64::from(p.eps)).sqrt()) as f32;
                (mean[row], inv_std[row]) = (m, s);
                for (output, &x) in output.iter_mut().zip(x) {
                    *output = (x - m) * s;
                }
                if let Some(scale) = scale {
                    output.iter_mut().zip(scale).for_each(|(y, &s)| *y *= s);
                }
                if let Some(bias) = bias {
                    output.iter_mut().zip(bias).for_each(|(y, &b)| *y += b);
                }
            }
        },
    );
}

/// Turns the gradient of the output into that of the input; `parameters` become the gradients of scale and
/// bias.
pub fn backward(
    p: &LayerNorm,
    x: &[f32],
    scale: Option<&[f32]>,
    (mean, inv_std): (&[f32], &[f32]),
    grad: &mut [f32],
    parameters: Option<(&mut [f32], &mut [f32])>,
) {
    if let Some((scale_grad, bias_grad)) = parameters {
        parameters_backward(p, x, (mean, inv_std), grad, scale_grad, bias_grad);
    }
    let len = p.len as f64;
    arch().dispatch(
        #[inline(always)]
        || {
            for row in 0..p.rows {
                let x = &x[row * p.len..][..p.len];
                let grad = &mut grad[row * p.len..][..p.len];
                let (m, s) = (mean[row], inv_std[row]);
                if let Some(scale) = scale {
                    grad.iter_mut()
                        .zip(scale)
                        .for_each(|(g, &scale)| *g *= scale);
                }
                let [sum, product] = sum::pairs(grad, x, |g, x| [g, g * ((x - m) * s)]);
                let sum = if p.centered { (sum / len) as f32 } else { 0.0 };
                let product = (product / len) as f32;
                for (g, &x) in grad.iter_mut().zip(x) {
                    *g = (*g - sum - (x - m) * s * product) * s;
                }
            }
        },
    );
}

fn parameters_backward(
    p: &LayerNorm,
    x: &[f32],
    (mean, inv_std): (&[f32], &[f32]),
    grad: &[f32],
    scale_grad: &mut [f32],
    bias_grad: &mut [f32],
) {
    let mut totals = vec![[0f64; 2]; p.len];
    let block = ROWS * p.len;
    arch().dispatch(
        #[inline(always)]
        || {
            for (block, (x, grad)) in x.chunks(block).zip(grad.chunks(block)).enumerate() {
                scale_grad.fill(0.0);
                bias_grad.fill(0.0);
                let rows = x.chunks_exact(p.len).zip(grad.chunks_exact(p.len));
                for (row, (x, grad)) in (block * ROWS..).zip(rows) {
                    let (m, s) = (mean[row], inv_std[row]);
                    let sums = scale_grad.iter_mut().zip(bias_grad.iter_mut());
                    for ((scale, bias), (&x, &g)) in sums.zip(x.iter().zip(grad)) {
                        *scale += g * ((x - m) * s);
                        *bias += g;
                    }
                }
                let sums = scale_grad.iter().zip(bias_grad.iter());
                for (total, (&scale, &bias)) in totals.iter_mut().zip(sums) {
                    total[0] += f64::from(scale);
                    total[1] += f64::from(bias);
                }
            }
        },
    );
    let sums = scale_grad.iter_mut().zip(bias_grad);
    for ((scale, bias), total) in sums.zip(totals) {
        (*scale, *bias) = (total[0] as f32, total[1] as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::layer_norm as plain;

    #[test]
    fn forward_and_backward() {
        on_every_arch(|| {
            for (rows, len) in [(1, 1), (300, 5), (3, 257), (2, 64)] {
                for (centered, affine) in [(true, true), (true, false), (false, true)] {
                    let p = LayerNorm {
                        rows,
                        len,
                        eps: 1e-5,
                        centered,
                    };
                    // A mean far from 0 shows what cancels.
                    let shift = if centered { 3.0 } else { 0.3 };
                    let x: Vec<f32> = values(rows * len, 1).iter().map(|x| x + shift).collect();
                    let (scale, bias) = (values(len, 2), values(len, 3));
                    let scale = affine.then_some(&scale[..]);
                    let bias = affine.then_some(&bias[..]);
                    let run = |fast: bool| {
                        let mut output = vec![0.0; rows * len];
                        let (mut mean, mut inv_std) = (vec![0.0; rows], vec![0.0; rows]);
                        let f = if fast { forward } else { plain::forward };
                        f(&p, &x, scale, bias, &mut output, (&mut mean, &mut inv_std));
                        let mut grad = values(rows * len, 4);
                        let (mut scale_grad, mut bias_grad) = (vec![0.0; len], vec![0.0; len]);
                        let parameters =
                            affine.then_some((&mut scale_grad[..], &mut bias_grad[..]));
                        let f = if fast { backward } else { plain::backward };
                        f(&p, &x, scale, (&mean, &inv_std), &mut grad, parameters);
                        [output, mean, inv_std, grad, scale_grad, bias_grad]
                    };
                    let names = ["output", "mean", "inv_std", "input", "scale", "bias"];
                    for ((name, actual), expected) in names.iter().zip(run(true)).zip(run(false)) {
                        assert_close(&format!("{name} of {p:?}"), &actual, &expected, 1e-5);
                    }
                }
            }
        });
    }
}
