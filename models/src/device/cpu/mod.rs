//! The CPU: primitives as thin calls of functions over slices.

pub mod kernels;
pub mod reference;

use std::sync::Arc;

use bytemuck::Pod;

use super::params::{
    AdamStep, Axis, Binary, Comparison, Conv, CumulativeSum, Distribution, Extreme, Gemm,
    LayerNorm, Lrn, LstmCell, MaskSeed, Pool, Reduction, SgdStep, Unary, View,
};
use super::pool::{self, Memory};
use super::{
    BatchNormBackward, BatchNormForward, Device, LayerNormBackward, LayerNormForward, LossOutput,
    LstmStep,
};
use crate::shape;
use crate::tensor::{DType, Tensor};
use kernels::{conv, elementwise, layer_norm, lrn, lstm, matmul, norm, pool as pooling};
use reference::{layout, loss, reduce};

/// A CPU worker's device: a pool of memory and a number of cores.
pub struct CpuDevice {
    pool: Arc<pool::Pool>,
    threads: usize,
}

impl CpuDevice {
    /// A device with an empty pool that computes on `threads` cores.
    pub fn new(threads: usize) -> Self {
        CpuDevice {
            pool: pool::Pool::new(),
            threads,
        }
    }

    fn floats(&self, shape: &[usize]) -> Tensor {
        self.alloc(DType::F32, shape)
    }

    /// The tensor itself when nobody else holds it, else a copy.
    fn owned(&self, x: Tensor) -> Tensor {
        if x.is_unique() { x } else { self.upload(&x) }
    }

    /// Changes every `step` elements by `f`, which is told where they begin: in place when nobody else holds the tensor,
    /// else each part of a copy while it is in a cache.
    fn map(&self, mut x: Tensor, step: usize, mut f: impl FnMut(usize, &mut [f32])) -> Tensor {
        if x.is_unique() {
            f(0, out(&mut x));
            return x;
        }
        let mut result = self.floats(x.shape());
        let parts = out::<f32>(&mut result).chunks_mut(step);
        for (i, (to, from)) in parts.zip(x.f32s().chunks(step)).enumerate() {
            to.copy_from_slice(from);
            f(i * step, to);
        }
        result
    }

    fn binary_of<T: Pod>(&self, f: impl Fn(T, T) -> T, mut a: Tensor, mut b: Tensor) -> Tensor {
        if a.shape() == b.shape() {
            if a.is_unique() {
                elementwise::each_with(out(&mut a), b.elements(), f);
                return a;
            }
            if b.is_unique() {
                elementwise::each_with(out(&mut b), a.elements(), |b, a| f(a, b));
                return b;
            }
        }
        let shape = broadcast(&a, &b);
        let mut result = self.alloc(a.dtype(), &shape);
        let a_strides = shape::broadcast_strides(a.shape(), &shape);
        let b_strides = shape::broadcast_strides(b.shape(), &shape);
        elementwise::broadcast(
            &shape,
            (a.elements::<T>(), &a_strides),
            (b.elements::<T>(), &b_strides),
            out(&mut result),
            f,
        );
        result
    }

    fn compare_of<T: Pod>(&self, a: &Tensor, b: &Tensor, f: impl Fn(T, T) -> bool) -> Tensor {
        let shape = broadcast(a, b);
        let mut result = self.alloc(DType::Bool, &shape);
        let a_strides = shape::broadcast_strides(a.shape(), &shape);
        let b_strides = shape::broadcast_strides(b.shape(), &shape);
        elementwise::broadcast(
            &shape,
            (a.elements::<T>(), &a_strides),
            (b.elements::<T>(), &b_strides),
            raw(&mut result),
            |a, b| u8::from(f(a, b)),
        );
        result
    }

    fn select_of<T: Pod>(&self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
        let shape = shape::broadcast(&broadcast(a, b), condition.shape());
        let shape = shape.expect("shapes that broadcast");
        let mut result = self.alloc(a.dtype(), &shape);
        let strides = |x: &Tensor| shape::broadcast_strides(x.shape(), &shape);
        elementwise::select(
            &shape,
            (condition.bools(), &strides(condition)),
            (a.elements::<T>(), &strides(a)),
            (b.elements::<T>(), &strides(b)),
            out(&mut result),
        );
        result
    }
}

/// Elements that are copied and changed at a time: 16 KiB stay in the nearest cache, beside as many that are read.
const PART: usize = 4096;

/// A multiple of the rows' length near [`PART`].
fn whole_rows(axis: Axis) -> usize {
    (PART / axis.len.max(1)).max(1) * axis.len.max(1)
}

/// The elements of a tensor that was just made here or is known to be unique.
fn out<T: Pod>(tensor: &mut Tensor) -> &mut [T] {
    tensor.elements_mut().expect("a tensor with one owner")
}

fn broadcast(a: &Tensor, b: &Tensor) -> Vec<usize> {
    shape::broadcast(a.shape(), b.shape()).expect("shapes that broadcast")
}

fn inv_std(variance: &[f32], eps: f32, out: &mut [f32]) {
    for (out, &v) in out.iter_mut().zip(variance) {
        *out = 1.0 / (v + eps).sqrt();
    }
}

impl std::fmt::Debug for CpuDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CpuDevice({} threads)", self.threads)
    }
}

impl Device for CpuDevice {
    fn name(&self) -> &str {
        "cpu"
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn memory(&self) -> Memory {
        self.pool.memory()
    }

    fn capacity_bytes(&self) -> Option<u64> {
        // Linux: a line "MemTotal:  1234 kB".
        let text = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:"))?;
        let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
        Some(kilobytes * 1024)
    }

    fn reset_peak(&self) {
        self.pool.reset_peak();
    }

    fn alloc(&self, dtype: DType, shape: &[usize]) -> Tensor {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Tensor::over(dtype, shape, self.pool.take(bytes))
    }

    fn fill(&self, shape: &[usize], value: f32) -> Tensor {
        let mut tensor = self.floats(shape);
        out::<f32>(&mut tensor).fill(value);
        tensor
    }

    fn upload(&self, host: &Tensor) -> Tensor {
        let mut copy = self.alloc(host.dtype(), host.shape());
        copy.raw_mut()
            .expect("a tensor with one owner")
            .copy_from_slice(host.raw());
        copy
    }

    fn download(&self, tensor: &Tensor) -> Tensor {
        tensor.clone()
    }

    fn gemm(&self, p: &Gemm, a: &Tensor, b: &Tensor, c: Option<Tensor>) -> Tensor {
        let shape = [p.offsets.len(), p.m, p.n];
        let mut c = match c {
            Some(c) => self.owned(c).into_shape(&shape),
            None => self.floats(&shape),
        };
        matmul::gemm(p, self.threads, a.f32s(), b.f32s(), out(&mut c));
        c
    }

    fn conv(&self, p: &Conv, input: &Tensor, filter: &Tensor, bias: Option<&Tensor>) -> Tensor {
        let [h, w] = p.window.output;
        let mut output = self.floats(&[p.batch, p.out_channels, h, w]);
        conv::forward(
            p,
            self.threads,
            input.f32s(),
            filter.f32s(),
            bias.map(Tensor::f32s),
            out(&mut output),
        );
        output
    }

    fn conv_backward_data(&self, p: &Conv, filter: &Tensor, grad: &Tensor) -> Tensor {
        let [h, w] = p.window.input;
        let mut input_grad = self.floats(&[p.batch, p.in_channels, h, w]);
        conv::backward_data(
            p,
            self.threads,
            filter.f32s(),
            grad.f32s(),
            out(&mut input_grad),
        );
        input_grad
    }

    fn conv_backward_filter(&self, p: &Conv, input: &Tensor, grad: &Tensor) -> Tensor {
        let [h, w] = p.window.kernel;
        let mut filter_grad = self.floats(&[p.out_channels, p.in_channels / p.groups, h, w]);
        conv::backward_filter(
            p,
            self.threads,
            input.f32s(),
            grad.f32s(),
            out(&mut filter_grad),
        );
        filter_grad
    }

    fn max_pool(&self, p: &Pool, input: &Tensor, positions: bool) -> (Tensor, Option<Tensor>) {
        let shape = [p.planes, p.window.output[0], p.window.output[1]];
        let mut output = self.floats(&shape);
        let mut positions = positions.then(|| self.alloc(DType::I32, &shape));
        pooling::max_pool(
            p,
            input.f32s(),
            out(&mut output),
            positions.as_mut().map(out),
        );
        (output, positions)
    }

    fn max_pool_backward(&self, p: &Pool, grad: &Tensor, positions: &Tensor) -> Tensor {
        let mut input_grad = self.floats(&[p.planes, p.window.input[0], p.window.input[1]]);
        pooling::max_pool_backward(p, grad.f32s(), positions.i32s(), out(&mut input_grad));
        input_grad
    }

    fn average_pool(&self, p: &Pool, input: &Tensor) -> Tensor {
        let mut output = self.floats(&[p.planes, p.window.output[0], p.window.output[1]]);
        reference::pool::average_pool(p, input.f32s(), out(&mut output));
        output
    }

    fn average_pool_backward(&self, p: &Pool, grad: &Tensor) -> Tensor {
        let mut input_grad = self.floats(&[p.planes, p.window.input[0], p.window.input[1]]);
        reference::pool::average_pool_backward(p, grad.f32s(), out(&mut input_grad));
        input_grad
    }

    fn batch_norm(
        &self,
        axis: Axis,
        x: &Tensor,
        scale: &Tensor,
        bias: &Tensor,
        running_mean: &Tensor,
        running_variance: &Tensor,
        eps: f32,
        momentum: f32,
    ) -> BatchNormForward {
        let channels = [axis.len];
        let [mut mean, mut variance, mut inv_std] = [(); 3].map(|()| self.floats(&channels));
        let mut output = self.floats(x.shape());
        norm::batch_norm(
            axis,
            x.f32s(),
            scale.f32s(),
            bias.f32s(),
            eps,
            norm::Statistics {
                mean: out(&mut mean),
                variance: out(&mut variance),
                inv_std: out(&mut inv_std),
            },
            out(&mut output),
        );
        let blend = |old: &Tensor, new: &Tensor| {
            let mut blended = self.floats(&channels);
            let values = old.f32s().iter().zip(new.f32s());
            for (blended, (old, new)) in out::<f32>(&mut blended).iter_mut().zip(values) {
                *blended = momentum * old + (1.0 - momentum) * new;
            }
            blended
        };
        let running_mean = blend(running_mean, &mean);
        let running_variance = blend(running_variance, &variance);
        BatchNormForward {
            output,
            mean,
            inv_std,
            running_mean,
            running_variance,
        }
    }

    fn batch_norm_backward(
        &self,
        axis: Axis,
        x: &Tensor,
        scale: &Tensor,
        mean: &Tensor,
        inv_std: &Tensor,
        grad: Tensor,
    ) -> BatchNormBackward {
        let mut input = self.owned(grad);
        let mut scale_grad = self.floats(&[axis.len]);
        let mut bias_grad = self.floats(&[axis.len]);
        norm::batch_norm_backward(
            axis,
            x.f32s(),
            out(&mut input),
            mean.f32s(),
            inv_std.f32s(),
            scale.f32s(),
            true,
            out(&mut scale_grad),
            out(&mut bias_grad),
        );
        BatchNormBackward {
            input,
            scale: scale_grad,
            bias: bias_grad,
        }
    }

    fn batch_norm_inference(
        &self,
        axis: Axis,
        x: Tensor,
        scale: &Tensor,
        bias: &Tensor,
        mean: &Tensor,
        variance: &Tensor,
        eps: f32,
    ) -> Tensor {
        let mut inverse = self.floats(&[axis.len]);
        inv_std(variance.f32s(), eps, out(&mut inverse));
        let mut output = self.owned(x);
        norm::normalize(
            axis,
            out(&mut output),
            mean.f32s(),
            inverse.f32s(),
            scale.f32s(),
            bias.f32s(),
        );
        output
    }

    fn batch_norm_inference_backward(
        &self,
        axis: Axis,
        x: &Tensor,
        scale: &Tensor,
        mean: &Tensor,
        variance: &Tensor,
        eps: f32,
        grad: Tensor,
    ) -> BatchNormBackward {
        let mut inverse = self.floats(&[axis.len]);
        inv_std(variance.f32s(), eps, out(&mut inverse));
        let mut input = self.owned(grad);
        let mut scale_grad = self.floats(&[axis.len]);
        let mut bias_grad = self.floats(&[axis.len]);
        norm::batch_norm_backward(
            axis,
            x.f32s(),
            out(&mut input),
            mean.f32s(),
            inverse.f32s(),
            scale.f32s(),
            false,
            out(&mut scale_grad),
            out(&mut bias_grad),
        );
        BatchNormBackward {
            input,
            scale: scale_grad,
            bias: bias_grad,
        }
    }

    fn layer_norm(
        &self,
        p: &LayerNorm,
        x: &Tensor,
        scale: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> LayerNormForward {
        let mut output = self.floats(x.shape());
        let [mut mean, mut inv_std] = [(); 2].map(|()| self.floats(&[p.rows]));
        layer_norm::forward(
            p,
            x.f32s(),
            scale.map(Tensor::f32s),
            bias.map(Tensor::f32s),
            out(&mut output),
            (out(&mut mean), out(&mut inv_std)),
        );
        LayerNormForward {
            output,
            mean,
            inv_std,
        }
    }

    fn layer_norm_backward(
        &self,
        p: &LayerNorm,
        x: &Tensor,
        scale: Option<&Tensor>,
        mean: &Tensor,
        inv_std: &Tensor,
        grad: Tensor,
    ) -> LayerNormBackward {
        let mut input = self.owned(grad);
        let mut parameters = scale.map(|_| [(); 2].map(|()| self.floats(&[p.len])));
        let sums = parameters
            .as_mut()
            .map(|[scale, bias]| (out(scale), out(bias)));
        let statistics = (mean.f32s(), inv_std.f32s());
        layer_norm::backward(
            p,
            x.f32s(),
            scale.map(Tensor::f32s),
            statistics,
            out(&mut input),
            sums,
        );
        LayerNormBackward {
            input,
            parameters: parameters.map(|[scale, bias]| (scale, bias)),
        }
    }

    fn lstm_cell(
        &self,
        p: &LstmCell,
        gates: Tensor,
        cell: &Tensor,
        peepholes: Option<&Tensor>,
    ) -> LstmStep {
        let mut gates = self.owned(gates);
        let mut hidden = self.floats(cell.shape());
        let mut after = self.floats(cell.shape());
        lstm::forward(
            p,
            out(&mut gates),
            cell.f32s(),
            peepholes.map(Tensor::f32s),
            out(&mut after),
            out(&mut hidden),
        );
        LstmStep {
            gates,
            cell: after,
            hidden,
        }
    }

    fn lstm_cell_backward(
        &self,
        p: &LstmCell,
        gates: Tensor,
        cells: [&Tensor; 2],
        peepholes: Option<&Tensor>,
        grad_hidden: &Tensor,
        grad_cell: Tensor,
    ) -> (Tensor, Tensor) {
        let mut gates = self.owned(gates);
        let mut grad_cell = self.owned(grad_cell);
        lstm::backward(
            p,
            out(&mut gates),
            cells.map(Tensor::f32s),
            peepholes.map(Tensor::f32s),
            grad_hidden.f32s(),
            out(&mut grad_cell),
        );
        (gates, grad_cell)
    }

    fn softmax(&self, axis: Axis, x: Tensor, log: bool) -> Tensor {
        if axis.inner == 1 {
            return self.map(x, whole_rows(axis), |_, x| norm::softmax(axis, x, log));
        }
        let mut output = self.owned(x);
        reference::norm::softmax(axis, out(&mut output), log);
        output
    }

    fn softmax_backward(&self, axis: Axis, output: &Tensor, grad: Tensor, log: bool) -> Tensor {
        if axis.inner == 1 {
            return self.map(grad, whole_rows(axis), |first, grad| {
                let output = &output.f32s()[first..][..grad.len()];
                norm::softmax_backward(axis, output, grad, log);
            });
        }
        let mut grad = self.owned(grad);
        reference::norm::softmax_backward(axis, output.f32s(), out(&mut grad), log);
        grad
    }

    fn lrn(&self, p: &Lrn, x: &Tensor) -> (Tensor, Tensor) {
        let mut output = self.floats(x.shape());
        let mut base = self.floats(x.shape());
        lrn::forward(p, x.f32s(), out(&mut output), out(&mut base));
        (output, base)
    }

    fn lrn_backward(&self, p: &Lrn, x: &Tensor, base: &Tensor, grad: &Tensor) -> Tensor {
        let mut input_grad = self.floats(x.shape());
        lrn::backward(p, x.f32s(), base.f32s(), grad.f32s(), out(&mut input_grad));
        input_grad
    }

    fn unary(&self, op: Unary, x: Tensor) -> Tensor {
        self.map(x, PART, |_, x| elementwise::unary(op, x))
    }

    fn unary_backward(&self, op: Unary, saved: &Tensor, grad: Tensor) -> Tensor {
        self.map(grad, PART, |first, grad| {
            elementwise::unary_backward(op, &saved.f32s()[first..][..grad.len()], grad);
        })
    }

    fn binary(&self, op: Binary, a: Tensor, b: Tensor) -> Tensor {
        match (a.dtype(), op) {
            (DType::I64, _) => {
                self.binary_of(|a, b| reference::elementwise::binary_i64(op, a, b), a, b)
            }
            (_, Binary::Add) => self.binary_of(|a: f32, b: f32| a + b, a, b),
            (_, Binary::Sub) => self.binary_of(|a: f32, b: f32| a - b, a, b),
            (_, Binary::Mul) => self.binary_of(|a: f32, b: f32| a * b, a, b),
            (_, Binary::Div) => self.binary_of(|a: f32, b: f32| a / b, a, b),
            (_, Binary::Pow) if b.len() == 1 && b.shape().len() <= a.shape().len() => {
                let mut power = self.owned(a);
                elementwise::power(out(&mut power), b.f32s()[0]);
                power
            }
            _ => self.binary_of(|a, b| reference::elementwise::binary_f32(op, a, b), a, b),
        }
    }

    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor) -> Tensor {
        match (a.dtype(), op) {
            (DType::Bool, _) => self.compare_of(a, b, |a: u8, b: u8| match op {
                Comparison::Equal => a == b,
                Comparison::Less => a < b,
                Comparison::LessOrEqual => a <= b,
                Comparison::And => a & b == 1,
                Comparison::Or => a | b == 1,
                Comparison::Xor => a ^ b == 1,
            }),
            (DType::I64, Comparison::Equal) => self.compare_of(a, b, |a: i64, b: i64| a == b),
            (DType::I64, Comparison::Less) => self.compare_of(a, b, |a: i64, b: i64| a < b),
            (DType::I64, _) => self.compare_of(a, b, |a: i64, b: i64| a <= b),
            (_, Comparison::Equal) => self.compare_of(a, b, |a: f32, b: f32| a == b),
            (_, Comparison::Less) => self.compare_of(a, b, |a: f32, b: f32| a < b),
            _ => self.compare_of(a, b, |a: f32, b: f32| a <= b),
        }
    }

    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor {
        match a.dtype() {
            DType::F32 => self.select_of::<f32>(condition, a, b),
            DType::I64 => self.select_of::<i64>(condition, a, b),
            DType::I32 => self.select_of::<i32>(condition, a, b),
            DType::Bool => self.select_of::<u8>(condition, a, b),
        }
    }

    fn cast(&self, x: Tensor, dtype: DType) -> Tensor {
        if x.dtype() == dtype {
            return x;
        }
        let mut result = self.alloc(dtype, x.shape());
        layout::cast(&x, &mut result);
        result
    }

    fn reduce(&self, reduction: Reduction, x: &Tensor, axes: &[usize]) -> Tensor {
        let mut kept = x.shape().to_vec();
        for &axis in axes {
            kept[axis] = 1;
        }
        let strides = shape::broadcast_strides(&kept, x.shape());
        let mut result = self.alloc(x.dtype(), &kept);
        let factor = match (x.dtype(), reduction) {
            (DType::F32, Reduction::Sum) => 1.0,
            (DType::F32, Reduction::Mean) => {
                axes.iter().map(|&a| x.shape()[a]).product::<usize>() as f32
            }
            (DType::F32, _) => {
                let out = out::<f32>(&mut result);
                reduce::reduce(reduction, x.shape(), x.f32s(), &strides, out);
                return result;
            }
            _ => {
                let out = out::<i64>(&mut result);
                reduce::reduce(reduction, x.shape(), x.i64s(), &strides, out);
                return result;
            }
        };
        elementwise::reduce(
            x.shape(),
            x.f32s(),
            &strides,
            1.0 / factor,
            out(&mut result),
        );
        result
    }

    fn reduce_backward(
        &self,
        reduction: Reduction,
        x: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> Tensor {
        let mut result = self.floats(x.shape());
        let strides = shape::broadcast_strides(output.shape(), x.shape());
        reduce::reduce_backward(
            reduction,
            x.shape(),
            x.f32s(),
            &strides,
            (output.f32s(), grad.f32s()),
            out(&mut result),
        );
        result
    }

    fn arg_extreme(&self, axis: Axis, x: &Tensor, extreme: Extreme) -> Tensor {
        let mut result = self.alloc(DType::I64, &[axis.outer, axis.inner]);
        match x.dtype() {
            DType::F32 => reduce::arg_extreme(axis, x.f32s(), extreme, out(&mut result)),
            _ => reduce::arg_extreme(axis, x.i64s(), extreme, out(&mut result)),
        }
        result
    }

    fn cumulative_sum(&self, axis: Axis, x: &Tensor, p: CumulativeSum) -> Tensor {
        let mut result = self.alloc(x.dtype(), x.shape());
        match x.dtype() {
            DType::F32 => reduce::cumulative_sum(axis, x.f32s(), p, out::<f32>(&mut result)),
            _ => reduce::cumulative_sum(axis, x.i64s(), p, out::<i64>(&mut result)),
        }
        result
    }

    fn copy(&self, view: &View, x: &Tensor) -> Tensor {
        let mut copy = self.alloc(x.dtype(), &view.shape);
        kernels::layout::copy(view, x.dtype().size(), x.raw(), raw(&mut copy));
        copy
    }

    fn scatter(&self, view: &View, shape: &[usize], value: f32, x: &Tensor) -> Tensor {
        let mut result = self.fill(shape, value);
        layout::scatter(view, x.dtype().size(), x.raw(), raw(&mut result));
        result
    }

    fn concat(&self, axis: usize, parts: &[Tensor]) -> Tensor {
        let mut shape = parts[0].shape().to_vec();
        shape[axis] = parts.iter().map(|part| part.shape()[axis]).sum();
        let outer: usize = shape[..axis].iter().product();
        let runs: Vec<_> = parts
            .iter()
            .map(|part| (part.raw(), part.bytes() / outer.max(1)))
            .collect();
        let mut result = self.alloc(parts[0].dtype(), &shape);
        layout::concat(outer, &runs, raw(&mut result));
        result
    }

    fn gather(&self, axis: Axis, x: &Tensor, indices: &Tensor) -> Tensor {
        let mut result = self.alloc(x.dtype(), &[axis.outer, indices.len(), axis.inner]);
        layout::gather(
            axis,
            x.dtype().size(),
            x.raw(),
            indices.i64s(),
            raw(&mut result),
        );
        result
    }

    fn scatter_add(&self, axis: Axis, shape: &[usize], indices: &Tensor, grad: &Tensor) -> Tensor {
        let mut result = self.floats(shape);
        layout::scatter_add(axis, indices.i64s(), grad.f32s(), out(&mut result));
        result
    }

    fn random_mask(&self, shape: &[usize], keep: f32, seed: MaskSeed) -> Tensor {
        let mut mask = self.alloc(DType::Bool, shape);
        let samples = shape.first().copied().unwrap_or(1);
        reference::elementwise::random_mask(samples, keep, seed, raw(&mut mask));
        mask
    }

    fn random(&self, distribution: Distribution, shape: &[usize], seed: MaskSeed) -> Tensor {
        let mut result = self.floats(shape);
        let samples = shape.first().copied().unwrap_or(1);
        reference::elementwise::random(distribution, samples, seed, out(&mut result));
        result
    }

    fn apply_mask(&self, x: Tensor, mask: &Tensor, factor: f32) -> Tensor {
        let mut output = self.owned(x);
        elementwise::apply_mask(out(&mut output), mask.bools(), factor);
        output
    }

    fn cross_entropy(
        &self,
        axis: Axis,
        logits: &Tensor,
        targets: &Tensor,
        ignore: Option<i64>,
        gradient: bool,
    ) -> LossOutput {
        let mut gradient = gradient.then(|| self.floats(logits.shape()));
        let (sum, correct, counted) = loss::cross_entropy(
            axis,
            logits.f32s(),
            targets.i64s(),
            ignore,
            gradient.as_mut().map(out),
        );
        LossOutput {
            loss: (sum / counted.max(1) as f64) as f32,
            correct,
            targets: counted,
            gradient,
        }
    }

    fn likelihood(
        &self,
        axis: Axis,
        log_probabilities: &Tensor,
        targets: &Tensor,
        class_weights: Option<&Tensor>,
        ignored: Option<i64>,
    ) -> (Tensor, Tensor) {
        let [mut losses, mut weights] = [(); 2].map(|()| self.floats(targets.shape()));
        loss::likelihood(
            axis,
            log_probabilities.f32s(),
            targets.i64s(),
            class_weights.map(Tensor::f32s),
            ignored,
            out(&mut losses),
            out(&mut weights),
        );
        (losses, weights)
    }

    fn likelihood_backward(
        &self,
        axis: Axis,
        shape: &[usize],
        targets: &Tensor,
        factors: &Tensor,
    ) -> Tensor {
        let mut grad = self.floats(shape);
        loss::likelihood_backward(axis, targets.i64s(), factors.f32s(), out(&mut grad));
        grad
    }

    fn mean_squared_error(&self, output: &Tensor, target: &Tensor, gradient: bool) -> LossOutput {
        let mut gradient = gradient.then(|| self.floats(output.shape()));
        let sum = loss::squared_error(output.f32s(), target.f32s(), gradient.as_mut().map(out));
        LossOutput {
            loss: (sum / output.len() as f64) as f32,
            correct: 0,
            targets: output.len(),
            gradient,
        }
    }

    fn sgd(
        &self,
        step: SgdStep,
        weight: Tensor,
        grad: &Tensor,
        velocity: &mut Option<Tensor>,
    ) -> Tensor {
        let mut weight = self.owned(weight);
        let first = velocity.is_none();
        if first && step.momentum != 0.0 {
            *velocity = Some(self.floats(weight.shape()));
        }
        // A checkpoint may share the state; then the step writes a copy.
        *velocity = velocity.take().map(|v| self.owned(v));
        let velocity = velocity.as_mut().map(out);
        elementwise::sgd(step, out(&mut weight), grad.f32s(), velocity, first);
        weight
    }

    fn adam(
        &self,
        step: AdamStep,
        weight: Tensor,
        grad: &Tensor,
        moments: &mut Option<[Tensor; 2]>,
    ) -> Tensor {
        let mut weight = self.owned(weight);
        let [first, second] = match moments.take() {
            Some(moments) => moments.map(|m| self.owned(m)),
            None => [(); 2].map(|()| self.fill(weight.shape(), 0.0)),
        };
        let [first, second] = moments.insert([first, second]);
        elementwise::adam(step, out(&mut weight), grad.f32s(), out(first), out(second));
        weight
    }
}

/// As [`out`], as bytes.
fn raw(tensor: &mut Tensor) -> &mut [u8] {
    tensor.raw_mut().expect("a tensor with one owner")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_tensor_is_changed_part_by_part_in_a_copy() {
        let device = CpuDevice::new(1);
        for len in [3, 2 * PART + 1] {
            let make = || {
                let values = (0..5 * len).map(|i| (i % 17) as f32 - 8.0);
                Tensor::from_f32(&[5, len], values.collect::<Vec<_>>())
            };
            let axis = Axis::of(&[5, len], 1);
            let x = make();
            let check = |what: &str, f: &dyn Fn(Tensor) -> Tensor| {
                assert_eq!(f(x.clone()).f32s(), f(make()).f32s(), "{what} of {len}");
                assert_eq!(x.f32s(), make().f32s(), "{what} of {len} changed its input");
            };
            check("gelu", &|x| device.unary(Unary::Gelu, x));
            check("softmax", &|x| device.softmax(axis, x, false));
            let saved = device.softmax(axis, make(), false);
            check("gelu's gradient", &|x| {
                device.unary_backward(Unary::Gelu, &saved, x)
            });
            check("softmax's gradient", &|x| {
                device.softmax_backward(axis, &saved, x, false)
            });
        }
    }
}
