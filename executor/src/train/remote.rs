//! A process with one worker of a run that another process coordinates.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::Job;
use super::squad::Squad;
use super::task::{Task, event_from_letter, event_to_letter};
use crate::affinity::Seat;
use crate::error::RunError;
use crate::transport::{Endpoint, Exchange, Transport};
use crate::worker::{Event, WorkerError};

/// The process whose worker is number 0 coordinates.
const COORDINATOR: usize = 0;

/// The coordinator's way to the workers of other processes.
#[derive(Debug)]
pub struct Link {
    /// To this process's exchange.
    pub end: Endpoint,
    /// What the others' workers report.
    pub events: Receiver<Event>,
    /// For this process's worker to report to.
    pub report: Sender<Event>,
}

/// The coordinator's exchange with `workers - 1` others, and the way to it for [`super::train_over`].
pub fn coordinate(workers: usize) -> (Exchange, Link) {
    let (report, events) = channel();
    let remote = report.clone();
    let (exchange, end) = Exchange::new(COORDINATOR, workers, move |from, letter| {
        let event = letter.map(event_from_letter);
        let event = event.map(|event| {
            event.unwrap_or_else(|| Event::Failed {
                worker: from,
                error: Some(WorkerError::Elsewhere("it sent what is no event".into())),
            })
        });
        if let Some(event) = event {
            // Nobody listens any more when the run has failed.
            let _ = remote.send(event);
        }
    });
    let link = Link {
        end,
        events,
        report,
    };
    (exchange, link)
}

/// The exchange of another worker's process, and what [`serve`] needs.
pub fn follow(worker: usize, workers: usize) -> (Exchange, Endpoint, Receiver<Task>) {
    let (sender, tasks) = channel();
    let mut sender = Some(sender);
    let (exchange, end) = Exchange::new(worker, workers, move |_, letter| {
        match letter.as_ref().and_then(Task::from_letter) {
            Some(task) => {
                if let Some(sender) = &sender {
                    // A worker that has failed has said so.
                    let _ = sender.send(task);
                }
            }
            None => sender = None,
        }
    });
    (exchange, end, tasks)
}

/// Carries out the coordinator's tasks until there are no more.
///
/// Failures go to the coordinator, which ends the run; `host` is where this process says that it runs.
pub fn serve(job: &Job, end: &Endpoint, tasks: &Receiver<Task>, host: &str, seat: Seat) {
    if let Err(error) = attend(job, end, tasks, host, seat) {
        report_failure(end, &error, host);
    }
    end.close();
}

fn attend(
    job: &Job,
    end: &Endpoint,
    tasks: &Receiver<Task>,
    host: &str,
    seat: Seat,
) -> Result<(), RunError> {
    let (report, events) = channel();
    let transport = Box::new(end.transport());
    let member: (usize, Seat, Box<dyn Transport>) = (end.worker, seat, transport);
    let mut squad = Squad::start(job, [member], &end.gauges, &report)?;
    for task in tasks {
        let mut answers = squad.begin(job, task)?;
        while answers > 0 {
            // The worker lives as long as the squad.
            let Ok(event) = events.recv() else {
                break;
            };
            let is_last = matches!(
                event,
                Event::Done { .. } | Event::Weights { .. } | Event::Failed { .. }
            );
            answers -= usize::from(is_last);
            match event {
                Event::Failed {
                    error: Some(error), ..
                } if !matches!(error, WorkerError::Diverged { .. }) => {
                    report_failure(end, &error, host);
                }
                event => end.post(COORDINATOR, event_to_letter(event)),
            }
        }
        squad.end()?;
    }
    squad.dismiss();
    Ok(())
}

fn report_failure(end: &Endpoint, error: &dyn std::fmt::Display, host: &str) {
    let failed = Event::Failed {
        worker: end.worker,
        error: Some(WorkerError::Elsewhere(format!("on {host}: {error}"))),
    };
    end.post(COORDINATOR, event_to_letter(failed));
}
