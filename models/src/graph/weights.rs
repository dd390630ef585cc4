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

    /// Whether a constant in a weight's place of an operator is one, or is computed from some.
    ///
    /// For additions and products that place may also hold what is no weight: normalisation of the data
    /// (before any parameter), attention masks (with the lowest float in them, or the same for all heads and
    /// places), scale factors (one element), tables of sines. A subtrahend or divisor is never one. What is looked up is one only as the file
    /// has it.
    pub(super) fn is_weight(&self, op_type: &str, index: usize, after_parameters: bool) -> bool {
        let Kind::Constant(tensor, source) = &self.draft.values[index].kind else {
            return false;
        };
        if source.leaves.is_empty() {
            return false;
        }
        let is_mask = || {
            let mut values = tensor.f32s().iter();
            values.any(|value| !value.is_finite() || *value <= f32::MIN / 2.0)
                || (matches!(tensor.shape(), [_, 1, _, _]) && tensor.is_one_number())
        };
        let is_inner = || {
            let mut leaves = source.leaves.iter();
            leaves.any(|leaf| self.draft.inner.contains(leaf))
        };
        match op_type {
            // A function's or a branch's own terms and factors are constants of its formula.
            "Add" | "Sum" | "Mul" if source.made == Made::Computed || is_inner() => false,
            "Add" | "Sum" => after_parameters && !is_mask(),
            "Mul" => after_parameters && tensor.len() > 1 && !is_mask(),
            "Sub" | "Div" => false,
            "Gather" | "GatherElements" => source.made == Made::Moved,
            _ => true,
        }
    }

    /// Where what a folded node gives comes from.
    pub(super) fn source_of(&self, node: &RawNode, inputs: &[Option<usize>]) -> Source {
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
        const SCALES: &[&str] = &["Add", "Div", "Mul", "Neg", "Sub"];
        let made = match node.op_type.as_str() {
            op if MOVES.contains(&op) => Made::Moved,
            op if SCALES.contains(&op) => Made::Scaled,
            _ => Made::Computed,
        };
        let mut source = Source::default();
        let mut terms = 0;
        for &input in inputs.iter().flatten() {
            let of_input = self.leaves_of(input);
            let leaves = match made {
                Made::Moved => of_input.leaves,
                // Numbers and constant nodes belong to the formula.
                _ if self.draft.values[input].ty.shape.iter().product::<usize>() == 1 => continue,
                _ => of_input
                    .leaves
                    .into_iter()
                    .filter(|leaf| self.is_initializer(leaf))
                    .collect(),
            };
            terms += 1;
            if !leaves.is_empty() {
                source.made = source.made.max(of_input.made);
                source.leaves.extend(leaves);
            }
        }
        let made = match made {
            Made::Scaled if terms > 1 => Made::Computed,
            made => made,
        };
        source.made = source.made.max(made);
        source
    }

    pub(super) fn leaves_of(&self, index: usize) -> Source {
        match &self.draft.values[index].kind {
            Kind::Constant(_, source) => source.clone(),
            _ => Source::default(),
        }
    }
}

/// What a constant is made from.
#[derive(Clone, Debug, Default)]
pub(super) struct Source {
    /// Initializers and constant nodes.
    pub leaves: BTreeSet<String>,
    made: Made,
}

/// What was done to leaves, from the least to the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Made {
    /// Their elements were moved around.
    #[default]
    Moved,
    /// And scaled or shifted by numbers, as normalisations with a scale of 1 + w do.
    Scaled,
    /// Anything else, as for weights of a given norm.
    Computed,
}

impl Source {
    /// Of a leaf.
    pub fn leaf(name: &str) -> Self {
        Source {
            leaves: BTreeSet::from([name.to_owned()]),
            made: Made::Moved,
        }
    }

    /// Leaves whose elements the constant only moves around.
    pub fn moved(self) -> BTreeSet<String> {
        match self.made {
            Made::Moved => self.leaves,
            Made::Scaled | Made::Computed => BTreeSet::new(),
        }
    }
}
