//! GatherElements and GatherND: elements and slices by their positions along several axes.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only,
};
use crate::device::params::{Axis, Binary, Comparison, Reduction};
use crate::shape;
use crate::tensor::{DType, Tensor};

/// Both pick rows of the data, flattened to `[rows, inner]`, whose numbers are sums over the last axis of
/// `index * stride`, and of an offset that only depends on where the index stands.
#[derive(Debug)]
struct GatherAt {
    name: &'static str,
    /// Shape in which the indices are taken: `[.., axes]`.
    index_shape: Vec<usize>,
    /// Extent of the data along each of those axes, for indices from the end, and rows between neighbours along it.
    extents: Tensor,
    strides: Tensor,
    offsets: Tensor,
    rows: Axis,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Inputs data and indices (int64, negative ones count from the end).
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.at_most_inputs(2)?;
    let data = spec.input(0, "data")?;
    let indices = spec.input(1, "indices")?;
    spec.expect_dtype(indices, "indices", DType::I64)?;
    if spec.op_type == "GatherND" {
        gather_nd(spec, data, indices)
    } else {
        gather_elements(spec, data, indices)
    }
}

fn numbers(values: impl Iterator<Item = usize>) -> Tensor {
    let values: Vec<i64> = values.map(|value| value as i64).collect();
    Tensor::from_i64(&[values.len()], values)
}

fn gather_elements(
    spec: &NodeSpec<'_>,
    data: &ValueType,
    indices: &ValueType,
) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axis"])?;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(0), data.shape.len())?;
    let fits = indices.shape.len() == data.shape.len()
        && (0..data.shape.len()).all(|i| i == axis || indices.shape[i] <= data.shape[i]);
    if !fits {
        let problem = format!("{:?} does not go with data {:?}", indices.shape, data.shape);
        return Err(spec.input_error("indices", problem));
    }
    check_known(spec, |index| in_range(index, data.shape[axis]))?;
    let strides = shape::strides(&data.shape);
    // Where each index stands along the other axes.
    let count: usize = indices.shape.iter().product();
    let own = shape::strides(&indices.shape);
    let offset = |i: usize| -> usize {
        let along = |a: usize| i / own[a] % indices.shape[a] * strides[a];
        (0..own.len()).filter(|&a| a != axis).map(along).sum()
    };
    let offsets = numbers((0..count).map(offset));
    Ok(Box::new(GatherAt {
        name: "GatherElements",
        index_shape: [&indices.shape[..], &[1]].concat(),
        extents: numbers([data.shape[axis]].into_iter()),
        strides: numbers([strides[axis]].into_iter()),
        offsets: offsets.into_shape(&indices.shape),
        rows: Axis {
            outer: 1,
            len: data.shape.iter().product(),
            inner: 1,
        },
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: indices.shape.clone(),
        }],
    }))
}

fn gather_nd(
    spec: &NodeSpec<'_>,
    data: &ValueType,
    indices: &ValueType,
) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["batch_dims"])?;
    let batch = usize::try_from(spec.int("batch_dims")?.unwrap_or(0)).unwrap_or(usize::MAX);
    let refuse = || {
        let problem = format!(
            "{:?} with {batch} batch axes does not go with data {:?}",
            indices.shape, data.shape
        );
        spec.input_error("indices", problem)
    };
    let Some((&depth, leading)) = indices.shape.split_last() else {
        return Err(refuse());
    };
    let picked = batch.saturating_add(depth);
    if depth == 0 || picked > data.shape.len() || leading.get(..batch) != data.shape.get(..batch) {
        return Err(refuse());
    }
    let (outer, inner) = data.shape.split_at(picked);
    check_known(spec, |index| {
        // Along which axis it is, only its place tells; the widest is the most that any can be.
        in_range(index, outer[batch..].iter().copied().max().unwrap_or(0))
    })?;
    let strides = shape::strides(outer);
    let shape = [leading, inner].concat();
    spec.check_size(&shape)?;
    let per_sample: usize = leading[batch..].iter().product();
    let samples: usize = data.shape[..batch].iter().product();
    let sample_rows: usize = outer[batch..].iter().product();
    let offsets = numbers((0..samples * per_sample).map(|i| i / per_sample * sample_rows));
    Ok(Box::new(GatherAt {
        name: "GatherND",
        index_shape: indices.shape.clone(),
        extents: numbers(outer[batch..].iter().copied()),
        strides: numbers(strides[batch..].iter().copied()),
        offsets: offsets.into_shape(leading),
        rows: Axis {
            outer: 1,
            len: outer.iter().product(),
            inner: inner.iter().product(),
        },
        input_shape: data.shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape,
        }],
    }))
}

fn in_range(index: i64, extent: usize) -> bool {
    let extent = extent as i64;
    (-extent..extent).contains(&index)
}

/// Refuses known indices that are out of range.
fn check_known(spec: &NodeSpec<'_>, fits: impl Fn(i64) -> bool) -> Result<(), OpError> {
    let known = spec.constants.get(1).and_then(Option::as_ref);
    match known.and_then(|known| known.i64s().iter().find(|&&index| !fits(index))) {
        Some(index) => Err(spec.input_error("indices", format!("{index} is out of range"))),
        None => Ok(()),
    }
}

impl GatherAt {
    /// The rows' numbers.
    fn rows(&self, cx: &Context<'_>, indices: &Tensor) -> Tensor {
        let device = cx.device;
        let binary = |op, a, b: &Tensor| device.binary(op, a, b.clone());
        let indices = indices.clone().into_shape(&self.index_shape);
        let negative = device.compare(Comparison::Less, &indices, &Tensor::from_i64(&[], [0]));
        let from_end = binary(Binary::Add, indices.clone(), &self.extents);
        let indices = device.select(&negative, &from_end, &indices);
        let last = self.index_shape.len() - 1;
        let rows = binary(Binary::Mul, indices, &self.strides);
        let rows = device.reduce(Reduction::Sum, &rows, &[last]);
        let rows = rows.into_shape(self.offsets.shape());
        binary(Binary::Add, rows, &self.offsets)
    }
}

impl Operator for GatherAt {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn index_limit(&self, input: usize) -> Option<usize> {
        // Of several components, each has a limit of its own.
        match self.extents.i64s() {
            [extent] if input == 1 => Some(*extent as usize),
            _ => None,
        }
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let (Some(data), Some(indices)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let picked = cx.device.gather(self.rows, data, &self.rows(cx, indices));
        Forward::of(picked.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| {
                let rows = self.rows(cx, saved.input(1));
                let shape = &self.input_shape;
                cx.device.scatter_add(self.rows, shape, &rows, &grad)
            }),
            wanted,
        )
    }
}
