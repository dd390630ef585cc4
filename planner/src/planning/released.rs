//! Plans under the released optimizer's formula where that knows more than a flat cluster: servers, or activations.

use super::search::{Found, Solver};
use super::space::Space;
use super::{PlanningError, Request, Scope};
use crate::cluster::Cluster;
use crate::cost::release::{Group, Grouped, Hierarchy};
use crate::cost::{Fabric, Formula, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::solve::{Recompute, hierarchy};

/// Whether the search for such plans answers the request.
pub(super) fn knows(request: &Request) -> bool {
    let on_servers = !request.cluster.servers.is_empty();
    match request.formula {
        // The user's own stages need not be groups of whole servers.
        Formula::Release => on_servers && !matches!(request.scope, Scope::Given(_)),
        Formula::ReleaseActivations => true,
        _ => false,
    }
}

/// Refuses to explain such a plan: its neighbours are no plans of whole servers.
pub(super) fn check_explained(request: &Request) -> Result<(), PlanningError> {
    if knows(request) {
        return Err(PlanningError::Formula {
            formula: request.formula,
            rule: "has no plans next to it to compare: leave out --explain",
        });
    }
    Ok(())
}

/// The best plan under the formula.
pub(super) fn search(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<Found, PlanningError> {
    let refuse = |rule| {
        Err(PlanningError::Formula {
            formula: request.formula,
            rule,
        })
    };
    if request.solver == Solver::Ilp {
        return refuse("has a search of its own here: leave out --solver");
    }
    if request.cluster.memory_bytes.is_some() || request.recompute == Recompute::Always {
        return refuse(
            "knows neither a memory limit nor recomputation here: leave out --memory and --recompute, or plan by \
             --model ours",
        );
    }
    if let Scope::Given(_) = request.scope {
        return refuse("scores only plans of its own: leave out --stages, or give --model release");
    }
    let Some(hierarchy) = hierarchy_of(&request.cluster, machine) else {
        return refuse(
            "knows only servers alike with devices alike: make --gpus a multiple of --gpus-per-server, or plan by \
             --model ours",
        );
    };
    let activations = request.formula == Formula::ReleaseActivations;
    let most_replicas = match request.scope {
        Scope::Straight => 1,
        _ => request.cluster.devices,
    };
    let sections = space.sections(activations);
    let best = hierarchy::solve(&sections, &hierarchy, most_replicas);
    let (graph, stages) = space.unfold(best.plan.stages);
    let plan = Grouped {
        stages,
        groups: best.plan.groups,
    };
    let (value, stage) = hierarchy.evaluate(&graph, &plan, activations);
    if (value - best.bottleneck).abs() > 1e-9 * value {
        return Err(PlanningError::Disagreement {
            solver: "hierarchical",
            reported: best.bottleneck,
            evaluated: value,
        });
    }
    let complete = space.is_complete();
    let lower_bound = if complete {
        value
    } else {
        hierarchy.bound(&graph)
    };
    Ok(Found {
        placement: Fabric::new(&request.cluster).map(|fabric| place(&plan, fabric)),
        partition: plan.flatten(),
        graph,
        judged: Some((value, stage)),
        lower_bound,
        proved: complete,
    })
}

/// Seconds per minibatch of one stage on all devices, if the formula knows the cluster.
pub(super) fn data_parallel(
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
) -> Option<f64> {
    let hierarchy = hierarchy_of(&request.cluster, machine).filter(|_| knows(request))?;
    let whole = Grouped {
        stages: Partition::new(
            std::iter::once(0..graph.len()).collect(),
            vec![hierarchy.per_server],
        ),
        groups: vec![Group {
            stages: 0..1,
            servers: hierarchy.servers,
        }],
    };
    Some(hierarchy.evaluate(graph, &whole, false).0)
}

/// The levels of the cluster; none if its servers or devices differ.
fn hierarchy_of(cluster: &Cluster, machine: &Machine) -> Option<Hierarchy> {
    let Some(first) = cluster.servers.first() else {
        return Some(Hierarchy {
            servers: 1,
            per_server: cluster.devices,
            outer_bandwidth: machine.bandwidth,
            inner_bandwidth: machine.bandwidth,
        });
    };
    let [devices] = first.devices.as_slice() else {
        return None;
    };
    let alike = cluster.servers.iter().all(|server| {
        server.devices == first.devices
            && server.bandwidth_bytes_per_s == first.bandwidth_bytes_per_s
            && server.inner_bandwidth_bytes_per_s == first.inner_bandwidth_bytes_per_s
    });
    (alike && devices.speed == 1.0).then_some(Hierarchy {
        servers: cluster.servers.len(),
        per_server: devices.count,
        outer_bandwidth: first.bandwidth_bytes_per_s,
        inner_bandwidth: first.inner_bandwidth_bytes_per_s,
    })
}

/// Each group on the next servers, the replicas of its stages alike on each.
fn place(plan: &Grouped, fabric: Fabric) -> Placement {
    let mut counts = vec![vec![0; fabric.servers()]; plan.stages.stages.len()];
    let mut next = 0;
    for group in &plan.groups {
        for stage in group.stages.clone() {
            counts[stage][next..next + group.servers].fill(plan.stages.replicas[stage]);
        }
        next += group.servers;
    }
    Placement { fabric, counts }
}
