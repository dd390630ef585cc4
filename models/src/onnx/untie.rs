//! Weights that an exporter stored once because they were equal.
//!
//! The exporter that goes by `torch.export` keeps one initializer for all that have the same bytes, and nothing in the
//! file tells the biases and scales of a fresh model apart. Tensors that hold one number everywhere are what
//! such models have in common; others that several nodes read are shared by the model itself.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use prost::Message as _;

use super::message::Message;
use super::proto::{GraphProto, TensorProto};
use super::wire::{self, field};
use super::write::{IR_INITIALIZERS_ALONE, value_info};
use super::{Model, OnnxError};
use crate::tensor::Tensor;

/// Places in the file's nodes that read a tensor: node and input.
type Readers = Vec<(usize, usize)>;

impl Model {
    /// Initializers of more than one element that hold one number everywhere and that several places of the
    /// graph's nodes read, with the names of these nodes. Identity nodes give names of their own and do not count.
    pub fn shared_fills(&self) -> BTreeMap<String, Vec<String>> {
        let nodes = &self.graph().node;
        let label = |&(node, _): &(usize, usize)| super::model::node_label(&nodes[node], node);
        let readers = self.readers();
        let named = readers.into_iter().map(|(name, readers)| {
            let labels = readers.iter().map(label).collect();
            (name.to_owned(), labels)
        });
        named.collect()
    }

    /// The model with an initializer of its own for every place that reads one of [`Self::shared_fills`]. The digest
    /// stays that of the file.
    ///
    /// # Errors
    /// As for [`Self::from_bytes`], should the names of the copies be taken by something that cannot be seen here.
    pub fn untied(self) -> Result<Model, OnnxError> {
        let readers = self.readers();
        if readers.is_empty() {
            return Ok(self);
        }
        let mut taken: HashSet<&str> = self.initializers().keys().map(String::as_str).collect();
        for node in &self.graph().node {
            taken.extend(node.output.iter().map(String::as_str));
        }
        let mut names: BTreeMap<(usize, usize), String> = BTreeMap::new();
        let mut copies: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for (name, places) in readers {
            let mut number = 1;
            for place in places.into_iter().skip(1) {
                let copy = loop {
                    number += 1;
                    let copy = format!("{name}:{number}");
                    if !taken.contains(copy.as_str()) {
                        break copy;
                    }
                };
                names.insert(place, copy.clone());
                copies.entry(name).or_default().push(copy);
            }
        }
        let mut bytes = Vec::new();
        self.with_copies(&names, &copies)?
            .write(&self.bytes, &mut bytes)
            .expect("memory takes what is written");
        let mut untied = Model::from_bytes(bytes, self.path.clone())?;
        untied.sha256 = self.sha256;
        Ok(untied)
    }

    fn readers(&self) -> BTreeMap<&str, Readers> {
        let graph = self.graph();
        let mut readers: BTreeMap<&str, Readers> = BTreeMap::new();
        for (index, node) in graph.node.iter().enumerate() {
            if node.op_type() == "Identity" {
                continue;
            }
            for (input, name) in node.input.iter().enumerate() {
                if let Some((name, value)) = self.initializers().get_key_value(name)
                    && is_fill(value)
                {
                    readers.entry(name).or_default().push((index, input));
                }
            }
        }
        readers.retain(|_, places| places.len() > 1);
        readers
    }

    fn with_copies(
        &self,
        names: &BTreeMap<(usize, usize), String>,
        copies: &BTreeMap<&str, Vec<String>>,
    ) -> Result<Message<'_>, OnnxError> {
        let mut message = Message::default();
        for part in self.fields(0..self.bytes.len())? {
            match part.payload {
                Some(payload) if part.number == field::MODEL_GRAPH => {
                    let mut graph = Message::default();
                    let mut node = 0;
                    for part in self.fields(payload)? {
                        match part.payload {
                            Some(payload) if part.number == field::GRAPH_NODE => {
                                graph.nest(part.number, self.renamed(node, payload, names)?);
                                node += 1;
                            }
                            _ => graph.copy(part.all),
                        }
                    }
                    self.put_copies(&mut graph, copies);
                    message.nest(part.number, graph);
                }
                _ => message.copy(part.all),
            }
        }
        Ok(message)
    }

    /// A node whose inputs have the names of the copies.
    fn renamed(
        &self,
        node: usize,
        range: Range<usize>,
        names: &BTreeMap<(usize, usize), String>,
    ) -> Result<Message<'_>, OnnxError> {
        let mut message = Message::default();
        let mut input = 0;
        for part in self.fields(range)? {
            if part.number != field::NODE_INPUT {
                message.copy(part.all);
                continue;
            }
            match names.get(&(node, input)) {
                Some(name) => {
                    let mut bytes = Vec::new();
                    wire::put_bytes(&mut bytes, field::NODE_INPUT, name.as_bytes());
                    message.push(bytes);
                }
                None => message.copy(part.all),
            }
            input += 1;
        }
        Ok(message)
    }

    /// Appends the copies, as graph inputs too where the file's version asks for that.
    fn put_copies(&self, message: &mut Message<'_>, copies: &BTreeMap<&str, Vec<String>>) {
        let GraphProto { initializer, .. } = self.graph();
        let sources = initializer
            .iter()
            .filter_map(|proto| Some((proto, copies.get(proto.name())?)));
        for (proto, names) in sources {
            for name in names {
                let mut bytes = Vec::new();
                if self.proto.ir_version() < IR_INITIALIZERS_ALONE {
                    let info = value_info(name, proto.data_type(), &proto.dims);
                    wire::put_bytes(&mut bytes, field::GRAPH_INPUT, &info.encode_to_vec());
                }
                let copy = TensorProto {
                    name: Some(name.clone()),
                    ..proto.clone()
                };
                wire::put_bytes(&mut bytes, field::GRAPH_INITIALIZER, &copy.encode_to_vec());
                message.push(bytes);
            }
        }
    }
}

fn is_fill(value: &Tensor) -> bool {
    value.len() > 1 && value.is_one_number()
}
