//! ConvTranspose: the gradient of a convolution as an operator of its own, over one or two axes.
//!
//! The convolution that it transposes reads this operator's output and gives its input, with the filter as it is.

use super::window::{ATTRIBUTES, extents};
use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only};
use crate::device::params::{Binary, Conv, Reduction, Window};
use crate::init::Fan;
use crate::tensor::Tensor;

#[derive(Debug)]
struct ConvTranspose {
    conv: Conv,
    input_shape: Vec<usize>,
    filter_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Inputs X `[n, c, spatial]`, W `[c, m / group, kernel]`, optional B `[m]`.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(
        &[
            &ATTRIBUTES[..],
            &["group", "output_padding", "output_shape"],
        ]
        .concat(),
    )?;
    spec.at_most_inputs(3)?;
    let x = &spec.float_input(0, "X")?.shape;
    let w = &spec.float_input(1, "W")?.shape;
    if x.len() < 3 || w.len() != x.len() {
        let problem = format!("X {x:?} and W {w:?} must both be [n, c, spatial axes]");
        return Err(spec.error(problem));
    }
    if let Some(kernel) = spec.ints("kernel_shape")?
        && !kernel.iter().copied().eq(w[2..].iter().map(|&k| k as i64))
    {
        let problem = format!("{kernel:?} differs from W {w:?}");
        return Err(spec.attribute_error("kernel_shape", problem));
    }
    let groups = usize::try_from(spec.int("group")?.unwrap_or(1)).unwrap_or(0);
    if groups == 0 || x[1] % groups != 0 || w[0] != x[1] {
        let problem = format!("{groups} groups do not go with X {x:?} and W {w:?}");
        return Err(spec.attribute_error("group", problem));
    }
    let channels = groups.saturating_mul(w[1]);
    if spec.optional(2).is_some() {
        spec.expect_shape(spec.float_input(2, "B")?, "B", &[channels])?;
    }
    let window = window(spec, &x[2..], &w[2..])?;
    let mut shape = vec![x[0], channels];
    shape.extend(&window.input[4 - x.len()..]);
    spec.check_size(&shape)?;
    Ok(Box::new(ConvTranspose {
        conv: Conv {
            batch: x[0],
            in_channels: channels,
            out_channels: x[1],
            groups,
            window,
        },
        input_shape: x.clone(),
        filter_shape: w.clone(),
        outputs: [ValueType::float(shape)],
    }))
}

/// The window of the transposed convolution, whose output is `input`. With `output_shape` (and `auto_pad` SAME, which
/// means `input * stride`) the padding is what remains, its odd part before the output unless SAME_UPPER.
fn window(spec: &NodeSpec<'_>, input: &[usize], kernel: &[usize]) -> Result<Window, OpError> {
    let axes = input.len();
    if axes > 2 {
        return Err(spec.error(format!(
            "has {axes} spatial axes; one and two are supported"
        )));
    }
    let strides = extents(spec, "strides", axes, 1)?;
    let dilations = extents(spec, "dilations", axes, 1)?;
    let sizes = |name: &str, count: usize| -> Result<Option<Vec<usize>>, OpError> {
        let Some(values) = spec.ints(name)? else {
            return Ok(None);
        };
        let small = |&value: &i64| usize::try_from(value).ok().filter(|&v| v < 1 << 30);
        let sizes: Option<Vec<usize>> = values.iter().map(small).collect();
        let sizes = sizes.filter(|sizes| sizes.len() == count);
        let refuse =
            || spec.attribute_error(name, format!("{values:?} needs {count} numbers from 0"));
        sizes.map(Some).ok_or_else(refuse)
    };
    let more = sizes("output_padding", axes)?.unwrap_or(vec![0; axes]);
    let pads = sizes("pads", 2 * axes)?.unwrap_or(vec![0; 2 * axes]);
    let wish = match sizes("output_shape", axes) {
        // It may name batch and channels too.
        Err(_) => sizes("output_shape", axes + 2)?.map(|sizes| sizes[2..].to_vec()),
        Ok(sizes) => sizes,
    };
    let auto_pad = spec.string("auto_pad")?.unwrap_or("NOTSET");
    if !["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"].contains(&auto_pad) {
        let problem = format!("{auto_pad} is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID");
        return Err(spec.attribute_error("auto_pad", problem));
    }
    // A one-dimensional window is a two-dimensional one of height 1.
    let mut window = Window {
        input: [1; 2],
        output: [1; 2],
        kernel: [1; 2],
        strides: [1; 2],
        dilations: [1; 2],
        pads_begin: [0; 2],
        pads_end: [0; 2],
    };
    for axis in 0..axes {
        let to = axis + 2 - axes;
        let stretched = (kernel[axis].saturating_sub(1))
            .checked_mul(dilations[axis])
            .and_then(|reach| reach.checked_add(1))
            .and_then(|reach| reach.checked_add(strides[axis].checked_mul(input[axis] - 1)?))
            .and_then(|extent| extent.checked_add(more[axis]))
            .filter(|&extent| extent < 1 << 40)
            .ok_or_else(|| spec.error("its result is too large"))?;
        let wish = match &wish {
            Some(wish) => Some(wish[axis]),
            None if auto_pad.starts_with("SAME") => Some(input[axis] * strides[axis]),
            None => None,
        };
        let (begin, output) = match wish {
            Some(output) => {
                let total = stretched.saturating_sub(output);
                let begin = if auto_pad == "SAME_UPPER" {
                    total / 2
                } else {
                    total - total / 2
                };
                (begin, Some(output))
            }
            None if auto_pad == "VALID" => (0, Some(stretched)),
            None => {
                let begin = pads[axis];
                (begin, stretched.checked_sub(begin + pads[axes + axis]))
            }
        };
        let output = output.filter(|&output| output > 0).ok_or_else(|| {
            spec.attribute_error("pads", format!("{pads:?} leave nothing of the result"))
        })?;
        window.input[to] = output;
        window.output[to] = input[axis];
        window.kernel[to] = kernel[axis];
        window.strides[to] = strides[axis];
        window.dilations[to] = dilations[axis];
        window.pads_begin[to] = begin;
        window.pads_end[to] = (stretched - more[axis]).saturating_sub(output + begin);
    }
    Ok(window)
}

impl Operator for ConvTranspose {
    fn name(&self) -> &'static str {
        "ConvTranspose"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[1, 2]
    }

    fn fan(&self, input: usize) -> Option<Fan> {
        let transposed = (input == 1).then(|| Fan::of_filter(&self.filter_shape))??;
        Some(Fan {
            inputs: transposed.outputs,
            outputs: transposed.inputs,
        })
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let (Some(x), Some(w)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let mut output = cx.device.conv_backward_data(&self.conv, w, x);
        if let Some(bias) = inputs.get(2).and_then(Option::as_ref) {
            let bias = bias.reshape(&[self.conv.in_channels, 1, 1]);
            output = cx.device.binary(Binary::Add, output, bias);
        }
        Forward::of(output.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let mut result = vec![None; wanted.len()];
        let Some(grad) = only(grads) else {
            return result;
        };
        let p = &self.conv;
        if wanted.get(2) == Some(&true) {
            let spatial = p.window.input.iter().product();
            let planes = grad.reshape(&[p.batch, p.in_channels, spatial]);
            let bias = cx.device.reduce(Reduction::Sum, &planes, &[0, 2]);
            result[2] = Some(bias.into_shape(&[p.in_channels]));
        }
        if wanted[1] {
            let filter = cx.device.conv_backward_filter(p, &grad, saved.input(0));
            result[1] = Some(filter.into_shape(&self.filter_shape));
        }
        if wanted[0] {
            let input = cx.device.conv(p, &grad, saved.input(1), None);
            result[0] = Some(input.into_shape(&self.input_shape));
        }
        result
    }
}
