//! Transports: how tensors travel between workers.
//!
//! A worker only ever sends (which never waits), receives, and takes part in all-reduces that it begins
//! (without waiting) and later completes. That is what non-blocking sends, receives and a progress loop
//! of a message-passing library offer as well, so a schedule runs unchanged over any transport.

//!
//! [`local`] connects threads of one process. Between processes, an [`Exchange`] keeps what one process
//! has to say to the others, in frames of bounded size; whoever can carry a frame from one process to
//! another is its carrier: MPI (feature `mpi`), or a test.

pub mod exchange;
mod frame;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
mod remote;
mod ring;
mod waited;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use models::tensor::Tensor;
use serde::{Deserialize, Serialize};

pub use exchange::Exchange;
pub use frame::Letter;
pub use local::{LocalTransport, local};
pub use remote::{Endpoint, RemoteTransport};

/// What a message is about. Together with sender and minibatch it identifies the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Activations on their way to a later stage.
    Forward,
    /// Gradients on their way back.
    Backward,
}

/// Identifies a message between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Minibatch number, never used twice in a run.
    pub minibatch: u64,
    /// Which way it goes.
    pub direction: Direction,
}

/// Content of a message.
#[derive(Debug)]
pub enum Message {
    /// One entry per tensor of the link; none where no gradient flows.
    Tensors(Vec<Option<Tensor>>),
    /// The run was stopped before this minibatch.
    Stopped,
}

/// Replicas that reduce together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// First worker: replicas of a stage have consecutive numbers.
    pub first: usize,
    /// Number of replicas.
    pub replicas: usize,
}

/// What a worker's communication amounted to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Bytes this worker sent: activations, gradients, and its part of every all-reduce.
    pub bytes_sent: u64,
    /// Time spent waiting for others.
    pub waited: Duration,
}

/// Why a message cannot come any more.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// Another worker failed; its own error says why.
    #[error("the run was aborted")]
    Aborted,
}

/// One worker's end of a transport.
pub trait Transport: Send {
    /// Hands a message to worker `to`; never waits.
    fn send(&mut self, to: usize, tag: Tag, message: Message);

    /// Waits for the message with this tag from worker `from`.
    ///
    /// # Errors
    /// When the run was aborted.
    fn receive(&mut self, from: usize, tag: Tag) -> Result<Message, TransportError>;

    /// Begins to sum tensors over the workers of `group`; never waits. `None` takes part with nothing.
    ///
    /// `round` is never used twice by the group in a run. The order of the sum is fixed and the same over every
    /// transport, so all workers get the same bits, run after run.
    fn all_reduce_begin(&mut self, group: &Group, round: u64, tensors: Option<Vec<Tensor>>);

    /// Waits until every worker of the group has begun, and gives the sums divided by the number of
    /// workers that gave tensors.
    ///
    /// # Errors
    /// When the run was aborted.
    fn all_reduce_wait(&mut self, group: &Group, round: u64)
    -> Result<Vec<Tensor>, TransportError>;

    /// What was sent and waited for so far.
    fn traffic(&self) -> Traffic;
}

/// Bytes of the distinct buffers among tensors: what a message moves.
pub fn message_bytes(tensors: &[Option<Tensor>]) -> u64 {
    let mut seen = Vec::new();
    let mut bytes = 0;
    for tensor in tensors.iter().flatten() {
        if !seen.contains(&tensor.buffer_id()) {
            seen.push(tensor.buffer_id());
            bytes += tensor.bytes() as u64;
        }
    }
    bytes
}

/// Bytes that each worker of a ring sends to sum these tensors over `replicas` workers.
fn ring_bytes(tensors: &[Tensor], replicas: usize) -> u64 {
    let bytes: u64 = tensors.iter().map(|t| t.bytes() as u64).sum();
    2 * (replicas as u64 - 1) * bytes / replicas as u64
}

/// Ends every wait of every worker it reaches with [`TransportError::Aborted`].
#[derive(Clone)]
pub struct AbortHandle(Arc<dyn Fn() + Send + Sync>);

impl AbortHandle {
    fn new(abort: impl Fn() + Send + Sync + 'static) -> Self {
        AbortHandle(Arc::new(abort))
    }

    /// Aborts. Waits that begin later end at once.
    pub fn abort(&self) {
        (self.0)();
    }
}

impl fmt::Debug for AbortHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortHandle")
    }
}
