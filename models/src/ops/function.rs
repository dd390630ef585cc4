//! Element-wise mathematical functions: Abs, Ceil, Cos, Erf, Exp, Floor, Log, Neg, Reciprocal, Round, Sign, Sin, Sqrt.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only,
};
use crate::device::params::{Binary, Unary};
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Function {
    name: &'static str,
    op: Unary,
    outputs: [ValueType; 1],
}

const FUNCTIONS: [(&str, Unary); 13] = [
    ("Abs", Unary::Abs),
    ("Ceil", Unary::Ceil),
    ("Cos", Unary::Cos),
    ("Erf", Unary::Erf),
    ("Exp", Unary::Exp),
    ("Floor", Unary::Floor),
    ("Log", Unary::Log),
    ("Neg", Unary::Scale(-1.0)),
    ("Reciprocal", Unary::Reciprocal),
    ("Round", Unary::Round),
    ("Sign", Unary::Sign),
    ("Sin", Unary::Sin),
    ("Sqrt", Unary::Sqrt),
];

/// Input X: float; Abs, Neg and Sign take int64 too.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[])?;
    spec.at_most_inputs(1)?;
    let x = spec.input(0, "X")?.clone();
    let known = FUNCTIONS.iter().find(|(name, _)| *name == spec.op_type);
    let &(name, op) = known.ok_or_else(|| OpError::Operator {
        node: spec.name.into(),
        op: spec.op_type.into(),
    })?;
    let of_integers = matches!(name, "Abs" | "Neg" | "Sign") && x.dtype == DType::I64;
    if !of_integers {
        spec.expect_dtype(&x, "X", DType::F32)?;
    }
    Ok(Box::new(Function {
        name,
        op,
        outputs: [x],
    }))
}

impl Function {
    fn has_one_slope(&self) -> bool {
        matches!(
            self.op,
            Unary::Scale(_) | Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round
        )
    }
}

impl Operator for Function {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        let (mut inputs, mut outputs) = (vec![], vec![]);
        if self.op.saves_output() {
            outputs.push(0);
        } else if !self.has_one_slope() {
            inputs.push(0);
        }
        Saves { inputs, outputs }
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].take().expect("input X");
        if x.dtype() == DType::F32 {
            return Forward::of(cx.device.unary(self.op, x));
        }
        let one = |value| Tensor::from_i64(&[], [value]);
        let binary = |op, a, b| cx.device.binary(op, a, b);
        Forward::of(match self.op {
            Unary::Abs => {
                let negative = binary(Binary::Mul, x.clone(), one(-1));
                binary(Binary::Max, x, negative)
            }
            Unary::Sign => binary(Binary::Max, binary(Binary::Min, x, one(1)), one(-1)),
            _ => binary(Binary::Mul, x, one(-1)),
        })
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
                if self.has_one_slope() {
                    // What is read does not matter.
                    let any = grad.clone();
                    return cx.device.unary_backward(self.op, &any, grad);
                }
                let read = if self.op.saves_output() {
                    saved.output(0)
                } else {
                    saved.input(0)
                };
                cx.device.unary_backward(self.op, read, grad)
            }),
            wanted,
        )
    }
}
