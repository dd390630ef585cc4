//! Partition planner for pipeline-parallel training.
//!
//! The way of the data: a [`Profile`] (what every layer costs) and a cluster go in, a [`Plan`] (stages,
//! replicas, depths) comes out, together with a lower bound that says how good it is and a
//! [`Schedule`](schedule::Schedule) that says what every worker does. The executor reads the plan and
//! carries out that very schedule; nothing here knows tensors, devices or transports.

#[cfg(feature = "cli")]
pub mod cli;
pub mod cluster;
pub mod contract;
pub mod cost;
pub mod file;
pub mod graph;
pub mod import;
pub mod layer_name;
pub mod plan;
#[cfg(feature = "solver")]
pub mod planning;
#[cfg(feature = "plot")]
pub mod plot;
pub mod profile;
#[cfg(feature = "cli")]
pub mod report;
pub mod schedule;
pub mod simulate;
#[cfg(feature = "solver")]
pub mod solve;
#[cfg(test)]
mod testing;
#[cfg(feature = "solver")]
pub mod timeline;
pub mod units;

pub use plan::Plan;
pub use profile::Profile;
