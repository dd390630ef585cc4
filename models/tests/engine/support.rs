//! Nodes without a file around them.

use std::collections::BTreeMap;
use std::sync::Arc;

use models::device::{self, Device};
use models::ops::{
    self, Attribute, Context, Forward, NodeSpec, OpError, Operator, Saved, ValueType,
};
use models::random::Stream;
use models::tensor::{DType, Tensor};

/// A node, its inputs, and which of them are known when it is built.
#[derive(Clone, Debug)]
pub struct Case {
    pub op_type: String,
    pub opset: i64,
    pub attributes: BTreeMap<String, Attribute>,
    pub inputs: Vec<Option<Tensor>>,
    pub constant: Vec<bool>,
    pub outputs: usize,
    pub training_form: bool,
}

impl Case {
    pub fn new(op_type: &str, opset: i64) -> Self {
        Case {
            op_type: op_type.into(),
            opset,
            attributes: BTreeMap::new(),
            inputs: Vec::new(),
            constant: Vec::new(),
            outputs: 1,
            training_form: false,
        }
    }

    pub fn attribute(mut self, name: &str, value: Attribute) -> Self {
        self.attributes.insert(name.into(), value);
        self
    }

    pub fn int(self, name: &str, value: i64) -> Self {
        self.attribute(name, Attribute::Int(value))
    }

    pub fn ints(self, name: &str, values: &[i64]) -> Self {
        self.attribute(name, Attribute::Ints(values.to_vec()))
    }

    pub fn float(self, name: &str, value: f32) -> Self {
        self.attribute(name, Attribute::Float(value))
    }

    pub fn string(self, name: &str, value: &str) -> Self {
        self.attribute(name, Attribute::String(value.into()))
    }

    /// Adds an input that data flows through.
    pub fn input(mut self, tensor: Tensor) -> Self {
        self.inputs.push(Some(tensor));
        self.constant.push(false);
        self
    }

    /// Adds an input that is known when the node is built.
    pub fn constant(mut self, tensor: Tensor) -> Self {
        self.inputs.push(Some(tensor));
        self.constant.push(true);
        self
    }

    pub fn omitted(mut self) -> Self {
        self.inputs.push(None);
        self.constant.push(false);
        self
    }

    pub fn build(&self) -> Result<Box<dyn Operator>, OpError> {
        let types: Vec<Option<ValueType>> = self
            .inputs
            .iter()
            .map(|i| i.as_ref().map(type_of))
            .collect();
        let constants: Vec<Option<Tensor>> = self
            .inputs
            .iter()
            .zip(&self.constant)
            .map(|(input, &constant)| input.clone().filter(|_| constant))
            .collect();
        ops::build(&NodeSpec {
            name: "node",
            op_type: &self.op_type,
            opset: self.opset,
            attributes: &self.attributes,
            inputs: &types,
            constants: &constants,
            outputs: self.outputs,
            training_form: self.training_form,
        })
    }

    /// Builds and runs forward in training.
    pub fn run(&self) -> Vec<Tensor> {
        let device = cpu();
        let op = self.build().unwrap();
        let outputs = op
            .forward(&context(&*device, true), self.inputs.clone())
            .outputs;
        for (output, promised) in outputs.iter().zip(op.outputs()) {
            assert_eq!(&type_of(output), promised, "shape rule of {}", self.op_type);
        }
        outputs
    }
}

pub fn type_of(tensor: &Tensor) -> ValueType {
    ValueType {
        dtype: tensor.dtype(),
        shape: tensor.shape().to_vec(),
    }
}

pub fn cpu() -> Arc<dyn Device> {
    device::open("cpu", 1).unwrap()
}

pub fn context(device: &dyn Device, training: bool) -> Context<'_> {
    Context {
        device,
        training,
        seed: 11,
        first_sample: 5,
    }
}

/// What an operator's backward gets to see, kept as a program keeps it.
pub fn saved(op: &dyn Operator, inputs: &[Option<Tensor>], forward: Forward) -> Saved {
    let saves = op.saves();
    let keep = |positions: &[usize], position: usize, tensor: &Tensor| {
        positions.contains(&position).then(|| tensor.clone())
    };
    let positional = |positions: &[usize], tensors: &mut dyn Iterator<Item = Option<&Tensor>>| {
        tensors
            .enumerate()
            .map(|(i, tensor)| tensor.and_then(|tensor| keep(positions, i, tensor)))
            .collect()
    };
    Saved {
        inputs: positional(&saves.inputs, &mut inputs.iter().map(Option::as_ref)),
        outputs: positional(&saves.outputs, &mut forward.outputs.iter().map(Some)),
        extra: forward.extra,
    }
}

/// Values in [-1, 1).
pub fn random(shape: &[usize], seed: u64) -> Tensor {
    let stream = Stream::new(seed);
    let len: usize = shape.iter().product();
    Tensor::from_f32(
        shape,
        (0..len as u64)
            .map(|i| 2.0 * stream.uniform(i) - 1.0)
            .collect::<Vec<_>>(),
    )
}

/// Values in [0.5, 1.5).
pub fn random_positive(shape: &[usize], seed: u64) -> Tensor {
    map(&random(shape, seed), |v| 1.0 + v / 2.0)
}

/// Values that keep at least `gap` from each other and half of it from its multiples, so that no small step
/// changes their order or carries one over a bend.
pub fn random_apart(shape: &[usize], seed: u64, gap: f32) -> Tensor {
    let stream = Stream::new(seed);
    let len: usize = shape.iter().product();
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by_key(|&i| stream.bits(i as u64));
    let values = order
        .iter()
        .map(|&rank| (rank as f32 - (len / 2) as f32 + 0.5) * gap);
    Tensor::from_f32(shape, values.collect::<Vec<_>>())
}

pub fn map(tensor: &Tensor, f: impl Fn(f32) -> f32) -> Tensor {
    let values: Vec<f32> = tensor.f32s().iter().map(|&v| f(v)).collect();
    Tensor::from_f32(tensor.shape(), values)
}

pub fn ints(values: &[i64]) -> Tensor {
    Tensor::from_i64(&[values.len()], values)
}

pub fn close(found: &[f32], expected: &[f32], tolerance: f32) -> bool {
    found.len() == expected.len()
        && found.iter().zip(expected).all(|(f, e)| {
            (f - e).abs() <= tolerance * e.abs().max(1.0) || (f.is_nan() && e.is_nan())
        })
}

#[track_caller]
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert!(
        close(found, expected, tolerance),
        "{what}: found {found:?}\nexpected {expected:?}"
    );
}

/// Compares the backward of a node in training with finite differences.
///
/// The function is a random weighting of the node's float outputs, summed in f64; the derivative is the
/// five-point difference quotient with steps of 0.03, whose own error is of the order of 1e-6. What is left is
/// f32 rounding of the forward over that step. Tolerance: 2e-3 of the largest gradient, at least 2e-3. Inputs
/// must keep 0.06 away from bends.
#[track_caller]
pub fn check_gradients(case: &Case) {
    const STEP: f32 = 0.03;
    const TOLERANCE: f64 = 2e-3;
    const COORDINATES: usize = 40;
    let device = cpu();
    let cx = context(&*device, true);
    let op = case.build().unwrap();
    let forward = op.forward(&cx, case.inputs.clone());
    assert_eq!(
        type_of(&forward.outputs[0]),
        op.outputs()[0],
        "shape rule of {case:?}"
    );
    // Running statistics are outputs that nothing flows back through.
    let state = |output: usize| op.state_updates().iter().any(|&(from, _)| from == output);
    let weightings: Vec<Option<Tensor>> = (0..)
        .zip(&forward.outputs)
        .map(|(number, output)| {
            let flows = output.dtype() == DType::F32 && number < case.outputs && !state(number);
            flows.then(|| random(output.shape(), 99 + number as u64))
        })
        .collect();
    let wanted: Vec<bool> = case
        .inputs
        .iter()
        .zip(&case.constant)
        .enumerate()
        .map(|(i, (input, constant))| {
            let state = op.state_updates().iter().any(|&(_, input)| input == i);
            let float = input.as_ref().is_some_and(|i| i.dtype() == DType::F32);
            float && !constant && !state
        })
        .collect();
    let grads = weightings.clone();
    let saved = saved(&*op, &case.inputs, forward);
    let gradients = op.backward(&cx, saved, grads, &wanted);
    let value = |position: usize, coordinate: usize, step: f32| -> f64 {
        let mut inputs = case.inputs.clone();
        let mut moved = inputs[position].as_ref().unwrap().f32s().to_vec();
        moved[coordinate] += step;
        let shape = inputs[position].as_ref().unwrap().shape().to_vec();
        inputs[position] = Some(Tensor::from_f32(&shape, moved));
        let outputs = op.forward(&cx, inputs).outputs;
        let weighted = outputs
            .iter()
            .zip(&weightings)
            .filter_map(|(y, w)| Some((y, w.as_ref()?)));
        let terms = weighted.flat_map(|(y, w)| y.f32s().iter().zip(w.f32s()));
        terms.map(|(&y, &w)| f64::from(y) * f64::from(w)).sum()
    };
    for (position, _) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted) {
        let input = case.inputs[position].as_ref().unwrap();
        let gradient = gradients[position]
            .as_ref()
            .expect("a gradient that is wanted");
        assert_eq!(
            gradient.shape(),
            input.shape(),
            "gradient of input {position} of {case:?}"
        );
        let largest = gradient
            .f32s()
            .iter()
            .fold(1f64, |m, &g| m.max(f64::from(g.abs())));
        let stride = input.len().div_ceil(COORDINATES).max(1);
        for coordinate in (0..input.len()).step_by(stride) {
            let near = value(position, coordinate, STEP) - value(position, coordinate, -STEP);
            let far =
                value(position, coordinate, 2.0 * STEP) - value(position, coordinate, -2.0 * STEP);
            let numeric = (8.0 * near - far) / (12.0 * f64::from(STEP));
            let analytic = f64::from(gradient.f32s()[coordinate]);
            assert!(
                (numeric - analytic).abs() <= TOLERANCE * largest,
                "gradient of input {position} at {coordinate}: {analytic}, by differences {numeric}, of {case:?}"
            );
        }
    }
}
