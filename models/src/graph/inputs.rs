//! Sizes of the data inputs: what the file fixes, what `--batch` and `--dim` bind.

use std::collections::{BTreeMap, HashSet};

use super::{BuildOptions, GraphErrorKind};
use crate::onnx::Model;
use crate::onnx::graph_dtype;
use crate::onnx::proto::{DimensionValue, TypeValue, ValueInfoProto, data_type};
use crate::ops::ValueType;

/// A data input with its shapes bound.
#[derive(Clone, Debug)]
pub(super) struct DataInput<'a> {
    pub name: &'a str,
    /// With the batch size asked for, or the exported one if none was.
    pub ty: ValueType,
    /// The exported extent of axis 0, where the file fixes it.
    pub exported_batch: Option<usize>,
}

impl DataInput<'_> {
    /// The type with the exported batch size.
    pub fn exported(&self) -> ValueType {
        let mut ty = self.ty.clone();
        if let (Some(batch), Some(first)) = (self.exported_batch, ty.shape.first_mut()) {
            *first = batch;
        }
        ty
    }
}

/// An axis as the file declares it.
enum Axis {
    Fixed(usize),
    /// Open under this name; unnamed ones are called `input:axis`.
    Open(String),
}

/// Binds every axis of those data inputs that are read. Inputs that are initializers too (IR version 3)
/// are no data.
pub(super) fn bind<'a>(
    model: &'a Model,
    options: &BuildOptions,
    read: &HashSet<&str>,
) -> Result<Vec<DataInput<'a>>, GraphErrorKind> {
    let is_data = |name: &str| read.contains(name) && !model.initializers().contains_key(name);
    let data = model
        .graph()
        .input
        .iter()
        .filter(|input| is_data(input.name()));
    let declared = data
        .map(|input| Ok((input, declared(input)?)))
        .collect::<Result<Vec<_>, GraphErrorKind>>()?;
    let sizes = sizes(&declared, options)?;
    let mut bound = Vec::new();
    for (input, (dtype, axes)) in &declared {
        let mut shape = Vec::with_capacity(axes.len());
        let mut exported_batch = None;
        for (index, axis) in axes.iter().enumerate() {
            shape.push(match axis {
                Axis::Fixed(extent) if index == 0 => {
                    exported_batch = Some(*extent);
                    options.batch.unwrap_or(*extent)
                }
                Axis::Fixed(extent) => *extent,
                Axis::Open(dim) => {
                    *sizes
                        .get(dim)
                        .ok_or_else(|| GraphErrorKind::OpenDimension {
                            input: input.name().into(),
                            axis: index,
                            dim: dim.clone(),
                            flag: if index == 0 {
                                "--batch N".into()
                            } else {
                                format!("--dim {dim}=N")
                            },
                        })?
                }
            });
        }
        bound.push(DataInput {
            name: input.name(),
            ty: ValueType {
                dtype: *dtype,
                shape,
            },
            exported_batch,
        });
    }
    Ok(bound)
}

type Declared = (crate::tensor::DType, Vec<Axis>);

fn declared(input: &ValueInfoProto) -> Result<Declared, GraphErrorKind> {
    let refused = |reason: String| GraphErrorKind::Input {
        input: input.name().into(),
        reason,
    };
    let Some(TypeValue::Tensor(tensor)) = input.r#type.as_ref().and_then(|ty| ty.value.as_ref())
    else {
        return Err(refused(
            "is no dense tensor; only tensors can be fed".into(),
        ));
    };
    let element = tensor.elem_type();
    let dtype = graph_dtype(element).ok_or_else(|| {
        refused(format!(
            "has elements of type {}, which is not supported",
            data_type::name(element)
        ))
    })?;
    let Some(shape) = &tensor.shape else {
        return Err(refused(
            "has no declared shape; export the model with input shapes".into(),
        ));
    };
    let axis = |(index, dim): (usize, &crate::onnx::proto::Dimension)| match &dim.value {
        // Zero and negative extents are how older exporters write an open axis.
        Some(DimensionValue::Value(extent)) if *extent > 0 => usize::try_from(*extent)
            .map(Axis::Fixed)
            .map_err(|_| refused("is too large for this machine".into())),
        Some(DimensionValue::Param(name)) if !name.is_empty() => Ok(Axis::Open(name.clone())),
        _ => Ok(Axis::Open(format!("{}:{index}", input.name()))),
    };
    Ok((
        dtype,
        shape
            .dim
            .iter()
            .enumerate()
            .map(axis)
            .collect::<Result<_, _>>()?,
    ))
}

/// Size of each open dimension that the options bind: `--batch` binds those that are some input's axis 0.
fn sizes(
    declared: &[(&ValueInfoProto, Declared)],
    options: &BuildOptions,
) -> Result<BTreeMap<String, usize>, GraphErrorKind> {
    let mut open = BTreeMap::new();
    for (_, (_, axes)) in declared {
        for (index, axis) in axes.iter().enumerate() {
            if let Axis::Open(dim) = axis {
                *open.entry(dim.clone()).or_insert(false) |= index == 0;
            }
        }
    }
    let invalid = |dim: &str, size, reason: &str| {
        Err(GraphErrorKind::Dimension {
            dim: dim.into(),
            size,
            reason: reason.into(),
        })
    };
    let mut sizes = BTreeMap::new();
    if options.batch == Some(0) {
        return invalid("batch", 0, "a minibatch has at least one sample");
    }
    for (dim, &size) in &options.dims {
        match open.get(dim) {
            None => {
                let open = open.into_keys().collect();
                return Err(GraphErrorKind::UnknownDimension {
                    dim: dim.clone(),
                    size,
                    open,
                });
            }
            Some(true) if options.batch.is_some_and(|batch| batch != size) => {
                return invalid(
                    dim,
                    size,
                    "it is the batch axis, which --batch gives another size",
                );
            }
            Some(_) if size == 0 => return invalid(dim, size, "sizes start at 1"),
            Some(_) => sizes.insert(dim.clone(), size),
        };
    }
    if let Some(batch) = options.batch {
        sizes.extend(
            open.into_iter()
                .filter(|(_, leading)| *leading)
                .map(|(dim, _)| (dim, batch)),
        );
    }
    Ok(sizes)
}
