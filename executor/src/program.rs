//! What the programs do around the training: from flags to a job, from an outcome to files.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use models::onnx::Model;
use planner::{Plan, file};

use crate::cli::Cli;
use crate::error::RunError;
use crate::job::{self, predicted_samples_per_s};
use crate::progress::{self, Console};
use crate::record::{self, Recorder, Summary};
use crate::train::{Job, Material, Observer, Outcome, cores_here};

/// All that a run needs, opened and checked; nothing is written yet.
pub struct Prepared {
    /// The plan.
    pub plan: Plan,
    /// Its model; none where compute is emulated.
    pub model: Option<Model>,
    /// What is to be trained.
    pub job: Job,
    /// Flags that read the model otherwise than it was profiled, in words.
    contradictions: Vec<String>,
}

impl Prepared {
    /// Opens what the flags name. The run ends after the minibatches under way once `stop` is set.
    ///
    /// # Errors
    /// When something is missing, unwritable, or does not fit.
    pub fn new(cli: &Cli, stop: Arc<AtomicBool>) -> Result<Self, Box<dyn Error + Send + Sync>> {
        let plan = Plan::load(&cli.plan)?;
        for path in cli.out.iter().chain(&cli.save_test) {
            file::check_target(path, Some(&cli.dir))?;
        }
        let options = cli.options();
        let (model, job) = job::prepare(&cli.plan, &plan, &options, stop)?;
        Ok(Prepared {
            contradictions: options.reading.contradictions(&plan),
            plan,
            model,
            job,
        })
    }

    /// Says on stderr what is odd about the model, and, if all workers are on this machine, whether they
    /// have the cores that they want.
    pub fn warn(&self, one_machine: bool) {
        let job = &self.job;
        for line in &self.contradictions {
            eprintln!("warning: {line}");
        }
        if let Some(graph) = &job.graph {
            for remark in graph.remarks() {
                eprintln!("warning: {}: {remark}", graph.path().display());
            }
        }
        let fills: Vec<&str> = job.constant_fills().collect();
        if let [first, others @ ..] = &fills[..] {
            eprintln!(
                "warning: weight '{first}'{} one number everywhere and cannot learn from there; use --init he",
                match others.len() {
                    0 => " holds".to_owned(),
                    n => format!(" and {n} more hold"),
                }
            );
        }
        if one_machine && !job.is_emulated() && job.cores_wanted() > cores_here() {
            eprintln!(
                "warning: the workers want {} cores and share {}: expect less than the predicted throughput",
                job.cores_wanted(),
                cores_here()
            );
        }
    }

    /// Trains by `train`, records and shows how it goes, and writes what was asked for. True when the run was
    /// interrupted.
    ///
    /// # Errors
    /// When training fails or a result cannot be written.
    pub fn run(
        &self,
        cli: &Cli,
        train: impl FnOnce(&Job, &mut dyn Observer) -> Result<Outcome, RunError>,
    ) -> Result<bool, Box<dyn Error + Send + Sync>> {
        let Prepared {
            plan, model, job, ..
        } = self;
        let recorder = Recorder::create(&cli.dir, job.is_emulated())?;
        if let Material::Dataset(dataset) = &job.material
            && let Some(vocabulary) = &dataset.vocabulary
        {
            record::save_vocabulary(&cli.dir, vocabulary)?;
            let count = vocabulary.len();
            let line =
                format!("{count} different characters, in the order of their tokens in vocab.json");
            console_line(cli, &line);
        }
        let mut console = Console::new(recorder, job.epochs, plan.batch_size, cli.quiet);
        let dilate = job.is_emulated().then_some(cli.emulation.dilate);
        let begin = Instant::now();
        let outcome = train(job, &mut console);
        let recorder = console.into_recorder();
        let outcome = outcome?;
        let summary = Summary::new(
            &outcome,
            cli.mode(),
            plan.batch_size,
            predicted_samples_per_s(plan, cli.options().baseline) / dilate.unwrap_or(1.0),
            begin.elapsed().as_secs_f64(),
            dilate,
        );
        if outcome.interrupted {
            eprintln!(
                "stopped after {} minibatches; writing what is there",
                outcome.minibatches
            );
        }
        if let (Some(path), Some(model), Some(graph)) = (&cli.out, model, &job.graph) {
            model.write_back(&outcome.named_tensors(graph), path)?;
            console_line(cli, &format!("wrote {}", path.display()));
            if let Some(exported) = graph.exported_batch()
                && exported != plan.batch_size
            {
                let line = format!(
                    "it takes {exported} samples at once, as the model was exported, not the {} of training",
                    plan.batch_size
                );
                console_line(cli, &line);
            }
        }
        if let (Some(path), Material::Dataset(dataset)) = (&cli.save_test, &job.material) {
            record::save_test(path, &dataset.test, &outcome.outputs)?;
            console_line(cli, &format!("wrote {}", path.display()));
        }
        if let Some(late) = summary.too_late() {
            eprintln!(
                "warning: waits ended {:.1} % of a minibatch's time late: this machine has too much to do for what it is to emulate; lengthen times with --dilate, or use more machines",
                100.0 * late
            );
        }
        recorder.finish(&summary)?;
        let text = match (cli.json, cli.quiet) {
            (true, _) => summary.to_json(),
            (false, true) => String::new(),
            (false, false) => progress::table(&summary),
        };
        file::print(&text).map_err(|error| format!("standard output: {error}"))?;
        Ok(outcome.interrupted)
    }
}

fn console_line(cli: &Cli, line: &str) {
    if !cli.quiet {
        eprintln!("{line}");
    }
}

/// A worker's panic is caught and ends the run with one line of its own.
pub fn silence_workers() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("worker")) {
            default(info);
        }
    }));
}
