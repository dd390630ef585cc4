//! Where replicas are: servers whose devices share a network card, and what that card carries.
//!
//! Replicas of a stage are numbered server by server, so that its ring leaves each server once and reaches it once.
//! Minibatch m goes from replica m mod r_s of stage s to replica m mod r_t of stage t: over lcm(r_s, r_t) minibatches
//! every pair that can meet meets once, and those that are in different servers load both cards.

use std::collections::HashMap;
use std::ops::Range;

use super::evaluate::LinkBytes;
use super::stage::{Loads, Machine, StageSums};
use crate::cluster::{Cluster, Slot};

/// The servers of a cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct Fabric {
    /// Kinds of devices, server by server.
    pub slots: Vec<Slot>,
    /// Names of the servers.
    pub names: Vec<String>,
    /// Goodput of each server's network card, each direction, bytes per second.
    pub cards: Vec<f64>,
    /// Goodput of each device's link in the server, each direction, bytes per second.
    pub inner: Vec<f64>,
}

/// A cluster's servers and how many replicas of each stage are on which devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The servers.
    pub fabric: Fabric,
    /// `n[i][v]`: replicas of stage i on slot v.
    pub counts: Vec<Vec<usize>>,
}

/// Bytes per minibatch through a server's network card.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CardBytes {
    /// Leaving the server.
    pub out: f64,
    /// Reaching it.
    pub into: f64,
}

/// What a server's network card carries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardLoad {
    /// The server.
    pub server: usize,
    /// Bytes per minibatch.
    pub bytes: CardBytes,
    /// Seconds per minibatch that its busier direction is taken.
    pub seconds: f64,
}

impl CardBytes {
    /// The busier direction.
    #[must_use]
    pub fn busier(&self) -> f64 {
        self.out.max(self.into)
    }

    /// Adds what another stage or link puts on the card.
    pub fn add(&mut self, other: Self) {
        self.out += other.out;
        self.into += other.into;
    }
}

impl Fabric {
    /// The servers of a cluster; none where every device has a link of its own.
    #[must_use]
    pub fn new(cluster: &Cluster) -> Option<Self> {
        if cluster.servers.is_empty() {
            return None;
        }
        let servers = &cluster.servers;
        Some(Self {
            slots: cluster.slots(),
            names: servers.iter().map(|s| s.name.clone()).collect(),
            cards: servers.iter().map(|s| s.bandwidth_bytes_per_s).collect(),
            inner: servers
                .iter()
                .map(|s| s.inner_bandwidth_bytes_per_s)
                .collect(),
        })
    }

    /// Number of servers.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.cards.len()
    }

    /// Which of its server's kinds of devices a slot is.
    fn kind(&self, slot: usize) -> usize {
        let server = self.slots[slot].server;
        let before = self.slots[..slot].iter().rev();
        before.take_while(|other| other.server == server).count()
    }

    /// The slot of a kind of devices of a server.
    #[must_use]
    pub fn slot(&self, server: usize, kind: usize) -> Option<usize> {
        let first = self.slots.iter().position(|slot| slot.server == server)?;
        let slot = self.slots.get(first + kind)?;
        (slot.server == server).then_some(first + kind)
    }

    /// The slots of each server.
    #[must_use]
    pub fn slots_of_servers(&self) -> Vec<Range<usize>> {
        let slots = |server| {
            let first = self.slots.partition_point(|slot| slot.server < server);
            first..self.slots.partition_point(|slot| slot.server <= server)
        };
        (0..self.servers()).map(slots).collect()
    }

    /// For each server the first one that has the same devices, links and card.
    #[must_use]
    pub fn classes(&self) -> Vec<usize> {
        let mut first: HashMap<Vec<u64>, usize> = HashMap::new();
        let slots = self.slots_of_servers().into_iter().enumerate();
        let classes = slots.map(|(server, slots)| {
            // Bit for bit: what is not the same number is taken for different.
            let mut key = vec![self.cards[server].to_bits(), self.inner[server].to_bits()];
            for slot in &self.slots[slots] {
                key.extend([
                    slot.count as u64,
                    slot.speed.to_bits(),
                    slot.memory.to_bits(),
                ]);
            }
            *first.entry(key).or_insert(server)
        });
        classes.collect()
    }

    /// Replicas in each server, from those on each slot.
    #[must_use]
    pub fn by_server(&self, counts: &[usize]) -> Vec<usize> {
        let mut servers = vec![0; self.servers()];
        for (slot, &count) in self.slots.iter().zip(counts) {
            servers[slot.server] += count;
        }
        servers
    }

    /// Seconds that one byte takes from one server to another, or within one, on the slowest part of its way.
    #[must_use]
    pub fn seconds_per_byte(&self, from: usize, to: usize) -> f64 {
        let slowest = self.inner[from].min(self.inner[to]);
        1.0 / if from == to {
            slowest
        } else {
            slowest.min(self.cards[from]).min(self.cards[to])
        }
    }

    /// Seconds that a byte takes between the nearest replicas of two stages with these replicas on each slot.
    #[must_use]
    pub fn quickest(&self, from: &[usize], to: &[usize]) -> f64 {
        let (from, to) = (self.by_server(from), self.by_server(to));
        let servers = |counts: &[usize]| -> Vec<usize> {
            let used = counts.iter().enumerate().filter(|&(_, &n)| n > 0);
            used.map(|(server, _)| server).collect()
        };
        let (from, to) = (servers(&from), servers(&to));
        let pairs = from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b)));
        let seconds = pairs.map(|(a, b)| self.seconds_per_byte(a, b));
        seconds.fold(f64::INFINITY, f64::min)
    }

    /// Bytes per second of the slowest edge of the ring of a stage with these replicas on each slot.
    #[must_use]
    pub fn ring_bandwidth(&self, counts: &[usize]) -> f64 {
        let servers = self.by_server(counts);
        let used = || servers.iter().enumerate().filter(|&(_, &n)| n > 0);
        let inner = used().map(|(server, _)| self.inner[server]);
        let slowest = inner.fold(f64::INFINITY, f64::min);
        if used().count() < 2 {
            return slowest;
        }
        let cards = used().map(|(server, _)| self.cards[server]);
        cards.fold(slowest, f64::min)
    }

    /// Speed of the fastest device among those that a stage uses.
    #[must_use]
    pub fn fastest(&self, counts: &[usize]) -> f64 {
        let used = self.slots.iter().zip(counts).filter(|&(_, &n)| n > 0);
        used.map(|(slot, _)| slot.speed).fold(0.0, f64::max)
    }

    /// The slowest device, the smallest memory and the slowest link among those that a stage uses.
    #[must_use]
    pub fn worst(&self, counts: &[usize]) -> Worst {
        let used = self.slots.iter().zip(counts).filter(|&(_, &n)| n > 0);
        used.fold(Worst::default(), |worst, (slot, _)| Worst {
            speed: worst.speed.min(slot.speed),
            memory: worst.memory.min(slot.memory),
            inner: worst.inner.min(self.inner[slot.server]),
        })
    }
}

/// What counts of the devices that a stage uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Worst {
    /// Speed of the slowest device.
    pub speed: f64,
    /// Bytes of the smallest memory.
    pub memory: f64,
    /// Goodput of the slowest link within a server.
    pub inner: f64,
}

impl Default for Worst {
    fn default() -> Self {
        Self {
            speed: f64::INFINITY,
            memory: f64::INFINITY,
            inner: f64::INFINITY,
        }
    }
}

impl Worst {
    /// Devices alike, each on a link of its own.
    #[must_use]
    pub fn of_machine(machine: &Machine) -> Self {
        Self {
            speed: 1.0,
            memory: f64::INFINITY,
            inner: machine.bandwidth,
        }
    }

    /// Loads of the slowest replica of a stage on such devices.
    #[must_use]
    pub fn loads(&self, sums: &StageSums, replicas: usize, machine: &Machine) -> Loads {
        let machine = Machine {
            bandwidth: self.inner,
            ..*machine
        };
        let loads = sums.loads(replicas, &machine);
        Loads {
            compute: loads.compute / self.speed,
            core: loads.core / self.speed,
            ..loads
        }
    }
}

impl Placement {
    /// What each server's card carries of these links and of the rings of stages with `parameters` bytes of weights.
    #[must_use]
    pub fn cards(
        &self,
        links: &[LinkBytes],
        parameters: &[f64],
        machine: &Machine,
    ) -> Vec<CardLoad> {
        let mut cards = vec![CardBytes::default(); self.fabric.servers()];
        let stages: Vec<Vec<usize>> = self
            .counts
            .iter()
            .map(|counts| self.fabric.by_server(counts))
            .collect();
        for (stage, &parameters) in stages.iter().zip(parameters) {
            add_ring(&mut cards, stage, parameters, machine);
        }
        for link in links {
            let bytes = (link.activations, link.gradients);
            let (from, to) = (&stages[link.from], &stages[link.to]);
            add_link(&mut cards, from, to, bytes, Meetings::RoundRobin);
        }
        let loads = cards.into_iter().zip(&self.fabric.cards).enumerate();
        loads
            .map(|(server, (bytes, card))| CardLoad {
                server,
                bytes,
                seconds: bytes.busier() / card,
            })
            .collect()
    }

    /// The server of each replica of a stage, and which kind of that server's devices it is on. The kinds are empty where
    /// every server has one kind.
    #[must_use]
    pub fn devices_of(&self, stage: usize) -> (Vec<usize>, Vec<usize>) {
        let slots = &self.fabric.slots;
        let counts = self.counts[stage].iter().enumerate();
        let replicas = counts.flat_map(|(slot, &count)| std::iter::repeat_n(slot, count));
        let (servers, mut kinds): (Vec<usize>, Vec<usize>) = replicas
            .map(|slot| (slots[slot].server, self.fabric.kind(slot)))
            .unzip();
        if (0..slots.len()).all(|slot| self.fabric.kind(slot) == 0) {
            kinds.clear();
        }
        (servers, kinds)
    }

    /// The slot of every worker, stage by stage.
    #[must_use]
    pub fn slots_of_workers(&self) -> Vec<usize> {
        let counts = self
            .counts
            .iter()
            .flat_map(|counts| counts.iter().enumerate());
        let slots = counts.flat_map(|(slot, &count)| std::iter::repeat_n(slot, count));
        slots.collect()
    }
}

/// Adds the all-reduce of a stage with these replicas in each server: one ring edge each way, if it spans servers.
pub fn add_ring(cards: &mut [CardBytes], servers: &[usize], parameters: f64, machine: &Machine) {
    if servers.iter().filter(|&&n| n > 0).count() < 2 {
        return;
    }
    let replicas = servers.iter().sum();
    let r = replicas as f64;
    let bytes = 2.0 * (r - 1.0) / r * parameters / machine.round_of(replicas);
    for (card, _) in cards.iter_mut().zip(servers).filter(|&(_, &n)| n > 0) {
        card.add(CardBytes {
            out: bytes,
            into: bytes,
        });
    }
}

/// How the minibatches that stay within a server are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meetings {
    /// Round robin, replicas numbered server by server.
    RoundRobin,
    /// As many as the replicas there can serve at all: never fewer, whatever the order of the servers.
    AtMost,
}

/// Adds activations from a stage to another, and gradients back, each stage with these replicas in each server.
pub fn add_link(
    cards: &mut [CardBytes],
    from: &[usize],
    to: &[usize],
    (activations, gradients): (f64, f64),
    meetings: Meetings,
) {
    let (all_from, all_to) = (from.iter().sum(), to.iter().sum());
    let (mut first_from, mut first_to) = (0, 0);
    for (card, (&here, &there)) in cards.iter_mut().zip(from.iter().zip(to)) {
        let (own, other) = (here as f64 / all_from as f64, there as f64 / all_to as f64);
        let both = match meetings {
            Meetings::RoundRobin => together(
                (all_from, first_from..first_from + here),
                (all_to, first_to..first_to + there),
            ),
            Meetings::AtMost => own.min(other),
        };
        let (leaving, reaching) = (own - both, other - both);
        card.add(CardBytes {
            out: leaving * activations + reaching * gradients,
            into: reaching * activations + leaving * gradients,
        });
        first_from += here;
        first_to += there;
    }
}

/// Share of minibatches that both a replica of `a` and one of `b` serve, each out of that many.
fn together((r_a, a): (usize, Range<usize>), (r_b, b): (usize, Range<usize>)) -> f64 {
    if a.is_empty() || b.is_empty() {
        return 0.0;
    }
    // Replicas x and y meet if x = y modulo the greatest common divisor, once in lcm minibatches.
    let divisor = common_divisor(r_a, r_b);
    let congruent = |x: usize| {
        let below = |end: usize| (end + divisor - 1 - x % divisor) / divisor;
        below(b.end) - below(b.start)
    };
    let meetings: usize = a.map(congruent).sum();
    meetings as f64 / (r_a / divisor * r_b) as f64
}

fn common_divisor(mut a: usize, mut b: usize) -> usize {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn cards_carry_what_counting_minibatches_says(
            from in proptest::collection::vec(0usize..4, 1..4),
            to in proptest::collection::vec(0usize..4, 1..4),
        ) {
            let servers = from.len().min(to.len());
            let (from, to) = (&from[..servers], &to[..servers]);
            let server_of = |counts: &[usize]| -> Vec<usize> {
                let servers = counts.iter().enumerate();
                servers.flat_map(|(v, &n)| std::iter::repeat_n(v, n)).collect()
            };
            let (a, b) = (server_of(from), server_of(to));
            prop_assume!(!a.is_empty() && !b.is_empty());
            let mut cards = vec![CardBytes::default(); servers];
            add_link(&mut cards, from, to, (1.0, 10.0), Meetings::RoundRobin);
            let mut least = vec![CardBytes::default(); servers];
            add_link(&mut least, from, to, (1.0, 10.0), Meetings::AtMost);
            let mut counted = vec![CardBytes::default(); servers];
            let rounds = a.len() * b.len();
            for m in 0..rounds {
                let (x, y) = (a[m % a.len()], b[m % b.len()]);
                if x != y {
                    let share = 1.0 / rounds as f64;
                    counted[x].add(CardBytes { out: share, into: 10.0 * share });
                    counted[y].add(CardBytes { out: 10.0 * share, into: share });
                }
            }
            for (card, truth) in cards.iter().zip(&counted) {
                prop_assert!((card.out - truth.out).abs() < 1e-9);
                prop_assert!((card.into - truth.into).abs() < 1e-9);
            }
            for (least, truth) in least.iter().zip(&counted) {
                prop_assert!(least.out < truth.out + 1e-9 && least.into < truth.into + 1e-9);
            }
        }
    }

    #[test]
    fn a_ring_within_one_server_leaves_it_never() {
        let mut cards = vec![CardBytes::default(); 2];
        let machine = Machine::new(&Cluster::flat(3, 1.0), 0.0);
        add_ring(&mut cards, &[0, 3], 90.0, &machine);
        assert_eq!(cards[1], CardBytes::default());
        add_ring(&mut cards, &[2, 1], 90.0, &machine);
        // 2 * 2/9 * 90 each way, for both.
        for card in &cards {
            assert!((card.out - 40.0).abs() < 1e-9 && (card.into - 40.0).abs() < 1e-9);
        }
    }
}
