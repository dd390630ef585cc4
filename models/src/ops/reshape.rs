//! Operators that give their input another shape over the same memory: Identity, Flatten, Reshape, Squeeze,
//! Unsqueeze.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::tensor::Tensor;

#[derive(Debug)]
struct Reshape {
    name: &'static str,
    input_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let data = spec.input(0, "data")?;
    let shape = &data.shape;
    let (name, output) = match spec.op_type {
        "Identity" => {
            spec.allow(&[])?;
            spec.at_most_inputs(1)?;
            ("Identity", shape.clone())
        }
        "Flatten" => ("Flatten", flatten(spec, shape)?),
        "Reshape" => ("Reshape", reshape(spec, shape)?),
        "Squeeze" => ("Squeeze", squeeze(spec, shape)?),
        _ => ("Unsqueeze", unsqueeze(spec, shape)?),
    };
    Ok(Box::new(Reshape {
        name,
        input_shape: shape.clone(),
        outputs: [ValueType {
            dtype: data.dtype,
            shape: output,
        }],
    }))
}

/// A matrix of the axes before `axis` by the others.
fn flatten(spec: &NodeSpec<'_>, shape: &[usize]) -> Result<Vec<usize>, OpError> {
    spec.allow(&["axis"])?;
    spec.at_most_inputs(1)?;
    let axis = spec.int("axis")?.unwrap_or(1);
    let axis = if axis == shape.len() as i64 {
        shape.len()
    } else {
        spec.axis(axis, shape.len())?
    };
    let (rows, columns) = shape.split_at(axis);
    Ok(vec![rows.iter().product(), columns.iter().product()])
}

/// As the second input says: 0 keeps an extent (unless `allowzero`), -1 takes what is left.
fn reshape(spec: &NodeSpec<'_>, shape: &[usize]) -> Result<Vec<usize>, OpError> {
    spec.allow(&["allowzero"])?;
    spec.at_most_inputs(2)?;
    let zero_is_kept = !spec.flag("allowzero")?;
    let wish = spec
        .constant_ints(1, "shape")?
        .ok_or_else(|| spec.input_error("shape", "is missing"))?;
    let refuse = || spec.input_error("shape", format!("{wish:?} does not go with data {shape:?}"));
    let mut output = Vec::with_capacity(wish.len());
    let mut open = None;
    for (axis, &extent) in wish.iter().enumerate() {
        output.push(match extent {
            0 if zero_is_kept => *shape.get(axis).ok_or_else(refuse)?,
            -1 if open.is_none() => {
                open = Some(axis);
                1
            }
            extent => usize::try_from(extent).map_err(|_| refuse())?,
        });
    }
    let product = |shape: &[usize]| shape.iter().try_fold(1usize, |p, &e| p.checked_mul(e));
    let elements: usize = shape.iter().product();
    let given = product(&output).ok_or_else(refuse)?;
    if let Some(axis) = open {
        if given == 0 || !elements.is_multiple_of(given) {
            return Err(refuse());
        }
        output[axis] = elements / given;
    } else if given != elements {
        return Err(refuse());
    }
    Ok(output)
}

/// Without the named axes, or without all of extent 1.
fn squeeze(spec: &NodeSpec<'_>, shape: &[usize]) -> Result<Vec<usize>, OpError> {
    spec.allow(&["axes"])?;
    spec.at_most_inputs(if spec.opset >= 13 { 2 } else { 1 })?;
    let axes = match spec.axes_since(13, 1)? {
        Some(axes) => spec.axes(axes, shape.len())?,
        None => (0..shape.len()).filter(|&axis| shape[axis] == 1).collect(),
    };
    if let Some(&axis) = axes.iter().find(|&&axis| shape[axis] != 1) {
        return Err(spec.attribute_error(
            "axes",
            format!("axis {axis} of data {shape:?} is not of extent 1"),
        ));
    }
    let kept = (0..shape.len()).filter(|axis| !axes.contains(axis));
    Ok(kept.map(|axis| shape[axis]).collect())
}

/// With axes of extent 1 at the places named in the result.
fn unsqueeze(spec: &NodeSpec<'_>, shape: &[usize]) -> Result<Vec<usize>, OpError> {
    spec.allow(&["axes"])?;
    spec.at_most_inputs(if spec.opset >= 13 { 2 } else { 1 })?;
    let axes = spec
        .axes_since(13, 1)?
        .ok_or_else(|| spec.attribute_error("axes", "is missing"))?;
    let rank = shape.len() + axes.len();
    let axes = spec.axes(axes, rank)?;
    let mut kept = shape.iter().copied();
    Ok((0..rank)
        .map(|axis| {
            if axes.contains(&axis) {
                1
            } else {
                kept.next().unwrap_or(1)
            }
        })
        .collect())
}

impl Operator for Reshape {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0]
    }

    fn forward(&self, _cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input data");
        Forward::of(x.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        _cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| grad.into_shape(&self.input_shape)),
            wanted,
        )
    }
}
