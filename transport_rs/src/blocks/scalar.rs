//! The products and functions of [`super`], one value at a time: the specification of those in `simd/`.
//!
//! Sixteen sums are kept in turn and added up at the end, halves onto each other. A multiply-add rounds once, everywhere.

use super::groups::{GROUP, Q4, Q8};
use crate::codec::numbers::{bf16_to_f32, f16_to_f32};
use crate::simd::LANES;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// The natural logarithm of 2: a part with so few bits that its product with a whole number is exact, and the rest.
const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
/// The last bit of this number is worth 1: adding it rounds a value to a whole number, which is then in the lowest
/// bits.
pub(super) const WHOLE: f32 = 12_582_912.0;
const SMALLEST: f32 = -87.336_54;
const LARGEST: f32 = 88.376_26;
/// The polynomial for `(e^x - 1 - x) / x^2`, for |x| <= ln(2) / 2 (Moshier's Cephes, `expf`).
const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5];

/// The specification of [`crate::simd::Isa::dots`].
pub(crate) fn dots(weights: &[f32], rows: &[f32], inputs: usize, out: &mut [f32]) {
    dots_with(weights, rows, inputs, out, |weight| *weight);
}

/// The specification of [`crate::simd::Isa::bf16_dots`].
pub(crate) fn bf16_dots(weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
    dots_with(weights, rows, inputs, out, |weight| bf16_to_f32(*weight));
}

/// The specification of [`crate::simd::Isa::f16_dots`].
pub(crate) fn f16_dots(weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
    dots_with(weights, rows, inputs, out, |weight| f16_to_f32(*weight));
}

/// The specification of [`crate::simd::Isa::q4_dots`].
pub(crate) fn q4_dots(weights: Q4<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
    let mut floats = vec![0.0; weights.levels.len() * GROUP];
    q4_floats(weights, &mut floats);
    dots(&floats, rows, inputs, out);
}

/// The specification of [`crate::simd::Isa::q8_dots`].
pub(crate) fn q8_dots(weights: Q8<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
    let mut floats = vec![0.0; weights.codes.len()];
    q8_floats(weights, &mut floats);
    dots(&floats, rows, inputs, out);
}

/// The specification of [`crate::simd::Isa::q8_floats`].
pub(crate) fn q8_floats(weights: Q8<'_>, out: &mut [f32]) {
    out.iter_mut().zip(weights.weights()).for_each(|(out, weight)| *out = weight);
}

/// The specification of [`crate::simd::Isa::q4_floats`].
pub(crate) fn q4_floats(weights: Q4<'_>, out: &mut [f32]) {
    out.iter_mut().enumerate().for_each(|(at, out)| *out = weights.weight(at));
}

fn dots_with<T>(weights: &[T], rows: &[f32], inputs: usize, out: &mut [f32], widen: impl Fn(&T) -> f32) {
    let outputs = weights.len() / inputs;
    for (row, out) in rows.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
        for (weights, out) in weights.chunks_exact(inputs).zip(out) {
            let mut sums = [0.0; LANES];
            for (weights, values) in weights.chunks(LANES).zip(row.chunks(LANES)) {
                for ((sum, weight), value) in sums.iter_mut().zip(weights).zip(values) {
                    *sum = widen(weight).mul_add(*value, *sum);
                }
            }
            *out = sum_of(sums);
        }
    }
}

#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
fn sum_of(mut sums: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        let (low, high) = sums.split_at_mut(half);
        low.iter_mut().zip(high).for_each(|(low, high)| *low += *high);
        half /= 2;
    }
    let [sum, ..] = sums;
    sum
}

/// The specification of [`crate::simd::Isa::weighted`].
pub(crate) fn weighted(values: &[f32], weights: &[f32], width: usize, out: &mut [f32]) {
    out.fill(0.0);
    for (weights, out) in weights.chunks_exact(values.len() / width).zip(out.chunks_exact_mut(width)) {
        for (values, weight) in values.chunks_exact(width).zip(weights) {
            for (sum, value) in out.iter_mut().zip(values) {
                *sum = value.mul_add(*weight, *sum);
            }
        }
    }
}

/// The specification of [`crate::simd::Isa::code_dots`].
pub(crate) fn code_dots(codes: &[i8], rows: &[i16], inputs: usize, out: &mut [i32]) {
    let outputs = codes.len() / inputs;
    for (row, out) in rows.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
        for (codes, out) in codes.chunks_exact(inputs).zip(out) {
            *out = codes.iter().zip(row).map(|(code, value)| i32::from(*code) * i32::from(*value)).sum();
        }
    }
}

/// The specification of [`crate::simd::Isa::scaled`].
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
pub(crate) fn scaled(codes: &[i8], scales: &[f32], out: &mut [f32]) {
    let width = codes.len() / scales.len().max(1);
    for ((codes, scale), out) in codes.chunks_exact(width.max(1)).zip(scales).zip(out.chunks_exact_mut(width.max(1))) {
        codes.iter().zip(out).for_each(|(code, value)| *value = f32::from(*code) * scale);
    }
}

/// The specification of [`crate::simd::Isa::round`].
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
pub(crate) fn round(values: &[f32], scale: f32, codes: &mut [i16]) {
    for (value, code) in values.iter().zip(codes) {
        let shifted = value / scale + WHOLE;
        #[expect(clippy::cast_possible_truncation, reason = "from -127 to 127")]
        let whole = shifted.to_bits().wrapping_sub(WHOLE.to_bits()) as i16;
        *code = whole;
    }
}

/// The specification of [`crate::simd::Isa::soften`].
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
pub(crate) fn soften(scores: &mut [f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (sixteens, rest) = scores.as_chunks_mut::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for scores in sixteens.iter() {
        most.iter_mut().zip(scores).for_each(|(most, score)| *most = larger(*most, *score));
    }
    let largest = most.iter().chain(rest.iter()).copied().fold(f32::NEG_INFINITY, larger);
    let mut sums = [0.0; LANES];
    for scores in sixteens {
        for (sum, score) in sums.iter_mut().zip(scores) {
            *score = exponential(*score - largest);
            *sum += *score;
        }
    }
    for (sum, score) in sums.iter_mut().zip(rest) {
        *score = exponential(*score - largest);
        *sum += *score;
    }
    sum_of(sums)
}

/// The specification of [`crate::simd::Isa::gated`].
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
pub(crate) fn gated(gates: &mut [f32], values: &[f32]) {
    for (gate, value) in gates.iter_mut().zip(values) {
        *gate = *gate / (1.0 + exponential(-*gate)) * value;
    }
}

/// To within two units of the last place; at the ends of the range the last value within it. NaN stays NaN.
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
fn exponential(x: f32) -> f32 {
    let x = if x < SMALLEST { SMALLEST } else { x };
    let x = if x > LARGEST { LARGEST } else { x };
    let shifted = x.mul_add(LOG2_E, WHOLE);
    let whole = shifted - WHOLE;
    let rest = (-whole).mul_add(LN_2.1, (-whole).mul_add(LN_2.0, x));
    let [first, others @ ..] = POLYNOMIAL;
    let mut sum = first;
    for coefficient in others {
        sum = sum.mul_add(rest, coefficient);
    }
    let mantissa = sum.mul_add(rest * rest, rest) + 1.0;
    let exponent = shifted.to_bits().wrapping_sub(WHOLE.to_bits()).wrapping_add(127) << 23;
    mantissa * f32::from_bits(exponent)
}
