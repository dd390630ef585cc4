//! Pooling.

use super::matrix::tap;
use crate::device::params::{Pool, Window};

fn area(extent: [usize; 2]) -> usize {
    extent[0] * extent[1]
}

/// Input elements under the window of one output.
fn window(w: &Window, output: usize) -> impl Iterator<Item = usize> {
    let w = *w;
    let (oh, ow) = (output / w.output[1], output % w.output[1]);
    (0..w.kernel[0])
        .filter_map(move |kh| tap(&w, 0, oh, kh))
        .flat_map(move |ih| {
            (0..w.kernel[1])
                .filter_map(move |kw| tap(&w, 1, ow, kw))
                .map(move |iw| ih * w.input[1] + iw)
        })
}

/// Maximum over windows and where it was found. A window that lies in the padding altogether gives
/// negative infinity, and position -1.
pub fn max_pool(p: &Pool, input: &[f32], output: &mut [f32], mut positions: Option<&mut [i32]>) {
    let (area_in, area_out) = (area(p.window.input), area(p.window.output));
    for (o, output) in output.iter_mut().enumerate() {
        let plane = &input[o / area_out * area_in..][..area_in];
        let mut best = (f32::NEG_INFINITY, -1);
        for i in window(&p.window, o % area_out) {
            let value = plane[i];
            if value > best.0 || best.1 < 0 || (value.is_nan() && !best.0.is_nan()) {
                best = (value, i as i32);
            }
        }
        *output = best.0;
        if let Some(positions) = positions.as_deref_mut() {
            positions[o] = best.1;
        }
    }
}

/// Gradient of a max pool's input.
pub fn max_pool_backward(p: &Pool, grad: &[f32], positions: &[i32], input_grad: &mut [f32]) {
    let (area_in, area_out) = (area(p.window.input), area(p.window.output));
    input_grad.fill(0.0);
    for (o, (grad, &position)) in grad.iter().zip(positions).enumerate() {
        if let Ok(position) = usize::try_from(position) {
            input_grad[o / area_out * area_in + position] += grad;
        }
    }
}

/// What an average divides by: the elements under the window, the declared padding included if asked.
fn divisor(p: &Pool, output: usize) -> f32 {
    let w = &p.window;
    if !p.count_include_pad {
        return window(w, output).count() as f32;
    }
    let count = |axis: usize, o: usize| {
        let padded = w.pads_begin[axis] + w.input[axis] + w.pads_end[axis];
        (0..w.kernel[axis])
            .filter(|k| o * w.strides[axis] + k * w.dilations[axis] < padded)
            .count()
    };
    (count(0, output / w.output[1]) * count(1, output % w.output[1])) as f32
}

/// Average over windows.
pub fn average_pool(p: &Pool, input: &[f32], output: &mut [f32]) {
    let (area_in, area_out) = (area(p.window.input), area(p.window.output));
    for (o, output) in output.iter_mut().enumerate() {
        let plane = &input[o / area_out * area_in..][..area_in];
        let sum: f64 = window(&p.window, o % area_out)
            .map(|i| f64::from(plane[i]))
            .sum();
        *output = sum as f32 / divisor(p, o % area_out);
    }
}

/// Gradient of an average pool's input.
pub fn average_pool_backward(p: &Pool, grad: &[f32], input_grad: &mut [f32]) {
    let (area_in, area_out) = (area(p.window.input), area(p.window.output));
    input_grad.fill(0.0);
    for (o, grad) in grad.iter().enumerate() {
        let plane = &mut input_grad[o / area_out * area_in..][..area_in];
        let share = grad / divisor(p, o % area_out);
        for i in window(&p.window, o % area_out) {
            plane[i] += share;
        }
    }
}
