//! A simulated run for people: as text, and as a trace for a browser.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::planning::Timeline;
use crate::schedule::Op;
use crate::simulate::Activity;
use crate::units::show_time;

/// Characters that a row of the text has for time.
const WIDTH: usize = 96;
/// Larger pipelines show their first workers only.
const MOST_WORKERS: usize = 32;

/// One row for each worker from `start` to `end` (seconds), ending in a newline.
///
/// Forwards are `F` and backwards `B` with the number of their minibatch, drawn out by `-` and `=`; steps are `S`, and
/// `.` is waiting.
#[must_use]
pub fn gantt(timeline: &Timeline, (start, end): (f64, f64)) -> String {
    let mut text = String::new();
    let column = (end - start) / WIDTH as f64;
    let _ = writeln!(
        text,
        "{} to {}, {} per character",
        show_time(start),
        show_time(end),
        show_time(column)
    );
    let shown = timeline.roles.len().min(MOST_WORKERS);
    for (worker, role) in timeline.roles.iter().enumerate().take(shown) {
        let mut row = vec![b'.'; WIDTH];
        for span in timeline.spans.iter().filter(|s| s.worker == worker) {
            let Activity::Compute(op) = span.activity else {
                continue;
            };
            if span.end <= start || span.start >= end {
                continue;
            }
            let place = |time: f64| {
                let columns = ((time - start) / column.max(f64::MIN_POSITIVE)).round();
                columns.clamp(0.0, WIDTH as f64) as usize
            };
            let (label, fill) = match op {
                Op::Forward { minibatch, .. } => (format!("F{minibatch}"), b'-'),
                Op::Backward { minibatch, .. } => (format!("B{minibatch}"), b'='),
                _ => ("S".to_owned(), b'S'),
            };
            let cells = &mut row[place(span.start)..place(span.end)];
            cells.fill(fill);
            // A number that is cut off would be another one; without room there is only the letter.
            let label = if label.len() <= cells.len() {
                label.as_str()
            } else {
                &label[..1]
            };
            let length = label.len().min(cells.len());
            cells[..length].copy_from_slice(&label.as_bytes()[..length]);
        }
        let row = String::from_utf8_lossy(&row);
        let _ = writeln!(text, "stage {:>2}.{:<2} |{row}|", role.stage, role.replica);
    }
    if shown < timeline.roles.len() {
        let _ = writeln!(text, "and {} more workers", timeline.roles.len() - shown);
    }
    text
}

/// The run's beginning and a piece of its steady state of the same length, with a line that explains them.
#[must_use]
pub fn first_rounds_and_steady_state(timeline: &Timeline, fill_s: f64, period_s: f64) -> String {
    let length = (1.25 * fill_s).max(4.0 * period_s).min(timeline.end);
    let middle = (timeline.end / 2.0 - length / 2.0).max(0.0);
    format!(
        "First rounds: stage.replica over time; F forward, B backward with the minibatch, S step, . waiting\n{}\n\
         Steady state\n{}",
        gantt(timeline, (0.0, length)),
        gantt(timeline, (middle, middle + length))
    )
}

/// The run in the Trace Event Format that Perfetto and chrome://tracing open: one process for each stage, and for each
/// of its replicas a row of the device and one of the link out of it.
#[must_use]
pub fn trace(timeline: &Timeline) -> String {
    let mut events: Vec<Value> = Vec::new();
    for (worker, role) in timeline.roles.iter().enumerate() {
        if role.replica == 0 {
            events.push(json!({
                "name": "process_name", "ph": "M", "pid": role.stage,
                "args": {"name": format!("stage {}", role.stage)},
            }));
        }
        for (row, what) in ["device", "link"].iter().enumerate() {
            events.push(json!({
                "name": "thread_name", "ph": "M", "pid": role.stage, "tid": 2 * worker + row,
                "args": {"name": format!("replica {} {what}", role.replica)},
            }));
        }
    }
    events.extend(timeline.spans.iter().map(|span| {
        let (name, category, row, arguments) = describe(span.activity);
        json!({
            "name": name, "cat": category, "ph": "X",
            "pid": timeline.roles[span.worker].stage, "tid": 2 * span.worker + row,
            // Microseconds, as the format asks for.
            "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
            "args": arguments,
        })
    }));
    let mut text = json!({"displayTimeUnit": "ms", "traceEvents": events}).to_string();
    text.push('\n');
    text
}

/// Name, category, row (0 device, 1 link) and arguments of an event.
fn describe(activity: Activity) -> (String, &'static str, usize, Value) {
    match activity {
        Activity::Compute(Op::Forward { minibatch, version }) => (
            format!("F{minibatch}"),
            "forward",
            0,
            json!({"minibatch": minibatch, "version": version}),
        ),
        Activity::Compute(Op::Backward { minibatch, version }) => (
            format!("B{minibatch}"),
            "backward",
            0,
            json!({"minibatch": minibatch, "version": version}),
        ),
        Activity::Compute(Op::Step { round, minibatches }) => (
            format!("step {round}"),
            "step",
            0,
            json!({"round": round, "minibatches": minibatches, "version": round + 1}),
        ),
        // No other operation takes time on the device.
        Activity::Compute(_) => ("communication".to_owned(), "communication", 0, json!({})),
        Activity::Activations { minibatch, to } => (
            format!("activations {minibatch}"),
            "activations",
            1,
            json!({"minibatch": minibatch, "to_worker": to}),
        ),
        Activity::Gradients { minibatch, to } => (
            format!("gradients {minibatch}"),
            "gradients",
            1,
            json!({"minibatch": minibatch, "to_worker": to}),
        ),
        Activity::AllReduce { round, to } => (
            format!("all-reduce {round}"),
            "all-reduce",
            1,
            json!({"round": round, "to_worker": to}),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::WorkerRole;
    use crate::simulate::Span;

    fn timeline() -> Timeline {
        let compute = |worker, start: f64, end: f64, op| Span {
            worker,
            start,
            end,
            activity: Activity::Compute(op),
        };
        let (minibatch, version) = (7, 3);
        Timeline {
            roles: (0..2)
                .map(|stage| WorkerRole { stage, replica: 0 })
                .collect(),
            spans: vec![
                compute(0, 0.0, 24.0, Op::Forward { minibatch, version }),
                compute(1, 24.0, 72.0, Op::Backward { minibatch, version }),
                compute(
                    1,
                    72.0,
                    73.0,
                    Op::Step {
                        round: 3,
                        minibatches: 1,
                    },
                ),
                Span {
                    worker: 0,
                    start: 24.0,
                    end: 25.0,
                    activity: Activity::Activations { minibatch, to: 1 },
                },
            ],
            end: 96.0,
            minibatches: 8,
        }
    }

    #[test]
    fn a_row_for_each_worker() {
        let text = gantt(&timeline(), (0.0, 96.0));
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[0], "0 to 96.0 s, 1.00 s per character");
        assert_eq!(
            rows[1],
            format!("stage  0.0  |F7{}{}|", "-".repeat(22), ".".repeat(72))
        );
        let waits = ".".repeat(24);
        assert_eq!(
            rows[2],
            format!(
                "stage  1.0  |{waits}B7{}S{}|",
                "=".repeat(46),
                ".".repeat(23)
            )
        );
        // Cut where the window ends.
        assert!(gantt(&timeline(), (12.0, 18.0)).contains(&format!("F7{}|", "-".repeat(94))));
    }

    #[test]
    fn the_trace_names_minibatches_and_versions() {
        let value: Value = serde_json::from_str(&trace(&timeline())).unwrap();
        let events = value["traceEvents"].as_array().unwrap();
        let named = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
        let backward = named("B7");
        assert_eq!(backward["args"]["version"], 3);
        assert_eq!(
            (&backward["ts"], &backward["dur"]),
            (&json!(24e6), &json!(48e6))
        );
        assert_eq!(named("activations 7")["tid"], 1);
        assert_eq!(named("step 3")["args"]["version"], 4);
    }
}
