//! Attention of single positions, each over the keys and values of its own sequence.

use super::Cache;
use crate::simd::Isa;

/// What `queries` of one head of keys and values, `(group, head_dim)`, attend to at the positions `[first, end)` of it,
/// written to `out`, of the same shape. `keys` and `values` are `(positions, head_dim)`.
pub(super) fn attend(isa: Isa, queries: &[f32], keys: &[f32], values: &[f32], head_dim: usize, out: &mut [f32]) {
    let positions = keys.len() / head_dim;
    let mut weights = vec![0.0; queries.len() / head_dim * positions];
    isa.dots(keys, queries, head_dim, &mut weights);
    for scores in weights.chunks_exact_mut(positions) {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        for score in scores {
            *score -= largest;
        }
    }
    isa.exponentials(&mut weights);
    isa.weighted(values, &weights, head_dim, out);
    for (out, weights) in out.chunks_exact_mut(head_dim).zip(weights.chunks_exact(positions)) {
        let sum: f32 = weights.iter().sum();
        for value in out {
            *value /= sum;
        }
    }
}

impl Cache<'_> {
    /// Writes the keys and values, `(heads, head_dim)` each, of one position.
    pub(super) fn write(&mut self, position: usize, keys: &[f32], values: &[f32], head_dim: usize) {
        for (slab, new) in [(&mut *self.keys, keys), (&mut *self.values, values)] {
            let heads = slab.chunks_exact_mut(self.capacity * head_dim);
            for (slab, new) in heads.zip(new.chunks_exact(head_dim)) {
                if let Some(place) = slab.chunks_exact_mut(head_dim).nth(position) {
                    place.copy_from_slice(new);
                }
            }
        }
    }

    /// The keys and values of a head at the positions `[first, end)`, `(positions, head_dim)` each.
    pub(super) fn read(&self, head: usize, first: usize, end: usize, head_dim: usize) -> (&[f32], &[f32]) {
        let start = (head * self.capacity + first) * head_dim;
        let range = start..start + (end - first) * head_dim;
        (self.keys.get(range.clone()).unwrap_or_default(), self.values.get(range).unwrap_or_default())
    }
}
