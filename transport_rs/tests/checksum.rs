//! CRC-32C against a bit-by-bit twin, the vectors of the RFC, and itself in pieces.

use llmnode_transport::checksum::{crc32c, frame_crc32c};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Longer than the longest stride of the fast path (three streams of 8 KiB), so that all of its branches are taken.
const MAX_BYTES: usize = 40 * 1024;

/// The slow, obvious twin: long division, one bit at a time.
fn bitwise_crc32c(data: &[u8], seed: u32) -> u32 {
    const POLYNOMIAL_REVERSED: u32 = 0x82F6_3B78;
    let mut register = !seed;
    for byte in data {
        register ^= u32::from(*byte);
        for _ in 0..8 {
            let out = register & 1;
            register = (register >> 1) ^ (out * POLYNOMIAL_REVERSED);
        }
    }
    !register
}

#[test]
fn crc32c_gives_the_vectors_of_rfc_3720_b4() {
    let rising: Vec<u8> = (0..32).collect();
    let falling: Vec<u8> = (0..32).rev().collect();
    assert_eq!(crc32c(&[0x00; 32], 0), 0x8A91_36AA);
    assert_eq!(crc32c(&[0xFF; 32], 0), 0x62A8_AB43);
    assert_eq!(crc32c(&rising, 0), 0x46DD_794E);
    assert_eq!(crc32c(&falling, 0), 0x113F_DB5C);
    assert_eq!(crc32c(b"123456789", 0), 0xE306_9283); // the "check" value of the CRC catalogues
}

#[test]
fn nothing_leaves_the_seed_as_it_was() {
    assert_eq!(crc32c(b"", 0), 0);
    assert_eq!(crc32c(b"", 0xDEAD_BEEF), 0xDEAD_BEEF);
    assert_eq!(frame_crc32c([]), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))] // Long inputs, and a twin that takes its time.

    #[test]
    fn crc32c_is_its_bitwise_twin_at_any_alignment(
        data in vec(any::<u8>(), 0..MAX_BYTES), skip in 0..16_usize, seed: u32,
    ) {
        let data = data.get(skip..).unwrap_or_default();
        prop_assert_eq!(crc32c(data, seed), bitwise_crc32c(data, seed));
    }

    #[test]
    fn crc32c_goes_on_from_any_split(data in vec(any::<u8>(), 0..MAX_BYTES), cut: Index, seed: u32) {
        let (head, tail) = data.split_at(cut.index(data.len() + 1));
        prop_assert_eq!(crc32c(tail, crc32c(head, seed)), crc32c(&data, seed));
    }

    #[test]
    fn frame_crc32c_is_the_crc_of_the_joined_parts(parts in vec(vec(any::<u8>(), 0..2048), 0..6)) {
        let whole = parts.concat();
        prop_assert_eq!(frame_crc32c(parts.iter().map(Vec::as_slice)), bitwise_crc32c(&whole, 0));
    }

    #[test]
    fn crc32c_sees_any_single_flipped_bit(data in vec(any::<u8>(), 1..MAX_BYTES), at: Index, bit in 0..8_u32) {
        let mut damaged = data.clone();
        damaged[at.index(data.len())] ^= 1 << bit;
        prop_assert_ne!(crc32c(&damaged, 0), crc32c(&data, 0));
    }
}
