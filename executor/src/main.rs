//! dp-run: trains a model as its plan says.

use std::ffi::OsString;
use std::process::{Child, ExitCode};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use clap::Parser;
use executor::cli::{Cli, Command, CommandLine};
use executor::launch::{self, LaunchError};
use executor::program::{self, Prepared};
use executor::train::train;
use planner::Plan;

/// What shells report for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// What a user is told in a line.
type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    let CommandLine { run: cli, command } = CommandLine::parse();
    let result = match (command, cli) {
        (Some(Command::Network(arguments)), _) => on_hosts(|mpirun| {
            let own: Vec<OsString> = std::env::args_os().skip(1).collect();
            Ok(launch::run_everywhere(&arguments.hosts, &own, mpirun)?)
        }),
        (None, Some(cli)) => run(&cli),
        // clap asks for one of the two.
        (None, None) => Ok(false),
    };
    match result {
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
fn run(cli: &Cli) -> Result<bool, Failure> {
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
fn run_on_hosts(cli: &Cli) -> Result<bool, Failure> {
    on_hosts(|mpirun| {
        let plan = Plan::load(&cli.plan)?;
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        let baseline = cli.options().baseline;
        Ok(launch::run(
            &plan, baseline, &cli.hosts, &arguments, mpirun,
        )?)
    })
}

/// Starts mpirun by `launch` so that Ctrl-C ends it; true when that happened.
fn on_hosts(
    launch: impl FnOnce(&Mutex<Option<Child>>) -> Result<(), Failure>,
) -> Result<bool, Failure> {
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
    let result = launch(&mpirun);
    match result {
        _ if interrupted.load(Ordering::Relaxed) => Ok(true),
        Err(error) => Err(error),
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
