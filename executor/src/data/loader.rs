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
                let samples = minibatch.input.shape()[0];
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
    /// Features, if the reader wants them.
    pub input: Option<Tensor>,
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
        let (Minibatch { input, target }, samples) = feed.get(minibatch);
        for (reader, sender) in readers.iter().zip(senders) {
            if minibatch % reader.replicas != reader.replica || !(reader.input || reader.target) {
                continue;
            }
            let delivery = Delivery {
                minibatch,
                samples,
                input: reader.input.then(|| input.clone()),
                target: reader.target.then(|| target.clone()),
            };
            if sender.send(delivery).is_err() {
                return;
            }
        }
    }
}
