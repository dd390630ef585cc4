//! Nodes with what other implementations give for them, from JSON.

use models::ops::Attribute;
use models::tensor::Tensor;
use serde_json::Value;

use crate::support::Case;

/// A tensor `{type, shape, values}`.
pub fn tensor(value: &Value) -> Tensor {
    let list = |value: &Value| -> Vec<f64> {
        let numbers = value.as_array().unwrap().iter();
        numbers
            .map(|v| {
                v.as_f64()
                    .unwrap_or_else(|| f64::from(u8::from(v.as_bool().unwrap())))
            })
            .collect()
    };
    let shape: Vec<usize> = list(&value["shape"])
        .into_iter()
        .map(|e| e as usize)
        .collect();
    let values = list(&value["values"]).into_iter();
    match value["type"].as_str().unwrap() {
        "float" => Tensor::from_f32(&shape, values.map(|v| v as f32).collect::<Vec<_>>()),
        "int64" => Tensor::from_i64(&shape, values.map(|v| v as i64).collect::<Vec<_>>()),
        _ => Tensor::from_bool(&shape, values.map(|v| v != 0.0).collect::<Vec<_>>()),
    }
}

fn attribute(value: &Value) -> Attribute {
    match value {
        Value::String(text) => Attribute::String(text.clone()),
        Value::Number(number) => match number.as_i64() {
            Some(int) => Attribute::Int(int),
            None => Attribute::Float(number.as_f64().unwrap() as f32),
        },
        Value::Array(list) if list.iter().all(Value::is_string) && !list.is_empty() => {
            let texts = list.iter().map(|v| v.as_str().unwrap().into());
            Attribute::Strings(texts.collect())
        }
        Value::Array(list) if list.iter().any(Value::is_f64) => {
            let floats = list.iter().map(|v| v.as_f64().unwrap() as f32);
            Attribute::Floats(floats.collect())
        }
        Value::Array(list) => Attribute::Ints(list.iter().map(|v| v.as_i64().unwrap()).collect()),
        tensor_value => Attribute::Tensor(tensor(tensor_value)),
    }
}

/// JSON does not tell 1.0 from 1.
const FLOATS: [&str; 10] = [
    "alpha", "beta", "bias", "clip", "epsilon", "gamma", "lambd", "max", "min", "value",
];

/// The nodes of a file, each with its entry. Outputs are as many as the entry has.
pub fn cases(text: &str) -> Vec<(Case, Value)> {
    let entries: Vec<Value> = serde_json::from_str(text).unwrap();
    entries
        .into_iter()
        .map(|entry| (case(&entry), entry))
        .collect()
}

fn case(golden: &Value) -> Case {
    let mut case = Case::new(
        golden["op"].as_str().unwrap(),
        golden["opset"].as_i64().unwrap(),
    );
    for (name, value) in golden["attributes"].as_object().unwrap() {
        let value = match attribute(value) {
            Attribute::Int(int) if FLOATS.contains(&name.as_str()) => Attribute::Float(int as f32),
            other => other,
        };
        case = case.attribute(name, value);
    }
    let constant = golden["constant"].as_array().unwrap();
    for (position, input) in golden["inputs"].as_array().unwrap().iter().enumerate() {
        case = match input {
            Value::Null => case.omitted(),
            input if constant.contains(&position.into()) => case.constant(tensor(input)),
            input => case.input(tensor(input)),
        };
    }
    case.outputs = golden["outputs"].as_array().unwrap().len();
    case
}
