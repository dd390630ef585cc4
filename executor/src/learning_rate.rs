//! The learning rate over a run.

use std::f32::consts::PI;

/// How the rate changes with the share of the run that is behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// It stays.
    None,
    /// Half a cosine wave, from the full rate to 0 (Loshchilov and Hutter, arXiv 1608.03983, without restarts).
    Cosine,
}

/// Learning rate of one stage, by minibatch. Minibatches are numbered through the run, so all stages and
/// all ways to cut a model agree on the rate of a minibatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// At the first minibatch.
    pub base: f32,
    /// How it changes.
    pub decay: Decay,
    /// Minibatches of the whole run.
    pub minibatches: usize,
}

impl LearningRate {
    /// Rate of the round that begins with this minibatch of the run.
    pub fn at(&self, minibatch: usize) -> f32 {
        let share = minibatch as f32 / self.minibatches.max(1) as f32;
        match self.decay {
            Decay::None => self.base,
            Decay::Cosine => self.base * 0.5 * (1.0 + (PI * share.min(1.0)).cos()),
        }
    }

    /// The same for a stage whose rate is `factor` of this one.
    pub fn scaled(self, factor: f32) -> Self {
        Self {
            base: self.base * factor,
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cosine_goes_from_the_full_rate_over_half_to_nothing() {
        let rate = LearningRate {
            base: 0.2,
            decay: Decay::Cosine,
            minibatches: 100,
        };
        assert_eq!(rate.at(0), 0.2);
        assert!((rate.at(50) - 0.1).abs() < 1e-6);
        assert!(rate.at(99) < 1e-3 && rate.at(99) > 0.0);
        assert!((0..99).all(|m| rate.at(m + 1) < rate.at(m)));
    }

    #[test]
    fn without_decay_the_rate_stays() {
        let rate = LearningRate {
            base: 0.2,
            decay: Decay::None,
            minibatches: 3,
        };
        assert_eq!(rate.at(2), 0.2);
        assert_eq!(rate.scaled(0.5).at(7), 0.1);
    }
}
