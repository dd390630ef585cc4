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
    /// When each direction of each worker's link is free again, seconds.
    out_free: Vec<f64>,
    in_free: Vec<f64>,
    /// The same of each server's card.
    card_out_free: Vec<f64>,
    card_in_free: Vec<f64>,
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
            out_free: vec![0.0; workers],
            in_free: vec![0.0; workers],
            card_out_free: vec![0.0; servers],
            card_in_free: vec![0.0; servers],
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
        let (free, per_byte, last) = match (part, outside) {
            (0, _) => (&mut self.out_free[from], link(away), false),
            (1, Some((away, _))) => (&mut self.card_out_free[away], self.card[away], false),
            (2, Some((_, home))) => (&mut self.card_in_free[home], self.card[home], false),
            _ => (&mut self.in_free[to], link(home), true),
        };
        let start = now.max(*free);
        let seconds = bytes * per_byte;
        *free = start + seconds;
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
