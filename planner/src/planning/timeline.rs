//! What every worker of a plan does when, as the simulation has it.

use super::{PlanningError, Request, planned};
use crate::cost::data_parallel::BucketedBackward;
use crate::cost::{Evaluation, Machine};
use crate::plan::Plan;
use crate::profile::Profile;
use crate::schedule::{ScheduleKind, WorkerRole};
use crate::simulate::{SimulationError, Span, record, record_bucketed};

/// A simulated run.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Stage and replica of each worker.
    pub roles: Vec<WorkerRole>,
    /// What took time.
    pub spans: Vec<Span>,
    /// Seconds that everything took.
    pub end: f64,
    /// Minibatches that went through.
    pub minibatches: usize,
}

/// Runs `minibatches` through the plan, which was made for this profile and request.
///
/// # Errors
/// If the plan's schedule cannot work.
pub fn timeline(
    profile: &Profile,
    request: &Request,
    plan: &Plan,
    minibatches: usize,
) -> Result<Timeline, PlanningError> {
    let (graph, partition) = planned(profile, request, plan)?;
    let machine = Machine {
        round: plan.microbatches.map(|round| round as f64),
        ..request.machine(profile)
    };
    let placement = plan.placement()?;
    let evaluation = Evaluation::placed(&graph, &partition, &machine, placement.as_ref());
    let schedule = plan.schedule_for(minibatches)?;
    let recorded = if plan.schedule == ScheduleKind::DataParallel {
        let backward = BucketedBackward::new(&graph, plan.workers, &machine);
        // Recomputation stands before the backward.
        let again =
            evaluation.stages[0].sums.backward - graph.layers().map(|l| l.backward).sum::<f64>();
        record_bucketed(&schedule, &evaluation, &machine, &backward.after(again))
    } else {
        record(&schedule, &evaluation, &machine)
    };
    let (trace, spans) = recorded.ok_or(SimulationError::Stuck)?;
    Ok(Timeline {
        roles: schedule.roles,
        spans,
        end: trace.end,
        minibatches,
    })
}
