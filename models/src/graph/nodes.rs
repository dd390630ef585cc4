//! Nodes as they stand in the file: named uniquely, live, sorted.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};

use super::GraphErrorKind;
use crate::onnx::Model;
use crate::onnx::proto::{AttributeProto, NodeProto, attribute_type};
use crate::ops::Attribute;

/// A node of the file, its attributes decoded.
#[derive(Debug)]
pub(super) struct RawNode<'a> {
    pub name: String,
    pub op_type: &'a str,
    pub attributes: BTreeMap<String, Attribute>,
    /// Names of the values it reads; empty where an optional input is left out.
    pub inputs: Vec<&'a str>,
    /// Names of the values it makes; empty where an output is left out.
    pub outputs: Vec<&'a str>,
}

/// The nodes that the graph's outputs depend on, every one after those it reads from; otherwise in the
/// file's order.
pub(super) fn sorted(model: &Model) -> Result<Vec<RawNode<'_>>, GraphErrorKind> {
    let graph = model.graph();
    let names = unique_names(&graph.node);
    let given: HashSet<&str> = graph.input.iter().map(|input| input.name()).collect();
    let known = |value: &str| given.contains(value) || model.initializers().contains_key(value);
    let mut makers: HashMap<&str, usize> = HashMap::new();
    for (index, node) in graph.node.iter().enumerate() {
        for output in node.output.iter().filter(|output| !output.is_empty()) {
            if known(output) || makers.insert(output, index).is_some() {
                return Err(GraphErrorKind::DuplicateValue {
                    node: names[index].clone(),
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
    let mut live = vec![false; graph.node.len()];
    let mut pending = Vec::new();
    for output in &graph.output {
        pending.extend(maker(output.name(), "(graph output)")?);
    }
    // For each live node, those it reads from.
    let mut reads: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    while let Some(index) = pending.pop() {
        if std::mem::replace(&mut live[index], true) {
            continue;
        }
        let node = &graph.node[index];
        refuse_subgraphs(node, &names[index])?;
        let mut from = Vec::new();
        for input in &node.input {
            from.extend(maker(input, &names[index])?);
        }
        pending.extend(&from);
        reads.insert(index, from);
    }

    let order = topological(&reads).map_err(|index| GraphErrorKind::Cycle {
        node: names[index].clone(),
    })?;
    order
        .into_iter()
        .map(|index| raw(model, &graph.node[index], names[index].clone()))
        .collect()
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

/// A name for each node: the file's; `Relu_3` for the fourth node if it has none; with a number behind it
/// if another node has the same.
fn unique_names(nodes: &[NodeProto]) -> Vec<String> {
    let mut taken: HashSet<String> = nodes.iter().map(|node| node.name().to_string()).collect();
    let mut used = HashSet::new();
    let mut names = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        let mut name = node.name().to_string();
        if name.is_empty() || used.contains(&name) {
            let base = if name.is_empty() {
                format!("{}_{index}", node.op_type())
            } else {
                format!("{name}_{index}")
            };
            name = std::iter::once(base.clone())
                .chain((1..).map(|number| format!("{base}_{number}")))
                .find(|candidate| !taken.contains(candidate))
                .unwrap_or(base);
            taken.insert(name.clone());
        }
        used.insert(name.clone());
        names.push(name);
    }
    names
}

fn refuse_subgraphs(node: &NodeProto, name: &str) -> Result<(), GraphErrorKind> {
    if node
        .attribute
        .iter()
        .any(|attribute| attribute.g.is_some() || !attribute.graphs.is_empty())
    {
        return Err(GraphErrorKind::Subgraph {
            operator: node.op_type().into(),
            node: name.into(),
        });
    }
    Ok(())
}

fn raw<'a>(
    model: &Model,
    node: &'a NodeProto,
    name: String,
) -> Result<RawNode<'a>, GraphErrorKind> {
    let mut attributes = BTreeMap::new();
    for proto in &node.attribute {
        attributes.insert(proto.name().to_string(), attribute(model, proto, &name)?);
    }
    Ok(RawNode {
        attributes,
        op_type: node.op_type(),
        inputs: node.input.iter().map(String::as_str).collect(),
        outputs: node.output.iter().map(String::as_str).collect(),
        name,
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

    fn node(name: &str, op_type: &str) -> NodeProto {
        NodeProto {
            name: Some(name.into()),
            op_type: Some(op_type.into()),
            ..NodeProto::default()
        }
    }

    #[test]
    fn names_become_unique_and_stable() {
        let nodes = [
            node("", "Relu"),
            node("a", "Conv"),
            node("a", "Conv"),
            node("", "Gemm"),
            node("Gemm_3", "Gemm"),
        ];
        assert_eq!(
            unique_names(&nodes),
            ["Relu_0", "a", "a_2", "Gemm_3_1", "Gemm_3"]
        );
    }

    #[test]
    fn sorting_keeps_the_files_order_where_it_can() {
        let reads = BTreeMap::from([(0, vec![3]), (1, vec![]), (2, vec![0, 1]), (3, vec![])]);
        assert_eq!(topological(&reads), Ok(vec![1, 3, 0, 2]));
        let cycle = BTreeMap::from([(0, vec![]), (1, vec![2]), (2, vec![1])]);
        assert_eq!(topological(&cycle), Err(1));
    }
}
