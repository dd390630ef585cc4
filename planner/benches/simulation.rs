//! How long 10,000 workers take to simulate: `cargo bench -p planner --bench simulation`.
//!
//! One hundred minibatches through pipelines of 10,000 workers of several shapes: the schedule is made, proved and
//! simulated, with seconds for each and bytes of the operations.

use std::time::Instant;

use planner::cost::{Evaluation, Machine, Partition};
use planner::graph::LayerGraph;
use planner::profile::{Edge, FileRef, LayerProfile, PROFILE_SCHEMA, Profile};
use planner::schedule::{Op, Schedule, StageLink, StageShape, admit};
use planner::simulate::run;

const WORKERS: usize = 10_000;
const MINIBATCHES: usize = 100;

fn chain(layers: usize) -> Profile {
    let layer = |i: usize| LayerProfile {
        name: format!("layer{i}"),
        kind: "Gemm".to_owned(),
        forward_ms: 1.0,
        backward_ms: 2.0,
        parameter_bytes: 10_000_000,
        stash_bytes: 1_000_000,
        ..LayerProfile::default()
    };
    let edge = |i: usize| Edge {
        from: format!("layer{}", i - 1),
        to: format!("layer{i}"),
        tensor: format!("tensor{i}"),
        bytes: 1_000_000,
        gradient: true,
        gradient_bytes: None,
    };
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        model: FileRef {
            file: "chain".to_owned(),
            sha256: "0".repeat(64),
        },
        device: "none".to_owned(),
        batch_size: 32,
        threads: 1,
        optimizer: None,
        reading: None,
        layers: (0..layers).map(layer).collect(),
        edges: (1..layers).map(edge).collect(),
        tied: Vec::new(),
        whole_step_ms: None,
        whole_step_samples_ms: Vec::new(),
        communication_s_per_byte: 0.0,
    }
}

fn main() {
    println!("{WORKERS} workers, {MINIBATCHES} minibatches");
    println!(
        "{:>15} {:>11} {:>9} {:>8} {:>8} {:>9}",
        "stages", "operations", "bytes", "made s", "proved s", "simulated s"
    );
    for stages in [1, 10, 100, 1000, WORKERS] {
        let machine = Machine {
            bandwidth: 1.25e9,
            latency: 1e-5,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        };
        let replicas = WORKERS / stages;
        let graph = LayerGraph::new(&chain(stages));
        let partition = Partition::new(
            (0..stages).map(|i| i..i + 1).collect(),
            vec![replicas; stages],
        );
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let links: Vec<StageLink> = evaluation.links.iter().map(|l| l.link()).collect();
        let depth = |stage: usize| (stages - stage).min(MINIBATCHES);
        let mut shapes: Vec<StageShape> = (0..stages)
            .map(|stage| StageShape {
                replicas,
                depth: depth(stage),
                delay: 0,
            })
            .collect();
        admit(&mut shapes);
        let start = Instant::now();
        let schedule = Schedule::one_f_one_b(&shapes, &links, MINIBATCHES).expect("a pipeline");
        let made = start.elapsed();
        let start = Instant::now();
        schedule.check().expect("a right schedule");
        let proved = start.elapsed();
        let start = Instant::now();
        let trace = run(&schedule, &evaluation, &machine).expect("no deadlock");
        let simulated = start.elapsed();
        assert!(trace.end > 0.0);
        let operations: usize = schedule.operations.iter().map(Vec::len).sum();
        println!(
            "{:>15} {operations:>11} {:>9} {:>8.3} {:>8.3} {:>9.3}",
            format!("{stages} x{replicas}"),
            operations * size_of::<Op>(),
            made.as_secs_f64(),
            proved.as_secs_f64(),
            simulated.as_secs_f64(),
        );
    }
}
