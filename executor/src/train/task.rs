//! What the coordinator asks of all workers, and what they answer, as letters between processes.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::transport::Letter;
use crate::worker::{Event, Report, WorkerError};

/// What all workers are asked to do together. Whoever has the job knows the rest: samples, schedule, rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Task {
    /// Carry minibatches of an epoch through the pipeline and drain it.
    Train {
        /// From 1.
        epoch: usize,
        /// How many.
        minibatches: usize,
        /// Number in the run of the first one, evaluations counted.
        first_minibatch: u64,
        /// Minibatches that the run trained before.
        steps_before: usize,
    },
    /// Average running statistics over replicas.
    AverageStates,
    /// Run the held-out samples forward.
    Evaluate {
        /// Number in the run of the first minibatch.
        first_minibatch: u64,
        /// Whether the values that the loss reads are wanted, too.
        keep_outputs: bool,
    },
    /// Hand out weights and running statistics: one replica of each stage does.
    Collect,
}

impl Task {
    /// For a worker's process.
    pub fn to_letter(self) -> Letter {
        letter(&self, Vec::new())
    }

    /// Nothing if it is no task.
    pub fn from_letter(letter: &Letter) -> Option<Self> {
        serde_json::from_str(&letter.text).ok()
    }
}

/// An [`Event`] without its tensors. Losses travel as bits: JSON has no infinity.
#[derive(Debug, Serialize, Deserialize)]
enum Note {
    Loss {
        minibatch: usize,
        loss: u32,
        correct: usize,
        targets: usize,
    },
    Output {
        minibatch: usize,
    },
    Done {
        worker: usize,
        report: Report,
    },
    Weights {
        worker: usize,
        /// The first so many tensors are weights, the others running statistics.
        weights: usize,
    },
    Aborted {
        worker: usize,
    },
    Diverged {
        worker: usize,
        minibatch: u64,
        loss: u32,
    },
    Failed {
        worker: usize,
        reason: String,
    },
}

/// For the coordinator's process.
pub fn event_to_letter(event: Event) -> Letter {
    let mut tensors = Vec::new();
    let note = match event {
        Event::Loss {
            minibatch,
            loss,
            correct,
            targets,
            at: _,
        } => Note::Loss {
            minibatch,
            loss: loss.to_bits(),
            correct,
            targets,
        },
        Event::Output { minibatch, output } => {
            tensors.push(output);
            Note::Output { minibatch }
        }
        Event::Done { worker, report } => Note::Done { worker, report },
        Event::Weights {
            worker,
            weights,
            states,
        } => {
            let count = weights.len();
            tensors.extend(weights.into_iter().chain(states));
            Note::Weights {
                worker,
                weights: count,
            }
        }
        Event::Failed { worker, error } => match error {
            None => Note::Aborted { worker },
            Some(WorkerError::Diverged { loss, minibatch }) => Note::Diverged {
                worker,
                minibatch,
                loss: loss.to_bits(),
            },
            Some(error) => Note::Failed {
                worker,
                reason: error.to_string(),
            },
        },
    };
    letter(&note, tensors)
}

/// As the coordinator reads it; nothing if it is no event. A loss counts as known when it arrives.
pub fn event_from_letter(letter: Letter) -> Option<Event> {
    let mut tensors = letter.tensors;
    Some(match serde_json::from_str(&letter.text).ok()? {
        Note::Loss {
            minibatch,
            loss,
            correct,
            targets,
        } => Event::Loss {
            minibatch,
            loss: f32::from_bits(loss),
            correct,
            targets,
            at: Instant::now(),
        },
        Note::Output { minibatch } => Event::Output {
            minibatch,
            output: tensors.pop()?,
        },
        Note::Done { worker, report } => Event::Done { worker, report },
        Note::Weights { worker, weights } => Event::Weights {
            worker,
            states: tensors.split_off(weights.min(tensors.len())),
            weights: tensors,
        },
        Note::Aborted { worker } => Event::Failed {
            worker,
            error: None,
        },
        Note::Diverged {
            worker,
            minibatch,
            loss,
        } => Event::Failed {
            worker,
            error: Some(WorkerError::Diverged {
                loss: f32::from_bits(loss),
                minibatch,
            }),
        },
        Note::Failed { worker, reason } => Event::Failed {
            worker,
            error: Some(WorkerError::Elsewhere(reason)),
        },
    })
}

fn letter(content: &impl Serialize, tensors: Vec<models::tensor::Tensor>) -> Letter {
    Letter {
        text: serde_json::to_string(content).expect("names, numbers and text only"),
        tensors,
    }
}

#[cfg(test)]
mod tests {
    use models::tensor::Tensor;

    use super::*;

    fn through(event: Event) -> Event {
        event_from_letter(event_to_letter(event)).unwrap()
    }

    #[test]
    fn events_arrive_as_they_were() {
        let tensor = |v: f32| Tensor::from_f32(&[1], [v]);
        let loss = f32::from_bits(0x3f80_0001);
        let event = through(Event::Loss {
            minibatch: 3,
            loss,
            correct: 5,
            targets: 6,
            at: Instant::now(),
        });
        assert!(
            matches!(event, Event::Loss { minibatch: 3, loss: l, correct: 5, targets: 6, .. } if l == loss)
        );
        let event = through(Event::Weights {
            worker: 2,
            weights: vec![tensor(1.0), tensor(2.0)],
            states: vec![tensor(3.0)],
        });
        let Event::Weights {
            worker: 2,
            weights,
            states,
        } = event
        else {
            panic!("{event:?}");
        };
        assert_eq!((weights.len(), states[0].f32s()[0]), (2, 3.0));
        let event = through(Event::Failed {
            worker: 1,
            error: Some(WorkerError::Diverged {
                loss: f32::NAN,
                minibatch: 9,
            }),
        });
        let Event::Failed {
            error: Some(error), ..
        } = event
        else {
            panic!("{event:?}");
        };
        assert!(error.to_string().contains("NaN at minibatch 9"), "{error}");
    }

    #[test]
    fn tasks_arrive_as_they_were() {
        let task = Task::Train {
            epoch: 2,
            minibatches: 7,
            first_minibatch: 1 << 40,
            steps_before: 3,
        };
        assert_eq!(Task::from_letter(&task.to_letter()), Some(task));
        assert!(Task::from_letter(&Letter::default()).is_none());
    }
}
