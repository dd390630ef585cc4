//! From a profile and a cluster to a plan: search, depths, baselines, and the words that explain them.

mod baselines;
mod compare;
mod explain;
mod free;
mod grid;
mod hand;
mod kinds;
mod neighbours;
mod one_at_a_time;
mod polish;
mod released;
mod search;
mod servers;
mod space;
mod sweep;
mod timeline;

pub use compare::{Compared, KINDS, compare};
pub use free::plan_freely;
pub use grid::{Axes, Cell, csv, grid};
pub use hand::{HandError, StageSpec, parse_stages};
pub use neighbours::{Explanation, explanation};
pub use search::{Infeasible, Solver};
pub use sweep::{Point, sweep};
pub use timeline::{Timeline, timeline};

use std::collections::HashMap;

pub use crate::contract::{Together, TogetherError};
use crate::contract::{layer_graph, untied_graph};
use crate::cost::{Evaluation, Formula, Machine, Partition, Placement};
use crate::graph::LayerGraph;
use crate::plan::{Card, Cluster, PLAN_SCHEMA, Plan, PlanError, Stage};
use crate::profile::{FileRef, Profile};
use crate::schedule::{Keeping, Schedule, ScheduleKind, StageShape};
pub use crate::simulate::depth::Course;
use crate::simulate::{SimulationError, depth};
pub use crate::solve::Recompute;
use crate::solve::{Limits, SolverError};

/// Goodput that stands for workers of one process, whose tensors change hands by reference: bytes per second.
pub const LOCAL_BANDWIDTH: f64 = 1e15;

/// What to plan for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The machines.
    pub cluster: Cluster,
    /// Who searches.
    pub solver: Solver,
    /// What a plan is judged by.
    pub formula: Formula,
    /// Which plans are considered.
    pub scope: Scope,
    /// Whether stages may keep their input only and run forward again before their backward.
    pub recompute: Recompute,
    /// Layers that have to stay in one stage.
    pub together: Vec<Together>,
    /// The kind of schedule, and how many minibatches make a step where all stages step together.
    pub course: Course,
}

impl Request {
    /// The kind of schedule with the minibatches of a step, where they have to be known before there is a plan: of a
    /// batch after which the pipeline is flushed four for each device, if none are given.
    fn course(&self) -> Course {
        let kind = self.course.kind;
        let flushes = matches!(kind, ScheduleKind::OneFOneBFlush | ScheduleKind::Gpipe);
        let suited = flushes.then_some(4 * self.cluster.devices);
        Course {
            kind,
            microbatches: self.course.microbatches.or(suited),
        }
    }

    fn keeping(&self) -> Keeping {
        let course = self.course();
        Keeping {
            kind: course.kind,
            microbatches: course.microbatches.unwrap_or(0),
        }
    }

    /// The machine as the solvers see it: where all stages step together and it is not known how often, a stage steps
    /// after a round of its replicas, as often as it ever does.
    fn machine(&self, profile: &Profile) -> Machine {
        let kind = self.course.kind;
        let together = !matches!(
            kind,
            ScheduleKind::OneFOneB | ScheduleKind::ModelParallel | ScheduleKind::DataParallel
        );
        let round = self.course().microbatches.filter(|_| together);
        Machine {
            round: round.map(|round| round as f64),
            ..Machine::new(&self.cluster, profile.communication_s_per_byte)
        }
    }
}

/// Which plans are considered.
#[derive(Clone, Debug, PartialEq)]
pub enum Scope {
    /// All of them.
    All,
    /// Those without replication.
    Straight,
    /// The one that the user wrote down.
    Given(Vec<StageSpec>),
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanningError {
    /// Nothing fits.
    #[error(transparent)]
    Infeasible(Box<Infeasible>),
    /// The stages that the user wrote down are none.
    #[error(transparent)]
    Hand(#[from] HandError),
    /// The layers that the user wants in one stage are none.
    #[error(transparent)]
    Together(#[from] TogetherError),
    /// Layers cannot be placed freely there.
    #[error(
        "--non-contiguous places layers on devices that are alike and share no network card, by this program's own \
         cost model, and with room for as many minibatches as there are devices: leave out the flags that ask for \
         something else, or give more --memory"
    )]
    Free,
    /// The back-end of the integer program gave up.
    #[error(transparent)]
    Solver(#[from] SolverError),
    /// A formula of another planner that has no answer for such a request.
    #[error("--model {} {rule}", formula.name())]
    Formula {
        /// The formula.
        formula: Formula,
        /// What it asks for, and what to do.
        rule: &'static str,
    },
    /// No schedule for the stages.
    #[error(transparent)]
    Simulation(#[from] SimulationError),
    /// The plan contradicts itself.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A solver promised what an independent evaluation does not confirm.
    #[error(
        "the {solver} solver reports a bottleneck of {reported} s, an independent evaluation {evaluated} s: \
         this is a fault of dp-plan, please report it with the profile"
    )]
    Disagreement {
        /// The solver.
        solver: &'static str,
        /// What it promised.
        reported: f64,
        /// What the evaluation says.
        evaluated: f64,
    },
}

impl From<Infeasible> for PlanningError {
    fn from(miss: Infeasible) -> Self {
        Self::Infeasible(Box::new(miss))
    }
}

/// Everything about a partition that a plan tells.
struct Judged {
    /// Steps and all-reduces as often as the schedule has them.
    machine: Machine,
    evaluation: Evaluation,
    choice: depth::Choice,
}

/// Makes the plan for a valid profile, which `profile_file` names.
///
/// # Errors
/// If nothing fits the memory, the user's stages are none, the kind of schedule cannot have the wanted minibatches per
/// step, or a solver fails.
pub fn plan(
    profile: &Profile,
    profile_file: FileRef,
    request: &Request,
) -> Result<Plan, PlanningError> {
    let request = &hand::named(profile, request)?;
    let graph = layer_graph(profile, &request.together)?;
    let machine = request.machine(profile);
    let space = space::Space::new(&graph);
    let kinds::Answer {
        mut found,
        judged,
        passed_over,
    } = kinds::find(&space, &machine, request)?;
    if !profile.tied.is_empty() && request.course.kind.may_split_ties() {
        // Only plans that keep them together were searched.
        let untied = untied_graph(profile, &request.together)?;
        let best = kinds::find(&space::Space::new(&untied), &machine, request)?;
        let bound = found.lower_bound.min(best.found.lower_bound);
        found.proved &= found.lower_bound <= bound * (1.0 + 1e-9);
        found.lower_bound = bound;
    }
    let baselines = baselines::baselines(profile, &space, request)?;
    let Judged {
        machine,
        evaluation,
        choice,
    } = &judged;
    let bottleneck_s = match request.course.kind {
        // One minibatch, or one bucket, after the other: there is no steady load that tells the pace.
        ScheduleKind::ModelParallel | ScheduleKind::DataParallel => choice.prediction.period,
        _ => found.objective(evaluation, request.formula, machine),
    };
    let prediction = &choice.prediction;
    let pace = choice.pace;
    let plan = Plan {
        schema: PLAN_SCHEMA.to_owned(),
        model: profile.model.clone(),
        profile: profile_file,
        reading: profile.reading.clone(),
        batch_size: profile.batch_size,
        threads: profile.threads,
        cluster: request.cluster.clone(),
        schedule: pace.kind,
        microbatches: (!pace.has_own_rounds()).then_some(pace.microbatches),
        stages: stages(&found.graph, &found.partition, &judged)?,
        links: evaluation.links.iter().map(|l| l.link()).collect(),
        workers: found.partition.workers(),
        bottleneck_s,
        bottleneck: match found.judged {
            Some((_, stage)) => {
                explain::bottleneck_stage(&found.graph, evaluation, stage, request.formula)
            }
            None => explain::bottleneck(&found.graph, evaluation, request.formula, machine),
        },
        lower_bound_s: found.lower_bound,
        gap: gap(bottleneck_s, found.lower_bound),
        optimal: found.proved,
        passed_over,
        period_s: prediction.period,
        stall: explain::stall(&found.graph, choice, evaluation),
        fill_s: prediction.fill,
        drain_s: prediction.drain,
        bubble_share: prediction.bubble_share,
        throughput_samples_per_s: throughput(profile, prediction.period),
        bytes_per_minibatch: evaluation.bytes_per_minibatch,
        cards: cards(&request.cluster, evaluation),
        baselines,
    };
    plan.validate()?;
    Ok(plan)
}

/// The layers in the order in which a plan for this profile and request names them, and its stages as runs of them.
fn planned(
    profile: &Profile,
    request: &Request,
    plan: &Plan,
) -> Result<(LayerGraph, Partition), PlanningError> {
    let graph = layer_graph(profile, &request.together)?;
    let members = graph.layers().enumerate();
    let place: HashMap<&str, usize> = members
        .flat_map(|(i, layer)| layer.members.iter().map(move |name| (name.as_str(), i)))
        .collect();
    let mut order = Vec::new();
    let mut stages = Vec::new();
    for stage in &plan.stages {
        let first = order.len();
        for name in &stage.layers {
            let layer = place[name.as_str()];
            // Layers that were made one follow one another.
            if order.last() != Some(&layer) {
                order.push(layer);
            }
        }
        stages.push(first..order.len());
    }
    let replicas = plan.stages.iter().map(|stage| stage.replicas);
    let partition = Partition {
        recompute: plan.stages.iter().map(|stage| stage.recompute).collect(),
        ..Partition::new(stages, replicas.collect())
    };
    Ok((graph.reordered(&order), partition))
}

fn memory_limit(cluster: &Cluster) -> f64 {
    cluster
        .memory_bytes
        .map_or(f64::INFINITY, |bytes| bytes as f64)
}

/// Samples per second. A profile in which nothing takes time has no speed: it is given as that of a nanosecond.
fn throughput(profile: &Profile, period: f64) -> f64 {
    profile.batch_size as f64 / period.max(1e-9)
}

fn gap(value: f64, bound: f64) -> f64 {
    if bound > 0.0 {
        (value / bound - 1.0).max(0.0)
    } else {
        0.0
    }
}

impl search::Found {
    /// Its costs, and the depths that suit it.
    fn judge(&self, machine: &Machine, request: &Request) -> Result<Judged, PlanningError> {
        let placement = self.placement.as_ref();
        judge(&self.graph, machine, &self.partition, placement, request)
    }

    /// Its largest load under the formula, seconds per minibatch.
    fn objective(&self, evaluation: &Evaluation, formula: Formula, machine: &Machine) -> f64 {
        self.judged.map_or_else(
            || evaluation.objective(formula, machine),
            |(value, _)| value,
        )
    }
}

/// Costs and depths of a partition. On servers the memory of each device counts.
fn judge(
    graph: &LayerGraph,
    machine: &Machine,
    partition: &Partition,
    placement: Option<&Placement>,
    request: &Request,
) -> Result<Judged, PlanningError> {
    let memory = placement.map_or(memory_limit(&request.cluster), |_| f64::INFINITY);
    let on = |machine: Machine, course| {
        let evaluation = Evaluation::placed(graph, partition, &machine, placement);
        let choice = depth::choose(&evaluation, &machine, course, memory)?;
        Ok(Judged {
            machine,
            evaluation,
            choice,
        })
    };
    let judged: Judged = on(*machine, request.course())?;
    let pace = judged.choice.pace;
    if pace.has_own_rounds() || machine.round.is_some() {
        return Ok(judged);
    }
    // Now it is known how often the stages step.
    let round = Some(pace.microbatches as f64);
    let course = Course {
        kind: pace.kind,
        microbatches: Some(pace.microbatches),
    };
    on(Machine { round, ..*machine }, course)
}

/// What each server's network card carries.
fn cards(cluster: &Cluster, evaluation: &Evaluation) -> Vec<Card> {
    let cards = evaluation.cards.iter().map(|card| Card {
        server: cluster.servers[card.server].name.clone(),
        bytes_sent: card.bytes.out,
        bytes_received: card.bytes.into,
        load_s: card.seconds,
    });
    cards.collect()
}

fn stages(
    graph: &LayerGraph,
    partition: &Partition,
    judged: &Judged,
) -> Result<Vec<Stage>, PlanningError> {
    let Judged {
        machine,
        evaluation,
        choice,
    } = judged;
    let (pace, shapes) = (choice.pace, &choice.shapes);
    let mut first_worker = 0;
    let stages = evaluation.stages.iter().zip(shapes).enumerate();
    let stages = stages.map(|(number, (e, shape))| {
        let workers: Vec<usize> = (first_worker..first_worker + shape.replicas).collect();
        first_worker += shape.replicas;
        let recompute = partition.recompute[number];
        let ring = e.ring_bytes(machine);
        let memory = e
            .sums
            .memory_shares(shape.replicas, pace.holding(shapes, number));
        let placement = evaluation.placement.as_ref();
        let (servers, kinds) = placement.map_or_else(Default::default, |p| p.devices_of(number));
        Ok(Stage {
            layers: e
                .layers
                .clone()
                .flat_map(|i| graph.layer(i).members.iter().cloned())
                .collect(),
            replicas: shape.replicas,
            depth: shape.depth,
            delay: shape.delay,
            versions: if pace.has_own_rounds() {
                versions(*shape)?
            } else {
                pace.holding(shapes, number).versions
            },
            recompute,
            memory_bytes: memory.total().ceil() as u64,
            memory,
            workers,
            servers,
            kinds,
            compute_s: e.loads.compute,
            sync_s: e.loads.sync,
            traffic_s: e.loads.traffic,
            sent_bytes: (e.sums.traffic.sent() + ring) / shape.replicas as f64,
            received_bytes: (e.sums.traffic.received() + ring) / shape.replicas as f64,
            parameter_bytes: e.sums.parameters as u64,
            stash_bytes: e.sums.stash as u64,
        })
    });
    stages.collect()
}

/// Weight versions that a replica holds once its stage is in its rhythm: other stages have no part in that.
fn versions(shape: StageShape) -> Result<usize, PlanningError> {
    let rounds = 2 * (shape.depth + 2);
    let alone = Schedule::one_f_one_b(&[shape], &[], rounds * shape.replicas)
        .map_err(SimulationError::from)?;
    Ok(alone.versions_held(0))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing;

    /// Chains with skips, any cluster, any scope.
    fn cases() -> impl Strategy<Value = (Profile, Request)> {
        let layer = (
            0u32..30,
            0u64..3000,
            0u64..3000,
            0u64..2000,
            any::<[bool; 3]>(),
        );
        (
            proptest::collection::vec(layer, 1..7),
            1usize..6,
            prop_oneof![Just(1e4), Just(1e6), Just(LOCAL_BANDWIDTH)],
            proptest::option::of(2000u64..40_000),
            any::<[bool; 3]>(),
            0usize..12,
        )
            .prop_map(
                |(layers, devices, bandwidth, memory, [straight, ilp, kappa], per_server)| {
                    let ms: Vec<f64> = layers.iter().map(|l| f64::from(l.0)).collect();
                    let weights: Vec<u64> = layers.iter().map(|l| l.1).collect();
                    let edges: Vec<u64> = layers[1..].iter().map(|l| l.3).collect();
                    let mut profile = testing::chain(&ms, &weights, &edges);
                    for (i, l) in layers.iter().enumerate() {
                        profile.layers[i].stash_bytes = l.2;
                        // A skip from this layer, and sometimes no link to the next one.
                        let [skip, cut, gradient] = l.4;
                        if skip && i + 2 < layers.len() {
                            let mut edge = profile.edges[i].clone();
                            edge.to = format!("L{}", layers.len() - 1);
                            edge.gradient = gradient;
                            profile.edges[i].gradient = gradient;
                            if cut {
                                profile.edges[i] = edge;
                            } else {
                                profile.edges.push(edge);
                            }
                        }
                    }
                    if kappa {
                        profile.communication_s_per_byte = 1e-7;
                    }
                    let (per_server, recompute) = (per_server % 4, per_server / 4);
                    let cluster = if per_server == 0 {
                        Cluster::flat(devices, bandwidth)
                    } else {
                        Cluster::uniform(devices, per_server, bandwidth, 1e7, memory)
                    };
                    let request = Request {
                        cluster: Cluster {
                            latency_s: 1e-5,
                            local: bandwidth >= LOCAL_BANDWIDTH && per_server == 0,
                            memory_bytes: memory,
                            ..cluster
                        },
                        solver: if ilp { Solver::Ilp } else { Solver::Dp },
                        formula: Formula::Ours,
                        scope: if straight {
                            Scope::Straight
                        } else {
                            Scope::All
                        },
                        recompute: [Recompute::Auto, Recompute::Never, Recompute::Always]
                            [recompute],
                        together: Vec::new(),
                        course: Course::default(),
                    };
                    (profile, request)
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]
        #[test]
        fn every_plan_is_sound_and_every_refusal_is_about_memory((profile, request) in cases()) {
            prop_assert_eq!(profile.validate(), Ok(()));
            match plan(&profile, profile.model.clone(), &request) {
                Ok(plan) => {
                    prop_assert!(plan.lower_bound_s <= plan.bottleneck_s);
                    prop_assert!(plan.bottleneck_s <= plan.period_s);
                    if let Some(other) = &plan.passed_over {
                        prop_assert!(other.period_s > plan.period_s);
                        prop_assert!(other.bottleneck_s <= plan.bottleneck_s * (1.0 + 1e-9));
                    }
                    prop_assert!(plan.workers <= request.cluster.devices);
                    let total = |of: fn(&Stage) -> f64| -> f64 {
                        plan.stages.iter().map(|s| of(s) * s.replicas as f64).sum()
                    };
                    let close = |bytes: f64| (bytes - plan.bytes_per_minibatch).abs() <= 1e-6 * bytes;
                    prop_assert!(close(total(|s| s.sent_bytes)));
                    prop_assert!(close(total(|s| s.received_bytes)));
                    let limit = request.cluster.memory_bytes.unwrap_or(u64::MAX);
                    prop_assert!(plan.stages.iter().all(|s| s.memory_bytes <= limit));
                    let placed = plan.placement().unwrap();
                    prop_assert_eq!(placed.is_some(), !request.cluster.servers.is_empty());
                    for minibatches in [1, 7, 50] {
                        prop_assert!(plan.schedule_for(minibatches).is_ok());
                    }
                }
                Err(PlanningError::Infeasible(_)) => {
                    prop_assert!(request.cluster.memory_bytes.is_some());
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }

        #[test]
        fn devices_alone_in_their_servers_are_devices_on_links_of_their_own(
            (profile, request) in cases()
        ) {
            let (old, bandwidth) = (&request.cluster, 1e5);
            let memory = old.memory_bytes;
            let flat = Cluster { memory_bytes: memory, ..Cluster::flat(old.devices, bandwidth) };
            let alone = Cluster::uniform(old.devices, 1, bandwidth, bandwidth, memory);
            let plan_on = |cluster| {
                let request = Request { cluster, ..request.clone() };
                plan(&profile, profile.model.clone(), &request)
            };
            match (plan_on(flat), plan_on(alone)) {
                (Ok(flat), Ok(alone)) => {
                    // Either may be shown better than the other one by a search that left something out.
                    prop_assert!(flat.lower_bound_s <= alone.bottleneck_s * (1.0 + 1e-9));
                    prop_assert!(alone.lower_bound_s <= flat.bottleneck_s * (1.0 + 1e-9));
                    if flat.optimal && alone.optimal {
                        let difference = (flat.bottleneck_s - alone.bottleneck_s).abs();
                        prop_assert!(difference <= 1e-9 * alone.bottleneck_s);
                    }
                }
                (Err(PlanningError::Infeasible(_)), Err(PlanningError::Infeasible(_))) => {}
                (flat, alone) => prop_assert!(false, "{:?} against {:?}", flat, alone),
            }
        }
    }
}
