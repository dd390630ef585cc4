//! Random numbers by counter: the n-th number of a stream is a function of its key and n.
//!
//! Nothing is drawn in sequence, so a mask or an initialisation comes out the same however the work is
//! split over workers and in whatever order it is done. The mixing function is the finaliser of
//! SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A stream of random numbers, addressed by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream that belongs to a seed.
    pub fn new(seed: u64) -> Self {
        Stream {
            key: mix(seed.wrapping_add(GOLDEN)),
        }
    }

    /// A stream of its own for a part of what this one is for.
    pub fn child(self, number: u64) -> Self {
        Stream {
            key: mix(self.key ^ mix(number.wrapping_add(GOLDEN))),
        }
    }

    /// A stream of its own for something that has a name.
    pub fn named(self, name: &str) -> Self {
        self.child(hash(name))
    }

    /// The number at `index`, all 64 bits random.
    pub fn bits(self, index: u64) -> u64 {
        mix(self.key.wrapping_add(index.wrapping_mul(GOLDEN)))
    }

    /// Uniform in [0, 1).
    pub fn uniform(self, index: u64) -> f32 {
        (self.bits(index) >> 40) as f32 / (1u64 << 24) as f32
    }

    /// Standard normal (Box-Muller).
    pub fn normal(self, index: u64) -> f32 {
        let bits = self.bits(index);
        // In (0, 1], so that the logarithm is finite.
        let radius = ((bits >> 32) + 1) as f64 / (1u64 << 32) as f64;
        let angle = (bits & 0xffff_ffff) as f64 / (1u64 << 32) as f64;
        ((-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()) as f32
    }
}

/// A number for a name that stays the same between runs and builds (FNV-1a).
pub fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moments(values: impl Iterator<Item = f32>) -> (f64, f64) {
        let values: Vec<f64> = values.map(f64::from).collect();
        let mean = values.iter().sum::<f64>() / values.len() as f64;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64;
        (mean, variance)
    }

    #[test]
    fn uniform_and_normal_have_their_moments() {
        let stream = Stream::new(7).named("conv1.weight");
        let (mean, variance) = moments((0..100_000).map(|i| stream.uniform(i)));
        assert!((mean - 0.5).abs() < 0.005 && (variance - 1.0 / 12.0).abs() < 0.002);
        let (mean, variance) = moments((0..100_000).map(|i| stream.normal(i)));
        assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02);
    }

    #[test]
    fn streams_differ_by_seed_and_name() {
        let root = Stream::new(1);
        assert_ne!(root.named("a").bits(0), root.named("b").bits(0));
        assert_ne!(root.bits(0), Stream::new(2).bits(0));
        assert_eq!(root.named("a"), Stream::new(1).named("a"));
    }
}
