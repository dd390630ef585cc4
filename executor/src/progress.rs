//! What a person sees while a run goes on, and its last words.

use std::fmt::Write;
use std::io::IsTerminal;

use crate::error::RunError;
use crate::record::{EmulatedCompute, Recorder, Summary};
use crate::train::{Epoch, Observer, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Records a run and shows it on stderr: a bar on a terminal, a line per epoch elsewhere.
pub struct Console {
    recorder: Recorder,
    bar: ProgressBar,
    terminal: bool,
    quiet: bool,
    epochs: usize,
    batch_size: usize,
    emulated: bool,
    loss: f64,
    correct: usize,
    seen: usize,
}

impl Console {
    /// Watches a run of so many epochs.
    pub fn new(recorder: Recorder, epochs: usize, batch_size: usize, quiet: bool) -> Self {
        let terminal = !quiet && std::io::stderr().is_terminal();
        let bar = ProgressBar::with_draw_target(
            None,
            if terminal {
                ProgressDrawTarget::stderr()
            } else {
                ProgressDrawTarget::hidden()
            },
        );
        let style = ProgressStyle::with_template("{prefix} {wide_bar} {pos}/{len} {msg}")
            .expect("a template with known keys");
        bar.set_style(style);
        Console {
            bar,
            terminal,
            quiet,
            epochs,
            batch_size,
            emulated: recorder.is_emulated(),
            loss: 0.0,
            correct: 0,
            seen: 0,
            recorder,
        }
    }

    /// Hands the record back.
    pub fn into_recorder(self) -> Recorder {
        self.bar.finish_and_clear();
        self.recorder
    }
}

impl Observer for Console {
    fn begin_epoch(&mut self, epoch: usize, minibatches: usize) {
        self.bar.set_length(minibatches as u64);
        self.bar.set_position(0);
        self.bar
            .set_prefix(format!("epoch {epoch}/{}", self.epochs));
        (self.loss, self.correct, self.seen) = (0.0, 0, 0);
    }

    fn step(&mut self, step: &Step) -> Result<(), RunError> {
        self.loss += f64::from(step.loss);
        self.correct += step.correct;
        self.seen += 1;
        if self.terminal {
            let seen = self.seen as f64;
            let learned = if self.emulated {
                "emulated compute".to_owned()
            } else {
                format!(
                    "loss {:.4} acc {:.1}%",
                    self.loss / seen,
                    100.0 * self.correct as f64 / (seen * self.batch_size as f64)
                )
            };
            self.bar.set_message(format!(
                "{learned} {:.0} samples/s bubbles {:.0}%",
                step.samples_per_s,
                100.0 * step.bubble_share
            ));
            self.bar.inc(1);
        }
        self.recorder.step(step)
    }

    fn epoch(&mut self, epoch: &Epoch) -> Result<(), RunError> {
        let line = if self.emulated {
            format!(
                "epoch {}/{}: emulated compute; {:.1} s",
                epoch.epoch, self.epochs, epoch.wall_s
            )
        } else {
            epoch_line(epoch, self.epochs)
        };
        if self.terminal {
            self.bar.println(line);
        } else if !self.quiet {
            eprintln!("{line}");
        }
        self.recorder.epoch(epoch)
    }
}

fn epoch_line(epoch: &Epoch, epochs: usize) -> String {
    let mut line = format!(
        "epoch {}/{epochs}: train loss {:.4}, accuracy {:.2} %",
        epoch.epoch,
        epoch.train_loss,
        100.0 * epoch.train_accuracy
    );
    if let (Some(loss), Some(accuracy)) = (epoch.test_loss, epoch.test_accuracy) {
        let _ = write!(
            line,
            "; test loss {loss:.4}, accuracy {:.2} %",
            100.0 * accuracy
        );
    }
    let _ = write!(line, "; {:.1} s", epoch.wall_s);
    line
}

/// How well waits took the place of compute.
fn lateness(emulated: &EmulatedCompute) -> String {
    let worst = |all: &[f64]| 1e3 * all.iter().copied().fold(0.0, f64::max);
    format!(
        "emulated, {} times the profile's times; waits {:.2} ms late in the mean, {:.1} ms at most",
        emulated.dilate,
        worst(&emulated.mean_lateness_s),
        worst(&emulated.largest_lateness_s)
    )
}

/// The table that ends a run.
pub fn table(summary: &Summary) -> String {
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |v| format!("{v:.4}"));
    let gap = summary.samples_per_s / summary.predicted_samples_per_s - 1.0;
    let mebibytes = |bytes: &u64| format!("{:.1}", *bytes as f64 / f64::from(1 << 20));
    let mut rows = match &summary.emulated_compute {
        Some(emulated) => vec![("compute", lateness(emulated))],
        None => vec![
            (
                "test accuracy",
                summary.test_accuracy.map_or("-".to_owned(), percent),
            ),
            ("test loss", number(summary.test_loss)),
            ("train loss", number(summary.train_loss)),
        ],
    };
    rows.extend([
        (
            "throughput",
            format!(
                "{:.1} samples/s with a full pipeline, {:.1} with filling and draining",
                summary.samples_per_s, summary.overall_samples_per_s
            ),
        ),
        (
            "predicted",
            format!(
                "{:.1} samples/s (measured: {:+.1} %)",
                summary.predicted_samples_per_s,
                100.0 * gap
            ),
        ),
        ("bubbles", percent(summary.bubble_share)),
        (
            "time",
            format!(
                "{:.1} s, {:.1} s of them training {} minibatches",
                summary.wall_s, summary.training_s, summary.minibatches
            ),
        ),
        ("sent", format!("{} MiB", mebibytes(&summary.bytes_sent))),
    ]);
    if summary.emulated_compute.is_none() {
        rows.push((
            "peak memory",
            format!(
                "{} MiB per worker",
                summary
                    .peak_memory_bytes
                    .iter()
                    .map(mebibytes)
                    .collect::<Vec<_>>()
                    .join(" ")
            ),
        ));
    }
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        let _ = writeln!(text, "{name:<14} {value}");
        text
    })
}
