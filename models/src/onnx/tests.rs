//! Reading damaged files, and writing weights back without touching anything else.

use std::path::Path;

use proptest::prelude::*;
use prost::Message;

use super::proto::*;
use super::wire::{self, field};
use super::write::MESSAGE_LIMIT;
use super::{Model, OnnxError};
use crate::graph::{BuildOptions, Graph};
use crate::tensor::Tensor;

fn raw_tensor(name: &str, data_type: i32, dims: &[i64], raw: Vec<u8>) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(data_type),
        dims: dims.to_vec(),
        raw_data: Some(raw.into()),
        ..TensorProto::default()
    }
}

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn node(op_type: &str, name: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        name: Some(name.into()),
        input: inputs.iter().map(|i| i.to_string()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    }
}

fn tensor_attribute(name: &str, tensor: TensorProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(attribute_type::TENSOR),
        t: Some(tensor),
        ..AttributeProto::default()
    }
}

fn value(name: &str, dims: &[i64]) -> ValueInfoProto {
    let dim = |&dim| Dimension {
        value: Some(DimensionValue::Value(dim)),
        denotation: None,
    };
    let shape = TensorShapeProto {
        dim: dims.iter().map(dim).collect(),
    };
    let tensor = TensorType {
        elem_type: Some(data_type::FLOAT),
        shape: Some(shape),
    };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            value: Some(TypeValue::Tensor(tensor)),
            denotation: None,
        }),
        ..ValueInfoProto::default()
    }
}

/// A stack of 2 x 2 products whose weights are stored in every way there is: raw, typed, half, double,
/// in a Constant node, as ConstantOfShape and behind an Identity.
fn sample() -> ModelProto {
    let typed = TensorProto {
        name: Some("typed".into()),
        data_type: Some(data_type::FLOAT),
        dims: vec![2, 2],
        float_data: vec![0.5; 4],
        ..TensorProto::default()
    };
    let half = TensorProto {
        name: Some("half".into()),
        data_type: Some(data_type::FLOAT16),
        dims: vec![2, 2],
        int32_data: vec![0x3c00; 4],
        ..TensorProto::default()
    };
    let double: Vec<u8> = [0.1f64; 4].iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape: Vec<u8> = [2i64, 2].iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut constant = node("Constant", "c", &[], "constant");
    let held = raw_tensor("", data_type::FLOAT, &[2, 2], floats(&[3.0; 4]));
    constant.attribute.push(tensor_attribute("value", held));
    let mut nodes = vec![
        constant,
        node("ConstantOfShape", "f", &["shape"], "fill"),
        node("Identity", "i", &["raw"], "copy"),
    ];
    let names = ["raw", "typed", "half", "double", "constant", "fill", "copy"];
    for (index, name) in names.iter().enumerate() {
        let (from, to) = (format!("x{index}"), format!("x{}", index + 1));
        nodes.push(node("MatMul", &format!("m{index}"), &[&from, name], &to));
    }
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(17),
        }],
        graph: Some(GraphProto {
            node: nodes,
            initializer: vec![
                raw_tensor("raw", data_type::FLOAT, &[2, 2], floats(&[1.0; 4])),
                typed,
                half,
                raw_tensor("double", data_type::DOUBLE, &[2, 2], double),
                raw_tensor("shape", data_type::INT64, &[2], shape),
            ],
            input: vec![value("x0", &[1, 2])],
            output: vec![value("x7", &[1, 2])],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

/// The sample with a field that no schema knows at the end of each kind of message that is patched.
fn sample_with_unknown_fields() -> Vec<u8> {
    let mark = |bytes: &mut Vec<u8>| wire::put_bytes(bytes, 999, b"unknown");
    let sample = sample();
    let graph = sample.graph.as_ref().unwrap();
    let mut inner = GraphProto {
        node: vec![],
        initializer: vec![],
        ..graph.clone()
    }
    .encode_to_vec();
    for node in &graph.node {
        let mut bytes = node.encode_to_vec();
        mark(&mut bytes);
        wire::put_bytes(&mut inner, field::GRAPH_NODE, &bytes);
    }
    for tensor in &graph.initializer {
        let mut bytes = tensor.encode_to_vec();
        mark(&mut bytes);
        wire::put_bytes(&mut inner, field::GRAPH_INITIALIZER, &bytes);
    }
    mark(&mut inner);
    let mut bytes = ModelProto {
        graph: None,
        ..sample
    }
    .encode_to_vec();
    wire::put_bytes(&mut bytes, field::MODEL_GRAPH, &inner);
    mark(&mut bytes);
    bytes
}

fn unknown_fields(bytes: &[u8]) -> usize {
    bytes.windows(7).filter(|w| *w == b"unknown").count()
}

/// The graph with all weights trained apart, also those that an Identity copies.
fn graph(model: &Model) -> Graph {
    let options = BuildOptions {
        untie: true,
        ..BuildOptions::default()
    };
    Graph::build(model, &options).unwrap()
}

fn weights(graph: &Graph) -> Vec<(String, Tensor)> {
    let parameters = graph.parameters().iter();
    parameters
        .map(|p| (p.name.clone(), p.tensor.clone()))
        .collect()
}

fn write(model: &Model, weights: &[(String, Tensor)], limit: usize) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.onnx");
    model.write_back_within(weights, &path, limit).unwrap();
    let written = Model::open(&path).unwrap();
    (folder, written)
}

#[test]
fn every_way_to_store_a_weight_is_a_parameter_of_its_own() {
    let model = Model::from_bytes(sample().encode_to_vec(), "sample.onnx").unwrap();
    let graph = graph(&model);
    let names: Vec<_> = graph.parameters().iter().map(|p| p.name.as_str()).collect();
    assert_eq!(
        names,
        ["raw", "typed", "half", "double", "constant", "fill", "copy"]
    );
    let fills = graph.constant_fills().count();
    assert_eq!(fills, 7, "each weight of the sample is one number");
}

#[test]
fn unchanged_weights_leave_the_bytes_of_initializers_alone() {
    let bytes = sample_with_unknown_fields();
    let model = Model::from_bytes(bytes.clone(), "sample.onnx").unwrap();
    let mut same = weights(&graph(&model));
    same.retain(|(name, _)| name != "fill" && name != "copy");
    let (folder, _) = write(&model, &same, usize::MAX);
    assert!(std::fs::read(folder.path().join("out.onnx")).unwrap() == bytes);
}

#[test]
fn weights_of_removed_nodes_become_inputs_too_in_old_files() {
    let old = ModelProto {
        ir_version: Some(3),
        ..sample()
    };
    let model = Model::from_bytes(old.encode_to_vec(), "sample.onnx").unwrap();
    let new = Tensor::from_f32(&[2, 2], [1., 2., 3., 4.]);
    let (_folder, written) = write(&model, &[("fill".to_string(), new)], usize::MAX);
    assert_eq!(written.initializers()["fill"].f32s(), [1., 2., 3., 4.]);
    assert_eq!(
        written.graph().input.last().unwrap(),
        &value("fill", &[2, 2])
    );
    assert!(
        written
            .graph()
            .node
            .iter()
            .all(|node| node.op_type() != "ConstantOfShape")
    );
}

#[test]
fn large_data_goes_to_a_file_of_its_own_and_comes_back() {
    let mut proto = sample();
    let graph = proto.graph.as_mut().unwrap();
    graph.node.truncate(0);
    graph.node.push(node("MatMul", "m", &["x0", "raw"], "x7"));
    graph.initializer = vec![raw_tensor(
        "raw",
        data_type::FLOAT,
        &[2, 300],
        floats(&[0.0; 600]),
    )];
    let model = Model::from_bytes(proto.encode_to_vec(), "sample.onnx").unwrap();
    let trained: Vec<f32> = (0..600).map(|v| v as f32).collect();
    let new = vec![("raw".to_string(), Tensor::from_f32(&[2, 300], &trained))];
    let (folder, written) = write(&model, &new, 100);
    assert_eq!(written.initializers()["raw"].f32s(), trained);
    let data = folder.path().join("out.onnx.data");
    assert_eq!(std::fs::metadata(&data).unwrap().len(), 2400);

    // What keeps its values goes there too where the file would be too large.
    let (other, kept) = write(&model, &[], 100);
    assert_eq!(kept.initializers()["raw"].f32s(), [0.0; 600]);
    assert!(other.path().join("out.onnx.data").exists());

    // A model that already has external data: what is not written is copied along.
    let (_other, again) = write(&written, &[], usize::MAX);
    assert_eq!(again.initializers()["raw"].f32s(), trained);

    std::fs::write(&data, [0; 10]).unwrap();
    let error = Model::open(folder.path().join("out.onnx"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("truncated") && error.contains("'raw'"),
        "{error}"
    );
}

/// Takes 7 GB of memory and as much disk: `cargo test -p models --lib -- --ignored over_2_gib`.
#[test]
#[ignore = "large"]
fn a_file_over_2_gib_is_read_and_written_with_external_data() {
    let length = (MESSAGE_LIMIT + 1) / 4096 * 4096 + 4096;
    let last = |bytes: &mut Vec<u8>, number, rest: usize| wire::put_header(bytes, number, rest);
    // The weight comes last in its message, in the graph and in the file: what is after is a hole.
    let dims = vec![length as i64 / 4096, 1024];
    let mut tensor = TensorProto {
        dims,
        data_type: Some(data_type::FLOAT),
        name: Some("large".into()),
        ..TensorProto::default()
    }
    .encode_to_vec();
    last(&mut tensor, field::TENSOR_RAW_DATA, length);
    let mut sample = sample();
    let mut graph = sample.graph.take().unwrap().encode_to_vec();
    last(&mut graph, field::GRAPH_INITIALIZER, tensor.len() + length);
    graph.extend(tensor);
    let mut bytes = sample.encode_to_vec();
    last(&mut bytes, field::MODEL_GRAPH, graph.len() + length);
    bytes.extend(graph);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large.onnx");
    std::fs::write(&path, &bytes).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len((bytes.len() + length) as u64).unwrap();

    let model = Model::open(&path).unwrap();
    assert_eq!(model.initializers()["large"].len(), length / 4);
    let out = folder.path().join("out.onnx");
    let new = Tensor::from_f32(&[2, 2], [1., 2., 3., 4.]);
    model.write_back(&[("raw", new)], &out).unwrap();
    drop(model);
    assert!(std::fs::metadata(&out).unwrap().len() < 10_000);
    let written = Model::open(&out).unwrap();
    assert_eq!(written.initializers()["large"].len(), length / 4);
    assert_eq!(written.initializers()["raw"].f32s(), [1., 2., 3., 4.]);
}

#[test]
fn external_data_outside_the_folder_is_refused() {
    for location in ["/etc/hostname", "../x.data", "a/../../x.data", ""] {
        let mut proto = sample();
        let tensor = &mut proto.graph.as_mut().unwrap().initializer[0];
        tensor.raw_data = None;
        tensor.data_location = Some(EXTERNAL);
        tensor.external_data = vec![StringStringEntryProto {
            key: Some("location".into()),
            value: Some(location.into()),
        }];
        let error = Model::from_bytes(proto.encode_to_vec(), "sample.onnx").unwrap_err();
        assert!(error.to_string().contains("refused"), "{error}");
    }
}

#[test]
fn weights_that_do_not_fit_are_refused_and_leave_no_file() {
    let model = Model::from_bytes(sample().encode_to_vec(), "sample.onnx").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.onnx");
    let try_write = |name: &str, tensor: Tensor| {
        let error = model.write_back(&[(name, tensor)], &path).unwrap_err();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        error.to_string()
    };
    let two = Tensor::from_f32(&[2], [0.0; 2]);
    let four = Tensor::from_f32(&[2, 2], [0.0; 4]);
    assert!(try_write("raw", two.clone()).contains("its shape is [2, 2]"));
    assert!(try_write("copy", two).contains("its shape is [2, 2]"));
    assert!(try_write("absent", four.clone()).contains("no initializer"));
    assert!(try_write("x1", four).contains("computes it"));
    let missing = folder.path().join("absent/out.onnx");
    let error = model.write_back::<&str>(&[], &missing).unwrap_err();
    assert!(matches!(error, OnnxError::Write { .. }));
}

#[test]
fn a_file_without_a_usable_graph_says_why() {
    let error = |proto: ModelProto| {
        Model::from_bytes(proto.encode_to_vec(), "m.onnx")
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        error(ModelProto::default()),
        "m.onnx: not an ONNX model: the file is empty"
    );
    let headless = ModelProto {
        graph: None,
        ..sample()
    };
    assert!(error(headless).contains("no graph"));
    let mut old = sample();
    old.opset_import[0].version = Some(6);
    assert!(error(old).contains("opset 6 of the default domain is not supported"));
    let mut unnamed = sample();
    unnamed.opset_import.clear();
    assert!(error(unnamed).contains("imports no operator set"));
    let mut short = sample();
    short.graph.as_mut().unwrap().initializer[0].raw_data = Some(vec![0; 3].into());
    assert_eq!(
        error(short),
        "m.onnx: tensor 'raw': its shape needs 4 float elements, its data has 3 bytes"
    );
    let error = Model::open("absent.onnx").unwrap_err().to_string();
    assert!(
        error.starts_with("absent.onnx: cannot read the model: "),
        "{error}"
    );
}

#[test]
fn foreign_domains_matter_only_when_used() {
    let mut proto = sample();
    proto.opset_import.push(OperatorSetIdProto {
        domain: Some("com.example".into()),
        version: Some(1),
    });
    assert!(Model::from_bytes(proto.encode_to_vec(), "m.onnx").is_ok());
    proto.graph.as_mut().unwrap().node[4].domain = Some("com.example".into());
    let error = Model::from_bytes(proto.encode_to_vec(), "m.onnx")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("node 'm1' uses operator MatMul of domain 'com.example'"),
        "{error}"
    );
}

fn lenet() -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("zoo/lenet5.onnx")).unwrap()
}

/// Opens and builds; the result does not matter, only that there is one.
fn survives(bytes: Vec<u8>) -> Result<(), String> {
    let model = Model::from_bytes(bytes, "damaged.onnx").map_err(|error| error.to_string())?;
    let options = BuildOptions {
        batch: Some(3),
        ..BuildOptions::default()
    };
    Graph::build(&model, &options)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[test]
fn every_truncation_is_one_clear_line() {
    let small = sample().encode_to_vec();
    let large = lenet();
    assert_eq!(survives(large.clone()), Ok(()));
    let cuts = (0..small.len()).map(|length| &small[..length]);
    for cut in cuts.chain((0..large.len()).step_by(997).map(|length| &large[..length])) {
        let error = survives(cut.to_vec()).expect_err("a truncated file cannot be whole");
        assert!(!error.contains('\n'), "{error}");
        assert!(error.starts_with("damaged.onnx: "), "{error}");
    }
    let error = survives(large[..large.len() / 2].to_vec()).unwrap_err();
    assert!(error.contains("truncated"), "{error}");
}

proptest! {
    #[test]
    fn new_weights_come_back_and_everything_else_stays(values in proptest::collection::vec(-100i16..100, 28)) {
        let bytes = sample_with_unknown_fields();
        let model = Model::from_bytes(bytes.clone(), "sample.onnx").unwrap();
        let mut new = weights(&graph(&model));
        for ((_, tensor), values) in new.iter_mut().zip(values.chunks(4)) {
            // Multiples of 1/8 up to 100 are exact in half precision too.
            let values: Vec<f32> = values.iter().map(|&v| f32::from(v) / 8.0).collect();
            *tensor = Tensor::from_f32(&[2, 2], values);
        }
        let (folder, written) = write(&model, &new, usize::MAX);
        let reread = weights(&graph(&written));
        for ((name, new), (again, tensor)) in new.iter().zip(&reread) {
            prop_assert_eq!(name, again);
            prop_assert_eq!(new.f32s(), tensor.f32s());
        }
        let output = std::fs::read(folder.path().join("out.onnx")).unwrap();
        // Two nodes went and their unknown fields with them.
        prop_assert_eq!(unknown_fields(&output), unknown_fields(&bytes) - 2);
        // Apart from the data of weights, the files decode alike.
        let blank = |model: &Model| {
            let mut graph = model.graph().clone();
            graph.initializer.retain(|tensor| tensor.name() != "fill" && tensor.name() != "copy");
            graph.node.retain(|node| !matches!(node.op_type(), "ConstantOfShape" | "Identity"));
            let attributes = graph.node.iter_mut().flat_map(|node| &mut node.attribute);
            for tensor in graph.initializer.iter_mut().chain(attributes.filter_map(|a| a.t.as_mut())) {
                if tensor.name() != "shape" {
                    (tensor.raw_data, tensor.float_data, tensor.int32_data) = (None, vec![], vec![]);
                }
            }
            graph
        };
        prop_assert_eq!(blank(&model), blank(&written));
    }

    #[test]
    fn flipped_bytes_never_panic(flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut bytes = sample().encode_to_vec();
        for (at, byte) in &flips {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        let _ = survives(bytes);
    }

    #[test]
    fn flipped_bytes_of_a_real_file_never_panic(at: prop::sample::Index, byte: u8) {
        let mut bytes = lenet();
        // The weights fill the middle; the nodes before and the values after are what can go wrong.
        let edges = 4096;
        let at = at.index(2 * edges);
        let at = if at < edges { at } else { bytes.len() - (at - edges) - 1 };
        bytes[at] = byte;
        let _ = survives(bytes);
    }
}
