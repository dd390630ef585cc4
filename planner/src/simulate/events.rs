//! The event simulation: workers carry out their lists, links carry one message at a time in each direction.

use super::queue::{Happening, Message, Queue, Transfer};
use super::trace::{Activity, Span, Trace};
use super::ways::Ways;
use super::worker::{Worker, ring_messages};
use crate::cost::data_parallel::{Bucket, BucketedBackward};
use crate::cost::{Evaluation, Machine};
use crate::schedule::{Op, Schedule};

/// Carries out a schedule.
///
/// A message occupies its sender's link, the network cards of two servers and its receiver's link for bytes / bandwidth
/// each, cut through, first come first served but for small ones, which pass large ones, and arrives a latency later. An
/// all-reduce is a ring of 2(r-1) such messages per replica; long rings send several chunks as one message.
/// The core's share of communication is added to the operation that causes it.
///
/// None if the schedule gets stuck, which [`Schedule::check`] explains.
#[must_use]
pub fn run(schedule: &Schedule, evaluation: &Evaluation, machine: &Machine) -> Option<Trace> {
    simulate(Simulation::new(schedule, evaluation, machine)).map(|(trace, _)| trace)
}

/// Carries out a schedule like [`run`] and records what took time on every worker and link.
#[must_use]
pub fn record(
    schedule: &Schedule,
    evaluation: &Evaluation,
    machine: &Machine,
) -> Option<(Trace, Vec<Span>)> {
    let mut simulation = Simulation::new(schedule, evaluation, machine);
    simulation.spans = Some(Vec::new());
    simulate(simulation)
}

/// Records a data-parallel schedule whose gradients leave in buckets during the backward, one bucket after the other.
#[must_use]
pub fn record_bucketed(
    schedule: &Schedule,
    evaluation: &Evaluation,
    machine: &Machine,
    backward: &BucketedBackward,
) -> Option<(Trace, Vec<Span>)> {
    let mut simulation = Simulation::new(schedule, evaluation, machine);
    simulation.spans = Some(Vec::new());
    simulation.bucketed = Some(backward);
    simulate(simulation)
}

fn simulate(mut simulation: Simulation) -> Option<(Trace, Vec<Span>)> {
    let schedule = simulation.schedule;
    for worker in 0..schedule.operations.len() {
        simulation.proceed(worker, 0.0);
    }
    while let Some((now, what)) = simulation.queue.pop() {
        simulation.handle(what, now);
    }
    let mut lists = simulation.workers.iter().zip(&schedule.operations);
    if !lists.all(|(worker, list)| worker.position == list.len()) {
        return None;
    }
    let mut through = simulation.through;
    through.sort_unstable_by(f64::total_cmp);
    let trace = Trace {
        through,
        last_first_stage_forward: simulation.last_first_stage_forward,
        end: simulation.end,
    };
    Some((trace, simulation.spans.unwrap_or_default()))
}

struct Simulation<'a> {
    schedule: &'a Schedule,
    evaluation: &'a Evaluation,
    machine: &'a Machine,
    /// The backward of a data-parallel worker, if its gradients leave in buckets.
    bucketed: Option<&'a BucketedBackward>,
    /// For each stage, the bytes of activations to each stage which reads them.
    activations: Vec<Vec<(usize, f64)>>,
    /// For each stage, the bytes of gradients to each stage which made what it reads.
    gradients: Vec<Vec<(usize, f64)>>,
    ways: Ways,
    queue: Queue,
    workers: Vec<Worker>,
    /// Per minibatch: backwards still to come, and when the last one ended.
    remaining: Vec<usize>,
    through: Vec<f64>,
    last_first_stage_forward: f64,
    end: f64,
    /// What took time, if somebody wants to know.
    spans: Option<Vec<Span>>,
}

impl<'a> Simulation<'a> {
    fn new(schedule: &'a Schedule, evaluation: &'a Evaluation, machine: &'a Machine) -> Self {
        let mut activations = vec![Vec::new(); schedule.stages.len()];
        let mut gradients = activations.clone();
        for l in &evaluation.links {
            activations[l.from].push((l.to, l.activations));
            gradients[l.to].push((l.from, l.gradients));
        }
        Self {
            schedule,
            evaluation,
            machine,
            bucketed: None,
            activations,
            gradients,
            ways: Ways::new(evaluation, machine, schedule.operations.len()),
            queue: Queue::default(),
            workers: vec![Worker::default(); schedule.operations.len()],
            remaining: vec![schedule.stages.len(); schedule.minibatches],
            through: vec![0.0; schedule.minibatches],
            last_first_stage_forward: 0.0,
            end: 0.0,
            spans: None,
        }
    }

    fn handle(&mut self, what: Happening, now: f64) {
        match what {
            Happening::Computed { worker } => {
                self.computed(worker, now);
                self.proceed(worker, now);
            }
            Happening::BucketReady { worker, round } => {
                self.workers[worker].ring(round).ready += 1;
                self.pass_chunks(worker, round, now);
            }
            Happening::OnTheWay { transfer, part } => self.go_on(transfer, part, now),
            Happening::Arrived { to, message } => {
                if let Message::Chunk { round } = message {
                    self.workers[to].ring(round).received += 1;
                    self.pass_chunks(to, round, now);
                } else {
                    self.workers[to].arrived.push(message);
                }
                if !self.workers[to].computing {
                    self.proceed(to, now);
                }
            }
        }
    }

    /// Carries out operations until one takes time or has to wait.
    fn proceed(&mut self, worker: usize, now: f64) {
        let stage = self.schedule.roles[worker].stage;
        while let Some(&op) = self.schedule.operations[worker].get(self.workers[worker].position) {
            match op {
                Op::SendActivations {
                    minibatch,
                    stage: to_stage,
                    peer,
                } => {
                    let bytes = bytes_to(&self.activations[stage], to_stage);
                    let message = Message::Activations {
                        from: stage,
                        minibatch,
                    };
                    let cost = (bytes, self.machine.latency);
                    self.transfer(worker, peer, cost, message, now);
                }
                Op::SendGradients {
                    minibatch,
                    stage: to_stage,
                    peer,
                } => {
                    let bytes = bytes_to(&self.gradients[stage], to_stage);
                    let message = Message::Gradients {
                        from: stage,
                        minibatch,
                    };
                    let cost = (bytes, self.machine.latency);
                    self.transfer(worker, peer, cost, message, now);
                }
                Op::ReceiveActivations {
                    minibatch, stage, ..
                } => {
                    let message = Message::Activations {
                        from: stage,
                        minibatch,
                    };
                    if !self.workers[worker].take(message) {
                        return;
                    }
                }
                Op::ReceiveGradients {
                    minibatch, stage, ..
                } => {
                    let message = Message::Gradients {
                        from: stage,
                        minibatch,
                    };
                    if !self.workers[worker].take(message) {
                        return;
                    }
                }
                Op::AllReduce { round } => {
                    self.workers[worker].ring(round).ready = self.buckets();
                    self.pass_chunks(worker, round, now);
                }
                Op::Step { round, .. } => {
                    if !self.reduced(worker, round) {
                        return;
                    }
                    self.workers[worker]
                        .rings
                        .retain(|ring| ring.round != round);
                    self.compute(worker, self.step_seconds(stage), now);
                    return;
                }
                Op::Forward { .. } => {
                    let traffic = self.evaluation.stages[stage].sums.traffic;
                    let messages = traffic.input + traffic.output;
                    let own = self.evaluation.stages[stage].sums.forward;
                    let seconds = own + self.machine.message_s_per_byte * messages;
                    self.compute(worker, seconds, now);
                    return;
                }
                Op::Backward { minibatch, .. } if self.bucketed.is_some() => {
                    self.bucketed_backward(worker, minibatch, now);
                    return;
                }
                Op::Backward { .. } => {
                    let traffic = self.evaluation.stages[stage].sums.traffic;
                    let messages = traffic.input_gradient + traffic.output_gradient;
                    let own = self.evaluation.stages[stage].sums.backward;
                    let seconds = own + self.machine.message_s_per_byte * messages;
                    self.compute(worker, seconds, now);
                    return;
                }
            }
            self.workers[worker].position += 1;
        }
    }

    /// All but the buckets that are full at its end, which the all-reduce behind it sends.
    fn bucketed_backward(&mut self, worker: usize, minibatch: usize, now: f64) {
        let Some(backward) = self.bucketed else {
            return;
        };
        let round = minibatch / self.replicas(worker);
        let speed = self.ways.speed(worker);
        let early = |bucket: &&Bucket| bucket.ready < backward.seconds;
        for bucket in backward.buckets.iter().filter(early) {
            let ready = now + bucket.ready / speed;
            self.queue
                .push(ready, Happening::BucketReady { worker, round });
        }
        self.compute(worker, backward.seconds, now);
    }

    /// Parts that each stage's gradient is all-reduced in.
    fn buckets(&self) -> usize {
        self.bucketed.map_or(1, |backward| backward.buckets.len())
    }

    /// `seconds` are those of the profiled device.
    fn compute(&mut self, worker: usize, seconds: f64, now: f64) {
        let seconds = seconds / self.ways.speed(worker);
        self.workers[worker].computing = true;
        if let Some(spans) = &mut self.spans {
            spans.push(Span {
                worker,
                start: now,
                end: now + seconds,
                activity: Activity::Compute(
                    self.schedule.operations[worker][self.workers[worker].position],
                ),
            });
        }
        self.queue
            .push(now + seconds, Happening::Computed { worker });
    }

    fn computed(&mut self, worker: usize, now: f64) {
        self.end = now;
        let op = self.schedule.operations[worker][self.workers[worker].position];
        match op {
            Op::Forward { .. } if self.schedule.roles[worker].stage == 0 => {
                self.last_first_stage_forward = now;
            }
            Op::Backward { minibatch, .. } => {
                self.remaining[minibatch] -= 1;
                if self.remaining[minibatch] == 0 {
                    self.through[minibatch] = now;
                }
            }
            _ => {}
        }
        self.workers[worker].computing = false;
        self.workers[worker].position += 1;
    }

    fn transfer(
        &mut self,
        from: usize,
        to: usize,
        (bytes, latency): (f64, f64),
        message: Message,
        now: f64,
    ) {
        let transfer = Transfer {
            from,
            to,
            bytes,
            latency,
            slowest: 0.0,
            message,
        };
        self.go_on(transfer, 0, now);
    }

    /// Takes the next part of a message's way as soon as it is free; behind the last one the message is there.
    fn go_on(&mut self, mut transfer: Transfer, part: usize, now: f64) {
        let Transfer {
            from, to, bytes, ..
        } = transfer;
        let (start, seconds, last) = self.ways.take((from, to), part, bytes, now);
        transfer.slowest = transfer.slowest.max(seconds);
        if part == 0
            && let Some(spans) = &mut self.spans
        {
            let activity = match transfer.message {
                Message::Activations { minibatch, .. } => Activity::Activations { minibatch, to },
                Message::Gradients { minibatch, .. } => Activity::Gradients { minibatch, to },
                Message::Chunk { round } => Activity::AllReduce { round, to },
            };
            spans.push(Span {
                worker: from,
                start,
                end: start + seconds,
                activity,
            });
        }
        if last {
            let message = transfer.message;
            let arrival = start + transfer.slowest + transfer.latency;
            self.queue.push(arrival, Happening::Arrived { to, message });
        } else {
            let part = part + 1;
            self.queue
                .push(start, Happening::OnTheWay { transfer, part });
        }
    }

    fn replicas(&self, worker: usize) -> usize {
        self.schedule.stages[self.schedule.roles[worker].stage].replicas
    }

    fn step_seconds(&self, stage: usize) -> f64 {
        let s = &self.evaluation.stages[stage];
        if self.bucketed.is_some() {
            return s.sums.step;
        }
        s.sums.step + self.machine.reduce_core_s(s.replicas, s.sums.parameters)
    }

    fn reduced(&self, worker: usize, round: usize) -> bool {
        let messages = self.buckets() * ring_messages(self.replicas(worker));
        messages == 0
            || self.workers[worker].rings.iter().any(|ring| {
                ring.round == round && ring.sent == messages && ring.received == messages
            })
    }

    /// Sends on the chunks of a ring that the worker has ready: its own first, then each one it received.
    fn pass_chunks(&mut self, worker: usize, round: usize, now: f64) {
        let role = self.schedule.roles[worker];
        let replicas = self.replicas(worker);
        let messages = ring_messages(replicas);
        // Chunks of the real ring in each message of the simulated one.
        let chunks = (2 * (replicas - 1)) as f64 / messages as f64;
        let whole = self.evaluation.stages[role.stage].sums.parameters;
        let next = worker - role.replica + (role.replica + 1) % replicas;
        loop {
            let ring = self.workers[worker].ring(round);
            // A bucket begins where the one before has come round.
            if ring.sent == ring.ready * messages || ring.sent > ring.received {
                return;
            }
            let bucket = ring.sent / messages;
            ring.sent += 1;
            let bytes = self.bucketed.map_or(whole, |b| b.buckets[bucket].bytes);
            let chunk = bytes / replicas as f64;
            let cost = (chunks * chunk, chunks * self.machine.latency);
            self.transfer(worker, next, cost, Message::Chunk { round }, now);
        }
    }
}

fn bytes_to(stages: &[(usize, f64)], stage: usize) -> f64 {
    let found = stages.iter().find(|(to, _)| *to == stage);
    found.map_or(0.0, |(_, bytes)| *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::Partition;
    use crate::graph::LayerGraph;
    use crate::schedule::{StageLink, StageShape};
    use crate::testing;

    const LINK: StageLink = StageLink {
        from: 0,
        to: 1,
        gradient: true,
    };

    fn machine(bandwidth: f64, latency: f64) -> Machine {
        Machine {
            bandwidth,
            latency,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        }
    }

    /// Two layers of 3 ms (1 forward, 2 backward), one stage each.
    fn pair(machine: &Machine, replicas: [usize; 2]) -> Evaluation {
        let graph = LayerGraph::new(&testing::chain(&[3.0, 3.0], &[1000, 1000], &[1000]));
        let partition = Partition::new(vec![0..1, 1..2], replicas.to_vec());
        Evaluation::new(&graph, &partition, machine)
    }

    fn shape(replicas: usize, depth: usize) -> StageShape {
        StageShape {
            replicas,
            depth,
            delay: 0,
        }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    }

    #[test]
    fn one_minibatch_goes_down_and_up() {
        // 1 + link 1 + 1 + 2 + link 1 + 2 ms, and half a millisecond of latency on each link.
        let machine = machine(1e6, 0.5e-3);
        let schedule = Schedule::model_parallel(2, &[LINK], 2).unwrap();
        let trace = run(&schedule, &pair(&machine, [1, 1]), &machine).unwrap();
        close(trace.through[0], 9e-3);
        close(trace.through[1], 18e-3);
        close(trace.end, 18e-3);
    }

    #[test]
    fn a_full_pipeline_takes_the_bottleneck_per_minibatch() {
        let machine = machine(1e15, 0.0);
        let shapes = [shape(1, 2), shape(1, 1)];
        let schedule = Schedule::one_f_one_b(&shapes, &[LINK], 20).unwrap();
        let trace = run(&schedule, &pair(&machine, [1, 1]), &machine).unwrap();
        close(trace.through[10] - trace.through[9], 3e-3);
    }

    #[test]
    fn a_ring_takes_its_messages_one_after_the_other() {
        // Three replicas: 4 messages of a third of 1000 bytes at 1 MB/s, a latency each, before the step.
        let machine = machine(1e6, 0.1e-3);
        let graph = LayerGraph::new(&testing::chain(&[3.0], &[1000], &[]));
        let partition = Partition::new(std::iter::once(0..1).collect(), vec![3]);
        let evaluation = Evaluation::new(&graph, &partition, &machine);
        let schedule = Schedule::data_parallel(3, 6).unwrap();
        let trace = run(&schedule, &evaluation, &machine).unwrap();
        close(trace.through[0], 3e-3);
        close(
            trace.through[3],
            3e-3 + 4.0 * (1.0 / 3.0 + 0.1) * 1e-3 + 3e-3,
        );
    }

    #[test]
    fn bucketed_data_parallelism_takes_what_the_cost_model_says() {
        let weights = [0, 40_000_000, 30_000_000, 10_000_000, 1000];
        let mut profile = testing::chain(&[3.0, 6.0, 9.0, 3.0, 3.0], &weights, &[1; 4]);
        profile.layers[1].step_ms = 2.0;
        let graph = LayerGraph::new(&profile);
        for workers in [1, 2, 3, 8, 40] {
            for (bandwidth, latency, kappa) in [
                (1e9, 0.0, 0.0),
                (1e9, 1e-4, 0.0),
                (1e10, 1e-5, 1e-11),
                (1e12, 0.0, 0.0),
            ] {
                let machine = Machine {
                    reduce_s_per_byte: kappa,
                    ..machine(bandwidth, latency)
                };
                let partition = Partition::new(std::iter::once(0..5).collect(), vec![workers]);
                let evaluation = Evaluation::new(&graph, &partition, &machine);
                let backward = BucketedBackward::new(&graph, workers, &machine);
                let schedule = Schedule::data_parallel(workers, 3 * workers).unwrap();
                let (trace, spans) =
                    record_bucketed(&schedule, &evaluation, &machine, &backward).unwrap();
                let step = crate::cost::data_parallel::step_seconds(&graph, workers, &machine);
                close(trace.end, 3.0 * step);
                let reduced = |s: &&Span| matches!(s.activity, Activity::AllReduce { .. });
                assert_eq!(spans.iter().any(|s| reduced(&s)), workers > 1);
            }
        }
    }
}
