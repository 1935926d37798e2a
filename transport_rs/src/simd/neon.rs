//! NEON: 4 values at a time. The conversions of `binary16` are whole-number arithmetic: the instructions for them have
//! been in the standard library only since Rust 1.94.

#![expect(clippy::trivially_copy_pass_by_ref, reason = "four values here, more in the other modules")]

use std::arch::aarch64::{
    float32x4_t, int16x8_t, int32x4_t, uint8x16x2_t, uint32x4_t, vabsq_f32, vabsq_s32, vadd_f32, vaddq_f32, vaddq_s32,
    vaddq_u32, vaddvq_s32, vandq_s32, vandq_u32, vbslq_u32, vcgeq_f32, vcgeq_u32, vcltq_f32, vcombine_f32,
    vcvtnq_s32_f32, vcvtq_f32_s32, vcvtq_s32_f32, vdup_n_u32, vdupq_n_f32, vdupq_n_s16, vdupq_n_s32, vdupq_n_u32,
    veorq_s32, veorq_u32, vfmaq_f32, vget_high_f32, vget_high_s8, vget_high_s16, vget_low_f32, vget_low_s8,
    vget_low_s16, vget_low_u16, vgetq_lane_u32, vld1_u8, vld1q_f32, vld1q_s8, vld1q_s16, vld1q_u8, vmaxq_s32,
    vmaxq_u32, vmaxvq_u32, vminq_f32, vmlal_s16, vmlaq_u32, vmovl_s8, vmovl_s16, vmovl_u8, vmovl_u16, vmovn_u32,
    vmulq_f32, vmulq_s32, vorrq_u32, vpadd_f32, vqtbl1q_u8, vqtbl2q_u8, vreinterpret_s8_u32, vreinterpret_u8_u16,
    vreinterpret_u8_u32, vreinterpret_u16_u8, vreinterpretq_f32_u32, vreinterpretq_s32_f32, vreinterpretq_s32_u32,
    vreinterpretq_u8_u32, vreinterpretq_u32_f32, vreinterpretq_u32_s32, vreinterpretq_u32_u8, vshlq_n_u32, vshrq_n_s32,
    vshrq_n_u32, vst1_u8, vst1q_f32, vst1q_u8, vsubq_s32, vsubq_u32, vtstq_s32,
};
use std::ops::Range;

use super::{Aligned, LANES, NEAR_VALUES, PREFETCH_BYTES, VALUES_AHEAD, WIDE_VALUES};
use crate::blocks::groups::{GROUP, GROUP_BYTES, Q4, Q8};
use crate::codec::levels::{BINADE_BELOW, DECADES, FIRSTS, LASTS, LINEAR_STEP, RISES, STARTS, STEPS, THRESHOLDS};
use crate::codec::{Code, DecodeRun, Dtype, EncodeRun, Format, NotFinite, scalar};

type Floats = float32x4_t;
type Ints = int32x4_t;

kernels!("neon", 4);

#[target_feature(enable = "neon")]
#[inline]
fn linear_codes(normalized: Floats) -> Ints {
    vcvtnq_s32_f32(normalized)
}

#[target_feature(enable = "neon")]
#[inline]
fn linear_levels(codes: &[u8; 4]) -> Floats {
    let bytes = vreinterpret_s8_u32(vdup_n_u32(u32::from_le_bytes(*codes)));
    let codes = vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
    multiply(vcvtq_f32_s32(vmaxq_s32(codes, splat_int(-127))), splat(LINEAR_STEP))
}

#[target_feature(enable = "neon")]
#[inline]
fn dynamic_codes(normalized: Floats) -> Ints {
    let magnitude = vabsq_f32(normalized);
    let binade = vreinterpretq_s32_u32(vshrq_n_u32::<23>(vreinterpretq_u32_f32(magnitude)));
    let binade = vsubq_s32(vmaxq_s32(binade, splat_int(BINADE_BELOW)), splat_int(BINADE_BELOW));
    let reached = vshrq_n_s32::<5>(vmulq_s32(binade, splat_int(11))); // a third
    let next_too = vcgeq_f32(magnitude, of_decade(&THRESHOLDS, reached)); // -1 or 0
    let decade = vsubq_s32(vsubq_s32(reached, splat_int(1)), vreinterpretq_s32_u32(next_too));
    let cells = vaddq_f32(multiply(magnitude, of_decade(&STEPS, decade)), of_decade(&FIRSTS, decade));
    let p = vcvtq_s32_f32(vminq_f32(cells, of_decade(&LASTS, decade)));
    let not_zero = vcgeq_f32(magnitude, splat(THRESHOLDS[0]));
    let p = vandq_s32(p, vreinterpretq_s32_u32(not_zero));
    let sign = vshrq_n_s32::<31>(vreinterpretq_s32_f32(normalized)); // -1 or 0
    let with_sign = vsubq_s32(veorq_s32(p, sign), sign);
    vaddq_s32(vmaxq_s32(with_sign, splat_int(-127)), splat_int(127))
}

#[target_feature(enable = "neon")]
#[inline]
fn dynamic_levels(codes: &[u8; 4]) -> Floats {
    let bytes = vreinterpret_u8_u32(vdup_n_u32(u32::from_le_bytes(*codes)));
    let codes = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
    let from_zero = vsubq_s32(codes, splat_int(127));
    let p = vabsq_s32(from_zero);
    let p_float = vcvtq_f32_s32(p);
    let decade = vsubq_s32(vreinterpretq_s32_u32(vshrq_n_u32::<23>(vreinterpretq_u32_f32(p_float))), splat_int(127));
    let level = vaddq_f32(multiply(of_decade(&RISES, decade), p_float), of_decade(&STARTS, decade));
    let level = vandq_u32(vreinterpretq_u32_f32(level), vtstq_s32(p, p));
    let sign = vreinterpretq_u32_s32(vandq_s32(from_zero, splat_int(i32::MIN)));
    vreinterpretq_f32_u32(veorq_u32(level, sign))
}

/// The constant of each lane's decade. The result for a lane outside of 0..8 is not specified.
#[target_feature(enable = "neon")]
#[inline]
fn of_decade(constants: &[f32; DECADES], decade: Ints) -> Floats {
    let bytes: *const u8 = constants.as_ptr().cast();
    // SAFETY: eight floats are the twice 16 bytes that are read.
    let table: uint8x16x2_t = unsafe { uint8x16x2_t(vld1q_u8(bytes), vld1q_u8(bytes.add(16))) };
    // Byte k of lane l is byte 4 * decade + k of the table.
    let places = vmlaq_u32(vdupq_n_u32(0x0302_0100), vreinterpretq_u32_s32(decade), vdupq_n_u32(0x0404_0404));
    vreinterpretq_f32_u32(vreinterpretq_u32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(places))))
}

/// Lane by lane, as whole numbers, the larger of `most` and the magnitude of `values`.
#[target_feature(enable = "neon")]
#[inline]
fn larger_magnitude(most: Ints, values: Floats) -> Ints {
    let magnitude = vreinterpretq_u32_f32(vabsq_f32(values));
    vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(most), magnitude))
}

#[target_feature(enable = "neon")]
#[inline]
fn largest(lanes: Ints) -> u32 {
    vmaxvq_u32(vreinterpretq_u32_s32(lanes))
}

#[target_feature(enable = "neon")]
#[inline]
fn splat(value: f32) -> Floats {
    vdupq_n_f32(value)
}

#[target_feature(enable = "neon")]
#[inline]
fn splat_int(value: i32) -> Ints {
    vdupq_n_s32(value)
}

#[target_feature(enable = "neon")]
#[inline]
fn multiply(a: Floats, b: Floats) -> Floats {
    vmulq_f32(a, b)
}

#[target_feature(enable = "neon")]
#[inline]
fn load_f32(values: &[u8; 16]) -> Floats {
    // SAFETY: the reference has the 16 bytes that are read; no alignment is asked for.
    vreinterpretq_f32_u32(vreinterpretq_u32_u8(unsafe { vld1q_u8(values.as_ptr()) }))
}

/// The same as [`crate::codec::numbers::f16_to_f32`].
#[target_feature(enable = "neon")]
#[inline]
fn load_f16(values: &[u8; 8]) -> Floats {
    let halves = load_halves(values);
    let magnitude = vandq_u32(halves, vdupq_n_u32(0x7FFF));
    let shifted = vshlq_n_u32::<13>(magnitude);
    let exponent = splat(f32::from_bits((127 + 112) << 23));
    let number = vreinterpretq_u32_f32(multiply(vreinterpretq_f32_u32(shifted), exponent));
    let not_finite = vcgeq_u32(magnitude, vdupq_n_u32(0x7C00));
    let number = vorrq_u32(number, vandq_u32(not_finite, vdupq_n_u32(f32::INFINITY.to_bits())));
    let sign = vshlq_n_u32::<16>(vandq_u32(halves, vdupq_n_u32(0x8000)));
    vreinterpretq_f32_u32(vorrq_u32(number, sign))
}

#[target_feature(enable = "neon")]
#[inline]
fn load_bf16(values: &[u8; 8]) -> Floats {
    vreinterpretq_f32_u32(vshlq_n_u32::<16>(load_halves(values)))
}

#[target_feature(enable = "neon")]
#[inline]
fn store_f32(numbers: Floats, values: &mut [u8; 16]) {
    // SAFETY: the reference has the 16 bytes that are written; no alignment is asked for.
    unsafe { vst1q_u8(values.as_mut_ptr(), vreinterpretq_u8_u32(vreinterpretq_u32_f32(numbers))) }
}

/// The same as [`crate::codec::numbers::f32_to_f16`], for magnitudes below 65520.
#[target_feature(enable = "neon")]
#[inline]
fn store_f16(numbers: Floats, values: &mut [u8; 8]) {
    let magnitude = vabsq_f32(numbers);
    let bits = vreinterpretq_u32_f32(magnitude);
    let odd = vandq_u32(vshrq_n_u32::<13>(bits), vdupq_n_u32(1));
    let half_up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x0FFF)), odd);
    let normal = vsubq_u32(vshrq_n_u32::<13>(half_up), vdupq_n_u32(112 << 10));
    // The last bit of 0.5 is worth what that of a denormal half is: the addition rounds there.
    let denormal = vsubq_u32(vreinterpretq_u32_f32(vaddq_f32(magnitude, splat(0.5))), vdupq_n_u32(0.5_f32.to_bits()));
    let is_denormal = vcltq_f32(magnitude, splat(f32::from_bits((127 - 14) << 23)));
    let sign = vandq_u32(vshrq_n_u32::<16>(vreinterpretq_u32_f32(numbers)), vdupq_n_u32(0x8000));
    store_halves(vorrq_u32(vbslq_u32(is_denormal, denormal, normal), sign), values);
}

#[target_feature(enable = "neon")]
#[inline]
fn store_bf16(numbers: Floats, values: &mut [u8; 8]) {
    let bits = vreinterpretq_u32_f32(numbers);
    let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
    let half_up = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
    store_halves(vshrq_n_u32::<16>(half_up), values);
}

/// Stable Rust has no such instruction here.
fn prefetch(_address: *const u8) {}

/// The lowest byte of each lane.
#[target_feature(enable = "neon")]
#[inline]
fn store_codes(lanes: Ints, codes: &mut [u8; 4]) {
    let bytes = vreinterpretq_u8_u32(vreinterpretq_u32_s32(lanes));
    let places = vreinterpretq_u8_u32(vdupq_n_u32(0x0C08_0400));
    let packed = vreinterpretq_u32_u8(vqtbl1q_u8(bytes, places));
    *codes = vgetq_lane_u32::<0>(packed).to_le_bytes();
}

#[target_feature(enable = "neon")]
#[inline]
fn load_halves(values: &[u8; 8]) -> uint32x4_t {
    // SAFETY: the reference has the 8 bytes that are read; no alignment is asked for.
    vmovl_u16(vreinterpret_u16_u8(unsafe { vld1_u8(values.as_ptr()) }))
}

/// The lower half of each lane.
#[target_feature(enable = "neon")]
#[inline]
fn store_halves(lanes: uint32x4_t, values: &mut [u8; 8]) {
    // SAFETY: the reference has the 8 bytes that are written; no alignment is asked for.
    unsafe { vst1_u8(values.as_mut_ptr(), vreinterpret_u8_u16(vmovn_u32(lanes))) }
}

type Sixteen = [Floats; 4];

row_kernels!("neon", 2 x 2, 2 x 2, straight: 2, usize::MAX);

#[target_feature(enable = "neon")]
#[inline]
fn zeros() -> Sixteen {
    spread(0.0)
}

#[target_feature(enable = "neon")]
#[inline]
fn spread(value: f32) -> Sixteen {
    [splat(value); 4]
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn load(values: *const f32) -> Sixteen {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { [vld1q_f32(values), vld1q_f32(values.add(4)), vld1q_f32(values.add(8)), vld1q_f32(values.add(12))] }
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn widen_bf16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    [0, 4, 8, 12].map(|at| load_bf16(unsafe { &*values.add(at).cast() }))
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn widen_f16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    [0, 4, 8, 12].map(|at| load_f16(unsafe { &*values.add(at).cast() }))
}

/// The 32 weights of a group.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn widen_q4(codes: *const u8, [step, least]: &[f32; 2]) -> [Sixteen; 2] {
    let mut weights = [zeros(); 2];
    for at in 0..4 {
        // SAFETY: the caller has 16 bytes there.
        let four = unsafe {
            [
                codes.add(4 * at).read(),
                codes.add(4 * at + 1).read(),
                codes.add(4 * at + 2).read(),
                codes.add(4 * at + 3).read(),
            ]
        };
        let bytes = vreinterpret_u8_u32(vdup_n_u32(u32::from_le_bytes(four)));
        let pairs = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
        let halves = [vandq_u32(pairs, vdupq_n_u32(15)), vshrq_n_u32::<4>(pairs)];
        for (weights, codes) in weights.iter_mut().zip(halves) {
            if let Some(four) = weights.get_mut(at) {
                *four = vfmaq_f32(splat(*least), vcvtq_f32_s32(vreinterpretq_s32_u32(codes)), splat(*step));
            }
        }
    }
    weights
}

/// The 32 weights of a group.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn widen_q8(codes: *const i8, step: f32) -> [Sixteen; 2] {
    [0, 16].map(|at| {
        // SAFETY: the caller has 32 bytes there; no alignment is asked for.
        let codes = unsafe { load_codes(codes.add(at)) };
        let fours = codes.map(|eight| [vmovl_s16(vget_low_s16(eight)), vmovl_s16(vget_high_s16(eight))]);
        let [[first, second], [third, fourth]] = fours;
        [first, second, third, fourth].map(|codes| vmulq_f32(vcvtq_f32_s32(codes), splat(step)))
    })
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn store(values: *mut f32, numbers: Sixteen) {
    for (number, four) in numbers.into_iter().enumerate() {
        // SAFETY: the caller has 16 values there; no alignment is asked for.
        unsafe { vst1q_f32(values.add(4 * number), four) };
    }
}

#[target_feature(enable = "neon")]
#[inline]
fn multiply_add(a: Sixteen, b: Sixteen, c: Sixteen) -> Sixteen {
    let ([a0, a1, a2, a3], [b0, b1, b2, b3], [c0, c1, c2, c3]) = (a, b, c);
    [vfmaq_f32(c0, a0, b0), vfmaq_f32(c1, a1, b1), vfmaq_f32(c2, a2, b2), vfmaq_f32(c3, a3, b3)]
}

/// Adds up each vector: halves onto each other, down to one lane.
#[target_feature(enable = "neon")]
#[inline]
fn sums_of(lanes: [Sixteen; 4]) -> [f32; 4] {
    let [a, b, c, d] = lanes.map(|[first, second, third, fourth]| {
        let four = vaddq_f32(vaddq_f32(first, third), vaddq_f32(second, fourth));
        vadd_f32(vget_low_f32(four), vget_high_f32(four))
    });
    let mut sums = [0.0; 4];
    // SAFETY: 4 values fit there.
    unsafe { vst1q_f32(sums.as_mut_ptr(), vcombine_f32(vpadd_f32(a, b), vpadd_f32(c, d))) };
    sums
}

code_kernels!("neon");

#[target_feature(enable = "neon")]
#[inline]
fn no_sums() -> Ints {
    splat_int(0)
}

#[target_feature(enable = "neon")]
#[inline]
fn no_codes() -> [int16x8_t; 2] {
    [vdupq_n_s16(0); 2]
}

/// In 16 bits each.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_codes(codes: *const i8) -> [int16x8_t; 2] {
    // SAFETY: the caller has 16 codes there; no alignment is asked for.
    let codes = unsafe { vld1q_s8(codes) };
    [vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes))]
}

#[target_feature(enable = "neon")]
#[inline]
unsafe fn load_shorts(values: *const i16) -> [int16x8_t; 2] {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { [vld1q_s16(values), vld1q_s16(values.add(8))] }
}

#[target_feature(enable = "neon")]
#[inline]
fn add_products(mut sums: Ints, a: [int16x8_t; 2], b: [int16x8_t; 2]) -> Ints {
    for (a, b) in a.into_iter().zip(b) {
        sums = vmlal_s16(sums, vget_low_s16(a), vget_low_s16(b));
        sums = vmlal_s16(sums, vget_high_s16(a), vget_high_s16(b));
    }
    sums
}

#[target_feature(enable = "neon")]
#[inline]
fn sum_of_whole(sums: Ints) -> i32 {
    vaddvq_s32(sums)
}
