//! Adapters against weights that they are merged into; and to the bit, whatever is in the same forward.

use llmnode_transport::blocks::{Block, BlockError, Shape, Update, Updates, forward};
use llmnode_transport::codec::Isa;
use proptest::collection::vec;
use proptest::prelude::*;

use crate::kinds::{Form, Kind, Layer, Sequence, Weights, kind_of, kinds, numbers, run, run_adapted, smallest};
use crate::slowly::slowly;

/// The first output, the matrices and the scale of an update.
#[derive(Clone)]
struct Low(usize, Vec<f32>, Vec<f32>, f32);

/// The updates of one block, by its layers.
#[derive(Clone)]
struct Adapter([Vec<Low>; 4]);

impl Adapter {
    /// Some of the layers have an update: those whose bits are in `which`.
    fn new(seed: u64, shape: &Shape, rank: usize, which: u8) -> Self {
        let [queries, keys] = [shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim];
        let Shape { hidden, inner, .. } = *shape;
        let layers = [
            (hidden, vec![queries, keys, keys]),
            (queries, vec![hidden]),
            (hidden, vec![inner, inner]),
            (inner, vec![hidden]),
        ];
        let mut number = 0_u8;
        Self(layers.map(|(inputs, widths)| {
            let mut first = 0;
            let all = widths.into_iter().map(|width| {
                number += 1;
                first += width;
                let seed = seed * 100 + u64::from(number) * 2;
                let rank = rank + usize::from(number % 3);
                let a = numbers(seed, rank * inputs, 1.0 / (inputs as f32).sqrt());
                let low = Low(first - width, a, numbers(seed + 1, rank * width, 0.5), 0.7);
                ((which >> (number - 1)) & 1 == 1).then_some(low)
            });
            all.flatten().collect()
        }))
    }

    fn updates(&self) -> Updates<'_> {
        let [qkv, output, gate_up, down] = [0, 1, 2, 3].map(|layer: usize| {
            self.0[layer].iter().map(|Low(first, a, b, scale)| Update { first: *first, a, b, scale: *scale }).collect()
        });
        Updates { qkv, output, gate_up, down }
    }

    /// Adds `scale * b a` to the weights themselves.
    fn merge(&self, weights: &mut Weights, shape: &Shape) {
        let inputs = [shape.hidden, shape.heads * shape.head_dim, shape.hidden, shape.inner];
        for ((layer, updates), inputs) in weights.layers().into_iter().zip(&self.0).zip(inputs) {
            for low in updates {
                merge(layer, low, inputs);
            }
        }
    }
}

fn merge(layer: &mut Layer, Low(first, a, b, scale): &Low, inputs: usize) {
    let rank = a.len() / inputs;
    let width = b.len() / rank;
    for output in 0..width {
        for input in 0..inputs {
            let sum: f64 =
                (0..rank).map(|at| f64::from(a[at * inputs + input]) * f64::from(b[at * width + output])).sum();
            layer.weight[(first + output) * inputs + input] += (sum * f64::from(*scale)) as f32;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn an_adapter_is_as_if_its_updates_were_in_the_weights(
        kind in kinds(), rank in 1..19_usize, which in any::<u8>(), count in 1..40_usize, seed in 0..1000_u64,
    ) {
        let kind = Kind { form: Form::Floats, has_kv_in_codes: false, window: None, ..kind };
        let weights: Vec<Weights> = (0..2).map(|number| Weights::new(seed * 7 + number, &kind.shape)).collect();
        let adapters: Vec<Adapter> = (0..2).map(|number| Adapter::new(seed + number, &kind.shape, rank, which)).collect();
        let mut merged = weights.clone();
        merged.iter_mut().zip(&adapters).for_each(|(weights, adapter)| adapter.merge(weights, &kind.shape));
        let hidden = numbers(seed, count * kind.shape.hidden, 2.0);
        let blocks: Vec<Block<'_>> = merged.iter().map(|weights| weights.block(&kind)).collect();
        let expected = slowly(&kind.shape, &blocks, &hidden, false);
        let largest = expected.iter().fold(1.0_f64, |largest, value| largest.max(value.abs()));
        let blocks: Vec<Block<'_>> = weights.iter().map(|weights| weights.block(&kind)).collect();
        let updates: Vec<Updates<'_>> = adapters.iter().map(Adapter::updates).collect();
        for isa in Isa::available() {
            let mut sequence = Sequence::new(2, &kind);
            let outputs = run_adapted(isa, 1, &kind, &blocks, vec![(&mut sequence, &hidden, Some(&updates))]);
            for (output, expected) in outputs.iter().zip(&expected) {
                prop_assert!((f64::from(*output) - expected).abs() < 5e-5 * largest, "{isa:?}: {output} for {expected}");
            }
        }
    }

    #[test]
    fn neither_other_adapters_nor_threads_nor_the_processor_change_a_bit(
        kind in kinds(),
        sequences in vec((1..9_usize, proptest::option::of(0..3_usize)), 2..9),
        which in any::<u8>(),
        threads in 2..4_usize,
        seed in 0..1000_u64,
    ) {
        let weights = Weights::new(seed, &kind.shape);
        let blocks = [weights.block(&kind)];
        let adapters = [1, 2, 3].map(|number| Adapter::new(seed + number, &kind.shape, 2 * number as usize, which));
        let updates = adapters.each_ref().map(|adapter| [adapter.updates()]);
        let states: Vec<Vec<f32>> = (0..)
            .zip(&sequences)
            .map(|(number, (length, _))| numbers(seed + number, length * kind.shape.hidden, 2.0))
            .collect();
        let of = |adapter: &Option<usize>| adapter.map(|number| updates[number].as_slice());
        let mut alone = Vec::new();
        for (states, (_, adapter)) in states.iter().zip(&sequences) {
            let mut own = Sequence::new(1, &kind);
            for state in states.chunks(kind.shape.hidden) {
                alone.extend(run_adapted(Isa::SCALAR, 1, &kind, &blocks, vec![(&mut own, state, of(adapter))]));
            }
        }
        for isa in Isa::available() {
            let mut own = vec![Sequence::new(1, &kind); states.len()];
            let together = own.iter_mut().zip(&states).zip(&sequences);
            let together = together.map(|((own, states), (_, adapter))| (own, states.as_slice(), of(adapter)));
            let outputs = run_adapted(isa, threads, &kind, &blocks, together.collect());
            prop_assert!(outputs.iter().zip(&alone).all(|(output, alone)| output.to_bits() == alone.to_bits()), "{isa:?}");
        }
    }
}

#[test]
fn updates_that_are_worth_several_threads_come_out_the_same() {
    let shape = Shape { hidden: 512, head_dim: 64, inner: 1056, frequencies: vec![0.3; 32], ..smallest(6) };
    let kind = kind_of(shape, false);
    let (weights, adapters) =
        (Weights::new(3, &kind.shape), [1, 2].map(|number| Adapter::new(number, &kind.shape, 16, 0xff)));
    let updates = adapters.each_ref().map(|adapter| [adapter.updates()]);
    let states = numbers(5, 512 * 36, 1.0);
    let outputs = [1, 3].map(|threads| {
        let mut sequences = vec![Sequence::new(1, &kind); 3];
        let [first, second, third] = sequences.as_mut_slice() else { unreachable!() };
        let pieces = vec![
            (first, &states[..512 * 34], Some(updates[0].as_slice())),
            (second, &states[512 * 34..512 * 35], None),
            (third, &states[512 * 35..], Some(updates[1].as_slice())),
        ];
        run_adapted(Isa::best(), threads, &kind, &[weights.block(&kind)], pieces)
    });
    assert!(outputs[0] == outputs[1]);
    let plain = run(Isa::best(), 1, &kind, &[weights.block(&kind)], vec![(&mut Sequence::new(1, &kind), &states)]);
    assert!(outputs[0][..512] != plain[..512], "it adds something");
}

#[test]
fn adapters_that_do_not_fit_are_refused_before_anything_is_written() {
    let kind = kind_of(smallest(2), true);
    let weights = Weights::new(1, &kind.shape);
    let of = |updates: &[Updates<'_>]| {
        let mut sequence = Sequence::new(1, &kind);
        let mut piece = sequence.piece(1);
        piece.adapter = Some(updates);
        let mut hidden = [0.5; 16];
        let result = forward(Isa::best(), None, &kind.shape, &[weights.block(&kind)], &mut [piece], &mut hidden);
        let untouched = sequence.slabs.iter().all(|slabs| slabs.floats.iter().all(|value| value.is_nan()));
        assert!(result.is_ok() || (untouched && hidden.map(f32::to_bits) == [0.5_f32.to_bits(); 16]));
        result
    };
    let of_update = |first: usize, a: usize, b: usize| {
        let (a, b) = (vec![0.5; a], vec![0.5; b]);
        let update = Update { first, a: &a, b: &b, scale: 1.0 };
        of(&[Updates { gate_up: vec![update], ..Updates::default() }])
    };
    assert_eq!(of(&[Updates::default()]), Ok(()));
    for good in [(0, 16, 32), (0, 48, 48), (16, 16, 16)] {
        assert_eq!(of_update(good.0, good.1, good.2), Ok(()));
    }
    let refused = Err(BlockError::Length("an adapter"));
    for bad in [
        (0, 0, 0),
        (0, 0, 16),
        (0, 15, 16),
        (0, 17, 16),
        (0, 16, 0),
        (0, 16, 8),
        (0, 32, 24),
        (1, 16, 32),
        (32, 16, 16),
    ] {
        assert_eq!(of_update(bad.0, bad.1, bad.2), refused);
    }
    assert_eq!(of_update(usize::MAX, 16, 16), refused);
    assert_eq!(of(&[]), refused);
    assert_eq!(of(&[Updates::default(), Updates::default()]), refused);
}
