//! The profile file, `dp.profile/1`: what every layer of one model costs on one device.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::file::{self, FileError};

/// The only profile schema this version reads and writes.
pub const PROFILE_SCHEMA: &str = "dp.profile/1";

/// Measured costs of every layer of one model at one batch size on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Always [`PROFILE_SCHEMA`].
    pub schema: String,
    /// The model that was measured.
    pub model: FileRef,
    /// The device in words, for example `cpu (AMD EPYC, avx512)`.
    pub device: String,
    /// Samples per minibatch.
    pub batch_size: usize,
    /// Cores that a worker owned while it was measured.
    pub threads: usize,
    /// The optimizer whose step was timed, for example `sgd-momentum`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<String>,
    /// How the model was read, where the profile says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<Reading>,
    /// In execution order: a topological order of the layer graph.
    pub layers: Vec<LayerProfile>,
    /// One entry per distinct (tensor, reading layer).
    pub edges: Vec<Edge>,
    /// Weights that several layers share. Each of those layers counts them among its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tied: Vec<Tied>,
    /// Median time of the whole model's training step (forward, backward, optimizer), milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub whole_step_ms: Option<f64>,
    /// Raw samples behind `whole_step_ms`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub whole_step_samples_ms: Vec<f64>,
    /// CPU seconds that one byte sent, received or reduced takes from the worker's own core (kappa).
    /// Zero for devices whose communication runs beside their compute.
    #[serde(default)]
    pub communication_s_per_byte: f64,
}

/// How a model was read: all that changes what is trained. dp-run reads it in the same way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// Sizes given to open dimensions, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub dims: BTreeMap<String, usize>,
    /// Whether Dropout and BatchNormalization train also where they were exported for inference.
    #[serde(default)]
    pub training_form: bool,
    /// Whether batch norm trains also where it was exported for inference.
    #[serde(default)]
    pub train_batch_norm: bool,
    /// Whether weights that only Identity nodes tell apart are trained apart.
    #[serde(default)]
    pub untie: bool,
    /// The model's output that the loss reads; its first one if none is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_output: Option<String>,
    /// What is minimised.
    #[serde(default)]
    pub loss: LossKind,
}

/// What training minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LossKind {
    /// Softmax and negative log likelihood.
    #[default]
    CrossEntropy,
    /// Mean squared error.
    Mse,
}

/// A file named in another file, with the digest that pins its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRef {
    /// The path as the user gave it.
    pub file: String,
    /// Lower-case hexadecimal SHA-256 of the file's bytes.
    pub sha256: String,
}

/// One layer: a compute node of the model with the cheap nodes fused onto it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerProfile {
    /// Unique within the profile.
    pub name: String,
    /// The ONNX operator of the compute node, for example `Conv`.
    pub kind: String,
    /// Every ONNX node in the layer, by name, in execution order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Median, milliseconds per minibatch.
    pub forward_ms: f64,
    /// Median, milliseconds per minibatch.
    pub backward_ms: f64,
    /// Median time of the optimizer step for this layer's weights, milliseconds.
    #[serde(default)]
    pub step_ms: f64,
    /// Median absolute deviation of `forward_ms`.
    #[serde(default)]
    pub forward_mad_ms: f64,
    /// Median absolute deviation of `backward_ms`.
    #[serde(default)]
    pub backward_mad_ms: f64,
    /// Median absolute deviation of `step_ms`.
    #[serde(default)]
    pub step_mad_ms: f64,
    /// Trainable weights, bytes.
    pub parameter_bytes: u64,
    /// Optimizer state (momentum, second moments), bytes.
    #[serde(default)]
    pub optimizer_bytes: u64,
    /// What one forward keeps for its backward, bytes.
    pub stash_bytes: u64,
    /// The model's own inputs that the layer reads, bytes: what a stage that recomputes keeps beside what others send it.
    #[serde(default)]
    pub input_bytes: u64,
    /// Scratch memory beyond weights, stash and outputs while the layer runs, bytes.
    #[serde(default)]
    pub workspace_bytes: u64,
    /// Raw samples behind `forward_ms`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forward_samples_ms: Vec<f64>,
    /// Raw samples behind `backward_ms`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub backward_samples_ms: Vec<f64>,
    /// Raw samples behind `step_ms`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub step_samples_ms: Vec<f64>,
}

/// A tensor that one layer makes and another reads.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Edge {
    /// Name of the producing layer.
    pub from: String,
    /// Name of the reading layer.
    pub to: String,
    /// Name of the tensor: traffic is counted once per tensor and receiving stage.
    pub tensor: String,
    /// Size for one minibatch.
    pub bytes: u64,
    /// Whether a gradient comes back (false for integer and bool tensors).
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub gradient: bool,
    /// Size of the gradient for one minibatch where it is not that of the tensor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_bytes: Option<u64>,
}

impl Edge {
    /// Bytes per minibatch of the gradient that comes back.
    #[must_use]
    pub fn returned_bytes(&self) -> u64 {
        if self.gradient {
            self.gradient_bytes.unwrap_or(self.bytes)
        } else {
            0
        }
    }
}

/// A weight tensor that several layers share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tied {
    /// Name of the weight tensor.
    pub tensor: String,
    /// Its size, bytes.
    pub parameter_bytes: u64,
    /// Optimizer state for it, bytes.
    #[serde(default)]
    pub optimizer_bytes: u64,
    /// Names of the layers, at least two.
    pub layers: Vec<String>,
}

/// What makes a profile unusable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ProfileError {
    /// Nothing was profiled.
    #[error("`layers` is empty: profile a model that has at least one compute node")]
    NoLayers,
    /// A count that must be at least one.
    #[error("`{field}` is 0: it must be at least 1, profile the model again")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A layer without a name.
    #[error("layer {index} has no name: every layer needs one of its own")]
    Unnamed {
        /// Its place in `layers`, from 0.
        index: usize,
    },
    /// Two layers of one name.
    #[error("two layers are named `{name}`: rename one of them")]
    DuplicateLayer {
        /// The name.
        name: String,
    },
    /// A time that is no time.
    #[error(
        "{place}: `{field}` is {value}: a time must be a number from 0 to {LONGEST_TIME:e}, profile again or correct it"
    )]
    Time {
        /// The layer, or the profile as a whole.
        place: String,
        /// The field.
        field: &'static str,
        /// What the file says.
        value: f64,
    },
    /// A size beyond any machine.
    #[error("{place}: `{field}` is {value} bytes, more than 1 PiB: correct it")]
    Size {
        /// The layer or edge.
        place: String,
        /// The field.
        field: &'static str,
        /// What the file says.
        value: u64,
    },
    /// An edge end that is no layer.
    #[error("edge `{from}` -> `{to}`: there is no layer `{missing}`")]
    UnknownLayer {
        /// Producing layer.
        from: String,
        /// Reading layer.
        to: String,
        /// The one that does not exist.
        missing: String,
    },
    /// The same tensor twice between the same layers.
    #[error("edge `{from}` -> `{to}` of tensor `{tensor}` stands there twice: remove one")]
    DuplicateEdge {
        /// Producing layer.
        from: String,
        /// Reading layer.
        to: String,
        /// The tensor.
        tensor: String,
    },
    /// Edges of one tensor that disagree.
    #[error(
        "the edges of tensor `{tensor}` of layer `{from}` differ in `bytes` or `gradient`: it is one tensor, make them equal"
    )]
    Disagreement {
        /// Producing layer.
        from: String,
        /// The tensor.
        tensor: String,
    },
    /// An edge without a gradient that gives the gradient's size.
    #[error(
        "edge `{from}` -> `{to}` has `gradient_bytes` although `gradient` is false: leave one of them out"
    )]
    NoGradient {
        /// Producing layer.
        from: String,
        /// Reading layer.
        to: String,
    },
    /// Shared weights that make no sense.
    #[error("`tied` weights `{tensor}`: {rule}")]
    Tied {
        /// The weights.
        tensor: String,
        /// What is asked for.
        rule: &'static str,
    },
    /// Layers that wait for each other.
    #[error("the layers form a cycle: {}: a model's layer graph has none, correct the edges", path.join(" -> "))]
    Cycle {
        /// Layer names along the cycle, the first again at the end.
        path: Vec<String>,
    },
    /// Layers listed in an order that could not be executed.
    #[error(
        "layer `{to}` reads from `{from}` but stands before it: list the layers in execution order"
    )]
    Order {
        /// Producing layer.
        from: String,
        /// Reading layer.
        to: String,
    },
}

/// No layer takes longer, in any unit; sums of such times stay finite.
const LONGEST_TIME: f64 = 1e15;

/// No size in a profile may exceed this, so that sums over layers cannot overflow.
const LARGEST_SIZE: u64 = 1 << 50;

const KIND: file::Kind = file::Kind {
    what: "profile",
    schema: PROFILE_SCHEMA,
    made_by: "dp-profile",
};

impl Profile {
    /// Reads and validates a profile.
    ///
    /// # Errors
    /// If the file cannot be read, is no profile of this schema, or contradicts itself.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let profile: Self = file::load(path, &KIND)?;
        profile.validate().map_err(|problem| FileError::Profile {
            path: path.to_owned(),
            problem,
        })?;
        Ok(profile)
    }

    /// Validates the profile and writes it, whole or not at all.
    ///
    /// # Errors
    /// If it contradicts itself or cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        self.validate().map_err(|problem| FileError::Profile {
            path: path.to_owned(),
            problem,
        })?;
        file::write_atomically(path, self.to_json().as_bytes())
    }

    /// The profile as it stands in its file.
    #[must_use]
    pub fn to_json(&self) -> String {
        file::to_json(self)
    }

    /// Checks everything that the planner relies on.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), ProfileError> {
        for (field, count) in [("batch_size", self.batch_size), ("threads", self.threads)] {
            if count == 0 {
                return Err(ProfileError::Zero { field });
            }
        }
        if self.layers.is_empty() {
            return Err(ProfileError::NoLayers);
        }
        let whole = "profile";
        check_time(whole, "whole_step_ms", self.whole_step_ms.unwrap_or(0.0))?;
        check_time(
            whole,
            "communication_s_per_byte",
            self.communication_s_per_byte,
        )?;
        let mut place_of = HashMap::new();
        for (index, layer) in self.layers.iter().enumerate() {
            if layer.name.is_empty() {
                return Err(ProfileError::Unnamed { index });
            }
            if place_of.insert(layer.name.as_str(), index).is_some() {
                return Err(ProfileError::DuplicateLayer {
                    name: layer.name.clone(),
                });
            }
            layer.validate()?;
        }
        self.validate_tied(&place_of)?;
        self.validate_edges(&place_of)
    }

    fn validate_tied(&self, place_of: &HashMap<&str, usize>) -> Result<(), ProfileError> {
        for tied in &self.tied {
            let error = |rule| {
                Err(ProfileError::Tied {
                    tensor: tied.tensor.clone(),
                    rule,
                })
            };
            let mut layers = HashSet::new();
            for name in &tied.layers {
                let Some(&place) = place_of.get(name.as_str()) else {
                    return error("each of its layers must be one of the profile's");
                };
                if !layers.insert(place) {
                    return error("each of its layers stands there once");
                }
                if self.layers[place].parameter_bytes < tied.parameter_bytes {
                    return error("a layer that shares them has at least as many bytes of weights");
                }
            }
            if layers.len() < 2 {
                return error("it takes two layers to share them");
            }
        }
        Ok(())
    }

    fn validate_edges(&self, place_of: &HashMap<&str, usize>) -> Result<(), ProfileError> {
        let mut seen = HashSet::new();
        let mut tensors = HashMap::new();
        let mut backwards = None;
        let mut graph = petgraph::graph::DiGraph::<(), ()>::new();
        let nodes: Vec<_> = self.layers.iter().map(|_| graph.add_node(())).collect();
        for edge in &self.edges {
            let find = |name: &str| {
                place_of
                    .get(name)
                    .copied()
                    .ok_or_else(|| ProfileError::UnknownLayer {
                        from: edge.from.clone(),
                        to: edge.to.clone(),
                        missing: name.to_owned(),
                    })
            };
            let (from, to) = (find(&edge.from)?, find(&edge.to)?);
            check_size(
                || format!("edge `{}` -> `{}`", edge.from, edge.to),
                "bytes",
                edge.bytes,
            )?;
            if let Some(bytes) = edge.gradient_bytes {
                let holder = || format!("edge `{}` -> `{}`", edge.from, edge.to);
                check_size(holder, "gradient_bytes", bytes)?;
                if !edge.gradient {
                    return Err(ProfileError::NoGradient {
                        from: edge.from.clone(),
                        to: edge.to.clone(),
                    });
                }
            }
            if !seen.insert((from, to, edge.tensor.as_str())) {
                return Err(ProfileError::DuplicateEdge {
                    from: edge.from.clone(),
                    to: edge.to.clone(),
                    tensor: edge.tensor.clone(),
                });
            }
            let size = (edge.bytes, edge.gradient, edge.gradient_bytes);
            if *tensors.entry((from, edge.tensor.as_str())).or_insert(size) != size {
                return Err(ProfileError::Disagreement {
                    from: edge.from.clone(),
                    tensor: edge.tensor.clone(),
                });
            }
            if from >= to && backwards.is_none() {
                backwards = Some(edge);
            }
            graph.add_edge(nodes[from], nodes[to], ());
        }
        let Some(edge) = backwards else { return Ok(()) };
        match crate::graph::find_cycle(&graph) {
            Some(cycle) => Err(ProfileError::Cycle {
                path: cycle
                    .iter()
                    .chain(cycle.first())
                    .map(|node| self.layers[node.index()].name.clone())
                    .collect(),
            }),
            None => Err(ProfileError::Order {
                from: edge.from.clone(),
                to: edge.to.clone(),
            }),
        }
    }
}

impl LayerProfile {
    fn validate(&self) -> Result<(), ProfileError> {
        let place = || format!("layer `{}`", self.name);
        for (field, value) in [
            ("forward_ms", self.forward_ms),
            ("backward_ms", self.backward_ms),
            ("step_ms", self.step_ms),
        ] {
            if !is_time(value) {
                check_time(&place(), field, value)?;
            }
        }
        for (field, value) in [
            ("parameter_bytes", self.parameter_bytes),
            ("optimizer_bytes", self.optimizer_bytes),
            ("stash_bytes", self.stash_bytes),
            ("input_bytes", self.input_bytes),
            ("workspace_bytes", self.workspace_bytes),
        ] {
            check_size(place, field, value)?;
        }
        Ok(())
    }
}

fn is_time(value: f64) -> bool {
    (0.0..LONGEST_TIME).contains(&value)
}

fn check_time(place: &str, field: &'static str, value: f64) -> Result<(), ProfileError> {
    if is_time(value) {
        return Ok(());
    }
    Err(ProfileError::Time {
        place: place.to_owned(),
        field,
        value,
    })
}

fn check_size(
    place: impl Fn() -> String,
    field: &'static str,
    value: u64,
) -> Result<(), ProfileError> {
    if value <= LARGEST_SIZE {
        return Ok(());
    }
    Err(ProfileError::Size {
        place: place(),
        field,
        value,
    })
}

fn yes() -> bool {
    true
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde asks for"
)]
fn is_true(b: &bool) -> bool {
    *b
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A chain of three layers, sound unless `change` spoils it.
    fn broken(change: impl FnOnce(&mut Profile)) -> ProfileError {
        let mut profile = crate::testing::chain(&[1.0, 2.0, 3.0], &[10, 20, 30], &[5, 5]);
        assert_eq!(profile.validate(), Ok(()));
        change(&mut profile);
        profile.validate().unwrap_err()
    }

    fn edge(from: &str, to: &str, tensor: &str) -> Edge {
        Edge {
            from: from.to_owned(),
            to: to.to_owned(),
            tensor: tensor.to_owned(),
            bytes: 5,
            gradient: true,
            gradient_bytes: None,
        }
    }

    #[test]
    fn a_cycle_is_named() {
        let error = broken(|p| p.edges.push(edge("L2", "L1", "back")));
        assert_eq!(
            error.to_string(),
            "the layers form a cycle: L1 -> L2 -> L1: a model's layer graph has none, correct the edges"
        );
    }

    #[test]
    fn a_wrong_order_is_told_from_a_cycle() {
        let error = broken(|p| p.layers.swap(0, 1));
        assert!(matches!(error, ProfileError::Order { .. }), "{error}");
    }

    #[test]
    fn times_must_be_finite_and_not_negative() {
        for time in [-1.0, f64::NAN, f64::INFINITY] {
            let error = broken(|p| p.layers[1].backward_ms = time);
            assert!(
                error
                    .to_string()
                    .starts_with("layer `L1`: `backward_ms` is"),
                "{error}"
            );
        }
        assert!(matches!(
            broken(|p| p.communication_s_per_byte = -1.0),
            ProfileError::Time { .. }
        ));
    }

    #[test]
    fn names_must_be_known_and_unique() {
        assert!(matches!(
            broken(|p| p.layers[1].name = "L0".to_owned()),
            ProfileError::DuplicateLayer { .. }
        ));
        assert!(matches!(
            broken(|p| p.layers[1].name.clear()),
            ProfileError::Unnamed { index: 1 }
        ));
        assert!(matches!(
            broken(|p| p.edges[0].from = "nobody".to_owned()),
            ProfileError::UnknownLayer { .. }
        ));
    }

    #[test]
    fn one_tensor_has_one_size() {
        assert!(matches!(
            broken(|p| {
                let mut skip = edge("L0", "L2", &p.edges[0].tensor);
                skip.bytes = 6;
                p.edges.push(skip);
            }),
            ProfileError::Disagreement { .. }
        ));
        assert!(matches!(
            broken(|p| p.edges.push(p.edges[0].clone())),
            ProfileError::DuplicateEdge { .. }
        ));
        assert!(matches!(
            broken(|p| {
                p.edges[0].gradient = false;
                p.edges[0].gradient_bytes = Some(1);
            }),
            ProfileError::NoGradient { .. }
        ));
    }

    #[test]
    fn counts_must_not_be_zero_and_sizes_not_absurd() {
        assert!(matches!(
            broken(|p| p.batch_size = 0),
            ProfileError::Zero {
                field: "batch_size"
            }
        ));
        assert_eq!(broken(|p| p.layers.clear()), ProfileError::NoLayers);
        assert!(matches!(
            broken(|p| p.layers[0].stash_bytes = u64::MAX),
            ProfileError::Size { .. }
        ));
    }
}
