//! The fastest plan among those around the one with the smallest bottleneck.
//!
//! The bottleneck is what solvers can prove, the simulated period is what a user gets. Where stages and links wait for
//! each other the second is the larger one, and a plan with a slightly larger bottleneck may well be faster: a replica
//! less, a boundary moved, a device left idle.

use super::search::{Found, search_quickly};
use super::space::Space;
use super::{Judged, PlanningError, Request, Scope, judge, neighbours};
use crate::cost::{Formula, Machine};
use crate::plan::PassedOver;
use crate::simulate::depth::CLOSE_ENOUGH;

/// What is faster by less is not worth a larger bottleneck.
const WORTH: f64 = 5e-3;

/// Plans around a plan that are simulated, and how often the best of them takes its place.
const MOST_TRIED: usize = 4;
const MOST_MOVES: usize = 3;

/// Devices that are left idle at most to find another plan to begin with.
const MOST_IDLE: usize = 3;

/// Shares of the links' speed for which another plan is found to begin with.
const SLOWER_LINKS: [f64; 2] = [0.75, 0.5];

/// Plans whose simulation takes more operations are left as they are: so many simulations would take long.
const MOST_OPERATIONS: usize = 120_000;

/// Graphs of more layers are searched once: again would take long.
const MOST_LAYERS: usize = 500;

/// A plan and how it is judged.
type Candidate = (Found, Judged);

/// The plan with the least simulated period that is found around this one, and this one if it is passed over.
pub(super) fn polish(
    space: &Space,
    machine: &Machine,
    request: &Request,
    (found, judged): Candidate,
) -> Result<(Candidate, Option<PassedOver>), PlanningError> {
    let period = judged.choice.prediction.period;
    let close = judged.evaluation.bottleneck * (1.0 + CLOSE_ENOUGH);
    if request.formula != Formula::Ours
        || matches!(request.scope, Scope::Given(_))
        || period <= close
        || judged.choice.prediction.operations > MOST_OPERATIONS
    {
        return Ok(((found, judged), None));
    }
    let passed_over = PassedOver {
        configuration: found.partition.configuration(),
        bottleneck_s: judged.evaluation.bottleneck,
        period_s: period,
    };
    let bound = found.lower_bound;
    let start = (found, judged);
    let mut best: Option<Candidate> = None;
    let idle = (1..=MOST_IDLE).map(|idle| (idle, 1.0));
    // A plan for slower links leaves these some slack.
    let slack = SLOWER_LINKS.into_iter().map(|share| (0, share));
    for (idle, share) in idle.chain(slack) {
        let other = elsewhere(space, machine, request, (idle, share))?;
        if let Some(other) = other
            && is_faster(&other.1, &best.as_ref().unwrap_or(&start).1)
        {
            best = Some(other);
        }
    }
    for _ in 0..MOST_MOVES {
        let from = best.as_ref().unwrap_or(&start);
        let Some(other) = fastest_neighbour(machine, request, from)? else {
            break;
        };
        best = Some(other);
    }
    let worth = |other: &Candidate| other.1.choice.prediction.period < period * (1.0 - WORTH);
    let Some((mut found, judged)) = best.filter(worth) else {
        return Ok((start, None));
    };
    let value = judged.evaluation.bottleneck;
    found.lower_bound = bound.min(value);
    found.proved = value <= bound * (1.0 + 1e-9);
    Ok(((found, judged), Some(passed_over)))
}

fn is_faster(a: &Judged, b: &Judged) -> bool {
    a.choice.prediction.period < b.choice.prediction.period
}

/// The plan with the smallest bottleneck that leaves so many devices idle, or for links of a share of their speed.
fn elsewhere(
    space: &Space,
    machine: &Machine,
    request: &Request,
    (idle, share): (usize, f64),
) -> Result<Option<Candidate>, PlanningError> {
    // On servers it would have to be said which devices are idle; links of one process are never slow.
    if !request.cluster.servers.is_empty()
        || request.cluster.local
        || request.cluster.devices <= idle
        || space.graph.len() > MOST_LAYERS
    {
        return Ok(None);
    }
    let mut other = request.clone();
    other.cluster.devices -= idle;
    let slower = Machine {
        bandwidth: machine.bandwidth * share,
        ..*machine
    };
    match search_quickly(space, &slower, &other) {
        Ok(found) => {
            let judged = found.judge(machine, request)?;
            Ok(Some((found, judged)))
        }
        Err(PlanningError::Infeasible(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The fastest of the plans one step away, if one is faster.
fn fastest_neighbour(
    machine: &Machine,
    request: &Request,
    (found, judged): &Candidate,
) -> Result<Option<Candidate>, PlanningError> {
    let period = judged.choice.prediction.period;
    let near = neighbours::around(&found.graph, machine, request, &found.partition);
    let promising = near
        .into_iter()
        .filter(|near| near.bottleneck < period * (1.0 - WORTH));
    let mut best: Option<Candidate> = None;
    for near in promising.take(MOST_TRIED) {
        let placement = near.placement.as_ref();
        let other = judge(&found.graph, machine, &near.partition, placement, request)?;
        let than = best.as_ref().map_or(judged, |(_, best)| best);
        if is_faster(&other, than) {
            let found = Found {
                graph: found.graph.clone(),
                partition: near.partition,
                placement: near.placement,
                judged: None,
                lower_bound: found.lower_bound,
                proved: false,
            };
            best = Some((found, other));
        }
    }
    Ok(best.filter(|(_, other)| other.choice.prediction.period < period * (1.0 - WORTH)))
}
