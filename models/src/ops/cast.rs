//! Cast and CastLike.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType, of_first, only};
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Cast {
    name: &'static str,
    from: DType,
    outputs: [ValueType; 1],
}

/// Between float, int64 and bool. Half and double are computed as float, int32 as int64, like everywhere
/// here; narrower integers would wrap and are refused.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let input = spec.input(0, "input")?;
    if spec.op_type == "CastLike" {
        spec.allow(&["saturate"])?;
        spec.at_most_inputs(2)?;
        let dtype = spec.input(1, "target_type")?.dtype;
        return Ok(cast("CastLike", input, dtype));
    }
    spec.allow(&["to", "saturate"])?;
    spec.at_most_inputs(1)?;
    let dtype = match spec.int("to")? {
        Some(1 | 10 | 11 | 16) => DType::F32,
        Some(6 | 7) => DType::I64,
        Some(9) => DType::Bool,
        Some(to) => {
            return Err(spec.attribute_error(
                "to",
                format!("type {to} is not supported; float, double, float16, bfloat16, int32, int64 and bool are"),
            ));
        }
        None => return Err(spec.attribute_error("to", "is missing")),
    };
    Ok(cast("Cast", input, dtype))
}

fn cast(name: &'static str, input: &ValueType, dtype: DType) -> Box<dyn Operator> {
    Box::new(Cast {
        name,
        from: input.dtype,
        outputs: [ValueType {
            dtype,
            shape: input.shape.clone(),
        }],
    })
}

impl Operator for Cast {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("an input");
        Forward::of(cx.device.cast(x, self.outputs[0].dtype))
    }

    fn backward(
        &self,
        _cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        // Nothing flows back through an integer.
        of_first(only(grads).filter(|_| self.from == DType::F32), wanted)
    }
}
