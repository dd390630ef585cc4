//! Which constants of a file are weights and running statistics, and under which name they are trained.

use std::collections::BTreeSet;

use super::GraphErrorKind;
use super::infer::{Kind, Walk};
use super::nodes::RawNode;

impl Walk<'_> {
    /// Whether an Identity of an initializer gives a tensor of its own rather than another name for it.
    ///
    /// A running statistic always does: nothing can be shared with it that is not replaced with it.
    pub(super) fn stands_alone(&self, node: &RawNode) -> bool {
        let (source, output) = (&node.inputs[0], &node.outputs[0]);
        let alias =
            || self.roles.parameters.contains(source) && !self.roles.states.contains(source);
        self.is_initializer(source)
            && (self.inference.options.untie || self.roles.states.contains(output) || !alias())
    }

    /// The leaf that is trained in place of this one: while weights stay tied, the initializer behind it.
    pub(super) fn trained_leaf(&self, leaf: String) -> String {
        let source = self.inference.aliases.get(leaf.as_str());
        match source.filter(|source| !self.roles.states.contains(**source)) {
            Some(source) if !self.inference.options.untie => source.to_string(),
            _ => leaf,
        }
    }

    /// Refuses a weight that stands where it cannot be written back.
    pub(super) fn check_place(&self, node: &RawNode, leaf: &str) -> Result<(), GraphErrorKind> {
        if self.draft.inner.contains(leaf) {
            return Err(GraphErrorKind::InnerWeight {
                node: node.name.clone(),
                weight: leaf.into(),
            });
        }
        Ok(())
    }

    /// Whether a constant in a weight's place of an operator is one.
    ///
    /// For additions and products that place may also hold what is no weight: normalisation of the data
    /// (before any parameter), attention masks (with the lowest float in them), scale factors (one
    /// element). A subtrahend or divisor is never one.
    pub(super) fn is_weight(&self, op_type: &str, index: usize, after_parameters: bool) -> bool {
        let Kind::Constant(tensor, leaves) = &self.draft.values[index].kind else {
            return false;
        };
        if leaves.is_empty() {
            return false;
        }
        let is_mask = || {
            tensor
                .f32s()
                .iter()
                .any(|value| !value.is_finite() || *value <= f32::MIN / 2.0)
        };
        match op_type {
            // A function's or a branch's own terms and factors are constants of its formula.
            "Add" | "Sum" | "Mul" if leaves.iter().any(|leaf| self.draft.inner.contains(leaf)) => {
                false
            }
            "Add" | "Sum" => after_parameters && !is_mask(),
            "Mul" => after_parameters && tensor.len() > 1 && !is_mask(),
            "Sub" | "Div" => false,
            _ => true,
        }
    }

    /// Leaves whose elements a folded node only moves around.
    pub(super) fn moved_leaves(
        &self,
        node: &RawNode,
        inputs: &[Option<usize>],
    ) -> BTreeSet<String> {
        const MOVES: &[&str] = &[
            "Concat",
            "DepthToSpace",
            "Expand",
            "Flatten",
            "Gather",
            "GatherElements",
            "GatherND",
            "Identity",
            "Reshape",
            "Slice",
            "SpaceToDepth",
            "Split",
            "Squeeze",
            "Tile",
            "Transpose",
            "Unsqueeze",
        ];
        if !MOVES.contains(&node.op_type.as_str()) {
            return BTreeSet::new();
        }
        inputs
            .iter()
            .flatten()
            .flat_map(|&input| self.leaves_of(input))
            .collect()
    }

    pub(super) fn leaves_of(&self, index: usize) -> BTreeSet<String> {
        match &self.draft.values[index].kind {
            Kind::Constant(_, leaves) => leaves.clone(),
            _ => BTreeSet::new(),
        }
    }
}
