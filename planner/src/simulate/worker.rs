//! What a simulated worker is at: its place in its list, what has come in for it, its part in all-reduces.

use super::queue::Message;

/// A ring of more messages than this is simulated by fewer, larger ones of the same total.
const LONGEST_RING: usize = 30;

#[derive(Clone, Debug, Default)]
pub(super) struct Worker {
    pub position: usize,
    /// Whether an operation is under way.
    pub computing: bool,
    /// Tensors that wait to be read: few at a time.
    pub arrived: Vec<Message>,
    /// Rounds whose all-reduce it takes part in, one or two at a time.
    pub rings: Vec<Ring>,
}

impl Worker {
    /// Takes a tensor that is there.
    pub(super) fn take(&mut self, message: Message) -> bool {
        let place = self.arrived.iter().position(|&m| m == message);
        if let Some(place) = place {
            self.arrived.swap_remove(place);
        }
        place.is_some()
    }

    pub(super) fn ring(&mut self, round: usize) -> &mut Ring {
        let place = self.rings.iter().position(|ring| ring.round == round);
        let place = place.unwrap_or_else(|| {
            self.rings.push(Ring {
                round,
                ..Ring::default()
            });
            self.rings.len() - 1
        });
        &mut self.rings[place]
    }
}

/// One worker's part in the all-reduce of a round.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ring {
    pub round: usize,
    /// Buckets of its gradient that are there.
    pub ready: usize,
    /// Messages, 2(r-1) of each bucket in the end.
    pub received: usize,
    pub sent: usize,
}

/// Messages that each replica sends in one all-reduce.
pub(super) fn ring_messages(replicas: usize) -> usize {
    (2 * (replicas - 1)).min(LONGEST_RING)
}
