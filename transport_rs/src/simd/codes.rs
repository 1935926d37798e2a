//! Products of whole numbers of a few rows with a matrix of 8 bits, written once for all instruction sets.

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
