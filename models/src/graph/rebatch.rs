//! Another batch size for models that were exported with a fixed one.
//!
//! The exported batch may be written into such a model: into the target shapes of reshapes and expansions,
//! and into constants that hold one row for each sample (initial states, masks, positions, sample
//! numbers). With the types of the exported model at hand, the first are replaced where the batch goes
//! through them; the others where a node would not accept them beside tensors of the new batch. What a
//! node computes from weights and such constants alone is asked for in the new size and the walk repeated.

use super::batch_axis::{
    Samples, batch_axis, continued, covering_axis, reshape_target, sample_rows,
};
use super::infer::{Kind, Walk, type_of};
use super::nodes::RawNode;
use super::weights::Source;
use crate::ops::{Attribute, OpError};
use crate::tensor::{DType, Tensor};

/// An axis that was exported with one extent and has another now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Resized {
    pub axis: usize,
    pub exported: usize,
    pub now: usize,
}

impl Walk<'_> {
    /// Replaces what would keep a node's outputs at the exported batch.
    ///
    /// Refuses what would go on picking from the exported samples without any shape telling.
    pub(super) fn rebatch(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
    ) -> Result<(), OpError> {
        let wanted = node.outputs.first().and_then(|name| self.wanted(name));
        match node.op_type.as_str() {
            "Reshape" => self.rebatch_reshape(node, inputs),
            "GatherElements" => self.rebatch_gather_elements(node, inputs),
            "Gather" => self.rebatch_gather(node, inputs)?,
            "GatherND" => self.rebatch_gather_nd(node, inputs)?,
            _ => {}
        }
        if let Some(wanted) = wanted {
            self.supply(node, inputs, wanted);
        }
        Ok(())
    }

    /// After a node was refused: repairs its inputs of the exported batch next to those of the new one. Whether
    /// any was repaired; others are asked for in the next walk.
    pub(super) fn align(&mut self, node: &RawNode, inputs: &mut [Option<usize>]) -> bool {
        let Some((rank, resized)) = self.resized_input(node, inputs) else {
            return false;
        };
        // Axes are counted from the last one, as broadcasting does.
        let from_end = rank - resized.axis;
        let mut repaired = false;
        if node.op_type == "Expand" {
            repaired |= self.resize_target(node, inputs, from_end, resized);
        }
        for input in inputs.iter_mut() {
            let Some(index) = *input else { continue };
            let Some(axis) = self.shape(index).len().checked_sub(from_end) else {
                continue;
            };
            if self.shape(index)[axis] == resized.exported {
                let wanted = Resized { axis, ..resized };
                repaired |= self.want(node, input, wanted);
            }
        }
        repaired
    }

    fn shape(&self, index: usize) -> &[usize] {
        &self.draft.values[index].ty.shape
    }

    /// How a value differs from the exported one.
    fn resized(&self, index: usize) -> Option<Resized> {
        let value = &self.draft.values[index];
        let exported = self.inference.exported.as_ref()?.shape_of(&value.name)?;
        let axis = batch_axis(exported, &value.ty.shape)?;
        Some(Resized {
            axis,
            exported: exported[axis],
            now: value.ty.shape[axis],
        })
    }

    /// What an earlier walk found that a value has to be.
    fn wanted(&self, name: &str) -> Option<Resized> {
        self.roles.wanted.get(name).copied()
    }

    /// The first input that has the new batch, by its rank and axis; for Expand that is the target shape.
    fn resized_input(&self, node: &RawNode, inputs: &[Option<usize>]) -> Option<(usize, Resized)> {
        let by_type = inputs
            .iter()
            .flatten()
            .find_map(|&index| Some((self.shape(index).len(), self.resized(index)?)));
        let by_target = || {
            let target = self.constant((*inputs.get(1)?)?)?;
            let exported = self.inference.exported.as_ref()?;
            let exported = exported.shape_of(node.outputs.first()?)?;
            let extents = target.i64s().iter().map(|&extent| extent.max(0) as usize);
            let now: Vec<usize> = extents.collect();
            let axis = batch_axis(exported, &now)?;
            let resized = Resized {
                axis,
                exported: exported[axis],
                now: now[axis],
            };
            Some((now.len(), resized))
        };
        match node.op_type.as_str() {
            "Expand" => by_type.or_else(by_target),
            _ => by_type,
        }
    }

    /// Asks for an input in the new size. True if it is a constant and was replaced.
    fn want(&mut self, node: &RawNode, input: &mut Option<usize>, wanted: Resized) -> bool {
        let Some(index) = *input else { return false };
        let value = &self.draft.values[index];
        match &value.kind {
            Kind::Constant(tensor, _) => match continued(tensor, wanted.axis, wanted.now) {
                Some(tensor) => {
                    *input = Some(self.replacement(node, tensor));
                    true
                }
                None => false,
            },
            Kind::Computed => {
                let name = value.name.clone();
                self.found.wanted.entry(name).or_insert(wanted);
                false
            }
            Kind::Input | Kind::Parameter(_) | Kind::State(_) => false,
        }
    }

    fn replacement(&mut self, node: &RawNode, tensor: Tensor) -> usize {
        let name = self.unnamed(&node.name, "batch");
        self.add(
            &name,
            type_of(&tensor),
            Kind::Constant(tensor, Source::default()),
        )
    }

    /// Makes a node's output as large as an earlier walk found that it has to be.
    fn supply(&mut self, node: &RawNode, inputs: &mut [Option<usize>], wanted: Resized) {
        let Some(&Some(data)) = inputs.first() else {
            return;
        };
        let Some(output) = self
            .inference
            .exported
            .as_ref()
            .and_then(|exported| exported.shape_of(node.outputs.first()?))
            .map(<[usize]>::to_vec)
        else {
            return;
        };
        let rank = self.shape(data).len();
        let attribute = |name: &str| match node.attributes.get(name) {
            Some(Attribute::Int(value)) => Some(*value),
            _ => None,
        };
        let at = |axis| Resized { axis, ..wanted };
        match node.op_type.as_str() {
            "Gather" => {
                let axis = attribute("axis").unwrap_or(0);
                let axis = if axis < 0 { axis + rank as i64 } else { axis } as usize;
                let indices = (output.len() + 1).saturating_sub(rank);
                let (position, axis) = match wanted.axis {
                    before if before < axis => (0, before),
                    inside if inside < axis + indices => (1, inside - axis),
                    after => (0, after + 1 - indices),
                };
                if let Some(input) = inputs.get_mut(position) {
                    self.want(node, input, at(axis));
                }
            }
            "Transpose" => {
                let axis = match node.attributes.get("perm") {
                    Some(Attribute::Ints(perm)) => perm.get(wanted.axis).map(|&axis| axis as usize),
                    _ => rank.checked_sub(wanted.axis + 1),
                };
                if let Some(axis) = axis.filter(|&axis| axis < rank) {
                    self.want(node, &mut inputs[0], at(axis));
                }
            }
            "Reshape" | "Unsqueeze" | "Squeeze" | "Flatten" => {
                let before = output[..wanted.axis].iter().product();
                if let Some(axis) = covering_axis(self.shape(data), before, wanted.exported) {
                    self.want(node, &mut inputs[0], at(axis));
                }
            }
            "Expand" => {
                self.resize_target(node, inputs, output.len() - wanted.axis, wanted);
                self.supply_broadcast(node, &mut inputs[..1], output.len(), wanted);
            }
            _ => self.supply_broadcast(node, inputs, output.len(), wanted),
        }
    }

    /// Replaces an extent of Expand's target shape, counted from the last one. True if it was there.
    fn resize_target(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
        from_end: usize,
        resized: Resized,
    ) -> bool {
        let target = inputs.get(1).copied().flatten();
        let target = target.and_then(|target| self.constant(target));
        let Some(mut extents) = target.map(|target| target.i64s().to_vec()) else {
            return false;
        };
        let axis = extents.len().checked_sub(from_end);
        let Some(extent) = axis.and_then(|axis| extents.get_mut(axis)) else {
            return false;
        };
        if *extent != resized.exported as i64 {
            return false;
        }
        *extent = resized.now as i64;
        let target = Tensor::from_i64(&[extents.len()], extents);
        inputs[1] = Some(self.replacement(node, target));
        true
    }

    /// Asks for every input whose axis, counted from the last one, has the exported extent.
    fn supply_broadcast(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
        rank: usize,
        wanted: Resized,
    ) {
        for input in inputs {
            let Some(index) = *input else { continue };
            let axis = (self.shape(index).len() + wanted.axis).checked_sub(rank);
            if let Some(axis) = axis.filter(|&axis| self.shape(index)[axis] == wanted.exported)
                && wanted.exported > 1
            {
                self.want(node, input, Resized { axis, ..wanted });
            }
        }
    }

    /// Replaces a target shape in which the exported batch stands.
    fn rebatch_reshape(&mut self, node: &RawNode, inputs: &mut [Option<usize>]) {
        let (Some(exported), [Some(data), Some(target)]) = (&self.inference.exported, &*inputs)
        else {
            return;
        };
        let value = &self.draft.values[*data];
        let old_output = node
            .outputs
            .first()
            .and_then(|name| exported.shape_of(name));
        let (Some(old_input), Some(old_output)) = (exported.shape_of(&value.name), old_output)
        else {
            return;
        };
        let Some(shape) = self
            .constant(*target)
            .filter(|target| target.dtype() == DType::I64)
        else {
            return;
        };
        if let Some(shape) = reshape_target(shape.i64s(), old_input, old_output, &value.ty.shape) {
            let target = Tensor::from_i64(&[shape.len()], shape);
            inputs[1] = Some(self.replacement(node, target));
        }
    }

    /// Extends indices that would pick from the exported samples only.
    fn rebatch_gather_elements(&mut self, node: &RawNode, inputs: &mut [Option<usize>]) {
        let [Some(data), indices] = inputs else {
            return;
        };
        if let (Some(resized), Some(index)) = (self.resized(*data), *indices)
            && self.resized(index).is_none()
            && self.shape(index).get(resized.axis) == Some(&resized.exported)
        {
            self.want(node, indices, resized);
        }
    }

    /// Extends indices into rows of several samples.
    fn rebatch_gather(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
    ) -> Result<(), OpError> {
        let axis = match node.attributes.get("axis") {
            Some(Attribute::Int(axis)) => *axis,
            _ => 0,
        };
        let [Some(data), _] = *inputs else {
            return Ok(());
        };
        let rank = self.shape(data).len() as i64;
        let axis = if axis < 0 { axis + rank } else { axis };
        match self.resized(data) {
            Some(resized) if resized.axis as i64 == axis => {
                self.rebatch_indices(node, inputs, resized, None)
            }
            _ => Ok(()),
        }
    }

    /// As for [`Self::rebatch_gather`], where a component of each index goes along the batch axis.
    fn rebatch_gather_nd(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
    ) -> Result<(), OpError> {
        let [Some(data), Some(indices)] = *inputs else {
            return Ok(());
        };
        let first = match node.attributes.get("batch_dims") {
            Some(Attribute::Int(count)) => *count as usize,
            _ => 0,
        };
        let depth = self.shape(indices).last().copied().unwrap_or(0);
        let Some(resized) = self.resized(data) else {
            return Ok(());
        };
        match resized.axis.checked_sub(first) {
            None if self.resized(indices).is_none() => {
                self.want(node, &mut inputs[1], resized);
                Ok(())
            }
            Some(component) if component < depth => {
                self.rebatch_indices(node, inputs, resized, Some(component))
            }
            _ => Ok(()),
        }
    }

    /// Replaces the indices, input 1, of a node that picks along the batch axis of its data.
    fn rebatch_indices(
        &mut self,
        node: &RawNode,
        inputs: &mut [Option<usize>],
        data: Resized,
        component: Option<usize>,
    ) -> Result<(), OpError> {
        let (Some(exported), Some(Some(indices))) = (self.inference.exported, inputs.get(1)) else {
            return Ok(());
        };
        let samples = Samples {
            exported: exported.batch,
            requested: exported.requested,
            rows: data.exported / exported.batch,
        };
        let numbered = self
            .constant(*indices)
            .filter(|indices| indices.dtype() == DType::I64)
            .map(|indices| sample_rows(indices, component, samples));
        match numbered {
            // They follow from what is fed to the model.
            None => Ok(()),
            Some(Some(numbered)) => {
                inputs[1] = Some(self.replacement(node, numbered));
                Ok(())
            }
            Some(None) => Err(OpError::Input {
                node: node.name.clone(),
                op: node.op_type.clone(),
                input: "indices".into(),
                problem: format!("pick from the {} exported samples", exported.batch),
            }),
        }
    }
}
