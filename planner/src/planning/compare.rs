//! The same model on the same machines under every kind of schedule.

use serde::Serialize;

use super::{PlanningError, Request, Scope, plan};
use crate::plan::Plan;
use crate::profile::{FileRef, Profile};
use crate::schedule::ScheduleKind;

/// What one kind of schedule gives.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Compared {
    /// The kind.
    pub schedule: ScheduleKind,
    /// Replicas of the stages, as in `15-1`; none if nothing fits.
    pub configuration: Option<String>,
    /// Simulated seconds per minibatch.
    pub period_s: Option<f64>,
    /// Samples per second.
    pub throughput_samples_per_s: Option<f64>,
    /// Memory of the fullest worker.
    pub memory_bytes: Option<u64>,
    /// Share of the workers' time in which they do not compute.
    pub bubble_share: Option<f64>,
    /// Minibatches between two steps of all stages, where they step together.
    pub microbatches: Option<usize>,
    /// Steps by which the weights of a gradient are older, at most, than those that it is applied to.
    pub staleness: Option<usize>,
    /// Why there is no plan.
    pub infeasible: Option<String>,
}

/// Every kind, in the order in which they are compared.
pub const KINDS: [ScheduleKind; 7] = [
    ScheduleKind::OneFOneB,
    ScheduleKind::VerticalSync,
    ScheduleKind::TwoBw,
    ScheduleKind::OneFOneBFlush,
    ScheduleKind::Gpipe,
    ScheduleKind::ModelParallel,
    ScheduleKind::DataParallel,
];

/// The plan of the kind with the least period, and what each kind gives. Ties go to the kind that stands first.
///
/// # Errors
/// If no kind fits, the reason of the first; or if a solver fails.
pub fn compare(
    profile: &Profile,
    profile_file: &FileRef,
    request: &Request,
) -> Result<(Plan, Vec<Compared>), PlanningError> {
    let mut best: Option<Plan> = None;
    let mut first_miss = None;
    let mut rows = Vec::new();
    // Data parallelism is nothing but replication.
    let straight = request.scope == Scope::Straight;
    let wanted = |kind: &ScheduleKind| !straight || *kind != ScheduleKind::DataParallel;
    for kind in KINDS.into_iter().filter(wanted) {
        let mut request = request.clone();
        request.course.kind = kind;
        match plan(profile, profile_file.clone(), &request) {
            Ok(plan) => {
                rows.push(row(kind, &plan));
                if best
                    .as_ref()
                    .is_none_or(|best| plan.period_s < best.period_s)
                {
                    best = Some(plan);
                }
            }
            // What is given may suit some kinds only: stages, or minibatches per step.
            Err(
                miss @ (PlanningError::Infeasible(_)
                | PlanningError::Simulation(_)
                | PlanningError::Plan(_)),
            ) => {
                rows.push(Compared {
                    infeasible: Some(miss.to_string()),
                    ..nothing(kind)
                });
                first_miss.get_or_insert(miss);
            }
            Err(other) => return Err(other),
        }
    }
    match (best, first_miss) {
        (Some(best), _) => Ok((best, rows)),
        (None, Some(miss)) => Err(miss),
        (None, None) => unreachable!("every kind gives a plan or a reason"),
    }
}

fn nothing(schedule: ScheduleKind) -> Compared {
    Compared {
        schedule,
        configuration: None,
        period_s: None,
        throughput_samples_per_s: None,
        memory_bytes: None,
        bubble_share: None,
        microbatches: None,
        staleness: None,
        infeasible: None,
    }
}

fn row(kind: ScheduleKind, plan: &Plan) -> Compared {
    let replicas: Vec<String> = plan.stages.iter().map(|s| s.replicas.to_string()).collect();
    let (pace, shapes) = (plan.pace(), plan.shapes());
    let lags = (0..shapes.len()).map(|stage| pace.lag(&shapes, stage));
    Compared {
        configuration: Some(replicas.join("-")),
        period_s: Some(plan.period_s),
        throughput_samples_per_s: Some(plan.throughput_samples_per_s),
        memory_bytes: plan.stages.iter().map(|s| s.memory_bytes).max(),
        bubble_share: Some(plan.bubble_share),
        microbatches: plan.microbatches,
        // A forward that reads the version before its round is not stale.
        staleness: lags.max().map(|lag| lag - 1),
        ..nothing(kind)
    }
}
