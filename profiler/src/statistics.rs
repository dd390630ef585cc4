//! Robust statistics of timing samples.

/// Median and spread of one series of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Summary {
    /// Middle sample; the mean of the two middle ones for an even count.
    pub median: f64,
    /// Median absolute deviation from the median.
    pub mad: f64,
}

impl Summary {
    /// Summary of `samples`; zeros for none.
    pub fn of(samples: &[f64]) -> Summary {
        let median = median(samples);
        let deviations: Vec<f64> = samples.iter().map(|s| (s - median).abs()).collect();
        Summary {
            median,
            mad: self::median(&deviations),
        }
    }

    /// Relative standard error of the median of `count` samples, taking the MAD as the measure of spread.
    ///
    /// For normal noise the standard deviation is 1.4826 MAD and the median's standard error 1.2533 of it
    /// over the root of the count.
    pub fn relative_error(&self, count: usize) -> f64 {
        if self.median <= 0.0 || count == 0 {
            return 0.0;
        }
        1.2533 * 1.4826 * self.mad / (count as f64).sqrt() / self.median
    }
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_mad_ignore_one_outlier() {
        let summary = Summary::of(&[1.0, 2.0, 3.0, 4.0, 1000.0]);
        assert_eq!(summary.median, 3.0);
        assert_eq!(summary.mad, 1.0);
    }

    #[test]
    fn even_counts_take_the_middle_pair() {
        assert_eq!(Summary::of(&[4.0, 1.0, 3.0, 2.0]).median, 2.5);
        assert_eq!(Summary::of(&[]).median, 0.0);
    }

    #[test]
    fn error_shrinks_with_the_root_of_the_count() {
        let summary = Summary {
            median: 10.0,
            mad: 1.0,
        };
        let ratio = summary.relative_error(25) / summary.relative_error(100);
        assert!((ratio - 2.0).abs() < 1e-12);
    }
}
