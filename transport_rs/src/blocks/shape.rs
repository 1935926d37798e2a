//! What a forward is given: blocks, pieces of sequences, and their sizes, which are checked before anything is computed.

use std::error::Error;
use std::fmt;

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
    /// In 8 bits, with a scale for each output. Inputs are rounded to 8 bits too, see `rounded.rs`.
    Codes(&'a [i8], &'a [f32]),
}

impl Weight<'_> {
    fn fits(&self, outputs: usize, inputs: usize) -> bool {
        match self {
            Self::Floats(values) => values.len() == outputs * inputs,
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

/// Keys and values of a sequence in one block: `(kv_heads, capacity, head_dim)` each.
#[derive(Debug)]
pub struct Cache<'a> {
    /// Keys, turned.
    pub keys: &'a mut [f32],
    /// Values.
    pub values: &'a mut [f32],
    /// Positions that there is room for.
    pub capacity: usize,
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
            if !linear.weight.fits(outputs, inputs) || linear.bias.is_some_and(|bias| bias.len() != outputs) {
                return Err(BlockError::Length(name));
            }
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
