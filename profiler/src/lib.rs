//! Measures a model: the time of every layer forward, backward and in the optimizer's step, and every size.

pub mod communication;
pub mod load;
pub mod measure;
pub mod report;
pub mod rig;
pub mod statistics;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use models::device::{self, Device, DeviceError, TooLarge};
use models::graph::{BuildOptions, Graph, GraphError};
use models::loss::{Loss, LossError};
use models::onnx::{Model, OnnxError};
use models::optimizer::Optimizer;
use models::tensor::DType;
use planner::Profile;
use planner::profile::{Edge, FileRef, LayerProfile, LossKind, PROFILE_SCHEMA, Reading, Tied};

use measure::{LayerSamples, Samples};
use rig::{PartSize, Rig};
use statistics::Summary;

/// Why a model cannot be profiled.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    /// The file is no model.
    #[error(transparent)]
    Model(#[from] OnnxError),
    /// The model is no graph that can be trained.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// There is no such device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model's output and the loss do not fit.
    #[error(transparent)]
    Loss(#[from] LossError),
    /// The model does not fit into the device.
    #[error("{model}: {problem}", model = model.display())]
    Memory {
        /// Model file.
        model: PathBuf,
        /// How much is missing.
        problem: TooLarge,
    },
    /// The model ends in integers.
    #[error("{model}: the output '{output}' is {dtype}, a loss needs float", model = model.display())]
    Output {
        /// Model file.
        model: PathBuf,
        /// Name of the output.
        output: String,
        /// Its type.
        dtype: DType,
    },
}

/// What to measure, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Batch and dynamic dimensions.
    pub build: BuildOptions,
    /// `auto`, `cpu` or `cuda:N`.
    pub device: String,
    /// Cores per worker.
    pub threads: usize,
    /// Workers that share this machine, the measured one included.
    pub workers: usize,
    /// Longest time to measure.
    pub budget: Duration,
    /// Loss at the end.
    pub loss: Loss,
    /// Optimizer whose step is timed, and its name in the profile.
    pub optimizer: (Optimizer, &'static str),
    /// Seed of the random minibatch.
    pub seed: u64,
}

/// A profile and what the user should know about how it came about.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The profile.
    pub profile: Profile,
    /// One line each: what is doubtful and what to do about it.
    pub warnings: Vec<String>,
}

/// Measures the model in `path`.
///
/// `progress` is told the stage, the rounds done in it and the share of the budget spent.
///
/// # Errors
/// When the model cannot be read, bound or trained, or the device cannot be had.
pub fn profile(
    path: &Path,
    options: &Options,
    progress: impl FnMut(measure::Stage, usize, f64),
) -> Result<Measured, ProfileError> {
    let device = device::open(&options.device, options.threads)?;
    let mut model = Model::open(path)?;
    if options.build.untie {
        model = model.untied()?;
    }
    let graph = Graph::build(&model, &options.build)?;
    device
        .check_room(graph.least_training_bytes())
        .map_err(|problem| ProfileError::Memory {
            model: path.to_owned(),
            problem,
        })?;
    let layer_count = graph.layers().len();
    let each: Vec<Vec<usize>> = (0..layer_count).map(|layer| vec![layer]).collect();
    let all = [(0..layer_count).collect()];

    // Drawn once: every rig has the same, in memory of its own.
    let weights = rig::weights(&graph, options.seed);
    let rig = |parts: &[Vec<usize>], device: &Arc<dyn Device>| {
        Rig::new(
            &graph,
            parts,
            &weights,
            device,
            options.loss,
            options.optimizer.0,
            options.seed,
        )
    };
    let mut layers = rig(&each, &device)?;
    let mut whole = rig(&all, &device)?;
    let neighbours = (1..options.workers)
        .map(|_| rig(&all, &device::open(&options.device, options.threads)?))
        .collect::<Result<Vec<Rig>, ProfileError>>()?;

    drop(weights);

    let sizes = layers.sizes();
    let kappa = communication::seconds_per_byte(&*device);
    let samples = load::beside(neighbours, || {
        measure::measure(&mut layers, &mut whole, options.budget, progress)
    });
    let profile = Profile {
        schema: PROFILE_SCHEMA.into(),
        model: FileRef {
            file: path.display().to_string(),
            sha256: model.sha256().into(),
        },
        device: description(&*device),
        batch_size: graph.batch_size(),
        threads: options.threads,
        optimizer: Some(options.optimizer.1.into()),
        reading: Some(reading(options)),
        layers: layer_profiles(&graph, &sizes, &layers.input_bytes(), &samples.layers),
        edges: edges(&graph),
        tied: tied(&graph, &layers.weights(), &sizes),
        whole_step_ms: Some(Summary::of(&samples.whole).median),
        whole_step_samples_ms: samples.whole.clone(),
        communication_s_per_byte: kappa,
    };
    let mut warnings = warnings(&profile, &samples);
    for remark in graph.remarks() {
        warnings.push(format!("{}: {remark}", path.display()));
    }
    if let Some(fill) = graph.constant_fills().next() {
        warnings.push(format!(
            "{}: weight '{}' (and perhaps others) holds one value everywhere, as in a file without trained weights; \
             measured with random weights, train with dp-run --init he",
            path.display(),
            fill.name
        ));
    }
    Ok(Measured { profile, warnings })
}

/// What dp-run needs to know to read the model in the same way.
fn reading(options: &Options) -> Reading {
    let BuildOptions {
        batch: _,
        dims,
        training_form,
        train_batch_norm,
        untie,
        loss_output,
    } = &options.build;
    Reading {
        dims: dims.clone(),
        training_form: *training_form,
        train_batch_norm: *train_batch_norm,
        untie: *untie,
        loss_output: loss_output.clone(),
        loss: match options.loss {
            Loss::CrossEntropy(_) => LossKind::CrossEntropy,
            Loss::Mse => LossKind::Mse,
        },
    }
}

/// The device in words: a CPU with the name that the system has for it.
fn description(device: &dyn Device) -> String {
    let processor = (device.name() == "cpu")
        .then(|| std::fs::read_to_string("/proc/cpuinfo").ok())
        .flatten();
    let name = processor.as_deref().and_then(|text| {
        let line = text.lines().find(|line| line.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim())
    });
    match name {
        Some(name) => format!("{} ({name})", device.name()),
        None => device.name().into(),
    }
}

fn layer_profiles(
    graph: &Graph,
    sizes: &[PartSize],
    inputs: &[usize],
    samples: &[LayerSamples],
) -> Vec<LayerProfile> {
    let layers = graph.layers().iter().zip(sizes).zip(inputs).zip(samples);
    let profiles = layers.map(|(((layer, size), &input_bytes), samples)| {
        let [forward, backward, step] = [&samples.forward, &samples.backward, &samples.step]
            .map(|samples| Summary::of(samples));
        LayerProfile {
            name: layer.name.clone(),
            kind: layer.kind.into(),
            nodes: graph.nodes()[layer.nodes.clone()]
                .iter()
                .map(|node| node.name.clone())
                .collect(),
            forward_ms: forward.median,
            backward_ms: backward.median,
            step_ms: step.median,
            forward_mad_ms: forward.mad,
            backward_mad_ms: backward.mad,
            step_mad_ms: step.mad,
            parameter_bytes: size.parameters as u64,
            optimizer_bytes: size.optimizer as u64,
            stash_bytes: size.stash as u64,
            input_bytes: input_bytes as u64,
            workspace_bytes: size.workspace as u64,
            forward_samples_ms: samples.forward.clone(),
            backward_samples_ms: samples.backward.clone(),
            step_samples_ms: samples.step.clone(),
        }
    });
    profiles.collect()
}

fn edges(graph: &Graph) -> Vec<Edge> {
    let name = |layer: usize| graph.layers()[layer].name.clone();
    let edges = graph.layer_edges().into_iter().map(|edge| Edge {
        from: name(edge.from),
        to: name(edge.to),
        tensor: edge.tensor,
        bytes: edge.bytes as u64,
        gradient: edge.gradient,
        gradient_bytes: None,
    });
    edges.collect()
}

/// Weights that several layers use, given those of each layer.
fn tied(graph: &Graph, weights: &[Vec<usize>], sizes: &[PartSize]) -> Vec<Tied> {
    let mut users: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for (layer, weights) in weights.iter().enumerate() {
        for &weight in weights {
            users.entry(weight).or_default().push(layer);
        }
    }
    let shared = users.into_iter().filter(|(_, layers)| layers.len() > 1);
    let tied = shared.map(|(weight, layers)| {
        let parameter = &graph.parameters()[weight];
        let bytes = parameter.tensor.bytes() as u64;
        let size = &sizes[layers[0]];
        Tied {
            tensor: parameter.name.clone(),
            parameter_bytes: bytes,
            // Every weight of a model has the same kind of state.
            optimizer_bytes: bytes * size.optimizer as u64 / size.parameters.max(1) as u64,
            layers: layers
                .iter()
                .map(|&layer| graph.layers()[layer].name.clone())
                .collect(),
        }
    });
    tied.collect()
}

/// The sum of layers may differ from the whole by this much without a warning.
const SUM_TOLERANCE: f64 = 0.1;

fn warnings(profile: &Profile, samples: &Samples) -> Vec<String> {
    let mut warnings = Vec::new();
    let rounds = samples.whole.len();
    if !measure::enough(rounds) {
        warnings.push(format!(
            "only {rounds} round{} fitted into the budget: give a longer --budget or a smaller --batch",
            if rounds == 1 { "" } else { "s" }
        ));
    } else if !samples.warm {
        warnings.push(
            "times had not settled when warm-up ended: close what else runs on this machine, or give a longer --budget"
                .into(),
        );
    }
    let whole = Summary::of(&samples.whole).median;
    let gap = report::sum_of_layers_ms(profile) / whole - 1.0;
    if gap.abs() > SUM_TOLERANCE {
        warnings.push(format!(
            "the layers sum to {:.1} % {} than the whole step: predictions will be off by as much; \
             measure again on a quiet machine with a longer --budget",
            gap.abs() * 100.0,
            if gap > 0.0 { "more" } else { "less" }
        ));
    }
    warnings
}
