//! Formats, values and bits that the tests of the codec draw, and what codes them.

use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use llmnode_transport::codec::{Code, CodecError, Dtype, Format, Isa, decode_on, encode_on};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

pub const CODES: [Code; 2] = [Code::Linear, Code::Dynamic];
pub const DTYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
pub const BLOCKS: [usize; 7] = [64, 128, 256, 512, 1024, 2048, 4096];

/// Several small blocks, a short one, and an end that fills no vector.
pub const MAX_VALUES: usize = 700;

fn number(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()),
        Dtype::F16 => f16_to_f32(u16::from_ne_bytes(bytes.try_into().unwrap())),
        Dtype::Bf16 => bf16_to_f32(u16::from_ne_bytes(bytes.try_into().unwrap())),
    }
}

pub fn numbers(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(dtype.bytes()).map(|value| number(dtype, value)).collect()
}

pub fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let bytes = |value: &f32| match dtype {
        Dtype::F32 => value.to_ne_bytes().to_vec(),
        Dtype::F16 => f32_to_f16(*value).to_ne_bytes().to_vec(),
        Dtype::Bf16 => f32_to_bf16(*value).to_ne_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

pub fn encoded(isa: Isa, format: Format, values: &[u8], threads: usize) -> Result<Vec<u8>, CodecError> {
    let count = values.len() / format.dtype().bytes();
    let mut out = vec![0xA5; format.encoded_bytes(count).unwrap()];
    encode_on(isa, format, values, &mut out, threads)?;
    Ok(out)
}

pub fn decoded(isa: Isa, format: Format, data: &[u8], values: usize, threads: usize) -> Result<Vec<u8>, CodecError> {
    let mut out = vec![0xA5; format.decoded_bytes(values).unwrap()];
    decode_on(isa, format, data, &mut out, threads)?;
    Ok(out)
}

pub fn round_trip(format: Format, values: &[f32]) -> Vec<f32> {
    let data = encoded(Isa::best(), format, &bytes_of(format.dtype(), values), 1).unwrap();
    numbers(format.dtype(), &decoded(Isa::best(), format, &data, values.len(), 1).unwrap())
}

pub fn every_format() -> impl Iterator<Item = Format> {
    let pairs = DTYPES.into_iter().flat_map(|dtype| CODES.map(|code| (dtype, code)));
    pairs.flat_map(|(dtype, code)| BLOCKS.map(|block| Format::new(dtype, code, block).unwrap()))
}

pub fn any_format() -> impl Strategy<Value = Format> {
    (select(&DTYPES), select(&CODES), select(&BLOCKS[..4]))
        .prop_map(|(dtype, code, block)| Format::new(dtype, code, block).unwrap())
}

/// Bits of every kind: noise, and one exponent for all, so that levels and thresholds of a block are met.
pub fn any_bits() -> impl Strategy<Value = Vec<u32>> {
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
pub fn as_bytes(dtype: Dtype, bits: &[u32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => bits.iter().flat_map(|bits| bits.to_ne_bytes()).collect(),
        Dtype::Bf16 => bits.iter().flat_map(|bits| u16::try_from(bits >> 16).unwrap().to_ne_bytes()).collect(),
        Dtype::F16 => bits.iter().flat_map(|bits| f32_to_f16(f32::from_bits(*bits)).to_ne_bytes()).collect(),
    }
}

pub fn finite_values(most: f32) -> impl Strategy<Value = Vec<f32>> {
    let any_size = (-44_i32..39, vec(-1.0_f32..1.0, 0..MAX_VALUES))
        .prop_map(|(exponent, values)| values.iter().map(|v| v * 10_f32.powi(exponent)).collect::<Vec<f32>>());
    any_size.prop_map(move |values| values.iter().map(|value| value.clamp(-most, most)).collect())
}
