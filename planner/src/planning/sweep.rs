//! Throughput over the number of workers: the plan against data parallel.

use super::baselines::data_parallel_seconds;
use super::space::Space;
use super::{PlanningError, Request, Scope, Solver, kinds, memory_limit, throughput};
use crate::contract::layer_graph;
use crate::cost::data_parallel;
use crate::profile::Profile;

/// Samples per second with some number of devices.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// Devices.
    pub devices: usize,
    /// The best plan's; none if nothing fits the memory.
    pub plan: Option<f64>,
    /// Data parallel's; none if it does not fit the memory.
    pub data_parallel: Option<f64>,
    /// One device's, without any limit, times the devices.
    pub ideal: f64,
}

/// No more numbers of devices than this are tried.
const MOST_POINTS: usize = 24;

/// Plans for 1 to `request.cluster.devices` devices; stages written by hand are left aside.
///
/// # Errors
/// If a solver fails; a number of devices on which nothing fits is a point without a plan.
pub fn sweep(profile: &Profile, request: &Request) -> Result<Vec<Point>, PlanningError> {
    let graph = layer_graph(profile, &request.together)?;
    let machine = request.machine(profile);
    let memory = memory_limit(&request.cluster);
    let single = throughput(profile, data_parallel::step_seconds(&graph, 1, &machine));
    let space = Space::new(&graph);
    let mut points = Vec::new();
    for devices in counts(request.cluster.devices) {
        let mut request = request.clone();
        let Some(cluster) = request.cluster.with_devices(devices) else {
            continue;
        };
        request.cluster = cluster;
        request.solver = Solver::Dp;
        if let Scope::Given(_) = request.scope {
            request.scope = Scope::All;
        }
        let plan = match kinds::find(&space, &machine, &request) {
            Ok(answer) => {
                let prediction = &answer.judged.choice.prediction;
                Some(throughput(profile, prediction.period))
            }
            Err(PlanningError::Infeasible(_)) => None,
            Err(other) => return Err(other),
        };
        let step = data_parallel_seconds(&graph, &machine, &request.cluster) / devices as f64;
        let fits = data_parallel::memory(&graph, devices) <= memory;
        points.push(Point {
            devices,
            plan,
            data_parallel: fits.then(|| throughput(profile, step)),
            ideal: single * devices as f64,
        });
    }
    Ok(points)
}

/// 1 to `most`, thinned out evenly.
fn counts(most: usize) -> Vec<usize> {
    let points = most.min(MOST_POINTS);
    let mut counts: Vec<usize> = (1..=points)
        .map(|i| (i * most).div_ceil(points).max(1))
        .collect();
    counts.insert(0, 1);
    counts.dedup();
    counts
}

#[cfg(test)]
mod tests {
    use super::counts;

    #[test]
    fn counts_begin_at_one_and_end_at_all() {
        assert_eq!(counts(1), [1]);
        assert_eq!(counts(4), [1, 2, 3, 4]);
        let many = counts(1000);
        assert_eq!((many[0], many[many.len() - 1]), (1, 1000));
        assert!(many.len() <= 26 && many.is_sorted());
    }
}
