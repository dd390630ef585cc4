//! The machines that a plan is for: devices alike on links alike, or servers whose devices share a network card.

use serde::{Deserialize, Serialize};

/// The machines a plan was made for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cluster {
    /// Devices, one worker each.
    pub devices: usize,
    /// Goodput of each device's link, each direction; with `servers`, of the slowest network card.
    pub bandwidth_bytes_per_s: f64,
    /// Latency of one message, seconds.
    #[serde(default)]
    pub latency_s: f64,
    /// Whether all workers are threads of one process, which hand tensors over by reference.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub local: bool,
    /// Memory of one device (with `servers`, of the smallest); none means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// The servers that the devices are in. None where every device has a link of its own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<Server>,
}

/// Devices behind one network card.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Server {
    /// Host name, or a number.
    pub name: String,
    /// Goodput of the network card, each direction: all that leaves or reaches the server shares it.
    pub bandwidth_bytes_per_s: f64,
    /// Goodput of each device's link within the server, each direction.
    pub inner_bandwidth_bytes_per_s: f64,
    /// Its devices, kind by kind.
    pub devices: Vec<Devices>,
}

/// Devices of one kind in one server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Devices {
    /// How many.
    pub count: usize,
    /// How fast one computes against the device that was profiled: 0.5 takes twice the time.
    pub speed: f64,
    /// Memory of one; none means unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// A kind of devices in a server, as the cost model and the solvers see it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slot {
    /// Number of its server.
    pub server: usize,
    /// Devices.
    pub count: usize,
    /// Speed against the profiled device.
    pub speed: f64,
    /// Bytes; infinite where unlimited.
    pub memory: f64,
}

/// What makes a cluster unusable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ClusterError {
    /// Nothing to run on.
    #[error("there are no devices: give at least one server with at least one device")]
    Empty,
    /// A count, speed or bandwidth that is none.
    #[error("server `{server}`: {what} must be {rule}")]
    Value {
        /// The server.
        server: String,
        /// What is wrong.
        what: &'static str,
        /// What it has to be.
        rule: &'static str,
    },
    /// Two servers of one name.
    #[error("two servers are named `{name}`: rename one of them")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// More devices than anybody has.
    #[error(
        "there are more than {MOST_SERVERS} servers or {MOST_DEVICES} devices: that is beyond this program"
    )]
    TooMany,
    /// Devices, memory or bandwidth of the whole that contradict the servers.
    #[error("`{field}` of the cluster contradicts its servers: make the plan again with dp-plan")]
    Contradiction {
        /// The field.
        field: &'static str,
    },
}

/// No cluster has more devices.
pub const MOST_DEVICES: usize = 1_000_000;

/// No cluster has more servers.
pub const MOST_SERVERS: usize = 10_000;

impl Cluster {
    /// `devices` devices, each behind a link of its own.
    #[must_use]
    pub fn flat(devices: usize, bandwidth_bytes_per_s: f64) -> Self {
        Self {
            devices,
            bandwidth_bytes_per_s,
            latency_s: 0.0,
            local: false,
            memory_bytes: None,
            servers: Vec::new(),
        }
    }

    /// `devices` devices alike, in servers of `per_server`; the last one may have fewer.
    #[must_use]
    pub fn uniform(
        devices: usize,
        per_server: usize,
        bandwidth_bytes_per_s: f64,
        inner_bandwidth_bytes_per_s: f64,
        memory_bytes: Option<u64>,
    ) -> Self {
        let servers = (0..devices.div_ceil(per_server)).map(|number| Server {
            name: number.to_string(),
            bandwidth_bytes_per_s,
            inner_bandwidth_bytes_per_s,
            devices: vec![Devices {
                count: per_server.min(devices - number * per_server),
                speed: 1.0,
                memory_bytes,
            }],
        });
        Self {
            memory_bytes,
            servers: servers.collect(),
            ..Self::flat(devices, bandwidth_bytes_per_s)
        }
    }

    /// The cluster of these servers.
    ///
    /// # Errors
    /// If a count, speed or bandwidth is none, or two servers have one name.
    pub fn of_servers(servers: Vec<Server>, latency_s: f64) -> Result<Self, ClusterError> {
        let devices = check_servers(&servers)?;
        Ok(Self {
            latency_s,
            memory_bytes: least_memory(&servers),
            bandwidth_bytes_per_s: slowest_card(&servers),
            servers,
            ..Self::flat(devices, 0.0)
        })
    }

    /// The servers as a cluster file, which dp-plan reads with --cluster.
    #[must_use]
    pub fn to_toml(&self) -> String {
        use std::fmt::Write;
        let mut text = format!("latency = \"{}us\"\n", rounded(1e6 * self.latency_s));
        for server in &self.servers {
            // Writing to memory does not fail.
            let _ = write!(
                text,
                "\n[[server]]\nname = {:?}\nbw = \"{:.0}B/s\"\ninner-bw = \"{:.0}B/s\"\ndevices = [",
                server.name, server.bandwidth_bytes_per_s, server.inner_bandwidth_bytes_per_s
            );
            for (number, devices) in server.devices.iter().enumerate() {
                let comma = if number > 0 { ", " } else { "" };
                let _ = write!(text, "{comma}{{ gpus = {}", devices.count);
                if devices.speed != 1.0 {
                    // A number with a point, as TOML wants it.
                    let _ = write!(text, ", speed = {:?}", devices.speed);
                }
                if let Some(memory) = devices.memory_bytes {
                    let _ = write!(text, ", memory = \"{memory}B\"");
                }
                text.push_str(" }");
            }
            text.push_str("]\n");
        }
        text
    }

    /// Checks what a plan file says.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), ClusterError> {
        if self.servers.is_empty() {
            return Ok(());
        }
        let devices = check_servers(&self.servers)?;
        for (field, agrees) in [
            ("devices", devices == self.devices),
            (
                "memory_bytes",
                self.memory_bytes == least_memory(&self.servers),
            ),
            ("local", !self.local),
        ] {
            if !agrees {
                return Err(ClusterError::Contradiction { field });
            }
        }
        Ok(())
    }

    /// The same kind of cluster with another number of devices: the first ones of it, or more servers like the last
    /// full one. None if its servers differ and have fewer.
    #[must_use]
    pub fn with_devices(&self, devices: usize) -> Option<Self> {
        let mut other = self.clone();
        other.devices = devices;
        if let Some(first) = self.servers.first() {
            let alike = |s: &Server| {
                let counts = |s: &Server| s.devices.iter().map(|d| d.count).sum::<usize>();
                s.bandwidth_bytes_per_s == first.bandwidth_bytes_per_s
                    && s.inner_bandwidth_bytes_per_s == first.inner_bandwidth_bytes_per_s
                    && (s.devices == first.devices || counts(s) < counts(first))
            };
            if devices > self.devices && !self.servers.iter().all(alike) {
                return None;
            }
            other.servers = take_devices(&self.servers, devices);
            other.memory_bytes = least_memory(&other.servers);
        }
        Some(other)
    }

    /// The same cluster on other network cards (or links, where there are no servers).
    #[must_use]
    pub fn with_bandwidth(&self, bandwidth_bytes_per_s: f64) -> Self {
        let mut other = self.clone();
        other.bandwidth_bytes_per_s = bandwidth_bytes_per_s;
        for server in &mut other.servers {
            server.bandwidth_bytes_per_s = bandwidth_bytes_per_s;
        }
        other
    }

    /// The same cluster with this much memory in each device.
    #[must_use]
    pub fn with_memory(&self, memory_bytes: Option<u64>) -> Self {
        let mut other = self.clone();
        other.memory_bytes = memory_bytes;
        for devices in other.servers.iter_mut().flat_map(|s| &mut s.devices) {
            devices.memory_bytes = memory_bytes;
        }
        other
    }

    /// Kinds of devices, server by server. Empty where every device has a link of its own.
    #[must_use]
    pub fn slots(&self) -> Vec<Slot> {
        let servers = self.servers.iter().enumerate();
        let slots = servers.flat_map(|(server, s)| {
            s.devices.iter().map(move |d| Slot {
                server,
                count: d.count,
                speed: d.speed,
                memory: d.memory_bytes.map_or(f64::INFINITY, |bytes| bytes as f64),
            })
        });
        slots.collect()
    }
}

/// To a tenth, as a person would write it.
fn rounded(value: f64) -> f64 {
    (10.0 * value).round() / 10.0
}

/// The first `devices` devices of the servers, and more servers like the first one where they do not suffice.
fn take_devices(servers: &[Server], devices: usize) -> Vec<Server> {
    let mut left = devices;
    let mut taken: Vec<Server> = Vec::new();
    for number in 0.. {
        if left == 0 {
            break;
        }
        // A last server that is not full is filled up before another one is added.
        let more = devices
            > servers
                .iter()
                .flat_map(|s| &s.devices)
                .map(|d| d.count)
                .sum();
        let mut server = match servers.get(number) {
            Some(server) if !more => server.clone(),
            Some(server) => Server {
                name: server.name.clone(),
                ..servers[0].clone()
            },
            None => Server {
                name: number.to_string(),
                ..servers[0].clone()
            },
        };
        for kind in &mut server.devices {
            kind.count = kind.count.min(left);
            left -= kind.count;
        }
        server.devices.retain(|kind| kind.count > 0);
        taken.push(server);
    }
    taken
}

fn least_memory(servers: &[Server]) -> Option<u64> {
    let kinds = servers.iter().flat_map(|s| &s.devices);
    kinds.filter_map(|d| d.memory_bytes).min()
}

fn slowest_card(servers: &[Server]) -> f64 {
    let cards = servers.iter().map(|s| s.bandwidth_bytes_per_s);
    cards.fold(f64::INFINITY, f64::min)
}

/// Number of devices in servers that make sense.
fn check_servers(servers: &[Server]) -> Result<usize, ClusterError> {
    let mut names = std::collections::HashSet::new();
    let mut devices: usize = 0;
    if servers.len() > MOST_SERVERS {
        return Err(ClusterError::TooMany);
    }
    for server in servers {
        let value = |what, rule| {
            Err(ClusterError::Value {
                server: server.name.clone(),
                what,
                rule,
            })
        };
        if server.name.is_empty() {
            return value("its name", "there");
        }
        if !names.insert(server.name.as_str()) {
            return Err(ClusterError::Duplicate {
                name: server.name.clone(),
            });
        }
        let positive = |value: f64| value > 0.0 && value.is_finite();
        if !positive(server.bandwidth_bytes_per_s) || !positive(server.inner_bandwidth_bytes_per_s)
        {
            return value("its bandwidth", "above zero");
        }
        if server.devices.is_empty() {
            return value("its number of devices", "at least 1");
        }
        for kind in &server.devices {
            if kind.count == 0 {
                return value("its number of devices", "at least 1");
            }
            if !(1e-6..=1e6).contains(&kind.speed) {
                return value("the speed of its devices", "from 0.000001 to 1000000");
            }
            devices = devices.saturating_add(kind.count);
        }
    }
    match devices {
        0 => Err(ClusterError::Empty),
        n if n > MOST_DEVICES => Err(ClusterError::TooMany),
        n => Ok(n),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(cluster: &Cluster) -> Vec<usize> {
        cluster.slots().iter().map(|s| s.count).collect()
    }

    #[test]
    fn a_uniform_cluster_fills_its_servers_in_order() {
        let cluster = Cluster::uniform(10, 4, 1e9, 1e10, Some(7));
        assert_eq!(counts(&cluster), [4, 4, 2]);
        assert_eq!(cluster.validate(), Ok(()));
        assert_eq!(counts(&cluster.with_devices(5).unwrap()), [4, 1]);
        let more = cluster.with_devices(13).unwrap();
        assert_eq!(counts(&more), [4, 4, 4, 1]);
        assert_eq!(more.validate(), Ok(()));
        assert_eq!(
            cluster.with_bandwidth(5.0).servers[2].bandwidth_bytes_per_s,
            5.0
        );
    }

    #[test]
    fn unequal_servers_cannot_be_extended() {
        let mut servers = Cluster::uniform(4, 2, 1e9, 1e10, None).servers;
        servers[1].devices[0].speed = 0.5;
        let cluster = Cluster::of_servers(servers, 0.0).unwrap();
        assert_eq!(cluster.with_devices(5), None);
        assert_eq!(counts(&cluster.with_devices(3).unwrap()), [2, 1]);
    }

    #[test]
    fn what_is_no_server_is_refused() {
        let good = Cluster::uniform(4, 2, 1e9, 1e10, None).servers;
        let broken = |change: &dyn Fn(&mut Vec<Server>)| {
            let mut servers = good.clone();
            change(&mut servers);
            Cluster::of_servers(servers, 0.0).unwrap_err()
        };
        assert_eq!(broken(&|s| s.clear()), ClusterError::Empty);
        assert!(matches!(
            broken(&|s| s[1].name = "0".to_owned()),
            ClusterError::Duplicate { .. }
        ));
        for change in [
            (&|s: &mut Vec<Server>| s[0].bandwidth_bytes_per_s = 0.0) as &dyn Fn(&mut Vec<Server>),
            &|s| s[0].devices.clear(),
            &|s| s[0].devices[0].count = 0,
            &|s| s[0].devices[0].speed = f64::NAN,
        ] {
            assert!(matches!(broken(change), ClusterError::Value { .. }));
        }
    }
}
