//! Which elements of an axis an output element is made of, and with which weights.

use crate::tensor::Tensor;

/// How an output position becomes one of the input (`coordinate_transformation_mode`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Coordinates {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    /// The part of the axis from the first to the second number, as shares of its extent.
    CropAndResize(f64, f64),
}

/// How a position between elements is rounded to one (`nearest_mode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nearest {
    PreferFloor,
    PreferCeil,
    Floor,
    Ceil,
}

/// How elements are weighed by their distance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Filter {
    Nearest(Nearest),
    Linear,
    /// With its coefficient a (Keys, "Cubic Convolution Interpolation for Digital Image Processing", 1981).
    Cubic(f64),
}

/// One axis and how it is resized.
#[derive(Clone, Copy, Debug)]
pub(super) struct AxisResize {
    pub input: usize,
    pub output: usize,
    pub scale: f64,
    pub coordinates: Coordinates,
    pub filter: Filter,
    /// Stretches the filter when the axis shrinks.
    pub antialias: bool,
    /// Elements beyond the ends have no weight, instead of repeating the ends.
    pub exclude_outside: bool,
}

/// For each tap, the element that each output element reads and its weight.
#[derive(Debug)]
pub(super) struct Taps {
    /// Output elements.
    pub len: usize,
    /// Int64, one tensor per tap, on the host.
    pub sources: Vec<Tensor>,
    /// One tensor per tap; `None`: the weight is 1.
    pub weights: Option<Vec<Tensor>>,
    /// Output elements whose position lies outside of the input, in crop-and-resize.
    pub outside: Vec<bool>,
}

impl AxisResize {
    /// Whether nothing changes.
    pub fn is_identity(&self) -> bool {
        self.input == self.output
            && self.scale == 1.0
            && !matches!(self.coordinates, Coordinates::CropAndResize(..))
    }

    /// Position in the input of an output element.
    fn position(&self, at: usize) -> f64 {
        let (at, input) = (at as f64, self.input as f64);
        // Before it was rounded down to a whole number of elements.
        let extent = self.scale * input;
        let half_pixel = (at + 0.5) / self.scale - 0.5;
        match self.coordinates {
            Coordinates::HalfPixel => half_pixel,
            Coordinates::PytorchHalfPixel if self.output > 1 => half_pixel,
            Coordinates::HalfPixelSymmetric => {
                // What rounding the extent cut off is shared by both ends.
                let adjustment = self.output as f64 / extent;
                input / 2.0 * (1.0 - adjustment) + half_pixel
            }
            Coordinates::AlignCorners if self.output > 1 => at * (input - 1.0) / (extent - 1.0),
            Coordinates::PytorchHalfPixel | Coordinates::AlignCorners => 0.0,
            Coordinates::Asymmetric => at / self.scale,
            Coordinates::CropAndResize(start, end) if self.output > 1 => {
                start * (input - 1.0) + at * (end - start) * (input - 1.0) / (extent - 1.0)
            }
            Coordinates::CropAndResize(start, end) => 0.5 * (start + end) * (input - 1.0),
        }
    }

    /// The taps of all output elements.
    pub fn taps(&self) -> Taps {
        let last = self.input as i64 - 1;
        let positions: Vec<f64> = (0..self.output).map(|at| self.position(at)).collect();
        let outside: Vec<bool> = match self.coordinates {
            Coordinates::CropAndResize(..) => positions
                .iter()
                .map(|&position| position < 0.0 || position > last as f64)
                .collect(),
            _ => vec![false; self.output],
        };
        let column = |values: Vec<i64>| Tensor::from_i64(&[values.len()], values);
        if let Filter::Nearest(nearest) = self.filter {
            let sources = positions.iter().map(|&p| nearest.round(p).clamp(0, last));
            let sources = vec![column(sources.collect())];
            let weights = outside.contains(&true).then(|| {
                let inside = outside.iter().map(|&out| f32::from(u8::from(!out)));
                vec![Tensor::from_f32(&[self.output], inside.collect::<Vec<_>>())]
            });
            return Taps {
                len: self.output,
                sources,
                weights,
                outside,
            };
        }
        let (first, count) = self.footprint();
        let mut sources = vec![Vec::with_capacity(self.output); count];
        let mut weights = vec![Vec::with_capacity(self.output); count];
        for (&position, &outside) in positions.iter().zip(&outside) {
            let floor = position.floor();
            let elements = (0..count as i64).map(|tap| floor as i64 + first + tap);
            let elements: Vec<i64> = elements.collect();
            let mut shares: Vec<f64> = elements
                .iter()
                .map(|&element| self.share(element as f64 - position))
                .collect();
            if self.exclude_outside {
                for (share, element) in shares.iter_mut().zip(&elements) {
                    if !(0..=last).contains(element) {
                        *share = 0.0;
                    }
                }
            }
            let sum: f64 = shares.iter().sum();
            for tap in 0..count {
                let share = if outside { 0.0 } else { shares[tap] / sum };
                sources[tap].push(elements[tap].clamp(0, last));
                weights[tap].push(share as f32);
            }
        }
        let weights = weights.iter().map(|w| Tensor::from_f32(&[w.len()], w));
        Taps {
            len: self.output,
            weights: Some(weights.collect()),
            sources: sources.into_iter().map(column).collect(),
            outside,
        }
    }

    /// Factor by which the filter is narrowed: below 1 it is stretched.
    fn narrowing(&self) -> f64 {
        if self.antialias {
            self.scale.min(1.0)
        } else {
            1.0
        }
    }

    /// First element relative to the position rounded down, and number of elements that may have weight.
    fn footprint(&self) -> (i64, usize) {
        let reach = match self.filter {
            Filter::Cubic(_) => 2.0,
            _ => 1.0,
        };
        let first = (-reach / self.narrowing()).floor() as i64 + 1;
        (first, (2 - 2 * first) as usize)
    }

    /// Weight at a distance, before all are made to sum to 1.
    fn share(&self, distance: f64) -> f64 {
        let x = (distance * self.narrowing()).abs();
        match self.filter {
            Filter::Cubic(a) if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            Filter::Cubic(a) if x < 2.0 => a * (((x - 5.0) * x + 8.0) * x - 4.0),
            Filter::Cubic(_) => 0.0,
            _ => (1.0 - x).max(0.0),
        }
    }
}

impl Nearest {
    fn round(self, position: f64) -> i64 {
        let rounded = match self {
            Nearest::PreferFloor => (position - 0.5).ceil(),
            Nearest::PreferCeil => (position + 0.5).floor(),
            Nearest::Floor => position.floor(),
            Nearest::Ceil => position.ceil(),
        };
        rounded as i64
    }
}
