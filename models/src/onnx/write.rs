//! Writing trained weights back by patching the bytes of the file that was read.
//!
//! Only the data of the weights changes: every other field, also those that no schema here knows, is
//! copied as it stands. A weight that is an initializer or the value of a Constant node is replaced in
//! place, in the element type the file has for it; one that another node makes (ConstantOfShape, or
//! Identity of another initializer) becomes an initializer of that name and the node goes.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use prost::Message as _;
use prost::bytes::Bytes;

use super::message::{Chunk, Message, write_file};
use super::proto::{
    Dimension, DimensionValue, EXTERNAL, NodeProto, TensorProto, TensorShapeProto, TensorType,
    TypeProto, TypeValue, ValueInfoProto, data_type,
};
use super::wire::{self, Field, field};
use super::{Model, OnnxError, tensor};
use crate::tensor::{DType, Tensor};

/// Largest message that protocol buffer libraries read.
pub(super) const MESSAGE_LIMIT: usize = i32::MAX as usize;
/// Tensors below this size stay in the model file also when others go to a file of their own.
const EXTERNAL_MINIMUM: usize = 1024;
/// Alignment of tensors in an external file, so that readers can map it.
const EXTERNAL_ALIGNMENT: usize = 4096;
/// First IR version whose initializers need not be graph inputs too.
pub(super) const IR_INITIALIZERS_ALONE: i64 = 4;

impl Model {
    /// Writes the model with other values for the named weights to `path`.
    ///
    /// A name is that of an initializer or of the output of a node that holds a constant. Names that are
    /// left out keep their values. Data goes to `<path>.data` where the model had external data or where
    /// it would outgrow the 2 GiB that a protocol buffer message may have. Files appear under their
    /// names only when complete.
    ///
    /// Errors: a name that the model lacks, a shape or type other than the model's, or a failing disk.
    pub fn write_back<N: AsRef<str>>(
        &self,
        weights: &[(N, Tensor)],
        path: impl AsRef<Path>,
    ) -> Result<(), OnnxError> {
        self.write_back_within(weights, path.as_ref(), MESSAGE_LIMIT)
    }

    pub(super) fn write_back_within<N: AsRef<str>>(
        &self,
        weights: &[(N, Tensor)],
        path: &Path,
        limit: usize,
    ) -> Result<(), OnnxError> {
        let weights: BTreeMap<_, _> = weights
            .iter()
            .map(|(name, tensor)| (name.as_ref(), tensor))
            .collect();
        let mut data_path = path.as_os_str().to_owned();
        data_path.push(".data");
        let data_path = PathBuf::from(data_path);
        let location = data_path
            .file_name()
            .map(|name| name.to_string_lossy().into_owned());

        let mut patcher = Patcher::new(
            self,
            &weights,
            location.as_deref().filter(|_| self.has_external_data()),
            false,
        );
        let mut message = patcher.model()?;
        if message.size > limit {
            patcher = Patcher::new(self, &weights, location.as_deref(), true);
            message = patcher.model()?;
        }

        let failed = |error| OnnxError::Write {
            path: path.into(),
            error,
        };
        if !patcher.data.chunks.is_empty() {
            write_file(&data_path, |out| patcher.data.write(&self.bytes, out)).map_err(failed)?;
        }
        write_file(path, |out| message.write(&self.bytes, out)).map_err(failed)
    }

    fn has_external_data(&self) -> bool {
        let attributes = self.graph().node.iter().flat_map(|node| &node.attribute);
        let mut tensors = self
            .graph()
            .initializer
            .iter()
            .chain(attributes.filter_map(|a| a.t.as_ref()));
        tensors.any(|tensor| tensor.data_location() == EXTERNAL)
    }

    /// The fields of a message that fills `range` of the file.
    pub(super) fn fields(&self, range: Range<usize>) -> Result<Vec<Field>, OnnxError> {
        wire::fields(&self.bytes, range).map_err(|_| OnnxError::Malformed {
            path: self.path.clone(),
            reason: "its bytes are not a protocol buffer message".into(),
        })
    }

    fn weight_error(&self, weight: &str, reason: impl Into<String>) -> OnnxError {
        OnnxError::Weight {
            path: self.path.clone(),
            weight: weight.into(),
            reason: reason.into(),
        }
    }
}

/// Walks the original's bytes alongside its decoded form.
struct Patcher<'a> {
    model: &'a Model,
    weights: &'a BTreeMap<&'a str, &'a Tensor>,
    /// Name of the external file, if large tensors go there.
    location: Option<&'a str>,
    /// Whether tensors go there that keep their values and lie in the model file.
    moves_kept: bool,
    /// Contents of the external file.
    data: Message<'a>,
    written: BTreeSet<&'a str>,
    /// Weights whose node goes: name and element type of the initializer that takes its place.
    promoted: Vec<(&'a str, i32)>,
}

impl<'a> Patcher<'a> {
    fn new(
        model: &'a Model,
        weights: &'a BTreeMap<&'a str, &'a Tensor>,
        location: Option<&'a str>,
        moves_kept: bool,
    ) -> Self {
        Patcher {
            model,
            weights,
            location,
            moves_kept,
            data: Message::default(),
            written: BTreeSet::new(),
            promoted: Vec::new(),
        }
    }

    fn model(&mut self) -> Result<Message<'a>, OnnxError> {
        let mut message = Message::default();
        for field in self.model.fields(0..self.model.bytes.len())? {
            match field.payload {
                Some(payload) if field.number == field::MODEL_GRAPH => {
                    message.nest(field.number, self.graph(payload)?);
                }
                _ => message.copy(field.all),
            }
        }
        match self
            .weights
            .keys()
            .find(|name| !self.written.contains(*name))
        {
            Some(name) => Err(self.model.weight_error(
                name,
                "the model has no initializer or constant of this name",
            )),
            None => Ok(message),
        }
    }

    fn graph(&mut self, range: Range<usize>) -> Result<Message<'a>, OnnxError> {
        let graph = self.model.graph();
        let (mut nodes, mut initializers) = (graph.node.iter(), graph.initializer.iter());
        let mut message = Message::default();
        for Field {
            number,
            all,
            payload,
        } in self.model.fields(range)?
        {
            let patched = match (number, payload) {
                (field::GRAPH_INITIALIZER, Some(payload)) => match initializers.next() {
                    Some(proto) => self.tensor(payload, proto, proto.name())?,
                    None => None,
                },
                (field::GRAPH_NODE, Some(payload)) => match nodes.next() {
                    Some(node) if self.promote(node)? => continue,
                    Some(node) => self.node(payload, node)?,
                    None => None,
                },
                _ => None,
            };
            match patched {
                Some(patched) => message.nest(number, patched),
                None => message.copy(all),
            }
        }
        for (name, element) in std::mem::take(&mut self.promoted) {
            let dims: Vec<i64> = self.weights[name]
                .shape()
                .iter()
                .map(|&dim| dim as i64)
                .collect();
            if self.model.proto.ir_version() < IR_INITIALIZERS_ALONE {
                let mut input = Vec::new();
                wire::put_bytes(
                    &mut input,
                    field::GRAPH_INPUT,
                    &value_info(name, element, &dims).encode_to_vec(),
                );
                message.push(input);
            }
            let proto = TensorProto {
                dims,
                data_type: Some(element),
                name: Some(name.into()),
                ..TensorProto::default()
            };
            let mut initializer = Message::default();
            initializer.push(proto.encode_to_vec());
            self.put_data(
                &mut initializer,
                Chunk::Weight(self.weights[name], element),
                name,
            )?;
            message.nest(field::GRAPH_INITIALIZER, initializer);
        }
        Ok(message)
    }

    /// Whether the node goes because an initializer takes the place of its output.
    fn promote(&mut self, node: &'a NodeProto) -> Result<bool, OnnxError> {
        let Some((name, weight)) = node
            .output
            .first()
            .and_then(|name| self.weights.get_key_value(name.as_str()))
        else {
            return Ok(false);
        };
        let attribute = |name: &str| {
            node.attribute
                .iter()
                .find(|attribute| attribute.name() == name)
        };
        let element = match node.op_type() {
            "Constant" if attribute("value").is_some() => return Ok(false),
            "Constant" => data_type::FLOAT,
            "ConstantOfShape" => {
                let value = attribute("value").and_then(|attribute| attribute.t.as_ref());
                value.map_or(data_type::FLOAT, TensorProto::data_type)
            }
            "Identity" => {
                let source = node.input.first().map_or("", String::as_str);
                let mut initializers = self.model.graph().initializer.iter();
                let source = initializers.find(|proto| proto.name() == source);
                let source = source.ok_or_else(|| {
                    self.model
                        .weight_error(name, "an Identity of a computed value")
                })?;
                self.check(name, weight, source)?;
                source.data_type()
            }
            other => {
                let reason = format!("node '{}' ({other}) computes it", node.name());
                return Err(self.model.weight_error(name, reason));
            }
        };
        if tensor::graph_dtype(element) != Some(DType::F32) || weight.dtype() != DType::F32 {
            return Err(self.model.weight_error(name, "it is no float tensor"));
        }
        self.written.insert(name);
        self.promoted.push((name, element));
        Ok(true)
    }

    /// A node with patched tensors in its attributes; `None` when it stays as it is.
    fn node(
        &mut self,
        range: Range<usize>,
        node: &'a NodeProto,
    ) -> Result<Option<Message<'a>>, OnnxError> {
        if node.attribute.iter().all(|attribute| attribute.t.is_none()) {
            return Ok(None);
        }
        let mut attributes = node.attribute.iter();
        let mut message = Message::default();
        let mut changed = false;
        for Field {
            number,
            all,
            payload,
        } in self.model.fields(range)?
        {
            let attribute = match number {
                field::NODE_ATTRIBUTE => attributes.next(),
                _ => None,
            };
            let (Some(attribute), Some(payload)) = (attribute, payload) else {
                message.copy(all);
                continue;
            };
            let holds_weight = node.op_type() == "Constant" && attribute.name() == "value";
            let name = if holds_weight {
                node.output.first().map_or("", String::as_str)
            } else {
                ""
            };
            let mut inner = Message::default();
            for Field {
                number,
                all,
                payload,
            } in self.model.fields(payload)?
            {
                let patched = match (number, payload, &attribute.t) {
                    (field::ATTRIBUTE_TENSOR, Some(payload), Some(proto)) => {
                        self.tensor(payload, proto, name)?
                    }
                    _ => None,
                };
                match patched {
                    Some(patched) => {
                        inner.nest(number, patched);
                        changed = true;
                    }
                    None => inner.copy(all),
                }
            }
            message.nest(number, inner);
        }
        Ok(changed.then_some(message))
    }

    /// A tensor with new data, or with its external data in the new place; `None` when it stays as it is.
    fn tensor(
        &mut self,
        range: Range<usize>,
        proto: &'a TensorProto,
        name: &str,
    ) -> Result<Option<Message<'a>>, OnnxError> {
        let mut data = None;
        if let Some((&name, &weight)) = self.weights.get_key_value(name) {
            self.check(name, weight, proto)?;
            self.written.insert(name);
            // A weight that did not change keeps its bytes, also those that float cannot hold (double).
            let old = self.model.attribute_tensor(proto, name)?;
            let same = old
                .f32s()
                .iter()
                .zip(weight.f32s())
                .all(|(old, new)| old.to_bits() == new.to_bits());
            if !same {
                data = Some(Chunk::Weight(weight, proto.data_type()));
            }
        }
        let inline = proto.raw_data.as_ref().map_or(0, Bytes::len);
        let moves = self.moves_kept && inline >= EXTERNAL_MINIMUM;
        if data.is_none() && (moves || proto.data_location() == EXTERNAL) {
            let folder = self.model.path.parent().unwrap_or(Path::new(""));
            let kept = tensor::raw_bytes(proto, folder)
                .map_err(|reason| self.model.weight_error(name, reason))?;
            data = kept.map(Chunk::Kept);
        }
        let Some(data) = data else {
            return Ok(None);
        };
        let mut message = Message::default();
        let mut data = Some(data);
        for Field { number, all, .. } in self.model.fields(range)? {
            match number {
                field::TENSOR_RAW_DATA => {
                    if let Some(data) = data.take() {
                        self.put_data(&mut message, data, name)?;
                    }
                }
                field::TENSOR_FLOAT_DATA
                | field::TENSOR_INT32_DATA
                | field::TENSOR_DOUBLE_DATA
                | field::TENSOR_EXTERNAL_DATA
                | field::TENSOR_DATA_LOCATION => {}
                _ => message.copy(all),
            }
        }
        if let Some(data) = data {
            self.put_data(&mut message, data, name)?;
        }
        Ok(Some(message))
    }

    /// Puts a tensor's data into it or, if it is large and others are there too, into the external file.
    fn put_data(
        &mut self,
        message: &mut Message<'a>,
        data: Chunk<'a>,
        name: &str,
    ) -> Result<(), OnnxError> {
        let size = match &data {
            Chunk::Weight(weight, element) => weight.len() * tensor::raw_size(*element),
            Chunk::Kept(bytes) => bytes.len(),
            Chunk::Original(_) | Chunk::New(_) => {
                return Err(self.model.weight_error(name, "it is no tensor data"));
            }
        };
        let mut head = Vec::new();
        let Some(location) = self.location.filter(|_| size >= EXTERNAL_MINIMUM) else {
            wire::put_header(&mut head, field::TENSOR_RAW_DATA, size);
            message.push(head);
            message.push_data(data, size);
            return Ok(());
        };
        let padding = self.data.size.next_multiple_of(EXTERNAL_ALIGNMENT) - self.data.size;
        self.data.push(vec![0; padding]);
        let entries = [
            ("location", location.to_string()),
            ("offset", self.data.size.to_string()),
            ("length", size.to_string()),
        ];
        for (key, value) in entries {
            let mut entry = Vec::new();
            wire::put_bytes(&mut entry, 1, key.as_bytes());
            wire::put_bytes(&mut entry, 2, value.as_bytes());
            wire::put_bytes(&mut head, field::TENSOR_EXTERNAL_DATA, &entry);
        }
        wire::put_int(&mut head, field::TENSOR_DATA_LOCATION, EXTERNAL as u64);
        message.push(head);
        self.data.push_data(data, size);
        Ok(())
    }

    fn check(&self, name: &str, weight: &Tensor, proto: &TensorProto) -> Result<(), OnnxError> {
        let shape: Vec<i64> = weight.shape().iter().map(|&dim| dim as i64).collect();
        if shape != proto.dims {
            let reason = format!(
                "its shape is {:?}, that of the new values {shape:?}",
                proto.dims
            );
            return Err(self.model.weight_error(name, reason));
        }
        if weight.dtype() != DType::F32
            || tensor::graph_dtype(proto.data_type()) != Some(DType::F32)
        {
            return Err(self.model.weight_error(name, "it is no float tensor"));
        }
        Ok(())
    }
}

pub(super) fn value_info(name: &str, element: i32, dims: &[i64]) -> ValueInfoProto {
    let dim = |&dim| Dimension {
        value: Some(DimensionValue::Value(dim)),
        denotation: None,
    };
    let shape = TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    };
    let tensor = TensorType {
        elem_type: Some(element),
        shape: Some(shape),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor)),
            denotation: None,
        }),
        ..ValueInfoProto::default()
    }
}
