//! Blocks against a slow reading of what they are, in `f64`; and to the bit, whatever the processor, threads and company.

#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small numbers")]

use kinds::{CAPACITY, FORMS, Form, Kind, Layer, Sequence, Weights, kind_of, kinds, numbers, run, smallest};
use llmnode_transport::blocks::{Block, BlockError, Half, Linear, Q4, Q8, Shape, Weight, forward, multiply, widen};
use llmnode_transport::codec::Isa;
use llmnode_transport::codec::numbers::{bf16_to_f32, f16_to_f32};
use proptest::collection::vec;
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;
use slowly::slowly;

mod adapters;
mod kinds;
mod slowly;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn blocks_compute_what_they_say(kind in kinds(), lengths in vec(1..6_usize, 1..5), seed in 0..1000_u64) {
        let weights: Vec<Weights> = (0..2).map(|number| Weights::new(seed * 7 + number, &kind.shape)).collect();
        let blocks: Vec<Block<'_>> = weights.iter().map(|weights| weights.block(&kind)).collect();
        let hidden = numbers(seed, lengths.iter().sum::<usize>() * kind.shape.hidden, 2.0);
        let expected = slowly(&kind.shape, &blocks, &hidden, kind.has_kv_in_codes);
        let tolerance = if kind.form == Form::Codes || kind.has_kv_in_codes { 2e-2 } else { 3e-5 }; // one may go to the next step
        for isa in Isa::available() {
            let mut sequence = Sequence::new(2, &kind);
            let mut outputs = Vec::new();
            let mut rest = hidden.as_slice();
            for length in &lengths {
                let (states, others) = rest.split_at(length * kind.shape.hidden);
                rest = others;
                outputs.extend(run(isa, 1, &kind, &blocks, vec![(&mut sequence, states)]));
            }
            let largest = expected.iter().fold(1.0_f64, |largest, value| largest.max(value.abs()));
            for (output, expected) in outputs.iter().zip(&expected) {
                prop_assert!((f64::from(*output) - expected).abs() < tolerance * largest, "{isa:?}: {output} for {expected}");
            }
        }
    }

    #[test]
    fn neither_company_nor_threads_nor_the_processor_change_a_bit(
        kind in kinds(), lengths in vec(1..9_usize, 2..12), seed in 0..1000_u64, threads in 2..4_usize,
    ) {
        let weights = Weights::new(seed, &kind.shape);
        let blocks = [weights.block(&kind)];
        let states: Vec<Vec<f32>> =
            (0..).zip(&lengths).map(|(number, length)| numbers(seed + number, length * kind.shape.hidden, 2.0)).collect();
        let empty: Vec<Sequence> = states.iter().map(|_| Sequence::new(1, &kind)).collect();
        let alone: Vec<f32> = empty.clone().iter_mut().zip(&states).flat_map(|(sequence, states)| {
            let positions = states.chunks(kind.shape.hidden); // one after the other, one value at a time
            positions.flat_map(|states| run(Isa::SCALAR, 1, &kind, &blocks, vec![(&mut *sequence, states)])).collect::<Vec<_>>()
        }).collect();
        for isa in Isa::available() {
            let mut sequences = empty.clone();
            let together = sequences.iter_mut().zip(&states).map(|(sequence, states)| (sequence, states.as_slice()));
            let outputs = run(isa, threads, &kind, &blocks, together.collect());
            prop_assert!(outputs.iter().zip(&alone).all(|(output, alone)| output.to_bits() == alone.to_bits()), "{isa:?}");
        }
    }
}

#[test]
fn a_position_that_is_not_a_number_changes_none_that_do_not_see_it() {
    let shape = Shape { hidden: 32, head_dim: 32, inner: 32, frequencies: vec![0.5; 16], ..smallest(2) };
    for (window, has_kv_in_codes) in [(None, false), (Some(3), false), (None, true), (Some(3), true)] {
        let kind = Kind { window, has_kv_in_codes, ..kind_of(shape.clone(), true) };
        let weights = Weights::new(5, &kind.shape);
        let block = [weights.block(&kind)];
        let mut states = numbers(6, 12 * 32, 1.0);
        states[5 * 32] = f32::NAN;
        for isa in Isa::available() {
            let mut apart = Sequence::new(1, &kind);
            let one_by_one: Vec<f32> =
                states.chunks(32).flat_map(|state| run(isa, 1, &kind, &block, vec![(&mut apart, state)])).collect();
            let together = run(isa, 1, &kind, &block, vec![(&mut Sequence::new(1, &kind), &states)]);
            for (at, (one, other)) in one_by_one.chunks(32).zip(together.chunks(32)).enumerate() {
                let sees_it = at >= 5 && window.is_none_or(|window| at < 5 + window);
                assert_eq!(one.iter().any(|value| value.is_nan()), sees_it, "{isa:?}, {window:?}: position {at}");
                assert!(one.iter().zip(other).all(|(one, other)| one.to_bits() == other.to_bits() || sees_it), "{at}");
            }
        }
    }
}

#[test]
fn weights_of_16_bits_and_of_4_are_as_if_they_were_floats_by_a_bit() {
    let kind = kind_of(Shape { hidden: 32, head_dim: 32, inner: 32, frequencies: vec![0.5; 16], ..smallest(2) }, true);
    let halves = Weights::new(9, &kind.shape);
    let mut wide = Weights::new(9, &kind.shape);
    let states = numbers(4, 5 * 32, 1.0);
    for narrow in [Form::Halves(Half::Bf16), Form::Halves(Half::F16), Form::Q4, Form::Q8] {
        for (layer, halves) in wide.layers().into_iter().zip(halves.clone().layers()) {
            match narrow {
                Form::Halves(Half::Bf16) => layer.weight = halves.bf16.iter().map(|half| bf16_to_f32(*half)).collect(),
                Form::Halves(Half::F16) => layer.weight = halves.f16.iter().map(|half| f16_to_f32(*half)).collect(),
                _ => assert!(widen(
                    Isa::SCALAR,
                    halves.linear(&Kind { form: narrow, ..kind.clone() }).weight,
                    &mut layer.weight
                )),
            }
        }
        let outputs = [(&halves, narrow), (&wide, Form::Floats)].map(|(weights, form)| {
            let kind = Kind { form, ..kind.clone() };
            run(Isa::best(), 1, &kind, &[weights.block(&kind)], vec![(&mut Sequence::new(1, &kind), &states)])
        });
        assert!(outputs[0] == outputs[1]);
    }
}

#[test]
fn a_product_alone_is_as_in_a_block() {
    let layer = Layer::new(7, 700, 96);
    let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
    for form in FORMS {
        let linear = layer.linear(&Kind { form, ..kind_of(smallest(1), false) });
        let all = numbers(3, 70 * 96, 1.0);
        let alone: Vec<f32> =
            all.chunks(96).flat_map(|row| multiply(Isa::SCALAR, None, linear, (700, 96), row).unwrap()).collect();
        for (isa, count) in Isa::available().flat_map(|isa| [0, 1, 5, 8, 9, 33, 70].map(|count| (isa, count))) {
            let (rows, expected) = (&all[..count * 96], &alone[..count * 700]);
            assert_eq!(multiply(isa, None, linear, (700, 96), rows).as_deref(), Ok(expected), "{isa:?}: {count}");
            assert_eq!(
                multiply(isa, Some(&pool), linear, (700, 96), rows).as_deref(),
                Ok(expected),
                "{isa:?}: {count}"
            );
        }
        assert_eq!(multiply(Isa::best(), None, linear, (700, 96), &[0.0; 95]), Err(BlockError::Length("rows")));
        let empty = Layer::new(7, 0, 96);
        let empty = Linear { bias: None, ..empty.linear(&Kind { form, ..kind_of(smallest(1), false) }) };
        assert_eq!(multiply(Isa::best(), None, empty, (0, 96), &[0.0; 96]), Err(BlockError::Length("weights")));
        for sizes in [(700, 95), (701, 96), (0, 96), (700, 0), (usize::MAX, 96), (96, usize::MAX)] {
            assert_eq!(multiply(Isa::best(), None, linear, sizes, &[]), Err(BlockError::Length("weights")));
        }
    }
}

#[test]
fn work_that_is_worth_several_threads_comes_out_the_same() {
    let shape = Shape {
        hidden: 512,
        heads: 6,
        kv_heads: 3,
        head_dim: 64,
        inner: 1056, // parts do not come out even
        epsilon: 1e-5,
        frequencies: vec![0.3; 32],
        rotary_scaling: 1.0,
    };
    let kind = kind_of(shape, false);
    let weights = Weights::new(3, &kind.shape);
    for (count, form) in [1, 2, 5, 13].into_iter().flat_map(|count| FORMS.map(|form| (count, form))) {
        let kind = Kind { form, ..kind.clone() };
        let blocks = [weights.block(&kind)];
        let states = numbers(count, 512 * 30, 1.0);
        let outputs: Vec<Vec<f32>> = [1, 3]
            .into_iter()
            .map(|threads| {
                let mut sequences = vec![Sequence::new(1, &kind); count as usize];
                let pieces = sequences.iter_mut().map(|sequence| (sequence, states.as_slice()));
                run(Isa::best(), threads, &kind, &blocks, pieces.collect())
            })
            .collect();
        assert!(outputs[0] == outputs[1]);
    }
}

#[test]
fn large_numbers_saturate_and_what_is_no_number_stays_with_its_own_sequence() {
    let shape = smallest(1);
    let kind = Kind { has_biases: false, ..kind_of(shape, false) };
    for (form, has_kv_in_codes) in FORMS[2..].iter().flat_map(|form| [(*form, false), (*form, true)]) {
        saturate(&Kind { form, has_kv_in_codes, ..kind.clone() }); // sizes are those of no group
    }
}

fn saturate(kind: &Kind) {
    let mut weights = Weights::new(5, &kind.shape);
    let layer = &mut weights.gate_up;
    layer.weight.iter_mut().chain(&mut layer.scales).for_each(|weight| *weight *= 1e3); // gates of several hundred
    layer.bf16.iter_mut().for_each(|half| *half += 10 << 7);
    layer.f16.iter_mut().for_each(|half| *half += 10 << 10);
    let blocks = [weights.block(kind)];
    let (honest, bad) = (numbers(1, 16, 1.0), vec![f32::NAN; 16]);
    for isa in Isa::available() {
        let mut sequences = vec![Sequence::new(1, kind); 2];
        let (first, second) = sequences.split_at_mut(1);
        let outputs = run(isa, 1, kind, &blocks, vec![(&mut first[0], &bad), (&mut second[0], &honest)]);
        assert!(
            outputs[..16].iter().all(|value| value.is_nan()) && outputs[16..].iter().all(|value| value.is_finite())
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    for has_kv_in_codes in [false, true] {
        refuse(&Kind { has_kv_in_codes, ..kind_of(smallest(2), true) });
    }
}

fn refuse(kind: &Kind) {
    let weights = Weights::new(1, &kind.shape);
    let block = weights.block(kind);
    let of = |shape: &Shape, block: Block<'_>, start: usize, length: usize, values: usize| {
        let mut sequence = Sequence::new(1, kind);
        sequence.length = start;
        let result = forward(Isa::best(), None, shape, &[block], &mut [sequence.piece(length)], &mut vec![0.5; values]);
        let untouched = sequence.slabs.iter().all(|slabs| slabs.floats.iter().all(|value| value.is_nan()));
        assert!(result.is_ok() || untouched);
        result
    };
    assert_eq!(of(&kind.shape, block, 0, 2, 32), Ok(()));
    assert_eq!(of(&kind.shape, block, CAPACITY - 1, 2, 32), Err(BlockError::CacheFull));
    assert_eq!(of(&kind.shape, block, usize::MAX, 2, 32), Err(BlockError::CacheFull));
    assert_eq!(of(&kind.shape, block, 0, 2, 31), Err(BlockError::Length("hidden states")));
    assert_eq!(of(&Shape { head_dim: 8, ..kind.shape.clone() }, block, 0, 1, 16), Err(BlockError::Shape));
    assert_eq!(of(&Shape { kv_heads: 0, ..kind.shape.clone() }, block, 0, 1, 16), Err(BlockError::Shape));
    let wrap = Shape { heads: 1 << 19, kv_heads: 1 << 19, head_dim: 1 << 23, hidden: 1 << 22, ..kind.shape.clone() };
    assert_eq!(of(&wrap, block, 0, 1, 16), Err(BlockError::Shape)); // its products are 0, by 64 bits
    let unpaired = Shape { frequencies: vec![0.5; 4], ..kind.shape.clone() };
    assert_eq!(of(&unpaired, Block { is_rotated: false, ..block }, 0, 2, 32), Err(BlockError::Shape));
    assert_eq!(of(&kind.shape, Block { window: Some(0), ..block }, 0, 2, 32), Err(BlockError::Window));
    assert_eq!(of(&Shape { hidden: 0, ..kind.shape.clone() }, block, 0, 1, 16), Err(BlockError::Shape));
    let short = &weights.qkv.weight[1..];
    let others = [
        (Block { qkv: Linear { weight: Weight::Floats(short), ..block.qkv }, ..block }, "qkv"),
        (
            Block { qkv: Linear { weight: Weight::Halves(Half::F16, &weights.qkv.f16[1..]), ..block.qkv }, ..block },
            "qkv",
        ),
        (Block { qkv: Linear { weight: Weight::Q8(Q8 { codes: &[], steps: &[] }), ..block.qkv }, ..block }, "qkv"),
        (Block { qkv: Linear { weight: Weight::Q4(Q4 { codes: &[], levels: &[] }), ..block.qkv }, ..block }, "qkv"),
        (Block { qkv: Linear { weight: Weight::Codes(&weights.qkv.codes, &short[..3]), ..block.qkv }, ..block }, "qkv"),
        (Block { qkv: Linear { weight: Weight::Codes(&[], &weights.qkv.scales), ..block.qkv }, ..block }, "qkv"),
        (Block { down: Linear { bias: Some(&short[..3]), ..block.down }, ..block }, "down"),
        (Block { fed_norm: &short[..15], ..block }, "a norm"),
        (Block { head_norms: Some((&short[..16], &short[..15])), ..block }, "a norm"),
    ];
    for (block, name) in others {
        assert_eq!(of(&kind.shape, block, 0, 1, 16), Err(BlockError::Length(name)));
    }
    let missing = forward(
        Isa::best(),
        None,
        &kind.shape,
        &[block, block],
        &mut [Sequence::new(1, kind).piece(1)],
        &mut [0.5; 16],
    );
    assert_eq!(missing, Err(BlockError::CacheFull));
    let mut short = Sequence::new(1, kind);
    short.slabs[0].floats.pop();
    let short = forward(Isa::best(), None, &kind.shape, &[block], &mut [short.piece(1)], &mut [0.5; 16]);
    assert_eq!(short, Err(BlockError::CacheFull));
    assert_eq!(forward(Isa::best(), None, &kind.shape, &[block], &mut [], &mut []), Ok(()));
}
