//! Keys and values of a sequence in one block: as floats, or in 8 bits in the format of `compute/kv.py`.

use std::borrow::Cow;

use super::Shape;
use crate::simd::Isa;

const LARGEST_CODE: f32 = 127.0;

/// Keys and values of a sequence in one block.
#[derive(Debug)]
pub struct Cache<'a> {
    /// The memory for all `capacity` positions.
    pub kept: Kept<'a>,
    /// The number of positions that fit.
    pub capacity: usize,
}

/// How values, and keys after rotation, are stored. A forward reads its new positions back from here too, rounded or
/// not.
#[derive(Debug)]
pub enum Kept<'a> {
    /// Floats: keys and values, `(kv_heads, capacity, head_dim)` each.
    Floats(&'a mut [f32], &'a mut [f32]),
    /// 8-bit codes, `(2, kv_heads, capacity, head_dim)`, keys first. Then a scale for each position and head, by which
    /// its largest number is 127: `(2, kv_heads, capacity)`.
    Codes(&'a mut [i8], &'a mut [f32]),
}

impl Cache<'_> {
    /// Whether `positions` fit, and the slabs have the length that `capacity` and `shape` ask for.
    pub(super) fn fits(&self, positions: usize, shape: &Shape) -> bool {
        let rows = self.capacity.checked_mul(shape.kv_heads);
        let values = rows.and_then(|rows| rows.checked_mul(shape.head_dim));
        let twice = |count: Option<usize>| count.and_then(|count| count.checked_mul(2));
        let (lengths, expected) = match &self.kept {
            Kept::Floats(keys, of_values) => ([keys.len(), of_values.len()], [values; 2]),
            Kept::Codes(codes, scales) => ([codes.len(), scales.len()], [twice(values), twice(rows)]),
        };
        positions <= self.capacity && lengths.map(Some) == expected
    }

    /// Writes the keys and values, `(heads, head_dim)` each, of one position.
    pub(super) fn write(&mut self, position: usize, keys: &[f32], values: &[f32], head_dim: usize) {
        let heads = keys.chunks_exact(head_dim).chain(values.chunks_exact(head_dim));
        let numbers = (position..).step_by(self.capacity); // of rows, first of all keys, then of all values
        match &mut self.kept {
            Kept::Floats(of_keys, of_values) => {
                for (slab, new) in [(of_keys, keys), (of_values, values)] {
                    for (number, new) in numbers.clone().zip(new.chunks_exact(head_dim)) {
                        if let Some(place) = slab.get_mut(number * head_dim..).and_then(|rest| rest.get_mut(..head_dim))
                        {
                            place.copy_from_slice(new);
                        }
                    }
                }
            }
            Kept::Codes(codes, scales) => {
                for (number, new) in numbers.zip(heads) {
                    let codes = codes.get_mut(number * head_dim..).and_then(|rest| rest.get_mut(..head_dim));
                    if let (Some(codes), Some(scale)) = (codes, scales.get_mut(number)) {
                        *scale = round(new, codes);
                    }
                }
            }
        }
    }

    /// The keys and values of a head at the positions `[first, end)`, `(positions, head_dim)` each.
    pub(super) fn read(
        &self,
        isa: Isa,
        head: usize,
        (first, end): (usize, usize),
        shape: &Shape,
    ) -> (Cow<'_, [f32]>, Cow<'_, [f32]>) {
        let width = shape.head_dim;
        let rows = |head: usize| head * self.capacity + first..head * self.capacity + end;
        let own = rows(head).start * width..rows(head).end * width;
        match &self.kept {
            Kept::Floats(keys, values) => {
                (keys.get(own.clone()).unwrap_or_default().into(), values.get(own).unwrap_or_default().into())
            }
            Kept::Codes(codes, scales) => {
                let widened = |head: usize| {
                    let scales = scales.get(rows(head)).unwrap_or_default();
                    let codes = codes.get(rows(head).start * width..rows(head).end * width).unwrap_or_default();
                    let mut values = vec![0.0; codes.len()];
                    isa.scaled(codes, scales, &mut values);
                    Cow::Owned(values)
                };
                (widened(head), widened(shape.kv_heads + head))
            }
        }
    }
}

/// To `codes`, the even one of two that are as near. Returns the scale: NaN, if one of `values` is not finite.
fn round(values: &[f32], codes: &mut [i8]) -> f32 {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let are_finite = values.iter().all(|value| value.is_finite());
    // Never 0, as the scale of nothing but zeros would be.
    let scale = if are_finite { (largest / LARGEST_CODE).max(f32::MIN_POSITIVE) } else { f32::NAN };
    for (code, value) in codes.iter_mut().zip(values) {
        #[expect(clippy::cast_possible_truncation, reason = "from -127 to 127, or NaN")]
        let rounded = (value / scale).round_ties_even() as i8;
        *code = rounded;
    }
    scale
}
