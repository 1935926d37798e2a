//! The products and functions of [`super`], one value at a time: the specification of those in `simd/`.
//!
//! Sixteen sums are kept in turn and added up at the end, halves onto each other. A multiply-add rounds once, everywhere.

use crate::simd::LANES;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// The natural logarithm of 2: a part with so few bits that its product with a whole number is exact, and the rest.
const LN_2: (f32, f32) = (0.693_359_4, -2.121_944_4e-4);
/// To what is added here, the last bit is worth 1: a sum is rounded to a whole number, which its lowest bits are.
const WHOLE: f32 = 12_582_912.0;
const SMALLEST: f32 = -87.336_54;
const LARGEST: f32 = 88.376_26;
/// Of `e^x - 1 - x`, divided by `x^2`, for |x| <= ln(2) / 2 (Moshier's Cephes, `expf`).
const POLYNOMIAL: [f32; 6] = [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5];

/// As [`crate::simd::Isa::dots`].
pub(crate) fn dots(weights: &[f32], rows: &[f32], inputs: usize, out: &mut [f32]) {
    let outputs = weights.len() / inputs;
    for (row, out) in rows.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
        for (weights, out) in weights.chunks_exact(inputs).zip(out) {
            let mut sums = [0.0; LANES];
            for (weights, values) in weights.chunks(LANES).zip(row.chunks(LANES)) {
                for ((sum, weight), value) in sums.iter_mut().zip(weights).zip(values) {
                    *sum = weight.mul_add(*value, *sum);
                }
            }
            *out = sum_of(sums);
        }
    }
}

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

/// As [`crate::simd::Isa::weighted`].
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

/// As [`crate::simd::Isa::code_dots`].
pub(crate) fn code_dots(codes: &[i8], rows: &[i16], inputs: usize, out: &mut [i32]) {
    let outputs = codes.len() / inputs;
    for (row, out) in rows.chunks_exact(inputs).zip(out.chunks_exact_mut(outputs)) {
        for (codes, out) in codes.chunks_exact(inputs).zip(out) {
            *out = codes.iter().zip(row).map(|(code, value)| i32::from(*code) * i32::from(*value)).sum();
        }
    }
}

/// As [`crate::simd::Isa::round`].
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

/// As [`crate::simd::Isa::exponentials`].
#[expect(clippy::inline_always, reason = "to be compiled with the instructions of the function that calls it")]
#[inline(always)]
pub(crate) fn exponentials(values: &mut [f32]) {
    for value in values {
        *value = exponential(*value);
    }
}

/// As [`crate::simd::Isa::gated`].
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
