//! Normalisations by statistics of the sample itself: LayerNormalization, RMSNormalization,
//! InstanceNormalization and GroupNormalization.
//!
//! Each sees its input as rows that are normalised one by one. What differs is what a row is, and how scale
//! and bias broadcast to the result.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, sum_to};
use crate::device::params::{Binary, LayerNorm, Unary};
use crate::shape;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Normalization {
    name: &'static str,
    rows: LayerNorm,
    affine: Affine,
    outputs: Vec<ValueType>,
}

/// How scale and bias apply.
#[derive(Debug)]
enum Affine {
    /// One number per element of a row: done while normalising.
    Row {
        /// Shapes of scale and bias, which have as many elements as a row.
        shapes: Vec<Vec<usize>>,
    },
    /// Broadcast to the result afterwards.
    Broadcast {
        /// Shape that the result takes.
        result: Vec<usize>,
        /// For scale and bias, its shape and the one it takes.
        shapes: Vec<(Vec<usize>, Vec<usize>)>,
    },
}

/// Inputs X, scale and (except for RMSNormalization) bias.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    match spec.op_type {
        "LayerNormalization" => layer(spec, "LayerNormalization"),
        "RMSNormalization" => layer(spec, "RMSNormalization"),
        "InstanceNormalization" => instance(spec),
        _ => group(spec),
    }
}

/// A row is all axes from `axis` on; scale and B broadcast to it. LayerNormalization may also give the mean and
/// the inverse deviation of each row.
fn layer(spec: &NodeSpec<'_>, name: &'static str) -> Result<Box<dyn Operator>, OpError> {
    let centered = name == "LayerNormalization";
    spec.allow(&["axis", "epsilon", "stash_type"])?;
    stash_type(spec)?;
    spec.at_most_inputs(if centered { 3 } else { 2 })?;
    let x = &spec.float_input(0, "X")?.shape;
    let axis = spec.axis(spec.int("axis")?.unwrap_or(-1), x.len())?;
    let (outer, row) = x.split_at(axis);
    let mut shapes = vec![spec.float_input(1, "Scale")?.shape.clone()];
    if spec.optional(2).is_some() {
        shapes.push(spec.float_input(2, "B")?.shape.clone());
    }
    for (shape, name) in shapes.iter().zip(["Scale", "B"]) {
        if shape::broadcast(shape, row).as_deref() != Some(row) {
            let problem = format!("{shape:?} does not broadcast to the normalised axes {row:?}");
            return Err(spec.input_error(name, problem));
        }
    }
    let len = row.iter().product();
    let affine = if shapes.iter().all(|s| s.iter().product::<usize>() == len) {
        Affine::Row { shapes }
    } else {
        let shapes = shapes.into_iter().map(|s| (s.clone(), s)).collect();
        Affine::Broadcast {
            result: x.clone(),
            shapes,
        }
    };
    let most = if centered { 3 } else { 1 };
    if spec.outputs > most {
        return Err(spec.error(format!(
            "names {} outputs, at most {most} are possible",
            spec.outputs
        )));
    }
    let statistics = [outer, &vec![1; row.len()][..]].concat();
    let mut outputs = vec![ValueType::float(x.clone())];
    outputs.resize(spec.outputs.max(1), ValueType::float(statistics));
    Ok(Box::new(Normalization {
        name,
        rows: LayerNorm {
            rows: outer.iter().product(),
            len,
            eps: spec.float("epsilon")?.unwrap_or(1e-5),
            centered,
        },
        affine,
        outputs,
    }))
}

/// A row is one channel of one sample.
fn instance(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&["epsilon"])?;
    let x = channels(spec)?;
    grouped(spec, "InstanceNormalization", x[1], &["scale", "B"], x[1])
}

/// A row is a group of channels of one sample. Scale and bias hold one number per group before opset 21 and one
/// per channel since.
fn group(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let attributes = ["epsilon", "num_groups", "stash_type"];
    spec.allow(&attributes[..if spec.opset >= 21 { 3 } else { 2 }])?;
    stash_type(spec)?;
    let channels = channels(spec)?[1];
    let groups = spec
        .int("num_groups")?
        .and_then(|groups| usize::try_from(groups).ok())
        .filter(|&groups| groups > 0 && channels % groups == 0)
        .ok_or_else(|| {
            let problem = format!("must be given and divide the {channels} channels");
            spec.attribute_error("num_groups", problem)
        })?;
    let parameters = if spec.opset >= 21 { channels } else { groups };
    let names = ["scale", "bias"];
    grouped(spec, "GroupNormalization", groups, &names, parameters)
}

/// Shape of input X `[n, c, ..]`.
fn channels<'a>(spec: &'a NodeSpec<'_>) -> Result<&'a [usize], OpError> {
    let x = &spec.float_input(0, "X")?.shape;
    if x.len() < 2 {
        return Err(spec.input_error("X", format!("{x:?} must be [n, c, ..]")));
    }
    Ok(x)
}

fn grouped(
    spec: &NodeSpec<'_>,
    name: &'static str,
    groups: usize,
    names: &[&str; 2],
    parameters: usize,
) -> Result<Box<dyn Operator>, OpError> {
    spec.at_most_inputs(3)?;
    let x = channels(spec)?;
    for (position, name) in names.iter().enumerate() {
        let input = spec.float_input(position + 1, name)?;
        spec.expect_shape(input, name, &[parameters])?;
    }
    let len = x[1..].iter().product::<usize>() / groups;
    // Scale and bias run along the middle axis.
    let result = vec![x[0], parameters, groups * len / parameters];
    let shape = (vec![parameters], vec![parameters, 1]);
    Ok(Box::new(Normalization {
        name,
        rows: LayerNorm {
            rows: x[0] * groups,
            len,
            eps: spec.float("epsilon")?.unwrap_or(1e-5),
            centered: true,
        },
        affine: Affine::Broadcast {
            result,
            shapes: vec![shape.clone(), shape],
        },
        outputs: vec![ValueType::float(x)],
    }))
}

/// Statistics are always computed in float, which is what 1 asks for.
fn stash_type(spec: &NodeSpec<'_>) -> Result<(), OpError> {
    match spec.int("stash_type")?.unwrap_or(1) {
        1 => Ok(()),
        other => {
            let problem = format!("{other} is not supported, only 1 (float)");
            Err(spec.attribute_error("stash_type", problem))
        }
    }
}

impl Normalization {
    /// Adds what flows back through the mean and the inverse deviation of the rows where they are read.
    fn statistics_backward(
        &self,
        cx: &Context<'_>,
        x: &Tensor,
        (mean, inv_std): (&Tensor, &Tensor),
        grads: &[Option<Tensor>],
        mut input: Tensor,
    ) -> Tensor {
        let device = cx.device;
        let (rows, len) = (self.rows.rows, self.rows.len);
        let column = |t: &Tensor| t.reshape(&[rows, 1]);
        let share = |t: Tensor| device.unary(Unary::Scale(1.0 / len as f32), t);
        let matrix = input.shape().to_vec();
        input = input.into_shape(&[rows, len]);
        if let Some(grad) = grads.get(1).and_then(Option::as_ref) {
            input = device.binary(Binary::Add, input, share(column(grad)));
        }
        if let Some(grad) = grads.get(2).and_then(Option::as_ref) {
            // s = (mean square deviation + eps)^-1/2: ds/dx = -s^3 * (x - mean) / len.
            let times = |a, b| device.binary(Binary::Mul, a, b);
            let s = column(inv_std);
            let cube = times(times(s.clone(), s.clone()), s);
            let factor = share(times(cube, column(grad)));
            let deviation = device.binary(Binary::Sub, x.reshape(&[rows, len]), column(mean));
            input = device.binary(Binary::Sub, input, times(deviation, factor));
        }
        input.into_shape(&matrix)
    }
}

impl Operator for Normalization {
    fn name(&self) -> &'static str {
        self.name
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[1, 2]
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let device = cx.device;
        let (Some(x), Some(scale)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let bias = inputs.get(2).and_then(Option::as_ref);
        let y = match &self.affine {
            Affine::Row { .. } => device.layer_norm(&self.rows, x, Some(scale), bias),
            Affine::Broadcast { result, shapes } => {
                let mut y = device.layer_norm(&self.rows, x, None, None);
                let parameters = [Some(scale), bias].into_iter().flatten().zip(shapes);
                let mut output = y.output.into_shape(result);
                for ((parameter, (_, view)), op) in parameters.zip([Binary::Mul, Binary::Add]) {
                    output = device.binary(op, output, parameter.reshape(view));
                }
                y.output = output.into_shape(x.shape());
                y
            }
        };
        let mut outputs = vec![y.output];
        for (statistic, shape) in [&y.mean, &y.inv_std].into_iter().zip(&self.outputs[1..]) {
            outputs.push(statistic.reshape(&shape.shape));
        }
        Forward {
            outputs,
            extra: vec![y.mean, y.inv_std],
        }
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        mut grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let device = cx.device;
        let mut result = vec![None; wanted.len()];
        let (x, scale) = (saved.input(0), saved.input(1));
        let [mean, inv_std] = &saved.extra[..] else {
            unreachable!("the statistics that the forward gave");
        };
        let mut input = None;
        if let Some(grad) = grads[0].take() {
            let (back, parameters) = match &self.affine {
                Affine::Row { shapes } => {
                    let p = &self.rows;
                    let back = device.layer_norm_backward(p, x, Some(scale), mean, inv_std, grad);
                    let parameters = back.parameters.into_iter().flat_map(|(s, b)| [s, b]);
                    let parameters = parameters.zip(shapes);
                    let parameters: Vec<_> = parameters.map(|(g, s)| g.into_shape(s)).collect();
                    (back.input, parameters)
                }
                Affine::Broadcast {
                    result: shape,
                    shapes,
                } => {
                    let grad = grad.into_shape(shape);
                    let mut parameters = Vec::new();
                    if wanted[1] {
                        let again = device.layer_norm(&self.rows, x, None, None).output;
                        let normalized = again.into_shape(shape);
                        let product = device.binary(Binary::Mul, normalized, grad.clone());
                        let sum = sum_to(device, product, &shapes[0].1);
                        parameters.push(sum.into_shape(&shapes[0].0));
                    } else {
                        parameters.push(scale.clone());
                    }
                    if let (Some((shape, view)), Some(true)) = (shapes.get(1), wanted.get(2)) {
                        let sum = sum_to(device, grad.clone(), view);
                        parameters.push(sum.into_shape(shape));
                    }
                    let scale = scale.reshape(&shapes[0].1);
                    let grad = device
                        .binary(Binary::Mul, grad, scale)
                        .into_shape(x.shape());
                    let p = &self.rows;
                    let back = device.layer_norm_backward(p, x, None, mean, inv_std, grad);
                    (back.input, parameters)
                }
            };
            input = Some(back);
            for (position, gradient) in parameters.into_iter().enumerate() {
                if wanted.get(position + 1) == Some(&true) {
                    result[position + 1] = Some(gradient);
                }
            }
        }
        if grads.iter().any(Option::is_some) {
            let start = input.unwrap_or_else(|| device.fill(x.shape(), 0.0));
            let statistics = (mean, inv_std);
            input = Some(self.statistics_backward(cx, x, statistics, &grads, start));
        }
        result[0] = input;
        result
    }
}
