//! Pipeline-parallel training as a plan says.
//!
//! The way through the crate: `data` reads samples and prefetches minibatches, `stage` cuts the model's
//! graph where the plan says, `train` starts one `worker` per replica and gives it the planner's
//! schedule to carry out, workers exchange tensors over a `transport`, and `record` writes down what
//! came of it. `emulation` puts waits and
//! tensors of a profile's sizes in the model's place. `network` measures what a transport
//! gives. `program` is what the programs do around that: dp-run, whose workers are threads, and
//! dp-run-worker (feature `mpi`), which is one worker among those that mpirun or srun started. What runs is the list of operations that the planner proved, nothing else.

pub mod affinity;
pub mod cli;
pub mod data;
pub mod emulation;
pub mod error;
pub mod job;
pub mod launch;
pub mod learning_rate;
pub mod network;
pub mod program;
pub mod progress;
pub mod reading;
pub mod record;
pub mod stage;
pub mod train;
pub mod transport;
pub mod usage;
pub mod work;
pub mod worker;
