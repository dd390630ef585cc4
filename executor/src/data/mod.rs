//! Data sets: reading, splitting, fitting to a model, and the thread that prefetches minibatches.

pub mod array;
pub mod idx;
pub mod loader;
pub mod npy;
pub mod shuffle;
mod source;
pub mod tokens;

use std::sync::Arc;

use models::loss::{Classes, Loss};
use models::ops::ValueType;
use models::random::Stream;
use models::tensor::{DType, Tensor};

use array::{Array, Elements};
pub use source::{DataOptions, open};

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A file cannot be read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// What the operating system says.
        source: std::io::Error,
    },
    /// A file or an array in it is damaged or of an unknown kind.
    #[error("{origin}: {reason}")]
    Malformed {
        /// File and array.
        origin: String,
        /// What is wrong.
        reason: String,
    },
    /// Arrays that do not go together, with each other or with the model.
    #[error("{0}")]
    Mismatch(String),
}

impl DataError {
    fn malformed(origin: &str, reason: impl ToString) -> Self {
        // Other crates' messages may span lines; ours never do.
        let reason = reason.to_string();
        DataError::Malformed {
            origin: origin.to_owned(),
            reason: reason.lines().next().unwrap_or_default().to_owned(),
        }
    }
}

/// One input of a model.
#[derive(Clone, Debug)]
pub struct Input {
    /// Its name in the graph.
    pub name: String,
    /// Its type; the first axis is the batch.
    pub ty: ValueType,
    /// How many rows its numbers pick from, if they do: tokens of an embedding.
    pub limit: Option<usize>,
}

/// What a model reads and gives for one minibatch, and what is to be learned.
#[derive(Clone, Debug)]
pub struct Signature {
    /// The graph's inputs, at least one.
    pub inputs: Vec<Input>,
    /// Type of the value that the loss reads.
    pub output: ValueType,
    /// The loss.
    pub loss: Loss,
}

/// Samples that a model can train on or be judged by: checked against a [`Signature`].
#[derive(Clone, Debug)]
pub struct Samples {
    /// One for each input of the model.
    x: Vec<Arc<Array>>,
    y: Arc<Array>,
    /// Rows of `x` and `y` that belong to this part.
    rows: Vec<u32>,
    /// Factor for each input that brings integer features into [0, 1].
    scales: Vec<f32>,
    signature: Arc<Signature>,
}

/// One minibatch on the host.
#[derive(Clone, Debug)]
pub struct Minibatch {
    /// Features, in the shapes of the graph's inputs.
    pub inputs: Vec<Tensor>,
    /// Labels or target values.
    pub target: Tensor,
}

/// A training part and a held-out part.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// To learn from.
    pub train: Samples,
    /// To judge by; without samples where there is none.
    pub test: Samples,
    /// The characters of a text, in the order of their tokens.
    pub vocabulary: Option<tokens::Vocabulary>,
}

impl Samples {
    /// Number of samples.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Samples per minibatch.
    pub fn batch_size(&self) -> usize {
        self.signature.inputs[0].ty.shape[0]
    }

    /// The order of one epoch: every sample once, shuffled by `seed` and `epoch`.
    pub fn order(&self, seed: u64, epoch: u64) -> Vec<u32> {
        let mut rows = self.rows.clone();
        shuffle::shuffle(&mut rows, Stream::new(seed).named("order").child(epoch));
        rows
    }

    /// The samples in the order of the file.
    pub fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// All features as the model reads them, by the names of its inputs (`x` if there is one), and all labels (`y`), in
    /// the order of the file.
    ///
    /// # Errors
    /// When there are none.
    pub fn arrays(&self, origin: &str) -> Result<Vec<(String, Array)>, DataError> {
        let batch = self.batch_size();
        let names = match &self.signature.inputs[..] {
            [_] => vec!["x".to_owned()],
            several => several.iter().map(|input| input.name.clone()).collect(),
        };
        let names: Vec<String> = names.into_iter().chain(["y".to_owned()]).collect();
        let mut parts: Vec<Vec<Tensor>> = vec![Vec::new(); names.len()];
        for rows in self.rows.chunks(batch) {
            let Minibatch { inputs, target } = self.minibatch(rows);
            for (part, tensor) in parts.iter_mut().zip(inputs.iter().chain([&target])) {
                part.push(array::head(tensor, batch, rows.len()));
            }
        }
        let arrays = names.into_iter().zip(&parts);
        arrays
            .map(|(name, part)| Ok((name, array::stack(origin, part)?)))
            .collect()
    }

    /// Gathers rows into a minibatch. Fewer rows than the batch size leave zeros behind the last one.
    pub fn minibatch(&self, rows: &[u32]) -> Minibatch {
        let batch = self.batch_size();
        let types = self.signature.inputs.iter().map(|input| &input.ty);
        let inputs = self.x.iter().zip(&self.scales).zip(types);
        let inputs = inputs
            .map(|((x, &scale), ty)| gather(x, rows, batch, scale, &ty.shape, ty.dtype))
            .collect();
        let target = self.signature.loss.target(&self.signature.output.shape);
        let (dtype, shape) = target.expect("samples are fitted to a signature that has targets");
        let target = gather(&self.y, rows, batch, 1.0, &shape, dtype);
        Minibatch { inputs, target }
    }
}

fn gather(
    array: &Array,
    rows: &[u32],
    batch: usize,
    scale: f32,
    shape: &[usize],
    dtype: DType,
) -> Tensor {
    let len = batch * array.sample_len();
    if dtype == DType::Bool {
        let mut values = Vec::with_capacity(len);
        for &row in rows {
            array.append_integers(row as usize, &mut values);
        }
        values.resize(len, 0);
        let values: Vec<bool> = values.into_iter().map(|value| value != 0).collect();
        Tensor::from_bool(shape, values)
    } else if dtype == DType::I64 {
        let mut values = Vec::with_capacity(len);
        for &row in rows {
            array.append_integers(row as usize, &mut values);
        }
        values.resize(len, 0);
        Tensor::from_i64(shape, values)
    } else {
        let mut values = Vec::with_capacity(len);
        for &row in rows {
            array.append_floats(row as usize, scale, &mut values);
        }
        values.resize(len, 0.0);
        Tensor::from_f32(shape, values)
    }
}

impl Samples {
    /// Checks arrays against a model and scales integer features.
    ///
    /// # Errors
    /// When counts, shapes, types or the range of labels do not fit.
    fn fit(
        x: Vec<Arc<Array>>,
        y: Arc<Array>,
        rows: Vec<u32>,
        scales: Vec<f32>,
        signature: &Arc<Signature>,
    ) -> Result<Self, DataError> {
        for (x, input) in x.iter().zip(&signature.inputs) {
            if x.samples() != y.samples() {
                return Err(DataError::Mismatch(format!(
                    "{} has {} samples, {} has {}: there must be one label or target for each",
                    x.origin,
                    x.samples(),
                    y.origin,
                    y.samples()
                )));
            }
            fit_features(x, input)?;
        }
        match signature.loss {
            Loss::CrossEntropy(classes) => fit_labels(&y, signature, classes)?,
            Loss::Mse => fit_targets(&y, signature)?,
        }
        Ok(Samples {
            x,
            y,
            rows,
            scales,
            signature: Arc::clone(signature),
        })
    }
}

/// Axes of length 1 may be missing or extra, and one flat axis takes any shape.
fn compatible(sample: &[usize], wanted: &[usize]) -> bool {
    let essential = |shape: &[usize]| -> Vec<usize> {
        shape
            .iter()
            .copied()
            .filter(|&extent| extent != 1)
            .collect()
    };
    let len = |shape: &[usize]| shape.iter().product::<usize>();
    let flat = wanted.len() <= 1 && len(sample) == len(wanted);
    flat || essential(sample) == essential(wanted)
}

fn fit_features(x: &Array, input: &Input) -> Result<(), DataError> {
    let wanted = &input.ty.shape[1..];
    if compatible(&x.shape[1..], wanted) {
        return fit_indices(x, input);
    }
    let mut channels_first = x.shape[1..].to_vec();
    if let Some(channels) = channels_first.pop() {
        channels_first.insert(0, channels);
    }
    let hint = if channels_first == wanted {
        "; its channels come last, the model wants them first: transpose the array"
    } else {
        ""
    };
    Err(DataError::Mismatch(format!(
        "{}: {} holds samples of shape {:?}, the model's input '{}' wants {:?}{hint}",
        x.origin,
        x.describe(),
        &x.shape[1..],
        input.name,
        wanted
    )))
}

/// Numbers that pick rows must find them: a lookup behind the last one has no answer.
fn fit_indices(x: &Array, input: &Input) -> Result<(), DataError> {
    let (Some(limit), Some((low, high))) = (input.limit, x.range(None)) else {
        return Ok(());
    };
    // Those below zero count from the end.
    if low >= -(limit as f64) && high < limit as f64 {
        return Ok(());
    }
    Err(DataError::Mismatch(format!(
        "{}: {} holds numbers from {low} to {high}, the model's input '{}' looks them up among {limit} (0 to {})",
        x.origin,
        x.describe(),
        input.name,
        limit - 1
    )))
}

fn fit_labels(y: &Array, signature: &Signature, which: Classes) -> Result<(), DataError> {
    let output = &signature.output.shape;
    let (Ok((_, targets)), Some(classes)) = (
        signature.loss.target(output),
        signature.loss.classes(output),
    ) else {
        return Err(DataError::Mismatch(format!(
            "cross-entropy wants a model output [batch, classes, ...], this model's is {output:?}; use --loss mse, or say \
             which axis the classes are on with --class-axis"
        )));
    };
    let batch = signature.inputs[0].ty.shape[0].max(1);
    let positions = targets.iter().product::<usize>() / batch;
    if y.sample_len() != positions {
        return Err(DataError::Mismatch(format!(
            "{}: {} gives {} labels per sample, the model's output {output:?} wants {positions} (class numbers, not one-hot; \
             its {classes} classes are on axis {}, --class-axis changes that)",
            y.origin,
            y.describe(),
            y.sample_len(),
            which.axis_of(output),
        )));
    }
    if let Elements::F32(values) = &*y.elements
        && let Some(value) = values.iter().find(|v| v.fract() != 0.0)
    {
        return Err(DataError::Mismatch(format!(
            "{}: the label {value} is no class number; use --loss mse to learn values",
            y.origin
        )));
    }
    match y.range(which.ignore) {
        Some((low, high)) if low < 0.0 || high >= classes as f64 => {
            Err(DataError::Mismatch(format!(
                "{}: labels run from {low} to {high}, the model has {classes} classes (0 to {}); --ignore-index N passes \
                 over the label N",
                y.origin,
                classes - 1
            )))
        }
        _ => Ok(()),
    }
}

fn fit_targets(y: &Array, signature: &Signature) -> Result<(), DataError> {
    let wanted = &signature.output.shape[1..];
    if compatible(&y.shape[1..], wanted) {
        return Ok(());
    }
    Err(DataError::Mismatch(format!(
        "{}: {} holds targets of shape {:?}, the model's output has {wanted:?} per sample",
        y.origin,
        y.describe(),
        &y.shape[1..],
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn signature(input: &[usize], output: &[usize], loss: Loss) -> Arc<Signature> {
        let value = |shape: &[usize]| ValueType {
            dtype: DType::F32,
            shape: shape.to_vec(),
        };
        Arc::new(Signature {
            inputs: vec![Input {
                name: "image".into(),
                ty: value(input),
                limit: None,
            }],
            output: value(output),
            loss,
        })
    }

    fn array(shape: &[usize], elements: Elements) -> Arc<Array> {
        Arc::new(Array::new("file.npz: x".into(), shape.to_vec(), elements).unwrap())
    }

    fn bytes(shape: &[usize]) -> Arc<Array> {
        let len = shape.iter().product();
        array(shape, Elements::U8((0..len).map(|i| i as u8).collect()))
    }

    fn labels(values: &[i64]) -> Arc<Array> {
        array(&[values.len()], Elements::I64(values.to_vec()))
    }

    fn fit(x: &Arc<Array>, y: &Arc<Array>, to: &Arc<Signature>) -> Result<Samples, String> {
        let rows = (0..x.samples() as u32).collect();
        Samples::fit(vec![x.clone()], y.clone(), rows, vec![0.5], to).map_err(|e| e.to_string())
    }

    #[test]
    fn a_missing_channel_axis_and_a_flat_input_are_no_obstacle() {
        let x = bytes(&[3, 2, 2]);
        let y = labels(&[0, 1, 2]);
        let images = signature(&[2, 1, 2, 2], &[2, 3], Loss::CROSS_ENTROPY);
        let vectors = signature(&[2, 4], &[2, 3], Loss::CROSS_ENTROPY);
        for signature in [images, vectors] {
            let minibatch = fit(&x, &y, &signature).unwrap().minibatch(&[2, 0]);
            assert_eq!(minibatch.inputs[0].shape(), signature.inputs[0].ty.shape);
            let expected = [8, 9, 10, 11, 0, 1, 2, 3].map(|v| v as f32 * 0.5);
            assert_eq!(minibatch.inputs[0].f32s(), expected);
            assert_eq!(minibatch.target.i64s(), [2, 0]);
        }
    }

    #[test]
    fn a_last_smaller_minibatch_is_filled_up() {
        let signature = signature(&[3, 1], &[3, 2], Loss::CROSS_ENTROPY);
        let samples = fit(&bytes(&[4, 1]), &labels(&[0, 1, 1, 1]), &signature).unwrap();
        let minibatch = samples.minibatch(&[3]);
        assert_eq!(minibatch.inputs[0].f32s(), [1.5, 0.0, 0.0]);
        assert_eq!(minibatch.target.i64s(), [1, 0, 0]);
    }

    #[test]
    fn what_does_not_fit_is_told_with_both_sides() {
        let to = signature(&[2, 3, 4, 4], &[2, 10], Loss::CROSS_ENTROPY);
        let y = labels(&[0, 1]);
        let error = fit(&bytes(&[2, 28, 28]), &y, &to).unwrap_err();
        assert!(error.contains("[28, 28]") && error.contains("'image' wants [3, 4, 4]"));
        let error = fit(&bytes(&[2, 4, 4, 3]), &y, &to).unwrap_err();
        assert!(error.contains("channels come last"), "{error}");
        let error = fit(&bytes(&[2, 3, 4, 4]), &labels(&[0, 10]), &to).unwrap_err();
        assert!(error.contains("from 0 to 10") && error.contains("10 classes (0 to 9)"));
        assert!(fit(&bytes(&[2, 3, 4, 4]), &labels(&[-1, 0]), &to).is_err());
        let error = fit(&bytes(&[2, 3, 4, 4]), &labels(&[0, 1, 2]), &to).unwrap_err();
        assert!(error.contains("2 samples") && error.contains("has 3"));
        let one_hot = bytes(&[2, 10]);
        let error = fit(&bytes(&[2, 3, 4, 4]), &one_hot, &to).unwrap_err();
        assert!(error.contains("not one-hot"));
        let values = array(&[2], Elements::F32(vec![0.5, 1.0]));
        let error = fit(&bytes(&[2, 3, 4, 4]), &values, &to).unwrap_err();
        assert!(error.contains("--loss mse"));
        let to = signature(&[2, 3], &[2, 2], Loss::Mse);
        assert!(fit(&bytes(&[2, 3]), &bytes(&[2, 2]), &to).is_ok());
        let error = fit(&bytes(&[2, 3]), &bytes(&[2, 3]), &to).unwrap_err();
        assert!(error.contains("output has [2]"));
    }

    #[test]
    fn tokens_that_the_embedding_lacks_are_told_before_training() {
        let to = Arc::new(Signature {
            inputs: vec![Input {
                name: "tokens".into(),
                ty: ValueType {
                    dtype: DType::I64,
                    shape: vec![2, 3],
                },
                limit: Some(5),
            }],
            output: signature(&[1, 1], &[2, 2], Loss::CROSS_ENTROPY)
                .output
                .clone(),
            loss: Loss::CROSS_ENTROPY,
        });
        let tokens = |last| array(&[2, 3], Elements::I64(vec![0, 1, 2, -5, 4, last]));
        let y = labels(&[0, 1]);
        assert!(fit(&tokens(4), &y, &to).is_ok());
        let error = fit(&tokens(5), &y, &to).unwrap_err();
        assert!(error.contains("from -5 to 5") && error.contains("among 5 (0 to 4)"));
        assert!(fit(&tokens(-6), &y, &to).is_err());
    }

    #[test]
    fn an_epoch_sees_every_sample_once_in_an_order_of_its_own() {
        let signature = signature(&[2, 1], &[2, 2], Loss::CROSS_ENTROPY);
        let samples = fit(&bytes(&[50, 1]), &labels(&[0; 50]), &signature).unwrap();
        let mut first = samples.order(1, 1);
        assert_ne!(first, samples.order(1, 2));
        assert_ne!(first, samples.order(2, 1));
        assert_eq!(first, samples.order(1, 1));
        first.sort_unstable();
        assert_eq!(first, samples.rows());
    }
}
