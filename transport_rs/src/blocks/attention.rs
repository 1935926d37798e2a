//! Attention of single positions, each over the keys and values of its own sequence.

use std::ops::Range;

use crate::simd::Isa;

/// Attention for one head of keys and values. `queries` are `(rows, group, head_dim)`; `keys` and `values` are
/// `(positions, head_dim)`. `seen` has the range of positions that each row attends to. The result has the shape of
/// `queries`.
pub(super) fn attend(
    isa: Isa,
    queries: &[f32],
    seen: &[Range<usize>],
    (keys, values): (&[f32], &[f32]),
    head_dim: usize,
) -> Vec<f32> {
    let (first, last) = (seen.iter().map(|seen| seen.start).max(), seen.iter().map(|seen| seen.end).min());
    let (head, tail) = (first.unwrap_or_default() * head_dim, last.unwrap_or_default() * head_dim);
    if !values.iter().take(head).chain(values.iter().skip(tail)).all(|value| value.is_finite()) {
        // A value that a row does not see has the weight 0; if it is infinite or NaN, the product would be NaN.
        let rows = queries.chunks_exact(queries.len() / seen.len()).zip(seen);
        let rows = rows.flat_map(|(queries, seen)| {
            let own = seen.start * head_dim..seen.end * head_dim;
            let [keys, values] = [keys, values].map(|all| all.get(own.clone()).unwrap_or_default());
            attend(isa, queries, std::slice::from_ref(&(0..seen.len())), (keys, values), head_dim)
        });
        return rows.collect();
    }
    let positions = keys.len() / head_dim;
    let mut weights = vec![0.0; queries.len() / head_dim * positions];
    isa.dots(keys, queries, head_dim, &mut weights);
    let group = queries.len() / head_dim / seen.len();
    let mut sums = Vec::with_capacity(seen.len() * group);
    for (scores, seen) in weights.chunks_exact_mut(group * positions).zip(seen) {
        for scores in scores.chunks_exact_mut(positions) {
            sums.push(isa.soften(scores.get_mut(seen.clone()).unwrap_or_default()));
            scores.iter_mut().take(seen.start).for_each(|score| *score = 0.0);
            scores.iter_mut().skip(seen.end).for_each(|score| *score = 0.0);
        }
    }
    let mut out = vec![0.0; queries.len()];
    isa.weighted(values, &weights, head_dim, &mut out);
    for (out, sum) in out.chunks_exact_mut(head_dim).zip(sums) {
        for value in out {
            *value /= sum;
        }
    }
    out
}
