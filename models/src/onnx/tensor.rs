//! `TensorProto` to host tensors and back.

use std::borrow::Cow;
use std::io::{self, Write};
use std::path::Path;

use half::{bf16, f16};
use prost::bytes::Bytes;

use super::external;
use super::proto::{EXTERNAL, TensorProto, data_type};
use crate::tensor::{DType, Tensor};

/// The type that elements of an ONNX data type have in a graph; `None` for those that have no place there.
pub(crate) fn graph_dtype(element: i32) -> Option<DType> {
    match element {
        data_type::FLOAT | data_type::FLOAT16 | data_type::BFLOAT16 | data_type::DOUBLE => {
            Some(DType::F32)
        }
        data_type::UINT8..=data_type::INT64 | data_type::UINT32 | data_type::UINT64 => {
            Some(DType::I64)
        }
        data_type::BOOL => Some(DType::Bool),
        _ => None,
    }
}

/// Bytes of one element in raw data.
pub(super) fn raw_size(element: i32) -> usize {
    match element {
        data_type::UINT8 | data_type::INT8 | data_type::BOOL => 1,
        data_type::UINT16 | data_type::INT16 | data_type::FLOAT16 | data_type::BFLOAT16 => 2,
        data_type::FLOAT | data_type::INT32 | data_type::UINT32 => 4,
        _ => 8,
    }
}

/// Dimensions as a shape whose size in bytes can be computed.
fn shape(dims: &[i64]) -> Result<Vec<usize>, String> {
    let shape = dims
        .iter()
        .map(|&dim| usize::try_from(dim))
        .collect::<Result<Vec<_>, _>>();
    let shape = shape.map_err(|_| format!("shape {dims:?} has a negative extent"))?;
    // Zero extents are left out so that the product of the others cannot overflow either.
    let size = shape
        .iter()
        .filter(|&&dim| dim > 0)
        .try_fold(8usize, |size, &dim| size.checked_mul(dim));
    match size {
        Some(size) if isize::try_from(size).is_ok() => Ok(shape),
        _ => Err(format!("shape {dims:?} is too large for this machine")),
    }
}

/// Raw little-endian bytes of a tensor, wherever it keeps them; `None` if it keeps typed values.
pub(super) fn raw_bytes(tensor: &TensorProto, folder: &Path) -> Result<Option<Bytes>, String> {
    if tensor.data_location() == EXTERNAL {
        let expected =
            shape(&tensor.dims)?.iter().product::<usize>() * raw_size(tensor.data_type());
        return external::read(tensor, expected, folder).map(Some);
    }
    Ok(tensor.raw_data.clone())
}

/// The tensor on the host: half precision and double become float, every integer int64.
pub(super) fn decode(tensor: &TensorProto, folder: &Path) -> Result<Tensor, String> {
    let element = tensor.data_type();
    let shape = shape(&tensor.dims)?;
    let Some(dtype) = graph_dtype(element) else {
        return Err(format!(
            "elements of type {} are not supported",
            data_type::name(element)
        ));
    };
    if tensor.segment.is_some() {
        return Err("a tensor stored in segments is not supported".to_string());
    }
    let count = shape.iter().product::<usize>();
    let raw = raw_bytes(tensor, folder)?;
    match dtype {
        DType::F32 => {
            let values: Cow<'_, [f32]> = match (&raw, element) {
                (Some(raw), data_type::FLOAT) => parse(raw, f32::from_le_bytes).into(),
                (Some(raw), data_type::DOUBLE) => {
                    parse(raw, |b| f64::from_le_bytes(b) as f32).into()
                }
                (Some(raw), data_type::FLOAT16) => {
                    parse(raw, |b| f16::from_le_bytes(b).to_f32()).into()
                }
                (Some(raw), _) => parse(raw, |b| bf16::from_le_bytes(b).to_f32()).into(),
                (None, data_type::FLOAT) => (&tensor.float_data).into(),
                (None, data_type::DOUBLE) => tensor.double_data.iter().map(|&v| v as f32).collect(),
                (None, data_type::FLOAT16) => half_bits(tensor)
                    .map(|bits| f16::from_bits(bits).to_f32())
                    .collect(),
                (None, _) => half_bits(tensor)
                    .map(|bits| bf16::from_bits(bits).to_f32())
                    .collect(),
            };
            check(count, values.len(), raw.as_ref(), element)?;
            Ok(Tensor::from_f32(&shape, values))
        }
        DType::I64 | DType::I32 => {
            let values: Cow<'_, [i64]> = match (&raw, element) {
                (Some(raw), data_type::INT8) => parse(raw, |b| i8::from_le_bytes(b).into()).into(),
                (Some(raw), data_type::UINT8) => parse(raw, |b| u8::from_le_bytes(b).into()).into(),
                (Some(raw), data_type::INT16) => {
                    parse(raw, |b| i16::from_le_bytes(b).into()).into()
                }
                (Some(raw), data_type::UINT16) => {
                    parse(raw, |b| u16::from_le_bytes(b).into()).into()
                }
                (Some(raw), data_type::INT32) => {
                    parse(raw, |b| i32::from_le_bytes(b).into()).into()
                }
                (Some(raw), data_type::UINT32) => {
                    parse(raw, |b| u32::from_le_bytes(b).into()).into()
                }
                (Some(raw), data_type::UINT64) => signed(parse(raw, u64::from_le_bytes))?.into(),
                (Some(raw), _) => parse(raw, i64::from_le_bytes).into(),
                (None, data_type::INT64) => (&tensor.int64_data).into(),
                (None, data_type::UINT32 | data_type::UINT64) => {
                    signed(tensor.uint64_data.clone())?.into()
                }
                (None, _) => tensor.int32_data.iter().map(|&v| v.into()).collect(),
            };
            check(count, values.len(), raw.as_ref(), element)?;
            Ok(Tensor::from_i64(&shape, values))
        }
        DType::Bool => {
            let values: Vec<bool> = match &raw {
                Some(raw) => raw.iter().map(|&byte| byte != 0).collect(),
                None => tensor.int32_data.iter().map(|&v| v != 0).collect(),
            };
            check(count, values.len(), raw.as_ref(), element)?;
            Ok(Tensor::from_bool(&shape, values))
        }
    }
}

fn parse<T, const N: usize>(raw: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
    raw.as_chunks::<N>()
        .0
        .iter()
        .map(|&bytes| value(bytes))
        .collect()
}

/// Bit patterns of half-precision values, which stand in `int32_data`.
fn half_bits(tensor: &TensorProto) -> impl Iterator<Item = u16> + '_ {
    tensor.int32_data.iter().map(|&bits| bits as u16)
}

fn signed(values: Vec<u64>) -> Result<Vec<i64>, String> {
    let signed = values
        .into_iter()
        .map(i64::try_from)
        .collect::<Result<Vec<_>, _>>();
    signed.map_err(|_| "a uint64 value is over 2^63 - 1".to_string())
}

fn check(count: usize, found: usize, raw: Option<&Bytes>, element: i32) -> Result<(), String> {
    let leftover = raw.is_some_and(|raw| raw.len() % raw_size(element) != 0);
    if found == count && !leftover {
        return Ok(());
    }
    let name = data_type::name(element);
    Err(match raw {
        Some(raw) => format!(
            "its shape needs {count} {name} elements, its data has {} bytes",
            raw.len()
        ),
        None => format!("its shape needs {count} {name} elements, its data has {found}"),
    })
}

/// Writes a float tensor as raw data of an element type for which [`graph_dtype`] gives float.
pub(super) fn encode(tensor: &Tensor, element: i32, out: &mut dyn Write) -> io::Result<()> {
    // In blocks, so that no second copy of a large weight is made.
    for values in tensor.f32s().chunks(1 << 16) {
        let bytes: Vec<u8> = match element {
            data_type::DOUBLE => values
                .iter()
                .flat_map(|&v| f64::from(v).to_le_bytes())
                .collect(),
            data_type::FLOAT16 => values
                .iter()
                .flat_map(|&v| f16::from_f32(v).to_le_bytes())
                .collect(),
            data_type::BFLOAT16 => values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        out.write_all(&bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(element: i32, dims: &[i64]) -> TensorProto {
        TensorProto {
            data_type: Some(element),
            dims: dims.to_vec(),
            ..TensorProto::default()
        }
    }

    fn decoded(tensor: &TensorProto) -> Result<Tensor, String> {
        decode(tensor, Path::new(""))
    }

    #[test]
    fn typed_and_raw_values_of_every_type_decode() {
        let mut float = tensor(data_type::FLOAT, &[2]);
        float.float_data = vec![1.5, -2.0];
        assert_eq!(decoded(&float).unwrap().f32s(), [1.5, -2.0]);

        let mut half = tensor(data_type::FLOAT16, &[2]);
        half.int32_data = vec![0x3c00, 0xc000];
        assert_eq!(decoded(&half).unwrap().f32s(), [1.0, -2.0]);

        let mut brain = tensor(data_type::BFLOAT16, &[1]);
        brain.raw_data = Some(vec![0x80, 0x3f].into());
        assert_eq!(decoded(&brain).unwrap().f32s(), [1.0]);

        let mut double = tensor(data_type::DOUBLE, &[1]);
        double.raw_data = Some(0.1f64.to_le_bytes().to_vec().into());
        assert_eq!(decoded(&double).unwrap().f32s(), [0.1]);

        let mut int = tensor(data_type::INT32, &[1, 2]);
        int.raw_data = Some([(-3i32).to_le_bytes(), 4i32.to_le_bytes()].concat().into());
        let int = decoded(&int).unwrap();
        assert_eq!((int.shape(), int.i64s()), (&[1, 2][..], &[-3, 4][..]));

        let mut byte = tensor(data_type::UINT8, &[1]);
        byte.raw_data = Some(vec![255].into());
        assert_eq!(decoded(&byte).unwrap().i64s(), [255]);

        let mut flags = tensor(data_type::BOOL, &[3]);
        flags.int32_data = vec![0, 1, 2];
        assert_eq!(decoded(&flags).unwrap().bools(), [0, 1, 1]);

        let mut scalar = tensor(data_type::INT64, &[]);
        scalar.int64_data = vec![7];
        assert_eq!(decoded(&scalar).unwrap().i64s(), [7]);
    }

    #[test]
    fn data_must_fit_the_shape() {
        let mut short = tensor(data_type::FLOAT, &[2, 2]);
        short.raw_data = Some(vec![0; 12].into());
        assert_eq!(
            decoded(&short).unwrap_err(),
            "its shape needs 4 float elements, its data has 12 bytes"
        );
        short.raw_data = Some(vec![0; 17].into());
        assert!(decoded(&short).is_err());
        assert!(
            decoded(&tensor(data_type::FLOAT, &[-1]))
                .unwrap_err()
                .contains("negative")
        );
        assert!(
            decoded(&tensor(data_type::FLOAT, &[i64::MAX, 4, 0]))
                .unwrap_err()
                .contains("too large")
        );
        assert!(
            decoded(&tensor(data_type::STRING, &[0]))
                .unwrap_err()
                .contains("string")
        );
    }

    #[test]
    fn encoding_keeps_the_files_element_type() {
        let values = Tensor::from_f32(&[2], [1.0, -0.5]);
        for element in [
            data_type::FLOAT,
            data_type::DOUBLE,
            data_type::FLOAT16,
            data_type::BFLOAT16,
        ] {
            let mut proto = tensor(element, &[2]);
            let mut raw = Vec::new();
            encode(&values, element, &mut raw).unwrap();
            proto.raw_data = Some(raw.into());
            assert_eq!(decoded(&proto).unwrap().f32s(), values.f32s());
        }
    }
}
