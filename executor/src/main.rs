//! dp-run: trains a model as its plan says.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use executor::cli::Cli;
use executor::program::{self, Prepared};
use executor::train::train;

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
fn run(cli: &Cli) -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
    let stop = stop_on_signal()?;
    program::silence_workers();
    let prepared = Prepared::new(cli, stop)?;
    prepared.warn(true);
    prepared.run(cli, train)
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
