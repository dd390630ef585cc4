//! dp-run-worker: one worker of a run over MPI. mpirun or srun starts as many as the plan has workers; that
//! of rank 0 is also the coordinator, which shows progress and writes results.

use std::error::Error;
use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;

use clap::Parser;
use executor::affinity::Seat;
use executor::cli::{Cli, Command, CommandLine, NetworkArgs};
use executor::network::{self, Network};
use executor::program::{self, Prepared};
use executor::stage;
use executor::train::{Job, remote, train_over};
use executor::transport::Exchange;
use executor::transport::mpi::{CarrierError, Difference, agree, all_ready, carry, hosts};
use mpi::Threading;
use mpi::topology::SimpleCommunicator;
use mpi::traits::Communicator;
use planner::file;

/// What [`agree`] compares, in words and in this order.
const COMPARED: [&str; 3] = [
    "is another version of dp-run-worker",
    "has another plan",
    "has other flags",
];

fn main() -> ExitCode {
    let CommandLine { run: cli, command } = CommandLine::parse();
    prefer_plain_sends();
    let Some((universe, _)) = mpi::initialize_with_threading(Threading::Funneled) else {
        eprintln!("error: MPI cannot be initialised");
        return ExitCode::FAILURE;
    };
    program::silence_workers();
    let world = universe.world();
    let hosts = hosts(&world);
    if let Some(Command::Network(arguments)) = command {
        return measure(&arguments, &world, &hosts);
    }
    // clap asks for one of the two.
    let Some(cli) = cli else {
        return ExitCode::FAILURE;
    };
    match prepare(&cli, &world, &hosts) {
        Ok(prepared) => run(&cli, &world, &hosts, &prepared),
        // All processes end here together; one of them says why.
        Err(error) => {
            if let Some(error) = error {
                eprintln!("error: {error}");
            }
            ExitCode::FAILURE
        }
    }
}

/// Open MPI sends large messages over TCP by a protocol for remote memory, which asks and answers more often: where
/// both directions of a link are busy, that costs a sixth to a third of the goodput. Who has set it keeps it.
fn prefer_plain_sends() {
    const FLAGS: &str = "OMPI_MCA_btl_tcp_flags";
    if std::env::var_os(FLAGS).is_none() {
        // SAFETY: this program has one thread yet.
        unsafe { std::env::set_var(FLAGS, "send") };
    }
}

/// Opens all that a run needs, if every process can, and all have the same. The error goes to one of them.
fn prepare(
    cli: &Cli,
    world: &SimpleCommunicator,
    hosts: &[String],
) -> Result<Prepared, Option<String>> {
    let rank = world.rank() as usize;
    let mine = open(cli, world);
    if let Err(first) = all_ready(world, mine.is_ok()) {
        return Err(match mine {
            Err(error) if first == rank && rank > 0 => {
                Some(format!("rank {rank} on {}: {error}", hosts[rank]))
            }
            Err(error) if first == rank => Some(error.to_string()),
            _ => None,
        });
    }
    let (prepared, plan_text) = mine.map_err(|error| Some(error.to_string()))?;
    let things = [version(), plan_text, format!("{:?}", cli.options())];
    match agree(world, &things) {
        Ok(()) => Ok(prepared),
        Err(Difference { rank: other, thing }) => Err((rank == 0).then(|| {
            format!(
                "rank {other} on {} {} than rank 0 on {}: give every machine the same",
                hosts[other], COMPARED[thing], hosts[0]
            )
        })),
    }
}

/// The job, and the text of its plan.
fn open(
    cli: &Cli,
    world: &SimpleCommunicator,
) -> Result<(Prepared, String), Box<dyn Error + Send + Sync>> {
    // Signals go to mpirun, which ends all processes: there is no stop half-way.
    let prepared = Prepared::new(cli, Arc::default())?;
    let (ranks, workers) = (world.size() as usize, prepared.job.workers());
    if ranks != workers {
        let hint = if ranks == 1 {
            ": start it with mpirun or srun, of the same MPI library that it was built with"
        } else {
            ""
        };
        return Err(format!(
            "{}: it has {workers} workers, and MPI gave {ranks} processes{hint} (mpirun -n {workers} dp-run-worker …)",
            cli.plan.display()
        )
        .into());
    }
    Ok((prepared, fs::read_to_string(&cli.plan)?))
}

/// Measures the network; rank 0 tells.
fn measure(arguments: &NetworkArgs, world: &SimpleCommunicator, hosts: &[String]) -> ExitCode {
    if let Err(Difference { rank, .. }) = agree(world, &[version()]) {
        if world.rank() == 0 {
            eprintln!(
                "error: rank {rank} on {} {} than rank 0 on {}: give every machine the same",
                hosts[rank], COMPARED[0], hosts[0]
            );
        }
        return ExitCode::FAILURE;
    }
    let (rank, workers) = (world.rank() as usize, world.size() as usize);
    // Only the measurement's own messages: there are no letters.
    let (mut exchange, end) = Exchange::new(rank, workers, |_, _| {});
    let result = thread::scope(|scope| {
        let prober = scope.spawn(|| {
            let result = network::measure(&mut end.transport(), rank, hosts, network::LONG_ENOUGH);
            end.close();
            result
        });
        if let Err(error) = carry(world, &mut exchange) {
            let worker = error.worker();
            eprintln!("error: rank {worker} on {}: {error}", hosts[worker]);
            world.abort(1);
        }
        prober.join()
    });
    let told = match result {
        Ok(Ok(Some(figures))) => tell(arguments, &figures),
        Ok(Ok(None)) => Ok(()),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err("internal error: the measurement failed".into()),
    };
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn tell(arguments: &NetworkArgs, figures: &Network) -> Result<(), Box<dyn Error + Send + Sync>> {
    if let Some(path) = &arguments.output {
        let text = format!(
            "# Measured by dp-run network.\n{}",
            figures.cluster()?.to_toml()
        );
        file::write_atomically(path, text.as_bytes())?;
    }
    let text = if arguments.json {
        figures.to_json()
    } else {
        figures.table()
    };
    Ok(file::print(&text)?)
}

/// What every process must be.
fn version() -> String {
    format!("{} {}", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH)
}

fn run(cli: &Cli, world: &SimpleCommunicator, hosts: &[String], prepared: &Prepared) -> ExitCode {
    let job = &prepared.job;
    let (rank, workers) = (world.rank() as usize, job.workers());
    let here = |ranks: &[String]| ranks.iter().filter(|h| **h == hosts[rank]).count();
    let seat = Seat {
        index: here(&hosts[..rank]),
        of: here(hosts),
    };
    let result = if rank == 0 {
        prepared.warn(false);
        let (mut exchange, link) = remote::coordinate(workers);
        let end = link.end.clone();
        thread::scope(|scope| {
            let coordinator = scope.spawn(move || {
                let result =
                    prepared.run(cli, |job, observer| train_over(job, link, seat, observer));
                if result.is_err() {
                    end.give_up();
                }
                result.map(|_| ())
            });
            carry_or_abort(world, &mut exchange, job, hosts);
            coordinator.join()
        })
    } else {
        let (mut exchange, end, tasks) = remote::follow(rank, workers);
        thread::scope(|scope| {
            let worker = scope.spawn(move || remote::serve(job, &end, &tasks, &hosts[rank], seat));
            carry_or_abort(world, &mut exchange, job, hosts);
            worker.join().map(Ok)
        })
    };
    match result {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            eprintln!("error: {error}");
            world.abort(1)
        }
        Err(_) => world.abort(1),
    }
}

/// Carries frames to the end. When another process is lost, so is the run.
fn carry_or_abort(
    world: &SimpleCommunicator,
    exchange: &mut Exchange,
    job: &Job,
    hosts: &[String],
) {
    if let Err(error) = carry(world, exchange) {
        eprintln!("error: {}", describe(&error, job, hosts));
        world.abort(1);
    }
}

fn describe(error: &CarrierError, job: &Job, hosts: &[String]) -> String {
    let worker = error.worker();
    let stage = stage::of_worker(&job.stages, worker);
    format!(
        "rank {worker} on {} (stage {}, replica {}): {error}",
        hosts[worker],
        stage.index,
        worker - stage.first_worker
    )
}
