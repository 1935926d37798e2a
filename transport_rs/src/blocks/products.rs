//! Products of a few rows with weights in any form, shared out among threads.

use rayon::ThreadPool;
use rayon::prelude::*;

use super::groups::{GROUP, GROUP_BYTES};
use super::rounded::Rounded;
use super::{BlockError, Half, Linear, Weight};
use crate::simd::{Aligned, Isa};

/// Work on fewer values than these (of weights, or of keys and values) is not worth another thread.
const VALUES_OF_PART: usize = 1 << 15;
/// Each thread's work is cut into this many parts: if one thread is held up, the others take its parts.
const PARTS_OF_THREAD: usize = 4;

/// How products are computed.
#[derive(Clone, Copy)]
pub(super) struct Products {
    pub(super) isa: Isa,
    threads: usize,
}

impl Products {
    pub(super) fn new(isa: Isa, pool: Option<&ThreadPool>) -> Self {
        Self { isa, threads: pool.map_or(1, ThreadPool::current_num_threads) }
    }

    /// `(rows, inputs)` to `(rows, outputs)`.
    pub(super) fn product(&self, values: &Aligned, count: usize, linear: Linear<'_>, outputs: usize) -> Vec<f32> {
        let inputs = values.len() / count;
        let values = &**values;
        let mut parts = vec![0.0; outputs * count]; // (rows, outputs) each
        let part = match linear.weight {
            Weight::Floats(weights) => self.dots(Isa::dots, weights, values, inputs, &mut parts),
            Weight::Halves(Half::Bf16, weights) => self.dots(Isa::bf16_dots, weights, values, inputs, &mut parts),
            Weight::Halves(Half::F16, weights) => self.dots(Isa::f16_dots, weights, values, inputs, &mut parts),
            Weight::Q4(weights) => {
                let groups = inputs / GROUP;
                let floats = groups * (GROUP_BYTES / size_of::<f32>() + 2); // that are as many bytes
                self.in_parts(&mut parts, count, floats, |first, out| {
                    let some = weights.groups(first * groups, (first + out.len() / count) * groups);
                    self.isa.q4_dots(some, values, inputs, out);
                })
            }
            Weight::Q8(weights) => {
                let groups = inputs / GROUP;
                let floats = groups * (GROUP / size_of::<f32>() + 1); // that are as many bytes
                self.in_parts(&mut parts, count, floats, |first, out| {
                    let some = weights.groups(first * groups, (first + out.len() / count) * groups);
                    self.isa.q8_dots(some, values, inputs, out);
                })
            }
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

    /// `(rows, outputs)` each of parts of the outputs. Returns how many outputs a part has.
    fn dots<T: Sync>(
        &self,
        dots: fn(Isa, &[T], &[f32], usize, &mut [f32]),
        weights: &[T],
        values: &[f32],
        inputs: usize,
        parts: &mut [f32],
    ) -> usize {
        let count = values.len() / inputs;
        self.in_parts(parts, count, inputs * size_of::<T>() / size_of::<f32>(), |first, out| {
            let range = first * inputs..(first + out.len() / count) * inputs;
            dots(self.isa, weights.get(range).unwrap_or_default(), values, inputs, out);
        })
    }

    /// Calls `make` on each item, on several threads if it pays. `values` is the number of values that all of them read
    /// together.
    pub(super) fn each<T: Sync, R: Send>(
        &self,
        items: &[T],
        values: usize,
        make: impl Fn(&T) -> R + Sync + Send,
    ) -> Vec<R> {
        match self.parts(values) {
            None => items.iter().map(make).collect(),
            Some(parts) => items.par_iter().with_min_len(items.len().div_ceil(parts)).map(make).collect(),
        }
    }

    /// Likewise, for items that are changed.
    pub(super) fn each_mut<T: Send>(&self, items: &mut [T], values: usize, change: impl Fn(&mut T) + Sync + Send) {
        match self.parts(values) {
            None => items.iter_mut().for_each(change),
            Some(parts) => {
                let least = items.len().div_ceil(parts);
                items.par_iter_mut().with_min_len(least).for_each(change);
            }
        }
    }

    /// The number of parts to cut work on `values` values into; `None` if several threads do not pay.
    fn parts(&self, values: usize) -> Option<usize> {
        let parts = (values / VALUES_OF_PART).min(self.threads * PARTS_OF_THREAD);
        (self.threads > 1 && parts > 1).then_some(parts)
    }

    /// Fills `out`, whose units take `values` values to read each: `fill` gets parts of it, and the number of the first
    /// unit of each. Returns how many units a part has; the last has fewer.
    pub(super) fn in_parts(
        &self,
        out: &mut [f32],
        unit: usize,
        values: usize,
        fill: impl Fn(usize, &mut [f32]) + Sync,
    ) -> usize {
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

/// One product: `values`, `(rows, inputs)`, to `(rows, outputs)`, on the threads of `pool`.
///
/// # Errors
///
/// [`BlockError::Length`] if the number of weights or values does not fit these sizes.
pub fn multiply(
    isa: Isa,
    pool: Option<&ThreadPool>,
    linear: Linear<'_>,
    (outputs, inputs): (usize, usize),
    values: &[f32],
) -> Result<Vec<f32>, BlockError> {
    linear.check("weights", outputs, inputs)?;
    if !values.len().is_multiple_of(inputs) {
        return Err(BlockError::Length("rows"));
    }
    if values.is_empty() {
        return Ok(Vec::new());
    }
    let run = || Products::new(isa, pool).product(&Aligned::of(values), values.len() / inputs, linear, outputs);
    Ok(match pool {
        Some(pool) => pool.install(run),
        None => run(),
    })
}

/// Widens weights in groups. Returns false for other formats, or if `out` has another length.
#[must_use]
pub fn widen(isa: Isa, weights: Weight<'_>, out: &mut [f32]) -> bool {
    match weights {
        Weight::Q4(weights) if weights.fits(1, out.len()) => isa.q4_floats(weights, out),
        Weight::Q8(weights) if weights.fits(1, out.len()) => isa.q8_floats(weights, out),
        _ => return false,
    }
    true
}

/// Joins the results of parts, which follow each other, to `(rows, outputs)`. Each part has the same number of outputs.
fn by_row(parts: &[f32], count: usize, part: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(parts.len());
    for row in 0..count {
        for some in parts.chunks(part * count) {
            out.extend_from_slice(some.chunks_exact(some.len() / count).nth(row).unwrap_or_default());
        }
    }
    out
}

pub(super) fn add(sums: &mut [f32], others: &[f32]) {
    sums.iter_mut().zip(others).for_each(|(sum, other)| *sum += other);
}
