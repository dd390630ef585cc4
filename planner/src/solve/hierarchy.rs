//! The released PipeDream optimizer's search on servers alike, exact under its formula ([`crate::cost::release`]).
//!
//! A(i, j, m) is the smallest bottleneck of the stages between places i and j on m units: one stage on all of them, or
//! the best place k and share q for the last stage, max(A(i, k, m-q), load(k, j, q)). The level of devices is
//! solved for every pair of places, as each may become what a group of servers runs; the level of servers only from
//! the first place. Unlike the original, units may be left idle, which can only help.

use crate::cost::Partition;
use crate::cost::interval::IntervalTable;
use crate::cost::release::{Group, Grouped, Hierarchy, LevelLinks};

/// A pair of places with a stage between them.
#[derive(Clone, Copy, Debug)]
struct Section {
    start: usize,
    end: usize,
    /// Seconds of forward and backward.
    compute: f64,
    /// Bytes.
    weights: f64,
}

/// What lies between every two places, and what crosses each.
#[derive(Debug)]
pub struct Sections {
    places: usize,
    /// Ordered by start, then end.
    sections: Vec<Section>,
    /// For each place the sections that end there.
    into: Vec<Vec<u32>>,
    /// For each place the first section that starts there.
    from: Vec<usize>,
    /// Bytes that cross each place; zero where activations are not counted.
    crossing: Vec<f64>,
}

/// The best plan and its seconds per minibatch.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// Its stages lie between places.
    pub plan: Grouped,
    /// Seconds per minibatch.
    pub bottleneck: f64,
}

/// So many units make sections that are worth keeping their loads, and shares that are worth trying one by one.
const FEW: usize = 16;

/// No place: the section is one stage.
const WHOLE: u32 = u32::MAX;

/// How a section is run best on some units.
#[derive(Clone, Copy, Debug)]
struct Choice {
    /// Where its last stage begins, or [`WHOLE`].
    cut: u32,
    /// Units of its last stage.
    last: u32,
    /// Units used in all.
    used: u32,
}

/// For every place the best ways from one other place to there, on 1 to all units.
struct Ways {
    /// Seconds per minibatch; infinite if there is no section.
    seconds: Vec<f64>,
    choices: Vec<Choice>,
}

/// One level: sections as stages on units.
struct Level<'a> {
    sections: &'a Sections,
    /// Seconds of each section on one unit.
    compute: &'a [f64],
    links: LevelLinks,
    units: usize,
    most_replicas: usize,
    /// For each section its loads on 1 to `most_replicas` units, when it is not the first stage; empty where units are many.
    loads: Vec<f64>,
}

impl Sections {
    /// Sections of a table of stages; `crossing` holds the bytes that cross each of its places.
    #[must_use]
    pub fn new(table: &IntervalTable, crossing: Vec<f64>) -> Self {
        let places = table.layers() + 1;
        let mut sections = Vec::new();
        let mut into = vec![Vec::new(); places];
        let mut from = Vec::with_capacity(places);
        for start in 0..places - 1 {
            from.push(sections.len());
            for (end, sums) in table.stages_from(start) {
                into[end].push(sections.len() as u32);
                sections.push(Section {
                    start,
                    end,
                    compute: sums.forward + sums.backward,
                    weights: sums.parameters,
                });
            }
        }
        from.push(sections.len());
        Self {
            places,
            sections,
            into,
            from,
            crossing,
        }
    }

    fn starting_at(&self, start: usize) -> std::ops::Range<usize> {
        self.from[start]
            ..self
                .from
                .get(start + 1)
                .copied()
                .unwrap_or(self.sections.len())
    }
}

impl<'a> Level<'a> {
    fn new(
        sections: &'a Sections,
        compute: &'a [f64],
        links: LevelLinks,
        units: usize,
        most_replicas: usize,
    ) -> Self {
        let mut level = Self {
            sections,
            compute,
            links,
            units,
            most_replicas: most_replicas.min(units),
            loads: Vec::new(),
        };
        if level.most_replicas <= FEW {
            let mut all = vec![0.0; sections.sections.len() * level.most_replicas];
            for (section, loads) in all.chunks_exact_mut(level.most_replicas).enumerate() {
                level.fill_loads(section, loads);
            }
            level.loads = all;
        }
        level
    }

    /// Loads of a section on 1, 2, ... units when it is not the first stage.
    fn fill_loads(&self, section: usize, loads: &mut [f64]) {
        let Section {
            start,
            end,
            weights,
            ..
        } = self.sections.sections[section];
        let cuts = [start, end].map(|place| self.sections.crossing[place]);
        for (units, load) in (1..).zip(loads) {
            *load = self
                .links
                .later(self.compute[section], weights, cuts, units);
        }
    }

    /// For every place the best ways from `start` to there.
    fn ways_from(&self, start: usize) -> Ways {
        let none = Choice {
            cut: WHOLE,
            last: 0,
            used: 0,
        };
        let units = self.units;
        let mut seconds = vec![f64::INFINITY; self.sections.places * units];
        let mut choices = vec![none; seconds.len()];
        let mut bests = vec![0.0; units];
        let mut own = vec![0.0; self.most_replicas];
        for whole in self.sections.starting_at(start) {
            let section = &self.sections.sections[whole];
            let (before, behind) = seconds.split_at_mut(section.end * units);
            let best = &mut behind[..units];
            let choices = &mut choices[section.end * units..][..units];
            for m in 1..=self.most_replicas {
                best[m - 1] = self.links.first(self.compute[whole], section.weights, m);
                choices[m - 1] = Choice {
                    cut: WHOLE,
                    last: m as u32,
                    used: m as u32,
                };
            }
            for &last in &self.sections.into[section.end] {
                let last = last as usize;
                let cut = self.sections.sections[last].start;
                if cut <= start {
                    continue;
                }
                let first = &before[cut * units..][..units];
                let loads = if self.loads.is_empty() {
                    self.fill_loads(last, &mut own);
                    &own
                } else {
                    &self.loads[last * self.most_replicas..][..self.most_replicas]
                };
                bests.copy_from_slice(best);
                improve(first, loads, &mut bests);
                for m in 2..=units {
                    if bests[m - 1] < best[m - 1] {
                        best[m - 1] = bests[m - 1];
                        let share = |&q: &usize| first[m - q - 1].max(loads[q - 1]) <= bests[m - 1];
                        choices[m - 1] = Choice {
                            cut: cut as u32,
                            last: (1..m).find(share).unwrap_or(1) as u32,
                            used: m as u32,
                        };
                    }
                }
            }
            for m in 1..units {
                if best[m] >= best[m - 1] {
                    best[m] = best[m - 1];
                    choices[m] = choices[m - 1];
                }
            }
        }
        Ways { seconds, choices }
    }

    /// The stages from `start` to `end` on at most all units: where each ends, and its units.
    fn stages(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let ways = self.ways_from(start);
        let mut stages = Vec::new();
        let (mut end, mut units) = (end, self.units);
        loop {
            let way = ways.choices[end * self.units + units - 1];
            stages.push((end, way.last as usize));
            if way.cut == WHOLE {
                stages.reverse();
                return stages;
            }
            end = way.cut as usize;
            units = way.used as usize - way.last as usize;
        }
    }
}

/// Lowers `best[m-1]` to the smallest max(first[m-q-1], loads[q-1]) over all shares q < m that there are loads for.
///
/// `first` never rises, `loads` do not from their second on.
fn improve(first: &[f64], loads: &[f64], best: &mut [f64]) {
    match loads.len() {
        4 if best.len() == 4 => improve_few::<4>(first, loads, best),
        8 if best.len() == 8 => improve_few::<8>(first, loads, best),
        0..=FEW => improve_any(first, loads, best),
        _ => improve_many(first, loads, best),
    }
}

/// The same for a number of units known to the compiler, which makes vector instructions of it: millions of cuts are
/// tried on the devices of a server.
fn improve_few<const UNITS: usize>(first: &[f64], loads: &[f64], best: &mut [f64]) {
    let Some(first): Option<&[f64; UNITS]> = first.first_chunk() else {
        return;
    };
    let Some(loads): Option<&[f64; UNITS]> = loads.first_chunk() else {
        return;
    };
    let Some(best): Option<&mut [f64; UNITS]> = best.first_chunk_mut() else {
        return;
    };
    for q in 1..UNITS {
        for m in q..UNITS {
            // As one instruction: `f64::max` would look for NaN.
            let (first, load) = (first[m - q], loads[q - 1]);
            let value = if first > load { first } else { load };
            best[m] = if value < best[m] { value } else { best[m] };
        }
    }
}

fn improve_any(first: &[f64], loads: &[f64], best: &mut [f64]) {
    for (q, &load) in loads.iter().enumerate() {
        for (best, &first) in best.iter_mut().skip(q + 1).zip(first) {
            *best = best.min(first.max(load));
        }
    }
}

/// The same by bisection: with the last stage's share its own load falls and that of the first part rises.
fn improve_many(first: &[f64], loads: &[f64], best: &mut [f64]) {
    for m in 2..=best.len() {
        let value = |q: usize| first[m - q - 1].max(loads[q - 1]);
        let (mut low, mut high) = (2, loads.len().min(m - 1));
        while low < high {
            let middle = usize::midpoint(low, high);
            if loads[middle - 1] <= first[m - middle - 1] {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        let shares = [1, high.saturating_sub(1), high];
        let values = shares.into_iter().filter(|q| (1..m).contains(q)).map(value);
        best[m - 1] = values.fold(best[m - 1], f64::min);
    }
}

/// The best plan on the servers, no stage with more than `most_replicas` replicas in a server and no group on more
/// servers.
///
/// Time O(places^3 devices^2) for the devices of more than one server, O(places^2 units^2) else.
#[must_use]
pub fn solve(sections: &Sections, hierarchy: &Hierarchy, most_replicas: usize) -> Best {
    let alone: Vec<f64> = sections.sections.iter().map(|s| s.compute).collect();
    let devices = Level::new(
        sections,
        &alone,
        hierarchy.inner(),
        hierarchy.per_server,
        most_replicas,
    );
    let all = sections.places - 1;
    let starts = if hierarchy.servers > 1 { all } else { 1 };
    let mut pipelines = vec![f64::INFINITY; sections.sections.len()];
    for start in 0..starts {
        let ways = devices.ways_from(start);
        for section in sections.starting_at(start) {
            let end = sections.sections[section].end;
            pipelines[section] = ways.seconds[(end + 1) * hierarchy.per_server - 1];
        }
    }
    let servers = Level::new(
        sections,
        &pipelines,
        hierarchy.outer(),
        hierarchy.servers,
        most_replicas,
    );
    let ways = servers.ways_from(0);
    let bottleneck = ways.seconds[(all + 1) * hierarchy.servers - 1];
    let (mut stages, mut replicas, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    let mut start = 0;
    for (end, servers) in servers.stages(0, all) {
        let first = stages.len();
        for (place, share) in devices.stages(start, end) {
            stages.push(start..place);
            replicas.push(share);
            start = place;
        }
        groups.push(Group {
            stages: first..stages.len(),
            servers,
        });
    }
    Best {
        plan: Grouped {
            stages: Partition::new(stages, replicas),
            groups,
        },
        bottleneck,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cost::interval::SkipCount;
    use crate::graph::LayerGraph;
    use crate::testing;

    fn crossing(graph: &LayerGraph) -> Vec<f64> {
        let cut = |place| {
            let cut = graph.tensors().iter().filter(move |t| {
                t.producer < place && t.readers.iter().any(|&reader| reader >= place)
            });
            cut.map(|t| t.bytes).sum()
        };
        (0..=graph.len()).map(cut).collect()
    }

    /// All ways to write `units` or less as shares of stages that end at some place up to `end`.
    fn chains(start: usize, end: usize, units: usize) -> Vec<Vec<(usize, usize)>> {
        if start == end {
            return vec![Vec::new()];
        }
        let mut all = Vec::new();
        for place in start + 1..=end {
            for share in 1..=units {
                for mut rest in chains(place, end, units - share) {
                    rest.insert(0, (place, share));
                    all.push(rest);
                }
            }
        }
        all
    }

    fn brute(graph: &LayerGraph, hierarchy: &Hierarchy, activations: bool) -> f64 {
        let mut least = f64::INFINITY;
        for groups in chains(0, graph.len(), hierarchy.servers) {
            let mut plans = vec![Grouped {
                stages: Partition::new(Vec::new(), Vec::new()),
                groups: Vec::new(),
            }];
            let mut start = 0;
            for (end, servers) in groups {
                let mut longer = Vec::new();
                for plan in &plans {
                    for stages in chains(start, end, hierarchy.per_server) {
                        let mut plan = plan.clone();
                        let first = plan.stages.stages.len();
                        let mut begin = start;
                        for (place, replicas) in stages {
                            plan.stages.stages.push(begin..place);
                            plan.stages.replicas.push(replicas);
                            plan.stages.recompute.push(false);
                            begin = place;
                        }
                        plan.groups.push(Group {
                            stages: first..plan.stages.stages.len(),
                            servers,
                        });
                        longer.push(plan);
                    }
                }
                plans = longer;
                start = end;
            }
            for plan in plans {
                least = least.min(hierarchy.evaluate(graph, &plan, activations).0);
            }
        }
        least
    }

    proptest! {
        #[test]
        fn all_ways_to_share_units_agree(
            mut first in proptest::collection::vec(0u32..50, 8),
            mut loads in proptest::collection::vec(0u32..50, 8),
            best in proptest::collection::vec(20u32..60, 8),
            shares in 1usize..9,
        ) {
            first.sort_unstable_by(|a, b| b.cmp(a));
            loads[1..].sort_unstable_by(|a, b| b.cmp(a));
            let floats = |numbers: &[u32]| numbers.iter().map(|&n| f64::from(n)).collect::<Vec<_>>();
            let (first, loads, best) = (floats(&first), floats(&loads), floats(&best));
            let (mut few, mut any, mut many) = (best.clone(), best.clone(), best);
            improve_any(&first, &loads[..shares], &mut any);
            improve_many(&first, &loads[..shares], &mut many);
            prop_assert_eq!(&any, &many);
            if shares == 8 {
                improve_few::<8>(&first, &loads, &mut few);
                prop_assert_eq!(&few, &any);
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn no_plan_of_whole_servers_is_better(
            layers in proptest::collection::vec((0u32..40, 0u64..400, 0u64..200), 1..5),
            skip in any::<bool>(),
            (servers, per_server) in (1usize..4, 1usize..4),
            activations in any::<bool>(),
        ) {
            let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
            let weights: Vec<u64> = layers.iter().map(|l| l.1).collect();
            let edges: Vec<u64> = layers[1..].iter().map(|l| l.2).collect();
            let mut profile = testing::chain(&ms, &weights, &edges);
            if skip && layers.len() > 2 {
                let mut edge = profile.edges[0].clone();
                edge.to = format!("L{}", layers.len() - 1);
                profile.edges.push(edge);
            }
            let graph = LayerGraph::new(&profile);
            let hierarchy = Hierarchy {
                servers,
                per_server,
                outer_bandwidth: 1e4,
                inner_bandwidth: 4e4,
            };
            let cut = if activations { crossing(&graph) } else { vec![0.0; graph.len() + 1] };
            let sections = Sections::new(&IntervalTable::new(&graph, SkipCount::Once), cut);
            let best = solve(&sections, &hierarchy, usize::MAX);
            let (value, _) = hierarchy.evaluate(&graph, &best.plan, activations);
            let exact = brute(&graph, &hierarchy, activations);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-12 + 1e-9 * b;
            prop_assert!(close(value, best.bottleneck), "{} evaluates to {}", best.bottleneck, value);
            prop_assert!(close(value, exact), "{} is not {}", value, exact);
            let whole: usize = best.plan.groups.iter().map(|g| g.servers).sum();
            prop_assert!(whole <= servers);
        }
    }
}
