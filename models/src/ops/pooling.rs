//! MaxPool and AveragePool, and their global forms.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, only, views, window};
use crate::device::params::{Binary, Pool, Reduction, Unary, Window};
use crate::tensor::{DType, Tensor};

/// Input X `[n, c, spatial]`.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.at_most_inputs(1)?;
    let x = &spec.float_input(0, "X")?.shape;
    if x.len() < 3 {
        return Err(spec.input_error("X", format!("{x:?} must be [n, c, spatial axes]")));
    }
    if spec.op_type.starts_with("Global") {
        spec.allow(&[])?;
        let mut shape = x.clone();
        shape[2..].fill(1);
        if spec.op_type == "GlobalMaxPool" {
            return global_max(spec, x, shape);
        }
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
    let most = if max { 2 } else { 1 };
    if spec.outputs > most {
        return Err(spec.error(format!("has at most {most} outputs, not {}", spec.outputs)));
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
    let mut outputs = vec![ValueType::float(shape.clone())];
    if spec.outputs > 1 {
        outputs.push(ValueType {
            dtype: DType::I64,
            shape,
        });
    }
    let shared = Pooling {
        params: Pool {
            planes: x[0] * x[1],
            window,
            count_include_pad: spec.flag("count_include_pad")?,
        },
        input_shape: x.clone(),
        outputs,
    };
    Ok(if max {
        Box::new(Max {
            name: "MaxPool",
            column_major: spec.flag("storage_order")?,
            pooling: shared,
        })
    } else {
        Box::new(Average(shared))
    })
}

/// One window over each whole plane, however many axes it has.
fn global_max(
    spec: &NodeSpec<'_>,
    x: &[usize],
    shape: Vec<usize>,
) -> Result<Box<dyn Operator>, OpError> {
    let area: usize = x[2..].iter().product();
    if area > i32::MAX as usize {
        return Err(spec.input_error("X", format!("{x:?} has planes that are too large")));
    }
    let window = Window {
        input: [1, area],
        output: [1; 2],
        kernel: [1, area],
        strides: [1; 2],
        dilations: [1; 2],
        pads_begin: [0; 2],
        pads_end: [0; 2],
    };
    Ok(Box::new(Max {
        name: "GlobalMaxPool",
        column_major: false,
        pooling: Pooling {
            params: Pool {
                planes: x[0] * x[1],
                window,
                count_include_pad: false,
            },
            input_shape: x.to_vec(),
            outputs: vec![ValueType::float(shape)],
        },
    }))
}

#[derive(Debug)]
struct Pooling {
    params: Pool,
    input_shape: Vec<usize>,
    outputs: Vec<ValueType>,
}

/// Keeps where each maximum was found.
#[derive(Debug)]
struct Max {
    name: &'static str,
    /// Indices count down the columns of a plane (`storage_order` 1).
    column_major: bool,
    pooling: Pooling,
}

impl Max {
    /// The output Indices: positions in the whole input instead of the plane.
    fn indices(&self, cx: &Context<'_>, positions: &Tensor) -> Tensor {
        let device = cx.device;
        let p = &self.pooling.params;
        let [height, width] = p.window.input;
        let number = |value: usize| device.upload(&Tensor::from_i64(&[], [value as i64]));
        let mut positions = device.cast(positions.clone(), DType::I64);
        if self.column_major {
            let rows = device.binary(Binary::Div, positions.clone(), number(width));
            let before = device.binary(Binary::Mul, rows.clone(), number(width));
            let columns = device.binary(Binary::Sub, positions, before);
            let down = device.binary(Binary::Mul, columns, number(height));
            positions = device.binary(Binary::Add, down, rows);
        }
        let begins: Vec<i64> = (0..p.planes)
            .map(|plane| (plane * height * width) as i64)
            .collect();
        let begins = device.upload(&Tensor::from_i64(&[p.planes, 1, 1], begins));
        device.binary(Binary::Add, positions, begins)
    }
}

impl Operator for Max {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.pooling.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let types = &self.pooling.outputs;
        let shows_indices = types.len() > 1;
        let needed = cx.training || shows_indices;
        let (output, positions) = cx.device.max_pool(&self.pooling.params, x, needed);
        let mut outputs = vec![output.into_shape(&types[0].shape)];
        if let Some(positions) = positions.as_ref().filter(|_| shows_indices) {
            outputs.push(self.indices(cx, positions).into_shape(&types[1].shape));
        }
        Forward {
            outputs,
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
        let Pooling {
            params,
            input_shape,
            ..
        } = &self.pooling;
        let back = |grad| cx.device.max_pool_backward(params, &grad, &saved.extra[0]);
        vec![only(grads).map(|grad| back(grad).into_shape(input_shape))]
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
