//! From files and flags to a [`Dataset`].

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::random::Stream;

use super::array::{Array, Elements};
use super::{DataError, Dataset, Samples, Signature, idx, npy, shuffle};

/// Which files and arrays make the data set.
#[derive(Clone, Debug)]
pub struct DataOptions {
    /// An `.npz` with features and labels, or features alone as `.npy` or IDX.
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
    /// Seed of the split.
    pub seed: u64,
}

/// Reads a data set and fits it to a model.
///
/// Integer features are divided by the largest value of the training array: 255 for images, so that
/// they run from 0 to 1. Without a test part of its own, a data set is shuffled by the seed and its
/// last `test_fraction` is held out.
///
/// # Errors
/// When a file or array is missing, damaged, or does not fit the model.
pub fn open(options: &DataOptions, signature: &Arc<Signature>) -> Result<Dataset, DataError> {
    let bytes = read_file(&options.data)?;
    let (x, y) = read_pair(
        &options.data,
        &bytes,
        options.labels.as_deref(),
        [options.x_name.as_deref(), options.y_name.as_deref()],
        [&["x_train", "x"], &["y_train", "y"]],
        "--labels",
    )?;
    let test = match &options.test_data {
        Some(path) => Some(read_pair(
            path,
            &read_file(path)?,
            options.test_labels.as_deref(),
            [
                options.x_test_name.as_deref(),
                options.y_test_name.as_deref(),
            ],
            [&["x_test", "x"], &["y_test", "y"]],
            "--test-labels",
        )?),
        None => read_test_part(options, &bytes)?,
    };
    let scale = integer_scale(&x);
    let (x, y) = (Arc::new(x), Arc::new(y));
    let all = rows(&x);
    match test {
        Some((x_test, y_test)) => {
            let test_rows = rows(&x_test);
            Ok(Dataset {
                train: Samples::fit(x, y, all, scale, signature)?,
                test: Samples::fit(
                    Arc::new(x_test),
                    Arc::new(y_test),
                    test_rows,
                    scale,
                    signature,
                )?,
            })
        }
        None => {
            let held_out = (all.len() as f64 * options.test_fraction).round() as usize;
            let mut order = all;
            shuffle::shuffle(&mut order, Stream::new(options.seed).named("split"));
            let test_rows = order.split_off(order.len() - held_out.min(order.len()));
            Ok(Dataset {
                train: Samples::fit(x.clone(), y.clone(), order, scale, signature)?,
                test: Samples::fit(x, y, test_rows, scale, signature)?,
            })
        }
    }
}

fn rows(x: &Array) -> Vec<u32> {
    (0..x.samples() as u32).collect()
}

/// 1 / the largest value of an array of integers, 1 for floats.
fn integer_scale(x: &Array) -> f32 {
    match (&x.elements, x.range()) {
        (Elements::U8(_), Some((_, high))) if high > 0.0 => (1.0 / high) as f32,
        _ => 1.0,
    }
}

type Names<'a> = [Option<&'a str>; 2];

fn read_pair(
    path: &Path,
    bytes: &[u8],
    labels: Option<&Path>,
    names: Names<'_>,
    defaults: [&[&str]; 2],
    labels_flag: &str,
) -> Result<(Array, Array), DataError> {
    let file = path.display().to_string();
    if bytes.starts_with(b"PK") {
        let [x, y] = pick(&file, bytes, names, defaults)?;
        return Ok((
            npy::read_from_archive(&file, bytes, &x)?,
            npy::read_from_archive(&file, bytes, &y)?,
        ));
    }
    let x = read_single(file, bytes)?;
    let Some(labels) = labels else {
        return Err(DataError::Mismatch(format!(
            "{} holds one array; name the file of its labels with {labels_flag}",
            x.origin
        )));
    };
    let y = read_single(labels.display().to_string(), &read_file(labels)?)?;
    Ok((x, y))
}

/// `x_test` and `y_test` of an `.npz`, when it has them.
fn read_test_part(
    options: &DataOptions,
    bytes: &[u8],
) -> Result<Option<(Array, Array)>, DataError> {
    let file = options.data.display().to_string();
    if !bytes.starts_with(b"PK") {
        return Ok(None);
    }
    let named = [
        options.x_test_name.as_deref(),
        options.y_test_name.as_deref(),
    ];
    let there = npy::names(&file, bytes)?;
    let expected = named.iter().any(Option::is_some)
        || ["x_test", "y_test"]
            .iter()
            .any(|name| there.iter().any(|n| n == name));
    if !expected {
        return Ok(None);
    }
    let [x, y] = pick(&file, bytes, named, [&["x_test"], &["y_test"]])?;
    Ok(Some((
        npy::read_from_archive(&file, bytes, &x)?,
        npy::read_from_archive(&file, bytes, &y)?,
    )))
}

/// The names of features and labels: the given ones or the first default that is there.
fn pick(
    file: &str,
    bytes: &[u8],
    names: Names<'_>,
    defaults: [&[&str]; 2],
) -> Result<[String; 2], DataError> {
    let there = npy::names(file, bytes)?;
    let find = |named: Option<&str>, defaults: &[&str], flag: &str| {
        let candidates = named.map_or_else(|| defaults.to_vec(), |name| vec![name]);
        candidates
            .iter()
            .find(|name| there.iter().any(|n| n == *name))
            .map(|&name| name.to_owned())
            .ok_or_else(|| {
                DataError::Mismatch(format!(
                    "{file}: no array {}, it has {}; name another with {flag}",
                    candidates.join(" or "),
                    if there.is_empty() {
                        "none".to_owned()
                    } else {
                        there.join(", ")
                    }
                ))
            })
    };
    let test = defaults[0][0] == "x_test";
    Ok([
        find(
            names[0],
            defaults[0],
            if test { "--x-test-name" } else { "--x-name" },
        )?,
        find(
            names[1],
            defaults[1],
            if test { "--y-test-name" } else { "--y-name" },
        )?,
    ])
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
