//! The input of a forward: blocks, pieces of sequences, and their sizes. They are checked before anything is computed.

use std::error::Error;
use std::fmt;

use super::adapters::Updates;
use super::cache::Cache;
use super::groups::{Q4, Q8};
use super::rounded;
use crate::simd::LANES;

/// All sizes are below this: `f32` has every whole number up to it, and a product of three fits a `usize`.
const SIZES_END: usize = 1 << 20;

/// The sizes that all blocks of a model share.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Values of a hidden state.
    pub hidden: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys, and of values.
    pub kv_heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Values between the products of the MLP.
    pub inner: usize,
    /// The epsilon of all norms.
    pub epsilon: f32,
    /// Rotary embeddings: the angle by which each pair of a head's values turns from one position to the next.
    pub frequencies: Vec<f32>,
    /// A factor for rotary embeddings.
    pub rotary_scaling: f32,
}

/// A linear layer.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `(outputs, inputs)`
    pub weight: Weight<'a>,
    /// `(outputs)`, if it has one.
    pub bias: Option<&'a [f32]>,
}

/// The weights of a linear layer, in one of several formats.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// 32-bit floats.
    Floats(&'a [f32]),
    /// 16-bit floats, each widened to `f32` exactly.
    Halves(Half, &'a [u16]),
    /// 4 bits, widened exactly.
    Q4(Q4<'a>),
    /// 8 bits, likewise. Inputs stay `f32`.
    Q8(Q8<'a>),
    /// 8 bits, with a scale for each output. Inputs are rounded to 8 bits too, see `rounded.rs`.
    Codes(&'a [i8], &'a [f32]),
}

impl Linear<'_> {
    pub(super) fn check(&self, name: &'static str, outputs: usize, inputs: usize) -> Result<(), BlockError> {
        let are_sizes = inputs.is_multiple_of(LANES) && outputs.checked_mul(inputs).is_some_and(|weights| weights > 0);
        let fits = are_sizes && self.weight.fits(outputs, inputs) && self.bias.is_none_or(|bias| bias.len() == outputs);
        if fits { Ok(()) } else { Err(BlockError::Length(name)) }
    }
}

/// The two 16-bit formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Half {
    /// The upper half of an `f32`.
    Bf16,
    /// `binary16` of IEEE 754.
    F16,
}

impl Weight<'_> {
    fn fits(&self, outputs: usize, inputs: usize) -> bool {
        match self {
            Self::Floats(values) => values.len() == outputs * inputs,
            Self::Halves(_, values) => values.len() == outputs * inputs,
            Self::Q4(weights) => weights.fits(outputs, inputs),
            Self::Q8(weights) => weights.fits(outputs, inputs),
            Self::Codes(codes, scales) => {
                codes.len() == outputs * inputs && scales.len() == outputs && inputs < rounded::INPUTS_END
            }
        }
    }
}

/// One block. The weights of queries, keys and values are one matrix; those of gate and up are another.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// The weight of the RMS norm before attention.
    pub attended_norm: &'a [f32],
    /// Projects to queries, keys and values.
    pub qkv: Linear<'a>,
    /// The weights of the RMS norms of each head: of queries, and of keys.
    pub head_norms: Option<(&'a [f32], &'a [f32])>,
    /// Projects the output of attention.
    pub output: Linear<'a>,
    /// The weight of the RMS norm before the MLP.
    pub fed_norm: &'a [f32],
    /// Projects to gate and up.
    pub gate_up: Linear<'a>,
    /// Projects their product back.
    pub down: Linear<'a>,
    /// A factor for scores of attention.
    pub scaling: f32,
    /// Whether queries and keys turn by position.
    pub is_rotated: bool,
    /// The number of positions that attention sees, its own among them. `None` means all.
    pub window: Option<usize>,
}

/// Positions of one sequence that follow each other.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The updates of each block, if it has an adapter. Neighbours that share them are computed together.
    pub adapter: Option<&'a [Updates<'a>]>,
    /// The first one's place in the sequence. The caches hold the positions before it.
    pub start: usize,
    /// The number of positions.
    pub length: usize,
    /// One for each block.
    pub caches: Vec<Cache<'a>>,
}

/// Why a forward, or a block, was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockError {
    /// A size that vectors do not fit, heads of queries that do not share those of keys evenly, or frequencies for another
    /// number of pairs than heads have.
    Shape,
    /// The named input has another number of values than its shape says.
    Length(&'static str),
    /// A window in which a position does not see itself.
    Window,
    /// A piece that does not fit its caches.
    CacheFull,
}

impl fmt::Display for BlockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape => {
                write!(
                    f,
                    "sizes must be multiples of {LANES}, heads of queries one of those of keys; of frequencies half a head's"
                )
            }
            Self::Length(what) => write!(f, "{what}: not as many values as the shape says"),
            Self::Window => f.write_str("a window of no position"),
            Self::CacheFull => f.write_str("a piece that does not fit into its cache"),
        }
    }
}

impl Error for BlockError {}

impl Shape {
    /// # Errors
    ///
    /// [`BlockError::Shape`]
    pub fn check(&self) -> Result<(), BlockError> {
        let sizes = [
            self.hidden,
            self.head_dim,
            self.inner,
            self.heads.saturating_mul(LANES),
            self.kv_heads.saturating_mul(LANES),
        ];
        let are_whole = sizes.iter().all(|size| (1..SIZES_END).contains(size) && size.is_multiple_of(LANES));
        let are_pairs = self.frequencies.len() * 2 == self.head_dim;
        let are_shared = are_whole && self.heads.is_multiple_of(self.kv_heads);
        if are_pairs && are_shared { Ok(()) } else { Err(BlockError::Shape) }
    }

    pub(super) fn joined(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// The linear layers of a block: the name, inputs and outputs of each.
    pub(super) fn layers(&self) -> [(&'static str, usize, usize); 4] {
        [
            ("qkv", self.hidden, self.joined()),
            ("output", self.heads * self.head_dim, self.hidden),
            ("gate_up", self.hidden, 2 * self.inner),
            ("down", self.inner, self.hidden),
        ]
    }
}

impl Block<'_> {
    /// # Errors
    ///
    /// [`BlockError::Length`] with the first part that does not fit `shape`.
    pub fn check(&self, shape: &Shape) -> Result<(), BlockError> {
        let linears = [self.qkv, self.output, self.gate_up, self.down];
        for ((name, inputs, outputs), linear) in shape.layers().into_iter().zip(linears) {
            linear.check(name, outputs, inputs)?;
        }
        if self.window == Some(0) {
            return Err(BlockError::Window);
        }
        let of_heads = self.head_norms.is_none_or(|(queries, keys)| [queries.len(), keys.len()] == [shape.head_dim; 2]);
        if [self.attended_norm.len(), self.fed_norm.len()] != [shape.hidden; 2] || !of_heads {
            return Err(BlockError::Length("a norm"));
        }
        Ok(())
    }
}
