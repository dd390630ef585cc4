//! Gemm: `alpha * A' * B' + beta * C`, where `'` may transpose and C broadcasts to the product.

use super::views::broadcast;
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, sum_to};
use crate::device::params::{self, Unary};
use crate::init::Fan;
use crate::shape;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Gemm {
    params: params::Gemm,
    a_shape: Vec<usize>,
    b_shape: Vec<usize>,
    /// C's shape and beta.
    bias: Option<(Vec<usize>, f32)>,
    outputs: [ValueType; 1],
}

/// Inputs A, B (matrices) and C, which is optional since opset 11.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["alpha", "beta", "transA", "transB"])?;
    spec.at_most_inputs(3)?;
    let a = &spec.float_input(0, "A")?.shape;
    let b = &spec.float_input(1, "B")?.shape;
    let (transpose_a, transpose_b) = (spec.flag("transA")?, spec.flag("transB")?);
    let (&[a0, a1], &[b0, b1]) = (&a[..], &b[..]) else {
        return Err(spec.error(format!("A {a:?} and B {b:?} must be matrices")));
    };
    let (m, k) = if transpose_a { (a1, a0) } else { (a0, a1) };
    let (inner, n) = if transpose_b { (b1, b0) } else { (b0, b1) };
    if inner != k {
        return Err(spec.error(format!(
            "A {a:?} and B {b:?} do not go together with transA {} and transB {}",
            u8::from(transpose_a),
            u8::from(transpose_b)
        )));
    }
    let alpha = spec.float("alpha")?.unwrap_or(1.0);
    let beta = spec.float("beta")?.unwrap_or(1.0);
    let bias = match spec.optional(2) {
        None => None,
        Some(_) => {
            let c = &spec.float_input(2, "C")?.shape;
            if shape::broadcast(c, &[m, n]).as_deref() != Some(&[m, n]) {
                return Err(
                    spec.input_error("C", format!("{c:?} does not broadcast to [{m}, {n}]"))
                );
            }
            Some((c.clone(), beta))
        }
    };
    spec.check_size(&[m, n])?;
    Ok(Box::new(Gemm {
        params: params::Gemm {
            transpose_a,
            transpose_b,
            alpha,
            beta: if bias.is_some() { beta } else { 0.0 },
            ..params::Gemm::new(m, n, k)
        },
        a_shape: a.clone(),
        b_shape: b.clone(),
        bias,
        outputs: [ValueType::float([m, n])],
    }))
}

impl Operator for Gemm {
    fn name(&self) -> &'static str {
        "Gemm"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0, 1, 2]
    }

    fn fan(&self, input: usize) -> Option<Fan> {
        let outputs = match input {
            0 => self.params.m,
            1 => self.params.n,
            _ => return None,
        };
        Some(Fan {
            inputs: self.params.k,
            outputs,
        })
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let shape = &self.outputs[0].shape;
        let (Some(a), Some(b)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let c = inputs
            .get(2)
            .and_then(Option::as_ref)
            .filter(|_| self.params.beta != 0.0);
        let c = c.map(|c| broadcast(cx.device, c, shape));
        Forward::of(cx.device.gemm(&self.params, a, b, c).into_shape(shape))
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
        let p = &self.params;
        let product =
            |m, n, k, (a, transpose_a): (&Tensor, bool), (b, transpose_b): (&Tensor, bool)| {
                let p = params::Gemm {
                    transpose_a,
                    transpose_b,
                    alpha: p.alpha,
                    ..params::Gemm::new(m, n, k)
                };
                cx.device.gemm(&p, a, b, None)
            };
        let mut result = vec![None; wanted.len()];
        if wanted[0] {
            let b = saved.input(1);
            let a_grad = if p.transpose_a {
                product(p.k, p.m, p.n, (b, p.transpose_b), (&grad, true))
            } else {
                product(p.m, p.k, p.n, (&grad, false), (b, !p.transpose_b))
            };
            result[0] = Some(a_grad.into_shape(&self.a_shape));
        }
        if wanted[1] {
            let a = saved.input(0);
            let b_grad = if p.transpose_b {
                product(p.n, p.k, p.m, (&grad, true), (a, p.transpose_a))
            } else {
                product(p.k, p.n, p.m, (a, !p.transpose_a), (&grad, false))
            };
            result[1] = Some(b_grad.into_shape(&self.b_shape));
        }
        if let (Some(true), Some((shape, beta))) = (wanted.get(2), &self.bias) {
            let sum = sum_to(cx.device, grad, shape);
            result[2] = Some(if *beta == 1.0 {
                sum
            } else {
                cx.device.unary(Unary::Scale(*beta), sum)
            });
        }
        result
    }
}
