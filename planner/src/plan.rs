//! The plan file, `dp.plan/1`: stages, replicas, depths, and what they are predicted to give.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};

pub use crate::cluster::Cluster;
use crate::cluster::ClusterError;
use crate::cost::{Fabric, MemoryShares, Placement};
use crate::file::{self, FileError};
use crate::profile::{FileRef, Reading};
use crate::schedule::{
    Pace, Schedule, ScheduleError, ScheduleKind, ShapeError, StageLink, StageShape,
};

/// The only plan schema this version reads and writes.
pub const PLAN_SCHEMA: &str = "dp.plan/1";

/// A partition of a model into replicated stages, with its prediction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Always [`PLAN_SCHEMA`].
    pub schema: String,
    /// The model that the plan is for: dp-run refuses any other.
    pub model: FileRef,
    /// The profile that the plan was made from.
    pub profile: FileRef,
    /// How the model was read when it was profiled: dp-run reads it in the same way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<Reading>,
    /// Samples per minibatch.
    pub batch_size: usize,
    /// Cores per worker in the profile.
    pub threads: usize,
    /// What the plan was made for.
    pub cluster: Cluster,
    /// The kind of schedule that the stages follow.
    pub schedule: ScheduleKind,
    /// Minibatches of `batch_size` samples between two steps, where all stages step together: the microbatches of one
    /// batch where the pipeline is flushed. Nothing where each stage steps after a round of its own replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub microbatches: Option<usize>,
    /// In pipeline order.
    pub stages: Vec<Stage>,
    /// Which stages send activations to which.
    pub links: Vec<StageLink>,
    /// Workers used: the sum of all replicas.
    pub workers: usize,
    /// Largest load of any resource, seconds per minibatch.
    pub bottleneck_s: f64,
    /// The resource with that load, in words.
    pub bottleneck: String,
    /// No feasible plan has a smaller bottleneck, seconds per minibatch.
    pub lower_bound_s: f64,
    /// `bottleneck_s / lower_bound_s - 1`.
    pub gap: f64,
    /// Whether the bottleneck is proved to be the smallest.
    pub optimal: bool,
    /// The plan with the smallest bottleneck, if it is not this one because this one is faster in the simulation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_over: Option<PassedOver>,
    /// Simulated steady-state seconds per minibatch.
    pub period_s: f64,
    /// What keeps the period more than 2 % above the bottleneck, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall: Option<String>,
    /// From the first forward until the first minibatch is through, seconds.
    #[serde(default)]
    pub fill_s: f64,
    /// From the first stage's last forward to the end, seconds.
    #[serde(default)]
    pub drain_s: f64,
    /// Share of the workers' time in steady state in which they do not compute.
    #[serde(default)]
    pub bubble_share: f64,
    /// `batch_size / period_s`.
    pub throughput_samples_per_s: f64,
    /// Bytes that cross any link per minibatch: activations, gradients, all-reduce.
    pub bytes_per_minibatch: f64,
    /// What each server's network card carries; empty where every device has a link of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<Card>,
    /// What the obvious alternatives would give.
    pub baselines: Baselines,
}

/// A plan that was not taken.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PassedOver {
    /// Replicas of its stages, as in `15-1`.
    pub configuration: String,
    /// Its largest load, seconds per minibatch.
    pub bottleneck_s: f64,
    /// Its simulated steady-state seconds per minibatch.
    pub period_s: f64,
}

/// A server's network card under a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Card {
    /// Name of the server.
    pub server: String,
    /// Bytes that leave the server per minibatch.
    pub bytes_sent: f64,
    /// Bytes that reach it per minibatch.
    pub bytes_received: f64,
    /// Seconds per minibatch that its busier direction is taken.
    pub load_s: f64,
}

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Layer names in execution order.
    pub layers: Vec<String>,
    /// Workers that run copies of this stage; minibatch m goes to replica m mod `replicas`.
    pub replicas: usize,
    /// K: minibatches in flight per replica.
    pub depth: usize,
    /// d: rounds by which the all-reduce may lag (0 or 1).
    pub delay: usize,
    /// Weight versions held per replica.
    pub versions: usize,
    /// Whether the stage keeps its input only and runs forward again before its backward.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub recompute: bool,
    /// Worker numbers of the replicas.
    pub workers: Vec<usize>,
    /// The server of each replica, a number into the cluster's servers; empty without servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<usize>,
    /// Which kind of that server's devices each replica is on; empty where every server has one kind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kinds: Vec<usize>,
    /// Forward, backward and step of one minibatch divided by the replicas, seconds per minibatch.
    pub compute_s: f64,
    /// All-reduce share of each replica's link, seconds per minibatch.
    pub sync_s: f64,
    /// Activations and gradients on each replica's link, seconds per minibatch.
    pub traffic_s: f64,
    /// Bytes that leave each replica over its link per minibatch: activations, gradients, its share of the all-reduce.
    #[serde(default)]
    pub sent_bytes: f64,
    /// Bytes that reach it.
    #[serde(default)]
    pub received_bytes: f64,
    /// Weights, bytes.
    pub parameter_bytes: u64,
    /// Stash of one minibatch, bytes.
    pub stash_bytes: u64,
    /// Memory of one replica at its fullest.
    pub memory_bytes: u64,
    /// What it is full of.
    #[serde(default)]
    pub memory: MemoryShares,
}

/// What the obvious alternatives give on the same cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baselines {
    /// Every device a full copy, gradients all-reduced in buckets each step.
    pub data_parallel: Baseline,
    /// Stages without replicas, one minibatch at a time, those for which that is fastest.
    pub model_parallel: Baseline,
    /// The best pipeline without replication.
    pub straight: Baseline,
}

/// One alternative.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Seconds per minibatch of `batch_size` samples.
    pub bottleneck_s: f64,
    /// Samples per second.
    pub throughput_samples_per_s: f64,
    /// Bytes that cross any link per minibatch.
    pub bytes_per_minibatch: f64,
    /// Memory of the fullest worker.
    pub memory_bytes: u64,
    /// Why it cannot run, if it cannot (for example memory).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub infeasible: Option<String>,
}

/// What makes a plan unusable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// A count that must be at least one.
    #[error("`{field}` is 0: it must be at least 1, make the plan again with dp-plan")]
    Zero {
        /// The field.
        field: &'static str,
    },
    /// A stage without layers.
    #[error("stage {stage} has no layers: make the plan again with dp-plan")]
    EmptyStage {
        /// Stage.
        stage: usize,
    },
    /// A layer in two places.
    #[error("layer `{layer}` is placed twice: each layer belongs to one stage")]
    DuplicateLayer {
        /// The layer.
        layer: String,
    },
    /// Worker numbers that are not 0, 1, 2, ... stage by stage.
    #[error(
        "stage {stage}: `workers` must be {expected:?}: workers are numbered stage by stage, replica by replica"
    )]
    Workers {
        /// Stage.
        stage: usize,
        /// What they have to be.
        expected: Vec<usize>,
    },
    /// A total that is not the stages'.
    #[error(
        "`workers` is {found}, but the stages have {replicas} replicas: make the plan again with dp-plan"
    )]
    WorkerCount {
        /// What the plan says.
        found: usize,
        /// What its stages add up to.
        replicas: usize,
    },
    /// A cluster that makes no sense.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// Replicas that are on no device of the cluster.
    #[error("stage {stage}: {rule}: make the plan again with dp-plan")]
    Placement {
        /// Stage.
        stage: usize,
        /// What is asked for.
        rule: &'static str,
    },
    /// Stages that the kind of schedule cannot run.
    #[error("schedule `{kind}` {rule}: make the plan again with dp-plan")]
    Kind {
        /// The kind.
        kind: ScheduleKind,
        /// What it asks for.
        rule: &'static str,
    },
    /// Shapes or links that make no pipeline.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Depths that cannot work.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
}

const KIND: file::Kind = file::Kind {
    what: "plan",
    schema: PLAN_SCHEMA,
    made_by: "dp-plan",
};

impl Plan {
    /// Reads and validates a plan.
    ///
    /// # Errors
    /// If the file cannot be read, is no plan of this schema, or contradicts itself.
    pub fn load(path: &Path) -> Result<Self, FileError> {
        let plan: Self = file::load(path, &KIND)?;
        plan.validate().map_err(|problem| FileError::Plan {
            path: path.to_owned(),
            problem,
        })?;
        Ok(plan)
    }

    /// Validates the plan and writes it, whole or not at all.
    ///
    /// # Errors
    /// If it contradicts itself or cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), FileError> {
        self.validate().map_err(|problem| FileError::Plan {
            path: path.to_owned(),
            problem,
        })?;
        file::write_atomically(path, self.to_json().as_bytes())
    }

    /// The plan as it stands in its file.
    #[must_use]
    pub fn to_json(&self) -> String {
        file::to_json(self)
    }

    /// What the schedule needs to know of the stages.
    #[must_use]
    pub fn shapes(&self) -> Vec<StageShape> {
        self.stages
            .iter()
            .map(|stage| StageShape {
                replicas: stage.replicas,
                depth: stage.depth,
                delay: stage.delay,
            })
            .collect()
    }

    /// The kind of schedule and how many minibatches make a step.
    #[must_use]
    pub fn pace(&self) -> Pace {
        Pace {
            kind: self.schedule,
            microbatches: self.microbatches.unwrap_or(0),
        }
    }

    /// The proved schedule that carries `minibatches` (for example an epoch) through the stages and drains.
    ///
    /// # Errors
    /// If the plan's stages, links or depths cannot work.
    pub fn schedule_for(&self, minibatches: usize) -> Result<Schedule, PlanError> {
        self.validate_kind()?;
        let schedule = Schedule::new(self.pace(), &self.shapes(), &self.links, minibatches)?;
        schedule.check()?;
        Ok(schedule)
    }

    /// Checks everything that the executor relies on.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), PlanError> {
        for (field, count) in [("batch_size", self.batch_size), ("threads", self.threads)] {
            if count == 0 {
                return Err(PlanError::Zero { field });
            }
        }
        let mut placed = HashSet::new();
        let mut next_worker: usize = 0;
        for (index, stage) in self.stages.iter().enumerate() {
            if stage.layers.is_empty() {
                return Err(PlanError::EmptyStage { stage: index });
            }
            if let Some(layer) = stage.layers.iter().find(|layer| !placed.insert(*layer)) {
                return Err(PlanError::DuplicateLayer {
                    layer: layer.clone(),
                });
            }
            if self.schedule == ScheduleKind::Interleaved {
                self.validate_piece(index, stage)?;
                continue;
            }
            let numbers = next_worker..next_worker.saturating_add(stage.replicas);
            if !stage.workers.iter().copied().eq(numbers.clone()) {
                // A replica count is what somebody typed: do not list a billion numbers.
                return Err(PlanError::Workers {
                    stage: index,
                    expected: numbers.take(64).collect(),
                });
            }
            next_worker += stage.replicas;
        }
        if self.schedule == ScheduleKind::Interleaved {
            return Ok(self.cluster.validate()?);
        }
        if self.workers != next_worker {
            return Err(PlanError::WorkerCount {
                found: self.workers,
                replicas: next_worker,
            });
        }
        self.cluster.validate()?;
        self.placement()?;
        self.validate_kind()?;
        // A few rounds show every kind of conflict between depths and replicas.
        let rounds = self
            .stages
            .iter()
            .map(|s| s.depth.saturating_mul(2).min(64))
            .max();
        let widest = self.stages.iter().map(|s| s.replicas).max();
        let batches = self.pace().microbatches.saturating_mul(2).min(4096);
        self.schedule_for((rounds.unwrap_or(0) * widest.unwrap_or(0)).max(batches))?;
        Ok(())
    }

    /// A stage of several on one worker.
    fn validate_piece(&self, index: usize, stage: &Stage) -> Result<(), PlanError> {
        let known = |worker: &usize| *worker < self.workers;
        if stage.replicas == 1 && stage.workers.len() == 1 && stage.workers.iter().all(known) {
            return Ok(());
        }
        Err(PlanError::Placement {
            stage: index,
            rule: "an interleaved stage is on one of the plan's workers, without replicas",
        })
    }

    /// Where the replicas are; none where every device has a link of its own.
    ///
    /// # Errors
    /// If a replica is on no device of the cluster, or two are on one.
    pub fn placement(&self) -> Result<Option<Placement>, PlanError> {
        let Some(fabric) = Fabric::new(&self.cluster) else {
            return Ok(None);
        };
        let mut free: Vec<usize> = fabric.slots.iter().map(|slot| slot.count).collect();
        let mut counts = Vec::with_capacity(self.stages.len());
        for (index, stage) in self.stages.iter().enumerate() {
            let error = |rule| PlanError::Placement { stage: index, rule };
            if stage.servers.len() != stage.replicas
                || !stage.kinds.is_empty() && stage.kinds.len() != stage.replicas
            {
                return Err(error("`servers` must name one server for each replica"));
            }
            let mut own = vec![0; free.len()];
            let mut last = 0;
            for (replica, &server) in stage.servers.iter().enumerate() {
                let kind = stage.kinds.get(replica).copied().unwrap_or(0);
                let slot = fabric.slot(server, kind);
                let slot = slot.filter(|&slot| slot >= last && free[slot] > 0);
                let slot = slot.ok_or_else(|| {
                    error("its replicas must be on devices of the cluster, server by server")
                })?;
                free[slot] -= 1;
                own[slot] += 1;
                last = slot;
            }
            counts.push(own);
        }
        Ok(Some(Placement { fabric, counts }))
    }

    fn validate_kind(&self) -> Result<(), PlanError> {
        let error = |rule| {
            Err(PlanError::Kind {
                kind: self.schedule,
                rule,
            })
        };
        match self.schedule {
            ScheduleKind::OneFOneB
            | ScheduleKind::VerticalSync
            | ScheduleKind::TwoBw
            | ScheduleKind::OneFOneBFlush
            | ScheduleKind::Gpipe => Ok(()),
            ScheduleKind::ModelParallel
                if self
                    .shapes()
                    .iter()
                    .any(|s| s.replicas != 1 || s.depth != 1) =>
            {
                error("has one replica and depth 1 in every stage")
            }
            ScheduleKind::DataParallel if self.stages.len() != 1 => error("has one stage"),
            ScheduleKind::ModelParallel | ScheduleKind::DataParallel => Ok(()),
            ScheduleKind::Interleaved => error("cannot be carried out yet"),
        }
    }
}
