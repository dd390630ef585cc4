//! The learning rate over a run.

use std::f32::consts::PI;

/// How the rate changes behind the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// It stays.
    None,
    /// Half a cosine wave, from the full rate to the least one (Loshchilov and Hutter, arXiv 1608.03983, without
    /// restarts).
    Cosine,
    /// In a straight line from the full rate to the least one.
    Linear,
    /// It is multiplied by the factor every so many minibatches.
    Step {
        /// Minibatches between two changes.
        every: usize,
        /// The factor.
        factor: f32,
    },
}

/// The shape of the rate over a run, the same for every stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Course {
    /// Minibatches over which the rate rises in a straight line to its full value.
    pub warm_up: usize,
    /// What it does from there on.
    pub decay: Decay,
    /// What cosine and linear decay end at, as a share of the full rate.
    pub least: f32,
}

/// Learning rate of one stage, by minibatch. Minibatches are numbered through the run, so all stages and
/// all ways to cut a model agree on the rate of a minibatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// The full rate.
    pub base: f32,
    /// How it changes.
    pub course: Course,
    /// Minibatches of the whole run.
    pub minibatches: usize,
}

impl LearningRate {
    /// Rate of the round that begins with this minibatch of the run.
    pub fn at(&self, minibatch: usize) -> f32 {
        let Course {
            warm_up,
            decay,
            least,
        } = self.course;
        if minibatch < warm_up {
            return self.base * (minibatch + 1) as f32 / warm_up as f32;
        }
        let behind = minibatch - warm_up;
        let left = self.minibatches.saturating_sub(warm_up).max(1);
        let share = (behind as f32 / left as f32).min(1.0);
        self.base
            * match decay {
                Decay::None => 1.0,
                Decay::Cosine => least + (1.0 - least) * 0.5 * (1.0 + (PI * share).cos()),
                Decay::Linear => least + (1.0 - least) * (1.0 - share),
                Decay::Step { every, factor } => {
                    factor.powi(i32::try_from(behind / every.max(1)).unwrap_or(i32::MAX))
                }
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

    fn rate(warm_up: usize, decay: Decay, least: f32) -> LearningRate {
        LearningRate {
            base: 0.2,
            course: Course {
                warm_up,
                decay,
                least,
            },
            minibatches: 100,
        }
    }

    #[test]
    fn cosine_goes_from_the_full_rate_over_half_to_nothing() {
        let rate = rate(0, Decay::Cosine, 0.0);
        assert_eq!(rate.at(0), 0.2);
        assert!((rate.at(50) - 0.1).abs() < 1e-6);
        assert!(rate.at(99) < 1e-3 && rate.at(99) > 0.0);
        assert!((0..99).all(|m| rate.at(m + 1) < rate.at(m)));
    }

    #[test]
    fn without_decay_the_rate_stays() {
        let rate = rate(0, Decay::None, 0.0);
        assert_eq!(rate.at(2), 0.2);
        assert_eq!(rate.scaled(0.5).at(7), 0.1);
    }

    #[test]
    fn a_warm_up_rises_to_the_full_rate_and_decay_begins_behind_it() {
        let rate = rate(10, Decay::Linear, 0.1);
        assert!((rate.at(0) - 0.02).abs() < 1e-7);
        assert!((rate.at(9) - 0.2).abs() < 1e-7);
        assert_eq!(rate.at(10), 0.2);
        assert!((rate.at(55) - 0.11).abs() < 1e-6);
        assert!((rate.at(100) - 0.02).abs() < 1e-6);
        assert_eq!(rate.at(1000), rate.at(100));
    }

    #[test]
    fn steps_multiply() {
        let rate = rate(
            0,
            Decay::Step {
                every: 30,
                factor: 0.1,
            },
            0.0,
        );
        assert_eq!(rate.at(29), 0.2);
        assert!((rate.at(30) - 0.02).abs() < 1e-7);
        assert!((rate.at(99) - 0.0002).abs() < 1e-8);
    }
}
