//! What a worker takes of its machine: processor time, and bytes on the network's interfaces.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

/// Since the start of the worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time of training.
    pub training: Duration,
    /// Processor time meanwhile: of the process, or of the worker's thread where the process has other workers. None
    /// where the system does not tell.
    pub cpu: Option<Duration>,
    /// What the machine's interfaces carried since, all together but the loopback. None where the system does not tell or
    /// the worker has no machine to itself.
    pub interfaces: Option<Carried>,
}

impl Usage {
    /// Processor time over time.
    pub fn cpu_share(&self) -> Option<f64> {
        let cpu = self.cpu?.as_secs_f64();
        (!self.training.is_zero()).then(|| cpu / self.training.as_secs_f64())
    }
}

/// Bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// Out.
    pub sent: u64,
    /// In.
    pub received: u64,
}

/// Measures a worker's [`Usage`]. Belongs to the worker's thread.
#[derive(Debug)]
pub struct Meter {
    alone: bool,
    before: Option<Carried>,
    usage: Usage,
    begun: Option<(Instant, Option<Duration>)>,
}

impl Meter {
    /// For a worker that is alone in its process, or not.
    pub fn new(alone: bool) -> Self {
        Meter {
            alone,
            before: if alone { system::carried() } else { None },
            usage: Usage {
                cpu: Some(Duration::ZERO),
                ..Usage::default()
            },
            begun: None,
        }
    }

    /// Training begins.
    pub fn begin(&mut self) {
        self.begun = Some((Instant::now(), system::cpu(self.alone)));
    }

    /// Training ends.
    pub fn end(&mut self) {
        if let Some((begin, before)) = self.begun.take() {
            self.usage.training += begin.elapsed();
            let spent = system::cpu(self.alone).zip(before);
            let sum = self.usage.cpu.zip(spent);
            self.usage.cpu = sum.map(|(sum, (now, before))| sum + now.saturating_sub(before));
        }
    }

    /// So far.
    pub fn usage(&self) -> Usage {
        let now = if self.alone { system::carried() } else { None };
        let interfaces = now.zip(self.before).map(|(now, before)| Carried {
            sent: now.sent.saturating_sub(before.sent),
            received: now.received.saturating_sub(before.received),
        });
        Usage {
            interfaces,
            ..self.usage
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::time::Duration;

    use nix::time::{ClockId, clock_gettime};

    use super::Carried;

    pub fn cpu(process: bool) -> Option<Duration> {
        let clock = if process {
            ClockId::CLOCK_PROCESS_CPUTIME_ID
        } else {
            ClockId::CLOCK_THREAD_CPUTIME_ID
        };
        clock_gettime(clock).ok().map(Duration::from)
    }

    pub fn carried() -> Option<Carried> {
        parse(&std::fs::read_to_string("/proc/self/net/dev").ok()?)
    }

    /// Sums of the interfaces in `/proc/net/dev`: two lines of headings, then `name: ` and sixteen counters, of which the
    /// first is bytes received and the ninth bytes sent.
    pub fn parse(table: &str) -> Option<Carried> {
        let mut sum = Carried::default();
        for line in table.lines().skip(2) {
            let (name, counters) = line.split_once(':')?;
            if name.trim() == "lo" {
                continue;
            }
            let mut counters = counters.split_whitespace().map(str::parse::<u64>);
            sum.received += counters.next()?.ok()?;
            sum.sent += counters.nth(7)?.ok()?;
        }
        Some(sum)
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::time::Duration;

    use super::Carried;

    pub fn cpu(_process: bool) -> Option<Duration> {
        None
    }

    pub fn carried() -> Option<Carried> {
        None
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_summed_but_the_loopback() {
        let table = "Inter-|   Receive  |  Transmit\n face |bytes packets\n\
            lo: 900 1 0 0 0 0 0 0 900 1 0 0 0 0 0 0\n\
            eth0: 10 1 0 0 0 0 0 0 20 1 0 0 0 0 0 0\n  eth1:1 1 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n";
        let sum = system::parse(table).unwrap();
        assert_eq!((sum.received, sum.sent), (11, 22));
        assert_eq!(system::parse("a\nb\nnonsense"), None);
    }

    #[test]
    fn processor_time_counts_while_training() {
        let mut meter = Meter::new(false);
        meter.begin();
        let begin = Instant::now();
        let mut sum = 0u64;
        while begin.elapsed() < Duration::from_millis(20) {
            sum = std::hint::black_box(sum + 1);
        }
        meter.end();
        let usage = meter.usage();
        assert!(usage.training >= Duration::from_millis(20));
        assert!(usage.cpu.is_some_and(|cpu| cpu > Duration::ZERO));
        assert_eq!(usage.interfaces, None);
    }
}
