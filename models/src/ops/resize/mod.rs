//! Resize and Upsample: every axis by itself, each output element a weighted sum of a few input elements.

mod build;
mod taps;

use self::taps::Taps;
use super::{Context, Forward, Operator, Saved, ValueType, only};
use crate::device::params::{Axis, Binary};
use crate::tensor::Tensor;

pub(super) use build::build;

#[derive(Debug)]
struct Resize {
    name: &'static str,
    /// The axes that change, in the order in which they do.
    axes: Vec<Line>,
    input_shape: Vec<usize>,
    /// Added at the end, where it broadcasts to the output: what stands for elements outside of the input.
    outside: Option<Tensor>,
    outputs: [ValueType; 1],
}

/// How one axis changes.
#[derive(Debug)]
struct Line {
    axis: usize,
    taps: Taps,
}

impl Line {
    /// Weights of one tap so that they run along the axis.
    fn weights(&self, cx: &Context<'_>, tap: usize, rank: usize) -> Option<Tensor> {
        let weights = self.taps.weights.as_ref()?;
        let mut shape = vec![1; rank];
        shape[self.axis] = self.taps.len;
        Some(cx.device.upload(&weights[tap]).into_shape(&shape))
    }
}

impl Operator for Resize {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let mut y = inputs[0].clone().expect("input X");
        for line in &self.axes {
            let mut shape = y.shape().to_vec();
            let along = Axis::of(&shape, line.axis);
            shape[line.axis] = line.taps.len;
            let mut sum: Option<Tensor> = None;
            for (tap, sources) in line.taps.sources.iter().enumerate() {
                let picked = device.gather(along, &y, &device.upload(sources));
                let mut term = picked.into_shape(&shape);
                if let Some(weights) = line.weights(cx, tap, shape.len()) {
                    term = device.binary(Binary::Mul, term, weights);
                }
                sum = Some(match sum {
                    Some(sum) => device.binary(Binary::Add, sum, term),
                    None => term,
                });
            }
            y = sum.expect("at least one tap");
        }
        if let Some(outside) = &self.outside {
            y = device.binary(Binary::Add, y, device.upload(outside));
        }
        Forward::of(y)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let mut result = vec![None; wanted.len()];
        let Some(mut grad) = only(grads) else {
            return result;
        };
        for line in self.axes.iter().rev() {
            let mut shape = grad.shape().to_vec();
            shape[line.axis] = self.input_shape[line.axis];
            let along = Axis::of(&shape, line.axis);
            let mut sum: Option<Tensor> = None;
            for (tap, sources) in line.taps.sources.iter().enumerate() {
                let mut part = grad.clone();
                if let Some(weights) = line.weights(cx, tap, shape.len()) {
                    part = device.binary(Binary::Mul, part, weights);
                }
                let part = device.scatter_add(along, &shape, &device.upload(sources), &part);
                sum = Some(match sum {
                    Some(sum) => device.binary(Binary::Add, sum, part),
                    None => part,
                });
            }
            grad = sum.expect("at least one tap");
        }
        result[0] = Some(grad);
        result
    }
}
