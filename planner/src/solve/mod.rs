//! Finds the stages and replicas with the smallest bottleneck.
//!
//! Every solver searches the same set: stages between two places, any number of replicas, idle devices allowed, memory
//! kept at the paper's depth K = ceil(replicas from the stage on / its replicas). The places are those of the execution
//! order, which misses no plan where no other order is possible; or the downsets of the layer graph, which never
//! misses one.

#[cfg(test)]
mod brute;
mod downsets;
pub mod free;
pub mod hierarchy;
mod ilp;
mod sequential;
pub mod servers;
mod threshold;

pub use downsets::{Downsets, MOST_DOWNSETS};
pub use ilp::solve as ilp;
pub use sequential::solve as sequential;
pub use threshold::{least_memory, solve as dynamic_program};

use std::sync::Arc;

use crate::cost::interval::{IntervalTable, SkipCount};
use crate::cost::{Formula, Machine, Partition, StageSums};
use crate::graph::LayerGraph;
use crate::schedule::Keeping;

/// A search for the best partition.
#[derive(Clone, Debug)]
pub struct Problem {
    table: Arc<IntervalTable>,
    machine: Machine,
    formula: Formula,
    devices: usize,
    most_replicas: usize,
    memory: f64,
    recompute: Recompute,
    keeping: Keeping,
}

/// Whether stages run forward again before their backward, to keep less in between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Recompute {
    /// Where the memory asks for it.
    #[default]
    Auto,
    /// Nowhere.
    Never,
    /// Everywhere.
    Always,
}

impl Recompute {
    /// The ways in which a stage may run, the faster one first: its sums, and whether it recomputes.
    pub(crate) fn ways(self, sums: &StageSums) -> impl Iterator<Item = (StageSums, bool)> {
        let plain = (self != Self::Always).then_some((*sums, false));
        let again = (self != Self::Never).then(|| (sums.recomputing(), true));
        plain.into_iter().chain(again)
    }
}

/// What to search for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// N: devices, all alike.
    pub devices: usize,
    /// Replicas of a stage at most; 1 for straight pipelines.
    pub most_replicas: usize,
    /// Bytes of memory of each device; infinite if there is no limit.
    pub memory: f64,
    /// Whether stages may recompute.
    pub recompute: Recompute,
    /// What replicas hold.
    pub keeping: Keeping,
}

/// The best partition that a solver found, and what is proved about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// Stages and replicas.
    pub partition: Partition,
    /// Its largest load as the problem counts it, seconds per minibatch: the smallest over the searched set.
    pub bottleneck: f64,
}

/// A solver that could not answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the integer program could not be solved: {0}; use --solver dp")]
pub struct SolverError(pub String);

impl Problem {
    /// The search for the best partition of a graph within limits, judged by a formula.
    #[must_use]
    pub fn new(
        graph: &LayerGraph,
        machine: Machine,
        formula: Formula,
        limits: Limits,
        skips: SkipCount,
    ) -> Self {
        let table = Arc::new(IntervalTable::new(graph, skips));
        Self::over(table, machine, formula, limits)
    }

    /// The same search over the stages of any table, such as that of [`Downsets`].
    #[must_use]
    pub fn over(
        table: Arc<IntervalTable>,
        machine: Machine,
        formula: Formula,
        limits: Limits,
    ) -> Self {
        Self {
            table,
            machine,
            formula,
            devices: limits.devices,
            most_replicas: limits.most_replicas.min(limits.devices),
            memory: limits.memory,
            recompute: limits.recompute,
            keeping: limits.keeping,
        }
    }

    /// The same search with another number of devices.
    #[must_use]
    pub fn with_devices(&self, devices: usize) -> Self {
        let mut other = self.clone();
        other.devices = devices;
        other.most_replicas = self.most_replicas.min(devices);
        other
    }

    fn layers(&self) -> usize {
        self.table.layers()
    }

    /// Memory of a worker of a stage at the paper's depth, with `behind` replicas in all later stages.
    fn memory_of(&self, sums: &StageSums, replicas: usize, behind: usize) -> f64 {
        let depth = 1 + behind.div_ceil(replicas);
        sums.memory_of(replicas, self.keeping.holding(replicas, depth, 0))
    }

    fn load_of(&self, sums: &StageSums, replicas: usize) -> f64 {
        self.formula.load(sums, replicas, &self.machine)
    }

    /// The ways in which a stage may run.
    fn ways(&self, start: usize, end: usize) -> impl Iterator<Item = (StageSums, bool)> {
        self.recompute.ways(self.table.get(start, end))
    }

    /// Sums of a stage of a partition.
    fn stage(&self, partition: &Partition, stage: usize) -> StageSums {
        let places = &partition.stages[stage];
        let sums = self.table.get(places.start, places.end);
        if partition.recompute[stage] {
            sums.recomputing()
        } else {
            *sums
        }
    }

    /// No plan has a smaller bottleneck, whatever its stages: all work spread evenly over all devices, or the layer
    /// that takes longest even by itself, replicated as often as is best for it.
    #[must_use]
    pub fn layer_bound(&self, graph: &LayerGraph) -> f64 {
        let alone = |layer| {
            let mut sums = StageSums::default();
            sums.add(layer);
            let load = |replicas| self.formula.load(&sums, replicas, &self.machine);
            (1..=self.most_replicas)
                .map(load)
                .fold(f64::INFINITY, f64::min)
        };
        graph.layers().map(alone).fold(self.work_bound(), f64::max)
    }

    /// All work spread evenly over all devices: no plan has a smaller bottleneck.
    #[must_use]
    pub fn work_bound(&self) -> f64 {
        self.formula
            .work(self.table.get(0, self.layers()), &self.machine)
            / self.devices as f64
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::schedule::ScheduleKind;
    use crate::testing;

    pub fn keepings() -> impl Strategy<Value = Keeping> {
        let kinds = prop_oneof![
            Just(ScheduleKind::OneFOneB),
            Just(ScheduleKind::TwoBw),
            Just(ScheduleKind::OneFOneBFlush),
            Just(ScheduleKind::Gpipe),
        ];
        (kinds, 1usize..9).prop_map(|(kind, microbatches)| Keeping { kind, microbatches })
    }

    /// Random chains: compute, weights, stash, edges; devices and memory limit.
    pub fn problems() -> impl Strategy<Value = Problem> {
        let layer = (0u32..40, 0u64..400, 0u64..300, 0u64..200, 0u32..3);
        (
            proptest::collection::vec(layer, 1..6),
            1usize..6,
            prop_oneof![Just(f64::INFINITY), (500u32..4000).prop_map(f64::from)],
            1usize..6,
            0usize..5,
            prop_oneof![
                Just(Recompute::Auto),
                Just(Recompute::Never),
                Just(Recompute::Always)
            ],
            keepings(),
        )
            .prop_map(
                |(layers, devices, memory, most_replicas, formula, recompute, keeping)| {
                    let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
                    let weights: Vec<u64> = layers.iter().map(|l| l.1).collect();
                    let edges: Vec<u64> = layers[1..].iter().map(|l| l.3).collect();
                    let mut profile = testing::chain(&ms, &weights, &edges);
                    for (layer, l) in profile.layers.iter_mut().zip(&layers) {
                        layer.stash_bytes = l.2;
                        layer.step_ms = f64::from(l.4);
                    }
                    let machine = Machine {
                        bandwidth: 1e4,
                        latency: 0.0,
                        message_s_per_byte: if formula == 4 { 1e-5 } else { 0.0 },
                        reduce_s_per_byte: if formula == 4 { 2e-5 } else { 0.0 },
                        round: (keeping.kind != ScheduleKind::OneFOneB)
                            .then_some(keeping.microbatches as f64),
                    };
                    let formula = match formula {
                        1 => Formula::Paper,
                        2 => Formula::Sosp19,
                        3 => Formula::Release,
                        _ => Formula::Ours,
                    };
                    let limits = Limits {
                        devices,
                        most_replicas,
                        memory,
                        recompute,
                        keeping,
                    };
                    Problem::new(
                        &LayerGraph::new(&profile),
                        machine,
                        formula,
                        limits,
                        SkipCount::Once,
                    )
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn dynamic_program_integer_program_and_brute_force_agree(problem in problems()) {
            let exact = brute::solve(&problem);
            let dp = dynamic_program(&problem);
            let ilp = ilp(&problem).unwrap();
            match (exact, dp, ilp) {
                (None, None, None) => {}
                (Some(exact), Some(dp), Some(ilp)) => {
                    // Bit for bit: all three take the loads from the same table.
                    prop_assert_eq!(dp.bottleneck, exact.bottleneck);
                    prop_assert_eq!(ilp.bottleneck, exact.bottleneck);
                    // Ties: fewest devices, fewest stages, least memory.
                    let key = |s: &Solution| (s.partition.workers(), s.partition.stages.len());
                    prop_assert_eq!(key(&dp), key(&exact));
                    prop_assert_eq!(key(&ilp), key(&exact));
                    if problem.recompute == Recompute::Auto {
                        // A stage recomputes only if its memory asks for it.
                        for stage in 0..dp.partition.stages.len() {
                            let mut plain = dp.partition.clone();
                            plain.recompute[stage] = false;
                            let needed = brute::largest_memory(&problem, &plain) > problem.memory;
                            prop_assert!(needed || !dp.partition.recompute[stage]);
                        }
                    } else {
                        prop_assert_eq!(
                            brute::largest_memory(&problem, &dp.partition),
                            brute::largest_memory(&problem, &exact.partition)
                        );
                    }
                }
                other => prop_assert!(false, "only some found a plan: {:?}", other),
            }
        }

        #[test]
        fn least_memory_is_the_limit_at_which_plans_begin(problem in problems()) {
            let needed = least_memory(&problem);
            let mut at = problem.clone();
            at.memory = needed.bytes;
            prop_assert!(dynamic_program(&at).is_some());
            at.memory = needed.bytes.next_down();
            prop_assert!(dynamic_program(&at).is_none());
        }
    }
}
