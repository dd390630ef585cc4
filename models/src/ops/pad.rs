//! Pad: more elements at the ends of axes (or fewer, where the amount is negative).

use super::views::block;
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, only};
use crate::device::params::{Axis, View};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Constant,
    Reflect,
    Edge,
    Wrap,
}

/// What happens to one axis: first it is cut, then padded.
#[derive(Clone, Copy, Debug)]
struct Amount {
    /// First element that is kept, and how many are.
    kept: (usize, usize),
    before: usize,
    after: usize,
}

/// Inputs data, pads, `constant_value` and axes; before opset 11 the attributes pads and value.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let data = spec.input(0, "data")?;
    let rank = data.shape.len();
    let mode = match spec.string("mode")?.unwrap_or("constant") {
        "constant" => Mode::Constant,
        "reflect" => Mode::Reflect,
        "edge" => Mode::Edge,
        "wrap" => Mode::Wrap,
        other => {
            let problem = format!("{other} is none of constant, reflect, edge, wrap");
            return Err(spec.attribute_error("mode", problem));
        }
    };
    if mode == Mode::Constant {
        spec.expect_dtype(data, "data", DType::F32)?;
    }
    let (pads, value, axes) = if spec.opset < 11 {
        spec.allow(&["mode", "pads", "value"])?;
        spec.at_most_inputs(1)?;
        (spec.ints("pads")?, spec.float("value")?, None)
    } else {
        spec.allow(&["mode"])?;
        spec.at_most_inputs(if spec.opset >= 18 { 4 } else { 3 })?;
        let value = match mode {
            Mode::Constant => spec.constant_float(2, "constant_value")?,
            _ => None,
        };
        let axes = spec.constant_ints(3, "axes")?;
        (spec.constant_ints(1, "pads")?, value, axes)
    };
    let pads = pads.ok_or_else(|| spec.input_error("pads", "is missing"))?;
    let all: Vec<i64> = (0..rank as i64).collect();
    let axes = axes.unwrap_or(&all);
    spec.axes(axes, rank)?;
    let refuse = |problem: String| spec.input_error("pads", problem);
    if pads.len() != 2 * axes.len() || pads.iter().any(|pad| pad.unsigned_abs() >= 1 << 40) {
        return Err(refuse(format!("{pads:?} needs {} numbers", 2 * axes.len())));
    }
    let whole = data.shape.iter().map(|&extent| Amount {
        kept: (0, extent),
        before: 0,
        after: 0,
    });
    let mut amounts: Vec<Amount> = whole.collect();
    let mut output = data.shape.clone();
    for (i, &axis) in axes.iter().enumerate() {
        let axis = spec.axis(axis, rank)?;
        let (before, after) = (pads[i], pads[axes.len() + i]);
        let cut = |pad: i64| (-pad).max(0) as usize;
        let extent = data.shape[axis];
        let kept = extent
            .checked_sub(cut(before) + cut(after))
            .ok_or_else(|| {
                refuse(format!(
                    "{pads:?} cut more than there is of {:?}",
                    data.shape
                ))
            })?;
        amounts[axis] = Amount {
            kept: (cut(before), kept),
            before: before.max(0) as usize,
            after: after.max(0) as usize,
        };
        let amount = &amounts[axis];
        if mode != Mode::Constant && kept == 0 && amount.before + amount.after > 0 {
            return Err(refuse(format!("axis {axis} has no elements to pad with")));
        }
        output[axis] = kept + amount.before + amount.after;
    }
    spec.check_size(&output)?;
    Ok(Box::new(Pad {
        mode,
        value: value.unwrap_or(0.0),
        amounts,
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: output,
        }],
    }))
}

#[derive(Debug)]
struct Pad {
    mode: Mode,
    value: f32,
    /// One per axis.
    amounts: Vec<Amount>,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

impl Pad {
    /// Where what is kept of the input lies: in the output, and in the input.
    fn views(&self) -> [View; 2] {
        let each = |part: fn(&Amount) -> usize| self.amounts.iter().map(part).collect::<Vec<_>>();
        let kept = each(|amount| amount.kept.1);
        [
            block(&self.outputs[0].shape, &each(|amount| amount.before), &kept),
            block(&self.input_shape, &each(|amount| amount.kept.0), &kept),
        ]
    }

    /// Element of an axis that each element of the padded one repeats.
    fn sources(&self, amount: &Amount) -> Tensor {
        let (first, extent) = (amount.kept.0 as i64, amount.kept.1 as i64);
        let source = |at: i64| {
            first
                + match self.mode {
                    Mode::Wrap => at.rem_euclid(extent),
                    // There and back again without repeating the ends.
                    Mode::Reflect if extent > 1 => {
                        let period = 2 * (extent - 1);
                        let at = at.rem_euclid(period);
                        at.min(period - at)
                    }
                    _ => at.clamp(0, extent - 1),
                }
        };
        let range = -(amount.before as i64)..extent + amount.after as i64;
        let sources: Vec<i64> = range.map(source).collect();
        Tensor::from_i64(&[sources.len()], sources)
    }

    /// Axes that change, with their sources.
    fn gathers(&self) -> Vec<(usize, Tensor)> {
        let changes = |&(axis, amount): &(usize, &Amount)| {
            let Amount { before, after, .. } = *amount;
            before + after > 0 || amount.kept.1 != self.input_shape[axis]
        };
        let amounts = self.amounts.iter().enumerate().filter(changes);
        amounts
            .map(|(axis, amount)| (axis, self.sources(amount)))
            .collect()
    }
}

impl Operator for Pad {
    fn name(&self) -> &'static str {
        "Pad"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let x = inputs[0].as_ref().expect("input data");
        if self.mode == Mode::Constant {
            let [to, from] = self.views();
            let kept = if from.shape == x.shape() {
                x.clone()
            } else {
                device.copy(&from, x)
            };
            let shape = &self.outputs[0].shape;
            return Forward::of(device.scatter(&to, shape, self.value, &kept));
        }
        let mut y = x.clone();
        for (axis, sources) in self.gathers() {
            let mut shape = y.shape().to_vec();
            let along = Axis::of(&shape, axis);
            shape[axis] = sources.len();
            y = device
                .gather(along, &y, &device.upload(&sources))
                .into_shape(&shape);
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
        if self.mode == Mode::Constant {
            let [to, from] = self.views();
            grad = device.copy(&to, &grad);
            if from.shape != self.input_shape {
                grad = device.scatter(&from, &self.input_shape, 0.0, &grad);
            }
        } else {
            for (axis, sources) in self.gathers().into_iter().rev() {
                let mut shape = grad.shape().to_vec();
                shape[axis] = self.input_shape[axis];
                let along = Axis::of(&shape, axis);
                grad = device.scatter_add(along, &shape, &device.upload(&sources), &grad);
            }
        }
        result[0] = Some(grad);
        result
    }
}
