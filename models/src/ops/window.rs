//! The shape rule that convolution and pooling share.

use super::{NodeSpec, OpError};
use crate::device::params::Window;

/// Attributes that [`window`] reads, except `ceil_mode`.
pub(super) const ATTRIBUTES: [&str; 5] =
    ["auto_pad", "dilations", "kernel_shape", "pads", "strides"];

/// Resolves `auto_pad`, `dilations`, `pads` and `strides` for an input whose spatial axes are `input` (one or
/// two) under a kernel of extents `kernel`.
///
/// With `ceil`, the number of windows is rounded up, but one that would begin in the padding after the
/// input is left out, as ONNX says (since opset 19 in words, earlier in practice).
pub(super) fn window(
    spec: &NodeSpec<'_>,
    input: &[usize],
    kernel: &[usize],
    ceil: bool,
) -> Result<Window, OpError> {
    let axes = input.len();
    if !(1..=2).contains(&axes) {
        return Err(spec.error(format!(
            "has {axes} spatial axes; one and two are supported"
        )));
    }
    if kernel.len() != axes || kernel.contains(&0) {
        return Err(spec.error(format!(
            "kernel {kernel:?} does not go with input {input:?}"
        )));
    }
    let strides = extents(spec, "strides", axes, 1)?;
    let dilations = extents(spec, "dilations", axes, 1)?;
    let auto_pad = spec.string("auto_pad")?.unwrap_or("NOTSET");
    let pads = match spec.ints("pads")? {
        Some(pads) if auto_pad == "NOTSET" => {
            let pads: Option<Vec<usize>> = pads.iter().map(|&p| small(p)).collect();
            pads.filter(|pads| pads.len() == 2 * axes).ok_or_else(|| {
                spec.attribute_error("pads", format!("needs {} numbers from 0", 2 * axes))
            })?
        }
        _ => vec![0; 2 * axes],
    };
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
        let reach = kernel[axis]
            .checked_sub(1)
            .and_then(|steps| steps.checked_mul(dilations[axis]))
            .and_then(|reach| reach.checked_add(1))
            .filter(|&reach| reach < MOST)
            .ok_or_else(|| {
                spec.error(format!(
                    "kernel {kernel:?} with dilations {dilations:?} is too large"
                ))
            })?;
        let (extent, stride) = (input[axis], strides[axis]);
        if extent == 0 || extent >= MOST {
            return Err(spec.error(format!("cannot slide over an input of extents {input:?}")));
        }
        let (begin, end) = match auto_pad {
            "NOTSET" => (pads[axis], pads[axes + axis]),
            "VALID" => (0, 0),
            "SAME_UPPER" | "SAME_LOWER" => {
                let outputs = extent.div_ceil(stride);
                let total = ((outputs - 1) * stride + reach).saturating_sub(extent);
                let less = total / 2;
                if auto_pad == "SAME_UPPER" {
                    (less, total - less)
                } else {
                    (total - less, less)
                }
            }
            other => {
                return Err(spec.attribute_error(
                    "auto_pad",
                    format!("{other} is none of NOTSET, SAME_UPPER, SAME_LOWER, VALID"),
                ));
            }
        };
        let padded = extent + begin + end;
        let Some(room) = padded.checked_sub(reach) else {
            return Err(spec.error(format!(
                "kernel {kernel:?} does not fit into input {input:?} with its padding"
            )));
        };
        let mut outputs = room / stride + 1;
        if ceil && room % stride != 0 && outputs * stride < extent + begin {
            outputs += 1;
        }
        window.input[to] = extent;
        window.output[to] = outputs;
        window.kernel[to] = kernel[axis];
        window.strides[to] = stride;
        window.dilations[to] = dilations[axis];
        window.pads_begin[to] = begin;
        window.pads_end[to] = end;
    }
    Ok(window)
}

/// Bound on extents, strides and pads, far above any real one, that keeps sums and products within a word.
const MOST: usize = 1 << 30;

fn small(value: i64) -> Option<usize> {
    usize::try_from(value).ok().filter(|&value| value < MOST)
}

/// A list of positive numbers, one per axis.
pub(super) fn extents(
    spec: &NodeSpec<'_>,
    name: &str,
    axes: usize,
    default: usize,
) -> Result<Vec<usize>, OpError> {
    let Some(values) = spec.ints(name)? else {
        return Ok(vec![default; axes]);
    };
    let positive: Option<Vec<usize>> = values
        .iter()
        .map(|&v| small(v).filter(|&v| v > 0))
        .collect();
    positive
        .filter(|values| values.len() == axes)
        .ok_or_else(|| {
            spec.attribute_error(name, format!("{values:?} needs {axes} numbers from 1"))
        })
}
