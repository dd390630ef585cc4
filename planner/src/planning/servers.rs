//! The search on clusters of servers, and what stands in for it.

use std::collections::HashMap;

use super::search::{Found, Infeasible, search, show_limit};
use super::space::Space;
use super::{PlanningError, Request, Scope, hand};
use crate::cluster::Slot;
use crate::cost::{Evaluation, Fabric, Formula, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::plan::Cluster;
use crate::schedule::{Keeping, noam};
use crate::solve::servers::{self, Places, Rules, thin_cuts};
use crate::solve::{Downsets, Limits, Recompute};

/// So many places are searched at most; all pairs of them are tried.
const MOST_PLACES: usize = 64;

/// The best plan on the servers.
pub(super) fn search_servers(
    space: &Space,
    machine: &Machine,
    request: &Request,
    fabric: &Fabric,
) -> Result<Found, PlanningError> {
    if request.formula != Formula::Ours {
        return packed(space, machine, request, fabric);
    }
    if let Some(bandwidth) = alone(fabric)
        && !matches!(request.scope, Scope::Given(_))
    {
        let machine = Machine {
            bandwidth,
            ..*machine
        };
        return packed(space, &machine, request, fabric);
    }
    let graph = space.graph;
    let relaxed = relaxation(space, machine, request, fabric)?;
    let devices = request.cluster.devices;
    let most_replicas = match request.scope {
        Scope::Straight => 1,
        Scope::All | Scope::Given(_) => devices,
    };
    if let Scope::Given(specs) = &request.scope {
        let partition = hand::partition(graph, specs, devices)?;
        let found = place(
            graph,
            machine,
            &partition,
            fabric,
            (request.recompute, request.keeping()),
        );
        let Some(placed) = found else {
            return Err(nearest(graph, machine, request, fabric, &partition).into());
        };
        return Ok(conclude(placed, relaxed.lower_bound));
    }
    let packed = packed_relaxation(&relaxed, machine, fabric, request.keeping());
    let packed = match packed {
        Some(packed) if packed.proved => return Ok(packed),
        other => other,
    };
    let wanted = (&relaxed.graph, &relaxed.partition);
    let found = search_places(
        space,
        machine,
        fabric,
        (most_replicas, request.recompute, request.keeping()),
        relaxed.lower_bound,
        Some(wanted),
    );
    let value = |found: &Found| {
        let placement = found.placement.as_ref();
        Evaluation::placed(&found.graph, &found.partition, machine, placement).bottleneck
    };
    // What was searched may leave out the one thing that is simple.
    let best = [found, packed].into_iter().flatten();
    let best = best.min_by(|a, b| value(a).total_cmp(&value(b)));
    best.ok_or_else(|| nearest(&relaxed.graph, machine, request, fabric, &relaxed.partition).into())
}

/// The best plan on devices alike, each on a link of its own, that counts every tensor as often as it is sent.
///
/// That is the plan for one server whose card is never full.
pub(super) fn search_alike(
    space: &Space,
    machine: &Machine,
    limits: Limits,
    bound: f64,
) -> Option<Found> {
    let fabric = Fabric {
        slots: vec![Slot {
            server: 0,
            count: limits.devices,
            speed: 1.0,
            memory: limits.memory,
        }],
        names: vec![String::new()],
        cards: vec![f64::INFINITY],
        inner: vec![machine.bandwidth],
    };
    let found = search_places(
        space,
        machine,
        &fabric,
        (limits.most_replicas, limits.recompute, limits.keeping),
        bound,
        None,
    )?;
    Some(Found {
        placement: None,
        ..found
    })
}

/// The best plan between the downsets of the graph, where they are few, else between cuts of one or two execution
/// orders: that in which a plan for other devices was found, whose cuts are tried, and the graph's own.
fn search_places(
    space: &Space,
    machine: &Machine,
    fabric: &Fabric,
    (most_replicas, recompute, keeping): (usize, Recompute, Keeping),
    bound: f64,
    wanted: Option<(&LayerGraph, &Partition)>,
) -> Option<Found> {
    let rules = Rules {
        most_replicas,
        given: None,
        recompute,
        keeping,
    };
    let solve = |graph: &LayerGraph, places: &Places| {
        servers::solve(graph, places, fabric, machine, rules, bound)
    };
    let few = |downsets: &&Downsets| downsets.count() <= MOST_PLACES;
    if let Some(downsets) = space.downsets.as_ref().filter(few) {
        // Every plan is a chain of these: what is proved of them is proved of all.
        let placed = solve(space.graph, &Places::new(space.graph, downsets.sets()))?;
        let bound = placed.lower_bound.max(bound);
        return Some(conclude(placed, bound));
    }
    let mut orders = Vec::new();
    if let Some((graph, partition)) = wanted {
        let ends = partition.stages.iter().map(|stage| stage.end);
        orders.push((graph, ends.collect()));
    }
    if wanted.is_none_or(|(graph, _)| !same_order(space.graph, graph)) {
        orders.push((space.graph, Vec::new()));
    }
    let found = orders.into_iter().filter_map(|(graph, wanted)| {
        let cuts = thin_cuts(graph, &wanted, MOST_PLACES);
        let all = graph.is_linear() && cuts.len() > graph.len();
        let placed = solve(graph, &Places::of_cuts(graph, &cuts))?;
        let bound = if all {
            placed.lower_bound.max(bound)
        } else {
            bound
        };
        Some((settle(placed, machine, keeping), bound))
    });
    let best = found.min_by(|(a, _), (b, _)| a.bottleneck.total_cmp(&b.bottleneck));
    best.map(|(placed, bound)| conclude(placed, bound))
}

/// The bandwidth of every device's link if all are alike and each is alone in its server: then nothing is shared.
fn alone(fabric: &Fabric) -> Option<f64> {
    let first = &fabric.slots[0];
    let alike = |slot: &Slot| slot.count == 1 && slot.speed == 1.0 && slot.memory == first.memory;
    let one_each = fabric.slots.len() == fabric.servers() && fabric.slots.iter().all(alike);
    let same = fabric.classes().iter().all(|&class| class == 0);
    (one_each && same).then(|| fabric.cards[0].min(fabric.inner[0]))
}

/// The best places for the replicas of a partition; none if they do not fit.
pub(super) fn place(
    graph: &LayerGraph,
    machine: &Machine,
    partition: &Partition,
    fabric: &Fabric,
    (recompute, keeping): (Recompute, Keeping),
) -> Option<servers::Placed> {
    let ends = partition.stages.iter().map(|stage| stage.end);
    let cuts: Vec<usize> = std::iter::once(0).chain(ends).collect();
    let rules = Rules {
        most_replicas: partition.workers(),
        given: Some(&partition.replicas),
        recompute,
        keeping,
    };
    let places = Places::of_cuts(graph, &cuts);
    servers::solve(graph, &places, fabric, machine, rules, 0.0)
}

/// The plan for devices that are all like the best ones and share no network card: none on the servers is faster.
fn relaxation(
    space: &Space,
    machine: &Machine,
    request: &Request,
    fabric: &Fabric,
) -> Result<Found, PlanningError> {
    let slots = &fabric.slots;
    let fastest = slots.iter().map(|s| s.speed).fold(0.0, f64::max);
    let memory = slots.iter().map(|s| s.memory).fold(0.0, f64::max);
    let bandwidth = fabric.inner.iter().copied().fold(0.0, f64::max);
    let cluster = Cluster {
        memory_bytes: (memory < f64::INFINITY).then_some(memory as u64),
        latency_s: request.cluster.latency_s,
        ..Cluster::flat(request.cluster.devices, bandwidth)
    };
    let mut flat = Request {
        cluster,
        ..request.clone()
    };
    if let Scope::Given(_) = flat.scope {
        flat.scope = Scope::All;
    }
    let machine = Machine {
        bandwidth,
        message_s_per_byte: machine.message_s_per_byte / fastest,
        reduce_s_per_byte: machine.reduce_s_per_byte / fastest,
        ..*machine
    };
    let graph = space.graph;
    let mut found = if fastest == 1.0 {
        search(space, &machine, &flat)?
    } else {
        search(&Space::new(&graph.at_speed(fastest)), &machine, &flat)?
    };
    let place: HashMap<&str, usize> = (0..graph.len())
        .map(|layer| (graph.layer(layer).name.as_str(), layer))
        .collect();
    let order: Vec<usize> = found
        .graph
        .layers()
        .map(|l| place[l.name.as_str()])
        .collect();
    found.graph = graph.reordered(&order);
    Ok(found)
}

/// The plan for devices that share no network card, packed onto the servers. If no card or slow device holds it up there,
/// nothing is faster. None if it does not fit the memory of the devices that it comes to.
fn packed_relaxation(
    relaxed: &Found,
    machine: &Machine,
    fabric: &Fabric,
    keeping: Keeping,
) -> Option<Found> {
    let placement = pack(&relaxed.partition, fabric);
    let evaluation = Evaluation::placed(
        &relaxed.graph,
        &relaxed.partition,
        machine,
        Some(&placement),
    );
    let depths = noam(&relaxed.partition.replicas);
    let fits = evaluation.stages.iter().zip(depths).all(|(s, depth)| {
        let holding = keeping.holding(s.replicas, depth, 0);
        s.sums.memory_of(s.replicas, holding) <= s.worst.memory
    });
    let bound = relaxed.lower_bound;
    fits.then(|| Found {
        graph: relaxed.graph.clone(),
        partition: relaxed.partition.clone(),
        placement: Some(placement),
        judged: None,
        lower_bound: bound.min(evaluation.bottleneck),
        proved: evaluation.bottleneck <= bound * (1.0 + 1e-9),
    })
}

/// Under the formula of another planner, which knows neither servers nor their network cards: its own plan for devices
/// alike, each on a link as fast as the slowest card, packed onto the servers one stage behind the other.
fn packed(
    space: &Space,
    machine: &Machine,
    request: &Request,
    fabric: &Fabric,
) -> Result<Found, PlanningError> {
    let mut flat = request.clone();
    flat.cluster.servers.clear();
    let mut found = search(space, machine, &flat)?;
    found.placement = Some(pack(&found.partition, fabric));
    Ok(found)
}

/// Stages one behind the other over the devices.
pub(super) fn pack(partition: &Partition, fabric: &Fabric) -> Placement {
    let mut free: Vec<usize> = fabric.slots.iter().map(|slot| slot.count).collect();
    let counts = partition.replicas.iter().map(|&replicas| {
        let mut left = replicas;
        let counts = free.iter_mut().map(|free| {
            let taken = left.min(*free);
            *free -= taken;
            left -= taken;
            taken
        });
        counts.collect()
    });
    Placement {
        counts: counts.collect(),
        fabric: fabric.clone(),
    }
}

fn same_order(a: &LayerGraph, b: &LayerGraph) -> bool {
    a.layers().zip(b.layers()).all(|(a, b)| a.name == b.name)
}

/// Moves each boundary to where the bottleneck is least, over all layers and not only the places that were searched.
fn settle(mut placed: servers::Placed, machine: &Machine, keeping: Keeping) -> servers::Placed {
    let evaluate = |graph: &LayerGraph, partition: &Partition, placement: &Placement| {
        let evaluation = Evaluation::placed(graph, partition, machine, Some(placement));
        let depths = noam(&partition.replicas);
        let fits = evaluation.stages.iter().zip(depths).all(|(s, depth)| {
            let holding = keeping.holding(s.replicas, depth, 0);
            s.sums.memory_of(s.replicas, holding) <= s.worst.memory
        });
        fits.then_some(evaluation.bottleneck)
    };
    // Each round is work for every layer; a few settle it.
    for _ in 0..3 {
        let before = placed.bottleneck;
        for boundary in 1..placed.partition.stages.len() {
            let (first, last) = (
                placed.partition.stages[boundary - 1].start + 1,
                placed.partition.stages[boundary].end,
            );
            for cut in first..last {
                let mut other = placed.partition.clone();
                other.stages[boundary - 1].end = cut;
                other.stages[boundary].start = cut;
                let value = evaluate(&placed.graph, &other, &placed.placement);
                if let Some(value) = value
                    && value < placed.bottleneck * (1.0 - 1e-9)
                {
                    placed.partition = other;
                    placed.bottleneck = value;
                }
            }
        }
        if placed.bottleneck >= before {
            break;
        }
    }
    placed
}

fn conclude(placed: servers::Placed, lower_bound: f64) -> Found {
    Found {
        proved: placed.bottleneck <= lower_bound * (1.0 + 1e-9),
        lower_bound: lower_bound.min(placed.bottleneck),
        graph: placed.graph,
        partition: placed.partition,
        placement: Some(placed.placement),
        judged: None,
    }
}

/// The worker that misses its memory by most when the stages are packed onto the servers.
fn nearest(
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
    fabric: &Fabric,
    partition: &Partition,
) -> Infeasible {
    let mut unlimited = fabric.clone();
    for slot in &mut unlimited.slots {
        slot.memory = f64::INFINITY;
    }
    let placement = place(
        graph,
        machine,
        partition,
        &unlimited,
        (Recompute::Never, request.keeping()),
    )
    .map_or_else(|| pack(partition, &unlimited), |placed| placed.placement);
    let placement = Placement {
        fabric: fabric.clone(),
        ..placement
    };
    let evaluation = Evaluation::placed(graph, partition, machine, Some(&placement));
    let needs = evaluation.stages.iter().zip(noam(&partition.replicas));
    let needs = needs.map(|(s, depth)| {
        let holding = request.keeping().holding(s.replicas, depth, 0);
        (s.sums.memory_of(s.replicas, holding), s.worst.memory, depth)
    });
    let worst = needs.enumerate().max_by(|(_, a), (_, b)| {
        let over = |(needed, limit, _): &(f64, f64, usize)| needed / limit;
        over(a).total_cmp(&over(b))
    });
    let (stage, (needed, limit, depth)) = worst.unwrap_or((0, (0.0, 0.0, 1)));
    let layers = partition.stages[stage].clone();
    Infeasible {
        what: match request.scope {
            Scope::All => "plan",
            Scope::Straight => "straight pipeline",
            Scope::Given(_) => "plan with these stages",
        },
        limit: show_limit(limit),
        devices: request.cluster.devices,
        needed: show_limit(needed),
        stage,
        first: graph.layer(layers.start).name.clone(),
        last: graph.layer(layers.end - 1).name.clone(),
        replicas: partition.replicas[stage],
        depth,
        may_recompute: request.recompute != Recompute::Never,
    }
}
