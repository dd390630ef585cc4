//! Constant, ConstantOfShape and Shape: values that are known before anything runs.

use super::{Attribute, Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType};
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Constant {
    name: &'static str,
    value: Tensor,
    outputs: [ValueType; 1],
}

/// Constant takes attributes only, ConstantOfShape a known shape, Shape any input (only its type is read).
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let (name, value) = match spec.op_type {
        "Constant" => ("Constant", constant(spec)?),
        "ConstantOfShape" => ("ConstantOfShape", constant_of_shape(spec)?),
        _ => ("Shape", shape(spec)?),
    };
    Ok(Box::new(Constant {
        name,
        outputs: [ValueType {
            dtype: value.dtype(),
            shape: value.shape().to_vec(),
        }],
        value,
    }))
}

fn constant(spec: &NodeSpec<'_>) -> Result<Tensor, OpError> {
    spec.at_most_inputs(0)?;
    spec.allow(&[
        "value",
        "value_float",
        "value_floats",
        "value_int",
        "value_ints",
    ])?;
    if spec.attributes.len() != 1 {
        return Err(spec.error(format!(
            "has {} values instead of one",
            spec.attributes.len()
        )));
    }
    let (name, value) = spec.attributes.iter().next().expect("one attribute");
    match (name.as_str(), value) {
        ("value", Attribute::Tensor(value)) => Ok(value.clone()),
        ("value_float", Attribute::Float(value)) => Ok(Tensor::from_f32(&[], [*value])),
        ("value_floats", Attribute::Floats(values)) => {
            Ok(Tensor::from_f32(&[values.len()], values))
        }
        ("value_int", Attribute::Int(value)) => Ok(Tensor::from_i64(&[], [*value])),
        ("value_ints", Attribute::Ints(values)) => Ok(Tensor::from_i64(&[values.len()], values)),
        _ => Err(spec.attribute_error(name, "is of another type than its name says")),
    }
}

/// One value everywhere, a float 0 by default.
fn constant_of_shape(spec: &NodeSpec<'_>) -> Result<Tensor, OpError> {
    spec.allow(&["value"])?;
    spec.at_most_inputs(1)?;
    let wish = spec
        .constant_ints(0, "input")?
        .ok_or_else(|| spec.input_error("input", "is missing"))?;
    let shape: Option<Vec<usize>> = wish
        .iter()
        .map(|&extent| usize::try_from(extent).ok())
        .collect();
    let shape = shape.ok_or_else(|| spec.input_error("input", format!("{wish:?} is no shape")))?;
    spec.check_size(&shape)?;
    let elements: usize = shape.iter().product();
    // It is held in memory, which a small file must not be able to exhaust.
    if elements > 1 << 28 {
        return Err(spec.input_error("input", format!("{wish:?} is too large for a constant")));
    }
    match spec.attributes.get("value") {
        None => Ok(Tensor::zeros(DType::F32, &shape)),
        Some(Attribute::Tensor(value)) if value.len() == 1 => Ok(match value.dtype() {
            DType::F32 => Tensor::from_f32(&shape, vec![value.f32s()[0]; elements]),
            DType::I64 => Tensor::from_i64(&shape, vec![value.i64s()[0]; elements]),
            _ => Tensor::from_bool(&shape, vec![value.raw()[0] != 0; elements]),
        }),
        Some(_) => Err(spec.attribute_error("value", "must be a tensor of one element")),
    }
}

/// Extents of the input, since opset 15 of some of its axes.
fn shape(spec: &NodeSpec<'_>) -> Result<Tensor, OpError> {
    spec.allow(&["start", "end"])?;
    spec.at_most_inputs(1)?;
    let shape = &spec.input(0, "data")?.shape;
    let rank = shape.len() as i64;
    let clamp = |axis: i64| {
        let axis = if axis < 0 {
            axis.saturating_add(rank)
        } else {
            axis
        };
        axis.clamp(0, rank) as usize
    };
    let start = clamp(spec.int("start")?.unwrap_or(0));
    let end = clamp(spec.int("end")?.unwrap_or(rank)).max(start);
    let extents: Vec<i64> = shape[start..end]
        .iter()
        .map(|&extent| extent as i64)
        .collect();
    Ok(Tensor::from_i64(&[extents.len()], extents))
}

impl Operator for Constant {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves::default()
    }

    fn forward(&self, _cx: &Context<'_>, _inputs: Vec<Option<Tensor>>) -> Forward {
        Forward::of(self.value.clone())
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
