//! Seeded orders of samples, the same on every machine.

use models::random::Stream;

/// Uniform in `0..bound` for a `bound` of at least 1, from 64 random bits.
pub fn below(bound: usize, bits: u64) -> usize {
    // The high half of a 64 by 64 bit product: a bias below bound / 2^64.
    ((u128::from(bits) * bound as u128) >> 64) as usize
}

/// Shuffles in place (Fisher and Yates).
pub fn shuffle(order: &mut [u32], random: Stream) {
    for last in (1..order.len()).rev() {
        order.swap(last, below(last + 1, random.bits(last as u64)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_permutation_that_depends_on_seed_and_stream() {
        let of = |seed, stream| {
            let mut order: Vec<u32> = (0..100).collect();
            shuffle(&mut order, Stream::new(seed).child(stream));
            order
        };
        let mut sorted = of(1, 0);
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(2, 0));
        assert_ne!(of(1, 0), of(1, 1));
    }

    #[test]
    fn every_place_is_as_likely_as_any_other() {
        let mut counts = [0; 5];
        for seed in 0..5000 {
            let mut order: Vec<u32> = (0..5).collect();
            shuffle(&mut order, Stream::new(seed));
            counts[order[0] as usize] += 1;
        }
        assert!(counts.iter().all(|c| (900..1100).contains(c)), "{counts:?}");
    }
}
