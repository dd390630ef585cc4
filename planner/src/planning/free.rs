//! Plans whose layers are placed freely: a device runs several pieces of the model, in turn.

use super::search::{miss, search};
use super::space::Space;
use super::{Course, PlanningError, Request, Scope, baselines, gap, memory_limit, throughput};
use crate::contract::layer_graph;
use crate::cost::devices::DeviceCosts;
use crate::cost::{Evaluation, Formula, Partition};
use crate::graph::LayerGraph;
use crate::plan::{PLAN_SCHEMA, Plan, Stage};
use crate::profile::{FileRef, Profile};
use crate::schedule::{Holding, ScheduleKind};
use crate::solve::free;
use crate::units::show_time;

/// Makes the plan that places layers freely on the request's devices, without replicas.
///
/// Its stages are runs of layers on one device; no schedule interleaves them yet, so that its period is the bottleneck
/// and not simulated. As many minibatches are counted in flight as there are devices.
///
/// # Errors
/// If no straight pipeline fits the memory, from which the search begins; or if the cluster has servers.
pub fn plan_freely(
    profile: &Profile,
    profile_file: FileRef,
    request: &Request,
) -> Result<Plan, PlanningError> {
    if !request.cluster.servers.is_empty() || request.formula != Formula::Ours {
        return Err(PlanningError::Free);
    }
    let straight = Request {
        scope: Scope::Straight,
        course: Course::default(),
        ..request.clone()
    };
    let graph = layer_graph(profile, &request.together)?;
    let machine = straight.machine(profile);
    let space = Space::new(&graph);
    let start = search(&space, &machine, &straight)?;
    let devices = request.cluster.devices;
    let mut device_of = vec![0; graph.len()];
    for (device, layers) in start.partition.stages.iter().enumerate() {
        device_of[layers.clone()].fill(device);
    }
    let memory = memory_limit(&request.cluster);
    let found = free::solve(&start.graph, &machine, devices, memory, device_of);
    let costs = DeviceCosts::new(&start.graph, &found.device_of, devices, &machine);
    let needed = costs.memory(devices);
    if needed > memory {
        // The straight pipeline holds fewer minibatches in its last stages than are counted here.
        let limits = super::Limits {
            devices,
            most_replicas: 1,
            memory: memory / needed * memory,
            recompute: super::Recompute::Never,
            keeping: straight.keeping(),
        };
        let miss = miss(
            &start.graph,
            &machine,
            &start.partition,
            limits,
            "free placement",
        );
        return Err(miss.map_or(PlanningError::Free, Into::into));
    }
    let (order, pieces) = pieces(&start.graph, &found.device_of);
    let graph = start.graph.reordered(&order);
    let layers: Vec<_> = pieces.iter().map(|(_, layers)| layers.clone()).collect();
    let partition = Partition::new(layers, vec![1; pieces.len()]);
    let evaluation = Evaluation::new(&graph, &partition, &machine);
    let baselines = baselines::baselines(profile, &space, &straight)?;
    let fullest = (0..devices).max_by(|&a, &b| costs.loads[a].total_cmp(&costs.loads[b]));
    let fullest = fullest.unwrap_or(0);
    let period = costs.bottleneck();
    let used: std::collections::BTreeSet<usize> = found.device_of.iter().copied().collect();
    // Devices without layers are not numbered.
    let number = |device: usize| used.range(..device).count();
    let busy: f64 = costs.loads.iter().sum::<f64>() / (used.len() as f64 * period.max(1e-300));
    let bytes = costs.sums.iter().map(|sums| sums.traffic.sent()).sum();
    let full = Holding {
        versions: devices,
        gradients: 1,
        stashes: devices,
    };
    let memory = |device: usize| costs.sums[device].memory_shares(1, full);
    let stages = pieces
        .iter()
        .zip(&evaluation.stages)
        .map(|((device, layers), e)| (layers, e, *device, memory(*device)))
        .map(|(layers, e, device, memory)| Stage {
            layers: layers
                .clone()
                .flat_map(|i| graph.layer(i).members.iter().cloned())
                .collect(),
            replicas: 1,
            depth: devices,
            delay: 0,
            versions: devices,
            recompute: false,
            workers: vec![number(device)],
            servers: Vec::new(),
            kinds: Vec::new(),
            compute_s: e.loads.compute,
            sync_s: 0.0,
            traffic_s: e.loads.traffic,
            sent_bytes: e.sums.traffic.sent(),
            received_bytes: e.sums.traffic.received(),
            parameter_bytes: e.sums.parameters as u64,
            stash_bytes: e.sums.stash as u64,
            memory_bytes: memory.total().ceil() as u64,
            memory,
        });
    let plan = Plan {
        schema: PLAN_SCHEMA.to_owned(),
        model: profile.model.clone(),
        profile: profile_file,
        reading: profile.reading.clone(),
        batch_size: profile.batch_size,
        threads: profile.threads,
        cluster: request.cluster.clone(),
        schedule: ScheduleKind::Interleaved,
        microbatches: None,
        stages: stages.collect(),
        links: evaluation.links.iter().map(|l| l.link()).collect(),
        workers: used.len(),
        bottleneck_s: period,
        bottleneck: format!(
            "worker {} with {} layers in {} pieces: {} on its device and link",
            number(fullest),
            found.device_of.iter().filter(|&&d| d == fullest).count(),
            pieces
                .iter()
                .filter(|(device, _)| *device == fullest)
                .count(),
            show_time(costs.loads[fullest])
        ),
        lower_bound_s: found.lower_bound,
        gap: gap(period, found.lower_bound),
        optimal: period <= found.lower_bound * (1.0 + 1e-9),
        passed_over: None,
        period_s: period,
        stall: Some(format!(
            "not simulated: several pieces share a worker, and no schedule interleaves them yet; one stage for each \
             worker takes {}",
            show_time(baselines.straight.bottleneck_s)
        )),
        fill_s: 0.0,
        drain_s: 0.0,
        bubble_share: (1.0 - busy).max(0.0),
        throughput_samples_per_s: throughput(profile, period),
        bytes_per_minibatch: bytes,
        cards: Vec::new(),
        baselines,
    };
    plan.validate()?;
    Ok(plan)
}

/// Layers in an execution order that stays on a device as long as it can, and the runs on one device.
fn pieces(
    graph: &LayerGraph,
    device_of: &[usize],
) -> (Vec<usize>, Vec<(usize, std::ops::Range<usize>)>) {
    let layers = graph.len();
    let mut missing = vec![0; layers];
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); layers];
    for tensor in graph.tensors() {
        for &reader in &tensor.readers {
            missing[reader] += 1;
            readers[tensor.producer].push(reader);
        }
    }
    let mut ready: std::collections::BTreeSet<usize> =
        (0..layers).filter(|&layer| missing[layer] == 0).collect();
    let mut order = Vec::with_capacity(layers);
    let mut pieces: Vec<(usize, std::ops::Range<usize>)> = Vec::new();
    while let Some(&first) = ready.first() {
        let same = pieces.last().and_then(|(device, _)| {
            let mut here = ready.iter().filter(|&&layer| device_of[layer] == *device);
            here.next().copied()
        });
        let layer = same.unwrap_or(first);
        ready.remove(&layer);
        for &reader in &readers[layer] {
            missing[reader] -= 1;
            if missing[reader] == 0 {
                ready.insert(reader);
            }
        }
        match pieces.last_mut() {
            Some((device, run)) if *device == device_of[layer] => run.end += 1,
            _ => pieces.push((device_of[layer], order.len()..order.len() + 1)),
        }
        order.push(layer);
    }
    (order, pieces)
}
