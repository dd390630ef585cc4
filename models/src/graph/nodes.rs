//! The nodes that a graph needs: live, sorted, their attributes decoded.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};

use super::GraphErrorKind;
use super::inline::{self, Body, Instance};
use super::sequences;
use crate::onnx::Model;
use crate::onnx::proto::{AttributeProto, attribute_type};
use crate::ops::Attribute;
use crate::tensor::Tensor;

/// A node whose attributes are decoded.
#[derive(Debug)]
pub(super) struct RawNode {
    pub name: String,
    pub op_type: String,
    /// Version of the default operator set that it goes by.
    pub opset: i64,
    pub attributes: BTreeMap<String, Attribute>,
    /// Names of the values it reads; empty where an optional input is left out.
    pub inputs: Vec<String>,
    /// Names of the values it makes; empty where an output is left out.
    pub outputs: Vec<String>,
    /// Names of all values it needs: its inputs and what its branches read.
    pub reads: Vec<String>,
    /// The branches of an If: then, else.
    pub branches: Option<[Branch; 2]>,
    /// Whether it stands in a function or a branch, where a weight could not be written back.
    pub inner: bool,
}

/// A branch of an If.
#[derive(Debug)]
pub(super) struct Branch {
    pub initializers: Vec<(String, Tensor)>,
    pub nodes: Vec<RawNode>,
    pub outputs: Vec<String>,
}

/// The nodes that the graph's outputs depend on, every one after those it reads from; otherwise in the
/// file's order.
pub(super) fn sorted(model: &Model) -> Result<Vec<RawNode>, GraphErrorKind> {
    let graph = model.graph();
    let given: HashSet<&str> = graph.input.iter().map(|input| input.name()).collect();
    let known = |value: &str| given.contains(value) || model.initializers().contains_key(value);
    let outputs: Vec<&str> = graph.output.iter().map(|output| output.name()).collect();
    let nodes = arrange(model, inline::instances(model)?, &outputs, &known)?;
    Ok(sequences::replace(model, nodes))
}

/// Sorts the nodes that `outputs` depend on. `known` says which values come from elsewhere.
fn arrange(
    model: &Model,
    instances: Vec<Instance<'_>>,
    outputs: &[&str],
    known: &dyn Fn(&str) -> bool,
) -> Result<Vec<RawNode>, GraphErrorKind> {
    let mut makers: HashMap<&str, usize> = HashMap::new();
    for (index, node) in instances.iter().enumerate() {
        for output in node.outputs.iter().filter(|output| !output.is_empty()) {
            if known(output) || makers.insert(output, index).is_some() {
                return Err(GraphErrorKind::DuplicateValue {
                    node: node.name.clone(),
                    value: output.clone(),
                });
            }
        }
    }

    let maker = |value: &str, node: &str| match makers.get(value) {
        Some(&maker) => Ok(Some(maker)),
        None if value.is_empty() || known(value) => Ok(None),
        None => Err(GraphErrorKind::MissingValue {
            node: node.into(),
            value: value.into(),
        }),
    };
    let mut live = vec![false; instances.len()];
    let mut pending = Vec::new();
    for output in outputs {
        pending.extend(maker(output, "(graph output)")?);
    }
    // For each live node, those it reads from.
    let mut reads: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    while let Some(index) = pending.pop() {
        if std::mem::replace(&mut live[index], true) {
            continue;
        }
        let node = &instances[index];
        let mut from = Vec::new();
        for value in node.reads() {
            from.extend(maker(value, &node.name)?);
        }
        pending.extend(&from);
        reads.insert(index, from);
    }

    let order = topological(&reads).map_err(|index| GraphErrorKind::Cycle {
        node: instances[index].name.clone(),
    })?;
    drop(makers);
    let mut instances: Vec<Option<Instance<'_>>> = instances.into_iter().map(Some).collect();
    let ordered = order
        .into_iter()
        .filter_map(|index| instances[index].take());
    ordered.map(|node| raw(model, node)).collect()
}

/// Kahn's algorithm, taking the first ready node of the file each time. The error is a node on a cycle
/// or after one.
fn topological(reads: &BTreeMap<usize, Vec<usize>>) -> Result<Vec<usize>, usize> {
    let mut missing: BTreeMap<usize, usize> = reads
        .iter()
        .map(|(&node, from)| (node, from.len()))
        .collect();
    let mut readers: HashMap<usize, Vec<usize>> = HashMap::new();
    for (&node, from) in reads {
        for &from in from {
            readers.entry(from).or_default().push(node);
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> = missing
        .iter()
        .filter(|(_, count)| **count == 0)
        .map(|(&node, _)| Reverse(node))
        .collect();
    let mut order = Vec::with_capacity(reads.len());
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        missing.remove(&node);
        for reader in readers.remove(&node).unwrap_or_default() {
            if let Some(count) = missing.get_mut(&reader) {
                *count -= 1;
                if *count == 0 {
                    ready.push(Reverse(reader));
                }
            }
        }
    }
    match missing.keys().next() {
        Some(&node) => Err(node),
        None => Ok(order),
    }
}

fn raw(model: &Model, node: Instance<'_>) -> Result<RawNode, GraphErrorKind> {
    let reads = node.reads().into_iter().map(String::from).collect();
    let mut attributes = BTreeMap::new();
    for &(name, proto) in &node.attributes {
        attributes.insert(name.to_string(), attribute(model, proto, &node.name)?);
    }
    let branches = match node.branches {
        None => None,
        Some([then, otherwise]) => Some([branch(model, then)?, branch(model, otherwise)?]),
    };
    Ok(RawNode {
        attributes,
        op_type: node.op_type.into(),
        opset: node.opset,
        reads,
        inputs: node.inputs,
        outputs: node.outputs,
        branches,
        inner: node.inner,
        name: node.name,
    })
}

fn branch(model: &Model, body: Body<'_>) -> Result<Branch, GraphErrorKind> {
    let mut initializers = Vec::with_capacity(body.initializers.len());
    for (name, proto) in body.initializers {
        let tensor = model.attribute_tensor(proto, &name)?;
        initializers.push((name, tensor));
    }
    let outputs: Vec<&str> = body.outputs.iter().map(String::as_str).collect();
    let own: HashSet<&str> = initializers.iter().map(|(name, _)| name.as_str()).collect();
    let made = body.nodes.iter().flat_map(|node| node.outputs.clone());
    let made: HashSet<String> = made.collect();
    // What the branch does not make itself comes from around it, and is looked for there.
    let known = |value: &str| own.contains(value) || !made.contains(value);
    let nodes = arrange(model, body.nodes, &outputs, &known)?;
    Ok(Branch {
        nodes,
        initializers,
        outputs: body.outputs,
    })
}

fn attribute(
    model: &Model,
    proto: &AttributeProto,
    node: &str,
) -> Result<Attribute, GraphErrorKind> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(match attribute_kind(proto) {
        attribute_type::FLOAT => Attribute::Float(proto.f()),
        attribute_type::INT => Attribute::Int(proto.i()),
        attribute_type::STRING => Attribute::String(text(proto.s.as_deref().unwrap_or_default())),
        attribute_type::FLOATS => Attribute::Floats(proto.floats.clone()),
        attribute_type::INTS => Attribute::Ints(proto.ints.clone()),
        attribute_type::STRINGS => {
            Attribute::Strings(proto.strings.iter().map(|s| text(s)).collect())
        }
        attribute_type::TENSOR => match &proto.t {
            Some(tensor) => Attribute::Tensor(model.attribute_tensor(tensor, node)?),
            None => Attribute::Other("TENSOR without a value"),
        },
        attribute_type::GRAPH | attribute_type::GRAPHS => Attribute::Other("GRAPH"),
        attribute_type::TENSORS => Attribute::Other("TENSORS"),
        attribute_type::SPARSE_TENSOR | attribute_type::SPARSE_TENSORS => {
            Attribute::Other("SPARSE_TENSOR")
        }
        attribute_type::TYPE_PROTO | attribute_type::TYPE_PROTOS => Attribute::Other("TYPE_PROTO"),
        _ => Attribute::Other("UNDEFINED"),
    })
}

/// The attribute's type; the first IR version did not store it, so it may have to be told from the fields.
fn attribute_kind(proto: &AttributeProto) -> i32 {
    match proto.r#type() {
        attribute_type::UNDEFINED if proto.f.is_some() => attribute_type::FLOAT,
        attribute_type::UNDEFINED if proto.i.is_some() => attribute_type::INT,
        attribute_type::UNDEFINED if proto.s.is_some() => attribute_type::STRING,
        attribute_type::UNDEFINED if proto.t.is_some() => attribute_type::TENSOR,
        attribute_type::UNDEFINED if !proto.floats.is_empty() => attribute_type::FLOATS,
        attribute_type::UNDEFINED if !proto.ints.is_empty() => attribute_type::INTS,
        attribute_type::UNDEFINED if !proto.strings.is_empty() => attribute_type::STRINGS,
        kind => kind,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sorting_keeps_the_files_order_where_it_can() {
        let reads = BTreeMap::from([(0, vec![3]), (1, vec![]), (2, vec![0, 1]), (3, vec![])]);
        assert_eq!(topological(&reads), Ok(vec![1, 3, 0, 2]));
        let cycle = BTreeMap::from([(0, vec![]), (1, vec![2]), (2, vec![1])]);
        assert_eq!(topological(&cycle), Err(1));
    }
}
