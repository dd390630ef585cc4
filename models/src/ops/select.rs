//! Where and Trilu: elements of one tensor or of another.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only, sum_to,
};
use crate::shape;
use crate::tensor::{DType, Tensor};

/// Inputs condition (bool), X and Y of one type, with numpy broadcasting.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    if spec.op_type == "Trilu" {
        return trilu(spec);
    }
    spec.allow(&[])?;
    spec.at_most_inputs(3)?;
    let condition = spec.input(0, "condition")?;
    spec.expect_dtype(condition, "condition", DType::Bool)?;
    let (x, y) = (spec.input(1, "X")?, spec.input(2, "Y")?);
    spec.expect_dtype(y, "Y", x.dtype)?;
    let shape = shape::broadcast(&x.shape, &y.shape)
        .and_then(|shape| shape::broadcast(&shape, &condition.shape))
        .ok_or_else(|| {
            spec.error(format!(
                "condition {:?}, X {:?} and Y {:?} do not broadcast",
                condition.shape, x.shape, y.shape
            ))
        })?;
    spec.check_size(&shape)?;
    Ok(Box::new(Where {
        shapes: [x.shape.clone(), y.shape.clone()],
        outputs: [ValueType {
            dtype: x.dtype,
            shape,
        }],
    }))
}

/// The upper or lower triangle of matrices; `k`, which must be known, moves the diagonal. 0 elsewhere.
fn trilu(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["upper"])?;
    spec.at_most_inputs(2)?;
    let x = spec.input(0, "input")?.clone();
    let &[.., rows, columns] = &x.shape[..] else {
        return Err(spec.input_error("input", format!("{:?} holds no matrices", x.shape)));
    };
    let upper = spec.int("upper")?.unwrap_or(1) != 0;
    let k = match spec.constant_ints(1, "k")? {
        None => 0,
        Some(&[k]) => k,
        Some(other) => return Err(spec.input_error("k", format!("{other:?} is not one number"))),
    };
    let mut kept = Vec::with_capacity(rows * columns);
    for row in 0..rows as i64 {
        let diagonal = row.saturating_add(k);
        kept.extend((0..columns as i64).map(|column| {
            if upper {
                column >= diagonal
            } else {
                column <= diagonal
            }
        }));
    }
    Ok(Box::new(Trilu {
        kept: Tensor::from_bool(&[rows, columns], kept),
        outputs: [x],
    }))
}

fn zero(dtype: DType) -> Tensor {
    Tensor::zeros(dtype, &[])
}

#[derive(Debug)]
struct Where {
    shapes: [Vec<usize>; 2],
    outputs: [ValueType; 1],
}

impl Operator for Where {
    fn name(&self) -> &'static str {
        "Where"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let [Some(condition), Some(x), Some(y)] = &inputs[..] else {
            unreachable!("inputs that the shape rule requires");
        };
        Forward::of(cx.device.select(condition, x, y))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let Some(grad) = only(grads) else {
            return vec![None; wanted.len()];
        };
        let (condition, zero) = (saved.input(0), zero(DType::F32));
        let side = |position: usize, part: Tensor| {
            wanted[position].then(|| sum_to(cx.device, part, &self.shapes[position - 1]))
        };
        vec![
            None,
            side(1, cx.device.select(condition, &grad, &zero)),
            side(2, cx.device.select(condition, &zero, &grad)),
        ]
    }
}

#[derive(Debug)]
struct Trilu {
    /// Which elements of a matrix stay.
    kept: Tensor,
    outputs: [ValueType; 1],
}

impl Operator for Trilu {
    fn name(&self) -> &'static str {
        "Trilu"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input");
        Forward::of(cx.device.select(&self.kept, x, &zero(x.dtype())))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        of_first(
            only(grads).map(|grad| cx.device.select(&self.kept, &grad, &zero(DType::F32))),
            wanted,
        )
    }
}
