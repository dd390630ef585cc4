//! Runs single nodes for `make node-tests`.
//!
//! Each line on stdin is a node as a JSON object: `op`, `opset`, `attributes` (name to `[type, value]`), `inputs` (null or
//! `[type, shape, numbers]`; floats by their bits), `outputs` (how many it names), `training`. The answer is a line with the outputs,
//! or with `refused` or `failed` and why.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

use models::device::{self, Device};
use models::ops::{self, Attribute, Context, NodeSpec, ValueType};
use models::tensor::{DType, Tensor};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = device::open("cpu", 1)?;
    // What fails is answered; nothing is to be written between the answers.
    panic::set_hook(Box::new(|_| {}));
    for line in std::io::stdin().lock().lines() {
        let node: Value = serde_json::from_str(&line?)?;
        let answer = panic::catch_unwind(AssertUnwindSafe(|| answer(&node, &device)))
            .unwrap_or_else(|cause| {
                let text = cause.downcast_ref::<String>().cloned();
                let text = text.or_else(|| cause.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                json!({ "failed": text })
            });
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Inputs that an operator has to know are made constants where it asks for them: first those that are no floats, then all.
fn answer(node: &Value, device: &Arc<dyn Device>) -> Value {
    let inputs: Vec<Option<Tensor>> = list(&node["inputs"]).iter().map(tensor).collect();
    let mut refusal = String::new();
    for constants in [
        vec![None; inputs.len()],
        inputs
            .iter()
            .map(|input| input.clone().filter(|t| t.dtype() != DType::F32))
            .collect(),
        inputs.clone(),
    ] {
        match run(node, &inputs, &constants, device) {
            Ok(outputs) => return json!({ "outputs": outputs }),
            Err(error) if refusal.is_empty() || !error.contains("must be known") => refusal = error,
            Err(_) => {}
        }
    }
    json!({ "refused": refusal })
}

fn run(
    node: &Value,
    inputs: &[Option<Tensor>],
    constants: &[Option<Tensor>],
    device: &Arc<dyn Device>,
) -> Result<Vec<Value>, String> {
    let attributes = node["attributes"].as_object().into_iter().flatten();
    let attributes: BTreeMap<String, Attribute> = attributes
        .map(|(name, value)| (name.clone(), attribute(value)))
        .collect();
    let types: Vec<Option<ValueType>> = inputs
        .iter()
        .map(|input| {
            input.as_ref().map(|tensor| ValueType {
                dtype: tensor.dtype(),
                shape: tensor.shape().to_vec(),
            })
        })
        .collect();
    let operator = ops::build(&NodeSpec {
        name: "node",
        op_type: node["op"].as_str().unwrap_or_default(),
        opset: node["opset"].as_i64().unwrap_or_default(),
        attributes: &attributes,
        inputs: &types,
        constants,
        outputs: node["outputs"].as_u64().unwrap_or(1) as usize,
        training_form: false,
    })
    .map_err(|error| error.to_string())?;
    let context = Context {
        device: &**device,
        training: node["training"].as_bool().unwrap_or(false),
        seed: 0,
        first_sample: 0,
    };
    let outputs = operator.forward(&context, inputs.to_vec()).outputs;
    for (output, promised) in outputs.iter().zip(operator.outputs()) {
        assert_eq!(
            (output.dtype(), output.shape()),
            (promised.dtype, &promised.shape[..]),
            "the shape rule"
        );
    }
    Ok(outputs.iter().map(shown).collect())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn integers(value: &Value) -> Vec<i64> {
    list(value).iter().filter_map(Value::as_i64).collect()
}

fn floats(value: &Value) -> Vec<f32> {
    let bits = integers(value).into_iter();
    bits.map(|bits| f32::from_bits(bits as u32)).collect()
}

fn tensor(value: &Value) -> Option<Tensor> {
    let dtype = value[0].as_str()?;
    let shape: Vec<usize> = integers(&value[1]).iter().map(|&n| n as usize).collect();
    Some(match dtype {
        "float" => Tensor::from_f32(&shape, floats(&value[2])),
        "bool" => {
            let values: Vec<bool> = integers(&value[2]).iter().map(|&b| b != 0).collect();
            Tensor::from_bool(&shape, values)
        }
        _ => Tensor::from_i64(&shape, integers(&value[2])),
    })
}

fn attribute(value: &Value) -> Attribute {
    let content = &value[1];
    match value[0].as_str().unwrap_or_default() {
        "int" => Attribute::Int(content.as_i64().unwrap_or_default()),
        "ints" => Attribute::Ints(integers(content)),
        "float" => Attribute::Float(floats(content)[0]),
        "floats" => Attribute::Floats(floats(content)),
        "string" => Attribute::String(content.as_str().unwrap_or_default().to_owned()),
        "strings" => {
            let strings = list(content).iter().filter_map(Value::as_str);
            Attribute::Strings(strings.map(str::to_owned).collect())
        }
        "tensor" => tensor(content).map_or(Attribute::Other("TENSOR"), Attribute::Tensor),
        _ => Attribute::Other("another type"),
    }
}

fn shown(tensor: &Tensor) -> Value {
    match tensor.dtype() {
        DType::F32 => {
            let bits: Vec<u32> = tensor.f32s().iter().map(|value| value.to_bits()).collect();
            json!(["float", tensor.shape(), bits])
        }
        DType::Bool => json!(["bool", tensor.shape(), tensor.bools()]),
        _ => json!(["int", tensor.shape(), tensor.i64s()]),
    }
}
