//! Every instruction set of this machine against the scalar specification, bit by bit.

use crate::inputs::{
    CODES, MAX_VALUES, any_bits, any_format, as_bytes, bytes_of, decoded, encoded, every_format, numbers,
};
use llmnode_transport::codec::levels::THRESHOLDS;
use llmnode_transport::codec::{Code, CodecError, Dtype, Format, Isa};
use proptest::collection::vec;
use proptest::prelude::*;

#[test]
fn this_machine_says_what_it_can() {
    let available: Vec<Isa> = Isa::available().collect();
    assert_eq!(available.first(), Some(&Isa::best()));
    assert_eq!(available.last(), Some(&Isa::SCALAR));
    println!("{available:?}");
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
}
