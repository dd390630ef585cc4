//! Workers that are processes of their own: each has one end, and its process an [`Exchange`].

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use models::tensor::Tensor;

use super::exchange::Outgoing;
use super::frame::Letter;
use super::waited::Waited;
use super::{
    AbortHandle, Group, Message, Tag, Traffic, Transport, TransportError, message_bytes, ring_bytes,
};

/// What has come for a worker and not been asked for yet.
#[derive(Debug, Default)]
pub struct Inbox {
    /// By sender and tag.
    pub messages: Waited<HashMap<(usize, Tag), Message>>,
    /// Finished all-reduces, by first worker of the group and round.
    pub means: Waited<HashMap<(usize, u64), Vec<Tensor>>>,
    aborted: AtomicBool,
}

impl Inbox {
    /// Ends every wait, now and later.
    pub fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.messages.wake();
        self.means.wake();
    }
}

/// How the threads of a process reach its exchange.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// The worker in this process.
    pub worker: usize,
    /// Workers of the run.
    pub workers: usize,
    /// Nanoseconds that each worker has been at work, as last heard.
    pub gauges: Vec<Arc<AtomicU64>>,
    pub(super) outgoing: Sender<Outgoing>,
    pub(super) inbox: Arc<Inbox>,
}

impl Endpoint {
    /// Sends a letter to the process of worker `to`.
    pub fn post(&self, to: usize, letter: Letter) {
        self.submit(Outgoing::Letter { to, letter });
    }

    /// Says that nothing more will come from here. The coordinator says it first, to all, and then hears it from all.
    pub fn close(&self) {
        self.submit(Outgoing::Close);
    }

    /// Says that the run is lost: the carrier of this process returns.
    pub fn give_up(&self) {
        self.submit(Outgoing::GiveUp);
    }

    /// Aborts this process's worker.
    pub fn abort_handle(&self) -> AbortHandle {
        let inbox = Arc::clone(&self.inbox);
        AbortHandle::new(move || inbox.abort())
    }

    /// The worker's end.
    pub fn transport(&self) -> RemoteTransport {
        RemoteTransport {
            end: self.clone(),
            traffic: Traffic::default(),
        }
    }

    fn submit(&self, outgoing: Outgoing) {
        // An exchange that has gone has ended the run for a reason of its own.
        let _ = self.outgoing.send(outgoing);
    }
}

/// One worker's end of a transport between processes.
#[derive(Debug)]
pub struct RemoteTransport {
    end: Endpoint,
    traffic: Traffic,
}

impl Transport for RemoteTransport {
    fn send(&mut self, to: usize, tag: Tag, message: Message) {
        if let Message::Tensors(tensors) = &message {
            self.traffic.bytes_sent += message_bytes(tensors);
        }
        self.end.submit(Outgoing::Message { to, tag, message });
    }

    fn receive(&mut self, from: usize, tag: Tag) -> Result<Message, TransportError> {
        let Inbox {
            messages, aborted, ..
        } = &*self.end.inbox;
        messages.wait(aborted, &mut self.traffic, |inbox| {
            inbox.remove(&(from, tag))
        })
    }

    fn all_reduce_begin(&mut self, group: &Group, round: u64, tensors: Option<Vec<Tensor>>) {
        if let Some(tensors) = &tensors {
            self.traffic.bytes_sent += ring_bytes(tensors, group.replicas);
        }
        self.end.submit(Outgoing::AllReduce {
            group: group.clone(),
            round,
            tensors,
        });
    }

    fn all_reduce_wait(
        &mut self,
        group: &Group,
        round: u64,
    ) -> Result<Vec<Tensor>, TransportError> {
        let Inbox { means, aborted, .. } = &*self.end.inbox;
        means.wait(aborted, &mut self.traffic, |means| {
            means.remove(&(group.first, round))
        })
    }

    fn traffic(&self) -> Traffic {
        self.traffic
    }
}
