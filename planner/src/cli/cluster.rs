//! The machines on the command line: devices alike, servers alike, or a cluster file.

use std::path::Path;

use serde::Deserialize;

use super::{Arguments, CliError, Link};
use crate::cluster::{Cluster, ClusterError, Devices, Server};
use crate::file::FileError;
use crate::planning::LOCAL_BANDWIDTH;
use crate::units::{UnitError, parse_bandwidth, parse_memory, parse_time};

/// What is wrong with a cluster file.
#[derive(Debug, thiserror::Error)]
pub enum ClusterFileError {
    /// It is no TOML, or has fields that are unknown or missing.
    #[error("{file}: {problem}; see `dp-plan --help` for an example of a cluster file")]
    Syntax {
        /// The file.
        file: String,
        /// What and where.
        problem: String,
    },
    /// A quantity that is none.
    #[error("{file}, {place}: {problem}")]
    Quantity {
        /// The file.
        file: String,
        /// The server and the field.
        place: String,
        /// What is wrong.
        problem: String,
    },
    /// A field that a server needs.
    #[error("{file}, server `{server}`: {rule}")]
    Missing {
        /// The file.
        file: String,
        /// The server.
        server: String,
        /// What is asked for.
        rule: &'static str,
    },
    /// Servers that make no cluster.
    #[error("{file}: {problem}")]
    Cluster {
        /// The file.
        file: String,
        /// What is wrong.
        problem: ClusterError,
    },
}

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    latency: Option<String>,
    /// What servers have that do not say otherwise.
    bw: Option<String>,
    inner_bw: Option<String>,
    memory: Option<String>,
    server: Vec<ServerEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ServerEntry {
    name: Option<String>,
    /// Servers alike.
    names: Option<Vec<String>>,
    count: Option<usize>,
    bw: Option<String>,
    inner_bw: Option<String>,
    gpus: Option<usize>,
    memory: Option<String>,
    speed: Option<f64>,
    /// Devices of several kinds.
    devices: Option<Vec<DevicesEntry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DevicesEntry {
    gpus: usize,
    memory: Option<String>,
    speed: Option<f64>,
}

/// The cluster that the flags ask for.
pub(super) fn cluster(arguments: &Arguments) -> Result<Cluster, CliError> {
    if let Some(path) = &arguments.cluster {
        let cluster = load(path)?;
        let devices = arguments.gpus.unwrap_or(cluster.devices);
        let first = cluster.with_devices(devices);
        return first.filter(|_| devices <= cluster.devices).ok_or_else(|| {
            CliError::Usage(format!(
                "--gpus {devices} asks for more devices than {} has: {}",
                path.display(),
                cluster.devices
            ))
        });
    }
    let bandwidth = match arguments.bw {
        Some(Link::Network(bandwidth)) => bandwidth,
        Some(Link::Local) | None => LOCAL_BANDWIDTH,
    };
    let (memory, latency) = (arguments.memory, arguments.latency);
    let flat = match (arguments.gpus_per_server, arguments.inner_bw) {
        (Some(_), Some(_)) if arguments.bw == Some(Link::Local) => {
            return Err(CliError::Usage(
                "--bw local is for one process: servers need the bandwidth of their network cards"
                    .to_owned(),
            ));
        }
        (Some(per_server), Some(inner)) => {
            // Where devices are swept, one full server shows what the others are like.
            let devices = arguments.gpus.unwrap_or(per_server);
            if devices.div_ceil(per_server) > crate::cluster::MOST_SERVERS {
                return Err(CliError::Usage(
                    "--gpus over --gpus-per-server makes more than 10000 servers: that is beyond this program".to_owned(),
                ));
            }
            Cluster::uniform(devices, per_server, bandwidth, inner, memory)
        }
        // What is not given is swept.
        _ => Cluster::flat(arguments.gpus.unwrap_or(1), bandwidth),
    };
    Ok(Cluster {
        latency_s: latency,
        local: arguments.bw == Some(Link::Local),
        memory_bytes: memory,
        ..flat
    })
}

/// Reads a cluster file.
fn load(path: &Path) -> Result<Cluster, CliError> {
    let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
        path: path.to_owned(),
        source,
    })?;
    Ok(parse(&path.display().to_string(), &text)?)
}

fn parse(file: &str, text: &str) -> Result<Cluster, ClusterFileError> {
    let parsed: File = basic_toml::from_str(text).map_err(|error| ClusterFileError::Syntax {
        file: file.to_owned(),
        problem: error.to_string(),
    })?;
    let mut servers: Vec<Server> = Vec::new();
    for entry in &parsed.server {
        let names = match (&entry.name, &entry.names, entry.count) {
            (Some(name), None, None) => vec![name.clone()],
            (None, Some(names), None) => names.clone(),
            (None, None, count) => (0..count.unwrap_or(1).min(crate::cluster::MOST_SERVERS + 1))
                .map(|more| (servers.len() + more).to_string())
                .collect(),
            _ => {
                return Err(ClusterFileError::Missing {
                    file: file.to_owned(),
                    server: entry.name.clone().unwrap_or_default(),
                    rule: "give one of `name`, `names` and `count`",
                });
            }
        };
        let reader = Reader {
            file,
            server: names.first().map_or("", String::as_str),
        };
        let bandwidth = reader.bandwidth("bw", entry.bw.as_ref().or(parsed.bw.as_ref()))?;
        let bandwidth = bandwidth
            .ok_or_else(|| reader.missing("it needs `bw`, the bandwidth of its network card"))?;
        let inner = entry.inner_bw.as_ref().or(parsed.inner_bw.as_ref());
        let inner = reader.bandwidth("inner-bw", inner)?;
        let template = Server {
            name: String::new(),
            bandwidth_bytes_per_s: bandwidth,
            // A device alone in its server has only the network card.
            inner_bandwidth_bytes_per_s: inner.unwrap_or(bandwidth),
            devices: reader.devices(entry, parsed.memory.as_ref())?,
        };
        servers.extend(names.into_iter().map(|name| Server {
            name,
            ..template.clone()
        }));
    }
    let reader = Reader { file, server: "" };
    let latency = match &parsed.latency {
        Some(text) => parse_time(text).map_err(|problem| reader.quantity("latency", &problem))?,
        None => 0.0,
    };
    Cluster::of_servers(servers, latency).map_err(|problem| ClusterFileError::Cluster {
        file: file.to_owned(),
        problem,
    })
}

/// Where in the file a value stands.
struct Reader<'a> {
    file: &'a str,
    server: &'a str,
}

impl Reader<'_> {
    fn missing(&self, rule: &'static str) -> ClusterFileError {
        ClusterFileError::Missing {
            file: self.file.to_owned(),
            server: self.server.to_owned(),
            rule,
        }
    }

    fn quantity(&self, field: &str, problem: &UnitError) -> ClusterFileError {
        ClusterFileError::Quantity {
            file: self.file.to_owned(),
            place: match self.server {
                "" => format!("`{field}`"),
                server => format!("server `{server}`, `{field}`"),
            },
            problem: problem.to_string(),
        }
    }

    fn bandwidth(
        &self,
        field: &str,
        text: Option<&String>,
    ) -> Result<Option<f64>, ClusterFileError> {
        text.map(|text| parse_bandwidth(text))
            .transpose()
            .map_err(|problem| self.quantity(field, &problem))
    }

    fn devices(
        &self,
        entry: &ServerEntry,
        default_memory: Option<&String>,
    ) -> Result<Vec<Devices>, ClusterFileError> {
        let memory = |own: Option<&String>| {
            let text = own.or(entry.memory.as_ref()).or(default_memory);
            text.map(|text| parse_memory(text))
                .transpose()
                .map_err(|problem| self.quantity("memory", &problem))
        };
        match (&entry.devices, entry.gpus) {
            (Some(kinds), None) => kinds
                .iter()
                .map(|kind| {
                    Ok(Devices {
                        count: kind.gpus,
                        speed: kind.speed.or(entry.speed).unwrap_or(1.0),
                        memory_bytes: memory(kind.memory.as_ref())?,
                    })
                })
                .collect(),
            (None, Some(count)) => Ok(vec![Devices {
                count,
                speed: entry.speed.unwrap_or(1.0),
                memory_bytes: memory(None)?,
            }]),
            _ => Err(self.missing("give one of `gpus` and `devices`")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_alike_and_servers_of_their_own() {
        let text = r#"
            latency = "20us"
            bw = "10Gbps"
            inner-bw = "12GB/s"
            memory = "16GiB"
            [[server]]
            names = ["a", "b"]
            gpus = 4
            [[server]]
            name = "old"
            bw = "1Gbps"
            devices = [{ gpus = 2, speed = 0.5 }, { gpus = 1, memory = "8GiB" }]
            [[server]]
            count = 2
            gpus = 1
        "#;
        let cluster = parse("c.toml", text).unwrap();
        assert_eq!(cluster.devices, 13);
        assert!((cluster.latency_s - 20e-6).abs() < 1e-12);
        let names: Vec<&str> = cluster.servers.iter().map(|s| s.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "old", "3", "4"]);
        assert_eq!(cluster.bandwidth_bytes_per_s, 1.25e8);
        assert_eq!(cluster.memory_bytes, Some(8 << 30));
        let old = &cluster.servers[2].devices;
        assert_eq!((old[0].speed, old[0].memory_bytes), (0.5, Some(16 << 30)));
        assert_eq!((old[1].speed, old[1].memory_bytes), (1.0, Some(8 << 30)));
    }

    #[test]
    fn what_a_cluster_is_written_as_is_read_again() {
        let devices = |count, speed, memory_bytes| Devices {
            count,
            speed,
            memory_bytes,
        };
        let server = |name: &str, devices| Server {
            name: name.to_owned(),
            bandwidth_bytes_per_s: 11_900_000.0,
            inner_bandwidth_bytes_per_s: 1e9,
            devices,
        };
        let servers = vec![
            server("a \"b\"", vec![devices(2, 1.0, None)]),
            server(
                "c",
                vec![
                    devices(1, 0.5, Some(8 << 30)),
                    devices(1, 1.0, Some(16 << 30)),
                ],
            ),
        ];
        let cluster = Cluster::of_servers(servers, 123e-6).unwrap();
        let again = parse("c.toml", &cluster.to_toml()).unwrap();
        assert!((again.latency_s - cluster.latency_s).abs() < 1e-12);
        assert_eq!(again.servers, cluster.servers);
    }

    #[test]
    fn what_is_wrong_is_one_line_that_says_where() {
        for (text, says) in [
            ("", "c.toml: missing field `server`"),
            ("server = []", "c.toml: there are no devices"),
            ("[[server]]\ngpus = 4", "server `0`: it needs `bw`"),
            (
                "[[server]]\nbw = \"1Gbps\"",
                "give one of `gpus` and `devices`",
            ),
            (
                "[[server]]\nbw = \"10\"\ngpus = 4",
                "server `0`, `bw`: `10` has no unit",
            ),
            ("[[server]]\ngpu = 4", "c.toml: unknown field `gpu`"),
            (
                "[[server]]\nname = \"a\"\ncount = 2\ngpus = 1\nbw = \"1Gbps\"",
                "give one of `name`, `names` and `count`",
            ),
            (
                "bw = \"1Gbps\"\n[[server]]\nnames = [\"a\", \"a\"]\ngpus = 1",
                "two servers are named `a`",
            ),
            (
                "bw = \"1Gbps\"\n[[server]]\ngpus = 0",
                "its number of devices must be at least 1",
            ),
        ] {
            let error = parse("c.toml", text).unwrap_err().to_string();
            assert!(error.contains(says) && !error.contains('\n'), "{error}");
        }
    }
}
