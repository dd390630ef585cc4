//! ONNX models as layer graphs whose layers run forward and backward.
//!
//! The way through the crate: `onnx` reads a file, `graph` binds shapes, folds constants and finds the
//! layers, `program` turns a run of layers into something that steps forward and backward, `ops` says
//! what each operator does in terms of the primitives that a `device` implements, and `onnx` writes
//! trained weights back into the original bytes.

pub mod device;
pub mod graph;
pub mod init;
pub mod loss;
pub mod onnx;
pub mod ops;
pub mod optimizer;
pub mod program;
pub mod random;
pub mod shape;
pub mod tensor;
