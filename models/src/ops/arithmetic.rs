//! Add, Sub, Mul, Div, Pow and Mod with numpy broadcasting; of floats, and of the integers that shapes are computed with.

use super::{Context, Forward, NodeSpec, OpError, Operator, Saved, Saves, ValueType, only, sum_to};
use crate::device::params::{Binary, Comparison, Unary};
use crate::shape;
use crate::tensor::{DType, Tensor};

#[derive(Debug)]
struct Arithmetic {
    op: Binary,
    shapes: [Vec<usize>; 2],
    /// Inputs that are constants, whose gradient nobody wants.
    constant: [bool; 2],
    outputs: [ValueType; 1],
}

/// Inputs A and B of one type; the exponent of a float may be an integer.
pub(super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    let is_mod = spec.op_type == "Mod";
    spec.allow(if is_mod { &["fmod"] } else { &[] })?;
    spec.at_most_inputs(2)?;
    let (a, b) = (spec.input(0, "A")?, spec.input(1, "B")?);
    let integer_power = spec.op_type == "Pow" && a.dtype == DType::F32 && b.dtype == DType::I64;
    if !integer_power {
        spec.expect_dtype(b, "B", a.dtype)?;
    }
    if !matches!(a.dtype, DType::F32 | DType::I64) {
        return Err(spec.input_error("A", format!("must be float or int64, not {}", a.dtype)));
    }
    let shape = shape::broadcast(&a.shape, &b.shape).ok_or_else(|| {
        spec.error(format!(
            "A {:?} and B {:?} do not broadcast",
            a.shape, b.shape
        ))
    })?;
    spec.check_size(&shape)?;
    let constant = |position: usize| spec.constants.get(position).is_some_and(Option::is_some);
    let op = match spec.op_type {
        "Add" => Binary::Add,
        "Sub" => Binary::Sub,
        "Mul" => Binary::Mul,
        "Div" => Binary::Div,
        "Pow" => Binary::Pow,
        _ if spec.flag("fmod")? => Binary::Fmod,
        // The standard has floats only with fmod; without, the sign follows the divisor.
        _ => Binary::Mod,
    };
    if matches!(op, Binary::Div | Binary::Mod | Binary::Fmod)
        && a.dtype == DType::I64
        && let Some(divisor) = spec.constants.get(1).and_then(Option::as_ref)
        && divisor.i64s().contains(&0)
    {
        return Err(spec.input_error("B", "divides integers by 0"));
    }
    Ok(Box::new(Arithmetic {
        op,
        shapes: [a.shape.clone(), b.shape.clone()],
        constant: [constant(0), constant(1)],
        outputs: [ValueType {
            dtype: a.dtype,
            shape,
        }],
    }))
}

impl Operator for Arithmetic {
    fn name(&self) -> &'static str {
        match self.op {
            Binary::Add => "Add",
            Binary::Sub => "Sub",
            Binary::Mul => "Mul",
            Binary::Div => "Div",
            Binary::Pow => "Pow",
            _ => "Mod",
        }
    }

    fn outputs(&self) -> &[ValueType] {
        &self.outputs
    }

    fn weights(&self) -> &[usize] {
        match self.op {
            Binary::Pow | Binary::Mod | Binary::Fmod => &[],
            _ => &[0, 1],
        }
    }

    fn saves(&self) -> Saves {
        let mut saves = Saves::default();
        match self.op {
            Binary::Add | Binary::Sub => {}
            Binary::Mul => {
                // The gradient of each side is made with the other.
                saves.inputs.extend((!self.constant[1]).then_some(0));
                saves.inputs.extend((!self.constant[0]).then_some(1));
            }
            Binary::Div => {
                saves.inputs.push(1);
                saves.outputs.extend((!self.constant[1]).then_some(0));
            }
            Binary::Pow => {
                saves.inputs.extend([0, 1]);
                saves.outputs.extend((!self.constant[1]).then_some(0));
            }
            // Whole multiples of the divisor are taken away: only those of it have to be known.
            _ => saves
                .inputs
                .extend((!self.constant[1]).then_some([0, 1]).into_iter().flatten()),
        }
        saves
    }

    fn forward(&self, cx: &Context<'_>, mut inputs: Vec<Option<Tensor>>) -> Forward {
        let a = inputs[0].take().expect("input A");
        let b = inputs[1].take().expect("input B");
        let b = cx.device.cast(b, a.dtype());
        Forward::of(cx.device.binary(self.op, a, b))
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        saved: Saved,
        grads: Vec<Option<Tensor>>,
        wanted: &[bool],
    ) -> Vec<Option<Tensor>> {
        let Some(grad) = only(grads) else {
            return vec![None; wanted.len()];
        };
        let device = cx.device;
        let wants = |side: usize| wanted[side] && !self.constant[side];
        let times = |x: Tensor, y: &Tensor| device.binary(Binary::Mul, x, y.clone());
        let over = |x: Tensor, y: &Tensor| device.binary(Binary::Div, x, y.clone());
        let (mut a_grad, mut b_grad) = (None, None);
        match self.op {
            Binary::Add | Binary::Sub => {
                b_grad = wants(1).then(|| sum_to(device, grad.clone(), &self.shapes[1]));
                if self.op == Binary::Sub {
                    b_grad = b_grad.map(|grad| device.unary(Unary::Scale(-1.0), grad));
                }
                a_grad = wants(0).then(|| sum_to(device, grad, &self.shapes[0]));
            }
            Binary::Mul => {
                if wants(1) {
                    b_grad = Some(sum_to(
                        device,
                        times(grad.clone(), saved.input(0)),
                        &self.shapes[1],
                    ));
                }
                if wants(0) {
                    a_grad = Some(sum_to(device, times(grad, saved.input(1)), &self.shapes[0]));
                }
            }
            Binary::Div => {
                // y = a / b: dy/da = 1 / b, dy/db = -y / b.
                let quotient = over(grad, saved.input(1));
                if wants(1) {
                    let through = times(quotient.clone(), saved.output(0));
                    let sum = sum_to(device, through, &self.shapes[1]);
                    b_grad = Some(device.unary(Unary::Scale(-1.0), sum));
                }
                a_grad = wants(0).then(|| sum_to(device, quotient, &self.shapes[0]));
            }
            Binary::Pow => {
                let a = saved.input(0);
                let b = device.cast(saved.input(1).clone(), DType::F32);
                if wants(1) {
                    // dy/db = y ln a, which is 0 at a = 0.
                    let zero = Tensor::from_f32(&[], [0.0]);
                    let log = device.unary(Unary::Log, a.clone());
                    let log =
                        device.select(&device.compare(Comparison::Equal, a, &zero), &zero, &log);
                    let through = times(times(grad.clone(), saved.output(0)), &log);
                    b_grad = Some(sum_to(device, through, &self.shapes[1]));
                }
                if wants(0) {
                    // dy/da = b a^(b - 1).
                    let less = device.binary(Binary::Sub, b.clone(), Tensor::from_f32(&[], [1.0]));
                    let slope = times(device.binary(Binary::Pow, a.clone(), less), &b);
                    a_grad = Some(sum_to(device, times(grad, &slope), &self.shapes[0]));
                }
            }
            _ => {
                if wants(1) {
                    // y = a - n b with a whole n: dy/db = -n.
                    let (a, b) = (saved.input(0), saved.input(1));
                    let rest = device.binary(self.op, a.clone(), b.clone());
                    let multiple = over(device.binary(Binary::Sub, rest, a.clone()), b);
                    let through = times(grad.clone(), &multiple);
                    b_grad = Some(sum_to(device, through, &self.shapes[1]));
                }
                a_grad = wants(0).then(|| sum_to(device, grad, &self.shapes[0]));
            }
        }
        vec![a_grad, b_grad]
    }
}
