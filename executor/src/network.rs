//! What the network between workers gives: latency, goodput of single transfers, bandwidth of all-reduces.
//!
//! It is measured over the transport that runs use, so the figures are what a plan can count on: framing, copies and the
//! progress loop are in them.

use std::fmt::Write;
use std::time::{Duration, Instant};

use models::tensor::{DType, Tensor};
use planner::cluster::{Cluster, ClusterError, Devices, Server};
use serde::Serialize;

use crate::transport::{Direction, Group, Message, Tag, Transport, TransportError};

/// Bytes of a message when goodput is measured.
const MESSAGE_BYTES: usize = 256 << 10;
/// Round trips for a latency.
const ROUND_TRIPS: usize = 51;
/// A measurement lasts at least so long where there is time.
pub const LONG_ENOUGH: Duration = Duration::from_millis(700);
/// Network cards that differ by less than this share are alike.
const ALIKE: f64 = 0.05;

/// All figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Network {
    /// Always `dp.network/1`.
    pub schema: &'static str,
    /// One message between two machines, or two workers where there is one machine, seconds, median.
    pub latency_s: f64,
    /// Bytes per second that each worker sends in an all-reduce among all.
    pub all_reduce_bytes_per_s: f64,
    /// The machines.
    pub hosts: Vec<HostNetwork>,
}

/// One machine.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HostNetwork {
    /// Its name.
    pub name: String,
    /// Workers on it.
    pub workers: usize,
    /// To the next machine, nothing else under way, bytes per second. Infinite (null) where there is one machine.
    pub sent_bytes_per_s: f64,
    /// From the machine before.
    pub received_bytes_per_s: f64,
    /// Sending and receiving at once, the slower of both.
    pub both_ways_bytes_per_s: f64,
    /// Between two of its workers, both ways at once; none where it has one.
    pub inner_bytes_per_s: Option<f64>,
}

/// Measures, on every worker at the same time; worker 0 gets the result. `hosts` names each worker's machine, equal
/// ones in a row; every measurement lasts at least `long_enough`.
///
/// # Errors
/// When another worker is lost.
pub fn measure(
    transport: &mut dyn Transport,
    worker: usize,
    hosts: &[String],
    long_enough: Duration,
) -> Result<Option<Network>, TransportError> {
    let mut probe = Probe {
        transport,
        worker,
        workers: hosts.len(),
        long_enough: long_enough.as_secs_f64(),
        pairs: 0,
        number: 0,
        round: 0,
    };
    let machines: Vec<std::ops::Range<usize>> = machines(hosts);
    let firsts: Vec<usize> = machines.iter().map(|m| m.start).collect();
    let pairs: Vec<(usize, usize)> = match firsts.len() {
        // Between two workers of one machine.
        1 => (1..hosts.len().min(2)).map(|other| (0, other)).collect(),
        2 => vec![(firsts[0], firsts[1])],
        n => (0..n).map(|i| (firsts[i], firsts[(i + 1) % n])).collect(),
    };
    let mut latencies = Vec::new();
    // Of each worker: sent, received, both ways.
    let mut rates = vec![[f64::INFINITY; 3]; hosts.len()];
    for &(a, b) in &pairs {
        let [latency, there, back, both] = probe.pair(a, b)?;
        latencies.push(latency);
        for (from, to, rate) in [(a, b, there), (b, a, back)] {
            rates[from][0] = rates[from][0].min(rate);
            rates[to][1] = rates[to][1].min(rate);
        }
        for end in [a, b] {
            rates[end][2] = rates[end][2].min(both);
        }
    }
    let mut inner = vec![None; machines.len()];
    for (rate, machine) in inner.iter_mut().zip(&machines) {
        if machine.len() > 1 {
            *rate = Some(probe.pair(machine.start, machine.start + 1)?[3]);
        }
    }
    let all_reduce = probe.all_reduce()?;
    latencies.sort_unstable_by(f64::total_cmp);
    Ok((worker == 0).then(|| Network {
        schema: "dp.network/1",
        latency_s: latencies.get(latencies.len() / 2).copied().unwrap_or(0.0),
        all_reduce_bytes_per_s: all_reduce,
        hosts: machines
            .iter()
            .zip(inner)
            .map(|(machine, inner_bytes_per_s)| {
                let [sent, received, both] = rates[machine.start];
                HostNetwork {
                    name: hosts[machine.start].clone(),
                    workers: machine.len(),
                    sent_bytes_per_s: sent,
                    received_bytes_per_s: received,
                    both_ways_bytes_per_s: both,
                    inner_bytes_per_s,
                }
            })
            .collect(),
    }))
}

/// Workers of each machine.
fn machines(hosts: &[String]) -> Vec<std::ops::Range<usize>> {
    let mut machines: Vec<std::ops::Range<usize>> = Vec::new();
    for (worker, host) in hosts.iter().enumerate() {
        match machines.last_mut() {
            Some(machine) if hosts[machine.start] == *host => machine.end = worker + 1,
            _ => machines.push(worker..worker + 1),
        }
    }
    machines
}

/// One worker's part in the measurements. Every worker calls the same methods in the same order.
struct Probe<'a> {
    transport: &'a mut dyn Transport,
    worker: usize,
    workers: usize,
    /// Seconds.
    long_enough: f64,
    /// Pairs that were measured.
    pairs: u64,
    /// Of the next message; both ends of a pair count alike.
    number: u64,
    /// Of the next all-reduce.
    round: u64,
}

impl Probe<'_> {
    /// Latency, goodput there, back, and both ways at once between two workers, known to all in the end.
    fn pair(&mut self, a: usize, b: usize) -> Result<[f64; 4], TransportError> {
        self.pairs += 1;
        self.number = self.pairs << 32;
        let mut figures = [0.0; 4];
        if let Some(other) = [(a, b), (b, a)].iter().find(|ends| ends.0 == self.worker) {
            let (first, other) = (self.worker == a, other.1);
            figures[0] = self.latency(other, first)?;
            let (there, count) = self.one_way(other, first, figures[0])?;
            let (back, _) = self.one_way(other, !first, figures[0])?;
            (figures[1], figures[2]) = (there, back);
            figures[3] = self.both_ways(other, count)?;
        }
        self.share(figures, [a, b])
    }

    /// Half of a round trip of nearly nothing, median.
    fn latency(&mut self, other: usize, first: bool) -> Result<f64, TransportError> {
        let mut times = Vec::with_capacity(ROUND_TRIPS);
        for _ in 0..ROUND_TRIPS {
            let begin = Instant::now();
            if first {
                self.send(other, &number_tensor(0));
                self.receive(other)?;
            } else {
                self.receive(other)?;
                self.send(other, &number_tensor(0));
            }
            times.push(begin.elapsed().as_secs_f64() / 2.0);
        }
        times.sort_unstable_by(f64::total_cmp);
        Ok(times[ROUND_TRIPS / 2])
    }

    /// Bytes per second from one worker to the other, and the number of messages that took long enough. Both ends get
    /// both.
    fn one_way(
        &mut self,
        other: usize,
        sends: bool,
        latency: f64,
    ) -> Result<(f64, i64), TransportError> {
        let message = Tensor::zeros(DType::F32, &[MESSAGE_BYTES / 4]);
        let mut count: i64 = 4;
        loop {
            let nanoseconds = if sends {
                let begin = Instant::now();
                for _ in 0..count {
                    self.send(other, &message);
                }
                self.receive(other)?;
                let taken = begin.elapsed().as_nanos() as i64;
                self.send(other, &number_tensor(taken));
                taken
            } else {
                for _ in 0..count {
                    self.receive(other)?;
                }
                self.send(other, &number_tensor(0));
                self.receive(other)?
            };
            let taken = nanoseconds as f64 / 1e9;
            if taken >= self.long_enough {
                let bytes = count as f64 * MESSAGE_BYTES as f64;
                return Ok((bytes / (taken - latency).max(latency), count));
            }
            count *= 2;
        }
    }

    /// Bytes per second that arrive here while as much goes the other way.
    fn both_ways(&mut self, other: usize, count: i64) -> Result<f64, TransportError> {
        let message = Tensor::zeros(DType::F32, &[MESSAGE_BYTES / 4]);
        // Begin together.
        self.exchange(other, 0)?;
        let begin = Instant::now();
        let first = self.number;
        for _ in 0..count {
            self.send(other, &message);
        }
        self.number = first;
        for _ in 0..count {
            self.receive(other)?;
        }
        let taken = begin.elapsed().as_secs_f64();
        let own = count as f64 * MESSAGE_BYTES as f64 / taken;
        let others = self.exchange(other, own as i64)? as f64;
        Ok(own.min(others))
    }

    /// Sends a number and receives the other's.
    fn exchange(&mut self, other: usize, number: i64) -> Result<i64, TransportError> {
        self.send(other, &number_tensor(number));
        self.number -= 1;
        self.receive(other)
    }

    /// Bytes per second that each worker sends while all reduce tensors large enough to take long enough.
    fn all_reduce(&mut self) -> Result<f64, TransportError> {
        if self.workers == 1 {
            return Ok(f64::INFINITY);
        }
        let replicas = self.workers;
        let mut bytes = 1 << 20;
        loop {
            self.reduce(vec![0.0])?;
            let begin = Instant::now();
            let tensor = Tensor::zeros(DType::F32, &[bytes / 4]);
            self.reduce_tensor(tensor)?;
            let taken = begin.elapsed().as_secs_f64();
            // All workers see the same mean and stop together.
            let mean = f64::from(self.reduce(vec![taken as f32])?[0]);
            if mean >= self.long_enough {
                let share = 2.0 * (replicas - 1) as f64 / replicas as f64;
                return Ok(share * bytes as f64 / mean);
            }
            bytes *= 2;
        }
    }

    /// Figures of the two workers that have some, to all: the mean over those two.
    fn share(&mut self, figures: [f64; 4], ends: [usize; 2]) -> Result<[f64; 4], TransportError> {
        let given = ends.contains(&self.worker);
        let values = if given { figures } else { [0.0; 4] };
        // Means over all workers, of which two gave something.
        let means = self.reduce(values.iter().map(|&v| v as f32).collect())?;
        let scale = self.workers as f64 / 2.0;
        let mut shared = [0.0; 4];
        for (shared, mean) in shared.iter_mut().zip(means) {
            *shared = f64::from(mean) * scale;
        }
        Ok(shared)
    }

    fn reduce(&mut self, values: Vec<f32>) -> Result<Vec<f32>, TransportError> {
        let tensor = Tensor::from_f32(&[values.len()], values);
        Ok(self.reduce_tensor(tensor)?.f32s().to_vec())
    }

    fn reduce_tensor(&mut self, tensor: Tensor) -> Result<Tensor, TransportError> {
        let group = Group {
            first: 0,
            replicas: self.workers,
        };
        let round = self.round;
        self.round += 1;
        self.transport
            .all_reduce_begin(&group, round, Some(vec![tensor]));
        let mut means = self.transport.all_reduce_wait(&group, round)?;
        Ok(means.pop().expect("as many as were given"))
    }

    fn send(&mut self, to: usize, tensor: &Tensor) {
        let message = Message::Tensors(vec![Some(tensor.clone())]);
        let tag = self.tag();
        self.transport.send(to, tag, message);
    }

    /// The number in a message, if it is one.
    fn receive(&mut self, from: usize) -> Result<i64, TransportError> {
        let tag = self.tag();
        let Message::Tensors(tensors) = self.transport.receive(from, tag)? else {
            return Err(TransportError::Aborted);
        };
        let number = tensors
            .into_iter()
            .flatten()
            .find(|t| t.dtype() == DType::I64);
        Ok(number.map_or(0, |t| t.i64s()[0]))
    }

    fn tag(&mut self) -> Tag {
        let minibatch = self.number;
        self.number += 1;
        Tag {
            minibatch,
            direction: Direction::Forward,
        }
    }
}

fn number_tensor(number: i64) -> Tensor {
    Tensor::from_i64(&[1], [number])
}

impl Network {
    /// The cluster for dp-plan: goodput is that of sending and receiving at once, as pipelines do. Machines whose cards
    /// are nearly alike count as alike, by the slowest.
    ///
    /// # Errors
    /// When a figure is none.
    pub fn cluster(&self) -> Result<Cluster, ClusterError> {
        let bandwidths: Vec<f64> = self.hosts.iter().map(|h| h.both_ways_bytes_per_s).collect();
        let servers = self.hosts.iter().zip(alike(&bandwidths));
        let servers = servers.map(|(host, bandwidth)| {
            // One machine alone has no card that counts.
            let inner = host.inner_bytes_per_s.unwrap_or(bandwidth);
            Server {
                name: host.name.clone(),
                bandwidth_bytes_per_s: if bandwidth.is_finite() {
                    bandwidth
                } else {
                    inner
                },
                inner_bandwidth_bytes_per_s: inner,
                devices: vec![Devices {
                    count: host.workers,
                    speed: 1.0,
                    memory_bytes: None,
                }],
            }
        });
        Cluster::of_servers(servers.collect(), self.latency_s)
    }

    /// The figures as JSON; rates that there are none of are null.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("numbers and strings only");
        text.push('\n');
        text
    }

    /// The figures as a table.
    pub fn table(&self) -> String {
        let rate = |rate: f64| {
            if rate.is_finite() {
                format!("{:.1} MB/s", rate / 1e6)
            } else {
                "-".to_owned()
            }
        };
        let mut text = format!(
            "{:<16} {:>7} {:>12} {:>12} {:>12} {:>12}\n",
            "host", "workers", "sends", "receives", "both at once", "within"
        );
        for host in &self.hosts {
            let _ = writeln!(
                text,
                "{:<16} {:>7} {:>12} {:>12} {:>12} {:>12}",
                host.name,
                host.workers,
                rate(host.sent_bytes_per_s),
                rate(host.received_bytes_per_s),
                rate(host.both_ways_bytes_per_s),
                rate(host.inner_bytes_per_s.unwrap_or(f64::INFINITY)),
            );
        }
        let _ = writeln!(text, "latency of a message  {:.0} us", 1e6 * self.latency_s);
        let _ = writeln!(
            text,
            "all-reduce among all  {} sent by each",
            rate(self.all_reduce_bytes_per_s)
        );
        text
    }
}

/// Each value replaced by the smallest of those that it is nearly equal to.
fn alike(values: &[f64]) -> Vec<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let mut groups: Vec<f64> = Vec::new();
    for value in sorted {
        if groups
            .last()
            .is_none_or(|&least| value > least * (1.0 + ALIKE))
        {
            groups.push(value);
        }
    }
    let of = |&value: &f64| groups.iter().rev().find(|&&least| least <= value);
    values
        .iter()
        .map(|v| of(v).copied().unwrap_or(*v))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::transport::local;

    #[test]
    fn every_worker_plays_its_part_and_the_first_knows_all() {
        for hosts in [vec!["a", "b"], vec!["a", "b", "c"], vec!["a", "a", "b"]] {
            let hosts: Vec<String> = hosts.into_iter().map(str::to_owned).collect();
            let (ends, _) = local(hosts.len());
            let threads: Vec<_> = ends
                .into_iter()
                .enumerate()
                .map(|(worker, mut end)| {
                    let hosts = hosts.clone();
                    thread::spawn(move || {
                        measure(&mut end, worker, &hosts, Duration::from_millis(3)).unwrap()
                    })
                })
                .collect();
            let mut all: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            let network = all.remove(0).unwrap();
            assert!(all.iter().all(Option::is_none));
            assert_eq!(network.hosts.len(), machines(&hosts).len());
            assert_eq!(
                network.hosts.iter().map(|h| h.workers).sum::<usize>(),
                hosts.len()
            );
            for host in &network.hosts {
                for rate in [
                    host.sent_bytes_per_s,
                    host.received_bytes_per_s,
                    host.both_ways_bytes_per_s,
                ] {
                    assert!(rate > 0.0 && rate.is_finite(), "{host:?}");
                }
                assert_eq!(host.inner_bytes_per_s.is_some(), host.workers > 1);
            }
            assert!(network.latency_s > 0.0 && network.all_reduce_bytes_per_s > 0.0);
            assert!(network.table().lines().count() > hosts.len());
        }
    }

    #[test]
    fn cards_that_are_nearly_alike_count_as_alike() {
        assert_eq!(
            alike(&[103.0, 100.0, 200.0, 50.0]),
            [100.0, 100.0, 200.0, 50.0]
        );
        assert_eq!(alike(&[]), [] as [f64; 0]);
    }

    #[test]
    fn a_cluster_has_a_server_for_each_machine() {
        let host = |name: &str, workers, both| HostNetwork {
            name: name.into(),
            workers,
            sent_bytes_per_s: both,
            received_bytes_per_s: both,
            both_ways_bytes_per_s: both,
            inner_bytes_per_s: (workers > 1).then_some(1e9),
        };
        let network = Network {
            schema: "dp.network/1",
            latency_s: 50e-6,
            all_reduce_bytes_per_s: 1e7,
            hosts: vec![host("a", 1, 11.9e6), host("b", 2, 12e6)],
        };
        let cluster = network.cluster().unwrap();
        assert_eq!((cluster.devices, cluster.latency_s), (3, 50e-6));
        let servers = cluster.servers.iter();
        let servers: Vec<_> = servers
            .map(|s| {
                (
                    &*s.name,
                    s.bandwidth_bytes_per_s,
                    s.inner_bandwidth_bytes_per_s,
                )
            })
            .collect();
        assert_eq!(servers, [("a", 11.9e6, 11.9e6), ("b", 11.9e6, 1e9)]);
    }
}
