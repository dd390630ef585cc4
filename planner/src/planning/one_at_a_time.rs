//! Model parallelism: stages without replicas, and one minibatch after the other through all of them.

use super::search::{Found, search};
use super::space::Space;
use super::{PlanningError, Request, Scope, memory_limit, servers};
use crate::cost::interval::SkipCount;
use crate::cost::{Evaluation, Fabric, Formula, Machine};
use crate::graph::LayerGraph;
use crate::schedule::{Keeping, Pace, ScheduleKind, StageShape};
use crate::simulate::{Prediction, predict};
use crate::solve::{self, Limits, Problem};

/// Graphs of more layers have more stages than are worth looking through for a baseline.
const MOST_LAYERS: usize = 1000;

/// The pace of the schedule.
pub(super) const PACE: Pace = Pace {
    kind: ScheduleKind::ModelParallel,
    ..Pace::ONE_F_ONE_B
};

/// Stages, one minibatch at a time, and how they do.
pub(super) struct OneAtATime {
    pub found: Found,
    pub evaluation: Evaluation,
    pub shapes: Vec<StageShape>,
    pub prediction: Prediction,
}

/// The fastest stages that are found: those with the shortest way for a minibatch, or those of the best straight
/// pipeline.
pub(super) fn find(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<OneAtATime, PlanningError> {
    let request = &Request {
        scope: match &request.scope {
            Scope::All => Scope::Straight,
            other => other.clone(),
        },
        course: super::Course {
            kind: ScheduleKind::ModelParallel,
            microbatches: None,
        },
        // Whatever a plan is judged by, here it is this program's own time.
        formula: Formula::Ours,
        ..request.clone()
    };
    let fabric = Fabric::new(&request.cluster);
    let shortest = match request.scope {
        Scope::Given(_) => None,
        _ => shortest(space, machine, request, fabric.as_ref()),
    };
    // Without a solution nothing fits, or it was not looked for.
    let (mut candidates, proved) = shortest.unwrap_or_default();
    let miss = match search(space, machine, request) {
        Ok(mut found) => {
            found.partition.replicas.fill(1);
            candidates.push(found);
            None
        }
        Err(miss @ PlanningError::Infeasible(_)) => Some(miss),
        Err(error) => return Err(error),
    };
    let mut best: Option<OneAtATime> = None;
    for found in candidates {
        let other = judge(found, machine)?;
        let sooner = |best: &OneAtATime| other.prediction.period < best.prediction.period;
        if best.as_ref().is_none_or(sooner) {
            best = Some(other);
        }
    }
    let mut best = match (best, miss) {
        (Some(best), _) => best,
        (None, Some(miss)) => return Err(miss),
        (None, None) => unreachable!("a search gives stages or a reason"),
    };
    let fastest = fabric.map_or(1.0, |fabric| {
        fabric.slots.iter().map(|s| s.speed).fold(0.0, f64::max)
    });
    let way = longest_round_trip(space.graph) / fastest;
    let bound = proved.map_or(way, |proved| proved.max(way));
    let period = best.prediction.period;
    best.found.lower_bound = bound.min(period);
    best.found.proved = period <= bound * (1.0 + 1e-9);
    Ok(best)
}

/// The partitions with the shortest way, on servers one for each kind of link, and the shortest way itself where that is
/// sure to be what the fastest plan takes.
fn shortest(
    space: &Space,
    machine: &Machine,
    request: &Request,
    fabric: Option<&Fabric>,
) -> Option<(Vec<Found>, Option<f64>)> {
    if space.graph.len() > MOST_LAYERS {
        return None;
    }
    let keeping = Keeping {
        kind: ScheduleKind::ModelParallel,
        microbatches: 0,
    };
    let on = |bandwidth: f64, memory: f64| {
        let limits = Limits {
            devices: request.cluster.devices,
            most_replicas: 1,
            memory,
            recompute: request.recompute,
            keeping,
        };
        let machine = Machine {
            bandwidth,
            ..*machine
        };
        let table = space.table(SkipCount::Once);
        solve::sequential(&Problem::over(table, machine, Formula::Ours, limits))
    };
    let Some(fabric) = fabric else {
        let solution = on(machine.bandwidth, memory_limit(&request.cluster))?;
        let exact = is_a_line(space.graph).then_some(solution.bottleneck);
        return Some((vec![unfolded(space, solution)], exact));
    };
    let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
    let memory: Vec<f64> = fabric.slots.iter().map(|s| s.memory).collect();
    let mut found = Vec::new();
    for links in [&fabric.inner, &fabric.cards] {
        let Some(solution) = on(largest(links), largest(&memory)) else {
            continue;
        };
        let flat = unfolded(space, solution);
        let rules = (request.recompute, keeping);
        let placed = servers::place(&flat.graph, machine, &flat.partition, fabric, rules);
        found.extend(placed.map(|placed| Found {
            graph: placed.graph,
            partition: placed.partition,
            placement: Some(placed.placement),
            ..flat
        }));
    }
    Some((found, None))
}

fn unfolded(space: &Space, solution: solve::Solution) -> Found {
    let (graph, partition) = space.unfold(solution.partition);
    Found {
        graph,
        partition,
        placement: None,
        judged: None,
        lower_bound: 0.0,
        proved: false,
    }
}

fn judge(found: Found, machine: &Machine) -> Result<OneAtATime, PlanningError> {
    let placement = found.placement.as_ref();
    let evaluation = Evaluation::placed(&found.graph, &found.partition, machine, placement);
    let alone = StageShape {
        replicas: 1,
        depth: 1,
        delay: 0,
    };
    let shapes = vec![alone; found.partition.stages.len()];
    let prediction = predict(&evaluation, PACE, &shapes, machine)?;
    Ok(OneAtATime {
        found,
        evaluation,
        shapes,
        prediction,
    })
}

/// Whether every layer waits for the one before, forward, and for the one behind, backward, and for no other.
fn is_a_line(graph: &LayerGraph) -> bool {
    graph.is_linear()
        && !graph.has_skips()
        && graph.tensors().iter().all(|t| t.gradient_bytes > 0.0)
}

/// The longest way from a layer to those behind it and back, seconds: however they are cut, the layer's worker does not
/// begin the next minibatch before.
fn longest_round_trip(graph: &LayerGraph) -> f64 {
    let mut round_trip = vec![0.0f64; graph.len()];
    let mut tensors: Vec<_> = graph.tensors().iter().collect();
    tensors.sort_by_key(|t| t.producer);
    for (i, layer) in graph.layers().enumerate().rev() {
        while let Some(tensor) = tensors.pop_if(|t| t.producer == i) {
            let behind = tensor.readers.iter().map(|&reader| round_trip[reader]);
            // Without a gradient nothing is waited for.
            if tensor.gradient_bytes > 0.0 {
                round_trip[i] = behind.fold(round_trip[i], f64::max);
            }
        }
        round_trip[i] += layer.forward + layer.backward;
    }
    round_trip.into_iter().fold(0.0, f64::max)
}
