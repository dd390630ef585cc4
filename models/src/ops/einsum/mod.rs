//! Einsum of one or two operands: diagonals and sums of each operand, then one stack of matrix products.

mod equation;

use self::equation::Equation;
use super::views::{broadcast, permute, permute_back};
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::{Gemm, Reduction, View};
use crate::shape;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Einsum {
    operands: Vec<Operand>,
    /// The product of two operands.
    product: Option<Gemm>,
    /// Shape of the result before its axes are put into the order of the output.
    joint: Vec<usize>,
    /// Order of the axes of `joint` in the output.
    order: Vec<usize>,
    positions: Vec<usize>,
    outputs: [ValueType; 1],
}

/// How an operand becomes a stack of matrices.
#[derive(Debug)]
struct Operand {
    shape: Vec<usize>,
    /// Where a label stands twice: the elements whose indices are equal.
    diagonal: Option<View>,
    /// Shape with one axis per label.
    labelled: Vec<usize>,
    /// Axes of it whose labels nobody else has, and those that only repeat.
    summed: Vec<usize>,
    /// Order of the remaining axes.
    order: Vec<usize>,
}

/// Inputs: one or two float tensors. A label may stand for an axis of extent 1 where it has another extent
/// elsewhere.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["equation"])?;
    let text = spec.string("equation")?;
    let text = text.ok_or_else(|| spec.attribute_error("equation", "is missing"))?;
    if !(1..=2).contains(&spec.inputs.len()) {
        let count = spec.inputs.len();
        return Err(spec.error(format!("has {count} inputs; one and two are supported")));
    }
    let mut shapes = Vec::with_capacity(2);
    for position in 0..spec.inputs.len() {
        shapes.push(&spec.float_input(position, "Inputs")?.shape[..]);
    }
    let refuse = |problem: String| spec.attribute_error("equation", problem);
    let equation = Equation::parse(text, &shapes).map_err(refuse)?;
    let output: Vec<usize> = equation
        .output
        .iter()
        .map(|&l| equation.extent(l))
        .collect();
    spec.check_size(&output)?;
    let positions: Vec<usize> = (0..shapes.len()).collect();
    let outputs = [ValueType::float(output)];
    // Labels of the result before its axes are ordered; each operand's labels in the order the product wants.
    let (joint, wanted, product) = match shapes.len() {
        1 => (equation.output.clone(), vec![equation.output.clone()], None),
        _ => {
            let [a, b] = [0, 1].map(|operand| equation.present(operand));
            let kept = |l: &usize| equation.output.contains(l);
            let pick = |from: &[usize], condition: &dyn Fn(&usize) -> bool| -> Vec<usize> {
                from.iter().copied().filter(|l| condition(l)).collect()
            };
            let batch = pick(&a, &|l| b.contains(l) && kept(l));
            let inner = pick(&a, &|l| b.contains(l) && !kept(l));
            let rows = pick(&a, &|l| !b.contains(l) && kept(l));
            let columns = pick(&b, &|l| !a.contains(l) && kept(l));
            let size = |labels: &[usize]| -> usize {
                labels.iter().map(|&l| equation.extent(l)).product()
            };
            let [m, n, k] = [&rows, &columns, &inner].map(|labels| size(labels));
            for shape in [[size(&batch), m, k], [size(&batch), k, n]] {
                spec.check_size(&shape)?;
            }
            let product = Gemm {
                offsets: (0..size(&batch)).map(|i| (i * m * k, i * k * n)).collect(),
                ..Gemm::new(m, n, k)
            };
            let joint = [&batch[..], &rows, &columns].concat();
            let wanted = vec![
                [&batch[..], &rows, &inner].concat(),
                [&batch[..], &inner, &columns].concat(),
            ];
            (joint, wanted, Some(product))
        }
    };
    let operands = (0..shapes.len())
        .map(|operand| Operand::new(&equation, operand, shapes[operand], &wanted[operand]));
    Ok(Box::new(Einsum {
        operands: operands.collect(),
        product,
        order: places(&joint, &equation.output),
        joint: joint.iter().map(|&l| equation.extent(l)).collect(),
        positions,
        outputs,
    }))
}

/// Where each of `labels` stands in `from`.
fn places(from: &[usize], labels: &[usize]) -> Vec<usize> {
    let place = |label| from.iter().position(|l| l == label);
    labels.iter().filter_map(place).collect()
}

impl Operand {
    fn new(equation: &Equation, operand: usize, shape: &[usize], wanted: &[usize]) -> Self {
        let labels = &equation.operands[operand];
        let mut distinct: Vec<usize> = Vec::new();
        for label in labels {
            if !distinct.contains(label) {
                distinct.push(*label);
            }
        }
        let own = shape::strides(shape);
        let axes_of = |label: usize| (0..labels.len()).filter(move |&axis| labels[axis] == label);
        let labelled: Vec<usize> = distinct
            .iter()
            .map(|&label| axes_of(label).map(|axis| shape[axis]).max().unwrap_or(1))
            .collect();
        // Along a diagonal all axes of a label advance together.
        let stride = |&label: &usize| axes_of(label).map(|axis| own[axis] as isize).sum();
        let diagonal = (distinct.len() < labels.len()).then(|| View {
            shape: labelled.clone(),
            strides: distinct.iter().map(stride).collect(),
            offset: 0,
        });
        let kept: Vec<usize> = distinct
            .iter()
            .copied()
            .filter(|l| wanted.contains(l))
            .collect();
        Operand {
            shape: shape.to_vec(),
            diagonal,
            summed: (0..distinct.len())
                .filter(|&axis| !wanted.contains(&distinct[axis]))
                .collect(),
            labelled,
            order: places(&kept, wanted),
        }
    }

    /// Shape after the sums.
    fn kept(&self) -> Vec<usize> {
        let axes = (0..self.labelled.len()).filter(|axis| !self.summed.contains(axis));
        axes.map(|axis| self.labelled[axis]).collect()
    }

    /// Whether the sums are of more than one element.
    fn sums(&self) -> bool {
        self.summed.iter().any(|&axis| self.labelled[axis] != 1)
    }

    fn prepare(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        let mut x = match &self.diagonal {
            Some(view) => cx.device.copy(view, x),
            None => x.clone(),
        };
        if self.sums() {
            x = cx.device.reduce(Reduction::Sum, &x, &self.summed);
        }
        permute(cx.device, &x.into_shape(&self.kept()), &self.order)
    }

    /// Gradient of the operand from that of what [`Self::prepare`] made of it.
    fn restore(&self, cx: &Context<'_>, grad: Tensor) -> Tensor {
        let kept = self.kept();
        let shape: Vec<usize> = self.order.iter().map(|&axis| kept[axis]).collect();
        let mut grad = permute_back(cx.device, &grad.into_shape(&shape), &self.order);
        let mut ones = self.labelled.clone();
        self.summed.iter().for_each(|&axis| ones[axis] = 1);
        grad = grad.into_shape(&ones);
        if self.sums() {
            grad = broadcast(cx.device, &grad, &self.labelled);
        }
        match &self.diagonal {
            Some(view) => cx.device.scatter(view, &self.shape, 0.0, &grad),
            None => grad.into_shape(&self.shape),
        }
    }
}

impl Operator for Einsum {
    fn name(&self) -> &'static str {
        "Einsum"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &self.positions
    }

    fn saves(&self) -> Saves {
        let needed = self.product.is_some();
        Saves {
            inputs: self.positions.iter().copied().filter(|_| needed).collect(),
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let mut prepared = self
            .operands
            .iter()
            .zip(inputs.iter().flatten())
            .map(|(operand, x)| operand.prepare(cx, x));
        let joint = match (&self.product, prepared.next(), prepared.next()) {
            (Some(p), Some(a), Some(b)) => cx.device.gemm(p, &a, &b, None),
            (_, Some(a), _) => a,
            _ => unreachable!("operands that the shape rule requires"),
        };
        Forward::of(permute(
            cx.device,
            &joint.into_shape(&self.joint),
            &self.order,
        ))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let mut result = vec![None; wanted.len()];
        let Some(grad) = only(grads) else {
            return result;
        };
        let grad = permute_back(cx.device, &grad, &self.order);
        let Some(p) = &self.product else {
            result[0] = Some(self.operands[0].restore(cx, grad));
            return result;
        };
        let (m, n, k) = (p.m, p.n, p.k);
        let numbered = |a: usize, b: usize| (0..p.offsets.len()).map(|i| (i * a, i * b)).collect();
        let operand = |position: usize| self.operands[position].prepare(cx, saved.input(position));
        if wanted[0] {
            let p = Gemm {
                transpose_b: true,
                offsets: numbered(m * n, k * n),
                ..Gemm::new(m, k, n)
            };
            let a = cx.device.gemm(&p, &grad, &operand(1), None);
            result[0] = Some(self.operands[0].restore(cx, a));
        }
        if wanted[1] {
            let p = Gemm {
                transpose_a: true,
                offsets: numbered(m * k, m * n),
                ..Gemm::new(k, n, m)
            };
            let b = cx.device.gemm(&p, &operand(0), &grad, None);
            result[1] = Some(self.operands[1].restore(cx, b));
        }
        result
    }
}
