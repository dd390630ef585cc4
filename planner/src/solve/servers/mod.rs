//! Plans for servers whose devices share a network card: which stages, how many replicas, on which devices.
//!
//! `labels` answers whether there is a plan within a bottleneck; here the smallest such bottleneck is looked for, by
//! bisection from what no plan can beat, first with the most promising placements only, then with all of them as far
//! as a fixed amount of work goes. What that proves is said: if nothing was left out below the plan that was found, it
//! is optimal; else the largest bottleneck below which nothing was left out is a bound.

mod dominance;
mod labels;
mod places;
mod spread;

use std::ops::Range;

use labels::{Effort, PlacedStage, Search, Servers};
pub use places::{Places, thin_cuts};

use crate::cost::{Evaluation, Fabric, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::schedule::Keeping;
use crate::solve::Recompute;

/// What limits the search, besides the servers.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    /// No stage has more replicas.
    pub most_replicas: usize,
    /// Replicas of every stage, one between each two places, where they are given.
    pub given: Option<&'a [usize]>,
    /// Whether stages may recompute.
    pub recompute: Recompute,
    /// What replicas hold.
    pub keeping: Keeping,
}

/// A plan on servers.
#[derive(Clone, Debug)]
pub struct Placed {
    /// The layers in an order in which stages are runs.
    pub graph: LayerGraph,
    /// Stages and replicas.
    pub partition: Partition,
    /// Where the replicas are.
    pub placement: Placement,
    /// Its largest load, seconds per minibatch.
    pub bottleneck: f64,
    /// No plan whose stages lie between the searched places has a smaller one.
    pub lower_bound: f64,
}

/// Loads that differ by less, relative to their size, are taken for the same.
const ROUNDING: f64 = 1e-10;

/// Placements of stages that one quick search tries at most, that all thorough ones do, and that are tried for a bound.
const QUICK: usize = 60_000;
const THOROUGH: usize = 150_000;
const PROOF: usize = 250_000;

const FAST: Effort = Effort {
    labels: 24,
    ways: 0,
    replicas: 2,
    servers: Servers::InOneOrder,
};

const ALL: Effort = Effort {
    labels: 2_000,
    ways: 2_000,
    replicas: usize::MAX,
    servers: Servers::Each,
};

/// The best plan that is found between the places; none if none fits the memory of the devices.
///
/// `bound` is a bottleneck (seconds per minibatch) that no plan can beat.
#[must_use]
pub fn solve(
    graph: &LayerGraph,
    places: &Places,
    fabric: &Fabric,
    machine: &Machine,
    rules: Rules,
    bound: f64,
) -> Option<Placed> {
    let search = Search {
        places,
        fabric,
        machine: *machine,
        most_replicas: rules.most_replicas,
        given: rules.given,
        recompute: rules.recompute,
        keeping: rules.keeping,
    };
    let evaluate = |stages: &[PlacedStage]| unfold(graph, places, fabric, machine, stages);
    let quick = |threshold| search.decide(threshold, FAST, &mut QUICK.clone()).stages;
    let one_order = Effort {
        servers: Servers::InOneOrder,
        ..ALL
    };
    let mut left = THOROUGH;
    let first = match quick(f64::INFINITY) {
        Some(stages) => stages,
        None => search.decide(f64::INFINITY, ALL, &mut left).stages?,
    };
    let mut best = evaluate(&first);
    let mut low = bound;
    for _ in 0..14 {
        if best.bottleneck <= low * (1.0 + 1e-4) {
            break;
        }
        let middle = f64::midpoint(low, best.bottleneck);
        match quick(middle) {
            Some(stages) => best = evaluate(&stages),
            None => low = middle,
        }
    }
    let mut proved = bound;
    // Few servers are all tried; of many that are alike, one for all.
    for effort in [one_order, ALL] {
        while left > 0 && best.bottleneck > proved * (1.0 + 1e-9) {
            let below = best.bottleneck * (1.0 - ROUNDING);
            let answer = search.decide(below, effort, &mut left);
            match answer.stages {
                Some(stages) => best = evaluate(&stages),
                None if answer.complete => proved = best.bottleneck,
                None => break,
            }
        }
    }
    if best.bottleneck > proved * (1.0 + 1e-9) {
        proved = proved.max(prove(&search, bound, best.bottleneck));
    }
    // Of those that are as fast, the one with the fewest devices, and of these the one with the fewest stages.
    let size = |p: &Placed| (p.partition.workers(), p.partition.stages.len());
    let as_fast = best.bottleneck * (1.0 + ROUNDING);
    for (effort, mut budget) in [(FAST, QUICK), (one_order, QUICK), (ALL, left)] {
        let other = search.decide(as_fast, effort, &mut budget).stages;
        let other = other.map(|stages| evaluate(&stages));
        if let Some(other) = other
            && other.bottleneck <= best.bottleneck * (1.0 + 2.0 * ROUNDING)
            && size(&other) < size(&best)
        {
            best = other;
        }
    }
    best.lower_bound = proved.min(best.bottleneck);
    Some(best)
}

/// The largest bottleneck from `low` to `high` below which everything could be tried: no plan has a smaller one.
fn prove(search: &Search, low: f64, high: f64) -> f64 {
    let relaxed = Effort {
        servers: Servers::Relaxed,
        ..ALL
    };
    let mut left = PROOF;
    let (mut proved, mut open) = (low, high);
    // All of it at once, if it can be; then by halves, each with a share of what is left.
    let mut threshold = high * (1.0 - ROUNDING);
    let mut share = left;
    for _ in 0..8 {
        if left == 0 || open <= proved * (1.0 + 1e-3) {
            break;
        }
        let given = share;
        let answer = search.decide(threshold, relaxed, &mut share);
        left -= given - share;
        if answer.stages.is_none() && answer.complete {
            let all = threshold >= high * (1.0 - 2.0 * ROUNDING);
            proved = if all { high } else { threshold };
        } else {
            open = threshold;
        }
        threshold = f64::midpoint(proved, open);
        share = left / 2;
    }
    proved
}

/// The plan of these stages, evaluated from the layer graph.
fn unfold(
    graph: &LayerGraph,
    places: &Places,
    fabric: &Fabric,
    machine: &Machine,
    stages: &[PlacedStage],
) -> Placed {
    let mut order = Vec::new();
    let mut runs: Vec<Range<usize>> = Vec::new();
    for stage in stages {
        let start = order.len();
        order.extend(places.layers(stage.start, stage.end));
        runs.push(start..order.len());
    }
    let counts: Vec<Vec<usize>> = stages.iter().map(|s| s.counts.clone()).collect();
    let mut partition = Partition::new(runs, counts.iter().map(|c| c.iter().sum()).collect());
    partition.recompute = stages.iter().map(|s| s.recompute).collect();
    let placement = Placement {
        fabric: fabric.clone(),
        counts,
    };
    let graph = graph.reordered(&order);
    let evaluation = Evaluation::placed(&graph, &partition, machine, Some(&placement));
    Placed {
        graph,
        partition,
        placement,
        bottleneck: evaluation.bottleneck,
        lower_bound: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cluster::{Cluster, Devices, Server};
    use crate::profile::{Edge, Profile};
    use crate::schedule::ScheduleKind;
    use crate::solve::Downsets;
    use crate::testing;

    /// Every chain of downsets with every replication on every set of devices, each evaluated by itself.
    struct Brute<'a> {
        graph: &'a LayerGraph,
        sets: &'a [Vec<bool>],
        fabric: &'a Fabric,
        machine: &'a Machine,
        most_replicas: usize,
        recompute: Recompute,
        keeping: Keeping,
        best: Option<(f64, usize)>,
    }

    impl Brute<'_> {
        fn visit(
            &mut self,
            set: usize,
            order: &[usize],
            partition: &Partition,
            counts: &[Vec<usize>],
        ) {
            if set == self.sets.len() - 1 {
                self.judge(order, partition, counts);
                return;
            }
            for larger in set + 1..self.sets.len() {
                let (before, until) = (&self.sets[set], &self.sets[larger]);
                if before.iter().zip(until).any(|(&b, &u)| b && !u) {
                    continue;
                }
                let mut order = order.to_vec();
                let start = order.len();
                order.extend((0..until.len()).filter(|&layer| until[layer] && !before[layer]));
                let free: Vec<usize> = (0..self.fabric.slots.len())
                    .map(|slot| {
                        self.fabric.slots[slot].count
                            - counts.iter().map(|c| c[slot]).sum::<usize>()
                    })
                    .collect();
                let again = match self.recompute {
                    Recompute::Auto => &[false, true][..],
                    Recompute::Never => &[false],
                    Recompute::Always => &[true],
                };
                for replicas in 1..=free.iter().sum::<usize>().min(self.most_replicas) {
                    let mut ways = Vec::new();
                    let any = vec![None; free.len()];
                    let mut visit = |c: &[usize]| ways.push(c.to_vec());
                    spread::every(&free, &any, replicas, usize::MAX, &mut visit);
                    for (way, &again) in ways.iter().flat_map(|w| again.iter().map(move |a| (w, a)))
                    {
                        let mut partition = partition.clone();
                        partition.stages.push(start..order.len());
                        partition.replicas.push(replicas);
                        partition.recompute.push(again);
                        let mut counts = counts.to_vec();
                        counts.push(way.clone());
                        self.visit(larger, &order, &partition, &counts);
                    }
                }
            }
        }

        fn judge(&mut self, order: &[usize], partition: &Partition, counts: &[Vec<usize>]) {
            let placement = Placement {
                fabric: self.fabric.clone(),
                counts: counts.to_vec(),
            };
            let graph = self.graph.reordered(order);
            let evaluation = Evaluation::placed(&graph, partition, self.machine, Some(&placement));
            let depths = crate::schedule::noam(&partition.replicas);
            let fits = evaluation.stages.iter().zip(depths).all(|(s, depth)| {
                let holding = self.keeping.holding(s.replicas, depth, 0);
                s.sums.memory_of(s.replicas, holding) <= s.worst.memory
            });
            if !fits {
                return;
            }
            let key = (evaluation.bottleneck, partition.workers());
            let better = self.best.is_none_or(|best| {
                key.0 < best.0 * (1.0 - 1e-9) || key.0 <= best.0 * (1.0 + 1e-9) && key.1 < best.1
            });
            if better {
                self.best = Some(key);
            }
        }
    }

    fn graphs() -> impl Strategy<Value = Profile> {
        let layer = (1u32..30, 0u64..400, 1u64..300, any::<[bool; 4]>());
        (proptest::collection::vec(layer, 1..5), 0usize..3).prop_map(|(layers, kind)| {
            let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
            let weights: Vec<u64> = layers.iter().map(|l| l.1).collect();
            let edges: Vec<u64> = layers[1..].iter().map(|l| l.2).collect();
            let mut profile = testing::chain(&ms, &weights, &edges);
            for (from, l) in layers.iter().enumerate() {
                profile.layers[from].stash_bytes = l.2 / 2;
            }
            if kind == 0 {
                return profile;
            }
            profile.edges.clear();
            for (from, l) in layers.iter().enumerate() {
                for to in (from + 1..layers.len()).filter(|&to| l.3[to]) {
                    let tensor = if kind == 1 { from } else { 10 * from + to };
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

    fn clusters() -> impl Strategy<Value = Cluster> {
        let kind = (1usize..3, 0usize..4, proptest::option::of(600u64..3000));
        let server = (
            proptest::collection::vec(kind, 1..3),
            0usize..3,
            any::<bool>(),
        );
        proptest::collection::vec(server, 1..4).prop_filter_map("at most 5 devices", |servers| {
            let servers = servers
                .into_iter()
                .enumerate()
                .map(|(number, (kinds, card, fast))| {
                    let devices = kinds
                        .into_iter()
                        .map(|(count, speed, memory_bytes)| Devices {
                            count,
                            speed: [1.0, 1.0, 0.5, 2.0][speed],
                            memory_bytes,
                        });
                    Server {
                        name: number.to_string(),
                        bandwidth_bytes_per_s: [3e3, 1e4, 1e6][card],
                        inner_bandwidth_bytes_per_s: if fast { 1e6 } else { 2e4 },
                        devices: devices.collect(),
                    }
                });
            let cluster = Cluster::of_servers(servers.collect(), 0.0).ok()?;
            (cluster.devices <= 5).then_some(cluster)
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(250))]
        #[test]
        fn the_search_on_servers_finds_what_brute_force_finds(
            profile in graphs(),
            cluster in clusters(),
            straight in any::<bool>(),
            recompute in prop_oneof![
                Just(Recompute::Auto),
                Just(Recompute::Never),
                Just(Recompute::Always)
            ],
            keeping in crate::solve::tests::keepings(),
        ) {
            let graph = LayerGraph::new(&profile);
            let machine = Machine {
                round: (keeping.kind != ScheduleKind::OneFOneB)
                    .then_some(keeping.microbatches as f64),
                ..Machine::new(&cluster, 0.0)
            };
            let fabric = Fabric::new(&cluster).unwrap();
            let downsets = Downsets::new(&graph, 64).unwrap();
            let most_replicas = if straight { 1 } else { cluster.devices };
            let mut brute = Brute {
                graph: &graph,
                sets: &downsets.sets(),
                fabric: &fabric,
                machine: &machine,
                most_replicas,
                recompute,
                keeping,
                best: None,
            };
            let none = Partition::new(Vec::new(), Vec::new());
            brute.visit(0, &[], &none, &[]);
            let places = Places::new(&graph, downsets.sets());
            let rules = Rules { most_replicas, given: None, recompute, keeping };
            let found = solve(&graph, &places, &fabric, &machine, rules, 0.0);
            match (brute.best, found) {
                (None, None) => {}
                (Some((best, devices)), Some(found)) => {
                    prop_assert!((found.bottleneck / best - 1.0).abs() < 1e-9, "{} is not {}", found.bottleneck, best);
                    prop_assert!((found.lower_bound / best - 1.0).abs() < 1e-9, "bound {}", found.lower_bound);
                    prop_assert_eq!(found.partition.workers(), devices);
                    let search = Search {
                        places: &places,
                        fabric: &fabric,
                        machine,
                        most_replicas,
                        given: None, recompute, keeping,
                    };
                    let bound = prove(&search, 0.0, best);
                    prop_assert!(bound <= best * (1.0 + 1e-9), "{} is above {}", bound, best);
                }
                (best, found) => prop_assert!(false, "{:?} against {:?}", best, found),
            }
        }
    }
}
