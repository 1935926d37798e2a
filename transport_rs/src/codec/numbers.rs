//! Element types as `f32` and back, one value at a time: what the conversions of `simd` must agree with.

const SIGN_16: u16 = 0x8000;
const INFINITY_16: u16 = 0x7C00;
const SMALLEST_NORMAL_16: f32 = f32::from_bits((127 - 14) << 23);
const SMALLEST_16: f32 = f32::from_bits((127 - 24) << 23);

/// The value of `binary16` bits. Exact.
#[must_use]
pub fn f16_to_f32(half: u16) -> f32 {
    let sign = u32::from(half & SIGN_16) << 16;
    let magnitude = u32::from(half & !SIGN_16);
    let bits = if magnitude >= u32::from(INFINITY_16) {
        (magnitude << 13) | f32::INFINITY.to_bits()
    } else {
        // The exponent, too small by 112, is put right by a multiplication, which also makes denormals normal.
        (f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23)).to_bits()
    };
    f32::from_bits(sign | bits)
}

/// The `binary16` bits nearest to `value`, ties to even; from 65520 on, infinity. Not for NaN.
#[must_use]
pub fn f32_to_f16(value: f32) -> u16 {
    let sign = u16::from(value.is_sign_negative()) * SIGN_16;
    let magnitude = value.abs();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2**15 by what was asked")]
    let bits = if magnitude >= 65520.0 {
        INFINITY_16
    } else if magnitude < SMALLEST_NORMAL_16 {
        (magnitude * (1.0 / SMALLEST_16)).round_ties_even() as u16
    } else {
        let bits = magnitude.to_bits();
        let half_up = bits + 0x0FFF + ((bits >> 13) & 1);
        ((half_up >> 13) - (112 << 10)) as u16
    };
    sign | bits
}

/// The value of `bfloat16` bits. Exact.
#[must_use]
pub fn bf16_to_f32(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

/// The `bfloat16` bits nearest to `value`, ties to even. Not for NaN.
#[must_use]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16) as u16
}
