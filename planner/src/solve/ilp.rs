//! The same search as an integer program, through good_lp.
//!
//! A partition is a path from layer 0 to the end over arcs (start, end, replicas), one binary variable each. For a
//! bottleneck T only arcs whose load is within T exist, and the objective is the number of devices: without memory
//! limits that is a shortest path, whose relaxation is integral, so the solver hardly ever branches. With a limit, an
//! arc admits only so many devices behind it. T itself is found by bisection over the arcs' loads.

use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution as _, SolverModel, Variable, microlp,
    variable,
};

use super::{Problem, Solution, SolverError};
use crate::cost::Partition;

/// A possible stage.
struct Arc {
    start: usize,
    end: usize,
    replicas: usize,
    recompute: bool,
    load: f64,
    /// Devices that may be behind it within its memory.
    most_behind: usize,
}

/// The smallest bottleneck; ties go to the fewest devices, then the fewest stages.
///
/// None if no partition fits the memory.
///
/// # Errors
/// If the back-end gives up.
pub fn solve(problem: &Problem) -> Result<Option<Solution>, SolverError> {
    let arcs = arcs(problem);
    let mut loads: Vec<f64> = arcs.iter().map(|arc| arc.load).collect();
    loads.sort_unstable_by(f64::total_cmp);
    loads.dedup();
    let Some(&largest) = loads.last() else {
        return Ok(None);
    };
    let Some(mut best) = within(problem, &arcs, largest)? else {
        return Ok(None);
    };
    // All thresholds before `low` are impossible, the one at `high` is not.
    let (mut low, mut high) = (0, loads.len() - 1);
    while low < high {
        let middle = usize::midpoint(low, high);
        match within(problem, &arcs, loads[middle])? {
            Some(solution) => {
                best = solution;
                high = middle;
            }
            None => low = middle + 1,
        }
    }
    Ok(Some(best))
}

fn arcs(problem: &Problem) -> Vec<Arc> {
    let mut arcs = Vec::new();
    for start in 0..problem.layers() {
        for (end, _) in problem.table.stages_from(start) {
            for replicas in 1..=problem.most_replicas {
                for (sums, recompute) in problem.ways(start, end) {
                    let fits =
                        |behind| problem.memory_of(&sums, replicas, behind) <= problem.memory;
                    let room = problem.devices - replicas;
                    // Nothing behind the last stage; elsewhere at least one device.
                    let range = if end == problem.layers() {
                        0..=0
                    } else {
                        1..=room
                    };
                    let Some(most_behind) = range.rev().find(|&behind| fits(behind)) else {
                        continue;
                    };
                    arcs.push(Arc {
                        start,
                        end,
                        replicas,
                        recompute,
                        load: problem.load_of(&sums, replicas),
                        most_behind,
                    });
                }
            }
        }
    }
    arcs
}

/// Arcs within the threshold, without those that another one of the same stage replaces.
///
/// Fewer replicas that admit as many devices behind them are never worse: they leave fewer to the stages before. Of as
/// many replicas those that do not recompute come first.
fn useful<'a>(arcs: &'a [Arc], threshold: f64) -> Vec<&'a Arc> {
    let mut kept: Vec<&'a Arc> = Vec::new();
    for arc in arcs.iter().filter(|arc| arc.load <= threshold) {
        let replaced = kept
            .iter()
            .rev()
            .take_while(|k| (k.start, k.end) == (arc.start, arc.end));
        if !replaced
            .into_iter()
            .any(|k| k.most_behind >= arc.most_behind)
        {
            kept.push(arc);
        }
    }
    kept
}

/// The path with the fewest devices, then stages, whose loads stay within the threshold.
fn within(
    problem: &Problem,
    arcs: &[Arc],
    threshold: f64,
) -> Result<Option<Solution>, SolverError> {
    let layers = problem.layers();
    let arcs = useful(arcs, threshold);
    let mut variables = ProblemVariables::new();
    let chosen: Vec<Variable> = arcs
        .iter()
        .map(|_| variables.add(variable().binary()))
        .collect();
    let sum = |filter: &dyn Fn(&Arc) -> bool, weight: &dyn Fn(&Arc) -> f64| -> Expression {
        arcs.iter()
            .zip(&chosen)
            .filter(|(arc, _)| filter(arc))
            .map(|(arc, &x)| weight(arc) * x)
            .sum()
    };
    // Fewer than layers + 1 stages: a device always outweighs them.
    let per_device = (layers + 1) as f64;
    let objective = sum(&|_| true, &|arc| per_device * arc.replicas as f64 + 1.0);
    let devices = |from: usize| sum(&|arc| arc.start >= from, &|arc| arc.replicas as f64);
    let mut model = variables.minimise(objective).using(microlp);
    model = model.with(devices(0).leq(problem.devices as f64));
    for at in 0..layers {
        let out = sum(&|arc| arc.start == at, &|_| 1.0);
        let into = sum(&|arc| arc.end == at, &|_| 1.0);
        model = model.with(if at == 0 { out.eq(1.0) } else { out.eq(into) });
    }
    for cut in 1..layers {
        // If a stage ends here, the devices behind it are what its memory admits; else nothing is asked.
        let slack = |arc: &Arc| problem.devices as f64 - arc.most_behind as f64;
        if arcs
            .iter()
            .any(|arc| arc.end == cut && arc.most_behind + arc.replicas < problem.devices)
        {
            let tightened = sum(&|arc| arc.end == cut, &slack);
            model = model.with((devices(cut) + tightened).leq(problem.devices as f64));
        }
    }
    let solution = match model.solve() {
        Ok(solution) => solution,
        Err(ResolutionError::Infeasible) => return Ok(None),
        Err(other) => return Err(SolverError(other.to_string())),
    };
    let mut path: Vec<&Arc> = arcs
        .iter()
        .zip(&chosen)
        .filter(|(_, x)| solution.value(**x) > 0.5)
        .map(|(arc, _)| *arc)
        .collect();
    path.sort_unstable_by_key(|arc| arc.start);
    let mut partition = Partition::new(
        path.iter().map(|arc| arc.start..arc.end).collect(),
        path.iter().map(|arc| arc.replicas).collect(),
    );
    partition.recompute = path.iter().map(|arc| arc.recompute).collect();
    Ok(Some(Solution {
        bottleneck: path.iter().map(|arc| arc.load).fold(0.0, f64::max),
        partition,
    }))
}
