//! How fast a run was: while the pipeline was full, and over all.

use std::time::{Duration, Instant};

/// Sums over all epochs.
#[derive(Debug, Default)]
pub struct Clock {
    training: Duration,
    busy: Duration,
    minibatches: usize,
    steady: Duration,
    steady_minibatches: usize,
}

impl Clock {
    /// Adds an epoch: when each loss was known, how long it took, and the workers' time at work.
    ///
    /// `in_flight` minibatches fill the pipeline; that many at the beginning and at the end do not
    /// count as steady, nor what is over whole multiples of `cycle`: replicas are through with theirs at about the same
    /// time, and a part of a round would be too fast. An epoch too short for that has no steady part.
    pub fn add(
        &mut self,
        mut losses: Vec<Instant>,
        wall: Duration,
        busy: Duration,
        in_flight: usize,
        cycle: usize,
    ) {
        self.training += wall;
        self.busy += busy;
        self.minibatches += losses.len();
        losses.sort_unstable();
        let steady = losses.len().saturating_sub(2 * in_flight + 1);
        // Many replicas in few minibatches: the error of a partial cycle is the smaller evil.
        let whole = match steady / cycle {
            0 => steady,
            cycles => cycles * cycle,
        };
        if whole > 0 {
            self.steady += losses[in_flight + whole] - losses[in_flight];
            self.steady_minibatches += whole;
        }
    }

    /// Minibatches per second with a full pipeline; over all where no epoch was long enough.
    pub fn steady_rate(&self) -> f64 {
        if self.steady_minibatches == 0 {
            return self.overall_rate();
        }
        rate(self.steady_minibatches, self.steady)
    }

    /// Minibatches per second of training.
    pub fn overall_rate(&self) -> f64 {
        rate(self.minibatches, self.training)
    }

    /// Share of the workers' training time that was not work.
    pub fn bubble_share(&self, workers: usize) -> f64 {
        let available = self.training.as_secs_f64() * workers as f64;
        if available == 0.0 {
            return 0.0;
        }
        (1.0 - self.busy.as_secs_f64() / available).max(0.0)
    }

    /// Seconds of training.
    pub fn training_s(&self) -> f64 {
        self.training.as_secs_f64()
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        return 0.0;
    }
    count as f64 / time.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filling_and_draining_do_not_count_as_steady() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut clock = Clock::default();
        // The first loss comes late, the last ones quickly.
        let losses = vec![at(500), at(600), at(700), at(800), at(900), at(910)];
        clock.add(
            losses,
            Duration::from_millis(1000),
            Duration::from_millis(1500),
            1,
            1,
        );
        assert!((clock.steady_rate() - 10.0).abs() < 1e-9);
        assert!((clock.overall_rate() - 6.0).abs() < 1e-9);
        assert!((clock.bubble_share(2) - 0.25).abs() < 1e-9);
    }

    #[test]
    fn replicas_that_are_through_together_count_in_whole_rounds() {
        let start = Instant::now();
        let mut clock = Clock::default();
        // Two replicas, a round every 100 ms.
        let losses = (0..11).map(|m| start + Duration::from_millis(m / 2 * 100));
        let wall = Duration::from_millis(600);
        clock.add(losses.collect(), wall, wall, 1, 2);
        assert!((clock.steady_rate() - 20.0).abs() < 1e-9);
    }

    #[test]
    fn a_short_run_falls_back_to_all_of_it() {
        let mut clock = Clock::default();
        assert_eq!(clock.steady_rate(), 0.0);
        clock.add(
            vec![Instant::now()],
            Duration::from_secs(2),
            Duration::from_secs(1),
            3,
            1,
        );
        assert_eq!(clock.steady_rate(), 0.5);
    }
}
