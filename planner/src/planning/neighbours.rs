//! What surrounds a plan: its fullest resources, the plans next to it, and what more hardware would bring.

use serde::Serialize;

use super::space::Space;
use super::{
    PlanningError, Request, Scope, Solver, explain, judge, kinds, memory_limit, planned, released,
    search, servers, throughput,
};
use crate::cost::{Evaluation, Fabric, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::plan::{Cluster, Plan};
use crate::profile::Profile;
use crate::solve::Limits;

/// Why a plan is the best, and what would make it better.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The fullest devices and links, fullest first.
    pub resources: Vec<Resource>,
    /// The best of the plans that differ in one boundary, one replica or one pair of merged stages.
    pub runner_ups: Vec<RunnerUp>,
    /// What a larger cluster would give.
    pub what_if: Vec<WhatIf>,
}

/// A device or link and how long it is taken.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Resource {
    /// In words.
    pub name: String,
    /// Seconds per minibatch.
    pub seconds: f64,
}

/// A plan that was not chosen.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunnerUp {
    /// Replicas of the stages, as in `15-1`.
    pub configuration: String,
    /// First layers of the stages behind the first one.
    pub cuts: Vec<String>,
    /// Seconds per minibatch on its fullest resource, as the request's formula counts it.
    pub bottleneck_s: f64,
    /// Simulated seconds per minibatch.
    pub period_s: f64,
}

/// The best plan on another cluster.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WhatIf {
    /// What is different.
    pub change: &'static str,
    /// Replicas of the stages.
    pub configuration: String,
    /// Samples per second.
    pub throughput_samples_per_s: f64,
    /// That over the plan's, 1.1 for 10 % more.
    pub speedup: f64,
}

/// No list is longer.
const MOST: usize = 4;

/// Looks around the plan, which was made for this profile and request.
///
/// # Errors
/// If a solver fails.
pub fn explanation(
    profile: &Profile,
    request: &Request,
    plan: &Plan,
) -> Result<Explanation, PlanningError> {
    released::check_explained(request)?;
    let (graph, chosen) = planned(profile, request, plan)?;
    let machine = Machine {
        round: plan.microbatches.map(|round| round as f64),
        ..request.machine(profile)
    };
    Ok(Explanation {
        resources: resources(&graph, &machine, &chosen, plan.placement()?.as_ref()),
        runner_ups: runner_ups(&graph, &machine, request, &chosen)?,
        what_if: what_if(profile, &graph, request, plan)?,
    })
}

impl Partition {
    pub(super) fn configuration(&self) -> String {
        let replicas: Vec<String> = self.replicas.iter().map(ToString::to_string).collect();
        replicas.join("-")
    }
}

fn resources(
    graph: &LayerGraph,
    machine: &Machine,
    partition: &Partition,
    placement: Option<&Placement>,
) -> Vec<Resource> {
    let evaluation = Evaluation::placed(graph, partition, machine, placement);
    let cards = evaluation.cards.iter().map(|card| Resource {
        name: explain::card_name(&evaluation, card),
        seconds: card.seconds,
    });
    let mut all: Vec<Resource> = cards.collect();
    for (stage, e) in evaluation.stages.iter().enumerate() {
        let place = explain::place(graph, e, stage);
        all.push(Resource {
            name: format!("device of {place}"),
            seconds: e.loads.device(),
        });
        if machine.bandwidth < super::LOCAL_BANDWIDTH {
            all.push(Resource {
                name: format!("link of {place}"),
                seconds: e.loads.network(),
            });
        }
    }
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    all.truncate(MOST);
    all
}

fn runner_ups(
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
    chosen: &Partition,
) -> Result<Vec<RunnerUp>, PlanningError> {
    let near = around(graph, machine, request, chosen);
    near.into_iter()
        .take(MOST)
        .map(|near| {
            let placement = near.placement.as_ref();
            let judged = judge(graph, machine, &near.partition, placement, request)?;
            let cuts = near.partition.stages[1..].iter();
            Ok(RunnerUp {
                configuration: near.partition.configuration(),
                cuts: cuts.map(|s| graph.layer(s.start).name.clone()).collect(),
                bottleneck_s: near.bottleneck,
                period_s: judged.choice.prediction.period,
            })
        })
        .collect()
}

/// A plan one step away from another one.
pub(super) struct Near {
    /// Seconds per minibatch on its fullest resource, as the request's formula counts it.
    pub bottleneck: f64,
    pub partition: Partition,
    pub placement: Option<Placement>,
}

/// The plans one step away that fit, the smallest bottleneck first.
pub(super) fn around(
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
    chosen: &Partition,
) -> Vec<Near> {
    let straight = request.scope == Scope::Straight;
    let limits = Limits {
        devices: request.cluster.devices,
        most_replicas: if straight { 1 } else { request.cluster.devices },
        memory: memory_limit(&request.cluster),
        recompute: request.recompute,
        keeping: request.keeping(),
    };
    let fabric = Fabric::new(&request.cluster);
    let mut near: Vec<Near> = neighbours(graph, chosen)
        .into_iter()
        .filter(|p| p.replicas.iter().all(|&r| r <= limits.most_replicas))
        .filter_map(|p| {
            let (partition, placement) = match &fabric {
                Some(fabric) => {
                    let keeping = (request.recompute, request.keeping());
                    let placed = servers::place(graph, machine, &p, fabric, keeping)?;
                    (placed.partition, Some(placed.placement))
                }
                None => (search::recompute(graph, machine, &p, limits), None),
            };
            if fabric.is_none()
                && search::miss(graph, machine, &partition, limits, "plan").is_some()
            {
                return None;
            }
            let evaluation = Evaluation::placed(graph, &partition, machine, placement.as_ref());
            Some(Near {
                bottleneck: evaluation.objective(request.formula, machine),
                partition,
                placement,
            })
        })
        .collect();
    near.sort_by(|a, b| a.bottleneck.total_cmp(&b.bottleneck));
    near
}

/// Partitions one step away: a boundary moved by a layer, a replica handed to a neighbour or given up, two stages
/// merged, a replicated stage cut in two where the work suits the replicas of each. Each uses no more devices.
fn neighbours(graph: &LayerGraph, chosen: &Partition) -> Vec<Partition> {
    let mut near = Vec::new();
    let stages = chosen.stages.len();
    for i in 0..stages {
        if chosen.replicas[i] > 1 {
            let mut fewer = chosen.clone();
            fewer.replicas[i] -= 1;
            for other in [i.checked_sub(1), (i + 1 < stages).then_some(i + 1)] {
                let mut moved = fewer.clone();
                let Some(other) = other else { continue };
                moved.replicas[other] += 1;
                near.push(moved);
            }
            near.push(fewer);
            let all = chosen.replicas[i];
            let mut shares = vec![1, all / 2, all - 1];
            shares.dedup();
            near.extend(
                shares
                    .into_iter()
                    .filter_map(|share| cut(graph, chosen, i, share)),
            );
        }
        if i + 1 == stages {
            continue;
        }
        let (left, right) = (chosen.stages[i].clone(), chosen.stages[i + 1].clone());
        for cut in [left.end - 1, left.end + 1] {
            if left.start < cut && cut < right.end {
                let mut moved = chosen.clone();
                moved.stages[i].end = cut;
                moved.stages[i + 1].start = cut;
                near.push(moved);
            }
        }
        let mut merged = chosen.clone();
        merged.stages[i].end = right.end;
        merged.replicas[i] += merged.replicas.remove(i + 1);
        merged.stages.remove(i + 1);
        merged.recompute.remove(i + 1);
        near.push(merged);
    }
    near
}

/// The stage cut in two, with `share` of its replicas for the first part, after the layer up to which about that share
/// of its work is done; none if it has one layer.
fn cut(graph: &LayerGraph, chosen: &Partition, stage: usize, share: usize) -> Option<Partition> {
    let layers = chosen.stages[stage].clone();
    let work = |layer: usize| graph.layer(layer).forward + graph.layer(layer).backward;
    let wanted =
        layers.clone().map(work).sum::<f64>() * share as f64 / chosen.replicas[stage] as f64;
    let mut done = 0.0;
    let ends = layers.clone().map(|layer| {
        done += work(layer);
        (layer + 1, (done - wanted).abs())
    });
    let inside = ends.filter(|(end, _)| *end < layers.end);
    let (middle, _) = inside.min_by(|a, b| a.1.total_cmp(&b.1))?;
    let mut parts = chosen.clone();
    parts.stages[stage].end = middle;
    parts.stages.insert(stage + 1, middle..layers.end);
    parts.replicas[stage] = share;
    parts
        .replicas
        .insert(stage + 1, chosen.replicas[stage] - share);
    parts.recompute.insert(stage + 1, chosen.recompute[stage]);
    Some(parts)
}

fn what_if(
    profile: &Profile,
    graph: &LayerGraph,
    request: &Request,
    plan: &Plan,
) -> Result<Vec<WhatIf>, PlanningError> {
    let mut free = request.clone();
    free.solver = Solver::Dp;
    if let Scope::Given(_) = free.scope {
        free.scope = Scope::All;
    }
    let mut changes = Vec::new();
    let mut change = |what, cluster: Option<Cluster>| {
        changes.extend(cluster.map(|cluster| {
            let free = free.clone();
            (what, Request { cluster, ..free })
        }));
    };
    let cluster = &request.cluster;
    change("one more device", cluster.with_devices(cluster.devices + 1));
    if !cluster.local {
        let faster = cluster.with_bandwidth(2.0 * cluster.bandwidth_bytes_per_s);
        change("twice the bandwidth", Some(faster));
    }
    if let Some(memory) = cluster.memory_bytes {
        let larger = cluster.with_memory(Some(memory.saturating_mul(2)));
        change("twice the memory", Some(larger));
    }
    let space = Space::new(graph);
    changes
        .into_iter()
        .filter_map(|(change, request)| {
            let machine = request.machine(profile);
            let (found, judged) = match kinds::find(&space, &machine, &request) {
                Ok(answer) => (answer.found, answer.judged),
                // What was found for this cluster may have been more luck than the search has on a larger one.
                Err(PlanningError::Infeasible(_)) => return None,
                Err(other) => return Some(Err(other)),
            };
            let samples = throughput(profile, judged.choice.prediction.period);
            Some(Ok(WhatIf {
                change,
                configuration: found.partition.configuration(),
                throughput_samples_per_s: samples,
                speedup: samples / plan.throughput_samples_per_s,
            }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Formula;
    use crate::plan::Cluster;
    use crate::planning::Course;
    use crate::solve::Recompute;
    use crate::testing;

    #[test]
    fn neighbours_are_partitions_of_the_same_layers_on_no_more_devices() {
        let chosen = Partition::new(vec![0..2, 2..3, 3..6], vec![2, 1, 3]);
        let graph = LayerGraph::new(&testing::chain(&[1.0; 6], &[0; 6], &[1; 5]));
        let near = neighbours(&graph, &chosen);
        // Stage 0: one moved or given up; stage 2 the same; the boundaries 1 (left, not right) and 2 (right); merged;
        // stage 0 cut into one and one, stage 2 into one and two or two and one.
        assert_eq!(near.len(), 2 + 2 + 2 + 2 + 3);
        let cut = Partition::new(vec![0..2, 2..3, 3..5, 5..6], vec![2, 1, 2, 1]);
        assert!(near.contains(&cut));
        for partition in near {
            assert_ne!(partition, chosen);
            assert!(partition.workers() <= chosen.workers());
            let mut next = 0;
            for (stage, replicas) in partition.stages.iter().zip(&partition.replicas) {
                assert!(stage.start == next && stage.start < stage.end && *replicas > 0);
                next = stage.end;
            }
            assert_eq!(next, 6);
        }
    }

    #[test]
    fn no_runner_up_beats_an_optimal_plan_and_hardware_helps() {
        let profile = testing::chain(&[30.0, 20.0, 40.0], &[1000, 500_000, 10], &[2000, 2000]);
        let request = Request {
            cluster: Cluster {
                devices: 3,
                bandwidth_bytes_per_s: 1e6,
                latency_s: 0.0,
                local: false,
                memory_bytes: None,
                servers: Vec::new(),
            },
            solver: Solver::Dp,
            formula: Formula::Ours,
            scope: Scope::All,
            recompute: Recompute::Auto,
            together: Vec::new(),
            course: Course::default(),
        };
        let plan = super::super::plan(&profile, profile.model.clone(), &request).unwrap();
        assert!(plan.optimal);
        let explanation = explanation(&profile, &request, &plan).unwrap();
        assert_eq!(explanation.resources[0].seconds, plan.bottleneck_s);
        for runner_up in &explanation.runner_ups {
            assert!(runner_up.bottleneck_s >= plan.bottleneck_s);
        }
        let changes: Vec<_> = explanation.what_if.iter().map(|w| w.change).collect();
        assert_eq!(changes, ["one more device", "twice the bandwidth"]);
        assert!(explanation.what_if[0].speedup > 1.0);
    }
}
