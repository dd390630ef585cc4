//! How long planning takes: `cargo bench -p planner`.
//!
//! Chains of random layers, seconds for the search alone and for the whole plan with its baselines and simulations.

mod chains;

use std::time::Instant;

use planner::cost::interval::SkipCount;
use planner::cost::{Formula, Machine};
use planner::graph::LayerGraph;
use planner::plan::Cluster;
use planner::planning::{Course, Recompute, Request, Scope, Solver, plan};
use planner::solve::{Limits, Problem, dynamic_program, ilp};

use chains::{chain, file};

fn main() {
    println!("layers  devices  memory    search dp    search ilp    whole plan");
    for (layers, devices, memory) in [
        (30, 4, None),
        (30, 16, None),
        (30, 16, Some(4u64 << 30)),
        (100, 64, None),
        (300, 256, None),
        (1000, 1024, None),
        (1000, 1024, Some(16u64 << 30)),
    ] {
        let profile = chain(layers);
        let cluster = Cluster {
            devices,
            bandwidth_bytes_per_s: 1.25e9,
            latency_s: 20e-6,
            local: false,
            memory_bytes: memory,
            servers: Vec::new(),
        };
        let began = Instant::now();
        let problem = Problem::new(
            &LayerGraph::new(&profile),
            Machine::new(&cluster, 0.0),
            Formula::Ours,
            Limits {
                devices,
                most_replicas: devices,
                memory: memory.map_or(f64::INFINITY, |bytes| bytes as f64),
                recompute: Recompute::Auto,
                keeping: planner::schedule::Keeping::STASHING,
            },
            SkipCount::Once,
        );
        let found = dynamic_program(&problem);
        let dp = began.elapsed().as_secs_f64();
        let began = Instant::now();
        let ilp = (layers <= 30).then(|| {
            let other = ilp(&problem).expect("microlp solves small programs");
            assert_eq!(
                found.as_ref().map(|s| s.bottleneck),
                other.map(|s| s.bottleneck)
            );
            began.elapsed().as_secs_f64()
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
        let began = Instant::now();
        let planned = plan(&profile, file("profile.json"), &request);
        let whole = began.elapsed().as_secs_f64();
        let ilp = ilp.map_or("-".to_owned(), |s| format!("{s:.3} s"));
        let memory = memory.map_or("-".to_owned(), |m| format!("{} GiB", m >> 30));
        println!(
            "{layers:6}  {devices:7}  {memory:6}  {dp:9.3} s  {ilp:>12}  {whole:10.3} s{}",
            planned.err().map_or(String::new(), |e| format!("  {e}"))
        );
    }
}
