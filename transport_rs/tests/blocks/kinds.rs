//! The inputs of the block tests: blocks of every kind, weights in each form, and sequences.

use llmnode_transport::blocks::{
    Block, Cache, GROUP, Half, Kept, Linear, Piece, Q4, Q8, Shape, Updates, Weight, forward,
};
use llmnode_transport::codec::Isa;
use llmnode_transport::codec::numbers::f32_to_f16;
use proptest::prelude::*;
use rayon::ThreadPoolBuilder;

pub const CAPACITY: usize = 40;

/// Numbers about 0, of a generator whose state is the seed.
pub fn numbers(seed: u64, count: usize, scale: f32) -> Vec<f32> {
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
pub struct Kind {
    pub shape: Shape,
    pub has_biases: bool,
    pub has_head_norms: bool,
    pub is_rotated: bool,
    pub window: Option<usize>,
    pub form: Form,
    pub has_kv_in_codes: bool,
}

/// The format of the weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Floats,
    Halves(Half),
    Q4,
    Q8,
    Codes,
}

pub const FORMS: [Form; 6] =
    [Form::Q4, Form::Q8, Form::Floats, Form::Halves(Half::Bf16), Form::Halves(Half::F16), Form::Codes];

pub fn kinds() -> impl Strategy<Value = Kind> {
    let sizes = (1..=2_usize, 1..=5_usize, 1..=5_usize, 1..=9_usize, 1..=5_usize);
    let options = (
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
        proptest::option::of(1..20_usize),
        proptest::sample::select(&FORMS),
        any::<bool>(),
    );
    (sizes, options).prop_map(
        |(
            (kv_heads, group, head, hidden, inner),
            (has_biases, has_head_norms, is_rotated, window, form, has_kv_in_codes),
        )| {
            let unit = if matches!(form, Form::Q4 | Form::Q8) { GROUP } else { 16 };
            let frequencies = (0..head * unit / 2).map(|pair| 1.0 / (1.0 + pair as f32)).collect();
            let shape = Shape {
                hidden: hidden * unit,
                heads: kv_heads * group,
                kv_heads,
                head_dim: head * unit,
                inner: inner * unit,
                epsilon: 1e-5,
                frequencies,
                rotary_scaling: 1.1,
            };
            Kind { shape, has_biases, has_head_norms, is_rotated, window, form, has_kv_in_codes }
        },
    )
}

pub fn smallest(heads: usize) -> Shape {
    let frequencies = vec![0.5; 8];
    Shape { hidden: 16, heads, kv_heads: 1, head_dim: 16, inner: 16, epsilon: 1e-5, frequencies, rotary_scaling: 1.0 }
}

pub fn kind_of(shape: Shape, has_head_norms: bool) -> Kind {
    let form = Form::Floats;
    Kind { shape, has_biases: true, has_head_norms, is_rotated: true, window: None, form, has_kv_in_codes: false }
}

/// A linear layer, in each form.
#[derive(Clone)]
pub struct Layer {
    pub weight: Vec<f32>,
    pub bf16: Vec<u16>,
    pub f16: Vec<u16>,
    pub pairs: Vec<u8>,
    pub levels: Vec<[f32; 2]>,
    pub steps: Vec<f32>,
    pub codes: Vec<i8>,
    pub scales: Vec<f32>,
    pub bias: Vec<f32>,
}

impl Layer {
    pub fn new(seed: u64, outputs: usize, inputs: usize) -> Self {
        let weight = numbers(seed, outputs * inputs, 1.5 / (inputs as f32).sqrt());
        let rows = weight.chunks(inputs);
        let scales: Vec<f32> =
            rows.map(|row| row.iter().fold(0.0_f32, |most, value| most.max(value.abs())) / 127.0).collect();
        let codes = weight
            .chunks(inputs)
            .zip(&scales)
            .flat_map(|(row, scale)| row.iter().map(move |value| (value / scale).round() as i8));
        Self {
            codes: codes.collect(),
            bf16: weight.iter().map(|value| (value.to_bits() >> 16) as u16).collect(),
            pairs: weight.iter().step_by(2).map(|value| value.to_bits() as u8).collect(),
            levels: weight.iter().step_by(GROUP).map(|value| [value.abs() / 7.5, -value.abs()]).collect(),
            steps: weight.iter().step_by(GROUP).map(|value| value.abs() / 100.0).collect(),
            f16: weight.iter().map(|value| f32_to_f16(*value)).collect(),
            scales,
            bias: numbers(seed + 1, outputs, 0.3),
            weight,
        }
    }

    pub fn linear(&self, kind: &Kind) -> Linear<'_> {
        let weight = match kind.form {
            Form::Floats => Weight::Floats(&self.weight),
            Form::Halves(Half::Bf16) => Weight::Halves(Half::Bf16, &self.bf16),
            Form::Halves(Half::F16) => Weight::Halves(Half::F16, &self.f16),
            Form::Q4 => Weight::Q4(Q4 { codes: &self.pairs, levels: &self.levels }),
            Form::Q8 => Weight::Q8(Q8 { codes: &self.codes, steps: &self.steps }),
            Form::Codes => Weight::Codes(&self.codes, &self.scales),
        };
        Linear { weight, bias: kind.has_biases.then_some(&self.bias) }
    }
}

/// The weights of one block.
#[derive(Clone)]
pub struct Weights {
    pub qkv: Layer,
    pub output: Layer,
    pub gate_up: Layer,
    pub down: Layer,
    pub norms: [Vec<f32>; 4],
}

impl Weights {
    pub fn new(seed: u64, shape: &Shape) -> Self {
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

    pub fn layers(&mut self) -> [&mut Layer; 4] {
        [&mut self.qkv, &mut self.output, &mut self.gate_up, &mut self.down]
    }

    pub fn block(&self, kind: &Kind) -> Block<'_> {
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
pub struct Sequence {
    pub slabs: Vec<Slabs>,
    pub length: usize,
}

/// In the one form or the other, `floats` with keys before values.
#[derive(Clone)]
pub struct Slabs {
    pub floats: Vec<f32>,
    codes: Option<Vec<i8>>,
}

impl Sequence {
    pub fn new(blocks: usize, kind: &Kind) -> Self {
        let rows = 2 * kind.shape.kv_heads * CAPACITY;
        let values = rows * kind.shape.head_dim;
        let codes = kind.has_kv_in_codes.then(|| vec![77; values]);
        let floats = vec![f32::NAN; if codes.is_some() { rows } else { values }]; // what was never written must not be read
        Self { slabs: vec![Slabs { floats, codes }; blocks], length: 0 }
    }

    pub fn piece(&mut self, length: usize) -> Piece<'_> {
        let start = self.length;
        self.length = start.wrapping_add(length);
        let caches = self.slabs.iter_mut().map(|Slabs { floats, codes }| {
            let kept = if let Some(codes) = codes {
                Kept::Codes(codes, floats)
            } else {
                let half = floats.len() / 2;
                let (keys, values) = floats.split_at_mut(half);
                Kept::Floats(keys, values)
            };
            Cache { kept, capacity: CAPACITY }
        });
        Piece { adapter: None, start, length, caches: caches.collect() }
    }
}

pub fn run(
    isa: Isa,
    threads: usize,
    kind: &Kind,
    blocks: &[Block<'_>],
    pieces: Vec<(&mut Sequence, &[f32])>,
) -> Vec<f32> {
    let pieces = pieces.into_iter().map(|(sequence, states)| (sequence, states, None));
    run_adapted(isa, threads, kind, blocks, pieces.collect())
}

/// A sequence, the states of its next positions, and its adapter.
pub type Adapted<'a> = (&'a mut Sequence, &'a [f32], Option<&'a [Updates<'a>]>);

pub fn run_adapted(isa: Isa, threads: usize, kind: &Kind, blocks: &[Block<'_>], pieces: Vec<Adapted<'_>>) -> Vec<f32> {
    let pool = (threads > 1).then(|| ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let mut hidden = Vec::new();
    let mut views = Vec::new();
    for (sequence, states, adapter) in pieces {
        hidden.extend_from_slice(states);
        views.push(Piece { adapter, ..sequence.piece(states.len() / kind.shape.hidden) });
    }
    forward(isa, pool.as_ref(), &kind.shape, blocks, &mut views, &mut hidden).unwrap();
    hidden
}
