//! Low-rank updates of linear layers (`LoRA`, Hu et al. 2021): some rows of a forward have an adapter, others none.
//!
//! All rows go through the weights together, whatever form these are in. Only the updates are computed by adapter, for
//! rows that follow each other: the cost grows with rows, and hardly with adapters (S-LoRA, Sheng et al. 2023).

use std::ops::Range;

use super::products::{Products, add};
use super::{BlockError, Piece, Shape};
use crate::simd::{Isa, LANES};

/// Rows of an adapter that a thread computes at a time.
const ROWS_OF_ITEM: usize = 32;

/// The update of some outputs of a linear layer: `scale * b (a x)` is added to them.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// The first of these outputs.
    pub first: usize,
    /// `(rank, inputs)`
    pub a: &'a [f32],
    /// `(rank, outputs)`: PEFT's transposed.
    pub b: &'a [f32],
    /// A factor for the update.
    pub scale: f32,
}

/// The updates of one block, by its linear layers.
#[derive(Clone, Debug, Default)]
pub struct Updates<'a> {
    /// Those of queries, keys and values.
    pub qkv: Vec<Update<'a>>,
    /// Those of the output of attention.
    pub output: Vec<Update<'a>>,
    /// Those of gate and up.
    pub gate_up: Vec<Update<'a>>,
    /// Those of the product that leads back.
    pub down: Vec<Update<'a>>,
}

impl Updates<'_> {
    fn check(&self, shape: &Shape) -> Result<(), BlockError> {
        let of_layers = [&self.qkv, &self.output, &self.gate_up, &self.down];
        for ((_, inputs, outputs), updates) in shape.layers().into_iter().zip(of_layers) {
            if !updates.iter().all(|update| update.fits(inputs, outputs)) {
                return Err(BlockError::Length("an adapter"));
            }
        }
        Ok(())
    }
}

impl Update<'_> {
    fn fits(&self, inputs: usize, outputs: usize) -> bool {
        let rank = self.a.len() / inputs;
        let width = self.b.len().checked_div(rank).unwrap_or(0);
        let are_whole = self.a.len() == rank * inputs && self.b.len() == rank * width;
        let are_outputs = width > 0 && width.is_multiple_of(LANES);
        are_whole && are_outputs && self.first.checked_add(width).is_some_and(|end| end <= outputs)
    }

    /// Adds the update to `out`, `(rows, outputs)`, of `values`, `(rows, inputs)`.
    fn add(&self, isa: Isa, (values, inputs): (&[f32], usize), (out, outputs): (&mut [f32], usize)) {
        let (count, rank) = (values.len() / inputs, self.a.len() / inputs);
        let width = self.b.len() / rank;
        let mut low = vec![0.0; count * rank];
        isa.dots(self.a, values, inputs, &mut low);
        for value in &mut low {
            *value *= self.scale;
        }
        let mut high = vec![0.0; count * width];
        isa.weighted(self.b, &low, width, &mut high);
        for (out, high) in out.chunks_exact_mut(outputs).zip(high.chunks_exact(width)) {
            add(out.get_mut(self.first..).unwrap_or_default(), high);
        }
    }
}

/// Finds the updates of one linear layer.
pub(super) type OfLayer = for<'a> fn(&'a Updates<'a>) -> &'a [Update<'a>];

/// Rows that follow each other and have the same adapter: the updates of each block of the forward.
pub(super) struct AdaptedRows<'a> {
    rows: Range<usize>,
    of_blocks: &'a [Updates<'a>],
}

/// The rows of `pieces` that have an adapter, in order.
///
/// # Errors
///
/// [`BlockError::Length`] for an adapter that does not fit `count` blocks of this shape.
pub(super) fn adapted_rows<'a>(
    pieces: &[Piece<'a>],
    shape: &Shape,
    count: usize,
) -> Result<Vec<AdaptedRows<'a>>, BlockError> {
    let mut found: Vec<AdaptedRows<'a>> = Vec::new();
    let mut start = 0;
    for piece in pieces {
        let end = start + piece.length;
        if let Some(of_blocks) = piece.adapter {
            match found.last_mut() {
                Some(last) if last.rows.end == start && std::ptr::eq(last.of_blocks, of_blocks) => last.rows.end = end,
                _ => {
                    if of_blocks.len() != count {
                        return Err(BlockError::Length("an adapter"));
                    }
                    of_blocks.iter().try_for_each(|updates| updates.check(shape))?;
                    found.push(AdaptedRows { rows: start..end, of_blocks });
                }
            }
        }
        start = end;
    }
    Ok(found)
}

/// Adds to `out`, `(rows, outputs)`, the updates of one layer in block `number`, which `of` finds.
pub(super) fn update(
    products: Products,
    adapted: &[AdaptedRows<'_>],
    (number, of): (usize, OfLayer),
    (values, inputs): (&[f32], usize),
    (mut rest, outputs): (&mut [f32], usize),
) {
    let (mut items, mut passed, mut read) = (Vec::new(), 0, 0);
    for AdaptedRows { rows, of_blocks } in adapted {
        let updates = of_blocks.get(number).map(of).unwrap_or_default();
        let of_rows = values.get(rows.start * inputs..rows.end * inputs);
        let own = rest.split_at_mut_checked((rows.start - passed) * outputs);
        let own = own.and_then(|(_, own)| own.split_at_mut_checked(rows.len() * outputs));
        let (Some(of_rows), Some((own, others))) = (of_rows, own) else { return };
        (rest, passed) = (others, rows.end);
        read += rows.len() * updates.iter().map(|update| update.a.len() + update.b.len()).sum::<usize>();
        if !updates.is_empty() {
            let (values, places) = (of_rows.chunks(ROWS_OF_ITEM * inputs), own.chunks_mut(ROWS_OF_ITEM * outputs));
            items.extend(values.zip(places).map(|(values, out)| (updates, values, out)));
        }
    }
    products.each_mut(&mut items, read, |(updates, values, out)| {
        for update in *updates {
            update.add(products.isa, (values, inputs), (out, outputs));
        }
    });
}
