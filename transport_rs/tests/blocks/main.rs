//! Blocks against a slow reading of what they are, in `f64`; and to the bit, whatever the processor, threads and company.

#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small numbers")]

use llmnode_transport::blocks::{Block, BlockError, Cache, Linear, Piece, Shape, Weight, forward};
use llmnode_transport::codec::Isa;
use proptest::collection::vec;
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;
use slowly::slowly;

mod slowly;

const CAPACITY: usize = 40;

/// Numbers about 0, of a generator whose state is the seed.
fn numbers(seed: u64, count: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (f32::from_bits(0x3F80_0000 | (state >> 41) as u32) - 1.5) * 2.0 * scale
    };
    (0..count).map(|_| next()).collect()
}

/// All that blocks of a shape may have.
#[allow(clippy::struct_excessive_bools, reason = "as a block has them")]
#[derive(Clone, Debug)]
struct Kind {
    shape: Shape,
    has_biases: bool,
    has_head_norms: bool,
    is_rotated: bool,
    window: Option<usize>,
    /// Whether weights are of 8 bits.
    is_rounded: bool,
}

fn kinds() -> impl Strategy<Value = Kind> {
    let sizes = (1..=2_usize, 1..=5_usize, 1..=5_usize, 1..=9_usize, 1..=5_usize);
    let options = (any::<bool>(), any::<bool>(), any::<bool>(), proptest::option::of(1..20_usize), any::<bool>());
    (sizes, options).prop_map(
        |((kv_heads, group, head, hidden, inner), (has_biases, has_head_norms, is_rotated, window, is_rounded))| {
            let frequencies = (0..head * 8).map(|pair| 1.0 / (1.0 + pair as f32)).collect();
            let shape = Shape {
                hidden: hidden * 16,
                heads: kv_heads * group,
                kv_heads,
                head_dim: head * 16,
                inner: inner * 16,
                epsilon: 1e-5,
                frequencies,
                rotary_scaling: 1.1,
            };
            Kind { shape, has_biases, has_head_norms, is_rotated, window, is_rounded }
        },
    )
}

fn smallest(heads: usize) -> Shape {
    let frequencies = vec![0.5; 8];
    Shape { hidden: 16, heads, kv_heads: 1, head_dim: 16, inner: 16, epsilon: 1e-5, frequencies, rotary_scaling: 1.0 }
}

fn kind_of(shape: Shape, has_head_norms: bool) -> Kind {
    Kind { shape, has_biases: true, has_head_norms, is_rotated: true, window: None, is_rounded: false }
}

/// A linear layer, as it is and in 8 bits.
struct Layer {
    weight: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    bias: Vec<f32>,
}

impl Layer {
    fn new(seed: u64, outputs: usize, inputs: usize) -> Self {
        let weight = numbers(seed, outputs * inputs, 1.5 / (inputs as f32).sqrt());
        let rows = weight.chunks(inputs);
        let scales: Vec<f32> =
            rows.map(|row| row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0).collect();
        let codes = weight
            .chunks(inputs)
            .zip(&scales)
            .flat_map(|(row, scale)| row.iter().map(move |value| (value / scale).round() as i8));
        Self { codes: codes.collect(), scales, bias: numbers(seed + 1, outputs, 0.3), weight }
    }

    fn linear(&self, kind: &Kind) -> Linear<'_> {
        let weight =
            if kind.is_rounded { Weight::Codes(&self.codes, &self.scales) } else { Weight::Floats(&self.weight) };
        Linear { weight, bias: kind.has_biases.then_some(&self.bias) }
    }
}

/// The weights of one block.
struct Weights {
    qkv: Layer,
    output: Layer,
    gate_up: Layer,
    down: Layer,
    norms: [Vec<f32>; 4],
}

impl Weights {
    fn new(seed: u64, shape: &Shape) -> Self {
        let joined = (shape.heads + 2 * shape.kv_heads) * shape.head_dim;
        let norm = |number: u64, size: usize| {
            let mut norm: Vec<f32> =
                numbers(seed * 41 + number, size, 0.4).into_iter().map(|value| value + 1.0).collect();
            norm[3] = 12.0; // what goes through it has outliers
            norm
        };
        Self {
            qkv: Layer::new(seed * 31, joined, shape.hidden),
            output: Layer::new(seed * 31 + 2, shape.hidden, shape.heads * shape.head_dim),
            gate_up: Layer::new(seed * 31 + 4, 2 * shape.inner, shape.hidden),
            down: Layer::new(seed * 31 + 6, shape.hidden, shape.inner),
            norms: [norm(0, shape.hidden), norm(1, shape.hidden), norm(2, shape.head_dim), norm(3, shape.head_dim)],
        }
    }

    fn block(&self, kind: &Kind) -> Block<'_> {
        let [attended_norm, fed_norm, queries, keys] = &self.norms;
        Block {
            attended_norm,
            qkv: self.qkv.linear(kind),
            head_norms: kind.has_head_norms.then_some((queries, keys)),
            output: self.output.linear(kind),
            fed_norm,
            gate_up: self.gate_up.linear(kind),
            down: self.down.linear(kind),
            scaling: 0.1 / (kind.shape.head_dim as f32).sqrt(),
            is_rotated: kind.is_rotated,
            window: kind.window,
        }
    }
}

/// A sequence through blocks: keys and values of each, and how far it is.
#[derive(Clone)]
struct Sequence {
    slabs: Vec<(Vec<f32>, Vec<f32>)>,
    length: usize,
}

impl Sequence {
    fn new(blocks: usize, shape: &Shape) -> Self {
        let slab = vec![f32::NAN; shape.kv_heads * CAPACITY * shape.head_dim]; // what was never written must not be read
        Self { slabs: vec![(slab.clone(), slab); blocks], length: 0 }
    }

    fn piece(&mut self, length: usize) -> Piece<'_> {
        let start = self.length;
        self.length = start.wrapping_add(length);
        let caches = self.slabs.iter_mut().map(|(keys, values)| Cache { keys, values, capacity: CAPACITY });
        Piece { start, length, caches: caches.collect() }
    }
}

fn run(isa: Isa, threads: usize, kind: &Kind, blocks: &[Block<'_>], pieces: Vec<(&mut Sequence, &[f32])>) -> Vec<f32> {
    let pool = (threads > 1).then(|| ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let mut hidden = Vec::new();
    let mut views = Vec::new();
    for (sequence, states) in pieces {
        hidden.extend_from_slice(states);
        views.push(sequence.piece(states.len() / kind.shape.hidden));
    }
    forward(isa, pool.as_ref(), &kind.shape, blocks, &mut views, &mut hidden).unwrap();
    hidden
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn blocks_compute_what_they_say(kind in kinds(), lengths in vec(1..6_usize, 1..5), seed in 0..1000_u64) {
        let weights: Vec<Weights> = (0..2).map(|number| Weights::new(seed * 7 + number, &kind.shape)).collect();
        let blocks: Vec<Block<'_>> = weights.iter().map(|weights| weights.block(&kind)).collect();
        let hidden = numbers(seed, lengths.iter().sum::<usize>() * kind.shape.hidden, 2.0);
        let expected = slowly(&kind.shape, &blocks, &hidden);
        let tolerance = if kind.is_rounded { 2e-2 } else { 3e-5 }; // an input may go to the next step
        for isa in Isa::available() {
            let mut sequence = Sequence::new(2, &kind.shape);
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
        let empty: Vec<Sequence> = states.iter().map(|_| Sequence::new(1, &kind.shape)).collect();
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
fn work_that_is_worth_several_threads_comes_out_the_same() {
    let shape = Shape {
        hidden: 512,
        heads: 6,
        kv_heads: 3,
        head_dim: 64,
        inner: 1040, // parts do not come out even
        epsilon: 1e-5,
        frequencies: vec![0.3; 32],
        rotary_scaling: 1.0,
    };
    let kind = kind_of(shape, false);
    let weights = Weights::new(3, &kind.shape);
    for (count, is_rounded) in [(1, false), (2, false), (5, true), (13, false), (1, true)] {
        let kind = Kind { is_rounded, ..kind.clone() };
        let blocks = [weights.block(&kind)];
        let states = numbers(count, 512 * 30, 1.0);
        let outputs: Vec<Vec<f32>> = [1, 3]
            .into_iter()
            .map(|threads| {
                let mut sequences = vec![Sequence::new(1, &kind.shape); count as usize];
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
    for is_rounded in [false, true] {
        saturate(&Kind { is_rounded, ..kind.clone() });
    }
}

fn saturate(kind: &Kind) {
    let mut weights = Weights::new(5, &kind.shape);
    let layer = &mut weights.gate_up;
    layer.weight.iter_mut().chain(&mut layer.scales).for_each(|weight| *weight *= 1e3); // gates of several hundred
    let blocks = [weights.block(kind)];
    let (honest, bad) = (numbers(1, 16, 1.0), vec![f32::NAN; 16]);
    for isa in Isa::available() {
        let mut sequences = vec![Sequence::new(1, &kind.shape); 2];
        let (first, second) = sequences.split_at_mut(1);
        let outputs = run(isa, 1, kind, &blocks, vec![(&mut first[0], &bad), (&mut second[0], &honest)]);
        assert!(
            outputs[..16].iter().all(|value| value.is_nan()) && outputs[16..].iter().all(|value| value.is_finite())
        );
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let shape = smallest(2);
    let kind = kind_of(shape, true);
    let weights = Weights::new(1, &kind.shape);
    let block = weights.block(&kind);
    let of = |shape: &Shape, block: Block<'_>, start: usize, length: usize, values: usize| {
        let mut sequence = Sequence::new(1, &kind.shape);
        sequence.length = start;
        let result = forward(Isa::best(), None, shape, &[block], &mut [sequence.piece(length)], &mut vec![0.5; values]);
        let untouched =
            sequence.slabs.iter().all(|(keys, values)| keys.iter().chain(values).all(|value| value.is_nan()));
        assert!(result.is_ok() || untouched);
        result
    };
    assert_eq!(of(&kind.shape, block, 0, 2, 32), Ok(()));
    assert_eq!(of(&kind.shape, block, CAPACITY - 1, 2, 32), Err(BlockError::Room));
    assert_eq!(of(&kind.shape, block, usize::MAX, 2, 32), Err(BlockError::Room));
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
        &mut [Sequence::new(1, &kind.shape).piece(1)],
        &mut [0.5; 16],
    );
    assert_eq!(missing, Err(BlockError::Room));
    assert_eq!(forward(Isa::best(), None, &kind.shape, &[block], &mut [], &mut []), Ok(()));
}
