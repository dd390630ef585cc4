use std::path::PathBuf;

use thiserror::Error;

/// Why an ONNX file cannot be read or written.
#[derive(Debug, Error)]
pub enum OnnxError {
    /// The file cannot be opened or read.
    #[error("{}: cannot read the model: {error}", path.display())]
    Read {
        /// The model file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The file ends before its contents do.
    #[error(
        "{}: the file is truncated: it has {length} bytes but needs at least {needs}; copy or download it again",
        path.display()
    )]
    Truncated {
        /// The model file.
        path: PathBuf,
        /// Bytes there.
        length: usize,
        /// Bytes that the outermost broken field asks for.
        needs: usize,
    },
    /// The bytes are no ONNX model.
    #[error("{}: not an ONNX model: {reason}", path.display())]
    Malformed {
        /// The model file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The model asks for a version of the operator set that this program doesn't know.
    #[error(
        "{}: opset {version} of the default domain is not supported (supported: {} to {}); export the model again with another opset_version",
        path.display(), supported.start(), supported.end()
    )]
    Opset {
        /// The model file.
        path: PathBuf,
        /// The version it imports.
        version: i64,
        /// The versions that would do.
        supported: std::ops::RangeInclusive<i64>,
    },
    /// A node uses an operator that is not in ONNX's default domain.
    #[error(
        "{}: node '{node}' uses operator {operator} of domain '{domain}'; only operators of the default ONNX domain are supported",
        path.display()
    )]
    ForeignOperator {
        /// The model file.
        path: PathBuf,
        /// The node's name.
        node: String,
        /// The operator type.
        operator: String,
        /// Its domain.
        domain: String,
    },
    /// A stored tensor cannot be used.
    #[error("{}: tensor '{tensor}': {reason}", path.display())]
    Tensor {
        /// The model file.
        path: PathBuf,
        /// Name of the tensor, or of the node whose attribute it is.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A weight to write back that does not fit the model.
    #[error("{}: cannot write weight '{weight}' back: {reason}", path.display())]
    Weight {
        /// The model file that the weights belong to.
        path: PathBuf,
        /// Name of the weight.
        weight: String,
        /// What does not fit.
        reason: String,
    },
    /// The output file cannot be written.
    #[error("{}: cannot write the model: {error}", path.display())]
    Write {
        /// The file that was to be written.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}
