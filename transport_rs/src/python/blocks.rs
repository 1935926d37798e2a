//! Blocks of the Llama kind as a Python class. What is promised to Python is in `_native.pyi`.

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::buffers::{ByteView, Slab, View};
use crate::blocks::{self, BlockError, Cache, Piece, Shape};
use crate::simd::Isa;

#[pyclass(module = "llmnode._native", frozen)]
pub(super) struct LlamaBlocks {
    shape: Shape,
    blocks: Vec<Block>,
    pool: Option<ThreadPool>,
}

/// The weights of one, held in place.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Block {
    attended_norm: View<f32>,
    qkv: Weight,
    qkv_bias: Option<View<f32>>,
    head_norms: Option<(View<f32>, View<f32>)>,
    output: Weight,
    output_bias: Option<View<f32>>,
    fed_norm: View<f32>,
    gate_up: Weight,
    gate_up_bias: Option<View<f32>>,
    down: Weight,
    down_bias: Option<View<f32>>,
    scaling: f32,
    is_rotated: bool,
    window: Option<usize>,
}

/// As it is, or codes and their scales.
#[derive(FromPyObject)]
enum Weight {
    Floats(View<f32>),
    Codes(View<i8>, View<f32>),
}

impl Block {
    fn view(&self) -> blocks::Block<'_> {
        blocks::Block {
            attended_norm: self.attended_norm.values(),
            qkv: linear(&self.qkv, self.qkv_bias.as_ref()),
            head_norms: self.head_norms.as_ref().map(|(queries, keys)| (queries.values(), keys.values())),
            output: linear(&self.output, self.output_bias.as_ref()),
            fed_norm: self.fed_norm.values(),
            gate_up: linear(&self.gate_up, self.gate_up_bias.as_ref()),
            down: linear(&self.down, self.down_bias.as_ref()),
            scaling: self.scaling,
            is_rotated: self.is_rotated,
            window: self.window,
        }
    }
}

fn linear<'a>(weight: &'a Weight, bias: Option<&'a View<f32>>) -> blocks::Linear<'a> {
    let weight = match weight {
        Weight::Floats(values) => blocks::Weight::Floats(values.values()),
        Weight::Codes(codes, scales) => blocks::Weight::Codes(codes.values(), scales.values()),
    };
    blocks::Linear { weight, bias: bias.map(View::values) }
}

#[pymethods]
impl LlamaBlocks {
    #[new]
    #[pyo3(signature = (blocks, *, hidden, heads, kv_heads, head_dim, inner, epsilon, frequencies, rotary_scaling, threads))]
    #[expect(clippy::too_many_arguments, reason = "by name, in Python")]
    fn new(
        blocks: Vec<Block>,
        hidden: usize,
        heads: usize,
        kv_heads: usize,
        head_dim: usize,
        inner: usize,
        epsilon: f32,
        frequencies: Vec<f32>,
        rotary_scaling: f32,
        threads: usize,
    ) -> PyResult<Self> {
        let shape = Shape { hidden, heads, kv_heads, head_dim, inner, epsilon, frequencies, rotary_scaling };
        shape.check()?;
        blocks.iter().try_for_each(|block| block.view().check(&shape))?;
        let pool = (threads > 1).then(|| ThreadPoolBuilder::new().num_threads(threads).build()).transpose();
        Ok(Self { shape, blocks, pool: pool.map_err(|error| PyOSError::new_err(error.to_string()))? })
    }

    /// Whether this processor has vectors that we know.
    #[staticmethod]
    fn is_fast() -> bool {
        Isa::best() != Isa::SCALAR
    }

    /// Each piece: slabs of the sequence, its first position, hidden states.
    fn forward<'py>(
        &self,
        py: Python<'py>,
        first: usize,
        pieces: Vec<(Bound<'py, SequenceSlabs>, usize, ByteView)>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let row_bytes = self.shape.hidden * size_of::<f32>();
        let mut slabs = pieces.iter().map(|(slabs, _, _)| slabs.try_borrow_mut()).collect::<Result<Vec<_>, _>>()?;
        let through = slabs.first().map_or(0, |slabs| slabs.of_blocks.len());
        let of_pieces = self.blocks.get(first..first.saturating_add(through)).ok_or_else(no_such_blocks)?;
        let mut hidden = Vec::new();
        let mut lengths = Vec::new();
        for (_, _, data) in &pieces {
            let (floats, _) = data.bytes().as_chunks();
            if !data.bytes().len().is_multiple_of(row_bytes) {
                return Err(BlockError::Length("hidden states").into());
            }
            hidden.extend(floats.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
            lengths.push(data.bytes().len() / row_bytes);
        }
        let caches = slabs.iter_mut().map(|slabs| slabs.caches());
        let views = caches.zip(&pieces).zip(lengths);
        let mut views: Vec<_> =
            views.map(|((caches, (_, start, _)), length)| Piece { start: *start, length, caches }).collect();
        py.detach(|| {
            let blocks: Vec<_> = of_pieces.iter().map(Block::view).collect();
            blocks::forward(Isa::best(), self.pool.as_ref(), &self.shape, &blocks, &mut views, &mut hidden)
        })?;
        let mut rest = hidden.as_slice();
        let outputs = views.iter().map(|piece| {
            let (own, others) = rest.split_at(piece.length * self.shape.hidden);
            rest = others;
            PyBytes::new_with(py, piece.length * row_bytes, |out| {
                let places = out.as_chunks_mut().0;
                places.iter_mut().zip(own).for_each(|(place, value)| *place = value.to_ne_bytes());
                Ok(())
            })
        });
        outputs.collect()
    }
}

/// Keys and values of one sequence, of each block that it goes through.
#[pyclass(module = "llmnode._native")]
pub(super) struct SequenceSlabs {
    of_blocks: Vec<(Slab<f32>, Slab<f32>)>,
    capacity: usize,
}

#[pymethods]
impl SequenceSlabs {
    #[new]
    fn new(of_blocks: Vec<(Slab<f32>, Slab<f32>)>, capacity: usize) -> PyResult<Self> {
        let slabs: Vec<_> = of_blocks.iter().flat_map(|(keys, values)| [keys, values]).collect();
        for (number, slab) in slabs.iter().enumerate() {
            if slabs.iter().skip(number + 1).any(|other| slab.overlaps(other)) {
                return Err(PyValueError::new_err("slabs overlap"));
            }
        }
        Ok(Self { of_blocks, capacity })
    }
}

impl SequenceSlabs {
    fn caches(&mut self) -> Vec<Cache<'_>> {
        let capacity = self.capacity;
        let caches = self.of_blocks.iter_mut();
        caches.map(|(keys, values)| Cache { keys: keys.values(), values: values.values(), capacity }).collect()
    }
}

fn no_such_blocks() -> PyErr {
    PyValueError::new_err("a sequence through blocks that are not here")
}

impl From<BlockError> for PyErr {
    fn from(error: BlockError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}
