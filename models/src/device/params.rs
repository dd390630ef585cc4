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

/// Normalisation of each row of `[rows, len]` by its own statistics.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerNorm {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub len: usize,
    /// Added to the variance.
    pub eps: f32,
    /// Subtracts the mean first; without, a row is divided by its root mean square.
    pub centered: bool,
}

/// One step of an LSTM: gates `[batch, 4 * hidden]` in ONNX's order input, output, forget, cell.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LstmCell {
    /// Samples.
    pub batch: usize,
    /// Elements of the hidden state.
    pub hidden: usize,
    /// Functions of the gates (input, output, forget), of the cell gate, and of the cell state. They must be
    /// such that the output tells the slope: see [`Unary::slope_at_output`].
    pub activations: [Unary; 3],
    /// Bound on the size of what the gates' functions see; may be infinite.
    pub clip: f32,
    /// The forget gate is 1 minus the input gate.
    pub coupled: bool,
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
    /// |x|
    Abs,
    /// e^x
    Exp,
    /// ln(x)
    Log,
    /// sqrt(x)
    Sqrt,
    /// 1 / x
    Reciprocal,
    /// Error function
    Erf,
    /// sin(x)
    Sin,
    /// cos(x)
    Cos,
    /// -1, 0 or 1
    Sign,
    /// Rounded down
    Floor,
    /// Rounded up
    Ceil,
    /// Rounded to the nearest integer, halves to the even one
    Round,
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
    /// x * Phi(x), with the distribution function Phi of the standard normal distribution
    Gelu,
    /// Gelu with 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) for Phi(x)
    GeluTanh,
    /// x, times the factor where it is negative
    LeakyRelu(f32),
    /// scale * x where x > 0, else factor * (exp(rate * x) - 1): Elu, Selu and Celu
    Elu {
        /// Factor of positive values.
        scale: f32,
        /// Limit for negative values, with the sign turned.
        factor: f32,
        /// Factor in the exponent.
        rate: f32,
    },
    /// x where it is above the threshold, else 0
    Threshold(f32),
    /// min(max(alpha * x + beta, 0), 1)
    HardSigmoid {
        /// Slope.
        alpha: f32,
        /// Value at 0.
        beta: f32,
    },
    /// x * min(max(x / 6 + 0.5, 0), 1)
    HardSwish,
    /// x * tanh(softplus(x))
    Mish,
    /// ln(1 + exp(x))
    Softplus,
    /// x / (1 + |x|)
    Softsign,
    /// x - bias above lambda, x + bias below -lambda, else 0
    Shrink {
        /// Half width of what becomes 0.
        lambda: f32,
        /// How far the rest is moved toward 0.
        bias: f32,
    },
    /// alpha * x + beta
    Affine {
        /// Slope.
        alpha: f32,
        /// Value at 0.
        beta: f32,
    },
    /// alpha * tanh(beta * x)
    ScaledTanh {
        /// Largest value.
        alpha: f32,
        /// Factor of the argument.
        beta: f32,
    },
}

impl Unary {
    /// Whether the gradient is made from the output instead of the input.
    pub fn saves_output(self) -> bool {
        matches!(
            self,
            Unary::Relu
                | Unary::Sigmoid
                | Unary::Tanh
                | Unary::Exp
                | Unary::Sqrt
                | Unary::Reciprocal
        )
    }

    /// The derivative where the function has the value `y`, for the functions that a recurrent cell may use;
    /// `None` for others.
    #[inline(always)]
    pub fn slope_at_output(self, y: f32) -> Option<f32> {
        let pick = |condition: bool, slope: f32| if condition { slope } else { 0.0 };
        Some(match self {
            Unary::Relu => pick(y > 0.0, 1.0),
            Unary::Sigmoid => y * (1.0 - y),
            Unary::Tanh => 1.0 - y * y,
            Unary::LeakyRelu(factor) if factor >= 0.0 => {
                if y > 0.0 {
                    1.0
                } else {
                    factor
                }
            }
            Unary::Elu {
                scale,
                factor,
                rate,
            } if scale > 0.0 && factor >= 0.0 => {
                if y > 0.0 {
                    scale
                } else {
                    rate * (y + factor)
                }
            }
            Unary::Threshold(threshold) if threshold >= 0.0 => pick(y > threshold, 1.0),
            Unary::HardSigmoid { alpha, .. } => pick(y > 0.0 && y < 1.0, alpha),
            Unary::Softplus => 1.0 - (-y).exp(),
            Unary::Softsign => (1.0 - y.abs()) * (1.0 - y.abs()),
            Unary::Affine { alpha, .. } => alpha,
            Unary::ScaledTanh { alpha, beta } if alpha != 0.0 => beta * (alpha - y * y / alpha),
            _ => return None,
        })
    }
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
    /// a to the power of b; an integer to a negative power is rounded toward zero
    Pow,
    /// The larger one; NaN where one of them is
    Max,
    /// The smaller one; NaN where one of them is
    Min,
    /// Remainder with the sign of b, as in Python
    Mod,
    /// Remainder with the sign of a, as in C
    Fmod,
}

/// Comparisons of two arguments, whose results are truth values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    /// a = b
    Equal,
    /// a < b
    Less,
    /// a <= b
    LessOrEqual,
    /// Both, of truth values
    And,
    /// At least one, of truth values
    Or,
    /// Exactly one, of truth values
    Xor,
}

/// How values are drawn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Largest value; NaN if there is one.
    Max,
    /// Smallest value; NaN if there is one.
    Min,
    /// Product.
    Prod,
}

/// Which of the elements along an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extreme {
    /// The largest instead of the smallest.
    pub largest: bool,
    /// The last one among equals instead of the first.
    pub last: bool,
}

/// What a sum up to an element holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CumulativeSum {
    /// Not the element itself.
    pub exclusive: bool,
    /// The elements behind it instead of those before it.
    pub reverse: bool,
}

/// Distributions of random floats.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Distribution {
    /// Uniform in `[low, high)`.
    Uniform {
        /// Smallest value.
        low: f32,
        /// Bound that is not reached.
        high: f32,
    },
    /// Normal.
    Normal {
        /// Mean.
        mean: f32,
        /// Standard deviation.
        deviation: f32,
    },
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
