//! What the primitives are told: sizes, strides, windows.

/// `count` products of matrices: `C[i] = alpha * op(A[i]) * op(B[i]) + beta * C[i]`, all row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemm {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the inner products.
    pub k: usize,
    /// A is stored `[k, m]` instead of `[m, k]`.
    pub transpose_a: bool,
    /// B is stored `[n, k]` instead of `[k, n]`.
    pub transpose_b: bool,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of what C holds before.
    pub beta: f32,
    /// Where A and B of each product begin, in elements; the C of each product follows the one before.
    pub offsets: Vec<(usize, usize)>,
}

impl Gemm {
    /// One product with neither matrix transposed and C overwritten.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Gemm {
            m,
            n,
            k,
            transpose_a: false,
            transpose_b: false,
            alpha: 1.0,
            beta: 0.0,
            offsets: vec![(0, 0)],
        }
    }
}

/// A window that slides over two axes; one-dimensional operators have an axis of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Extent of the input.
    pub input: [usize; 2],
    /// Extent of the output.
    pub output: [usize; 2],
    /// Extent of the kernel.
    pub kernel: [usize; 2],
    /// Steps between neighbouring outputs.
    pub strides: [usize; 2],
    /// Steps between neighbouring kernel elements.
    pub dilations: [usize; 2],
    /// Padding before the first element of each axis. Padding after the last is what the extents imply.
    pub pads_begin: [usize; 2],
    /// Padding after the last element of each axis, as the node declares it.
    pub pads_end: [usize; 2],
}

/// A convolution: input `[batch, in_channels, h, w]`, filter `[out_channels, in_channels / groups, kh, kw]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Samples.
    pub batch: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output.
    pub out_channels: usize,
    /// Groups that both channel counts are split into.
    pub groups: usize,
    /// Sliding window.
    pub window: Window,
}

/// A pooling of `planes` = batch x channels planes, each of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pool {
    /// Batch times channels.
    pub planes: usize,
    /// Sliding window.
    pub window: Window,
    /// Averages divide by the padding too, but not by what ceil mode adds beyond it.
    pub count_include_pad: bool,
}

/// A tensor seen as `[outer, axis, inner]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Axis {
    /// Product of the axes before.
    pub outer: usize,
    /// Extent of the axis, or product of neighbouring ones.
    pub len: usize,
    /// Product of the axes after.
    pub inner: usize,
}

impl Axis {
    /// The view around `axis` of `shape`.
    pub fn of(shape: &[usize], axis: usize) -> Self {
        Axis {
            outer: shape[..axis].iter().product(),
            len: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }
}

/// Normalisation across channels (ONNX LRN) of `[batch, channels, spatial]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lrn {
    /// Samples.
    pub batch: usize,
    /// Channels.
    pub channels: usize,
    /// Product of the spatial axes.
    pub spatial: usize,
    /// Channels that are summed.
    pub size: usize,
    /// Factor of the sum of squares, before division by `size`.
    pub alpha: f32,
    /// Exponent.
    pub beta: f32,
    /// Constant in the base.
    pub bias: f32,
}

/// A strided selection from a tensor: element `[i, j, ..]` lies at `offset + i * strides[0] + ..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Elements between neighbours along each axis; 0 repeats, negative runs backwards.
    pub strides: Vec<isize>,
    /// Element where the selection begins.
    pub offset: usize,
}

/// Element-wise functions of one argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unary {
    /// max(x, 0)
    Relu,
    /// 1 / (1 + exp(-x))
    Sigmoid,
    /// tanh(x)
    Tanh,
    /// min(max(x, low), high)
    Clip {
        /// Smallest result.
        low: f32,
        /// Largest result.
        high: f32,
    },
    /// factor * x
    Scale(f32),
}

/// Element-wise functions of two arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    /// a + b
    Add,
    /// a - b
    Sub,
    /// a * b
    Mul,
    /// a / b; integers round toward zero
    Div,
}

/// How values are drawn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
}

/// Which random numbers a mask is made of; see [`crate::random`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskSeed {
    /// Seed of the run.
    pub seed: u64,
    /// The node, by a number that does not depend on how the graph is cut.
    pub node: u64,
    /// Number of the first sample; samples lie along axis 0.
    pub first_sample: u64,
}

/// One SGD step (PyTorch's `torch.optim.SGD`, dampening 0).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SgdStep {
    /// Learning rate.
    pub lr: f32,
    /// Factor of the velocity; 0: none is kept.
    pub momentum: f32,
    /// Factor of the weight that is added to the gradient.
    pub weight_decay: f32,
    /// Nesterov momentum.
    pub nesterov: bool,
}

/// One Adam step (PyTorch's `torch.optim.Adam`; with `decoupled`, `AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamStep {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the mean gradient.
    pub beta1: f32,
    /// Decay of the mean squared gradient.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// The weight decays by itself instead of through the gradient.
    pub decoupled: bool,
    /// Number of this step, from 1.
    pub step: u64,
}
