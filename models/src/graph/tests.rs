//! Graphs of the zoo, of real exports and of cases with known answers (the latter two are skipped where
//! they are not at hand).

mod trained;

use std::path::PathBuf;

use prost::Message;

use super::*;
use crate::onnx::Model;
use crate::onnx::proto::*;

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

fn case(name: &str) -> Option<Model> {
    shared(&format!("cases/{name}.onnx")).map(|path| Model::open(path).unwrap())
}

#[test]
fn case_g1_initializers_as_inputs_and_unnamed_nodes() {
    let Some(model) = case("g1_ir3_initializers_as_inputs_unnamed") else {
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

    let training = BuildOptions {
        training_form: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&model, &training).unwrap();
    assert!(graph.nodes().iter().any(|node| node.name == "Dropout_2"));
}

#[test]
fn case_g2_batch_on_another_axis() {
    let Some(model) = case("g2_gemm_alpha_beta_transA") else {
        return;
    };
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
fn case_g4_a_tied_weight_is_one_parameter() {
    let Some(model) = case("g4_tied_embedding") else {
        return;
    };
    let graph = Graph::build(&model, &BuildOptions::default()).unwrap();
    let names: Vec<_> = graph.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["E", "Wm"]);
}

#[test]
fn case_g5_control_flow_is_refused() {
    let Some(model) = case("g5_if_subgraph") else {
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
fn every_export_builds_with_another_batch() {
    let Some(folder) = shared("models") else {
        return;
    };
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let graph = Graph::build(&Model::open(&path).unwrap(), &batch(4)).unwrap();
        assert_eq!(graph.batch_size(), 4, "{}", path.display());
        let output = &graph.values()[graph.outputs()[0]];
        assert_eq!(output.ty.shape[0], 4, "{}", path.display());
        assert_consistent(&graph);
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

/// Name, shape, and the value everywhere; without one, elements differ.
type InitializerRow<'a> = (&'a str, &'a [i64], Option<f32>);
/// Operator, inputs, output, integer attributes.
type NodeRow<'a> = (&'a str, &'a [&'a str], &'a str, &'a [(&'a str, i64)]);

/// A model of one input `x`; the last node makes the output.
fn model(input: &[i64], initializers: &[InitializerRow<'_>], nodes: &[NodeRow<'_>]) -> Model {
    let declared = |name, dims| ValueInfoProto::tensor(name, data_type::FLOAT, dims);
    let initializer = |&(name, dims, value): &InitializerRow<'_>| {
        let count = dims.iter().product::<i64>();
        TensorProto {
            name: Some(name.into()),
            dims: dims.to_vec(),
            data_type: Some(data_type::FLOAT),
            float_data: (0..count)
                .map(|i| value.unwrap_or(i as f32 + 1.0))
                .collect(),
            ..TensorProto::default()
        }
    };
    let node = |&(op_type, inputs, output, attributes): &NodeRow<'_>| NodeProto {
        op_type: Some(op_type.into()),
        input: inputs.iter().map(|i| i.to_string()).collect(),
        output: vec![output.into()],
        attribute: attributes
            .iter()
            .map(|(name, value)| AttributeProto {
                name: Some(name.to_string()),
                r#type: Some(attribute_type::INT),
                i: Some(*value),
                ..AttributeProto::default()
            })
            .collect(),
        ..NodeProto::default()
    };
    let last = nodes.last().unwrap().2;
    let proto = ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(17),
        }],
        graph: Some(GraphProto {
            node: nodes.iter().map(node).collect(),
            initializer: initializers.iter().map(initializer).collect(),
            input: vec![declared("x", input)],
            output: vec![declared(last, &[])],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    };
    Model::from_bytes(proto.encode_to_vec(), "model.onnx").unwrap()
}

fn built(model: &Model) -> Graph {
    let graph = Graph::build(model, &BuildOptions::default()).unwrap();
    assert_consistent(&graph);
    graph
}

#[test]
fn a_final_softmax_belongs_to_cross_entropy() {
    let weights: &[InitializerRow<'_>] = &[("w", &[3, 4], None)];
    let matmul: NodeRow<'_> = ("MatMul", &["x", "w"], "logits", &[]);
    let graph = built(&model(
        &[2, 3],
        weights,
        &[matmul, ("Softmax", &["logits"], "y", &[("axis", -1)])],
    ));
    let output = graph.training_output(Loss::CROSS_ENTROPY);
    assert_eq!(graph.values()[output.value].name, "logits");
    assert_eq!(output.skipped, [1]);
    let output = graph.training_output(Loss::Mse);
    assert_eq!((output.value, output.skipped), (graph.outputs()[0], vec![]));

    let other_axis = model(
        &[2, 3],
        weights,
        &[matmul, ("Softmax", &["logits"], "y", &[("axis", 0)])],
    );
    let graph = built(&other_axis);
    assert_eq!(
        graph.training_output(Loss::CROSS_ENTROPY).value,
        graph.outputs()[0]
    );
}

#[test]
fn running_statistics_are_states_and_not_trained() {
    let initializers: &[InitializerRow<'_>] = &[
        ("s", &[3], None),
        ("b", &[3], None),
        ("mean", &[3], None),
        ("var", &[3], None),
    ];
    let inputs: &[&str] = &["x", "s", "b", "mean", "var"];
    let nodes: &[NodeRow<'_>] = &[("BatchNormalization", inputs, "y", &[("training_mode", 1)])];
    let graph = built(&model(&[2, 3, 4, 4], initializers, nodes));
    let names = |ids: Vec<&str>| ids.join(" ");
    assert_eq!(
        names(graph.parameters().iter().map(|p| p.name.as_str()).collect()),
        "s b"
    );
    assert_eq!(
        names(graph.states().iter().map(|s| s.name.as_str()).collect()),
        "mean var"
    );
    assert_eq!(graph.layers()[0].states, [0, 1]);
}

#[test]
fn scales_masks_and_normalisation_are_no_weights() {
    let initializers: &[InitializerRow<'_>] = &[
        ("mean", &[3], None),
        ("deviation", &[3], None),
        ("w", &[3, 4], None),
        ("bias", &[4], None),
        ("scale", &[1], None),
        ("mask", &[4], Some(f32::MIN)),
    ];
    let nodes: &[NodeRow<'_>] = &[
        ("Sub", &["x", "mean"], "centred", &[]),
        ("Mul", &["centred", "deviation"], "normal", &[]),
        ("MatMul", &["normal", "w"], "product", &[]),
        ("Add", &["product", "bias"], "shifted", &[]),
        ("Mul", &["shifted", "scale"], "scaled", &[]),
        ("Add", &["scaled", "mask"], "y", &[]),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    let names: Vec<_> = graph.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(names, ["w", "bias"]);
    assert_eq!(
        graph.layers().len(),
        1,
        "cheap nodes before the product belong to its layer"
    );
}

#[test]
fn a_weight_behind_a_transpose_is_the_initializer() {
    let initializers: &[InitializerRow<'_>] = &[("w", &[4, 3], None), ("v", &[4, 4], None)];
    let nodes: &[NodeRow<'_>] = &[
        ("Transpose", &["v"], "vt", &[]),
        ("Transpose", &["w"], "wt", &[]),
        ("MatMul", &["x", "wt"], "h", &[]),
        ("MatMul", &["h", "vt"], "y", &[]),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    let parameters: Vec<_> = graph
        .parameters()
        .iter()
        .map(|p| (p.name.as_str(), p.tensor.shape()))
        .collect();
    assert_eq!(parameters, [("w", &[4, 3][..]), ("v", &[4, 4][..])]);
    // Each transpose runs in the layer that reads from it, so that no edge carries a weight.
    assert_eq!(
        graph
            .layers()
            .iter()
            .map(|layer| layer.nodes.len())
            .collect::<Vec<_>>(),
        [2, 2]
    );
    assert_eq!(graph.layer_edges().len(), 1);
}

#[test]
fn graphs_that_lead_nowhere_say_so() {
    let fail = |model: &Model| {
        Graph::build(model, &BuildOptions::default())
            .unwrap_err()
            .to_string()
    };
    let weights: &[InitializerRow<'_>] = &[("w", &[3, 3], None)];
    let constant = model(&[2, 3], weights, &[("Relu", &["w"], "y", &[])]);
    assert!(fail(&constant).contains("no output depends on a data input"));
    let dangling = model(&[2, 3], weights, &[("MatMul", &["x", "absent"], "y", &[])]);
    assert!(fail(&dangling).contains("node 'MatMul_0' reads 'absent'"));
    let cycle = model(
        &[2, 3],
        weights,
        &[("Add", &["b", "x"], "a", &[]), ("Relu", &["a"], "b", &[])],
    );
    assert!(fail(&cycle).contains("cycle"));
    let twice = model(
        &[2, 3],
        weights,
        &[("Relu", &["x"], "y", &[]), ("Tanh", &["x"], "y", &[])],
    );
    assert!(fail(&twice).contains("value 'y' is made twice"));
    let unknown = model(&[2, 3], weights, &[("Frobnicate", &["x"], "y", &[])]);
    assert!(fail(&unknown).contains("Frobnicate"));
}

#[test]
fn a_batch_that_is_written_into_the_model_is_named() {
    let initializers: &[InitializerRow<'_>] = &[("w", &[3, 3], None), ("baked", &[2, 3], None)];
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "w"], "h", &[]),
        ("Add", &["h", "baked"], "y", &[]),
    ];
    let model = model(&[2, 3], initializers, nodes);
    let error = Graph::build(&model, &batch(8)).unwrap_err().to_string();
    assert!(
        error.contains("--batch 8 cannot be applied: the model was exported with batch 2"),
        "{error}"
    );
    assert!(
        error.contains("Add_1") && error.contains("use --batch 2"),
        "{error}"
    );
    assert!(Graph::build(&model, &batch(2)).is_ok());
}

#[test]
fn a_cast_between_types_that_are_one_here_is_no_node() {
    let initializers: &[InitializerRow<'_>] = &[("w", &[3, 4], None)];
    let half = i64::from(data_type::FLOAT16);
    let nodes: &[NodeRow<'_>] = &[
        ("Cast", &["w"], "half", &[("to", half)]),
        ("MatMul", &["x", "half"], "y", &[]),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    assert_eq!(graph.parameters()[0].name, "w");
    assert_eq!(graph.nodes().len(), 1);
}

#[test]
fn dimensions_need_a_name_and_a_size() {
    use super::parse_dimension;
    assert_eq!(parse_dimension("sequence=4"), Ok(("sequence".into(), 4)));
    for bad in ["sequence", "=4", "sequence=0", "sequence=x"] {
        assert!(parse_dimension(bad).unwrap_err().contains(bad));
    }
}
