//! From files and flags to a [`Dataset`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::random::Stream;
use models::tensor::DType;

use super::array::{Array, Elements};
use super::{DataError, Dataset, Samples, Signature, idx, npy, shuffle, tokens};

/// Which files and arrays make the data set.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// An `.npz` with features and labels, features alone as `.npy` or IDX, or a row of tokens: `text:FILE`, `.bin`,
    /// `.npy`.
    pub data: PathBuf,
    /// Labels, when `data` holds features alone.
    pub labels: Option<PathBuf>,
    /// Held-out features, as `data`.
    pub test_data: Option<PathBuf>,
    /// Held-out labels, as `labels`.
    pub test_labels: Option<PathBuf>,
    /// Array of features in an `.npz`; otherwise `x_train` or `x`.
    pub x_name: Option<String>,
    /// Array of labels in an `.npz`; otherwise `y_train` or `y`.
    pub y_name: Option<String>,
    /// Array of held-out features in an `.npz`; otherwise `x_test`.
    pub x_test_name: Option<String>,
    /// Array of held-out labels in an `.npz`; otherwise `y_test`.
    pub y_test_name: Option<String>,
    /// Share of the samples to hold out when the files have no test part.
    pub test_fraction: f64,
    /// Tokens of a sample, if the user says how many there should be.
    pub seq: Option<usize>,
    /// Seed of the split.
    pub seed: u64,
}

/// Reads a data set and fits it to a model.
///
/// Integer features are divided by the largest value of the training array: 255 for images, so that
/// they run from 0 to 1. Without a test part of its own, a data set is shuffled by the seed and its
/// last `test_fraction` is held out. A text (`text:FILE`), a `.bin`, and an `.npy` with one axis of integers for a
/// model that reads tokens are rows of tokens to learn the next one of; their end is held out.
///
/// # Errors
/// When a file or array is missing, damaged, or does not fit the model.
pub fn open(options: &DataOptions, signature: &Arc<Signature>) -> Result<Dataset, DataError> {
    if let Some(dataset) = open_tokens(options, signature)? {
        return Ok(dataset);
    }
    let bytes = read_file(&options.data)?;
    let train = Part {
        labels: options.labels.as_deref(),
        names: [options.x_name.as_deref(), options.y_name.as_deref()],
        suffix: "train",
        flags: ["--labels", "--x-name", "--y-name"],
    };
    let (x, y) = train.read(&options.data, &bytes, signature)?;
    let held_out = Part {
        labels: options.test_labels.as_deref(),
        names: [
            options.x_test_name.as_deref(),
            options.y_test_name.as_deref(),
        ],
        suffix: "test",
        flags: ["--test-labels", "--x-test-name", "--y-test-name"],
    };
    let test = match &options.test_data {
        Some(path) => Some(held_out.read(path, &read_file(path)?, signature)?),
        None if held_out.is_in(&options.data, &bytes)? => {
            Some(held_out.read(&options.data, &bytes, signature)?)
        }
        None => None,
    };
    let scales: Vec<f32> = x.iter().map(|x| integer_scale(x)).collect();
    let all = rows(&y);
    if let Some((x_test, y_test)) = test {
        let test_rows = rows(&y_test);
        return Ok(Dataset {
            train: Samples::fit(x, y, all, scales.clone(), signature)?,
            test: Samples::fit(x_test, y_test, test_rows, scales, signature)?,
            vocabulary: None,
        });
    }
    let held_out = (all.len() as f64 * options.test_fraction).round() as usize;
    let mut order = all;
    shuffle::shuffle(&mut order, Stream::new(options.seed).named("split"));
    let test_rows = order.split_off(order.len() - held_out.min(order.len()));
    Ok(Dataset {
        train: Samples::fit(x.clone(), y.clone(), order, scales.clone(), signature)?,
        test: Samples::fit(x, y, test_rows, scales, signature)?,
        vocabulary: None,
    })
}

/// A row of tokens, if that is what the data is.
fn open_tokens(
    options: &DataOptions,
    signature: &Arc<Signature>,
) -> Result<Option<Dataset>, DataError> {
    let fraction = options.test_fraction;
    if let (Some(seq), [input]) = (options.seq, &signature.inputs[..])
        && input.ty.shape.get(1) != Some(&seq)
    {
        return Err(DataError::Mismatch(format!(
            "--seq {seq}: the model's input '{}' is {:?}; profile, plan and run it with --dim if its length is open, or \
             export it for {seq} tokens",
            input.name, input.ty.shape
        )));
    }
    if let Some(file) = tokens::text_file(&options.data) {
        if file.as_os_str().is_empty() {
            let problem = "--data text: names no file; write text:FILE, for example text:book.txt";
            return Err(DataError::Mismatch(problem.to_owned()));
        }
        let origin = file.display().to_string();
        let (row, vocabulary) = tokens::of_text(&origin, &read_file(file)?)?;
        return Ok(Some(Dataset {
            vocabulary: Some(vocabulary),
            ..tokens::dataset(&origin, row, fraction, signature)?
        }));
    }
    let origin = options.data.display().to_string();
    let ends_in = |extension| options.data.extension().is_some_and(|e| e == extension);
    let reads_tokens = matches!(&signature.inputs[..], [input] if input.ty.dtype == DType::I64);
    if options.labels.is_some() || !reads_tokens {
        return Ok(None);
    }
    if ends_in("bin") {
        let row = tokens::of_bin(&origin, &read_file(&options.data)?)?;
        return tokens::dataset(&origin, row, fraction, signature).map(Some);
    }
    if ends_in("npy") {
        let array = read_single(origin.clone(), &read_file(&options.data)?)?;
        if let ([_], Elements::I64(_) | Elements::U8(_) | Elements::U16(_)) =
            (&array.shape[..], &*array.elements)
        {
            let row = Arc::unwrap_or_clone(array.elements);
            return tokens::dataset(&origin, row, fraction, signature).map(Some);
        }
    }
    Ok(None)
}

fn rows(y: &Array) -> Vec<u32> {
    (0..y.samples() as u32).collect()
}

/// 1 / the largest value of an array of integers, 1 for floats.
fn integer_scale(x: &Array) -> f32 {
    match (&*x.elements, x.range(None)) {
        (Elements::U8(_), Some((_, high))) if high > 0.0 => (1.0 / high) as f32,
        _ => 1.0,
    }
}

/// The training or the held-out part of a data set, as flags and defaults name it.
struct Part<'a> {
    /// File of the labels, where the features are alone in theirs.
    labels: Option<&'a Path>,
    /// Arrays of features and labels.
    names: [Option<&'a str>; 2],
    /// How the names of its arrays end.
    suffix: &'static str,
    /// Flags that name the labels' file and the arrays.
    flags: [&'static str; 3],
}

impl Part<'_> {
    /// Whether an archive has this part.
    fn is_in(&self, path: &Path, bytes: &[u8]) -> Result<bool, DataError> {
        if !bytes.starts_with(b"PK") {
            return Ok(false);
        }
        let there = npy::names(&path.display().to_string(), bytes)?;
        let ending = format!("_{}", self.suffix);
        Ok(self.names.iter().any(Option::is_some) || there.iter().any(|n| n.ends_with(&ending)))
    }

    /// Features for each of the model's inputs, and labels.
    fn read(
        &self,
        path: &Path,
        bytes: &[u8],
        signature: &Signature,
    ) -> Result<(Vec<Arc<Array>>, Arc<Array>), DataError> {
        let file = path.display().to_string();
        if bytes.starts_with(b"PK") {
            return self.read_archive(&file, bytes, signature);
        }
        if signature.inputs.len() > 1 {
            let names: Vec<&str> = signature.inputs.iter().map(|i| i.name.as_str()).collect();
            return Err(DataError::Mismatch(format!(
                "{file} holds one array, the model reads {}: give an .npz with arrays of these names",
                names.join(", ")
            )));
        }
        let x = read_single(file, bytes)?;
        let Some(labels) = self.labels else {
            return Err(DataError::Mismatch(format!(
                "{} holds one array; name the file of its labels with {}",
                x.origin, self.flags[0]
            )));
        };
        let y = read_single(labels.display().to_string(), &read_file(labels)?)?;
        Ok((vec![Arc::new(x)], Arc::new(y)))
    }

    fn read_archive(
        &self,
        file: &str,
        bytes: &[u8],
        signature: &Signature,
    ) -> Result<(Vec<Arc<Array>>, Arc<Array>), DataError> {
        let there = npy::names(file, bytes)?;
        let find = |given: Option<&str>, defaults: &[&str], flag: &str| {
            let suffixed = defaults
                .iter()
                .map(|name| format!("{name}_{}", self.suffix));
            let bare = defaults.iter().map(|name| (*name).to_owned());
            let candidates = match given {
                Some(name) => vec![name.to_owned()],
                None => suffixed.chain(bare).collect(),
            };
            let found = candidates.iter().find(|name| there.contains(name));
            let name = found.ok_or_else(|| {
                DataError::Mismatch(format!(
                    "{file}: no array {}, it has {}; name another with {flag}",
                    candidates.join(" or "),
                    if there.is_empty() {
                        "none".to_owned()
                    } else {
                        there.join(", ")
                    }
                ))
            })?;
            npy::read_from_archive(file, bytes, name).map(Arc::new)
        };
        let [_, x_flag, y_flag] = self.flags;
        let x = if let [input] = &signature.inputs[..] {
            vec![find(self.names[0], &["x", &input.name], x_flag)?]
        } else {
            let each = signature.inputs.iter();
            let each =
                each.map(|input| find(None, &[&input.name], "the name of the model's input"));
            each.collect::<Result<_, _>>()?
        };
        let y = find(self.names[1], &["y", "labels"], y_flag)?;
        Ok((x, y))
    }
}

/// Reads a file; a gzipped one is inflated.
fn read_file(path: &Path) -> Result<Vec<u8>, DataError> {
    let io = |source| DataError::Io {
        file: path.display().to_string(),
        source,
    };
    let bytes = std::fs::read(path).map_err(io)?;
    if !bytes.starts_with(&[0x1F, 0x8B]) {
        return Ok(bytes);
    }
    let mut inflated = Vec::new();
    flate2::read::MultiGzDecoder::new(&bytes[..])
        .read_to_end(&mut inflated)
        .map_err(io)?;
    Ok(inflated)
}

fn read_single(origin: String, bytes: &[u8]) -> Result<Array, DataError> {
    if bytes.starts_with(b"\x93NUMPY") {
        npy::read(origin, bytes)
    } else if idx::is_idx(bytes) {
        idx::read(origin, bytes)
    } else {
        Err(DataError::malformed(
            &origin,
            "neither .npz, .npy nor IDX (the file begins like none of them)",
        ))
    }
}
