//! Packing against a slow reading of its documented format: any bytes come back, and nothing else does.

use llmnode_transport::packing::{PackError, pack, unpack, unpacked_bytes};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

const WIDTHS: [usize; 2] = [2, 4];

fn unpacked(packed: &[u8]) -> Result<Vec<u8>, PackError> {
    let mut out = vec![0xA5; unpacked_bytes(packed)?];
    unpack(packed, &mut out)?;
    Ok(out)
}

fn number(packed: &mut &[u8]) -> usize {
    let (number, rest) = packed.split_first_chunk().unwrap();
    *packed = rest;
    u32::from_le_bytes(*number) as usize
}

/// By the words of the module's documentation, one value at a time.
fn unpacked_slowly(mut packed: &[u8]) -> Vec<u8> {
    let (width, zstd_lanes) = (usize::from(packed[0]), packed[1]);
    packed = &packed[2..];
    let size = number(&mut packed);
    let count = size / width;
    let is_zstd = |lane: usize| zstd_lanes >> lane & 1 == 1;
    let lengths: Vec<usize> = (0..width).map(|lane| if is_zstd(lane) { number(&mut packed) } else { count }).collect();
    let mut lanes = Vec::new();
    for (lane, length) in lengths.into_iter().enumerate() {
        let bytes = &packed[..length];
        packed = &packed[length..];
        lanes.push(if is_zstd(lane) { zstd::stream::decode_all(bytes).unwrap() } else { bytes.to_vec() });
    }
    let mut values = Vec::new();
    assert!(lanes.iter().all(|lane| lane.len() == count));
    for (at, (exponent, sign)) in lanes[0].iter().zip(&lanes[1]).enumerate() {
        let upper = u16::from(*exponent) << 8 | u16::from(*sign);
        let upper = upper >> 1 | (upper & 1) << 15;
        if width == 4 {
            values.extend([lanes[3][at], lanes[2][at]]);
        }
        values.extend(upper.to_le_bytes());
    }
    values.extend(packed);
    assert_eq!(values.len(), size);
    values
}

/// Numbers about 1, as hidden states are; of 16 bits the upper halves.
fn normals(width: usize, count: usize) -> Vec<u8> {
    let mut state = 7_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        f32::from_bits(0x3F80_0000 | (state >> 41) as u32) - 1.5
    };
    let values = (0..count).map(|_| (0..12).map(|_| uniform()).sum::<f32>());
    values.flat_map(|value| value.to_le_bytes()[4 - width..].to_vec()).collect()
}

fn any_values() -> impl Strategy<Value = Vec<u8>> {
    let special = select(vec![0_u32, 0x8000_0000, 1, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0x7FA0_0001, 0xFFFF_FFFF]);
    let words = |word: BoxedStrategy<u32>, most| {
        vec(word, 0..most).prop_map(|words| words.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
    };
    let close = (0x3E00_0000_u32..0x4000_0000).boxed();
    prop_oneof![
        vec(any::<u8>(), 0..700),
        vec(0_u8..3, 0..700),
        words(special.boxed(), 300),
        words(close.clone(), 300),
        words(close.prop_map(|word| word & 0xFFFF_0000).boxed(), 300),
        Just(vec![0; 100_003]),
    ]
}

proptest! {
    #[test]
    fn any_bytes_come_back(data in any_values(), width in select(&WIDTHS), tail in 0_usize..4) {
        let data = &data[..data.len().saturating_sub(tail)];
        let packed = pack(data, width).unwrap();
        prop_assert_eq!(unpacked_bytes(&packed), Ok(data.len()));
        prop_assert_eq!(unpacked(&packed).unwrap(), data);
        prop_assert_eq!(unpacked_slowly(&packed), data);
        prop_assert!(packed.len() <= data.len() + 6);
    }

    #[test]
    fn what_is_cut_short_or_goes_on_is_refused(data in any_values(), width in select(&WIDTHS), at in any::<Index>()) {
        let mut packed = pack(&data, width).unwrap();
        prop_assert!(unpacked_bytes(&packed[..at.index(packed.len())]).is_err());
        packed.push(0);
        prop_assert_eq!(unpacked_bytes(&packed), Err(PackError::Lengths));
    }

    #[test]
    fn whatever_arrives_never_unpacks_to_more_than_four_times_its_length(bytes in vec(any::<u8>(), 0..200)) {
        prop_assert!(unpacked_bytes(&bytes).unwrap_or(0) <= 4 * bytes.len());
    }
}

#[test]
fn normal_values_of_16_bits_lose_a_quarter_and_of_32_an_eighth() {
    for (width, lost) in [(2, 4), (4, 8)] {
        let data = normals(width, 10_000);
        let packed = pack(&data, width).unwrap();
        assert!(packed.len() < data.len() - data.len() / lost, "{} of {}", packed.len(), data.len());
    }
}

#[test]
fn values_of_16_bits_in_32_lose_their_zeros_too() {
    let mut data = normals(4, 10_000);
    for value in data.as_chunks_mut::<4>().0 {
        value[..2].fill(0);
    }
    assert!(pack(&data, 4).unwrap().len() < data.len() * 4 / 10);
}

#[test]
fn what_does_not_compress_is_six_bytes_longer() {
    let mut state = 7_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    let noise: Vec<u8> = (0..40_000).map(|_| byte()).collect();
    for width in WIDTHS {
        assert_eq!(pack(&noise, width).unwrap().len(), noise.len() + 6);
    }
}

#[test]
fn nothing_is_packed_to_a_header() {
    assert_eq!(pack(&[], 4), Ok(vec![4, 0, 0, 0, 0, 0]));
    assert_eq!(unpacked(&[2, 0, 0, 0, 0, 0]), Ok(vec![]));
}

#[test]
fn other_widths_are_refused() {
    for width in [0, 1, 3, 5, 8, usize::MAX] {
        assert_eq!(pack(&[0; 16], width), Err(PackError::Width(width)));
    }
}

#[test]
fn headers_that_cannot_be_are_refused() {
    for header in [[0, 0], [1, 0], [3, 0], [8, 0], [255, 0], [2, 0b10], [2, 0b100], [4, 0b10], [4, 0b1_0000]] {
        let mut packed = header.to_vec();
        packed.extend([0; 40]);
        assert_eq!(unpacked_bytes(&packed), Err(PackError::Header), "{header:?}");
    }
}

#[test]
fn a_lane_of_another_length_than_there_are_values_is_refused() {
    let data = vec![0; 1000];
    for count in [499_usize, 501, 100_000_000] {
        let lane = zstd::bulk::compress(&vec![0; count], 1).unwrap();
        let mut packed = vec![2, 1];
        packed.extend(1000_u32.to_le_bytes());
        packed.extend(u32::try_from(lane.len()).unwrap().to_le_bytes());
        packed.extend(lane);
        packed.extend(&data[..500]);
        assert_eq!(unpacked_bytes(&packed), Ok(1000));
        assert_eq!(unpacked(&packed), Err(PackError::Lane));
    }
}

#[test]
fn an_out_of_another_length_is_refused() {
    let packed = pack(&[1; 100], 4).unwrap();
    for length in [0, 99, 101] {
        assert_eq!(unpack(&packed, &mut vec![0; length]), Err(PackError::Lengths));
    }
}
