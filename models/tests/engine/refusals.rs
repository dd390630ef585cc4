//! Nodes that cannot be run are refused with an error that says which, where and why; never a panic.

use std::sync::LazyLock;

use models::ops::Attribute;
use models::tensor::{DType, Tensor};
use proptest::prelude::*;

use crate::golden;
use crate::support::{Case, context, cpu, ints, random, saved};

#[track_caller]
fn refused(case: &Case, parts: &[&str]) {
    let message = case
        .build()
        .expect_err("a node that is refused")
        .to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} lacks {part:?}");
    }
    assert!(
        message.contains("node") && !message.contains('\n'),
        "{message:?}"
    );
}

#[test]
fn errors_name_operator_attribute_and_reason() {
    let x = || random(&[1, 2, 6, 6], 1);
    refused(
        &Case::new("NonMaxSuppression", 17).input(x()),
        &["unsupported operator NonMaxSuppression"],
    );
    refused(&Case::new("Relu", 24).input(x()), &["opset 24", "7 to 23"]);
    refused(&Case::new("Relu", 13), &["input X", "missing"]);
    refused(
        &Case::new("Relu", 13).input(ints(&[1])),
        &["float", "int64"],
    );
    refused(
        &Case::new("Relu", 13).input(random(&[0, 2], 1)),
        &["no elements"],
    );
    refused(
        &Case::new("Relu", 13).input(x()).int("speed", 3),
        &["attribute speed", "not supported"],
    );
    let pool = || Case::new("MaxPool", 12).input(x());
    refused(&pool(), &["kernel_shape", "missing"]);
    let pool = || pool().ints("kernel_shape", &[2, 2]);
    refused(&pool().int("storage_order", 2), &["storage_order"]);
    refused(&pool().ints("strides", &[0, 1]), &["strides"]);
    refused(&pool().ints("pads", &[2, 0, 0, 0]), &["pads"]);
    refused(&pool().ints("pads", &[-1, 0, 0, 0]), &["pads"]);
    refused(&pool().string("auto_pad", "HALF"), &["auto_pad", "HALF"]);
    refused(&pool().float("ceil_mode", 1.0), &["ceil_mode", "integer"]);
    let mut indices = pool();
    indices.outputs = 3;
    refused(&indices, &["at most 2 outputs"]);
    let conv = |w: &[usize]| Case::new("Conv", 17).input(x()).input(random(w, 2));
    refused(&conv(&[4, 3, 3, 3]), &["group", "[4, 3, 3, 3]"]);
    refused(&conv(&[4, 2, 7, 7]), &["does not fit"]);
    refused(
        &conv(&[4, 2, 3, 3]).ints("kernel_shape", &[5, 5]),
        &["kernel_shape"],
    );
    refused(&conv(&[4, 2, 3]), &["X", "W"]);
    refused(
        &Case::new("Gemm", 13)
            .input(random(&[2, 3], 1))
            .input(random(&[2, 3], 2)),
        &["transA"],
    );
    refused(
        &Case::new("MatMul", 13)
            .input(random(&[2, 3], 1))
            .input(random(&[2, 3], 2)),
        &["do not go together"],
    );
    refused(
        &Case::new("Add", 13)
            .input(random(&[2], 1))
            .input(random(&[3], 2)),
        &["broadcast"],
    );
    refused(
        &Case::new("Add", 13)
            .input(random(&[2], 1))
            .input(ints(&[3])),
        &["input B", "float"],
    );
    refused(
        &Case::new("Div", 13).input(ints(&[1])).constant(ints(&[0])),
        &["by 0"],
    );
    refused(
        &Case::new("Reshape", 13).input(x()).input(ints(&[-1])),
        &["shape", "known"],
    );
    refused(
        &Case::new("Reshape", 13).input(x()).constant(ints(&[-1, 5])),
        &["[-1, 5]"],
    );
    refused(
        &Case::new("Reshape", 13)
            .input(x())
            .constant(ints(&[i64::MAX, i64::MAX])),
        &["shape"],
    );
    refused(
        &Case::new("Squeeze", 13).input(x()).constant(ints(&[1])),
        &["axis 1"],
    );
    refused(
        &Case::new("Pad", 13)
            .string("mode", "mirror")
            .input(x())
            .constant(ints(&[0; 8])),
        &["mode", "mirror"],
    );
    refused(
        &Case::new("Dropout", 9).float("ratio", 1.0).input(x()),
        &["ratio"],
    );
    refused(
        &Case::new("Cast", 13).int("to", 2).input(x()),
        &["attribute to"],
    );
    refused(
        &Case::new("Gather", 13).input(x()).constant(ints(&[1])),
        &["indices", "outside"],
    );
    refused(
        &Case::new("ConstantOfShape", 13).constant(ints(&[1 << 40, 1 << 40])),
        &["too large"],
    );
    refused(
        &Case::new("Softmax", 13).int("axis", 4).input(x()),
        &["axis"],
    );
    refused(&Case::new("Constant", 13), &["one"]);
    refused(
        &Case::new("Transpose", 13)
            .ints("perm", &[0, 0, 1, 2])
            .input(x()),
        &["perm"],
    );
    refused(
        &Case::new("RNN", 14)
            .input(random(&[3, 2, 4], 1))
            .input(random(&[1, 5, 4], 2))
            .input(random(&[1, 5, 5], 3))
            .omitted()
            .constant(ints(&[3, 2])),
        &["sequence_lens", "3 for each of the 2 samples"],
    );
    refused(
        &Case::new("Einsum", 12)
            .string("equation", "ij,jk->ikl")
            .input(random(&[2, 3], 1))
            .input(random(&[3, 4], 2)),
        &["equation", "no input has"],
    );
    refused(
        &Case::new("Resize", 13).string("mode", "area").input(x()),
        &["mode", "area"],
    );
    refused(
        &Case::new("BatchNormalization", 15)
            .input(x())
            .input(random(&[3], 1)),
        &["scale", "[2]"],
    );
}

fn any_tensor() -> impl Strategy<Value = Option<Tensor>> {
    let shape = prop::collection::vec(0usize..4, 0..5);
    prop_oneof![
        1 => Just(None),
        4 => (shape.clone(), any::<u64>()).prop_map(|(s, seed)| Some(random(&s, seed))),
        2 => prop::collection::vec(prop_oneof![-3i64..5, any::<i64>()], 0..5).prop_map(|v| Some(ints(&v))),
        1 => shape.prop_map(|s| Some(Tensor::from_bool(&s, vec![true; s.iter().product()]))),
    ]
}

fn any_attribute() -> impl Strategy<Value = Attribute> {
    let int = || prop_oneof![-3i64..6, any::<i64>()];
    prop_oneof![
        int().prop_map(Attribute::Int),
        prop::collection::vec(int(), 0..5).prop_map(Attribute::Ints),
        any::<f32>().prop_map(Attribute::Float),
        Just(Attribute::String("SAME_UPPER".into())),
        any_tensor().prop_map(|t| t.map_or(Attribute::Other("graph"), Attribute::Tensor)),
    ]
}

const OPERATORS: [&str; 67] = [
    "Conv",
    "Gemm",
    "MatMul",
    "Relu",
    "Sigmoid",
    "Tanh",
    "Clip",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "MaxPool",
    "AveragePool",
    "GlobalAveragePool",
    "BatchNormalization",
    "Dropout",
    "LRN",
    "Softmax",
    "LogSoftmax",
    "Identity",
    "Flatten",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "Slice",
    "Pad",
    "Concat",
    "Gather",
    "Cast",
    "ReduceMean",
    "ConstantOfShape",
    "Gelu",
    "LeakyRelu",
    "ThresholdedRelu",
    "Elu",
    "Selu",
    "Celu",
    "HardSigmoid",
    "HardSwish",
    "Mish",
    "Softplus",
    "Softsign",
    "Shrink",
    "PRelu",
    "LayerNormalization",
    "RMSNormalization",
    "InstanceNormalization",
    "GroupNormalization",
    "MeanVarianceNormalization",
    "LpNormalization",
    "LSTM",
    "GRU",
    "RNN",
    "Attention",
    "SoftmaxCrossEntropyLoss",
    "NegativeLogLikelihoodLoss",
    "ConvTranspose",
    "GlobalMaxPool",
    "Resize",
    "Upsample",
    "Einsum",
    "RandomUniform",
    "RandomNormal",
    "RandomUniformLike",
    "RandomNormalLike",
    "Bernoulli",
];

const ATTRIBUTES: [&str; 47] = [
    "axis",
    "axes",
    "perm",
    "kernel_shape",
    "strides",
    "pads",
    "dilations",
    "auto_pad",
    "group",
    "ceil_mode",
    "alpha",
    "beta",
    "transA",
    "ratio",
    "size",
    "epsilon",
    "to",
    "keepdims",
    "starts",
    "ends",
    "value",
    "min",
    "training_mode",
    "spatial",
    "scales",
    "mode",
    "layout",
    "num_groups",
    "direction",
    "clip",
    "hidden_size",
    "is_causal",
    "q_num_heads",
    "kv_num_heads",
    "softcap",
    "output_padding",
    "output_shape",
    "equation",
    "shape",
    "p",
    "ignore_index",
    "reduction",
    "antialias",
    "storage_order",
    "activations",
    "lambd",
    "gamma",
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 6000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a file says, building refuses or the operator runs forward and, for floats, backward.
    #[test]
    fn no_node_panics(
        op in 0..OPERATORS.len(), opset in 6i64..25,
        attributes in prop::collection::btree_map(0..ATTRIBUTES.len(), any_attribute(), 0..4),
        inputs in prop::collection::vec((any_tensor(), any::<bool>()), 0..6), outputs in 0usize..4,
    ) {
        let mut case = Case::new(OPERATORS[op], opset);
        case.outputs = outputs;
        for (name, value) in attributes {
            case = case.attribute(ATTRIBUTES[name], value);
        }
        for (input, constant) in inputs {
            case.inputs.push(input);
            case.constant.push(constant);
        }
        run_if_legal(&case);
    }

    /// The same of nodes that are nearly right: known ones with something changed.
    #[test]
    fn no_changed_node_panics(
        number in any::<prop::sample::Index>(), change in 0usize..5, place in any::<prop::sample::Index>(),
        attribute in any_attribute(), tensor in any_tensor(), opset in 7i64..24,
    ) {
        static KNOWN: LazyLock<Vec<Case>> = LazyLock::new(|| {
            let onnxruntime = golden::cases(include_str!("../golden/operators.json"));
            let torch = golden::cases(include_str!("../golden/pytorch.json"));
            onnxruntime.into_iter().chain(torch).map(|(case, _)| case).collect()
        });
        let mut case = KNOWN[number.index(KNOWN.len())].clone();
        let inputs = case.inputs.len();
        match change {
            0 if inputs > 0 => case.inputs[place.index(inputs)] = tensor,
            1 if inputs > 0 => drop(case.inputs.remove(place.index(inputs))),
            2 if inputs > 0 => case.constant[place.index(inputs)] ^= true,
            3 => {
                let name = match case.attributes.len() {
                    0 => ATTRIBUTES[place.index(ATTRIBUTES.len())].to_owned(),
                    len => case.attributes.keys().nth(place.index(len)).unwrap().clone(),
                };
                case.attributes.insert(name, attribute);
            }
            _ => case.opset = opset,
        }
        case.constant.truncate(case.inputs.len());
        run_if_legal(&case);
    }
}

/// Runs a node forward and backward if it can be built.
fn run_if_legal(case: &Case) {
    if let Ok(op) = case.build() {
        // Results that would be large are legal but not worth the time.
        if op
            .outputs()
            .iter()
            .all(|o| o.shape.iter().product::<usize>() < 100_000)
        {
            let outputs = case.run();
            let device = cpu();
            let cx = context(&*device, true);
            let wanted: Vec<bool> = case.inputs.iter().map(Option::is_some).collect();
            let saved = saved(&*op, &case.inputs, op.forward(&cx, case.inputs.clone()));
            let grads = outputs
                .into_iter()
                .map(|o| Some(o).filter(|o| o.dtype() == DType::F32));
            op.backward(&cx, saved, grads.collect(), &wanted);
        }
    }
}
