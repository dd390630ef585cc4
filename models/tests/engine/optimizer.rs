//! Optimizers against PyTorch's (`golden/optimizer.json`).

use models::optimizer::{Optimizer, OptimizerState};
use models::tensor::Tensor;
use serde_json::Value;

use crate::support::{assert_close, cpu};

fn start() -> Vec<Tensor> {
    vec![
        Tensor::from_f32(&[5], [0.5, -1.0, 2.0, 0.0, -0.25]),
        Tensor::from_f32(&[2], [1.5, -0.75]),
    ]
}

/// As `gradient` in the script.
fn gradient(step: usize, weight: &Tensor) -> Tensor {
    let values = weight.f32s().iter().enumerate();
    let values = values.map(|(i, w)| 0.5 * w + 0.1 * (i as f32 - 1.0) - 0.05 * step as f32);
    Tensor::from_f32(weight.shape(), values.collect::<Vec<_>>())
}

fn optimizer(golden: &Value) -> Optimizer {
    let number = |name: &str| golden[name].as_f64().unwrap() as f32;
    match golden["optimizer"].as_str().unwrap() {
        "sgd" => Optimizer::Sgd {
            momentum: number("momentum"),
            weight_decay: number("weight_decay"),
            nesterov: golden["nesterov"].as_bool().unwrap(),
        },
        name => Optimizer::Adam {
            beta1: number("beta1"),
            beta2: number("beta2"),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            decoupled: name == "adamw",
        },
    }
}

#[test]
fn steps_equal_pytorch() {
    let cases: Vec<Value> = serde_json::from_str(include_str!("../golden/optimizer.json")).unwrap();
    let device = cpu();
    assert_eq!(cases.len(), 8);
    for golden in &cases {
        let optimizer = optimizer(golden);
        let mut state = OptimizerState::default();
        let mut weights: Vec<Tensor> = start().iter().map(|w| device.upload(w)).collect();
        for (step, expected) in golden["weights"].as_array().unwrap().iter().enumerate() {
            let grads: Vec<Tensor> = weights.iter().map(|w| gradient(step, w)).collect();
            let lr = golden["lr"].as_f64().unwrap() as f32 / (1 + step) as f32;
            weights = optimizer.step(&*device, &mut state, weights, &grads, lr);
            for (weight, expected) in weights.iter().zip(expected.as_array().unwrap()) {
                let expected: Vec<f32> = expected
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|v| v.as_f64().unwrap() as f32)
                    .collect();
                let what = format!("{optimizer:?} step {step}");
                assert_close(&what, weight.f32s(), &expected, 2e-6);
            }
        }
        assert_eq!(state.bytes(), optimizer.state_tensors() * 28);
    }
}

#[test]
fn old_versions_stay_while_somebody_holds_them() {
    let device = cpu();
    let optimizer = Optimizer::Sgd {
        momentum: 0.9,
        weight_decay: 0.0,
        nesterov: false,
    };
    let mut state = OptimizerState::default();
    let old: Vec<Tensor> = start().iter().map(|w| device.upload(w)).collect();
    let grads: Vec<Tensor> = old.iter().map(|w| gradient(0, w)).collect();
    let new = optimizer.step(&*device, &mut state, old.clone(), &grads, 0.1);
    assert_eq!(old[0].f32s(), start()[0].f32s());
    assert!(!new[0].same_buffer(&old[0]));
    // A checkpoint shares the state; it must not change under it.
    let checkpoint = state.clone();
    let before = checkpoint.velocities[0].as_ref().unwrap().f32s().to_vec();
    let id = new[0].buffer_id();
    let newest = optimizer.step(&*device, &mut state, new, &grads, 0.1);
    assert_eq!(
        newest[0].buffer_id(),
        id,
        "a version that nobody else holds is overwritten"
    );
    assert_eq!(checkpoint.velocities[0].as_ref().unwrap().f32s(), before);
    assert_ne!(state.velocities[0].as_ref().unwrap().f32s(), before);
}
