//! ArgMax, ArgMin, CumSum and OneHot: positions along an axis.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::device::params::{Axis, Binary, Comparison, CumulativeSum, Extreme};
use crate::tensor::{DType, Tensor};

pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    match spec.op_type {
        "CumSum" => cumulative_sum(spec),
        "OneHot" => one_hot(spec),
        _ => arg_extreme(spec),
    }
}

/// Input data: float or int64.
fn number<'a>(spec: &'a NodeSpec<'_>, name: &str) -> Result<&'a ValueType, OpError> {
    let x = spec.input(0, name)?;
    if x.dtype == DType::Bool {
        return Err(spec.input_error(name, "must be float or int64, not bool"));
    }
    Ok(x)
}

fn arg_extreme(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis", "keepdims", "select_last_index"])?;
    spec.at_most_inputs(1)?;
    let x = number(spec, "data")?;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(0), x.shape.len())?;
    if x.shape[axis] == 0 {
        let problem = format!("{:?} has no elements along axis {axis}", x.shape);
        return Err(spec.input_error("data", problem));
    }
    let mut shape = x.shape.clone();
    if spec.int("keepdims")?.unwrap_or(1) != 0 {
        shape[axis] = 1;
    } else {
        shape.remove(axis);
    }
    Ok(Box::new(ArgExtreme {
        axis: Axis::of(&x.shape, axis),
        extreme: Extreme {
            largest: spec.op_type == "ArgMax",
            last: spec.flag("select_last_index")?,
        },
        outputs: [ValueType {
            dtype: DType::I64,
            shape,
        }],
    }))
}

/// Inputs x and axis, which must be known.
fn cumulative_sum(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["exclusive", "reverse"])?;
    spec.at_most_inputs(2)?;
    let x = number(spec, "x")?;
    let axis = match spec.constant_ints(1, "axis")? {
        Some(&[axis]) => spec.axis(axis, x.shape.len())?,
        _ => return Err(spec.input_error("axis", "must be one number")),
    };
    Ok(Box::new(CumSum {
        axis: Axis::of(&x.shape, axis),
        sum: CumulativeSum {
            exclusive: spec.flag("exclusive")?,
            reverse: spec.flag("reverse")?,
        },
        outputs: [x.clone()],
    }))
}

/// Inputs indices, depth (known) and values `[off, on]`; indices outside of the depth give off everywhere.
fn one_hot(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis"])?;
    spec.at_most_inputs(3)?;
    let indices = spec.input(0, "indices")?;
    if indices.dtype == DType::Bool {
        return Err(spec.input_error("indices", "must be numbers, not bool"));
    }
    let depth = match spec.optional_constant(1, "depth")? {
        Some(depth) if depth.len() == 1 && depth.dtype() == DType::I64 => depth.i64s()[0],
        Some(depth) if depth.len() == 1 && depth.dtype() == DType::F32 => depth.f32s()[0] as i64,
        _ => return Err(spec.input_error("depth", "must be one number")),
    };
    let values = spec.input(2, "values")?;
    spec.expect_shape(values, "values", &[2])?;
    let rank = indices.shape.len();
    let axis = spec.axis(spec.int("axis")?.unwrap_or(-1), rank + 1)?;
    let extent = usize::try_from(depth).map_err(|_| {
        let problem = format!("{depth} is no number of classes");
        spec.input_error("depth", problem)
    })?;
    let mut shape = indices.shape.clone();
    shape.insert(axis, extent);
    spec.check_size(&shape)?;
    let mut around = indices.shape.clone();
    around.insert(axis, 1);
    let mut along = vec![1; rank + 1];
    along[axis] = extent;
    Ok(Box::new(OneHot {
        depth,
        around,
        classes: Tensor::from_i64(&along, (0..depth).collect::<Vec<_>>()),
        outputs: [ValueType {
            dtype: values.dtype,
            shape,
        }],
    }))
}

#[derive(Debug)]
struct ArgExtreme {
    axis: Axis,
    extreme: Extreme,
    outputs: [ValueType; 1],
}

impl Operator for ArgExtreme {
    fn name(&self) -> &'static str {
        if self.extreme.largest {
            "ArgMax"
        } else {
            "ArgMin"
        }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input data");
        let positions = cx.device.arg_extreme(self.axis, x, self.extreme);
        Forward::of(positions.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        _cx: &Context<'_>,
        _saved: Saved,
        _grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        vec![None; wanted.len()]
    }
}

#[derive(Debug)]
struct CumSum {
    axis: Axis,
    sum: CumulativeSum,
    outputs: [ValueType; 1],
}

impl Operator for CumSum {
    fn name(&self) -> &'static str {
        "CumSum"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input x");
        Forward::of(cx.device.cumulative_sum(self.axis, x, self.sum))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        // What an element was added to lies on the other side of it.
        let back = CumulativeSum {
            reverse: !self.sum.reverse,
            ..self.sum
        };
        of_first(
            only(grads).map(|grad| cx.device.cumulative_sum(self.axis, &grad, back)),
            wanted,
        )
    }
}

#[derive(Debug)]
struct OneHot {
    depth: i64,
    /// Shape of the indices with an axis of 1 for the classes.
    around: Vec<usize>,
    /// The numbers of the classes, along that axis.
    classes: Tensor,
    outputs: [ValueType; 1],
}

impl Operator for OneHot {
    fn name(&self) -> &'static str {
        "OneHot"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let indices = inputs[0].take().expect("input indices");
        let values = inputs[2].take().expect("input values");
        let indices = device.cast(indices, DType::I64).into_shape(&self.around);
        let (zero, depth) = (
            Tensor::from_i64(&[], [0]),
            Tensor::from_i64(&[], [self.depth]),
        );
        let negative = device.compare(Comparison::Less, &indices, &zero);
        let from_end = device.binary(Binary::Add, indices.clone(), depth);
        let indices = device.select(&negative, &from_end, &indices);
        let is_it = device.compare(Comparison::Equal, &indices, &self.classes);
        let value = |position: i64| {
            let axis = Axis {
                outer: 1,
                len: 2,
                inner: 1,
            };
            let value = device.gather(axis, &values, &Tensor::from_i64(&[1], [position]));
            value.into_shape(&[])
        };
        Forward::of(device.select(&is_it, &value(1), &value(0)))
    }

    fn backward(
        &self,
        _cx: &Context<'_>,
        _saved: Saved,
        _grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        vec![None; wanted.len()]
    }
}
