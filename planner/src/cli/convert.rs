//! Profiles of other planners: `--from`, and `dp-plan convert`.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use super::{CliError, parse_count};
use crate::import::{self, Format, Imported};

/// `dp-plan convert`.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Profile written by another planner's profiler
    pub file: PathBuf,

    /// Who wrote the profile [default: seen from its content]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub from: Option<FormatName>,

    /// Samples in a minibatch of the profile [default: seen from its sizes, or else 1]; times and sizes stay what
    /// they are
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub batch: Option<usize>,

    /// Write the profile to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
}

/// `--from`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FormatName {
    /// dp-profile
    Own,
    /// PipeDream's profiler: graph.txt
    #[value(name = "pipedream")]
    PipeDream,
    /// Workloads of Tarnawski et al. 2020: JSON
    DnnPartitioning,
    /// Piper: JSON
    Piper,
}

/// No note names more layers.
const MOST_SHOWN: usize = 3;

/// The profile in `path`, with notes on what its format leaves open and what it ties together.
///
/// # Errors
/// If it cannot be read or used.
pub(super) fn load(
    path: &Path,
    from: Option<FormatName>,
    batch: Option<usize>,
) -> Result<Imported, CliError> {
    let format = from.map(|name| match name {
        FormatName::Own => Format::Own,
        FormatName::PipeDream => Format::PipeDream,
        FormatName::DnnPartitioning => Format::DnnPartitioning,
        FormatName::Piper => Format::Piper,
    });
    let mut imported = import::load(path, format, batch)?;
    for tied in &imported.profile.tied {
        let shown = tied.layers.iter().take(MOST_SHOWN).map(String::as_str);
        let mut shown = shown.collect::<Vec<_>>().join(", ");
        if tied.layers.len() > MOST_SHOWN {
            shown.push_str(&format!(" and {} more", tied.layers.len() - MOST_SHOWN));
        }
        imported.notes.push(format!(
            "the layers {shown} share the weights `{}`: they stay in one stage (profile with --untie if only the export \
             made them one)",
            tied.tensor
        ));
    }
    Ok(imported)
}

/// Reads the file and writes it in this program's format.
///
/// # Errors
/// Each is one line for the user.
pub(super) fn run(arguments: &Arguments) -> Result<(), CliError> {
    let imported = load(&arguments.file, arguments.from, arguments.batch)?;
    for note in &imported.notes {
        eprintln!("note: {}: {note}", arguments.file.display());
    }
    Ok(imported.profile.save(&arguments.output)?)
}
