//! What exporters do to models: merged weights, functions, branches, batch norm in inference form.

use models::graph::{BuildOptions, Graph, Remark};
use models::loss::Loss;
use models::onnx::Model;
use models::onnx::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto,
    TensorProto, ValueInfoProto, attribute_type, data_type,
};
use models::tensor::{DType, Tensor};
use prost::Message;

use crate::support::{assert_close, context, cpu};

fn tensor(name: &str, dims: &[i64], value: f32) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(data_type::FLOAT),
        float_data: vec![value; dims.iter().product::<i64>() as usize],
        ..TensorProto::default()
    }
}

fn truth(name: &str, value: bool) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(data_type::BOOL),
        int32_data: vec![i32::from(value)],
        ..TensorProto::default()
    }
}

fn node(op_type: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: Some(op_type.into()),
        input: inputs.iter().map(|&name| name.into()).collect(),
        output: outputs.iter().map(|&name| name.into()).collect(),
        ..NodeProto::default()
    }
}

fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(attribute);
    node
}

fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(attribute_type::FLOAT),
        f: Some(value),
        ..AttributeProto::default()
    }
}

fn graph_attribute(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(attribute_type::GRAPH),
        g: Some(Box::new(graph)),
        ..AttributeProto::default()
    }
}

/// A branch without inputs that gives `output`.
fn branch(nodes: Vec<NodeProto>, initializer: Vec<TensorProto>, output: &str) -> GraphProto {
    GraphProto {
        node: nodes,
        initializer,
        output: vec![ValueInfoProto::tensor(output, data_type::FLOAT, &[])],
        ..GraphProto::default()
    }
}

/// A model of one float input `x` and one output `y`.
fn proto(input: &[i64], initializer: Vec<TensorProto>, nodes: Vec<NodeProto>) -> ModelProto {
    ModelProto {
        ir_version: Some(10),
        opset_import: vec![OperatorSetIdProto {
            domain: None,
            version: Some(18),
        }],
        graph: Some(GraphProto {
            node: nodes,
            initializer,
            input: vec![ValueInfoProto::tensor("x", data_type::FLOAT, input)],
            output: vec![ValueInfoProto::tensor("y", data_type::FLOAT, &[])],
            ..GraphProto::default()
        }),
        ..ModelProto::default()
    }
}

fn open(proto: &ModelProto) -> Model {
    Model::from_bytes(proto.encode_to_vec(), "model.onnx").unwrap()
}

fn build(proto: &ModelProto) -> Result<Graph, String> {
    Graph::build(&open(proto), &BuildOptions::default()).map_err(|error| error.to_string())
}

fn names(graph: &Graph) -> Vec<&str> {
    graph.parameters().iter().map(|p| p.name.as_str()).collect()
}

fn operators(graph: &Graph) -> Vec<&str> {
    graph.nodes().iter().map(|node| node.op.name()).collect()
}

/// Output, and gradients of the weights where every output element has gradient 1.
fn run(graph: &Graph, x: Tensor) -> (Vec<f32>, Vec<Vec<f32>>) {
    let device = cpu();
    let cx = context(&*device, true);
    let layers: Vec<usize> = (0..graph.layers().len()).collect();
    let target = graph.training_output(Loss::Mse).value;
    let program = graph.program(&layers, &[target]);
    let weights: Vec<Tensor> = program
        .weights()
        .iter()
        .map(|&weight| graph.parameters()[weight].tensor.clone())
        .collect();
    let states = program.states().iter();
    let mut states: Vec<Tensor> = states.map(|&s| graph.states()[s].tensor.clone()).collect();
    let (outputs, stash) = program.forward(&cx, vec![x], &weights, &mut states);
    let ones = Tensor::from_f32(outputs[0].shape(), vec![1.0; outputs[0].len()]);
    let gradients = program.backward(&cx, stash, &weights, vec![Some(ones)]);
    let gradients = gradients.weights.iter().map(|g| g.f32s().to_vec());
    (outputs[0].f32s().to_vec(), gradients.collect())
}

/// Two layers whose equal weights the exporter merged: one initializer, and an Identity for the second.
fn merged() -> ModelProto {
    proto(
        &[1, 2],
        vec![tensor("w1", &[2, 2], 0.5)],
        vec![
            node("Identity", &["w1"], &["w2"]),
            node("MatMul", &["x", "w1"], &["h"]),
            node("MatMul", &["h", "w2"], &["y"]),
        ],
    )
}

#[test]
fn merged_weights_are_one_with_the_sum_of_the_gradients_unless_untied() {
    let model = open(&merged());
    let tied = Graph::build(&model, &BuildOptions::default()).unwrap();
    assert_eq!(names(&tied), ["w1"]);
    assert_eq!(operators(&tied), ["MatMul", "MatMul"]);
    let untie = BuildOptions {
        untie: true,
        ..BuildOptions::default()
    };
    let untied = Graph::build(&model, &untie).unwrap();
    assert_eq!(names(&untied), ["w1", "w2"]);
    assert_eq!(untied.remarks(), []);

    let x = || Tensor::from_f32(&[1, 2], [1.0, 3.0]);
    let (output, gradients) = run(&tied, x());
    let (output_untied, apart) = run(&untied, x());
    assert_eq!(output, [2.0, 2.0]);
    assert_eq!(output_untied, output);
    // h = [2, 2]: the second product's gradient is 2 everywhere, the first one's x times 1.
    assert_eq!(apart, [vec![1.0, 1.0, 3.0, 3.0], vec![2.0; 4]]);
    assert_eq!(gradients, [vec![3.0, 3.0, 5.0, 5.0]]);
}

#[test]
fn merged_weights_are_remarked_on_and_mere_renaming_is_not() {
    let graph = build(&merged()).unwrap();
    let remark = Remark::Merged {
        weight: "w1".into(),
        others: vec!["w2".into()],
        more: 0,
    };
    assert_eq!(graph.remarks(), [remark]);
    let text = graph.remarks()[0].to_string();
    assert!(
        text.contains("'w1' and 'w2'") && text.contains("--untie"),
        "{text}"
    );

    let mut renamed = merged();
    let nodes = &mut renamed.graph.as_mut().unwrap().node;
    *nodes = vec![nodes[0].clone(), node("MatMul", &["x", "w2"], &["y"])];
    let graph = build(&renamed).unwrap();
    assert_eq!((names(&graph), graph.remarks()), (vec!["w1"], &[][..]));
}

/// Batch norm in inference form, its bias merged with its running mean: both were zeros when exported.
fn norm_with_merged_statistics() -> ModelProto {
    proto(
        &[2, 3],
        vec![tensor("mean", &[3], 0.0), tensor("var", &[3], 1.0)],
        vec![
            node("Identity", &["mean"], &["bias"]),
            node("Identity", &["var"], &["scale"]),
            node(
                "BatchNormalization",
                &["x", "scale", "bias", "mean", "var"],
                &["y"],
            ),
        ],
    )
}

#[test]
fn running_statistics_are_never_shared_with_weights() {
    let model = open(&norm_with_merged_statistics());
    let options = BuildOptions {
        train_batch_norm: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&model, &options).unwrap();
    assert_eq!(names(&graph), ["scale", "bias"]);
    let states: Vec<_> = graph.states().iter().map(|s| s.name.as_str()).collect();
    assert_eq!(states, ["mean", "var"]);
    assert_eq!(graph.remarks(), []);

    let mut direct = norm_with_merged_statistics();
    let nodes = &mut direct.graph.as_mut().unwrap().node;
    nodes[2].input[1] = "var".into();
    let error = Graph::build(&open(&direct), &options).unwrap_err();
    assert!(
        error.to_string().contains("reads 'var' as a weight"),
        "{error}"
    );
}

#[test]
fn batch_norm_trains_on_request_and_its_absence_is_remarked_on() {
    let train = BuildOptions {
        train_batch_norm: true,
        ..BuildOptions::default()
    };
    let model = open(&norm_with_merged_statistics());
    let inference = Graph::build(&model, &BuildOptions::default()).unwrap();
    assert_eq!(inference.states().len(), 0);
    assert_eq!(Graph::build(&model, &train).unwrap().states().len(), 2);

    let none = open(&merged());
    let graph = Graph::build(&none, &train).unwrap();
    assert!(graph.remarks().contains(&Remark::NoBatchNorm));
    let folded = proto(
        &[1, 1, 4, 4],
        vec![
            tensor("onnx::Conv_12", &[2, 1, 3, 3], 0.1),
            tensor("onnx::Conv_13", &[2], 0.0),
        ],
        vec![node(
            "Conv",
            &["x", "onnx::Conv_12", "onnx::Conv_13"],
            &["y"],
        )],
    );
    let remarks = build(&folded).unwrap().remarks().to_vec();
    assert_eq!(remarks, [Remark::FoldedBatchNorm { convolutions: 1 }]);
}

#[test]
fn the_running_variance_is_unbiased_as_in_pytorch() {
    let train = BuildOptions {
        train_batch_norm: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&open(&norm_with_merged_statistics()), &train).unwrap();
    let device = cpu();
    let program = graph.program(&[0], graph.outputs());
    let weights: Vec<Tensor> = graph
        .parameters()
        .iter()
        .map(|p| p.tensor.clone())
        .collect();
    let mut states: Vec<Tensor> = graph.states().iter().map(|s| s.tensor.clone()).collect();
    let x = || Tensor::from_f32(&[2, 3], [1.0, 2.0, 3.0, 3.0, 2.0, 7.0]);
    program.forward(&context(&*device, true), vec![x()], &weights, &mut states);
    // torch.nn.BatchNorm1d(3) after one step: variances 2, 0 and 8, blended with 1 by momentum 0.1.
    assert_close("mean", states[0].f32s(), &[0.2, 0.2, 0.5], 1e-6);
    assert_close("variance", states[1].f32s(), &[1.1, 0.9, 1.7], 1e-6);
    let kept = states.clone();
    program.forward(&context(&*device, false), vec![x()], &weights, &mut states);
    assert_eq!(states[1].f32s(), kept[1].f32s());
}

/// `scaled(x, w; alpha = 2) = LeakyRelu(x, alpha) w`, over two levels of functions.
fn functions() -> Vec<FunctionProto> {
    let imports = || {
        vec![OperatorSetIdProto {
            domain: None,
            version: Some(18),
        }]
    };
    let reference = AttributeProto {
        name: Some("alpha".into()),
        r#type: Some(attribute_type::FLOAT),
        ref_attr_name: Some("slope".into()),
        ..AttributeProto::default()
    };
    let rectify = FunctionProto {
        name: Some("rectify".into()),
        domain: Some("mine".into()),
        input: vec!["in".into()],
        output: vec!["out".into()],
        attribute_proto: vec![float("slope", 2.0)],
        node: vec![with(
            node("LeakyRelu", &["in"], &["out"]),
            reference.clone(),
        )],
        opset_import: imports(),
        ..FunctionProto::default()
    };
    let mut inner = with(node("rectify", &["a"], &["t"]), reference);
    inner.domain = Some("mine".into());
    inner.attribute[0].name = Some("slope".into());
    let scaled = FunctionProto {
        name: Some("scaled".into()),
        domain: Some("mine".into()),
        input: vec!["a".into(), "w".into()],
        output: vec!["b".into()],
        attribute: vec!["slope".into()],
        node: vec![inner, node("MatMul", &["t", "w"], &["b"])],
        opset_import: imports(),
        ..FunctionProto::default()
    };
    vec![rectify, scaled]
}

fn call(inputs: &[&str], output: &str, name: &str) -> NodeProto {
    NodeProto {
        domain: Some("mine".into()),
        name: Some(name.into()),
        ..node("scaled", inputs, &[output])
    }
}

fn calls(nodes: Vec<NodeProto>) -> ModelProto {
    let weights = vec![tensor("w1", &[2, 2], 1.0), tensor("w2", &[2, 2], 0.5)];
    ModelProto {
        functions: functions(),
        ..proto(&[1, 2], weights, nodes)
    }
}

#[test]
fn functions_are_replaced_by_their_nodes() {
    let model = calls(vec![
        with(call(&["x", "w1"], "h", "one"), float("slope", 0.5)),
        call(&["h", "w2"], "y", "two"),
    ]);
    let graph = build(&model).unwrap();
    assert_eq!(
        operators(&graph),
        ["LeakyRelu", "MatMul", "LeakyRelu", "MatMul"]
    );
    assert_eq!(names(&graph), ["w1", "w2"]);
    let nodes: Vec<_> = graph.nodes().iter().map(|n| n.name.as_str()).collect();
    assert_eq!(
        nodes,
        [
            "one/rectify_0/LeakyRelu_0",
            "one/MatMul_1",
            "two/rectify_0/LeakyRelu_0",
            "two/MatMul_1"
        ]
    );
    // -4 with slope 0.5 is -2; the sum -1 with the default slope 2 is -2; twice half of it.
    let (output, _) = run(&graph, Tensor::from_f32(&[1, 2], [-4.0, 1.0]));
    assert_eq!(output, [-2.0, -2.0]);
}

#[test]
fn functions_that_call_themselves_are_an_error() {
    let mut model = calls(vec![call(&["x", "w1"], "y", "one")]);
    let mut again = node("scaled", &["in", "in"], &["out"]);
    again.domain = Some("mine".into());
    model.functions[0].node = vec![again];
    let error = build(&model).unwrap_err();
    assert!(error.contains("call each other in a circle"), "{error}");

    model.functions.remove(0);
    let bytes = model.encode_to_vec();
    let error = Model::from_bytes(bytes, "model.onnx").unwrap_err();
    assert!(
        error
            .to_string()
            .contains("operator rectify of domain 'mine'"),
        "{error}"
    );
}

/// `y = if condition { x w } else { x + x }`, both branches calling their result `r`.
fn conditional(condition: NodeProto, in_branch: bool) -> ModelProto {
    let product = vec![node("MatMul", &["x", "w"], &["r"])];
    let weight = vec![tensor("w", &[2, 2], 2.0)];
    let (outer, inner) = if in_branch {
        (vec![], weight)
    } else {
        (weight, vec![])
    };
    let choice = with(
        node("If", &["c"], &["y"]),
        graph_attribute("then_branch", branch(product, inner, "r")),
    );
    let sum = vec![node("Add", &["x", "x"], &["r"])];
    let choice = with(
        choice,
        graph_attribute("else_branch", branch(sum, vec![], "r")),
    );
    proto(&[1, 2], outer, vec![choice, condition])
}

fn constant(value: bool) -> NodeProto {
    let value = AttributeProto {
        name: Some("value".into()),
        r#type: Some(attribute_type::TENSOR),
        t: Some(truth("", value)),
        ..AttributeProto::default()
    };
    with(node("Constant", &[], &["c"]), value)
}

#[test]
fn an_if_with_a_known_condition_is_its_branch() {
    let graph = build(&conditional(constant(true), false)).unwrap();
    assert_eq!(
        (operators(&graph), names(&graph)),
        (vec!["MatMul"], vec!["w"])
    );
    let x = || Tensor::from_f32(&[1, 2], [1.0, 2.0]);
    assert_eq!(run(&graph, x()).0, [6.0, 6.0]);
    let graph = build(&conditional(constant(false), false)).unwrap();
    assert_eq!(operators(&graph), ["Add"]);
    assert_eq!(run(&graph, x()).0, [2.0, 4.0]);
}

#[test]
fn an_if_may_depend_on_shapes_but_not_on_data() {
    let integer = |name: &str, value: i64| AttributeProto {
        name: Some(name.into()),
        r#type: Some(attribute_type::INT),
        i: Some(value),
        ..AttributeProto::default()
    };
    // The extent 1 of the first axis, or the difference 0 of it to itself.
    let by_shape = |source: &str| {
        let to_bool = integer("to", data_type::BOOL.into());
        let mut model = conditional(with(node("Cast", &[source], &["c"]), to_bool), false);
        let first = with(node("Shape", &["x"], &["extent"]), integer("end", 1));
        let nodes = &mut model.graph.as_mut().unwrap().node;
        nodes.extend([first, node("Sub", &["extent", "extent"], &["difference"])]);
        model
    };
    assert_eq!(operators(&build(&by_shape("extent")).unwrap()), ["MatMul"]);
    assert_eq!(operators(&build(&by_shape("difference")).unwrap()), ["Add"]);

    let mut by_data = conditional(node("Identity", &["flag"], &["c"]), false);
    let inputs = &mut by_data.graph.as_mut().unwrap().input;
    inputs.push(ValueInfoProto::tensor("flag", data_type::BOOL, &[]));
    let error = build(&by_data).unwrap_err();
    let expected = "operator If (node 'If_0') has sub-graphs and cannot be profiled or trained: its condition 'c' depends";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn weights_inside_a_branch_are_refused() {
    let error = build(&conditional(constant(true), true)).unwrap_err();
    assert!(
        error.contains("its weight 'If_0/then/w' is stored inside"),
        "{error}"
    );
    // The other branch does not need it.
    assert!(build(&conditional(constant(false), true)).is_ok());
}

/// Outputs of a whole graph in inference for the samples `from..`, made of their numbers.
fn infer(graph: &Graph, from: usize) -> Vec<f32> {
    let device = cpu();
    let cx = context(&*device, false);
    let layers: Vec<usize> = (0..graph.layers().len()).collect();
    let program = graph.program(&layers, &graph.outputs()[..1]);
    let weights: Vec<Tensor> = program
        .weights()
        .iter()
        .map(|&weight| graph.parameters()[weight].tensor.clone())
        .collect();
    let states = program.states().iter();
    let states: Vec<Tensor> = states.map(|&s| graph.states()[s].tensor.clone()).collect();
    let inputs = program.inputs().iter().map(|&input| {
        let value = &graph.values()[input];
        let shape = &value.ty.shape;
        let row: usize = shape[1..].iter().product();
        let number = (from * row..(from + shape[0]) * row).map(|i| i * i % 17);
        match value.ty.dtype {
            // A mask over the first tokens of each sample, and tokens.
            DType::I64 if value.name.contains("mask") => {
                let kept = number
                    .enumerate()
                    .map(|(i, n)| i64::from(i % row < 9 + n % 2));
                Tensor::from_i64(shape, kept.collect::<Vec<_>>())
            }
            DType::I64 => Tensor::from_i64(shape, number.map(|n| n as i64).collect::<Vec<_>>()),
            _ => Tensor::from_f32(shape, number.map(|n| n as f32 / 17.0).collect::<Vec<_>>()),
        }
    });
    let outputs = program.evaluate(&cx, inputs.collect(), &weights, &states);
    outputs[0].f32s().to_vec()
}

/// The exports hold a batch of 2 in reshapes, expansions, initial states, masks and sample numbers.
#[test]
fn exports_give_the_same_for_a_sample_whatever_the_batch() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/models");
    let Ok(entries) = std::fs::read_dir(folder) else {
        eprintln!("skipped: {folder} is not there");
        return;
    };
    let mut compared = 0;
    for entry in entries {
        let path = entry.unwrap().path();
        let model = Model::open(&path).unwrap();
        let build = |batch| {
            let options = BuildOptions {
                batch: Some(batch),
                ..BuildOptions::default()
            };
            Graph::build(&model, &options)
        };
        let (Ok(two), Ok(five)) = (build(2), build(5)) else {
            continue;
        };
        let found = infer(&five, 0);
        let expected = [infer(&two, 0), infer(&two, 2), infer(&two, 4)].concat();
        assert_close(
            &path.display().to_string(),
            &found,
            &expected[..found.len()],
            1e-4,
        );
        compared += 1;
    }
    assert!(compared > 15, "only {compared} exports could be built");
}

#[test]
fn a_batch_in_an_expansion_a_state_and_sample_numbers_is_replaced() {
    let int = |name: &str, dims: &[i64], values: &[i64]| TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(data_type::INT64),
        int64_data: values.to_vec(),
        ..TensorProto::default()
    };
    let concat = with(
        node("Concat", &["token", "x"], &["sequence"]),
        AttributeProto {
            name: Some("axis".into()),
            r#type: Some(attribute_type::INT),
            i: Some(1),
            ..AttributeProto::default()
        },
    );
    // A class token for each sample, a constant row for each, and the last and first step of each.
    let model = open(&proto(
        &[2, 2, 3],
        vec![
            tensor("class", &[1, 1, 3], 0.5),
            tensor("row", &[2, 1, 3], 0.25),
            int("shape", &[3], &[2, 1, 3]),
            int("steps", &[2, 2, 2], &[0, 2, 0, 0, 1, 2, 1, 0]),
        ],
        vec![
            node("Expand", &["class", "shape"], &["token"]),
            concat,
            node("Sub", &["sequence", "row"], &["shifted"]),
            node("GatherND", &["shifted", "steps"], &["y"]),
        ],
    ));
    let options = |batch| BuildOptions {
        batch: Some(batch),
        ..BuildOptions::default()
    };
    let five = Graph::build(&model, &options(5)).unwrap();
    assert_eq!(five.values()[five.outputs()[0]].ty.shape, [5, 2, 3]);
    let two = Graph::build(&model, &options(2)).unwrap();
    let expected = [infer(&two, 0), infer(&two, 2), infer(&two, 4)].concat();
    assert_eq!(infer(&five, 0), expected[..30]);
}

#[test]
fn the_loss_reads_the_output_of_its_name_and_the_rest_is_left_out() {
    let mut two = proto(
        &[2, 3],
        vec![tensor("v", &[3, 4], 0.5), tensor("w", &[3, 5], 0.25)],
        vec![
            node("MatMul", &["x", "v"], &["y"]),
            node("MatMul", &["x", "w"], &["z"]),
        ],
    );
    let outputs = &mut two.graph.as_mut().unwrap().output;
    outputs.push(ValueInfoProto::tensor("z", data_type::FLOAT, &[]));
    let model = open(&two);
    let named = |name: &str| BuildOptions {
        loss_output: Some(name.into()),
        ..BuildOptions::default()
    };
    let first = Graph::build(&model, &BuildOptions::default()).unwrap();
    let value = |graph: &Graph, id: usize| graph.values()[id].name.clone();
    assert_eq!(value(&first, first.training_output(Loss::Mse).value), "y");
    assert_eq!(names(&first), ["v", "w"]);
    let others = vec!["z".to_owned()];
    let output = "y".to_owned();
    assert_eq!(first.remarks(), [Remark::FirstOutput { output, others }]);

    let second = Graph::build(&model, &named("z")).unwrap();
    assert_eq!(value(&second, second.training_output(Loss::Mse).value), "z");
    assert_eq!(names(&second), ["w"]);
    assert_eq!(second.remarks(), []);
    let error = Graph::build(&model, &named("u")).unwrap_err().to_string();
    assert!(
        error.contains("--loss-output u") && error.contains("but y, z"),
        "{error}"
    );
}

#[test]
fn lookups_limit_the_numbers_of_an_input() {
    let mut tokens = proto(
        &[2, 3],
        vec![tensor("small", &[7, 4], 0.5), tensor("large", &[9, 4], 0.5)],
        vec![
            node("Gather", &["large", "x"], &["a"]),
            node("Identity", &["x"], &["same"]),
            node("Gather", &["small", "same"], &["b"]),
            node("Add", &["a", "b"], &["y"]),
        ],
    );
    let graph = tokens.graph.as_mut().unwrap();
    graph.input[0] = ValueInfoProto::tensor("x", data_type::INT64, &[2, 3]);
    let graph = Graph::build(&open(&tokens), &BuildOptions::default()).unwrap();
    assert_eq!(graph.index_limit(graph.inputs()[0]), Some(7));

    let floats = proto(
        &[2, 3],
        vec![tensor("w", &[3, 4], 0.5)],
        vec![node("MatMul", &["x", "w"], &["y"])],
    );
    let graph = Graph::build(&open(&floats), &BuildOptions::default()).unwrap();
    assert_eq!(graph.index_limit(graph.inputs()[0]), None);
    assert_eq!(graph.exported_batch(), Some(2));
}
