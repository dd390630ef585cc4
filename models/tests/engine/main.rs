//! The compute engine from outside: operators against finite differences and against values from other
//! implementations, programs, optimizers.

mod exporters;
mod forward;
mod golden;
mod gradients;
mod optimizer;
mod program;
mod refusals;
mod support;
mod torch;
mod whole_models;
