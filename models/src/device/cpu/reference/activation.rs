//! Functions and their slopes, in double precision and as their definitions say.

use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_PI, PI};

use crate::device::params::Unary;

/// The function's value.
pub fn value(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Sqrt => x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Erf => erf(x),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Sign => {
            if x == 0.0 {
                x
            } else {
                x.signum()
            }
        }
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Round => x.round_ties_even(),
        Unary::Relu => x.max(0.0),
        Unary::Sigmoid => sigmoid(x),
        Unary::Tanh => x.tanh(),
        Unary::Clip { low, high } => x.max(low.into()).min(high.into()),
        Unary::Scale(factor) => f64::from(factor) * x,
        Unary::Gelu => x * normal(x),
        Unary::GeluTanh => x * 0.5 * (1.0 + inner(x).tanh()),
        Unary::LeakyRelu(factor) => x * if x < 0.0 { factor.into() } else { 1.0 },
        Unary::Elu {
            scale,
            factor,
            rate,
        } => {
            if x > 0.0 {
                f64::from(scale) * x
            } else {
                f64::from(factor) * (f64::from(rate) * x).exp_m1()
            }
        }
        Unary::Threshold(threshold) => {
            if x > threshold.into() {
                x
            } else {
                0.0
            }
        }
        Unary::HardSigmoid { alpha, beta } => {
            (f64::from(alpha) * x + f64::from(beta)).clamp(0.0, 1.0)
        }
        Unary::HardSwish => x * (x / 6.0 + 0.5).clamp(0.0, 1.0),
        Unary::Mish => x * softplus(x).tanh(),
        Unary::Softplus => softplus(x),
        Unary::Softsign => x / (1.0 + x.abs()),
        Unary::Shrink { lambda, bias } => {
            if x.abs() > lambda.into() {
                x - f64::from(bias) * x.signum()
            } else {
                0.0
            }
        }
        Unary::Affine { alpha, beta } => f64::from(alpha) * x + f64::from(beta),
        Unary::ScaledTanh { alpha, beta } => f64::from(alpha) * (f64::from(beta) * x).tanh(),
    }
}

/// The function's derivative; at a bend, that of the side on which ONNX's definition puts the bend itself
/// where both are in use, else 0.
pub fn slope(op: Unary, x: f64) -> f64 {
    let step = |inside: bool| f64::from(u8::from(inside));
    match op {
        Unary::Abs => step(x > 0.0) - step(x < 0.0),
        Unary::Exp => x.exp(),
        Unary::Log => 1.0 / x,
        Unary::Sqrt => 0.5 / x.sqrt(),
        Unary::Reciprocal => -1.0 / (x * x),
        Unary::Erf => 2.0 / PI.sqrt() * (-x * x).exp(),
        Unary::Sin => x.cos(),
        Unary::Cos => -x.sin(),
        Unary::Sign | Unary::Floor | Unary::Ceil | Unary::Round => 0.0,
        Unary::Relu => step(x > 0.0),
        Unary::Sigmoid => sigmoid(x) * sigmoid(-x),
        Unary::Tanh => 1.0 - x.tanh().powi(2),
        Unary::Clip { low, high } => step(x >= low.into() && x <= high.into()),
        Unary::Scale(factor) => factor.into(),
        Unary::Gelu => normal(x) + x * (-x * x / 2.0).exp() / (2.0 * PI).sqrt(),
        Unary::GeluTanh => {
            let t = inner(x).tanh();
            let inner_slope = FRAC_2_PI.sqrt() * (1.0 + 3.0 * 0.044_715 * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner_slope
        }
        Unary::LeakyRelu(factor) => {
            if x > 0.0 {
                1.0
            } else {
                factor.into()
            }
        }
        Unary::Elu {
            scale,
            factor,
            rate,
        } => {
            if x > 0.0 {
                scale.into()
            } else {
                f64::from(factor) * f64::from(rate) * (f64::from(rate) * x).exp()
            }
        }
        Unary::Threshold(threshold) => step(x > threshold.into()),
        Unary::HardSigmoid { alpha, beta } => {
            let y = f64::from(alpha) * x + f64::from(beta);
            f64::from(alpha) * step(y > 0.0 && y < 1.0)
        }
        Unary::HardSwish => {
            if x <= -3.0 {
                0.0
            } else if x < 3.0 {
                x / 3.0 + 0.5
            } else {
                1.0
            }
        }
        Unary::Mish => {
            let t = softplus(x).tanh();
            t + x * (1.0 - t * t) * sigmoid(x)
        }
        Unary::Softplus => sigmoid(x),
        Unary::Softsign => 1.0 / (1.0 + x.abs()).powi(2),
        Unary::Shrink { lambda, .. } => step(x.abs() > lambda.into()),
        Unary::Affine { alpha, .. } => alpha.into(),
        Unary::ScaledTanh { alpha, beta } => {
            let t = (f64::from(beta) * x).tanh();
            f64::from(alpha) * f64::from(beta) * (1.0 - t * t)
        }
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

/// What Gelu's approximation takes the tanh of.
fn inner(x: f64) -> f64 {
    FRAC_2_PI.sqrt() * (x + 0.044_715 * x.powi(3))
}

/// Distribution function of the standard normal distribution.
fn normal(x: f64) -> f64 {
    0.5 * (1.0 + erf(x * FRAC_1_SQRT_2))
}

/// Error function, by the series whose terms are all of one sign: 2 / sqrt(pi) * exp(-x^2) * sum of
/// 2^n x^(2n + 1) / (1 * 3 * .. * (2n + 1)).
pub fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::erf;

    #[test]
    fn error_function_has_its_known_values() {
        for (x, known) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (-1.0, -0.842_700_792_949_714_9),
            (3.0, 0.999_977_909_503_001_4),
        ] {
            assert!((erf(x) - known).abs() < 1e-14, "erf({x}) is {}", erf(x));
        }
        assert!(erf(f64::NAN).is_nan());
    }
}
