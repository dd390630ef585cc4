//! Plain versions of the CPU primitives: as close to their definition as code can be, sums in f64.
//!
//! Tests hold the fast kernels against these, and small or rare work runs on them.

pub mod elementwise;
pub mod layout;
pub mod loss;
pub mod matrix;
pub mod norm;
pub mod pool;
