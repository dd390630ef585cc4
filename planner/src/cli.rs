//! The command line of dp-plan: what may be asked, turned into a request, carried out, printed.

pub mod cluster;
pub mod convert;
pub mod sweep;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::cost::Formula;
use crate::file::{self, FileError};
use crate::planning::{
    self, Compared, Course, Explanation, PlanningError, Recompute, Request, Scope, Solver,
    StageSpec, Together,
};
use crate::profile::{FileRef, Profile};
use crate::schedule::ScheduleKind;
use crate::units::{parse_bandwidth, parse_memory, parse_time};
use crate::{Plan, report, timeline};

const AFTER_HELP: &str = "\
A cluster file (defaults first, each server may say otherwise):
  latency = \"20us\"
  bw = \"10Gbps\"          # network card of a server, each direction
  inner-bw = \"12GB/s\"    # link of each device within a server
  memory = \"16GiB\"
  [[server]]
  names = [\"a\", \"b\"]    # or `name`, or `count`
  gpus = 4
  [[server]]
  name = \"old\"
  devices = [{ gpus = 2, speed = 0.5 }, { gpus = 1, memory = \"8GiB\" }]
`speed` is against the profiled device: 0.5 takes twice the time.

Exit status: 0 a plan was found, 1 a file or the search failed, 2 flags that are wrong or do not go
together, 3 no plan fits the memory (the message names the nearest one).";

/// Finds the pipeline stages, their replicas and depths that train a profiled model fastest.
///
/// Reads a profile written by dp-profile, prints the best plan with what every alternative would give, and writes
/// the plan that dp-run carries out.
#[derive(Debug, Parser)]
#[command(
    name = "dp-plan",
    version,
    max_term_width = 100,
    after_help = AFTER_HELP,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true
)]
pub struct CommandLine {
    /// What to plan.
    #[command(flatten)]
    pub plan: Option<Arguments>,
    /// What else to do.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// Everything besides planning.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Write a profile of another planner as a profile of dp-profile
    Convert(convert::Arguments),
}

/// What to plan.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Profile of the model, written by dp-profile or another planner's profiler (see --from)
    pub profile: PathBuf,

    /// Who wrote the profile [default: seen from its content]
    #[arg(long, value_enum, value_name = "FORMAT")]
    pub from: Option<convert::FormatName>,

    /// Samples in a minibatch of another planner's profile [default: seen from its sizes, or else 1]; times and sizes
    /// stay what they are
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub batch: Option<usize>,

    /// Devices (or CPU workers) to plan for, all alike; with --cluster only the first N of the file
    #[arg(long, value_name = "N", value_parser = parse_count, required_unless_present_any = ["sweep", "cluster"])]
    pub gpus: Option<usize>,

    /// Goodput of each device's link in each direction: 10Gbps, 1.25GB/s; or `local` for threads of one
    /// process, which hand tensors over by reference
    #[arg(long, value_name = "BANDWIDTH", value_parser = parse_link, required_unless_present_any = ["sweep", "cluster"])]
    pub bw: Option<Link>,

    /// Devices in each server: what leaves a server shares its network card, whose goodput --bw then is
    #[arg(long, value_name = "K", value_parser = parse_count, requires = "inner_bw")]
    pub gpus_per_server: Option<usize>,

    /// Goodput of each device's link within its server, in each direction
    #[arg(long, value_name = "BANDWIDTH", value_parser = parse_bandwidth, requires = "gpus_per_server")]
    pub inner_bw: Option<f64>,

    /// Servers that differ, from a TOML file (see below) instead of the flags above
    #[arg(long, value_name = "FILE", conflicts_with_all = ["bw", "gpus_per_server", "inner_bw", "latency", "memory"])]
    pub cluster: Option<PathBuf>,

    /// Latency of one message
    #[arg(long, value_name = "TIME", default_value = "0us", value_parser = parse_time, allow_hyphen_values = true)]
    pub latency: f64,

    /// Memory of each device, for example 16GiB [default: unlimited]
    #[arg(long, value_name = "SIZE", value_parser = parse_memory)]
    pub memory: Option<u64>,

    /// How minibatches move through the stages: asynchronously with weight stashing (1f1b), with two weight versions
    /// (2bw), in batches behind which the pipeline is flushed (1f1b-flush, gpipe), one at a time, or without stages;
    /// `auto` compares all kinds and takes the fastest
    #[arg(long, value_enum, value_name = "KIND", default_value_t = ScheduleName::OneFOneB, conflicts_with = "sweep")]
    pub schedule: ScheduleName,

    /// With 1f1b: a minibatch reads the same weight version in all stages
    #[arg(long, conflicts_with = "sweep")]
    pub vertical_sync: bool,

    /// Minibatches of the profile's size in a step of all stages (2bw, vertical sync, and the microbatches of a batch
    /// with 1f1b-flush and gpipe) [default: as few as suit the stages; four for each device where batches are flushed]
    #[arg(long, value_name = "M", value_parser = parse_count, conflicts_with = "sweep")]
    pub microbatches: Option<usize>,

    /// Whether stages keep their inputs only and run forward again before each backward, which costs time and saves
    /// memory: where the memory asks for it, nowhere, or everywhere
    #[arg(long, value_enum, default_value_t = RecomputeName::Auto)]
    pub recompute: RecomputeName,

    /// Who searches: the dynamic program or the integer program; both find the same optimum
    #[arg(long, value_enum, default_value_t = SolverName::Dp)]
    pub solver: SolverName,

    /// What a plan is judged by: this program's cost model, or the formula of arXiv 1806.03377, of SOSP 2019, or
    /// of the released PipeDream optimizer, for comparison
    #[arg(long, value_enum, default_value_t = ModelName::Ours)]
    pub model: ModelName,

    /// Only pipelines without replication
    #[arg(long, conflicts_with = "stages")]
    pub straight: bool,

    /// Place layers freely on the devices, a device running several pieces of the model: without replicas, and not yet
    /// for dp-run
    #[arg(long, conflicts_with_all = ["stages", "schedule", "vertical_sync", "microbatches", "sweep", "explain", "gantt", "trace", "recompute", "gpus_per_server", "cluster"])]
    pub non_contiguous: bool,

    /// Stages of your own: the first layer of each (name, or number from 0 in execution order) and its replicas,
    /// as in `0:2,fc1:1`
    #[arg(long, value_name = "FIRST[:REPLICAS],...", value_parser = parse_stages)]
    pub stages: Option<Stages>,

    /// Keep these layers in one stage (names, or numbers from 0), with all that lies between them in the graph; may be
    /// given several times. Layers that share weights stay together by themselves
    #[arg(long, value_name = "FIRST..LAST|LAYER,LAYER,...")]
    pub together: Vec<Together>,

    /// Plan for a range of devices or bandwidths, or both: gpus=1..64, bw=1Gbps..100Gbps (1, 2, 5 of each decade and
    /// both ends; at most 64 steps, 16 of devices where both are swept). Prints comma-separated values, one line for
    /// each plan; --output writes them to a file. --plot FILE draws FILE, FILE-memory and FILE-communication over one
    /// range, and a map of the speed-up over data parallel over both
    #[arg(long, value_name = "NAME=FIRST..LAST", value_parser = sweep::parse)]
    pub sweep: Vec<sweep::Sweep>,

    /// Write the plan to this file
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Draw throughput over 1 to N devices against data parallel, or what --sweep found; .svg or .png, without
    /// either both are written
    #[cfg(feature = "plot")]
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Say more about the plan: its fullest resources, what the plans next to it cost, and what one more device or
    /// twice the bandwidth would bring
    #[arg(long, conflicts_with_all = ["quiet", "sweep"])]
    pub explain: bool,

    /// Print the simulated schedule too, one row for each worker: the first rounds and the steady state
    #[arg(long, conflicts_with_all = ["json", "quiet", "sweep"])]
    pub gantt: bool,

    /// Minibatches (microbatches) of the schedule that --gantt and --trace simulate [default: as many as show the
    /// steady state]
    #[arg(long, value_name = "N", value_parser = parse_count, conflicts_with = "sweep")]
    pub minibatches: Option<usize>,

    /// Write the simulated schedule as a trace that Perfetto and chrome://tracing open
    #[arg(long, value_name = "FILE", conflicts_with = "sweep")]
    pub trace: Option<PathBuf>,

    /// Print the plan as one JSON object instead of a table
    #[arg(long)]
    pub json: bool,

    /// Print no table, and no notes on the profile
    #[arg(long)]
    pub quiet: bool,
}

/// What connects the workers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Link {
    /// Threads of one process.
    Local,
    /// Bytes per second.
    Network(f64),
}

/// Stages given on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stages(Vec<StageSpec>);

/// `--solver`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SolverName {
    /// Dynamic program
    Dp,
    /// Integer program
    Ilp,
}

/// `--schedule`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ScheduleName {
    /// One forward, one backward, weight stashing: PipeDream
    #[value(name = "1f1b")]
    OneFOneB,
    /// Two weight versions, a step for all minibatches in flight: PipeDream-2BW
    #[value(name = "2bw")]
    TwoBw,
    /// One forward, one backward within each batch, no staleness
    #[value(name = "1f1b-flush")]
    OneFOneBFlush,
    /// All forwards, then all backwards of each batch, no staleness
    Gpipe,
    /// One minibatch at a time
    ModelParallel,
    /// The whole model on every device
    DataParallel,
    /// The fastest of all
    Auto,
}

/// `--recompute`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RecomputeName {
    /// Where the memory asks for it
    Auto,
    /// Nowhere
    Never,
    /// In every stage
    Always,
}

/// `--model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ModelName {
    /// Compute, step, traffic, all-reduce and memory of this program
    Ours,
    /// arXiv 1806.03377
    Paper,
    /// SOSP 2019
    Sosp19,
    /// The released optimizer, which cuts and replicates whole servers
    Release,
    /// The released optimizer with activations counted
    ReleaseActivations,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The cluster file.
    #[error(transparent)]
    Cluster(#[from] cluster::ClusterFileError),
    /// The planning.
    #[error(transparent)]
    Planning(#[from] PlanningError),
    /// Flags that do not go together.
    #[error("{0}")]
    Usage(String),
    /// The picture.
    #[cfg(feature = "plot")]
    #[error(transparent)]
    Plot(#[from] crate::plot::PlotError),
    /// Nobody reads the output.
    #[error("cannot print: {0}")]
    Print(#[from] std::io::Error),
}

impl CliError {
    /// 3 if no plan is feasible, 2 if the user's stages are no partition, else 1.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Planning(PlanningError::Infeasible(_)) => 3,
            Self::Planning(
                PlanningError::Hand(_) | PlanningError::Together(_) | PlanningError::Formula { .. },
            )
            | Self::Usage(_) => 2,
            _ => 1,
        }
    }
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("a plan needs at least 1".to_owned()),
        Ok(count) if count > 1_000_000 => Err("at most 1000000".to_owned()),
        Ok(count) => Ok(count),
        Err(_) => Err("write a whole number, for example 4".to_owned()),
    }
}

fn parse_link(text: &str) -> Result<Link, String> {
    if text == "local" {
        return Ok(Link::Local);
    }
    parse_bandwidth(text)
        .map(Link::Network)
        .map_err(|error| format!("{error}, or `local` for threads of one process"))
}

fn parse_stages(text: &str) -> Result<Stages, planning::HandError> {
    planning::parse_stages(text).map(Stages)
}

impl Arguments {
    fn kind(&self) -> Result<ScheduleKind, CliError> {
        let kind = match self.schedule {
            ScheduleName::OneFOneB | ScheduleName::Auto => ScheduleKind::OneFOneB,
            ScheduleName::TwoBw => ScheduleKind::TwoBw,
            ScheduleName::OneFOneBFlush => ScheduleKind::OneFOneBFlush,
            ScheduleName::Gpipe => ScheduleKind::Gpipe,
            ScheduleName::ModelParallel => ScheduleKind::ModelParallel,
            ScheduleName::DataParallel => ScheduleKind::DataParallel,
        };
        match (self.vertical_sync, self.schedule) {
            (false, _) => Ok(kind),
            (true, ScheduleName::OneFOneB) => Ok(ScheduleKind::VerticalSync),
            (true, _) => Err(CliError::Usage(
                "--vertical-sync is a variant of --schedule 1f1b: no other kind has it".to_owned(),
            )),
        }
    }

    /// What the flags ask for.
    ///
    /// # Errors
    /// If the cluster file cannot be read or used.
    pub fn request(&self) -> Result<Request, CliError> {
        Ok(Request {
            cluster: cluster::cluster(self)?,
            solver: match self.solver {
                SolverName::Dp => Solver::Dp,
                SolverName::Ilp => Solver::Ilp,
            },
            formula: match self.model {
                ModelName::Ours => Formula::Ours,
                ModelName::Paper => Formula::Paper,
                ModelName::Sosp19 => Formula::Sosp19,
                ModelName::Release => Formula::Release,
                ModelName::ReleaseActivations => Formula::ReleaseActivations,
            },
            recompute: match self.recompute {
                RecomputeName::Auto => Recompute::Auto,
                RecomputeName::Never => Recompute::Never,
                RecomputeName::Always => Recompute::Always,
            },
            together: self.together.clone(),
            course: Course {
                kind: self.kind()?,
                microbatches: self.microbatches,
            },
            scope: match (&self.stages, self.straight) {
                (Some(Stages(specs)), _) => Scope::Given(specs.clone()),
                (None, true) => Scope::Straight,
                (None, false) => Scope::All,
            },
        })
    }
}

/// Does what the command line asks for.
///
/// # Errors
/// Each is one line for the user.
pub fn run(command_line: &CommandLine) -> Result<(), CliError> {
    match (&command_line.command, &command_line.plan) {
        (Some(Command::Convert(arguments)), _) => convert::run(arguments),
        (None, Some(arguments)) => plan(arguments),
        // clap asks for one of the two.
        (None, None) => Ok(()),
    }
}

/// Loads the profile, plans, prints and writes what was asked for.
fn plan(arguments: &Arguments) -> Result<(), CliError> {
    if arguments.minibatches.is_some() && !arguments.gantt && arguments.trace.is_none() {
        return Err(CliError::Usage(
            "--minibatches is for the simulated schedule: give --gantt or --trace too".to_owned(),
        ));
    }
    let profile = convert::load(&arguments.profile, arguments.from, arguments.batch)?;
    if !arguments.quiet {
        for note in &profile.notes {
            eprintln!("note: {}: {note}", arguments.profile.display());
        }
    }
    let imported = profile.is_foreign();
    let profile = profile.profile;
    if !arguments.sweep.is_empty() {
        return sweep::run(arguments, &profile);
    }
    let profile_file = FileRef {
        file: arguments.profile.display().to_string(),
        sha256: file::sha256_of_file(&arguments.profile)?,
    };
    let request = arguments.request()?;
    let (plan, compared) = if arguments.non_contiguous {
        let plan = planning::plan_freely(&profile, profile_file, &request)?;
        (plan, Vec::new())
    } else if arguments.schedule == ScheduleName::Auto {
        planning::compare(&profile, &profile_file, &request)?
    } else {
        (
            planning::plan(&profile, profile_file, &request)?,
            Vec::new(),
        )
    };
    let request = Request {
        course: Course {
            kind: plan.schedule,
            microbatches: request.course.microbatches,
        },
        ..request
    };
    if let Some(path) = &arguments.output {
        plan.save(path)?;
        if imported && !arguments.quiet {
            eprintln!(
                "note: {}: made from another planner's profile, which names no layers of an ONNX model: dp-run needs a plan \
                 from a profile of dp-profile to train, and carries this one out with --emulate-compute",
                path.display()
            );
        }
    }
    #[cfg(feature = "plot")]
    if let Some(path) = &arguments.plot {
        draw(path, &profile, &request)?;
    }
    let explanation = if arguments.explain {
        Some(planning::explanation(&profile, &request, &plan)?)
    } else {
        None
    };
    print(arguments, &request, &plan, &compared, explanation.as_ref())?;
    show_timeline(arguments, &profile, &request, &plan)
}

/// The schedule as text and as a trace, of as many minibatches as show the steady state between fill and drain.
fn show_timeline(
    arguments: &Arguments,
    profile: &Profile,
    request: &Request,
    plan: &Plan,
) -> Result<(), CliError> {
    if !arguments.gantt && arguments.trace.is_none() {
        return Ok(());
    }
    let in_flight = plan.stages.iter().map(|s| s.replicas * s.depth).max();
    let batches = 3 * plan.microbatches.unwrap_or(0);
    let minibatches = arguments
        .minibatches
        .unwrap_or_else(|| (6 * in_flight.unwrap_or(1) + 8).max(batches));
    let run = planning::timeline(profile, request, plan, minibatches)?;
    if let Some(path) = &arguments.trace {
        file::write_atomically(path, timeline::trace(&run).as_bytes())?;
    }
    if arguments.gantt {
        let text = timeline::first_rounds_and_steady_state(&run, plan.fill_s, plan.period_s);
        file::print(&format!("\n{text}"))?;
    }
    Ok(())
}

fn print(
    arguments: &Arguments,
    request: &Request,
    plan: &Plan,
    compared: &[Compared],
    explanation: Option<&Explanation>,
) -> Result<(), CliError> {
    /// The plan's own names, and some more.
    #[derive(serde::Serialize)]
    struct Answer<'a> {
        #[serde(flatten)]
        plan: &'a Plan,
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        schedules: &'a [Compared],
        #[serde(skip_serializing_if = "Option::is_none")]
        explanation: Option<&'a Explanation>,
    }
    if arguments.quiet && !arguments.json {
        return Ok(());
    }
    if arguments.json {
        let answer = Answer {
            plan,
            schedules: compared,
            explanation,
        };
        return Ok(file::print(&file::to_json(&answer))?);
    }
    let mut text = report::table(plan, request.formula);
    if !compared.is_empty() {
        text.push('\n');
        text.push_str(&report::schedules(plan, compared));
    }
    if let Some(explanation) = explanation {
        text.push('\n');
        text.push_str(&report::explanation(plan, explanation));
    }
    Ok(file::print(&text)?)
}

#[cfg(feature = "plot")]
fn draw(path: &std::path::Path, profile: &Profile, request: &Request) -> Result<(), CliError> {
    use std::path::Path;

    use crate::plot;

    let points = planning::sweep(profile, request)?;
    let title = Path::new(&profile.model.file)
        .file_stem()
        .map_or_else(|| "model".into(), |stem| stem.to_string_lossy());
    let subtitle = report::cluster_line(&request.cluster);
    let chart = plot::Chart {
        title: &format!("{title}: throughput over workers"),
        subtitle: &format!("batch {} per worker, {subtitle}", profile.batch_size),
        points: &points,
    };
    Ok(plot::Picture::Chart(&chart).write(path)?)
}
