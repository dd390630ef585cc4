//! The protocol buffer wire format, as far as patching a file needs it.
//!
//! A message is a run of fields: a varint key (field number and wire type), then the payload. Copying
//! the bytes of fields that need no change keeps whatever this program does not know about.

use std::ops::Range;

/// Field numbers that patching touches.
pub(super) mod field {
    pub const MODEL_GRAPH: u32 = 7;
    pub const GRAPH_NODE: u32 = 1;
    pub const GRAPH_INITIALIZER: u32 = 5;
    pub const GRAPH_INPUT: u32 = 11;
    pub const NODE_INPUT: u32 = 1;
    pub const NODE_ATTRIBUTE: u32 = 5;
    pub const ATTRIBUTE_TENSOR: u32 = 5;
    pub const TENSOR_FLOAT_DATA: u32 = 4;
    pub const TENSOR_INT32_DATA: u32 = 5;
    pub const TENSOR_RAW_DATA: u32 = 9;
    pub const TENSOR_DOUBLE_DATA: u32 = 10;
    pub const TENSOR_EXTERNAL_DATA: u32 = 13;
    pub const TENSOR_DATA_LOCATION: u32 = 14;
}

/// One field of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Field {
    /// Field number.
    pub number: u32,
    /// Key and payload, as byte positions in the whole buffer.
    pub all: Range<usize>,
    /// The payload of a length-delimited field; `None` for scalars.
    pub payload: Option<Range<usize>>,
}

/// Why a buffer is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WireError {
    /// A field says that it goes on to this byte position, past the end of the buffer.
    Truncated { needs: usize },
    /// Bytes at this position that no encoder writes.
    Malformed { at: usize },
}

/// The fields of the message that fills `range` of `bytes`.
pub(super) fn fields(bytes: &[u8], range: Range<usize>) -> Result<Vec<Field>, WireError> {
    let end = range.end;
    let mut fields = Vec::new();
    let mut at = range.start;
    while at < end {
        let start = at;
        let key = varint(bytes, &mut at, end)?;
        let number = u32::try_from(key >> 3).map_err(|_| WireError::Malformed { at: start })?;
        if number == 0 {
            return Err(WireError::Malformed { at: start });
        }
        let mut payload = None;
        match key & 7 {
            0 => {
                varint(bytes, &mut at, end)?;
            }
            1 => at = advance(at, 8, end)?,
            2 => {
                let length = varint(bytes, &mut at, end)?;
                let from = at;
                at = advance(at, usize::try_from(length).unwrap_or(usize::MAX), end)?;
                payload = Some(from..at);
            }
            5 => at = advance(at, 4, end)?,
            _ => return Err(WireError::Malformed { at: start }),
        }
        fields.push(Field {
            number,
            all: start..at,
            payload,
        });
    }
    Ok(fields)
}

fn advance(at: usize, by: usize, end: usize) -> Result<usize, WireError> {
    let to = at.saturating_add(by);
    if to > end {
        Err(WireError::Truncated { needs: to })
    } else {
        Ok(to)
    }
}

fn varint(bytes: &[u8], at: &mut usize, end: usize) -> Result<u64, WireError> {
    let start = *at;
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        if *at >= end {
            return Err(WireError::Truncated { needs: end + 1 });
        }
        let byte = bytes[*at];
        *at += 1;
        if shift == 63 && byte > 1 {
            break;
        }
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(WireError::Malformed { at: start })
}

/// Appends a varint.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Appends the key and length of a length-delimited field whose payload follows.
pub(super) fn put_header(out: &mut Vec<u8>, number: u32, length: usize) {
    put_varint(out, u64::from(number) << 3 | 2);
    put_varint(out, length as u64);
}

/// Appends a length-delimited field.
pub(super) fn put_bytes(out: &mut Vec<u8>, number: u32, payload: &[u8]) {
    put_header(out, number, payload.len());
    out.extend_from_slice(payload);
}

/// Appends a varint field.
pub(super) fn put_int(out: &mut Vec<u8>, number: u32, value: u64) {
    put_varint(out, u64::from(number) << 3);
    put_varint(out, value);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn fields_of_every_wire_type_are_found() {
        let mut bytes = Vec::new();
        put_int(&mut bytes, 1, 300);
        put_bytes(&mut bytes, 99, b"abc");
        bytes.extend_from_slice(&[3 << 3 | 5, 1, 2, 3, 4]);
        bytes.extend_from_slice(&[4 << 3 | 1, 1, 2, 3, 4, 5, 6, 7, 8]);
        let found = fields(&bytes, 0..bytes.len()).unwrap();
        assert_eq!(
            found.iter().map(|f| f.number).collect::<Vec<_>>(),
            [1, 99, 3, 4]
        );
        assert_eq!(found[0].all, 0..3);
        assert_eq!(&bytes[found[1].payload.clone().unwrap()], b"abc");
        assert_eq!(found[3].all.end, bytes.len());
    }

    #[test]
    fn a_field_longer_than_its_message_says_how_much_is_missing() {
        let mut bytes = Vec::new();
        put_bytes(&mut bytes, 7, &[0; 100]);
        assert_eq!(
            fields(&bytes, 0..50),
            Err(WireError::Truncated { needs: bytes.len() })
        );
    }

    #[test]
    fn groups_and_field_zero_are_malformed() {
        assert_eq!(
            fields(&[1 << 3 | 3], 0..1),
            Err(WireError::Malformed { at: 0 })
        );
        assert_eq!(fields(&[0, 0], 0..2), Err(WireError::Malformed { at: 0 }));
    }

    proptest! {
        #[test]
        fn varints_survive(value: u64) {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut at = 0;
            prop_assert_eq!(varint(&bytes, &mut at, bytes.len()), Ok(value));
            prop_assert_eq!(at, bytes.len());
        }

        #[test]
        fn any_bytes_are_fields_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(found) = fields(&bytes, 0..bytes.len()) {
                let total: usize = found.iter().map(|f| f.all.len()).sum();
                prop_assert_eq!(total, bytes.len());
            }
        }
    }
}
