//! Carries frames by MPI: one thread makes all MPI calls, none of which waits.
//!
//! A blocked `MPI_Recv` keeps a core busy, so this thread naps while nothing moves; the longer nothing
//! has moved, the longer it naps, up to a limit. A thread that has something to send wakes it at once.

mod agree;

use std::mem::ManuallyDrop;
use std::os::raw::{c_int, c_void};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use mpi::ffi;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{AsRaw, Communicator, Equivalence};

use super::exchange::{Exchange, SMALL_BYTES};
use super::frame::FRAME_BYTES;

pub use agree::{Difference, agree, all_ready, hosts};

/// Receives that wait for whatever comes.
const RECEIVES: usize = 8;

/// Frames of large parcels on their way to one process: the next is ready when one is through, and a small
/// parcel waits for no more than these.
const LARGE_IN_FLIGHT: usize = 2;

/// A message is noticed after at most this share of the time it was waited for…
const NAP_SHARE: u32 = 8;
/// …but not sooner than this,
const SHORTEST_NAP: Duration = Duration::from_micros(50);
/// nor later.
const LONGEST_NAP: Duration = Duration::from_millis(1);

/// How often a process says that it is there.
const BEAT: Duration = Duration::from_secs(1);
/// A process that says nothing for so long is given up.
const PATIENCE: Duration = Duration::from_secs(6);

/// All of an MPI program's frames have one tag.
const TAG: c_int = 1;

/// Why a run over MPI cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CarrierError {
    /// A process has not been heard of.
    #[error("nothing was heard of it for {} s: it hangs, was stopped, or its machine or network is down", PATIENCE.as_secs())]
    Silent {
        /// The worker in it.
        worker: usize,
    },
    /// A process sent what is no frame.
    #[error("it sent what cannot be read: {reason}")]
    Unreadable {
        /// The worker in it.
        worker: usize,
        /// What is wrong.
        reason: std::io::Error,
    },
}

impl CarrierError {
    /// The worker whose process is to blame.
    pub fn worker(&self) -> usize {
        match self {
            CarrierError::Silent { worker } | CarrierError::Unreadable { worker, .. } => *worker,
        }
    }
}

/// Carries frames until all processes have said that they are through, or this one has given up. Call it on
/// the thread that initialised MPI, on every process; worker numbers are ranks.
///
/// # Errors
/// When a process falls silent or sends what cannot be read. Then, and after giving up, requests may be
/// under way: end the program with `MPI_Abort`.
pub fn carry(world: &SimpleCommunicator, exchange: &mut Exchange) -> Result<(), CarrierError> {
    // Requests that are under way at an untimely end keep their memory.
    let mut requests = ManuallyDrop::new(Requests::new(world));
    let others: Vec<usize> = exchange.others().collect();
    let mut heard = vec![Instant::now(); others.len() + 1];
    let mut beaten = Instant::now();
    let mut looked = Instant::now();
    let mut moved = Instant::now();
    loop {
        let mut busy = false;
        while let Ok(outgoing) = exchange.outgoing().try_recv() {
            exchange.submit(outgoing);
            busy = true;
        }
        let now = Instant::now();
        if now - beaten > BEAT {
            beaten = now;
            exchange.beat();
        }
        for &to in &others {
            while let Some(frame) = exchange.next_frame(to, requests.large_to(to) < LARGE_IN_FLIGHT)
            {
                requests.send(to, frame);
                busy = true;
            }
        }
        busy |= requests.test_sends();
        for (from, frame) in requests.test_receives() {
            heard[from] = now;
            busy = true;
            exchange
                .accept(from, frame)
                .map_err(|reason| CarrierError::Unreadable {
                    worker: from,
                    reason,
                })?;
        }
        if exchange.is_over() && requests.sends.is_empty() {
            requests.cancel_receives();
            ManuallyDrop::into_inner(requests);
            return Ok(());
        }
        if exchange.has_given_up() {
            return Ok(());
        }
        if now - looked > PATIENCE / 2 {
            // It was this process that was stopped: hear the others out first.
            heard.fill(now);
        }
        looked = now;
        for worker in exchange.watched() {
            if now - heard[worker] > PATIENCE {
                return Err(CarrierError::Silent { worker });
            }
        }
        if busy {
            moved = now;
            continue;
        }
        let nap = ((now - moved) / NAP_SHARE).clamp(SHORTEST_NAP, LONGEST_NAP);
        match exchange.outgoing().recv_timeout(nap) {
            Ok(outgoing) => {
                exchange.submit(outgoing);
                moved = Instant::now();
            }
            Err(RecvTimeoutError::Timeout) => {}
            // All threads of this process are through; the others may still talk.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(nap),
        }
    }
}

/// Requests under way, and the memory that they read and write.
struct Requests {
    world: ffi::MPI_Comm,
    byte: ffi::MPI_Datatype,
    sends: Vec<ffi::MPI_Request>,
    /// Of each send its receiver and its frame.
    sent: Vec<(usize, Vec<u8>)>,
    receives: Vec<ffi::MPI_Request>,
    received: Vec<Vec<u8>>,
    /// Frames of large parcels on their way, by receiver.
    large: Vec<usize>,
    /// Room for what a test reports.
    indices: Vec<c_int>,
    statuses: Vec<ffi::MPI_Status>,
}

impl Requests {
    fn new(world: &SimpleCommunicator) -> Self {
        let mut requests = Requests {
            world: world.as_raw(),
            byte: u8::equivalent_datatype().as_raw(),
            sends: Vec::new(),
            sent: Vec::new(),
            receives: Vec::new(),
            received: Vec::new(),
            large: vec![0; world.size() as usize],
            indices: Vec::new(),
            statuses: Vec::new(),
        };
        for _ in 0..RECEIVES {
            let mut frame = vec![0; FRAME_BYTES];
            let request = requests.receive_into(&mut frame);
            requests.receives.push(request);
            requests.received.push(frame);
        }
        requests
    }

    fn large_to(&self, to: usize) -> usize {
        self.large[to]
    }

    fn send(&mut self, to: usize, frame: Vec<u8>) {
        if is_large(&frame) {
            self.large[to] += 1;
        }
        // SAFETY: a null request is what MPI_Isend overwrites.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the frame's memory stays where it is and is not written until the request is complete: `sent` keeps
        // it, and moving a Vec does not move its elements. Errors end the program (MPI_ERRORS_ARE_FATAL).
        unsafe {
            ffi::MPI_Isend(
                frame.as_ptr().cast::<c_void>(),
                frame.len() as c_int,
                self.byte,
                to as c_int,
                TAG,
                self.world,
                &raw mut request,
            );
        }
        self.sends.push(request);
        self.sent.push((to, frame));
    }

    /// Begins to receive into `frame`, which must live until the request is complete.
    fn receive_into(&self, frame: &mut [u8]) -> ffi::MPI_Request {
        // SAFETY: as in `send`.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: `received` keeps the frame until the request is complete, and nobody reads it before.
        unsafe {
            ffi::MPI_Irecv(
                frame.as_mut_ptr().cast::<c_void>(),
                frame.len() as c_int,
                self.byte,
                ffi::RSMPI_ANY_SOURCE,
                TAG,
                self.world,
                &raw mut request,
            );
        }
        request
    }

    /// Lets go of frames that are through; whether there was one.
    fn test_sends(&mut self) -> bool {
        let mut done = test_some(&mut self.sends, &mut self.indices, &mut self.statuses);
        // From the end, so that what is swapped in is not one of them.
        done.sort_unstable_by(|a, b| b.cmp(a));
        for &index in &done {
            self.sends.swap_remove(index);
            let (to, frame) = self.sent.swap_remove(index);
            if is_large(&frame) {
                self.large[to] -= 1;
            }
        }
        !done.is_empty()
    }

    /// Frames that have arrived, with their senders.
    fn test_receives(&mut self) -> Vec<(usize, Vec<u8>)> {
        let done = test_some(&mut self.receives, &mut self.indices, &mut self.statuses);
        let mut frames = Vec::with_capacity(done.len());
        for (&index, status) in done.iter().zip(&self.statuses) {
            let mut len = 0;
            // SAFETY: the status is that of a completed receive of bytes.
            unsafe { ffi::MPI_Get_count(status, self.byte, &raw mut len) };
            let mut next = vec![0; FRAME_BYTES];
            self.receives[index] = self.receive_into(&mut next);
            let mut frame = std::mem::replace(&mut self.received[index], next);
            frame.truncate(len as usize);
            frames.push((status.MPI_SOURCE as usize, frame));
        }
        frames
    }

    /// Nothing more will come.
    fn cancel_receives(&mut self) {
        for request in &mut self.receives {
            // SAFETY: the request is active; after the wait MPI does not touch the frame any more.
            unsafe {
                ffi::MPI_Cancel(request);
                ffi::MPI_Wait(request, ffi::RSMPI_STATUS_IGNORE);
            }
        }
    }
}

/// Counts against the limit on large parcels' frames.
fn is_large(frame: &[u8]) -> bool {
    frame.len() > SMALL_BYTES
}

/// Places of the requests that are complete; their statuses are the first of `statuses`.
fn test_some(
    requests: &mut [ffi::MPI_Request],
    indices: &mut Vec<c_int>,
    statuses: &mut Vec<ffi::MPI_Status>,
) -> Vec<usize> {
    if requests.is_empty() {
        return Vec::new();
    }
    indices.resize(requests.len(), 0);
    // SAFETY: MPI_Status is plain old data; MPI writes those that it reports.
    statuses.resize(requests.len(), unsafe { std::mem::zeroed() });
    let mut count = 0;
    // SAFETY: both arrays have room for all requests; every request is active or null.
    unsafe {
        ffi::MPI_Testsome(
            requests.len() as c_int,
            requests.as_mut_ptr(),
            &raw mut count,
            indices.as_mut_ptr(),
            statuses.as_mut_ptr(),
        );
    }
    // MPI_UNDEFINED, a negative number, when no request is active.
    let count = usize::try_from(count).unwrap_or(0);
    indices[..count].iter().map(|&i| i as usize).collect()
}
