//! A few positions of several sequences through blocks of the Llama kind: decodes, above all.
//!
//! Such a forward reads each weight once and does next to nothing with it, so it takes as long as the weights take from
//! memory, if nothing is done between one product and the next. Here little is. All is `f32`, but for weights of 8 bits.
//!
//! A position's output does not depend on what else is in the same forward, nor on the processor's vectors or the number
//! of threads: not by a bit. [`scalar`] is the specification of the arithmetic, but for the sines of rotary embeddings, which
//! are the system's.

use rayon::ThreadPool;
use rayon::prelude::*;

use crate::simd::Isa;
use rounded::Rounded;

mod attention;
mod rounded;
pub(crate) mod scalar;
mod shape;

pub use shape::{Block, BlockError, Cache, Linear, Piece, Shape, Weight};

/// Work on fewer values than these (of weights, or of keys and values) is not worth another thread.
const VALUES_OF_PART: usize = 1 << 15;
/// Each thread gets its work in so many parts: one that is held up leaves the others to the rest.
const PARTS_OF_THREAD: usize = 4;

/// One position of a forward.
#[derive(Clone, Copy)]
struct Row {
    piece: usize,
    position: usize,
}

/// `hidden`, `(positions of all pieces, shape.hidden)`, through `blocks`, in place. Keys and values are kept.
///
/// On as many threads as `pool` has, or this one.
///
/// # Errors
///
/// [`BlockError`], before anything has been written.
pub fn forward(
    isa: Isa,
    pool: Option<&ThreadPool>,
    shape: &Shape,
    blocks: &[Block<'_>],
    pieces: &mut [Piece<'_>],
    hidden: &mut [f32],
) -> Result<(), BlockError> {
    shape.check()?;
    blocks.iter().try_for_each(|block| block.check(shape))?;
    let count = pieces.iter().try_fold(0_usize, |count, piece| count.checked_add(piece.length));
    if count.and_then(|count| count.checked_mul(shape.hidden)) != Some(hidden.len()) {
        return Err(BlockError::Length("hidden states"));
    }
    let mut rows = Vec::new();
    for (number, piece) in pieces.iter().enumerate() {
        let size = shape.kv_heads * shape.head_dim;
        let end = piece.start.checked_add(piece.length).ok_or(BlockError::Room)?;
        let fits = |cache: &Cache<'_>| {
            let values = cache.capacity.checked_mul(size);
            end <= cache.capacity && [Some(cache.keys.len()), Some(cache.values.len())] == [values; 2]
        };
        if piece.caches.len() != blocks.len() || !piece.caches.iter().all(fits) {
            return Err(BlockError::Room);
        }
        rows.extend((piece.start..end).map(|position| Row { piece: number, position }));
    }
    if rows.is_empty() {
        return Ok(());
    }
    let turns = shape.turns(&rows);
    let forward = Forward { isa, threads: pool.map_or(1, ThreadPool::current_num_threads), shape, rows, turns };
    let mut run = || {
        for (number, block) in blocks.iter().enumerate() {
            forward.through(number, block, pieces, hidden);
        }
    };
    match pool {
        Some(pool) => pool.install(run),
        None => run(),
    }
    Ok(())
}

impl Shape {
    /// Cosines and sines of each row, `head_dim / 2` each, one after the other.
    fn turns(&self, rows: &[Row]) -> Vec<f32> {
        let mut turns = Vec::with_capacity(rows.len() * self.head_dim);
        for row in rows {
            #[expect(clippy::cast_precision_loss, reason = "as transformers has it")]
            let angles = self.frequencies.iter().map(|frequency| row.position as f32 * frequency);
            turns.extend(angles.clone().map(|angle| angle.cos() * self.rotary_scaling));
            turns.extend(angles.map(|angle| angle.sin() * self.rotary_scaling));
        }
        turns
    }
}

struct Forward<'a> {
    isa: Isa,
    threads: usize,
    shape: &'a Shape,
    rows: Vec<Row>,
    turns: Vec<f32>,
}

impl Forward<'_> {
    fn through(&self, number: usize, block: &Block<'_>, pieces: &mut [Piece<'_>], hidden: &mut [f32]) {
        let joined = self.product(&self.normed(hidden, block.attended_norm), block.qkv, self.shape.joined());
        let queries = self.kept(number, block, joined, pieces);
        let attended = self.attended(number, block, &queries, pieces);
        add(hidden, &self.product(&attended, block.output, self.shape.hidden));

        let mut gates = self.product(&self.normed(hidden, block.fed_norm), block.gate_up, 2 * self.shape.inner);
        let mut fed = Vec::with_capacity(gates.len() / 2);
        for gates in gates.chunks_exact_mut(2 * self.shape.inner) {
            let (gates, up) = gates.split_at_mut(self.shape.inner);
            self.isa.gated(gates, up);
            fed.extend_from_slice(gates);
        }
        add(hidden, &self.product(&fed, block.down, self.shape.hidden));
    }

    /// `(rows, inputs)` to `(rows, outputs)`.
    fn product(&self, values: &[f32], linear: Linear<'_>, outputs: usize) -> Vec<f32> {
        let (count, inputs) = (self.rows.len(), values.len() / self.rows.len());
        let mut parts = vec![0.0; outputs * count]; // (rows, outputs) each
        let part = match linear.weight {
            Weight::Floats(weights) => self.in_parts(&mut parts, count, inputs, |first, out| {
                let range = first * inputs..(first + out.len() / count) * inputs;
                self.isa.dots(weights.get(range).unwrap_or_default(), values, inputs, out);
            }),
            Weight::Codes(codes, scales) => {
                let rows = Rounded::new(self.isa, values, inputs);
                self.in_parts(&mut parts, count, inputs / size_of::<f32>(), |first, out| {
                    let end = first + out.len() / count;
                    let codes = codes.get(first * inputs..end * inputs).unwrap_or_default();
                    rows.product(self.isa, codes, scales.get(first..end).unwrap_or_default(), out);
                })
            }
        };
        let mut out = if part == outputs { parts } else { by_row(&parts, count, part) };
        if let Some(bias) = linear.bias {
            out.chunks_exact_mut(outputs).for_each(|row| add(row, bias));
        }
        out
    }

    fn normed(&self, hidden: &[f32], weight: &[f32]) -> Vec<f32> {
        let mut normed = hidden.to_vec();
        normed.chunks_exact_mut(weight.len()).for_each(|row| self.norm(row, weight));
        normed
    }

    /// The RMS norm of `values`, in place.
    fn norm(&self, values: &mut [f32], weight: &[f32]) {
        let mut squares = [0.0];
        self.isa.dots(values, values, values.len(), &mut squares);
        let [squares] = squares;
        #[expect(clippy::cast_precision_loss, reason = "sizes are below 2^20")]
        let factor = 1.0 / (squares / values.len() as f32 + self.shape.epsilon).sqrt();
        values.iter_mut().zip(weight).for_each(|(value, weight)| *value *= factor * weight);
    }

    /// Normed and turned; keys and values go to the caches, queries, `(rows, heads * head_dim)`, are scaled and returned.
    fn kept(&self, number: usize, block: &Block<'_>, mut joined: Vec<f32>, pieces: &mut [Piece<'_>]) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let mut kept = Vec::with_capacity(self.rows.len() * heads * head_dim);
        let rows = joined.chunks_exact_mut(self.shape.joined()).zip(&self.rows);
        for ((joined, row), turns) in rows.zip(self.turns.chunks_exact(head_dim)) {
            let (queries, others) = joined.split_at_mut(heads * head_dim);
            let (keys, values) = others.split_at_mut(kv_heads * head_dim);
            if let Some((of_queries, of_keys)) = block.head_norms {
                queries.chunks_exact_mut(head_dim).for_each(|head| self.norm(head, of_queries));
                keys.chunks_exact_mut(head_dim).for_each(|head| self.norm(head, of_keys));
            }
            if block.is_rotated {
                queries.chunks_exact_mut(head_dim).for_each(|head| turn(head, turns));
                keys.chunks_exact_mut(head_dim).for_each(|head| turn(head, turns));
            }
            if let Some(cache) = pieces.get_mut(row.piece).and_then(|piece| piece.caches.get_mut(number)) {
                cache.write(row.position, keys, values, head_dim);
            }
            kept.extend(queries.iter().map(|value| value * block.scaling));
        }
        kept
    }

    /// What each row attends to, `(rows, heads * head_dim)`.
    fn attended(&self, number: usize, block: &Block<'_>, queries: &[f32], pieces: &[Piece<'_>]) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let unit = heads / kv_heads * head_dim; // of queries that share a head of keys
        let mut attended = vec![0.0; queries.len()];
        let seen = self.rows.iter().map(|row| row.position + 1).max().unwrap_or_default();
        self.in_parts(&mut attended, unit, 2 * seen * head_dim, |first, out| {
            let units = out.chunks_exact_mut(unit).zip(queries.chunks_exact(unit).skip(first));
            for (at, (out, queries)) in (first..).zip(units) {
                let row = self.rows.get(at / kv_heads);
                let cache = row.and_then(|row| pieces.get(row.piece)?.caches.get(number));
                if let (Some(row), Some(cache)) = (row, cache) {
                    let end = row.position + 1;
                    let first = block.window.map_or(0, |window| end.saturating_sub(window));
                    let (keys, values) = cache.read(at % kv_heads, first, end, head_dim);
                    attention::attend(self.isa, queries, keys, values, head_dim, out);
                }
            }
        });
        attended
    }

    /// Fills `out`, whose units take `values` values to read each: `fill` gets parts of it, and the number of the first
    /// unit of each. Returns how many units a part has; the last has fewer.
    fn in_parts(&self, out: &mut [f32], unit: usize, values: usize, fill: impl Fn(usize, &mut [f32]) + Sync) -> usize {
        let units = out.len() / unit;
        let worthwhile = units * values / VALUES_OF_PART;
        if self.threads == 1 || worthwhile < 2 {
            fill(0, out);
            units
        } else {
            let part = units.div_ceil(worthwhile.min(self.threads * PARTS_OF_THREAD));
            out.par_chunks_mut(part * unit).enumerate().for_each(|(number, out)| fill(number * part, out));
            part
        }
    }
}

/// `(rows, outputs)` of parts of as many outputs, that of each part after that of the other.
fn by_row(parts: &[f32], count: usize, part: usize) -> Vec<f32> {
    let rows = (0..count).flat_map(|row| {
        parts.chunks(part * count).flat_map(move |out| out.chunks_exact(out.len() / count).skip(row).take(1))
    });
    rows.flatten().copied().collect()
}

fn add(sums: &mut [f32], others: &[f32]) {
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
}

/// Rotary embeddings (Su et al. 2021) of one head, its halves as pairs; cosines and sines as [`Shape::turns`] has them.
fn turn(head: &mut [f32], turns: &[f32]) {
    let (cosines, sines) = turns.split_at(turns.len() / 2);
    let (first, second) = head.split_at_mut(head.len() / 2);
    for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}
