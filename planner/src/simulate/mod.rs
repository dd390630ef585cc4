//! Runs a schedule over the cost model: the steady-state period that a plan is predicted by.

pub mod bounds;
pub mod depth;
mod events;
mod queue;
mod trace;
mod ways;
mod worker;

pub use events::{record, record_bucketed, run};
pub use trace::{Activity, Span, Trace};

use crate::cost::{Evaluation, Machine};
use crate::schedule::{
    Pace, Schedule, ScheduleError, ShapeError, StageLink, StageShape, whole_rounds,
};

/// What a pipeline does once it is full, and around that.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds per minibatch in steady state.
    pub period: f64,
    /// Whether a simulation showed it; else it is the largest analytic bound.
    pub simulated: bool,
    /// Operations that were simulated for it.
    pub operations: usize,
    /// From the first forward to the first minibatch that is through its last backward, seconds.
    pub fill: f64,
    /// From the last forward of the first stage to the end of everything, seconds.
    pub drain: f64,
    /// Share of the workers' time in steady state in which they do not compute.
    pub bubble_share: f64,
    /// Share of its time in steady state that each worker computes.
    pub busy: Vec<f64>,
    /// Bytes of each worker at its fullest.
    pub memory: Vec<f64>,
}

/// Stages, links or depths that no schedule can be made from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SimulationError {
    /// The shapes make no pipeline.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The depths cannot work.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The simulation got stuck in a schedule that passes the check.
    #[error(
        "the simulation got stuck although the schedule is free of deadlock: please report the profile"
    )]
    Stuck,
}

/// Repetitions that differ by less, relative to their length, are taken for the same.
const SAME: f64 = 1e-9;
/// Without a rhythm, windows that differ by less than this are taken for the steady state.
const SETTLED: f64 = 1e-3;
/// A schedule longer than this many operations is not made longer to find the steady state.
const MOST_OPERATIONS: usize = 50_000;
/// A pipeline that needs more than this to get under way is not simulated at all.
const TOO_MANY_OPERATIONS: usize = 4_000_000;

/// Simulates a pipeline of these shapes until its rhythm repeats.
///
/// # Errors
/// If the shapes or depths cannot work.
pub fn predict(
    evaluation: &Evaluation,
    pace: Pace,
    shapes: &[StageShape],
    machine: &Machine,
) -> Result<Prediction, SimulationError> {
    // Where a cycle is only just slower than the bottleneck, a finite run still lives on the slack of its start.
    let bound = bounds::bound(evaluation, pace, shapes, machine);
    let run = if operations_needed(evaluation, pace, shapes) > TOO_MANY_OPERATIONS {
        None
    } else {
        Some(measure(evaluation, pace, shapes, machine)?)
    };
    let period = run.as_ref().map_or(bound, |run| run.period.max(bound));
    Ok(summary(evaluation, pace, shapes, run.as_ref(), period))
}

/// Minibatches that are under way at once, or make a step together.
fn in_flight(pace: Pace, shapes: &[StageShape]) -> usize {
    let shapes = shapes.iter();
    let most = shapes.map(|s| s.replicas.saturating_mul(s.depth)).max();
    most.unwrap_or(1).max(pace.microbatches)
}

/// About how long the shortest schedule is that shows a steady state.
fn operations_needed(evaluation: &Evaluation, pace: Pace, shapes: &[StageShape]) -> usize {
    in_flight(pace, shapes)
        .saturating_mul(5)
        .saturating_mul(operations_per_minibatch(evaluation))
}

/// About how many operations all workers carry out for one minibatch.
fn operations_per_minibatch(evaluation: &Evaluation) -> usize {
    4 * evaluation.stages.len() + 4 * evaluation.links.len()
}

/// What simulations of growing length show.
struct Measured {
    period: f64,
    /// The run that it was seen in.
    trace: Trace,
    /// Operations of all runs.
    operations: usize,
}

/// The period that the simulation shows.
fn measure(
    evaluation: &Evaluation,
    pace: Pace,
    shapes: &[StageShape],
    machine: &Machine,
) -> Result<Measured, SimulationError> {
    let links: Vec<StageLink> = evaluation.links.iter().map(|l| l.link()).collect();
    let in_flight = in_flight(pace, shapes);
    // Workers serve the same minibatches again after the least common multiple of all replicas. Where that is
    // long, whole rounds of the first stage, in which minibatches end, have to do.
    let cycle = shapes
        .iter()
        .try_fold(pace.microbatches.max(1), |all, s| {
            Some(whole_rounds([all, s.replicas])).filter(|&all| all <= 2 * in_flight)
        })
        .unwrap_or(if pace.has_own_rounds() {
            shapes[0].replicas
        } else {
            pace.microbatches
        });
    let mut window = in_flight.div_ceil(cycle) * cycle;
    // A long pipeline is in its rhythm about as soon as it is full.
    let long = 6 * in_flight * operations_per_minibatch(evaluation) > MOST_OPERATIONS;
    let windows = if long { 3 } else { 4 };
    let mut all_operations = 0;
    loop {
        // What is in flight to get under way and to drain, and windows to look for the rhythm in.
        let minibatches = (2 * in_flight).next_multiple_of(cycle) + windows * window;
        let schedule = Schedule::new(pace, shapes, &links, minibatches)?;
        let Some(trace) = run(&schedule, evaluation, machine) else {
            // The simulation only sees that it is stuck; the checker says where.
            schedule.check()?;
            return Err(SimulationError::Stuck);
        };
        let steady = &trace.through[in_flight..minibatches - in_flight];
        let operations: usize = schedule.operations.iter().map(Vec::len).sum();
        all_operations += operations;
        if let Some(period) = rhythm(steady, cycle) {
            return Ok(Measured {
                period,
                trace,
                operations: all_operations,
            });
        }
        let mean = |end: usize| (steady[end - 1] - steady[end - 1 - window]) / window as f64;
        let (earlier, later) = (mean(steady.len() - window), mean(steady.len()));
        let settled = (earlier - later).abs() <= SETTLED * later;
        if settled || operations > MOST_OPERATIONS {
            return Ok(Measured {
                period: f64::midpoint(earlier, later),
                trace,
                operations: all_operations,
            });
        }
        window *= 2;
    }
}

/// The period of the rhythm that the minibatches are in, if it has lasted for half of them.
///
/// Workers and links that wait for each other repeat themselves after some multiple of `cycle` minibatches.
fn rhythm(through: &[f64], cycle: usize) -> Option<f64> {
    let last = through.len().checked_sub(1)?;
    let repeats = |&length: &usize| {
        let once = through[last] - through[last - length];
        (0..length.max(last / 2)).all(|back| {
            let again = through[last - back] - through[last - back - length];
            (again - once).abs() <= SAME * once
        })
    };
    let length = (1..=32)
        .map(|times| times * cycle)
        .take_while(|length| 3 * length <= last)
        .find(repeats)?;
    Some((through[last] - through[last - length]) / length as f64)
}

fn summary(
    evaluation: &Evaluation,
    pace: Pace,
    shapes: &[StageShape],
    run: Option<&Measured>,
    period: f64,
) -> Prediction {
    let mut busy = Vec::new();
    let mut memory = Vec::new();
    for (stage, (e, shape)) in evaluation.stages.iter().zip(shapes).enumerate() {
        let share = if period > 0.0 {
            e.loads.device() / period
        } else {
            1.0
        };
        let bytes = e
            .sums
            .memory_of(shape.replicas, pace.holding(shapes, stage));
        busy.extend(std::iter::repeat_n(share, shape.replicas));
        memory.extend(std::iter::repeat_n(bytes, shape.replicas));
    }
    let trace = run.map(|run| &run.trace);
    let mean = busy.iter().sum::<f64>() / busy.len() as f64;
    Prediction {
        period,
        simulated: run.is_some(),
        operations: run.map_or(0, |run| run.operations),
        fill: trace.map_or(0.0, |t| t.through.first().copied().unwrap_or(0.0)),
        drain: trace.map_or(0.0, |t| t.end - t.last_first_stage_forward),
        bubble_share: (1.0 - mean).max(0.0),
        busy,
        memory,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::bounds::{Cause, bounds};
    use super::depth::{CLOSE_ENOUGH, Course, choose};
    use super::*;
    use crate::cost::Partition;
    use crate::graph::LayerGraph;
    use crate::schedule::ScheduleKind;
    use crate::testing;

    const PACE: Pace = Pace::ONE_F_ONE_B;

    /// A chain cut into one stage per layer, each with some replicas, on links of any speed.
    fn pipelines() -> impl Strategy<Value = (Evaluation, Machine)> {
        let stage = (1u32..20, 0u64..3000, 0u64..3000, 1usize..4);
        (
            proptest::collection::vec(stage, 1..5),
            prop_oneof![Just(1e15), Just(3e6), Just(1e6)],
            prop_oneof![Just(0.0), Just(1e-3)],
            prop_oneof![Just(0.0), Just(1e-7)],
        )
            .prop_map(|(stages, bandwidth, latency, kappa)| {
                let ms: Vec<f64> = stages.iter().map(|s| f64::from(s.0)).collect();
                let weights: Vec<u64> = stages.iter().map(|s| s.1).collect();
                let edges: Vec<u64> = stages[1..].iter().map(|s| s.2).collect();
                let mut profile = testing::chain(&ms, &weights, &edges);
                for (i, layer) in profile.layers.iter_mut().enumerate() {
                    layer.step_ms = (i % 3) as f64;
                }
                let machine = Machine {
                    bandwidth,
                    latency,
                    message_s_per_byte: kappa,
                    reduce_s_per_byte: kappa,
                    round: None,
                };
                let partition = Partition::new(
                    (0..stages.len()).map(|i| i..i + 1).collect(),
                    stages.iter().map(|s| s.3).collect(),
                );
                let graph = LayerGraph::new(&profile);
                (Evaluation::new(&graph, &partition, &machine), machine)
            })
    }

    /// A layer for each stage of an evaluation of a chain.
    fn evaluation_graph(evaluation: &Evaluation) -> LayerGraph {
        let stages = || evaluation.stages.iter().map(|s| s.sums);
        let ms: Vec<f64> = stages().map(|s| 1e3 * (s.forward + s.backward)).collect();
        let weights: Vec<u64> = stages().map(|s| s.parameters as u64).collect();
        let edges: Vec<u64> = stages().skip(1).map(|s| s.traffic.input as u64).collect();
        let mut profile = testing::chain(&ms, &weights, &edges);
        for (layer, sums) in profile.layers.iter_mut().zip(stages()) {
            layer.step_ms = 1e3 * sums.step;
        }
        LayerGraph::new(&profile)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn no_simulated_period_beats_its_bounds((evaluation, machine) in pipelines(), delay in 0usize..2) {
            let replicas: Vec<usize> = evaluation.stages.iter().map(|s| s.replicas).collect();
            let depths = crate::schedule::noam(&replicas);
            let shapes: Vec<StageShape> = replicas
                .iter()
                .zip(depths)
                .map(|(&replicas, depth)| StageShape {
                    replicas,
                    depth,
                    delay: if replicas > 1 { delay } else { 0 },
                })
                .collect();
            let measured = measure(&evaluation, PACE, &shapes, &machine).unwrap().period;
            let predicted = predict(&evaluation, PACE, &shapes, &machine).unwrap().period;
            for bound in bounds(&evaluation, PACE, &shapes, &machine) {
                prop_assert!(predicted >= bound.seconds);
                prop_assert!(measured >= bound.seconds * 0.99, "{} beats {:?}", measured, bound);
            }
            prop_assert!(measured >= predicted * 0.99);
        }

        #[test]
        fn no_kind_of_schedule_beats_its_bounds(
            (evaluation, machine) in pipelines(),
            kind in prop_oneof![
                Just(ScheduleKind::VerticalSync),
                Just(ScheduleKind::TwoBw),
                Just(ScheduleKind::OneFOneBFlush),
                Just(ScheduleKind::Gpipe),
            ],
            more in 0usize..4,
        ) {
            let course = Course { kind, microbatches: None };
            let choice = choose(&evaluation, &machine, course, f64::INFINITY).unwrap();
            let rounds = whole_rounds(choice.shapes.iter().map(|s| s.replicas));
            let given = choice.pace.microbatches + more * rounds;
            let pace = Pace::new(kind, &choice.shapes, Some(given)).unwrap();
            // Loads are those of steps as frequent as this schedule has them.
            let machine = Machine { round: Some(given as f64), ..machine };
            let partition = Partition::new(
                evaluation.stages.iter().map(|s| s.layers.clone()).collect(),
                evaluation.stages.iter().map(|s| s.replicas).collect(),
            );
            let graph = evaluation_graph(&evaluation);
            let evaluation = Evaluation::new(&graph, &partition, &machine);
            let measured = measure(&evaluation, pace, &choice.shapes, &machine).unwrap().period;
            for bound in bounds(&evaluation, pace, &choice.shapes, &machine) {
                prop_assert!(measured >= bound.seconds * 0.99, "{} beats {:?}", measured, bound);
            }
        }

        #[test]
        fn where_depth_is_free_the_period_is_its_bound((evaluation, machine) in pipelines()) {
            let choice = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
            let bound = bounds::bound(&evaluation, PACE, &choice.shapes, &machine);
            let ratio = choice.prediction.period / bound;
            // About one in a hundred of such pipelines has several all-reduces that wait for each other, and says so.
            let replicated = choice.shapes.iter().any(|s| s.replicas > 1);
            if replicated && choice.cause == Cause::Waiting {
                prop_assert!(ratio <= 1.5, "{} times {} for {:?}", ratio, bound, choice.shapes);
            } else {
                prop_assert!(ratio <= 1.0 + CLOSE_ENOUGH, "{} times {} for {:?}", ratio, bound, choice.shapes);
            }
        }

        #[test]
        fn depths_stay_within_memory_and_never_slow_a_plan((evaluation, machine) in pipelines()) {
            let replicas: Vec<usize> = evaluation.stages.iter().map(|s| s.replicas).collect();
            let free = choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
            let least: Vec<StageShape> = crate::schedule::noam(&replicas)
                .into_iter()
                .zip(&replicas)
                .map(|(depth, &replicas)| StageShape { replicas, depth, delay: 0 })
                .collect();
            let shallow = predict(&evaluation, PACE, &least, &machine).unwrap();
            prop_assert!(free.prediction.period <= shallow.period * (1.0 + 1e-9));
            let memory = shallow.memory.iter().copied().fold(0.0, f64::max);
            let tight = choose(&evaluation, &machine, Course::default(), memory).unwrap();
            prop_assert!(tight.prediction.memory.iter().all(|&m| m <= memory));
        }
    }

    /// Stages of the same load on each device, with transfers of half a stage's time where links are slow.
    #[test]
    fn uneven_plans_and_slow_links_come_within_two_percent_of_the_bottleneck() {
        let plans: [&[usize]; 6] = [
            &[1, 15],
            &[15, 1],
            &[9, 5, 1, 1],
            &[2, 3],
            &[2, 1, 1],
            &[1, 1, 1, 1],
        ];
        for replicas in plans {
            for transfer in [0.0, 0.5] {
                let stages = replicas.len();
                let ms: Vec<f64> = replicas.iter().map(|&r| 6.0 * r as f64).collect();
                // At 1 MB/s a kilobyte takes a millisecond.
                let edges = vec![(6000.0 * transfer) as u64; stages - 1];
                let profile = testing::chain(&ms, &vec![10; stages], &edges);
                let machine = Machine {
                    bandwidth: 1e6,
                    latency: 0.0,
                    message_s_per_byte: 0.0,
                    reduce_s_per_byte: 0.0,
                    round: None,
                };
                let layers = (0..stages).map(|i| i..i + 1).collect();
                let partition = Partition::new(layers, replicas.to_vec());
                let evaluation = Evaluation::new(&LayerGraph::new(&profile), &partition, &machine);
                let choice =
                    choose(&evaluation, &machine, Course::default(), f64::INFINITY).unwrap();
                let ratio = choice.prediction.period / evaluation.bottleneck;
                assert!(
                    ratio <= 1.0 + CLOSE_ENOUGH,
                    "{replicas:?}, transfers of {transfer}: {ratio}"
                );
            }
        }
    }
}
