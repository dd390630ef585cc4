//! The contiguous partitioning of Tarnawski et al. 2020 (arXiv 2006.16423), computed anew from their files by their
//! own rule, as a judge of dp-plan and of how it reads them.
//!
//! Their devices are some accelerators and a CPU. An accelerator takes the sum of its nodes' latencies, and for each
//! node whose output crosses its border, in either direction and however often, that output's cost once. The CPU has
//! latencies of its own and communicates for free. What is minimized is the largest load of a device. dp-plan knows
//! no such CPU, so it is compared with the optimum of the accelerators alone.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use assert_cmd::Command;
use serde::Deserialize;
use serde_json::Value;

/// Their profiles, which are not part of this repository.
const WORKLOADS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../shared/data/peer-profiles/dnn-partitioning"
);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Workload {
    #[serde(rename = "maxFPGAs")]
    accelerators: usize,
    #[serde(rename = "maxCPUs")]
    cpus: usize,
    #[serde(rename = "maxSizePerFPGA")]
    memory: f64,
    nodes: Vec<Node>,
    edges: Vec<Link>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    id: u64,
    fpga_latency: f64,
    cpu_latency: f64,
    size: f64,
    is_backward_node: Value,
    color_class: Option<i64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Link {
    source_id: u64,
    dest_id: u64,
    cost: f64,
}

impl Node {
    fn is_backward(&self) -> bool {
        self.is_backward_node == Value::Bool(true) || self.is_backward_node == 1
    }
}

const WORDS: usize = 4;

/// Groups of nodes, one bit each.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Groups([u64; WORDS]);

impl Groups {
    fn has(self, group: usize) -> bool {
        self.0[group / 64] >> (group % 64) & 1 == 1
    }

    fn with(mut self, group: usize) -> Self {
        self.0[group / 64] |= 1 << (group % 64);
        self
    }

    fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    fn is_empty(self) -> bool {
        self.0 == [0; WORDS]
    }
}

/// An output that some other group reads.
struct Output {
    group: usize,
    readers: Groups,
    cost: f64,
}

/// Sums over some groups.
#[derive(Clone, Copy, Default)]
struct Sums {
    accelerator: f64,
    cpu: f64,
    size: f64,
}

/// A workload whose nodes that have to stay together are one group.
struct Judge {
    workload: Workload,
    sums: Vec<Sums>,
    /// The groups that each group's forward nodes read from.
    reads: Vec<Groups>,
    outputs: Vec<Output>,
}

impl Judge {
    fn new(workload: Workload) -> Self {
        let place: HashMap<u64, usize> = (workload.nodes.iter().map(|n| n.id).zip(0..)).collect();
        let arrows: Vec<(usize, usize, f64)> = (workload.edges.iter())
            .map(|e| (place[&e.source_id], place[&e.dest_id], e.cost))
            .collect();
        let group = groups(&workload.nodes, &arrows);
        let count = group.iter().max().unwrap() + 1;
        assert!(count <= WORDS * 64, "{count} groups");
        let mut sums = vec![Sums::default(); count];
        for (node, &g) in workload.nodes.iter().zip(&group) {
            sums[g].accelerator += node.fpga_latency;
            sums[g].cpu += node.cpu_latency;
            sums[g].size += node.size;
        }
        let mut reads = vec![Groups::default(); count];
        let mut outputs: HashMap<usize, Output> = HashMap::new();
        for (from, to) in precedence(&workload.nodes, &arrows, &group) {
            reads[group[to]] = reads[group[to]].with(group[from]);
        }
        for &(from, to, cost) in arrows.iter().filter(|a| group[a.0] != group[a.1]) {
            let output = outputs.entry(from).or_insert(Output {
                group: group[from],
                readers: Groups::default(),
                cost,
            });
            output.readers = output.readers.with(group[to]);
            output.cost = output.cost.max(cost);
        }
        Self {
            workload,
            sums,
            reads,
            outputs: outputs.into_values().filter(|o| o.cost > 0.0).collect(),
        }
    }

    /// What can have been placed when some device is full: with each group all that it reads from. Small ones first.
    fn downsets(&self) -> Vec<(Groups, Sums)> {
        let mut sets = vec![(Groups::default(), Sums::default())];
        let mut seen = HashSet::from([Groups::default()]);
        let mut next = 0;
        while next < sets.len() {
            let (set, sums) = sets[next];
            for (g, own) in self.sums.iter().enumerate() {
                let larger = set.with(g);
                let ready = !set.has(g) && self.reads[g].without(set).is_empty();
                if ready && seen.insert(larger) {
                    let sums = Sums {
                        accelerator: sums.accelerator + own.accelerator,
                        cpu: sums.cpu + own.cpu,
                        size: sums.size + own.size,
                    };
                    sets.push((larger, sums));
                }
            }
            next += 1;
        }
        sets
    }

    /// Milliseconds that an accelerator with these groups communicates.
    fn communication(&self, held: Groups) -> f64 {
        let crossing = self.outputs.iter().filter(|output| {
            if held.has(output.group) {
                !output.readers.without(held).is_empty()
            } else {
                output.readers.without(held) != output.readers
            }
        });
        crossing.map(|output| output.cost).sum()
    }

    /// The least possible largest load, in milliseconds, with as many CPUs.
    fn optimum(&self, cpus: usize) -> f64 {
        let sets = self.downsets();
        let accelerators = self.workload.accelerators;
        // least[set][a][c]: the largest load when a accelerators and c CPUs hold the set.
        let mut least = vec![vec![vec![f64::INFINITY; cpus + 1]; accelerators + 1]; sets.len()];
        least[0] = vec![vec![0.0; cpus + 1]; accelerators + 1];
        for end in 1..sets.len() {
            let (until, upper) = sets[end];
            let (earlier, rest) = least.split_at_mut(end);
            let best = &mut rest[0];
            for start in (0..end).rev() {
                let (before, lower) = sets[start];
                if !before.without(until).is_empty() {
                    continue;
                }
                let latency = upper.accelerator - lower.accelerator;
                let cpu = upper.cpu - lower.cpu;
                let fits = upper.size - lower.size <= self.workload.memory;
                // Costly to count, so only where it may matter.
                let mut load = None;
                for a in 0..=accelerators {
                    for c in 0..=cpus {
                        if c > 0 {
                            best[a][c] = best[a][c].min(earlier[start][a][c - 1].max(cpu));
                        }
                        if a == 0 || !fits {
                            continue;
                        }
                        let others = earlier[start][a - 1][c];
                        if others.max(latency) < best[a][c] {
                            let load = *load.get_or_insert_with(|| {
                                latency + self.communication(until.without(before))
                            });
                            best[a][c] = best[a][c].min(others.max(load));
                        }
                    }
                }
            }
        }
        least[sets.len() - 1][accelerators][cpus]
    }
}

/// Pairs of nodes of which the first is never behind the second in a pipeline.
///
/// The arrows of the forward; and those of the backward, turned round, at groups that have no forward.
fn precedence(
    nodes: &[Node],
    arrows: &[(usize, usize, f64)],
    group: &[usize],
) -> Vec<(usize, usize)> {
    let mut has_forward = vec![false; nodes.len()];
    for (node, &g) in nodes.iter().zip(group) {
        has_forward[g] |= !node.is_backward();
    }
    let pairs = arrows.iter().filter_map(|&(from, to, _)| {
        match (nodes[from].is_backward(), nodes[to].is_backward()) {
            (false, false) => Some((from, to)),
            (true, true) if !has_forward[group[from]] || !has_forward[group[to]] => {
                Some((to, from))
            }
            _ => None,
        }
    });
    pairs.filter(|&(a, b)| group[a] != group[b]).collect()
}

/// The group of each node: colour classes, and those that wait for each other together.
fn groups(nodes: &[Node], arrows: &[(usize, usize, f64)]) -> Vec<usize> {
    let mut group: Vec<usize> = (0..nodes.len()).collect();
    let join = |group: &mut Vec<usize>, a: usize, b: usize| {
        let (a, b) = (group[a], group[b]);
        for g in group.iter_mut().filter(|g| **g == b) {
            *g = a;
        }
    };
    let mut first = HashMap::new();
    for (i, node) in nodes.iter().enumerate() {
        if let Some(color) = node.color_class {
            join(&mut group, *first.entry(color).or_insert(i), i);
        }
    }
    // Which groups lead to which.
    let mut leads = vec![vec![false; nodes.len()]; nodes.len()];
    for (from, to) in precedence(nodes, arrows, &group) {
        leads[group[from]][group[to]] = true;
    }
    for via in 0..nodes.len() {
        let onward = leads[via].clone();
        for row in leads.iter_mut().filter(|row| row[via]) {
            for (there, &further) in row.iter_mut().zip(&onward) {
                *there |= further;
            }
        }
    }
    for (a, after) in leads.iter().enumerate() {
        for (b, before) in leads.iter().enumerate().take(a) {
            if after[b] && before[a] {
                join(&mut group, b, a);
            }
        }
    }
    let mut numbers = HashMap::new();
    let numbered = group.iter().map(|&g| {
        let next = numbers.len();
        *numbers.entry(g).or_insert(next)
    });
    numbered.collect()
}

/// dp-plan's least bottleneck for the file's accelerators without replication, in milliseconds.
fn planned(file: &Path, accelerators: usize) -> f64 {
    let mut command = Command::cargo_bin("dp-plan").unwrap();
    command
        .arg(file)
        .args(["--gpus", &accelerators.to_string()]);
    // The costs of communication are in the file: links do not add any.
    command.args(["--bw", "900TB/s", "--straight", "--json"]);
    let output = command.assert().success().get_output().stdout.clone();
    let plan: Value = serde_json::from_slice(&output).unwrap();
    plan["bottleneck_s"].as_f64().unwrap() * 1e3
}

/// Compares the judge with the figure that the planner of Tarnawski et al. printed, and dp-plan with the judge.
fn compare(name: &str, printed: f64) {
    let file = Path::new(WORKLOADS).join(name);
    if !file.exists() {
        eprintln!("skipped: {} is not there", file.display());
        return;
    }
    let text = std::fs::read_to_string(&file).unwrap();
    let judge = Judge::new(serde_json::from_str(&text).unwrap());
    let with_cpu = judge.optimum(judge.workload.cpus);
    let alone = judge.optimum(0);
    let ours = planned(&file, judge.workload.accelerators);
    eprintln!("{name}: with CPU {with_cpu} ms, without {alone} ms, dp-plan {ours} ms");
    assert!((with_cpu - printed).abs() <= 0.5001e-3, "{with_cpu}");
    assert!((ours / alone - 1.0).abs() <= 1e-6, "{ours} against {alone}");
}

#[test]
fn bert24_layers_forward() {
    compare("LayerGraphs_bert24_inference.json", 17.790);
}

#[test]
fn bert24_layers() {
    compare("LayerGraphs_bert24_training.json", 41.746);
}

#[test]
fn resnet50_layers_forward() {
    compare("LayerGraphs_resnet50_inference.json", 33.775);
}

#[test]
fn resnet50_layers() {
    compare("LayerGraphs_resnet50_training.json", 78.632);
}

#[test]
fn resnet50_operators_forward() {
    compare("OperatorGraphs_resnet50_inference.json", 124.349);
}

#[test]
fn resnet50_operators() {
    compare("OperatorGraphs_resnet50_training.json", 255.194);
}

#[test]
fn bert3_operators_forward() {
    compare("OperatorGraphs_bert_l-3_inference.json", 27.919);
}

#[test]
fn bert3_operators() {
    compare("OperatorGraphs_bert_l-3_training.json", 65.303);
}
