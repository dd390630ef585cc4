//! Whole models: LeNet-5 against PyTorch (`golden/lenet5.json`), and the cases with known outcomes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use models::device::Device;
use models::graph::{BuildOptions, Graph};
use models::loss::Loss;
use models::onnx::Model;
use models::optimizer::{Optimizer, OptimizerState};
use models::program::Program;
use models::tensor::{DType, Tensor};
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
