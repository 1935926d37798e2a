//! What a forward is given: blocks, pieces of sequences, and their sizes, which are checked before anything is computed.

use std::error::Error;
use std::fmt;

use super::cache::Cache;
use super::groups::{Q4, Q8};
use super::rounded;
use crate::simd::LANES;

/// Sizes are less: `f32` has all whole numbers up to it, and products of three fit a `usize`.
const SIZES_END: usize = 1 << 20;

/// What blocks of a model have in common.
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
    /// Of all norms.
    pub epsilon: f32,
    /// Of rotary embeddings: by how much each pair of a head's values turns from one position to the next.
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

/// What inputs are multiplied with.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// As it is.
    Floats(&'a [f32]),
    /// In 16 bits, of which there is an `f32` each.
    Halves(Half, &'a [u16]),
    /// In 4 bits: widened, they are as they were.
    Q4(Q4<'a>),
    /// In 8 bits, likewise. Inputs are as they are.
    Q8(Q8<'a>),
    /// In 8 bits, with a scale for each output. Inputs are rounded to 8 bits too, see `rounded.rs`.
    Codes(&'a [i8], &'a [f32]),
}

impl Linear<'_> {
    pub(super) fn check(&self, name: &'static str, outputs: usize, inputs: usize) -> Result<(), BlockError> {
        let are_sizes = inputs.is_multiple_of(LANES) && outputs.checked_mul(inputs).is_some_and(|weights| weights > 0);
        let fits = are_sizes && self.weight.fits(outputs, inputs) && self.bias.is_none_or(|bias| bias.len() == outputs);
        if fits { Ok(()) } else { Err(BlockError::Length(name)) }
    }
}

/// What 16 bits are.
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

/// One block. Products are joined: queries, keys and values of one; gate and up of another.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    /// Before attention: the weight of an RMS norm.
    pub attended_norm: &'a [f32],
    /// Of queries, keys and values.
    pub qkv: Linear<'a>,
    /// Of each head of queries, and each of keys: the weights of RMS norms.
    pub head_norms: Option<(&'a [f32], &'a [f32])>,
    /// Of what attention gives.
    pub output: Linear<'a>,
    /// Before the MLP.
    pub fed_norm: &'a [f32],
    /// Of gate and up.
    pub gate_up: Linear<'a>,
    /// Of what they give.
    pub down: Linear<'a>,
    /// A factor for scores of attention.
    pub scaling: f32,
    /// Whether queries and keys turn by position.
    pub is_rotated: bool,
    /// So many positions are looked at, one's own too; all, if that is not said.
    pub window: Option<usize>,
}

/// Positions of one sequence that follow each other.
#[derive(Debug)]
pub struct Piece<'a> {
    /// The first one's place in the sequence. What is before it is in the caches.
    pub start: usize,
    /// How many they are.
    pub length: usize,
    /// Of each block that they go through.
    pub caches: Vec<Cache<'a>>,
}

/// Why a forward, or a block, was refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockError {
    /// A size that vectors do not fit, heads of queries that do not share those of keys evenly, or frequencies for another
    /// number of pairs than heads have.
    Shape,
    /// What is named has another number of values than its shape says.
    Length(&'static str),
    /// A window in which a position does not see itself.
    Window,
    /// A piece that its caches have no room for.
    Room,
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
            Self::Room => f.write_str("a piece that its cache has no room for"),
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
}

impl Block<'_> {
    /// # Errors
    ///
    /// [`BlockError::Length`] with the first part that does not fit `shape`.
    pub fn check(&self, shape: &Shape) -> Result<(), BlockError> {
        let attended = shape.heads * shape.head_dim;
        let linears = [
            ("qkv", self.qkv, shape.hidden, shape.joined()),
            ("output", self.output, attended, shape.hidden),
            ("gate_up", self.gate_up, shape.hidden, 2 * shape.inner),
            ("down", self.down, shape.inner, shape.hidden),
        ];
        for (name, linear, inputs, outputs) in linears {
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
