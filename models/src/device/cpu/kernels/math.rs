//! Exponential functions without branches or tables, so that loops over them become vector code.
//!
//! Within 2 units in the last place of the exact result (tests compare with double precision).

/// Adding and subtracting it rounds to the nearest integer, which then stands in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;

/// e^x; infinity and 0 where the result leaves the range of normal numbers, NaN for NaN.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // ln 2 in two parts, so that n * HIGH is exact (Cody and Waite, "Software Manual for the Elementary
    // Functions", 1980).
    const HIGH: f32 = 0.693_359_4;
    const LOW: f32 = -2.121_944_4e-4;
    let rounded = x.clamp(-87.4, 89.0) * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let bits = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = x.clamp(-87.4, 89.0) - n * HIGH - n * LOW;
    // Taylor's series: the remainder after r^7 is below half a unit for |r| <= ln(2) / 2.
    let mut p = 1.0 / 5040.0;
    for coefficient in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        p = p * r + coefficient;
    }
    // 2^n in two factors: n = 128 has no float of its own.
    let half = bits >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let result = p * power(half) * power(bits - half);
    let result = if x > 88.722_84 { f32::INFINITY } else { result };
    if x < -87.336_54 { 0.0 } else { result }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// Hyperbolic tangent.
#[inline(always)]
pub(super) fn tanh(x: f32) -> f32 {
    // Around 0 the quotient below would lose its leading digits; there the odd series to x^13 holds.
    let s = x * x;
    let mut p = 21_844.0 / 6_081_075.0;
    for coefficient in [
        -1382.0 / 155_925.0,
        62.0 / 2835.0,
        -17.0 / 315.0,
        2.0 / 15.0,
        -1.0 / 3.0,
    ] {
        p = p * s + coefficient;
    }
    let small = x + x * s * p;
    let large = 1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0);
    if x.abs() < 0.5 {
        small
    } else {
        large.copysign(x)
    }
}

/// Error function. Two polynomials of our own fit: erf(x) / x in x^2 up to 1, and from there
/// (1 - erf(x)) * exp(x^2) in 1 / (1 + x / 2), both within 3e-8 of the exact quotient.
#[inline(always)]
pub(super) fn erf(x: f32) -> f32 {
    let a = x.abs();
    let s = a * a;
    let mut p = 7.853_861e-5;
    for coefficient in [
        -8.010_194e-4,
        5.188_328e-3,
        -2.685_381_2e-2,
        0.112_835_86,
        -0.376_126_26,
        std::f32::consts::FRAC_2_SQRT_PI,
    ] {
        p = p * s + coefficient;
    }
    let small = a * p;
    let t = 1.0 / (1.0 + 0.5 * a);
    let mut p = 0.119_088_86;
    for coefficient in [
        -0.470_394_3,
        0.562_216_3,
        -0.102_859_735,
        0.347_484_7,
        0.259_767_62,
        0.284_901_4,
        -1.535_202_3e-4,
    ] {
        p = p * t + coefficient;
    }
    let large = 1.0 - p * exp(-s);
    let large = if a > 4.0 { 1.0 } else { large };
    if a < 1.0 { small } else { large }.copysign(x)
}

/// Distribution function and density of the standard normal distribution at x, which share an exponential.
///
/// A polynomial of our own fit: erfc(a) * exp(a^2) in 1 / (1 + 0.4 a), within 1e-7 of the exact quotient for a in
/// 0..9. Beyond the exponential is 0. No digits cancel where the distribution function is small.
#[inline(always)]
pub(super) fn normal(x: f32) -> (f32, f32) {
    const DENSITY_AT_0: f32 = 0.398_942_3;
    let e = exp(-0.5 * x * x);
    let t = 1.0 / (1.0 + 0.4 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let mut p = 0.073_996_53;
    for coefficient in [
        -0.396_682_95,
        0.697_594_7,
        -0.401_160_18,
        0.437_671_42,
        0.122_111_2,
        0.242_579_19,
        0.223_800_82,
        8.917_222e-5,
    ] {
        p = p * t + coefficient;
    }
    let tail = 0.5 * p * e;
    (if x < 0.0 { tail } else { 1.0 - tail }, DENSITY_AT_0 * e)
}

/// tanh(ln(1 + e^x)), without the logarithm.
#[inline(always)]
pub(super) fn tanh_softplus(x: f32) -> f32 {
    // From 20 on it is 1 in single precision, and the square would overflow later.
    let e = exp(if x > 20.0 { 20.0 } else { x });
    let n = e * (e + 2.0);
    n / (n + 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::reference::activation::erf as erf_of;

    fn check(name: &str, f: fn(f32) -> f32, exact: fn(f64) -> f64) {
        for i in -900_000..900_000 {
            let x = i as f32 * 1e-4;
            let (actual, exact) = (f64::from(f(x)), exact(f64::from(x)));
            // Below the normal numbers the result is 0.
            let allowed =
                2.5 * f64::from(f32::EPSILON) * exact.abs() + f64::from(f32::MIN_POSITIVE);
            let close = (actual - exact).abs() <= allowed
                || (actual.is_infinite() && exact > f64::from(f32::MAX));
            assert!(close, "{name}({x}) is {actual}, not {exact}");
        }
        assert!(f(f32::NAN).is_nan(), "{name}(NaN)");
    }

    #[test]
    fn functions_are_exact_to_a_few_units() {
        check("exp", exp, f64::exp);
        check("sigmoid", sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
        check("tanh", tanh, f64::tanh);
        check("erf", erf, erf_of);
    }

    #[test]
    fn normal_distribution() {
        for i in -90_000..90_000 {
            let x = i as f32 * 1e-4;
            let exact = 0.5 * (1.0 + erf_of(f64::from(x) * std::f64::consts::FRAC_1_SQRT_2));
            let (distribution, density) = normal(x);
            assert!((f64::from(distribution) - exact).abs() < 3e-7, "at {x}");
            let exact = (-0.5 * f64::from(x).powi(2)).exp() / std::f64::consts::TAU.sqrt();
            assert!((f64::from(density) - exact).abs() < 1e-7, "density at {x}");
        }
        assert_eq!(normal(f32::INFINITY), (1.0, 0.0));
        assert_eq!(normal(f32::NEG_INFINITY), (0.0, 0.0));
        assert!(normal(f32::NAN).0.is_nan());
    }

    #[test]
    fn limits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(
            (exp(f32::INFINITY), exp(f32::NEG_INFINITY)),
            (f32::INFINITY, 0.0)
        );
        assert_eq!(
            (sigmoid(f32::INFINITY), sigmoid(f32::NEG_INFINITY)),
            (1.0, 0.0)
        );
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
    }
}
