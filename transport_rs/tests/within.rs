//! Limits of numbers by their bits, against comparing the numbers.

use llmnode_transport::codec::numbers::f16_to_f32;
use llmnode_transport::within::{Width, are_within};
use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #[test]
    fn numbers_of_32_bits_are_within_as_their_values_are(bits in vec(any::<u32>(), 0..100), largest in 0.0_f32..1e30) {
        let data: Vec<u8> = bits.iter().flat_map(|each| each.to_le_bytes()).collect();
        let expected = bits.iter().all(|each| f32::from_bits(*each).abs() <= largest);
        prop_assert_eq!(are_within(&data, Width::Four, largest.to_bits(), true), expected);
    }

    #[test]
    fn one_of_many_is_seen(bits in any::<u32>(), at in 0_usize..300, count in 300_usize..400) {
        let mut data: Vec<u8> = 1.0_f32.to_le_bytes().repeat(count);
        data.splice(4 * at..4 * at + 4, bits.to_le_bytes());
        let value = f32::from_bits(bits);
        prop_assert_eq!(are_within(&data, Width::Four, 2.0_f32.to_bits(), true), value.abs() <= 2.0);
        let is_positive = value.is_sign_positive() && value <= 2.0;
        prop_assert_eq!(are_within(&data, Width::Four, 2.0_f32.to_bits(), false), is_positive);
    }

    #[test]
    fn numbers_of_16_bits_are_within_as_their_values_are(bits in vec(any::<u16>(), 0..4), largest in 0_u16..0x7C00) {
        let data: Vec<u8> = bits.iter().flat_map(|each| each.to_le_bytes()).collect();
        let expected = bits.iter().all(|each| f16_to_f32(*each).abs() <= f16_to_f32(largest));
        prop_assert_eq!(are_within(&data, Width::Two, largest.into(), true), expected);
    }
}
