//! Why a plan is as fast as it is, in words.

use crate::cost::{CardLoad, Evaluation, Formula, Machine, StageEvaluation};
use crate::graph::LayerGraph;
use crate::schedule::ScheduleKind;
use crate::simulate::bounds::Cause;
use crate::simulate::depth::{CLOSE_ENOUGH, Choice};
use crate::units::{show_bytes, show_time};

/// The resource with the largest load.
pub(super) fn bottleneck(
    graph: &LayerGraph,
    evaluation: &Evaluation,
    formula: Formula,
    machine: &Machine,
) -> String {
    let Some(stage) = evaluation.objective_stage(formula, machine) else {
        let card = evaluation.fullest_card();
        return card.map_or_else(String::new, |card| card_name(evaluation, card));
    };
    if formula != Formula::Ours {
        return bottleneck_stage(graph, evaluation, stage, formula);
    }
    let e = &evaluation.stages[stage];
    let place = place(graph, e, stage);
    let loads = e.loads;
    if loads.device() >= loads.network() {
        let shares = parts(&[
            (
                "forward and backward",
                (e.sums.forward + e.sums.backward) / e.replicas as f64,
            ),
            ("optimizer step", e.sums.step / e.replicas as f64),
            ("communication on the core", loads.core),
        ]);
        format!("device of {place}: {shares}")
    } else {
        let shares = parts(&[
            ("activations and gradients", loads.traffic),
            ("all-reduce", loads.sync),
        ]);
        format!("link of {place}: {shares}")
    }
}

/// The stage with the largest load, as another planner's formula counts it.
pub(super) fn bottleneck_stage(
    graph: &LayerGraph,
    evaluation: &Evaluation,
    stage: usize,
    formula: Formula,
) -> String {
    let place = place(graph, &evaluation.stages[stage], stage);
    format!("{place}, as the formula `{}` counts it", formula.name())
}

/// A server's network card and what it carries.
pub(super) fn card_name(evaluation: &Evaluation, card: &CardLoad) -> String {
    let placement = evaluation.placement.as_ref();
    let name = placement.map_or("", |p| p.fabric.names[card.server].as_str());
    format!(
        "network card of server {name}: {} leave and {} reach it per minibatch",
        show_bytes(card.bytes.out),
        show_bytes(card.bytes.into)
    )
}

/// What keeps the period above the bottleneck, if it is more than a little.
pub(super) fn stall(
    graph: &LayerGraph,
    choice: &Choice,
    evaluation: &Evaluation,
) -> Option<String> {
    if !choice.prediction.simulated {
        return Some(
            "not simulated, the pipeline is too long: the period is its largest analytic bound"
                .to_owned(),
        );
    }
    if choice.prediction.period <= evaluation.bottleneck * (1.0 + CLOSE_ENOUGH) {
        return None;
    }
    let named = |stage: usize| place(graph, &evaluation.stages[stage], stage);
    Some(match choice.cause {
        _ if choice.pace.kind == ScheduleKind::ModelParallel => {
            "one minibatch at a time: the period is its way through all stages and back".to_owned()
        }
        _ if choice.pace.kind == ScheduleKind::DataParallel => {
            "all replicas wait for the all-reduce of the last gradients before the next minibatch"
                .to_owned()
        }
        Cause::InFlight { stage } => format!(
            "{} has {} minibatches in flight per replica, and each takes longer than that many periods to come back",
            named(stage),
            choice.shapes[stage].depth
        ),
        Cause::AllReduce { stage } => format!(
            "{} waits for its all-reduce before it can go on to a newer version",
            named(stage)
        ),
        Cause::Flush { stage } => format!(
            "a batch of {} microbatches is through all stages before the next one begins; {} sets the pace",
            choice.pace.microbatches,
            named(stage)
        ),
        Cause::Load { .. } | Cause::Card { .. } | Cause::Waiting => {
            "stages and links wait for each other in turn; no single one is full".to_owned()
        }
    })
}

pub(super) fn place(graph: &LayerGraph, e: &StageEvaluation, stage: usize) -> String {
    // Layers that are kept together are one in the graph, named by its first.
    let members = |layer: usize| &graph.layer(layer).members;
    let (first, last) = (
        members(e.layers.start).first(),
        members(e.layers.end - 1).last(),
    );
    let layers = match (first, last) {
        (Some(first), Some(last)) if first != last => format!("{first} .. {last}"),
        (Some(only), _) => only.clone(),
        (None, _) => String::new(),
    };
    format!("stage {stage} ({layers}, x{})", e.replicas)
}

/// Parts that are there, largest share named with its time.
fn parts(parts: &[(&str, f64)]) -> String {
    let shown: Vec<String> = parts
        .iter()
        .filter(|(_, seconds)| *seconds > 0.0)
        .map(|(name, seconds)| format!("{name} {}", show_time(*seconds)))
        .collect();
    if shown.is_empty() {
        return "nothing takes time".to_owned();
    }
    shown.join(" + ")
}
