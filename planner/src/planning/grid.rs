//! Plans for every combination of some numbers of devices and some bandwidths.

use serde::Serialize;

use super::{PlanningError, Request, plan};
use crate::plan::{Baseline, Plan};
use crate::profile::Profile;
use crate::units::show_bandwidth;

/// What to go through.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axes {
    /// Numbers of devices, ascending; the request's if empty.
    pub devices: Vec<usize>,
    /// Bytes per second, ascending; the request's if empty.
    pub bandwidths: Vec<f64>,
}

/// What the plan for one combination gives. Nothing but the combination is there where no plan fits the memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Cell {
    /// Devices.
    pub devices: usize,
    /// Goodput of each device's link, bytes per second.
    pub bandwidth_bytes_per_s: f64,
    /// Replicas of the stages, as in `15-1`.
    pub configuration: Option<String>,
    /// Devices that the plan uses.
    pub workers: Option<usize>,
    /// Whether the plan is proved to be the best.
    pub optimal: Option<bool>,
    /// How far it may be above the best, 0.02 for 2 %.
    pub gap: Option<f64>,
    /// Throughput of the plan, samples per second.
    pub plan_samples_per_s: Option<f64>,
    /// Throughput of data parallel; none if it does not fit.
    pub data_parallel_samples_per_s: Option<f64>,
    /// Throughput of model parallel; none if it does not fit.
    pub model_parallel_samples_per_s: Option<f64>,
    /// Throughput of the best pipeline without replicas; none if none fits.
    pub straight_samples_per_s: Option<f64>,
    /// The plan's throughput over that of data parallel.
    pub speedup_over_data_parallel: Option<f64>,
    /// Memory of the plan's fullest worker.
    pub memory_bytes: Option<u64>,
    /// Bytes that the plan moves between workers for each sample.
    pub bytes_per_sample: Option<f64>,
    /// The same of data parallel.
    pub data_parallel_bytes_per_sample: Option<f64>,
}

/// Plans for each combination: devices in the inner, bandwidths in the outer loop.
///
/// # Errors
/// If a solver fails or the request asks for stages of the user's that are none.
pub fn grid(profile: &Profile, request: &Request, axes: &Axes) -> Result<Vec<Cell>, PlanningError> {
    let cluster = &request.cluster;
    let or = |axis: &[usize], own| {
        if axis.is_empty() {
            vec![own]
        } else {
            axis.to_vec()
        }
    };
    let devices = or(&axes.devices, cluster.devices);
    let own = cluster.bandwidth_bytes_per_s;
    let bandwidths = if axes.bandwidths.is_empty() {
        &[own][..]
    } else {
        &axes.bandwidths
    };
    let mut cells = Vec::with_capacity(devices.len() * bandwidths.len());
    for &bandwidth in bandwidths {
        for &devices in &devices {
            let mut request = request.clone();
            let Some(cluster) = cluster.with_devices(devices) else {
                continue;
            };
            if !axes.bandwidths.is_empty() {
                request.cluster = cluster.with_bandwidth(bandwidth);
                request.cluster.local = false;
            } else {
                request.cluster = cluster;
            }
            let found = match plan(profile, profile.model.clone(), &request) {
                Ok(plan) => cell(&plan),
                Err(PlanningError::Infeasible(_)) => Cell::default(),
                Err(other) => return Err(other),
            };
            cells.push(Cell {
                devices,
                bandwidth_bytes_per_s: bandwidth,
                ..found
            });
        }
    }
    Ok(cells)
}

fn cell(plan: &Plan) -> Cell {
    let replicas: Vec<String> = plan.stages.iter().map(|s| s.replicas.to_string()).collect();
    let throughput = |baseline: &Baseline| {
        let fits = baseline.infeasible.is_none();
        fits.then_some(baseline.throughput_samples_per_s)
    };
    let data_parallel = throughput(&plan.baselines.data_parallel);
    let batch = plan.batch_size as f64;
    Cell {
        configuration: Some(replicas.join("-")),
        workers: Some(plan.workers),
        optimal: Some(plan.optimal),
        gap: Some(plan.gap),
        plan_samples_per_s: Some(plan.throughput_samples_per_s),
        data_parallel_samples_per_s: data_parallel,
        model_parallel_samples_per_s: throughput(&plan.baselines.model_parallel),
        straight_samples_per_s: throughput(&plan.baselines.straight),
        speedup_over_data_parallel: data_parallel.map(|d| plan.throughput_samples_per_s / d),
        memory_bytes: plan.stages.iter().map(|s| s.memory_bytes).max(),
        bytes_per_sample: Some(plan.bytes_per_minibatch / batch),
        data_parallel_bytes_per_sample: data_parallel
            .map(|_| plan.baselines.data_parallel.bytes_per_minibatch / batch),
        ..Cell::default()
    }
}

/// The cells as comma-separated values under a line of names; what is not there is empty.
#[must_use]
pub fn csv(cells: &[Cell]) -> String {
    fn text<T: ToString>(value: Option<T>) -> String {
        value.map_or_else(String::new, |v| v.to_string())
    }
    let mut lines = vec![
        "devices,bandwidth,bandwidth_bytes_per_s,configuration,workers,optimal,gap,plan_samples_per_s,\
         data_parallel_samples_per_s,model_parallel_samples_per_s,straight_samples_per_s,\
         speedup_over_data_parallel,memory_bytes,bytes_per_sample,data_parallel_bytes_per_sample"
            .to_owned(),
    ];
    lines.extend(cells.iter().map(|c| {
        [
            c.devices.to_string(),
            show_bandwidth(c.bandwidth_bytes_per_s),
            c.bandwidth_bytes_per_s.to_string(),
            text(c.configuration.as_ref()),
            text(c.workers),
            text(c.optimal),
            text(c.gap),
            text(c.plan_samples_per_s),
            text(c.data_parallel_samples_per_s),
            text(c.model_parallel_samples_per_s),
            text(c.straight_samples_per_s),
            text(c.speedup_over_data_parallel),
            text(c.memory_bytes),
            text(c.bytes_per_sample),
            text(c.data_parallel_bytes_per_sample),
        ]
        .join(",")
    }));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Formula;
    use crate::plan::Cluster;
    use crate::planning::Course;
    use crate::planning::{Recompute, Scope, Solver};
    use crate::testing;

    fn request(memory_bytes: Option<u64>) -> Request {
        Request {
            cluster: Cluster {
                devices: 2,
                bandwidth_bytes_per_s: 1e6,
                latency_s: 0.0,
                local: false,
                memory_bytes,
                servers: Vec::new(),
            },
            solver: Solver::Dp,
            formula: Formula::Ours,
            scope: Scope::All,
            recompute: Recompute::Auto,
            together: Vec::new(),
            course: Course::default(),
        }
    }

    #[test]
    fn every_combination_is_planned_once() {
        let profile = testing::chain(&[30.0, 30.0], &[1000, 9_000_000], &[1000]);
        let axes = Axes {
            devices: vec![1, 2],
            bandwidths: vec![1e6, 1e9],
        };
        let cells = grid(&profile, &request(None), &axes).unwrap();
        let keys: Vec<_> = cells
            .iter()
            .map(|c| (c.devices, c.bandwidth_bytes_per_s))
            .collect();
        assert_eq!(keys, [(1, 1e6), (2, 1e6), (1, 1e9), (2, 1e9)]);
        assert_eq!(cells[0].speedup_over_data_parallel, Some(1.0));
        // Nine megabytes do not pass a slow link each step.
        assert!(cells[1].speedup_over_data_parallel > Some(2.0));
        let csv = csv(&cells);
        assert_eq!(csv.lines().count(), 5);
        let columns = |line: &str| line.split(',').count();
        assert!(csv.lines().all(|l| columns(l) == 15));
    }

    #[test]
    fn what_does_not_fit_is_empty() {
        let profile = testing::chain(&[30.0, 30.0], &[1000, 1000], &[10]);
        let axes = Axes {
            devices: vec![1],
            ..Axes::default()
        };
        let cells = grid(&profile, &request(Some(10)), &axes).unwrap();
        assert_eq!(cells[0].plan_samples_per_s, None);
        assert!(csv(&cells).ends_with(&",".repeat(12)) || csv(&cells).ends_with(",,\n"));
    }
}
