//! Every operator's backward against finite differences, over random shapes and attributes.

use models::ops::Attribute;
use models::tensor::Tensor;
use proptest::prelude::*;

use crate::support::{
    Case, check_gradients, cpu, ints, map, random, random_apart, random_positive,
};

/// Sizes of one sliding axis: input, kernel, stride, dilation, padding before and after.
type Sliding = (usize, i64, i64, i64, i64, i64);

/// A kernel that fits the input, padding smaller than its reach.
fn sliding() -> impl Strategy<Value = Sliding> {
    (1i64..4, 1i64..4, 1i64..3).prop_flat_map(|(kernel, stride, dilation)| {
        let reach = (kernel - 1) * dilation + 1;
        (reach..reach + 5, 0..reach.min(3), 0..reach.min(3)).prop_map(
            move |(input, before, after)| (input as usize, kernel, stride, dilation, before, after),
        )
    })
}

/// The window attributes of ONNX for one or two axes.
fn windowed(case: Case, axes: &[Sliding], auto_pad: &str) -> Case {
    let list = |f: &dyn Fn(&Sliding) -> i64| axes.iter().map(f).collect::<Vec<_>>();
    let case = case
        .ints("kernel_shape", &list(&|a| a.1))
        .ints("strides", &list(&|a| a.2))
        .ints("dilations", &list(&|a| a.3));
    if auto_pad == "NOTSET" {
        case.ints("pads", &[list(&|a| a.4), list(&|a| a.5)].concat())
    } else {
        case.string("auto_pad", auto_pad)
    }
}

fn auto_pad() -> impl Strategy<Value = &'static str> {
    prop_oneof![
        3 => Just("NOTSET"),
        1 => Just("SAME_UPPER"),
        1 => Just("SAME_LOWER"),
        1 => Just("VALID"),
    ]
}

fn shape(axes: std::ops::Range<usize>) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1usize..5, axes)
}

/// Two shapes that broadcast.
fn broadcasting() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    (shape(0..4), any::<u8>(), 0usize..4, any::<bool>()).prop_map(|(full, ones, cut, swap)| {
        let mut part = full[cut.min(full.len())..].to_vec();
        for (axis, extent) in part.iter_mut().enumerate() {
            if ones >> axis & 1 == 1 {
                *extent = 1;
            }
        }
        if swap { (part, full) } else { (full, part) }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn conv(
        batch in 1usize..3, groups in 1usize..3, inner in 1usize..3, outer in 1usize..4,
        axes in prop::collection::vec(sliding(), 1..3), auto_pad in auto_pad(), bias: bool, seed: u64,
    ) {
        let (channels, filters) = (groups * inner, groups * outer);
        let mut x = vec![batch, channels];
        x.extend(axes.iter().map(|a| a.0));
        let mut w = vec![filters, inner];
        w.extend(axes.iter().map(|a| a.1 as usize));
        let mut case = windowed(Case::new("Conv", 17), &axes, auto_pad)
            .int("group", groups as i64)
            .input(random(&x, seed))
            .input(random(&w, seed ^ 1));
        if bias {
            case = case.input(random(&[filters], seed ^ 2));
        }
        check_gradients(&case);
    }

    #[test]
    fn gemm(
        m in 1usize..5, n in 1usize..5, k in 1usize..5, ta: bool, tb: bool,
        alpha in -2f32..2.0, beta in -2f32..2.0, c in 0usize..6, seed: u64,
    ) {
        let flip = |t: bool, a, b| if t { [b, a] } else { [a, b] };
        let mut case = Case::new("Gemm", 13)
            .float("alpha", alpha).float("beta", beta)
            .int("transA", ta.into()).int("transB", tb.into())
            .input(random(&flip(ta, m, k), seed))
            .input(random(&flip(tb, k, n), seed ^ 1));
        let c = vec![vec![], vec![1], vec![n], vec![1, n], vec![m, 1], vec![m, n]].swap_remove(c);
        if seed % 7 != 0 {
            case = case.input(random(&c, seed ^ 2));
        }
        check_gradients(&case);
    }

    #[test]
    fn matmul((a, b) in broadcasting(), m in 1usize..4, n in 1usize..4, k in 1usize..5, vectors in 0u8..8, seed: u64) {
        let (mut a, mut b) = (a, b);
        match vectors {
            0 => a = vec![k],
            _ => a.extend([m, k]),
        }
        match vectors {
            1 => b = vec![k],
            _ => b.extend([k, n]),
        }
        check_gradients(&Case::new("MatMul", 13).input(random(&a, seed)).input(random(&b, seed ^ 1)));
    }

    #[test]
    fn activations(shape in shape(0..4), which in 0usize..4, seed: u64) {
        let name = ["Relu", "Sigmoid", "Tanh", "Clip"][which];
        let mut case = Case::new(name, 13);
        case = case.input(if which == 1 || which == 2 { random(&shape, seed) } else { random_apart(&shape, seed, 0.2) });
        if name == "Clip" {
            case = case.constant(Tensor::from_f32(&[], [-0.4])).constant(Tensor::from_f32(&[], [1.2]));
        }
        check_gradients(&case);
    }

    #[test]
    fn smooth_activations(shape in shape(0..4), which in 0usize..8, alpha in 0.3f32..1.5, seed: u64) {
        let (name, opset) = [
            ("Gelu", 20), ("Gelu", 20), ("Mish", 18), ("Softplus", 7), ("Softsign", 7), ("Elu", 7), ("Celu", 12),
            ("Selu", 7),
        ][which];
        let case = Case::new(name, opset);
        let case = match which {
            0 => case.string("approximate", "tanh"),
            5 | 6 => case.float("alpha", alpha),
            7 => case.float("alpha", alpha).float("gamma", 1.2),
            _ => case,
        };
        let bends = which >= 4;
        check_gradients(&case.input(if bends { random_apart(&shape, seed, 0.2) } else { random(&shape, seed) }));
    }

    #[test]
    fn bent_activations(shape in shape(0..4), which in 0usize..5, seed: u64) {
        // Values lie at odd multiples of 0.1, bends at even ones.
        let case = match which {
            0 => Case::new("LeakyRelu", 16).float("alpha", 0.3),
            1 => Case::new("ThresholdedRelu", 10).float("alpha", 0.4),
            2 => Case::new("HardSigmoid", 7).float("alpha", 0.5).float("beta", 0.6),
            3 => Case::new("HardSwish", 14),
            _ => Case::new("Shrink", 9).float("lambd", 0.4).float("bias", -0.3),
        };
        check_gradients(&case.input(random_apart(&shape, seed, 0.2)));
    }

    #[test]
    fn prelu((x, slope) in broadcasting(), seed: u64) {
        let (x, slope) = if x.len() < slope.len() { (slope, x) } else { (x, slope) };
        prop_assume!(slope.iter().rev().zip(x.iter().rev()).all(|(s, x)| s == x || *s == 1));
        check_gradients(&Case::new("PRelu", 16).input(random_apart(&x, seed, 0.2)).input(random(&slope, seed ^ 1)));
    }

    #[test]
    fn layer_norm(shape in shape(1..5), axis in 0usize..5, ones in 0u8..8, bias: bool, rms: bool, seed: u64) {
        let axis = axis % shape.len();
        let mut scale = shape[axis..].to_vec();
        for (at, extent) in scale.iter_mut().enumerate() {
            if ones < 4 && ones >> at & 1 == 1 {
                *extent = 1;
            }
        }
        let mut case = Case::new(if rms { "RMSNormalization" } else { "LayerNormalization" }, 23)
            .int("axis", axis as i64 - shape.len() as i64)
            .float("epsilon", 0.3)
            .input(random(&shape, seed))
            .input(random(&scale, seed ^ 1));
        if bias && !rms {
            case = case.input(random(&shape[axis..], seed ^ 2));
        }
        check_gradients(&case);
    }

    #[test]
    fn group_norm(
        n in 1usize..3, groups in 1usize..4, inner in 1usize..3, spatial in shape(0..3), which in 0usize..3, seed: u64,
    ) {
        let channels = groups * inner;
        let x = random(&[vec![n, channels], spatial].concat(), seed);
        let (case, parameters) = match which {
            0 => (Case::new("InstanceNormalization", 7), channels),
            1 => (Case::new("GroupNormalization", 18).int("num_groups", groups as i64), groups),
            _ => (Case::new("GroupNormalization", 21).int("num_groups", groups as i64), channels),
        };
        check_gradients(&case
            .float("epsilon", 0.3)
            .input(x)
            .input(random(&[parameters], seed ^ 1))
            .input(random(&[parameters], seed ^ 2)));
    }

    #[test]
    fn recurrent(
        which in 0usize..4, steps in 1usize..4, batch in 1usize..3, width in 1usize..4, hidden in 1usize..4,
        direction in 0usize..3, batch_first: bool, bias: bool, initial: bool, peepholes: bool, options in 0u8..8,
        seed: u64,
    ) {
        let (name, gates) = [("LSTM", 4), ("GRU", 3), ("GRU", 3), ("RNN", 1)][which];
        let (direction, d) = [("forward", 1), ("reverse", 1), ("bidirectional", 2)][direction];
        let turned = |a: usize, b: usize, c: usize| if batch_first { [b, a, c] } else { [a, b, c] };
        let state = turned(d, batch, hidden);
        let mut case = Case::new(name, 14).string("direction", direction).int("layout", batch_first.into());
        if which == 2 {
            case = case.int("linear_before_reset", 1);
        }
        let names: &[&str] = match (options, name) {
            (0, "LSTM") => &["Sigmoid", "ScaledTanh", "Softplus"],
            (0, "GRU") => &["Softplus", "ScaledTanh"],
            (0, _) => &["Affine"],
            _ => &[],
        };
        if !names.is_empty() {
            let names = names.repeat(d).into_iter().map(String::from).collect();
            case = case
                .attribute("activations", Attribute::Strings(names))
                .attribute("activation_alpha", Attribute::Floats(vec![0.8]))
                .attribute("activation_beta", Attribute::Floats(vec![0.6]));
        }
        if options == 1 && name == "LSTM" {
            case = case.int("input_forget", 1);
        }
        case = case
            .input(random(&turned(steps, batch, width), seed))
            .input(random(&[d, gates * hidden, width], seed ^ 1))
            .input(random(&[d, gates * hidden, hidden], seed ^ 2));
        case = if bias { case.input(random(&[d, 2 * gates * hidden], seed ^ 3)) } else { case.omitted() };
        case = case.omitted();
        case = if initial { case.input(random(&state, seed ^ 4)) } else { case.omitted() };
        if name == "LSTM" {
            case = if initial { case.input(random(&state, seed ^ 5)) } else { case.omitted() };
            if peepholes {
                case = case.input(random(&[d, 3 * hidden], seed ^ 6));
            }
        }
        case.outputs = if name == "LSTM" { 3 } else { 2 };
        check_gradients(&case);
    }

    #[test]
    fn attention(
        batch in 1usize..3, kv_heads in 1usize..3, group in 1usize..3, queries in 1usize..4, keys in 1usize..4,
        width in 1usize..4, v_width in 1usize..4, past in 0usize..3, packed: bool, causal: bool, capped: bool,
        mask in 0usize..5, seed: u64,
    ) {
        let heads = kv_heads * group;
        let shape = |heads, len, width| match packed {
            true => vec![batch, len, heads * width],
            false => vec![batch, heads, len, width],
        };
        let mut case = Case::new("Attention", 23)
            .int("is_causal", causal.into())
            .int("q_num_heads", heads as i64)
            .int("kv_num_heads", kv_heads as i64)
            .float("scale", 0.7)
            .float("softcap", if capped { 1.5 } else { 0.0 })
            .int("qk_matmul_output_mode", if seed % 2 == 0 { 0 } else { 3 })
            .input(random(&shape(heads, queries, width), seed))
            .input(random(&shape(kv_heads, keys, width), seed ^ 1))
            .input(random(&shape(kv_heads, keys, v_width), seed ^ 2));
        let all = past + keys;
        case = match mask {
            0 => case.omitted(),
            1 => case.input(random(&[queries, all], seed ^ 3)),
            2 => case.input(random(&[batch, 1, 1, all], seed ^ 3)),
            // The first key is always seen.
            3 => case.input(Tensor::from_bool(&[1, all], (0..all).map(|i| i % 2 == 0).collect::<Vec<_>>())),
            _ => case.input(random(&[heads, queries, 1.max(all - 1)], seed ^ 3)),
        };
        if past > 0 {
            case = case
                .input(random(&[batch, kv_heads, past, width], seed ^ 4))
                .input(random(&[batch, kv_heads, past, v_width], seed ^ 5));
        }
        case.outputs = if seed % 3 == 0 { 4 } else { 1 };
        check_gradients(&case);
    }

    #[test]
    fn likelihood(
        n in 1usize..4, classes in 1usize..5, rest in shape(0..3), softmax: bool, weighted: bool, reduction in 0usize..3,
        ignored: bool, seed: u64,
    ) {
        let name = if softmax { "SoftmaxCrossEntropyLoss" } else { "NegativeLogLikelihoodLoss" };
        let targets = [vec![n], rest.clone()].concat();
        let count: usize = targets.iter().product();
        let mut labels: Vec<i64> = (0..count as u64).map(|i| (seed.rotate_left(i as u32 * 7) % classes as u64) as i64).collect();
        let mut case = Case::new(name, 13).string("reduction", ["none", "sum", "mean"][reduction]);
        if ignored && count > 1 {
            labels[0] = -100;
            case = case.int("ignore_index", -100);
        }
        case = case
            .input(random(&[vec![n, classes], rest].concat(), seed))
            .input(Tensor::from_i64(&targets, labels));
        if weighted {
            case = case.constant(random_positive(&[classes], seed ^ 1));
        }
        case.outputs = if softmax && seed % 2 == 0 { 2 } else { 1 };
        check_gradients(&case);
    }

    #[test]
    fn conv_transpose(
        batch in 1usize..3, groups in 1usize..3, inner in 1usize..3, outer in 1usize..3,
        axes in prop::collection::vec((1usize..4, 1i64..4, 1i64..4, 1i64..3, 0i64..2, 0i64..2), 1..3),
        auto_pad in auto_pad(), bias: bool, seed: u64,
    ) {
        let list = |f: &dyn Fn(&Sliding) -> i64| axes.iter().map(f).collect::<Vec<_>>();
        let mut x = vec![batch, groups * inner];
        x.extend(axes.iter().map(|a| a.0));
        let mut w = vec![groups * inner, outer];
        w.extend(axes.iter().map(|a| a.1 as usize));
        let mut case = Case::new("ConvTranspose", 11)
            .int("group", groups as i64)
            .ints("strides", &list(&|a| a.2))
            .ints("dilations", &list(&|a| a.3));
        // Padding never takes more than the kernel's reach leaves.
        let reach = |a: &Sliding| (a.1 - 1) * a.3;
        case = match auto_pad {
            "NOTSET" => case
                .ints("pads", &[list(&|a| a.4.min(reach(a))), list(&|a| (a.5.min(reach(a) - a.4.min(reach(a)))).max(0))].concat())
                .ints("output_padding", &list(&|a| a.4.min(a.2 - 1))),
            mode => case.string("auto_pad", mode),
        };
        case = case.input(random(&x, seed)).input(random(&w, seed ^ 1));
        if bias {
            case = case.input(random(&[groups * outer], seed ^ 2));
        }
        check_gradients(&case);
    }

    #[test]
    fn global_max_pool(shape in shape(3..6), seed: u64) {
        check_gradients(&Case::new("GlobalMaxPool", 13).input(random_apart(&shape, seed, 0.2)));
    }

    #[test]
    fn axis_norms(shape in shape(1..4), axis in 0usize..4, which in 0usize..3, seed: u64) {
        let axis = (axis % shape.len()) as i64;
        let case = match which {
            0 => Case::new("MeanVarianceNormalization", 13).ints("axes", &[axis]),
            p => Case::new("LpNormalization", 13).int("axis", axis).int("p", p as i64),
        };
        // Away from where the deviation of a line is near 0.
        prop_assume!(which > 0 || shape[axis as usize] > 2);
        check_gradients(&case.input(random_apart(&shape, seed, 1.0)));
    }

    #[test]
    fn pad_modes(
        shape in shape(1..4), mode in 0usize..4, before in prop::collection::vec(-1i64..4, 3),
        after in prop::collection::vec(-1i64..4, 3), last: bool, seed: u64,
    ) {
        let rank = shape.len();
        prop_assume!(shape.iter().all(|&extent| extent > 2));
        let mut case = Case::new("Pad", 19).string("mode", ["constant", "reflect", "edge", "wrap"][mode])
            .input(random(&shape, seed));
        case = if last {
            case.constant(ints(&[before[0], after[0]])).omitted().constant(ints(&[-1]))
        } else {
            case.constant(ints(&[&before[..rank], &after[..rank]].concat()))
        };
        check_gradients(&case);
    }

    #[test]
    fn resize(
        shape in shape(1..4), mode in 0usize..3, coordinates in 0usize..6, exclude: bool, antialias: bool,
        sizes in prop::collection::vec(1i64..8, 3), seed: u64,
    ) {
        let coordinates = [
            "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
            "tf_crop_and_resize",
        ][coordinates];
        let rank = shape.len();
        let roi: Vec<f32> = (0..2 * rank).map(|i| if i < rank { -0.2 } else { 0.9 }).collect();
        check_gradients(&Case::new("Resize", 19)
            .string("mode", ["nearest", "linear", "cubic"][mode])
            .string("coordinate_transformation_mode", coordinates)
            .int("exclude_outside", (exclude && mode == 2).into())
            .int("antialias", (antialias && mode > 0).into())
            .float("extrapolation_value", 0.5)
            .input(random(&shape, seed))
            .constant(Tensor::from_f32(&[2 * rank], roi))
            .omitted()
            .constant(ints(&sizes[..rank])));
    }

    #[test]
    fn einsum(which in 0usize..12, a in 1usize..4, b in 1usize..4, c in 1usize..4, d in 1usize..4, seed: u64) {
        let (equation, shapes): (&str, Vec<Vec<usize>>) = match which {
            0 => ("ij->ji", vec![vec![a, b]]),
            1 => ("ijk->j", vec![vec![a, b, c]]),
            2 => ("iij->ji", vec![vec![a, a, b]]),
            3 => ("...ii", vec![vec![b, a, a]]),
            4 => ("i,i", vec![vec![a], vec![a]]),
            5 => ("i,j->ji", vec![vec![a], vec![b]]),
            6 => ("bij,bjk->bik", vec![vec![a, b, c], vec![a, c, d]]),
            7 => ("bhqd,bkhd->bhqk", vec![vec![a, b, c, d], vec![a, 2, b, d]]),
            8 => ("...ij,jk", vec![vec![a, b, c], vec![c, d]]),
            9 => ("i...,...j->...ij", vec![vec![a, 1, b], vec![c, b, d]]),
            10 => ("aab,cb->c", vec![vec![a, a, b], vec![c, 1]]),
            _ => ("abc,cbd->ad", vec![vec![a, b, c], vec![c, b, d]]),
        };
        let mut case = Case::new("Einsum", 12).string("equation", equation);
        for (i, shape) in shapes.iter().enumerate() {
            case = case.input(random(shape, seed ^ i as u64));
        }
        check_gradients(&case);
    }

    #[test]
    fn arithmetic((a, b) in broadcasting(), which in 0usize..4, constant in 0usize..6, seed: u64) {
        let name = ["Add", "Sub", "Mul", "Div"][which];
        let (a, b) = (random(&a, seed), random_positive(&b, seed ^ 1));
        let case = Case::new(name, 14);
        check_gradients(&match constant {
            0 => case.constant(a).input(b),
            1 => case.input(a).constant(b),
            _ => case.input(a).input(b),
        });
    }

    #[test]
    fn max_pool(
        planes in shape(2..3), axes in prop::collection::vec(sliding(), 1..3),
        auto_pad in auto_pad(), ceil: bool, seed: u64,
    ) {
        let x = [planes, axes.iter().map(|a| a.0).collect()].concat();
        let case = windowed(Case::new("MaxPool", 12), &axes, auto_pad).int("ceil_mode", ceil.into());
        check_gradients(&case.input(random_apart(&x, seed, 0.2)));
    }

    #[test]
    fn average_pool(
        planes in shape(2..3), axes in prop::collection::vec(sliding(), 1..3),
        auto_pad in auto_pad(), ceil: bool, padding: bool, seed: u64,
    ) {
        let x = [planes, axes.iter().map(|a| a.0).collect()].concat();
        let case = windowed(Case::new("AveragePool", 19), &axes, auto_pad)
            .int("ceil_mode", ceil.into())
            .int("count_include_pad", padding.into());
        check_gradients(&case.input(random(&x, seed)));
    }

    #[test]
    fn global_average_pool(shape in shape(3..6), seed: u64) {
        check_gradients(&Case::new("GlobalAveragePool", 13).input(random(&shape, seed)));
    }

    #[test]
    fn batch_norm(shape in shape(2..5), training: bool, old: bool, seed: u64) {
        // With a variance near 0 the function bends too sharply for finite differences.
        prop_assume!(!training || shape.iter().product::<usize>() / shape[1] >= 3);
        let c = [shape[1]];
        let mut case = Case::new("BatchNormalization", if old { 9 } else { 15 })
            .float("epsilon", 0.1)
            .input(map(&random(&shape, seed), |v| 2.0 * v))
            .input(random(&c, seed ^ 1))
            .input(random(&c, seed ^ 2))
            .input(random(&c, seed ^ 3))
            .input(random_positive(&c, seed ^ 4));
        if training && !old {
            case = case.int("training_mode", 1);
        }
        case.outputs = if training { 3 } else { 1 };
        if !training {
            case.constant[3..].fill(true);
        }
        check_gradients(&case);
    }

    #[test]
    fn dropout(shape in shape(1..4), ratio in 0f32..0.9, seed: u64) {
        check_gradients(&Case::new("Dropout", 13)
            .input(random(&shape, seed))
            .constant(Tensor::from_f32(&[], [ratio]))
            .constant(Tensor::from_bool(&[], [true])));
    }

    #[test]
    fn lrn(shape in shape(2..5), size in 1i64..6, seed: u64) {
        check_gradients(&Case::new("LRN", 13)
            .int("size", size).float("alpha", 0.5).float("beta", 0.75).float("bias", 1.5)
            .input(random(&shape, seed)));
    }

    #[test]
    fn softmax(shape in shape(1..4), log: bool, old: bool, axis in 0usize..4, seed: u64) {
        let axis = axis % shape.len();
        check_gradients(&Case::new(if log { "LogSoftmax" } else { "Softmax" }, if old { 11 } else { 13 })
            .int("axis", axis as i64)
            .input(random(&shape, seed)));
    }

    #[test]
    fn views(shape in shape(1..4), axis in 0usize..4, seed: u64) {
        let x = random(&shape, seed);
        let axis = (axis % shape.len()) as i64;
        check_gradients(&Case::new("Identity", 13).input(x.clone()));
        check_gradients(&Case::new("Flatten", 13).int("axis", axis).input(x.clone()));
        check_gradients(&Case::new("Reshape", 13).input(x.clone()).constant(ints(&[0, -1])));
        check_gradients(&Case::new("Unsqueeze", 13).input(x.clone()).constant(ints(&[axis])));
        let ones: Vec<i64> = (0..).zip(&shape).filter(|(_, e)| **e == 1).map(|(a, _)| a).collect();
        check_gradients(&Case::new("Squeeze", 11).ints("axes", &ones).input(x));
    }

    #[test]
    fn movement(shape in shape(3..4), order in Just(vec![0i64, 1, 2]).prop_shuffle(), step in 1i64..3, back: bool, seed: u64) {
        let x = random(&shape, seed);
        check_gradients(&Case::new("Transpose", 13).ints("perm", &order).input(x.clone()));
        check_gradients(&Case::new("Pad", 13).input(x.clone()).constant(ints(&[1, 0, 2, 0, 1, 0])));
        let (start, end, step) = if back { (-1, i64::MIN, -step) } else { (0, i64::MAX, step) };
        check_gradients(&Case::new("Slice", 13)
            .input(x).constant(ints(&[start])).constant(ints(&[end])).constant(ints(&[1])).constant(ints(&[step])));
    }

    #[test]
    fn concat(shape in shape(1..4), extents in shape(1..4), axis in 0usize..4, seed: u64) {
        let axis = axis % shape.len();
        let mut case = Case::new("Concat", 13).int("axis", axis as i64);
        for (i, extent) in extents.into_iter().enumerate() {
            let mut part = shape.clone();
            part[axis] = extent;
            case = case.input(random(&part, seed ^ i as u64));
        }
        check_gradients(&case);
    }

    #[test]
    fn reduce_mean(shape in shape(1..5), axis in 0usize..5, keep: bool, seed: u64) {
        let axis = (axis % shape.len()) as i64;
        let axes = if axis == 0 { vec![-1] } else { vec![0, axis] };
        check_gradients(&Case::new("ReduceMean", 18)
            .int("keepdims", keep.into())
            .input(random(&shape, seed))
            .constant(ints(&axes)));
    }

    #[test]
    fn functions(shape in shape(0..4), seed: u64) {
        for name in ["Cos", "Erf", "Exp", "Neg", "Sin"] {
            check_gradients(&Case::new(name, 13).input(random(&shape, seed)));
        }
        for name in ["Log", "Reciprocal", "Sqrt"] {
            check_gradients(&Case::new(name, 13).input(random_positive(&shape, seed)));
        }
        for name in ["Abs", "Ceil", "Floor", "Round", "Sign"] {
            // In the middle between whole numbers and their halves.
            let x = map(&random_apart(&shape, seed, 1.0), |x| x + 0.25);
            check_gradients(&Case::new(name, 13).input(x));
        }
    }

    #[test]
    fn power((a, b) in broadcasting(), known: bool, exponent in prop::sample::select(vec![-1.0f32, -0.5, 0.5, 1.0, 1.7, 2.0, 3.0]), seed: u64) {
        let case = Case::new("Pow", 13).input(random_positive(&a, seed));
        check_gradients(&if known {
            case.constant(Tensor::from_f32(&[], [exponent]))
        } else {
            case.input(random(&b, seed ^ 1))
        });
        // The divisor, about 10, is taken away once or not at all.
        let x = map(&random_apart(&a, seed, 0.5), |x| x.rem_euclid(4.0) + 4.0);
        let y = map(&random(&b, seed ^ 1), |y| y / 4.0 + 3.5);
        for fmod in [0, 1] {
            let x = map(&x, |x| if (x - 3.25).rem_euclid(3.75) < 0.8 { x + 0.9 } else { x });
            let quotient_is_safe = x.f32s().iter().all(|x| y.f32s().iter().all(|y| {
                let part = (x / y).fract();
                (0.1..0.9).contains(&part)
            }));
            if quotient_is_safe {
                check_gradients(&Case::new("Mod", 13).int("fmod", fmod).input(x).input(y.clone()));
            }
        }
    }

    #[test]
    fn variadic((a, b) in broadcasting(), seed: u64) {
        let rank = a.len().max(b.len());
        let lead: Vec<usize> = [vec![2], vec![1; rank]].concat();
        for name in ["Sum", "Mean"] {
            let case = Case::new(name, 13).input(random(&a, seed)).input(random(&b, seed ^ 1));
            check_gradients(&case.input(random(&lead, seed ^ 2)));
        }
        // Values of the two come from lattices that lie between each other.
        let x = random_apart(&a, seed, 0.4);
        let y = map(&random_apart(&b, seed ^ 1, 0.4), |y| y + 0.2);
        for name in ["Max", "Min"] {
            check_gradients(&Case::new(name, 13).input(x.clone()).input(y.clone()));
        }
    }

    #[test]
    fn selection((a, b) in broadcasting(), rows in 1usize..5, columns in 1usize..5, upper: bool, k in -3i64..4, seed: u64) {
        let picks = |shape: &[usize]| {
            let bits: Vec<bool> = random(shape, seed ^ 7).f32s().iter().map(|&v| v > 0.0).collect();
            Tensor::from_bool(shape, bits)
        };
        check_gradients(&Case::new("Where", 16).input(picks(&b)).input(random(&a, seed)).input(random(&b, seed ^ 1)));
        check_gradients(&Case::new("Where", 16).constant(picks(&a)).input(random(&b, seed)).constant(random(&[], seed ^ 1)));
        check_gradients(&Case::new("Trilu", 14).int("upper", upper.into())
            .input(random(&[2, rows, columns], seed)).constant(Tensor::from_i64(&[], [k])));
    }

    #[test]
    fn repetition((part, full) in broadcasting(), counts in prop::collection::vec(1i64..4, 3), seed: u64) {
        let wish: Vec<i64> = full.iter().map(|&extent| extent as i64).collect();
        check_gradients(&Case::new("Expand", 13).input(random(&part, seed)).constant(ints(&wish)));
        check_gradients(&Case::new("Tile", 13).input(random(&[2, 1, 3], seed)).constant(ints(&counts)));
    }

    #[test]
    fn split_and_blocks(shape in shape(1..4), axis in 0usize..4, parts in prop::collection::vec(1usize..4, 1..4), crd: bool, side in 1usize..3, seed: u64) {
        let axis = axis % shape.len();
        let mut whole = shape.clone();
        whole[axis] = parts.iter().sum();
        let extents: Vec<i64> = parts.iter().map(|&part| part as i64).collect();
        let mut case = Case::new("Split", 13).int("axis", axis as i64).input(random(&whole, seed)).constant(ints(&extents));
        case.outputs = parts.len();
        check_gradients(&case);
        check_gradients(&Case::new("DepthToSpace", 13).int("blocksize", side as i64)
            .string("mode", if crd { "CRD" } else { "DCR" }).input(random(&[2, 3 * side * side, 2, 1], seed)));
        check_gradients(&Case::new("SpaceToDepth", 13).int("blocksize", side as i64)
            .input(random(&[2, 2, 2 * side, side], seed)));
    }

    #[test]
    fn running_sums(shape in shape(1..4), axis in 0usize..4, exclusive: bool, reverse: bool, seed: u64) {
        check_gradients(&Case::new("CumSum", 14).int("exclusive", exclusive.into()).int("reverse", reverse.into())
            .input(random(&shape, seed)).constant(Tensor::from_i64(&[], [(axis % shape.len()) as i64])));
    }

    #[test]
    fn reductions(shape in shape(1..4), axis in 0usize..4, keep: bool, seed: u64) {
        let axis = (axis % shape.len()) as i64;
        let axes = if axis == 0 { vec![-1] } else { vec![0, axis] };
        let case = |name: &str, x: Tensor| Case::new(name, 18)
            .int("keepdims", keep.into()).input(x).constant(ints(&axes));
        for name in ["ReduceSum", "ReduceMean", "ReduceSumSquare", "ReduceLogSumExp", "ReduceProd"] {
            check_gradients(&case(name, random(&shape, seed)));
        }
        for name in ["ReduceLogSum", "ReduceL2"] {
            check_gradients(&case(name, random_positive(&shape, seed)));
        }
        for name in ["ReduceMax", "ReduceMin", "ReduceL1"] {
            check_gradients(&case(name, random_apart(&shape, seed, 0.5)));
        }
    }

    #[test]
    fn gather_elements(shape in shape(1..4), axis in 0usize..4, count in 1usize..5, seed: u64) {
        let axis = axis % shape.len();
        let extent = shape[axis] as i64;
        let mut picked = shape.clone();
        picked[axis] = count;
        let indices: Vec<i64> = random(&picked, seed ^ 3).f32s().iter()
            .map(|v| ((v * 0.999 * extent as f32).floor() as i64).clamp(-extent, extent - 1)).collect();
        check_gradients(&Case::new("GatherElements", 13).int("axis", axis as i64)
            .input(random(&shape, seed)).input(Tensor::from_i64(&picked, indices)));
    }

    #[test]
    fn gather_nd(batch in 1usize..3, rows in 1usize..4, columns in 1usize..4, inner in 1usize..3, batched: bool, seed: u64) {
        let shape = [batch, rows, columns, inner];
        let last = |extent: usize| extent as i64 - 1;
        let (indices, dims) = if batched {
            let each = [0, -1, last(rows), last(columns)].repeat(batch);
            (Tensor::from_i64(&[batch, 2, 2], each), 1)
        } else {
            (Tensor::from_i64(&[2, 2], [0, last(rows), -1, 0]), 0)
        };
        check_gradients(&Case::new("GatherND", 13).int("batch_dims", dims)
            .input(random(&shape, seed)).input(indices));
    }

    #[test]
    fn gather(shape in shape(1..4), axis in 0usize..4, indices in prop::collection::vec(any::<u32>(), 1..6), seed: u64) {
        let axis = axis % shape.len();
        let extent = shape[axis] as i64;
        let indices: Vec<i64> = indices.iter().map(|&i| i64::from(i) % (2 * extent) - extent).collect();
        check_gradients(&Case::new("Gather", 13)
            .int("axis", axis as i64)
            .input(random(&shape, seed))
            .input(Tensor::from_i64(&[1, indices.len()], &indices)));
    }
}

/// The check itself must notice a wrong gradient: the kernel of a bend is one.
#[test]
#[should_panic(expected = "by differences")]
fn a_wrong_gradient_is_noticed() {
    // Half of the steps cross the bend at 0, so the difference quotient is not the derivative.
    check_gradients(&Case::new("Relu", 13).input(Tensor::from_f32(&[1], [0.001])));
}

#[test]
fn losses() {
    use models::loss::{Classes, Loss};
    let device = cpu();
    let logits = random(&[3, 4, 2], 1);
    let labels = Tensor::from_i64(&[3, 2], [0, 3, 1, 1, 2, 0]);
    let target = random(&[3, 4, 2], 2);
    let over = |axis, ignore| {
        Loss::CrossEntropy(Classes {
            axis: Some(axis),
            ignore,
        })
    };
    let tokens = Tensor::from_i64(&[3, 4], [0, 1, 1, -100, 0, -100, 1, 1, 0, 0, -100, 1]);
    for (loss, target) in [
        (over(1, None), &labels),
        (over(1, Some(1)), &labels),
        (over(2, Some(-100)), &tokens),
        (Loss::Mse, &target),
    ] {
        loss.check(logits.shape(), target).unwrap();
        let result = loss.forward_backward(&*device, &logits, target);
        let judged = loss.evaluate(&*device, &logits, target);
        assert_eq!(
            (result.loss, result.correct, result.targets),
            (judged.loss, judged.correct, judged.targets)
        );
        for i in 0..logits.len() {
            let moved = |step: f32| {
                let mut values = logits.f32s().to_vec();
                values[i] += step;
                let moved = Tensor::from_f32(logits.shape(), values);
                f64::from(loss.evaluate(&*device, &moved, target).loss)
            };
            let numeric = (8.0 * (moved(0.1) - moved(-0.1)) - (moved(0.2) - moved(-0.2))) / 1.2;
            let analytic = f64::from(result.gradient.f32s()[i]);
            assert!(
                (numeric - analytic).abs() < 1e-4,
                "{loss} at {i}: {analytic} {numeric}"
            );
        }
    }
}
