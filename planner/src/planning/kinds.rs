//! The plan for a kind of schedule: which stages are searched, and what is proved of them.

use super::polish::polish;
use super::search::{Found, miss, search};
use super::space::Space;
use super::{
    Judged, PlanningError, Request, baselines, depth, memory_limit, one_at_a_time, servers,
};
use crate::cost::{Evaluation, Fabric, Formula, Machine, Partition};
use crate::plan::PassedOver;
use crate::schedule::{Pace, ScheduleKind, StageShape};
use crate::simulate::bounds::Cause;
use crate::simulate::{Prediction, predict};
use crate::solve::Limits;

/// A plan and what is said of it.
pub(super) struct Answer {
    pub found: Found,
    pub judged: Judged,
    /// The plan with the smallest bottleneck, if another one is faster.
    pub passed_over: Option<PassedOver>,
}

/// The best stages that are found for the request's kind of schedule, with their depths and prediction.
pub(super) fn find(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<Answer, PlanningError> {
    let ((found, judged), passed_over) = match request.course.kind {
        ScheduleKind::DataParallel => (data_parallel(space, machine, request)?, None),
        ScheduleKind::ModelParallel => (model_parallel(space, machine, request)?, None),
        _ => {
            let proved = pipeline(space, machine, request)?;
            polish(space, machine, request, proved)?
        }
    };
    Ok(Answer {
        found,
        judged,
        passed_over,
    })
}

fn pipeline(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<(Found, Judged), PlanningError> {
    let mut found = search(space, machine, request)?;
    let judged = found.judge(machine, request)?;
    check_memory(&found, &judged, request)?;
    if judged.machine.round != machine.round && request.formula == Formula::Ours {
        // The search took steps and all-reduces for more frequent than they are: no plan is better than the best one
        // if they cost nothing.
        let free = Machine {
            round: Some(f64::INFINITY),
            ..*machine
        };
        let bound = search(space, &free, request)?.lower_bound;
        let value = judged.evaluation.bottleneck;
        found.lower_bound = bound.min(value);
        found.proved = value <= bound * (1.0 + 1e-9);
    }
    Ok((found, judged))
}

/// With vertical sync all stages hold as many versions as the first one, which the search does not know.
fn check_memory(found: &Found, judged: &Judged, request: &Request) -> Result<(), PlanningError> {
    // On servers the memory of the devices that a stage is on counts, not that of the smallest one anywhere.
    let limit = match found.placement {
        Some(_) => f64::INFINITY,
        None => memory_limit(&request.cluster),
    };
    let mut first = 0;
    for (stage, e) in judged.evaluation.stages.iter().enumerate() {
        let needed = judged.choice.prediction.memory[first];
        first += e.replicas;
        let limit = limit.min(e.worst.memory);
        if needed > limit {
            let layers = e.layers.clone();
            return Err(super::Infeasible {
                what: "plan that was found for this schedule",
                limit: super::search::show_limit(limit),
                devices: request.cluster.devices,
                needed: super::search::show_limit(needed),
                stage,
                first: found.graph.layer(layers.start).name.clone(),
                last: found.graph.layer(layers.end - 1).name.clone(),
                replicas: e.replicas,
                depth: judged.choice.shapes[stage].depth,
                may_recompute: request.recompute != super::Recompute::Never,
            }
            .into());
        }
    }
    Ok(())
}

/// Stages without replicas, one minibatch at a time.
fn model_parallel(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<(Found, Judged), PlanningError> {
    let one_at_a_time::OneAtATime {
        found,
        evaluation,
        shapes,
        prediction,
    } = one_at_a_time::find(space, machine, request)?;
    let pace = one_at_a_time::PACE;
    Ok((found, judged(machine, evaluation, pace, shapes, prediction)))
}

/// The whole model on every device.
fn data_parallel(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<(Found, Judged), PlanningError> {
    let devices = request.cluster.devices;
    let graph = space.graph.clone();
    let partition = Partition::new(std::iter::once(0..graph.len()).collect(), vec![devices]);
    let fabric = Fabric::new(&request.cluster);
    let limits = Limits {
        devices,
        most_replicas: devices,
        memory: memory_limit(&request.cluster),
        recompute: request.recompute,
        keeping: request.keeping(),
    };
    let partition = super::search::recompute(&graph, machine, &partition, limits);
    if let Some(miss) = miss(&graph, machine, &partition, limits, "data-parallel plan") {
        return Err(miss.into());
    }
    let placement = fabric.map(|fabric| servers::pack(&partition, &fabric));
    let evaluation = Evaluation::placed(&graph, &partition, machine, placement.as_ref());
    let shapes = vec![StageShape {
        replicas: devices,
        depth: 1,
        delay: 0,
    }];
    let pace = Pace {
        kind: ScheduleKind::DataParallel,
        ..Pace::ONE_F_ONE_B
    };
    let mut prediction = predict(&evaluation, pace, &shapes, machine)?;
    // Gradients leave in buckets while the backward goes on: the whole all-reduce does not wait for its end.
    let again = if partition.recompute[0] {
        graph.layers().map(|l| l.forward).sum()
    } else {
        0.0
    };
    let step = baselines::data_parallel_seconds(&graph, machine, &request.cluster) + again;
    prediction.period = step / devices as f64;
    let busy = evaluation.stages[0].loads.device() / prediction.period.max(f64::MIN_POSITIVE);
    prediction.busy.fill(busy);
    prediction.bubble_share = (1.0 - busy).max(0.0);
    prediction.fill = prediction.fill.min(step);
    prediction.drain = prediction.drain.min(step);
    let found = Found {
        judged: None,
        lower_bound: prediction.period,
        proved: true,
        graph,
        partition,
        placement,
    };
    Ok((found, judged(machine, evaluation, pace, shapes, prediction)))
}

fn judged(
    machine: &Machine,
    evaluation: Evaluation,
    pace: Pace,
    shapes: Vec<StageShape>,
    prediction: Prediction,
) -> Judged {
    Judged {
        machine: *machine,
        evaluation,
        choice: depth::Choice {
            pace,
            shapes,
            prediction,
            cause: Cause::Waiting,
        },
    }
}
