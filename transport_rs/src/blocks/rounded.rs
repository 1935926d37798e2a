//! Products of 8 bits with 8 bits: LLM.int8 (Dettmers et al. 2022), by row, as `models/weights/quantized.py` has it.
//!
//! A row is rounded to 127 steps of either sign of its largest value. Values from [`OUTLIER`] on are left out of that, so
//! that they do not widen the steps of the others, and multiplied as they are. Sums of products of integers are exact.

use crate::simd::{Isa, LANES};

/// Fewer inputs than these: their sum fits 32 bits.
pub(super) const INPUTS_END: usize = 1 << 17;
const OUTLIER: f32 = 6.0;
const STEPS: f32 = 127.0;

pub(super) struct Rounded {
    /// `(rows, inputs)`
    codes: Vec<i16>,
    inputs: usize,
    rows: Vec<Row>,
}

struct Row {
    scale: f32,
    /// Inputs by their places.
    outliers: Vec<(usize, f32)>,
}

impl Rounded {
    /// Rounds `values`, `(rows, inputs)`.
    pub(super) fn new(isa: Isa, values: &[f32], inputs: usize) -> Self {
        let mut codes = vec![0; values.len()];
        let rows = values.chunks_exact(inputs).zip(codes.chunks_exact_mut(inputs));
        let rows = rows.map(|(values, codes)| Row::new(isa, values, codes)).collect();
        Self { codes, inputs, rows }
    }

    /// With the weights of some outputs: `codes` is `(outputs, inputs)`, `out` is `(rows, outputs)`.
    pub(super) fn product(&self, isa: Isa, codes: &[i8], scales: &[f32], out: &mut [f32]) {
        let mut sums = vec![0; out.len()];
        isa.code_dots(codes, &self.codes, self.inputs, &mut sums);
        let rows = sums.chunks_exact(scales.len()).zip(out.chunks_exact_mut(scales.len())).zip(&self.rows);
        for ((sums, out), row) in rows {
            for ((out, sum), scale) in out.iter_mut().zip(sums).zip(scales) {
                #[expect(clippy::cast_precision_loss, reason = "as torch has it")]
                let sum = *sum as f32;
                *out = sum * row.scale * scale;
            }
            if !row.outliers.is_empty() {
                for ((out, codes), scale) in out.iter_mut().zip(codes.chunks_exact(self.inputs)).zip(scales) {
                    let weights = row.outliers.iter().filter_map(|(at, value)| Some((codes.get(*at)?, value)));
                    *out += weights.map(|(code, value)| value * (f32::from(*code) * scale)).sum::<f32>();
                }
            }
        }
    }
}

impl Row {
    fn new(isa: Isa, values: &[f32], codes: &mut [i16]) -> Self {
        let is_outlier = |value: &f32| value.abs() >= OUTLIER;
        let most = largest(values);
        if most < OUTLIER {
            let scale = most.max(f32::MIN_POSITIVE) / STEPS;
            isa.round(values, scale, codes);
            return Self { scale, outliers: Vec::new() };
        }
        if most.is_nan() {
            return Self { scale: f32::NAN, outliers: Vec::new() }; // by which all outputs are no numbers either
        }
        let outliers = values.iter().copied().enumerate().filter(|(_, value)| is_outlier(value)).collect();
        let others: Vec<f32> = values.iter().map(|value| if is_outlier(value) { 0.0 } else { *value }).collect();
        let scale = largest(&others).max(f32::MIN_POSITIVE) / STEPS;
        isa.round(&others, scale, codes);
        Self { scale, outliers }
    }
}

/// The largest magnitude; NaN if any is.
fn largest(values: &[f32]) -> f32 {
    let mut largest = [0_u32; LANES]; // as whole numbers they are in the same order, and NaN is after the others
    for values in values.chunks_exact(LANES) {
        for (largest, value) in largest.iter_mut().zip(values) {
            *largest = (*largest).max(value.abs().to_bits());
        }
    }
    f32::from_bits(largest.into_iter().max().unwrap_or_default())
}
