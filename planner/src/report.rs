//! A plan as a table that anybody can read.

use std::fmt::Write;

use crate::Plan;
use crate::cost::Formula;
use crate::plan::{Baseline, Cluster, Stage};
use crate::planning::{Compared, Explanation};
use crate::schedule::ScheduleKind;
use crate::units::{show_bandwidth, show_bytes, show_time};

/// No layer name is shown longer than this.
const LONGEST_NAME: usize = 28;

/// No row names more servers.
const MOST_SERVERS: usize = 6;

/// The whole report, ending in a newline.
#[must_use]
pub fn table(plan: &Plan, formula: Formula) -> String {
    let mut text = String::new();
    let replicas: Vec<String> = plan.stages.iter().map(|s| s.replicas.to_string()).collect();
    let _ = writeln!(
        text,
        "Plan {}{} on {} of {}: {} samples/s ({} per minibatch of {})\n",
        if plan.schedule == ScheduleKind::Interleaved {
            "of free pieces".to_owned()
        } else {
            replicas.join("-")
        },
        schedule(plan),
        count(plan.workers, "worker"),
        cluster_line(&plan.cluster),
        number(plan.throughput_samples_per_s),
        show_time(plan.period_s),
        plan.batch_size,
    );
    text.push_str(&stage_table(plan));
    if let Some(card) = plan
        .cards
        .iter()
        .max_by(|a, b| a.load_s.total_cmp(&b.load_s))
    {
        let _ = writeln!(
            text,
            "Fullest network card: server {} sends {} and receives {} per minibatch, {}.",
            card.server,
            show_bytes(card.bytes_sent),
            show_bytes(card.bytes_received),
            show_time(card.load_s),
        );
    }
    text.push('\n');
    text.push_str(&verdict(plan, formula));
    text.push('\n');
    text.push_str(&baseline_table(plan));
    text
}

/// What is special about the plan's schedule: ` (gpipe, steps of 64 microbatches)`.
fn schedule(plan: &Plan) -> String {
    match (plan.schedule, plan.microbatches) {
        (ScheduleKind::OneFOneB, _) => String::new(),
        (ScheduleKind::Interleaved, _) => format!(
            " ({}, not simulated: at the pace of the bottleneck)",
            count(plan.stages.len(), "piece")
        ),
        (kind, None) => format!(" ({kind})"),
        (kind, Some(count)) if plan.pace().flushes() => {
            format!(" ({kind}, microbatches per batch: {count})")
        }
        (kind, Some(count)) => format!(" ({kind}, a step every {count} minibatches)"),
    }
}

/// `4 devices, 10.0 Gbps, 16.0 GiB each`.
#[must_use]
pub fn cluster_line(cluster: &Cluster) -> String {
    let mut line = count(cluster.devices, "device");
    if cluster.local {
        line.push_str(" in one process");
    } else if let Some(first) = cluster.servers.first() {
        let _ = write!(line, " in {}", count(cluster.servers.len(), "server"));
        let cards = cluster.servers.iter().map(|s| s.bandwidth_bytes_per_s);
        let (least, most) = cards.fold((f64::INFINITY, 0.0f64), |(a, b), card| {
            (a.min(card), b.max(card))
        });
        let _ = match least < most {
            true => write!(
                line,
                ", {} to {} between them",
                show_bandwidth(least),
                show_bandwidth(most)
            ),
            false => write!(line, ", {} between them", show_bandwidth(least)),
        };
        let inner = first.inner_bandwidth_bytes_per_s;
        if cluster
            .servers
            .iter()
            .all(|s| s.inner_bandwidth_bytes_per_s == inner)
        {
            let _ = write!(line, ", {} inside", show_bandwidth(inner));
        }
    } else {
        let _ = write!(
            line,
            ", {} links",
            show_bandwidth(cluster.bandwidth_bytes_per_s)
        );
    }
    if let Some(memory) = memory(cluster) {
        let _ = write!(line, ", {memory} each");
    }
    line
}

/// `16.0 GiB`, or `8.0 GiB to 16.0 GiB`, or `8.0 GiB or more` where some devices have no limit.
fn memory(cluster: &Cluster) -> Option<String> {
    let least = cluster.memory_bytes?;
    let kinds = cluster.servers.iter().flat_map(|server| &server.devices);
    let limits: Vec<Option<u64>> = kinds.map(|kind| kind.memory_bytes).collect();
    let least_text = show_bytes(least as f64);
    if limits.contains(&None) {
        return Some(format!("{least_text} or more"));
    }
    let most = limits.into_iter().flatten().max().unwrap_or(least);
    Some(match most > least {
        true => format!("{least_text} to {}", show_bytes(most as f64)),
        false => least_text,
    })
}

fn stage_table(plan: &Plan) -> String {
    let mut rows = vec![
        [
            "stage", "layers", "replicas", "depth", "compute", "traffic", "sync", "link", "memory",
        ]
        .map(str::to_owned)
        .to_vec(),
    ];
    for (i, stage) in plan.stages.iter().enumerate() {
        let mut depth = match stage.delay {
            0 => stage.depth.to_string(),
            delay => format!("{}+{delay}", stage.depth),
        };
        if stage.recompute {
            depth.push('r');
        }
        rows.push(vec![
            i.to_string(),
            layers(stage),
            format!("x{}", stage.replicas),
            depth,
            show_time(stage.compute_s),
            show_time(stage.traffic_s),
            show_time(stage.sync_s),
            show_bytes(stage.sent_bytes.max(stage.received_bytes)),
            show_bytes(stage.memory_bytes as f64),
        ]);
    }
    if plan.schedule == ScheduleKind::Interleaved {
        rows[0].push("worker".to_owned());
        for (row, stage) in rows[1..].iter_mut().zip(&plan.stages) {
            let workers: Vec<String> = stage.workers.iter().map(ToString::to_string).collect();
            row.push(workers.join(", "));
        }
    }
    if !plan.cluster.servers.is_empty() {
        rows[0].push("  on".to_owned());
        for (row, stage) in rows[1..].iter_mut().zip(&plan.stages) {
            row.push(format!("  {}", on_servers(plan, stage)));
        }
    }
    let mut text = align(&rows, 2);
    text.push_str("Per minibatch: times of each replica's device (compute) and link (traffic, sync), bytes over its link in the busier \
         direction; memory per worker at its fullest.\n");
    if plan.stages.iter().any(|s| s.delay > 0) {
        text.push_str(
            "Depth k+1: k minibatches in flight, and the all-reduce may lag one round: it runs beside the next minibatch, \
             whose weights are one step older for it.\n",
        );
    }
    if plan.stages.iter().any(|s| s.recompute) {
        text.push_str(
            "Depth kr: the stage keeps its inputs only and runs forward again before each backward.\n",
        );
    }
    text
}

/// `a x4, b x3`: replicas in each server.
fn on_servers(plan: &Plan, stage: &Stage) -> String {
    let mut counts: Vec<(usize, usize)> = Vec::new();
    for &server in &stage.servers {
        match counts.last_mut() {
            Some((last, count)) if *last == server => *count += 1,
            _ => counts.push((server, 1)),
        }
    }
    let shown = counts.iter().take(MOST_SERVERS);
    let mut shown: Vec<String> = shown
        .map(|&(server, count)| format!("{} x{count}", plan.cluster.servers[server].name))
        .collect();
    if counts.len() > MOST_SERVERS {
        shown.push(format!("and {} more", counts.len() - MOST_SERVERS));
    }
    shown.join(", ")
}

fn layers(stage: &Stage) -> String {
    let name = |i: usize| shorten(&stage.layers[i]);
    match stage.layers.len() {
        0 => String::new(),
        1 => name(0),
        n => format!("{} .. {} ({n})", name(0), name(n - 1)),
    }
}

/// Long names keep their end, which tells layers apart.
fn shorten(name: &str) -> String {
    let length = name.chars().count();
    if length <= LONGEST_NAME {
        return name.to_owned();
    }
    let tail: String = name.chars().skip(length - LONGEST_NAME + 1).collect();
    format!("\u{2026}{tail}")
}

fn verdict(plan: &Plan, formula: Formula) -> String {
    let mut text = format!(
        "Bottleneck  {} per minibatch\n            {}\n",
        show_time(plan.bottleneck_s),
        plan.bottleneck
    );
    let proof = if plan.optimal {
        "optimal: no plan on these devices has a smaller bottleneck".to_owned()
    } else {
        format!(
            "{:.1} % above the lower bound of {}",
            100.0 * plan.gap,
            show_time(plan.lower_bound_s)
        )
    };
    let _ = writeln!(text, "Proof       {proof}");
    if plan.schedule == ScheduleKind::Interleaved {
        // Its stall says why nothing is simulated.
    } else if formula == Formula::Ours {
        let above = plan.period_s / plan.bottleneck_s.max(f64::MIN_POSITIVE) - 1.0;
        let _ = writeln!(
            text,
            "Simulated   {} per minibatch, {:.1} % above the bottleneck; bubbles {:.0} %, fill {}, drain {}",
            show_time(plan.period_s),
            100.0 * above.clamp(0.0, 1e6),
            100.0 * plan.bubble_share,
            show_time(plan.fill_s),
            show_time(plan.drain_s),
        );
    } else {
        let _ = writeln!(
            text,
            "Simulated   {} per minibatch under this program's own cost model (--model ours plans by it)",
            show_time(plan.period_s),
        );
    }
    if let Some(other) = &plan.passed_over {
        let _ = writeln!(
            text,
            "Instead of  {}, whose bottleneck of {} is {} but which simulates {:.1} % slower ({})",
            other.configuration,
            show_time(other.bottleneck_s),
            if other.bottleneck_s < plan.bottleneck_s {
                "smaller"
            } else {
                "no larger"
            },
            100.0 * (other.period_s / plan.period_s.max(f64::MIN_POSITIVE) - 1.0),
            show_time(other.period_s),
        );
    }
    if let Some(stall) = &plan.stall {
        let _ = writeln!(text, "Period      {stall}");
    }
    let unused = plan.cluster.devices - plan.workers.min(plan.cluster.devices);
    if unused > 0 {
        let why = if plan.optimal {
            ": more workers would not lower the bottleneck"
        } else {
            ""
        };
        let _ = writeln!(text, "Idle        {}{why}", count(unused, "device"));
    }
    text
}

/// What the kinds of schedules give, ending in a newline.
#[must_use]
pub fn schedules(plan: &Plan, compared: &[Compared]) -> String {
    let header = [
        "schedule",
        "replicas",
        "samples/s",
        "period",
        "bubbles",
        "memory",
        "staleness",
        "per step",
        "",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for other in compared {
        let or_not = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let note = match &other.infeasible {
            None if other.schedule == plan.schedule => "  taken",
            None => "",
            Some(_) => "  does not fit",
        };
        rows.push(vec![
            other.schedule.to_string(),
            or_not(other.configuration.clone()),
            or_not(other.throughput_samples_per_s.map(number)),
            or_not(other.period_s.map(show_time)),
            or_not(other.bubble_share.map(|b| format!("{:.0} %", 100.0 * b))),
            or_not(other.memory_bytes.map(|bytes| show_bytes(bytes as f64))),
            or_not(other.staleness.map(|steps| steps.to_string())),
            or_not(other.microbatches.map(|count| count.to_string())),
            note.to_owned(),
        ]);
    }
    let mut text = align(&rows, 1);
    text.push_str(
        "Staleness: steps by which a gradient's weights may be older than those it is applied to; none without it.\n\
         Per step: minibatches between two steps, where all stages step together.\n",
    );
    text
}

/// What surrounds the plan, ending in a newline.
#[must_use]
pub fn explanation(plan: &Plan, explanation: &Explanation) -> String {
    let percent = |ratio: f64| format!("{:+.1} %", 100.0 * (ratio - 1.0));
    let header = |cells: [&str; 4]| cells.map(str::to_owned).to_vec();
    let mut text = String::from("Fullest resources, seconds per minibatch\n");
    for resource in &explanation.resources {
        let _ = writeln!(
            text,
            "  {:>8}  {}",
            show_time(resource.seconds),
            resource.name
        );
    }
    if !explanation.runner_ups.is_empty() {
        text.push_str(
            "\nThe best plans one step away: a boundary, a replica, a pair of stages merged or a stage cut in two\n",
        );
        let mut rows = vec![header([
            "replicas",
            "bottleneck",
            "simulated",
            "  stages begin at",
        ])];
        rows.extend(explanation.runner_ups.iter().map(|other| {
            let cuts: Vec<String> = other.cuts.iter().map(|cut| shorten(cut)).collect();
            let cuts = if cuts.len() > 4 {
                format!("{} and {} more", cuts[..4].join(", "), cuts.len() - 4)
            } else {
                cuts.join(", ")
            };
            vec![
                other.configuration.clone(),
                show_time(other.bottleneck_s),
                percent(other.period_s / plan.period_s.max(f64::MIN_POSITIVE)),
                format!("  {cuts}"),
            ]
        }));
        text.push_str(&align(&rows, 1));
        text.push_str("Simulated: seconds per minibatch against this plan's.\n");
    }
    text.push_str("\nMemory of a worker of each stage\n");
    text.push_str(&memory_table(plan));
    text.push_str("\nWith other hardware\n");
    let mut rows = vec![header(["", "samples/s", "gain", "  replicas"])];
    rows.extend(explanation.what_if.iter().map(|other| {
        vec![
            other.change.to_owned(),
            number(other.throughput_samples_per_s),
            percent(other.speedup),
            format!("  {}", other.configuration),
        ]
    }));
    text.push_str(&align(&rows, 1));
    text
}

fn memory_table(plan: &Plan) -> String {
    let header = [
        "stage",
        "weights",
        "gradients",
        "optimizer",
        "stashes",
        "messages",
        "workspace",
        "all",
    ];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    rows.extend(plan.stages.iter().enumerate().map(|(i, stage)| {
        let m = stage.memory;
        let shares = [
            m.weights,
            m.gradients,
            m.optimizer,
            m.stashes,
            m.messages,
            m.workspace,
            stage.memory_bytes as f64,
        ];
        std::iter::once(i.to_string())
            .chain(shares.map(show_bytes))
            .collect()
    }));
    let mut text = align(&rows, 1);
    text.push_str("Weights: all versions held. Stashes: what the minibatches in flight keep for their backward.\n");
    text
}

fn baseline_table(plan: &Plan) -> String {
    let mut rows = vec![
        [
            "against",
            "samples/s",
            "plan gains",
            "traffic/minibatch",
            "memory",
            "",
        ]
        .map(str::to_owned)
        .to_vec(),
        vec![
            "this plan".to_owned(),
            number(plan.throughput_samples_per_s),
            String::new(),
            show_bytes(plan.bytes_per_minibatch),
            show_bytes(
                plan.stages
                    .iter()
                    .map(|s| s.memory_bytes)
                    .max()
                    .unwrap_or(0) as f64,
            ),
            String::new(),
        ],
    ];
    let baselines = &plan.baselines;
    for (name, baseline) in [
        ("data parallel", &baselines.data_parallel),
        ("model parallel", &baselines.model_parallel),
        ("straight pipeline", &baselines.straight),
    ] {
        rows.push(baseline_row(name, baseline, plan));
    }
    align(&rows, 1)
}

fn baseline_row(name: &str, baseline: &Baseline, plan: &Plan) -> Vec<String> {
    let note = if baseline.infeasible.is_some() {
        "does not fit the memory"
    } else {
        ""
    };
    vec![
        name.to_owned(),
        number(baseline.throughput_samples_per_s),
        format!(
            "{:.2}x",
            plan.throughput_samples_per_s / baseline.throughput_samples_per_s
        ),
        show_bytes(baseline.bytes_per_minibatch),
        show_bytes(baseline.memory_bytes as f64),
        note.to_owned(),
    ]
}

/// Columns two spaces apart: the first `left` of them flush left, the others flush right.
fn align(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|c| {
            rows.iter()
                .map(|row| row[c].chars().count())
                .max()
                .unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (c, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let padding = " ".repeat(width - cell.chars().count());
            // A note in the last column needs no alignment.
            let words = cell.starts_with("  ") || cell.contains(' ') && left == 1;
            let (before, after) = if c < left || words && c + 1 == columns {
                (cell, &padding)
            } else {
                (&padding, cell)
            };
            let _ = write!(line, "{before}{after}  ");
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn count(n: usize, what: &str) -> String {
    if n == 1 {
        format!("1 {what}")
    } else {
        format!("{n} {what}s")
    }
}

fn number(value: f64) -> String {
    let decimals = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    format!("{value:.decimals$}")
}
