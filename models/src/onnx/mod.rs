//! ONNX files: reading with every check that a graph relies on, and writing trained weights back.

mod error;
mod external;
mod message;
mod model;
pub mod proto;
mod tensor;
mod untie;
mod wire;
mod write;

#[cfg(test)]
mod tests;

pub use error::OnnxError;
pub use model::{Model, SUPPORTED_OPSETS};
pub(crate) use tensor::graph_dtype;
