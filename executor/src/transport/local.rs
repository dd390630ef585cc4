//! Workers that are threads of one process: messages hand over shared tensors, nothing is copied.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use models::tensor::Tensor;

use super::{Group, Message, Tag, Traffic, Transport, TransportError, message_bytes};

/// Makes the connected ends for `workers` workers, and a handle that aborts them all.
pub fn local(workers: usize) -> (Vec<LocalTransport>, AbortHandle) {
    let shared = Arc::new(Shared {
        inboxes: (0..workers).map(|_| Waited::default()).collect(),
        rounds: Waited::default(),
        aborted: AtomicBool::new(false),
    });
    let ends = (0..workers)
        .map(|worker| LocalTransport {
            worker,
            shared: Arc::clone(&shared),
            traffic: Traffic::default(),
        })
        .collect();
    (ends, AbortHandle(shared))
}

/// Ends every wait of every worker with [`TransportError::Aborted`].
#[derive(Clone, Debug)]
pub struct AbortHandle(Arc<Shared>);

impl AbortHandle {
    /// Aborts. Waits that begin later end at once.
    pub fn abort(&self) {
        self.0.aborted.store(true, Ordering::SeqCst);
        for inbox in &self.0.inboxes {
            inbox.wake();
        }
        self.0.rounds.wake();
    }
}

/// One worker's end of the in-process transport.
#[derive(Debug)]
pub struct LocalTransport {
    worker: usize,
    shared: Arc<Shared>,
    traffic: Traffic,
}

#[derive(Debug)]
struct Shared {
    /// One per worker: what it has not received yet, by sender and tag.
    inboxes: Vec<Waited<HashMap<(usize, Tag), Message>>>,
    /// All-reduces under way, by first worker and round.
    rounds: Waited<HashMap<(usize, u64), Round>>,
    aborted: AtomicBool,
}

/// A value that threads wait on.
#[derive(Debug, Default)]
struct Waited<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Waited<T> {
    fn lock(&self) -> MutexGuard<'_, T> {
        // A worker that panicked aborts the run; what it left behind is not used for anything.
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the lock first, so that nobody is between looking and waiting.
    fn wake(&self) {
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Waits until `ready` gives something.
    fn wait<R>(
        &self,
        aborted: &AtomicBool,
        traffic: &mut Traffic,
        mut ready: impl FnMut(&mut T) -> Option<R>,
    ) -> Result<R, TransportError> {
        let mut guard = self.lock();
        if let Some(result) = ready(&mut guard) {
            return Ok(result);
        }
        let begin = Instant::now();
        let result = loop {
            if aborted.load(Ordering::SeqCst) {
                break Err(TransportError::Aborted);
            }
            guard = self
                .changed
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
            if let Some(result) = ready(&mut guard) {
                break Ok(result);
            }
        };
        traffic.waited += begin.elapsed();
        result
    }
}

/// An all-reduce under way.
#[derive(Debug, Default)]
struct Round {
    /// What each worker that has begun gave, by its place in the group.
    given: HashMap<usize, Option<Vec<Tensor>>>,
    /// Set once all have begun.
    complete: Option<Arc<Reduction>>,
    /// Workers that have taken the result.
    taken: usize,
}

/// The contributions in the order of the workers and their means, made by whoever needs one first.
#[derive(Debug)]
struct Reduction {
    /// For each tensor what the workers gave, until its mean is made.
    parts: Vec<Mutex<Vec<Tensor>>>,
    means: Vec<OnceLock<Tensor>>,
}

impl Reduction {
    fn new(mut given: HashMap<usize, Option<Vec<Tensor>>>, replicas: usize) -> Self {
        let mut parts: Vec<Vec<Tensor>> = Vec::new();
        for tensors in (0..replicas).filter_map(|place| given.remove(&place).flatten()) {
            parts.resize_with(tensors.len(), Vec::new);
            for (part, tensor) in parts.iter_mut().zip(tensors) {
                part.push(tensor);
            }
        }
        Reduction {
            means: parts.iter().map(|_| OnceLock::new()).collect(),
            parts: parts.into_iter().map(Mutex::new).collect(),
        }
    }

    /// All means. Workers begin at different tensors, so that they share the work instead of waiting.
    fn means(&self, place: usize, replicas: usize) -> Vec<Tensor> {
        let tensors = self.means.len();
        let begin = place * tensors / replicas;
        for index in (begin..tensors).chain(0..begin) {
            self.means[index].get_or_init(|| {
                let mut parts = self.parts[index]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                mean(std::mem::take(&mut parts))
            });
        }
        self.means
            .iter()
            .filter_map(|mean| mean.get().cloned())
            .collect()
    }
}

/// Mean of at least one tensor, in the memory of the first when nobody else holds it.
fn mean(parts: Vec<Tensor>) -> Tensor {
    let count = parts.len();
    let mut parts = parts.into_iter();
    let mut sum = parts.next().expect("a mean is over at least one worker");
    if !sum.is_unique() {
        sum = Tensor::from_f32(sum.shape(), sum.f32s());
    }
    let totals = sum.f32s_mut().expect("it was copied when shared");
    for part in parts {
        for (total, &value) in totals.iter_mut().zip(part.f32s()) {
            *total += value;
        }
    }
    if count > 1 {
        let share = 1.0 / count as f32;
        totals.iter_mut().for_each(|total| *total *= share);
    }
    sum
}

impl Transport for LocalTransport {
    fn send(&mut self, to: usize, tag: Tag, message: Message) {
        if let Message::Tensors(tensors) = &message {
            self.traffic.bytes_sent += message_bytes(tensors);
        }
        let inbox = &self.shared.inboxes[to];
        inbox.lock().insert((self.worker, tag), message);
        inbox.changed.notify_all();
    }

    fn receive(&mut self, from: usize, tag: Tag) -> Result<Message, TransportError> {
        let Self {
            worker,
            shared,
            traffic,
        } = self;
        shared.inboxes[*worker].wait(&shared.aborted, traffic, |inbox| inbox.remove(&(from, tag)))
    }

    fn all_reduce_begin(&mut self, group: &Group, round: u64, tensors: Option<Vec<Tensor>>) {
        let replicas = group.replicas;
        if let Some(tensors) = &tensors {
            let bytes: u64 = tensors.iter().map(|t| t.bytes() as u64).sum();
            // What a ring moves per worker; here the memory is shared and nothing moves.
            self.traffic.bytes_sent += 2 * (replicas as u64 - 1) * bytes / replicas as u64;
        }
        let mut rounds = self.shared.rounds.lock();
        let entry = rounds.entry((group.first, round)).or_default();
        entry.given.insert(self.worker - group.first, tensors);
        if entry.given.len() == replicas {
            let given = std::mem::take(&mut entry.given);
            entry.complete = Some(Arc::new(Reduction::new(given, replicas)));
            self.shared.rounds.changed.notify_all();
        }
    }

    fn all_reduce_wait(
        &mut self,
        group: &Group,
        round: u64,
    ) -> Result<Vec<Tensor>, TransportError> {
        let Self {
            worker,
            shared,
            traffic,
        } = self;
        let key = (group.first, round);
        let reduction = shared.rounds.wait(&shared.aborted, traffic, |rounds| {
            let entry = rounds.get_mut(&key)?;
            let reduction = entry.complete.clone()?;
            entry.taken += 1;
            if entry.taken == group.replicas {
                rounds.remove(&key);
            }
            Some(reduction)
        })?;
        Ok(reduction.means(*worker - group.first, group.replicas))
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

#[cfg(test)]
mod tests {
    use super::super::Direction;
    use super::*;

    fn tag(minibatch: u64) -> Tag {
        Tag {
            minibatch,
            direction: Direction::Forward,
        }
    }

    fn message(value: f32) -> Message {
        Message::Tensors(vec![Some(Tensor::from_f32(&[1], [value]))])
    }

    fn value(message: Message) -> f32 {
        match message {
            Message::Tensors(tensors) => tensors[0].as_ref().unwrap().f32s()[0],
            Message::Stopped => panic!("stopped"),
        }
    }

    #[test]
    fn messages_are_matched_by_sender_and_tag_not_by_order() {
        let (mut ends, _) = local(3);
        ends[0].send(2, tag(1), message(1.0));
        ends[0].send(2, tag(0), message(0.5));
        ends[1].send(2, tag(0), message(7.0));
        assert_eq!(value(ends[2].receive(0, tag(0)).unwrap()), 0.5);
        assert_eq!(value(ends[2].receive(1, tag(0)).unwrap()), 7.0);
        assert_eq!(value(ends[2].receive(0, tag(1)).unwrap()), 1.0);
        assert_eq!(ends[0].traffic().bytes_sent, 8);
    }

    #[test]
    fn an_all_reduce_averages_over_those_that_gave_something() {
        let (ends, _) = local(4);
        let group = Group {
            first: 1,
            replicas: 3,
        };
        let give = [None, Some([1.0, 2.0]), Some([3.0, 6.0]), None];
        let results: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let threads: Vec<_> = ends
                .into_iter()
                .zip(give)
                .skip(1)
                .map(|(mut end, given)| {
                    let group = group.clone();
                    scope.spawn(move || {
                        let tensors = given.map(|v| vec![Tensor::from_f32(&[2], v)]);
                        end.all_reduce_begin(&group, 5, tensors);
                        let means = end.all_reduce_wait(&group, 5).unwrap();
                        assert!(end.shared.rounds.lock().len() <= 1);
                        means[0].f32s().to_vec()
                    })
                })
                .collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(results, vec![vec![2.0, 4.0]; 3]);
    }

    #[test]
    fn an_abort_ends_waits_before_and_after_it() {
        let (mut ends, abort) = local(2);
        let mut second = ends.pop().unwrap();
        let waiting = std::thread::spawn(move || second.receive(0, tag(0)).is_err());
        abort.abort();
        assert!(waiting.join().unwrap());
        assert!(ends[0].receive(1, tag(0)).is_err());
        let group = Group {
            first: 0,
            replicas: 2,
        };
        assert!(ends[0].all_reduce_wait(&group, 0).is_err());
    }
}
