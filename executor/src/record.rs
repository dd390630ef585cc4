//! What a run leaves behind: `metrics.csv`, `epochs.csv` and `summary.json`.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use models::tensor::Tensor;
use serde::Serialize;

use crate::data::{Samples, array, npy};
use crate::error::RunError;
use crate::train::{Epoch, Observer, Outcome, Step};
use crate::usage::Carried;
use crate::worker::Report;

/// Writes `metrics.csv` and `epochs.csv` while a run goes on.
#[derive(Debug)]
pub struct Recorder {
    dir: PathBuf,
    metrics: csv::Writer<File>,
    epochs: csv::Writer<File>,
    emulated: bool,
}

impl Recorder {
    /// Makes the folder and begins both files anew. Where compute is `emulated` there are no losses to write, and
    /// `metrics.csv` says so in a column of its own.
    ///
    /// # Errors
    /// When the folder or a file in it cannot be written.
    pub fn create(dir: &Path, emulated: bool) -> Result<Self, RunError> {
        fs::create_dir_all(dir).map_err(|e| output_error(dir, e))?;
        let begin = |name: &str, header: &[&str]| -> Result<csv::Writer<File>, RunError> {
            let path = dir.join(name);
            let mut writer = csv::Writer::from_path(&path).map_err(|e| output_error(&path, e))?;
            writer
                .write_record(header)
                .map_err(|e| output_error(&path, e))?;
            Ok(writer)
        };
        let mut recorder = Recorder {
            dir: dir.to_owned(),
            metrics: begin(
                "metrics.csv",
                &["step", "epoch", "loss", "samples_per_s", "compute"][..4 + usize::from(emulated)],
            )?,
            emulated,
            epochs: begin(
                "epochs.csv",
                &[
                    "epoch",
                    "train_loss",
                    "test_loss",
                    "test_accuracy",
                    "wall_s",
                ],
            )?,
        };
        recorder.flush()?;
        // One of an earlier run would be taken for this one's.
        let summary = dir.join("summary.json");
        match fs::remove_file(&summary) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(output_error(&summary, e)),
            _ => Ok(recorder),
        }
    }

    /// Whether compute is emulated.
    pub fn is_emulated(&self) -> bool {
        self.emulated
    }

    /// Writes `summary.json`, whole or not at all.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn finish(mut self, summary: &Summary) -> Result<(), RunError> {
        self.flush()?;
        let path = self.dir.join("summary.json");
        planner::file::write_atomically(&path, summary.to_json().as_bytes())
            .map_err(|e| output_error(&path, e))
    }

    fn flush(&mut self) -> Result<(), RunError> {
        let Self {
            dir,
            metrics,
            epochs,
            ..
        } = self;
        metrics
            .flush()
            .and_then(|()| epochs.flush())
            .map_err(|e| output_error(dir, e))
    }
}

impl Observer for Recorder {
    fn begin_epoch(&mut self, _epoch: usize, _minibatches: usize) {}

    fn step(&mut self, step: &Step) -> Result<(), RunError> {
        let row = [
            step.step.to_string(),
            step.epoch.to_string(),
            if self.emulated {
                String::new()
            } else {
                step.loss.to_string()
            },
            format!("{:.1}", step.samples_per_s),
        ];
        let compute = self.emulated.then(|| "emulated".to_owned());
        self.metrics
            .write_record(row.into_iter().chain(compute))
            .map_err(|e| output_error(&self.dir, e))
    }

    fn epoch(&mut self, epoch: &Epoch) -> Result<(), RunError> {
        let optional = |value: Option<f64>| value.map_or(String::new(), |v| v.to_string());
        let row = [
            epoch.epoch.to_string(),
            optional(Some(epoch.train_loss).filter(|_| !self.emulated)),
            optional(epoch.test_loss),
            optional(epoch.test_accuracy),
            format!("{:.3}", epoch.wall_s),
        ];
        self.epochs
            .write_record(row)
            .map_err(|e| output_error(&self.dir, e))?;
        self.flush()
    }
}

/// Writes held-out samples, their labels, and what the model gives for them as an `.npz`.
///
/// # Errors
/// When it cannot be written.
pub fn save_test(path: &Path, test: &Samples, outputs: &[Tensor]) -> Result<(), RunError> {
    let origin = path.display().to_string();
    let mut arrays = test.arrays(&origin)?;
    arrays.push(("output".to_owned(), array::stack(&origin, outputs)?));
    let named: Vec<_> = arrays
        .iter()
        .map(|(name, array)| (name.as_str(), array))
        .collect();
    let bytes = npy::write_archive(&named)?;
    planner::file::write_atomically(path, &bytes).map_err(|e| output_error(path, e))
}

/// Writes the characters of a text in the order of their tokens as `vocab.json`, a list.
///
/// # Errors
/// When it cannot be written.
pub fn save_vocabulary(dir: &Path, vocabulary: &[char]) -> Result<(), RunError> {
    let path = dir.join("vocab.json");
    let text = serde_json::to_string_pretty(vocabulary).map_err(|e| output_error(&path, e))?;
    planner::file::write_atomically(&path, text.as_bytes()).map_err(|e| output_error(&path, e))
}

fn output_error(path: &Path, reason: impl ToString) -> RunError {
    RunError::Output {
        file: path.display().to_string(),
        reason: reason.to_string(),
    }
}

/// Waits that end this share of a minibatch's time late do not stand for compute any more.
const LATE: f64 = 0.01;

/// `summary.json`: what a run came to.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Always `dp.run/1`.
    pub schema: &'static str,
    /// `plan`, or the baseline that was run in its place.
    pub mode: &'static str,
    /// Epochs that were trained, the last one perhaps in part.
    pub epochs: usize,
    /// Minibatches that were trained.
    pub minibatches: usize,
    /// Samples per minibatch.
    pub batch_size: usize,
    /// Whether it was stopped before its end.
    pub interrupted: bool,
    /// Share of held-out samples that are right, after the last epoch that was judged.
    pub test_accuracy: Option<f64>,
    /// Loss over the held-out samples then.
    pub test_loss: Option<f64>,
    /// Mean loss over the last epoch's minibatches.
    pub train_loss: Option<f64>,
    /// Samples per second while the pipeline was full: what the prediction is about.
    pub samples_per_s: f64,
    /// Samples per second of training, filling and draining of every epoch included.
    pub overall_samples_per_s: f64,
    /// What the plan predicts for a full pipeline.
    pub predicted_samples_per_s: f64,
    /// Share of the workers' training time spent waiting, filling and draining included.
    pub bubble_share: f64,
    /// Seconds from the first minibatch to the last evaluation.
    pub wall_s: f64,
    /// Seconds of training in it.
    pub training_s: f64,
    /// Activations, gradients and all-reduces (counted as a ring moves them), all workers together.
    pub bytes_sent: u64,
    /// Most bytes that each worker's device held at once.
    pub peak_memory_bytes: Vec<u64>,
    /// Most weight versions that each worker held at once.
    pub versions_held: Vec<usize>,
    /// Processor time of training over its time, for each worker: of its process, or of its thread where the process has
    /// other workers.
    pub cpu_share: Vec<Option<f64>>,
    /// Bytes that the interfaces of each worker's machine sent meanwhile, the loopback left out, with all that the
    /// protocols add. None where the workers share a process.
    pub interface_bytes_sent: Vec<Option<u64>>,
    /// Bytes that they received.
    pub interface_bytes_received: Vec<Option<u64>>,
    /// Where waits took the place of compute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub emulated_compute: Option<EmulatedCompute>,
}

/// How well waits took the place of compute.
#[derive(Clone, Debug, Serialize)]
pub struct EmulatedCompute {
    /// Times were so many times those of the profile.
    pub dilate: f64,
    /// How late each worker's waits ended, mean, seconds.
    pub mean_lateness_s: Vec<f64>,
    /// The latest.
    pub largest_lateness_s: Vec<f64>,
}

impl EmulatedCompute {
    fn new(dilate: f64, workers: &[Report]) -> Self {
        let lateness = || workers.iter().map(|w| w.lateness);
        EmulatedCompute {
            dilate,
            mean_lateness_s: lateness().map(|l| l.mean().as_secs_f64()).collect(),
            largest_lateness_s: lateness().map(|l| l.largest.as_secs_f64()).collect(),
        }
    }
}

impl Summary {
    /// Sums an outcome up; `dilate` where compute was emulated.
    pub fn new(
        outcome: &Outcome,
        mode: &'static str,
        batch_size: usize,
        predicted_samples_per_s: f64,
        wall_s: f64,
        dilate: Option<f64>,
    ) -> Self {
        let judged = outcome.epochs.iter().rev().find(|e| e.test_loss.is_some());
        let workers = outcome.workers.iter();
        let carried =
            |bytes: fn(Carried) -> u64| workers.clone().map(move |w| w.usage.interfaces.map(bytes));
        Summary {
            schema: "dp.run/1",
            mode,
            epochs: outcome.epochs.len(),
            minibatches: outcome.minibatches,
            batch_size,
            interrupted: outcome.interrupted,
            test_accuracy: judged.and_then(|e| e.test_accuracy),
            test_loss: judged.and_then(|e| e.test_loss),
            train_loss: (outcome.epochs.last().map(|e| e.train_loss)).filter(|_| dilate.is_none()),
            samples_per_s: outcome.steady_samples_per_s,
            overall_samples_per_s: outcome.overall_samples_per_s,
            predicted_samples_per_s,
            bubble_share: outcome.bubble_share,
            wall_s,
            training_s: outcome.training_s,
            bytes_sent: workers.clone().map(|w| w.traffic.bytes_sent).sum(),
            peak_memory_bytes: match dilate {
                None => workers.clone().map(|w| w.peak_memory_bytes).collect(),
                // Its tensors are never written.
                Some(_) => Vec::new(),
            },
            versions_held: workers.clone().map(|w| w.most_versions).collect(),
            cpu_share: workers.clone().map(|w| w.usage.cpu_share()).collect(),
            interface_bytes_sent: carried(|bytes| bytes.sent).collect(),
            interface_bytes_received: carried(|bytes| bytes.received).collect(),
            emulated_compute: dilate.map(|k| EmulatedCompute::new(k, &outcome.workers)),
        }
    }

    /// By how large a share of the time between two minibatches waits were late in the mean, where that is too much for
    /// them to stand for compute.
    pub fn too_late(&self) -> Option<f64> {
        let lateness = self
            .emulated_compute
            .iter()
            .flat_map(|e| &e.mean_lateness_s);
        let latest = lateness.copied().fold(0.0, f64::max);
        let share = latest * self.samples_per_s / self.batch_size as f64;
        (share > LATE).then_some(share)
    }

    /// As it stands in the file.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("numbers and strings only");
        text.push('\n');
        text
    }
}
