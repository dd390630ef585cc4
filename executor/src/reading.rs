//! How a model is read: as it was profiled, unless flags say otherwise.

use std::collections::BTreeMap;

use models::graph::BuildOptions;
use models::loss::{Classes, Loss};
use planner::Plan;
use planner::profile::{LossKind, Reading};

/// What a user says about the reading of a model; nothing leaves it as in the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Sizes of open dimensions by name, the batch aside.
    pub dims: BTreeMap<String, usize>,
    /// Whether Dropout and BatchNormalization in inference form train all the same.
    pub training_form: Option<bool>,
    /// Whether batch norm in inference form trains all the same.
    pub train_batch_norm: Option<bool>,
    /// Whether weights that only Identity nodes tell apart are trained apart.
    pub untie: Option<bool>,
    /// The output that the loss reads.
    pub loss_output: Option<String>,
    /// What is minimised.
    pub loss: Option<LossKind>,
}

impl Overrides {
    /// How the model of a plan is read.
    pub fn apply(&self, plan: &Plan) -> Reading {
        let planned = plan.reading.clone().unwrap_or_default();
        let mut dims = planned.dims;
        dims.extend(self.dims.clone());
        Reading {
            dims,
            training_form: self.training_form.unwrap_or(planned.training_form),
            train_batch_norm: self.train_batch_norm.unwrap_or(planned.train_batch_norm),
            untie: self.untie.unwrap_or(planned.untie),
            loss_output: self.loss_output.clone().or(planned.loss_output),
            loss: self.loss.unwrap_or(planned.loss),
        }
    }

    /// One line for each flag that contradicts what was profiled. Empty where the plan does not say how that was.
    pub fn contradictions(&self, plan: &Plan) -> Vec<String> {
        let Some(planned) = &plan.reading else {
            return Vec::new();
        };
        let named = |name: &Option<String>| name.clone().unwrap_or("the first".to_owned());
        let loss = |loss| match loss {
            LossKind::CrossEntropy => "cross-entropy",
            LossKind::Mse => "mse",
        };
        let batch_norm = |train| if train { "train" } else { "file" };
        let wanted = self.apply(plan);
        let mut pairs: Vec<(String, String, String)> = vec![
            (
                "--training-form".into(),
                wanted.training_form.to_string(),
                planned.training_form.to_string(),
            ),
            (
                "--bn".into(),
                batch_norm(wanted.train_batch_norm).into(),
                batch_norm(planned.train_batch_norm).into(),
            ),
            (
                "--untie".into(),
                wanted.untie.to_string(),
                planned.untie.to_string(),
            ),
            (
                "--loss-output".into(),
                named(&wanted.loss_output),
                named(&planned.loss_output),
            ),
            (
                "--loss".into(),
                loss(wanted.loss).into(),
                loss(planned.loss).into(),
            ),
        ];
        pairs.extend(self.dims.iter().map(|(name, size)| {
            let planned = planned.dims.get(name);
            let planned = planned.map_or("nothing".to_owned(), ToString::to_string);
            (format!("--dim {name}"), size.to_string(), planned)
        }));
        let differ = pairs
            .into_iter()
            .filter(|(_, wanted, planned)| wanted != planned);
        differ
            .map(|(flag, wanted, planned)| {
                format!(
                    "{flag}={wanted} where the model was profiled with {planned}: trained as the flag says, the plan's \
                     predictions are for the other"
                )
            })
            .collect()
    }
}

/// The options of a graph that is read so.
pub fn build_options(reading: &Reading, batch_size: usize) -> BuildOptions {
    BuildOptions {
        batch: Some(batch_size),
        dims: reading.dims.clone(),
        training_form: reading.training_form,
        train_batch_norm: reading.train_batch_norm,
        untie: reading.untie,
        loss_output: reading.loss_output.clone(),
    }
}

/// The loss, with classes as the user says where it has any.
pub fn loss(reading: &Reading, classes: Classes) -> Loss {
    match reading.loss {
        LossKind::CrossEntropy => Loss::CrossEntropy(classes),
        LossKind::Mse => Loss::Mse,
    }
}
