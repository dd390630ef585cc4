//! What the obvious alternatives give on the same cluster.

use super::search::Found;
use super::space::Space;
use super::{
    Course, PlanningError, Request, Scope, Solver, gap, memory_limit, one_at_a_time, released,
    search, servers, throughput,
};
use crate::cost::{Evaluation, Fabric, Formula, Machine, Partition, data_parallel};
use crate::graph::LayerGraph;
use crate::plan::{Baseline, Baselines, Cluster};
use crate::profile::Profile;
use crate::units::show_bytes;

/// Data parallel, model parallel and straight pipeline. Throughputs follow our cost model; under another formula
/// only `bottleneck_s` is that formula's.
pub(super) fn baselines(
    profile: &Profile,
    space: &Space,
    request: &Request,
) -> Result<Baselines, PlanningError> {
    // Whatever the plan's own schedule: these are what one would do without it.
    let machine = &Machine::new(&request.cluster, profile.communication_s_per_byte);
    let request = &Request {
        course: Course::default(),
        ..request.clone()
    };
    let straight = Request {
        scope: Scope::Straight,
        // Both solvers find the same, this one at once.
        solver: Solver::Dp,
        ..request.clone()
    };
    let (stages, why) = match search::search(space, machine, &straight) {
        Ok(found) => (found, None),
        Err(PlanningError::Infeasible(miss)) => {
            let mut unlimited = straight.clone();
            unlimited.cluster = unlimited.cluster.with_memory(None);
            let found = search::search(space, machine, &unlimited)?;
            (found, Some(miss.to_string()))
        }
        Err(other) => return Err(other),
    };
    Ok(Baselines {
        data_parallel: data_parallel_baseline(profile, space.graph, machine, request),
        model_parallel: model_parallel_baseline(profile, space, machine, &straight)?,
        straight: straight_baseline(profile, machine, request, &stages, why)?,
    })
}

/// Seconds of one data-parallel step on all devices: on servers at the pace of the slowest device, all-reduced over one
/// ring through all servers.
pub(super) fn data_parallel_seconds(
    graph: &LayerGraph,
    machine: &Machine,
    cluster: &Cluster,
) -> f64 {
    let devices = cluster.devices;
    let Some(fabric) = Fabric::new(cluster) else {
        return data_parallel::step_seconds(graph, devices, machine);
    };
    let all: Vec<usize> = fabric.slots.iter().map(|slot| slot.count).collect();
    let speed = fabric.worst(&all).speed;
    let ring = Machine {
        bandwidth: fabric.ring_bandwidth(&all),
        reduce_s_per_byte: machine.reduce_s_per_byte / speed,
        ..*machine
    };
    data_parallel::step_seconds(&graph.at_speed(speed), devices, &ring)
}

fn data_parallel_baseline(
    profile: &Profile,
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
) -> Baseline {
    let devices = request.cluster.devices;
    let whole = Partition::new(std::iter::once(0..graph.len()).collect(), vec![devices]);
    let fabric = Fabric::new(&request.cluster);
    let placement = fabric.map(|fabric| servers::pack(&whole, &fabric));
    let evaluation = Evaluation::placed(graph, &whole, machine, placement.as_ref());
    let honest = data_parallel_seconds(graph, machine, &request.cluster) / devices as f64;
    let memory = data_parallel::memory(graph, devices);
    Baseline {
        bottleneck_s: match request.formula {
            Formula::Ours => honest,
            formula => released::data_parallel(graph, machine, request)
                .unwrap_or_else(|| evaluation.objective(formula, machine)),
        },
        throughput_samples_per_s: throughput(profile, honest),
        bytes_per_minibatch: evaluation.bytes_per_minibatch,
        memory_bytes: memory.ceil() as u64,
        infeasible: too_large(memory, request),
    }
}

fn model_parallel_baseline(
    profile: &Profile,
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<Baseline, PlanningError> {
    let found = match one_at_a_time::find(space, machine, request) {
        Err(PlanningError::Infeasible(_)) => {
            let mut unlimited = request.clone();
            unlimited.cluster = unlimited.cluster.with_memory(None);
            one_at_a_time::find(space, machine, &unlimited)
        }
        other => other,
    }?;
    let prediction = found.prediction;
    let memory = prediction.memory.iter().copied().fold(0.0, f64::max);
    Ok(Baseline {
        bottleneck_s: prediction.period,
        throughput_samples_per_s: throughput(profile, prediction.period),
        bytes_per_minibatch: found.evaluation.bytes_per_minibatch,
        memory_bytes: memory.ceil() as u64,
        infeasible: too_large(memory, request),
    })
}

fn straight_baseline(
    profile: &Profile,
    machine: &Machine,
    request: &Request,
    stages: &Found,
    infeasible: Option<String>,
) -> Result<Baseline, PlanningError> {
    let unlimited = Request {
        cluster: request.cluster.with_memory(None),
        ..request.clone()
    };
    let judged = stages.judge(
        machine,
        if infeasible.is_none() {
            request
        } else {
            &unlimited
        },
    )?;
    let prediction = &judged.choice.prediction;
    let memory = prediction.memory.iter().copied().fold(0.0, f64::max);
    Ok(Baseline {
        bottleneck_s: stages.objective(&judged.evaluation, request.formula, machine),
        throughput_samples_per_s: throughput(profile, prediction.period),
        bytes_per_minibatch: judged.evaluation.bytes_per_minibatch,
        memory_bytes: memory.ceil() as u64,
        infeasible,
    })
}

fn too_large(memory: f64, request: &Request) -> Option<String> {
    let limit = memory_limit(&request.cluster);
    (memory > limit).then(|| {
        format!(
            "needs {} per worker, {:.0} % more than it has",
            show_bytes(memory),
            100.0 * gap(memory, limit)
        )
    })
}
