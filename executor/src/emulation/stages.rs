//! From a plan and a profile to stages of tensors and times.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use models::tensor::{DType, Tensor};
use planner::cost::Machine;
use planner::profile::LayerProfile;
use planner::schedule::StageShape;
use planner::{Plan, Profile};

use super::{Emulated, Times, numbered, placement};
use crate::error::RunError;
use crate::job::Baseline;
use crate::stage::{self, Stage};
use crate::work::Work;

/// What times are made from besides the profile's.
pub struct Scale {
    /// The core's share of communication.
    pub machine: Machine,
    /// Times are so many times as long.
    pub dilate: f64,
}

impl Scale {
    fn time(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds.max(0.0) * self.dilate)
    }
}

/// A tensor between layers.
struct Passed {
    bytes: u64,
    /// Of its gradient; 0 where none comes back.
    returned: u64,
    from: usize,
    to: BTreeSet<usize>,
}

/// The stages of the plan, or of what is run in its place, and a weight for every layer that has some.
///
/// # Errors
/// When the profile has other layers than the plan.
pub fn cut(
    plan: &Plan,
    profile: &Profile,
    baseline: Option<Baseline>,
    scale: &Scale,
) -> Result<(Vec<Stage>, Vec<Tensor>), RunError> {
    let layers = placement(plan, profile, baseline);
    let stage_of = assign(profile, &layers)?;
    let own_bytes = own_parameter_bytes(profile, &stage_of)?;
    let shapes = match baseline {
        None => plan.shapes(),
        Some(Baseline::DataParallel) => vec![whole(plan.workers)],
        Some(Baseline::Single) => vec![whole(1)],
    };
    // Tensors are numbered as they come, the loss behind them.
    let passed = passed(profile, &stage_of);
    let loss_value = passed.len();
    let mut works = Vec::new();
    for (index, shape) in shapes.iter().enumerate() {
        let mut emulated = Emulated {
            inputs: Vec::new(),
            wanted: Vec::new(),
            returned: Vec::new(),
            outputs: Vec::new(),
            made: Vec::new(),
            weights: Vec::new(),
            gradients: Vec::new(),
            times: Times::default(),
            speeds: match baseline {
                None => speeds(plan, index, shape.replicas),
                // A step of data parallelism waits for the slowest.
                Some(_) => vec![slowest(plan); shape.replicas],
            },
        };
        let (mut forward_bytes, mut backward_bytes) = (0, 0);
        for (number, tensor) in passed.iter().enumerate() {
            if tensor.from == index && tensor.to.iter().any(|&to| to != index) {
                emulated.outputs.push(number);
                emulated.made.push(activation(tensor));
                let readers = tensor.to.iter().filter(|&&to| to != index).count() as u64;
                forward_bytes += readers * tensor.bytes;
                backward_bytes += readers * tensor.returned;
            }
            if tensor.from != index && tensor.to.contains(&index) {
                emulated.inputs.push(number);
                emulated.wanted.push(tensor.returned > 0);
                emulated
                    .returned
                    .push((tensor.returned > 0).then(|| floats(tensor.returned)));
                forward_bytes += tensor.bytes;
                backward_bytes += tensor.returned;
            }
        }
        if index + 1 == shapes.len() {
            emulated.outputs.push(loss_value);
            emulated.made.push(floats(4));
        }
        let members: Vec<usize> = (0..profile.layers.len())
            .filter(|&layer| stage_of[layer] == index)
            .collect();
        let sum = |time: fn(&LayerProfile) -> f64| -> f64 {
            members
                .iter()
                .map(|&l| time(&profile.layers[l]) / 1e3)
                .sum()
        };
        let message_s = scale.machine.message_s_per_byte;
        let weights: u64 = members.iter().map(|&layer| own_bytes[layer]).sum();
        let times = &mut emulated.times;
        times.forward = scale.time(sum(|l| l.forward_ms) + message_s * forward_bytes as f64);
        times.backward = scale.time(sum(|l| l.backward_ms) + message_s * backward_bytes as f64);
        let reduce_s = scale.machine.reduce_core_s(shape.replicas, weights as f64);
        times.step = scale.time(sum(|l| l.step_ms) + reduce_s);
        let mut clock = 0.0;
        for &layer in members.iter().rev() {
            clock += profile.layers[layer].backward_ms / 1e3;
            if own_bytes[layer] > 0 {
                emulated.weights.push(layer);
                emulated.gradients.push(floats(own_bytes[layer]));
                times.ready.push(scale.time(clock));
            }
        }
        emulated.weights.reverse();
        emulated.gradients.reverse();
        times.ready.reverse();
        works.push(Work::Emulated(emulated));
    }
    let name = |value: usize| format!("tensor {value}");
    let mut stages = stage::connect(works, &shapes, loss_value, &[], &name)?;
    if baseline.is_none() {
        for (stage, planned) in stages.iter_mut().zip(&plan.stages) {
            stage.recompute = planned.recompute;
        }
    }
    let weights = own_bytes.iter().map(|&bytes| floats(bytes)).collect();
    Ok((stages, weights))
}

fn whole(replicas: usize) -> StageShape {
    StageShape {
        replicas,
        depth: 1,
        delay: 0,
    }
}

/// Stage of each layer of the profile.
fn assign(profile: &Profile, stages: &[Vec<String>]) -> Result<Vec<usize>, RunError> {
    let known = numbered(profile.layers.iter().map(|l| l.name.as_str()));
    let mut stage_of = vec![usize::MAX; profile.layers.len()];
    for (stage, names) in stages.iter().enumerate() {
        for name in names {
            let &layer = known.get(name.as_str()).ok_or_else(|| {
                RunError::Plan(format!(
                    "stage {stage} names the layer '{name}', which the profile does not have: emulate by the profile that the plan was made from"
                ))
            })?;
            stage_of[layer] = stage;
        }
    }
    match stage_of.iter().position(|&stage| stage == usize::MAX) {
        None => Ok(stage_of),
        Some(layer) => Err(RunError::Plan(format!(
            "no stage has the profile's layer '{}': emulate by the profile that the plan was made from",
            profile.layers[layer].name
        ))),
    }
}

/// Bytes of each layer's weights, those that it shares with earlier layers of its stage left out.
fn own_parameter_bytes(profile: &Profile, stage_of: &[usize]) -> Result<Vec<u64>, RunError> {
    let number = numbered(profile.layers.iter().map(|l| l.name.as_str()));
    let mut bytes: Vec<u64> = profile.layers.iter().map(|l| l.parameter_bytes).collect();
    for tied in &profile.tied {
        let mut layers: Vec<usize> = tied.layers.iter().map(|l| number[l.as_str()]).collect();
        layers.sort_unstable();
        for &layer in &layers[1..] {
            if stage_of[layer] != stage_of[layers[0]] {
                return Err(RunError::Plan(format!(
                    "stages {} and {} both use the weight '{}': a plan that dp-run can carry out keeps its layers in one stage",
                    stage_of[layers[0]], stage_of[layer], tied.tensor
                )));
            }
            bytes[layer] = bytes[layer].saturating_sub(tied.parameter_bytes);
        }
    }
    Ok(bytes)
}

/// All tensors between layers, in the order of the profile.
fn passed(profile: &Profile, stage_of: &[usize]) -> Vec<Passed> {
    let number = numbered(profile.layers.iter().map(|l| l.name.as_str()));
    let mut known: HashMap<(&str, &str), usize> = HashMap::new();
    let mut passed: BTreeMap<usize, Passed> = BTreeMap::new();
    for edge in &profile.edges {
        let next = known.len();
        let index = *known
            .entry((edge.from.as_str(), edge.tensor.as_str()))
            .or_insert(next);
        let tensor = passed.entry(index).or_insert_with(|| Passed {
            bytes: edge.bytes,
            returned: edge.returned_bytes(),
            from: stage_of[number[edge.from.as_str()]],
            to: BTreeSet::new(),
        });
        tensor.to.insert(stage_of[number[edge.to.as_str()]]);
    }
    passed.into_values().collect()
}

/// Speeds of a stage's devices.
fn speeds(plan: &Plan, stage: usize, replicas: usize) -> Vec<f64> {
    let stage = &plan.stages[stage];
    (0..replicas)
        .map(|replica| {
            let server = stage.servers.get(replica);
            let kind = stage.kinds.get(replica).copied().unwrap_or(0);
            server
                .and_then(|&server| plan.cluster.servers.get(server)?.devices.get(kind))
                .map_or(1.0, |devices| devices.speed)
        })
        .collect()
}

/// The slowest device of the cluster.
fn slowest(plan: &Plan) -> f64 {
    let devices = plan.cluster.servers.iter().flat_map(|s| &s.devices);
    let slowest = devices.map(|d| d.speed).fold(f64::INFINITY, f64::min);
    if slowest.is_finite() { slowest } else { 1.0 }
}

/// Zeros that others may be added to.
fn floats(bytes: u64) -> Tensor {
    Tensor::zeros(DType::F32, &[bytes.div_ceil(4) as usize])
}

fn activation(tensor: &Passed) -> Tensor {
    if tensor.returned > 0 {
        floats(tensor.bytes)
    } else {
        Tensor::zeros(DType::Bool, &[tensor.bytes as usize])
    }
}
