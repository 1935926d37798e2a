//! Blocks of the Llama kind as a Python class. The interface for Python is in `_native.pyi`.

use std::iter;
use std::ops::Range;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyOSError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::buffers::{ByteView, Slab, View, range, refuse_overlaps};
use crate::blocks::{self, BlockError, Cache, Half, Kept, Piece, Q4, Q8, Shape};
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

/// A weight from Python: a buffer of floats, or the name of a format and its buffers.
pub(super) enum Weight {
    Floats(View<f32>),
    Halves(Half, View<u16>),
    Q4(View<u8>, View<f32>),
    Q8(View<i8>, View<f32>),
    Codes(View<i8>, View<f32>),
}

impl<'py> FromPyObject<'_, 'py> for Weight {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let Ok(parts) = object.cast::<PyTuple>() else {
            return Ok(Self::Floats(object.extract()?));
        };
        let part = |at| parts.get_item(at).map_err(|_| PyTypeError::new_err("a weight without all its numbers"));
        let numbers = part(1)?;
        match part(0)?.extract()? {
            "bfloat16" => Ok(Self::Halves(Half::Bf16, numbers.extract()?)),
            "float16" => Ok(Self::Halves(Half::F16, numbers.extract()?)),
            "q4" => Ok(Self::Q4(numbers.extract()?, part(2)?.extract()?)),
            "q8" => Ok(Self::Q8(numbers.extract()?, part(2)?.extract()?)),
            "int8" => Ok(Self::Codes(numbers.extract()?, part(2)?.extract()?)),
            other => Err(PyTypeError::new_err(format!("weights in {other} are not known"))),
        }
    }
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
        Weight::Halves(half, values) => blocks::Weight::Halves(*half, values.values()),
        Weight::Q4(codes, levels) => blocks::Weight::Q4(q4(codes, levels)),
        Weight::Q8(codes, steps) => blocks::Weight::Q8(Q8 { codes: codes.values(), steps: steps.values() }),
        Weight::Codes(codes, scales) => blocks::Weight::Codes(codes.values(), scales.values()),
    };
    blocks::Linear { weight, bias: bias.map(View::values) }
}

fn q4<'a>(codes: &'a View<u8>, levels: &'a View<f32>) -> Q4<'a> {
    Q4 { codes: codes.values(), levels: levels.values().as_chunks().0 }
}

/// Writes `codes` and `levels` of `weights`, and returns whether they stand for exactly these weights.
#[pyfunction]
pub(super) fn pack_q4(
    py: Python<'_>,
    weights: View<f32>,
    mut codes: Slab<u8>,
    mut levels: Slab<f32>,
) -> PyResult<bool> {
    refuse_overlaps(&[codes.range(), levels.range()], &[range(weights.values())])?;
    Ok(py.detach(|| blocks::pack(weights.values(), codes.values(), levels.values().as_chunks_mut().0))?)
}

/// `pack_q4` in 8 bits.
#[pyfunction]
pub(super) fn pack_q8(py: Python<'_>, weights: View<f32>, mut codes: Slab<i8>, mut steps: Slab<f32>) -> PyResult<bool> {
    refuse_overlaps(&[codes.range(), steps.range()], &[range(weights.values())])?;
    Ok(py.detach(|| blocks::pack_q8(weights.values(), codes.values(), steps.values()))?)
}

/// `weight` as it is.
#[pyfunction]
pub(super) fn widen(py: Python<'_>, weight: Weight, mut out: Slab<f32>) -> PyResult<()> {
    refuse_overlaps(&[out.range()], &weight.ranges())?;
    let is_done = py.detach(|| blocks::widen(Isa::best(), linear(&weight, None).weight, out.values()));
    if is_done { Ok(()) } else { Err(BlockError::Length("weights").into()) }
}

impl Weight {
    fn ranges(&self) -> Vec<Range<usize>> {
        match self {
            Self::Floats(values) => vec![range(values.values())],
            Self::Halves(_, values) => vec![range(values.values())],
            Self::Q4(codes, levels) => vec![range(codes.values()), range(levels.values())],
            Self::Q8(codes, scales) | Self::Codes(codes, scales) => vec![range(codes.values()), range(scales.values())],
        }
    }
}

fn pool_of(threads: usize) -> PyResult<Option<ThreadPool>> {
    let pool = (threads > 1).then(|| ThreadPoolBuilder::new().num_threads(threads).build()).transpose();
    pool.map_err(|error| PyOSError::new_err(error.to_string()))
}

/// Products of a few rows with one weight, held in place.
#[pyclass(module = "llmnode._native", frozen)]
pub(super) struct Product {
    weight: Weight,
    outputs: usize,
    inputs: usize,
    pool: Option<ThreadPool>,
}

#[pymethods]
impl Product {
    #[new]
    fn new(weight: Weight, outputs: usize, inputs: usize, threads: usize) -> PyResult<Self> {
        let product = Self { weight, outputs, inputs, pool: pool_of(threads)? };
        product.multiply(&[])?;
        Ok(product)
    }

    fn into(&self, py: Python<'_>, rows: View<f32>, mut out: Slab<f32>) -> PyResult<()> {
        let read = [self.weight.ranges(), vec![range(rows.values())]].concat();
        refuse_overlaps(&[out.range()], &read)?;
        let products = py.detach(|| self.multiply(rows.values()))?;
        let places = out.values();
        if places.len() != products.len() {
            return Err(BlockError::Length("out").into());
        }
        places.copy_from_slice(&products);
        Ok(())
    }
}

impl Product {
    fn multiply(&self, rows: &[f32]) -> Result<Vec<f32>, BlockError> {
        let sizes = (self.outputs, self.inputs);
        blocks::multiply(Isa::best(), self.pool.as_ref(), linear(&self.weight, None), sizes, rows)
    }
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
        Ok(Self { shape, blocks, pool: pool_of(threads)? })
    }

    /// Whether this processor has vectors that we know.
    #[staticmethod]
    fn is_fast() -> bool {
        Isa::best() != Isa::SCALAR
    }

    /// Each piece: slabs of the sequence, how many of their blocks are before, its first position, hidden states. Each
    /// has its place in `adapters`, if any has one.
    #[pyo3(signature = (first, end, pieces, adapters = None))]
    fn forward<'py>(
        &self,
        py: Python<'py>,
        first: usize,
        end: usize,
        pieces: Vec<(Bound<'py, SequenceSlabs>, usize, usize, ByteView)>,
        adapters: Option<Vec<Option<Bound<'py, LlamaAdapter>>>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let adapters = adapters.unwrap_or_else(|| vec![None; pieces.len()]);
        if adapters.len() != pieces.len() {
            return Err(PyValueError::new_err("adapters of another number of pieces"));
        }
        let row_bytes = self.shape.hidden * size_of::<f32>();
        let mut slabs = pieces.iter().map(|(slabs, ..)| slabs.try_borrow_mut()).collect::<Result<Vec<_>, _>>()?;
        let of_pieces = self.blocks.get(first..end).ok_or_else(no_such_blocks)?;
        let mut hidden = Vec::new();
        let mut lengths = Vec::new();
        for (.., data) in &pieces {
            let (floats, _) = data.bytes().as_chunks();
            if !data.bytes().len().is_multiple_of(row_bytes) {
                return Err(BlockError::Length("hidden states").into());
            }
            hidden.extend(floats.iter().map(|bytes| f32::from_ne_bytes(*bytes)));
            lengths.push(data.bytes().len() / row_bytes);
        }
        let runs = adapters.chunk_by(|one, other| match (one, other) {
            (Some(one), Some(other)) => one.is(other),
            (one, other) => one.is_none() && other.is_none(),
        });
        let runs = runs.map(|run| Ok((run.len(), updates_of(run.first(), self.blocks.len(), first..end)?)));
        let runs = runs.collect::<PyResult<Vec<_>>>()?;
        let of_adapters = runs.iter().flat_map(|(pieces, updates)| iter::repeat_n(updates.as_deref(), *pieces));
        let views = slabs.iter_mut().zip(&pieces).zip(lengths).zip(of_adapters);
        let views = views.map(|(((slabs, (_, passed, start, _)), length), adapter)| {
            let caches = slabs.caches(*passed, of_pieces.len());
            Piece { adapter, start: *start, length, caches }
        });
        let mut views: Vec<_> = views.collect();
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

/// The updates of an adapter for the linear layers of all blocks, held in place.
#[pyclass(module = "llmnode._native", frozen)]
pub(super) struct LlamaAdapter {
    of_blocks: Vec<Updates>,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Updates {
    qkv: Vec<Update>,
    output: Vec<Update>,
    gate_up: Vec<Update>,
    down: Vec<Update>,
}

/// The first output, both matrices and the scale.
type Update = (usize, View<f32>, View<f32>, f32);

#[pymethods]
impl LlamaAdapter {
    #[new]
    fn new(of_blocks: Vec<Updates>) -> Self {
        Self { of_blocks }
    }
}

impl Updates {
    fn view(&self) -> blocks::Updates<'_> {
        let [qkv, output, gate_up, down] = [&self.qkv, &self.output, &self.gate_up, &self.down].map(|updates| {
            let views = updates.iter().map(|(first, a, b, scale)| blocks::Update {
                first: *first,
                a: a.values(),
                b: b.values(),
                scale: *scale,
            });
            views.collect()
        });
        blocks::Updates { qkv, output, gate_up, down }
    }
}

/// The updates of some blocks out of `count`, if there is an adapter.
fn updates_of<'a>(
    adapter: Option<&'a Option<Bound<'_, LlamaAdapter>>>,
    count: usize,
    blocks: Range<usize>,
) -> PyResult<Option<Vec<blocks::Updates<'a>>>> {
    let Some(Some(adapter)) = adapter else {
        return Ok(None);
    };
    let of_blocks = &adapter.get().of_blocks;
    match of_blocks.get(blocks) {
        Some(some) if of_blocks.len() == count => Ok(Some(some.iter().map(Updates::view).collect())),
        _ => Err(BlockError::Length("an adapter").into()),
    }
}

/// Keys and values of one sequence, of each block that it goes through.
#[pyclass(module = "llmnode._native")]
pub(super) struct SequenceSlabs {
    of_blocks: Vec<Slabs>,
    capacity: usize,
}

/// The buffers of a [`Kept`].
enum Slabs {
    Floats(Slab<f32>, Slab<f32>),
    Codes(Slab<i8>, Slab<f32>),
}

impl<'py> FromPyObject<'_, 'py> for Slabs {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (first, second): (Bound<'py, PyAny>, Slab<f32>) = object.extract()?;
        if PyBuffer::<i8>::get(&first).is_ok() {
            Ok(Self::Codes(first.extract()?, second))
        } else {
            Ok(Self::Floats(first.extract()?, second))
        }
    }
}

impl Slabs {
    fn ranges(&self) -> [Range<usize>; 2] {
        match self {
            Self::Floats(keys, values) => [keys.range(), values.range()],
            Self::Codes(codes, scales) => [codes.range(), scales.range()],
        }
    }

    fn kept(&mut self) -> Kept<'_> {
        match self {
            Self::Floats(keys, values) => Kept::Floats(keys.values(), values.values()),
            Self::Codes(codes, scales) => Kept::Codes(codes.values(), scales.values()),
        }
    }
}

#[pymethods]
impl SequenceSlabs {
    #[new]
    fn new(of_blocks: Vec<Slabs>, capacity: usize) -> PyResult<Self> {
        refuse_overlaps(&of_blocks.iter().flat_map(Slabs::ranges).collect::<Vec<_>>(), &[])?;
        Ok(Self { of_blocks, capacity })
    }
}

impl SequenceSlabs {
    fn caches(&mut self, passed: usize, count: usize) -> Vec<Cache<'_>> {
        let capacity = self.capacity;
        self.of_blocks.iter_mut().skip(passed).take(count).map(|slabs| Cache { kept: slabs.kept(), capacity }).collect()
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
