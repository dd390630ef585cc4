//! Model-local functions and branches of If as plain nodes: every value gets the one name that it has in
//! the whole graph, so that nothing after this needs to know of scopes.
//!
//! A call of a function is replaced by the function's nodes. Which branch of an If runs may only show
//! when shapes are known, so both are kept beside the node until then.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::GraphErrorKind;
use crate::onnx::Model;
use crate::onnx::proto::{AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto};

/// Nodes that all functions of a file may come to; beyond it calls of calls have got out of hand.
const MAX_NODES: usize = 1 << 20;
/// Depth to which functions and branches may be nested.
const MAX_DEPTH: usize = 64;

/// A node of the file at one place of the graph: a function's node has one for each call.
#[derive(Debug)]
pub(super) struct Instance<'a> {
    /// Unique in the graph.
    pub name: String,
    pub op_type: &'a str,
    /// Version of the default operator set that it goes by.
    pub opset: i64,
    pub attributes: Vec<(&'a str, &'a AttributeProto)>,
    /// Values it reads; empty where an optional input is left out.
    pub inputs: Vec<String>,
    /// Values it makes; empty where an output is left out.
    pub outputs: Vec<String>,
    /// The branches of an If: then, else.
    pub branches: Option<[Body<'a>; 2]>,
    /// Whether it stands in a function or a branch.
    pub inner: bool,
}

/// A branch.
#[derive(Debug)]
pub(super) struct Body<'a> {
    pub initializers: Vec<(String, &'a TensorProto)>,
    pub nodes: Vec<Instance<'a>>,
    pub outputs: Vec<String>,
}

impl Instance<'_> {
    /// Names of all values that it needs, those included that only its branches read.
    pub fn reads(&self) -> Vec<&str> {
        let mut reads: Vec<&str> = self.inputs.iter().map(String::as_str).collect();
        for body in self.branches.iter().flatten() {
            let own = body.initializers.iter().map(|(name, _)| name.as_str());
            let made = body.nodes.iter().flat_map(|node| &node.outputs);
            let own: HashSet<&str> = own.chain(made.map(String::as_str)).collect();
            let needed = body.nodes.iter().flat_map(Instance::reads);
            let needed = needed.chain(body.outputs.iter().map(String::as_str));
            reads.extend(needed.filter(|name| !own.contains(name)));
        }
        reads.retain(|name| !name.is_empty());
        reads
    }
}

/// The nodes of a model with all calls of functions replaced, in the file's order.
pub(super) fn instances(model: &Model) -> Result<Vec<Instance<'_>>, GraphErrorKind> {
    let functions = model.functions();
    let mut taken = BTreeSet::new();
    names_in(model.graph(), &mut taken);
    let mut expander = Expander {
        functions: functions.iter().map(|f| (key_of(f), f)).collect(),
        taken,
        count: 0,
        depth: 0,
    };
    let scope = Scope {
        prefix: String::new(),
        names: HashMap::new(),
        outer: None,
        attributes: None,
        opset: model.opset(),
    };
    expander.nodes(&model.graph().node, &scope)
}

/// What a function is called by: domain, name, overload.
type Key<'a> = (&'a str, &'a str, &'a str);

fn key_of(function: &FunctionProto) -> Key<'_> {
    (
        plain_domain(function.domain()),
        function.name(),
        function.overload(),
    )
}

fn plain_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// Names of values as a function's body or a branch sees them.
struct Scope<'a, 's> {
    /// What goes before the names of its own values and nodes.
    prefix: String,
    /// Its own values, and for a function the values it is called with.
    names: HashMap<&'a str, String>,
    /// The scope around a branch.
    outer: Option<&'s Scope<'a, 's>>,
    /// The attributes that a function is called with; `None` outside of functions.
    attributes: Option<&'s HashMap<&'a str, &'a AttributeProto>>,
    opset: i64,
}

impl Scope<'_, '_> {
    fn resolve(&self, name: &str) -> String {
        match (self.names.get(name), self.outer) {
            _ if name.is_empty() => String::new(),
            (Some(name), _) => name.clone(),
            (None, Some(outer)) => outer.resolve(name),
            (None, None) => format!("{}{name}", self.prefix),
        }
    }
}

struct Expander<'a> {
    functions: HashMap<Key<'a>, &'a FunctionProto>,
    /// Names of the file's nodes and values.
    taken: BTreeSet<&'a str>,
    count: usize,
    depth: usize,
}

impl<'a> Expander<'a> {
    fn nodes(
        &mut self,
        nodes: &'a [NodeProto],
        scope: &Scope<'a, '_>,
    ) -> Result<Vec<Instance<'a>>, GraphErrorKind> {
        let mut instances = Vec::with_capacity(nodes.len());
        for (node, name) in nodes.iter().zip(unique_names(nodes)) {
            let name = format!("{}{name}", scope.prefix);
            self.count += 1;
            if self.count > MAX_NODES || self.depth > MAX_DEPTH {
                return Err(GraphErrorKind::Nesting { node: name });
            }
            let key = (plain_domain(node.domain()), node.op_type(), node.overload());
            match self.functions.get(&key) {
                Some(&function) => {
                    self.depth += 1;
                    instances.extend(self.call(node, &name, function, scope)?);
                    self.depth -= 1;
                }
                None => instances.push(self.instance(node, name, scope)?),
            }
        }
        Ok(instances)
    }

    fn call(
        &mut self,
        node: &'a NodeProto,
        name: &str,
        function: &'a FunctionProto,
        scope: &Scope<'a, '_>,
    ) -> Result<Vec<Instance<'a>>, GraphErrorKind> {
        let given = |names: &'a [String], position: usize| {
            let name = names.get(position).map_or("", String::as_str);
            scope.resolve(name)
        };
        let prefix = self.fresh_prefix(format!("{name}/"));
        let mut names = HashMap::new();
        for (position, formal) in function.output.iter().enumerate() {
            let actual = given(&node.output, position);
            if !actual.is_empty() {
                names.insert(formal.as_str(), actual);
            }
        }
        for (position, formal) in function.input.iter().enumerate() {
            names.insert(formal.as_str(), given(&node.input, position));
        }
        let defaults = function.attribute_proto.iter().map(|a| (a.name(), a));
        let attributes = defaults.chain(attributes(node, scope)).collect();
        let imports = function.opset_import.iter();
        let opset = imports
            .filter(|import| plain_domain(import.domain()).is_empty())
            .map(|import| import.version())
            .next();
        let body = Scope {
            prefix,
            names,
            outer: None,
            attributes: Some(&attributes),
            opset: opset.unwrap_or(scope.opset),
        };
        self.nodes(&function.node, &body)
    }

    fn instance(
        &mut self,
        node: &'a NodeProto,
        name: String,
        scope: &Scope<'a, '_>,
    ) -> Result<Instance<'a>, GraphErrorKind> {
        let attributes = attributes(node, scope);
        let graph = |branch: &str| {
            let (_, attribute) = attributes.iter().find(|(name, _)| *name == branch)?;
            attribute.g.as_deref()
        };
        let branches = match (graph("then_branch"), graph("else_branch")) {
            (Some(then), Some(otherwise)) if node.op_type() == "If" => {
                self.depth += 1;
                let branches = [
                    self.branch(then, &format!("{name}/then/"), scope)?,
                    self.branch(otherwise, &format!("{name}/else/"), scope)?,
                ];
                self.depth -= 1;
                Some(branches)
            }
            _ => None,
        };
        let resolve = |names: &[String]| names.iter().map(|name| scope.resolve(name)).collect();
        Ok(Instance {
            name,
            op_type: node.op_type(),
            opset: scope.opset,
            attributes,
            inputs: resolve(&node.input),
            outputs: resolve(&node.output),
            branches,
            inner: !scope.prefix.is_empty(),
        })
    }

    fn branch(
        &mut self,
        graph: &'a GraphProto,
        prefix: &str,
        outer: &Scope<'a, '_>,
    ) -> Result<Body<'a>, GraphErrorKind> {
        let prefix = self.fresh_prefix(prefix.to_string());
        let made = graph.node.iter().flat_map(|node| &node.output);
        let own = made
            .map(String::as_str)
            .chain(graph.initializer.iter().map(|proto| proto.name()));
        let names = own
            .filter(|name| !name.is_empty())
            .map(|name| (name, format!("{prefix}{name}")))
            .collect();
        let scope = Scope {
            prefix,
            names,
            outer: Some(outer),
            attributes: outer.attributes,
            opset: outer.opset,
        };
        Ok(Body {
            initializers: graph
                .initializer
                .iter()
                .map(|proto| (scope.resolve(proto.name()), proto))
                .collect(),
            nodes: self.nodes(&graph.node, &scope)?,
            outputs: graph
                .output
                .iter()
                .map(|output| scope.resolve(output.name()))
                .collect(),
        })
    }

    /// The prefix, made such that no name of the file begins with it.
    fn fresh_prefix(&self, mut prefix: String) -> String {
        while self
            .taken
            .range(prefix.as_str()..)
            .next()
            .is_some_and(|name| name.starts_with(&prefix))
        {
            prefix.pop();
            prefix.push_str("'/");
        }
        prefix
    }
}

/// A node's attributes, those of the call in place where a function's node refers to them.
fn attributes<'a>(
    node: &'a NodeProto,
    scope: &Scope<'a, '_>,
) -> Vec<(&'a str, &'a AttributeProto)> {
    let resolve = |attribute: &'a AttributeProto| match attribute.ref_attr_name() {
        "" => Some((attribute.name(), attribute)),
        name => Some((attribute.name(), *scope.attributes?.get(name)?)),
    };
    node.attribute.iter().filter_map(resolve).collect()
}

/// Names of nodes, and of values that are the graph's own.
fn names_in<'a>(graph: &'a GraphProto, names: &mut BTreeSet<&'a str>) {
    for node in &graph.node {
        names.insert(node.name());
        names.extend(node.output.iter().map(String::as_str));
    }
    names.extend(graph.initializer.iter().map(|proto| proto.name()));
    names.extend(graph.input.iter().map(|input| input.name()));
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
}
