//! What an export did to a model, as far as the file shows it.

use std::collections::BTreeMap;
use std::fmt;

use super::nodes::RawNode;
use super::{BuildOptions, Graph, Node, ValueId};
use crate::onnx::Model;

/// Something that whoever trains the model should know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remark {
    /// A weight that stands for several by Identity nodes and is trained as one.
    Merged {
        /// The weight.
        weight: String,
        /// The names that it has besides.
        others: Vec<String>,
        /// Further weights of which the same is true.
        more: usize,
    },
    /// A weight that is one number everywhere and that several nodes read, as exporters leave it that store equal
    /// tensors once.
    SharedFill {
        /// The weight.
        weight: String,
        /// The nodes.
        readers: Vec<String>,
        /// Further weights of which the same is true.
        more: usize,
    },
    /// Batch norm that stands in its form for inference, with statistics that were never trained.
    UntrainedBatchNorm {
        /// How many nodes.
        nodes: usize,
    },
    /// Convolutions that batch norm was folded into: TorchScript's exporter numbers their filters anew.
    FoldedBatchNorm {
        /// How many.
        convolutions: usize,
    },
    /// Batch norm is to be trained, and there is none.
    NoBatchNorm,
    /// The model has several outputs, and the loss reads the first one for want of a choice.
    FirstOutput {
        /// The one that it reads.
        output: String,
        /// The others.
        others: Vec<String>,
    },
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remark::Merged {
                weight,
                others,
                more,
            } => {
                write!(f, "the file holds one tensor for the weights '{weight}'")?;
                if let [other, rest @ ..] = &others[..] {
                    write!(f, " and '{other}'")?;
                    if !rest.is_empty() {
                        write!(f, " and {} more", rest.len())?;
                    }
                }
                if *more > 0 {
                    write!(f, " (and {more} more such tensors)")?;
                }
                write!(
                    f,
                    ": they are trained as one; where they were only equal when the model was exported, give --untie"
                )
            }
            Remark::SharedFill {
                weight,
                readers,
                more,
            } => {
                write!(f, "{} nodes read the weight '{weight}'", readers.len())?;
                if let [first, second, ..] = &readers[..] {
                    write!(f, " ({first}, {second}, …)")?;
                }
                write!(f, ", which holds one number everywhere")?;
                if *more > 0 {
                    write!(f, " (and {more} more such weights)")?;
                }
                write!(
                    f,
                    ": it is trained as one; where the export stored several once because they were equal, give --untie"
                )
            }
            Remark::UntrainedBatchNorm { nodes } => write!(
                f,
                "{nodes} batch norms stand in their form for inference, with the statistics of a fresh model: they normalise \
                 by mean 0 and variance 1; give --bn train to train them"
            ),
            Remark::FoldedBatchNorm { convolutions } => write!(
                f,
                "batch norm seems to have been folded into {convolutions} convolutions when the model was exported, so it \
                 is not trained; export with training=torch.onnx.TrainingMode.TRAINING (or PRESERVE) to keep it"
            ),
            Remark::NoBatchNorm => write!(
                f,
                "there is no batch norm to train in the model; exporters fold it into convolutions unless told to keep it"
            ),
            Remark::FirstOutput { output, others } => write!(
                f,
                "the loss reads the output '{output}'; --loss-output chooses another one ({})",
                others.join(", ")
            ),
        }
    }
}

pub(super) fn of(
    graph: &Graph,
    model: &Model,
    nodes: &[RawNode],
    options: &BuildOptions,
) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if !options.untie {
        remarks.extend(merged(graph, nodes));
        remarks.extend(shared_fill(graph, model));
    }
    remarks.extend(untrained_batch_norm(graph));
    if let (None, [first, others @ ..]) = (&options.loss_output, &graph.outputs[..])
        && !others.is_empty()
    {
        let name = |&id: &usize| graph.values[id].name.clone();
        remarks.push(Remark::FirstOutput {
            output: name(first),
            others: others.iter().map(name).collect(),
        });
    }
    let kind = |kind: &str| graph.nodes.iter().any(|node| node.op.name() == kind);
    if !kind("BatchNormalization") {
        let convolutions = graph
            .parameters
            .iter()
            .filter(|p| is_folded(&p.name, p.tensor.shape().len()));
        match convolutions.count() {
            0 if options.train_batch_norm => remarks.push(Remark::NoBatchNorm),
            0 => {}
            convolutions => remarks.push(Remark::FoldedBatchNorm { convolutions }),
        }
    }
    remarks
}

/// One remark for all weights that several Identity nodes, or one and other nodes, read.
fn merged(graph: &Graph, nodes: &[RawNode]) -> Option<Remark> {
    let mut names: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut direct: BTreeMap<&str, bool> = BTreeMap::new();
    for node in nodes {
        for input in &node.inputs {
            match (node.op_type.as_str(), node.outputs.first()) {
                ("Identity", Some(output)) => names.entry(input).or_default().push(output),
                _ => drop(direct.insert(input, true)),
            }
        }
    }
    let merged = graph.parameters.iter().filter_map(|parameter| {
        let others = names.get(parameter.name.as_str())?;
        let alone = others.len() == 1 && !direct.contains_key(parameter.name.as_str());
        (!alone).then_some((&parameter.name, others))
    });
    let mut merged = merged.peekable();
    let &(weight, others) = merged.peek()?;
    Some(Remark::Merged {
        weight: weight.clone(),
        others: others.iter().map(ToString::to_string).collect(),
        more: merged.count() - 1,
    })
}

/// One remark for all weights of one number that several nodes read.
fn shared_fill(graph: &Graph, model: &Model) -> Option<Remark> {
    let mut shared = model.shared_fills();
    shared.retain(|name, _| graph.parameters.iter().any(|p| p.name == *name));
    let more = shared.len().checked_sub(1)?;
    let (weight, readers) = shared.pop_first()?;
    Some(Remark::SharedFill {
        weight,
        readers,
        more,
    })
}

/// Batch norm for inference that normalises by mean 0 and variance 1.
fn untrained_batch_norm(graph: &Graph) -> Option<Remark> {
    let holds = |value: Option<ValueId>, number: f32| {
        let tensor = value.and_then(|id| graph.constants.get(&id));
        tensor.is_some_and(|t| t.is_one_number() && t.f32s().first() == Some(&number))
    };
    let is_untrained = |node: &&Node| {
        node.op.name() == "BatchNormalization"
            && matches!(node.inputs[..], [.., mean, variance] if holds(mean, 0.0) && holds(variance, 1.0))
    };
    match graph.nodes.iter().filter(is_untrained).count() {
        0 => None,
        nodes => Some(Remark::UntrainedBatchNorm { nodes }),
    }
}

/// `onnx::Conv_193`: the name that TorchScript's exporter gives a filter it made itself.
fn is_folded(name: &str, rank: usize) -> bool {
    let number = name.strip_prefix("onnx::Conv_");
    rank >= 3 && number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}
