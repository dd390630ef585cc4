//! dp-plan: finds pipeline stages, replicas and depths for a profiled model.

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use planner::cli::{CommandLine, run};

fn main() -> ExitCode {
    let command_line = match CommandLine::try_parse() {
        Ok(command_line) => command_line,
        Err(error) if error.kind() == ErrorKind::ValueValidation => {
            // The first line says everything; a usage reminder would only bury it.
            let text = error.to_string();
            eprintln!("{}", text.lines().next().unwrap_or_default());
            return ExitCode::from(2);
        }
        Err(error) => error.exit(),
    };
    match run(&command_line) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
