//! Losses.

use crate::device::params::Axis;

/// Cross-entropy of logits `[outer, classes, inner]`, summed, how many have their largest logit at the target,
/// and, in `gradient`, the gradient of the mean. A target outside `0..classes` gives NaN.
pub fn cross_entropy(
    axis: Axis,
    logits: &[f32],
    targets: &[i64],
    mut gradient: Option<&mut [f32]>,
) -> (f64, usize) {
    let rows = axis.outer * axis.inner;
    let (mut loss, mut correct) = (0f64, 0);
    for (line, &target) in targets.iter().enumerate() {
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
    (loss, correct)
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
