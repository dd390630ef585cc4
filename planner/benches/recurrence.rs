//! Planning beside the plain recurrence of arXiv 1806.03377, timed in the same run: `cargo bench -p planner --bench recurrence`.
//!
//! The recurrence takes layers^2 devices^2 / 4 steps. Our search answers the same question, the smallest bottleneck by
//! that paper's formula over the layers in the order they are given in, and both have to agree. The last column is the
//! whole of what dp-plan does: our cost model, other orders of the layers, baselines and simulations.

mod chains;

use std::path::Path;
use std::time::Instant;

use planner::cost::interval::{IntervalTable, SkipCount};
use planner::cost::{Formula, Machine};
use planner::graph::LayerGraph;
use planner::import;
use planner::plan::Cluster;
use planner::planning::{Course, Recompute, Request, Scope, Solver, plan};
use planner::profile::Profile;
use planner::schedule::Keeping;
use planner::solve::{Limits, Problem, dynamic_program};

use chains::{chain, file};

/// More steps of the recurrence are not waited for.
const MOST_STEPS: f64 = 3e9;

const PEERS: [&str; 2] = ["pipedream", "dnn-partitioning"];

fn cluster(devices: usize) -> Cluster {
    Cluster {
        devices,
        bandwidth_bytes_per_s: 1.25e9,
        latency_s: 0.0,
        local: false,
        memory_bytes: None,
        servers: Vec::new(),
    }
}

/// The smallest bottleneck: `A(j, m)` is that of layers `..j` on m devices, the smallest over the last stage's first
/// layer i and replicas r of the larger of `A(i, m - r)` and that stage's load, the cut before it included.
fn recurrence(table: &IntervalTable, machine: &Machine, devices: usize) -> f64 {
    let layers = table.layers();
    let mut best = vec![vec![f64::INFINITY; devices + 1]; layers + 1];
    // No layers are left over, whatever number of devices is idle.
    best[0].fill(0.0);
    for end in 1..=layers {
        for start in 0..end {
            let sums = table.get(start, end);
            for replicas in 1..=devices {
                let load = Formula::Paper.load(sums, replicas, machine);
                for all in replicas..=devices {
                    let bottleneck = best[start][all - replicas].max(load);
                    best[end][all] = best[end][all].min(bottleneck);
                }
            }
        }
    }
    best[layers][devices]
}

fn seconds<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let began = Instant::now();
    let result = work();
    (result, began.elapsed().as_secs_f64())
}

/// One line: both searches and the whole of planning. Returns the ratio of the searches, if both were timed.
fn compare(name: &str, profile: &Profile, devices: usize) -> Option<f64> {
    let cluster = cluster(devices);
    let machine = Machine::new(&cluster, 0.0);
    let graph = LayerGraph::new(profile);
    let limits = Limits {
        devices,
        most_replicas: devices,
        memory: f64::INFINITY,
        recompute: Recompute::Never,
        keeping: Keeping::STASHING,
    };
    let (ours, search_s) = seconds(|| {
        let problem = Problem::new(&graph, machine, Formula::Paper, limits, SkipCount::Once);
        dynamic_program(&problem).map(|found| found.bottleneck)
    });
    let layers = graph.len();
    let steps = (layers as f64 * devices as f64).powi(2) / 4.0;
    let plain_s = (steps <= MOST_STEPS).then(|| {
        let (plain, plain_s) = seconds(|| {
            let table = IntervalTable::new(&graph, SkipCount::Once);
            recurrence(&table, &machine, devices)
        });
        assert_eq!(Some(plain), ours, "{name}: both are exact");
        plain_s
    });
    let request = Request {
        cluster,
        solver: Solver::Dp,
        formula: Formula::Ours,
        scope: Scope::All,
        recompute: Recompute::Auto,
        together: Vec::new(),
        course: Course::default(),
    };
    let (planned, whole_s) = seconds(|| plan(profile, file("profile.json"), &request));
    let failed = planned.err().map_or(String::new(), |e| format!("  {e}"));
    let ratio = plain_s.map(|plain_s| search_s / plain_s);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    println!(
        "{name:34} {layers:6} {devices:8} {:>12} {search_s:10.4} s {:>8} {whole_s:10.3} s{failed}",
        or_dash(plain_s.map(|s| format!("{s:.4} s"))),
        or_dash(ratio.map(|r| format!("{r:.4}"))),
    );
    ratio
}

fn main() {
    println!(
        "{:34} {:>6} {:>8} {:>12} {:>12} {:>8} {:>12}",
        "profile", "layers", "devices", "recurrence", "our search", "ratio", "whole plan"
    );
    let mut ratios = Vec::new();
    let shared = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../shared/data/peer-profiles"
    ));
    for peer in PEERS {
        let folder = shared.join(peer);
        let Ok(entries) = folder.read_dir() else {
            println!(
                "skipped {peer}'s profiles: {} is not there",
                folder.display()
            );
            continue;
        };
        let mut paths: Vec<_> = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.is_file())
            .collect();
        paths.sort();
        for path in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            match import::load(&path, None, None) {
                Ok(imported) => ratios.extend(compare(&name, &imported.profile, 16)),
                Err(error) => println!("skipped {name}: {error}"),
            }
        }
    }
    for (layers, devices) in [
        (30, 16),
        (100, 64),
        (300, 256),
        (1000, 64),
        (1000, 1024),
        (5000, 4),
    ] {
        ratios.extend(compare("random chain", &chain(layers), devices));
    }
    let logs: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    let mean = (logs / ratios.len() as f64).exp();
    println!("our search takes {mean:.4} of the recurrence's time in the geometric mean");
}
