//! The codec against its definitions written out slowly, and every instruction set of this machine against the scalar
//! specification, bit by bit.

use llmnode_transport::codec::levels::{DYNAMIC_MAGNITUDES, THRESHOLDS};
use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use llmnode_transport::codec::scalar::{dynamic_code, dynamic_level, linear_code, linear_level};
use llmnode_transport::codec::{
    Code, CodecError, Dtype, Format, Isa, SCALE_BYTES, decode, decode_on, encode, encode_on,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const CODES: [Code; 2] = [Code::Linear, Code::Dynamic];
const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
const BLOCKS: [usize; 7] = [64, 128, 256, 512, 1024, 2048, 4096];

/// Several small blocks, a short one, and an end that fills no vector.
const MAX_VALUES: usize = 700;

/// The published map in double precision, in rising order: decades of 1, 2, 4 ... 64 cells of [0.1, 1], their middles,
/// their negatives, 0 and 1.
fn published_map() -> Vec<f64> {
    let mut levels = vec![0.0, 1.0];
    for decade in 0..7 {
        let cells = 2_i32.pow(decade);
        let unit = 10_f64.powi(i32::try_from(decade).unwrap() - 6);
        for cell in 0..cells {
            let low = 0.1 + 0.9 * f64::from(cell) / f64::from(cells);
            let high = 0.1 + 0.9 * f64::from(cell + 1) / f64::from(cells);
            levels.extend([unit * f64::midpoint(low, high), -unit * f64::midpoint(low, high)]);
        }
    }
    levels.sort_by(f64::total_cmp);
    levels
}

fn number(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
        Dtype::F16 => f16_to_f32(u16::from_ne_bytes(bytes.try_into().unwrap())),
        Dtype::Bf16 => bf16_to_f32(u16::from_ne_bytes(bytes.try_into().unwrap())),
    }
}

fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(dtype.bytes()).map(|value| number(dtype, value)).collect()
}

fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let bytes = |value: &f32| match dtype {
        Dtype::F32 => value.to_ne_bytes().to_vec(),
        Dtype::F16 => f32_to_f16(*value).to_ne_bytes().to_vec(),
        Dtype::Bf16 => f32_to_bf16(*value).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

fn encoded(isa: Isa, format: Format, values: &[u8], threads: usize) -> Result<Vec<u8>, CodecError> {
    let count = values.len() / format.dtype().bytes();
    let mut out = vec![0xA5; format.encoded_bytes(count).unwrap()];
    encode_on(isa, format, values, &mut out, threads)?;
    Ok(out)
}

fn decoded(isa: Isa, format: Format, data: &[u8], values: usize, threads: usize) -> Result<Vec<u8>, CodecError> {
    let mut out = vec![0xA5; format.decoded_bytes(values).unwrap()];
    decode_on(isa, format, data, &mut out, threads)?;
    Ok(out)
}

fn round_trip(format: Format, values: &[f32]) -> Vec<f32> {
    let data = encoded(Isa::best(), format, &bytes_of(format.dtype(), values), 1).unwrap();
    numbers(format.dtype(), &decoded(Isa::best(), format, &data, values.len(), 1).unwrap())
}

fn every_format() -> impl Iterator<Item = Format> {
    let pairs = DTYPES.into_iter().flat_map(|dtype| CODES.map(|code| (dtype, code)));
    pairs.flat_map(|(dtype, code)| BLOCKS.map(|block| Format::new(dtype, code, block).unwrap()))
}

fn any_format() -> impl Strategy<Value = Format> {
    (select(&DTYPES), select(&CODES), select(&BLOCKS[..4]))
        .prop_map(|(dtype, code, block)| Format::new(dtype, code, block).unwrap())
}

/// Bits of every kind: noise, and one exponent for all, so that levels and thresholds of a block are met.
fn any_bits() -> impl Strategy<Value = Vec<u32>> {
    let special = select(vec![
        0,
        0x8000_0000,
        1,
        0x8000_0001,
        0x007F_FFFF,
        0x0080_0000,
        0x7F7F_FFFF,
        0xFF7F_FFFF,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0x7FA0_0000,
        0x3F80_0000,
        0xBF80_0000,
        0x477F_EFFF,
        0x477F_F000,
        0x3880_0000,
        0x387F_FFFF,
        0x3300_0000,
    ]);
    let noise = any::<u32>();
    let like_one = (0_u32..0x0080_0000, any::<bool>())
        .prop_map(|(low, sign)| 0x3F00_0000 | low | if sign { 0x8000_0000 } else { 0 });
    let tiny = 0_u32..0x0100_0000;
    let decades =
        (0x3380_0000_u32..0x3F80_0001, any::<bool>()).prop_map(|(low, sign)| low | if sign { 0x8000_0000 } else { 0 });
    prop_oneof![
        1 => vec(noise, 0..MAX_VALUES),
        2 => vec(like_one, 0..MAX_VALUES),
        2 => vec(tiny, 0..MAX_VALUES),
        3 => vec(decades, 0..MAX_VALUES),
        1 => vec(special, 0..8),
    ]
}

/// The same bits as values of the element type: of a half, the upper 16.
fn as_bytes(dtype: Dtype, bits: &[u32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bits.iter().flat_map(|bits| bits.to_ne_bytes()).collect(),
        Dtype::Bf16 => bits.iter().flat_map(|bits| u16::try_from(bits >> 16).unwrap().to_ne_bytes()).collect(),
        Dtype::F16 => bits.iter().flat_map(|bits| f32_to_f16(f32::from_bits(*bits)).to_ne_bytes()).collect(),
    }
}

fn finite_values(most: f32) -> impl Strategy<Value = Vec<f32>> {
    let any_size = (-44_i32..39, vec(-1.0_f32..1.0, 0..MAX_VALUES))
        .prop_map(|(exponent, values)| values.iter().map(|v| v * 10_f32.powi(exponent)).collect::<Vec<f32>>());
    any_size.prop_map(move |values| values.iter().map(|value| value.clamp(-most, most)).collect())
}

#[test]
fn this_machine_says_what_it_can() {
    let available: Vec<Isa> = Isa::available().collect();
    assert_eq!(available.first(), Some(&Isa::best()));
    assert_eq!(available.last(), Some(&Isa::SCALAR));
    println!("{available:?}");
}

#[test]
fn dynamic_levels_are_the_published_map() {
    let published = published_map();
    assert_eq!(published.len(), 256);
    for (code, expected) in (0..=255).zip(&published) {
        let level = f64::from(dynamic_level(code));
        assert!((level - expected).abs() <= 6e-7 * expected.abs(), "code {code}: {level}, not {expected}");
    }
    assert_eq!(dynamic_level(127).to_bits(), 0);
    assert_eq!(dynamic_level(255).to_bits(), 1.0_f32.to_bits());
    assert!(DYNAMIC_MAGNITUDES.is_sorted_by(|low, high| low < high));
}

#[test]
fn linear_levels_are_127ths() {
    for code in -127..=127_i8 {
        let level = linear_level(code.cast_unsigned());
        assert!((f64::from(level) - f64::from(code) / 127.0).abs() <= 1e-7);
        assert_eq!(linear_code(f32::from(code)), code.cast_unsigned());
    }
    assert_eq!(linear_level(127).to_bits(), 1.0_f32.to_bits());
    assert_eq!(linear_level(128).to_bits(), (-1.0_f32).to_bits(), "-128 is read as -127");
}

#[test]
fn linear_codes_round_half_to_even() {
    for (value, code) in [(0.5, 0_i8), (1.5, 2), (2.5, 2), (-0.5, 0), (-1.5, -2), (126.5, 126), (127.000_01, 127)] {
        assert_eq!(linear_code(value), code.cast_unsigned(), "{value}");
    }
}

#[test]
fn each_dynamic_level_has_its_own_code() {
    for code in 0..=255 {
        assert_eq!(dynamic_code(dynamic_level(code)), code);
    }
}

#[test]
fn dynamic_codes_are_the_nearest_level() {
    let map = published_map();
    let nearest = |value: f64| map.iter().map(|level| (level - value).abs()).fold(f64::INFINITY, f64::min);
    for bits in (0..=1.0_f32.to_bits()).step_by(9973) {
        for value in [f32::from_bits(bits), -f32::from_bits(bits)] {
            let exact = f64::from(value);
            let distance = (f64::from(dynamic_level(dynamic_code(value))) - exact).abs();
            assert!(distance <= nearest(exact) + 1.2e-6 * exact.abs(), "{value}: off by {distance}");
        }
    }
}

#[test]
fn halves_are_read_and_written_as_ieee_says() {
    assert_eq!(f16_to_f32(0x3C00).to_bits(), 1.0_f32.to_bits());
    assert_eq!(f16_to_f32(0x7BFF).to_bits(), 65504.0_f32.to_bits());
    assert_eq!(f16_to_f32(0x0001).to_bits(), 2.0_f32.powi(-24).to_bits());
    assert!(f16_to_f32(0xFC00).is_infinite() && f16_to_f32(0xFC00) < 0.0);
    assert!(f16_to_f32(0x7E00).is_nan() && f16_to_f32(0x7C01).is_nan());
    for half in 0..=0xFFFF {
        let value = f16_to_f32(half);
        if !value.is_nan() {
            assert_eq!(f32_to_f16(value), half);
        }
        if half & 0x7C00 != 0x7C00 {
            let value = f64::from(value);
            let (exponent, mantissa) = (i32::from(half >> 10 & 31), f64::from(half & 0x3FF));
            let magnitude = if exponent == 0 { mantissa } else { (1024.0 + mantissa) * 2_f64.powi(exponent - 1) };
            assert!((magnitude * 2_f64.powi(-24) - value.abs()).abs() == 0.0, "{half:#x}");
        }
    }
}

#[test]
fn halves_round_to_the_nearest_and_ties_to_even() {
    for half in 0..0x7BFF_u16 {
        let (low, high) = (f16_to_f32(half), f16_to_f32(half + 1));
        let middle = f32::midpoint(low, high); // exact: two more bits are there
        assert_eq!(f32_to_f16(middle), half + (half & 1), "tie after {half:#x}");
        assert_eq!(f32_to_f16(middle.next_down()), half);
        assert_eq!(f32_to_f16(-middle.next_up()), (half + 1) | 0x8000);
    }
    for upper in (0..0x7F7F_u16).step_by(7) {
        let (low, high) = (bf16_to_f32(upper), bf16_to_f32(upper + 1));
        let middle = f32::from_bits(u32::midpoint(low.to_bits(), high.to_bits()));
        assert_eq!(f32_to_bf16(middle), upper + (upper & 1), "tie after {upper:#x}");
        assert_eq!(f32_to_bf16(middle.next_down()), upper);
        assert_eq!(f32_to_bf16(middle.next_up()), upper + 1);
    }
}

#[test]
fn every_half_is_taken_alike_by_all_instruction_sets() {
    for dtype in [Dtype::F16, Dtype::Bf16] {
        for code in CODES {
            let format = Format::new(dtype, code, 64).unwrap();
            for high in 0..=0x3FF_u16 {
                // 64 neighbours make a block, so that their differences show.
                let values: Vec<u8> = (0..64).flat_map(|low| (high << 6 | low).to_ne_bytes()).collect();
                let expected = encoded(Isa::SCALAR, format, &values, 1);
                for isa in Isa::available() {
                    assert_eq!(encoded(isa, format, &values, 1), expected, "{isa:?} {format:?} {high:#x}");
                }
            }
        }
    }
}

#[test]
fn every_code_is_read_alike_at_every_scale() {
    let codes: Vec<u8> = (0..=255).collect();
    for bits in (0..0x7F80_0000_u32).step_by(0x0013_5791) {
        for format in every_format().filter(|format| format.block() == 256) {
            let data = [f32::from_bits(bits).to_le_bytes().as_slice(), &codes].concat();
            let expected = decoded(Isa::SCALAR, format, &data, 256, 1);
            for isa in Isa::available() {
                assert_eq!(decoded(isa, format, &data, 256, 1), expected, "{isa:?} {format:?} {bits:#x}");
            }
        }
    }
}

#[test]
fn thresholds_are_met_alike_by_all_instruction_sets() {
    let format = Format::new(Dtype::F32, Code::Dynamic, 4096).unwrap();
    let mut values = vec![1.0]; // the scale, so that the others are normalized already
    for around in THRESHOLDS.into_iter().chain((-40..=0).map(|exponent| 2_f32.powi(exponent))) {
        let bits = around.to_bits();
        values.extend((bits - 20..bits + 20).map(f32::from_bits).filter(|value| *value <= 1.0));
    }
    values.extend(values.clone().iter().map(|value| -value));
    let expected = encoded(Isa::SCALAR, format, &bytes_of(Dtype::F32, &values), 1);
    for isa in Isa::available() {
        assert_eq!(encoded(isa, format, &bytes_of(Dtype::F32, &values), 1), expected, "{isa:?}");
    }
}

#[test]
fn the_bytes_are_scales_and_then_codes() {
    let format = Format::new(Dtype::F32, Code::Linear, 64).unwrap();
    let mut values = vec![0.0; 65];
    (values[0], values[1], values[64]) = (127.0, -63.0, -2.0);
    let data = encoded(Isa::best(), format, &bytes_of(Dtype::F32, &values), 1).unwrap();
    assert_eq!(data.len(), 2 * SCALE_BYTES + 65);
    assert_eq!(data[..8], [0, 0, 0xFE, 0x42, 0, 0, 0, 0x40]); // 127.0, 2.0
    assert_eq!(data[8..11], [127, 193, 0]);
    assert_eq!(data[72], 129); // -127
    assert_eq!(round_trip(format, &values), values);
}

#[test]
fn nothing_is_encoded_in_nothing() {
    for format in every_format() {
        assert_eq!(format.encoded_bytes(0), Some(0));
        assert_eq!(encoded(Isa::best(), format, &[], 4), Ok(vec![]));
        assert_eq!(decoded(Isa::best(), format, &[], 0, 4), Ok(vec![]));
    }
}

#[test]
fn the_encoded_length_is_a_byte_a_value_and_four_a_block() {
    let format = Format::new(Dtype::F32, Code::Linear, 256).unwrap();
    for (values, bytes) in [(1, 5), (255, 259), (256, 260), (257, 265), (1 << 20, (1 << 20) + (4 << 12))] {
        assert_eq!(format.encoded_bytes(values), Some(bytes));
    }
    assert_eq!(format.encoded_bytes(usize::MAX), None);
    assert_eq!(format.decoded_bytes(usize::MAX), None);
}

#[test]
fn a_block_of_zeros_comes_back_as_zeros() {
    for format in every_format() {
        for zero in [0.0, -0.0] {
            assert!(round_trip(format, &[zero; 100]).iter().all(|value| value.to_bits() == 0), "{format:?}");
        }
    }
}

#[test]
fn the_smallest_and_the_largest_numbers_survive() {
    for format in every_format() {
        let smallest = match format.dtype() {
            Dtype::F32 => f32::from_bits(1),
            Dtype::F16 => f16_to_f32(1),
            Dtype::Bf16 => bf16_to_f32(1),
        };
        for extreme in [smallest, format.dtype().max()] {
            let back = round_trip(format, &[extreme, 0.0, extreme]);
            assert_eq!(back, [extreme, 0.0, extreme], "{format:?}");
            let least = round_trip(format, &[-extreme, extreme])[0];
            assert!(least <= -0.99 * extreme && least.is_finite(), "{format:?}: {least}");
        }
    }
}

#[test]
fn only_powers_of_two_in_range_are_block_sizes() {
    for block in [0, 1, 32, 63, 65, 96, 4095, 8192, usize::MAX] {
        assert_eq!(Format::new(Dtype::F32, Code::Linear, block), Err(CodecError::BlockSize { block }));
    }
}

#[test]
fn the_first_value_that_is_not_finite_is_named() {
    for format in every_format() {
        for culprit in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for index in [0, 63, 64, 150, 4999] {
                let mut values = vec![1.0; 5000];
                values[index] = culprit;
                values[4999] = culprit;
                let bytes: Vec<u8> = match (format.dtype(), culprit.is_nan()) {
                    (Dtype::F16, true) => values
                        .iter()
                        .flat_map(|v| (if v.is_nan() { 0x7C01 } else { f32_to_f16(*v) }).to_ne_bytes())
                        .collect(),
                    (dtype, _) => bytes_of(dtype, &values),
                };
                for isa in Isa::available() {
                    assert_eq!(encoded(isa, format, &bytes, 1), Err(CodecError::NotFinite { index }), "{isa:?}");
                }
            }
        }
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let format = Format::new(Dtype::F16, Code::Dynamic, 64).unwrap();
    let mut out = [0; 1000];
    assert_eq!(encode(format, &[0; 5], &mut out[..7], 1), Err(CodecError::PartialValue { len_bytes: 5 }));
    assert_eq!(decode(format, &[0; 7], &mut out[..5], 1), Err(CodecError::PartialValue { len_bytes: 5 }));
    for found in (0..200).filter(|found| *found != 108) {
        let expected = Err(CodecError::EncodedLength { found, values: 100 });
        assert_eq!(encode(format, &[0; 200], &mut out[..found], 1), expected);
        assert_eq!(decode(format, &vec![0; found], &mut out[..200], 1), expected);
    }
}

#[test]
fn a_scale_that_no_encoder_writes_is_refused() {
    for (dtype, most) in [(Dtype::F32, f32::MAX), (Dtype::F16, 65504.0), (Dtype::Bf16, Dtype::Bf16.max())] {
        for code in CODES {
            let format = Format::new(dtype, code, 64).unwrap();
            for scale in [-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, most.next_up(), -f32::from_bits(1)] {
                let data = [[0; 4].as_slice(), &scale.to_le_bytes(), &[0; 100]].concat();
                let error = decoded(Isa::best(), format, &data, 100, 1).unwrap_err();
                assert!(matches!(error, CodecError::BadScale { block: 1, .. }), "{scale}: {error}");
            }
            let most_at_once = [most.to_le_bytes().as_slice(), &(0..64).collect::<Vec<u8>>()].concat();
            let values = numbers(dtype, &decoded(Isa::best(), format, &most_at_once, 64, 1).unwrap());
            assert!(values.iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn threads_change_nothing() {
    const VALUES: usize = 3_000_001; // three threads' worth, and an odd end
    let mut state = 1_u32;
    let values: Vec<f32> = (0..VALUES)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(0x3F80_0000 | state >> 9) - 1.5
        })
        .collect();
    for dtype in DTYPES {
        for code in CODES {
            let format = Format::new(dtype, code, 256).unwrap();
            let mut bytes = bytes_of(dtype, &values);
            let data = encoded(Isa::best(), format, &bytes, 1).unwrap();
            let back = decoded(Isa::best(), format, &data, VALUES, 1).unwrap();
            for threads in [0, 2, 3, 5, usize::MAX] {
                assert_eq!(encoded(Isa::best(), format, &bytes, threads).as_ref(), Ok(&data));
                assert_eq!(decoded(Isa::best(), format, &data, VALUES, threads).as_ref(), Ok(&back));
            }
            for index in [VALUES - 1, VALUES / 2] {
                let infinite = if dtype == Dtype::F16 { 0x7C00_u16 } else { 0x7F80 }.to_ne_bytes();
                let end = (index + 1) * dtype.bytes();
                bytes[end - 2..end].copy_from_slice(&infinite);
                assert_eq!(encoded(Isa::best(), format, &bytes, 3), Err(CodecError::NotFinite { index }));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn all_instruction_sets_encode_the_same_bits(format in any_format(), bits in any_bits(), skip in 0..4_usize) {
        let values = as_bytes(format.dtype(), &bits);
        let shifted = [vec![0; skip], values].concat(); // at any alignment
        let values = &shifted[skip..];
        let expected = encoded(Isa::SCALAR, format, values, 1);
        for isa in Isa::available() {
            prop_assert_eq!(encoded(isa, format, values, 1), expected.clone(), "{:?}", isa);
        }
    }

    #[test]
    fn any_bytes_decode_alike_to_finite_values_or_an_error(
        format in any_format(), mut data in vec(any::<u8>(), 0..MAX_VALUES), values in 0..MAX_VALUES, fit: bool,
    ) {
        if fit {
            data.resize(format.encoded_bytes(values).unwrap(), 0x42);
        }
        let expected = decoded(Isa::SCALAR, format, &data, values, 1);
        if let Ok(bytes) = &expected {
            prop_assert!(numbers(format.dtype(), bytes).iter().all(|value| value.is_finite()));
        }
        for isa in Isa::available() {
            match (decoded(isa, format, &data, values, 1), &expected) {
                (Err(CodecError::BadScale { block, .. }), Err(CodecError::BadScale { block: same, .. })) => {
                    prop_assert_eq!(block, *same); // a NaN is not equal to itself
                }
                (result, expected) => prop_assert_eq!(&result, expected, "{:?}", isa),
            }
        }
    }

    #[test]
    fn any_scales_and_codes_decode_alike(
        format in any_format(), codes in vec(any::<u8>(), 1..MAX_VALUES), scale in 0_u32..0x7F80_0000, skip in 0..4_usize,
    ) {
        let scales = f32::from_bits(scale).min(format.dtype().max()).to_le_bytes().repeat(codes.len().div_ceil(format.block()));
        let shifted = [vec![0; skip], scales, codes.clone()].concat();
        let expected = decoded(Isa::SCALAR, format, &shifted[skip..], codes.len(), 1);
        prop_assert!(expected.is_ok());
        for isa in Isa::available() {
            prop_assert_eq!(decoded(isa, format, &shifted[skip..], codes.len(), 1), expected.clone(), "{:?}", isa);
        }
    }

    #[test]
    fn the_error_is_bounded_by_the_distance_of_levels(
        code in select(&CODES), block in select(&BLOCKS), values in finite_values(f32::MAX),
    ) {
        let back = round_trip(Format::new(Dtype::F32, code, block).unwrap(), &values);
        for (values, back) in values.chunks(block).zip(back.chunks(block)) {
            let absmax = values.iter().fold(0.0_f64, |most, value| most.max(f64::from(value.abs())));
            let step = match code { Code::Linear => 1.0 / 254.0, Code::Dynamic => 0.45 / 64.0 };
            for (value, back) in values.iter().zip(back) {
                let error = (f64::from(*value) - f64::from(*back)).abs();
                prop_assert!(error <= absmax * (step + 5e-7) + f64::from(f32::from_bits(1)), "{value} -> {back} in {absmax}");
            }
        }
    }

    #[test]
    fn a_dynamic_value_is_off_by_a_part_of_itself(values in finite_values(1e30)) {
        let back = round_trip(Format::new(Dtype::F32, Code::Dynamic, 4096).unwrap(), &values);
        let absmax = values.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        for (value, back) in values.iter().zip(back) {
            // Half of the widest cell of its decade, or of the gap to the next one; within the lowest decade all is lost.
            let decade = (value.abs() / absmax).log10().ceil().max(-6.0);
            let share = 2_f32.powf(-(decade + 6.0)) * 4.6;
            let error = (value - back).abs();
            prop_assert!(error <= share * value.abs() + absmax * 6e-7, "{value} -> {back} in {absmax}");
        }
    }

    #[test]
    fn order_is_kept_within_a_block(format in any_format(), mut values in finite_values(60000.0)) {
        values.truncate(64);
        values.sort_by(f32::total_cmp);
        let back = round_trip(format, &values);
        prop_assert!(back.is_sorted(), "{:?} -> {:?}", values, back);
    }

    #[test]
    fn a_block_does_not_touch_its_neighbours(
        format in any_format(), values in finite_values(60000.0), at: Index, bits in 0_u16..0x7C00,
    ) {
        prop_assume!(!values.is_empty());
        let (at, block) = (at.index(values.len()), format.block());
        let mut changed = values.clone();
        changed[at] = f16_to_f32(bits);
        let pairs = round_trip(format, &values).into_iter().zip(round_trip(format, &changed));
        for (index, (before, after)) in pairs.enumerate().filter(|(index, _)| index / block != at / block) {
            prop_assert_eq!(before.to_bits(), after.to_bits(), "value {}", index);
        }
    }
}
