//! Attention: scaled dot products of queries and keys, softmax, weighted sums of values.

mod build;

use super::views::{block, part, permute};
use super::{Context, Forward, Operator, Saved, Saves, ValueType, sum_to};
use crate::device::params::{Axis, Binary, Gemm, Reduction, Unary, View};
use crate::tensor::{DType, Tensor};

pub(super) use build::build;

/// Positions of the inputs.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const MASK: usize = 3;
const PAST_K: usize = 4;
const PAST_V: usize = 5;
/// Position of the output that shows the scores.
const SCORES: usize = 3;

#[derive(Debug)]
struct Attention {
    batch: usize,
    /// Heads of the queries.
    heads: usize,
    /// Heads of keys and values, each of which serves `heads / kv_heads` query heads.
    kv_heads: usize,
    /// Queries, and keys with those of the past.
    lens: [usize; 2],
    /// Keys of the past.
    past: usize,
    /// Width of a head of queries and keys, and of values.
    widths: [usize; 2],
    scale: f32,
    /// Scores go through `cap * tanh(score / cap)`.
    softcap: Option<Unary>,
    /// Added to the scores so that no query sees a later key, `[queries, keys]`; on the host.
    causal: Option<Tensor>,
    /// Shape of the mask.
    mask: Option<Vec<usize>>,
    /// Inputs and output are `[batch, len, heads * width]` instead of `[batch, heads, len, width]`.
    packed: bool,
    /// The output of scores shows them after the softmax instead of before anything.
    shows_softmax: bool,
    outputs: Vec<ValueType>,
}

impl Attention {
    /// A tensor as `[batch, heads, len, width]`.
    fn unpacked(&self, cx: &Context<'_>, x: &Tensor, heads: usize) -> Tensor {
        if !self.packed {
            return x.clone();
        }
        let [batch, len, width] = x.shape()[..] else {
            unreachable!("three axes by the shape rule");
        };
        let split = x.reshape(&[batch, len, heads, width / heads]);
        permute(cx.device, &split, &[0, 2, 1, 3])
    }

    /// As an input or output lies: the opposite of [`Self::unpacked`].
    fn packed(&self, cx: &Context<'_>, x: Tensor, shape: &[usize]) -> Tensor {
        if self.packed {
            permute(cx.device, &x, &[0, 2, 1, 3]).into_shape(shape)
        } else {
            x.into_shape(shape)
        }
    }

    /// Keys or values with those of the past.
    fn present(
        &self,
        cx: &Context<'_>,
        inputs: &[Option<Tensor>],
        [position, past]: [usize; 2],
    ) -> Tensor {
        let now = inputs[position]
            .as_ref()
            .expect("an input that must be there");
        let now = self.unpacked(cx, now, self.kv_heads);
        match inputs.get(past).and_then(Option::as_ref) {
            Some(past) if self.past > 0 => cx.device.concat(2, &[past.clone(), now]),
            _ => now,
        }
    }

    /// Products of one matrix per query head with one per key head. `sizes` are elements of each.
    fn gemm(&self, p: Gemm, sizes: [usize; 2]) -> Gemm {
        let group = self.heads / self.kv_heads;
        let offsets = (0..self.batch * self.heads).map(|head| {
            let serving = head / self.heads * self.kv_heads + head % self.heads / group;
            (head * sizes[0], serving * sizes[1])
        });
        Gemm {
            offsets: offsets.collect(),
            ..p
        }
    }

    /// Products of two matrices per query head.
    fn gemm_per_head(&self, p: Gemm, sizes: [usize; 2]) -> Gemm {
        let heads = 0..self.batch * self.heads;
        Gemm {
            offsets: heads
                .map(|head| (head * sizes[0], head * sizes[1]))
                .collect(),
            ..p
        }
    }

    /// Products of queries and keys, `[batch, heads, queries, keys]`.
    fn products(&self, cx: &Context<'_>, q: &Tensor, k: &Tensor) -> Tensor {
        let ([queries, keys], [width, _]) = (self.lens, self.widths);
        let p = Gemm {
            transpose_b: true,
            alpha: self.scale,
            ..Gemm::new(queries, keys, width)
        };
        let p = self.gemm(p, [queries * width, keys * width]);
        let products = cx.device.gemm(&p, q, k, None);
        products.into_shape(&[self.batch, self.heads, queries, keys])
    }

    /// What the mask adds to the scores, with all keys.
    fn bias(&self, cx: &Context<'_>, mask: &Tensor) -> Tensor {
        let device = cx.device;
        let mut bias = mask.clone();
        if mask.dtype() == DType::Bool {
            // 1 becomes 0, and 0 the lowest number: 0 * infinity would not be a number.
            let hide = Unary::Affine {
                alpha: f32::MAX,
                beta: -f32::MAX,
            };
            bias = device.unary(hide, device.cast(bias, DType::F32));
        }
        let mut shape = mask.shape().to_vec();
        match shape.last_mut() {
            Some(keys) if *keys > 1 && *keys < self.lens[1] => {
                let strides = self.mask_view(mask.shape());
                *keys = self.lens[1];
                device.scatter(&strides, &shape, f32::NEG_INFINITY, &bias)
            }
            _ => bias,
        }
    }

    /// Where a mask that lacks keys lies in one that has all of them.
    fn mask_view(&self, mask: &[usize]) -> View {
        let mut full = mask.to_vec();
        if let Some(keys) = full.last_mut() {
            *keys = self.lens[1];
        }
        block(&full, &vec![0; full.len()], mask)
    }

    /// Gradient of the mask from that of the scores.
    fn mask_backward(&self, cx: &Context<'_>, mask: &[usize], grad: &Tensor) -> Tensor {
        let mut full = mask.to_vec();
        let short = match full.last_mut() {
            Some(keys) if *keys > 1 && *keys < self.lens[1] => {
                *keys = self.lens[1];
                true
            }
            _ => false,
        };
        let grad = sum_to(cx.device, grad.clone(), &full);
        if short {
            cx.device.copy(&self.mask_view(mask), &grad)
        } else {
            grad
        }
    }

    /// Sums the gradients of the query heads that a key head serves.
    fn settle(&self, cx: &Context<'_>, grad: Tensor, width: usize) -> Tensor {
        let group = self.heads / self.kv_heads;
        let shape = [self.batch, self.kv_heads, self.lens[1], width];
        if group == 1 {
            return grad.into_shape(&shape);
        }
        let split = [self.batch * self.kv_heads, group, self.lens[1] * width];
        let sum = cx
            .device
            .reduce(Reduction::Sum, &grad.into_shape(&split), &[1]);
        sum.into_shape(&shape)
    }

    fn softmax_axis(&self) -> Axis {
        Axis {
            outer: self.batch * self.heads * self.lens[0],
            len: self.lens[1],
            inner: 1,
        }
    }
}

impl Operator for Attention {
    fn name(&self) -> &'static str {
        "Attention"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![Q, K, V, PAST_K, PAST_V],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let q = inputs[Q].as_ref().expect("input Q");
        let q = self.unpacked(cx, q, self.heads);
        let k = self.present(cx, &inputs, [K, PAST_K]);
        let v = self.present(cx, &inputs, [V, PAST_V]);
        let products = self.products(cx, &q, &k);
        let shown = (self.outputs.len() > SCORES).then(|| products.clone());
        let mut kept = None;
        let mut scores = match self.softcap {
            Some(cap) => {
                kept = Some(products.clone());
                device.unary(cap, products)
            }
            None => products,
        };
        if let Some(mask) = inputs.get(MASK).and_then(Option::as_ref) {
            scores = device.binary(Binary::Add, scores, self.bias(cx, mask));
        }
        if let Some(causal) = &self.causal {
            scores = device.binary(Binary::Add, scores, device.upload(causal));
        }
        let weights = device.softmax(self.softmax_axis(), scores, false);
        let ([queries, keys], [_, width]) = (self.lens, self.widths);
        let p = Gemm::new(queries, width, keys);
        let p = self.gemm(p, [queries * keys, keys * width]);
        let y = device.gemm(&p, &weights, &v, None);
        let y = y.into_shape(&[self.batch, self.heads, queries, width]);
        let mut outputs = vec![self.packed(cx, y, &self.outputs[0].shape), k, v];
        outputs.extend(match shown {
            Some(_) if self.shows_softmax => Some(weights.clone()),
            products => products,
        });
        outputs.truncate(self.outputs.len());
        Forward {
            outputs,
            extra: [weights].into_iter().chain(kept).collect(),
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let ([queries, keys], [width, v_width]) = (self.lens, self.widths);
        let get = |output: usize| grads.get(output).and_then(Option::as_ref);
        let add = |sum: Option<Tensor>, more: Option<&Tensor>| match (sum, more) {
            (Some(sum), Some(more)) => Some(device.binary(Binary::Add, sum, more.clone())),
            (sum, more) => sum.or_else(|| more.cloned()),
        };
        let weights = &saved.extra[0];
        let q = self.unpacked(cx, saved.input(Q), self.heads);
        let k = self.present(cx, &saved.inputs, [K, PAST_K]);
        let (of_softmax, of_products) = match self.shows_softmax {
            true => (get(SCORES), None),
            false => (None, get(SCORES)),
        };
        let (mut v_grad, mut weights_grad) = (None, None);
        if let Some(grad) = get(0) {
            let grad = self.unpacked(cx, grad, self.heads);
            let v = self.present(cx, &saved.inputs, [V, PAST_V]);
            let p = Gemm {
                transpose_b: true,
                ..Gemm::new(queries, keys, v_width)
            };
            let p = self.gemm(p, [queries * v_width, keys * v_width]);
            weights_grad = Some(device.gemm(&p, &grad, &v, None).into_shape(weights.shape()));
            let p = Gemm {
                transpose_a: true,
                ..Gemm::new(keys, v_width, queries)
            };
            let p = self.gemm_per_head(p, [queries * keys, queries * v_width]);
            let grad = device.gemm(&p, weights, &grad, None);
            v_grad = Some(self.settle(cx, grad, v_width));
        }
        let mut result = vec![None; PAST_V + 1];
        let scores_grad = add(weights_grad, of_softmax)
            .map(|grad| device.softmax_backward(self.softmax_axis(), weights, grad, false));
        if let (Some(mask), Some(grad), Some(true)) = (&self.mask, &scores_grad, wanted.get(MASK)) {
            result[MASK] = Some(self.mask_backward(cx, mask, grad));
        }
        let products_grad = scores_grad.map(|grad| match self.softcap {
            Some(cap) => device.unary_backward(cap, &saved.extra[1], grad),
            None => grad,
        });
        let mut k_grad = None;
        if let Some(grad) = add(products_grad, of_products) {
            let p = Gemm {
                alpha: self.scale,
                ..Gemm::new(queries, width, keys)
            };
            let p = self.gemm(p, [queries * keys, keys * width]);
            let q_grad = device.gemm(&p, &grad, &k, None).into_shape(q.shape());
            result[Q] = Some(self.packed(cx, q_grad, saved.input(Q).shape()));
            let p = Gemm {
                alpha: self.scale,
                transpose_a: true,
                ..Gemm::new(keys, width, queries)
            };
            let p = self.gemm_per_head(p, [queries * keys, queries * width]);
            let grad = device.gemm(&p, &grad, &q, None);
            k_grad = Some(self.settle(cx, grad, width));
        }
        let now = keys - self.past;
        for (position, past, grad) in [
            (K, PAST_K, add(k_grad, get(1))),
            (V, PAST_V, add(v_grad, get(2))),
        ] {
            let Some(grad) = grad else { continue };
            if wanted.get(past) == Some(&true) {
                result[past] = Some(part(device, &grad, 2, 0, self.past));
            }
            let grad = part(device, &grad, 2, self.past, now);
            result[position] = Some(self.packed(cx, grad, saved.input(position).shape()));
        }
        result.truncate(wanted.len());
        result
    }
}
