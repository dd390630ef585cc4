use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use prost::Message;
use prost::bytes::Bytes;
use sha2::{Digest, Sha256};

use super::proto::{FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto};
use super::wire::{self, WireError, field};
use super::{OnnxError, tensor};
use crate::tensor::Tensor;

/// Versions of the default operator set whose operators this crate knows.
pub const SUPPORTED_OPSETS: RangeInclusive<i64> = 7..=23;

/// An ONNX file in memory, checked as far as that needs no knowledge of operators.
#[derive(Debug)]
pub struct Model {
    pub(super) path: PathBuf,
    pub(super) bytes: Bytes,
    pub(super) proto: ModelProto,
    pub(super) sha256: String,
    opset: i64,
    initializers: BTreeMap<String, Tensor>,
}

impl Model {
    /// Reads a file.
    ///
    /// Errors name the file and, where there is one, the tensor or node: unreadable, truncated or other
    /// data; no graph; an unsupported opset; operators of other domains; tensors whose data does not fit
    /// their shape or lies outside the model's folder.
    pub fn open(path: impl AsRef<Path>) -> Result<Model, OnnxError> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|error| OnnxError::Read {
            path: path.into(),
            error,
        })?;
        Model::from_bytes(bytes, path)
    }

    /// As [`Self::open`], for bytes already read; `path` is used in messages and to find external data.
    pub fn from_bytes(
        bytes: impl Into<Bytes>,
        path: impl Into<PathBuf>,
    ) -> Result<Model, OnnxError> {
        let (bytes, path) = (bytes.into(), path.into());
        let proto = decode(&bytes, &path)?;
        let malformed = |reason: &str| OnnxError::Malformed {
            path: path.clone(),
            reason: reason.into(),
        };
        let Some(graph) = &proto.graph else {
            return Err(malformed(if bytes.is_empty() {
                "the file is empty"
            } else {
                "it holds no graph"
            }));
        };
        if graph.output.is_empty() {
            return Err(malformed("its graph has no output"));
        }
        let opset = default_opset(&proto).ok_or_else(|| malformed("it imports no operator set"))?;
        if !SUPPORTED_OPSETS.contains(&opset) {
            return Err(OnnxError::Opset {
                path,
                version: opset,
                supported: SUPPORTED_OPSETS,
            });
        }
        let bodies = proto.functions.iter().map(|function| &function.node);
        for nodes in std::iter::once(&graph.node).chain(bodies) {
            if let Some((name, node)) = foreign_node(nodes, &proto.functions) {
                return Err(OnnxError::ForeignOperator {
                    node: name,
                    operator: node.op_type().into(),
                    domain: node.domain().into(),
                    path,
                });
            }
        }
        let initializers = read_initializers(graph, &path)?;
        let sha256 = Sha256::digest(&bytes)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Ok(Model {
            path,
            bytes,
            proto,
            sha256,
            opset,
            initializers,
        })
    }

    /// The file as it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// SHA-256 of the file's bytes, in lower-case hexadecimal; external data is not part of it.
    pub fn sha256(&self) -> &str {
        &self.sha256
    }

    /// Version of the default operator set.
    pub fn opset(&self) -> i64 {
        self.opset
    }

    /// Initializers by name, on the host.
    pub fn initializers(&self) -> &BTreeMap<String, Tensor> {
        &self.initializers
    }

    pub(crate) fn graph(&self) -> &GraphProto {
        self.proto
            .graph
            .as_ref()
            .expect("checked when the model was read")
    }

    /// Functions that the file defines for its own use.
    pub(crate) fn functions(&self) -> &[FunctionProto] {
        &self.proto.functions
    }

    /// Decodes a tensor that is an attribute of a node.
    pub(crate) fn attribute_tensor(
        &self,
        proto: &TensorProto,
        node: &str,
    ) -> Result<Tensor, OnnxError> {
        decode_tensor(proto, node, &self.path)
    }
}

/// The name of a node, or a stand-in made of its place in the file.
pub(crate) fn node_label(node: &NodeProto, index: usize) -> String {
    match node.name() {
        "" => format!("{}_{index}", node.op_type()),
        name => name.into(),
    }
}

/// The first node, in branches too, whose operator neither ONNX nor the file itself defines, with its name.
fn foreign_node<'a>(
    nodes: &'a [NodeProto],
    functions: &[FunctionProto],
) -> Option<(String, &'a NodeProto)> {
    nodes.iter().enumerate().find_map(|(index, node)| {
        let defined = || {
            functions
                .iter()
                .any(|f| f.domain() == node.domain() && f.name() == node.op_type())
        };
        if !is_default(node.domain()) && !defined() {
            return Some((node_label(node, index), node));
        }
        let mut graphs = node.attribute.iter().filter_map(|a| a.g.as_deref());
        graphs.find_map(|graph| foreign_node(&graph.node, functions))
    })
}

fn is_default(domain: &str) -> bool {
    matches!(domain, "" | "ai.onnx")
}

fn default_opset(proto: &ModelProto) -> Option<i64> {
    let import = proto
        .opset_import
        .iter()
        .find(|import| is_default(import.domain()));
    import.map(|import| import.version())
}

fn decode(bytes: &Bytes, path: &Path) -> Result<ModelProto, OnnxError> {
    // The outermost fields first: prost reports a truncated file only as a buffer underflow.
    match wire::fields(bytes, 0..bytes.len()) {
        Err(WireError::Truncated { needs }) if bytes.first().is_some_and(|&key| key == 8) => {
            return Err(OnnxError::Truncated {
                path: path.into(),
                length: bytes.len(),
                needs,
            });
        }
        Err(_) => {
            let reason = "its bytes are not a protocol buffer message".to_string();
            return Err(OnnxError::Malformed {
                path: path.into(),
                reason,
            });
        }
        Ok(fields)
            if fields
                .iter()
                .filter(|f| f.number == field::MODEL_GRAPH)
                .count()
                > 1 =>
        {
            let reason = "it holds more than one graph".to_string();
            return Err(OnnxError::Malformed {
                path: path.into(),
                reason,
            });
        }
        Ok(_) => {}
    }
    ModelProto::decode(bytes.clone()).map_err(|error| OnnxError::Malformed {
        path: path.into(),
        reason: error.to_string(),
    })
}

fn read_initializers(
    graph: &GraphProto,
    path: &Path,
) -> Result<BTreeMap<String, Tensor>, OnnxError> {
    let unusable = |tensor: &str, reason: &str| OnnxError::Tensor {
        path: path.into(),
        tensor: tensor.into(),
        reason: reason.into(),
    };
    if let Some(sparse) = graph.sparse_initializer.first() {
        let name = sparse.values.as_ref().map_or("", |values| values.name());
        return Err(unusable(
            name,
            "sparse initializers are not supported; store it as a dense one",
        ));
    }
    let mut initializers = BTreeMap::new();
    for proto in &graph.initializer {
        if proto.name().is_empty() {
            return Err(unusable("", "an initializer has no name"));
        }
        let tensor = decode_tensor(proto, proto.name(), path)?;
        if initializers
            .insert(proto.name().to_string(), tensor)
            .is_some()
        {
            return Err(unusable(proto.name(), "two initializers have this name"));
        }
    }
    Ok(initializers)
}

fn decode_tensor(proto: &TensorProto, name: &str, path: &Path) -> Result<Tensor, OnnxError> {
    let folder = path.parent().unwrap_or(Path::new(""));
    tensor::decode(proto, folder).map_err(|reason| OnnxError::Tensor {
        path: path.into(),
        tensor: name.into(),
        reason,
    })
}
