//! Reading and writing files: whole or not at all, with errors that say where and what to do.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::import::ImportError;
use crate::plan::PlanError;
use crate::profile::ProfileError;

/// Why a file could not be read, written or used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The operating system refused to read it.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The operating system refused to write it.
    #[error("{}: cannot be written: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// Its text is not the JSON that was expected.
    #[error("{}:{line}:{column}: not a {what}: {message}; {made_by} writes such files", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault.
        column: usize,
        /// `profile` or `plan`.
        what: &'static str,
        /// What the parser found.
        message: String,
        /// The program that writes such files.
        made_by: &'static str,
    },
    /// Its `schema` is another one.
    #[error("{}: schema `{found}` is not `{expected}`, the only one this version reads: {hint}", path.display())]
    Schema {
        /// The file.
        path: PathBuf,
        /// What the file says.
        found: String,
        /// What this version reads.
        expected: &'static str,
        /// What to do.
        hint: String,
    },
    /// A profile of another planner that is wrong.
    #[error("{}:{problem} (read as a {what})", path.display())]
    Import {
        /// The file.
        path: PathBuf,
        /// What it was read as.
        what: &'static str,
        /// What is wrong, from its line on.
        problem: ImportError,
    },
    /// A profile that contradicts itself.
    #[error("{}: {problem}", path.display())]
    Profile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: ProfileError,
    },
    /// A plan that contradicts itself.
    #[error("{}: {problem}", path.display())]
    Plan {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: PlanError,
    },
}

/// What a kind of file is called, for errors.
pub(crate) struct Kind {
    pub what: &'static str,
    pub schema: &'static str,
    pub made_by: &'static str,
}

/// Reads a JSON file that carries a `schema` field.
pub(crate) fn load<T: DeserializeOwned>(path: &Path, kind: &Kind) -> Result<T, FileError> {
    #[derive(Deserialize)]
    struct Header {
        schema: Option<String>,
    }
    let bytes = fs::read(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    let header: Header = parse(path, &bytes, kind)?;
    match header.schema {
        Some(found) if found == kind.schema => parse(path, &bytes, kind),
        found => Err(FileError::Schema {
            path: path.to_owned(),
            hint: schema_hint(found.as_deref(), kind),
            found: found.unwrap_or_else(|| "(none)".to_owned()),
            expected: kind.schema,
        }),
    }
}

/// Pretty JSON with a final newline.
pub(crate) fn to_json<T: serde::Serialize>(value: &T) -> String {
    // Our file types have string keys and finite numbers, so serialisation cannot fail.
    let mut text = serde_json::to_string_pretty(value).unwrap_or_default();
    text.push('\n');
    text
}

fn parse<T: DeserializeOwned>(path: &Path, bytes: &[u8], kind: &Kind) -> Result<T, FileError> {
    serde_json::from_slice(bytes).map_err(|error| {
        let text = error.to_string();
        // The place stands in front of the message already.
        let message = text
            .rsplit_once(" at line ")
            .map_or(text.as_str(), |(message, _)| message);
        FileError::Json {
            path: path.to_owned(),
            line: error.line(),
            column: error.column(),
            what: kind.what,
            message: message.to_owned(),
            made_by: kind.made_by,
        }
    })
}

fn schema_hint(found: Option<&str>, kind: &Kind) -> String {
    let family = kind.schema.split('/').next().unwrap_or_default();
    match found {
        Some(found) if found.split('/').next() == Some(family) => {
            format!(
                "make the {} again with this version's {}",
                kind.what, kind.made_by
            )
        }
        Some(found) if found.starts_with("dp.") => {
            format!("this is another kind of file, give a {} here", kind.what)
        }
        _ => format!("make a {} with {}", kind.what, kind.made_by),
    }
}

/// Asked before long work whose result goes to `path`: whether its folder is there and it is none itself.
/// `to_be_made` is a folder that the work begins with making.
///
/// # Errors
/// If the file could not be written in the end.
pub fn check_target(path: &Path, to_be_made: Option<&Path>) -> Result<(), FileError> {
    let refused = |reason: String| {
        Err(FileError::Write {
            path: path.to_owned(),
            source: std::io::Error::other(reason),
        })
    };
    let folder = path.parent().filter(|folder| {
        let made = to_be_made.is_some_and(|new| new.starts_with(folder));
        !folder.as_os_str().is_empty() && !made
    });
    match folder {
        Some(folder) if !folder.is_dir() => refused(format!(
            "the folder {} is not there; make it first",
            folder.display()
        )),
        _ if path.is_dir() => refused("it is a folder, name a file in it".to_owned()),
        _ => Ok(()),
    }
}

/// Writes to standard output. A reader who has gone, as in `dp-plan ... | head`, has all that it wanted.
///
/// # Errors
/// If it cannot be written, for example to a full disk.
pub fn print(text: &str) -> std::io::Result<()> {
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

/// Writes a file under a temporary name beside `path`, then renames it: readers see the whole or nothing.
///
/// # Errors
/// If the folder does not exist or cannot be written.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let given = path;
    let failed = |source| FileError::Write {
        path: given.to_owned(),
        source,
    };
    // A link stays and what it leads to is replaced; a device or a pipe takes the bytes as they come.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let path = target.as_path();
    if fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
        let opened = fs::OpenOptions::new().write(true).open(path);
        return opened
            .and_then(|mut file| file.write_all(bytes))
            .map_err(failed);
    }
    let name = path.file_name().ok_or_else(|| {
        failed(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "the path names no file",
        ))
    })?;
    let mut temporary_name = std::ffi::OsString::from(".");
    temporary_name.push(name);
    temporary_name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary_name);
    let written = fs::File::create(&temporary).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written
        .and_then(|()| fs::rename(&temporary, path))
        .map_err(|source| {
            let _ = fs::remove_file(&temporary);
            failed(source)
        })
}

/// Lower-case hexadecimal SHA-256 of `bytes`.
#[must_use]
pub fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Lower-case hexadecimal SHA-256 of a file's bytes.
///
/// # Errors
/// If the file cannot be read.
pub fn sha256_of_file(path: &Path) -> Result<String, FileError> {
    let bytes = fs::read(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(sha256_hex(&bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_of_a_known_text() {
        // FIPS 180-2, appendix B.1.
        assert_eq!(
            sha256_hex(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_a_device_takes_the_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_atomically(&link, b"new").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");

        let null = folder.path().join("null");
        std::os::unix::fs::symlink("/dev/null", &null).unwrap();
        write_atomically(&null, b"new").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn targets_are_checked_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/run/file");
        let error = check_target(&path, None).unwrap_err().to_string();
        assert!(error.contains("make it first"), "{error}");
        check_target(&path, Some(&folder.path().join("new/run"))).unwrap();
        check_target(&folder.path().join("file"), None).unwrap();
        check_target(Path::new("file"), None).unwrap();
        assert!(check_target(folder.path(), None).is_err());
    }

    #[test]
    fn a_failed_write_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("taken");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("inside"), b"x").unwrap();
        assert!(write_atomically(&target, b"new").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
