//! Sums that are fast and still exact to single precision.

/// Elements that are added up in single precision before double takes over.
const RUN: usize = 1 << 14;
/// Partial sums side by side: four vectors, so that additions do not wait for each other.
const LANES: usize = 64;

/// Sum of `f(x)`.
#[inline(always)]
pub(super) fn of(x: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    let mut sum = 0.0;
    for run in x.chunks(RUN) {
        let (chunks, rest) = run.as_chunks::<LANES>();
        let mut lanes = [0f32; LANES];
        for chunk in chunks {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += f(x);
            }
        }
        sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        sum += rest.iter().map(|&x| f64::from(f(x))).sum::<f64>();
    }
    sum
}

/// Sums of `f(x, y)` over pairs, two at once.
#[inline(always)]
pub(super) fn pairs(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> [f32; 2]) -> [f64; 2] {
    let mut sum = [0.0; 2];
    for (x, y) in x.chunks(RUN).zip(y.chunks(RUN)) {
        let (x_chunks, x_rest) = x.as_chunks::<LANES>();
        let (y_chunks, y_rest) = y.as_chunks::<LANES>();
        let mut lanes = [[0f32; LANES]; 2];
        for (x, y) in x_chunks.iter().zip(y_chunks) {
            for i in 0..LANES {
                let [first, second] = f(x[i], y[i]);
                lanes[0][i] += first;
                lanes[1][i] += second;
            }
        }
        for (sum, lanes) in sum.iter_mut().zip(&lanes) {
            *sum += lanes.iter().map(|&lane| f64::from(lane)).sum::<f64>();
        }
        for (&x, &y) in x_rest.iter().zip(y_rest) {
            let terms = f(x, y);
            sum.iter_mut()
                .zip(terms)
                .for_each(|(sum, term)| *sum += f64::from(term));
        }
    }
    sum
}
