//! What one process has to say to the others, and what it hears from them.
//!
//! An exchange does not wait and moves nothing itself: its carrier asks for the next frame to a process and hands in
//! the frames that arrive. All-reduces go on in here while the worker computes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

use models::tensor::Tensor;

use super::frame::{Assembly, Letter, Parcel, encode, header};
use super::remote::{Endpoint, Inbox};
use super::ring::{Chunk, Ring};
use super::{Group, Message, Tag};

/// The process with this number coordinates the run.
const COORDINATOR: usize = 0;

/// Parcels up to this many bytes overtake larger ones.
pub const SMALL_BYTES: usize = 16 << 10;

/// What the threads of a process ask its exchange to do.
#[derive(Debug)]
pub enum Outgoing {
    /// Send a worker's message.
    Message {
        /// The receiving worker.
        to: usize,
        /// What it is about.
        tag: Tag,
        /// Content.
        message: Message,
    },
    /// Take part in an all-reduce.
    AllReduce {
        /// Who reduces.
        group: Group,
        /// Which of the group's.
        round: u64,
        /// This worker's part.
        tensors: Option<Vec<Tensor>>,
    },
    /// Send a letter.
    Letter {
        /// The receiving process.
        to: usize,
        /// Content.
        letter: Letter,
    },
    /// Nothing more will come from this process.
    Close,
    /// The run is lost.
    GiveUp,
}

/// Takes letters: from whom, and what. `None` when the coordinator has no more.
type Deliver = Box<dyn FnMut(usize, Option<Letter>) + Send>;

/// One process's exchange.
pub struct Exchange {
    worker: usize,
    inbox: Arc<Inbox>,
    gauges: Vec<Arc<AtomicU64>>,
    deliver: Deliver,
    outgoing: Receiver<Outgoing>,
    peers: Vec<Peer>,
    rings: HashMap<(usize, u64), Ring>,
    /// Chunks of all-reduces that this process's worker has not begun.
    early: HashMap<(usize, u64), Vec<Chunk>>,
    closed: bool,
    given_up: bool,
}

/// Another process.
#[derive(Debug, Default)]
struct Peer {
    /// Frames of small parcels.
    small: VecDeque<Vec<u8>>,
    /// Frames of the others.
    large: VecDeque<Vec<u8>>,
    /// Number of the next parcel.
    number: u64,
    /// Parcels of which frames are here, by number.
    arriving: HashMap<u64, Assembly>,
    /// Letters to it.
    written: u64,
    /// Letters from it that were delivered.
    read: u64,
    /// Letters that overtook others.
    unread: HashMap<u64, Option<Letter>>,
    closed: bool,
}

impl Exchange {
    /// The exchange of `worker` among `workers` processes, one worker each, and the way to it for the
    /// threads of the process. Letters go to `deliver`.
    pub fn new(
        worker: usize,
        workers: usize,
        deliver: impl FnMut(usize, Option<Letter>) + Send + 'static,
    ) -> (Self, Endpoint) {
        let (submit, outgoing) = channel();
        let inbox = Arc::new(Inbox::default());
        let gauges: Vec<Arc<AtomicU64>> = (0..workers).map(|_| Arc::default()).collect();
        let end = Endpoint {
            worker,
            workers,
            gauges: gauges.clone(),
            outgoing: submit,
            inbox: Arc::clone(&inbox),
        };
        let exchange = Exchange {
            worker,
            inbox,
            gauges,
            deliver: Box::new(deliver),
            outgoing,
            peers: (0..workers).map(|_| Peer::default()).collect(),
            rings: HashMap::new(),
            early: HashMap::new(),
            closed: false,
            given_up: false,
        };
        (exchange, end)
    }

    /// The worker of this process.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// Numbers of the other processes.
    pub fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let worker = self.worker;
        (0..self.peers.len()).filter(move |&peer| peer != worker)
    }

    /// What the threads ask for.
    pub fn outgoing(&self) -> &Receiver<Outgoing> {
        &self.outgoing
    }

    /// Begins what a thread asked for.
    pub fn submit(&mut self, outgoing: Outgoing) {
        match outgoing {
            Outgoing::Message { to, tag, message } => {
                self.put(to, &Parcel::Message(tag, message));
            }
            Outgoing::Letter { to, letter } => self.write(to, Some(letter)),
            Outgoing::AllReduce {
                group,
                round,
                tensors,
            } => self.reduce(group, round, tensors),
            Outgoing::GiveUp => self.given_up = true,
            Outgoing::Close => {
                self.closed = true;
                if self.worker == COORDINATOR {
                    for peer in self.others() {
                        self.write(peer, None);
                    }
                } else {
                    self.write(COORDINATOR, None);
                }
            }
        }
    }

    /// Tells those who watch this process that it is there: the coordinator all others, they the coordinator.
    pub fn beat(&mut self) {
        let busy = self.gauges[self.worker].load(Ordering::Relaxed);
        for peer in self.watched() {
            self.put(peer, &Parcel::Beat(busy));
        }
    }

    /// The processes that this one listens for.
    pub fn watched(&self) -> Vec<usize> {
        self.others()
            .filter(|&peer| self.worker == COORDINATOR || peer == COORDINATOR)
            .filter(|&peer| !self.peers[peer].closed)
            .collect()
    }

    /// The next frame to a process. Those of large parcels wait unless `large`.
    pub fn next_frame(&mut self, to: usize, large: bool) -> Option<Vec<u8>> {
        let peer = &mut self.peers[to];
        let small = peer.small.pop_front();
        small.or_else(|| large.then(|| peer.large.pop_front()).flatten())
    }

    /// Takes a frame that has arrived.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn accept(&mut self, from: usize, frame: Vec<u8>) -> io::Result<()> {
        let (number, index, count) = header(&frame)?;
        let arriving = &mut self.peers[from].arriving;
        let assembly = arriving
            .entry(number)
            .or_insert_with(|| Assembly::new(count));
        if !assembly.take(index, frame)? {
            return Ok(());
        }
        let assembly = arriving.remove(&number).expect("it was filled just now");
        match assembly.parcel()? {
            Parcel::Message(tag, message) => self.inbox.messages.change(|messages| {
                messages.insert((from, tag), message);
            }),
            Parcel::Chunk(chunk) => {
                let key = (chunk.group.first, chunk.round);
                if self.rings.contains_key(&key) {
                    self.advance(key, chunk);
                } else {
                    self.early.entry(key).or_default().push(chunk);
                }
            }
            Parcel::Letter(number, letter) => self.read(from, number, letter),
            Parcel::Beat(busy) => self.gauges[from].store(busy, Ordering::Relaxed),
        }
        Ok(())
    }

    /// Whether all has been said and heard; frames may still be on their way from here.
    pub fn is_over(&self) -> bool {
        let heard = self.worker != COORDINATOR || self.watched().is_empty();
        self.closed && heard && self.peers.iter().all(Peer::is_silent)
    }

    /// Whether a thread of this process has given the run up.
    pub fn has_given_up(&self) -> bool {
        self.given_up
    }

    fn write(&mut self, to: usize, letter: Option<Letter>) {
        let number = self.peers[to].written;
        self.peers[to].written += 1;
        self.put(to, &Parcel::Letter(number, letter));
    }

    /// Delivers letters in the order in which they were written.
    fn read(&mut self, from: usize, number: u64, letter: Option<Letter>) {
        let peer = &mut self.peers[from];
        peer.unread.insert(number, letter);
        while let Some(letter) = peer.unread.remove(&peer.read) {
            peer.read += 1;
            peer.closed = letter.is_none();
            if letter.is_some() || from == COORDINATOR {
                (self.deliver)(from, letter);
            }
        }
    }

    fn put(&mut self, to: usize, parcel: &Parcel) {
        let peer = &mut self.peers[to];
        let frames = encode(peer.number, parcel);
        peer.number += 1;
        let is_small = frames.len() == 1 && frames[0].len() <= SMALL_BYTES;
        if is_small {
            peer.small.extend(frames);
        } else {
            peer.large.extend(frames);
        }
    }

    fn reduce(&mut self, group: Group, round: u64, tensors: Option<Vec<Tensor>>) {
        let key = (group.first, round);
        if group.replicas == 1 {
            self.finish(key, tensors.unwrap_or_default());
            return;
        }
        let place = self.worker - group.first;
        let (ring, chunk) = Ring::begin(group, round, place, tensors);
        let next = ring.next();
        self.rings.insert(key, ring);
        self.put(key.0 + next, &Parcel::Chunk(chunk));
        for chunk in self.early.remove(&key).unwrap_or_default() {
            self.advance(key, chunk);
        }
    }

    /// Takes a chunk of an all-reduce under way.
    fn advance(&mut self, key: (usize, u64), chunk: Chunk) {
        let ring = self.rings.get_mut(&key).expect("callers look first");
        let next = ring.next();
        let pass_on = ring.take(chunk);
        let is_ready = ring.is_ready();
        if let Some(chunk) = pass_on {
            self.put(key.0 + next, &Parcel::Chunk(chunk));
        }
        if is_ready && let Some(ring) = self.rings.remove(&key) {
            self.finish(key, ring.into_means());
        }
    }

    fn finish(&mut self, key: (usize, u64), tensors: Vec<Tensor>) {
        self.inbox.means.change(|means| {
            means.insert(key, tensors);
        });
    }
}

impl Peer {
    fn is_silent(&self) -> bool {
        self.small.is_empty() && self.large.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::super::{Direction, RemoteTransport, Transport, local};
    use super::*;

    /// Carries frames between exchanges of one process until all are over.
    fn carry(mut exchanges: Vec<Exchange>) {
        while !exchanges.iter().all(Exchange::is_over) {
            for from in 0..exchanges.len() {
                while let Ok(outgoing) = exchanges[from].outgoing().try_recv() {
                    exchanges[from].submit(outgoing);
                }
                for to in exchanges[from].others() {
                    while let Some(frame) = exchanges[from].next_frame(to, true) {
                        exchanges[to].accept(from, frame).unwrap();
                    }
                }
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Runs `work` on every worker over exchanges; gives their results.
    fn over_exchanges<R: Send + 'static>(
        workers: usize,
        work: impl Fn(usize, &mut RemoteTransport) -> R + Send + Sync + Clone + 'static,
    ) -> Vec<R> {
        let (exchanges, ends): (Vec<Exchange>, Vec<Endpoint>) = (0..workers)
            .map(|worker| Exchange::new(worker, workers, |_, _| {}))
            .unzip();
        let carrier = thread::spawn(move || carry(exchanges));
        let threads: Vec<_> = ends
            .into_iter()
            .map(|end| {
                let work = work.clone();
                thread::spawn(move || {
                    let result = work(end.worker, &mut end.transport());
                    end.close();
                    result
                })
            })
            .collect();
        let results = threads.into_iter().map(|t| t.join().unwrap()).collect();
        carrier.join().unwrap();
        results
    }

    /// What worker `place` gives: numbers whose sum depends on the order.
    fn part(place: usize, lens: &[usize]) -> Vec<Tensor> {
        let value = |i: usize| {
            let mixed = (i as u32 + 1).wrapping_mul(2_654_435_761 ^ (place as u32) << 7);
            (mixed as f32 / 4e9 - 0.5) * 10f32.powi((i % 7) as i32 - 3)
        };
        let tensor =
            |&len: &usize| Tensor::from_f32(&[len], (0..len).map(value).collect::<Vec<_>>());
        lens.iter().map(tensor).collect()
    }

    fn reduce(
        end: &mut impl Transport,
        worker: usize,
        replicas: usize,
        givers: usize,
        lens: &[usize],
    ) -> Vec<Vec<u32>> {
        let group = Group { first: 0, replicas };
        let given = (worker < givers).then(|| part(worker, lens));
        end.all_reduce_begin(&group, 3, given);
        let means = end.all_reduce_wait(&group, 3).unwrap();
        let bits = |t: &Tensor| t.f32s().iter().map(|v| v.to_bits()).collect();
        means.iter().map(bits).collect()
    }

    #[test]
    fn an_all_reduce_has_the_same_bits_as_in_one_process() {
        let lens = [3, 0, 1, 5000, 17];
        for (replicas, givers) in [(2, 2), (2, 1), (3, 3), (3, 2), (4, 4), (5, 1), (7, 7)] {
            let (ends, _) = local(replicas);
            let threads: Vec<_> = ends
                .into_iter()
                .enumerate()
                .map(|(w, mut end)| {
                    thread::spawn(move || reduce(&mut end, w, replicas, givers, &lens))
                })
                .collect();
            let expected: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            let ring = over_exchanges(replicas, move |worker, end| {
                reduce(end, worker, replicas, givers, &lens)
            });
            assert_eq!(expected[0].len(), lens.len());
            assert!(expected.iter().all(|means| *means == expected[0]));
            assert_eq!(ring, expected, "{replicas} replicas, {givers} give");
        }
    }

    #[test]
    fn small_messages_pass_large_ones() {
        let (mut exchange, _end) = Exchange::new(0, 2, |_, _| {});
        let send = |minibatch, len| Outgoing::Message {
            to: 1,
            tag: Tag {
                minibatch,
                direction: Direction::Forward,
            },
            message: Message::Tensors(vec![Some(Tensor::from_f32(&[len], vec![0.5; len]))]),
        };
        exchange.submit(send(0, 1 << 20));
        exchange.submit(send(1, 1));
        let first = exchange.next_frame(1, false).unwrap();
        assert_eq!(header(&first).unwrap(), (1, 0, 1));
        assert!(exchange.next_frame(1, false).is_none());
        let mut arrived = 0;
        let (mut receiver, end) = Exchange::new(1, 2, |_, _| {});
        receiver.accept(0, first).unwrap();
        while let Some(frame) = exchange.next_frame(1, true) {
            receiver.accept(0, frame).unwrap();
            arrived += 1;
        }
        assert_eq!(arrived, 17);
        let tag = Tag {
            minibatch: 0,
            direction: Direction::Forward,
        };
        let message = end.transport().receive(0, tag).unwrap();
        assert!(matches!(message, Message::Tensors(t) if t[0].as_ref().unwrap().len() == 1 << 20));
    }

    #[test]
    fn letters_are_read_in_the_order_in_which_they_were_written() {
        let (mut writer, end) = Exchange::new(0, 2, |_, _| {});
        let letter = |text: &str, len| Letter {
            text: text.to_owned(),
            tensors: vec![Tensor::from_f32(&[len], vec![1.0; len])],
        };
        end.post(1, letter("large", 1 << 17));
        end.post(1, letter("small", 1));
        end.close();
        while let Ok(outgoing) = writer.outgoing().try_recv() {
            writer.submit(outgoing);
        }
        let (sender, texts) = channel();
        let (mut reader, _end) = Exchange::new(1, 2, move |_, letter| {
            let _ = sender.send(letter.map_or("end".to_owned(), |l| l.text));
        });
        let mut frames: Vec<_> = std::iter::from_fn(|| writer.next_frame(1, true)).collect();
        frames.reverse();
        for frame in frames {
            reader.accept(0, frame).unwrap();
        }
        assert_eq!(
            texts.try_iter().collect::<Vec<_>>(),
            ["large", "small", "end"]
        );
    }

    #[test]
    fn an_abort_ends_waits_before_and_after_it() {
        let (_exchange, end) = Exchange::new(0, 2, |_, _| {});
        let tag = Tag {
            minibatch: 0,
            direction: Direction::Forward,
        };
        let mut transport = end.transport();
        let waiting = thread::spawn(move || transport.receive(1, tag).is_err());
        end.abort_handle().abort();
        assert!(waiting.join().unwrap());
        assert!(end.transport().receive(1, tag).is_err());
    }
}
