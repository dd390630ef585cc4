//! Our side of `make bench`: times training steps on request.
//!
//! `bench/pytorch.py` starts this program and writes lines `CASE COUNT` to it, a case being a name or an .onnx file;
//! each is answered with one line of COUNT step times in milliseconds. Driver and program take turns, so that whatever disturbs the
//! machine disturbs both. A step is a forward and a backward to all inputs and weights; for a whole
//! model the loss and the optimizer step too.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::time::Instant;

use models::device::{self, Device};
use models::graph::{BuildOptions, Graph};
use models::loss::Loss;
use models::onnx::Model;
use models::ops::{self, Attribute, Context, NodeSpec, Operator, Saved, ValueType};
use models::optimizer::{Optimizer, OptimizerState};
use models::tensor::{DType, Tensor};

type Step = Box<dyn FnMut()>;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = device::open("cpu", 1)?;
    let mut ready: Option<(String, Step)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (name, count) = line.rsplit_once(' ').ok_or("expected: CASE COUNT")?;
        let count: usize = count.parse()?;
        // One case at a time: weights of several would not fit the caches of a smaller machine.
        if ready.as_ref().is_none_or(|(current, _)| current != name) {
            drop(ready.take());
            ready = Some((name.to_owned(), case(name, &device)?));
        }
        let (_, step) = ready.as_mut().ok_or("no case")?;
        let times: Vec<String> = (0..count)
            .map(|_| {
                let start = Instant::now();
                step();
                format!("{:.6}", start.elapsed().as_secs_f64() * 1e3)
            })
            .collect();
        println!("{}", times.join(" "));
        std::io::stdout().flush()?;
    }
    Ok(())
}

fn case(name: &str, device: &Arc<dyn Device>) -> Result<Step, Box<dyn std::error::Error>> {
    let pads = |pads: &[i64]| ("pads", Attribute::Ints(pads.to_vec()));
    let pair = |name, a, b| (name, Attribute::Ints(vec![a, b]));
    Ok(match name {
        "lenet5" => model(
            device,
            concat!(env!("CARGO_MANIFEST_DIR"), "/zoo/lenet5.onnx"),
            Some(32),
        )?,
        file if file.ends_with(".onnx") => model(device, file, None)?,
        "conv-64-128-56" => operator(
            device,
            "Conv",
            vec![pads(&[1; 4])],
            &[&[8, 64, 56, 56], &[128, 64, 3, 3], &[128]],
            3,
        )?,
        "conv-256-256-14" => operator(
            device,
            "Conv",
            vec![pads(&[1; 4])],
            &[&[16, 256, 14, 14], &[256, 256, 3, 3], &[256]],
            3,
        )?,
        "linear-4096-4096" => operator(
            device,
            "Gemm",
            vec![("transB", Attribute::Int(1))],
            &[&[32, 4096], &[4096, 4096], &[4096]],
            3,
        )?,
        "linear-25088-4096" => operator(
            device,
            "Gemm",
            vec![("transB", Attribute::Int(1))],
            &[&[32, 25088], &[4096, 25088], &[4096]],
            3,
        )?,
        "matmul-4096-4096" => operator(device, "MatMul", vec![], &[&[32, 4096], &[4096, 4096]], 2)?,
        "batchnorm-64-56" => operator(
            device,
            "BatchNormalization",
            vec![("training_mode", Attribute::Int(1))],
            &[&[16, 64, 56, 56], &[64], &[64], &[64], &[64]],
            3,
        )?,
        "maxpool-64-112" => operator(
            device,
            "MaxPool",
            vec![pair("kernel_shape", 2, 2), pair("strides", 2, 2)],
            &[&[8, 64, 112, 112]],
            1,
        )?,
        "depthwise-128-28" => operator(
            device,
            "Conv",
            vec![pads(&[1; 4]), ("group", Attribute::Int(128))],
            &[&[16, 128, 28, 28], &[128, 1, 3, 3], &[128]],
            3,
        )?,
        "attention-256-64" => operator(device, "Attention", vec![], &[&[4, 8, 256, 64][..]; 3], 3)?,
        "layernorm-768" => operator(
            device,
            "LayerNormalization",
            vec![],
            &[&[8, 256, 768], &[768], &[768]],
            3,
        )?,
        "gelu-3072" => operator(device, "Gelu", vec![], &[&[8, 256, 3072]], 1)?,
        "softmax-256" => operator(device, "Softmax", vec![], &[&[4, 8, 256, 256]], 1)?,
        "embedding-768" => embedding(device)?,
        _ => return Err(format!("no case {name}").into()),
    })
}

/// A step of one operator: gradients flow to the first `wanted` inputs.
fn operator(
    device: &Arc<dyn Device>,
    op_type: &str,
    attributes: Vec<(&str, Attribute)>,
    shapes: &[&[usize]],
    wanted: usize,
) -> Result<Step, ops::OpError> {
    let inputs = shapes.iter().map(|shape| random(device, shape)).collect();
    operator_of(device, op_type, attributes, inputs, wanted)
}

/// The lookup of 2048 of 30522 rows.
fn embedding(device: &Arc<dyn Device>) -> Result<Step, ops::OpError> {
    let indices = Tensor::from_i64(&[8, 256], (0..2048).map(|i| i * 7).collect::<Vec<_>>());
    let inputs = vec![random(device, &[30522, 768]), indices];
    operator_of(device, "Gather", vec![], inputs, 1)
}

fn operator_of(
    device: &Arc<dyn Device>,
    op_type: &str,
    attributes: Vec<(&str, Attribute)>,
    inputs: Vec<Tensor>,
    wanted: usize,
) -> Result<Step, ops::OpError> {
    let attributes: BTreeMap<String, Attribute> = attributes
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    let types: Vec<_> = inputs
        .iter()
        .map(|input| {
            Some(ValueType {
                dtype: input.dtype(),
                shape: input.shape().to_vec(),
            })
        })
        .collect();
    let operator: Box<dyn Operator> = ops::build(&NodeSpec {
        name: op_type,
        op_type,
        opset: 23,
        attributes: &attributes,
        inputs: &types,
        constants: &vec![None; types.len()],
        outputs: if op_type == "BatchNormalization" {
            3
        } else {
            1
        },
        training_form: true,
    })?;
    let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
    let grad = random(device, &operator.outputs()[0].shape);
    let wanted: Vec<bool> = (0..inputs.len()).map(|i| i < wanted).collect();
    let device = device.clone();
    Ok(Box::new(move || {
        let cx = Context {
            device: &*device,
            training: true,
            seed: 0,
            first_sample: 0,
        };
        let forward = operator.forward(&cx, inputs.clone());
        let saves = operator.saves();
        let keep = |tensors: Vec<Option<Tensor>>, kept: &[usize]| {
            let tensors = tensors.into_iter().enumerate();
            tensors
                .map(|(i, tensor)| tensor.filter(|_| kept.contains(&i)))
                .collect()
        };
        let outputs = forward.outputs.len();
        let saved = Saved {
            inputs: keep(inputs.clone(), &saves.inputs),
            outputs: keep(
                forward.outputs.into_iter().map(Some).collect(),
                &saves.outputs,
            ),
            extra: forward.extra,
        };
        let mut grads = vec![None; outputs];
        grads[0] = Some(grad.clone());
        operator.backward(&cx, saved, grads, &wanted);
    }))
}

/// A training step of a whole model.
fn model(
    device: &Arc<dyn Device>,
    path: &str,
    batch: Option<usize>,
) -> Result<Step, Box<dyn std::error::Error>> {
    let options = BuildOptions {
        batch,
        untie: true,
        ..BuildOptions::default()
    };
    let graph = Graph::build(&Model::open(path)?, &options)?;
    let layers: Vec<usize> = (0..graph.layers().len()).collect();
    let output = graph.training_output(Loss::CROSS_ENTROPY).value;
    let program = graph.program(&layers, &[output]);
    let parameters = program
        .weights()
        .iter()
        .map(|&w| &graph.parameters()[w].tensor);
    let mut weights: Vec<Tensor> = parameters.map(|tensor| device.upload(tensor)).collect();
    let states = program.states().iter();
    let mut states: Vec<Tensor> = states
        .map(|&s| device.upload(&graph.states()[s].tensor))
        .collect();
    let optimizer = Optimizer::Sgd {
        momentum: 0.9,
        weight_decay: 0.0,
        nesterov: false,
    };
    let mut state = OptimizerState::default();
    let input = |&value: &usize| {
        let ty = &graph.values()[value].ty;
        let count: i64 = ty.shape.iter().product::<usize>() as i64;
        match ty.dtype {
            DType::F32 => random(device, &ty.shape),
            _ => Tensor::from_i64(&ty.shape, (0..count).map(|i| i % 17).collect::<Vec<_>>()),
        }
    };
    let inputs: Vec<Tensor> = program.inputs().iter().map(input).collect();
    let (_, shape) = Loss::CROSS_ENTROPY.target(&graph.values()[output].ty.shape)?;
    let count: i64 = shape.iter().product::<usize>() as i64;
    let labels = Tensor::from_i64(&shape, (0..count).map(|i| i % 2).collect::<Vec<_>>());
    let device = device.clone();
    drop(graph);
    Ok(Box::new(move || {
        let cx = Context {
            device: &*device,
            training: true,
            seed: 0,
            first_sample: 0,
        };
        let (outputs, stash) = program.forward(&cx, inputs.clone(), &weights, &mut states);
        let loss = Loss::CROSS_ENTROPY.forward_backward(&*device, &outputs[0], &labels);
        drop(outputs);
        let grads = program
            .backward(&cx, stash, &weights, vec![Some(loss.gradient)])
            .weights;
        weights = optimizer.step(
            &*device,
            &mut state,
            std::mem::take(&mut weights),
            &grads,
            0.001,
        );
    }))
}

/// Repeatable values in -0.5..0.5.
fn random(device: &Arc<dyn Device>, shape: &[usize]) -> Tensor {
    let mut state = 1u32;
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state as f32 / u32::MAX as f32 - 0.5
        })
        .collect();
    device.upload(&Tensor::from_f32(shape, values))
}
