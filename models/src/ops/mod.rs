//! Operators: one small unit each, with its shape rule, forward and backward.
//!
//! There is no tape. An operator says which of its inputs and outputs its backward reads ([`Operator::saves`]);
//! whoever runs it keeps exactly those, so stash bytes are known. Weights are ordinary inputs: the
//! backward gets them again from the weight version its forward used, they are never part of a stash.

mod activation;
mod arithmetic;
mod attention;
mod axis_norm;
mod batch_norm;
mod cast;
mod compare;
mod concat;
mod constant;
mod conv;
mod conv_transpose;
mod dropout;
mod einsum;
mod expand;
mod function;
mod gather;
mod gather_elements;
mod gemm;
mod likelihood;
mod lrn;
mod matmul;
mod movement;
mod normalization;
mod pad;
mod pooling;
mod position;
mod prelu;
mod random;
mod recurrent;
mod reduce;
mod reshape;
mod resize;
mod select;
mod softmax;
mod spec;
mod split;
mod variadic;
mod views;
mod window;

use std::collections::BTreeMap;

use crate::device::Device;
use crate::device::params::Reduction;
use crate::init::Fan;
use crate::tensor::{DType, Tensor};

/// An attribute of an ONNX node.
#[derive(Clone, Debug)]
pub enum Attribute {
    /// FLOAT.
    Float(f32),
    /// INT.
    Int(i64),
    /// STRING.
    String(String),
    /// FLOATS.
    Floats(Vec<f32>),
    /// INTS.
    Ints(Vec<i64>),
    /// STRINGS.
    Strings(Vec<String>),
    /// TENSOR, on the host.
    Tensor(Tensor),
    /// A type that no supported operator takes (graphs, sparse tensors), by its ONNX name.
    Other(&'static str),
}

/// A node as it stands in the file, with everything known about its inputs.
#[derive(Debug)]
pub struct NodeSpec<'a> {
    /// Name, for error messages.
    pub name: &'a str,
    /// ONNX operator type, default domain.
    pub op_type: &'a str,
    /// Opset that the model imports for the default domain.
    pub opset: i64,
    /// Attributes by name.
    pub attributes: &'a BTreeMap<String, Attribute>,
    /// Types of the inputs; `None` where an optional input is omitted.
    pub inputs: &'a [Option<ValueType>],
    /// Values of those inputs that are constant (folded or non-trainable), on the host.
    pub constants: &'a [Option<Tensor>],
    /// Number of outputs that the node names.
    pub outputs: usize,
    /// Dropout and BatchNormalization that the file holds in inference form behave in training as in
    /// their training form.
    pub training_form: bool,
}

/// Why a node cannot become an operator.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
    /// No such operator here.
    #[error("node {node}: unsupported operator {op}")]
    Operator {
        /// Name of the node.
        node: String,
        /// ONNX operator type.
        op: String,
    },
    /// An attribute that is unknown, of another type, or has a value that is not supported.
    #[error("node {node} ({op}): attribute {attribute}: {problem}")]
    Attribute {
        /// Name of the node.
        node: String,
        /// ONNX operator type.
        op: String,
        /// Name of the attribute.
        attribute: String,
        /// What is wrong with it.
        problem: String,
    },
    /// An input that is missing, or whose type, shape or value is not supported.
    #[error("node {node} ({op}): input {input}: {problem}")]
    Input {
        /// Name of the node.
        node: String,
        /// ONNX operator type.
        op: String,
        /// Name of the input in the ONNX operator's definition.
        input: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Anything else that is wrong with the node.
    #[error("node {node} ({op}): {problem}")]
    Node {
        /// Name of the node.
        node: String,
        /// ONNX operator type.
        op: String,
        /// What is wrong.
        problem: String,
    },
}

/// Makes the operator for a node: ONNX opsets 7 to 23, default domain.
///
/// Everything that can be wrong with a node is found here, so that running it cannot fail.
pub fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.check_opset()?;
    match spec.op_type {
        "Conv" => conv::build(spec),
        "Gemm" => gemm::build(spec),
        "MatMul" => matmul::build(spec),
        "Relu" | "Sigmoid" | "Tanh" | "Clip" | "Gelu" | "LeakyRelu" | "ThresholdedRelu" | "Elu"
        | "Selu" | "Celu" | "HardSigmoid" | "HardSwish" | "Mish" | "Softplus" | "Softsign"
        | "Shrink" => activation::build(spec),
        "PRelu" => prelu::build(spec),
        "Add" | "Sub" | "Mul" | "Div" | "Pow" | "Mod" => arithmetic::build(spec),
        "Abs" | "Ceil" | "Cos" | "Erf" | "Exp" | "Floor" | "Log" | "Neg" | "Reciprocal"
        | "Round" | "Sign" | "Sin" | "Sqrt" => function::build(spec),
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" | "And" | "Or" | "Xor"
        | "Not" | "IsNaN" | "IsInf" => compare::build(spec),
        "MaxPool" | "AveragePool" | "GlobalAveragePool" | "GlobalMaxPool" => pooling::build(spec),
        "BatchNormalization" => batch_norm::build(spec),
        "LayerNormalization"
        | "RMSNormalization"
        | "InstanceNormalization"
        | "GroupNormalization" => normalization::build(spec),
        "SoftmaxCrossEntropyLoss" | "NegativeLogLikelihoodLoss" => likelihood::build(spec),
        "ConvTranspose" => conv_transpose::build(spec),
        "RandomUniform" | "RandomNormal" | "RandomUniformLike" | "RandomNormalLike"
        | "Bernoulli" => random::build(spec),
        "Resize" | "Upsample" => resize::build(spec),
        "Einsum" => einsum::build(spec),
        "MeanVarianceNormalization" | "LpNormalization" => axis_norm::build(spec),
        "Attention" => attention::build(spec),
        "LSTM" | "GRU" | "RNN" => recurrent::build(spec),
        "Dropout" => dropout::build(spec),
        "LRN" => lrn::build(spec),
        "Softmax" | "LogSoftmax" => softmax::build(spec),
        "Identity" | "Flatten" | "Reshape" | "Squeeze" | "Unsqueeze" => reshape::build(spec),
        "Transpose" | "Slice" | "DepthToSpace" | "SpaceToDepth" => movement::build(spec),
        "Pad" => pad::build(spec),
        "Concat" => concat::build(spec),
        "Gather" => gather::build(spec),
        "Cast" | "CastLike" => cast::build(spec),
        "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax"
        | "ReduceMean" | "ReduceMin" | "ReduceProd" | "ReduceSum" | "ReduceSumSquare" => {
            reduce::build(spec)
        }
        "ArgMax" | "ArgMin" | "CumSum" | "OneHot" => position::build(spec),
        "GatherElements" | "GatherND" => gather_elements::build(spec),
        "Sum" | "Mean" | "Max" | "Min" => variadic::build(spec),
        "Where" | "Trilu" => select::build(spec),
        "Expand" | "Tile" => expand::build(spec),
        "Split" => split::build(spec),
        "Constant" | "ConstantOfShape" | "Shape" | "Size" | "Range" | "EyeLike" => {
            constant::build(spec)
        }
        _ => Err(OpError::Operator {
            node: spec.name.into(),
            op: spec.op_type.into(),
        }),
    }
}

/// Type and shape of a value, known before anything runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueType {
    /// Element type.
    pub dtype: DType,
    /// Extent of each axis.
    pub shape: Vec<usize>,
}

/// What an operator's backward reads again, by position.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Saves {
    /// Positions of inputs.
    pub inputs: Vec<usize>,
    /// Positions of outputs.
    pub outputs: Vec<usize>,
}

/// Where and for whom an operator runs.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The worker's device.
    pub device: &'a dyn Device,
    /// Whether dropout drops and batch norm uses the minibatch's statistics.
    pub training: bool,
    /// Seed of the run; random masks depend on it, on the node and on the sample alone.
    pub seed: u64,
    /// Number of the minibatch's first sample since the start of the run.
    pub first_sample: u64,
}

/// The gradient of an operator's only output.
fn only(grads: Vec<Option<Tensor>>) -> Option<Tensor> {
    grads.into_iter().next().flatten()
}

/// The gradients of all inputs of an operator where only the first one has any.
fn of_first(gradient: Option<Tensor>, wanted: &[bool]) -> Vec<Option<Tensor>> {
    let mut gradients = vec![None; wanted.len()];
    gradients[0] = gradient;
    gradients
}

/// Draws a gradient together to the shape of an input that was broadcast.
fn sum_to(device: &dyn Device, grad: Tensor, shape: &[usize]) -> Tensor {
    let axes = crate::shape::broadcast_axes(shape, grad.shape());
    if axes.is_empty() {
        return grad.into_shape(shape);
    }
    device
        .reduce(Reduction::Sum, &grad, &axes)
        .into_shape(shape)
}

/// What a forward gives.
#[derive(Debug, Default)]
pub struct Forward {
    /// One per ONNX output, those included that the node leaves unnamed.
    pub outputs: Vec<Tensor>,
    /// What the backward needs beyond inputs and outputs: masks, indices, statistics.
    pub extra: Vec<Tensor>,
}

impl Forward {
    /// One output and nothing else to keep.
    fn of(output: Tensor) -> Self {
        Forward {
            outputs: vec![output],
            extra: vec![],
        }
    }
}

/// What a backward gets to see of its forward.
#[derive(Debug, Default)]
pub struct Saved {
    /// As long as the node's inputs; present where [`Saves::inputs`] said so, weights included.
    pub inputs: Vec<Option<Tensor>>,
    /// As long as the node's outputs; present where [`Saves::outputs`] said so.
    pub outputs: Vec<Option<Tensor>>,
    /// [`Forward::extra`] as the forward gave it.
    pub extra: Vec<Tensor>,
}

impl Saved {
    /// An input that [`Saves`] names.
    fn input(&self, position: usize) -> &Tensor {
        self.inputs[position]
            .as_ref()
            .expect("an input that is saved")
    }

    /// An output that [`Saves`] names.
    fn output(&self, position: usize) -> &Tensor {
        self.outputs[position]
            .as_ref()
            .expect("an output that is saved")
    }
}

/// One operator with its attributes resolved and its input types known.
///
/// Tensors are passed by value: an operator may write into an argument that nobody else holds
/// ([`Tensor::is_unique`]) instead of allocating its result.
pub trait Operator: std::fmt::Debug + Send + Sync {
    /// The ONNX operator type.
    fn name(&self) -> &'static str;

    /// Types of the outputs. The operator was made for inputs of known types, so this cannot fail.
    fn outputs(&self) -> &[ValueType];

    /// Positions of inputs that hold trainable weights when they are float initializers.
    fn weights(&self) -> &[usize] {
        &[]
    }

    /// How many terms an input weighs together and how many results each of its numbers reaches, where the
    /// input is the matrix of a linear map: what an initialisation goes by.
    fn fan(&self, _input: usize) -> Option<Fan> {
        None
    }

    /// Where an input's integers pick rows: how many there are. Numbers run from minus that many to one less.
    fn index_limit(&self, _input: usize) -> Option<usize> {
        None
    }

    /// What the backward reads again: nothing, if an operator does not say otherwise.
    fn saves(&self) -> Saves {
        Saves::default()
    }

    /// Whether the outputs are drawn at random, so that they are no constants even where all inputs are.
    fn is_random(&self) -> bool {
        false
    }

    /// Outputs that replace an input of the same shape after a training forward, as (output, input):
    /// the running statistics of a batch norm.
    fn state_updates(&self) -> &[(usize, usize)] {
        &[]
    }

    /// What a training forward keeps in place of the `old` value of a running statistic, given the output that
    /// [`Self::state_updates`] names.
    fn kept_state(
        &self,
        _cx: &Context<'_>,
        _output: usize,
        value: Tensor,
        _old: &Tensor,
    ) -> Tensor {
        value
    }

    /// Runs forward. `inputs` are as the node lists them; an omitted optional input is `None`.
    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward;

    /// Gradients of the inputs from the gradients of the outputs.
    ///
    /// `grads` has one entry per output (`None`: nothing flows back through it); `wanted` one flag per
    /// input: others may be answered with `None` without being computed.
    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>>;
}
