//! From a plan and options to a [`Job`]: the model opened and checked, cut into stages, weights set.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use models::graph::{Graph, Value};
use models::init::Init;
use models::loss::{Classes, Loss};
use models::onnx::Model;
use models::optimizer::Optimizer;
use models::random::Stream;
use models::tensor::{DType, Tensor};
use planner::Plan;
use planner::schedule::{Pace, ScheduleKind, StageShape};

use crate::data::shuffle::below;
use crate::data::{self, DataOptions, Input, Minibatch, Signature};
use crate::emulation::{self, EmulationOptions};
use crate::error::RunError;
use crate::learning_rate::Course;
use crate::reading::{self, Overrides};
use crate::stage;
use crate::train::{Job, Material};
use crate::worker::Settings;

/// What to run in place of the plan's stages, to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Baseline {
    /// As many workers as the plan has, each with the whole model.
    DataParallel,
    /// One worker with the whole model.
    Single,
}

/// How to run a plan.
#[derive(Clone, Debug)]
pub struct Options {
    /// The model, if it does not lie where the plan says.
    pub model: Option<PathBuf>,
    /// How to read the model, where not as it was profiled.
    pub reading: Overrides,
    /// Something else than the plan's stages.
    pub baseline: Option<Baseline>,
    /// Samples; random numbers of the right shapes if none.
    pub data: Option<DataOptions>,
    /// Where the classes are and which label does not count, if classes are learned.
    pub classes: Classes,
    /// How weights are stepped.
    pub optimizer: Optimizer,
    /// Learning rate at the global batch of the first stage.
    pub learning_rate: f32,
    /// How it changes over the run.
    pub course: Course,
    /// Largest norm of the gradient of a stage; a larger one is scaled down to it.
    pub clip_norm: Option<f32>,
    /// Gradients are all-reduced together until they have so many bytes.
    pub bucket_bytes: usize,
    /// Whether the other stages' rates are scaled by their replicas over the first one's.
    pub scale_learning_rate: bool,
    /// Whether a backward reads the version its forward read.
    pub weight_stashing: bool,
    /// Where the first weights come from.
    pub init: Init,
    /// Seed of weights, order of samples, and masks.
    pub seed: u64,
    /// Epochs.
    pub epochs: usize,
    /// Most minibatches over all epochs.
    pub max_minibatches: Option<usize>,
    /// `auto`, `cpu` or `cuda:N`.
    pub device: String,
    /// Cores per worker; the plan's if none.
    pub threads: Option<usize>,
    /// Whether workers stay on cores of their own, if there are enough.
    pub pin: bool,
    /// Whether to keep what the trained model gives for the held-out samples.
    pub keep_outputs: bool,
    /// Waits in place of compute.
    pub emulation: Option<EmulationOptions>,
}

/// Made-up minibatches to cycle through: enough that no two in flight are the same.
const SYNTHETIC_POOL: usize = 8;

/// Refuses what this version can plan and not yet carry out.
fn check_supported(plan_file: &Path, plan: &Plan) -> Result<(), RunError> {
    if plan.schedule != ScheduleKind::Interleaved {
        return Ok(());
    }
    Err(RunError::Plan(format!(
        "{}: dp-run cannot carry out free pieces, several on a worker: plan without --non-contiguous",
        plan_file.display()
    )))
}

/// Opens and checks everything that a run needs; nothing is written before this succeeds. There is no model where
/// compute is emulated.
///
/// # Errors
/// When the model is not the plan's, lacks a layer of it, or data and model do not fit.
pub fn prepare(
    plan_file: &Path,
    plan: &Plan,
    options: &Options,
    stop: Arc<AtomicBool>,
) -> Result<(Option<Model>, Job), RunError> {
    check_supported(plan_file, plan)?;
    if let Some(emulation) = &options.emulation {
        let job = emulation::prepare(plan_file, plan, options, emulation, stop)?;
        return Ok((None, job));
    }
    let model_error = |e: &dyn std::fmt::Display| RunError::Model(e.to_string());
    let reading = options.reading.apply(plan);
    let mut model = open_model(plan_file, plan, options.model.as_deref())?;
    if reading.untie {
        model = model.untied().map_err(|e| model_error(&e))?;
    }
    let build = reading::build_options(&reading, plan.batch_size);
    let loss = reading::loss(&reading, options.classes);
    let graph = Arc::new(Graph::build(&model, &build).map_err(|e| model_error(&e))?);
    let device = models::device::open(&options.device, 1).map_err(|e| model_error(&e))?;
    device
        .check_room(graph.least_training_bytes())
        .map_err(|e| RunError::Model(format!("{}: {e}", graph.path().display())))?;

    let (layers, shapes) = placement(plan, &graph, options.baseline);
    let loss_value = graph.training_output(loss).value;
    let mut stages = stage::cut(&graph, &layers, &shapes, loss_value)?;
    let pace = match options.baseline {
        None => {
            for (stage, planned) in stages.iter_mut().zip(&plan.stages) {
                stage.recompute = planned.recompute;
            }
            plan.pace()
        }
        Some(_) => Pace::ONE_F_ONE_B,
    };
    let signature = Arc::new(signature(&graph, loss)?);
    let material = match &options.data {
        Some(files) => Material::Dataset(data::open(files, &signature)?),
        None => Material::Synthetic(Arc::new(synthetic(&signature, options.seed))),
    };
    let weights = graph
        .parameters()
        .iter()
        .map(|p| {
            options
                .init
                .parameter(&p.name, &p.tensor, p.fan, options.seed)
        })
        .collect();
    let job = Job {
        stages: stages.into(),
        settings: Settings {
            batch_size: plan.batch_size,
            seed: options.seed,
            loss,
            optimizer: options.optimizer,
            pace,
            weight_stashing: options.weight_stashing,
            clip_norm: options.clip_norm,
            bucket_bytes: options.bucket_bytes,
        },
        learning_rate: options.learning_rate,
        course: options.course,
        scale_learning_rate: options.scale_learning_rate,
        weights,
        material,
        epochs: options.epochs,
        max_minibatches: options.max_minibatches,
        device: options.device.clone(),
        threads: options.threads.unwrap_or(plan.threads),
        pin: options.pin,
        keep_outputs: options.keep_outputs,
        stop,
        states: graph.states().iter().map(|s| s.tensor.clone()).collect(),
        graph: Some(graph),
    };
    job.minibatches_per_epoch()?;
    Ok((Some(model), job))
}

/// Samples per second that the plan predicts for what is run.
pub fn predicted_samples_per_s(plan: &Plan, baseline: Option<Baseline>) -> f64 {
    match baseline {
        None => plan.throughput_samples_per_s,
        Some(Baseline::DataParallel) => plan.baselines.data_parallel.throughput_samples_per_s,
        Some(Baseline::Single) => {
            let seconds: f64 = plan
                .stages
                .iter()
                .map(|stage| stage.compute_s * stage.replicas as f64)
                .sum();
            plan.batch_size as f64 / seconds
        }
    }
}

/// Opens the plan's model: where the user says, where the plan says, or there seen from the plan's folder.
fn open_model(plan_file: &Path, plan: &Plan, given: Option<&Path>) -> Result<Model, RunError> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => {
            let named = PathBuf::from(&plan.model.file);
            let beside = plan_file.with_file_name("").join(&named);
            if !named.exists() && beside.exists() {
                beside
            } else {
                named
            }
        }
    };
    if given.is_none() && !path.exists() {
        return Err(RunError::Plan(format!(
            "{}: its model {} is not there; say where it is with --model",
            plan_file.display(),
            path.display()
        )));
    }
    let model = Model::open(&path).map_err(|e| RunError::Model(e.to_string()))?;
    if model.sha256() != plan.model.sha256 {
        return Err(RunError::Plan(format!(
            "{}: made for {} (sha256 {}), but {} is another file (sha256 {}); give the right one with --model, or profile and plan this one",
            plan_file.display(),
            plan.model.file,
            short(&plan.model.sha256),
            path.display(),
            short(model.sha256()),
        )));
    }
    Ok(model)
}

fn short(sha256: &str) -> String {
    sha256.chars().take(12).chain(['…']).collect()
}

/// The layers of each stage and its shape.
fn placement(
    plan: &Plan,
    graph: &Graph,
    baseline: Option<Baseline>,
) -> (Vec<Vec<String>>, Vec<StageShape>) {
    let whole = |replicas| {
        let shape = StageShape {
            replicas,
            depth: 1,
            delay: 0,
        };
        let layers = graph.layers().iter().map(|l| l.name.clone()).collect();
        (vec![layers], vec![shape])
    };
    match baseline {
        None => (
            plan.stages.iter().map(|s| s.layers.clone()).collect(),
            plan.shapes(),
        ),
        Some(Baseline::DataParallel) => whole(plan.workers),
        Some(Baseline::Single) => whole(1),
    }
}

fn signature(graph: &Graph, loss: Loss) -> Result<Signature, RunError> {
    let values = graph.values();
    let inputs: Vec<Input> = graph
        .inputs()
        .iter()
        .map(|&input| Input {
            name: values[input].name.clone(),
            ty: values[input].ty.clone(),
            limit: graph.index_limit(input),
        })
        .collect();
    if inputs.is_empty() {
        return Err(RunError::Model(format!(
            "{}: the model reads no data",
            graph.path().display()
        )));
    }
    let output = values[graph.training_output(loss).value].ty.clone();
    loss.target(&output.shape)
        .map_err(|e| RunError::Model(format!("{}: {e}", graph.path().display())))?;
    Ok(Signature {
        inputs,
        output,
        loss,
    })
}

/// Random minibatches of the shapes that a model reads.
fn synthetic(signature: &Signature, seed: u64) -> Vec<Minibatch> {
    (0..SYNTHETIC_POOL as u64)
        .map(|index| {
            let random = Stream::new(seed).named("synthetic").child(index);
            let floats =
                |len: usize| -> Vec<f32> { (0..len as u64).map(|i| random.normal(i)).collect() };
            let inputs = signature.inputs.iter().map(|input| {
                let shape = &input.ty.shape;
                let len = shape.iter().product();
                match input.ty.dtype {
                    DType::I64 => Tensor::from_i64(shape, vec![Value::stand_in(&input.name); len]),
                    DType::Bool => Tensor::from_bool(shape, vec![true; len]),
                    _ => Tensor::from_f32(shape, floats(len)),
                }
            });
            let output = &signature.output.shape;
            let target = match (
                signature.loss.target(output),
                signature.loss.classes(output),
            ) {
                (Ok((_, shape)), Some(classes)) => {
                    let len: usize = shape.iter().product();
                    let labels: Vec<i64> = (0..len as u64)
                        .map(|i| below(classes, random.bits(i)) as i64)
                        .collect();
                    Tensor::from_i64(&shape, labels)
                }
                _ => Tensor::from_f32(output, floats(output.iter().product())),
            };
            Minibatch {
                inputs: inputs.collect(),
                target,
            }
        })
        .collect()
}
