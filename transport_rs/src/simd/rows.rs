//! Products of a few rows with a matrix, written once for all instruction sets.

/// Makes `dots`, `weighted`, `exponentials`, `gated` and `round` of the vector operations in scope: `zeros`, `load`,
/// `store`, `spread`, `multiply_add` and `sum_of`, on sixteen `f32` whatever the instruction set, so that all round alike.
///
/// A tile of `$rows` rows and `$outputs` outputs has all its sums in registers.
macro_rules! row_kernels {
    ($feature:literal, $rows:literal, $outputs:literal) => {
        #[target_feature(enable = $feature)]
        pub(super) fn dots(weights: &[f32], rows: &[f32], inputs: usize, out: &mut [f32]) {
            let whole = weights.len() / inputs / $outputs * $outputs;
            let (tiles, rest) = weights.split_at(whole * inputs);
            for (number, weights) in tiles.chunks_exact($outputs * inputs).enumerate() {
                dots_of_rows::<$outputs>(weights, rows, inputs, out, number * $outputs);
            }
            for (number, weights) in rest.chunks_exact(inputs).enumerate() {
                dots_of_rows::<1>(weights, rows, inputs, out, whole + number);
            }
        }

        /// The outputs from `output` on, of all rows.
        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_of_rows<const OUTPUTS: usize>(
            weights: &[f32],
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            output: usize,
        ) {
            let outputs = out.len() / (rows.len() / inputs);
            for (number, (rows, out)) in rows.chunks($rows * inputs).zip(out.chunks_mut($rows * outputs)).enumerate() {
                let (at, is_first) = ((output, outputs), number == 0);
                match rows.len() / inputs {
                    1 => dots_of_tile::<1, OUTPUTS>(weights, rows, inputs, out, at, is_first),
                    2 => dots_of_tile::<2, OUTPUTS>(weights, rows, inputs, out, at, is_first),
                    3 => dots_of_tile::<3, OUTPUTS>(weights, rows, inputs, out, at, is_first),
                    _ => dots_of_tile::<$rows, OUTPUTS>(weights, rows, inputs, out, at, is_first),
                }
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_of_tile<const ROWS: usize, const OUTPUTS: usize>(
            weights: &[f32],
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            (output, outputs): (usize, usize),
            is_first: bool,
        ) {
            assert!(weights.len() == OUTPUTS * inputs && rows.len() == ROWS * inputs && inputs % LANES == 0);
            let mut sums = [[zeros(); OUTPUTS]; ROWS];
            for at in (0..inputs).step_by(LANES) {
                let mut vectors = [zeros(); OUTPUTS];
                for (number, vector) in vectors.iter_mut().enumerate() {
                    let address = weights.as_ptr().wrapping_add(number * inputs + at);
                    if is_first {
                        prefetch(address.wrapping_add(weights.len()).cast()); // what the next tile reads here
                    }
                    // SAFETY: `at` + 16 <= `inputs`, and there are `OUTPUTS` times `inputs` weights.
                    *vector = unsafe { load(address) };
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: likewise, and there are `ROWS` times `inputs` values.
                    let values = unsafe { load(rows.as_ptr().add(row * inputs + at)) };
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = multiply_add(vector, values, *sum);
                    }
                }
            }
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(outputs)) {
                for (sum, out) in sums.iter().zip(out.iter_mut().skip(output)) {
                    *out = sum_of(*sum);
                }
            }
        }

        #[target_feature(enable = $feature)]
        pub(super) fn weighted(values: &[f32], weights: &[f32], width: usize, out: &mut [f32]) {
            let positions = values.len() / width;
            let wide = width / ($outputs * LANES) * $outputs * LANES;
            for (weights, out) in weights.chunks($rows * positions).zip(out.chunks_mut($rows * width)) {
                for column in (0..wide).step_by($outputs * LANES) {
                    weighted_rows::<$outputs>(values, weights, width, column, out);
                }
                for column in (wide..width).step_by(LANES) {
                    weighted_rows::<1>(values, weights, width, column, out);
                }
            }
        }

        /// The vectors from `column` on.
        #[target_feature(enable = $feature)]
        #[inline]
        fn weighted_rows<const VECTORS: usize>(
            values: &[f32],
            weights: &[f32],
            width: usize,
            column: usize,
            out: &mut [f32],
        ) {
            match out.len() / width {
                1 => weighted_tile::<1, VECTORS>(values, weights, width, column, out),
                2 => weighted_tile::<2, VECTORS>(values, weights, width, column, out),
                3 => weighted_tile::<3, VECTORS>(values, weights, width, column, out),
                _ => weighted_tile::<$rows, VECTORS>(values, weights, width, column, out),
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn weighted_tile<const ROWS: usize, const VECTORS: usize>(
            values: &[f32],
            weights: &[f32],
            width: usize,
            column: usize,
            out: &mut [f32],
        ) {
            let positions = values.len() / width;
            assert!(column + VECTORS * LANES <= width);
            assert!(weights.len() == ROWS * positions && out.len() == ROWS * width);
            let mut sums = [[zeros(); VECTORS]; ROWS];
            for (position, values) in values.chunks_exact(width).enumerate() {
                let mut vectors = [zeros(); VECTORS];
                for (number, vector) in vectors.iter_mut().enumerate() {
                    // SAFETY: `column` and `VECTORS` vectors are within `width`, and a chunk has as many values.
                    *vector = unsafe { load(values.as_ptr().add(column + number * LANES)) };
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: `position` < `positions`, and there are `ROWS` times `positions` weights.
                    let weight = spread(unsafe { *weights.as_ptr().add(row * positions + position) });
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = multiply_add(vector, weight, *sum);
                    }
                }
            }
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(width)) {
                for (number, sum) in sums.iter().enumerate() {
                    // SAFETY: as the loads, of a chunk of `out`.
                    unsafe { store(out.as_mut_ptr().add(column + number * LANES), *sum) };
                }
            }
        }

        #[target_feature(enable = $feature)]
        pub(super) fn exponentials(values: &mut [f32]) {
            crate::blocks::scalar::exponentials(values);
        }

        #[target_feature(enable = $feature)]
        pub(super) fn round(values: &[f32], scale: f32, codes: &mut [i16]) {
            crate::blocks::scalar::round(values, scale, codes);
        }

        #[target_feature(enable = $feature)]
        pub(super) fn gated(gates: &mut [f32], values: &[f32]) {
            crate::blocks::scalar::gated(gates, values);
        }
    };
}

/// Makes `code_dots` of `no_sums`, `no_codes`, `load_codes`, `load_shorts`, `add_products` and `sum_of_whole`, on sixteen
/// values. All is exact.
macro_rules! code_kernels {
    ($feature:literal) => {
        #[target_feature(enable = $feature)]
        pub(super) fn code_dots(codes: &[i8], rows: &[i16], inputs: usize, out: &mut [i32]) {
            let whole = codes.len() / inputs / 2 * 2;
            let (tiles, rest) = codes.split_at(whole * inputs);
            for (number, codes) in tiles.chunks_exact(2 * inputs).enumerate() {
                code_dots_of_rows::<2>(codes, rows, inputs, out, 2 * number);
            }
            for (number, codes) in rest.chunks_exact(inputs).enumerate() {
                code_dots_of_rows::<1>(codes, rows, inputs, out, whole + number);
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn code_dots_of_rows<const OUTPUTS: usize>(
            codes: &[i8],
            rows: &[i16],
            inputs: usize,
            out: &mut [i32],
            output: usize,
        ) {
            let outputs = out.len() / (rows.len() / inputs);
            for (rows, out) in rows.chunks(4 * inputs).zip(out.chunks_mut(4 * outputs)) {
                match rows.len() / inputs {
                    1 => code_dots_of_tile::<1, OUTPUTS>(codes, rows, inputs, out, (output, outputs)),
                    2 => code_dots_of_tile::<2, OUTPUTS>(codes, rows, inputs, out, (output, outputs)),
                    3 => code_dots_of_tile::<3, OUTPUTS>(codes, rows, inputs, out, (output, outputs)),
                    _ => code_dots_of_tile::<4, OUTPUTS>(codes, rows, inputs, out, (output, outputs)),
                }
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn code_dots_of_tile<const ROWS: usize, const OUTPUTS: usize>(
            codes: &[i8],
            rows: &[i16],
            inputs: usize,
            out: &mut [i32],
            (output, outputs): (usize, usize),
        ) {
            assert!(codes.len() == OUTPUTS * inputs && rows.len() == ROWS * inputs && inputs % LANES == 0);
            let mut sums = [[no_sums(); OUTPUTS]; ROWS];
            for at in (0..inputs).step_by(LANES) {
                let mut vectors = [no_codes(); OUTPUTS];
                for (number, vector) in vectors.iter_mut().enumerate() {
                    let address = codes.as_ptr().wrapping_add(number * inputs + at);
                    prefetch(address.wrapping_add(PREFETCH_BYTES).cast());
                    // SAFETY: `at` + 16 <= `inputs`, and there are `OUTPUTS` times `inputs` codes.
                    *vector = unsafe { load_codes(address) };
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: likewise, and there are `ROWS` times `inputs` values.
                    let values = unsafe { load_shorts(rows.as_ptr().add(row * inputs + at)) };
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = add_products(*sum, vector, values);
                    }
                }
            }
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(outputs)) {
                for (sum, out) in sums.iter().zip(out.iter_mut().skip(output)) {
                    *out = sum_of_whole(*sum);
                }
            }
        }
    };
}
