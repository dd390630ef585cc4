//! Which constants are trained, in models as they are exported.

use super::*;

fn names(graph: &Graph) -> Vec<&str> {
    graph.parameters().iter().map(|p| p.name.as_str()).collect()
}

#[test]
fn what_is_as_large_as_the_data_is_no_weight() {
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "w"], "product", &[]),
        ("Shape", &["product"], "extents", &[]),
        ("ConstantOfShape", &["extents"], "start", &[]),
        ("Add", &["product", "start"], "begun", &[]),
        ("Add", &["begun", "bias"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[("w", &[3, 4], None), ("bias", &[4], None)];
    let graph = built(&model(&[2, 3], initializers, nodes));
    assert_eq!(names(&graph), ["w", "bias"]);
}

#[test]
fn weights_that_others_are_computed_from_are_trained() {
    // Weight normalisation: g * v / |v|.
    let nodes: &[NodeRow<'_>] = &[
        ("ReduceL2", &["v"], "norm", &[("keepdims", 1)]),
        ("Div", &["v", "norm"], "direction", &[]),
        ("Mul", &["direction", "g"], "w", &[]),
        ("MatMul", &["x", "first"], "h", &[]),
        ("MatMul", &["h", "w"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[
        ("v", &[4, 5], None),
        ("g", &[1, 5], None),
        ("first", &[3, 4], None),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    let mut trained = names(&graph);
    trained.sort_unstable();
    assert_eq!(trained, ["first", "g", "v"]);
    let kinds: Vec<_> = graph.layers().iter().map(|layer| layer.kind).collect();
    assert_eq!(kinds, ["MatMul", "MatMul"]);
    assert_eq!(graph.layers()[1].parameters.len(), 2);
    assert_eq!(graph.layer_edges().len(), 1);
}

#[test]
fn constants_of_a_weights_formula_are_not_trained() {
    let nodes: &[NodeRow<'_>] = &[
        ("ReduceMean", &["v"], "mean", &[("keepdims", 1)]),
        ("Sub", &["v", "mean"], "centred", &[]),
        ("Mul", &["centred", "gain"], "w", &[]),
        ("Constant", &[], "zeros", &[("value_int", 0)]),
        ("MatMul", &["x", "w"], "h", &[]),
        ("Add", &["h", "one"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[
        ("v", &[3, 4], None),
        ("gain", &[1], None),
        ("one", &[4], None),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    let mut trained = names(&graph);
    trained.sort_unstable();
    assert_eq!(trained, ["one", "v"]);
}

#[test]
fn scales_that_are_shifted_by_a_number_are_trained() {
    // RMSNorm with a scale of 1 + w.
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "first"], "h", &[]),
        ("Add", &["w", "one"], "scale", &[]),
        ("Mul", &["h", "scale"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[
        ("first", &[3, 4], None),
        ("w", &[4], Some(0.0)),
        ("one", &[1], None),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    assert_eq!(names(&graph), ["first", "w"]);
}

#[test]
fn tables_that_are_computed_are_not_trained() {
    // Rotary positions: products with the cosines of frequencies.
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "first"], "h", &[]),
        ("Cos", &["frequencies"], "table", &[]),
        ("Mul", &["h", "table"], "turned", &[]),
        ("Add", &["turned", "mask"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[
        ("first", &[3, 4], None),
        ("frequencies", &[4], None),
        ("mask", &[2, 1, 2, 4], Some(0.0)),
    ];
    let graph = built(&model(&[2, 3], initializers, nodes));
    assert_eq!(names(&graph), ["first"]);
}

#[test]
fn weights_that_were_only_equal_are_trained_apart_when_told() {
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "w"], "h", &[]),
        ("Add", &["h", "bias"], "shifted", &[]),
        ("MatMul", &["shifted", "w"], "again", &[]),
        ("Add", &["again", "bias"], "y", &[]),
    ];
    let initializers: &[InitializerRow<'_>] = &[("w", &[3, 3], None), ("bias", &[3], Some(0.0))];
    let model = model(&[2, 3], initializers, nodes);
    let graph = built(&model);
    assert_eq!(names(&graph), ["w", "bias"]);
    let remarks: Vec<_> = graph.remarks().iter().map(ToString::to_string).collect();
    assert_eq!(remarks.len(), 1, "{remarks:?}");
    assert!(
        remarks[0].starts_with(
            "2 nodes read the weight 'bias' (Add_1, Add_3, …), which holds one number everywhere: it is trained as one"
        ),
        "{remarks:?}"
    );

    let digest = model.sha256().to_owned();
    let untied = model.untied().unwrap();
    assert_eq!(untied.sha256(), digest);
    let options = BuildOptions {
        untie: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&untied, &options).unwrap();
    assert_consistent(&graph);
    // Two products with one matrix share it: its numbers differ from each other.
    assert_eq!(names(&graph), ["w", "bias", "bias:2"]);
    assert!(graph.remarks().is_empty());

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out.onnx");
    let [first, second] = [[1.0; 3], [2.0; 3]].map(|values| Tensor::from_f32(&[3], values));
    untied
        .write_back(&[("bias", first), ("bias:2", second)], &path)
        .unwrap();
    let written = Model::open(&path).unwrap();
    assert_eq!(written.initializers()["bias"].f32s(), [1.0; 3]);
    assert_eq!(written.initializers()["bias:2"].f32s(), [2.0; 3]);
    assert_eq!(names(&built(&written)), ["w", "bias", "bias:2"]);
}

#[test]
fn sequences_of_known_positions_are_slices() {
    let nodes: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "w"], "h", &[]),
        ("Constant", &[], "size", &[("value_int", 3)]),
        ("Constant", &[], "zero", &[("value_int", 0)]),
        ("Constant", &[], "one", &[("value_int", 1)]),
        ("SplitToSequence", &["h", "size"], "parts", &[("axis", 1)]),
        ("SequenceAt", &["parts", "one"], "last", &[]),
        ("SequenceConstruct", &["last", "h"], "pair", &[]),
        ("SequenceAt", &["pair", "zero"], "same", &[]),
        ("ConcatFromSequence", &["pair"], "joined", &[("axis", 1)]),
        ("ReduceSum", &["joined"], "sum", &[]),
        ("Mul", &["same", "sum"], "y", &[]),
    ];
    let graph = built(&model(&[2, 3], &[("w", &[3, 4], None)], nodes));
    let shape_of = |name: &str| {
        let value = graph.values().iter().find(|value| value.name == name);
        value.map(|value| value.ty.shape.clone())
    };
    // The last part is shorter.
    assert_eq!(shape_of("last").unwrap(), [2, 1]);
    assert_eq!(shape_of("joined").unwrap(), [2, 5]);
    assert_eq!(shape_of("y").unwrap(), [2, 1]);
    let operators: Vec<_> = graph.nodes().iter().map(|node| node.op.name()).collect();
    assert_eq!(operators, ["MatMul", "Slice", "Concat", "ReduceSum", "Mul"]);

    let unknown: &[NodeRow<'_>] = &[
        ("MatMul", &["x", "w"], "h", &[]),
        ("SplitToSequence", &["h"], "parts", &[]),
        ("SequenceLength", &["parts"], "y", &[]),
    ];
    let error = Graph::build(
        &model(&[2, 3], &[("w", &[3, 4], None)], unknown),
        &BuildOptions::default(),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("unsupported operator SplitToSequence"),
        "{error}"
    );
}
