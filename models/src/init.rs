//! Initial weights: named and seeded, so that a parameter comes out the same however the model is cut.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::program::{Source, ValueId};
use crate::random::Stream;
use crate::tensor::{DType, Tensor};

/// Where initial weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Init {
    /// The file.
    Keep,
    /// Normal with variance 2 / fan-in (He et al. 2015), for ReLU networks.
    He,
    /// Uniform within sqrt(6 / (fan-in + fan-out)) (Glorot and Bengio 2010).
    Xavier,
}

/// How a parameter is used, which settles what its initial value may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fan {
    /// Inputs that are summed into one output.
    pub inputs: usize,
    /// Outputs that one input reaches.
    pub outputs: usize,
}

impl Fan {
    /// Of a convolution's filter `[outputs, inputs, kernel..]`; `None` with fewer than two axes.
    pub fn of_filter(shape: &[usize]) -> Option<Self> {
        let [outputs, inputs, kernel @ ..] = shape else {
            return None;
        };
        let field: usize = kernel.iter().product();
        Some(Fan {
            inputs: inputs * field,
            outputs: outputs * field,
        })
    }
}

/// The fan of a parameter: that of the linear map it is the matrix of, directly or transposed or reshaped
/// on the way. `None` for biases, scales and whatever else.
pub fn fan(source: &Source<'_>, parameter: ValueId) -> Option<Fan> {
    let mut names = BTreeSet::from([parameter]);
    for node in source.nodes {
        for (position, input) in node.inputs.iter().enumerate() {
            if !input.is_some_and(|value| names.contains(&value)) {
                continue;
            }
            let fan = node.op.fan(position);
            if fan.is_some() {
                return fan;
            }
            if matches!(
                node.op.name(),
                "Identity" | "Transpose" | "Reshape" | "Squeeze" | "Unsqueeze"
            ) {
                names.extend(node.outputs.iter().flatten());
            }
        }
    }
    None
}

impl Init {
    /// The initial value of a parameter: `from_file` itself, or a tensor of its shape drawn by name and
    /// seed. Parameters without fan (biases, scales, shifts) keep the file's value.
    pub fn parameter(self, name: &str, from_file: &Tensor, fan: Option<Fan>, seed: u64) -> Tensor {
        let (Some(fan), DType::F32) = (fan, from_file.dtype()) else {
            return from_file.clone();
        };
        let stream = Stream::new(seed).named(name);
        let draw = |f: &dyn Fn(u64) -> f32| {
            let values: Vec<f32> = (0..from_file.len() as u64).map(f).collect();
            Tensor::from_f32(from_file.shape(), values)
        };
        match self {
            Init::Keep => from_file.clone(),
            Init::He => {
                let deviation = (2.0 / fan.inputs.max(1) as f32).sqrt();
                draw(&|i| deviation * stream.normal(i))
            }
            Init::Xavier => {
                let bound = (6.0 / (fan.inputs + fan.outputs).max(1) as f32).sqrt();
                draw(&|i| bound * (2.0 * stream.uniform(i) - 1.0))
            }
        }
    }
}

impl FromStr for Init {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "keep" => Ok(Init::Keep),
            "he" => Ok(Init::He),
            "xavier" => Ok(Init::Xavier),
            _ => Err(format!(
                "no initialisation {name:?}; use he, xavier or keep"
            )),
        }
    }
}

/// Whether a weight with a fan holds one value everywhere: such a model was exported without weights and
/// cannot train from them, since all its units stay equal.
pub fn is_constant_fill(value: &Tensor, fan: Option<Fan>) -> bool {
    fan.is_some() && value.len() > 1 && value.is_one_number()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_follow_the_name_the_seed_and_the_fan() {
        let file = Tensor::from_f32(&[64, 32, 3, 3], vec![0.0; 64 * 32 * 9]);
        let fan = Fan::of_filter(file.shape());
        assert_eq!(
            fan,
            Some(Fan {
                inputs: 288,
                outputs: 576
            })
        );
        let draw = |init: Init, name, seed| init.parameter(name, &file, fan, seed);
        let he = draw(Init::He, "conv.weight", 1);
        assert_eq!(he.f32s(), draw(Init::He, "conv.weight", 1).f32s());
        assert_ne!(he.f32s(), draw(Init::He, "conv.weight", 2).f32s());
        assert_ne!(he.f32s(), draw(Init::He, "other.weight", 1).f32s());
        let square = |t: &Tensor| t.f32s().iter().map(|v| v * v).sum::<f32>() / t.len() as f32;
        assert!((square(&he) * 288.0 / 2.0 - 1.0).abs() < 0.05);
        let xavier = draw(Init::Xavier, "conv.weight", 1);
        assert!((square(&xavier) * 864.0 / 2.0 - 1.0).abs() < 0.05);
    }

    #[test]
    fn vectors_and_keep_leave_the_file_alone() {
        let bias = Tensor::from_f32(&[3], [1., 2., 3.]);
        assert!(
            Init::He
                .parameter("b", &bias, Fan::of_filter(&[3]), 1)
                .same_buffer(&bias)
        );
        let weight = Tensor::from_f32(&[1, 2], [1., 2.]);
        let fan = Fan::of_filter(&[1, 2]);
        assert!(
            Init::Keep
                .parameter("w", &weight, fan, 1)
                .same_buffer(&weight)
        );
    }

    #[test]
    fn constant_fills_are_noticed_where_they_hurt() {
        let fill = Tensor::from_f32(&[2, 2], [0.5; 4]);
        assert!(is_constant_fill(&fill, Fan::of_filter(&[2, 2])));
        assert!(!is_constant_fill(&Tensor::from_f32(&[4], [0.0; 4]), None));
        let drawn = Tensor::from_f32(&[2, 2], [0.5, 0.5, 0.5, 0.4]);
        assert!(!is_constant_fill(&drawn, Fan::of_filter(&[2, 2])));
    }
}
