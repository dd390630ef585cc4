//! The pipeline against a plain simulation of its update rule, minibatch by minibatch in one thread.

mod common;

use std::path::Path;

use executor::job::Baseline;
use executor::train::{Job, Material};
use models::device;
use models::device::params::Binary;
use models::ops::Context;
use models::optimizer::Optimizer;
use models::tensor::Tensor;
use planner::schedule::{Pace, ScheduleKind, StageShape};

use common::{digits, job, lenet, mnist, norm_dropout_skip, options, plan, run, shapes};

/// Largest relative difference that passes for equal.
const TOLERANCE: f32 = 1e-5;

/// One stage of the simulation: every version it ever had, none ever freed or overwritten.
struct Simulated {
    versions: Vec<Vec<Vec<f32>>>,
    velocity: Vec<Vec<f32>>,
    /// Running statistics of each replica.
    states: Vec<Vec<Tensor>>,
    /// Sum of the gradients of the round under way, and how many minibatches are in it.
    gradients: Vec<Vec<f32>>,
    summed: usize,
}

/// The losses of `w(q+1) = w(q) - lr * velocity`, the velocity being fed the mean over round q of
/// the gradients at version `q - K - d + 1`.
fn simulate(job: &Job, minibatches: usize) -> Vec<f32> {
    let Material::Dataset(dataset) = &job.material else {
        panic!("the simulation wants data");
    };
    let Optimizer::Sgd { momentum, .. } = job.settings.optimizer else {
        panic!("the simulation knows SGD only");
    };
    let device = device::open("cpu", 1).unwrap();
    let batch = job.settings.batch_size;
    let order = dataset.train.order(job.settings.seed, 1);
    let mut stages: Vec<Simulated> = job
        .stages
        .iter()
        .map(|stage| {
            let weights: Vec<Vec<f32>> = stage
                .program
                .weights()
                .iter()
                .map(|&p| job.weights[p].f32s().to_vec())
                .collect();
            let states: Vec<Tensor> = stage
                .program
                .states()
                .iter()
                .map(|&s| job.states[s].clone())
                .collect();
            let zeros: Vec<Vec<f32>> = weights.iter().map(|w| vec![0.0; w.len()]).collect();
            Simulated {
                versions: vec![weights],
                velocity: zeros.clone(),
                states: vec![states; stage.shape.replicas],
                gradients: zeros,
                summed: 0,
            }
        })
        .collect();
    let weights_of = |stage: usize, version: &[Vec<f32>]| -> Vec<Tensor> {
        let parameters = job.stages[stage].program.weights().iter();
        parameters
            .zip(version)
            .map(|(&p, values)| Tensor::from_f32(job.weights[p].shape(), values))
            .collect()
    };

    let mut losses = Vec::new();
    for m in 0..minibatches {
        let data = dataset.train.minibatch(&order[m * batch..(m + 1) * batch]);
        let context = Context {
            device: &*device,
            training: true,
            seed: job.settings.seed,
            first_sample: (m * batch) as u64,
        };
        // Values that stages gave, by their number in the graph.
        let mut values = std::collections::HashMap::new();
        let mut passes = Vec::new();
        for (s, stage) in job.stages.iter().enumerate() {
            let StageShape {
                replicas,
                depth,
                delay,
            } = stage.shape;
            let length = round_length(job, s);
            let lag = match job.settings.pace.kind {
                ScheduleKind::OneFOneB => depth + delay,
                ScheduleKind::TwoBw => 2,
                ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe => 1,
                // The largest of what any stage has in flight, in steps of all.
                ScheduleKind::VerticalSync => {
                    let all = job.stages.iter().map(|stage| stage.shape);
                    let lag =
                        |s: StageShape| 1 + ((s.depth - 1) * s.replicas).div_ceil(length) + s.delay;
                    all.map(lag).max().unwrap()
                }
                other => panic!("{other} has no rule here"),
            };
            let version = (m / length + 1).saturating_sub(lag);
            let weights = weights_of(s, &stages[s].versions[version]);
            let inputs = stage.program.inputs().iter();
            let inputs = inputs
                .map(|value| values.get(value).unwrap_or(&data.inputs[0]).clone())
                .collect();
            let states = &mut stages[s].states[m % replicas];
            let (outputs, stash) = stage.program.forward(&context, inputs, &weights, states);
            for (&value, output) in stage.program.outputs().iter().zip(outputs) {
                values.insert(value, output);
            }
            passes.push((weights, stash));
        }
        let last = job.stages.last().unwrap();
        let logits = &values[&last.program.outputs()[last.loss_output.unwrap()]];
        let result = job
            .settings
            .loss
            .forward_backward(&*device, logits, &data.target);
        losses.push(result.loss);

        let mut upstream = std::collections::HashMap::new();
        upstream.insert(
            last.program.outputs()[last.loss_output.unwrap()],
            result.gradient,
        );
        for (s, stage) in job.stages.iter().enumerate().rev() {
            let (weights, stash) = passes.pop().unwrap();
            let outputs = stage.program.outputs().iter();
            let grads = outputs.map(|value| upstream.remove(value)).collect();
            let gradients = stage.program.backward(&context, stash, &weights, grads);
            for (&value, gradient) in stage.program.inputs().iter().zip(gradients.inputs) {
                let Some(gradient) = gradient else { continue };
                // Several stages may read one value.
                let sum = match upstream.remove(&value) {
                    Some(other) => device.binary(Binary::Add, other, gradient),
                    None => gradient,
                };
                upstream.insert(value, sum);
            }
            let simulated = &mut stages[s];
            for (sum, gradient) in simulated.gradients.iter_mut().zip(&gradients.weights) {
                for (sum, &g) in sum.iter_mut().zip(gradient.f32s()) {
                    *sum += g;
                }
            }
            simulated.summed += 1;
            if simulated.summed == round_length(job, s) || m + 1 == minibatches {
                let scale = stage.shape.replicas as f32 / job.stages[0].shape.replicas as f32;
                // The warm-up, then the cosine, at the round's first minibatch.
                let first = m + 1 - simulated.summed;
                let warm_up = job.course.warm_up;
                let risen = (first + 1) as f32 / warm_up.max(1) as f32;
                let share = first.saturating_sub(warm_up) as f32 / (minibatches - warm_up) as f32;
                let cosine = (1.0 + (std::f32::consts::PI * share).cos()) / 2.0;
                let base = job.learning_rate * if first < warm_up { risen } else { cosine };
                let scaled = job.scale_learning_rate && job.settings.pace.has_own_rounds();
                let rate = base * if scaled { scale } else { 1.0 };
                let mut next = simulated.versions.last().unwrap().clone();
                let mean = |g: f32| f64::from(g / simulated.summed as f32);
                let all = simulated.gradients.iter().flatten();
                let norm = all.map(|&g| mean(g).powi(2)).sum::<f64>().sqrt() as f32;
                let clip = job
                    .settings
                    .clip_norm
                    .map_or(1.0, |most| (most / norm).min(1.0));
                for ((weight, velocity), sum) in next
                    .iter_mut()
                    .zip(&mut simulated.velocity)
                    .zip(&mut simulated.gradients)
                {
                    for ((w, v), g) in weight.iter_mut().zip(velocity).zip(sum) {
                        *v = momentum * *v + clip * *g / simulated.summed as f32;
                        *w -= rate * *v;
                        *g = 0.0;
                    }
                }
                simulated.versions.push(next);
                simulated.summed = 0;
            }
        }
    }
    losses
}

/// Minibatches of a step of a stage.
fn round_length(job: &Job, stage: usize) -> usize {
    match job.settings.pace.microbatches {
        0 => job.stages[stage].shape.replicas,
        together => together,
    }
}

fn assert_close(pipeline: &[f32], simulation: &[f32], what: &str) {
    assert_eq!(pipeline.len(), simulation.len(), "{what}");
    for (step, (p, s)) in pipeline.iter().zip(simulation).enumerate() {
        assert!(
            (p - s).abs() <= TOLERANCE * s.abs(),
            "{what}: step {step}: pipeline {p}, simulation {s}"
        );
    }
}

/// Runs every plan over an odd number of minibatches, and checks losses and versions held.
fn check(model: &Path, data: &Path, plans: &[&[usize]], minibatches: usize) {
    for replicas in plans {
        for delay in 0..=usize::from(replicas.iter().any(|&r| r > 1)) {
            let what = format!("{replicas:?} delay {delay}");
            let plan = plan(model, 16, &shapes(replicas, delay));
            let job = job(&plan, &options(data, minibatches));
            let (losses, outcome) = run(&job);
            assert_close(&losses, &simulate(&job, minibatches), &what);
            for stage in &plan.stages {
                for &worker in &stage.workers {
                    let held = outcome.workers[worker].most_versions;
                    assert!(
                        held <= stage.versions,
                        "{what}: worker {worker} held {held}"
                    );
                }
            }
        }
    }
}

#[test]
fn straight_pipelines_follow_the_rule() {
    check(&lenet(), &mnist(), &[&[1], &[1, 1], &[1, 1, 1]], 23);
}

#[test]
fn replicated_pipelines_follow_the_rule() {
    check(
        &lenet(),
        &mnist(),
        &[&[2, 1], &[1, 2], &[3, 1], &[2, 1, 1]],
        23,
    );
}

#[test]
fn a_skip_connection_goes_directly_to_the_stage_that_reads_it() {
    let plan = plan(&norm_dropout_skip(), 16, &shapes(&[1, 1, 1, 1], 0));
    let job = job(&plan, &options(&digits(), 9));
    let readers: Vec<usize> = job.stages[1].outgoing.iter().map(|l| l.stage).collect();
    assert_eq!(readers, [2, 3]);
    let (losses, _) = run(&job);
    assert_close(&losses, &simulate(&job, 9), "skip connection");
}

#[test]
fn batch_norm_and_dropout_follow_the_rule() {
    check(
        &norm_dropout_skip(),
        &digits(),
        &[&[1], &[1, 1], &[2, 1], &[2, 1, 2]],
        21,
    );
}

#[test]
fn a_language_model_follows_the_rule() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("text.txt");
    let text: String = (0..4000u32)
        .map(|i| char::from(b' ' + (i * i % 77) as u8))
        .collect();
    std::fs::write(&file, text).unwrap();
    let data = std::path::PathBuf::from(format!("text:{}", file.display()));
    let model = common::repository("models/zoo/chargpt.onnx");
    check(&model, &data, &[&[1, 1], &[2, 1], &[1, 1, 1]], 3);
}

#[test]
fn every_kind_of_schedule_follows_its_rule() {
    for kind in [
        ScheduleKind::OneFOneBFlush,
        ScheduleKind::Gpipe,
        ScheduleKind::TwoBw,
        ScheduleKind::VerticalSync,
    ] {
        for (replicas, delay) in [(&[1, 1][..], 0), (&[2, 1], 0), (&[1, 2, 1], 1)] {
            let what = format!("{kind} {replicas:?}");
            let mut plan = plan(&lenet(), 16, &shapes(replicas, delay));
            let pace = Pace::new(kind, &plan.shapes(), None).unwrap();
            plan.schedule = kind;
            plan.microbatches = Some(pace.microbatches);
            // Whole steps, and a partial one.
            let minibatches = 2 * pace.microbatches + 3;
            let job = job(&plan, &options(&mnist(), minibatches));
            let (losses, outcome) = run(&job);
            assert_close(&losses, &simulate(&job, minibatches), &what);
            for (stage, worker) in plan
                .stages
                .iter()
                .enumerate()
                .map(|(s, p)| (s, p.workers[0]))
            {
                let most = pace.holding(&plan.shapes(), stage).versions;
                let held = outcome.workers[worker].most_versions;
                assert!(
                    held <= most,
                    "{what}: worker {worker} held {held} of {most}"
                );
            }
        }
    }
}

#[test]
fn a_stage_that_runs_forward_again_learns_the_same() {
    let mut plan = plan(&norm_dropout_skip(), 16, &shapes(&[2, 1, 2], 0));
    let plain = job(&plan, &options(&digits(), 21));
    for stage in &mut plan.stages {
        stage.recompute = true;
    }
    let again = job(&plan, &options(&digits(), 21));
    assert!(again.stages.iter().all(|stage| stage.recompute));
    let ((losses, outcome), (expected, other)) = (run(&again), run(&plain));
    assert_eq!(losses, expected);
    let states = outcome.states.iter().zip(&other.states);
    assert!(states.into_iter().all(|(a, b)| a.f32s() == b.f32s()));
    let weights = outcome.weights.iter().zip(&other.weights);
    assert!(weights.into_iter().all(|(a, b)| a.f32s() == b.f32s()));
}

#[test]
fn warm_up_and_clipping_are_part_of_the_rule() {
    let plan = plan(&lenet(), 16, &shapes(&[2, 1], 1));
    let plain = job(&plan, &options(&mnist(), 23));
    let mut clipped = options(&mnist(), 23);
    clipped.clip_norm = Some(0.5);
    clipped.course.warm_up = 5;
    let job = job(&plan, &clipped);
    let (losses, _) = run(&job);
    assert_close(&losses, &simulate(&job, 23), "clipped");
    // It makes a difference.
    assert_ne!(losses, simulate(&plain, 23));
}

#[test]
fn without_stashing_losses_differ() {
    let plan = plan(&lenet(), 16, &shapes(&[1, 1, 1], 0));
    let stashing = job(&plan, &options(&mnist(), 23));
    let mut naive = options(&mnist(), 23);
    naive.weight_stashing = false;
    let (losses, outcome) = run(&job(&plan, &naive));
    let right = simulate(&stashing, 23);
    assert!(outcome.workers.iter().all(|w| w.most_versions == 1));
    // The first two losses come before the third stage's first update reaches anybody.
    let apart = losses
        .iter()
        .zip(&right)
        .filter(|(a, b)| (*a - *b).abs() > 10.0 * TOLERANCE * b.abs())
        .count();
    assert!(
        apart > 10,
        "{apart} of 23 losses differ: {losses:?} {right:?}"
    );
}

#[test]
fn data_parallel_is_gradient_accumulation_over_a_round() {
    // A round of 3 minibatches at one version, averaged: the simulation of one stage on 3 replicas.
    let plan = plan(&lenet(), 16, &shapes(&[2, 1], 0));
    let job = job(
        &plan,
        &common::baseline(&mnist(), 22, Baseline::DataParallel),
    );
    assert_eq!(job.stages.len(), 1);
    assert_eq!(job.stages[0].shape.replicas, 3);
    let (losses, _) = run(&job);
    assert_close(&losses, &simulate(&job, 22), "data parallel");
}

#[test]
fn the_same_seed_gives_the_same_bits() {
    let plan = plan(&lenet(), 16, &shapes(&[3, 1], 1));
    let job = job(&plan, &options(&mnist(), 25));
    let (first_losses, first) = run(&job);
    let (second_losses, second) = run(&job);
    assert_eq!(first_losses, second_losses);
    for (a, b) in first.weights.iter().zip(&second.weights) {
        assert_eq!(a.f32s(), b.f32s());
    }
    assert_eq!(
        first.epochs[0].test_accuracy,
        second.epochs[0].test_accuracy
    );
}
