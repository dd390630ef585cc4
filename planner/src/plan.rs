//! The plan file, `dp.plan/1`: stages, replicas, depths, and what they are predicted to give.

use serde::{Deserialize, Serialize};

use crate::profile::FileRef;
use crate::schedule::ScheduleKind;

/// The only plan schema this version reads and writes.
pub const PLAN_SCHEMA: &str = "dp.plan/1";

/// A partition of a model into replicated stages, with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Always [`PLAN_SCHEMA`].
    pub schema: String,
    /// The model that the plan is for: dp-run refuses any other.
    pub model: FileRef,
    /// The profile that the plan was made from.
    pub profile: FileRef,
    /// Samples per minibatch.
    pub batch_size: usize,
    /// Cores per worker in the profile.
    pub threads: usize,
    /// What the plan was made for.
    pub cluster: Cluster,
    /// The kind of schedule that the stages follow.
    pub schedule: ScheduleKind,
    /// In pipeline order.
    pub stages: Vec<Stage>,
    /// Workers used: the sum of all replicas.
    pub workers: usize,
    /// Largest load of any resource, seconds per minibatch.
    pub bottleneck_s: f64,
    /// The resource with that load, in words.
    pub bottleneck: String,
    /// No feasible plan has a smaller bottleneck, seconds per minibatch.
    pub lower_bound_s: f64,
    /// `bottleneck_s / lower_bound_s - 1`.
    pub gap: f64,
    /// Whether the bottleneck is proved to be the smallest.
    pub optimal: bool,
    /// Simulated steady-state seconds per minibatch.
    pub period_s: f64,
    /// `batch_size / period_s`.
    pub throughput_samples_per_s: f64,
    /// Bytes that cross any link per minibatch: activations, gradients, all-reduce.
    pub bytes_per_minibatch: f64,
    /// What the obvious alternatives would give.
    pub baselines: Baselines,
}

/// The machines a plan was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Devices, one worker each.
    pub devices: usize,
    /// Goodput of each device's link, each direction.
    pub bandwidth_bytes_per_s: f64,
    /// Latency of one message, seconds.
    #[serde(default)]
    pub latency_s: f64,
    /// Memory of one device; none means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Layer names in execution order.
    pub layers: Vec<String>,
    /// Workers that run copies of this stage; minibatch m goes to replica m mod `replicas`.
    pub replicas: usize,
    /// K: minibatches in flight per replica.
    pub depth: usize,
    /// d: rounds by which the all-reduce may lag (0 or 1).
    pub delay: usize,
    /// Weight versions held per replica.
    pub versions: usize,
    /// Worker numbers of the replicas.
    pub workers: Vec<usize>,
    /// Forward, backward and step of one minibatch divided by the replicas, seconds per minibatch.
    pub compute_s: f64,
    /// All-reduce share of each replica's link, seconds per minibatch.
    pub sync_s: f64,
    /// Activations and gradients on each replica's link, seconds per minibatch.
    pub traffic_s: f64,
    /// Weights, bytes.
    pub parameter_bytes: u64,
    /// Stash of one minibatch, bytes.
    pub stash_bytes: u64,
    /// Memory of one replica.
    pub memory_bytes: u64,
}

/// What the obvious alternatives give on the same cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// Every device a full copy, gradients all-reduced in buckets each step.
    pub data_parallel: Baseline,
    /// The straight pipeline's stages, one minibatch at a time.
    pub model_parallel: Baseline,
    /// The best pipeline without replication.
    pub straight: Baseline,
}

/// One alternative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Seconds per minibatch of `batch_size` samples.
    pub bottleneck_s: f64,
    /// Samples per second.
    pub throughput_samples_per_s: f64,
    /// Bytes that cross any link per minibatch.
    pub bytes_per_minibatch: f64,
    /// Memory of the fullest worker.
    pub memory_bytes: u64,
    /// Why it cannot run, if it cannot (for example memory).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
}
