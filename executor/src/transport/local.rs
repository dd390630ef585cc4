//! Workers that are threads of one process: messages hand over shared tensors, nothing is copied.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use models::tensor::Tensor;

use super::ring::SumOrder;
use super::waited::Waited;
use super::{
    AbortHandle, Group, Message, Tag, Traffic, Transport, TransportError, message_bytes, ring_bytes,
};

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
    let abort = AbortHandle::new(move || {
        shared.aborted.store(true, Ordering::SeqCst);
        shared.inboxes.iter().for_each(Waited::wake);
        shared.rounds.wake();
    });
    (ends, abort)
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

/// What the workers gave and their means, made by whoever needs one first.
#[derive(Debug)]
struct Reduction {
    /// For each tensor what each worker gave, with its place, until the mean is made.
    parts: Vec<Mutex<Vec<(usize, Tensor)>>>,
    /// Place of each tensor's first element among the elements of all tensors.
    offsets: Vec<usize>,
    order: SumOrder,
    means: Vec<OnceLock<Tensor>>,
}

impl Reduction {
    fn new(mut given: HashMap<usize, Option<Vec<Tensor>>>, replicas: usize) -> Self {
        let mut parts: Vec<Vec<(usize, Tensor)>> = Vec::new();
        for place in 0..replicas {
            let Some(tensors) = given.remove(&place).flatten() else {
                continue;
            };
            parts.resize_with(tensors.len(), Vec::new);
            for (part, tensor) in parts.iter_mut().zip(tensors) {
                part.push((place, tensor));
            }
        }
        let mut elements = 0;
        let offsets = parts.iter().map(|part| {
            let offset = elements;
            elements += part[0].1.len();
            offset
        });
        Reduction {
            offsets: offsets.collect(),
            order: SumOrder { replicas, elements },
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
                self.order
                    .mean(std::mem::take(&mut parts), self.offsets[index])
            });
        }
        self.means
            .iter()
            .filter_map(|mean| mean.get().cloned())
            .collect()
    }
}

impl Transport for LocalTransport {
    fn send(&mut self, to: usize, tag: Tag, message: Message) {
        if let Message::Tensors(tensors) = &message {
            self.traffic.bytes_sent += message_bytes(tensors);
        }
        self.shared.inboxes[to].change(|inbox| {
            inbox.insert((self.worker, tag), message);
        });
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
            // What it would move between machines; here the memory is shared and nothing moves.
            self.traffic.bytes_sent += ring_bytes(tensors, replicas);
        }
        self.shared.rounds.change(|rounds| {
            let entry = rounds.entry((group.first, round)).or_default();
            entry.given.insert(self.worker - group.first, tensors);
            if entry.given.len() == replicas {
                let given = std::mem::take(&mut entry.given);
                entry.complete = Some(Arc::new(Reduction::new(given, replicas)));
            }
        });
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
