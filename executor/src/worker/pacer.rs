//! Waits in place of compute, on absolute deadlines: what one wait is late, the next makes up for.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::emulation::Times;
use crate::stage::Stage;
use crate::work::Work;

/// How late waits ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lateness {
    /// Waits.
    pub waits: u64,
    /// Of all together.
    pub total: Duration,
    /// Of the latest.
    pub largest: Duration,
}

impl Lateness {
    /// The mean over all waits.
    pub fn mean(&self) -> Duration {
        self.total / u32::try_from(self.waits.max(1)).unwrap_or(u32::MAX)
    }
}

/// Lets the time of a worker's operations pass; lets none pass where the worker computes.
#[derive(Debug)]
pub struct Pacer(Option<Clock>);

#[derive(Debug)]
struct Clock {
    times: Times,
    /// Until when the device is taken.
    deadline: Instant,
    /// Start of the backward under way.
    begun: Instant,
    /// Waited for messages in all, when last asked.
    waited: Duration,
    lateness: Lateness,
}

impl Pacer {
    /// For a replica of a stage.
    pub fn new(stage: &Stage, replica: usize) -> Self {
        let Work::Emulated(emulated) = &stage.program else {
            return Pacer(None);
        };
        let speed = emulated.speeds[replica];
        let mut times = emulated.times.clone();
        if stage.recompute {
            let again = times.forward;
            times.backward += again;
            times.ready.iter_mut().for_each(|ready| *ready += again);
        }
        let all = [&mut times.forward, &mut times.backward, &mut times.step];
        for time in all.into_iter().chain(&mut times.ready) {
            *time = time.div_f64(speed);
        }
        let now = Instant::now();
        Pacer(Some(Clock {
            times,
            deadline: now,
            begun: now,
            waited: Duration::ZERO,
            lateness: Lateness::default(),
        }))
    }

    /// Whether waits take the place of compute.
    pub fn emulates(&self) -> bool {
        self.0.is_some()
    }

    /// Lets a forward pass; `waited` is how long the worker has waited for messages in all.
    pub fn forward(&mut self, waited: Duration) {
        if let Some(clock) = &mut self.0 {
            let start = clock.start(waited);
            clock.end(start + clock.times.forward);
        }
    }

    /// Begins a backward.
    pub fn begin_backward(&mut self, waited: Duration) {
        if let Some(clock) = &mut self.0 {
            clock.begun = clock.start(waited);
        }
    }

    /// Waits until the gradient of a weight is there.
    pub fn gradient(&self, weight: usize) {
        if let Some(clock) = &self.0 {
            sleep_until(clock.begun + clock.times.ready[weight]);
        }
    }

    /// Waits until the backward has ended.
    pub fn end_backward(&mut self) {
        if let Some(clock) = &mut self.0 {
            clock.end(clock.begun + clock.times.backward);
        }
    }

    /// Lets an optimizer step pass.
    pub fn step(&mut self, waited: Duration) {
        if let Some(clock) = &mut self.0 {
            let start = clock.start(waited);
            clock.end(start + clock.times.step);
        }
    }

    /// How late waits ended so far.
    pub fn lateness(&self) -> Lateness {
        self.0
            .as_ref()
            .map_or_else(Lateness::default, |clock| clock.lateness)
    }
}

impl Clock {
    /// When the device begins: when it was free, or, where the worker has waited since, now.
    fn start(&mut self, waited: Duration) -> Instant {
        let has_waited = waited > self.waited;
        self.waited = waited;
        if has_waited {
            self.deadline.max(Instant::now())
        } else {
            self.deadline
        }
    }

    fn end(&mut self, deadline: Instant) {
        self.deadline = deadline;
        sleep_until(deadline);
        let late = deadline.elapsed();
        self.lateness.waits += 1;
        self.lateness.total += late;
        self.lateness.largest = self.lateness.largest.max(late);
    }
}

fn sleep_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if !left.is_zero() {
        std::thread::sleep(left);
    }
}
