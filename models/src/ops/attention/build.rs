//! Shape rule and attributes of Attention.

use super::super::{NodeSpec, OpError, Operator, ValueType};
use super::{Attention, K, MASK, PAST_K, PAST_V, Q, SCORES, V};
use crate::device::params::Unary;
use crate::shape;
use crate::tensor::{DType, Tensor};

/// Inputs Q, K, V, `attn_mask`, `past_key` and `past_value`; opset 23.
///
/// Scores are capped before the mask is added, as ONNX and ONNX Runtime have it now: the other order
/// would let masked positions through. Where a bool mask hides all keys from a query, it sees all of them alike.
pub(in super::super) fn build(spec: &NodeSpec<'_>) -> Result<Box<dyn Operator>, OpError> {
    spec.allow(&[
        "is_causal",
        "kv_num_heads",
        "q_num_heads",
        "qk_matmul_output_mode",
        "scale",
        "softcap",
        "softmax_precision",
    ])?;
    spec.at_most_inputs(6)?;
    let (q, q_heads) = heads(spec, Q, "Q", "q_num_heads")?;
    let (k, k_heads) = heads(spec, K, "K", "kv_num_heads")?;
    let (v, v_heads) = heads(spec, V, "V", "kv_num_heads")?;
    let ranks = [Q, K, V].map(|position| spec.optional(position).map(|t| t.shape.len()));
    let [batch, q_len, width] = q;
    let fits = [k[0], v[0]] == [batch; 2]
        && k[2] == width
        && v[1] == k[1]
        && v_heads == k_heads
        && q_heads % k_heads == 0
        && ranks[0] == ranks[1]
        && ranks[0] == ranks[2];
    if !fits {
        let shapes = [Q, K, V].map(|p| spec.optional(p).map_or(&[][..], |t| &t.shape));
        return Err(spec.error(format!("Q, K and V {shapes:?} do not go together")));
    }
    let past = past(spec, [batch, k_heads], [width, v[2]])?;
    let lens = [q_len, past + k[1]];
    let scores = [batch, q_heads, lens[0], lens[1]];
    spec.check_size(&scores)?;
    let mask = mask(spec, &scores)?;
    let softcap = spec.float("softcap")?.unwrap_or(0.0);
    if softcap < 0.0 {
        return Err(spec.attribute_error("softcap", format!("{softcap} is below 0")));
    }
    if spec
        .int("softmax_precision")?
        .is_some_and(|precision| precision != 1)
    {
        return Err(spec.attribute_error("softmax_precision", "only 1 (float) is supported"));
    }
    if spec.outputs > 4 {
        return Err(spec.error(format!("has at most 4 outputs, not {}", spec.outputs)));
    }
    let mode = spec.int("qk_matmul_output_mode")?.unwrap_or(0);
    if spec.outputs > SCORES && !matches!(mode, 0 | 3) {
        let problem = format!("{mode} is not supported, only 0 (products) and 3 (after softmax)");
        return Err(spec.attribute_error("qk_matmul_output_mode", problem));
    }
    let packed = ranks[0] == Some(3);
    let y = if packed {
        vec![batch, q_len, q_heads * v[2]]
    } else {
        vec![batch, q_heads, q_len, v[2]]
    };
    let present = |width: usize| ValueType::float([batch, k_heads, lens[1], width]);
    let mut outputs = vec![ValueType::float(y), present(width), present(v[2])];
    outputs.push(ValueType::float(scores));
    outputs.truncate(spec.outputs.max(1));
    Ok(Box::new(Attention {
        batch,
        heads: q_heads,
        kv_heads: k_heads,
        lens,
        past,
        widths: [width, v[2]],
        scale: spec.float("scale")?.unwrap_or(1.0 / (width as f32).sqrt()),
        softcap: (softcap > 0.0).then_some(Unary::ScaledTanh {
            alpha: softcap,
            beta: 1.0 / softcap,
        }),
        causal: (spec.int("is_causal")?.unwrap_or(0) != 0).then(|| causal(lens, past)),
        mask,
        packed,
        shows_softmax: mode == 3,
        outputs,
    }))
}

/// Extents `[batch, len, width of a head]` and number of heads of an input.
fn heads(
    spec: &NodeSpec<'_>,
    position: usize,
    name: &str,
    attribute: &str,
) -> Result<([usize; 3], usize), OpError> {
    let shape = &spec.float_input(position, name)?.shape;
    let given = spec.int(attribute)?;
    match shape[..] {
        [batch, heads, len, width] => match given {
            Some(number) if number != heads as i64 => {
                let problem = format!("{number} does not go with {name} {shape:?}");
                Err(spec.attribute_error(attribute, problem))
            }
            _ => Ok(([batch, len, width], heads)),
        },
        [batch, len, width] => {
            let number = given.and_then(|number| usize::try_from(number).ok());
            let number = number.filter(|&number| number > 0 && width % number == 0);
            let number = number.ok_or_else(|| {
                let problem = format!("must be given and divide the last axis of {name} {shape:?}");
                spec.attribute_error(attribute, problem)
            })?;
            Ok(([batch, len, width / number], number))
        }
        _ => Err(spec.input_error(name, format!("{shape:?} must have three or four axes"))),
    }
}

/// Number of keys of the past.
fn past(spec: &NodeSpec<'_>, outer: [usize; 2], widths: [usize; 2]) -> Result<usize, OpError> {
    let mut len = None;
    for (position, name, width) in [
        (PAST_K, "past_key", widths[0]),
        (PAST_V, "past_value", widths[1]),
    ] {
        let Some(past) = spec.optional(position) else {
            continue;
        };
        spec.expect_dtype(past, name, DType::F32)?;
        let found = past.shape.get(2).copied().unwrap_or(0);
        let expected = len.unwrap_or(found);
        spec.expect_shape(past, name, &[outer[0], outer[1], expected, width])?;
        len = Some(expected);
    }
    if spec.optional(PAST_K).is_some() != spec.optional(PAST_V).is_some() {
        return Err(spec.error("has only one of past_key and past_value"));
    }
    Ok(len.unwrap_or(0))
}

/// Shape of the mask, which broadcasts to the scores except that keys at the end may be missing: they are hidden.
fn mask(spec: &NodeSpec<'_>, scores: &[usize; 4]) -> Result<Option<Vec<usize>>, OpError> {
    let Some(mask) = spec.optional(MASK) else {
        return Ok(None);
    };
    if !matches!(mask.dtype, DType::F32 | DType::Bool) {
        let problem = format!("must be float or bool, not {}", mask.dtype);
        return Err(spec.input_error("attn_mask", problem));
    }
    let mut full = mask.shape.clone();
    if let Some(keys) = full.last_mut()
        && (2..=scores[3]).contains(keys)
    {
        *keys = scores[3];
    }
    if shape::broadcast(&full, scores).as_deref() != Some(&scores[..]) || mask.shape.contains(&0) {
        let problem = format!(
            "{:?} does not broadcast to the scores {scores:?}",
            mask.shape
        );
        return Err(spec.input_error("attn_mask", problem));
    }
    Ok(Some(mask.shape.clone()))
}

/// 0 where a key may be seen, else minus infinity.
fn causal([queries, keys]: [usize; 2], past: usize) -> Tensor {
    let seen = |query: usize, key: usize| match key <= query + past {
        true => 0.0,
        false => f32::NEG_INFINITY,
    };
    let values = (0..queries).flat_map(|query| (0..keys).map(move |key| seen(query, key)));
    Tensor::from_f32(&[queries, keys], values.collect::<Vec<_>>())
}
