//! Asks a solver, checks its answer, and says what is proved.

use super::space::Space;
use super::{PlanningError, Request, Scope, hand, memory_limit, released, servers};
use crate::cost::interval::SkipCount;
use crate::cost::{Evaluation, Fabric, Formula, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::schedule::noam;
use crate::solve::{self, Limits, Problem, Recompute, Solution, SolverError};

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
     ({first} .. {last}, x{replicas}, {depth} in flight); give it {needed} or more (--memory, or `memory` in a cluster \
     file), more devices,{} or profile with a smaller batch",
    if *.may_recompute { "" } else { " --recompute auto," }
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
    /// Whether stages were allowed to recompute.
    pub may_recompute: bool,
}

/// A partition and what is proved about it.
pub(super) struct Found {
    /// The layers in the order in which the partition's stages are runs of them.
    pub graph: LayerGraph,
    pub partition: Partition,
    /// Where the replicas are, on a cluster of servers.
    pub placement: Option<Placement>,
    /// The largest load, seconds per minibatch, and its stage, where another planner's formula counts what an
    /// [`Evaluation`] does not know.
    pub judged: Option<(f64, usize)>,
    /// No plan has a smaller bottleneck.
    pub lower_bound: f64,
    /// Whether this partition's bottleneck is that bound.
    pub proved: bool,
}

pub(super) fn search(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<Found, PlanningError> {
    search_with(space, machine, request, true)
}

/// The same, but where tensors have several readers it is left at bounds.
pub(super) fn search_quickly(
    space: &Space,
    machine: &Machine,
    request: &Request,
) -> Result<Found, PlanningError> {
    search_with(space, machine, request, false)
}

fn search_with(
    space: &Space,
    machine: &Machine,
    request: &Request,
    exact: bool,
) -> Result<Found, PlanningError> {
    let graph = space.graph;
    if released::knows(request) {
        return released::search(space, machine, request);
    }
    if let Some(fabric) = Fabric::new(&request.cluster) {
        return servers::search_servers(space, machine, request, &fabric);
    }
    let limits = Limits {
        devices: request.cluster.devices,
        most_replicas: match request.scope {
            Scope::Straight => 1,
            Scope::All | Scope::Given(_) => request.cluster.devices,
        },
        memory: memory_limit(&request.cluster),
        recompute: request.recompute,
        keeping: request.keeping(),
    };
    let formula = request.formula;
    let problem = |skips| Problem::over(space.table(skips), *machine, formula, limits);
    let relaxed = problem(SkipCount::Once);
    let bound = |contiguous: f64| {
        if space.is_complete() {
            contiguous
        } else {
            relaxed.layer_bound(graph)
        }
    };
    if let Scope::Given(specs) = &request.scope {
        let partition = hand::partition(graph, specs, request.cluster.devices)?;
        let partition = recompute(graph, machine, &partition, limits);
        if let Some(miss) = miss(graph, machine, &partition, limits, "plan with these stages") {
            return Err(miss.into());
        }
        // The user's plan is in the set that is searched, so something is found.
        let best = request.solver.solve(&relaxed)?;
        let bound = bound(best.map_or(0.0, |best| best.bottleneck));
        return Ok(conclude(graph.clone(), machine, formula, partition, bound));
    }
    let what = if request.scope == Scope::Straight {
        "straight pipeline"
    } else {
        "plan"
    };
    let Some(first) = request.solver.solve(&relaxed)? else {
        let (graph, nearest) = space.unfold(solve::least_memory(&relaxed).partition);
        return Err(miss(&graph, machine, &nearest, limits, what)
            .map_or_else(|| unexplained(request.solver), Into::into));
    };
    let mut candidates = vec![space.unfold(first.partition)];
    if graph.has_skips() {
        // How often a skipping tensor is sent depends on the cuts behind it, which the solver saw only as
        // bounds: the other bound gives a second candidate, and both are judged by what they really send.
        let cautious = request.solver.solve(&problem(SkipCount::PerReader))?;
        candidates.extend(cautious.map(|solution| space.unfold(solution.partition)));
    } else {
        let (graph, partition) = &candidates[0];
        let evaluated = objective(graph, machine, formula, partition);
        if (evaluated - first.bottleneck).abs() > 1e-9 * evaluated {
            return Err(PlanningError::Disagreement {
                solver: request.solver.name(),
                reported: first.bottleneck,
                evaluated,
            });
        }
    }
    if space.downsets.is_some() && graph.has_skips() {
        // Nor may a plan be worse than the best one in the order that the layers are given in.
        for skips in [SkipCount::Once, SkipCount::PerReader] {
            let table = space.table_in_order(skips);
            let in_order = Problem::over(table, *machine, formula, limits);
            let solution = request.solver.solve(&in_order)?;
            candidates.extend(solution.map(|solution| (graph.clone(), solution.partition)));
        }
    }
    let nearest = miss(&candidates[0].0, machine, &candidates[0].1, limits, what);
    let best = candidates
        .into_iter()
        .filter(|(graph, partition)| miss(graph, machine, partition, limits, what).is_none())
        .map(|(graph, partition)| {
            let value = objective(&graph, machine, formula, &partition);
            (value, graph, partition)
        })
        .min_by(|(a, _, p), (b, _, q)| {
            let size = |p: &Partition| (p.workers(), p.stages.len());
            a.total_cmp(b).then(size(p).cmp(&size(q)))
        });
    let bound = bound(first.bottleneck);
    let best =
        best.map(|(_, graph, partition)| conclude(graph, machine, formula, partition, bound));
    if formula != Formula::Ours || !exact || best.as_ref().is_some_and(|best| best.proved) {
        return best.ok_or_else(|| {
            nearest.map_or_else(|| unexplained(request.solver), PlanningError::from)
        });
    }
    // What the solver saw only as bounds is counted as it is by the search that knows all stages behind.
    let exact = servers::search_alike(space, machine, limits, bound);
    let size = |found: &Found| (found.partition.workers(), found.partition.stages.len());
    let found: Vec<Found> = [best, exact].into_iter().flatten().collect();
    let bound = found
        .iter()
        .map(|found| found.lower_bound)
        .fold(bound, f64::max);
    found
        .into_iter()
        .map(|found| conclude(found.graph, machine, formula, found.partition, bound))
        .map(|found| {
            let value = objective(&found.graph, machine, formula, &found.partition);
            (value, found)
        })
        .min_by(|(a, x), (b, y)| a.total_cmp(b).then(size(x).cmp(&size(y))))
        .map(|(_, found)| found)
        .ok_or_else(|| nearest.map_or_else(|| unexplained(request.solver), PlanningError::from))
}

/// A solver that finds nothing although something fits has a fault.
fn unexplained(solver: Solver) -> PlanningError {
    PlanningError::Solver(SolverError(format!("{} found nothing", solver.name())))
}

/// The same stages, recomputing as the limits allow and the memory asks for.
pub(super) fn recompute(
    graph: &LayerGraph,
    machine: &Machine,
    partition: &Partition,
    limits: Limits,
) -> Partition {
    let mut all = partition.clone();
    all.recompute.fill(limits.recompute == Recompute::Always);
    match limits.recompute {
        Recompute::Auto => {
            all.recomputing_where_needed(graph, machine, limits.keeping, limits.memory)
        }
        Recompute::Never | Recompute::Always => all,
    }
}

/// What is proved of a partition, given that no plan has a smaller bottleneck than `lower_bound`.
fn conclude(
    graph: LayerGraph,
    machine: &Machine,
    formula: Formula,
    partition: Partition,
    lower_bound: f64,
) -> Found {
    let value = objective(&graph, machine, formula, &partition);
    Found {
        graph,
        partition,
        placement: None,
        judged: None,
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
        .map(|(s, depth)| {
            let holding = limits.keeping.holding(s.replicas, depth, 0);
            (s.sums.memory_of(s.replicas, holding), depth)
        });
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
        may_recompute: limits.recompute != Recompute::Never,
    })
}

/// A size as a flag takes it, rounded up so that giving it suffices: in the tables' units, but in decimal ones where it is
/// round in those, as a user may have written it.
pub(super) fn show_limit(bytes: f64) -> String {
    let hundredths = |(unit, name): (f64, &str)| {
        let hundredths = (bytes / unit * 100.0).ceil() / 100.0;
        format!("{hundredths}{name}")
    };
    let binary = [(3, "GiB"), (2, "MiB"), (1, "KiB")].map(|(n, name)| (1024f64.powi(n), name));
    let decimal = [(1e9, "GB"), (1e6, "MB")];
    let round = |unit: f64| bytes >= unit && (bytes / unit).fract() == 0.0;
    let as_written = binary[..2].iter().chain(&decimal);
    let unit = as_written.into_iter().find(|(unit, _)| round(*unit));
    let unit = unit.or_else(|| binary.iter().find(|(unit, _)| bytes >= *unit));
    hundredths(unit.copied().unwrap_or((1.0, "B")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::Cluster;
    use crate::planning::Course;
    use crate::profile::{Edge, Profile};
    use crate::testing;

    #[test]
    fn limits_read_as_they_were_written_and_what_is_needed_is_rounded_up() {
        for (bytes, text) in [
            (16.0 * 1024f64.powi(3), "16GiB"),
            (16e9, "16GB"),
            (512.0 * 1_048_576.0, "512MiB"),
            (500e6, "500MB"),
            (772.4712 * 1_048_576.0, "772.48MiB"),
            (1000.0, "1000B"),
        ] {
            assert_eq!(show_limit(bytes), text);
            assert!(crate::units::parse_memory(&show_limit(bytes)).unwrap() as f64 >= bytes);
        }
    }

    /// Layers that read any earlier ones: tensors of their own for each reader, or one for all.
    fn branching() -> impl Strategy<Value = Profile> {
        let layer = (1u32..30, 0u64..400, 0u64..300, any::<[bool; 5]>());
        (proptest::collection::vec(layer, 1..6), any::<bool>()).prop_map(|(layers, shared)| {
            let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
            let weights: Vec<u64> = layers.iter().map(|l| l.1).collect();
            let mut profile = testing::chain(&ms, &weights, &vec![0; layers.len() - 1]);
            profile.edges.clear();
            for (from, l) in layers.iter().enumerate() {
                profile.layers[from].stash_bytes = l.2 / 2;
                for to in (from + 1..layers.len()).filter(|&to| l.3[to]) {
                    let tensor = if shared { from } else { 10 * from + to };
                    profile.edges.push(Edge {
                        from: format!("L{from}"),
                        to: format!("L{to}"),
                        tensor: format!("t{tensor}"),
                        bytes: l.2,
                        gradient: from != 1,
                        gradient_bytes: None,
                    });
                }
            }
            profile
        })
    }

    fn requests() -> impl Strategy<Value = Request> {
        (
            1usize..4,
            any::<bool>(),
            0usize..4,
            proptest::option::of(500u64..3000),
            0usize..3,
        )
            .prop_map(
                |(devices, straight, formula, memory_bytes, recompute)| Request {
                    cluster: Cluster {
                        devices,
                        bandwidth_bytes_per_s: 1e4,
                        latency_s: 0.0,
                        local: false,
                        memory_bytes,
                        servers: Vec::new(),
                    },
                    solver: Solver::Dp,
                    formula: [
                        Formula::Ours,
                        Formula::Paper,
                        Formula::Sosp19,
                        Formula::Release,
                    ][formula],
                    scope: if straight {
                        Scope::Straight
                    } else {
                        Scope::All
                    },
                    recompute: [Recompute::Auto, Recompute::Never, Recompute::Always][recompute],
                    together: Vec::new(),
                    course: Course::default(),
                },
            )
    }

    /// The smallest objective of all chains of downsets with all replications that fit, each evaluated by itself.
    struct Brute<'a> {
        graph: &'a LayerGraph,
        machine: &'a Machine,
        formula: Formula,
        limits: Limits,
        again: &'a [bool],
        best: Option<f64>,
    }

    impl Brute<'_> {
        fn is_downset(&self, set: usize) -> bool {
            self.graph.tensors().iter().all(|t| {
                let has = |layer: usize| set >> layer & 1 == 1;
                has(t.producer) || t.readers.iter().all(|&r| !has(r))
            })
        }

        fn visit(&mut self, set: usize, order: &[usize], partition: &Partition) {
            let all = (1 << self.graph.len()) - 1;
            if set == all {
                let graph = self.graph.reordered(order);
                if miss(&graph, self.machine, partition, self.limits, "plan").is_none() {
                    let value = objective(&graph, self.machine, self.formula, partition);
                    self.best = Some(self.best.map_or(value, |best| best.min(value)));
                }
                return;
            }
            for larger in (set + 1..=all).filter(|larger| larger & set == set) {
                if !self.is_downset(larger) {
                    continue;
                }
                let mut order = order.to_vec();
                let start = order.len();
                order.extend((0..self.graph.len()).filter(|&l| (larger & !set) >> l & 1 == 1));
                let left = self.limits.devices - partition.workers();
                for replicas in 1..=left.min(self.limits.most_replicas) {
                    for &again in self.again {
                        let mut partition = partition.clone();
                        partition.stages.push(start..order.len());
                        partition.replicas.push(replicas);
                        partition.recompute.push(again);
                        self.visit(larger, &order, &partition);
                    }
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn no_chain_of_downsets_is_better_than_what_is_called_optimal(
            profile in branching(), request in requests()
        ) {
            let graph = LayerGraph::new(&profile);
            let machine = Machine::new(&request.cluster, 0.0);
            let limits = Limits {
                devices: request.cluster.devices,
                most_replicas: match request.scope {
                    Scope::Straight => 1,
                    _ => request.cluster.devices,
                },
                memory: memory_limit(&request.cluster),
                recompute: request.recompute,
                keeping: request.keeping(),
            };
            let mut brute = Brute {
                graph: &graph,
                machine: &machine,
                formula: request.formula,
                limits,
                again: match request.recompute {
                    Recompute::Auto => &[false, true],
                    Recompute::Never => &[false],
                    Recompute::Always => &[true],
                },
                best: None,
            };
            let none = Partition::new(Vec::new(), Vec::new());
            brute.visit(0, &[], &none);
            // Where each tensor has one reader, traffic does not depend on the cuts further on: nothing is relaxed. Our
            // own cost model is searched with what is known of them, the others are not.
            let one_reader = graph.tensors().iter().all(|t| t.readers.len() == 1);
            let exact = one_reader || request.formula == Formula::Ours;
            match search(&Space::new(&graph), &machine, &request) {
                Ok(found) => {
                    let best = brute.best.unwrap();
                    let value = objective(&found.graph, &machine, request.formula, &found.partition);
                    prop_assert!(value >= best * (1.0 - 1e-9));
                    prop_assert!(found.lower_bound <= best * (1.0 + 1e-9));
                    prop_assert!(!exact || found.proved);
                    if found.proved {
                        prop_assert!(value <= best * (1.0 + 1e-9), "{} is not {}", value, best);
                    }
                    let plan = crate::planning::plan(&profile, profile.model.clone(), &request).unwrap();
                    prop_assert!(plan.schedule_for(20).is_ok());
                    // What explains a plan evaluates its own stages, not runs of the profile's order.
                    let told = crate::planning::explanation(&profile, &request, &plan).unwrap();
                    if request.formula == Formula::Ours {
                        prop_assert_eq!(told.resources[0].seconds, plan.bottleneck_s);
                    }
                    let places = Problem::new(&graph, machine, request.formula, limits, SkipCount::Once);
                    prop_assert!(places.layer_bound(&graph) <= best * (1.0 + 1e-9));
                }
                Err(PlanningError::Infeasible(_)) => prop_assert!(!exact || brute.best.is_none()),
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }

    #[test]
    fn branches_are_not_kept_in_the_order_they_stand_in() {
        // Two branches of two layers each, interleaved: 0 -> 2 and 1 -> 3. Each is a stage of its own.
        let mut profile = testing::chain(&[6.0; 4], &[0; 4], &[0; 3]);
        profile.edges.clear();
        for (from, to) in [(0, 2), (1, 3)] {
            profile.edges.push(Edge {
                from: format!("L{from}"),
                to: format!("L{to}"),
                tensor: format!("t{from}"),
                bytes: 1_000_000,
                gradient: true,
                gradient_bytes: None,
            });
        }
        let request = Request {
            cluster: Cluster {
                devices: 2,
                bandwidth_bytes_per_s: 1e4,
                latency_s: 0.0,
                local: false,
                memory_bytes: None,
                servers: Vec::new(),
            },
            solver: Solver::Dp,
            formula: Formula::Ours,
            scope: Scope::Straight,
            recompute: Recompute::Auto,
            together: Vec::new(),
            course: Course::default(),
        };
        let machine = Machine::new(&request.cluster, 0.0);
        let graph = LayerGraph::new(&profile);
        let found = search(&Space::new(&graph), &machine, &request).unwrap();
        let names: Vec<&str> = found.graph.layers().map(|l| l.name.as_str()).collect();
        assert!(names == ["L0", "L2", "L1", "L3"] || names == ["L1", "L3", "L0", "L2"]);
        assert_eq!(found.partition.stages, [0..2, 2..4]);
        assert!(found.proved);
    }
}
