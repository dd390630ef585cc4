//! The flags of dp-run.

use std::path::PathBuf;

use crate::data::DataOptions;
use crate::emulation::EmulationOptions;
use crate::job::{Baseline, Options};
use crate::launch::Host;
use crate::learning_rate::{Course, Decay};
use crate::reading::Overrides;
use clap::{Args, Parser, Subcommand, ValueEnum};
use models::graph::parse_dimension;
use models::init::Init;
use models::loss::Classes;
use models::optimizer::Optimizer;
use planner::profile::LossKind;
use planner::units::parse_memory;

/// Train a model as its plan says: pipeline stages, replicas, weight versions.
#[derive(Debug, Parser)]
#[command(
    name = "dp-run",
    version,
    max_term_width = 100,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
#[command(
    after_help = "Examples:\n  dp-run plan.json --data mnist.npz --epochs 6 --out trained.onnx\n  \
                  dp-run plan.json --data mnist.npz --epochs 6 --baseline dp --dir run-dp\n  \
                  dp-run plan.json --synthetic --steps 50\n\n\
                  Leaves metrics.csv, epochs.csv and summary.json in --dir. Ctrl-C ends the run after the\n\
                  minibatches under way and writes what is there (exit status 130); a second one at once."
)]
pub struct CommandLine {
    /// What to run.
    #[command(flatten)]
    pub run: Option<Cli>,
    /// What else to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Everything besides running a plan.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure the network between machines as runs will find it: latency, goodput, all-reduce
    Network(NetworkArgs),
}

/// What to measure, and where to write it.
#[derive(Debug, Args)]
pub struct NetworkArgs {
    /// Machines and how many workers each takes, by Open MPI's mpirun, with dp-run-worker beside dp-run
    #[arg(
        long,
        value_name = "HOST[:N],…",
        value_delimiter = ',',
        required = true
    )]
    pub hosts: Vec<Host>,

    /// Write the cluster to this file, for dp-plan --cluster
    #[arg(short, long, value_name = "FILE.toml")]
    pub output: Option<PathBuf>,

    /// Print the figures as JSON instead of the table
    #[arg(long)]
    pub json: bool,
}

/// How to run a plan.
#[derive(Debug, Args)]
#[command(allow_negative_numbers = true)]
// With groups nested in it clap does not fill this one, by which it sees whether there is something to run.
#[group(args = ["plan"])]
pub struct Cli {
    /// The plan, made by dp-plan
    #[arg(value_name = "PLAN.json")]
    pub plan: PathBuf,

    /// The model, if it is not where the plan says
    #[arg(long, value_name = "FILE.onnx")]
    pub model: Option<PathBuf>,

    /// Size of a named dynamic dimension [default: as the model was profiled]; may be given several times
    #[arg(long = "dim", value_name = "NAME=SIZE", value_parser = parse_dimension)]
    pub dims: Vec<(String, usize)>,

    /// Where samples come from
    #[command(flatten)]
    pub data: DataArgs,

    /// Epochs to train
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub epochs: u32,

    /// Train at most this many minibatches
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub steps: Option<u32>,

    /// Write the model with its trained weights to this file
    #[arg(long, value_name = "FILE.onnx")]
    pub out: Option<PathBuf>,

    /// Write the held-out samples as the model reads them (x, or by the names of its inputs where it has several),
    /// their labels (y) and what the trained model gives for them (output) to this file
    #[arg(long, value_name = "FILE.npz", conflicts_with = "synthetic")]
    pub save_test: Option<PathBuf>,

    /// Folder for metrics.csv, epochs.csv and summary.json
    #[arg(long, value_name = "DIR", default_value = "run")]
    pub dir: PathBuf,

    /// Run this in place of the plan's stages, to compare
    #[arg(long, value_enum)]
    pub baseline: Option<BaselineName>,

    /// How to learn
    #[command(flatten)]
    pub training: TrainingArgs,

    /// Where workers compute: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,

    /// Cores per worker [default: the plan's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,

    /// Machines to run on and how many workers each takes, by Open MPI's mpirun: every machine has the same
    /// files in the same places, and dp-run-worker beside dp-run
    #[arg(long, value_name = "HOST[:N],…", value_delimiter = ',')]
    pub hosts: Vec<Host>,

    /// Waits in place of compute
    #[command(flatten)]
    pub emulation: EmulationArgs,

    /// Gradients of a replicated stage are all-reduced together until they have so many bytes
    #[arg(long, value_name = "SIZE", default_value = "4MiB", value_parser = parse_memory)]
    pub bucket: u64,

    /// Do not keep each worker on cores of its own, as is done on Linux where there are enough
    #[arg(long)]
    pub no_pin: bool,

    /// Print the summary as JSON instead of the table
    #[arg(long)]
    pub json: bool,

    /// Print neither progress nor the table
    #[arg(short, long)]
    pub quiet: bool,
}

/// Waits in place of compute.
#[derive(Debug, Args)]
#[command(next_help_heading = "Emulated compute")]
pub struct EmulationArgs {
    /// Do not compute: wait as long as the profile says, and send, receive and all-reduce tensors of its sizes, to try a
    /// plan on a network without its devices or model [default: the plan's profile]
    #[arg(long, value_name = "PROFILE", num_args = 0..=1, conflicts_with_all = ["data", "synthetic", "out", "save_test", "model"])]
    pub emulate_compute: Option<Option<PathBuf>>,

    /// With --emulate-compute: take so many times as long, for links that are as many times slower than the plan's
    #[arg(long, value_name = "K", requires = "emulate_compute", conflicts_with_all = ["data", "synthetic"], default_value_t = 1.0, value_parser = dilation)]
    pub dilate: f64,
}

impl EmulationArgs {
    fn options(&self) -> Option<EmulationOptions> {
        self.emulate_compute
            .clone()
            .map(|profile| EmulationOptions {
                profile,
                dilate: self.dilate,
            })
    }
}

/// Where samples come from.
#[derive(Debug, Args)]
#[command(next_help_heading = "Data")]
pub struct DataArgs {
    /// Samples: .npz with x and y (or x_train, y_train, x_test, y_test; for a model with several inputs one array of
    /// each name), .npy or IDX, gzipped or not. Tokens, to learn the next one of: text:FILE by its characters, .bin of
    /// 16-bit numbers, or .npy with one axis
    #[arg(long, value_name = "FILE", required_unless_present_any = ["synthetic", "emulate_compute"])]
    pub data: Option<PathBuf>,

    /// Tokens of a sample, as a check: the model says how many it reads
    #[arg(long, value_name = "N", requires = "data", value_parser = clap::value_parser!(u32).range(1..))]
    pub seq: Option<u32>,

    /// Labels, when --data holds one array (.npy, IDX)
    #[arg(long, value_name = "FILE", requires = "data")]
    pub labels: Option<PathBuf>,

    /// Held-out samples, when they are in a file of their own
    #[arg(long, value_name = "FILE", requires = "data")]
    pub test_data: Option<PathBuf>,

    /// Labels of --test-data
    #[arg(long, value_name = "FILE", requires = "test_data")]
    pub test_labels: Option<PathBuf>,

    /// Array of samples in an .npz [default: x_train or x]
    #[arg(long, value_name = "NAME")]
    pub x_name: Option<String>,

    /// Array of labels in an .npz [default: y_train or y]
    #[arg(long, value_name = "NAME")]
    pub y_name: Option<String>,

    /// Array of held-out samples in an .npz [default: x_test, if there]
    #[arg(long, value_name = "NAME")]
    pub x_test_name: Option<String>,

    /// Array of held-out labels in an .npz [default: y_test, if there]
    #[arg(long, value_name = "NAME")]
    pub y_test_name: Option<String>,

    /// Share of the samples to hold out when there is no test part
    #[arg(long, value_name = "SHARE", default_value_t = 0.15, value_parser = fraction)]
    pub test_fraction: f64,

    /// Train on random numbers of the right shapes: for timing alone
    #[arg(long, conflicts_with_all = ["data", "out"])]
    pub synthetic: bool,
}

/// How to learn.
#[derive(Debug, Args)]
#[command(next_help_heading = "Training")]
pub struct TrainingArgs {
    /// Learning rate at the first stage's global batch (its replicas times the batch size); the other
    /// stages' is scaled by their replicas over the first one's [default: 0.02 for sgd, 0.001
    /// for adam and adamw, next to nothing with --synthetic]
    #[arg(long, value_name = "RATE", value_parser = positive)]
    pub lr: Option<f32>,

    /// How the rate changes over the run, behind the warm-up
    #[arg(long, value_enum, default_value_t = DecayName::None)]
    pub lr_decay: DecayName,

    /// Minibatches over which the rate rises to its full value
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub lr_warmup: usize,

    /// What cosine and linear decay end at, as a share of the full rate
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub lr_min: f32,

    /// Minibatches between two steps of --lr-decay step
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = at_least_one)]
    pub lr_step: usize,

    /// Factor of each step of --lr-decay step
    #[arg(long, value_name = "FACTOR", default_value_t = 0.1, value_parser = positive)]
    pub lr_gamma: f32,

    /// Scale gradients down to this norm where it is larger, each stage's by itself: stages step at different times,
    /// and waiting for all of them would stop the pipeline
    #[arg(long, value_name = "NORM", value_parser = positive)]
    pub clip_norm: Option<f32>,

    /// Use --lr as it is in every stage
    #[arg(long)]
    pub no_lr_scaling: bool,

    /// Optimizer
    #[arg(long, value_enum, default_value_t = OptimizerName::Sgd)]
    pub optimizer: OptimizerName,

    /// Momentum of sgd
    #[arg(long, value_name = "SHARE", default_value_t = 0.9, value_parser = momentum)]
    pub momentum: f32,

    /// Weight decay
    #[arg(long, value_name = "RATE", default_value_t = 0.0, value_parser = not_negative)]
    pub weight_decay: f32,

    /// Decay of the mean and of the mean squared gradient of adam and adamw
    #[arg(long, value_name = "BETA1,BETA2", default_value = "0.9,0.999", value_parser = betas)]
    pub betas: (f32, f32),

    /// What is minimised [default: as the model was profiled]
    #[arg(long, value_enum)]
    pub loss: Option<LossName>,

    /// The model's output that the loss reads [default: as the model was profiled]
    #[arg(long, value_name = "NAME")]
    pub loss_output: Option<String>,

    /// Axis of the classes in the model's output [default: the last of three, else 1]
    #[arg(long, value_name = "AXIS", value_parser = at_least_one)]
    pub class_axis: Option<usize>,

    /// Label that does not count, such as -100 for padding
    #[arg(long, value_name = "LABEL", allow_hyphen_values = true)]
    pub ignore_index: Option<i64>,

    /// Train Dropout and BatchNormalization nodes also where they were exported for inference [default: as the model
    /// was profiled]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub training_form: Option<bool>,

    /// Batch norm: as the file has it, or trained also where it was exported for inference [default: as the model was
    /// profiled]
    #[arg(long, value_enum, value_name = "FORM")]
    pub bn: Option<BatchNormForm>,

    /// Train weights apart that the file holds as one tensor [default: as the model was profiled]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub untie: Option<bool>,

    /// First weights: those in the file, or new ones drawn by the seed
    #[arg(long, value_enum, default_value_t = InitName::Keep)]
    pub init: InitName,

    /// Seed of weights, of the order of samples, and of dropout
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Let every pass read the newest weights, as a pipeline without weight versions would: the
    /// gradients are then wrong, which is what this shows
    #[arg(long)]
    pub no_weight_stashing: bool,
}

/// `--baseline`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BaselineName {
    /// Data parallel: the whole model on as many workers as the plan has
    Dp,
    /// The whole model on one worker
    Single,
}

/// `--optimizer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OptimizerName {
    /// Stochastic gradient descent with momentum
    Sgd,
    /// Adam
    Adam,
    /// Adam whose weight decay acts on the weights themselves
    Adamw,
}

/// `--lr-decay`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DecayName {
    /// It stays as it is
    None,
    /// Along half a cosine wave to --lr-min at the end of the run
    Cosine,
    /// In a straight line to --lr-min at the end of the run
    Linear,
    /// Times --lr-gamma every --lr-step minibatches
    Step,
}

/// `--bn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BatchNormForm {
    /// As the file has it
    File,
    /// With the minibatch's statistics
    Train,
}

/// `--loss`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LossName {
    /// Cross-entropy of class numbers
    CrossEntropy,
    /// Mean squared error
    Mse,
}

/// `--init`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum InitName {
    /// The weights in the file
    Keep,
    /// Kaiming He's, for rectifiers
    He,
    /// Xavier Glorot's
    Xavier,
}

impl Cli {
    /// What the library needs to know.
    pub fn options(&self) -> Options {
        let training = &self.training;
        Options {
            model: self.model.clone(),
            reading: self.reading(),
            baseline: self.baseline.map(|name| match name {
                BaselineName::Dp => Baseline::DataParallel,
                BaselineName::Single => Baseline::Single,
            }),
            data: self.data.options(training.seed),
            classes: Classes {
                axis: training.class_axis,
                ignore: training.ignore_index,
            },
            optimizer: training.optimizer(),
            learning_rate: training.lr.unwrap_or(match training.optimizer {
                // There is nothing to learn, and no step may spoil the numbers.
                _ if self.data.synthetic => 1e-6,
                OptimizerName::Sgd => 0.02,
                OptimizerName::Adam | OptimizerName::Adamw => 0.001,
            }),
            course: Course {
                warm_up: training.lr_warmup,
                decay: match training.lr_decay {
                    DecayName::None => Decay::None,
                    DecayName::Cosine => Decay::Cosine,
                    DecayName::Linear => Decay::Linear,
                    DecayName::Step => Decay::Step {
                        every: training.lr_step,
                        factor: training.lr_gamma,
                    },
                },
                least: training.lr_min,
            },
            clip_norm: training.clip_norm,
            scale_learning_rate: !training.no_lr_scaling,
            weight_stashing: !training.no_weight_stashing,
            init: match training.init {
                InitName::Keep => Init::Keep,
                InitName::He => Init::He,
                InitName::Xavier => Init::Xavier,
            },
            seed: training.seed,
            epochs: self.epochs as usize,
            max_minibatches: self.steps.map(|n| n as usize),
            device: self.device.clone(),
            threads: self.threads.map(|n| n as usize),
            pin: !self.no_pin,
            keep_outputs: self.save_test.is_some(),
            bucket_bytes: self.bucket as usize,
            emulation: self.emulation.options(),
        }
    }

    /// How the model is to be read, as far as the flags say.
    fn reading(&self) -> Overrides {
        let training = &self.training;
        Overrides {
            dims: self.dims.iter().cloned().collect(),
            training_form: training.training_form,
            train_batch_norm: training.bn.map(|form| form == BatchNormForm::Train),
            untie: training.untie,
            loss_output: training.loss_output.clone(),
            loss: training.loss.map(|name| match name {
                LossName::CrossEntropy => LossKind::CrossEntropy,
                LossName::Mse => LossKind::Mse,
            }),
        }
    }

    /// What is run, for `summary.json`.
    pub fn mode(&self) -> &'static str {
        match self.baseline {
            None => "plan",
            Some(BaselineName::Dp) => "dp",
            Some(BaselineName::Single) => "single",
        }
    }
}

impl DataArgs {
    /// None for made-up data.
    fn options(&self, seed: u64) -> Option<DataOptions> {
        Some(DataOptions {
            data: self.data.clone()?,
            labels: self.labels.clone(),
            test_data: self.test_data.clone(),
            test_labels: self.test_labels.clone(),
            x_name: self.x_name.clone(),
            y_name: self.y_name.clone(),
            x_test_name: self.x_test_name.clone(),
            y_test_name: self.y_test_name.clone(),
            test_fraction: self.test_fraction,
            seq: self.seq.map(|n| n as usize),
            seed,
        })
    }
}

impl TrainingArgs {
    fn optimizer(&self) -> Optimizer {
        match self.optimizer {
            OptimizerName::Sgd => Optimizer::Sgd {
                momentum: self.momentum,
                weight_decay: self.weight_decay,
                nesterov: false,
            },
            OptimizerName::Adam | OptimizerName::Adamw => Optimizer::Adam {
                beta1: self.betas.0,
                beta2: self.betas.1,
                eps: 1e-8,
                weight_decay: self.weight_decay,
                decoupled: self.optimizer == OptimizerName::Adamw,
            },
        }
    }
}

fn number<T: std::str::FromStr + PartialOrd>(
    text: &str,
    accept: impl Fn(&T) -> bool,
    expected: &str,
) -> Result<T, String> {
    text.parse()
        .ok()
        .filter(accept)
        .ok_or_else(|| format!("expected {expected}"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    number(text, |&n: &usize| n > 0, "a number of at least 1")
}

fn share(text: &str) -> Result<f32, String> {
    number(
        text,
        |v: &f32| (0.0..=1.0).contains(v),
        "a share from 0 to 1",
    )
}

fn betas(text: &str) -> Result<(f32, f32), String> {
    let (first, second) = text
        .split_once(',')
        .ok_or("expected two numbers, such as 0.9,0.999")?;
    Ok((momentum(first.trim())?, momentum(second.trim())?))
}

fn dilation(text: &str) -> Result<f64, String> {
    number(
        text,
        |&v: &f64| v > 0.0 && v <= 1e9,
        "a factor above 0, such as 100",
    )
}

fn positive(text: &str) -> Result<f32, String> {
    number(
        text,
        |&v: &f32| v > 0.0 && v.is_finite(),
        "a number above 0",
    )
}

fn not_negative(text: &str) -> Result<f32, String> {
    number(
        text,
        |&v: &f32| v >= 0.0 && v.is_finite(),
        "a number of at least 0",
    )
}

fn momentum(text: &str) -> Result<f32, String> {
    number(
        text,
        |v: &f32| (0.0..1.0).contains(v),
        "a number from 0 to below 1",
    )
}

fn fraction(text: &str) -> Result<f64, String> {
    number(
        text,
        |v: &f64| (0.0..1.0).contains(v),
        "a share from 0 to below 1, such as 0.15",
    )
}
