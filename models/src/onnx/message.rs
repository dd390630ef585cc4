//! Messages made of stretches of an original file and new bytes, and files that appear only when complete.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use prost::bytes::Bytes;

use super::{tensor, wire};
use crate::tensor::Tensor;

/// A stretch of an output file.
pub(super) enum Chunk<'a> {
    /// Bytes of the original file.
    Original(Range<usize>),
    /// A few bytes of our own.
    New(Vec<u8>),
    /// Data that the original keeps in another file.
    Kept(Bytes),
    /// A weight, to be written in this element type.
    Weight(&'a Tensor, i32),
}

/// A message (or file) under construction: the length of a nested one is known only when it is complete.
#[derive(Default)]
pub(super) struct Message<'a> {
    pub(super) chunks: Vec<Chunk<'a>>,
    pub(super) size: usize,
}

impl<'a> Message<'a> {
    pub(super) fn copy(&mut self, range: Range<usize>) {
        self.size += range.len();
        match self.chunks.last_mut() {
            Some(Chunk::Original(last)) if last.end == range.start => last.end = range.end,
            _ => self.chunks.push(Chunk::Original(range)),
        }
    }

    pub(super) fn push(&mut self, bytes: Vec<u8>) {
        self.size += bytes.len();
        self.chunks.push(Chunk::New(bytes));
    }

    pub(super) fn push_data(&mut self, data: Chunk<'a>, size: usize) {
        self.size += size;
        self.chunks.push(data);
    }

    pub(super) fn nest(&mut self, number: u32, message: Message<'a>) {
        let mut header = Vec::new();
        wire::put_header(&mut header, number, message.size);
        self.push(header);
        self.size += message.size;
        self.chunks.extend(message.chunks);
    }

    pub(super) fn write(&self, original: &[u8], out: &mut dyn Write) -> io::Result<()> {
        for chunk in &self.chunks {
            match chunk {
                Chunk::Original(range) => out.write_all(&original[range.clone()])?,
                Chunk::New(bytes) => out.write_all(bytes)?,
                Chunk::Kept(bytes) => out.write_all(bytes)?,
                Chunk::Weight(weight, element) => tensor::encode(weight, *element, out)?,
            }
        }
        Ok(())
    }
}

/// Writes a file under a temporary name in the same folder and renames it when it is complete.
pub(super) fn write_file(
    path: &Path,
    contents: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> io::Result<()> {
    // A link stays and what it leads to is replaced; a device or a pipe takes the bytes as they come.
    let target = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let path = target.as_path();
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
        let mut file = File::options().write(true).open(path)?;
        return contents(&mut file);
    }
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::from(io::ErrorKind::InvalidFilename))?;
    let temporary = path.with_file_name(format!(
        ".{}.{}.tmp",
        name.to_string_lossy(),
        std::process::id()
    ));
    let written = File::create(&temporary).and_then(|file| {
        let mut out = BufWriter::with_capacity(1 << 20, file);
        contents(&mut out)?;
        out.into_inner()
            .map_err(io::IntoInnerError::into_error)?
            .sync_all()?;
        std::fs::rename(&temporary, path)
    });
    if written.is_err() {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&temporary);
    }
    written
}
