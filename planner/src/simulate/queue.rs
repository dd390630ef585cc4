//! The queue of a simulation: what happens when, in an order that does not depend on the machine.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A tensor or a chunk of a ring on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Activations { from: usize, minibatch: usize },
    Gradients { from: usize, minibatch: usize },
    Chunk { round: usize },
}

/// A message between two workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Transfer {
    pub from: usize,
    pub to: usize,
    pub bytes: f64,
    pub latency: f64,
    /// Seconds that the slowest part of its way so far takes.
    pub slowest: f64,
    pub message: Message,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Happening {
    /// The worker is through with its operation.
    Computed { worker: usize },
    /// Gradients of the round fill another bucket while the worker's backward goes on.
    BucketReady { worker: usize, round: usize },
    /// The message has come to a part of its way.
    OnTheWay { transfer: Transfer, part: usize },
    /// The message is there.
    Arrived { to: usize, message: Message },
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    time: f64,
    /// Breaks ties by age, so that the same input gives the same result.
    number: u64,
    what: Happening,
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.time
            .total_cmp(&other.time)
            .then(self.number.cmp(&other.number))
    }
}

/// What is going to happen, the earliest first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    events: BinaryHeap<Reverse<Event>>,
    numbered: u64,
}

impl Queue {
    pub(super) fn push(&mut self, time: f64, what: Happening) {
        self.numbered += 1;
        self.events.push(Reverse(Event {
            time,
            number: self.numbered,
            what,
        }));
    }

    /// The next happening and its time.
    pub(super) fn pop(&mut self) -> Option<(f64, Happening)> {
        let Reverse(event) = self.events.pop()?;
        Some((event.time, event.what))
    }
}
