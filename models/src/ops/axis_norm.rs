//! Normalisations along any axes without scale and bias: MeanVarianceNormalization and LpNormalization.

use super::views::{broadcast, permute, permute_back};
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::{Binary, LayerNorm, Reduction, Unary};
use crate::tensor::Tensor;

/// |x|, as a leaky Relu.
const ABS: Unary = Unary::LeakyRelu(-1.0);
/// Added to norms so that what is 0 everywhere stays 0.
const TINY: f32 = f32::MIN_POSITIVE;

#[derive(Debug)]
struct RowNorm {
    name: &'static str,
    /// Axes in the order in which those that are normalised come last.
    order: Vec<usize>,
    rows: LayerNorm,
    /// The root mean square of a row times this is the norm that divides it.
    factor: f32,
    outputs: [ValueType; 1],
}

/// x over the sum of its absolute values along an axis.
#[derive(Debug)]
struct L1Norm {
    axis: usize,
    outputs: [ValueType; 1],
}

/// Input X.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.at_most_inputs(1)?;
    let x = spec.float_input(0, "X")?;
    if spec.op_type == "MeanVarianceNormalization" {
        spec.allow(&["axes"])?;
        let axes = spec.ints("axes")?.unwrap_or(&[0, 2, 3]);
        let axes = spec.axes(axes, x.shape.len())?;
        // ONNX adds 1e-9 to the deviation; this is the variance of that.
        return Ok(row_norm("MeanVarianceNormalization", x, &axes, true, 1e-18));
    }
    spec.allow(&["axis", "p"])?;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(-1), x.shape.len())?;
    match spec.int("p")?.unwrap_or(2) {
        1 => Ok(Box::new(L1Norm {
            axis,
            outputs: [x.clone()],
        })),
        2 => Ok(row_norm("LpNormalization", x, &[axis], false, TINY)),
        other => Err(spec.attribute_error("p", format!("must be 1 or 2, not {other}"))),
    }
}

fn row_norm(
    name: &'static str,
    x: &ValueType,
    axes: &[usize],
    centered: bool,
    eps: f32,
) -> Box<dyn Operator> {
    let mut order: Vec<usize> = (0..x.shape.len())
        .filter(|axis| !axes.contains(axis))
        .collect();
    order.extend(axes);
    let len = axes.iter().map(|&axis| x.shape[axis]).product();
    Box::new(RowNorm {
        name,
        order,
        rows: LayerNorm {
            rows: x.shape.iter().product::<usize>() / len,
            len,
            eps,
            centered,
        },
        factor: if centered {
            1.0
        } else {
            1.0 / (len as f32).sqrt()
        },
        outputs: [x.clone()],
    })
}

impl RowNorm {
    fn scaled(&self, cx: &Context<'_>, x: Tensor) -> Tensor {
        if self.factor == 1.0 {
            return x;
        }
        cx.device.unary(Unary::Scale(self.factor), x)
    }
}

impl Operator for RowNorm {
    fn name(&self) -> &'static str {
        self.name
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
        let x = permute(cx.device, inputs[0].as_ref().expect("input X"), &self.order);
        let y = cx.device.layer_norm(&self.rows, &x, None, None);
        let output = self.scaled(cx, y.output);
        Forward {
            outputs: vec![permute_back(cx.device, &output, &self.order)],
            extra: vec![y.mean, y.inv_std],
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let back = |grad: Tensor| {
            let x = permute(device, saved.input(0), &self.order);
            let grad = self.scaled(cx, permute(device, &grad, &self.order));
            let [mean, inv_std] = &saved.extra[..] else {
                unreachable!("the statistics that the forward gave");
            };
            let back = device.layer_norm_backward(&self.rows, &x, None, mean, inv_std, grad);
            permute_back(device, &back.input, &self.order)
        };
        vec![only(grads).map(back)]
    }
}

impl L1Norm {
    /// Sum of the absolute values along the axis.
    fn norm(&self, cx: &Context<'_>, x: &Tensor) -> Tensor {
        let sizes = cx.device.unary(ABS, x.clone());
        let sum = cx.device.reduce(Reduction::Sum, &sizes, &[self.axis]);
        let above_0 = Unary::Affine {
            alpha: 1.0,
            beta: TINY,
        };
        cx.device.unary(above_0, sum)
    }
}

impl Operator for L1Norm {
    fn name(&self) -> &'static str {
        "LpNormalization"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0],
            outputs: vec![0],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let x = inputs[0].as_ref().expect("input X");
        let norm = self.norm(cx, x);
        Forward::of(cx.device.binary(Binary::Div, x.clone(), norm))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        _wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        // y = x / n with n = sum |x|: dx = (g - sign(x) * sum(g * y)) / n.
        let back = |grad: Tensor| {
            let (x, y) = (saved.input(0), saved.output(0));
            let products = device.binary(Binary::Mul, y.clone(), grad.clone());
            let dot = device.reduce(Reduction::Sum, &products, &[self.axis]);
            let spread = broadcast(device, &dot, x.shape());
            let through = device.unary_backward(ABS, x, spread);
            let inner = device.binary(Binary::Sub, grad, through);
            device.binary(Binary::Div, inner, self.norm(cx, x))
        };
        vec![only(grads).map(back)]
    }
}
