//! How long planning takes: `cargo bench -p planner`.
//!
//! Chains of random layers, seconds for the search alone and for the whole plan with its baselines and simulations.

use std::time::Instant;

use planner::cost::interval::SkipCount;
use planner::cost::{Formula, Machine};
use planner::graph::LayerGraph;
use planner::plan::Cluster;
use planner::planning::{Course, Recompute, Request, Scope, Solver, plan};
use planner::profile::{Edge, FileRef, LayerProfile, PROFILE_SCHEMA, Profile};
use planner::solve::{Limits, Problem, dynamic_program, ilp};

/// A linear congruential generator (Knuth's MMIX constants): the same layers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

fn file(name: &str) -> FileRef {
    FileRef {
        file: name.to_owned(),
        sha256: "0".repeat(64),
    }
}

fn chain(layers: usize) -> Profile {
    let mut random = Random(1);
    let layer = |i: usize, random: &mut Random| {
        let forward_ms = 0.1 + random.below(1000) as f64 / 500.0;
        LayerProfile {
            name: format!("layer{i}"),
            kind: "Gemm".to_owned(),
            forward_ms,
            backward_ms: 2.0 * forward_ms,
            parameter_bytes: random.below(20_000_000),
            stash_bytes: random.below(10_000_000),
            ..LayerProfile::default()
        }
    };
    let layers: Vec<LayerProfile> = (0..layers).map(|i| layer(i, &mut random)).collect();
    let edges = (1..layers.len())
        .map(|i| Edge {
            from: layers[i - 1].name.clone(),
            to: layers[i].name.clone(),
            tensor: format!("tensor{i}"),
            bytes: random.below(5_000_000),
            gradient: true,
        })
        .collect();
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        model: file("random.onnx"),
        device: "none".to_owned(),
        batch_size: 32,
        threads: 1,
        optimizer: None,
        layers,
        edges,
        tied: Vec::new(),
        whole_step_ms: None,
        whole_step_samples_ms: Vec::new(),
        communication_s_per_byte: 0.0,
    }
}

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
