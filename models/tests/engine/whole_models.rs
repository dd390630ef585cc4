//! Whole models: LeNet-5 against PyTorch (`golden/lenet5.json`), and the cases with known outcomes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use models::device::Device;
use models::graph::{BuildOptions, Graph};
use models::loss::Loss;
use models::onnx::Model;
use models::onnx::proto::ModelProto;
use models::ops::ValueType;
use models::optimizer::{Optimizer, OptimizerState};
use models::program::Program;
use models::tensor::{DType, Tensor};
use prost::Message;
use serde_json::Value;

use crate::support::{assert_close, context, cpu};

fn numbers(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        number => vec![number.as_f64().unwrap() as f32],
    }
}

fn open(path: &Path, batch: Option<usize>) -> Graph {
    let options = BuildOptions {
        batch,
        ..BuildOptions::default()
    };
    Graph::build(&Model::open(path).unwrap(), &options).unwrap()
}

/// The program of a whole graph, and its weights on the device.
fn whole(graph: &Graph, loss: Loss, device: &dyn Device) -> (Program, Vec<Tensor>) {
    let layers: Vec<usize> = (0..graph.layers().len()).collect();
    let program = graph.program(&layers, &[graph.training_output(loss).value]);
    let weights = program.weights().iter();
    let weights = weights
        .map(|&w| device.upload(&graph.parameters()[w].tensor))
        .collect();
    (program, weights)
}

/// Sums and elements as the script takes them, with the size of the tensor.
fn assert_summary(what: &str, found: &Tensor, golden: &Value) {
    let values = found.f32s();
    let squares: f64 = values.iter().map(|&v| f64::from(v).powi(2)).sum();
    let sum: f64 = values.iter().map(|&v| f64::from(v)).sum();
    let expected = |name: &str| golden[name].as_f64().unwrap();
    let norm = expected("squares").sqrt();
    assert!(
        (squares.sqrt() - norm).abs() < 1e-5 * norm,
        "norm of {what}"
    );
    // The error of a sum grows with the root of the number of its terms.
    let tolerance = 1e-5 * norm * (values.len() as f64).sqrt();
    assert!((sum - expected("sum")).abs() < tolerance, "sum of {what}");
    let elements: Vec<f32> = values
        .iter()
        .step_by((values.len() / 16).max(1))
        .copied()
        .collect();
    let scale = (norm / (values.len() as f64).sqrt()) as f32;
    for (found, expected) in elements.iter().zip(numbers(&golden["elements"])) {
        assert!(
            (found - expected).abs() < 1e-4 * scale.max(expected.abs()),
            "{what}: {found} {expected}"
        );
    }
}

#[test]
fn lenet_trains_like_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/lenet5.json")).unwrap();
    let number = |name: &str| golden[name].as_f64().unwrap();
    let batch = number("batch") as usize;
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/zoo/lenet5.onnx");
    let graph = open(Path::new(path), Some(batch));
    let device = cpu();
    let cx = context(&*device, true);
    let (program, mut weights) = whole(&graph, Loss::CROSS_ENTROPY, &*device);
    let optimizer = Optimizer::Sgd {
        momentum: number("momentum") as f32,
        weight_decay: 0.0,
        nesterov: false,
    };
    let mut state = OptimizerState::default();
    let pixel = |i: usize| 0.5 + 0.5 * (i as f64 * i as f64 * 0.0007).sin();
    let pixels: Vec<f32> = (0..batch * 784).map(|i| pixel(i) as f32).collect();
    let images = Tensor::from_f32(&[batch, 1, 28, 28], pixels);
    let labels: Vec<i64> = (0..batch as i64).map(|i| i * 3 % 10).collect();
    let labels = Tensor::from_i64(&[batch], labels);
    for (number_of_step, golden_step) in golden["steps"].as_array().unwrap().iter().enumerate() {
        let (outputs, stash) = program.forward(&cx, vec![images.clone()], &weights, &mut []);
        let loss = Loss::CROSS_ENTROPY.forward_backward(&*device, &outputs[0], &labels);
        let grads = program
            .backward(&cx, stash, &weights, vec![Some(loss.gradient)])
            .weights;
        let lr = number("lr") as f32;
        weights = optimizer.step(&*device, &mut state, weights, &grads, lr);
        let step = |what: &str| format!("{what} in step {number_of_step}");
        assert_close(
            &step("logits"),
            outputs[0].f32s(),
            &numbers(&golden_step["logits"]),
            2e-5,
        );
        assert_close(
            &step("loss"),
            &[loss.loss],
            &numbers(&golden_step["loss"]),
            1e-5,
        );
        assert_eq!(
            loss.correct as u64,
            golden_step["correct"].as_u64().unwrap()
        );
        for ((&parameter, grad), weight) in program.weights().iter().zip(&grads).zip(&weights) {
            let name = &graph.parameters()[parameter].name;
            assert_summary(
                &step(&format!("gradient of {name}")),
                grad,
                &golden_step["gradients"][name],
            );
            assert_summary(
                &step(&format!("weight {name}")),
                weight,
                &golden_step["weights"][name],
            );
        }
    }
}

/// A case by name, unless the folder that is given with the project's surroundings is missing.
fn case(name: &str) -> Option<(PathBuf, Value)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/cases");
    let model = Path::new(folder).join(format!("{name}.onnx"));
    let Ok(expected) = std::fs::read_to_string(model.with_extension("expect.json")) else {
        eprintln!("skipped: {} is not there", model.display());
        return None;
    };
    Some((model, serde_json::from_str(&expected).unwrap()))
}

fn check_case(name: &str) {
    let Some((path, expected)) = case(name) else {
        return;
    };
    let graph = open(&path, None);
    let device = cpu();
    let cx = context(&*device, true);
    let (program, weights) = whole(&graph, Loss::CROSS_ENTROPY, &*device);
    let inputs = program.inputs().iter().map(|&input| {
        let value = &graph.values()[input];
        let data = numbers(&expected["inputs"][&value.name]["data"]);
        match value.ty.dtype {
            DType::I64 => {
                let data: Vec<i64> = data.iter().map(|&v| v as i64).collect();
                Tensor::from_i64(&value.ty.shape, data)
            }
            _ => Tensor::from_f32(&value.ty.shape, data),
        }
    });
    let (outputs, stash) = program.forward(&cx, inputs.collect(), &weights, &mut []);
    assert_close(
        "output",
        outputs[0].f32s(),
        &numbers(&expected["outputs"][0]["data"]),
        1e-5,
    );
    let (loss, gradient) = match expected.get("labels") {
        Some(labels) => {
            let labels: Vec<i64> = labels
                .as_array()
                .unwrap()
                .iter()
                .map(|l| l.as_i64().unwrap())
                .collect();
            // A token model gives [batch, time, classes]: a row for each token.
            let rows = outputs[0].reshape(&[labels.len(), outputs[0].len() / labels.len()]);
            let labels = Tensor::from_i64(&[labels.len()], labels);
            let result = Loss::CROSS_ENTROPY.forward_backward(&*device, &rows, &labels);
            (result.loss, result.gradient.into_shape(outputs[0].shape()))
        }
        // Half the sum of squares, whose gradient is the output.
        None => (
            outputs[0].f32s().iter().map(|v| v * v / 2.0).sum(),
            outputs[0].clone(),
        ),
    };
    assert_close("loss", &[loss], &numbers(&expected["loss"]), 1e-5);
    let grads = program
        .backward(&cx, stash, &weights, vec![Some(gradient)])
        .weights;
    let found: BTreeMap<&str, &Tensor> = program
        .weights()
        .iter()
        .map(|&w| graph.parameters()[w].name.as_str())
        .zip(&grads)
        .collect();
    let golden = expected["grads"].as_object().unwrap();
    assert_eq!(found.len(), golden.len());
    for (name, golden) in golden {
        assert_close(name, found[name.as_str()].f32s(), &numbers(golden), 1e-5);
    }
}

#[test]
fn case_g1_old_file_with_initializers_among_its_inputs() {
    check_case("g1_ir3_initializers_as_inputs_unnamed");
}

#[test]
fn case_g2_gemm_with_all_its_attributes() {
    check_case("g2_gemm_alpha_beta_transA");
}

#[test]
fn case_g3_padding_and_rounding_up() {
    check_case("g3_conv_same_upper_pool_ceil");
}

#[test]
fn case_g4_embedding_that_is_the_output_matrix_too() {
    check_case("g4_tied_embedding");
}

/// The minibatch of a step as `golden/whole_models.py` makes it.
fn synthetic(name: &str, ty: &ValueType, step: usize) -> Tensor {
    let hash = |index: usize| {
        let mut h = (index as u32).wrapping_mul(2_654_435_761);
        h = (h ^ (h >> 15)).wrapping_mul(2_246_822_519);
        h ^ (h >> 13)
    };
    let count: usize = ty.shape.iter().product();
    let numbers = (step * count..(step + 1) * count).map(hash);
    match ty.dtype {
        DType::I64 if name.contains("mask") => Tensor::from_i64(&ty.shape, vec![1; count]),
        DType::I64 => {
            let tokens = numbers.map(|h| i64::from(h % 17));
            Tensor::from_i64(&ty.shape, tokens.collect::<Vec<_>>())
        }
        _ => {
            let numbers = numbers.map(|h| (h >> 16) as f32 / 32768.0 - 1.0);
            Tensor::from_f32(&ty.shape, numbers.collect::<Vec<_>>())
        }
    }
}

/// The export without its dropout, which no other implementation's random numbers would match.
fn without_dropout(path: &Path) -> Model {
    let mut proto = ModelProto::decode(&std::fs::read(path).unwrap()[..]).unwrap();
    for node in &mut proto.graph.as_mut().unwrap().node {
        if node.op_type() == "Dropout" {
            node.op_type = Some("Identity".into());
            node.input.truncate(1);
            node.output.truncate(1);
            node.attribute.clear();
        }
    }
    Model::from_bytes(proto.encode_to_vec(), path).unwrap()
}

#[test]
fn exports_train_like_pytorch() {
    let golden: Value = serde_json::from_str(include_str!("../golden/whole_models.json")).unwrap();
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/models"));
    if !folder.exists() {
        eprintln!("skipped: {} is not there", folder.display());
        return;
    }
    let device = cpu();
    let cx = context(&*device, true);
    let mut apart = Vec::new();
    for (name, golden_model) in golden["models"].as_object().unwrap() {
        let model = without_dropout(&folder.join(name));
        let options = BuildOptions {
            batch: Some(golden_model["batch"].as_u64().unwrap() as usize),
            ..BuildOptions::default()
        };
        let graph = Graph::build(&model, &options).unwrap();
        let (program, mut weights) = whole(&graph, Loss::CROSS_ENTROPY, &*device);
        let states = program.states().iter();
        let mut states: Vec<Tensor> = states.map(|&s| graph.states()[s].tensor.clone()).collect();
        let optimizer = Optimizer::Sgd {
            momentum: golden["momentum"].as_f64().unwrap() as f32,
            weight_decay: 0.0,
            nesterov: false,
        };
        let lr = golden_model["lr"].as_f64().unwrap() as f32;
        let mut state = OptimizerState::default();
        let expected = numbers(&golden_model["losses"]);
        let rounding = numbers(&golden_model["rounding"]);
        for (step, &expected) in expected.iter().enumerate() {
            let inputs = program.inputs().iter().map(|&input| {
                let value = &graph.values()[input];
                synthetic(&value.name, &value.ty, step)
            });
            let (outputs, stash) = program.forward(&cx, inputs.collect(), &weights, &mut states);
            let classes = *outputs[0].shape().last().unwrap();
            let rows = outputs[0].len() / classes;
            let labels = (0..rows).map(|i| ((i * 3 + step) % classes) as i64);
            let labels = Tensor::from_i64(&[rows], labels.collect::<Vec<_>>());
            let logits = outputs[0].reshape(&[rows, classes]);
            let loss = Loss::CROSS_ENTROPY.forward_backward(&*device, &logits, &labels);
            let gradient = loss.gradient.into_shape(outputs[0].shape());
            let difference = (loss.loss - expected).abs() / expected;
            // What PyTorch's own single precision is off by, no other can be expected to avoid.
            let tolerance = 1e-4 + 4.0 * rounding[step];
            if difference.is_nan() || difference > tolerance {
                apart.push(format!(
                    "{name}, step {step}: {} where PyTorch has {expected}",
                    loss.loss
                ));
                break;
            }
            let gradients = program.backward(&cx, stash, &weights, vec![Some(gradient)]);
            weights = optimizer.step(&*device, &mut state, weights, &gradients.weights, lr);
        }
    }
    assert!(apart.is_empty(), "{}", apart.join("\n"));
}
