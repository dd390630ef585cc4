//! The ways of messages: out of a worker's link, through the network cards of two servers, into another worker's link.

use crate::cost::{Evaluation, Machine};

/// Links and network cards, and when each is free again.
#[derive(Clone, Debug)]
pub(super) struct Ways {
    /// Server and speed of each worker; empty where every device has a link of its own.
    workers: Vec<(usize, f64)>,
    /// Seconds per byte of each worker's link where there are no servers.
    link: f64,
    /// Seconds per byte of links within each server, and of its network card.
    inner: Vec<f64>,
    card: Vec<f64>,
    /// Each direction of each worker's link.
    out: Vec<Direction>,
    into: Vec<Direction>,
    /// The same of each server's card.
    card_out: Vec<Direction>,
    card_into: Vec<Direction>,
}

/// A message this much smaller than the largest one passes it.
const SMALL: f64 = 0.25;

/// One direction of a link.
///
/// Transports send large tensors in pieces, between which small messages pass: the hops of an all-reduce, one behind the
/// other, would else each wait for whole activations. Those that pass are served first come first served, and so are the
/// others, behind all the bytes of both.
#[derive(Clone, Copy, Debug, Default)]
struct Direction {
    /// When it is free again for messages that pass, and for others, seconds.
    small_free: f64,
    free: f64,
    /// Bytes of the largest message so far.
    largest: f64,
}

impl Direction {
    /// Takes a message that is there at `now`: when it begins.
    fn take(&mut self, bytes: f64, seconds: f64, now: f64) -> f64 {
        self.largest = self.largest.max(bytes);
        let behind_all = now.max(self.free);
        self.free = behind_all + seconds;
        if bytes > SMALL * self.largest {
            return behind_all;
        }
        let start = now.max(self.small_free);
        self.small_free = start + seconds;
        start
    }
}

impl Ways {
    /// The links of `workers` workers of this evaluation.
    pub(super) fn new(evaluation: &Evaluation, machine: &Machine, workers: usize) -> Self {
        let placement = evaluation.placement.as_ref();
        let fabric = placement.map(|p| &p.fabric);
        let slots = placement.map_or_else(Vec::new, |p| {
            let slots = p.slots_of_workers().into_iter();
            let slots = slots.map(|slot| &p.fabric.slots[slot]);
            slots.map(|slot| (slot.server, slot.speed)).collect()
        });
        let seconds = |rates: &Vec<f64>| rates.iter().map(|rate| 1.0 / rate).collect();
        let servers = fabric.map_or(0, |fabric| fabric.cards.len());
        Self {
            workers: slots,
            link: 1.0 / machine.bandwidth,
            inner: fabric.map_or_else(Vec::new, |fabric| seconds(&fabric.inner)),
            card: fabric.map_or_else(Vec::new, |fabric| seconds(&fabric.cards)),
            out: vec![Direction::default(); workers],
            into: vec![Direction::default(); workers],
            card_out: vec![Direction::default(); servers],
            card_into: vec![Direction::default(); servers],
        }
    }

    /// Speed of the worker's device against the profiled one.
    pub(super) fn speed(&self, worker: usize) -> f64 {
        self.workers.get(worker).map_or(1.0, |&(_, speed)| speed)
    }

    /// Occupies a part of the way between two workers from `now` on, as soon as it is free: when it begins, how many
    /// seconds it is taken, and whether it is the last part.
    pub(super) fn take(
        &mut self,
        (from, to): (usize, usize),
        part: usize,
        bytes: f64,
        now: f64,
    ) -> (f64, f64, bool) {
        let server = |worker: usize| self.workers.get(worker).map(|&(server, _)| server);
        let (away, home) = (server(from), server(to));
        let link = |server: Option<usize>| server.map_or(self.link, |v| self.inner[v]);
        let outside = away.zip(home).filter(|(away, home)| away != home);
        let (direction, per_byte, last) = match (part, outside) {
            (0, _) => (&mut self.out[from], link(away), false),
            (1, Some((away, _))) => (&mut self.card_out[away], self.card[away], false),
            (2, Some((_, home))) => (&mut self.card_into[home], self.card[home], false),
            _ => (&mut self.into[to], link(home), true),
        };
        let seconds = bytes * per_byte;
        let start = direction.take(bytes, seconds, now);
        (start, seconds, last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::cost::{Fabric, Partition, Placement};
    use crate::graph::LayerGraph;
    use crate::testing;

    #[test]
    fn a_small_message_passes_large_ones_which_wait_for_it_in_turn() {
        let mut link = Direction::default();
        assert_eq!(link.take(100.0, 100.0, 0.0), 0.0);
        assert_eq!(link.take(100.0, 100.0, 1.0), 100.0);
        assert_eq!(link.take(10.0, 10.0, 2.0), 2.0);
        // Behind the one that passes, not behind the large ones.
        assert_eq!(link.take(10.0, 10.0, 3.0), 12.0);
        // The link carries no more than it can.
        assert_eq!(link.take(100.0, 100.0, 4.0), 220.0);
        assert_eq!(link.take(26.0, 26.0, 5.0), 320.0);
    }

    #[test]
    fn what_leaves_a_server_shares_its_card() {
        let cluster = Cluster::uniform(4, 2, 1e3, 1e4, None);
        let machine = Machine::new(&cluster, 0.0);
        let graph = LayerGraph::new(&testing::chain(&[1.0, 1.0], &[1, 1], &[1]));
        let partition = Partition::new(vec![0..1, 1..2], vec![2, 2]);
        let placement = Placement {
            fabric: Fabric::new(&cluster).unwrap(),
            counts: vec![vec![2, 0], vec![0, 2]],
        };
        let evaluation = Evaluation::placed(&graph, &partition, &machine, Some(&placement));
        let mut ways = Ways::new(&evaluation, &machine, 4);
        // Out of two links at once, one behind the other through the card.
        assert_eq!(ways.take((0, 2), 0, 1e3, 0.0), (0.0, 0.1, false));
        assert_eq!(ways.take((1, 3), 0, 1e3, 0.0), (0.0, 0.1, false));
        assert_eq!(ways.take((0, 2), 1, 1e3, 0.0), (0.0, 1.0, false));
        assert_eq!(ways.take((1, 3), 1, 1e3, 0.0), (1.0, 1.0, false));
        assert_eq!(ways.take((0, 2), 2, 1e3, 0.0), (0.0, 1.0, false));
        assert_eq!(ways.take((0, 2), 3, 1e3, 0.0), (0.0, 0.1, true));
        // Neighbours need no card.
        assert_eq!(ways.take((0, 1), 1, 1e3, 0.0), (0.0, 0.1, true));
    }
}
