//! Asks a solver, checks its answer, and says what is proved.

use super::{PlanningError, Request, Scope, hand, memory_limit};
use crate::cost::interval::SkipCount;
use crate::cost::{Evaluation, Formula, Machine, Partition};
use crate::graph::LayerGraph;
use crate::schedule::noam;
use crate::solve::{self, Limits, Problem, Solution, SolverError};

/// Who searches for the best partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Solver {
    /// The dynamic program.
    Dp,
    /// The integer program.
    Ilp,
}

impl Solver {
    fn name(self) -> &'static str {
        match self {
            Self::Dp => "dp",
            Self::Ilp => "ilp",
        }
    }

    pub(super) fn solve(self, problem: &Problem) -> Result<Option<Solution>, SolverError> {
        match self {
            Self::Dp => Ok(solve::dynamic_program(problem)),
            Self::Ilp => solve::ilp(problem),
        }
    }
}

/// No plan fits the memory; this is the one that comes nearest.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "no {what} fits {limit} per worker on {devices} devices: the nearest needs {needed} for stage {stage} \
     ({first} .. {last}, x{replicas}, {depth} in flight); give --memory {needed} or more, more --gpus, \
     or profile with a smaller batch"
)]
pub struct Infeasible {
    /// `plan` or the scope that was searched.
    pub what: &'static str,
    /// Memory of a worker.
    pub limit: String,
    /// Devices.
    pub devices: usize,
    /// What the fullest worker needs.
    pub needed: String,
    /// Its stage.
    pub stage: usize,
    /// First layer of that stage.
    pub first: String,
    /// Last layer of that stage.
    pub last: String,
    /// Replicas of that stage.
    pub replicas: usize,
    /// Minibatches in flight per replica.
    pub depth: usize,
}

/// A partition and what is proved about it.
pub(super) struct Found {
    pub partition: Partition,
    /// No plan has a smaller bottleneck.
    pub lower_bound: f64,
    /// Whether this partition's bottleneck is that bound.
    pub proved: bool,
}

pub(super) fn search(
    graph: &LayerGraph,
    machine: &Machine,
    request: &Request,
) -> Result<Found, PlanningError> {
    let limits = Limits {
        devices: request.cluster.devices,
        most_replicas: match request.scope {
            Scope::Straight => 1,
            Scope::All | Scope::Given(_) => request.cluster.devices,
        },
        memory: memory_limit(&request.cluster),
    };
    let problem = |skips| Problem::new(graph, *machine, request.formula, limits, skips);
    let relaxed = problem(SkipCount::Once);
    if let Scope::Given(specs) = &request.scope {
        let partition = hand::partition(graph, specs, request.cluster.devices)?;
        if let Some(miss) = miss(graph, machine, &partition, limits, "plan with these stages") {
            return Err(miss.into());
        }
        // The user's plan is in the set that is searched, so something is found.
        let best = request.solver.solve(&relaxed)?;
        let bound = best.map_or(0.0, |best| best.bottleneck);
        return Ok(conclude(
            graph,
            machine,
            request.formula,
            &relaxed,
            partition,
            bound,
        ));
    }
    let what = if request.scope == Scope::Straight {
        "straight pipeline"
    } else {
        "plan"
    };
    let nearest = || {
        let nearest = solve::least_memory(&relaxed).partition;
        miss(graph, machine, &nearest, limits, what)
    };
    let Some(first) = request.solver.solve(&relaxed)? else {
        return Err(nearest().map_or_else(|| unexplained(request.solver), Into::into));
    };
    let mut candidates = vec![first.partition.clone()];
    if graph.has_skips() {
        // How often a skipping tensor is sent depends on the cuts behind it, which the solver saw only as
        // bounds: the other bound gives a second candidate, and both are judged by what they really send.
        let cautious = request.solver.solve(&problem(SkipCount::PerReader))?;
        candidates.extend(cautious.map(|solution| solution.partition));
    } else {
        let evaluated = objective(graph, machine, request.formula, &first.partition);
        if (evaluated - first.bottleneck).abs() > 1e-9 * evaluated {
            return Err(PlanningError::Disagreement {
                solver: request.solver.name(),
                reported: first.bottleneck,
                evaluated,
            });
        }
    }
    let best = candidates
        .into_iter()
        .filter(|partition| miss(graph, machine, partition, limits, what).is_none())
        .min_by(|a, b| {
            let value = |p| objective(graph, machine, request.formula, p);
            value(a).total_cmp(&value(b))
        });
    let Some(partition) = best else {
        return Err(miss(graph, machine, &first.partition, limits, what)
            .map_or_else(|| unexplained(request.solver), Into::into));
    };
    let bound = first.bottleneck;
    Ok(conclude(
        graph,
        machine,
        request.formula,
        &relaxed,
        partition,
        bound,
    ))
}

/// A solver that finds nothing although something fits has a fault.
fn unexplained(solver: Solver) -> PlanningError {
    PlanningError::Solver(SolverError(format!("{} found nothing", solver.name())))
}

/// What is proved: the contiguous optimum bounds every plan only if no other order of the layers is possible.
fn conclude(
    graph: &LayerGraph,
    machine: &Machine,
    formula: Formula,
    problem: &Problem,
    partition: Partition,
    contiguous: f64,
) -> Found {
    let lower_bound = if graph.is_linear() {
        contiguous
    } else {
        problem.work_bound()
    };
    let value = objective(graph, machine, formula, &partition);
    Found {
        partition,
        proved: value <= lower_bound * (1.0 + 1e-9),
        // Rounding must not put the bound above what it bounds.
        lower_bound: lower_bound.min(value),
    }
}

fn objective(
    graph: &LayerGraph,
    machine: &Machine,
    formula: Formula,
    partition: &Partition,
) -> f64 {
    Evaluation::new(graph, partition, machine).objective(formula, machine)
}

/// Which worker does not fit, if one does not, at the least depths.
pub(super) fn miss(
    graph: &LayerGraph,
    machine: &Machine,
    partition: &Partition,
    limits: Limits,
    what: &'static str,
) -> Option<Infeasible> {
    let evaluation = Evaluation::new(graph, partition, machine);
    let needs = evaluation
        .stages
        .iter()
        .zip(noam(&partition.replicas))
        .map(|(s, depth)| (s.sums.memory(s.replicas, depth, 0), depth));
    let (stage, (needed, depth)) = needs.enumerate().max_by(|a, b| a.1.0.total_cmp(&b.1.0))?;
    if needed <= limits.memory {
        return None;
    }
    let layers = evaluation.stages[stage].layers.clone();
    Some(Infeasible {
        what,
        limit: show_limit(limits.memory),
        devices: limits.devices,
        needed: show_limit(needed),
        stage,
        first: graph.layer(layers.start).name.clone(),
        last: graph.layer(layers.end - 1).name.clone(),
        replicas: partition.replicas[stage],
        depth,
    })
}

/// A size as a flag takes it, rounded up so that giving it suffices.
fn show_limit(bytes: f64) -> String {
    let (unit, name) = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")]
        .into_iter()
        .find(|(unit, _)| bytes >= 10.0 * unit)
        .unwrap_or((1.0, "B"));
    let hundredths = (bytes / unit * 100.0).ceil() / 100.0;
    format!("{hundredths}{name}")
}
