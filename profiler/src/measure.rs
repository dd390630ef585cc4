//! Rounds of training steps, timed until the numbers are steady or the budget is spent.
//!
//! A round trains one minibatch layer by layer and one in a single piece. So every layer meets its inputs
//! in the state that training leaves them in, drift of the machine's speed hits all layers alike, and the
//! sum of the layers can be held against the whole.

use std::time::{Duration, Instant};

use crate::rig::{PartTime, Rig};
use crate::statistics::Summary;

/// Rounds that are worth a median.
const LEAST_ROUNDS: usize = 5;
/// More rounds do not tell more.
const MOST_ROUNDS: usize = 200;
/// The whole step's standard error at which measuring may end.
const STEADY: f64 = 0.005;
/// Warm-up ends when three rounds are within this of the three before.
const WARM: f64 = 0.05;
/// Share of the budget that warm-up may take.
const WARM_UP_SHARE: f64 = 0.25;

/// Samples of one layer, milliseconds.
#[derive(Clone, Debug, Default)]
pub struct LayerSamples {
    /// Forward.
    pub forward: Vec<f64>,
    /// Backward; for the last layer the loss too.
    pub backward: Vec<f64>,
    /// Optimizer step.
    pub step: Vec<f64>,
}

impl LayerSamples {
    fn push(&mut self, time: &PartTime) {
        self.forward.push(milliseconds(time.forward));
        self.backward.push(milliseconds(time.backward));
        self.step.push(milliseconds(time.step));
    }
}

/// All samples of a measurement.
#[derive(Clone, Debug)]
pub struct Samples {
    /// One per layer.
    pub layers: Vec<LayerSamples>,
    /// The whole model's step in one piece, milliseconds.
    pub whole: Vec<f64>,
    /// Whether warm-up ended because the times had become steady.
    pub warm: bool,
}

/// Where a measurement stands.
#[derive(Clone, Copy, Debug)]
pub enum Stage {
    /// Rounds that are thrown away.
    WarmUp,
    /// Rounds that count.
    Measure,
}

/// Measures `layers` (one part per layer) and `whole` (one part) in turn.
///
/// `progress` is told the stage, the rounds done in it and the share of the budget spent.
pub fn measure(
    layers: &mut Rig,
    whole: &mut Rig,
    budget: Duration,
    mut progress: impl FnMut(Stage, usize, f64),
) -> Samples {
    let start = Instant::now();
    let spent = || start.elapsed().as_secs_f64() / budget.as_secs_f64();

    let mut warm_up = Vec::new();
    let warm = loop {
        let time = total(&layers.train()) + total(&whole.train());
        warm_up.push(milliseconds(time));
        progress(Stage::WarmUp, warm_up.len(), spent());
        if is_steady(&warm_up) {
            break true;
        }
        if spent() > WARM_UP_SHARE {
            break false;
        }
    };

    let mut samples = Samples {
        layers: Vec::new(),
        whole: Vec::new(),
        warm,
    };
    while samples.whole.len() < MOST_ROUNDS {
        let times = layers.train();
        samples
            .layers
            .resize_with(times.len(), LayerSamples::default);
        for (layer, time) in samples.layers.iter_mut().zip(&times) {
            layer.push(time);
        }
        samples.whole.push(milliseconds(total(&whole.train())));
        let rounds = samples.whole.len();
        progress(Stage::Measure, rounds, spent());
        let steady = Summary::of(&samples.whole).relative_error(rounds) < STEADY;
        if spent() >= 1.0 || (rounds >= 4 * LEAST_ROUNDS && steady) {
            break;
        }
    }
    samples
}

/// Whether a measurement of this many rounds is worth a median.
pub fn enough(rounds: usize) -> bool {
    rounds >= LEAST_ROUNDS
}

fn is_steady(samples: &[f64]) -> bool {
    let Some(recent) = samples.len().checked_sub(6).map(|from| &samples[from..]) else {
        return false;
    };
    let (before, after) = recent.split_at(3);
    let (before, after) = (Summary::of(before).median, Summary::of(after).median);
    (before - after).abs() <= WARM * before.max(after)
}

fn total(times: &[PartTime]) -> Duration {
    times.iter().map(PartTime::total).sum()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_ends_when_three_rounds_repeat_the_three_before() {
        assert!(!is_steady(&[1.0; 5]));
        assert!(is_steady(&[9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]));
        assert!(!is_steady(&[2.0, 2.0, 2.0, 1.0, 1.0, 1.0]));
    }
}
