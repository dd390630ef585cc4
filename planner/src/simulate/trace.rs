//! What a simulated run leaves behind.

use crate::schedule::Op;

/// When things happened, seconds from the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// When the first m + 1 minibatches were through their last backward, for each m.
    pub through: Vec<f64>,
    /// End of the last forward of stage 0.
    pub last_first_stage_forward: f64,
    /// End of everything.
    pub end: f64,
}

/// What took time in a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// Worker, on whose device or out of whose link it was.
    pub worker: usize,
    /// Seconds from the start.
    pub start: f64,
    /// Seconds from the start.
    pub end: f64,
    /// What it was.
    pub activity: Activity,
}

/// Kinds of [`Span`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// The device carried out this forward, backward or step.
    Compute(Op),
    /// Activations of the minibatch left for worker `to`.
    Activations {
        /// Minibatch.
        minibatch: usize,
        /// Receiving worker.
        to: usize,
    },
    /// Gradients of the minibatch left for worker `to`.
    Gradients {
        /// Minibatch.
        minibatch: usize,
        /// Receiving worker.
        to: usize,
    },
    /// Some of the round's all-reduce left for worker `to`.
    AllReduce {
        /// Round.
        round: usize,
        /// Receiving worker.
        to: usize,
    },
}
