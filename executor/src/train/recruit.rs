//! The first steps of a worker's thread: on its own cores it opens its own device.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use models::device;
use models::optimizer::OptimizerState;
use models::tensor::Tensor;

use super::{Job, cores_here};
use crate::affinity::{self, Seat};
use crate::stage::Stage;
use crate::transport::Transport;
use crate::usage::Meter;
use crate::worker::pacer::Pacer;
use crate::worker::versions::VersionStore;
use crate::worker::{Command, Event, Settings, Worker, WorkerError};

/// What a worker's thread needs to become a worker.
pub struct Recruit {
    id: usize,
    stage: usize,
    replica: usize,
    stages: Arc<[Stage]>,
    transport: Box<dyn Transport>,
    weights: Vec<Tensor>,
    states: Vec<Tensor>,
    settings: Settings,
    device: String,
    threads: usize,
    /// Whether it is alone in its process.
    alone: bool,
    /// Where it stays on cores of its own.
    seat: Option<Seat>,
    gauge: Arc<AtomicU64>,
    events: Sender<Event>,
}

impl Recruit {
    /// Replica `replica` of `stage`, on a seat, alone in its process or not.
    pub fn new(
        job: &Job,
        stage: &Stage,
        replica: usize,
        transport: Box<dyn Transport>,
        (seat, alone): (Seat, bool),
        gauge: Arc<AtomicU64>,
        events: Sender<Event>,
    ) -> Self {
        let weights = stage.program.weights().iter();
        let states = stage.program.states().iter();
        Recruit {
            id: stage.first_worker + replica,
            stage: stage.index,
            replica,
            stages: Arc::clone(&job.stages),
            transport,
            weights: weights.map(|&p| job.weights[p].clone()).collect(),
            states: states.map(|&s| job.states[s].clone()).collect(),
            settings: job.settings.clone(),
            device: job.device.clone(),
            threads: job.threads,
            alone,
            // Sharing cores is best left to the system.
            seat: Some(seat).filter(|seat| job.pin && seat.of * job.threads <= cores_here()),
            gauge,
            events,
        }
    }

    /// Opens the device, uploads the first weights, and carries out commands.
    pub fn run(self, commands: &Receiver<Command>) {
        if let Some(seat) = self.seat {
            affinity::bind(seat.index * self.threads, self.threads);
        }
        let device = match device::open(&self.device, self.threads) {
            Ok(device) => device,
            Err(error) => {
                let error = Some(WorkerError::Device(error));
                let worker = self.id;
                // Nobody listens any more when the coordinator has gone.
                let _ = self.events.send(Event::Failed { worker, error });
                return;
            }
        };
        let pacer = Pacer::new(&self.stages[self.stage], self.replica);
        let upload = |tensors: &[Tensor]| -> Vec<Tensor> {
            if pacer.emulates() {
                return tensors.to_vec();
            }
            tensors.iter().map(|t| device.upload(t)).collect()
        };
        let weights = upload(&self.weights);
        let states = upload(&self.states);
        Worker {
            id: self.id,
            stages: self.stages,
            stage: self.stage,
            replica: self.replica,
            transport: self.transport,
            versions: VersionStore::new(weights, self.settings.weight_stashing),
            states,
            optimizer_state: OptimizerState::default(),
            settings: self.settings,
            device,
            events: self.events,
            gauge: self.gauge,
            starved: Duration::ZERO,
            rounds: 0,
            pacer,
            meter: Meter::new(self.alone),
        }
        .run(commands);
    }
}
