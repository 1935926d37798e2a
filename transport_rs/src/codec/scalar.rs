//! The codec one value at a time: the specification, the path of processors without SIMD of ours, and the ends of blocks
//! that fill no vector.

use super::levels::{DYNAMIC_MAGNITUDES, FIRSTS, LASTS, LINEAR_STEP, STEPS, THRESHOLDS};
use super::numbers::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use super::{Code, DecodeRun, Dtype, EncodeRun, Format, NotFinite};

/// How the values of a block are brought into the range of the code map: times `prescale`, then times `factor`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalization {
    /// 1, or a power of two that keeps `factor` from overflowing or becoming denormal.
    pub prescale: f32,
    /// The largest level, in units of the code map, over the prescaled scale; 0 for a block of zeros.
    pub factor: f32,
}

impl Normalization {
    /// For a block of this largest magnitude, which is finite.
    #[must_use]
    pub fn new(code: Code, absmax: f32) -> Self {
        const BIG: f32 = f32::from_bits((127 + 100) << 23); // 2^100
        const SMALL: f32 = f32::from_bits((127 - 100) << 23);
        let prescale = match absmax {
            _ if absmax < SMALL => BIG,
            _ if absmax > BIG => SMALL,
            _ => 1.0,
        };
        let top = match code {
            Code::Linear => 127.0,
            Code::Dynamic => 1.0,
        };
        Self { prescale, factor: if absmax == 0.0 { 0.0 } else { top / (absmax * prescale) } }
    }
}

/// The code of a value that was brought into `[-127, 127]`.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "rounding may leave the range, and then saturates at its end")]
pub fn linear_code(normalized: f32) -> u8 {
    (normalized.round_ties_even() as i8).cast_unsigned()
}

/// The level of a code.
#[must_use]
pub fn linear_level(code: u8) -> f32 {
    f32::from(code.cast_signed().max(-127)) * LINEAR_STEP
}

/// The code of a value that was brought into `[-1, 1]`: the nearest level's, give or take the rounding of one
/// multiplication and one addition.
#[must_use]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 128, and then from 0 to 255")]
pub fn dynamic_code(normalized: f32) -> u8 {
    let magnitude = normalized.abs();
    let mut p = 0.0;
    for ((threshold, last), (step, first)) in THRESHOLDS.iter().zip(&LASTS).zip(STEPS.iter().zip(&FIRSTS)) {
        if magnitude >= *threshold {
            p = (magnitude * step + first).min(*last);
        }
    }
    let p = p as i32;
    (127 + if normalized < 0.0 { -p.min(127) } else { p }) as u8
}

/// The level of a code.
#[must_use]
pub fn dynamic_level(code: u8) -> f32 {
    let from_zero = i16::from(code) - 127;
    let magnitude = DYNAMIC_MAGNITUDES.get(usize::from(from_zero.unsigned_abs())).copied().unwrap_or_default();
    if from_zero < 0 { -magnitude } else { magnitude }
}

pub(crate) fn encode(format: Format, run: EncodeRun<'_>) -> Result<(), NotFinite> {
    let blocks = run.values.chunks(format.block * format.dtype.bytes());
    for (number, ((values, scale), codes)) in blocks.zip(run.scales).zip(run.codes.chunks_mut(format.block)).enumerate()
    {
        let bits = absmax_bits(format.dtype, values);
        let absmax = finite(bits).ok_or_else(|| first_not_finite(format, number, values))?;
        *scale = absmax.to_le_bytes();
        encode_values(format, Normalization::new(format.code, absmax), values, codes);
    }
    Ok(())
}

pub(crate) fn decode(format: Format, run: DecodeRun<'_>) {
    let DecodeRun { values, scales, codes } = run;
    let blocks = values.chunks_mut(format.block * format.dtype.bytes());
    for ((values, scale), codes) in blocks.zip(scales).zip(codes.chunks(format.block)) {
        decode_values(format, f32::from_le_bytes(*scale), codes, values);
    }
}

/// The bits of the largest magnitude. The bits of magnitudes, read as whole numbers, have the same order, with infinity
/// and then NaN last.
pub(crate) fn absmax_bits(dtype: Dtype, values: &[u8]) -> u32 {
    let magnitude = |value: f32| value.abs().to_bits();
    match dtype {
        Dtype::F32 => of_four(values).map(magnitude).max(),
        Dtype::F16 => of_two(values, f16_to_f32).map(magnitude).max(),
        Dtype::Bf16 => of_two(values, bf16_to_f32).map(magnitude).max(),
    }
    .unwrap_or_default()
}

/// The number with these bits, if it is one and not infinite.
pub(crate) fn finite(bits: u32) -> Option<f32> {
    Some(f32::from_bits(bits)).filter(|number| number.is_finite())
}

/// Where in the run the culprit stands, given the block that has it.
#[cold]
pub(crate) fn first_not_finite(format: Format, block: usize, values: &[u8]) -> NotFinite {
    let culprit =
        values.chunks(format.dtype.bytes()).position(|value| finite(absmax_bits(format.dtype, value)).is_none());
    NotFinite { index: block * format.block + culprit.unwrap_or_default() }
}

pub(crate) fn encode_values(format: Format, by: Normalization, values: &[u8], codes: &mut [u8]) {
    match format.dtype {
        Dtype::F32 => encode_each(format.code, by, of_four(values), codes),
        Dtype::F16 => encode_each(format.code, by, of_two(values, f16_to_f32), codes),
        Dtype::Bf16 => encode_each(format.code, by, of_two(values, bf16_to_f32), codes),
    }
}

pub(crate) fn decode_values(format: Format, scale: f32, codes: &[u8], values: &mut [u8]) {
    let level = match format.code {
        Code::Linear => linear_level,
        Code::Dynamic => dynamic_level,
    };
    let decoded = codes.iter().map(|code| level(*code) * scale);
    match format.dtype {
        Dtype::F32 => into_four(decoded, values),
        Dtype::F16 => into_two(decoded, values, f32_to_f16),
        Dtype::Bf16 => into_two(decoded, values, f32_to_bf16),
    }
}

fn encode_each(code: Code, by: Normalization, values: impl Iterator<Item = f32>, codes: &mut [u8]) {
    let code_of = match code {
        Code::Linear => linear_code,
        Code::Dynamic => dynamic_code,
    };
    for (value, code) in values.zip(codes) {
        *code = code_of(value * by.prescale * by.factor);
    }
}

fn of_four(values: &[u8]) -> impl Iterator<Item = f32> {
    values.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes))
}

fn of_two(values: &[u8], number: impl Fn(u16) -> f32) -> impl Iterator<Item = f32> {
    values.as_chunks().0.iter().map(move |bytes| number(u16::from_ne_bytes(*bytes)))
}

fn into_four(decoded: impl Iterator<Item = f32>, values: &mut [u8]) {
    for (number, bytes) in decoded.zip(values.as_chunks_mut().0) {
        *bytes = number.to_ne_bytes();
    }
}

fn into_two(decoded: impl Iterator<Item = f32>, values: &mut [u8], rounded: impl Fn(f32) -> u16) {
    for (number, bytes) in decoded.zip(values.as_chunks_mut().0) {
        *bytes = rounded(number).to_ne_bytes();
    }
}
