//! Tensors whose data lies in a file beside the model.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Component, Path};

use prost::bytes::Bytes;

use super::proto::TensorProto;

/// Bytes of an external tensor; `folder` is the model's.
///
/// The location must stay inside that folder: a model from elsewhere must not make a program read,
/// and later publish in trained weights, files that have nothing to do with it.
pub(super) fn read(tensor: &TensorProto, expected: usize, folder: &Path) -> Result<Bytes, String> {
    let entry = |key: &str| {
        tensor
            .external_data
            .iter()
            .find(|entry| entry.key() == key)
            .map(|entry| entry.value())
    };
    let number = |key: &str| match entry(key) {
        None => Ok(None),
        Some(text) => text
            .parse::<u64>()
            .map(Some)
            .map_err(|_| format!("external data: {key} '{text}' is not a number of bytes")),
    };
    let location = entry("location").ok_or("external data without a location")?;
    let relative = Path::new(location);
    let inside = relative
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if location.is_empty() || !inside {
        return Err(format!(
            "external data '{location}' is not inside the model's folder; refused"
        ));
    }
    let folder = if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    };
    let path = folder.join(relative);
    let failed = |error: std::io::Error| format!("external data {}: {error}", path.display());
    let real = path.canonicalize().map_err(failed)?;
    if !real.starts_with(folder.canonicalize().map_err(failed)?) {
        return Err(format!(
            "external data '{location}' leads out of the model's folder; refused"
        ));
    }
    let offset = number("offset")?.unwrap_or(0);
    let mut file = File::open(&real).map_err(failed)?;
    let available = file
        .metadata()
        .map_err(failed)?
        .len()
        .saturating_sub(offset);
    let length = number("length")?.unwrap_or(available.min(expected as u64));
    if length != expected as u64 {
        return Err(format!(
            "external data '{location}' holds {length} bytes for it where its shape needs {expected}"
        ));
    }
    if length > available {
        return Err(format!(
            "external data {} is truncated: {length} bytes at offset {offset} are wanted, {available} are there",
            path.display()
        ));
    }
    file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    let mut bytes = vec![0; expected];
    file.read_exact(&mut bytes).map_err(failed)?;
    Ok(bytes.into())
}
