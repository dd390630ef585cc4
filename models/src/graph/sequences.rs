//! Sequences of tensors, as the exporter that goes by `torch.export` writes splits: replaced by slices.
//!
//! A sequence whose positions are all read by known numbers needs no type of its own: an element of a
//! SplitToSequence is a Slice (a Gather where it drops the axis), an element of a SequenceConstruct is the tensor
//! itself, and ConcatFromSequence of one is a Concat. What cannot be replaced stays, and is refused as an
//! operator that is not supported.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::nodes::RawNode;
use crate::onnx::Model;
use crate::ops::Attribute;
use crate::tensor::{DType, Tensor};

/// What makes a sequence.
enum Sequence {
    /// Parts of a tensor along an axis.
    Split {
        data: String,
        axis: i64,
        parts: Parts,
    },
    /// Tensors.
    Of(Vec<String>),
}

enum Parts {
    /// As many elements each, the last perhaps fewer.
    Chunks(i64),
    /// So many elements.
    Sizes(Vec<i64>),
    /// One element each, without the axis.
    Single,
}

/// The nodes (sorted) with sequences replaced where that is possible.
pub(super) fn replace(model: &Model, nodes: Vec<RawNode>) -> Vec<RawNode> {
    let held = held(&nodes);
    let numbers = |name: &str| -> Option<Vec<i64>> {
        let initializer = model.initializers().get(name);
        let tensor = initializer.or_else(|| held.get(name))?;
        (tensor.dtype() == DType::I64).then(|| tensor.i64s().to_vec())
    };
    let sequences: HashMap<String, Sequence> = nodes
        .iter()
        .filter_map(|node| Some((node.outputs.first()?.clone(), sequence(node, &numbers)?)))
        .collect();
    if sequences.is_empty() {
        return nodes;
    }
    let mut replaced: Vec<RawNode> = Vec::with_capacity(nodes.len());
    for node in nodes {
        match reading(&node, &sequences, &numbers) {
            Some(instead) => replaced.extend(instead),
            None => replaced.push(node),
        }
    }
    let read: HashSet<String> = replaced.iter().flat_map(|n| n.reads.clone()).collect();
    replaced.retain(|node| {
        let made = node.outputs.first().filter(|o| sequences.contains_key(*o));
        made.is_none_or(|output| read.contains(output))
    });
    replaced
}

/// Values of Constant nodes.
fn held(nodes: &[RawNode]) -> HashMap<String, Tensor> {
    let constants = nodes.iter().filter(|node| node.op_type == "Constant");
    constants
        .filter_map(|node| {
            let value = match node.attributes.get("value") {
                Some(Attribute::Tensor(tensor)) => tensor.clone(),
                _ => match node.attributes.get("value_int")? {
                    Attribute::Int(value) => Tensor::from_i64(&[], [*value]),
                    _ => return None,
                },
            };
            Some((node.outputs.first()?.clone(), value))
        })
        .collect()
}

fn int(node: &RawNode, name: &str, default: i64) -> i64 {
    match node.attributes.get(name) {
        Some(Attribute::Int(value)) => *value,
        _ => default,
    }
}

/// The sequence that a node makes.
fn sequence(node: &RawNode, numbers: &dyn Fn(&str) -> Option<Vec<i64>>) -> Option<Sequence> {
    match node.op_type.as_str() {
        "SequenceConstruct" => Some(Sequence::Of(node.inputs.clone())),
        "SplitToSequence" => {
            let keeps_axis = int(node, "keepdims", 1) != 0;
            let parts = match node.inputs.get(1).filter(|name| !name.is_empty()) {
                None if keeps_axis => Parts::Chunks(1),
                None => Parts::Single,
                Some(sizes) => match numbers(sizes)?[..] {
                    [size] if size > 0 => Parts::Chunks(size),
                    ref sizes => Parts::Sizes(sizes.to_vec()),
                },
            };
            Some(Sequence::Split {
                data: node.inputs.first()?.clone(),
                axis: int(node, "axis", 0),
                parts,
            })
        }
        _ => None,
    }
}

/// What stands for a node that reads a sequence.
fn reading(
    node: &RawNode,
    sequences: &HashMap<String, Sequence>,
    numbers: &dyn Fn(&str) -> Option<Vec<i64>>,
) -> Option<Vec<RawNode>> {
    let sequence = sequences.get(node.inputs.first()?)?;
    match node.op_type.as_str() {
        "ConcatFromSequence" if int(node, "new_axis", 0) == 0 => {
            let Sequence::Of(tensors) = sequence else {
                return None;
            };
            let axis = int(node, "axis", 0);
            Some(vec![like(
                node,
                "Concat",
                tensors.clone(),
                &[("axis", axis)],
            )])
        }
        "SequenceAt" => {
            let position = *numbers(node.inputs.get(1)?)?.first()?;
            match sequence {
                Sequence::Of(tensors) => {
                    let from_end = position + tensors.len() as i64;
                    let position = if position < 0 { from_end } else { position };
                    let tensor = tensors.get(usize::try_from(position).ok()?)?;
                    Some(vec![like(node, "Identity", vec![tensor.clone()], &[])])
                }
                Sequence::Split { data, axis, parts } => {
                    part(node, data, *axis, parts, usize::try_from(position).ok()?)
                }
            }
        }
        _ => None,
    }
}

/// A part of a tensor.
fn part(
    node: &RawNode,
    data: &str,
    axis: i64,
    parts: &Parts,
    position: usize,
) -> Option<Vec<RawNode>> {
    let (start, end) = match parts {
        Parts::Chunks(size) => {
            let start = size.checked_mul(position as i64)?;
            (start, start.checked_add(*size)?)
        }
        Parts::Sizes(sizes) => {
            let start: i64 = sizes.get(..position)?.iter().sum();
            (start, start + sizes.get(position)?)
        }
        Parts::Single => {
            let index = constant(node, "index", Tensor::from_i64(&[], [position as i64]));
            let inputs = vec![data.to_owned(), index.outputs[0].clone()];
            return Some(vec![index, like(node, "Gather", inputs, &[("axis", axis)])]);
        }
    };
    let bound = |what, value| constant(node, what, Tensor::from_i64(&[1], [value]));
    let bounds = [
        bound("start", start),
        bound("end", end),
        bound("axis", axis),
    ];
    let names = bounds.iter().map(|bound| bound.outputs[0].clone());
    let inputs = std::iter::once(data.to_owned()).chain(names).collect();
    let slice = like(node, "Slice", inputs, &[]);
    Some(bounds.into_iter().chain([slice]).collect())
}

/// Another operator in a node's place.
fn like(node: &RawNode, op_type: &str, inputs: Vec<String>, ints: &[(&str, i64)]) -> RawNode {
    RawNode {
        name: node.name.clone(),
        op_type: op_type.into(),
        opset: node.opset,
        attributes: ints
            .iter()
            .map(|&(name, value)| (name.to_owned(), Attribute::Int(value)))
            .collect(),
        reads: inputs.clone(),
        inputs,
        outputs: node.outputs.clone(),
        branches: None,
        inner: node.inner,
    }
}

/// A number that a node in another's place reads.
fn constant(node: &RawNode, what: &str, value: Tensor) -> RawNode {
    RawNode {
        attributes: BTreeMap::from([("value".to_owned(), Attribute::Tensor(value))]),
        outputs: vec![format!("{}:{what}", node.outputs[0])],
        ..like(node, "Constant", Vec::new(), &[])
    }
}
