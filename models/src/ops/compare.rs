//! What gives truth values: Equal, Greater, GreaterOrEqual, Less, LessOrEqual, And, Or, Xor, Not, IsInf, IsNaN.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType};
use crate::device::params::{Comparison, Unary};
use crate::shape;
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, Debug)]
enum Test {
    /// Of A and B, or of B and A.
    Compare {
        op: Comparison,
        swapped: bool,
    },
    Not,
    IsNan,
    /// Which of the infinities count.
    IsInf {
        negative: bool,
        positive: bool,
    },
}

#[derive(Debug)]
struct Truth {
    name: &'static str,
    test: Test,
    outputs: [ValueType; 1],
}

/// Inputs A and B of one type with numpy broadcasting, or X alone.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let (name, test) = test(spec)?;
    let x = spec.input(0, "A")?;
    let shape = if let Test::Compare { op, .. } = test {
        spec.at_most_inputs(2)?;
        let b = spec.input(1, "B")?;
        spec.expect_dtype(b, "B", x.dtype)?;
        match op {
            Comparison::And | Comparison::Or | Comparison::Xor => {
                spec.expect_dtype(x, "A", DType::Bool)?;
            }
            Comparison::Less | Comparison::LessOrEqual if x.dtype == DType::Bool => {
                return Err(spec.input_error("A", "must be a number, not bool"));
            }
            _ => {}
        }
        shape::broadcast(&x.shape, &b.shape).ok_or_else(|| {
            spec.error(format!(
                "A {:?} and B {:?} do not broadcast",
                x.shape, b.shape
            ))
        })?
    } else {
        spec.at_most_inputs(1)?;
        let dtype = match test {
            Test::Not => DType::Bool,
            _ => DType::F32,
        };
        spec.expect_dtype(x, "X", dtype)?;
        x.shape.clone()
    };
    spec.check_size(&shape)?;
    Ok(Box::new(Truth {
        name,
        test,
        outputs: [ValueType {
            dtype: DType::Bool,
            shape,
        }],
    }))
}

fn test(spec: &NodeSpec<'_>) -> Result<(&'static str, Test), OpError> {
    if spec.op_type == "IsInf" {
        spec.allow(&["detect_negative", "detect_positive"])?;
        let detect = |name| Ok(spec.int(name)?.unwrap_or(1) != 0);
        let test = Test::IsInf {
            negative: detect("detect_negative")?,
            positive: detect("detect_positive")?,
        };
        return Ok(("IsInf", test));
    }
    spec.allow(&[])?;
    let compare = |op, swapped| Test::Compare { op, swapped };
    Ok(match spec.op_type {
        "Equal" => ("Equal", compare(Comparison::Equal, false)),
        "Less" => ("Less", compare(Comparison::Less, false)),
        "LessOrEqual" => ("LessOrEqual", compare(Comparison::LessOrEqual, false)),
        "Greater" => ("Greater", compare(Comparison::Less, true)),
        "GreaterOrEqual" => ("GreaterOrEqual", compare(Comparison::LessOrEqual, true)),
        "And" => ("And", compare(Comparison::And, false)),
        "Or" => ("Or", compare(Comparison::Or, false)),
        "Xor" => ("Xor", compare(Comparison::Xor, false)),
        "IsNaN" => ("IsNaN", Test::IsNan),
        _ => ("Not", Test::Not),
    })
}

impl Operator for Truth {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let x = inputs[0].take().expect("an input");
        let no = Tensor::from_bool(&[], [false]);
        let infinity = |sign: f32| Tensor::from_f32(&[], [sign * f32::INFINITY]);
        Forward::of(match self.test {
            Test::Compare { op, swapped } => {
                let b = inputs[1].take().expect("input B");
                if swapped {
                    device.compare(op, &b, &x)
                } else {
                    device.compare(op, &x, &b)
                }
            }
            Test::Not => device.compare(Comparison::Equal, &x, &no),
            // Nothing else differs from itself.
            Test::IsNan => {
                let itself = device.compare(Comparison::Equal, &x, &x);
                device.compare(Comparison::Equal, &itself, &no)
            }
            Test::IsInf { negative, positive } => match (negative, positive) {
                (true, true) => {
                    let size = device.unary(Unary::Abs, x);
                    device.compare(Comparison::Equal, &size, &infinity(1.0))
                }
                (true, false) => device.compare(Comparison::Equal, &x, &infinity(-1.0)),
                (false, true) => device.compare(Comparison::Equal, &x, &infinity(1.0)),
                (false, false) => device.compare(Comparison::Less, &x, &infinity(-1.0)),
            },
        })
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
