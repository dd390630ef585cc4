//! Conv: convolution over one or two axes with groups, strides, dilations and padding.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, window};
use crate::device::params::{self, Reduction};
use crate::init::Fan;
use crate::tensor::Tensor;

#[derive(Debug)]
struct Conv {
    params: params::Conv,
    input_shape: Vec<usize>,
    filter_shape: Vec<usize>,
    outputs: [ValueType; 1],
}

/// Inputs X `[n, c, spatial]`, W `[m, c / group, kernel]`, optional B `[m]`.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[&window::ATTRIBUTES[..], &["group"]].concat())?;
    spec.at_most_inputs(3)?;
    let x = &spec.float_input(0, "X")?.shape;
    let w = &spec.float_input(1, "W")?.shape;
    if x.len() < 3 || w.len() != x.len() {
        return Err(spec.error(format!(
            "X {x:?} and W {w:?} must both be [n, c, spatial axes]"
        )));
    }
    if let Some(kernel) = spec.ints("kernel_shape")?
        && !kernel.iter().copied().eq(w[2..].iter().map(|&k| k as i64))
    {
        return Err(
            spec.attribute_error("kernel_shape", format!("{kernel:?} differs from W {w:?}"))
        );
    }
    let groups = usize::try_from(spec.int("group")?.unwrap_or(1)).unwrap_or(0);
    let (in_channels, out_channels) = (x[1], w[0]);
    let divides = groups > 0 && in_channels % groups == 0 && out_channels % groups == 0;
    if !divides || in_channels == 0 || out_channels == 0 || w[1] != in_channels / groups {
        return Err(spec.attribute_error(
            "group",
            format!("{groups} groups do not go with X {x:?} and W {w:?}"),
        ));
    }
    if spec.optional(2).is_some() {
        spec.expect_shape(spec.float_input(2, "B")?, "B", &[out_channels])?;
    }
    let window = window::window(spec, &x[2..], &w[2..], false)?;
    let mut shape = vec![x[0], out_channels];
    shape.extend(&window.output[4 - x.len()..]);
    spec.check_size(&shape)?;
    Ok(Box::new(Conv {
        params: params::Conv {
            batch: x[0],
            in_channels,
            out_channels,
            groups,
            window,
        },
        input_shape: x.clone(),
        filter_shape: w.clone(),
        outputs: [ValueType::float(shape)],
    }))
}

impl Operator for Conv {
    fn name(&self) -> &'static str {
        "Conv"
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        &[1, 2]
    }

    fn fan(&self, input: usize) -> Option<Fan> {
        if input == 1 {
            Fan::of_filter(&self.filter_shape)
        } else {
            None
        }
    }

    fn saves(&self) -> Saves {
        Saves {
            inputs: vec![0, 1],
            outputs: vec![],
        }
    }

    fn forward(&self, cx: &Context<'_>, inputs: Vec<Option<Tensor>>) -> Forward {
        let bias = inputs.get(2).and_then(Option::as_ref);
        let (Some(x), Some(w)) = (&inputs[0], &inputs[1]) else {
            unreachable!("inputs that the shape rule requires");
        };
        let output = cx.device.conv(&self.params, x, w, bias);
        Forward::of(output.into_shape(&self.outputs[0].shape))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let Some(grad) = only(grads) else {
            return vec![None; wanted.len()];
        };
        let p = &self.params;
        let mut result = vec![None; wanted.len()];
        if wanted.get(2) == Some(&true) {
            let spatial = p.window.output.iter().product();
            let planes = grad.reshape(&[p.batch, p.out_channels, spatial]);
            let bias = cx.device.reduce(Reduction::Sum, &planes, &[0, 2]);
            result[2] = Some(bias.into_shape(&[p.out_channels]));
        }
        if wanted[1] {
            let filter = cx.device.conv_backward_filter(p, saved.input(0), &grad);
            result[1] = Some(filter.into_shape(&self.filter_shape));
        }
        if wanted[0] {
            let input = cx.device.conv_backward_data(p, saved.input(1), &grad);
            result[0] = Some(input.into_shape(&self.input_shape));
        }
        result
    }
}
