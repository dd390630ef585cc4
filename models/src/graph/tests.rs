//! Graphs of the zoo, of real exports and of cases with known answers (the latter two are skipped where
//! they are not at hand).

use std::path::PathBuf;

use serde_json::Value as Json;

use super::*;
use crate::device::cpu::CpuDevice;
use crate::onnx::Model;
use crate::ops::Context;

fn shared(path: &str) -> Option<PathBuf> {
    let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared")).join(path);
    if !path.exists() {
        eprintln!("skipped: {} is not there", path.display());
        return None;
    }
    Some(path)
}

fn zoo(name: &str) -> Model {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("zoo");
    Model::open(folder.join(name)).unwrap()
}

fn batch(batch: usize) -> BuildOptions {
    BuildOptions {
        batch: Some(batch),
        ..BuildOptions::default()
    }
}

/// A case's model and its expectations.
fn case(name: &str) -> Option<(Model, Json)> {
    let model = Model::open(shared(&format!("cases/{name}.onnx"))?).unwrap();
    let text = std::fs::read_to_string(shared(&format!("cases/{name}.expect.json"))?).unwrap();
    Some((model, serde_json::from_str(&text).unwrap()))
}

/// All numbers of a nested list, in order.
fn numbers(json: &Json) -> Vec<f32> {
    match json {
        Json::Array(items) => items.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().unwrap() as f32],
    }
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let tolerance = 1e-4 * (1.0 + expected.abs());
        assert!(
            (found - expected).abs() < tolerance,
            "{what}: {found} instead of {expected}"
        );
    }
}

/// Runs a case forward and backward and compares outputs, loss and gradients.
fn check_case(model: &Model, expect: &Json) {
    let graph = Graph::build(model, &BuildOptions::default()).unwrap();
    let device = CpuDevice::new(1);
    let cx = Context {
        device: &device,
        training: true,
        seed: 0,
        first_sample: 0,
    };
    let layers: Vec<usize> = (0..graph.layers().len()).collect();
    let program = graph.program(&layers, graph.outputs());
    let inputs = program.inputs().iter().map(|&input| {
        let value = &graph.values()[input];
        let data = numbers(&expect["inputs"][&value.name]["data"]);
        Tensor::from_f32(&value.ty.shape, data)
    });
    let weights: Vec<Tensor> = program
        .weights()
        .iter()
        .map(|&parameter| graph.parameters()[parameter].tensor.clone())
        .collect();
    let (outputs, stash) = program.forward(&cx, inputs.collect(), &weights, &mut []);
    let output = &outputs[0];
    assert_close(
        "output",
        output.f32s(),
        &numbers(&expect["outputs"][0]["data"]),
    );

    let (loss, gradient) = if expect["labels"].is_array() {
        let labels: Vec<i64> = numbers(&expect["labels"])
            .iter()
            .map(|&label| label as i64)
            .collect();
        let target = Tensor::from_i64(&[labels.len()], labels);
        let result = Loss::CrossEntropy.forward_backward(&device, output, &target);
        (result.loss, result.gradient)
    } else {
        let loss = output.f32s().iter().map(|v| 0.5 * v * v).sum();
        (loss, output.clone())
    };
    assert_close("loss", &[loss], &numbers(&expect["loss"]));
    let gradients = program.backward(&cx, stash, &weights, vec![Some(gradient)]);
    let expected = expect["grads"].as_object().unwrap();
    assert_eq!(graph.parameters().len(), expected.len());
    for (&parameter, gradient) in program.weights().iter().zip(&gradients.weights) {
        let name = &graph.parameters()[parameter].name;
        assert_close(name, gradient.f32s(), &numbers(&expected[name]));
    }
}

#[test]
fn case_g1_initializers_as_inputs_and_unnamed_nodes() {
    let Some((model, expect)) = case("g1_ir3_initializers_as_inputs_unnamed") else {
        return;
    };
    let graph = Graph::build(&model, &BuildOptions::default()).unwrap();
    let inputs: Vec<_> = graph
        .inputs()
        .iter()
        .map(|&id| graph.values()[id].name.as_str())
        .collect();
    assert_eq!(inputs, ["x"]);
    let names: Vec<_> = graph
        .nodes()
        .iter()
        .map(|node| node.name.as_str())
        .collect();
    assert_eq!(names, ["Gemm_0", "Relu_1", "Gemm_3"]);
    check_case(&model, &expect);

    let training = BuildOptions {
        training: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&model, &training).unwrap();
    assert!(graph.nodes().iter().any(|node| node.name == "Dropout_2"));
}

#[test]
fn case_g2_batch_on_another_axis() {
    let Some((model, expect)) = case("g2_gemm_alpha_beta_transA") else {
        return;
    };
    check_case(&model, &expect);
    assert_eq!(Graph::build(&model, &batch(2)).unwrap().batch_size(), 2);
    for other in [1, 4, 8] {
        let error = Graph::build(&model, &batch(other)).unwrap_err();
        assert!(
            matches!(*error.kind, GraphErrorKind::BatchAxis { exported: 2, .. }),
            "{error}"
        );
    }
}

#[test]
fn case_g3_uneven_padding_and_ceiling() {
    let Some((model, expect)) = case("g3_conv_same_upper_pool_ceil") else {
        return;
    };
    check_case(&model, &expect);
}

#[test]
fn case_g5_control_flow_is_refused() {
    let Some((model, _)) = case("g5_if_subgraph") else {
        return;
    };
    let error = Graph::build(&model, &BuildOptions::default())
        .unwrap_err()
        .to_string();
    let expected = "operator If (node 'gate') has sub-graphs and cannot be profiled or trained";
    assert!(error.contains(expected), "{error}");
    assert!(!error.contains('\n'));
}

#[test]
fn every_export_builds_or_names_what_is_missing() {
    let Some(folder) = shared("models") else {
        return;
    };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let model = Model::open(&path).unwrap();
        let sequence = ["bert", "chargpt", "gpt2", "gru", "lstm", "vit"];
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        match Graph::build(&model, &batch(4)) {
            Ok(graph) => {
                assert_eq!(graph.batch_size(), 4, "{name}");
                let output = &graph.values()[graph.outputs()[0]];
                assert_eq!(output.ty.shape[0], 4, "{name}");
                assert_consistent(&graph);
            }
            Err(error) => {
                let error = error.to_string();
                assert!(
                    sequence.iter().any(|prefix| name.starts_with(prefix)),
                    "{error}"
                );
                assert!(
                    error.contains("node ") && error.contains("unsupported operator"),
                    "{error}"
                );
                assert!(!error.contains('\n'), "{error}");
            }
        }
    }
}

/// What every graph promises: order, unique names, layers that partition the nodes, forward edges.
fn assert_consistent(graph: &Graph) {
    for (id, node) in graph.nodes().iter().enumerate() {
        for &input in node.inputs.iter().flatten() {
            let value = &graph.values()[input];
            assert!(value.consumers.contains(&id), "{}", value.name);
            if let Origin::Node(maker) = value.origin {
                assert!(maker < id, "{} runs before what it reads", node.name);
            }
        }
        for &output in node.outputs.iter().flatten() {
            assert_eq!(graph.values()[output].origin, Origin::Node(id));
        }
    }
    let distinct = |mut names: Vec<&str>| {
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        count == names.len()
    };
    assert!(distinct(
        graph
            .nodes()
            .iter()
            .map(|node| node.name.as_str())
            .collect()
    ));
    assert!(distinct(
        graph
            .values()
            .iter()
            .map(|value| value.name.as_str())
            .collect()
    ));
    assert!(distinct(
        graph
            .layers()
            .iter()
            .map(|layer| layer.name.as_str())
            .collect()
    ));
    let covered: Vec<usize> = graph
        .layers()
        .iter()
        .flat_map(|layer| layer.nodes.clone())
        .collect();
    assert_eq!(covered, (0..graph.nodes().len()).collect::<Vec<_>>());
    for edge in graph.layer_edges() {
        assert!(edge.from < edge.to, "{}", edge.tensor);
        assert!(edge.bytes > 0);
    }
}

#[test]
fn lenet_has_seven_layers() {
    let graph = Graph::build(&zoo("lenet5.onnx"), &batch(32)).unwrap();
    let layers: Vec<_> = graph
        .layers()
        .iter()
        .map(|layer| {
            (
                layer.name.as_str(),
                layer.kind,
                layer.nodes.len(),
                layer.parameters.len(),
            )
        })
        .collect();
    let expected = [
        ("/0/Conv", "Conv", 2, 2),
        ("/2/MaxPool", "MaxPool", 1, 0),
        ("/3/Conv", "Conv", 2, 2),
        ("/5/MaxPool", "MaxPool", 2, 0),
        ("/7/Gemm", "Gemm", 2, 2),
        ("/9/Gemm", "Gemm", 2, 2),
        ("/11/Gemm", "Gemm", 1, 2),
    ];
    assert_eq!(layers, expected);
    let edges = graph.layer_edges();
    assert_eq!(edges.len(), 6);
    let first = &edges[0];
    assert_eq!((first.from, first.to, first.gradient), (0, 1, true));
    assert_eq!(first.bytes, 32 * 6 * 28 * 28 * 4);
    assert_eq!(first.tensor, "/1/Relu_output_0");
    let fed = &graph.values()[graph.inputs()[0]];
    assert_eq!(fed.ty.shape, [32, 1, 28, 28]);
    assert!(!fed.needs_gradient);
    assert_eq!(graph.constant_fills().count(), 0);
}

#[test]
fn graph_only_files_have_named_weights_of_one_number() {
    let graph = Graph::build(&zoo("alexnet.onnx"), &batch(2)).unwrap();
    assert_consistent(&graph);
    let elements: usize = graph.parameters().iter().map(|p| p.tensor.len()).sum();
    assert_eq!(elements, 61_100_840);
    assert_eq!(graph.parameters()[0].name, "features.0.weight");
    let fills: Vec<_> = graph.constant_fills().map(|p| p.name.as_str()).collect();
    assert_eq!(fills.len(), 8);
    assert!(fills.iter().all(|name| name.ends_with(".weight")));
    let dropouts = graph
        .nodes()
        .iter()
        .filter(|node| node.op.name() == "Dropout");
    assert_eq!(dropouts.count(), 2);
}

#[test]
fn open_dimensions_are_asked_for_by_flag() {
    let model = zoo("mlp_digits.onnx");
    let error = Graph::build(&model, &BuildOptions::default()).unwrap_err();
    let expected = "input 'input': the size of axis 0 ('batch') is open; give it with --batch N";
    assert!(error.to_string().ends_with(expected), "{error}");

    let dims = |name: &str, size| BuildOptions {
        batch: Some(4),
        dims: BTreeMap::from([(name.to_string(), size)]),
        ..BuildOptions::default()
    };
    let error = Graph::build(&model, &dims("seq", 8))
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("no input has an open dimension of this name; open are: batch"),
        "{error}"
    );
    let error = Graph::build(&model, &dims("batch", 8))
        .unwrap_err()
        .to_string();
    assert!(error.contains("dimension 'batch' cannot be 8"), "{error}");
    let error = Graph::build(&model, &batch(0)).unwrap_err().to_string();
    assert!(error.contains("at least one sample"), "{error}");

    let by_name = BuildOptions {
        batch: None,
        ..dims("batch", 6)
    };
    let graph = Graph::build(&model, &by_name).unwrap();
    assert_eq!(graph.batch_size(), 6);
    assert_eq!(graph.values()[graph.outputs()[0]].ty.shape, [6, 10]);
}
