//! What the tests of whole runs share: plans for real models, and runs of them.
#![allow(
    dead_code,
    reason = "every test program compiles this module and uses a part of it"
)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use executor::data::DataOptions;
use executor::error::RunError;
use executor::job::{Baseline, Options, prepare};
use executor::learning_rate::{Course, Decay};
use executor::reading::Overrides;
use executor::train::{Epoch, Job, Observer, Outcome, Step, train};
use models::graph::{BuildOptions, Graph};
use models::init::Init;
use models::loss::Classes;
use models::onnx::Model;
use models::optimizer::Optimizer;
use planner::Plan;
use planner::schedule::{StageShape, admit, noam};
use serde_json::{Value, json};

/// A file of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// LeNet-5 for 28x28 digits.
pub fn lenet() -> PathBuf {
    repository("models/zoo/lenet5.onnx")
}

/// Convolutions, batch norm, dropout and a skip connection for 8x8 digits.
pub fn norm_dropout_skip() -> PathBuf {
    repository("executor/tests/models/norm_dropout_skip.onnx")
}

/// Sixteen fully connected layers for 8x8 digits.
pub fn deep() -> PathBuf {
    repository("executor/tests/models/deep.onnx")
}

/// 10,000 digits for [`lenet`].
pub fn mnist() -> PathBuf {
    repository("data/mnist10k.npz")
}

/// 1,797 digits for [`norm_dropout_skip`].
pub fn digits() -> PathBuf {
    repository("data/digits8x8.npz")
}

/// Depths by the paper's NOAM, raised where a round needs more; `delay` where a stage is replicated.
pub fn shapes(replicas: &[usize], delay: usize) -> Vec<StageShape> {
    let mut shapes: Vec<StageShape> = noam(replicas)
        .into_iter()
        .zip(replicas)
        .map(|(depth, &replicas)| StageShape {
            replicas,
            depth,
            delay: if replicas > 1 { delay } else { 0 },
        })
        .collect();
    admit(&mut shapes);
    shapes
}

/// A plan that cuts the model's layers into stages of about the same number of them.
pub fn plan(model: &Path, batch_size: usize, shapes: &[StageShape]) -> Plan {
    let opened = Model::open(model).unwrap();
    let build = BuildOptions {
        batch: Some(batch_size),
        ..BuildOptions::default()
    };
    let graph = Graph::build(&opened, &build).unwrap();
    let names: Vec<String> = graph.layers().iter().map(|l| l.name.clone()).collect();
    let file = json!({ "file": model.display().to_string(), "sha256": opened.sha256() });
    plan_of(&names, &file, batch_size, shapes)
}

/// A plan that cuts layers of these names into stages of about the same number of them; `file` is model and profile.
pub fn plan_of(names: &[String], file: &Value, batch_size: usize, shapes: &[StageShape]) -> Plan {
    let count = shapes.len();
    let mut workers = 0;
    let stages: Vec<Value> = shapes
        .iter()
        .enumerate()
        .map(|(index, shape)| {
            let first = workers;
            workers += shape.replicas;
            json!({
                "layers": names[index * names.len() / count..(index + 1) * names.len() / count],
                "replicas": shape.replicas,
                "depth": shape.depth,
                "delay": shape.delay,
                "versions": shape.depth + shape.delay,
                "workers": (first..workers).collect::<Vec<_>>(),
                "compute_s": 0.001, "sync_s": 0.0, "traffic_s": 0.0,
                "parameter_bytes": 0, "stash_bytes": 0, "memory_bytes": 0,
            })
        })
        .collect();
    let links: Vec<Value> = (1..count)
        .map(|to| json!({ "from": to - 1, "to": to, "gradient": true }))
        .collect();
    let baseline = json!({
        "bottleneck_s": 0.001, "throughput_samples_per_s": 1000.0,
        "bytes_per_minibatch": 0.0, "memory_bytes": 0,
    });
    let plan = json!({
        "schema": planner::plan::PLAN_SCHEMA,
        "model": file,
        "profile": file,
        "batch_size": batch_size,
        "threads": 1,
        "cluster": { "devices": workers, "bandwidth_bytes_per_s": 1e9 },
        "schedule": "1f1b",
        "stages": stages,
        "links": links,
        "workers": workers,
        "bottleneck_s": 0.001,
        "bottleneck": "stage 0",
        "lower_bound_s": 0.001,
        "gap": 0.0,
        "optimal": true,
        "period_s": 0.001,
        "throughput_samples_per_s": 1000.0,
        "bytes_per_minibatch": 0.0,
        "baselines": {
            "data_parallel": baseline, "model_parallel": baseline, "straight": baseline,
        },
    });
    serde_json::from_value(plan).unwrap()
}

/// Plain SGD on a data set for so many minibatches.
pub fn options(data: &Path, minibatches: usize) -> Options {
    Options {
        model: None,
        reading: Overrides {
            training_form: Some(true),
            ..Overrides::default()
        },
        baseline: None,
        data: Some(DataOptions {
            data: data.to_owned(),
            labels: None,
            test_data: None,
            test_labels: None,
            x_name: None,
            y_name: None,
            x_test_name: None,
            y_test_name: None,
            test_fraction: 0.01,
            seq: None,
            seed: 7,
        }),
        classes: Classes::default(),
        optimizer: Optimizer::Sgd {
            momentum: 0.9,
            weight_decay: 0.0,
            nesterov: false,
        },
        learning_rate: 0.02,
        course: Course {
            warm_up: 0,
            decay: Decay::Cosine,
            least: 0.0,
        },
        clip_norm: None,
        scale_learning_rate: true,
        weight_stashing: true,
        init: Init::He,
        seed: 7,
        epochs: 1,
        max_minibatches: Some(minibatches),
        device: "cpu".to_owned(),
        threads: Some(1),
        pin: false,
        bucket_bytes: executor::worker::BUCKET_BYTES,
        emulation: None,
        keep_outputs: false,
    }
}

/// Keeps all losses.
#[derive(Default)]
pub struct Losses(pub Vec<f32>);

impl Observer for Losses {
    fn begin_epoch(&mut self, _epoch: usize, _minibatches: usize) {}

    fn step(&mut self, step: &Step) -> Result<(), RunError> {
        self.0.push(step.loss);
        Ok(())
    }

    fn epoch(&mut self, _epoch: &Epoch) -> Result<(), RunError> {
        Ok(())
    }
}

/// A prepared job.
pub fn job(plan: &Plan, options: &Options) -> Job {
    let stop = Arc::new(AtomicBool::new(false));
    prepare(Path::new("plan.json"), plan, options, stop)
        .unwrap()
        .1
}

/// Runs a job and keeps its losses.
pub fn run(job: &Job) -> (Vec<f32>, Outcome) {
    let mut losses = Losses::default();
    let outcome = train(job, &mut losses).unwrap();
    (losses.0, outcome)
}

/// As [`options`], for a baseline.
pub fn baseline(data: &Path, minibatches: usize, baseline: Baseline) -> Options {
    Options {
        baseline: Some(baseline),
        ..options(data, minibatches)
    }
}
