//! A few positions of several sequences through blocks of the Llama kind: decodes, above all.
//!
//! Such a forward reads each weight once and does next to nothing with it, so it takes as long as the weights take from
//! memory, if nothing is done between one product and the next. Here little is. All is `f32`, but for weights of fewer bits.
//!
//! A position's output does not depend on what else is in the same forward, nor on the processor's vectors or the number
//! of threads: not by a bit. [`scalar`] is the specification of the arithmetic, but for the sines of rotary embeddings, which
//! are the system's.

use std::ops::Range;

use rayon::ThreadPool;

use crate::simd::{Aligned, Isa};
use adapters::{AdaptedRows, OfLayer, adapted_rows};
use products::{Products, add};

mod adapters;
mod attention;
mod cache;
pub(crate) mod groups;
mod products;
mod rounded;
pub(crate) mod scalar;
mod shape;

pub use adapters::{Update, Updates};
pub use cache::{Cache, Kept};
pub use groups::{GROUP, Q4, Q8, pack, pack_q8};
pub use products::{multiply, widen};
pub use shape::{Block, BlockError, Half, Linear, Piece, Shape, Weight};

/// This many rows of one sequence read each key and value together.
const ROWS_OF_RUN: usize = 8;

/// One position of a forward.
#[derive(Clone, Copy)]
struct Row {
    piece: usize,
    position: usize,
}

/// `hidden`, `(positions of all pieces, shape.hidden)`, through `blocks`, in place. Keys and values are kept.
///
/// It runs on the threads of `pool`, or on this one.
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
        let end = piece.start.checked_add(piece.length).ok_or(BlockError::CacheFull)?;
        if piece.caches.len() != blocks.len() || !piece.caches.iter().all(|cache| cache.fits(end, shape)) {
            return Err(BlockError::CacheFull);
        }
        rows.extend((piece.start..end).map(|position| Row { piece: number, position }));
    }
    let adapted = adapted_rows(pieces, shape, blocks.len())?;
    if rows.is_empty() {
        return Ok(());
    }
    let turns = shape.turns(&rows);
    let runs = runs(&rows);
    let forward = Forward { products: Products::new(isa, pool), shape, rows, adapted, runs, turns };
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
    products: Products,
    shape: &'a Shape,
    rows: Vec<Row>,
    adapted: Vec<AdaptedRows<'a>>,
    runs: Vec<Range<usize>>,
    turns: Vec<f32>,
}

/// Cuts rows into runs: rows of one piece that attend together.
fn runs(rows: &[Row]) -> Vec<Range<usize>> {
    let mut start = 0;
    let pieces = rows.chunk_by(|row, next| row.piece == next.piece);
    let runs = pieces.flat_map(|rows| rows.chunks(ROWS_OF_RUN)).map(|rows| {
        let run = start..start + rows.len();
        start = run.end;
        run
    });
    runs.collect()
}

impl Forward<'_> {
    fn through(&self, number: usize, block: &Block<'_>, pieces: &mut [Piece<'_>], hidden: &mut [f32]) {
        let normed = self.normed(hidden, block.attended_norm);
        let joined = self.product(&normed, block.qkv, self.shape.joined(), (number, |updates| &updates.qkv));
        let queries = self.kept(number, block, joined, pieces);
        let attended = self.attended(number, block, &queries, pieces);
        add(hidden, &self.product(&attended, block.output, self.shape.hidden, (number, |updates| &updates.output)));

        let normed = self.normed(hidden, block.fed_norm);
        let gate_up = (number, (|updates| &updates.gate_up) as OfLayer);
        let mut gates = self.product(&normed, block.gate_up, 2 * self.shape.inner, gate_up);
        let mut fed = Vec::with_capacity(gates.len() / 2);
        for gates in gates.chunks_exact_mut(2 * self.shape.inner) {
            let (gates, up) = gates.split_at_mut(self.shape.inner);
            self.products.isa.gated(gates, up);
            fed.extend_from_slice(gates);
        }
        add(hidden, &self.product(&fed, block.down, self.shape.hidden, (number, |updates| &updates.down)));
    }

    /// `(rows, inputs)` to `(rows, outputs)`, with what the adapters of the rows add in this layer of a block.
    fn product(&self, values: &[f32], linear: Linear<'_>, outputs: usize, layer: (usize, OfLayer)) -> Vec<f32> {
        let (count, values) = (self.rows.len(), Aligned::of(values));
        let mut out = self.products.product(&values, count, linear, outputs);
        adapters::update(self.products, &self.adapted, layer, (&values, values.len() / count), (&mut out, outputs));
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
        self.products.isa.dots(values, values, values.len(), &mut squares);
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

    /// The output of attention for each row, `(rows, heads * head_dim)`. Rows of a sequence read its keys and values
    /// together.
    fn attended(&self, number: usize, block: &Block<'_>, queries: &[f32], pieces: &[Piece<'_>]) -> Vec<f32> {
        let Shape { heads, kv_heads, head_dim, .. } = *self.shape;
        let (width, unit) = (heads * head_dim, heads / kv_heads * head_dim); // a unit's queries share a head of keys
        let attend = |run: &Range<usize>, head: usize| {
            let rows = self.rows.get(run.clone()).unwrap_or_default();
            let cache = rows.first().and_then(|row| pieces.get(row.piece)?.caches.get(number));
            let seen = |row: &Row| {
                let end = row.position + 1;
                block.window.map_or(0, |window| end.saturating_sub(window))..end
            };
            let (Some(cache), Some(first), Some(last)) = (cache, rows.first().map(seen), rows.last().map(seen)) else {
                return Vec::new();
            };
            let mut own = Vec::with_capacity(run.len() * unit);
            for row in queries.chunks_exact(width).skip(run.start).take(run.len()) {
                own.extend_from_slice(row.chunks_exact(unit).nth(head).unwrap_or_default());
            }
            let seen: Vec<_> =
                rows.iter().map(seen).map(|seen| seen.start - first.start..seen.end - first.start).collect();
            let (keys, values) = cache.read(self.products.isa, head, (first.start, last.end), self.shape);
            attention::attend(self.products.isa, &own, &seen, (&keys, &values), head_dim)
        };
        let values = self.rows.iter().map(|row| 2 * kv_heads * (row.position + 1) * head_dim).sum();
        let items: Vec<_> = self.runs.iter().flat_map(|run| (0..kv_heads).map(move |head| (run, head))).collect();
        let of_items = self.products.each(&items, values, |(run, head)| attend(run, *head));
        let mut attended = vec![0.0; queries.len()];
        for ((run, head), of_item) in items.into_iter().zip(of_items) {
            let rows = attended.chunks_exact_mut(width).skip(run.start).take(run.len());
            for (row, own) in rows.zip(of_item.chunks_exact(unit)) {
                row.iter_mut().skip(head * unit).zip(own).for_each(|(place, value)| *place = *value);
            }
        }
        attended
    }
}

/// Rotary embeddings (Su et al. 2021) of one head, its halves as pairs; cosines and sines as [`Shape::turns`] has them.
fn turn(head: &mut [f32], turns: &[f32]) {
    let (cosines, sines) = turns.split_at(turns.len() / 2);
    let (first, second) = head.split_at_mut(head.len() / 2);
    for (((a, b), cosine), sine) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
        (*a, *b) = (*a * cosine - *b * sine, *b * cosine + *a * sine);
    }
}
