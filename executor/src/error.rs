//! What ends a run before its time.

use crate::data::DataError;
use crate::worker::WorkerError;

/// Why a run cannot begin or go on.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The data does not fit.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model cannot be cut or trained as asked.
    #[error("{0}")]
    Model(String),
    /// The plan is for something else.
    #[error("{0}")]
    Plan(String),
    /// A worker failed.
    #[error("worker {worker} (stage {stage}, replica {replica}): {error}")]
    Worker {
        /// Its number.
        worker: usize,
        /// Its stage.
        stage: usize,
        /// Its replica.
        replica: usize,
        /// Why.
        error: WorkerError,
    },
    /// The loss is not finite.
    #[error("{0}")]
    Diverged(WorkerError),
    /// The loader thread ended before all was delivered.
    #[error("internal error: the data loader failed")]
    Loader,
    /// A result cannot be written.
    #[error("{file}: {reason}")]
    Output {
        /// The file or folder.
        file: String,
        /// Why not.
        reason: String,
    },
}
