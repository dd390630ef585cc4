//! Tensors: a shape over reference-counted, pooled, 64-byte aligned memory.
//!
//! A tensor is always contiguous and row-major. Cloning shares the memory; a reshape is a clone with
//! another shape. Memory goes back to the pool of the device that made it when its last owner drops it,
//! on whatever thread that happens.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use crate::device::pool::Buffer;

/// Element types that flow through a graph.
///
/// Files may hold more: half-precision and double initializers become `F32`, every integer `I64`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float: the only type that has gradients.
    F32,
    /// 64-bit signed integer: indices, shapes, tokens.
    I64,
    /// 32-bit signed integer: positions that operators stash for their backward; no value of a graph has it.
    I32,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 => 4,
            DType::I64 => 8,
            DType::Bool => 1,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DType::F32 => "float",
            DType::I64 => "int64",
            DType::I32 => "int32",
            DType::Bool => "bool",
        })
    }
}

/// A contiguous row-major tensor.
///
/// Typed access panics when the type is not the tensor's: types are settled when a graph is built.
#[derive(Clone)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    buffer: Arc<Buffer>,
}

impl Tensor {
    /// A tensor over a buffer of exactly the bytes its shape needs.
    pub(crate) fn over(dtype: DType, shape: &[usize], buffer: Buffer) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        assert_eq!(
            buffer.bytes().len(),
            bytes,
            "buffer of another size than shape {shape:?}"
        );
        Tensor {
            shape: shape.to_vec(),
            dtype,
            buffer: Arc::new(buffer),
        }
    }

    /// A host tensor of zeros that belongs to no pool.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Tensor::over(dtype, shape, Buffer::unpooled(bytes))
    }

    /// A host tensor from values in row-major order; panics when their number is not the shape's.
    pub fn from_f32(shape: &[usize], values: impl AsRef<[f32]>) -> Self {
        let mut buffer = Buffer::unpooled(size_of_val(values.as_ref()));
        buffer.elements_mut().copy_from_slice(values.as_ref());
        Tensor::over(DType::F32, shape, buffer)
    }

    /// As [`Self::from_f32`], for integers.
    pub fn from_i64(shape: &[usize], values: impl AsRef<[i64]>) -> Self {
        let mut buffer = Buffer::unpooled(size_of_val(values.as_ref()));
        buffer.elements_mut().copy_from_slice(values.as_ref());
        Tensor::over(DType::I64, shape, buffer)
    }

    /// As [`Self::from_f32`], for truth values.
    pub fn from_bool(shape: &[usize], values: impl AsRef<[bool]>) -> Self {
        let mut buffer = Buffer::unpooled(values.as_ref().len());
        for (byte, &value) in buffer.bytes_mut().iter_mut().zip(values.as_ref()) {
            *byte = value.into();
        }
        Tensor::over(DType::Bool, shape, buffer)
    }

    /// Extent of each axis; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.len() * self.dtype.size()
    }

    /// Elements of a float tensor.
    pub fn f32s(&self) -> &[f32] {
        self.expect(DType::F32);
        self.buffer.elements()
    }

    /// Whether a tensor is of floats that are all the same.
    pub fn is_one_number(&self) -> bool {
        self.dtype == DType::F32 && {
            let values = self.f32s();
            values.iter().all(|v| v.to_bits() == values[0].to_bits())
        }
    }

    /// Elements of an int64 tensor.
    pub fn i64s(&self) -> &[i64] {
        self.expect(DType::I64);
        self.buffer.elements()
    }

    /// Elements of an int32 tensor.
    pub fn i32s(&self) -> &[i32] {
        self.expect(DType::I32);
        self.buffer.elements()
    }

    /// Elements of a bool tensor, each 0 or 1.
    pub fn bools(&self) -> &[u8] {
        self.expect(DType::Bool);
        self.buffer.elements()
    }

    /// The elements as bytes, whatever their type.
    pub fn raw(&self) -> &[u8] {
        self.buffer.bytes()
    }

    /// Elements of a float tensor to write; `None` when the memory is shared.
    pub fn f32s_mut(&mut self) -> Option<&mut [f32]> {
        self.expect(DType::F32);
        Arc::get_mut(&mut self.buffer).map(Buffer::elements_mut)
    }

    /// Elements of an int64 tensor to write; `None` when the memory is shared.
    pub fn i64s_mut(&mut self) -> Option<&mut [i64]> {
        self.expect(DType::I64);
        Arc::get_mut(&mut self.buffer).map(Buffer::elements_mut)
    }

    /// Elements of an int32 tensor to write; `None` when the memory is shared.
    pub fn i32s_mut(&mut self) -> Option<&mut [i32]> {
        self.expect(DType::I32);
        Arc::get_mut(&mut self.buffer).map(Buffer::elements_mut)
    }

    /// The elements as bytes to write, whatever their type; `None` when the memory is shared.
    pub fn raw_mut(&mut self) -> Option<&mut [u8]> {
        Arc::get_mut(&mut self.buffer).map(Buffer::bytes_mut)
    }

    /// The elements as a plain type of the size of the tensor's.
    pub(crate) fn elements<T: Pod>(&self) -> &[T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        self.buffer.elements()
    }

    /// As [`Self::elements`], to write; `None` when the memory is shared.
    pub(crate) fn elements_mut<T: Pod>(&mut self) -> Option<&mut [T]> {
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        Arc::get_mut(&mut self.buffer).map(Buffer::elements_mut)
    }

    /// Whether nobody else holds the memory, so that it may be overwritten.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.buffer) == 1
    }

    /// The same memory under another shape; panics when the number of elements differs.
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        self.clone().into_shape(shape)
    }

    /// As [`Self::reshape`], giving up this owner of the memory.
    pub fn into_shape(mut self, shape: &[usize]) -> Tensor {
        assert_eq!(
            shape.iter().product::<usize>(),
            self.len(),
            "reshape of {:?} to {shape:?}",
            self.shape
        );
        self.shape = shape.to_vec();
        self
    }

    /// Identifies the memory: equal for tensors that share it, as long as one of them lives.
    pub fn buffer_id(&self) -> usize {
        Arc::as_ptr(&self.buffer) as usize
    }

    /// Whether both share memory.
    pub fn same_buffer(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    fn expect(&self, dtype: DType) {
        assert_eq!(self.dtype, dtype, "tensor of another type");
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?})", self.dtype, self.shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reshape_shares_and_writing_needs_a_single_owner() {
        let mut tensor = Tensor::from_f32(&[2, 3], [0., 1., 2., 3., 4., 5.]);
        let flat = tensor.reshape(&[6]);
        assert!(flat.same_buffer(&tensor));
        assert!(!tensor.is_unique());
        assert!(tensor.f32s_mut().is_none());
        drop(flat);
        tensor.f32s_mut().unwrap()[5] = 9.0;
        assert_eq!(tensor.f32s()[5], 9.0);
        assert_eq!(tensor.bytes(), 24);
    }

    #[test]
    fn scalars_and_empty_tensors_have_a_length() {
        assert_eq!(Tensor::from_i64(&[], [7]).len(), 1);
        assert!(Tensor::from_f32(&[0, 4], []).is_empty());
        assert_eq!(Tensor::from_bool(&[2], [true, false]).bools(), [1, 0]);
    }
}
