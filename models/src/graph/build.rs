//! From a model file to a [`Graph`].

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::infer::{Draft, DraftNode, Exported, Inference, Kind};
use super::inputs::{self, DataInput};
use super::layers;
use super::nodes::{self, RawNode};
use super::remarks;
use super::{Graph, GraphError, GraphErrorKind, Node, Origin, Parameter, State, Value, ValueId};
use crate::device::cpu::CpuDevice;
use crate::init;
use crate::onnx::Model;
use crate::ops::ValueType;

/// What a model leaves open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildOptions {
    /// Samples per minibatch: the first axis of every data input. `None` takes what the file fixes.
    pub batch: Option<usize>,
    /// Sizes of open dimensions by name (`input:axis` for one without).
    pub dims: BTreeMap<String, usize>,
    /// Whether nodes that the file holds in inference form train all the same: Dropout drops, and
    /// BatchNormalization uses the minibatch's statistics. Otherwise such a Dropout passes its input on and
    /// such a batch norm keeps its running statistics, in training too. Nodes in training form do not
    /// need it.
    pub training_form: bool,
    /// Whether batch norm in inference form trains, as with `training_form`, which also means Dropout.
    pub train_batch_norm: bool,
    /// Whether weights that the file holds once and tells apart by Identity nodes are weights of their own.
    /// Exporters merge weights that are one in the model like that, but also those that only happen to
    /// be equal; without this they are trained as one.
    pub untie: bool,
    /// The output that the loss reads, by name; what only others need is left out. `None` takes all of them,
    /// and the loss the first one.
    pub loss_output: Option<String>,
}

/// Reads `NAME=SIZE`, the way programs are told the size of an open dimension.
///
/// # Errors
/// What was expected, when it is not that or the size is 0.
pub fn parse_dimension(text: &str) -> Result<(String, usize), String> {
    let expected = || {
        format!(
            "expected NAME=SIZE with a size of at least 1, for example sequence=128, not '{text}'"
        )
    };
    let (name, size) = text.split_once('=').ok_or_else(expected)?;
    match size.parse() {
        Ok(size) if size > 0 && !name.is_empty() => Ok((name.to_owned(), size)),
        _ => Err(expected()),
    }
}

impl Graph {
    /// Builds the graph of a model: names and sorts its nodes, binds shapes, finds its weights, folds
    /// constants, drops what no output depends on, and groups the rest into layers.
    ///
    /// A parameter is a float tensor of the file with at least one axis, in a weight's place of an
    /// operator or moved there unchanged (transposed, reshaped); all other tensors of the file are constants,
    /// running statistics aside. A batch size other than the exported one also replaces that one in
    /// the target shapes of reshapes.
    pub fn build(model: &Model, options: &BuildOptions) -> Result<Graph, GraphError> {
        build(model, options).map_err(|kind| GraphError {
            path: model.path().into(),
            kind: Box::new(kind),
        })
    }
}

fn build(model: &Model, options: &BuildOptions) -> Result<Graph, GraphErrorKind> {
    let nodes = nodes::sorted(model)?;
    let read: HashSet<&str> = nodes
        .iter()
        .flat_map(|node| node.reads.iter().map(String::as_str))
        .collect();
    let inputs = inputs::bind(model, options, &read)?;
    let (draft, batch_size) = infer(model, options, &nodes, &inputs)?;
    let mut graph = finish(model, options, &draft, &inputs, batch_size)?;
    graph.exported_batch = inputs.iter().find_map(|input| input.exported_batch);
    graph.remarks = remarks::of(&graph, model, &nodes, options);
    Ok(graph)
}

/// Types all values for the batch size asked for, and says which one that is.
fn infer(
    model: &Model,
    options: &BuildOptions,
    nodes: &[RawNode],
    inputs: &[DataInput<'_>],
) -> Result<(Draft, usize), GraphErrorKind> {
    let device = CpuDevice::new(1);
    let aliases = aliases(model, nodes);
    let run = |exported: Option<Exported<'_>>, types: Vec<ValueType>| {
        let named: Vec<_> = inputs.iter().map(|input| input.name).zip(types).collect();
        Inference {
            model,
            nodes,
            options,
            device: &device,
            exported,
            aliases: &aliases,
        }
        .run(&named)
    };
    let requested = || inputs.iter().map(|input| input.ty.clone()).collect();
    let first_extent = |input: &DataInput<'_>| input.ty.shape.first().copied().unwrap_or(1);
    let Some((fixed, exported)) = inputs
        .iter()
        .find_map(|input| Some((input, input.exported_batch?)))
    else {
        let batch_size = inputs.first().map_or(1, first_extent);
        return Ok((run(None, requested())?, batch_size));
    };

    let draft = run(None, inputs.iter().map(DataInput::exported).collect())?;
    let samples = output_extent(model, options, &draft);
    // Outputs have one row per sample, or one per token of each sample; else the batch is another axis.
    let leads = samples.is_none_or(|samples| samples % exported == 0);
    let batch_size = if leads {
        exported
    } else {
        samples.unwrap_or(exported)
    };
    let requested_batch = match options.batch {
        Some(batch) if batch != batch_size => batch,
        _ => return Ok((draft, batch_size)),
    };
    if !leads {
        return Err(GraphErrorKind::BatchAxis {
            input: fixed.name.into(),
            extent: exported,
            exported: batch_size,
            requested: requested_batch,
        });
    }
    let unfit = |reason: String| GraphErrorKind::BatchFixed {
        requested: requested_batch,
        exported,
        reason,
    };
    let from = Exported {
        draft: &draft,
        batch: exported,
        requested: requested_batch,
    };
    let rebatched = run(Some(from), requested()).map_err(|error| unfit(error.to_string()))?;
    match (samples, output_extent(model, options, &rebatched)) {
        (Some(old), Some(new)) if new * exported != old * requested_batch => Err(unfit(format!(
            "the first axis of its output stays {new} where it should become {}",
            old / exported * requested_batch
        ))),
        _ => Ok((rebatched, requested_batch)),
    }
}

/// Initializers by the outputs of the Identity nodes that pass them on.
fn aliases<'a>(model: &Model, nodes: &'a [RawNode]) -> HashMap<&'a str, &'a str> {
    let identities = nodes.iter().filter(|node| node.op_type == "Identity");
    identities
        .filter_map(|node| {
            Some((
                node.outputs.first()?.as_str(),
                node.inputs.first()?.as_str(),
            ))
        })
        .filter(|(_, source)| model.initializers().contains_key(*source))
        .collect()
}

/// Extent of the first axis of the output that the loss reads.
fn output_extent(model: &Model, options: &BuildOptions, draft: &Draft) -> Option<usize> {
    let first = || Some(model.graph().output.first()?.name());
    let output = draft.named(options.loss_output.as_deref().or_else(first)?)?;
    draft.values[output].ty.shape.first().copied()
}

/// Drops what no output depends on, finds layers and numbers everything in execution order.
fn finish(
    model: &Model,
    options: &BuildOptions,
    draft: &Draft,
    inputs: &[DataInput<'_>],
    batch_size: usize,
) -> Result<Graph, GraphErrorKind> {
    let outputs = wanted_outputs(model, options, draft)?;
    let live = live_nodes(draft, &outputs);
    let position: HashMap<usize, usize> = live
        .iter()
        .enumerate()
        .flat_map(|(position, &node)| {
            draft.nodes[node]
                .outputs
                .iter()
                .map(move |&output| (output, position))
        })
        .collect();
    let reads: Vec<Vec<usize>> = live
        .iter()
        .map(|&node| {
            draft.nodes[node]
                .inputs
                .iter()
                .flatten()
                .filter_map(|input| position.get(input).copied())
                .collect()
        })
        .collect();
    // What is computed from weights alone belongs to the layer that reads it, whatever it takes.
    let cheap: Vec<bool> = live
        .iter()
        .map(|&node| {
            let DraftNode { op, outputs, .. } = &draft.nodes[node];
            let follows_data = outputs.iter().any(|&out| draft.values[out].follows_data);
            !follows_data || layers::is_cheap(op.name())
        })
        .collect();
    let assigned = layers::assign(&cheap, &reads);
    let mut order: Vec<usize> = (0..live.len()).collect();
    order.sort_by_key(|&position| assigned[position]);

    let mut assembly = Assembly::new(model, draft, batch_size);
    let read: BTreeSet<usize> = live
        .iter()
        .flat_map(|&node| draft.nodes[node].inputs.iter().flatten().copied())
        .collect();
    for input in inputs {
        if let Some(index) = draft.named(input.name).filter(|index| read.contains(index)) {
            let id = assembly.value(index);
            assembly.graph.inputs.push(id);
        }
    }
    for &position in &order {
        assembly.node(live[position]);
    }
    let mut graph = assembly.graph;
    graph.outputs = outputs.iter().map(|output| assembly.ids[output]).collect();
    graph.final_softmax = final_softmax(draft, &graph, &outputs, &live, &order);
    let assigned: Vec<usize> = order.iter().map(|&position| assigned[position]).collect();
    let cheap: Vec<bool> = order.iter().map(|&position| cheap[position]).collect();
    graph.layers = layers::describe(&graph, &assigned, &cheap);
    for parameter in 0..graph.parameters.len() {
        let fan = init::fan(&graph.source(), graph.parameters[parameter].value);
        graph.parameters[parameter].fan = fan;
    }
    Ok(graph)
}

/// The outputs that nodes compute, in the file's order, or the one among them that the loss is to read.
fn wanted_outputs(
    model: &Model,
    options: &BuildOptions,
    draft: &Draft,
) -> Result<Vec<usize>, GraphErrorKind> {
    let names = model.graph().output.iter().map(|output| output.name());
    let mut computed: Vec<(&str, usize)> = Vec::new();
    for name in names {
        if let Some(index) = draft.named(name)
            && matches!(draft.values[index].kind, Kind::Computed)
            && computed.iter().all(|&(_, other)| other != index)
        {
            computed.push((name, index));
        }
    }
    if computed.is_empty() {
        return Err(GraphErrorKind::NothingToRun);
    }
    let Some(wanted) = &options.loss_output else {
        return Ok(computed.into_iter().map(|(_, index)| index).collect());
    };
    match computed.iter().find(|(name, _)| name == wanted) {
        Some(&(_, index)) => Ok(vec![index]),
        None => Err(GraphErrorKind::UnknownOutput {
            output: wanted.clone(),
            outputs: computed.iter().map(|&(name, _)| name.to_owned()).collect(),
        }),
    }
}

/// Nodes that an output depends on, ascending.
fn live_nodes(draft: &Draft, outputs: &[usize]) -> Vec<usize> {
    let mut wanted: HashSet<usize> = outputs.iter().copied().collect();
    let mut live = Vec::new();
    for (index, node) in draft.nodes.iter().enumerate().rev() {
        if node.outputs.iter().any(|output| wanted.contains(output)) {
            wanted.extend(node.inputs.iter().flatten());
            live.push(index);
        }
    }
    live.reverse();
    live
}

/// The node that makes the first output, if it is a softmax over the classes whose result nobody else needs.
fn final_softmax(
    draft: &Draft,
    graph: &Graph,
    outputs: &[usize],
    live: &[usize],
    order: &[usize],
) -> Option<usize> {
    let id = order
        .iter()
        .position(|&position| draft.nodes[live[position]].outputs.first() == outputs.first())?;
    let alone = graph.values[graph.outputs[0]].consumers.is_empty();
    (draft.nodes[live[order[id]]].softmax && alone).then_some(id)
}

/// A graph under construction.
struct Assembly<'a> {
    draft: &'a Draft,
    graph: Graph,
    /// Number of each draft value that is used.
    ids: HashMap<usize, ValueId>,
}

impl<'a> Assembly<'a> {
    fn new(model: &Model, draft: &'a Draft, batch_size: usize) -> Self {
        let graph = Graph {
            path: model.path().into(),
            nodes: Vec::new(),
            values: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            constants: BTreeMap::new(),
            parameters: Vec::new(),
            parameter_values: Vec::new(),
            states: Vec::new(),
            state_values: Vec::new(),
            layers: Vec::new(),
            batch_size,
            exported_batch: None,
            final_softmax: None,
            remarks: Vec::new(),
        };
        Assembly {
            draft,
            graph,
            ids: HashMap::new(),
        }
    }

    /// The number of a value, given at its first use.
    fn value(&mut self, index: usize) -> ValueId {
        if let Some(&id) = self.ids.get(&index) {
            return id;
        }
        let draft = &self.draft.values[index];
        let id = self.graph.values.len();
        let origin = match &draft.kind {
            Kind::Input => Origin::Input,
            Kind::Computed => Origin::Node(self.graph.nodes.len()),
            Kind::Parameter(tensor) => {
                let constant_fill =
                    tensor.shape().len() >= 2 && tensor.len() > 1 && tensor.is_one_number();
                let (name, tensor) = (draft.name.clone(), tensor.clone());
                self.graph.parameters.push(Parameter {
                    name,
                    value: id,
                    tensor,
                    fan: None,
                    constant_fill,
                });
                self.graph.parameter_values.push(id);
                Origin::Parameter(self.graph.parameters.len() - 1)
            }
            Kind::State(tensor) => {
                self.graph.states.push(State {
                    name: draft.name.clone(),
                    value: id,
                    tensor: tensor.clone(),
                });
                self.graph.state_values.push(id);
                Origin::State(self.graph.states.len() - 1)
            }
            Kind::Constant(tensor, _) => {
                self.graph.constants.insert(id, tensor.clone());
                Origin::Constant
            }
        };
        self.graph.values.push(Value {
            name: draft.name.clone(),
            ty: draft.ty.clone(),
            origin,
            consumers: Vec::new(),
            needs_gradient: draft.needs_gradient,
        });
        self.ids.insert(index, id);
        id
    }

    fn node(&mut self, index: usize) {
        let draft = &self.draft.nodes[index];
        let inputs: Vec<Option<ValueId>> = draft
            .inputs
            .iter()
            .map(|input| input.map(|input| self.value(input)))
            .collect();
        let outputs: Vec<Option<ValueId>> = draft
            .outputs
            .iter()
            .map(|&output| Some(self.value(output)))
            .collect();
        let id = self.graph.nodes.len();
        for &input in inputs.iter().flatten() {
            let consumers = &mut self.graph.values[input].consumers;
            if consumers.last() != Some(&id) {
                consumers.push(id);
            }
        }
        self.graph.nodes.push(Node {
            name: draft.name.clone(),
            op: draft.op.clone(),
            inputs,
            outputs,
        });
    }
}
