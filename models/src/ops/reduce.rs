//! Reductions over axes: ReduceL1, ReduceL2, ReduceLogSum, ReduceLogSumExp, ReduceMax, ReduceMean, ReduceMin, ReduceProd,
//! ReduceSum, ReduceSumSquare.

use super::{
    Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, of_first, only, views,
};
use crate::device::params::{Binary, Comparison, Reduction, Unary};
use crate::tensor::{DType, Tensor};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Plain(Reduction),
    L1,
    L2,
    LogSum,
    LogSumExp,
    SumSquare,
}

#[derive(Debug)]
struct Reduce {
    name: &'static str,
    kind: Kind,
    axes: Vec<usize>,
    input_shape: Vec<usize>,
    /// Shape of the result with the reduced axes kept at extent 1.
    kept: Vec<usize>,
    outputs: [ValueType; 1],
}

const KINDS: [(&str, Kind); 10] = [
    ("ReduceL1", Kind::L1),
    ("ReduceL2", Kind::L2),
    ("ReduceLogSum", Kind::LogSum),
    ("ReduceLogSumExp", Kind::LogSumExp),
    ("ReduceMax", Kind::Plain(Reduction::Max)),
    ("ReduceMean", Kind::Plain(Reduction::Mean)),
    ("ReduceMin", Kind::Plain(Reduction::Min)),
    ("ReduceProd", Kind::Plain(Reduction::Prod)),
    ("ReduceSum", Kind::Plain(Reduction::Sum)),
    ("ReduceSumSquare", Kind::SumSquare),
];

/// Input data: float, or int64 for the sum, the product and the extremes. Axes are an attribute before opset 18 (13 for
/// ReduceSum) and an input since. No axes: all of them.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["axes", "keepdims", "noop_with_empty_axes"])?;
    let since = if spec.op_type == "ReduceSum" { 13 } else { 18 };
    spec.at_most_inputs(if spec.opset >= since { 2 } else { 1 })?;
    let known = KINDS.iter().find(|(name, _)| *name == spec.op_type);
    let &(name, kind) = known.ok_or_else(|| OpError::Operator {
        node: spec.name.into(),
        op: spec.op_type.into(),
    })?;
    let data = spec.input(0, "data")?;
    let of_integers = match kind {
        Kind::Plain(reduction) => reduction != Reduction::Mean && data.dtype == DType::I64,
        _ => false,
    };
    if !of_integers {
        spec.expect_dtype(data, "data", DType::F32)?;
    }
    let shape = &data.shape;
    let rank = shape.len();
    let axes = match spec.axes_since(since, 1)? {
        Some(axes) if !axes.is_empty() => spec.axes(axes, rank)?,
        _ if spec.flag("noop_with_empty_axes")? => Vec::new(),
        _ => (0..rank).collect(),
    };
    let nothing = axes.iter().any(|&axis| shape[axis] == 0);
    if nothing && !matches!(kind, Kind::Plain(Reduction::Sum | Reduction::Prod)) {
        let problem = format!("{shape:?} has no elements along the axes {axes:?}");
        return Err(spec.input_error("data", problem));
    }
    let keep = spec.int("keepdims")?.unwrap_or(1) != 0;
    let mut kept = shape.clone();
    for &axis in &axes {
        kept[axis] = 1;
    }
    let output = (0..rank)
        .filter(|axis| keep || !axes.contains(axis))
        .map(|axis| kept[axis])
        .collect::<Vec<_>>();
    Ok(Box::new(Reduce {
        name,
        kind,
        axes,
        input_shape: shape.clone(),
        kept,
        outputs: [ValueType {
            dtype: data.dtype,
            shape: output,
        }],
    }))
}

impl Operator for Reduce {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        let (input, output) = match self.kind {
            Kind::Plain(Reduction::Sum | Reduction::Mean) => (false, false),
            Kind::L1 | Kind::SumSquare => (true, false),
            Kind::LogSum => (false, true),
            Kind::Plain(_) | Kind::L2 | Kind::LogSumExp => (true, true),
        };
        let position = |saved: bool| saved.then_some(0).into_iter().collect();
        Saves {
            inputs: position(input),
            outputs: position(output),
        }
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let x = inputs[0].take().expect("input data");
        let reduce = |reduction, x: &Tensor| device.reduce(reduction, x, &self.axes);
        let square = |x: Tensor| device.binary(Binary::Mul, x.clone(), x);
        let result = match self.kind {
            Kind::Plain(reduction) => reduce(reduction, &x),
            Kind::L1 => reduce(Reduction::Sum, &device.unary(Unary::Abs, x)),
            Kind::L2 => device.unary(Unary::Sqrt, reduce(Reduction::Sum, &square(x))),
            Kind::SumSquare => reduce(Reduction::Sum, &square(x)),
            Kind::LogSum => device.unary(Unary::Log, reduce(Reduction::Sum, &x)),
            Kind::LogSumExp => {
                // The largest term is taken out, so that none overflows.
                let largest = reduce(Reduction::Max, &x);
                let terms = device.binary(Binary::Sub, x, largest.clone());
                let sum = reduce(Reduction::Sum, &device.unary(Unary::Exp, terms));
                device.binary(Binary::Add, device.unary(Unary::Log, sum), largest)
            }
        };
        Forward::of(result.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let times = |a: Tensor, b: Tensor| device.binary(Binary::Mul, a, b);
        let y = || saved.output(0).clone().into_shape(&self.kept);
        let back = |grad: Tensor| {
            let grad = grad.into_shape(&self.kept);
            match self.kind {
                Kind::Plain(Reduction::Sum) => views::broadcast(device, &grad, &self.input_shape),
                Kind::Plain(Reduction::Mean) => {
                    let count = self.input_shape.iter().product::<usize>() / grad.len().max(1);
                    let share = device.unary(Unary::Scale(1.0 / count as f32), grad);
                    views::broadcast(device, &share, &self.input_shape)
                }
                Kind::Plain(reduction) => {
                    device.reduce_backward(reduction, saved.input(0), &y(), &grad)
                }
                Kind::L1 => times(device.unary(Unary::Sign, saved.input(0).clone()), grad),
                Kind::SumSquare => {
                    let twice = device.unary(Unary::Scale(2.0), grad);
                    times(saved.input(0).clone(), twice)
                }
                Kind::L2 => {
                    // The norm has no slope at 0; 0 is one of its subgradients there.
                    let zero = Tensor::from_f32(&[], [0.0]);
                    let share = device.binary(Binary::Div, grad, y());
                    let at_zero = device.compare(Comparison::Equal, &y(), &zero);
                    let share = device.select(&at_zero, &zero, &share);
                    times(saved.input(0).clone(), share)
                }
                Kind::LogSum => {
                    let inverse = device.unary(Unary::Exp, device.unary(Unary::Scale(-1.0), y()));
                    views::broadcast(device, &times(grad, inverse), &self.input_shape)
                }
                Kind::LogSumExp => {
                    let share = device.binary(Binary::Sub, saved.input(0).clone(), y());
                    times(device.unary(Unary::Exp, share), grad)
                }
            }
        };
        of_first(only(grads).map(back), wanted)
    }
}
