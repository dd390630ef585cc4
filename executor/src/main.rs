//! dp-run: trains a model as its plan says.

mod cli;
mod progress;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use clap::Parser;
use executor::job::{self, predicted_samples_per_s};
use executor::record::{self, Recorder, Summary};
use executor::train::{Material, cores_here, train};
use planner::{Plan, file};

use cli::Cli;
use progress::Console;

/// What shells report for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(INTERRUPTED),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// True when the run was interrupted.
fn run(cli: &Cli) -> Result<bool, Box<dyn std::error::Error>> {
    let stop = stop_on_signal()?;
    silence_workers();
    let plan = Plan::load(&cli.plan)?;
    for path in cli.out.iter().chain(&cli.save_test) {
        file::check_target(path, Some(&cli.dir))?;
    }
    let options = cli.options();
    let (model, job) = job::prepare(&cli.plan, &plan, &options, stop)?;

    for remark in job.graph.remarks() {
        eprintln!("warning: {}: {remark}", job.graph.path().display());
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
    if job.cores_wanted() > cores_here() {
        eprintln!(
            "warning: the workers want {} cores and share {}: expect less than the predicted throughput",
            job.cores_wanted(),
            cores_here()
        );
    }

    let recorder = Recorder::create(&cli.dir)?;
    let mut console = Console::new(recorder, options.epochs, plan.batch_size, cli.quiet);
    let begin = Instant::now();
    let outcome = train(&job, &mut console);
    let recorder = console.into_recorder();
    let outcome = outcome?;
    let summary = Summary::new(
        &outcome,
        cli.mode(),
        plan.batch_size,
        predicted_samples_per_s(&plan, options.baseline),
        begin.elapsed().as_secs_f64(),
    );
    if outcome.interrupted {
        eprintln!(
            "stopped after {} minibatches; writing what is there",
            outcome.minibatches
        );
    }
    if let Some(path) = &cli.out {
        model.write_back(&outcome.named_tensors(&job.graph), path)?;
        console_line(cli, &format!("wrote {}", path.display()));
    }
    if let (Some(path), Material::Dataset(dataset)) = (&cli.save_test, &job.material) {
        record::save_test(path, &dataset.test, &outcome.outputs)?;
        console_line(cli, &format!("wrote {}", path.display()));
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

fn console_line(cli: &Cli, line: &str) {
    if !cli.quiet {
        eprintln!("{line}");
    }
}

/// A worker's panic is caught and ends the run with one line of its own.
fn silence_workers() {
    let default = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let thread = std::thread::current();
        if !thread.name().is_some_and(|name| name.starts_with("worker")) {
            default(info);
        }
    }));
}

/// A flag that the first Ctrl-C sets; the second one ends the program at once.
fn stop_on_signal() -> Result<Arc<AtomicBool>, ctrlc::Error> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
        eprintln!("\nstopping after the minibatches under way; press Ctrl-C again to end at once");
    })?;
    Ok(stop)
}
