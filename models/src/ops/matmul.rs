//! MatMul: matrix product with numpy's broadcasting of leading axes and its rule for vectors.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, sum_to};
use crate::device::params::Gemm;
use crate::init::Fan;
use crate::shape;
use crate::tensor::Tensor;

#[derive(Debug)]
struct MatMul {
    m: usize,
    n: usize,
    k: usize,
    /// Shape of A and B in the file.
    shapes: [Vec<usize>; 2],
    /// Shape of A and B as stacks of matrices, `[leading.., rows, columns]`.
    stacks: [Vec<usize>; 2],
    /// Leading axes of the result.
    leading: Vec<usize>,
    /// Where A and B of each product begin.
    offsets: Vec<(usize, usize)>,
    outputs: [ValueType; 1],
}

/// Inputs A `[.., m, k]` and B `[.., k, n]`; a vector is a row on the left, a column on the right.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[])?;
    spec.at_most_inputs(2)?;
    let a = &spec.float_input(0, "A")?.shape;
    let b = &spec.float_input(1, "B")?.shape;
    if a.is_empty() || b.is_empty() {
        return Err(spec.error("a scalar has no matrix product"));
    }
    let (mut a_stack, mut b_stack) = (a.clone(), b.clone());
    if a.len() == 1 {
        a_stack.insert(0, 1);
    }
    if b.len() == 1 {
        b_stack.push(1);
    }
    let (a_leading, &[m, k]) = split(&a_stack);
    let (b_leading, &[inner, n]) = split(&b_stack);
    let leading = shape::broadcast(a_leading, b_leading).filter(|_| inner == k);
    let Some(leading) = leading else {
        return Err(spec.error(format!("A {a:?} and B {b:?} do not go together")));
    };
    let mut output = leading.clone();
    if a.len() > 1 {
        output.push(m);
    }
    if b.len() > 1 {
        output.push(n);
    }
    spec.check_size(&output)?;
    spec.check_size(&[&leading[..], &[m, k]].concat())?;
    spec.check_size(&[&leading[..], &[k, n]].concat())?;
    let products: usize = leading.iter().product();
    let plan = if b_leading.iter().all(|&extent| extent == 1) && a_leading.len() >= b_leading.len()
    {
        // One matrix on the right: the stack on the left is one tall matrix.
        (products * m, vec![(0, 0)])
    } else {
        (m, offsets(&leading, a_leading, m * k, b_leading, k * n))
    };
    Ok(Box::new(MatMul {
        m: plan.0,
        n,
        k,
        shapes: [a.clone(), b.clone()],
        stacks: [a_stack.clone(), b_stack.clone()],
        leading,
        offsets: plan.1,
        outputs: [ValueType::float(output)],
    }))
}

fn split(stack: &[usize]) -> (&[usize], &[usize; 2]) {
    stack.split_last_chunk().expect("at least two axes")
}

/// Begin of both matrices of every product.
fn offsets(
    leading: &[usize],
    a: &[usize],
    a_size: usize,
    b: &[usize],
    b_size: usize,
) -> Vec<(usize, usize)> {
    let a_strides = shape::broadcast_strides(a, leading);
    let b_strides = shape::broadcast_strides(b, leading);
    let strides = shape::strides(leading);
    (0..leading.iter().product())
        .map(|product| {
            let (mut i, mut j) = (0, 0);
            for axis in 0..leading.len() {
                let index = product / strides[axis] % leading[axis];
                i += index * a_strides[axis];
                j += index * b_strides[axis];
            }
            (i * a_size, j * b_size)
        })
        .collect()
}

impl Operator for MatMul {
    fn name(&self) -> &'static str {
        "MatMul"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[0, 1]
    }

    fn fan(&self, input: usize) -> Option<Fan> {
        Some(Fan {
            inputs: self.k,
            outputs: if input == 0 { self.m } else { self.n },
        })
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let (Some(a), Some(b)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let p = Gemm {
            offsets: self.offsets.clone(),
            ..Gemm::new(self.m, self.n, self.k)
        };
        let output = cx.device.gemm(&p, a, b, None);
        Forward::of(output.into_shape(&self.outputs[0].shape))
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
        let (m, n, k) = (self.m, self.n, self.k);
        // The gradient of each product is a matrix of its own.
        let numbered = |f: &dyn Fn(usize, (usize, usize)) -> (usize, usize)| {
            self.offsets
                .iter()
                .enumerate()
                .map(|(i, &o)| f(i * m * n, o))
                .collect()
        };
        // Gradients of matrices that were read by several products are summed afterwards.
        let settle = |grad: Tensor, which: usize| {
            let (_, matrix) = split(&self.stacks[which]);
            let one_matrix = grad.len() == self.shapes[which].iter().product::<usize>();
            let grad = if one_matrix {
                grad
            } else {
                let stack = [&self.leading[..], &matrix[..]].concat();
                sum_to(cx.device, grad.into_shape(&stack), &self.stacks[which])
            };
            grad.into_shape(&self.shapes[which])
        };
        let mut result = vec![None; wanted.len()];
        if wanted[0] {
            let p = Gemm {
                transpose_b: true,
                offsets: numbered(&|grad, (_, b)| (grad, b)),
                ..Gemm::new(m, k, n)
            };
            let a_grad = cx.device.gemm(&p, &grad, saved.input(1), None);
            result[0] = Some(settle(a_grad, 0));
        }
        if wanted[1] {
            let p = Gemm {
                transpose_a: true,
                offsets: numbered(&|grad, (a, _)| (a, grad)),
                ..Gemm::new(k, n, m)
            };
            let b_grad = cx.device.gemm(&p, saved.input(0), &grad, None);
            result[1] = Some(settle(b_grad, 1));
        }
        result
    }
}
