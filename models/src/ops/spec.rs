//! Reading a node: attributes and inputs by name, with errors that say where.

use super::{Attribute, NodeSpec, OpError, ValueType};
use crate::tensor::{DType, Tensor};

/// Opsets whose operators are understood.
const OPSETS: std::ops::RangeInclusive<i64> = 7..=23;

impl NodeSpec<'_> {
    pub(super) fn check_opset(&self) -> Result<(), OpError> {
        if OPSETS.contains(&self.opset) {
            return Ok(());
        }
        Err(self.error(format!(
            "opset {} is not supported; export the model with opset {} to {}",
            self.opset,
            OPSETS.start(),
            OPSETS.end()
        )))
    }

    pub(super) fn error(&self, problem: impl Into<String>) -> OpError {
        OpError::Node {
            node: self.name.into(),
            op: self.op_type.into(),
            problem: problem.into(),
        }
    }

    pub(super) fn attribute_error(&self, attribute: &str, problem: impl Into<String>) -> OpError {
        OpError::Attribute {
            node: self.name.into(),
            op: self.op_type.into(),
            attribute: attribute.into(),
            problem: problem.into(),
        }
    }

    pub(super) fn input_error(&self, input: &str, problem: impl Into<String>) -> OpError {
        OpError::Input {
            node: self.name.into(),
            op: self.op_type.into(),
            input: input.into(),
            problem: problem.into(),
        }
    }

    /// Refuses attributes that are not among those the operator understands.
    pub(super) fn allow(&self, known: &[&str]) -> Result<(), OpError> {
        match self
            .attributes
            .keys()
            .find(|name| !known.contains(&name.as_str()))
        {
            Some(name) => Err(self.attribute_error(name, "is not supported")),
            None => Ok(()),
        }
    }

    pub(super) fn int(&self, name: &str) -> Result<Option<i64>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::Int(value)) => Ok(Some(*value)),
            Some(_) => Err(self.attribute_error(name, "must be an integer")),
        }
    }

    /// An attribute that is 0 or 1 and 0 by default.
    pub(super) fn flag(&self, name: &str) -> Result<bool, OpError> {
        match self.int(name)? {
            None | Some(0) => Ok(false),
            Some(1) => Ok(true),
            Some(value) => Err(self.attribute_error(name, format!("must be 0 or 1, not {value}"))),
        }
    }

    pub(super) fn float(&self, name: &str) -> Result<Option<f32>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::Float(value)) => Ok(Some(*value)),
            Some(_) => Err(self.attribute_error(name, "must be a float")),
        }
    }

    pub(super) fn ints(&self, name: &str) -> Result<Option<&[i64]>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::Ints(values)) => Ok(Some(values)),
            Some(_) => Err(self.attribute_error(name, "must be a list of integers")),
        }
    }

    pub(super) fn floats(&self, name: &str) -> Result<Option<&[f32]>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::Floats(values)) => Ok(Some(values)),
            Some(_) => Err(self.attribute_error(name, "must be a list of floats")),
        }
    }

    pub(super) fn strings(&self, name: &str) -> Result<Option<&[String]>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::Strings(values)) => Ok(Some(values)),
            Some(_) => Err(self.attribute_error(name, "must be a list of strings")),
        }
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<&str>, OpError> {
        match self.attributes.get(name) {
            None => Ok(None),
            Some(Attribute::String(value)) => Ok(Some(value)),
            Some(_) => Err(self.attribute_error(name, "must be a string")),
        }
    }

    /// Type of an input that may be omitted.
    pub(super) fn optional(&self, position: usize) -> Option<&ValueType> {
        self.inputs.get(position).and_then(Option::as_ref)
    }

    /// Type of an input that must be there.
    pub(super) fn input(&self, position: usize, name: &str) -> Result<&ValueType, OpError> {
        self.optional(position)
            .ok_or_else(|| self.input_error(name, "is missing"))
    }

    /// Type of an input that must be there and hold at least one float.
    pub(super) fn float_input(&self, position: usize, name: &str) -> Result<&ValueType, OpError> {
        let input = self.input(position, name)?;
        self.expect_dtype(input, name, DType::F32)?;
        if input.shape.contains(&0) {
            return Err(self.input_error(name, format!("{:?} has no elements", input.shape)));
        }
        Ok(input)
    }

    pub(super) fn expect_dtype(
        &self,
        input: &ValueType,
        name: &str,
        dtype: DType,
    ) -> Result<(), OpError> {
        if input.dtype == dtype {
            return Ok(());
        }
        Err(self.input_error(name, format!("must be {dtype}, not {}", input.dtype)))
    }

    pub(super) fn expect_shape(
        &self,
        input: &ValueType,
        name: &str,
        shape: &[usize],
    ) -> Result<(), OpError> {
        if input.shape == shape {
            return Ok(());
        }
        Err(self.input_error(
            name,
            format!("must have shape {shape:?}, not {:?}", input.shape),
        ))
    }

    /// Refuses inputs beyond the `count` that the operator has.
    pub(super) fn at_most_inputs(&self, count: usize) -> Result<(), OpError> {
        match self.inputs.len() {
            given if given > count => {
                Err(self.error(format!("has {given} inputs, at most {count} are possible")))
            }
            _ => Ok(()),
        }
    }

    /// Value of an input that may be omitted but must be known before anything runs.
    pub(super) fn optional_constant(
        &self,
        position: usize,
        name: &str,
    ) -> Result<Option<&Tensor>, OpError> {
        if self.optional(position).is_none() {
            return Ok(None);
        }
        match self.constants.get(position).and_then(Option::as_ref) {
            Some(value) => Ok(Some(value)),
            None => Err(self.input_error(
                name,
                "must be known before the model runs, but depends on what is fed to it",
            )),
        }
    }

    /// Integers of an input that may be omitted but must be known before anything runs.
    pub(super) fn constant_ints(
        &self,
        position: usize,
        name: &str,
    ) -> Result<Option<&[i64]>, OpError> {
        match self.optional_constant(position, name)? {
            None => Ok(None),
            Some(value) if value.dtype() == DType::I64 => Ok(Some(value.i64s())),
            Some(value) => {
                Err(self.input_error(name, format!("must be int64, not {}", value.dtype())))
            }
        }
    }

    /// A float of an input that may be omitted but must be known before anything runs.
    pub(super) fn constant_float(
        &self,
        position: usize,
        name: &str,
    ) -> Result<Option<f32>, OpError> {
        match self.optional_constant(position, name)? {
            None => Ok(None),
            Some(value) if value.dtype() == DType::F32 && value.len() == 1 => {
                Ok(Some(value.f32s()[0]))
            }
            Some(value) => Err(self.input_error(
                name,
                format!(
                    "must be one float, not {} {:?}",
                    value.dtype(),
                    value.shape()
                ),
            )),
        }
    }

    /// The axes of an operator that took them as an attribute before `opset` and takes them as an input since.
    pub(super) fn axes_since(
        &self,
        opset: i64,
        position: usize,
    ) -> Result<Option<&[i64]>, OpError> {
        if self.opset >= opset {
            self.allow_not("axes", opset)?;
            self.constant_ints(position, "axes")
        } else {
            self.ints("axes")
        }
    }

    /// Refuses an attribute that became an input.
    pub(super) fn allow_not(&self, attribute: &str, opset: i64) -> Result<(), OpError> {
        if self.attributes.contains_key(attribute) {
            return Err(self.attribute_error(attribute, format!("is an input since opset {opset}")));
        }
        Ok(())
    }

    /// An axis of a tensor of `rank` axes; negative counts from the end.
    pub(super) fn axis(&self, axis: i64, rank: usize) -> Result<usize, OpError> {
        let from_start = if axis < 0 {
            axis.saturating_add(rank as i64)
        } else {
            axis
        };
        usize::try_from(from_start)
            .ok()
            .filter(|&axis| axis < rank)
            .ok_or_else(|| {
                self.attribute_error("axis", format!("{axis} is outside of {rank} axes"))
            })
    }

    /// Distinct axes, sorted.
    pub(super) fn axes(&self, axes: &[i64], rank: usize) -> Result<Vec<usize>, OpError> {
        let mut resolved = Vec::with_capacity(axes.len());
        for &axis in axes {
            resolved.push(self.axis(axis, rank)?);
        }
        resolved.sort_unstable();
        if resolved.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(self.attribute_error("axes", format!("{axes:?} names an axis twice")));
        }
        Ok(resolved)
    }

    /// Refuses shapes whose number of bytes does not fit a machine word or no memory could hold.
    pub(super) fn check_size(&self, shape: &[usize]) -> Result<(), OpError> {
        const LIMIT: usize = 1 << 44;
        let elements = shape
            .iter()
            .try_fold(1usize, |product, &extent| product.checked_mul(extent));
        match elements {
            Some(elements) if elements <= LIMIT => Ok(()),
            _ => Err(self.error(format!("its result of shape {shape:?} is too large"))),
        }
    }
}

impl ValueType {
    /// A float value.
    pub(super) fn float(shape: impl Into<Vec<usize>>) -> Self {
        ValueType {
            dtype: DType::F32,
            shape: shape.into(),
        }
    }
}
