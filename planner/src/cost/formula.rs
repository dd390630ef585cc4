//! What a plan is judged by: our cost model, or the formulas of published planners for comparison.

use super::release::LevelLinks;
use super::stage::{Machine, StageSums};

/// An objective: the largest load of a plan's resources, seconds per minibatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Formula {
    /// This crate's cost model ([`StageSums::loads`]).
    Ours,
    /// arXiv 1806.03377: a stage takes 1/m max(compute, 4(m-1)W / (m B)), a cut 2a / B.
    Paper,
    /// SOSP 2019: a stage takes 1/m max(compute, 2(m-1)W / B), a cut 2a / B.
    Sosp19,
    /// The released optimizer on a flat cluster: a stage takes 1/m (compute + 4(m-1)W / (m B)), cuts are free.
    Release,
    /// The same with `--activation_compression_ratio 1`: each stage but the first also takes 2a / (m B) for what
    /// crosses the cuts before and behind it. Exact only in [`super::release`], which knows what merely passes a stage.
    ReleaseActivations,
}

impl Formula {
    /// The largest load that the stage brings: its own, and that of the cut before it.
    #[must_use]
    pub fn load(self, sums: &StageSums, replicas: usize, machine: &Machine) -> f64 {
        let m = replicas as f64;
        let released = LevelLinks {
            bandwidth: machine.bandwidth,
            below: 1.0,
        };
        let compute = sums.forward + sums.backward;
        let cut = 2.0 * sums.traffic.input / machine.bandwidth;
        let weights = sums.parameters / machine.bandwidth;
        match self {
            Self::Ours => sums.loads(replicas, machine).largest(),
            Self::Paper => (compute.max(4.0 * (m - 1.0) / m * weights) / m).max(cut),
            Self::Sosp19 => (compute.max(2.0 * (m - 1.0) * weights) / m).max(cut),
            Self::Release => released.first(compute, sums.parameters, replicas),
            Self::ReleaseActivations => {
                let cuts = [sums.traffic.input, sums.traffic.output];
                released.later(compute, sums.parameters, cuts, replicas)
            }
        }
    }

    /// Device seconds of the stage that no number of replicas takes away: its load is at least this over r.
    #[must_use]
    pub fn work(self, sums: &StageSums, machine: &Machine) -> f64 {
        // Where all stages step together that does not become less with the replicas.
        let own_rounds = self == Self::Ours && machine.round.is_none();
        let step = if own_rounds { sums.step } else { 0.0 };
        sums.forward + sums.backward + step
    }

    /// Whether what grows with the replicas lets this many stay within the threshold: no more do if these do not.
    ///
    /// That is SOSP 2019's all-reduce, and ours where all stages step together: each load is then a/r + b, and grows if a
    /// is negative. Every other load falls from two replicas on.
    #[must_use]
    pub fn admits(
        self,
        sums: &StageSums,
        replicas: usize,
        threshold: f64,
        machine: &Machine,
    ) -> bool {
        match self {
            Self::Sosp19 => {
                let only_weights = StageSums {
                    parameters: sums.parameters,
                    ..StageSums::default()
                };
                self.load(&only_weights, replicas, machine) <= threshold
            }
            Self::Ours if machine.round.is_some() => {
                let [one, two] = [1, 2].map(|replicas| sums.loads(replicas, machine));
                let these = sums.loads(replicas, machine);
                let device = two.device() <= one.device() || these.device() <= threshold;
                let network = two.network() <= one.network() || these.network() <= threshold;
                device && network
            }
            _ => true,
        }
    }

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::Paper => "paper",
            Self::Sosp19 => "sosp19",
            Self::Release => "release",
            Self::ReleaseActivations => "release-activations",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::stage::Traffic;

    #[test]
    fn the_formulas_by_hand() {
        let sums = StageSums {
            forward: 1.0,
            backward: 2.0,
            step: 100.0,
            parameters: 600.0,
            traffic: Traffic {
                input: 10.0,
                ..Traffic::default()
            },
            ..StageSums::default()
        };
        let machine = Machine {
            bandwidth: 100.0,
            latency: 0.0,
            message_s_per_byte: 0.0,
            reduce_s_per_byte: 0.0,
            round: None,
        };
        // 4 (m-1) / m * 6 = 16 at m = 3; 2 (m-1) * 6 = 24.
        assert_eq!(Formula::Paper.load(&sums, 3, &machine), 16.0 / 3.0);
        assert_eq!(Formula::Sosp19.load(&sums, 3, &machine), 8.0);
        assert_eq!(Formula::Release.load(&sums, 3, &machine), 19.0 / 3.0);
        assert_eq!(Formula::Paper.load(&sums, 1, &machine), 3.0);
        assert!((Formula::Ours.load(&sums, 1, &machine) - 103.0).abs() < 1e-12);
    }
}
