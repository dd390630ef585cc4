//! Chooses each stage's depth K and delay d: as shallow as the bottleneck allows, within memory.
//!
//! The paper's NOAM keeps every worker busy only while links are free. Where the simulated period shows that it does
//! not suffice, depths grow with the time a minibatch takes from a stage's forward to its backward, and a replicated
//! stage may let its all-reduce lag one round.

use super::bounds::{Bound, Cause, bound, bounds, round_trips};
use super::{Prediction, SimulationError, predict};
use crate::cost::{Evaluation, Machine};
use crate::schedule::{Keeping, Pace, ScheduleKind, ShapeError, StageShape, noam};

/// A period within this of the bottleneck needs no deeper pipeline.
pub const CLOSE_ENOUGH: f64 = 0.02;

/// Simulated operations after which no other depths are tried: large plans take long to simulate.
const MOST_OPERATIONS: usize = 600_000;

/// What is deeper has to be faster by this much to be worth its memory and staleness.
const WORTH: f64 = 1e-3;

/// The kind of schedule that is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Course {
    /// The kind.
    pub kind: ScheduleKind,
    /// Minibatches of a step where all stages step together; as suits the stages if none are given.
    pub microbatches: Option<usize>,
}

/// Depths and delays, and what they give.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The kind of schedule and how many minibatches make a step.
    pub pace: Pace,
    /// One per stage.
    pub shapes: Vec<StageShape>,
    /// What the simulation says.
    pub prediction: Prediction,
    /// What the period is held up by.
    pub cause: Cause,
}

/// The shallowest depths whose simulated period is within 2 % of the bottleneck, else those with the least period.
///
/// # Errors
/// If the evaluation's stages make no pipeline, or none of that kind with the wanted minibatches per step.
pub fn choose(
    evaluation: &Evaluation,
    machine: &Machine,
    course: Course,
    memory: f64,
) -> Result<Choice, SimulationError> {
    let goal = evaluation.bottleneck * (1.0 + CLOSE_ENOUGH);
    // Zero: NOAM. One: the time of the round trip filled. More: slack for waiting in between.
    let mut candidates: Vec<(Pace, Vec<StageShape>)> = Vec::new();
    let mut refused: Option<ShapeError> = None;
    for slack in [0.0, 1.0, 1.25, 1.5, 2.0, 3.0] {
        for delay in [0, 1] {
            let shapes = shapes(evaluation, machine, course, memory, (slack, delay));
            match Pace::new(course.kind, &shapes, course.microbatches) {
                Ok(pace) if !candidates.contains(&(pace, shapes.clone())) => {
                    candidates.push((pace, shapes));
                }
                Ok(_) => {}
                Err(error) => {
                    refused.get_or_insert(error);
                }
            }
        }
    }
    if candidates.is_empty() {
        return Err(refused.map_or(SimulationError::Stuck, SimulationError::Shape));
    }
    // No simulated period is below its bound: what cannot reach the goal waits until nothing else has.
    let bounds: Vec<f64> = candidates
        .iter()
        .map(|(pace, shapes)| bound(evaluation, *pace, shapes, machine))
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
        let (pace, shapes) = &candidates[candidate];
        let prediction = predict(evaluation, *pace, shapes, machine)?;
        left = left.saturating_sub(prediction.operations);
        if prediction.period <= goal {
            let (pace, shapes) = candidates.swap_remove(candidate);
            let enough = (shapes, prediction);
            let (shapes, prediction) = trim(evaluation, machine, pace, enough, (goal, left));
            return Ok(explain(evaluation, machine, pace, shapes, prediction));
        }
        least = least.min(prediction.period);
        simulated.push((candidate, prediction));
    }
    // The shallowest of those that are about as fast as the fastest.
    let shallow = simulated
        .iter()
        .filter(|(_, prediction)| prediction.period <= least * (1.0 + WORTH))
        .map(|&(candidate, _)| candidate)
        .min()
        .ok_or(SimulationError::Stuck)?;
    // Stages that wait for each other's all-reduce may do better where only some of them let it lag.
    let deepest = simulated.iter().map(|&(candidate, _)| candidate).max();
    let mut best: Option<(Pace, Vec<StageShape>, Prediction)> = None;
    for start in [Some(shallow), deepest.filter(|&deepest| deepest != shallow)] {
        let Some((at, prediction)) = start.and_then(|s| simulated.iter().find(|(c, _)| *c == s))
        else {
            continue;
        };
        let (pace, shapes) = candidates[*at].clone();
        let start = (shapes, prediction.clone());
        let found = mix_delays(
            evaluation,
            machine,
            (pace, memory),
            start,
            (goal, &mut left),
        );
        if found.1.period <= goal {
            let (shapes, prediction) = trim(evaluation, machine, pace, found, (goal, left));
            return Ok(explain(evaluation, machine, pace, shapes, prediction));
        }
        let faster =
            |(_, _, best): &(_, _, Prediction)| found.1.period < best.period * (1.0 - WORTH);
        if best.as_ref().is_none_or(faster) {
            best = Some((pace, found.0, found.1));
        }
    }
    let (pace, shapes, prediction) = best.ok_or(SimulationError::Stuck)?;
    Ok(explain(evaluation, machine, pace, shapes, prediction))
}

/// Turns the delay of one replicated stage after the other round while that makes the pipeline faster and fits the
/// memory, until the goal is reached or no operations are left to simulate.
fn mix_delays(
    evaluation: &Evaluation,
    machine: &Machine,
    (pace, memory): (Pace, f64),
    start: (Vec<StageShape>, Prediction),
    (goal, left): (f64, &mut usize),
) -> (Vec<StageShape>, Prediction) {
    let (mut shapes, mut prediction) = start;
    if !prediction.simulated || pace.kind != ScheduleKind::OneFOneB {
        return (shapes, prediction);
    }
    let mut changed = true;
    while std::mem::take(&mut changed) {
        for stage in 0..shapes.len() {
            if *left == 0 || prediction.period <= goal {
                return (shapes, prediction);
            }
            if shapes[stage].replicas == 1 {
                continue;
            }
            let mut other = shapes.clone();
            other[stage].delay = 1 - other[stage].delay;
            let e = &evaluation.stages[stage];
            let needed = e.sums.memory_of(e.replicas, pace.holding(&other, stage));
            let hopeless = bound(evaluation, pace, &other, machine) >= prediction.period;
            if needed > memory.min(e.worst.memory) || hopeless {
                continue;
            }
            let Ok(result) = predict(evaluation, pace, &other, machine) else {
                continue;
            };
            *left = left.saturating_sub(result.operations);
            if result.period < prediction.period * (1.0 - WORTH) {
                (shapes, prediction) = (other, result);
                changed = true;
            }
        }
    }
    (shapes, prediction)
}

/// Takes away depth and delay that the goal does not need, where it saves most memory first, while operations are
/// left to simulate.
fn trim(
    evaluation: &Evaluation,
    machine: &Machine,
    pace: Pace,
    enough: (Vec<StageShape>, Prediction),
    (goal, mut left): (f64, usize),
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
        if left == 0 || bound(evaluation, pace, &less, machine) > goal {
            return false;
        }
        // Too shallow for what is behind it is an error here, and no candidate.
        let Ok(result) = predict(evaluation, pace, &less, machine) else {
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
    pace: Pace,
    shapes: Vec<StageShape>,
    prediction: Prediction,
) -> Choice {
    let explains = |b: &Bound| b.seconds * (1.0 + CLOSE_ENOUGH) >= prediction.period;
    let mut bounds = bounds(evaluation, pace, &shapes, machine);
    // The load of a resource is the simplest explanation where several hold.
    bounds.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    let is_load = |b: &&Bound| matches!(b.cause, Cause::Load { .. } | Cause::Card { .. });
    let load = bounds.iter().filter(is_load).find(|b| explains(b));
    let cause = load
        .or_else(|| bounds.iter().find(|b| explains(b)))
        .map_or(Cause::Waiting, |b| b.cause);
    Choice {
        pace,
        shapes,
        prediction,
        cause,
    }
}

/// NOAM, deepened to hold `slack` times the round trip in flight, as far as memory and upstream depths go.
fn shapes(
    evaluation: &Evaluation,
    machine: &Machine,
    course: Course,
    memory: f64,
    (slack, delay): (f64, usize),
) -> Vec<StageShape> {
    let delay = if course.kind.is_synchronous() {
        0
    } else {
        delay
    };
    let keeping = Keeping {
        kind: course.kind,
        microbatches: course.microbatches.unwrap_or(0),
    };
    let replicas: Vec<usize> = evaluation.stages.iter().map(|s| s.replicas).collect();
    let trips = round_trips(evaluation, machine);
    let mut shapes: Vec<StageShape> = Vec::new();
    for (stage, least) in noam(&replicas).into_iter().enumerate() {
        let e = &evaluation.stages[stage];
        let memory = memory.min(e.worst.memory);
        let fits = |depth, delay| {
            let holding = keeping.holding(e.replicas, depth, delay);
            e.sums.memory_of(e.replicas, holding) <= memory
        };
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
            round: None,
        };
        let graph = LayerGraph::new(&testing::chain(&[6.0; 4], &[0; 4], &[3000; 3]));
        let partition = Partition::new((0..4).map(|i| i..i + 1).collect(), vec![1; 4]);
        (Evaluation::new(&graph, &partition, &machine), machine)
    }

    #[test]
    fn free_links_need_no_more_than_noam() {
        let (evaluation, machine) = straight(1e15);
        let choice = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
        let depths: Vec<usize> = choice.shapes.iter().map(|s| s.depth).collect();
        assert_eq!(depths, [4, 3, 2, 1]);
        assert!(matches!(choice.cause, Cause::Load { .. }));
    }

    #[test]
    fn transfers_of_half_a_stage_stall_noam_and_are_hidden_by_depth() {
        // 3 ms of transfer each way against stages of 6 ms.
        let (evaluation, machine) = straight(1e6);
        let noam = shapes(
            &evaluation,
            &machine,
            Course::default(),
            f64::INFINITY,
            (0.0, 0),
        );
        let shallow = predict(&evaluation, Pace::ONE_F_ONE_B, &noam, &machine).unwrap();
        assert!(shallow.period > 1.5 * 6e-3, "{}", shallow.period);
        let choice = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
        assert!(choice.prediction.period <= 1.02 * 6e-3, "{choice:?}");
    }

    #[test]
    fn no_stage_is_deeper_than_it_has_to_be() {
        let machine = Machine {
            bandwidth: 1.25e9,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        };
        let graph = LayerGraph::new(&testing::chain(&[30.0; 3], &[9; 3], &[1_000_000; 2]));
        let partition = Partition::new((0..3).map(|i| i..i + 1).collect(), vec![1; 3]);
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let choice = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
        let goal = 1.02 * 30e-3;
        assert!(choice.prediction.period <= goal);
        for stage in 0..3 {
            let mut less = choice.shapes.clone();
            less[stage].depth -= 1;
            let slower = less[stage].depth == 0
                || predict(&evaluation, Pace::ONE_F_ONE_B, &less, &machine).is_err()
                || predict(&evaluation, Pace::ONE_F_ONE_B, &less, &machine)
                    .unwrap()
                    .period
                    > goal;
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
            round: None,
        };
        let graph = LayerGraph::new(&testing::chain(&[12.0, 6.0, 6.0], &[9, 9, 9], &[1, 1]));
        let partition = Partition::new((0..3).map(|i| i..i + 1).collect(), vec![2, 1, 1]);
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let at_once = shapes(
            &evaluation,
            &machine,
            Course::default(),
            f64::INFINITY,
            (0.0, 0),
        );
        let stalled = predict(&evaluation, Pace::ONE_F_ONE_B, &at_once, &machine).unwrap();
        assert!(stalled.period > 1.2 * 6e-3, "{}", stalled.period);
        let choice = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
        assert!(choice.prediction.period <= 1.02 * 6e-3, "{choice:?}");
        assert_eq!(choice.shapes[0].delay, 1);
    }
}
