//! Levels, codes and halves against their definitions written out slowly.

use llmnode_transport::codec::levels::DYNAMIC_MAGNITUDES;
use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use llmnode_transport::codec::scalar::{dynamic_code, dynamic_level, linear_code, linear_level};

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
