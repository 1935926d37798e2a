//! AVX2 with F16C and FMA: 8 values at a time.

use std::arch::x86_64::{
    __m256, __m256i, _CMP_GE_OQ, _CMP_NEQ_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1, _mm_add_epi32,
    _mm_cvtsi128_si32, _mm_loadl_epi64, _mm_loadu_si128, _mm_max_epu32, _mm_movelh_ps, _mm_prefetch, _mm_shuffle_epi32,
    _mm_storel_epi64, _mm_storeu_ps, _mm_storeu_si128, _mm_unpacklo_epi32, _mm256_abs_epi32, _mm256_add_epi32,
    _mm256_add_ps, _mm256_and_ps, _mm256_and_si256, _mm256_castps_si256, _mm256_castps256_ps128, _mm256_castsi256_ps,
    _mm256_castsi256_si128, _mm256_cmp_ps, _mm256_cvtepi8_epi16, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_cvtps_ph,
    _mm256_cvttps_epi32, _mm256_extractf128_ps, _mm256_extracti128_si256, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_loadu_si256, _mm256_madd_epi16, _mm256_max_epi32, _mm256_max_epu32, _mm256_min_ps, _mm256_mul_ps,
    _mm256_mullo_epi16, _mm256_packus_epi32, _mm256_permute_ps, _mm256_permute2f128_ps, _mm256_permute4x64_epi64,
    _mm256_permutevar8x32_ps, _mm256_round_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps,
    _mm256_shuffle_epi8, _mm256_shuffle_ps, _mm256_slli_epi32, _mm256_srai_epi32, _mm256_srli_epi32, _mm256_storeu_ps,
    _mm256_sub_epi32, _mm256_xor_si256,
};
use std::ops::Range;

use super::{Aligned, LANES, NEAR_VALUES, PREFETCH_BYTES, VALUES_AHEAD, WIDE_VALUES};
use crate::blocks::groups::{GROUP, GROUP_BYTES, Q4, Q8};
use crate::codec::levels::{BINADE_BELOW, DECADES, FIRSTS, LASTS, LINEAR_STEP, RISES, STARTS, STEPS, THRESHOLDS};
use crate::codec::{Code, DecodeRun, Dtype, EncodeRun, Format, NotFinite, scalar};

type Floats = __m256;
type Ints = __m256i;

kernels!("avx2,f16c", 8);

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn linear_codes(normalized: Floats) -> Ints {
    let whole = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(normalized);
    _mm256_cvtps_epi32(whole) // exact, whatever the thread's rounding mode
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn linear_levels(codes: &[u8; 8]) -> Floats {
    // SAFETY: the reference has the 8 bytes that are read; no alignment is asked for.
    let codes = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) });
    multiply(_mm256_cvtepi32_ps(_mm256_max_epi32(codes, splat_int(-127))), splat(LINEAR_STEP))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn dynamic_codes(normalized: Floats) -> Ints {
    let bits = _mm256_castps_si256(normalized);
    let magnitude = _mm256_castsi256_ps(_mm256_and_si256(bits, splat_int(i32::MAX)));
    let binade = _mm256_srli_epi32::<23>(_mm256_castps_si256(magnitude));
    let binade = _mm256_sub_epi32(_mm256_max_epi32(binade, splat_int(BINADE_BELOW)), splat_int(BINADE_BELOW));
    let reached = _mm256_srli_epi32::<5>(_mm256_mullo_epi16(binade, splat_int(11))); // a third
    let next_too = _mm256_cmp_ps::<_CMP_GE_OQ>(magnitude, of_decade(&THRESHOLDS, reached)); // -1 or 0
    let decade = _mm256_sub_epi32(_mm256_sub_epi32(reached, splat_int(1)), _mm256_castps_si256(next_too));
    let cells = _mm256_add_ps(multiply(magnitude, of_decade(&STEPS, decade)), of_decade(&FIRSTS, decade));
    let p = _mm256_cvttps_epi32(_mm256_min_ps(cells, of_decade(&LASTS, decade)));
    let not_zero = _mm256_cmp_ps::<_CMP_GE_OQ>(magnitude, splat(THRESHOLDS[0]));
    let p = _mm256_and_si256(p, _mm256_castps_si256(not_zero));
    let sign = _mm256_srai_epi32::<31>(bits); // -1 or 0
    let with_sign = _mm256_sub_epi32(_mm256_xor_si256(p, sign), sign);
    _mm256_add_epi32(_mm256_max_epi32(with_sign, splat_int(-127)), splat_int(127))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn dynamic_levels(codes: &[u8; 8]) -> Floats {
    // SAFETY: the reference has the 8 bytes that are read; no alignment is asked for.
    let codes = _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) });
    let from_zero = _mm256_sub_epi32(codes, splat_int(127));
    let p = _mm256_cvtepi32_ps(_mm256_abs_epi32(from_zero));
    let decade = _mm256_sub_epi32(_mm256_srli_epi32::<23>(_mm256_castps_si256(p)), splat_int(127));
    let level = _mm256_add_ps(multiply(of_decade(&RISES, decade), p), of_decade(&STARTS, decade));
    let level = _mm256_and_ps(level, _mm256_cmp_ps::<_CMP_NEQ_OQ>(p, _mm256_setzero_ps()));
    let sign = _mm256_and_si256(from_zero, splat_int(i32::MIN));
    _mm256_castsi256_ps(_mm256_xor_si256(_mm256_castps_si256(level), sign))
}

/// The constant of each lane's decade. The result for a lane outside of 0..8 is not specified.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn of_decade(constants: &[f32; DECADES], decade: Ints) -> Floats {
    // SAFETY: the reference has the 8 floats that are read; no alignment is asked for.
    _mm256_permutevar8x32_ps(unsafe { _mm256_loadu_ps(constants.as_ptr()) }, decade)
}

/// Lane by lane, as whole numbers, the larger of `most` and the magnitude of `values`.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn larger_magnitude(most: Ints, values: Floats) -> Ints {
    _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(values), splat_int(i32::MAX)))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn largest(lanes: Ints) -> u32 {
    let four = _mm_max_epu32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256::<1>(lanes));
    let two = _mm_max_epu32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
    let one = _mm_max_epu32(two, _mm_shuffle_epi32::<0b00_00_00_01>(two));
    _mm_cvtsi128_si32(one).cast_unsigned()
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn splat(value: f32) -> Floats {
    _mm256_set1_ps(value)
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn splat_int(value: i32) -> Ints {
    _mm256_set1_epi32(value)
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn multiply(a: Floats, b: Floats) -> Floats {
    _mm256_mul_ps(a, b)
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn load_f32(values: &[u8; 32]) -> Floats {
    // SAFETY: the reference has the 32 bytes that are read; no alignment is asked for.
    unsafe { _mm256_loadu_ps(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn load_f16(values: &[u8; 16]) -> Floats {
    // SAFETY: the reference has the 16 bytes that are read; no alignment is asked for.
    _mm256_cvtph_ps(unsafe { _mm_loadu_si128(values.as_ptr().cast()) })
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn load_bf16(values: &[u8; 16]) -> Floats {
    // SAFETY: the reference has the 16 bytes that are read; no alignment is asked for.
    let halves = _mm256_cvtepu16_epi32(unsafe { _mm_loadu_si128(values.as_ptr().cast()) });
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn store_f32(numbers: Floats, values: &mut [u8; 32]) {
    // SAFETY: the reference has the 32 bytes that are written; no alignment is asked for.
    unsafe { _mm256_storeu_ps(values.as_mut_ptr().cast(), numbers) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn store_f16(numbers: Floats, values: &mut [u8; 16]) {
    let halves = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(numbers);
    // SAFETY: the reference has the 16 bytes that are written; no alignment is asked for.
    unsafe { _mm_storeu_si128(values.as_mut_ptr().cast(), halves) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn store_bf16(numbers: Floats, values: &mut [u8; 16]) {
    let bits = _mm256_castps_si256(numbers);
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), splat_int(1));
    let half_up = _mm256_add_epi32(_mm256_add_epi32(bits, splat_int(0x7FFF)), odd);
    let halves = _mm256_srli_epi32::<16>(half_up);
    let packed = _mm256_permute4x64_epi64::<0b00_00_10_00>(_mm256_packus_epi32(halves, halves));
    // SAFETY: the reference has the 16 bytes that are written; no alignment is asked for.
    unsafe { _mm_storeu_si128(values.as_mut_ptr().cast(), _mm256_castsi256_si128(packed)) }
}

/// Calls for the cache line at an address, which need not be anybody's.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn prefetch(address: *const u8) {
    // SAFETY: a hint, which never faults whatever the address.
    #[allow(unused_unsafe, reason = "it was unsafe in Rust 1.89")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
}

/// The lowest byte of each lane.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn store_codes(lanes: Ints, codes: &mut [u8; 8]) {
    let packed = _mm256_shuffle_epi8(lanes, splat_int(0x0C08_0400)); // bytes 0, 4, 8, 12 of each half
    let both = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256::<1>(packed));
    // SAFETY: the reference has the 8 bytes that are written; no alignment is asked for.
    unsafe { _mm_storel_epi64(codes.as_mut_ptr().cast(), both) }
}

type Sixteen = [Floats; 2];

row_kernels!("avx2,fma,f16c", 2 x 2, 2 x 2, straight: 2, usize::MAX);

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn zeros() -> Sixteen {
    spread(0.0)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn spread(value: f32) -> Sixteen {
    [splat(value); 2]
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load(values: *const f32) -> Sixteen {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { [_mm256_loadu_ps(values), _mm256_loadu_ps(values.add(8))] }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn widen_bf16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    unsafe { [load_bf16(&*values.cast()), load_bf16(&*values.add(8).cast())] }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn widen_f16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    unsafe { [load_f16(&*values.cast()), load_f16(&*values.add(8).cast())] }
}

/// The 32 weights of a group.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn widen_q4(codes: *const u8, [step, least]: &[f32; 2]) -> [Sixteen; 2] {
    let pairs = [0, 8].map(|at| {
        // SAFETY: the caller has 16 bytes there; no alignment is asked for.
        _mm256_cvtepu8_epi32(unsafe { _mm_loadl_epi64(codes.add(at).cast()) })
    });
    let low = pairs.map(|pairs| _mm256_cvtepi32_ps(_mm256_and_si256(pairs, splat_int(15))));
    let high = pairs.map(|pairs| _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(pairs)));
    [low, high].map(|codes| multiply_add(codes, spread(*step), spread(*least)))
}

/// The 32 weights of a group.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn widen_q8(codes: *const i8, step: f32) -> [Sixteen; 2] {
    [0, 16].map(|at| {
        [at, at + 8].map(|at| {
            // SAFETY: the caller has 32 bytes there; no alignment is asked for.
            let codes = _mm256_cvtepi8_epi32(unsafe { _mm_loadl_epi64(codes.add(at).cast()) });
            multiply(_mm256_cvtepi32_ps(codes), splat(step))
        })
    })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn store(values: *mut f32, [low, high]: Sixteen) {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe {
        _mm256_storeu_ps(values, low);
        _mm256_storeu_ps(values.add(8), high);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn multiply_add([a, a_high]: Sixteen, [b, b_high]: Sixteen, [c, c_high]: Sixteen) -> Sixteen {
    [_mm256_fmadd_ps(a, b, c), _mm256_fmadd_ps(a_high, b_high, c_high)]
}

/// Adds up each vector: halves onto each other, down to one lane.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sums_of(lanes: [Sixteen; 4]) -> [f32; 4] {
    let [a, b, c, d] = lanes.map(|[low, high]| _mm256_add_ps(low, high));
    let [ac, bd] = [[a, c], [b, d]].map(|[a, c]| {
        let low = _mm256_permute2f128_ps::<0x20>(a, c);
        _mm256_add_ps(low, _mm256_permute2f128_ps::<0x31>(a, c)) // four of the one, four of the other
    });
    let low = _mm256_shuffle_ps::<0b01_00_01_00>(ac, bd);
    let twos = _mm256_add_ps(low, _mm256_shuffle_ps::<0b11_10_11_10>(ac, bd));
    let ones = _mm256_add_ps(twos, _mm256_permute_ps::<0b10_11_00_01>(twos));
    let of_each = _mm256_shuffle_ps::<0b00_00_10_00>(ones, ones);
    let [ab, cd] = [_mm256_castps256_ps128(of_each), _mm256_extractf128_ps::<1>(of_each)];
    let mut sums = [0.0; 4];
    // SAFETY: 4 values fit there; no alignment is asked for.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), _mm_movelh_ps(ab, cd)) };
    sums
}

code_kernels!("avx2,fma,f16c");

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn no_sums() -> Ints {
    splat_int(0)
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn no_codes() -> Ints {
    splat_int(0)
}

/// In 16 bits each.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load_codes(codes: *const i8) -> Ints {
    // SAFETY: the caller has 16 codes there; no alignment is asked for.
    _mm256_cvtepi8_epi16(unsafe { _mm_loadu_si128(codes.cast()) })
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
unsafe fn load_shorts(values: *const i16) -> Ints {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { _mm256_loadu_si256(values.cast()) }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add_products(sums: Ints, a: Ints, b: Ints) -> Ints {
    _mm256_add_epi32(sums, _mm256_madd_epi16(a, b))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_of_whole(sums: Ints) -> i32 {
    let four = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256::<1>(sums));
    let two = _mm_add_epi32(four, _mm_shuffle_epi32::<0b00_00_11_10>(four));
    _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32::<0b00_00_00_01>(two)))
}
