//! dp-profile: parses, measures, prints.

mod cli;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use planner::file;
use profiler::measure::Stage;
use profiler::{Measured, report};

use cli::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<(), Box<dyn std::error::Error>> {
    for path in cli.output.iter().chain(&cli.csv) {
        file::check_target(path, None)?;
    }
    let bar = progress_bar(cli.quiet);
    let options = cli.options();
    let measured = profiler::profile(&cli.model, &options, |stage, rounds, spent| {
        bar.set_position((spent.min(1.0) * 1000.0) as u64);
        bar.set_message(match stage {
            Stage::WarmUp => format!("warming up, round {rounds}"),
            Stage::Measure => format!("round {rounds}"),
        });
    });
    bar.finish_and_clear();
    let Measured { profile, warnings } = measured?;

    for warning in warnings {
        eprintln!("warning: {warning}");
    }
    if let Some(path) = &cli.output {
        profile.save(path)?;
    }
    if let Some(path) = &cli.csv {
        let mut table = Vec::new();
        report::write_csv(&profile, &mut table)?;
        file::write_atomically(path, &table)?;
    }
    let text = match (cli.json, cli.quiet) {
        (true, _) => profile.to_json(),
        (false, true) => return Ok(()),
        (false, false) => report::table(&profile),
    };
    Ok(file::print(&text)?)
}

fn progress_bar(quiet: bool) -> ProgressBar {
    if quiet || !io::stderr().is_terminal() {
        return ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
    }
    let bar = ProgressBar::new(1000);
    let template = "{bar:30} {msg} ({elapsed} of the budget)";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
