//! The cost model: what a stage asks of its device, its link and its memory.
//!
//! Seconds are per minibatch in steady state, bytes per minibatch. [`stage`] holds the terms of one stage,
//! [`interval`] sums them over every run of layers for the solvers, [`evaluate`] computes a finished plan's costs
//! from the layer graph alone (so that no figure is printed that only a solver believed), [`placement`] what servers' network cards carry, [`data_parallel`] the
//! opponent, [`formula`] the objectives of the published planners, [`release`] that of the released one
//! on servers.

pub mod data_parallel;
pub mod devices;
pub mod evaluate;
pub mod formula;
pub mod interval;
pub mod placement;
pub mod release;
pub mod stage;

pub use evaluate::{Evaluation, LinkBytes, Partition, StageEvaluation};
pub use formula::Formula;
pub use placement::{CardLoad, Fabric, Placement};
pub use stage::{Loads, Machine, MemoryShares, StageSums, Traffic};
