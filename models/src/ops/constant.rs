//! Constant, ConstantOfShape, EyeLike, Range, Shape and Size: values that are known before anything runs.

use super::{Attribute, Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType};
use crate::tensor::{DType, Tensor};

/// No constant that a node describes has more elements.
const MOST_ELEMENTS: usize = 1 << 28;

#[derive(Debug)]
struct Constant {
    name: &'static str,
    value: Tensor,
    outputs: [ValueType; 1],
}

/// Constant takes attributes only, ConstantOfShape a known shape, Range known bounds, the others any input (only its
/// type is read).
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let (name, value) = match spec.op_type {
        "Constant" => ("Constant", constant(spec)?),
        "ConstantOfShape" => ("ConstantOfShape", constant_of_shape(spec)?),
        "Range" => ("Range", range(spec)?),
        "EyeLike" => ("EyeLike", eye_like(spec)?),
        "Size" => {
            spec.allow(&[])?;
            spec.at_most_inputs(1)?;
            let elements: usize = spec.input(0, "data")?.shape.iter().product();
            ("Size", Tensor::from_i64(&[], [elements as i64]))
        }
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
    if elements > MOST_ELEMENTS {
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

/// Numbers from start to limit (without it) in steps of delta.
fn range(spec: &NodeSpec<'_>) -> Result<Tensor, OpError> {
    spec.allow(&[])?;
    spec.at_most_inputs(3)?;
    let names = ["start", "limit", "delta"];
    let mut values = Vec::with_capacity(3);
    for (position, name) in names.into_iter().enumerate() {
        match spec.optional_constant(position, name)? {
            Some(value) if value.len() == 1 && value.dtype() != DType::Bool => values.push(value),
            _ => return Err(spec.input_error(name, "must be one number")),
        }
    }
    let limit = "is a range of more elements than a constant may have, or of none in these steps";
    let too_many = || spec.input_error("limit", limit);
    if values.iter().all(|value| value.dtype() == DType::I64) {
        let [start, end, delta] = [0, 1, 2].map(|i| i128::from(values[i].i64s()[0]));
        let count = match delta {
            0 => return Err(too_many()),
            _ => ((end - start) / delta + i128::from((end - start) % delta != 0)).max(0),
        };
        let count = if (end - start).signum() == delta.signum() {
            count
        } else {
            0
        };
        if count > MOST_ELEMENTS as i128 {
            return Err(too_many());
        }
        let values: Vec<i64> = (0..count).map(|i| (start + i * delta) as i64).collect();
        return Ok(Tensor::from_i64(&[values.len()], values));
    }
    if values.iter().any(|value| value.dtype() != DType::F32) {
        return Err(spec.error("start, limit and delta must be of one type"));
    }
    let [start, end, delta] = [0, 1, 2].map(|i| f64::from(values[i].f32s()[0]));
    let count = ((end - start) / delta).ceil().max(0.0);
    if !count.is_finite() || count > MOST_ELEMENTS as f64 {
        return Err(too_many());
    }
    let values: Vec<f32> = (0..count as usize)
        .map(|i| (start + i as f64 * delta) as f32)
        .collect();
    Ok(Tensor::from_f32(&[values.len()], values))
}

/// Ones on a diagonal of a matrix of the input's shape.
fn eye_like(spec: &NodeSpec<'_>) -> Result<Tensor, OpError> {
    spec.allow(&["dtype", "k"])?;
    spec.at_most_inputs(1)?;
    let input = spec.input(0, "input")?;
    let &[rows, columns] = &input.shape[..] else {
        return Err(spec.input_error("input", format!("{:?} is no matrix", input.shape)));
    };
    let dtype = match spec.int("dtype")? {
        None => input.dtype,
        Some(1 | 10 | 11 | 16) => DType::F32,
        Some(6 | 7) => DType::I64,
        Some(9) => DType::Bool,
        Some(other) => {
            return Err(spec.attribute_error("dtype", format!("type {other} is not supported")));
        }
    };
    if rows.saturating_mul(columns) > MOST_ELEMENTS {
        return Err(spec.input_error("input", "is too large for a constant"));
    }
    let k = spec.int("k")?.unwrap_or(0);
    let on = (0..rows as i64)
        .flat_map(|row| (0..columns as i64).map(move |column| column.checked_sub(row) == Some(k)));
    let on: Vec<bool> = on.collect();
    Ok(match dtype {
        DType::Bool => Tensor::from_bool(&input.shape, on),
        DType::F32 => {
            let values: Vec<f32> = on.into_iter().map(|on| f32::from(u8::from(on))).collect();
            Tensor::from_f32(&input.shape, values)
        }
        _ => {
            let values: Vec<i64> = on.into_iter().map(i64::from).collect();
            Tensor::from_i64(&input.shape, values)
        }
    })
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
