//! AVX-512F: 16 values at a time.

use std::arch::x86_64::{
    __m512, __m512i, _CMP_GE_OQ, _MM_FROUND_NO_EXC, _MM_FROUND_TO_NEAREST_INT, _MM_HINT_T1, _mm_loadu_si128,
    _mm_prefetch, _mm_storeu_ps, _mm_storeu_si128, _mm256_loadu_si256, _mm256_storeu_si256, _mm512_abs_epi32,
    _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_andnot_si512, _mm512_castps_si512,
    _mm512_castps512_ps128, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvt_roundps_epi32, _mm512_cvtepi8_epi32,
    _mm512_cvtepi32_epi8, _mm512_cvtepi32_epi16, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_cvtps_ph, _mm512_cvttps_epi32, _mm512_fmadd_ps, _mm512_loadu_epi32, _mm512_loadu_ps,
    _mm512_mask_add_epi32, _mm512_maskz_compress_ps, _mm512_max_epi32, _mm512_max_epu32, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_permute_ps, _mm512_permutex2var_epi32, _mm512_permutexvar_ps, _mm512_reduce_max_epu32,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_setr_ps, _mm512_setzero_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps, _mm512_sub_epi32, _mm512_ternarylogic_epi32,
};
use std::ops::Range;

pub(super) use super::avx2::code_dots; // every such processor has AVX2 too
use super::{Aligned, LANES, NEAR_VALUES, PREFETCH_BYTES, VALUES_AHEAD, WIDE_VALUES};
use crate::blocks::groups::{GROUP, GROUP_BYTES, Q4, Q8};
use crate::codec::levels::{BINADE_BELOW, DECADES, FIRSTS, LASTS, LINEAR_STEP, RISES, STARTS, STEPS, THRESHOLDS};
use crate::codec::{Code, DecodeRun, Dtype, EncodeRun, Format, NotFinite, scalar};

type Floats = __m512;
type Ints = __m512i;

/// For the lowest 5 bits of an exponent, from [`BINADE_BELOW`] on: the decade before the one that may begin there, and the
/// bits of its threshold.
const DECADE_BELOW: [i32; 32] = by_exponent(false);
const NEXT_THRESHOLD: [i32; 32] = by_exponent(true);

#[expect(clippy::cast_sign_loss, reason = "from 0 to 127")]
#[expect(clippy::indexing_slicing, reason = "at compile time: a wrong index does not build")]
const fn by_exponent(threshold: bool) -> [i32; 32] {
    let mut entries = [0; 32];
    let mut exponent = BINADE_BELOW;
    while exponent <= 127 {
        let reached = (exponent - BINADE_BELOW) / 3;
        entries[exponent as usize % 32] =
            if threshold { THRESHOLDS[reached as usize].to_bits().cast_signed() } else { reached - 1 };
        exponent += 1;
    }
    entries
}

/// The truth table of `a ^ (b & c)`.
const XOR_OF_AND: i32 = 0x78;

kernels!("avx512f", 16);

#[target_feature(enable = "avx512f")]
#[inline]
fn linear_codes(normalized: Floats) -> Ints {
    _mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(normalized)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn linear_levels(codes: &[u8; 16]) -> Floats {
    // SAFETY: the reference has the 16 bytes that are read; no alignment is asked for.
    let codes = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
    multiply(_mm512_cvtepi32_ps(_mm512_max_epi32(codes, splat_int(-127))), splat(LINEAR_STEP))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn dynamic_codes(normalized: Floats) -> Ints {
    let sign = splat_int(i32::MIN);
    let magnitude = _mm512_castsi512_ps(_mm512_andnot_si512(sign, _mm512_castps_si512(normalized)));
    let at_least = _mm512_max_ps(magnitude, splat(f32::from_bits(BINADE_BELOW.cast_unsigned() << 23)));
    let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(at_least)); // of 32 entries its lowest 5 bits choose
    let next = _mm512_castsi512_ps(of_32(&NEXT_THRESHOLD, exponent));
    let reached = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(magnitude, next);
    let decade = of_32(&DECADE_BELOW, exponent);
    let decade = _mm512_mask_add_epi32(decade, reached, decade, splat_int(1));
    let cells = _mm512_add_ps(multiply(magnitude, of_decade(&STEPS, decade)), of_decade(&FIRSTS, decade));
    let p = _mm512_castps_si512(_mm512_min_ps(cells, of_decade(&LASTS, decade)));
    let p_with_sign = _mm512_ternarylogic_epi32::<XOR_OF_AND>(p, _mm512_castps_si512(normalized), sign);
    let from_zero = _mm512_cvttps_epi32(_mm512_castsi512_ps(p_with_sign));
    _mm512_add_epi32(_mm512_max_epi32(from_zero, splat_int(-127)), splat_int(127))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn dynamic_levels(codes: &[u8; 16]) -> Floats {
    // SAFETY: the reference has the 16 bytes that are read; no alignment is asked for.
    let codes = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(codes.as_ptr().cast()) });
    let from_zero = _mm512_sub_epi32(codes, splat_int(127));
    let p = _mm512_cvtepi32_ps(_mm512_abs_epi32(from_zero));
    let p = _mm512_max_ps(p, splat(0.5)); // so that 0 has a decade of its own, with a rise and a start of 0
    let exponent = _mm512_srli_epi32::<23>(_mm512_castps_si512(p)); // of 16 constants its lowest 4 bits choose
    let level = _mm512_add_ps(multiply(of_exponent(&RISES, exponent), p), of_exponent(&STARTS, exponent));
    let sign = splat_int(i32::MIN);
    let with_sign = _mm512_ternarylogic_epi32::<XOR_OF_AND>(_mm512_castps_si512(level), from_zero, sign);
    _mm512_castsi512_ps(with_sign)
}

/// The entry of each lane's index modulo 32.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_32(table: &[i32; 32], index: Ints) -> Ints {
    let (low, high) = table.split_at(16);
    // SAFETY: both halves have the 16 numbers that are read; no alignment is asked for.
    unsafe {
        let (low, high) = (_mm512_loadu_epi32(low.as_ptr()), _mm512_loadu_epi32(high.as_ptr()));
        _mm512_permutex2var_epi32(low, index, high)
    }
}

/// The constant of each lane's decade, 0..8; 0 for decade -1.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_decade(constants: &[f32; DECADES], decade: Ints) -> Floats {
    let [c0, c1, c2, c3, c4, c5, c6, c7] = *constants;
    _mm512_permutexvar_ps(
        decade,
        _mm512_setr_ps(c0, c1, c2, c3, c4, c5, c6, c7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )
}

/// The constant of the decade in which numbers of a float's exponent are; 0 for one exponent below.
#[target_feature(enable = "avx512f")]
#[inline]
fn of_exponent(constants: &[f32; DECADES], exponent: Ints) -> Floats {
    let [c0, c1, c2, c3, c4, c5, c6, c7] = *constants;
    let rotated = _mm512_setr_ps(c1, c2, c3, c4, c5, c6, c7, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, c0);
    _mm512_permutexvar_ps(exponent, rotated)
}

/// Lane by lane, as whole numbers, the larger of `most` and the magnitude of `values`.
#[target_feature(enable = "avx512f")]
#[inline]
fn larger_magnitude(most: Ints, values: Floats) -> Ints {
    _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(values), splat_int(i32::MAX)))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn largest(lanes: Ints) -> u32 {
    _mm512_reduce_max_epu32(lanes)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn splat(value: f32) -> Floats {
    _mm512_set1_ps(value)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn splat_int(value: i32) -> Ints {
    _mm512_set1_epi32(value)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn multiply(a: Floats, b: Floats) -> Floats {
    _mm512_mul_ps(a, b)
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_f32(values: &[u8; 64]) -> Floats {
    // SAFETY: the reference has the 64 bytes that are read; no alignment is asked for.
    unsafe { _mm512_loadu_ps(values.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_f16(values: &[u8; 32]) -> Floats {
    // SAFETY: the reference has the 32 bytes that are read; no alignment is asked for.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(values.as_ptr().cast()) })
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_bf16(values: &[u8; 32]) -> Floats {
    // SAFETY: the reference has the 32 bytes that are read; no alignment is asked for.
    let halves = _mm512_cvtepu16_epi32(unsafe { _mm256_loadu_si256(values.as_ptr().cast()) });
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_f32(numbers: Floats, values: &mut [u8; 64]) {
    // SAFETY: the reference has the 64 bytes that are written; no alignment is asked for.
    unsafe { _mm512_storeu_ps(values.as_mut_ptr().cast(), numbers) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_f16(numbers: Floats, values: &mut [u8; 32]) {
    let halves = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(numbers);
    // SAFETY: the reference has the 32 bytes that are written; no alignment is asked for.
    unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), halves) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_bf16(numbers: Floats, values: &mut [u8; 32]) {
    let bits = _mm512_castps_si512(numbers);
    let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), splat_int(1));
    let half_up = _mm512_add_epi32(_mm512_add_epi32(bits, splat_int(0x7FFF)), odd);
    let halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(half_up));
    // SAFETY: the reference has the 32 bytes that are written; no alignment is asked for.
    unsafe { _mm256_storeu_si256(values.as_mut_ptr().cast(), halves) }
}

/// Calls for the cache line at an address, which need not be anybody's.
#[target_feature(enable = "avx512f")]
#[inline]
fn prefetch(address: *const u8) {
    // SAFETY: a hint, which never faults whatever the address.
    #[allow(unused_unsafe, reason = "it was unsafe in Rust 1.89")]
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
}

/// The lowest byte of each lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn store_codes(lanes: Ints, codes: &mut [u8; 16]) {
    // SAFETY: the reference has the 16 bytes that are written; no alignment is asked for.
    unsafe { _mm_storeu_si128(codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(lanes)) }
}

type Sixteen = __m512;

row_kernels!("avx512f", 4 x 4, 8 x 3, straight: 32, 32);

#[target_feature(enable = "avx512f")]
#[inline]
fn zeros() -> Sixteen {
    _mm512_setzero_ps()
}

#[target_feature(enable = "avx512f")]
#[inline]
fn spread(value: f32) -> Sixteen {
    splat(value)
}

#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load(values: *const f32) -> Sixteen {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { _mm512_loadu_ps(values) }
}

#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn widen_bf16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    load_bf16(unsafe { &*values.cast() })
}

#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn widen_f16(values: *const u16) -> Sixteen {
    // SAFETY: the caller has 16 values there.
    load_f16(unsafe { &*values.cast() })
}

/// The 32 weights of a group.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn widen_q4(codes: *const u8, [step, least]: &[f32; 2]) -> [Sixteen; 2] {
    // SAFETY: the caller has 16 bytes there; no alignment is asked for.
    let pairs = _mm512_cvtepu8_epi32(unsafe { _mm_loadu_si128(codes.cast()) });
    let codes = _mm512_setr_ps(0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0);
    let levels = multiply_add(codes, splat(*step), splat(*least)); // of 16 a number's lowest 4 bits choose
    [_mm512_permutexvar_ps(pairs, levels), _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(pairs), levels)]
}

/// The 32 weights of a group.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn widen_q8(codes: *const i8, step: f32) -> [Sixteen; 2] {
    [0, 16].map(|at| {
        // SAFETY: the caller has 32 bytes there; no alignment is asked for.
        let codes = _mm512_cvtepi8_epi32(unsafe { _mm_loadu_si128(codes.add(at).cast()) });
        multiply(_mm512_cvtepi32_ps(codes), splat(step))
    })
}

#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn store(values: *mut f32, numbers: Sixteen) {
    // SAFETY: the caller has 16 values there; no alignment is asked for.
    unsafe { _mm512_storeu_ps(values, numbers) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn multiply_add(a: Sixteen, b: Sixteen, c: Sixteen) -> Sixteen {
    _mm512_fmadd_ps(a, b, c)
}

/// Adds up each vector: halves onto each other, down to one lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn sums_of([a, b, c, d]: [Sixteen; 4]) -> [f32; 4] {
    let [ab, cd] = [[a, b], [c, d]].map(|[a, b]| {
        let low = _mm512_shuffle_f32x4::<0b01_00_01_00>(a, b);
        _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_10_11_10>(a, b))
    });
    let low = _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd);
    let fours = _mm512_add_ps(low, _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd)); // of each, one after the other
    let twos = _mm512_add_ps(fours, _mm512_permute_ps::<0b00_00_11_10>(fours));
    let ones = _mm512_add_ps(twos, _mm512_permute_ps::<0b00_00_00_01>(twos));
    let of_each = _mm512_maskz_compress_ps(0b0001_0001_0001_0001, ones);
    let mut sums = [0.0; 4];
    // SAFETY: 4 values fit there; no alignment is asked for.
    unsafe { _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(of_each)) };
    sums
}
