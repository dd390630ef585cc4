//! Types of all values, constants, and which constants are weights, by building operators in order.
//!
//! Whether an initializer is a weight shows when an operator says so; until then it is a constant that
//! may have been folded through a transpose. So the walk is repeated with what it found until it finds
//! nothing new: then weights are values of their own and everything computed from them is a node.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::nodes::{Branch, RawNode};
use super::rebatch::Resized;
use super::weights::Source;
use super::{BuildOptions, GraphErrorKind};
use crate::device::Device;
use crate::loss::Classes;
use crate::onnx::{Model, graph_dtype};
use crate::ops::{self, Attribute, Context, NodeSpec, OpError, Operator, ValueType};
use crate::tensor::{DType, Tensor};

/// Largest constant that is computed while a graph is built.
const MAX_CONSTANT_BYTES: usize = 1 << 32;

/// What a value is.
#[derive(Clone, Debug)]
pub(super) enum Kind {
    Input,
    Parameter(Tensor),
    State(Tensor),
    /// Folded.
    Constant(Tensor, Source),
    Computed,
}

#[derive(Clone, Debug)]
pub(super) struct DraftValue {
    pub name: String,
    pub ty: ValueType,
    pub kind: Kind,
    /// A parameter, or a float computed from one.
    pub needs_gradient: bool,
    /// Data, or computed from it.
    pub follows_data: bool,
}

/// A node that has to run; values by their position in [`Draft::values`].
#[derive(Debug)]
pub(super) struct DraftNode {
    pub name: String,
    pub op: Arc<dyn Operator>,
    pub inputs: Vec<Option<usize>>,
    pub outputs: Vec<usize>,
    /// Whether it is a softmax over the classes.
    pub softmax: bool,
}

/// The graph before dead nodes are dropped and layers are found.
#[derive(Debug, Default)]
pub(super) struct Draft {
    pub values: Vec<DraftValue>,
    pub nodes: Vec<DraftNode>,
    names: HashMap<String, usize>,
    /// Leaves that stand in a function or a branch.
    pub inner: HashSet<String>,
    /// Constants that follow from the shapes of data.
    pub sized: HashSet<usize>,
}

impl Draft {
    /// The value that the file calls by this name; nodes that only pass a value on share it.
    pub fn named(&self, name: &str) -> Option<usize> {
        self.names.get(name).copied()
    }

    fn shape_of(&self, name: &str) -> Option<&[usize]> {
        self.named(name)
            .map(|index| self.values[index].ty.shape.as_slice())
    }
}

/// What a walk finds out about values and the next one goes by: above all the role that operators give them.
#[derive(Clone, Debug, Default)]
pub(super) struct Roles {
    pub(super) parameters: BTreeSet<String>,
    pub(super) states: BTreeSet<String>,
    /// Values that need another extent than the exported one beside what is fed to the model.
    pub(super) wanted: BTreeMap<String, Resized>,
}

impl Roles {
    fn len(&self) -> usize {
        self.parameters.len() + self.states.len() + self.wanted.len()
    }
}

/// A model with the batch size that it was exported with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exported<'a> {
    pub draft: &'a Draft,
    pub batch: usize,
    /// The batch size asked for.
    pub requested: usize,
}

impl Exported<'_> {
    /// The exported shape of a value.
    pub fn shape_of(&self, name: &str) -> Option<&[usize]> {
        self.draft.shape_of(name)
    }
}

/// What inference works on.
pub(super) struct Inference<'a> {
    pub model: &'a Model,
    pub nodes: &'a [RawNode],
    pub options: &'a BuildOptions,
    /// Runs operators on constants.
    pub device: &'a dyn Device,
    /// The exported model, if another batch size than its own is asked for.
    pub exported: Option<Exported<'a>>,
    /// Initializers by the outputs of the Identity nodes that pass them on.
    pub aliases: &'a HashMap<&'a str, &'a str>,
}

impl Inference<'_> {
    /// Types everything, given the types of the data inputs.
    pub fn run(&self, inputs: &[(&str, ValueType)]) -> Result<Draft, GraphErrorKind> {
        let mut roles = Roles::default();
        loop {
            let mut walk = Walk {
                inference: self,
                roles: &roles,
                draft: Draft::default(),
                found: roles.clone(),
            };
            for (name, ty) in inputs {
                walk.add(name, ty.clone(), Kind::Input);
            }
            let end = self.nodes.iter().try_for_each(|node| walk.node(node));
            let Walk { draft, found, .. } = walk;
            match end {
                _ if found.len() > roles.len() => roles = found,
                Ok(()) => return Ok(draft),
                Err(error) => return Err(error),
            }
        }
    }
}

/// One pass over the nodes.
pub(super) struct Walk<'a> {
    pub inference: &'a Inference<'a>,
    pub roles: &'a Roles,
    pub draft: Draft,
    pub found: Roles,
}

impl Walk<'_> {
    pub fn add(&mut self, name: &str, ty: ValueType, kind: Kind) -> usize {
        let index = self.draft.values.len();
        let needs_gradient = matches!(kind, Kind::Parameter(_));
        let follows_data = matches!(kind, Kind::Input);
        self.draft.values.push(DraftValue {
            name: name.into(),
            ty,
            kind,
            needs_gradient,
            follows_data,
        });
        self.draft.names.insert(name.into(), index);
        index
    }

    /// An initializer or the output of a node that holds a constant.
    fn add_leaf(&mut self, name: &str, tensor: Tensor) -> usize {
        let ty = type_of(&tensor);
        let kind = if self.roles.states.contains(name) {
            Kind::State(tensor)
        } else if self.roles.parameters.contains(name) {
            Kind::Parameter(tensor)
        } else {
            let source = if ty.dtype == DType::F32 && !ty.shape.is_empty() {
                Source::leaf(name)
            } else {
                Source::default()
            };
            Kind::Constant(tensor, source)
        };
        self.add(name, ty, kind)
    }

    fn lookup(&mut self, name: &str, node: &RawNode) -> Result<Option<usize>, GraphErrorKind> {
        if name.is_empty() {
            return Ok(None);
        }
        if let Some(index) = self.draft.named(name) {
            return Ok(Some(index));
        }
        match self.inference.model.initializers().get(name) {
            Some(tensor) => Ok(Some(self.add_leaf(name, tensor.clone()))),
            None => Err(GraphErrorKind::MissingValue {
                node: node.name.clone(),
                value: name.into(),
            }),
        }
    }

    /// A name for a value that the file has none for.
    pub fn unnamed(&self, node: &str, what: &str) -> String {
        let mut name = format!("{node}:{what}");
        while self.draft.names.contains_key(&name) || self.is_initializer(&name) {
            name.push('\'');
        }
        name
    }

    pub fn constant(&self, index: usize) -> Option<&Tensor> {
        match &self.draft.values[index].kind {
            Kind::Constant(tensor, _) => Some(tensor),
            _ => None,
        }
    }

    fn node(&mut self, node: &RawNode) -> Result<(), GraphErrorKind> {
        if let Some(branches) = &node.branches {
            return self.choose(node, branches);
        }
        if let Some(Attribute::Other("GRAPH")) = node
            .attributes
            .values()
            .find(|attribute| matches!(attribute, Attribute::Other("GRAPH")))
        {
            return Err(GraphErrorKind::Subgraph {
                operator: node.op_type.clone(),
                node: node.name.clone(),
                condition: None,
            });
        }
        let mut inputs = Vec::with_capacity(node.inputs.len());
        for name in &node.inputs {
            inputs.push(self.lookup(name, node)?);
        }
        let output = node.outputs.first().map_or("", String::as_str);
        match (node.op_type.as_str(), inputs.first()) {
            // Another name for an initializer, which may stand for a tensor of its own.
            ("Identity", Some(&Some(input))) if self.stands_alone(node) => {
                let tensor = match &self.draft.values[input].kind {
                    Kind::Parameter(tensor) | Kind::State(tensor) | Kind::Constant(tensor, _) => {
                        tensor.clone()
                    }
                    Kind::Input | Kind::Computed => return Ok(()),
                };
                self.add_leaf(output, tensor);
                return Ok(());
            }
            ("Identity" | "Cast" | "Dropout", Some(&Some(input)))
                if self.passes_on(node, input) =>
            {
                self.draft.names.insert(output.into(), input);
                return Ok(());
            }
            _ => {}
        }
        if self.inference.exported.is_some() {
            self.rebatch(node, &mut inputs)?;
        }
        match self.operator(node, &inputs) {
            Ok(op) => self.place(node, op, inputs),
            Err(_) if self.inference.exported.is_some() && self.align(node, &mut inputs) => {
                let op = self.operator(node, &inputs)?;
                self.place(node, op, inputs)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The operator of a node that reads these inputs.
    fn operator(
        &self,
        node: &RawNode,
        inputs: &[Option<usize>],
    ) -> Result<Box<dyn Operator>, OpError> {
        let constants = self.constants(inputs);
        let types: Vec<_> = inputs
            .iter()
            .map(|input| input.map(|input| self.draft.values[input].ty.clone()))
            .collect();
        ops::build(&NodeSpec {
            name: &node.name,
            op_type: &node.op_type,
            opset: node.opset,
            attributes: &node.attributes,
            inputs: &types,
            constants: &constants,
            outputs: node.outputs.len(),
            training_form: self.inference.options.training_form
                || (self.inference.options.train_batch_norm
                    && node.op_type == "BatchNormalization"),
        })
    }

    fn constants(&self, inputs: &[Option<usize>]) -> Vec<Option<Tensor>> {
        let constant = |input: &Option<usize>| self.constant((*input)?).cloned();
        inputs.iter().map(constant).collect()
    }

    /// Adds what a node makes: constants if it can run now, else values that are computed.
    fn place(
        &mut self,
        node: &RawNode,
        op: Box<dyn Operator>,
        inputs: Vec<Option<usize>>,
    ) -> Result<(), GraphErrorKind> {
        let constants = self.constants(&inputs);
        let known = !op.is_random()
            && inputs
                .iter()
                .zip(&constants)
                .all(|(input, constant)| input.is_none() || constant.is_some());
        // Of these only the type of what they read matters.
        let fold = known || matches!(node.op_type.as_str(), "Shape" | "Size" | "EyeLike");
        let names = self.output_names(
            node,
            &*op,
            if fold {
                MAX_CONSTANT_BYTES
            } else {
                isize::MAX as usize
            },
        )?;
        if fold {
            self.fold(node, &*op, &inputs, constants, &names);
        } else {
            self.compute(node, op, inputs, &names)?;
        }
        Ok(())
    }

    /// Goes on with the branch of an If whose condition is known.
    fn choose(&mut self, node: &RawNode, branches: &[Branch; 2]) -> Result<(), GraphErrorKind> {
        let condition = node.inputs.first().map_or("", String::as_str);
        let index = self.lookup(condition, node)?;
        let truth = index
            .and_then(|index| self.constant(index))
            .filter(|value| value.dtype() == DType::Bool && value.len() == 1)
            .map(|value| value.raw()[0] != 0);
        let Some(truth) = truth else {
            return Err(GraphErrorKind::Subgraph {
                operator: node.op_type.clone(),
                node: node.name.clone(),
                condition: Some(condition.into()),
            });
        };
        let branch = &branches[usize::from(!truth)];
        if branch.outputs.len() < node.outputs.len() {
            return Err(GraphErrorKind::BranchOutputs {
                node: node.name.clone(),
                expected: node.outputs.len(),
                found: branch.outputs.len(),
            });
        }
        for (name, tensor) in &branch.initializers {
            self.draft.inner.insert(name.clone());
            self.add_leaf(name, tensor.clone());
        }
        for node in &branch.nodes {
            self.node(node)?;
        }
        for (made, wanted) in branch.outputs.iter().zip(&node.outputs) {
            if let Some(index) = self.lookup(made, node)? {
                self.draft.names.insert(wanted.clone(), index);
            }
        }
        Ok(())
    }

    /// Names of an operator's outputs, whose sizes are checked.
    fn output_names(
        &self,
        node: &RawNode,
        op: &dyn Operator,
        max_bytes: usize,
    ) -> Result<Vec<String>, GraphErrorKind> {
        let mut names = Vec::with_capacity(op.outputs().len());
        for (index, ty) in op.outputs().iter().enumerate() {
            let name = match node.outputs.get(index) {
                Some(name) if !name.is_empty() => name.to_string(),
                _ => self.unnamed(&node.name, &index.to_string()),
            };
            let bytes = ty
                .shape
                .iter()
                .try_fold(ty.dtype.size(), |bytes, &extent| bytes.checked_mul(extent));
            if bytes.is_none_or(|bytes| bytes > max_bytes) {
                return Err(GraphErrorKind::TooLarge {
                    node: node.name.clone(),
                    value: name,
                    shape: ty.shape.clone(),
                });
            }
            names.push(name);
        }
        Ok(names)
    }

    /// Runs an operator whose inputs are constant (or, for Shape, only matter by their type).
    fn fold(
        &mut self,
        node: &RawNode,
        op: &dyn Operator,
        inputs: &[Option<usize>],
        constants: Vec<Option<Tensor>>,
        names: &[String],
    ) {
        let source = self.source_of(node, inputs);
        let is_sized = self.is_sized(node, inputs);
        let cx = Context {
            device: self.inference.device,
            training: false,
            seed: 0,
            first_sample: 0,
        };
        // What is as large as the data asks for (states at the start, masks) is no weight.
        let is_leaf = match node.op_type.as_str() {
            "Constant" => true,
            "ConstantOfShape" => !is_sized,
            _ => false,
        };
        for (name, tensor) in names.iter().zip(op.forward(&cx, constants).outputs) {
            let index = if is_leaf {
                if node.inner {
                    self.draft.inner.insert(name.clone());
                }
                self.add_leaf(name, tensor)
            } else {
                self.add(
                    name,
                    type_of(&tensor),
                    Kind::Constant(tensor, source.clone()),
                )
            };
            if is_sized {
                self.draft.sized.insert(index);
            }
        }
    }

    /// Whether what a node computes follows from the shapes of data.
    fn is_sized(&self, node: &RawNode, inputs: &[Option<usize>]) -> bool {
        let reads_shape = matches!(node.op_type.as_str(), "Shape" | "Size");
        inputs.iter().flatten().any(|input| {
            let kind = &self.draft.values[*input].kind;
            let is_data = matches!(kind, Kind::Input | Kind::Computed);
            (reads_shape && is_data) || self.draft.sized.contains(input)
        })
    }

    /// Adds a node that runs, and notes which of its constants are weights and running statistics.
    fn compute(
        &mut self,
        node: &RawNode,
        op: Box<dyn Operator>,
        inputs: Vec<Option<usize>>,
        names: &[String],
    ) -> Result<(), GraphErrorKind> {
        let of_inputs = || inputs.iter().flatten().map(|&i| &self.draft.values[i]);
        let mut needs_gradient = of_inputs().any(|value| value.needs_gradient);
        let follows_data = of_inputs().any(|value| value.follows_data) || op.is_random();
        // What is computed from weights alone has a formula of its own, whose constants are no weights.
        let positions = if follows_data { op.weights() } else { &[] };
        for &position in positions {
            let Some(&Some(input)) = inputs.get(position) else {
                continue;
            };
            if let Kind::State(_) = self.draft.values[input].kind {
                return Err(GraphErrorKind::WeightAndState {
                    node: node.name.clone(),
                    value: self.draft.values[input].name.clone(),
                });
            }
            if self.is_weight(&node.op_type, input, needs_gradient) {
                needs_gradient = true;
                for leaf in self.leaves_of(input).leaves {
                    self.check_place(node, &leaf)?;
                    let leaf = self.trained_leaf(leaf);
                    self.found.parameters.insert(leaf);
                }
            }
        }
        for &(_, position) in op.state_updates() {
            if let Some(Some(input)) = inputs.get(position) {
                for leaf in self.leaves_of(*input).moved() {
                    self.check_place(node, &leaf)?;
                    self.found.states.insert(leaf);
                }
            }
        }
        let updated: Vec<usize> = op
            .state_updates()
            .iter()
            .map(|&(output, _)| output)
            .collect();
        let types = op.outputs().to_vec();
        let mut outputs = Vec::with_capacity(names.len());
        for (position, (name, ty)) in names.iter().zip(types).enumerate() {
            let differentiable = ty.dtype == DType::F32 && !updated.contains(&position);
            let index = self.add(name, ty, Kind::Computed);
            self.draft.values[index].needs_gradient = needs_gradient && differentiable;
            self.draft.values[index].follows_data = follows_data;
            outputs.push(index);
        }
        let softmax = matches!(node.op_type.as_str(), "Softmax" | "LogSoftmax")
            && self.is_over_classes(node, outputs[0]);
        self.draft.nodes.push(DraftNode {
            name: node.name.clone(),
            op: op.into(),
            inputs,
            outputs,
            softmax,
        });
        Ok(())
    }

    pub fn is_initializer(&self, name: &str) -> bool {
        self.inference.model.initializers().contains_key(name)
    }

    /// Whether a node only passes its input on: Identity; Cast between types that are one here (half
    /// precision weights); and Dropout in the form that exporters write for inference, unless dropout is
    /// switched on.
    fn passes_on(&self, node: &RawNode, input: usize) -> bool {
        match (node.op_type.as_str(), node.attributes.get("to")) {
            ("Identity", _) => return true,
            ("Cast", Some(Attribute::Int(to))) => {
                let to = i32::try_from(*to).ok().and_then(graph_dtype);
                return to == Some(self.draft.values[input].ty.dtype);
            }
            ("Cast", _) => return false,
            _ => {}
        }
        let mask_used = node.outputs.get(1).is_some_and(|name| !name.is_empty());
        let in_file = match node.inputs.get(2) {
            Some(name) if !name.is_empty() => {
                let mode = self
                    .draft
                    .named(name)
                    .and_then(|index| self.constant(index));
                mode.is_none_or(|mode| mode.raw().iter().any(|&byte| byte != 0))
            }
            _ => false,
        };
        !mask_used && !in_file && !self.inference.options.training_form
    }

    /// Whether a softmax runs over the axis where a loss looks for the classes.
    fn is_over_classes(&self, node: &RawNode, output: usize) -> bool {
        let shape = &self.draft.values[output].ty.shape;
        let axis = match node.attributes.get("axis") {
            Some(Attribute::Int(axis)) => Some(*axis),
            _ => None,
        };
        let classes = Classes::default().axis_of(shape);
        let is_it = |axis: i64| [axis, axis + shape.len() as i64].contains(&(classes as i64));
        if node.opset >= 13 {
            return is_it(axis.unwrap_or(-1));
        }
        // Before opset 13 it ran over all axes from there on, taken together.
        is_it(axis.unwrap_or(1)) && shape.iter().skip(classes + 1).all(|&extent| extent == 1)
    }
}

pub(super) fn type_of(tensor: &Tensor) -> ValueType {
    ValueType {
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
    }
}
