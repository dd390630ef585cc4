//! Shape rule and attributes of LSTM, GRU and RNN.

use super::super::{NodeSpec, OpError, Operator, ValueType};
use super::function::Function;
use super::sequence::Sizes;
use super::{Cell, Recurrent, gru, input, lstm, rnn};
use crate::device::params::{Axis, LstmCell, Unary};
use crate::tensor::DType;

/// Inputs X, W, R, B, `sequence_lens`, `initial_h`, for LSTM also `initial_c` and P. All sequences of a batch must be
/// as long as X says.
pub(in super::super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let (gates, functions, own): (_, _, &[&str]) = match spec.op_type {
        "LSTM" => (4, 3, &["input_forget"]),
        "GRU" => (3, 2, &["linear_before_reset"]),
        _ => (1, 1, &[]),
    };
    let common = [
        "activation_alpha",
        "activation_beta",
        "activations",
        "clip",
        "direction",
        "hidden_size",
    ];
    let layout: &[&str] = if spec.opset >= 14 { &["layout"] } else { &[] };
    spec.allow(&[&common[..], own, layout].concat())?;
    let is_lstm = spec.op_type == "LSTM";
    spec.at_most_inputs(if is_lstm { input::COUNT } else { 6 })?;
    let reversed = match spec.string("direction")?.unwrap_or("forward") {
        "forward" => vec![false],
        "reverse" => vec![true],
        "bidirectional" => vec![false, true],
        other => {
            let problem = format!("{other} is none of forward, reverse, bidirectional");
            return Err(spec.attribute_error("direction", problem));
        }
    };
    let batch_first = spec.flag("layout")?;
    let sizes = sizes(spec, gates, reversed.len(), batch_first)?;
    check_inputs(spec, &sizes, batch_first)?;
    let clip = match spec.float("clip")? {
        Some(clip) if clip > 0.0 => clip,
        Some(clip) => {
            return Err(spec.attribute_error("clip", format!("{clip} is not above 0")));
        }
        None => f32::INFINITY,
    };
    let activations = activations(spec, functions, reversed.len())?;
    let mut cells = Vec::new();
    for ops in activations.chunks_exact(functions) {
        cells.push(match *ops {
            [gate, candidate, state] => lstm_cell(spec, &sizes, [gate, candidate, state], clip)?,
            [gate, candidate] => Cell::Gru(gru::Gru {
                gate: function(gate, clip),
                candidate: function(candidate, clip),
                linear_before_reset: spec.int("linear_before_reset")?.unwrap_or(0) != 0,
            }),
            _ => Cell::Rnn(rnn::Rnn {
                function: function(ops[0], clip),
            }),
        });
    }
    let Sizes {
        steps,
        batch,
        hidden,
        directions,
        ..
    } = sizes;
    let (y, state) = if batch_first {
        (
            [batch, steps, directions, hidden],
            [batch, directions, hidden],
        )
    } else {
        (
            [steps, directions, batch, hidden],
            [directions, batch, hidden],
        )
    };
    let most = if is_lstm { 3 } else { 2 };
    if spec.outputs > most {
        return Err(spec.error(format!("has at most {most} outputs, not {}", spec.outputs)));
    }
    let mut outputs = vec![ValueType::float(y)];
    outputs.resize(most, ValueType::float(state));
    Ok(Box::new(Recurrent {
        sizes,
        cells,
        reversed,
        batch_first,
        outputs,
    }))
}

fn sizes(
    spec: &NodeSpec<'_>,
    gates: usize,
    directions: usize,
    batch_first: bool,
) -> Result<Sizes, OpError> {
    let x = &spec.float_input(input::X, "X")?.shape;
    let r = &spec.float_input(input::R, "R")?.shape;
    let &[first, second, width] = &x[..] else {
        return Err(spec.input_error("X", format!("{x:?} must have three axes")));
    };
    let hidden = r.last().copied().unwrap_or(0);
    if let Some(size) = spec.int("hidden_size")?
        && size != hidden as i64
    {
        let problem = format!("{size} does not go with R {r:?}");
        return Err(spec.attribute_error("hidden_size", problem));
    }
    let (steps, batch) = if batch_first {
        (second, first)
    } else {
        (first, second)
    };
    spec.check_size(&[steps, directions, batch, hidden, gates])?;
    Ok(Sizes {
        steps,
        batch,
        input: width,
        hidden,
        gates,
        directions,
    })
}

fn check_inputs(spec: &NodeSpec<'_>, s: &Sizes, batch_first: bool) -> Result<(), OpError> {
    let shapes = s.parameter_shapes();
    let states = if batch_first {
        [s.batch, s.directions, s.hidden]
    } else {
        [s.directions, s.batch, s.hidden]
    };
    spec.expect_shape(spec.float_input(input::W, "W")?, "W", &shapes.w)?;
    spec.expect_shape(spec.float_input(input::R, "R")?, "R", &shapes.r)?;
    let optional: [(usize, &str, &[usize]); 4] = [
        (input::B, "B", &shapes.b),
        (input::INITIAL_H, "initial_h", &states),
        (input::INITIAL_C, "initial_c", &states),
        (input::P, "P", &shapes.p),
    ];
    let batch_axis = usize::from(!batch_first);
    for (position, name, shape) in optional {
        if spec.optional(position).is_some() && !is_any_batch(spec, position, batch_axis, shape) {
            spec.expect_shape(spec.float_input(position, name)?, name, shape)?;
        }
    }
    if let Some(lens) = spec.optional_constant(input::SEQUENCE_LENS, "sequence_lens")? {
        let full = |lens: &[i64]| lens.iter().all(|&len| len == s.steps as i64);
        if lens.dtype() != DType::I64 || lens.shape() != [s.batch] || !full(lens.i64s()) {
            let problem = format!(
                "must be {} for each of the {} samples: sequences that differ in length are not supported",
                s.steps, s.batch
            );
            return Err(spec.input_error("sequence_lens", problem));
        }
    }
    Ok(())
}

/// Whether an input is a constant that is the same for every sample, so that it serves any batch size: the initial
/// state in a file that was exported with a fixed batch.
fn is_any_batch(spec: &NodeSpec<'_>, position: usize, batch_axis: usize, shape: &[usize]) -> bool {
    let Some(Some(state)) = spec.constants.get(position) else {
        return false;
    };
    let mut one = state.shape().to_vec();
    let mut same_but_for_batch = one.len() == 3 && !state.is_empty() && state.dtype() == DType::F32;
    if same_but_for_batch {
        one[batch_axis] = shape[batch_axis];
        same_but_for_batch = one == shape;
    }
    if !same_but_for_batch {
        return false;
    }
    let axis = Axis::of(state.shape(), batch_axis);
    state
        .f32s()
        .chunks_exact(axis.len * axis.inner)
        .all(|samples| {
            let mut samples = samples.chunks_exact(axis.inner);
            let first = samples.next();
            samples.all(|sample| Some(sample) == first)
        })
}

fn function(op: Unary, clip: f32) -> Function {
    let clip = clip.is_finite().then_some(Unary::Clip {
        low: -clip,
        high: clip,
    });
    Function { op, clip }
}

fn lstm_cell(
    spec: &NodeSpec<'_>,
    s: &Sizes,
    activations: [Unary; 3],
    clip: f32,
) -> Result<Cell, OpError> {
    if let Some(op) = activations
        .iter()
        .find(|op| op.slope_at_output(0.0).is_none())
    {
        let problem = format!("{op:?} with this factor is not supported in an LSTM");
        return Err(spec.attribute_error("activations", problem));
    }
    Ok(Cell::Lstm(lstm::Lstm {
        cell: LstmCell {
            batch: s.batch,
            hidden: s.hidden,
            activations,
            clip,
            coupled: spec.int("input_forget")?.unwrap_or(0) != 0,
        },
    }))
}

/// The functions of each direction's cell. Those with factors take them in turn from `activation_alpha` and
/// `activation_beta`, or else have the defaults of the operator of that name.
fn activations(
    spec: &NodeSpec<'_>,
    functions: usize,
    directions: usize,
) -> Result<Vec<Unary>, OpError> {
    let usual: &[&str] = match functions {
        1 => &["Tanh"],
        2 => &["Sigmoid", "Tanh"],
        _ => &["Sigmoid", "Tanh", "Tanh"],
    };
    let usual = usual.repeat(directions);
    let names: Vec<&str> = match spec.strings("activations")? {
        Some(names) => names.iter().map(String::as_str).collect(),
        None => usual.clone(),
    };
    if names.len() != usual.len() {
        let problem = format!("{names:?} must be {} names", usual.len());
        return Err(spec.attribute_error("activations", problem));
    }
    let mut alphas = spec.floats("activation_alpha")?.unwrap_or(&[]).iter();
    let mut betas = spec.floats("activation_beta")?.unwrap_or(&[]).iter();
    let mut alpha = |default| alphas.next().copied().unwrap_or(default);
    let mut beta = |default| betas.next().copied().unwrap_or(default);
    let mut ops = Vec::with_capacity(names.len());
    for name in names {
        ops.push(match name.to_ascii_lowercase().as_str() {
            "relu" => Unary::Relu,
            "sigmoid" => Unary::Sigmoid,
            "tanh" => Unary::Tanh,
            "softsign" => Unary::Softsign,
            "softplus" => Unary::Softplus,
            "affine" => Unary::Affine {
                alpha: alpha(1.0),
                beta: beta(0.0),
            },
            "leakyrelu" => Unary::LeakyRelu(alpha(0.01)),
            "thresholdedrelu" => Unary::Threshold(alpha(1.0)),
            "scaledtanh" => Unary::ScaledTanh {
                alpha: alpha(1.0),
                beta: beta(1.0),
            },
            "hardsigmoid" => Unary::HardSigmoid {
                alpha: alpha(0.2),
                beta: beta(0.5),
            },
            "elu" => Unary::Elu {
                scale: 1.0,
                factor: alpha(1.0),
                rate: 1.0,
            },
            _ => {
                let problem = format!("{name} is no activation function of ONNX");
                return Err(spec.attribute_error("activations", problem));
            }
        });
    }
    Ok(ops)
}
