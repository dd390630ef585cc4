//! The profile file, `dp.profile/1`: what every layer of one model costs on one device.

use serde::{Deserialize, Serialize};

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
    /// In execution order: a topological order of the layer graph.
    pub layers: Vec<LayerProfile>,
    /// One entry per distinct (tensor, reading layer).
    pub edges: Vec<Edge>,
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
    /// Whether a gradient of the same size comes back (false for integer and bool tensors).
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub gradient: bool,
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
