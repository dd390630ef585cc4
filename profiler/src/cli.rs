//! The flags of dp-profile.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use models::graph::{BuildOptions, parse_dimension};
use models::loss::Loss;
use models::optimizer::Optimizer;
use planner::units::parse_time;
use profiler::Options;

/// Time every layer of an ONNX model, forward and backward, and measure every size.
#[derive(Debug, Parser)]
#[command(name = "dp-profile", version, max_term_width = 100)]
#[command(
    after_help = "Example:\n  dp-profile models/zoo/lenet5.onnx --batch 32 -o profile.json\n  dp-plan profile.json --gpus 4 --bw 10Gbps -o plan.json"
)]
pub struct Cli {
    /// The model
    #[arg(value_name = "MODEL.onnx")]
    pub model: PathBuf,

    /// Samples per minibatch [default: the batch that the file fixes]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub batch: Option<u32>,

    /// Size of a named dynamic dimension; may be given several times
    #[arg(long = "dim", value_name = "NAME=SIZE", value_parser = parse_dimension)]
    pub dims: Vec<(String, usize)>,

    /// Train Dropout and BatchNormalization nodes also where they were exported for inference
    #[arg(long)]
    pub training_form: bool,

    /// Batch norm: as the file has it, or trained also where it was exported for inference
    #[arg(long, value_enum, value_name = "FORM", default_value_t = BatchNormForm::File)]
    pub bn: BatchNormForm,

    /// Train weights apart that the file holds as one tensor, told apart only by Identity nodes
    #[arg(long)]
    pub untie: bool,

    /// The output that the loss reads, for a model with several [default: the first one]; what only others need is left
    /// out
    #[arg(long, value_name = "NAME")]
    pub loss_output: Option<String>,

    /// Where to measure: auto, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,

    /// Cores that the worker owns (dp-run must be given the same)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,

    /// Workers that will share this machine: the others do the same work while one is measured
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub workers: u32,

    /// Longest time to measure, with a unit: 500ms, 60s, 2min
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub budget: Duration,

    /// Loss at the end of the backward pass
    #[arg(long, value_enum, default_value_t = LossName::CrossEntropy)]
    pub loss: LossName,

    /// Optimizer whose step is timed
    #[arg(long, value_enum, default_value_t = OptimizerName::Sgd)]
    pub optimizer: OptimizerName,

    /// Seed of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Profile file to write
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Also write the table as CSV
    #[arg(long, value_name = "FILE")]
    pub csv: Option<PathBuf>,

    /// Print the profile as JSON instead of the table
    #[arg(long)]
    pub json: bool,

    /// No progress bar and no table
    #[arg(short, long)]
    pub quiet: bool,
}

/// Forms of batch norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BatchNormForm {
    /// As the file has it.
    File,
    /// With the minibatch's statistics.
    Train,
}

/// Losses that a profile can end on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LossName {
    /// Softmax and negative log likelihood.
    CrossEntropy,
    /// Mean squared error.
    Mse,
}

/// Optimizers that a profile can time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum OptimizerName {
    /// Stochastic gradient descent with momentum.
    Sgd,
    /// Adam.
    Adam,
}

impl Cli {
    /// What to measure, and how.
    pub fn options(&self) -> Options {
        Options {
            build: BuildOptions {
                batch: self.batch.map(|batch| batch as usize),
                dims: self.dims.iter().cloned().collect(),
                training_form: self.training_form,
                train_batch_norm: self.bn == BatchNormForm::Train,
                untie: self.untie,
                loss_output: self.loss_output.clone(),
            },
            device: self.device.clone(),
            threads: self.threads as usize,
            workers: self.workers as usize,
            budget: self.budget,
            loss: match self.loss {
                LossName::CrossEntropy => Loss::CROSS_ENTROPY,
                LossName::Mse => Loss::Mse,
            },
            optimizer: match self.optimizer {
                OptimizerName::Sgd => (
                    Optimizer::Sgd {
                        momentum: 0.9,
                        weight_decay: 0.0,
                        nesterov: false,
                    },
                    "sgd-momentum",
                ),
                OptimizerName::Adam => {
                    let adam = Optimizer::Adam {
                        beta1: 0.9,
                        beta2: 0.999,
                        eps: 1e-8,
                        weight_decay: 0.0,
                        decoupled: false,
                    };
                    (adam, "adam")
                }
            },
            seed: self.seed,
        }
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    let seconds = parse_time(text).map_err(|error| error.to_string())?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(format!(
            "`{text}` is no time to measure in: write for example 60s"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_number_is_no_time() {
        assert!(duration("60").unwrap_err().contains("60s"));
        assert_eq!(duration("2min"), Ok(Duration::from_secs(120)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        for bad in ["-1s", "0s", "infs", "nans", "s", "1e300h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
