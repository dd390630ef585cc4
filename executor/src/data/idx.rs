//! IDX, the format of the original MNIST files: big-endian, a type byte and the number of axes in front.

use super::DataError;
use super::array::{Array, Elements};

/// Whether bytes begin like an IDX file: two zeros and a known element type.
pub fn is_idx(bytes: &[u8]) -> bool {
    matches!(
        bytes,
        [0, 0, 0x08 | 0x09 | 0x0B | 0x0C | 0x0D | 0x0E, 1..=8, ..]
    )
}

/// Reads the bytes of an IDX file.
///
/// # Errors
/// When they are fewer or more than the header says.
pub fn read(origin: String, bytes: &[u8]) -> Result<Array, DataError> {
    let truncated = || DataError::malformed(&origin, "the file ends inside its header");
    let (&[_, _, element, axes], rest) = bytes.split_first_chunk::<4>().ok_or_else(truncated)?;
    let (header, data) = rest
        .split_at_checked(4 * usize::from(axes))
        .ok_or_else(truncated)?;
    let shape: Vec<usize> = words::<4>(header)
        .map(|word| u32::from_be_bytes(word) as usize)
        .collect();
    let size = match element {
        0x08 | 0x09 => 1,
        0x0B => 2,
        0x0E => 8,
        _ => 4,
    };
    let expected = shape
        .iter()
        .try_fold(size, |product: usize, &extent| product.checked_mul(extent));
    if expected != Some(data.len()) {
        return Err(DataError::malformed(
            &origin,
            format!(
                "the header promises shape {shape:?} of {size} bytes each, {} bytes follow",
                data.len()
            ),
        ));
    }
    let elements = match element {
        0x08 => Elements::U8(data.to_vec()),
        0x09 => Elements::I64(data.iter().map(|&b| i64::from(b.cast_signed())).collect()),
        0x0B => Elements::I64(
            words(data)
                .map(|w| i64::from(i16::from_be_bytes(w)))
                .collect(),
        ),
        0x0C => Elements::I64(
            words(data)
                .map(|w| i64::from(i32::from_be_bytes(w)))
                .collect(),
        ),
        0x0D => Elements::F32(words(data).map(f32::from_be_bytes).collect()),
        0x0E => Elements::F32(words(data).map(|w| f64::from_be_bytes(w) as f32).collect()),
        _ => return Err(DataError::malformed(&origin, "unknown element type")),
    };
    Array::new(origin, shape, elements)
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_bytes_and_big_endian_words() {
        let images = [0, 0, 0x08, 2, 0, 0, 0, 2, 0, 0, 0, 3, 9, 8, 7, 6, 5, 4];
        let array = read("images".into(), &images).unwrap();
        assert_eq!(array.shape, [2, 3]);
        assert_eq!(*array.elements, Elements::U8(vec![9, 8, 7, 6, 5, 4]));
        let labels = [0, 0, 0x0B, 1, 0, 0, 0, 2, 1, 0, 0xFF, 0xFF];
        let array = read("labels".into(), &labels).unwrap();
        assert_eq!(*array.elements, Elements::I64(vec![256, -1]));
    }

    #[test]
    fn truncated_files_are_refused() {
        let images = [0, 0, 0x08, 2, 0, 0, 0, 2, 0, 0, 0, 3, 9, 8, 7, 6, 5];
        for end in 0..images.len() {
            assert!(read("images".into(), &images[..end]).is_err(), "{end}");
        }
    }
}
