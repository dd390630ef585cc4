//! Forward and backward against PyTorch (`golden/pytorch.json`).

use crate::golden;
use crate::support::{assert_close, context, cpu, saved};

#[test]
fn operators_and_their_gradients_are_pytorchs() {
    let device = cpu();
    let cx = context(&*device, true);
    let cases = golden::cases(include_str!("../golden/pytorch.json"));
    assert!(cases.len() > 20);
    for (number, (case, golden)) in cases.iter().enumerate() {
        let what = |of: String| {
            format!(
                "{of} of case {number}, {} {:?}",
                case.op_type, case.attributes
            )
        };
        let list = |name: &str| golden[name].as_array().unwrap().iter();
        let op = case.build().unwrap();
        let forward = op.forward(&cx, case.inputs.clone());
        for (output, expected) in list("outputs").enumerate() {
            let (found, expected) = (&forward.outputs[output], golden::tensor(expected));
            assert_eq!(found.shape(), expected.shape());
            assert_close(
                &what(format!("output {output}")),
                found.f32s(),
                expected.f32s(),
                1e-5,
            );
        }
        let mut grads: Vec<_> = list("flows_back")
            .map(|grad| Some(golden::tensor(grad)))
            .collect();
        grads.resize(forward.outputs.len(), None);
        let expected: Vec<_> = list("gradients").collect();
        let wanted: Vec<bool> = expected.iter().map(|grad| !grad.is_null()).collect();
        let saved = saved(&*op, &case.inputs, forward);
        let found = op.backward(&cx, saved, grads, &wanted);
        for (input, expected) in expected.iter().enumerate().filter(|(_, e)| !e.is_null()) {
            let expected = golden::tensor(expected);
            let found = found[input].as_ref().expect("a gradient that is wanted");
            assert_eq!(found.shape(), expected.shape());
            let what = what(format!("gradient of input {input}"));
            assert_close(&what, found.f32s(), expected.f32s(), 2e-5);
        }
    }
}
