//! Sum, Mean, Max and Min of any number of tensors, with numpy broadcasting.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, sum_to};
use crate::device::params::{Binary, Comparison, Unary};
use crate::shape;
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Variadic {
    name: &'static str,
    op: Binary,
    /// 1 / number of inputs of a mean.
    factor: f32,
    shapes: Vec<Vec<usize>>,
    positions: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Any number of inputs of one type: float, or int64 but for the mean.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[])?;
    let first = spec.input(0, "data_0")?;
    let (name, op) = match spec.op_type {
        "Sum" => ("Sum", Binary::Add),
        "Max" => ("Max", Binary::Max),
        "Min" => ("Min", Binary::Min),
        _ => ("Mean", Binary::Add),
    };
    if first.dtype != DType::I64 || name == "Mean" {
        spec.expect_dtype(first, "data_0", DType::F32)?;
    }
    let mut shape = first.shape.clone();
    let mut shapes = Vec::with_capacity(spec.inputs.len());
    for position in 0..spec.inputs.len() {
        let input = spec.input(position, &format!("data_{position}"))?;
        spec.expect_dtype(input, &format!("data_{position}"), first.dtype)?;
        shape = shape::broadcast(&shape, &input.shape).ok_or_else(|| {
            let problem = format!("{:?} does not broadcast with {shape:?}", input.shape);
            spec.input_error(&format!("data_{position}"), problem)
        })?;
        shapes.push(input.shape.clone());
    }
    spec.check_size(&shape)?;
    let factor = if name == "Mean" {
        1.0 / shapes.len() as f32
    } else {
        1.0
    };
    Ok(Box::new(Variadic {
        name,
        op,
        factor,
        positions: (0..shapes.len()).collect(),
        shapes,
        outputs: [ValueType {
            dtype: first.dtype,
            shape,
        }],
    }))
}

impl Variadic {
    fn is_extreme(&self) -> bool {
        matches!(self.op, Binary::Max | Binary::Min)
    }
}

impl Operator for Variadic {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        if self.name == "Sum" {
            &self.positions
        } else {
            &[]
        }
    }

    fn saves(&self) -> Saves {
        if self.is_extreme() {
            Saves {
                inputs: self.positions.clone(),
                outputs: vec![0],
            }
        } else {
            Saves::default()
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let terms = inputs.into_iter().flatten();
        let result = terms.reduce(|a, b| cx.device.binary(self.op, a, b));
        let result = result.expect("at least one input");
        Forward::of(if self.name == "Mean" {
            cx.device.unary(Unary::Scale(self.factor), result)
        } else {
            result
        })
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let Some(grad) = only(grads) else {
            return vec![None; wanted.len()];
        };
        if !self.is_extreme() {
            let grad = device.unary(Unary::Scale(self.factor), grad);
            let each = wanted.iter().zip(&self.shapes);
            return each
                .map(|(&wanted, shape)| wanted.then(|| sum_to(device, grad.clone(), shape)))
                .collect();
        }
        // Those that are equal to the extreme share its gradient.
        let shares: Vec<Tensor> = (0..wanted.len())
            .map(|i| device.compare(Comparison::Equal, saved.input(i), saved.output(0)))
            .map(|equal| device.cast(equal, DType::F32))
            .collect();
        let count = shares.iter().cloned();
        let count = count.reduce(|a, b| device.binary(Binary::Add, a, b));
        let share = device.binary(Binary::Div, grad, count.expect("at least one input"));
        let each = shares.into_iter().zip(wanted).zip(&self.shapes);
        each.map(|((equal, &wanted), shape)| {
            let through = wanted.then(|| device.binary(Binary::Mul, equal, share.clone()));
            through.map(|grad| sum_to(device, grad, shape))
        })
        .collect()
    }
}
