//! Programs: stages, stashes, weight versions, memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use models::device::Device;
use models::init::{self, Fan};
use models::loss::Loss;
use models::ops::ValueType;
use models::optimizer::{Optimizer, OptimizerState};
use models::program::{Node, Program, Source, ValueId};
use models::tensor::{DType, Tensor};

use crate::support::{Case, assert_close, context, cpu, ints, map, random, random_positive};

/// A graph put together by hand.
#[derive(Default)]
struct Net {
    types: Vec<ValueType>,
    nodes: Vec<Node>,
    parameters: Vec<ValueId>,
    states: Vec<ValueId>,
    constants: BTreeMap<ValueId, Tensor>,
    inputs: Vec<ValueId>,
    weights: Vec<Tensor>,
    statistics: Vec<Tensor>,
}

impl Net {
    fn value(&mut self, dtype: DType, shape: &[usize]) -> ValueId {
        let shape = shape.to_vec();
        self.types.push(ValueType { dtype, shape });
        self.types.len() - 1
    }

    fn input(&mut self, shape: &[usize]) -> ValueId {
        let value = self.value(DType::F32, shape);
        self.inputs.push(value);
        value
    }

    fn weight(&mut self, tensor: Tensor) -> ValueId {
        let value = self.value(DType::F32, tensor.shape());
        self.parameters.push(value);
        self.weights.push(tensor);
        value
    }

    fn state(&mut self, tensor: Tensor) -> ValueId {
        let value = self.value(DType::F32, tensor.shape());
        self.states.push(value);
        self.statistics.push(tensor);
        value
    }

    fn constant(&mut self, tensor: Tensor) -> ValueId {
        let value = self.value(tensor.dtype(), tensor.shape());
        self.constants.insert(value, tensor);
        value
    }

    fn node(&mut self, mut case: Case, inputs: &[ValueId]) -> ValueId {
        for input in inputs {
            let known = self.constants.get(input);
            let ValueType { dtype, shape } = &self.types[*input];
            let tensor = known
                .cloned()
                .unwrap_or_else(|| Tensor::zeros(*dtype, shape));
            case = match known {
                Some(_) => case.constant(tensor),
                None => case.input(tensor),
            };
        }
        let op = case.build().unwrap();
        let ValueType { dtype, shape } = op.outputs()[0].clone();
        let output = self.value(dtype, &shape);
        self.nodes.push(Node {
            name: format!("node{}", self.nodes.len()),
            op: Arc::from(op),
            inputs: inputs.iter().copied().map(Some).collect(),
            outputs: vec![Some(output)],
        });
        output
    }

    fn program(&self, nodes: std::ops::Range<usize>, target: ValueId) -> Program {
        let source = Source {
            nodes: &self.nodes,
            parameters: &self.parameters,
            states: &self.states,
            constants: &self.constants,
            inputs: &self.inputs,
        };
        Program::new(&source, &nodes.collect::<Vec<_>>(), &[target])
    }

    fn pick(&self, program: &Program) -> (Vec<Tensor>, Vec<Tensor>) {
        let weights = program.weights().iter().map(|&w| self.weights[w].clone());
        let states = program.states().iter().map(|&s| self.statistics[s].clone());
        (weights.collect(), states.collect())
    }
}

/// Convolution, batch norm, two branches that meet again, a classifier and its softmax.
/// Returns the net and the value of the logits.
fn small_net() -> (Net, ValueId) {
    let mut net = Net::default();
    let x = net.input(&[4, 2, 6, 6]);
    let filter = net.weight(random(&[3, 2, 3, 3], 1));
    let conv = net.node(
        Case::new("Conv", 17).ints("pads", &[1, 1, 1, 1]),
        &[x, filter],
    );
    let norm = [
        net.weight(random_positive(&[3], 2)),
        net.weight(random(&[3], 3)),
        net.state(random(&[3], 4)),
        net.state(random_positive(&[3], 5)),
    ];
    let mut case = Case::new("BatchNormalization", 15).int("training_mode", 1);
    case.outputs = 3;
    let norm = net.node(case, &[conv, norm[0], norm[1], norm[2], norm[3]]);
    let relu = net.node(Case::new("Relu", 14), &[norm]);
    let half = net.constant(Tensor::from_f32(&[], [0.5]));
    let scaled = net.node(Case::new("Mul", 14), &[relu, half]);
    let tanh = net.node(Case::new("Tanh", 13), &[relu]);
    let sum = net.node(Case::new("Add", 14), &[scaled, tanh]);
    let ratio = net.constant(Tensor::from_f32(&[], [0.25]));
    let mode = net.constant(Tensor::from_bool(&[], [true]));
    let dropped = net.node(Case::new("Dropout", 13), &[sum, ratio, mode]);
    let pool = Case::new("MaxPool", 12)
        .ints("kernel_shape", &[2, 2])
        .ints("strides", &[2, 2]);
    let pooled = net.node(pool, &[dropped]);
    let flat = net.node(Case::new("Flatten", 13), &[pooled]);
    let (dense, bias) = (net.weight(random(&[5, 27], 6)), net.weight(random(&[5], 7)));
    let logits = net.node(Case::new("Gemm", 13).int("transB", 1), &[flat, dense, bias]);
    net.node(Case::new("Softmax", 13), &[logits]);
    (net, logits)
}

const NODES: usize = 11;

fn labels() -> Tensor {
    Tensor::from_i64(&[4], [0, 4, 2, 2])
}

/// One training step without optimizer, the net cut into stages: loss and gradients by parameter.
fn step(
    net: &Net,
    target: ValueId,
    cuts: &[usize],
    device: &dyn Device,
) -> (f32, BTreeMap<usize, Vec<f32>>) {
    let cx = context(device, true);
    let bounds = [&[0], cuts, &[NODES]].concat();
    let stages: Vec<Program> = bounds
        .windows(2)
        .map(|b| net.program(b[0]..b[1], target))
        .collect();
    let mut values = BTreeMap::from([(net.inputs[0], device.upload(&random(&[4, 2, 6, 6], 8)))]);
    let mut kept = Vec::new();
    for stage in &stages {
        let (weights, mut states) = net.pick(stage);
        let inputs = stage.inputs().iter().map(|v| values[v].clone()).collect();
        let (outputs, stash) = stage.forward(&cx, inputs, &weights, &mut states);
        values.extend(stage.outputs().iter().copied().zip(outputs));
        kept.push((stash, weights));
    }
    let loss = Loss::CROSS_ENTROPY.forward_backward(device, &values[&target], &labels());
    let mut flowing = BTreeMap::from([(target, loss.gradient)]);
    let mut grads = BTreeMap::new();
    for (stage, (stash, weights)) in stages.iter().zip(kept).rev() {
        let outputs = stage
            .outputs()
            .iter()
            .map(|v| flowing.get(v).cloned())
            .collect();
        let back = stage.backward(&cx, stash, &weights, outputs);
        for ((&value, grad), &promised) in stage
            .inputs()
            .iter()
            .zip(back.inputs)
            .zip(stage.input_gradients())
        {
            assert_eq!(grad.is_some(), promised);
            assert_eq!(
                promised,
                value != net.inputs[0],
                "nobody wants the gradient of the data"
            );
            flowing.extend(grad.map(|grad| (value, grad)));
        }
        for (&parameter, grad) in stage.weights().iter().zip(back.weights) {
            grads.insert(parameter, grad.f32s().to_vec());
        }
    }
    (loss.loss, grads)
}

#[test]
fn every_cut_gives_the_same_step() {
    let (net, logits) = small_net();
    let device = cpu();
    let whole = step(&net, logits, &[], &*device);
    assert_eq!(whole.1.len(), 5);
    for cut in 1..NODES {
        assert_eq!(
            step(&net, logits, &[cut], &*device),
            whole,
            "cut before node {cut}"
        );
    }
    assert_eq!(step(&net, logits, &[2, 7], &*device), whole);
}

#[test]
fn gradients_are_those_of_the_loss() {
    let (mut net, logits) = small_net();
    let device = cpu();
    let (_, grads) = step(&net, logits, &[5], &*device);
    for (parameter, grad) in grads {
        let original = net.weights[parameter].clone();
        for i in (0..grad.len()).step_by(grad.len().div_ceil(6)) {
            let mut moved = |by: f32| {
                let mut values = original.f32s().to_vec();
                values[i] += by;
                net.weights[parameter] = Tensor::from_f32(original.shape(), values);
                f64::from(step(&net, logits, &[], &*device).0)
            };
            // Small, since the net has bends; the loss is summed in f64 but made of f32 values.
            let numeric = (moved(2e-3) - moved(-2e-3)) / 4e-3;
            let difference = (numeric - f64::from(grad[i])).abs();
            assert!(
                difference < 5e-3,
                "parameter {parameter} at {i}: {} by differences {numeric}",
                grad[i]
            );
        }
        net.weights[parameter] = original;
    }
}

#[test]
fn a_target_before_the_softmax_leaves_the_softmax_out() {
    let (net, logits) = small_net();
    assert_eq!(net.program(0..NODES, logits).outputs(), [logits]);
    assert_eq!(
        net.program(NODES - 1..NODES, logits).inputs(),
        [] as [usize; 0]
    );
    let device = cpu();
    let softmax = net.program(0..NODES, logits + 1);
    let (weights, states) = net.pick(&softmax);
    let x = random(&[4, 2, 6, 6], 8);
    let y = softmax.evaluate(&context(&*device, false), vec![x], &weights, &states);
    let row: f32 = y[0].f32s()[..5].iter().sum();
    assert!((row - 1.0).abs() < 1e-6);
}

#[test]
fn running_statistics_change_in_training_only() {
    let (net, logits) = small_net();
    let device = cpu();
    let program = net.program(0..NODES, logits);
    let (weights, mut states) = net.pick(&program);
    let before: Vec<Vec<f32>> = states.iter().map(|s| s.f32s().to_vec()).collect();
    let x = random(&[4, 2, 6, 6], 8);
    program.evaluate(
        &context(&*device, false),
        vec![x.clone()],
        &weights,
        &states,
    );
    assert_eq!(states[1].f32s(), before[1]);
    program.forward(&context(&*device, true), vec![x], &weights, &mut states);
    assert_ne!(states[0].f32s(), before[0]);
    assert_ne!(states[1].f32s(), before[1]);
}

#[test]
fn a_stash_counts_what_it_holds_once() {
    let (net, logits) = small_net();
    let device = cpu();
    let program = net.program(0..NODES, logits);
    let (weights, mut states) = net.pick(&program);
    let cx = context(&*device, true);
    let x = device.upload(&random(&[4, 2, 6, 6], 8));
    let (outputs, stash) = program.forward(&cx, vec![x], &weights, &mut states);
    let plane = 4 * 3 * 6 * 6;
    let floats = 4 * 2 * 6 * 6 // input of the convolution
        + plane + 3 + 3 // batch norm: input, mean, deviation
        + plane // output of the relu
        + plane // output of the tanh
        + plane / 4 // where the pool found its maxima (int32)
        + plane / 4; // input of the classifier
    assert_eq!(
        stash.bytes(),
        floats * 4 + plane,
        "and the mask of the dropout, one byte each"
    );
    // What is alive: the stash, the logits, the running statistics.
    let live = device.memory().live_bytes;
    assert_eq!(live, stash.bytes() + outputs[0].bytes() + 2 * 12);
    drop(stash);
    assert_eq!(device.memory().live_bytes, outputs[0].bytes() + 2 * 12);
}

#[test]
fn training_allocates_nothing_once_it_runs() {
    let (net, logits) = small_net();
    let device = cpu();
    let program = net.program(0..NODES, logits);
    let (weights, mut states) = net.pick(&program);
    let mut weights: Vec<Tensor> = weights.iter().map(|w| device.upload(w)).collect();
    let optimizer = Optimizer::Sgd {
        momentum: 0.9,
        weight_decay: 0.0,
        nesterov: false,
    };
    let mut optimizer_state = OptimizerState::default();
    let data = random(&[4, 2, 6, 6], 8);
    let mut losses = Vec::new();
    let mut misses = Vec::new();
    let mut live = Vec::new();
    for minibatch in 0..30 {
        let mut cx = context(&*device, true);
        cx.first_sample = 4 * minibatch;
        let x = device.upload(&data);
        let (outputs, stash) = program.forward(&cx, vec![x], &weights, &mut states);
        let loss = Loss::CROSS_ENTROPY.forward_backward(&*device, &outputs[0], &labels());
        let grads = program.backward(&cx, stash, &weights, vec![Some(loss.gradient)]);
        weights = optimizer.step(
            &*device,
            &mut optimizer_state,
            weights,
            &grads.weights,
            0.02,
        );
        losses.push(loss.loss);
        drop((outputs, grads.weights));
        misses.push(device.memory().misses);
        live.push(device.memory().live_bytes);
    }
    assert_eq!(misses[2], misses[29], "misses by minibatch: {misses:?}");
    assert_eq!(live[2], live[29], "live bytes by minibatch: {live:?}");
    assert!(losses[29] < 0.3 * losses[0], "{losses:?}");
}

#[test]
fn a_backward_uses_the_version_of_its_forward() {
    let (net, logits) = small_net();
    let device = cpu();
    let program = net.program(0..NODES, logits);
    let (old, mut states) = net.pick(&program);
    let cx = context(&*device, true);
    let run = |states: &mut Vec<Tensor>| {
        let x = device.upload(&random(&[4, 2, 6, 6], 8));
        let (outputs, stash) = program.forward(&cx, vec![x], &old, states);
        let loss = Loss::CROSS_ENTROPY.forward_backward(&*device, &outputs[0], &labels());
        (stash, loss.gradient)
    };
    let (stash, gradient) = run(&mut states);
    let right = program
        .backward(&cx, stash, &old, vec![Some(gradient)])
        .weights;
    let newer: Vec<Tensor> = old.iter().map(|w| map(w, |v| v + 0.25)).collect();
    let (stash, gradient) = run(&mut states);
    let wrong = program
        .backward(&cx, stash, &newer, vec![Some(gradient)])
        .weights;
    assert_ne!(
        right[0].f32s(),
        wrong[0].f32s(),
        "without stashing the gradient is another one"
    );
    let (stash, gradient) = run(&mut states);
    let again = program
        .backward(&cx, stash, &old, vec![Some(gradient)])
        .weights;
    assert_eq!(right[0].f32s(), again[0].f32s());
}

#[test]
fn gradients_add_up_where_a_weight_is_used_twice() {
    let mut net = Net::default();
    let x = net.input(&[2, 3]);
    let w = net.weight(random(&[3, 3], 1));
    let unused = net.weight(random(&[3], 2));
    let first = net.node(Case::new("MatMul", 13), &[x, w]);
    let transposed = net.node(Case::new("Transpose", 13), &[w]);
    let second = net.node(Case::new("MatMul", 13), &[first, transposed]);
    let squared = net.node(Case::new("Mul", 14), &[second, second]);
    let zero = net.constant(Tensor::from_f32(&[3], [0.0; 3]));
    let nothing = net.node(Case::new("Mul", 14), &[unused, zero]);
    let sum = net.node(Case::new("Add", 14), &[squared, nothing]);
    let device = cpu();
    let cx = context(&*device, true);
    let program = net.program(0..6, sum);
    let data = random(&[2, 3], 3);
    let value = |w: &Tensor| -> f64 {
        let weights = [w.clone(), net.weights[1].clone()];
        let outputs = program.evaluate(&cx, vec![data.clone()], &weights, &[]);
        outputs[0].f32s().iter().map(|&v| f64::from(v)).sum()
    };
    let (weights, _) = net.pick(&program);
    let (_, stash) = program.forward(&cx, vec![data.clone()], &weights, &mut []);
    let ones = Tensor::from_f32(&[2, 3], [1.0; 6]);
    let grads = program
        .backward(&cx, stash, &weights, vec![Some(ones)])
        .weights;
    let numeric: Vec<f32> = (0..9)
        .map(|i| {
            let moved = |by: f32| {
                let mut values = weights[0].f32s().to_vec();
                values[i] += by;
                value(&Tensor::from_f32(&[3, 3], values))
            };
            ((8.0 * (moved(0.05) - moved(-0.05)) - (moved(0.1) - moved(-0.1))) / 0.6) as f32
        })
        .collect();
    assert_close("tied weight", grads[0].f32s(), &numeric, 1e-4);
    // Handed out one by one, the tied weight's gradient comes when its first reader is through.
    let (_, stash) = program.forward(&cx, vec![data.clone()], &weights, &mut []);
    let ones = Tensor::from_f32(&[2, 3], [1.0; 6]);
    let mut handed_out = Vec::new();
    program.backward_each(
        &cx,
        stash,
        &weights,
        vec![Some(ones)],
        &mut |weight, grad| {
            assert_eq!(grad.f32s(), grads[weight].f32s());
            handed_out.push(weight);
        },
    );
    assert_eq!(handed_out, program.backward_order().collect::<Vec<_>>());
    handed_out.sort_unstable();
    assert_eq!(handed_out, [0, 1]);
    assert_eq!(grads[1].f32s(), [0.0; 3]);
    // Nothing flows back: gradients are zeros, not missing.
    let (_, stash) = program.forward(&cx, vec![data.clone()], &weights, &mut []);
    let grads = program.backward(&cx, stash, &weights, vec![None]).weights;
    assert_eq!(grads[0].f32s(), [0.0; 9]);
}

#[test]
fn integers_flow_without_gradients() {
    let mut net = Net::default();
    let tokens = net.value(DType::I64, &[2, 3]);
    net.inputs.push(tokens);
    let table = net.weight(random(&[7, 4], 1));
    let embedded = net.node(Case::new("Gather", 13), &[table, tokens]);
    let shape = net.constant(ints(&[2, 12]));
    let flat = net.node(Case::new("Reshape", 13), &[embedded, shape]);
    let device = cpu();
    let cx = context(&*device, true);
    let program = net.program(0..2, flat);
    let indices = Tensor::from_i64(&[2, 3], [0, 1, 1, 6, 0, 1]);
    let (weights, _) = net.pick(&program);
    let (outputs, stash) = program.forward(&cx, vec![indices], &weights, &mut []);
    assert_eq!(outputs[0].f32s()[4..8], weights[0].f32s()[4..8]);
    let ones = Tensor::from_f32(&[2, 12], [1.0; 24]);
    let grads = program.backward(&cx, stash, &weights, vec![Some(ones)]);
    let rows: Vec<f32> = grads.weights[0]
        .f32s()
        .chunks(4)
        .map(|row| row[0])
        .collect();
    assert_eq!(rows, [2., 3., 0., 0., 0., 0., 1.]);
    assert!(grads.inputs[0].is_none());
}

#[test]
fn a_fan_is_found_behind_a_transposition() {
    let mut net = Net::default();
    let x = net.input(&[2, 3]);
    let w = net.weight(random(&[5, 3], 1));
    let b = net.weight(random(&[1, 5], 1));
    let turned = net.node(Case::new("Transpose", 13), &[w]);
    let product = net.node(Case::new("MatMul", 13), &[x, turned]);
    net.node(Case::new("Add", 14), &[product, b]);
    let source = Source {
        nodes: &net.nodes,
        parameters: &net.parameters,
        states: &net.states,
        constants: &net.constants,
        inputs: &net.inputs,
    };
    let expected = Fan {
        inputs: 3,
        outputs: 5,
    };
    assert_eq!(init::fan(&source, w), Some(expected));
    assert_eq!(init::fan(&source, b), None);
}
