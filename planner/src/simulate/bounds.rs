//! What no pipeline can beat: bounds on the period that loads, depths, all-reduces and flushes impose.

use crate::cost::{Evaluation, Machine};
use crate::schedule::{Pace, ScheduleKind, StageShape};

/// A lower bound on the period, and what imposes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Seconds per minibatch.
    pub seconds: f64,
    /// What imposes it.
    pub cause: Cause,
}

/// What can hold a pipeline back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The load of a resource of this stage.
    Load {
        /// Stage.
        stage: usize,
    },
    /// The load of a server's network card.
    Card {
        /// Server.
        server: usize,
    },
    /// The way of a minibatch from this stage's forward to its backward, with only so many in flight.
    InFlight {
        /// Stage.
        stage: usize,
    },
    /// The same way and the all-reduce behind it, which a forward waits for.
    AllReduce {
        /// Stage.
        stage: usize,
    },
    /// The batch has to be through before the next one begins; this stage's share of it and the way to and from it.
    Flush {
        /// Stage.
        stage: usize,
    },
    /// Stages and links waiting for each other; no single resource or cycle explains it.
    Waiting,
}

/// R of each stage: seconds from the start of a forward to the end of its backward when nothing else is under way.
#[must_use]
pub fn round_trips(evaluation: &Evaluation, machine: &Machine) -> Vec<f64> {
    let mut trips = vec![0.0f64; evaluation.stages.len()];
    for stage in (0..trips.len()).rev() {
        let behind = evaluation
            .links
            .iter()
            .filter(|l| l.from == stage && l.gradients > 0.0)
            .map(|l| {
                let there_and_back =
                    (l.activations + l.gradients) * evaluation.quickest(l.from, l.to, machine);
                there_and_back + 2.0 * machine.latency + trips[l.to]
            })
            .fold(0.0, f64::max);
        trips[stage] = own_seconds(evaluation, stage, machine) + behind;
    }
    trips
}

/// Seconds of a forward and a backward on the fastest device that the stage uses.
fn own_seconds(evaluation: &Evaluation, stage: usize, machine: &Machine) -> f64 {
    let sums = &evaluation.stages[stage].sums;
    let bytes = sums.traffic.sent() + sums.traffic.received();
    let own = sums.forward + sums.backward + machine.message_s_per_byte * bytes;
    own / evaluation.fastest(stage)
}

/// Seconds that a minibatch takes at least from the first stage's forward to a stage's, and from that stage's backward
/// to the end of the first stage's. None for stages that send the first one no gradients.
fn ways_to_and_from(evaluation: &Evaluation, machine: &Machine) -> Vec<Option<f64>> {
    let mut ways: Vec<Option<f64>> = vec![None; evaluation.stages.len()];
    ways[0] = Some(0.0);
    for l in evaluation.links.iter().filter(|l| l.gradients > 0.0) {
        // Links are ordered: the way to where this one begins is known.
        let Some(before) = ways[l.from] else {
            continue;
        };
        let sums = &evaluation.stages[l.from].sums;
        let own = (sums.forward + sums.backward) / evaluation.fastest(l.from);
        let bytes = l.activations + l.gradients;
        let way = before
            + own
            + bytes * evaluation.quickest(l.from, l.to, machine)
            + 2.0 * machine.latency;
        ways[l.to] = Some(ways[l.to].map_or(way, |other| other.max(way)));
    }
    ways
}

/// Every bound on the period that these shapes impose.
#[must_use]
pub fn bounds(
    evaluation: &Evaluation,
    pace: Pace,
    shapes: &[StageShape],
    machine: &Machine,
) -> Vec<Bound> {
    let trips = round_trips(evaluation, machine);
    let ways = ways_to_and_from(evaluation, machine);
    let mut bounds: Vec<Bound> = evaluation
        .cards
        .iter()
        .map(|card| Bound {
            seconds: card.seconds,
            cause: Cause::Card {
                server: card.server,
            },
        })
        .collect();
    for (stage, (e, shape)) in evaluation.stages.iter().zip(shapes).enumerate() {
        bounds.push(Bound {
            seconds: e.loads.largest(),
            cause: Cause::Load { stage },
        });
        let r = shape.replicas as f64;
        let step = e.sums.step + machine.reduce_core_s(shape.replicas, e.sums.parameters);
        let step = step / evaluation.fastest(stage);
        // A replica's forward waits for the backward K rounds before, and for the step between them.
        let own_step = if pace.has_own_rounds() { step } else { 0.0 };
        if pace.kind != ScheduleKind::Gpipe {
            bounds.push(Bound {
                seconds: (trips[stage] + own_step) / (r * shape.depth as f64),
                cause: Cause::InFlight { stage },
            });
        }
        let slowest = evaluation.slowest_ring_edge(stage, machine);
        let chunk = e.sums.parameters / r * slowest + machine.latency;
        let ring = 2.0 * (r - 1.0) * chunk;
        if pace.flushes() {
            let batch = pace.microbatches as f64;
            // A replica carries its share of a batch one after the other, and the batches one after the other.
            let own = pace.microbatches / shape.replicas;
            let each = (e.sums.forward + e.sums.backward) / evaluation.fastest(stage);
            bounds.push(Bound {
                seconds: (own as f64 * each + step + ring) / batch,
                cause: Cause::Flush { stage },
            });
            if let Some(way) = ways[stage] {
                bounds.push(Bound {
                    seconds: (way + own as f64 * each) / batch,
                    cause: Cause::Flush { stage },
                });
            }
        } else if shape.replicas > 1 {
            let (before, minibatches) = if pace.has_own_rounds() {
                (trips[stage], r * (shape.depth + shape.delay) as f64)
            } else {
                let lag = pace.lag(shapes, stage);
                (0.0, (lag * pace.microbatches) as f64)
            };
            bounds.push(Bound {
                seconds: (before + ring + step) / minibatches,
                cause: Cause::AllReduce { stage },
            });
            if pace.has_own_rounds() {
                // Between a step and the one d + 1 rounds behind it a replica runs at least a forward and a backward,
                // and behind them waits for the all-reduce, however many minibatches are in flight.
                let rounds = (1 + shape.delay) as f64;
                bounds.push(Bound {
                    seconds: (own_seconds(evaluation, stage, machine) + ring + step) / (r * rounds),
                    cause: Cause::AllReduce { stage },
                });
            }
        }
    }
    bounds
}

/// The largest bound on the period that these shapes impose.
#[must_use]
pub fn bound(evaluation: &Evaluation, pace: Pace, shapes: &[StageShape], machine: &Machine) -> f64 {
    let bounds = bounds(evaluation, pace, shapes, machine);
    bounds.iter().map(|b| b.seconds).fold(0.0, f64::max)
}
