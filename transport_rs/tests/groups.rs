//! Weights of 4 and of 8 bits are found in what they were widened to, and in nothing else.

use llmnode_transport::blocks::{BlockError, GROUP, Q4, Q8, Weight, pack, pack_q8, widen};
use llmnode_transport::codec::Isa;
use llmnode_transport::codec::numbers::{f16_to_f32, f32_to_f16};
use proptest::collection::vec;
use proptest::prelude::*;

const PAIRS: usize = GROUP / 2;

/// A number of `binary16` as GGUF may have for a step or the least of a group.
fn halves() -> impl Strategy<Value = f32> {
    (any::<bool>(), 0..0x6400_u16).prop_map(|(is_negative, half)| f16_to_f32(half | u16::from(is_negative) << 15))
}

fn widened(codes: &[u8], levels: &[[f32; 2]]) -> Vec<f32> {
    let mut weights = vec![f32::NAN; codes.len() * 2];
    assert!(widen(Isa::SCALAR, Weight::Q4(Q4 { codes, levels }), &mut weights));
    weights
}

/// Packs `weights`, if that is exact, and widens them again.
fn found(weights: &[f32]) -> Option<Vec<f32>> {
    let (mut codes, mut levels) = (vec![0; weights.len() / 2], vec![[0.0; 2]; weights.len() / GROUP]);
    pack(weights, &mut codes, &mut levels).unwrap().then(|| widened(&codes, &levels))
}

fn of_8_bits(codes: &[i8], steps: &[f32]) -> Vec<f32> {
    let groups = codes.chunks(GROUP).zip(steps);
    groups.flat_map(|(codes, step)| codes.iter().map(move |code| f32::from(*code) * step)).collect()
}

fn found_q8(weights: &[f32]) -> Option<(Vec<i8>, Vec<f32>)> {
    let (mut codes, mut steps) = (vec![0; weights.len()], vec![0.0; weights.len() / GROUP]);
    pack_q8(weights, &mut codes, &mut steps).unwrap().then_some((codes, steps))
}

proptest! {
    #[test]
    fn q4_1_is_found(
        groups in vec((halves(), -2000.0..2000.0_f32, vec(any::<u8>(), PAIRS), 0..GROUP / 2, 0..GROUP / 2), 1..6)
    ) {
        let (mut codes, mut levels) = (Vec::new(), Vec::new());
        for (step, steps, mut pairs, first, last) in groups {
            let least = f16_to_f32(f32_to_f16((steps * step).clamp(-6e4, 6e4))); // of so many more a step would be lost
            pairs[first] &= 0xF0; // the least and the largest code come about, as the format has it
            pairs[last] |= 0x0F;
            pairs[first] |= if first == last { 0xF0 } else { 0 };
            pairs[first] &= if first == last { 0xF0 } else { 0xFF };
            codes.extend(pairs);
            levels.push([step.abs(), least]);
        }
        let weights = widened(&codes, &levels);
        prop_assert_eq!(found(&weights), Some(weights));
    }

    #[test]
    fn q4_0_is_found(groups in vec((halves(), vec(any::<u8>(), PAIRS), 0..PAIRS), 1..6)) {
        let (mut codes, mut levels) = (Vec::new(), Vec::new());
        for (step, mut pairs, first) in groups {
            pairs[first] &= 0xF0; // the largest magnitude has this code
            codes.extend(pairs);
            levels.push([step, -8.0 * step]);
        }
        let weights = widened(&codes, &levels);
        prop_assert_eq!(found(&weights), Some(weights));
    }

    #[test]
    fn q8_0_is_found(groups in vec((halves(), vec(-127..=127_i8, GROUP), 0..GROUP), 1..6)) {
        let mut expected = (Vec::new(), Vec::new());
        for (step, mut codes, at) in groups {
            codes[at] = 127; // the largest magnitude has this code
            expected.0.extend(codes.iter().map(|code| if step == 0.0 { 0 } else { code * if step < 0.0 { -1 } else { 1 } }));
            expected.1.push(step.abs());
        }
        let weights = of_8_bits(&expected.0, &expected.1);
        prop_assert_eq!(found_q8(&weights), Some(expected));
        let mut others = weights;
        others[5] = others[6] * 0.37 + 0.1;
        if let Some((codes, steps)) = found_q8(&others) {
            prop_assert_eq!(of_8_bits(&codes, &steps), others);
        }
    }

    #[test]
    fn any_other_weights_are_left_as_they_are(weights in vec(-1.0..1.0_f32, GROUP), at in 0..GROUP) {
        prop_assert_eq!(found(&weights), None);
        let mut levels: Vec<f32> = (0..16_u8).chain(0..16).map(|code| f32::from(code) * 0.25 - 2.0).collect();
        prop_assert!(found(&levels).is_some());
        levels[at] += levels[at].abs().max(0.1) * f32::EPSILON * 2.0;
        prop_assert_eq!(found(&levels), None, "one is beside its level by a bit or two");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))] // Each has every code at every place.

    #[test]
    fn any_processor_widens_to_the_same_bits(
        codes in vec(any::<u8>(), PAIRS * 3000), seed in 1..1000_u16,
    ) {
        let levels: Vec<[f32; 2]> = (0..3000).map(|at| [f16_to_f32(seed + at), -f16_to_f32(seed * 3 + at)]).collect();
        let of_steps: Vec<f32> = (0..1500).map(|at| f16_to_f32(seed + at)).collect();
        let weights = widened(&codes, &levels);
        for isa in Isa::available() {
            let mut ours = vec![f32::NAN; weights.len()];
            let is_done = widen(isa, Weight::Q4(Q4 { codes: &codes, levels: &levels }), &mut ours);
            prop_assert!(is_done);
            prop_assert!(ours.iter().zip(&weights).all(|(ours, weight)| ours.to_bits() == weight.to_bits()), "{isa:?}");
            let of_8 = (codes.iter().map(|code| code.cast_signed()).collect::<Vec<_>>(), &of_steps);
            let mut ours = vec![f32::NAN; codes.len()];
            let is_done = widen(isa, Weight::Q8(Q8 { codes: &of_8.0, steps: of_8.1 }), &mut ours);
            prop_assert!(is_done);
            prop_assert!(ours == of_8_bits(&of_8.0, of_8.1), "{isa:?}");
        }
    }
}

#[test]
fn what_is_no_number_and_what_there_is_no_room_for_is_not_packed() {
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        let mut weights = vec![0.5; 2 * GROUP];
        assert_eq!(found(&weights), Some(weights.clone()), "all alike");
        weights[40] = odd;
        weights[41] = -0.25;
        assert_eq!(found(&weights), None);
        assert_eq!(found_q8(&weights), None);
    }
    let weights = vec![1.0; 2 * GROUP];
    assert_eq!(pack_q8(&weights, &mut [0; 2 * GROUP], &mut [0.0; 1]), Err(BlockError::Length("codes")));
    assert_eq!(pack_q8(&weights, &mut [0; GROUP], &mut [0.0; 2]), Err(BlockError::Length("codes")));
    assert_eq!(pack_q8(&weights[1..], &mut [0; 2 * GROUP], &mut [0.0; 2]), Err(BlockError::Length("codes")));
    assert_eq!(pack(&weights, &mut [0; GROUP], &mut [[0.0; 2]; 1]), Err(BlockError::Length("codes")));
    assert_eq!(pack(&weights, &mut [0; GROUP / 2], &mut [[0.0; 2]; 2]), Err(BlockError::Length("codes")));
    assert_eq!(pack(&weights[1..], &mut [0; GROUP], &mut [[0.0; 2]; 2]), Err(BlockError::Length("codes")));
    assert_eq!(pack(&[], &mut [], &mut []), Ok(true));
    let q4 = Weight::Q4(Q4 { codes: &[0; GROUP / 2], levels: &[[1.0; 2]] });
    assert!(widen(Isa::best(), q4, &mut [0.0; GROUP]) && !widen(Isa::best(), q4, &mut [0.0; 2 * GROUP]));
    assert!(!widen(Isa::best(), Weight::Floats(&[0.0; GROUP]), &mut [0.0; GROUP]));
}
