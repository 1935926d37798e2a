//! Values that come back from a block are near, in order, and independent of its neighbours.

use crate::inputs::{BLOCKS, CODES, any_format, every_format, finite_values, round_trip};
use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32};
use llmnode_transport::codec::{Code, Dtype, Format};
use proptest::prelude::*;
use proptest::sample::{Index, select};

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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

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
