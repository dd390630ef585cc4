//! RandomUniform, RandomNormal, their Like forms and Bernoulli: numbers that depend on seed, node and sample alone.

use super::{Attribute, Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType};
use crate::device::params::{Binary, Distribution, MaskSeed, Unary};
use crate::random;
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Random {
    name: &'static str,
    distribution: Distribution,
    /// The input holds probabilities of 1; numbers below it become 1, others 0.
    bernoulli: bool,
    /// Identifies the node in every cut of the graph.
    node: u64,
    outputs: [ValueType; 1],
}

/// No input but the attribute `shape`, or the Like forms' input, whose shape counts, or Bernoulli's probabilities. The
/// attribute `seed` is left to the seed of the run. Samples lie along the first axis.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let (name, uniform) = match spec.op_type {
        "RandomUniform" => ("RandomUniform", true),
        "RandomNormal" => ("RandomNormal", false),
        "RandomUniformLike" => ("RandomUniformLike", true),
        "RandomNormalLike" => ("RandomNormalLike", false),
        _ => ("Bernoulli", true),
    };
    let bernoulli = name == "Bernoulli";
    let like = bernoulli || name.ends_with("Like");
    let own: &[&str] = match (bernoulli, uniform) {
        (true, _) => &[],
        (_, true) => &["high", "low"],
        _ => &["mean", "scale"],
    };
    let shape: &[&str] = if like { &[] } else { &["shape"] };
    spec.allow(&[own, shape, &["dtype", "seed"]].concat())?;
    spec.at_most_inputs(usize::from(like))?;
    let shape = if like {
        let input = spec.input(0, "input")?;
        if bernoulli {
            spec.expect_dtype(input, "input", DType::F32)?;
        }
        input.shape.clone()
    } else {
        let wish = spec.ints("shape")?;
        let wish = wish.ok_or_else(|| spec.attribute_error("shape", "is missing"))?;
        let shape: Option<Vec<usize>> = wish.iter().map(|&e| usize::try_from(e).ok()).collect();
        shape.ok_or_else(|| spec.attribute_error("shape", format!("{wish:?} is no shape")))?
    };
    spec.check_size(&shape)?;
    let float = |name, default| Ok(spec.float(name)?.unwrap_or(default));
    let distribution = if bernoulli {
        Distribution::Uniform {
            low: 0.0,
            high: 1.0,
        }
    } else if uniform {
        Distribution::Uniform {
            low: float("low", 0.0)?,
            high: float("high", 1.0)?,
        }
    } else {
        Distribution::Normal {
            mean: float("mean", 0.0)?,
            deviation: float("scale", 1.0)?,
        }
    };
    let dtype = dtype(spec, bernoulli)?;
    Ok(Box::new(Random {
        name,
        distribution,
        bernoulli,
        node: random::hash(spec.name),
        outputs: [ValueType { dtype, shape }],
    }))
}

/// Element type by ONNX's number; the floats (1 float, 10 half, 11 double, 16 bfloat16) are all computed in float.
/// Bernoulli may also give integers (6 int32, 7 int64) and bools (9).
fn dtype(spec: &NodeSpec<'_>, bernoulli: bool) -> Result<DType, OpError> {
    match spec.attributes.get("dtype") {
        None | Some(Attribute::Int(1 | 10 | 11 | 16)) => Ok(DType::F32),
        Some(Attribute::Int(6 | 7)) if bernoulli => Ok(DType::I64),
        Some(Attribute::Int(9)) if bernoulli => Ok(DType::Bool),
        Some(_) => Err(spec.attribute_error("dtype", "this element type is not supported")),
    }
}

impl Operator for Random {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn is_random(&self) -> bool {
        true
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let seed = MaskSeed {
            seed: cx.seed,
            node: self.node,
            first_sample: cx.first_sample,
        };
        let ValueType { dtype, shape } = &self.outputs[0];
        let numbers = device.random(self.distribution, shape, seed);
        if !self.bernoulli {
            return Forward::of(numbers);
        }
        let probabilities = inputs[0].take().expect("input input");
        let room = device.binary(Binary::Sub, probabilities, numbers);
        let above = device.unary(Unary::Threshold(0.0), room);
        let ones = device.cast(above, DType::Bool);
        Forward::of(device.cast(ones, *dtype))
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
