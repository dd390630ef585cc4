//! dp-run: trains a model as its plan says.

use std::ffi::OsString;
use std::process::{Child, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Parser;
use executor::cli::Cli;
use executor::launch::{self, LaunchError};
use executor::program::{self, Prepared};
use executor::train::train;
use planner::Plan;

/// What shells report for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(false) => ExitCode::SUCCESS,
        Ok(true) => ExitCode::from(INTERRUPTED),
        // A worker has printed its error.
        Err(error) if matches!(error.downcast_ref(), Some(LaunchError::Reported)) => {
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// True when the run was interrupted.
fn run(cli: &Cli) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
    if !cli.hosts.is_empty() {
        return run_on_hosts(cli);
    }
    let stop = stop_on_signal()?;
    program::silence_workers();
    let prepared = Prepared::new(cli, stop)?;
    prepared.warn(true);
    prepared.run(cli, train)
}

/// As [`run`], on other machines.
fn run_on_hosts(cli: &Cli) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
    let mpirun: Arc<Mutex<Option<Child>>> = Arc::default();
    let interrupted = Arc::new(AtomicBool::new(false));
    let (running, flag) = (Arc::clone(&mpirun), Arc::clone(&interrupted));
    ctrlc::set_handler(move || {
        flag.store(true, Ordering::Relaxed);
        if let Some(child) = &mut *running.lock().unwrap_or_else(PoisonError::into_inner) {
            // Its workers end with it. One that has ended cannot be killed.
            let _ = child.kill();
        }
    })?;
    let plan = Plan::load(&cli.plan)?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let baseline = cli.options().baseline;
    let result = launch::run(&plan, baseline, &cli.hosts, &arguments, &mpirun);
    match result {
        _ if interrupted.load(Ordering::Relaxed) => Ok(true),
        Err(error) => Err(error.into()),
        Ok(()) => Ok(false),
    }
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
