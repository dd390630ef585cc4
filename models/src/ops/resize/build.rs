//! Shape rule and attributes of Resize and Upsample in all their forms.

use super::super::{NodeSpec, OpError, Operator, ValueType};
use super::taps::{AxisResize, Coordinates, Filter, Nearest};
use super::{Line, Resize};
use crate::shape;
use crate::tensor::{DType, Tensor};

/// Most taps of one output element: an antialiased axis that shrinks further would take as many passes.
const MOST_TAPS: f64 = 128.0;

/// How much each resized axis grows.
struct Target {
    axis: usize,
    output: usize,
    scale: f64,
}

/// Resize: inputs X, roi, scales, sizes (before opset 11 only X and scales); Upsample: X and scales (before opset 9 an
/// attribute).
pub(in super::super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let x = spec.input(0, "X")?;
    let old = spec.op_type == "Upsample" || spec.opset < 11;
    if spec.op_type == "Upsample" && spec.opset >= 10 {
        return Err(spec.error("has no form since opset 10; it is Resize there"));
    }
    let (coordinates, filter) = if old {
        let own: &[&str] = if spec.opset < 9 { &["scales"] } else { &[] };
        spec.allow(&[&["mode"], own].concat())?;
        spec.at_most_inputs(if spec.opset < 9 { 1 } else { 2 })?;
        let filter = match spec.string("mode")?.unwrap_or("nearest") {
            "nearest" => Filter::Nearest(Nearest::Floor),
            "linear" | "bilinear" => Filter::Linear,
            other => return Err(spec.attribute_error("mode", format!("{other} is not supported"))),
        };
        ("asymmetric", filter)
    } else {
        spec.allow(&[
            "antialias",
            "axes",
            "coordinate_transformation_mode",
            "cubic_coeff_a",
            "exclude_outside",
            "extrapolation_value",
            "keep_aspect_ratio_policy",
            "mode",
            "nearest_mode",
        ])?;
        spec.at_most_inputs(4)?;
        let mode = spec.string("coordinate_transformation_mode")?;
        (mode.unwrap_or("half_pixel"), filter(spec)?)
    };
    let known = [
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
    ];
    if !known.contains(&coordinates) {
        let problem = format!("{coordinates} is not supported");
        return Err(spec.attribute_error("coordinate_transformation_mode", problem));
    }
    if !matches!(filter, Filter::Nearest(_)) || coordinates == "tf_crop_and_resize" {
        spec.expect_dtype(x, "X", DType::F32)?;
    }
    if x.shape.contains(&0) {
        return Err(spec.input_error("X", format!("{:?} has no elements", x.shape)));
    }
    let targets = targets(spec, &x.shape, old)?;
    let roi = if coordinates == "tf_crop_and_resize" {
        roi(spec, targets.len())?
    } else {
        Vec::new()
    };
    let mut output = x.shape.clone();
    let (mut axes, mut outside) = (Vec::new(), Vec::new());
    let exclude_outside = spec.flag("exclude_outside")?;
    let antialias = spec.flag("antialias")?;
    for (number, target) in targets.iter().enumerate() {
        let resize = AxisResize {
            input: x.shape[target.axis],
            output: target.output,
            scale: target.scale,
            coordinates: match coordinates {
                "half_pixel" => Coordinates::HalfPixel,
                "half_pixel_symmetric" => Coordinates::HalfPixelSymmetric,
                "pytorch_half_pixel" => Coordinates::PytorchHalfPixel,
                "align_corners" => Coordinates::AlignCorners,
                "asymmetric" => Coordinates::Asymmetric,
                _ => Coordinates::CropAndResize(roi[number].0, roi[number].1),
            },
            // The standard leaves the rounding of opset 10 open; this is what ONNX Runtime does.
            filter: match filter {
                Filter::Nearest(_) if old && target.scale < 1.0 => Filter::Nearest(Nearest::Ceil),
                _ => filter,
            },
            antialias,
            exclude_outside,
        };
        output[target.axis] = target.output;
        if resize.is_identity() {
            continue;
        }
        if antialias && 4.0 / target.scale > MOST_TAPS {
            return Err(spec.attribute_error(
                "antialias",
                format!("axis {} shrinks by too much for it", target.axis),
            ));
        }
        spec.check_size(&output)?;
        let taps = resize.taps();
        if taps.outside.contains(&true) {
            outside.push((target.axis, taps.outside.clone()));
        }
        axes.push(Line {
            axis: target.axis,
            taps,
        });
    }
    spec.check_size(&output)?;
    let extrapolation = spec.float("extrapolation_value")?.unwrap_or(0.0);
    Ok(Box::new(Resize {
        name: if spec.op_type == "Upsample" {
            "Upsample"
        } else {
            "Resize"
        },
        axes,
        input_shape: x.shape.clone(),
        outside: (!outside.is_empty() && extrapolation != 0.0)
            .then(|| outside_values(&output, &outside, extrapolation)),
        outputs: [ValueType {
            dtype: x.dtype,
            shape: output,
        }],
    }))
}

fn filter(spec: &NodeSpec<'_>) -> Result<Filter, OpError> {
    let nearest = match spec.string("nearest_mode")?.unwrap_or("round_prefer_floor") {
        "round_prefer_floor" => Nearest::PreferFloor,
        "round_prefer_ceil" => Nearest::PreferCeil,
        "floor" => Nearest::Floor,
        "ceil" => Nearest::Ceil,
        other => {
            let problem = format!("{other} is no way to round");
            return Err(spec.attribute_error("nearest_mode", problem));
        }
    };
    match spec.string("mode")?.unwrap_or("nearest") {
        "nearest" => Ok(Filter::Nearest(nearest)),
        "linear" => Ok(Filter::Linear),
        "cubic" => {
            let a = spec.float("cubic_coeff_a")?.unwrap_or(-0.75);
            Ok(Filter::Cubic(a.into()))
        }
        other => {
            let problem = format!("{other} is none of nearest, linear, cubic");
            Err(spec.attribute_error("mode", problem))
        }
    }
}

/// The axes that `axes` names (by default all) with their new extents.
fn targets(spec: &NodeSpec<'_>, shape: &[usize], old: bool) -> Result<Vec<Target>, OpError> {
    let all: Vec<i64> = (0..shape.len() as i64).collect();
    let named = if old { None } else { spec.ints("axes")? };
    let named = named.unwrap_or(&all);
    spec.axes(named, shape.len())?;
    let mut axes = Vec::with_capacity(named.len());
    for &axis in named {
        axes.push(spec.axis(axis, shape.len())?);
    }
    let count = |name: &str, found: usize| match found == axes.len() {
        true => Ok(()),
        false => {
            let problem = format!("must have {} numbers, not {found}", axes.len());
            Err(spec.input_error(name, problem))
        }
    };
    if !old && let Some(sizes) = spec.constant_ints(3, "sizes")?.filter(|s| !s.is_empty()) {
        count("sizes", sizes.len())?;
        return by_sizes(spec, shape, &axes, sizes);
    }
    let position = if old { 1 } else { 2 };
    let tensor;
    let scales = if spec.opset < 9 {
        spec.floats("scales")?
    } else {
        tensor = spec.optional_constant(position, "scales")?;
        match tensor {
            Some(scales) => {
                let ty = ValueType {
                    dtype: scales.dtype(),
                    shape: scales.shape().to_vec(),
                };
                spec.expect_dtype(&ty, "scales", DType::F32)?;
                Some(scales.f32s())
            }
            None => None,
        }
    };
    let scales = scales.filter(|scales| !scales.is_empty());
    let scales = scales.ok_or_else(|| spec.error("has neither scales nor sizes"))?;
    count("scales", scales.len())?;
    let mut targets = Vec::with_capacity(axes.len());
    for (&axis, &scale) in axes.iter().zip(scales) {
        let output = (shape[axis] as f64 * f64::from(scale)).floor();
        if !(scale > 0.0 && (1.0..1e9).contains(&output)) {
            let problem = format!("{scales:?} make nothing sensible of X {shape:?}");
            return Err(spec.input_error("scales", problem));
        }
        targets.push(Target {
            axis,
            output: output as usize,
            scale: scale.into(),
        });
    }
    Ok(targets)
}

fn by_sizes(
    spec: &NodeSpec<'_>,
    shape: &[usize],
    axes: &[usize],
    sizes: &[i64],
) -> Result<Vec<Target>, OpError> {
    if sizes.iter().any(|size| !(1..1 << 30).contains(size)) {
        return Err(spec.input_error("sizes", format!("{sizes:?} must be from 1")));
    }
    let ratios = axes
        .iter()
        .zip(sizes)
        .map(|(&axis, &size)| size as f64 / shape[axis] as f64);
    let policy = spec
        .string("keep_aspect_ratio_policy")?
        .unwrap_or("stretch");
    let common = match policy {
        "stretch" => None,
        "not_larger" => ratios.clone().reduce(f64::min),
        "not_smaller" => ratios.clone().reduce(f64::max),
        other => {
            let problem = format!("{other} is none of stretch, not_larger, not_smaller");
            return Err(spec.attribute_error("keep_aspect_ratio_policy", problem));
        }
    };
    let targets = axes
        .iter()
        .zip(sizes)
        .zip(ratios)
        .map(|((&axis, &size), ratio)| Target {
            axis,
            output: match common {
                Some(scale) => ((shape[axis] as f64 * scale + 0.5).floor() as usize).max(1),
                None => size as usize,
            },
            scale: common.unwrap_or(ratio),
        });
    Ok(targets.collect())
}

/// Start and end of each axis.
fn roi(spec: &NodeSpec<'_>, axes: usize) -> Result<Vec<(f64, f64)>, OpError> {
    let roi = spec.optional_constant(1, "roi")?;
    let roi = roi.filter(|roi| roi.dtype() == DType::F32 && roi.len() == 2 * axes);
    let roi = roi.ok_or_else(|| spec.input_error("roi", format!("must be {} floats", 2 * axes)))?;
    let (starts, ends) = roi.f32s().split_at(axes);
    let pairs = starts.iter().zip(ends);
    Ok(pairs
        .map(|(&start, &end)| (start.into(), end.into()))
        .collect())
}

/// The value wherever an element lies outside along any axis, else 0; axes that do not matter have extent 1.
fn outside_values(output: &[usize], outside: &[(usize, Vec<bool>)], value: f32) -> Tensor {
    let mut shape = vec![1; output.len()];
    for (axis, _) in outside {
        shape[*axis] = output[*axis];
    }
    let strides = shape::strides(&shape);
    let values = (0..shape.iter().product::<usize>()).map(|element| {
        let out = outside
            .iter()
            .any(|(axis, outside)| outside[element / strides[*axis] % shape[*axis]]);
        if out { value } else { 0.0 }
    });
    Tensor::from_f32(&shape, values.collect::<Vec<_>>())
}
