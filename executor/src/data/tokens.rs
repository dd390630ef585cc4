//! One long row of tokens to learn the next one of: texts by their characters, and token files.

use std::path::Path;
use std::sync::Arc;

use models::tensor::DType;

use super::array::{Array, Elements};
use super::{DataError, Dataset, Samples, Signature};

/// How a text is asked for on the command line: `text:FILE`.
const TEXT: &str = "text:";

/// The characters of a text, in the order of their tokens.
pub type Vocabulary = Vec<char>;

/// The file of `text:FILE`.
pub fn text_file(data: &Path) -> Option<&Path> {
    data.to_str()?.strip_prefix(TEXT).map(Path::new)
}

/// The tokens of a text: each character by its place among all that occur, in the order of Unicode.
///
/// # Errors
/// When the bytes are no UTF-8 or there are more than 65,536 different characters.
pub fn of_text(origin: &str, bytes: &[u8]) -> Result<(Elements, Vocabulary), DataError> {
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let reason = format!("no UTF-8 text ({e}); token files are .bin or .npy");
        DataError::malformed(origin, reason)
    })?;
    let mut vocabulary: Vocabulary = text.chars().collect();
    vocabulary.sort_unstable();
    vocabulary.dedup();
    let token = |c: char| {
        let place = vocabulary.binary_search(&c).unwrap_or_default();
        u16::try_from(place)
    };
    let tokens: Result<Vec<u16>, _> = text.chars().map(token).collect();
    let tokens = tokens.map_err(|_| {
        let reason = format!("{} different characters; at most 65536", vocabulary.len());
        DataError::malformed(origin, reason)
    })?;
    Ok((Elements::U16(tokens), vocabulary))
}

/// The tokens of a `.bin`: 16-bit little-endian numbers and nothing else, as nanoGPT writes them.
///
/// # Errors
/// When the number of bytes is odd.
pub fn of_bin(origin: &str, bytes: &[u8]) -> Result<Elements, DataError> {
    if !bytes.len().is_multiple_of(2) {
        let reason = format!("{} bytes are no row of 16-bit tokens", bytes.len());
        return Err(DataError::malformed(origin, reason));
    }
    let pairs = bytes.chunks_exact(2);
    let tokens = pairs.map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    Ok(Elements::U16(tokens.collect()))
}

/// Windows of the length that the model reads, side by side, each with the tokens that follow: one behind every token of
/// the window, or the one behind the window where the model gives one only. The last `test_fraction` is held out.
///
/// # Errors
/// When the model does not read tokens, or the row is shorter than a window.
pub fn dataset(
    origin: &str,
    tokens: Elements,
    test_fraction: f64,
    signature: &Arc<Signature>,
) -> Result<Dataset, DataError> {
    let refuse = |reason: String| DataError::Mismatch(format!("{origin}: {reason}"));
    let [input] = &signature.inputs[..] else {
        return Err(refuse(format!(
            "a row of tokens feeds models with one input, this one has {}",
            signature.inputs.len()
        )));
    };
    let (DType::I64, &[batch, length]) = (input.ty.dtype, &input.ty.shape[..]) else {
        return Err(refuse(format!(
            "a row of tokens feeds models that read int64 [batch, sequence], not {} {:?}",
            input.ty.dtype, input.ty.shape
        )));
    };
    let targets = signature.loss.target(&signature.output.shape);
    let targets = targets.map_or(0, |(_, shape)| shape.iter().product::<usize>()) / batch.max(1);
    let behind = match targets {
        1 => length,
        _ if targets == length => 1,
        _ => {
            return Err(refuse(format!(
                "the model gives {targets} predictions for the {length} tokens of a sample; one, or one for each token, can \
                 be learned"
            )));
        }
    };
    let count = tokens.len();
    let held_out = (count as f64 * test_fraction).round() as usize;
    let train = count - held_out.min(count);
    if train < length + 1 {
        return Err(refuse(format!(
            "{count} tokens, {held_out} of them held out, hold no sample of {length} and the token behind it"
        )));
    }
    let elements = Arc::new(tokens);
    let starts = count - length;
    let array = |what: &str, len: usize, offset: usize| {
        let origin = format!("{origin}: {what}");
        Array::windows(origin, Arc::clone(&elements), (starts, len, offset)).map(Arc::new)
    };
    let (x, y) = (
        array("tokens", length, 0)?,
        array("tokens", targets, behind)?,
    );
    let part = |first: usize, end: usize| {
        let last = end.saturating_sub(length);
        let rows = (first..last)
            .step_by(length)
            .map(|row| row as u32)
            .collect();
        Samples::fit(
            vec![Arc::clone(&x)],
            Arc::clone(&y),
            rows,
            vec![1.0],
            signature,
        )
    };
    Ok(Dataset {
        train: part(0, train)?,
        test: part(train, count)?,
        vocabulary: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Input;
    use models::loss::Loss;
    use models::ops::ValueType;

    fn signature(input: &[usize], output: &[usize]) -> Arc<Signature> {
        let ty = |dtype, shape: &[usize]| ValueType {
            dtype,
            shape: shape.to_vec(),
        };
        Arc::new(Signature {
            inputs: vec![Input {
                name: "tokens".into(),
                ty: ty(DType::I64, input),
                limit: None,
            }],
            output: ty(DType::F32, output),
            loss: Loss::CROSS_ENTROPY,
        })
    }

    fn row(count: u16) -> Elements {
        Elements::U16((0..count).collect())
    }

    #[test]
    fn characters_are_numbered_in_the_order_of_unicode() {
        let (tokens, vocabulary) = of_text("t", "bäca".as_bytes()).unwrap();
        assert_eq!(vocabulary, ['a', 'b', 'c', 'ä']);
        assert_eq!(tokens, Elements::U16(vec![1, 3, 2, 0]));
        assert!(
            of_text("t", &[0xFF])
                .unwrap_err()
                .to_string()
                .contains("no UTF-8")
        );
    }

    #[test]
    fn every_token_is_followed_by_its_target() {
        let data = dataset("t", row(20), 0.25, &signature(&[2, 3], &[2, 3, 20])).unwrap();
        // 15 to train on, of which the last needs one behind it.
        assert_eq!(data.train.rows(), [0, 3, 6, 9]);
        assert_eq!(data.test.rows(), [15]);
        let minibatch = data.train.minibatch(&[9, 3]);
        assert_eq!(minibatch.inputs[0].i64s(), [9, 10, 11, 3, 4, 5]);
        assert_eq!(minibatch.target.i64s(), [10, 11, 12, 4, 5, 6]);
        assert_eq!(minibatch.target.shape(), [2, 3]);
        // One row for each token of each sample.
        let flat = dataset("t", row(20), 0.0, &signature(&[2, 3], &[6, 20])).unwrap();
        assert_eq!(
            flat.train.minibatch(&[0, 6]).target.i64s(),
            [1, 2, 3, 7, 8, 9]
        );
        let last = dataset("t", row(20), 0.0, &signature(&[2, 3], &[2, 20])).unwrap();
        assert_eq!(last.train.minibatch(&[0, 6]).target.i64s(), [3, 9]);
    }

    #[test]
    fn what_cannot_be_learned_from_is_said() {
        let error = |tokens, signature: &Arc<Signature>| {
            dataset("t", tokens, 0.5, signature)
                .unwrap_err()
                .to_string()
        };
        assert!(error(row(20), &signature(&[2, 3], &[2, 2, 20])).contains("2 predictions"));
        assert!(error(row(6), &signature(&[2, 3], &[2, 3, 20])).contains("hold no sample of 3"));
        assert!(error(row(20), &signature(&[2, 3, 1], &[2, 3, 20])).contains("[batch, sequence]"));
        let few = error(row(20), &signature(&[2, 3], &[2, 3, 19]));
        assert!(
            few.contains("from 0 to 19") && few.contains("19 classes"),
            "{few}"
        );
        assert!(of_bin("t", &[1, 0, 2]).is_err());
        assert_eq!(of_bin("t", &[1, 2]).unwrap(), Elements::U16(vec![513]));
    }
}
