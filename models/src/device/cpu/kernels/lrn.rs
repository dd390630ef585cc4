//! Local response normalisation, a channel's plane at a time.

use std::ops::Range;

use super::{arch, scratch};
use crate::device::params::Lrn;

/// `base = bias + alpha / size * sum of squares; output = x * base^-beta`.
pub fn forward(p: &Lrn, x: &[f32], output: &mut [f32], base: &mut [f32]) {
    // The exponent of AlexNet takes roots only; a power costs as much as everything else together.
    if p.beta == 0.75 {
        forward_with(p, x, output, base, three_quarters);
    } else {
        forward_with(p, x, output, base, |base| base.powf(-p.beta));
    }
}

/// Gradient of the input from the input, the base and the gradient of the output.
pub fn backward(p: &Lrn, x: &[f32], base: &[f32], grad: &[f32], input_grad: &mut [f32]) {
    if p.beta == 0.75 {
        backward_with(p, x, base, grad, input_grad, three_quarters);
    } else {
        backward_with(p, x, base, grad, input_grad, |base| base.powf(-p.beta));
    }
}

/// x^-0.75
#[inline(always)]
fn three_quarters(x: f32) -> f32 {
    let root = x.sqrt();
    1.0 / (root * root.sqrt())
}

/// Channels within `below` before and `above` after a channel.
fn around(p: &Lrn, channel: usize, below: usize, above: usize) -> Range<usize> {
    channel.saturating_sub(below)..(channel + above + 1).min(p.channels)
}

/// How far a channel's sum reaches, as ONNX centres it.
fn reach(p: &Lrn) -> (usize, usize) {
    let below = (p.size - 1) / 2;
    (below, p.size - 1 - below)
}

fn forward_with(
    p: &Lrn,
    x: &[f32],
    output: &mut [f32],
    base: &mut [f32],
    power: impl Fn(f32) -> f32,
) {
    let (below, above) = reach(p);
    let sample = p.channels * p.spatial;
    let factor = p.alpha / p.size as f32;
    arch().dispatch(
        #[inline(always)]
        || {
            let results = output
                .chunks_exact_mut(sample)
                .zip(base.chunks_exact_mut(sample));
            for (x, (output, base)) in x.chunks_exact(sample).zip(results) {
                for c in 0..p.channels {
                    let here = c * p.spatial..(c + 1) * p.spatial;
                    let base = &mut base[here.clone()];
                    base.fill(0.0);
                    for k in around(p, c, below, above) {
                        let plane = &x[k * p.spatial..][..p.spatial];
                        base.iter_mut()
                            .zip(plane)
                            .for_each(|(sum, x)| *sum += x * x);
                    }
                    let terms = base.iter_mut().zip(&x[here.clone()]);
                    for (output, (base, x)) in output[here].iter_mut().zip(terms) {
                        *base = p.bias + factor * *base;
                        *output = x * power(*base);
                    }
                }
            }
        },
    );
}

fn backward_with(
    p: &Lrn,
    x: &[f32],
    base: &[f32],
    grad: &[f32],
    input_grad: &mut [f32],
    power: impl Fn(f32) -> f32,
) {
    let (below, above) = reach(p);
    let sample = p.channels * p.spatial;
    let factor = 2.0 * p.alpha * p.beta / p.size as f32;
    scratch::with(sample, |through| {
        arch().dispatch(
            #[inline(always)]
            || {
                for (n, input_grad) in input_grad.chunks_exact_mut(sample).enumerate() {
                    let of_sample = n * sample..(n + 1) * sample;
                    let [x, base, grad] = [x, base, grad].map(|values| &values[of_sample.clone()]);
                    // What each output's gradient passes on through its base, but for the factor and x.
                    for i in 0..sample {
                        let power = power(base[i]);
                        input_grad[i] = grad[i] * power;
                        through[i] = factor * grad[i] * x[i] * power / base[i];
                    }
                    for c in 0..p.channels {
                        // The outputs whose sums this channel is part of.
                        for k in around(p, c, above, below) {
                            let through = &through[k * p.spatial..][..p.spatial];
                            let here = c * p.spatial..(c + 1) * p.spatial;
                            let terms = through.iter().zip(&x[here.clone()]);
                            let input_grad = input_grad[here].iter_mut();
                            input_grad
                                .zip(terms)
                                .for_each(|(sum, (t, x))| *sum -= t * x);
                        }
                    }
                }
            },
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::kernels::testing::{assert_close, on_every_arch, values};
    use crate::device::cpu::reference::norm as plain;

    #[test]
    fn forward_and_backward() {
        on_every_arch(|| {
            for (size, beta) in [(5, 0.75), (4, 0.75), (1, 0.5), (9, 1.0)] {
                let (batch, channels, spatial) = (2, 7, 37);
                let p = Lrn {
                    batch,
                    channels,
                    spatial,
                    size,
                    alpha: 0.3,
                    beta,
                    bias: 1.5,
                };
                let n = batch * channels * spatial;
                let x: Vec<f32> = values(n, 1).iter().map(|x| x * 8.0).collect();
                let grad = values(n, 2);
                let [mut output, mut base, mut expected, mut plain_base] =
                    [(); 4].map(|()| vec![0.0; n]);
                forward(&p, &x, &mut output, &mut base);
                plain::lrn(&p, &x, &mut expected, &mut plain_base);
                assert_close("output", &output, &expected, 1e-6);
                assert_close("base", &base, &plain_base, 1e-6);
                let (mut actual, mut expected) = (vec![0.0; n], vec![0.0; n]);
                backward(&p, &x, &base, &grad, &mut actual);
                plain::lrn_backward(&p, &x, &base, &grad, &mut expected);
                assert_close("gradient", &actual, &expected, 1e-5);
            }
        });
    }
}
