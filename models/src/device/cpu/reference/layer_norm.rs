//! Layer norm: every row by its own statistics.

use crate::device::params::LayerNorm;

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
    for row in 0..p.rows {
        let x = &x[row * p.len..][..p.len];
        let m = match p.centered {
            true => x.iter().map(|&x| f64::from(x)).sum::<f64>() / len,
            false => 0.0,
        };
        let squares: f64 = x.iter().map(|&x| (f64::from(x) - m).powi(2)).sum();
        let s = 1.0 / (squares / len + f64::from(p.eps)).sqrt();
        (mean[row], inv_std[row]) = (m as f32, s as f32);
        for i in 0..p.len {
            let scale = f64::from(scale.map_or(1.0, |scale| scale[i]));
            let bias = f64::from(bias.map_or(0.0, |bias| bias[i]));
            output[row * p.len + i] = ((f64::from(x[i]) - m) * s * scale + bias) as f32;
        }
    }
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
    let normalized = |row: usize, i: usize| (x[row * p.len + i] - mean[row]) * inv_std[row];
    if let Some((scale_grad, bias_grad)) = parameters {
        for i in 0..p.len {
            let column = (0..p.rows).map(|row| (row, f64::from(grad[row * p.len + i])));
            bias_grad[i] = column.clone().map(|(_, g)| g).sum::<f64>() as f32;
            let products = column.map(|(row, g)| g * f64::from(normalized(row, i)));
            scale_grad[i] = products.sum::<f64>() as f32;
        }
    }
    for row in 0..p.rows {
        let grad = &mut grad[row * p.len..][..p.len];
        if let Some(scale) = scale {
            grad.iter_mut().zip(scale).for_each(|(g, s)| *g *= s);
        }
        let (mut sum, mut product) = (0f64, 0f64);
        for (i, &g) in grad.iter().enumerate() {
            sum += f64::from(g);
            product += f64::from(g) * f64::from(normalized(row, i));
        }
        let sum = if p.centered { sum } else { 0.0 } / p.len as f64;
        let product = product / p.len as f64;
        for (i, g) in grad.iter_mut().enumerate() {
            let inner = f64::from(*g) - sum - f64::from(normalized(row, i)) * product;
            *g = (inner * f64::from(inv_std[row])) as f32;
        }
    }
}
