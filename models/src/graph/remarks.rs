//! What an export did to a model, as far as the file shows it.

use std::collections::BTreeMap;
use std::fmt;

use super::nodes::RawNode;
use super::{BuildOptions, Graph};

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
    /// Convolutions that batch norm was folded into: TorchScript's exporter numbers their filters anew.
    FoldedBatchNorm {
        /// How many.
        convolutions: usize,
    },
    /// Batch norm is to be trained, and there is none.
    NoBatchNorm,
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
            Remark::FoldedBatchNorm { convolutions } => write!(
                f,
                "batch norm seems to have been folded into {convolutions} convolutions when the model was exported, so it \
                 is not trained; export with training=torch.onnx.TrainingMode.TRAINING (or PRESERVE) to keep it"
            ),
            Remark::NoBatchNorm => write!(
                f,
                "there is no batch norm to train in the model; exporters fold it into convolutions unless told to keep it"
            ),
        }
    }
}

pub(super) fn of(graph: &Graph, nodes: &[RawNode], options: &BuildOptions) -> Vec<Remark> {
    let mut remarks = Vec::new();
    if !options.untie {
        remarks.extend(merged(graph, nodes));
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

/// `onnx::Conv_193`: the name that TorchScript's exporter gives a filter it made itself.
fn is_folded(name: &str, rank: usize) -> bool {
    let number = name.strip_prefix("onnx::Conv_");
    rank >= 3 && number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}
