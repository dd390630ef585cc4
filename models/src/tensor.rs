//! Tensors: a shape over reference-counted, pooled, 64-byte aligned memory.
//!
//! A tensor is always contiguous and row-major. Cloning shares the memory; a reshape is a clone with
//! another shape. Memory goes back to the pool of the device that made it when its last owner drops it,
//! on whatever thread that happens.

use std::fmt;
use std::sync::Arc;

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
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes per element.
    pub fn size(self) -> usize {
        match self {
            DType::F32 => 4,
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
            DType::Bool => "bool",
        })
    }
}

/// A contiguous row-major tensor.
#[derive(Clone)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    buffer: Arc<Buffer>,
}
