//! The thread that gathers minibatches ahead of the workers that read them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use models::tensor::Tensor;

use super::{Minibatch, Samples};

/// Where minibatches come from.
#[derive(Clone, Debug)]
pub enum Feed {
    /// Rows of a data set in the order given, a batch at a time; the last may be smaller.
    Rows {
        /// The data.
        samples: Samples,
        /// Which rows, in which order.
        order: Vec<u32>,
    },
    /// The same made-up minibatches over and over: for timing alone.
    Repeat {
        /// At least one.
        pool: Arc<Vec<Minibatch>>,
        /// How many minibatches in all.
        minibatches: usize,
    },
}

impl Feed {
    /// All samples once, in the order of the file.
    pub fn all(samples: &Samples) -> Self {
        Feed::Rows {
            samples: samples.clone(),
            order: samples.rows().to_vec(),
        }
    }

    /// Minibatches in all.
    pub fn minibatches(&self) -> usize {
        match self {
            Feed::Rows { samples, order } => order.len().div_ceil(samples.batch_size()),
            Feed::Repeat { minibatches, .. } => *minibatches,
        }
    }

    /// A minibatch and the number of samples in it.
    fn get(&self, index: usize) -> (Minibatch, usize) {
        match self {
            Feed::Rows { samples, order } => {
                let batch = samples.batch_size();
                let rows = &order[index * batch..order.len().min((index + 1) * batch)];
                (samples.minibatch(rows), rows.len())
            }
            Feed::Repeat { pool, .. } => {
                let minibatch = pool[index % pool.len()].clone();
                let samples = minibatch.inputs[0].shape()[0];
                (minibatch, samples)
            }
        }
    }
}

/// Who reads what.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    /// Replicas of the reader's stage.
    pub replicas: usize,
    /// Which of them it is: it gets the minibatches m with m mod `replicas` equal to this.
    pub replica: usize,
    /// Whether it reads the features.
    pub input: bool,
    /// Whether it reads the labels.
    pub target: bool,
}

/// What one reader gets of a minibatch.
#[derive(Debug)]
pub struct Delivery {
    /// Minibatch number.
    pub minibatch: usize,
    /// Samples in it; fewer than the batch size only in the last one of an evaluation.
    pub samples: usize,
    /// Features, one for each input of the graph, if the reader wants them.
    pub inputs: Option<Vec<Tensor>>,
    /// Labels, if the reader wants them.
    pub target: Option<Tensor>,
}

/// A running loader.
#[derive(Debug)]
pub struct Loader {
    thread: JoinHandle<()>,
}

impl Loader {
    /// Starts a thread that delivers the minibatches of `feed`; one channel per reader, in order.
    ///
    /// `window` is how far a reader may fall behind before the loader waits for it. It must be at least
    /// the number of minibatches in flight in the whole pipeline, or readers could wait for each other.
    ///
    /// Once `stop` is set, the loader goes on to the next multiple of `granularity` minibatches (whole
    /// rounds in every stage) and closes the channels: readers take that as the end. With fewer than
    /// `granularity` left it delivers them all, so that every reader learns of a stop or none does.
    pub fn start(
        feed: Feed,
        readers: &[Reader],
        window: usize,
        granularity: usize,
        stop: Arc<AtomicBool>,
    ) -> (Self, Vec<Receiver<Delivery>>) {
        let (senders, receivers): (Vec<SyncSender<Delivery>>, Vec<Receiver<Delivery>>) =
            readers.iter().map(|_| sync_channel(window)).unzip();
        let readers = readers.to_vec();
        let thread = std::thread::Builder::new()
            .name("loader".into())
            .spawn(move || deliver(&feed, &readers, &senders, granularity, &stop))
            .expect("the operating system starts threads");
        (Loader { thread }, receivers)
    }

    /// Waits for the thread, which ends when all is delivered or nobody reads any more.
    ///
    /// False when it panicked: readers then saw an early end that nobody asked for.
    #[must_use]
    pub fn join(self) -> bool {
        self.thread.join().is_ok()
    }
}

fn deliver(
    feed: &Feed,
    readers: &[Reader],
    senders: &[SyncSender<Delivery>],
    granularity: usize,
    stop: &AtomicBool,
) {
    let minibatches = feed.minibatches();
    for minibatch in 0..minibatches {
        let may_stop = minibatch % granularity == 0 && minibatch + granularity <= minibatches;
        if may_stop && stop.load(Ordering::Relaxed) {
            return;
        }
        let (Minibatch { inputs, target }, samples) = feed.get(minibatch);
        for (reader, sender) in readers.iter().zip(senders) {
            if minibatch % reader.replicas != reader.replica || !(reader.input || reader.target) {
                continue;
            }
            let delivery = Delivery {
                minibatch,
                samples,
                inputs: reader.input.then(|| inputs.clone()),
                target: reader.target.then(|| target.clone()),
            };
            if sender.send(delivery).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn feed(minibatches: usize) -> Feed {
        let minibatch = Minibatch {
            inputs: vec![Tensor::from_f32(&[1, 1], [0.0])],
            target: Tensor::from_i64(&[1], [0]),
        };
        Feed::Repeat {
            pool: Arc::new(vec![minibatch]),
            minibatches,
        }
    }

    fn reader(replicas: usize, replica: usize) -> Reader {
        Reader {
            replicas,
            replica,
            input: replicas == 2,
            target: replicas != 2,
        }
    }

    fn numbers(receiver: &Receiver<Delivery>) -> Vec<usize> {
        receiver.iter().map(|d| d.minibatch).collect()
    }

    #[test]
    fn minibatches_go_round_robin_to_those_who_read_them() {
        let readers = [reader(2, 0), reader(2, 1), reader(1, 0)];
        let stop = Arc::new(AtomicBool::new(false));
        let (loader, receivers) = Loader::start(feed(5), &readers, 8, 2, stop);
        let first = receivers[0].recv().unwrap();
        assert!(first.inputs.is_some() && first.target.is_none());
        assert_eq!(numbers(&receivers[0]), [2, 4]);
        assert_eq!(numbers(&receivers[1]), [1, 3]);
        assert_eq!(numbers(&receivers[2]), [0, 1, 2, 3, 4]);
        assert!(loader.join());
    }

    #[test]
    fn a_stop_comes_between_whole_rounds() {
        let readers = [reader(2, 0), reader(2, 1)];
        let stop = Arc::new(AtomicBool::new(false));
        // The window holds one minibatch per reader: the loader cannot run far ahead.
        let (loader, mut receivers) = Loader::start(feed(100), &readers, 1, 2, stop.clone());
        assert_eq!(receivers[0].recv().unwrap().minibatch, 0);
        stop.store(true, Ordering::Relaxed);
        let odd_ones = receivers.remove(1);
        let odd = std::thread::spawn(move || numbers(&odd_ones));
        let even = numbers(&receivers[0]);
        let odd = odd.join().unwrap();
        assert!(odd.len() < 50);
        assert_eq!(even.len() + 1, odd.len(), "{even:?} {odd:?}");
        assert!(loader.join());
    }

    #[test]
    fn too_few_left_for_a_round_are_all_delivered() {
        let stop = Arc::new(AtomicBool::new(true));
        let (_, receivers) = Loader::start(feed(3), &[reader(1, 0)], 8, 4, stop);
        assert_eq!(numbers(&receivers[0]), [0, 1, 2]);
    }
}
