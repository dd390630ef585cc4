//! Emulated compute: a plan carried out without its model.
//!
//! Forward, backward and optimizer step become waits as long as the profile says. Stages are made of tensors of the
//! profile's sizes, so schedule, weight versions, messages and all-reduces are those of a run that computes. That way
//! a plan can be tried on a real network without the devices that it is for, also one whose profile was imported and
//! names no ONNX model. There is nothing to learn: no losses, no trained model.

mod stages;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use models::loss::Loss;
use models::program::{ParameterId, ValueId};
use models::tensor::{DType, Tensor};
use planner::cost::Machine;
use planner::import;
use planner::{Plan, Profile};

use crate::data::Minibatch;
use crate::error::RunError;
use crate::job::{Baseline, Options};
use crate::train::{Job, Material};
use crate::worker::Settings;

/// How to emulate compute.
#[derive(Clone, Debug)]
pub struct EmulationOptions {
    /// Times and sizes; those of the plan's own profile if none.
    pub profile: Option<PathBuf>,
    /// Times are so many times as long. On links that are as many times slower a run behaves as the undilated one.
    pub dilate: f64,
}

/// A stage made of a profile's sizes and times.
#[derive(Clone, Debug)]
pub struct Emulated {
    /// Numbers of the tensors that come from other stages.
    pub inputs: Vec<ValueId>,
    /// Which of them get a gradient.
    pub wanted: Vec<bool>,
    /// The gradients, where wanted.
    pub returned: Vec<Option<Tensor>>,
    /// Numbers of the tensors that it gives.
    pub outputs: Vec<ValueId>,
    /// The tensors.
    pub made: Vec<Tensor>,
    /// One for each layer that has weights, in execution order.
    pub weights: Vec<ParameterId>,
    /// Their gradients.
    pub gradients: Vec<Tensor>,
    /// How long it takes.
    pub times: Times,
    /// Speed of each replica's device against the profiled one.
    pub speeds: Vec<f64>,
}

/// How long a stage takes on the profiled device, dilated.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// Of a minibatch.
    pub forward: Duration,
    /// Of a minibatch, without a repeated forward.
    pub backward: Duration,
    /// Of an optimizer step.
    pub step: Duration,
    /// From the start of a backward to each weight's gradient, in the order of the weights.
    pub ready: Vec<Duration>,
}

/// A job of waits, for `plan` or in its place a baseline.
///
/// # Errors
/// When the profile cannot be read, is not the plan's, or lacks a layer of it.
pub fn prepare(
    plan_file: &Path,
    plan: &Plan,
    options: &Options,
    emulation: &EmulationOptions,
    stop: Arc<AtomicBool>,
) -> Result<Job, RunError> {
    let profile = load(plan_file, plan, emulation.profile.as_deref())?;
    let machine = Machine::new(&plan.cluster, profile.communication_s_per_byte);
    let scale = stages::Scale {
        machine,
        dilate: emulation.dilate,
    };
    let (stages, weights) = stages::cut(plan, &profile, options.baseline, &scale)?;
    let pace = match options.baseline {
        None => plan.pace(),
        Some(_) => planner::schedule::Pace::ONE_F_ONE_B,
    };
    // A number that is as it should be, so that the loss is one and its gradient, too.
    let nothing = Minibatch {
        inputs: vec![Tensor::zeros(DType::Bool, &[plan.batch_size])],
        target: Tensor::zeros(DType::F32, &[1]),
    };
    Ok(Job {
        graph: None,
        states: Vec::new(),
        stages: stages.into(),
        settings: Settings {
            batch_size: plan.batch_size,
            seed: options.seed,
            loss: Loss::Mse,
            optimizer: options.optimizer,
            pace,
            weight_stashing: options.weight_stashing,
            clip_norm: None,
            bucket_bytes: options.bucket_bytes,
        },
        learning_rate: options.learning_rate,
        course: options.course,
        scale_learning_rate: options.scale_learning_rate,
        weights,
        material: Material::Synthetic(Arc::new(vec![nothing])),
        epochs: options.epochs,
        max_minibatches: options.max_minibatches,
        device: "cpu".to_owned(),
        threads: 1,
        pin: false,
        keep_outputs: false,
        stop,
    })
}

/// The profile: where the user says, where the plan says, or there seen from the plan's folder.
fn load(plan_file: &Path, plan: &Plan, given: Option<&Path>) -> Result<Profile, RunError> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => beside(plan_file, &plan.profile.file),
    };
    if given.is_none() {
        let wrong = |what: String| {
            RunError::Plan(format!(
                "{}: {what}; give it with --emulate-compute FILE",
                plan_file.display()
            ))
        };
        let sha256 = planner::file::sha256_of_file(&path)
            .map_err(|e| wrong(format!("its profile cannot be read ({e})")))?;
        if sha256 != plan.profile.sha256 {
            return Err(wrong(format!(
                "its profile {} has changed since",
                path.display()
            )));
        }
    }
    let imported = import::load(&path, None, Some(plan.batch_size));
    let profile = imported.map_err(|e| RunError::Plan(e.to_string()))?.profile;
    if profile.batch_size != plan.batch_size {
        return Err(RunError::Plan(format!(
            "{}: its times are those of minibatches of {} samples, and the plan's have {}",
            path.display(),
            profile.batch_size,
            plan.batch_size
        )));
    }
    Ok(profile)
}

/// A file that a plan names: there, or seen from the plan's folder.
fn beside(plan_file: &Path, named: &str) -> PathBuf {
    let named = PathBuf::from(named);
    let beside = plan_file.with_file_name("").join(&named);
    if !named.exists() && beside.exists() {
        beside
    } else {
        named
    }
}

/// The layers of each stage of what is run.
fn placement(plan: &Plan, profile: &Profile, baseline: Option<Baseline>) -> Vec<Vec<String>> {
    match baseline {
        None => plan.stages.iter().map(|s| s.layers.clone()).collect(),
        Some(_) => vec![profile.layers.iter().map(|l| l.name.clone()).collect()],
    }
}

/// Number of each name.
fn numbered<'a>(names: impl Iterator<Item = &'a str>) -> HashMap<&'a str, usize> {
    names
        .enumerate()
        .map(|(number, name)| (name, number))
        .collect()
}
