//! Numpy's `.npy` and `.npz` (a zip archive of the former, stored or deflated).

use std::io::{Cursor, Read, Write};

use npyz::{AutoSerialize, DType, Deserialize, NpyFile, Order, WriterBuilder};

use super::DataError;
use super::array::{Array, Elements};

/// Names of the arrays in an `.npz`, in the archive's order, without their `.npy`.
///
/// # Errors
/// When the bytes are no zip archive.
pub fn names(file: &str, bytes: &[u8]) -> Result<Vec<String>, DataError> {
    let archive = open(file, bytes)?;
    Ok(archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.strip_suffix(".npy")?.to_owned()))
        .collect())
}

/// Reads one array of an `.npz`.
///
/// # Errors
/// When the archive has no such array, is damaged, or the array is of a type that holds no numbers.
pub fn read_from_archive(file: &str, bytes: &[u8], name: &str) -> Result<Array, DataError> {
    let origin = format!("{file}: {name}");
    let mut archive = open(file, bytes)?;
    let mut content = Vec::new();
    archive
        .by_name(&format!("{name}.npy"))
        .map_err(|e| DataError::malformed(&origin, e))?
        .read_to_end(&mut content)
        .map_err(|e| DataError::malformed(&origin, e))?;
    read(origin, &content)
}

fn open<'a>(file: &str, bytes: &'a [u8]) -> Result<zip::ZipArchive<Cursor<&'a [u8]>>, DataError> {
    zip::ZipArchive::new(Cursor::new(bytes)).map_err(|e| DataError::malformed(file, e))
}

/// Reads the bytes of an `.npy`.
///
/// # Errors
/// When they are damaged or the array is of a type that holds no numbers.
pub fn read(origin: String, bytes: &[u8]) -> Result<Array, DataError> {
    let file = NpyFile::new(bytes).map_err(|e| DataError::malformed(&origin, e))?;
    let DType::Plain(element) = file.dtype() else {
        return Err(DataError::malformed(
            &origin,
            "a structured array; plain numbers are expected",
        ));
    };
    let shape = file
        .shape()
        .iter()
        .map(|&extent| usize::try_from(extent))
        .collect::<Result<Vec<usize>, _>>()
        .map_err(|e| DataError::malformed(&origin, e))?;
    // The header is believed only as far as the bytes behind it go: a damaged one must not allocate.
    let needed = shape
        .iter()
        .try_fold(element.num_bytes().unwrap_or(1), |product, &extent| {
            product.checked_mul(extent)
        });
    if needed.is_none_or(|needed| needed > bytes.len()) {
        return Err(DataError::malformed(
            &origin,
            format!(
                "the header promises shape {shape:?}, the file ends after {} bytes",
                bytes.len()
            ),
        ));
    }
    let fortran = file.order() == Order::Fortran && shape.len() > 1;
    let name = element.to_string();
    let elements = match name.trim_start_matches(['<', '>', '|', '=']) {
        "u1" => Elements::U8(vector(&origin, file)?),
        "b1" => integers::<bool>(&origin, file)?,
        "i1" => integers::<i8>(&origin, file)?,
        "i2" => integers::<i16>(&origin, file)?,
        "u2" => Elements::U16(vector(&origin, file)?),
        "i4" => integers::<i32>(&origin, file)?,
        "u4" => integers::<u32>(&origin, file)?,
        "i8" => Elements::I64(vector(&origin, file)?),
        "u8" => Elements::I64(
            vector::<u64>(&origin, file)?
                .into_iter()
                .map(i64::try_from)
                .collect::<Result<_, _>>()
                .map_err(|e| DataError::malformed(&origin, e))?,
        ),
        "f2" => floats(vector::<npyz::half::f16>(&origin, file)?, f32::from),
        "f4" => Elements::F32(vector(&origin, file)?),
        "f8" => floats(vector::<f64>(&origin, file)?, |v| v as f32),
        _ => {
            return Err(DataError::malformed(
                &origin,
                format!("element type {name}; numbers of up to 64 bits are expected"),
            ));
        }
    };
    let elements = if fortran {
        match elements {
            Elements::U8(v) => Elements::U8(to_row_major(&shape, &v)),
            Elements::U16(v) => Elements::U16(to_row_major(&shape, &v)),
            Elements::F32(v) => Elements::F32(to_row_major(&shape, &v)),
            Elements::I64(v) => Elements::I64(to_row_major(&shape, &v)),
        }
    } else {
        elements
    };
    Array::new(origin, shape, elements)
}

fn vector<T: Deserialize>(origin: &str, file: NpyFile<&[u8]>) -> Result<Vec<T>, DataError> {
    file.into_vec().map_err(|e| DataError::malformed(origin, e))
}

fn integers<T: Deserialize + Into<i64>>(
    origin: &str,
    file: NpyFile<&[u8]>,
) -> Result<Elements, DataError> {
    let values = vector::<T>(origin, file)?;
    Ok(Elements::I64(values.into_iter().map(Into::into).collect()))
}

fn floats<T>(values: Vec<T>, convert: impl Fn(T) -> f32) -> Elements {
    Elements::F32(values.into_iter().map(convert).collect())
}

/// An `.npz` of arrays by name, as bytes.
///
/// # Errors
/// When an array cannot be encoded.
pub fn write_archive(arrays: &[(&str, &Array)]) -> Result<Vec<u8>, DataError> {
    let mut archive = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, array) in arrays {
        let failed = |e: &dyn ToString| DataError::malformed(name, e.to_string());
        let options = zip::write::SimpleFileOptions::default()
            .compression_method(zip::CompressionMethod::Stored)
            .large_file(true);
        archive
            .start_file(format!("{name}.npy"), options)
            .map_err(|e| failed(&e))?;
        match &*array.elements {
            Elements::U8(values) => write(&mut archive, &array.shape, values),
            Elements::U16(values) => write(&mut archive, &array.shape, values),
            Elements::F32(values) => write(&mut archive, &array.shape, values),
            Elements::I64(values) => write(&mut archive, &array.shape, values),
        }
        .map_err(|e| failed(&e))?;
    }
    let bytes = archive
        .finish()
        .map_err(|e| DataError::malformed("npz", e))?;
    Ok(bytes.into_inner())
}

fn write<T: AutoSerialize + Copy>(
    to: impl Write,
    shape: &[usize],
    values: &[T],
) -> std::io::Result<()> {
    let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
    let mut writer = npyz::WriteOptions::new()
        .default_dtype()
        .shape(&shape)
        .writer(to)
        .begin_nd()?;
    writer.extend(values.iter().copied())?;
    writer.finish()
}

/// Reorders elements whose first axis varies fastest so that the last one does.
fn to_row_major<T: Copy>(shape: &[usize], values: &[T]) -> Vec<T> {
    let mut strides = vec![1; shape.len()];
    for axis in 1..shape.len() {
        strides[axis] = strides[axis - 1] * shape[axis - 1];
    }
    (0..values.len())
        .map(|position| {
            let mut rest = position;
            let mut offset = 0;
            for axis in (0..shape.len()).rev() {
                offset += rest % shape[axis] * strides[axis];
                rest /= shape[axis];
            }
            values[offset]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An `.npy` of doubles in the given element order.
    fn npy(order: Order, shape: &[u64], values: &[f64]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = npyz::WriteOptions::new()
            .default_dtype()
            .shape(shape)
            .order(order)
            .writer(&mut bytes)
            .begin_nd()
            .unwrap();
        writer.extend(values.iter().copied()).unwrap();
        writer.finish().unwrap();
        bytes
    }

    #[test]
    fn doubles_become_floats_and_fortran_order_is_undone() {
        let rows = read(
            "c".into(),
            &npy(Order::C, &[2, 3], &[0., 1., 2., 3., 4., 5.]),
        );
        let columns = read(
            "f".into(),
            &npy(Order::Fortran, &[2, 3], &[0., 3., 1., 4., 2., 5.]),
        );
        let expected = Elements::F32(vec![0., 1., 2., 3., 4., 5.]);
        assert_eq!(*rows.unwrap().elements, expected);
        assert_eq!(*columns.unwrap().elements, expected);
    }

    #[test]
    fn an_archive_is_read_as_it_was_written() {
        let floats = Elements::F32(vec![0.5, -1.0, 3.0, 4.0]);
        let x = Array::new("a.npz: x".into(), vec![2, 2], floats).unwrap();
        let y = Array::new("a.npz: y".into(), vec![2], Elements::I64(vec![7, -1])).unwrap();
        let bytes = write_archive(&[("x", &x), ("y", &y)]).unwrap();
        assert_eq!(names("a.npz", &bytes).unwrap(), ["x", "y"]);
        assert_eq!(read_from_archive("a.npz", &bytes, "x").unwrap(), x);
        assert_eq!(read_from_archive("a.npz", &bytes, "y").unwrap(), y);
    }

    #[test]
    fn a_header_that_promises_too_much_is_refused() {
        let mut bytes = npy(Order::C, &[2, 3], &[0.; 6]);
        bytes.truncate(bytes.len() - 40);
        let error = read("x.npy".into(), &bytes).unwrap_err().to_string();
        assert!(error.starts_with("x.npy"), "{error}");
        let huge = npy(Order::C, &[2, 3], &[0.; 6]);
        let text = String::from_utf8_lossy(&huge).replace("(2, 3)", "(2147483647, 2147483647)");
        assert!(read("x.npy".into(), text.as_bytes()).is_err());
    }
}
