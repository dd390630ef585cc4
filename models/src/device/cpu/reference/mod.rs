//! Plain versions of the CPU primitives: as close to their definition as code can be, sums in f64.
//!
//! Tests hold the fast kernels against these, and small or rare work runs on them.

pub mod activation;
pub mod elementwise;
pub mod layer_norm;
pub mod layout;
pub mod loss;
pub mod lstm;
pub mod matrix;
pub mod norm;
pub mod pool;
pub mod reduce;
