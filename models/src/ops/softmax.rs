//! Softmax and LogSoftmax.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::Axis;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Softmax {
    axis: Axis,
    log: bool,
    outputs: [ValueType; 1],
}

/// Input along one axis (by default the last); before opset 13 along that axis (by default 1) and all after it
/// together.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis"])?;
    spec.at_most_inputs(1)?;
    let x = spec.float_input(0, "input")?.clone();
    let rank = x.shape.len();
    let together = spec.opset < 13;
    let axis = spec.int("axis")?.unwrap_or(if together { 1 } else { -1 });
    let axis = if together && axis == rank as i64 {
        // The matrix has one column then.
        Axis {
            outer: x.shape.iter().product(),
            len: 1,
            inner: 1,
        }
    } else {
        let axis = spec.axis(axis, rank)?;
        if together {
            Axis {
                outer: x.shape[..axis].iter().product(),
                len: x.shape[axis..].iter().product(),
                inner: 1,
            }
        } else {
            Axis::of(&x.shape, axis)
        }
    };
    Ok(Box::new(Softmax {
        axis,
        log: spec.op_type == "LogSoftmax",
        outputs: [x],
    }))
}

impl Operator for Softmax {
    fn name(&self) -> &'static str {
        if self.log { "LogSoftmax" } else { "Softmax" }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![],
            outputs: vec![0],
        }
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("an input");
        Forward::of(cx.device.softmax(self.axis, x, self.log))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let output = saved.output(0);
        vec![only(grads).map(|grad| {
            cx.device
                .softmax_backward(self.axis, output, grad, self.log)
        })]
    }
}
