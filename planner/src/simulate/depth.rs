//! Chooses each stage's depth K and delay d: as shallow as the bottleneck allows, within memory.
//!
//! The paper's NOAM keeps every worker busy only while links are free. Where the simulated period shows that it does
//! not suffice, depths grow with the time a minibatch takes from a stage's forward to its backward, and a replicated
//! stage may let its all-reduce lag one round.

use super::{Prediction, SimulationError, predict};
use crate::cost::{Evaluation, Machine};
use crate::schedule::{StageShape, noam};

/// A period within this of the bottleneck needs no deeper pipeline.
pub const CLOSE_ENOUGH: f64 = 0.02;

/// Simulated operations after which no other depths are tried: large plans take long to simulate.
const MOST_OPERATIONS: usize = 1_500_000;

/// What is deeper has to be faster by this much to be worth its memory and staleness.
const WORTH: f64 = 1e-3;

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
    /// Stages and links waiting for each other; no single resource or cycle explains it.
    Waiting,
}

/// Depths and delays, and what they give.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// One per stage.
    pub shapes: Vec<StageShape>,
    /// What the simulation says.
    pub prediction: Prediction,
    /// What the period is held up by.
    pub cause: Cause,
}

/// R of each stage: seconds from the start of a forward to the end of its backward when nothing else is under way.
#[must_use]
pub fn round_trips(evaluation: &Evaluation, machine: &Machine) -> Vec<f64> {
    let mut trips = vec![0.0f64; evaluation.stages.len()];
    for (stage, e) in evaluation.stages.iter().enumerate().rev() {
        let traffic = e.sums.traffic;
        let bytes = traffic.sent() + traffic.received();
        let own = e.sums.forward + e.sums.backward + machine.message_s_per_byte * bytes;
        let own = own / evaluation.fastest(stage);
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
        trips[stage] = own + behind;
    }
    trips
}

/// Every bound on the period that these shapes impose.
#[must_use]
pub fn bounds(evaluation: &Evaluation, shapes: &[StageShape], machine: &Machine) -> Vec<Bound> {
    let trips = round_trips(evaluation, machine);
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
        // A replica's forward waits for the backward and the step K rounds before.
        let step = e.sums.step + machine.reduce_core_s(shape.replicas, e.sums.parameters);
        let step = step / evaluation.fastest(stage);
        bounds.push(Bound {
            seconds: (trips[stage] + step) / (r * shape.depth as f64),
            cause: Cause::InFlight { stage },
        });
        if shape.replicas > 1 {
            let slowest = evaluation.slowest_ring_edge(stage, machine);
            let chunk = e.sums.parameters / r * slowest + machine.latency;
            let ring = 2.0 * (r - 1.0) * chunk;
            bounds.push(Bound {
                seconds: (trips[stage] + ring + step) / (r * (shape.depth + shape.delay) as f64),
                cause: Cause::AllReduce { stage },
            });
        }
    }
    bounds
}

/// The shallowest depths whose simulated period is within 2 % of the bottleneck, else those with the least period.
///
/// # Errors
/// Only if the evaluation's stages make no pipeline.
pub fn choose(
    evaluation: &Evaluation,
    machine: &Machine,
    memory: f64,
) -> Result<Choice, SimulationError> {
    let goal = evaluation.bottleneck * (1.0 + CLOSE_ENOUGH);
    // Zero: NOAM. One: the time of the round trip filled. More: slack for waiting in between.
    let mut candidates: Vec<Vec<StageShape>> = Vec::new();
    for slack in [0.0, 1.0, 1.25, 1.5, 2.0, 3.0] {
        for delay in [0, 1] {
            let shapes = shapes(evaluation, machine, memory, slack, delay);
            if !candidates.contains(&shapes) {
                candidates.push(shapes);
            }
        }
    }
    // No simulated period is below its bound: what cannot reach the goal waits until nothing else has.
    let bounds: Vec<f64> = candidates
        .iter()
        .map(|shapes| bound(evaluation, shapes, machine))
        .collect();
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    order.sort_by_key(|&candidate| bounds[candidate] > goal);
    let mut left = MOST_OPERATIONS;
    let mut simulated: Vec<(usize, Prediction)> = Vec::new();
    let mut least = f64::INFINITY;
    for candidate in order {
        if left == 0 || bounds[candidate] >= least * (1.0 - WORTH) {
            continue;
        }
        let prediction = predict(evaluation, &candidates[candidate], machine)?;
        left = left.saturating_sub(prediction.operations);
        if prediction.period <= goal {
            let enough = (candidates[candidate].clone(), prediction);
            let (shapes, prediction) = trim(evaluation, machine, enough, goal, left);
            return Ok(explain(evaluation, machine, shapes, prediction));
        }
        least = least.min(prediction.period);
        simulated.push((candidate, prediction));
    }
    // The shallowest of those that are about as fast as the fastest.
    let (candidate, prediction) = simulated
        .into_iter()
        .filter(|(_, prediction)| prediction.period <= least * (1.0 + WORTH))
        .min_by_key(|(candidate, _)| *candidate)
        .ok_or(SimulationError::Stuck)?;
    let shapes = candidates.swap_remove(candidate);
    Ok(explain(evaluation, machine, shapes, prediction))
}

/// The largest bound on the period that these shapes impose.
#[must_use]
pub fn bound(evaluation: &Evaluation, shapes: &[StageShape], machine: &Machine) -> f64 {
    let bounds = bounds(evaluation, shapes, machine);
    bounds.iter().map(|b| b.seconds).fold(0.0, f64::max)
}

/// Takes away depth and delay that the goal does not need, where it saves most memory first, while operations are
/// left to simulate.
fn trim(
    evaluation: &Evaluation,
    machine: &Machine,
    enough: (Vec<StageShape>, Prediction),
    goal: f64,
    mut left: usize,
) -> (Vec<StageShape>, Prediction) {
    let (mut shapes, mut prediction) = enough;
    if !prediction.simulated {
        // An analytic bound does not notice what is too shallow.
        return (shapes, prediction);
    }
    let replicas: Vec<usize> = shapes.iter().map(|s| s.replicas).collect();
    let least = noam(&replicas);
    let mut stages: Vec<usize> = (0..shapes.len()).collect();
    let per_depth = |stage: usize| {
        let sums = &evaluation.stages[stage].sums;
        sums.parameters + sums.stash
    };
    stages.sort_by(|&a, &b| per_depth(b).total_cmp(&per_depth(a)));
    // What is accepted last is what is kept.
    let mut accept = |less: Vec<StageShape>, shapes: &mut Vec<StageShape>| -> bool {
        if left == 0 || bound(evaluation, &less, machine) > goal {
            return false;
        }
        // Too shallow for what is behind it is an error here, and no candidate.
        let Ok(result) = predict(evaluation, &less, machine) else {
            return false;
        };
        left = left.saturating_sub(result.operations);
        let accepted = result.period <= goal;
        if accepted {
            (*shapes, prediction) = (less, result);
        }
        accepted
    };
    // What one stage gives up may allow another one to give up more: again until nothing changes.
    let mut before = Vec::new();
    while before != shapes {
        before.clone_from(&shapes);
        for &stage in &stages {
            let mut low = least[stage];
            while low < shapes[stage].depth {
                let mut less = shapes.clone();
                less[stage].depth = usize::midpoint(low, shapes[stage].depth);
                let tried = less[stage].depth;
                if !accept(less, &mut shapes) {
                    low = tried + 1;
                }
            }
            if shapes[stage].delay > 0 {
                let mut less = shapes.clone();
                less[stage].delay = 0;
                accept(less, &mut shapes);
            }
        }
    }
    (shapes, prediction)
}

fn explain(
    evaluation: &Evaluation,
    machine: &Machine,
    shapes: Vec<StageShape>,
    prediction: Prediction,
) -> Choice {
    let explains = |b: &Bound| b.seconds * (1.0 + CLOSE_ENOUGH) >= prediction.period;
    let mut bounds = bounds(evaluation, &shapes, machine);
    // The load of a resource is the simplest explanation where several hold.
    bounds.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let is_load = |b: &&Bound| matches!(b.cause, Cause::Load { .. } | Cause::Card { .. });
    let load = bounds.iter().filter(is_load).find(|b| explains(b));
    let cause = load
        .or_else(|| bounds.iter().find(|b| explains(b)))
        .map_or(Cause::Waiting, |b| b.cause);
    Choice {
        shapes,
        prediction,
        cause,
    }
}

/// NOAM, deepened to hold `slack` times the round trip in flight, as far as memory and upstream depths go.
fn shapes(
    evaluation: &Evaluation,
    machine: &Machine,
    memory: f64,
    slack: f64,
    delay: usize,
) -> Vec<StageShape> {
    let replicas: Vec<usize> = evaluation.stages.iter().map(|s| s.replicas).collect();
    let trips = round_trips(evaluation, machine);
    let mut shapes: Vec<StageShape> = Vec::new();
    for (stage, least) in noam(&replicas).into_iter().enumerate() {
        let e = &evaluation.stages[stage];
        let memory = memory.min(e.worst.memory);
        let fits = |depth, delay| e.sums.memory(e.replicas, depth, delay) <= memory;
        let delay = usize::from(delay == 1 && e.replicas > 1 && fits(least, 1));
        let wanted =
            slack * (trips[stage] + e.sums.step) / (e.replicas as f64 * evaluation.bottleneck);
        // The stage before admits no more than its own warm-up.
        let admitted = shapes.last().map_or(usize::MAX, |before| {
            1 + (before.depth - 1) * before.replicas / e.replicas
        });
        // Beyond a few times NOAM nothing but memory grows; not a number (nothing takes time) wants nothing.
        let wanted = (wanted.ceil() as usize).min(4 * least + 8).min(admitted);
        let depth = (least..=wanted.max(least))
            .rev()
            .find(|&depth| fits(depth, delay))
            .unwrap_or(least);
        shapes.push(StageShape {
            replicas: e.replicas,
            depth,
            delay,
        });
    }
    shapes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Partition;
    use crate::graph::LayerGraph;
    use crate::testing;

    fn straight(bandwidth: f64) -> (Evaluation, Machine) {
        let machine = Machine {
            bandwidth,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
        };
        let graph = LayerGraph::new(&testing::chain(&[6.0; 4], &[0; 4], &[3000; 3]));
        let partition = Partition::new((0..4).map(|i| i..i + 1).collect(), vec![1; 4]);
        (Evaluation::new(&graph, &partition, &machine), machine)
    }

    #[test]
    fn free_links_need_no_more_than_noam() {
        let (evaluation, machine) = straight(1e15);
        let choice = choose(&evaluation, &machine, f64::INFINITY).unwrap();
        let depths: Vec<usize> = choice.shapes.iter().map(|s| s.depth).collect();
        assert_eq!(depths, [4, 3, 2, 1]);
        assert!(matches!(choice.cause, Cause::Load { .. }));
    }

    #[test]
    fn transfers_of_half_a_stage_stall_noam_and_are_hidden_by_depth() {
        // 3 ms of transfer each way against stages of 6 ms.
        let (evaluation, machine) = straight(1e6);
        let noam = shapes(&evaluation, &machine, f64::INFINITY, 0.0, 0);
        let shallow = predict(&evaluation, &noam, &machine).unwrap();
        assert!(shallow.period > 1.5 * 6e-3, "{}", shallow.period);
        let choice = choose(&evaluation, &machine, f64::INFINITY).unwrap();
        assert!(choice.prediction.period <= 1.02 * 6e-3, "{choice:?}");
    }

    #[test]
    fn no_stage_is_deeper_than_it_has_to_be() {
        let machine = Machine {
            bandwidth: 1.25e9,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
        };
        let graph = LayerGraph::new(&testing::chain(&[30.0; 3], &[9; 3], &[1_000_000; 2]));
        let partition = Partition::new((0..3).map(|i| i..i + 1).collect(), vec![1; 3]);
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let choice = choose(&evaluation, &machine, f64::INFINITY).unwrap();
        let goal = 1.02 * 30e-3;
        assert!(choice.prediction.period <= goal);
        for stage in 0..3 {
            let mut less = choice.shapes.clone();
            less[stage].depth -= 1;
            let slower = less[stage].depth == 0
                || predict(&evaluation, &less, &machine).is_err()
                || predict(&evaluation, &less, &machine).unwrap().period > goal;
            assert!(slower, "{less:?}");
        }
    }

    #[test]
    fn uneven_plans_need_a_delayed_all_reduce() {
        // 2-1-1 at depths 2-2-1 stalls while it waits for the newest all-reduce, free as that is.
        let machine = Machine {
            bandwidth: 1e15,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
        };
        let graph = LayerGraph::new(&testing::chain(&[12.0, 6.0, 6.0], &[9, 9, 9], &[1, 1]));
        let partition = Partition::new((0..3).map(|i| i..i + 1).collect(), vec![2, 1, 1]);
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let at_once = shapes(&evaluation, &machine, f64::INFINITY, 0.0, 0);
        let stalled = predict(&evaluation, &at_once, &machine).unwrap();
        assert!(stalled.period > 1.2 * 6e-3, "{}", stalled.period);
        let choice = choose(&evaluation, &machine, f64::INFINITY).unwrap();
        assert!(choice.prediction.period <= 1.02 * 6e-3, "{choice:?}");
        assert_eq!(choice.shapes[0].delay, 1);
    }
}
