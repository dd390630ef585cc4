//! Devices: the small set of primitives that operators are written over.
//!
//! A primitive takes tensors whose shapes its parameters describe and gives new ones from the device's
//! pool. Tensors taken by value are overwritten when nobody else holds them. Primitives do not check
//! what the shape rules of `ops` have established: a wrong shape here is a fault of this crate.

pub mod cpu;
mod cuda;
pub mod params;
pub mod pool;

use std::fmt;
use std::sync::Arc;

use crate::tensor::{DType, Tensor};
use params::{
    AdamStep, Axis, Binary, Comparison, Conv, CumulativeSum, Distribution, Extreme, Gemm,
    LayerNorm, Lrn, LstmCell, MaskSeed, Pool, Reduction, SgdStep, Unary, View,
};
use pool::Memory;

/// Why a device cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The name means nothing.
    #[error("--device {0}: no such device; use auto, cpu or cuda:N (N from 0)")]
    Unknown(String),
    /// No driver on this machine.
    #[error(
        "--device {0}: no CUDA driver found (libcuda.so.1); install the NVIDIA driver or use --device cpu"
    )]
    NoDriver(String),
    /// A driver, but nothing to drive it.
    #[error("--device {0}: this version computes on the CPU only; use --device cpu")]
    NotSupported(String),
    /// Threads are counted from 1.
    #[error("--threads 0: a device needs at least one thread")]
    NoThreads,
}

/// Opens a device: `auto`, `cpu` or `cuda:N`. A CPU device computes on `threads` cores.
pub fn open(name: &str, threads: usize) -> Result<Arc<dyn Device>, DeviceError> {
    if threads == 0 {
        return Err(DeviceError::NoThreads);
    }
    match name {
        "cpu" | "auto" => Ok(Arc::new(cpu::CpuDevice::new(threads))),
        _ => match name.strip_prefix("cuda:").map(str::parse::<usize>) {
            Some(Ok(_)) if cuda::driver_present() => Err(DeviceError::NotSupported(name.into())),
            Some(Ok(_)) => Err(DeviceError::NoDriver(name.into())),
            _ => Err(DeviceError::Unknown(name.into())),
        },
    }
}

/// What batch norm gives in training.
#[derive(Debug)]
pub struct BatchNormForward {
    /// Normalised, scaled and shifted input.
    pub output: Tensor,
    /// Mean of each channel over the minibatch.
    pub mean: Tensor,
    /// 1 / sqrt(variance + eps) of each channel, with the biased variance.
    pub inv_std: Tensor,
    /// `momentum * running_mean + (1 - momentum) * mean`.
    pub running_mean: Tensor,
    /// As `running_mean`, of the biased variance, as ONNX defines it.
    pub running_variance: Tensor,
}

/// Gradients of batch norm.
#[derive(Debug)]
pub struct BatchNormBackward {
    /// Of the input.
    pub input: Tensor,
    /// Of the scale.
    pub scale: Tensor,
    /// Of the shift.
    pub bias: Tensor,
}

/// What layer norm gives.
#[derive(Debug)]
pub struct LayerNormForward {
    /// Normalised, scaled and shifted input.
    pub output: Tensor,
    /// Mean of each row; 0 where it is not subtracted.
    pub mean: Tensor,
    /// 1 / sqrt(variance + eps) of each row, with the biased variance (not centred: the mean square).
    pub inv_std: Tensor,
}

/// Gradients of layer norm.
#[derive(Debug)]
pub struct LayerNormBackward {
    /// Of the input.
    pub input: Tensor,
    /// Of scale and shift, `[len]`, where there is a scale.
    pub parameters: Option<(Tensor, Tensor)>,
}

/// What a step of an LSTM gives.
#[derive(Debug)]
pub struct LstmStep {
    /// Gates after their functions.
    pub gates: Tensor,
    /// Cell state, `[batch, hidden]`.
    pub cell: Tensor,
    /// Hidden state, `[batch, hidden]`.
    pub hidden: Tensor,
}

/// What a loss gives.
#[derive(Debug)]
pub struct LossOutput {
    /// Mean over the targets that count (cross-entropy) or elements (MSE); 0 where none does.
    pub loss: f32,
    /// Targets whose class has the largest output (0 where that has no meaning).
    pub correct: usize,
    /// Targets that count, or elements.
    pub targets: usize,
    /// Gradient of the mean loss, if asked for.
    pub gradient: Option<Tensor>,
}

/// A model that no device of this size can train.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "one training step takes at least {needed} bytes, {device} has {capacity}: use a smaller --batch, or cut the \
     model over more machines"
)]
pub struct TooLarge {
    /// Name of the device.
    device: String,
    /// A lower bound of what training takes.
    needed: u64,
    /// What there is.
    capacity: u64,
}

impl dyn Device {
    /// Whether `bytes` have a place here, as far as the system tells.
    ///
    /// # Errors
    /// When they certainly have not.
    pub fn check_room(&self, bytes: u64) -> Result<(), TooLarge> {
        match self.capacity_bytes() {
            Some(capacity) if bytes > capacity => Err(TooLarge {
                device: self.name().to_owned(),
                needed: bytes,
                capacity,
            }),
            _ => Ok(()),
        }
    }
}

/// A device that runs primitives.
pub trait Device: fmt::Debug + Send + Sync {
    /// The name that opens it.
    fn name(&self) -> &str;

    /// Cores that it computes on (1 for an accelerator).
    fn threads(&self) -> usize;

    /// Bytes held for tensors.
    fn memory(&self) -> Memory;

    /// Bytes that there are for tensors, where the system tells.
    fn capacity_bytes(&self) -> Option<u64>;

    /// Lets `peak_bytes` start again from what is alive now.
    fn reset_peak(&self);

    /// A tensor with unspecified contents.
    fn alloc(&self, dtype: DType, shape: &[usize]) -> Tensor;

    /// A float tensor that holds one value everywhere.
    fn fill(&self, shape: &[usize], value: f32) -> Tensor;

    /// A copy in this device's memory, its only owner.
    fn upload(&self, host: &Tensor) -> Tensor;

    /// The tensor on the host; may share memory.
    fn download(&self, tensor: &Tensor) -> Tensor;

    /// Batched matrix product. `c` is read and written when `beta` is not 0, else it must be `None`.
    /// Result: `offsets.len() * m * n` elements, shaped `[offsets.len(), m, n]`.
    fn gemm(&self, p: &Gemm, a: &Tensor, b: &Tensor, c: Option<Tensor>) -> Tensor;

    /// Convolution; result `[batch, out_channels, oh, ow]`.
    fn conv(&self, p: &Conv, input: &Tensor, filter: &Tensor, bias: Option<&Tensor>) -> Tensor;

    /// Gradient of a convolution's input, `[batch, in_channels, h, w]`.
    fn conv_backward_data(&self, p: &Conv, filter: &Tensor, grad: &Tensor) -> Tensor;

    /// Gradient of a convolution's filter.
    fn conv_backward_filter(&self, p: &Conv, input: &Tensor, grad: &Tensor) -> Tensor;

    /// Maximum over windows and, if `positions`, where in its input plane each was found (int32).
    /// The first one counts among equals; NaN wins.
    fn max_pool(&self, p: &Pool, input: &Tensor, positions: bool) -> (Tensor, Option<Tensor>);

    /// Gradient of a max pool's input from the positions its forward gave.
    fn max_pool_backward(&self, p: &Pool, grad: &Tensor, positions: &Tensor) -> Tensor;

    /// Average over windows.
    fn average_pool(&self, p: &Pool, input: &Tensor) -> Tensor;

    /// Gradient of an average pool's input.
    fn average_pool_backward(&self, p: &Pool, grad: &Tensor) -> Tensor;

    /// Batch norm with the statistics of the minibatch; `x` is `[batch, channels, spatial]` as `axis`
    /// says (outer, len, inner).
    #[allow(clippy::too_many_arguments)]
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
    ) -> BatchNormForward;

    /// Gradients of [`Self::batch_norm`].
    fn batch_norm_backward(
        &self,
        axis: Axis,
        x: &Tensor,
        scale: &Tensor,
        mean: &Tensor,
        inv_std: &Tensor,
        grad: Tensor,
    ) -> BatchNormBackward;

    /// Batch norm with given statistics.
    #[allow(clippy::too_many_arguments)]
    fn batch_norm_inference(
        &self,
        axis: Axis,
        x: Tensor,
        scale: &Tensor,
        bias: &Tensor,
        mean: &Tensor,
        variance: &Tensor,
        eps: f32,
    ) -> Tensor;

    /// Gradients of [`Self::batch_norm_inference`].
    #[allow(clippy::too_many_arguments)]
    fn batch_norm_inference_backward(
        &self,
        axis: Axis,
        x: &Tensor,
        scale: &Tensor,
        mean: &Tensor,
        variance: &Tensor,
        eps: f32,
        grad: Tensor,
    ) -> BatchNormBackward;

    /// Layer norm: `(x - mean) * inv_std * scale + bias`, with scale and bias of `len` elements.
    fn layer_norm(
        &self,
        p: &LayerNorm,
        x: &Tensor,
        scale: Option<&Tensor>,
        bias: Option<&Tensor>,
    ) -> LayerNormForward;

    /// Gradients of [`Self::layer_norm`].
    fn layer_norm_backward(
        &self,
        p: &LayerNorm,
        x: &Tensor,
        scale: Option<&Tensor>,
        mean: &Tensor,
        inv_std: &Tensor,
        grad: Tensor,
    ) -> LayerNormBackward;

    /// One step of an LSTM from its gates before their functions and the cell state before it: `cell' = forget *
    /// cell + input * gate; hidden = output * h(cell')`. `peepholes` (`[3 * hidden]`, input, output, forget)
    /// let the gates see the cell state, the output gate the new one.
    fn lstm_cell(
        &self,
        p: &LstmCell,
        gates: Tensor,
        cell: &Tensor,
        peepholes: Option<&Tensor>,
    ) -> LstmStep;

    /// Gradients of [`Self::lstm_cell`]: of the gates before their functions and of the cell state before the
    /// step, from the gates after their functions, the cell state before and after the step, and the gradients
    /// of both states after it.
    fn lstm_cell_backward(
        &self,
        p: &LstmCell,
        gates: Tensor,
        cells: [&Tensor; 2],
        peepholes: Option<&Tensor>,
        grad_hidden: &Tensor,
        grad_cell: Tensor,
    ) -> (Tensor, Tensor);

    /// Softmax (`log`: its logarithm) along the axis.
    fn softmax(&self, axis: Axis, x: Tensor, log: bool) -> Tensor;

    /// Gradient of [`Self::softmax`] from its output.
    fn softmax_backward(&self, axis: Axis, output: &Tensor, grad: Tensor, log: bool) -> Tensor;

    /// Local response normalisation; also gives the base of the power.
    fn lrn(&self, p: &Lrn, x: &Tensor) -> (Tensor, Tensor);

    /// Gradient of [`Self::lrn`] from its input and the base.
    fn lrn_backward(&self, p: &Lrn, x: &Tensor, base: &Tensor, grad: &Tensor) -> Tensor;

    /// Element-wise function.
    fn unary(&self, op: Unary, x: Tensor) -> Tensor;

    /// Gradient of [`Self::unary`]. `saved` is the output or the input, as [`Unary::saves_output`] says.
    fn unary_backward(&self, op: Unary, saved: &Tensor, grad: Tensor) -> Tensor;

    /// Element-wise function with numpy broadcasting; float or int64.
    fn binary(&self, op: Binary, a: Tensor, b: Tensor) -> Tensor;

    /// Compares element by element with numpy broadcasting: bool. Truth values are compared with each other, floats
    /// with floats and int64 with int64.
    fn compare(&self, op: Comparison, a: &Tensor, b: &Tensor) -> Tensor;

    /// Elements of `a` where `condition` is true, else of `b`, with numpy broadcasting; both of one type.
    fn select(&self, condition: &Tensor, a: &Tensor, b: &Tensor) -> Tensor;

    /// Another element type: toward zero from float to int64; what is not 0 is true.
    fn cast(&self, x: Tensor, dtype: DType) -> Tensor;

    /// Reduces a tensor over `axes` (sorted, distinct); they stay as axes of extent 1. Float, or int64 but for the
    /// mean; overflow wraps.
    fn reduce(&self, reduction: Reduction, x: &Tensor, axes: &[usize]) -> Tensor;

    /// Gradient of [`Self::reduce`] by Max, Min or Prod from its input, its output and the output's gradient. Equal
    /// extremes share the gradient.
    fn reduce_backward(
        &self,
        reduction: Reduction,
        x: &Tensor,
        output: &Tensor,
        grad: &Tensor,
    ) -> Tensor;

    /// Where along the axis of a float or int64 tensor its extreme lies, `[outer, inner]` of int64.
    fn arg_extreme(&self, axis: Axis, x: &Tensor, extreme: Extreme) -> Tensor;

    /// Sums of a float or int64 tensor along the axis up to each element.
    fn cumulative_sum(&self, axis: Axis, x: &Tensor, p: CumulativeSum) -> Tensor;

    /// Picks a strided selection into a contiguous tensor: transpose, slice, broadcast.
    fn copy(&self, view: &View, x: &Tensor) -> Tensor;

    /// Writes `x` into a strided selection of a tensor of `shape` that holds `value` elsewhere: pad, and
    /// the gradient of a slice. Float only; a selection must not name an element twice.
    fn scatter(&self, view: &View, shape: &[usize], value: f32, x: &Tensor) -> Tensor;

    /// Concatenates along an axis.
    fn concat(&self, axis: usize, parts: &[Tensor]) -> Tensor;

    /// Rows of `[outer, len, inner]` by index along the axis: `[outer, indices, inner]`. Negative indices count from the end.
    fn gather(&self, axis: Axis, x: &Tensor, indices: &Tensor) -> Tensor;

    /// Gradient of [`Self::gather`]: sums rows into `[outer, len, inner]` of the given shape.
    fn scatter_add(&self, axis: Axis, shape: &[usize], indices: &Tensor, grad: &Tensor) -> Tensor;

    /// A bool mask that is 1 with probability `keep`, the same for a sample whatever its minibatch.
    fn random_mask(&self, shape: &[usize], keep: f32, seed: MaskSeed) -> Tensor;

    /// Random floats, the same for a sample whatever its minibatch.
    fn random(&self, distribution: Distribution, shape: &[usize], seed: MaskSeed) -> Tensor;

    /// `x * factor` where the mask is 1, else 0.
    fn apply_mask(&self, x: Tensor, mask: &Tensor, factor: f32) -> Tensor;

    /// Mean cross-entropy over rows `[outer, classes, inner]` of logits; targets are int64 `[outer, inner]`
    /// in `0..classes`, or `ignore`, which does not count.
    fn cross_entropy(
        &self,
        axis: Axis,
        logits: &Tensor,
        targets: &Tensor,
        ignore: Option<i64>,
        gradient: bool,
    ) -> LossOutput;

    /// Negative log-likelihood of each target, int64 `[outer, inner]`, under log-probabilities `[outer, classes,
    /// inner]`, times the weight of its class; and these weights. Both are 0 for a target that is `ignored`, and
    /// NaN for any other outside `0..classes`.
    fn likelihood(
        &self,
        axis: Axis,
        log_probabilities: &Tensor,
        targets: &Tensor,
        class_weights: Option<&Tensor>,
        ignored: Option<i64>,
    ) -> (Tensor, Tensor);

    /// Gradient of log-probabilities of `shape` in [`Self::likelihood`] from one factor per target, the gradient of
    /// its loss times its weight.
    fn likelihood_backward(
        &self,
        axis: Axis,
        shape: &[usize],
        targets: &Tensor,
        factors: &Tensor,
    ) -> Tensor;

    /// Mean squared error over all elements.
    fn mean_squared_error(&self, output: &Tensor, target: &Tensor, gradient: bool) -> LossOutput;

    /// One SGD step: the new weight, in the old one's memory when nobody else holds it. `velocity` is
    /// `None` before a first step with momentum.
    fn sgd(
        &self,
        step: SgdStep,
        weight: Tensor,
        grad: &Tensor,
        velocity: &mut Option<Tensor>,
    ) -> Tensor;

    /// One Adam step; `moments` are the first and second one, `None` before the first step.
    fn adam(
        &self,
        step: AdamStep,
        weight: Tensor,
        grad: &Tensor,
        moments: &mut Option<[Tensor; 2]>,
    ) -> Tensor;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_open_nothing_say_what_does() {
        let message = |name| open(name, 1).unwrap_err().to_string();
        assert!(message("gpu").contains("auto, cpu or cuda:N"));
        assert!(message("cuda:x").contains("auto, cpu or cuda:N"));
        assert!(message("cuda:0").contains("--device cpu"));
        assert!(!message("cuda:0").contains('\n'));
        assert!(open("cpu", 0).is_err());
        assert_eq!(open("auto", 2).unwrap().threads(), 2);
    }
}
