//! Runs over many machines: which worker goes where, and mpirun's supervision.

use std::ffi::OsString;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use planner::Plan;

use crate::job::Baseline;

/// A machine and how many workers it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// As ssh knows it.
    pub name: String,
    /// Most workers.
    pub slots: usize,
}

impl std::str::FromStr for Host {
    type Err = String;

    /// `name` for one worker, `name:4` for up to four.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, slots) = match text.split_once(':') {
            None => (text, Some(1)),
            Some((name, slots)) => (name, slots.parse().ok().filter(|&n| n > 0)),
        };
        match slots {
            Some(slots) if !name.is_empty() => Ok(Host {
                name: name.to_owned(),
                slots,
            }),
            _ => Err("expected a name, or a name and a number of workers, such as a:4".into()),
        }
    }
}

/// Why a run over many machines cannot begin or did not end well.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// There is no room for all workers.
    #[error(
        "--hosts has room for {slots} workers, and there are {workers}: name more, or more of each, as in a:4,b:4"
    )]
    Slots {
        /// Of all machines.
        slots: usize,
        /// To be placed.
        workers: usize,
    },
    /// The plan counts on more servers.
    #[error("the plan places workers on {servers} servers, and --hosts names {hosts}")]
    Servers {
        /// That the plan uses.
        servers: usize,
        /// That were named.
        hosts: usize,
    },
    /// The plan has more workers on a server than its machine takes.
    #[error(
        "the plan places {workers} workers on {host}, and --hosts gives it {slots}: plan for these machines (dp-plan --cluster), or write {host}:{workers}"
    )]
    Room {
        /// The machine.
        host: String,
        /// Placed there.
        workers: usize,
        /// Its room.
        slots: usize,
    },
    /// The program was built without MPI.
    #[error("{} is missing: workers on other machines need it; apt-get install openmpi-bin libopenmpi-dev libclang-dev && cargo install --path executor --features mpi", .0.display())]
    NoWorker(PathBuf),
    /// There is no MPI.
    #[error("mpirun cannot be started ({0}): apt-get install openmpi-bin")]
    NoMpirun(io::Error),
    /// A worker's process ended.
    #[error(
        "rank {rank} on {host} (stage {stage}, replica {replica}) was ended by signal {signal}"
    )]
    Killed {
        /// Its worker.
        rank: usize,
        /// Its machine.
        host: String,
        /// Its stage.
        stage: usize,
        /// Its replica.
        replica: usize,
        /// Number and name.
        signal: String,
    },
    /// A machine cannot be reached any more.
    #[error("the connection to {host} was lost, where {workers} ran")]
    Unreachable {
        /// The machine.
        host: String,
        /// Who was on it, in words.
        workers: String,
    },
    /// It does not trust the user.
    #[error(
        "mpirun refuses to run as root; to insist, set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
    )]
    Root,
    /// As mpirun says.
    #[error("mpirun: {0}")]
    Mpirun(String),
    /// A worker has said why.
    #[error("the run failed")]
    Reported,
}

/// The machine of each worker: that of its server in the plan, or the first with room.
///
/// # Errors
/// When there is no room.
fn place(plan: &Plan, workers: usize, hosts: &[Host]) -> Result<Vec<usize>, LaunchError> {
    let servers = plan.stages.iter().flat_map(|stage| &stage.servers);
    let names = plan.cluster.servers.iter().map(|server| &*server.name);
    place_on(
        &servers.copied().collect::<Vec<_>>(),
        &names.collect::<Vec<_>>(),
        workers,
        hosts,
    )
}

/// As [`place`], from the server of each worker in the plan (none where it has no servers) and the servers' names.
fn place_on(
    servers: &[usize],
    names: &[&str],
    workers: usize,
    hosts: &[Host],
) -> Result<Vec<usize>, LaunchError> {
    if servers.len() != workers {
        let slots: usize = hosts.iter().map(|host| host.slots).sum();
        let all = hosts.iter().enumerate();
        let places = all.flat_map(|(index, host)| std::iter::repeat_n(index, host.slots));
        return match slots >= workers {
            true => Ok(places.take(workers).collect()),
            false => Err(LaunchError::Slots { slots, workers }),
        };
    }
    let used = servers.iter().max().map_or(0, |&last| last + 1);
    let by_name: Option<Vec<usize>> = (0..used)
        .map(|server| {
            let name = names.get(server)?;
            hosts.iter().position(|host| host.name == *name)
        })
        .collect();
    if by_name.is_none() && used > hosts.len() {
        return Err(LaunchError::Servers {
            servers: used,
            hosts: hosts.len(),
        });
    }
    let host_of = by_name.unwrap_or_else(|| (0..used).collect());
    let places: Vec<usize> = servers.iter().map(|&server| host_of[server]).collect();
    for (index, host) in hosts.iter().enumerate() {
        let workers = places.iter().filter(|&&place| place == index).count();
        if workers > host.slots {
            return Err(LaunchError::Room {
                host: host.name.clone(),
                workers,
                slots: host.slots,
            });
        }
    }
    Ok(places)
}

/// mpirun of Open MPI, with one dp-run-worker for each place.
fn mpirun(worker: &Path, arguments: &[OsString], hosts: &[Host], places: &[usize]) -> Command {
    let mut command = Command::new("mpirun");
    command.args(["--oversubscribe", "--bind-to", "none"]);
    // A machine that falls silent is noticed after some seconds, not hours.
    for (name, value) in [("time", "3"), ("intvl", "1"), ("probes", "3")] {
        command.args(["--mca", &format!("oob_tcp_keepalive_{name}"), value]);
    }
    // Ranks are numbered in the order of these groups.
    for (index, group) in places.chunk_by(|a, b| a == b).enumerate() {
        if index > 0 {
            command.arg(":");
        }
        let (host, count) = (&hosts[group[0]].name, group.len());
        command.args(["-H", &format!("{host}:{count}"), "-n", &count.to_string()]);
        command.arg(worker).args(arguments);
    }
    command
}

/// What mpirun tells on stderr, apart from what workers write there.
#[derive(Debug, Default)]
struct Teller {
    /// Within a block of its own, which rulers enclose.
    inside: bool,
    blocks: Vec<String>,
    /// Whether a worker has said why the run failed.
    reported: bool,
}

impl Teller {
    /// Takes a line; gives it back if a worker wrote it.
    fn take<'a>(&mut self, line: &'a str) -> Option<&'a str> {
        if line.len() > 40 && line.bytes().all(|b| b == b'-') {
            self.inside = !self.inside;
            if self.inside {
                self.blocks.push(String::new());
            }
            return None;
        }
        if self.inside {
            let block = self.blocks.last_mut()?;
            if !block.is_empty() && !line.trim().is_empty() {
                block.push(' ');
            }
            block.push_str(line.trim());
            return None;
        }
        self.reported |= line.starts_with("error: ");
        // Open MPI's own remarks begin with the machine and process.
        let is_remark = line
            .strip_prefix('[')
            .and_then(|rest| rest.split_once(']'))
            .is_some_and(|(from, rest)| {
                rest.starts_with("[[") || from.split_once(':').is_some_and(|(_, p)| is_number(p))
            });
        (!is_remark).then_some(line)
    }

    /// Machine whose daemon was lost.
    fn unreachable(&self) -> Option<&str> {
        self.blocks.iter().find_map(|block| {
            let (_, rest) = block.split_once("lost communication with a remote daemon")?;
            let (_, rest) = rest.split_once("Remote daemon:")?;
            let (_, rest) = rest.split_once(" on node ")?;
            rest.split(' ').next()
        })
    }

    /// Why a run failed whose mpirun ended with `status`. `roles` has stage and replica of each worker, `named` the
    /// machine.
    fn explain(self, status: &str, roles: &[(usize, usize)], named: &[&str]) -> LaunchError {
        if self.reported {
            return LaunchError::Reported;
        }
        if let Some((rank, host, signal)) = self.killed() {
            let (stage, replica) = roles.get(rank).copied().unwrap_or_default();
            return LaunchError::Killed {
                rank,
                host,
                stage,
                replica,
                signal,
            };
        }
        if let Some(host) = self.unreachable() {
            let there = roles
                .iter()
                .enumerate()
                .filter(|(rank, _)| named[*rank] == host);
            let words = there.map(|(rank, (stage, replica))| {
                format!("rank {rank} (stage {stage}, replica {replica})")
            });
            return LaunchError::Unreachable {
                host: host.to_owned(),
                workers: words.collect::<Vec<_>>().join(", "),
            };
        }
        let first = self.blocks.into_iter().find(|block| !block.is_empty());
        let first = first.unwrap_or_else(|| format!("it ended without a word ({status})"));
        if first.contains("attempt to run as root") {
            return LaunchError::Root;
        }
        // What follows is advice on settings.
        let sentence = first
            .split_once(". ")
            .map(|(sentence, _)| sentence.to_owned());
        LaunchError::Mpirun(sentence.unwrap_or(first))
    }

    /// Rank, machine and signal of a process that a signal ended.
    fn killed(&self) -> Option<(usize, String, String)> {
        self.blocks.iter().find_map(|block| {
            let (_, rest) = block.split_once("noticed that process rank ")?;
            let (rank, rest) = rest.split_once(' ')?;
            let (_, rest) = rest.split_once(" on node ")?;
            let (host, rest) = rest.split_once(' ')?;
            let (_, signal) = rest.split_once("on signal ")?;
            let signal = signal.trim_end_matches('.').to_owned();
            Some((rank.parse().ok()?, host.to_owned(), signal))
        })
    }
}

/// Stage and replica of each worker of what is run.
fn roles(plan: &Plan, baseline: Option<Baseline>) -> Vec<(usize, usize)> {
    let replicas: Vec<usize> = match baseline {
        None => plan.stages.iter().map(|stage| stage.replicas).collect(),
        Some(Baseline::DataParallel) => vec![plan.workers],
        Some(Baseline::Single) => vec![1],
    };
    let stages = replicas.into_iter().enumerate();
    stages
        .flat_map(|(stage, replicas)| (0..replicas).map(move |replica| (stage, replica)))
        .collect()
}

/// Runs a plan on these machines by mpirun: shows what the workers say, and waits for their end.
///
/// `arguments` are those of dp-run-worker, which lies beside this program. `running` holds mpirun meanwhile: who
/// kills it ends all workers.
///
/// # Errors
/// When there is no room, a program is missing, or the run did not end well.
pub fn run(
    plan: &Plan,
    baseline: Option<Baseline>,
    hosts: &[Host],
    arguments: &[OsString],
    running: &Mutex<Option<Child>>,
) -> Result<(), LaunchError> {
    let roles = roles(plan, baseline);
    let places = place(plan, roles.len(), hosts)?;
    start(&roles, &places, hosts, arguments, running)
}

/// As [`run`], a worker on every place of the machines, without a plan.
///
/// # Errors
/// As [`run`].
pub fn run_everywhere(
    hosts: &[Host],
    arguments: &[OsString],
    running: &Mutex<Option<Child>>,
) -> Result<(), LaunchError> {
    let all = hosts.iter().enumerate();
    let places: Vec<usize> = all
        .flat_map(|(index, host)| std::iter::repeat_n(index, host.slots))
        .collect();
    let roles: Vec<(usize, usize)> = (0..places.len()).map(|replica| (0, replica)).collect();
    start(&roles, &places, hosts, arguments, running)
}

/// Starts a worker for each role, the machine of each given, and waits for their end.
fn start(
    roles: &[(usize, usize)],
    places: &[usize],
    hosts: &[Host],
    arguments: &[OsString],
    running: &Mutex<Option<Child>>,
) -> Result<(), LaunchError> {
    let program = std::env::current_exe().unwrap_or_default();
    let worker = program.with_file_name("dp-run-worker");
    if !worker.exists() {
        return Err(LaunchError::NoWorker(worker));
    }
    let mut child = mpirun(&worker, arguments, hosts, places)
        .stderr(Stdio::piped())
        .spawn()
        .map_err(LaunchError::NoMpirun)?;
    let stderr = child.stderr.take().expect("it is piped");
    let lock = || running.lock().unwrap_or_else(PoisonError::into_inner);
    *lock() = Some(child);
    let mut teller = Teller::default();
    for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        if let Some(line) = teller.take(&String::from_utf8_lossy(&line)) {
            eprintln!("{line}");
        }
    }
    let status = match lock().take().map(|mut child| child.wait()) {
        Some(Ok(status)) if status.success() => return Ok(()),
        Some(Ok(status)) => status.to_string(),
        _ => "status unknown".to_owned(),
    };
    let named: Vec<&str> = places.iter().map(|&place| &*hosts[place].name).collect();
    Err(teller.explain(&status, roles, &named))
}

fn is_number(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hosts(text: &str) -> Vec<Host> {
        text.split(',').map(|host| host.parse().unwrap()).collect()
    }

    #[test]
    fn hosts_have_a_name_and_slots() {
        assert_eq!(
            hosts("a,b:4"),
            [("a", 1), ("b", 4)].map(|(name, slots)| Host {
                name: name.into(),
                slots
            })
        );
        for wrong in ["", ":2", "a:0", "a:x"] {
            assert!(wrong.parse::<Host>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn workers_go_where_their_servers_are_or_where_there_is_room() {
        let two = hosts("a:2,b:2");
        assert_eq!(place_on(&[], &[], 3, &two).unwrap(), [0, 0, 1]);
        assert!(matches!(
            place_on(&[], &[], 5, &two),
            Err(LaunchError::Slots {
                slots: 4,
                workers: 5
            })
        ));
        // By name, or else in the order of the servers.
        assert_eq!(
            place_on(&[0, 1, 1], &["b", "a"], 3, &two).unwrap(),
            [1, 0, 0]
        );
        assert_eq!(
            place_on(&[0, 1, 1], &["0", "1"], 3, &two).unwrap(),
            [0, 1, 1]
        );
        assert!(matches!(
            place_on(&[0, 0, 0], &["b"], 3, &two),
            Err(LaunchError::Room { workers: 3, .. })
        ));
        assert!(matches!(
            place_on(&[0, 1, 2], &["0", "1", "2"], 3, &two),
            Err(LaunchError::Servers {
                servers: 3,
                hosts: 2
            })
        ));
    }

    #[test]
    fn mpirun_numbers_ranks_by_place() {
        let hosts = hosts("a:2,b:2");
        let command = mpirun(Path::new("w"), &["p".into()], &hosts, &[0, 0, 1, 0]);
        let arguments: Vec<_> = command.get_args().map(|a| a.to_string_lossy()).collect();
        let groups = arguments.join(" ");
        let groups = groups.split_once("probes 3 ").unwrap().1;
        assert_eq!(
            groups,
            "-H a:2 -n 2 w p : -H b:1 -n 1 w p : -H a:1 -n 1 w p"
        );
    }

    fn told(said: &str) -> (Vec<&str>, Teller) {
        let mut teller = Teller::default();
        let shown = said.lines().filter_map(|line| teller.take(line)).collect();
        (shown, teller)
    }

    fn block(text: &str) -> String {
        let ruler = "-".repeat(74);
        format!("{ruler}\n{text}\n{ruler}\n")
    }

    #[test]
    fn a_killed_rank_is_found_among_what_mpirun_says() {
        let said = [
            "warning: odd\n[dp0:20784] 1 more process has sent help message\n[loss] falls\n".into(),
            block(
                "Primary job  terminated normally, but 1 process returned\na non-zero exit code.",
            ),
            block(
                "mpirun noticed that process rank 3 with PID 0 on node dp1 exited on signal 9 (Killed).",
            ),
        ];
        let said = said.concat();
        let (shown, teller) = told(&said);
        assert_eq!(shown, ["warning: odd", "[loss] falls"]);
        let error = teller.explain("", &[(0, 0), (0, 1), (0, 2), (1, 0)], &["dp1"; 4]);
        assert_eq!(
            error.to_string(),
            "rank 3 on dp1 (stage 1, replica 0) was ended by signal 9 (Killed)"
        );
    }

    #[test]
    fn a_lost_machine_is_named_with_its_workers() {
        let said = block(
            "ORTE has lost communication with a remote daemon.\n\n  HNP daemon   : [[1,0],0] on node dp0\n  Remote daemon: [[1,0],2] on node dp2\n\nThis is usually",
        );
        let error = told(&said)
            .1
            .explain("", &[(0, 0), (1, 0), (1, 1)], &["dp0", "dp2", "dp2"]);
        assert_eq!(
            error.to_string(),
            "the connection to dp2 was lost, where rank 1 (stage 1, replica 0), rank 2 (stage 1, replica 1) ran"
        );
    }

    #[test]
    fn the_first_sentence_of_mpirun_is_enough_and_a_workers_word_comes_first() {
        let error = Teller::default().explain("signal: 9 (SIGKILL)", &[], &[]);
        let said = "mpirun: it ended without a word (signal: 9 (SIGKILL))";
        assert_eq!(error.to_string(), said);
        let said = block("It cannot start. This is usually caused by:\n* much");
        let error = told(&said).1.explain("", &[], &[]);
        assert_eq!(error.to_string(), "mpirun: It cannot start");
        let said = format!("error: no data\n{said}");
        let (shown, teller) = told(&said);
        assert_eq!(shown, ["error: no data"]);
        assert!(matches!(
            teller.explain("", &[], &[]),
            LaunchError::Reported
        ));
    }
}
