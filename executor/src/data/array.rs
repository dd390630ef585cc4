//! Arrays as they lie in a file: a shape over one of three element types.

use std::sync::Arc;

use models::tensor::{DType, Tensor};

use super::DataError;

/// Elements of an [`Array`]. Small integers stay as they are in the file: a data set of images is four
/// times smaller in memory than it would be as floats.
#[derive(Clone, Debug, PartialEq)]
pub enum Elements {
    /// Unsigned bytes, mostly images.
    U8(Vec<u8>),
    /// Tokens.
    U16(Vec<u16>),
    /// Floats; half and double precision are converted.
    F32(Vec<f32>),
    /// All other integers, and booleans.
    I64(Vec<i64>),
}

impl Elements {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            Elements::U8(v) => v.len(),
            Elements::U16(v) => v.len(),
            Elements::F32(v) => v.len(),
            Elements::I64(v) => v.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The type in words, as numpy calls it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Elements::U8(_) => "uint8",
            Elements::U16(_) => "uint16",
            Elements::F32(_) => "float",
            Elements::I64(_) => "integer",
        }
    }
}

/// A row-major array. The first axis counts samples.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    /// Where it came from, for error messages: `mnist.npz: x`.
    pub origin: String,
    /// Extent of each axis.
    pub shape: Vec<usize>,
    /// Elements, as many as the shape says, or those that windows lie in.
    pub elements: Arc<Elements>,
    /// Elements between the beginnings of neighbouring samples, and before the first one.
    stride: usize,
    offset: usize,
}

impl Array {
    /// Joins a shape and its elements.
    ///
    /// # Errors
    /// When there is no sample axis or the number of elements is not the product of the shape.
    pub fn new(origin: String, shape: Vec<usize>, elements: Elements) -> Result<Self, DataError> {
        let expected = shape
            .iter()
            .try_fold(1usize, |product, &extent| product.checked_mul(extent));
        if shape.is_empty() || expected != Some(elements.len()) {
            return Err(DataError::Malformed {
                origin,
                reason: format!(
                    "shape {shape:?} does not fit its {} elements",
                    elements.len()
                ),
            });
        }
        let stride = shape[1..].iter().product();
        Ok(Array {
            origin,
            shape,
            elements: Arc::new(elements),
            stride,
            offset: 0,
        })
    }

    /// Windows of `len` neighbouring elements: sample i begins at element `offset + i`. There are as many as begin at
    /// the first `starts` elements.
    ///
    /// # Errors
    /// When the last one would reach beyond the elements.
    pub fn windows(
        origin: String,
        elements: Arc<Elements>,
        (starts, len, offset): (usize, usize, usize),
    ) -> Result<Self, DataError> {
        if starts + len + offset > elements.len() + 1 {
            let reason = format!("{} elements hold no window of {len}", elements.len());
            return Err(DataError::Malformed { origin, reason });
        }
        Ok(Array {
            origin,
            shape: vec![starts, len],
            elements,
            stride: 1,
            offset,
        })
    }

    fn sample(&self, index: usize) -> std::ops::Range<usize> {
        let begin = self.offset + index * self.stride;
        begin..begin + self.sample_len()
    }

    /// Number of samples.
    pub fn samples(&self) -> usize {
        self.shape[0]
    }

    /// Elements in one sample.
    pub fn sample_len(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Shape and type in words, for error messages: `uint8 [10000, 28, 28]`.
    pub fn describe(&self) -> String {
        format!("{} {:?}", self.elements.type_name(), self.shape)
    }

    /// Appends sample `index` as floats, integers multiplied by `scale`.
    pub fn append_floats(&self, index: usize, scale: f32, out: &mut Vec<f32>) {
        let range = self.sample(index);
        match &*self.elements {
            Elements::U8(v) => out.extend(v[range].iter().map(|&e| f32::from(e) * scale)),
            Elements::U16(v) => out.extend(v[range].iter().map(|&e| f32::from(e) * scale)),
            Elements::F32(v) => out.extend_from_slice(&v[range]),
            Elements::I64(v) => out.extend(v[range].iter().map(|&e| e as f32 * scale)),
        }
    }

    /// Appends sample `index` as integers; floats are cut to their integer part.
    pub fn append_integers(&self, index: usize, out: &mut Vec<i64>) {
        let range = self.sample(index);
        match &*self.elements {
            Elements::U8(v) => out.extend(v[range].iter().map(|&e| i64::from(e))),
            Elements::U16(v) => out.extend(v[range].iter().map(|&e| i64::from(e))),
            Elements::F32(v) => out.extend(v[range].iter().map(|&e| e as i64)),
            Elements::I64(v) => out.extend_from_slice(&v[range]),
        }
    }

    /// Smallest and largest value over all samples, integers equal to `ignore` aside; `None` when there are none or one
    /// is not a number.
    pub fn range(&self, ignore: Option<i64>) -> Option<(f64, f64)> {
        fn of(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
            values
                .map(|v| (v, v))
                .reduce(|a, b| (a.0.min(b.0), if b.1.is_nan() { b.1 } else { a.1.max(b.1) }))
                .filter(|r| !r.1.is_nan())
        }
        let counts = |e: &i64| ignore != Some(*e);
        match &*self.elements {
            Elements::U8(v) => of(v
                .iter()
                .map(|&e| i64::from(e))
                .filter(counts)
                .map(|e| e as f64)),
            Elements::U16(v) => of(v
                .iter()
                .map(|&e| i64::from(e))
                .filter(counts)
                .map(|e| e as f64)),
            Elements::F32(v) => of(v.iter().map(|&e| f64::from(e))),
            Elements::I64(v) => of(v.iter().copied().filter(counts).map(|e| e as f64)),
        }
    }
}

/// Joins host tensors along their first axis, their only one that may differ.
///
/// # Errors
/// When there is none.
pub fn stack(origin: &str, tensors: &[Tensor]) -> Result<Array, DataError> {
    let Some(first) = tensors.first() else {
        return Err(DataError::malformed(origin, "there are no samples"));
    };
    let mut shape = first.shape().to_vec();
    shape[0] = tensors.iter().map(|t| t.shape()[0]).sum();
    let elements = if first.dtype() == DType::I64 {
        Elements::I64(tensors.iter().flat_map(|t| t.i64s()).copied().collect())
    } else {
        Elements::F32(tensors.iter().flat_map(|t| t.f32s()).copied().collect())
    };
    Array::new(origin.to_owned(), shape, elements)
}

/// The part of a host tensor that belongs to the first `samples` of `batch` samples.
pub fn head(tensor: &Tensor, batch: usize, samples: usize) -> Tensor {
    let mut shape = tensor.shape().to_vec();
    // The first axis may be the batch itself or the batch times positions.
    shape[0] = shape[0] / batch * samples;
    let len = shape.iter().product();
    match tensor.dtype() {
        DType::I64 => Tensor::from_i64(&shape, &tensor.i64s()[..len]),
        _ => Tensor::from_f32(&shape, &tensor.f32s()[..len]),
    }
}
