//! The codec: its bytes and its refusals here; levels, instruction sets and losses beside.

use inputs::{CODES, DTYPES, bytes_of, decoded, encoded, every_format, numbers, round_trip};
use llmnode_transport::codec::numbers::f32_to_f16;
use llmnode_transport::codec::{Code, CodecError, Dtype, Format, Isa, SCALE_BYTES, decode, encode};

mod inputs;
mod instruction_sets;
mod levels;
mod losses;

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
