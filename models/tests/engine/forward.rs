//! Forward values: against onnxruntime (`golden/operators.json`) and by hand.

use std::sync::Arc;

use models::tensor::{DType, Tensor};

use crate::golden;
use crate::support::{Case, assert_close, context, cpu, random};

#[test]
fn operators_give_what_onnxruntime_gives() {
    let cases = golden::cases(include_str!("../golden/operators.json"));
    assert!(cases.len() > 80);
    for (number, (case, golden)) in cases.iter().enumerate() {
        let found = case.run();
        for (found, expected) in found.iter().zip(golden["outputs"].as_array().unwrap()) {
            let expected = golden::tensor(expected);
            let what = format!("case {number}: {case:?}");
            assert_eq!(
                (found.shape(), found.dtype()),
                (expected.shape(), expected.dtype()),
                "{what}"
            );
            match expected.dtype() {
                DType::F32 => assert_close(&what, found.f32s(), expected.f32s(), 1e-5),
                _ => assert_eq!(found.raw(), expected.raw(), "{what}"),
            }
        }
    }
}

#[test]
fn batch_norm_in_training_normalises_and_blends_the_statistics() {
    let mut case = Case::new("BatchNormalization", 15)
        .int("training_mode", 1)
        .float("momentum", 0.75)
        .float("epsilon", 0.0)
        .input(Tensor::from_f32(&[2, 1, 2], [1., 3., 5., 7.]))
        .input(Tensor::from_f32(&[1], [2.0]))
        .input(Tensor::from_f32(&[1], [10.0]))
        .input(Tensor::from_f32(&[1], [0.0]))
        .input(Tensor::from_f32(&[1], [1.0]));
    case.outputs = 3;
    let outputs = case.run();
    let deviation = 5f32.sqrt();
    let expected = [-3f32, -1., 1., 3.].map(|v| 10.0 + 2.0 * v / deviation);
    assert_close("output", outputs[0].f32s(), &expected, 1e-6);
    assert_close("mean", outputs[1].f32s(), &[1.0], 1e-6);
    assert_close("variance", outputs[2].f32s(), &[0.75 + 0.25 * 5.0], 1e-6);
}

#[test]
fn an_even_lrn_reaches_further_up() {
    // onnxruntime refuses even sizes; ONNX: from c - floor((size - 1) / 2) to c + ceil((size - 1) / 2).
    let case = Case::new("LRN", 13)
        .int("size", 2)
        .float("alpha", 2.0)
        .float("beta", 1.0)
        .input(Tensor::from_f32(&[1, 3], [1., 2., 3.]));
    assert_close(
        "output",
        case.run()[0].f32s(),
        &[1. / 6., 2. / 14., 3. / 10.],
        1e-6,
    );
}

#[test]
fn inference_forms_train_only_when_asked() {
    let dropout = |training_form| {
        let mut case = Case::new("Dropout", 9)
            .float("ratio", 0.5)
            .input(random(&[4, 50], 1));
        case.training_form = training_form;
        case
    };
    assert_eq!(dropout(false).run()[0].f32s(), random(&[4, 50], 1).f32s());
    let dropped = dropout(true).run();
    let zeros = dropped[0].f32s().iter().filter(|v| **v == 0.0).count();
    assert!((60..140).contains(&zeros), "{zeros} of 200");

    let mut norm = Case::new("BatchNormalization", 15).input(random(&[4, 2], 1));
    for seed in 2..6 {
        norm = norm.input(random(&[2], seed));
    }
    assert_eq!(norm.build().unwrap().state_updates(), []);
    norm.training_form = true;
    assert_eq!(norm.build().unwrap().state_updates(), [(1, 3), (2, 4)]);
    assert_eq!(norm.run().len(), 3);
}

#[test]
fn dropout_masks_follow_the_sample_not_the_minibatch() {
    let device = cpu();
    let run = |x: Tensor, first_sample, seed| {
        let case = Case::new("Dropout", 13)
            .input(x.clone())
            .constant(Tensor::from_f32(&[], [0.3]))
            .constant(Tensor::from_bool(&[], [true]));
        let mut cx = context(&*device, true);
        cx.first_sample = first_sample;
        cx.seed = seed;
        let outputs = case.build().unwrap().forward(&cx, vec![Some(x)]).outputs;
        outputs[0].f32s().to_vec()
    };
    let x = Tensor::from_f32(&[6, 100], vec![1.0; 600]);
    let whole = run(x.clone(), 40, 1);
    let half = |first| run(Tensor::from_f32(&[3, 100], vec![1.0; 300]), first, 1);
    assert_eq!(whole, [half(40), half(43)].concat());
    assert_ne!(whole, run(x, 40, 2));
    let kept = whole.iter().filter(|v| **v != 0.0);
    assert!(kept.clone().all(|v| (v - 1.0 / 0.7).abs() < 1e-6));
    assert!((360..480).contains(&kept.count()));
}

#[test]
fn random_numbers_follow_the_sample_not_the_minibatch() {
    let device = cpu();
    for name in ["RandomUniformLike", "RandomNormalLike", "Bernoulli"] {
        let run = |rows: usize, first_sample, seed| {
            let x = Tensor::from_f32(&[rows, 200], vec![0.25; rows * 200]);
            let op = Case::new(name, 15).input(x.clone()).build().unwrap();
            assert!(op.is_random());
            let mut cx = context(&*device, false);
            (cx.first_sample, cx.seed) = (first_sample, seed);
            op.forward(&cx, vec![Some(x)]).outputs[0].f32s().to_vec()
        };
        let whole = run(6, 40, 1);
        assert_eq!(whole, [run(3, 40, 1), run(3, 43, 1)].concat(), "{name}");
        assert_ne!(whole, run(6, 40, 2), "{name}");
        let mean = whole.iter().sum::<f32>() / whole.len() as f32;
        let expected = match name {
            "RandomUniformLike" => 0.5,
            "RandomNormalLike" => 0.0,
            _ => 0.25,
        };
        assert!((mean - expected).abs() < 0.1, "mean of {name}: {mean}");
    }
}

#[test]
fn a_label_outside_of_the_classes_is_no_number() {
    let case = Case::new("NegativeLogLikelihoodLoss", 13)
        .input(random(&[2, 3], 1))
        .input(Tensor::from_i64(&[2], [1, 3]));
    assert!(case.run()[0].f32s()[0].is_nan());
}

#[test]
fn operators_write_into_arguments_that_nobody_else_holds() {
    let device = cpu();
    let cx = context(&*device, true);
    let relu = Case::new("Relu", 13)
        .input(random(&[8, 8], 1))
        .build()
        .unwrap();
    let x = device.upload(&random(&[8, 8], 1));
    let id = x.buffer_id();
    let shared = x.clone();
    let fresh = relu.forward(&cx, vec![Some(x)]).outputs.remove(0);
    assert_ne!(fresh.buffer_id(), id);
    assert_eq!(shared.f32s(), random(&[8, 8], 1).f32s());
    let same = relu.forward(&cx, vec![Some(shared)]).outputs.remove(0);
    assert_eq!(same.buffer_id(), id);
    assert_eq!(same.f32s(), fresh.f32s());
}

#[test]
fn a_device_is_shared_between_threads() {
    let device = cpu();
    let other = Arc::clone(&device);
    let sum = std::thread::spawn(move || other.fill(&[4], 2.0).f32s().iter().sum::<f32>());
    assert_eq!(sum.join().unwrap(), 8.0);
    assert_eq!(device.memory().live_bytes, 0);
}
