//! Profiles that other planners left behind, read as [`Profile`]s.
//!
//! Each format has a file of its own: `pipedream` (the text that PipeDream's profiler wrote), `dnn_partitioning`
//! and `piper` (JSON). They tell less than a profile of dp-profile: what a format does not know is zero here, and
//! [`Imported::notes`] says so.

mod dnn_partitioning;
mod draft;
mod json;
mod pipedream;
mod piper;

use std::fs;
use std::path::Path;

use crate::file::{self, FileError};
use crate::profile::{FileRef, PROFILE_SCHEMA, Profile};

use draft::Draft;

/// Who wrote a profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// dp-profile.
    Own,
    /// PipeDream's profiler: `graph.txt`.
    PipeDream,
    /// The throughput workloads of Tarnawski et al. 2020, JSON.
    DnnPartitioning,
    /// Piper's profiles, JSON.
    Piper,
}

impl Format {
    /// What the content looks like; dp-profile's own format if it looks like none of the others.
    #[must_use]
    pub fn detect(text: &str) -> Self {
        if !text.trim_start().starts_with('{') {
            return if text.contains("forward_compute_time") {
                Self::PipeDream
            } else {
                Self::Own
            };
        }
        if text.contains("\"schema\"") {
            Self::Own
        } else if text.contains("\"TMPCs\"") {
            Self::Piper
        } else if text.contains("\"fpgaLatency\"") {
            Self::DnnPartitioning
        } else {
            Self::Own
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Own => "profile",
            Self::PipeDream => "PipeDream profile",
            Self::DnnPartitioning => "dnn-partitioning workload",
            Self::Piper => "Piper profile",
        }
    }
}

/// Where a foreign profile is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}: {message}")]
pub struct ImportError {
    /// Line, from 1.
    pub line: usize,
    /// What is wrong and what was expected.
    pub message: String,
}

impl ImportError {
    fn new(line: usize, message: impl Into<String>) -> Self {
        Self {
            line,
            message: message.into(),
        }
    }
}

/// A profile, and what its user should know of where it comes from.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// Valid, in execution order.
    pub profile: Profile,
    /// One line each: what the format leaves open and how it was filled.
    pub notes: Vec<String>,
}

impl Imported {
    /// Whether the profile names layers of no ONNX model.
    #[must_use]
    pub fn is_foreign(&self) -> bool {
        self.profile.device.starts_with(FOREIGN_DEVICE)
    }
}

/// How `device` begins in a profile that another planner's profiler wrote, also after `dp-plan convert`.
const FOREIGN_DEVICE: &str = "unknown: imported";

/// Reads a profile of any format, detected by its content if `format` is none.
///
/// `batch_size` (samples per minibatch) replaces what the file says or implies.
///
/// # Errors
/// If the file cannot be read, is not of that format, or contradicts itself.
pub fn load(
    path: &Path,
    format: Option<Format>,
    batch_size: Option<usize>,
) -> Result<Imported, FileError> {
    let bytes = fs::read(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    let text = String::from_utf8_lossy(&bytes);
    let format = format.unwrap_or_else(|| Format::detect(&text));
    let mut imported = if format == Format::Own {
        Imported {
            profile: Profile::load(path)?,
            notes: Vec::new(),
        }
    } else {
        let reference = FileRef {
            file: path.display().to_string(),
            sha256: file::sha256_hex(&bytes),
        };
        parse(&text, format, reference).map_err(|problem| FileError::Import {
            path: path.to_owned(),
            what: format.name(),
            problem,
        })?
    };
    let profile = &mut imported.profile;
    if format == Format::Own {
        if batch_size.is_some_and(|given| given != profile.batch_size) {
            let note = format!(
                "the profile was measured at a batch size of {}: another one is not taken",
                profile.batch_size
            );
            imported.notes.push(note);
        }
    } else if let Some(given) = batch_size {
        if profile.batch_size != 0 && profile.batch_size != given {
            let note = format!(
                "its sizes are those of a minibatch of {} samples, not of --batch {given}: `samples` are counted by the \
                 latter, times and sizes stay what they are",
                profile.batch_size
            );
            imported.notes.push(note);
        }
        profile.batch_size = given;
    } else if profile.batch_size != 0 {
        let note = format!(
            "a batch size of {} shows in its sizes (--batch N says otherwise)",
            profile.batch_size
        );
        imported.notes.push(note);
    } else {
        profile.batch_size = 1;
        let note = "the file does not tell its batch size: `samples` are minibatches here, --batch N changes that";
        imported.notes.push(note.to_owned());
    }
    profile.validate().map_err(|problem| FileError::Profile {
        path: path.to_owned(),
        problem,
    })?;
    Ok(imported)
}

/// The profile in a text of a foreign format; its batch size is 0 where the text does not tell it.
fn parse(text: &str, format: Format, file: FileRef) -> Result<Imported, ImportError> {
    let Draft {
        layers,
        edges,
        batch_size,
        communication_s_per_byte,
        notes,
    } = match format {
        Format::Own => return Err(ImportError::new(1, "this is no foreign format")),
        Format::PipeDream => pipedream::parse(text)?,
        Format::DnnPartitioning => dnn_partitioning::parse(text)?,
        Format::Piper => piper::parse(text)?,
    };
    let (layers, edges) = draft::in_execution_order(layers, edges)?;
    let profile = Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        model: file,
        device: format!("{FOREIGN_DEVICE} from a {}", format.name()),
        batch_size: batch_size.unwrap_or(0),
        threads: 1,
        optimizer: None,
        reading: None,
        layers,
        edges,
        tied: Vec::new(),
        whole_step_ms: None,
        whole_step_samples_ms: Vec::new(),
        communication_s_per_byte,
    };
    Ok(Imported { profile, notes })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORMATS: [Format; 3] = [Format::PipeDream, Format::DnnPartitioning, Format::Piper];

    fn reference() -> FileRef {
        FileRef {
            file: "graph.txt".to_owned(),
            sha256: String::new(),
        }
    }

    /// Pieces of all three formats, in any order.
    fn fragments() -> impl Strategy<Value = String> {
        let piece = prop_oneof![
            Just(
                "node1 -- Conv2d(3) -- forward_compute_time=1.0, backward_compute_time=2, activation_size=[1; 2], parameter_size=3\n"
            ),
            Just("node2 -- Input -- forward_compute_time=1e308, "),
            Just("activation_size=[, parameter_size=nan\n"),
            Just("\tnode1 -- node2\n"),
            Just("\tnode2 -- node1\n"),
            Just("{\"nodes\": [{\"id\": 1, \"name\": \"a\", \"fpgaLatency\": -1, \"size\": 1e300}"),
            Just("{\"id\": 2, \"TMPCs\": {\"1\": [{\"timePerSample\": 1}]}}"),
            Just(
                "], \"edges\": [{\"sourceId\": 1, \"destId\": 2, \"cost\": 0, \"communicationCost\": 1}"
            ),
            Just("]}"),
            Just(","),
            Just("\u{e9}\u{0}"),
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn nothing_makes_a_reader_panic(text in prop_oneof![fragments(), any::<String>()]) {
            let _ = Format::detect(&text);
            for format in FORMATS {
                if let Ok(mut imported) = parse(&text, format, reference()) {
                    imported.profile.batch_size = 1;
                    // What a format does not rule out, the profile does: sizes, times, no layers.
                    let _ = imported.profile.validate();
                }
            }
        }
    }

    #[test]
    fn formats_are_told_apart_by_content() {
        for (text, format) in [
            (
                "node1 -- Input -- forward_compute_time=0, ",
                Format::PipeDream,
            ),
            (
                " {\"nodes\": [{\"fpgaLatency\": 1}]}",
                Format::DnnPartitioning,
            ),
            ("{\"nodes\": [{\"TMPCs\": {}}]}", Format::Piper),
            ("{\"schema\": \"dp.profile/1\"}", Format::Own),
            ("{}", Format::Own),
            ("", Format::Own),
        ] {
            assert_eq!(Format::detect(text), format, "{text}");
        }
    }
}
