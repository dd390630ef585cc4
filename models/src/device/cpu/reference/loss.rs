//! Losses.

use crate::device::params::Axis;

/// Cross-entropy of logits `[outer, classes, inner]`, summed, how many have their largest logit at the target,
/// how many count, and, in `gradient`, the gradient of the mean over those. Targets equal to `ignore` do not
/// count; any other outside `0..classes` gives NaN.
pub fn cross_entropy(
    axis: Axis,
    logits: &[f32],
    targets: &[i64],
    ignore: Option<i64>,
    mut gradient: Option<&mut [f32]>,
) -> (f64, usize, usize) {
    let rows = targets.iter().filter(|&&t| ignore != Some(t)).count();
    let (mut loss, mut correct) = (0f64, 0);
    if let Some(gradient) = gradient.as_deref_mut().filter(|_| rows < targets.len()) {
        gradient.fill(0.0);
    }
    for (line, &target) in targets.iter().enumerate() {
        if ignore == Some(target) {
            continue;
        }
        let start = line / axis.inner * axis.len * axis.inner + line % axis.inner;
        let at = |class: usize| start + class * axis.inner;
        let (mut best, mut largest) = (0, f32::NEG_INFINITY);
        for class in 0..axis.len {
            if logits[at(class)] > largest {
                (best, largest) = (class, logits[at(class)]);
            }
        }
        let sum: f64 = (0..axis.len)
            .map(|c| f64::from(logits[at(c)] - largest).exp())
            .sum();
        let target = usize::try_from(target).ok().filter(|&t| t < axis.len);
        loss += match target {
            Some(target) => sum.ln() - f64::from(logits[at(target)] - largest),
            None => f64::NAN,
        };
        correct += usize::from(target == Some(best));
        if let Some(gradient) = gradient.as_deref_mut() {
            for class in 0..axis.len {
                let probability = f64::from(logits[at(class)] - largest).exp() / sum;
                let hit = f64::from(u8::from(target == Some(class)));
                gradient[at(class)] = ((probability - hit) / rows as f64) as f32;
            }
        }
    }
    (loss, correct, rows)
}

/// The class that a target names.
fn class(axis: Axis, target: i64) -> Option<usize> {
    usize::try_from(target)
        .ok()
        .filter(|&class| class < axis.len)
}

/// Element of `[outer, len, inner]` that belongs to a row and a class.
fn element(axis: Axis, row: usize, class: usize) -> usize {
    (row / axis.inner * axis.len + class) * axis.inner + row % axis.inner
}

/// Weighted negative log-likelihood and weight of each target; see [`crate::device::Device::likelihood`].
pub fn likelihood(
    axis: Axis,
    log_probabilities: &[f32],
    targets: &[i64],
    class_weights: Option<&[f32]>,
    ignored: Option<i64>,
    losses: &mut [f32],
    weights: &mut [f32],
) {
    for (row, &target) in targets.iter().enumerate() {
        (losses[row], weights[row]) = match class(axis, target) {
            _ if Some(target) == ignored => (0.0, 0.0),
            Some(class) => {
                let weight = class_weights.map_or(1.0, |weights| weights[class]);
                let log_probability = log_probabilities[element(axis, row, class)];
                (-weight * log_probability, weight)
            }
            None => (f32::NAN, f32::NAN),
        };
    }
}

/// Gradient of the log-probabilities in [`likelihood`].
pub fn likelihood_backward(axis: Axis, targets: &[i64], factors: &[f32], grad: &mut [f32]) {
    grad.fill(0.0);
    for (row, (&target, &factor)) in targets.iter().zip(factors).enumerate() {
        if let Some(class) = class(axis, target) {
            grad[element(axis, row, class)] = -factor;
        }
    }
}

/// Sum of squared differences and, in `gradient`, the gradient of their mean.
pub fn squared_error(output: &[f32], target: &[f32], mut gradient: Option<&mut [f32]>) -> f64 {
    let mut loss = 0f64;
    for (i, (&o, &t)) in output.iter().zip(target).enumerate() {
        loss += f64::from(o - t).powi(2);
        if let Some(gradient) = gradient.as_deref_mut() {
            gradient[i] = 2.0 * (o - t) / output.len() as f32;
        }
    }
    loss
}
