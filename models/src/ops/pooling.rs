//! MaxPool, AveragePool and GlobalAveragePool.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, views, window,
};
use crate::device::params::{Pool, Reduction, Unary};
use crate::tensor::Tensor;

/// Input X `[n, c, spatial]`.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.at_most_inputs(1)?;
    let x = &spec.float_input(0, "X")?.shape;
    if x.len() < 3 {
        return Err(spec.input_error("X", format!("{x:?} must be [n, c, spatial axes]")));
    }
    if spec.op_type == "GlobalAveragePool" {
        spec.allow(&[])?;
        let mut shape = x.clone();
        shape[2..].fill(1);
        return Ok(Box::new(GlobalAverage {
            input_shape: x.clone(),
            outputs: [ValueType::float(shape)],
        }));
    }
    let max = spec.op_type == "MaxPool";
    let own: &[&str] = if max {
        &["ceil_mode", "storage_order"]
    } else {
        &["ceil_mode", "count_include_pad"]
    };
    spec.allow(&[&window::ATTRIBUTES[..], own].concat())?;
    if spec.outputs > 1 {
        return Err(spec.error("its output Indices is not supported"));
    }
    if spec.int("storage_order")?.unwrap_or(0) != 0 {
        return Err(spec.attribute_error("storage_order", "only row-major order (0) is supported"));
    }
    if spec.ints("kernel_shape")?.is_none() {
        return Err(spec.attribute_error("kernel_shape", "is missing"));
    }
    let kernel = window::extents(spec, "kernel_shape", x.len() - 2, 1)?;
    let window = window::window(spec, &x[2..], &kernel, spec.flag("ceil_mode")?)?;
    let area: usize = window.input.iter().product();
    if area > i32::MAX as usize {
        return Err(spec.input_error("X", format!("{x:?} has planes that are too large")));
    }
    for axis in 0..2 {
        let reach = (window.kernel[axis] - 1) * window.dilations[axis] + 1;
        if window.pads_begin[axis] >= reach || window.pads_end[axis] >= reach {
            return Err(spec.attribute_error(
                "pads",
                format!(
                    "as large as the kernel {kernel:?}, so that windows would see padding only"
                ),
            ));
        }
    }
    let mut shape = x[..2].to_vec();
    shape.extend(&window.output[4 - x.len()..]);
    spec.check_size(&shape)?;
    let shared = Pooling {
        params: Pool {
            planes: x[0] * x[1],
            window,
            count_include_pad: spec.flag("count_include_pad")?,
        },
        input_shape: x.clone(),
        outputs: [ValueType::float(shape)],
    };
    Ok(if max {
        Box::new(Max(shared))
    } else {
        Box::new(Average(shared))
    })
}

#[derive(Debug)]
struct Pooling {
    params: Pool,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Keeps where each maximum was found.
#[derive(Debug)]
struct Max(Pooling);

impl Operator for Max {
    fn name(&self) -> &'static str {
        "MaxPool"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.0.outputs
    }

    fn saves(&self) -> Saves {
        Saves::default()
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let (output, positions) = cx.device.max_pool(&self.0.params, x, cx.training);
        Forward {
            outputs: vec![output.into_shape(&self.0.outputs[0].shape)],
            extra: positions.into_iter().collect(),
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let back = |grad| {
            cx.device
                .max_pool_backward(&self.0.params, &grad, &saved.extra[0])
        };
        vec![only(grads).map(|grad| back(grad).into_shape(&self.0.input_shape))]
    }
}

#[derive(Debug)]
struct Average(Pooling);

impl Operator for Average {
    fn name(&self) -> &'static str {
        "AveragePool"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.0.outputs
    }

    fn saves(&self) -> Saves {
        Saves::default()
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let output = cx.device.average_pool(&self.0.params, x);
        Forward::of(output.into_shape(&self.0.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let back = |grad| cx.device.average_pool_backward(&self.0.params, &grad);
        vec![only(grads).map(|grad| back(grad).into_shape(&self.0.input_shape))]
    }
}

/// The mean over all spatial axes, however many.
#[derive(Debug)]
struct GlobalAverage {
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

impl Operator for GlobalAverage {
    fn name(&self) -> &'static str {
        "GlobalAveragePool"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves::default()
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let axes: Vec<usize> = (2..self.input_shape.len()).collect();
        Forward::of(cx.device.reduce(Reduction::Mean, x, &axes))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        vec![only(grads).map(|grad| spread(cx, grad, &self.input_shape))]
    }
}

/// Gradient of a mean: its share for each element. `grad` has extent 1 along the reduced axes.
pub(super) fn spread(cx: &Context<'_>, grad: Tensor, shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>() / grad.len();
    let share = cx.device.unary(Unary::Scale(1.0 / count as f32), grad);
    views::broadcast(cx.device, &share, shape)
}
