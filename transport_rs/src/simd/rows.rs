//! Products of a few rows with a matrix, written once for all instruction sets.

/// Makes `dots` (of floats, `bf16_`, `f16_`, `q4_` and `q8_`), `q4_floats`, `q8_floats`, `weighted`, `soften`, `gated`,
/// `scaled` and `round` of the vector operations in scope: `zeros`, `load`, `widen_bf16`, `widen_f16`, `widen_q4`,
/// `widen_q8`, `store`, `spread`, `multiply_add` and `sums_of`, on sixteen `f32` whatever the instruction set, so that all
/// round alike.
///
/// A tile of `$rows` rows and `$outputs` outputs has all its sums in registers, and so has one of `$many_rows` and
/// `$many_outputs`. For more than `$straight` rows weights are widened once; floats, which have the second number, are
/// copied to where cache lines begin. The weights come from a closure, which takes the target feature from the function
/// around it. It gets the number of the first weight, and the distance to the weights to prefetch. It returns `VECTORS`
/// vectors.
macro_rules! row_kernels {
    ($feature:literal, $rows:literal x $outputs:literal, $many_rows:literal x $many_outputs:literal, straight: $straight:literal, $straight_floats:expr) => {
        #[target_feature(enable = $feature)]
        pub(super) fn dots(weights: &[f32], rows: &[f32], inputs: usize, out: &mut [f32]) {
            dots_with(weights.len() / inputs, $straight_floats, rows, inputs, out, move |at, ahead| {
                let address = place(weights, at, ahead);
                // SAFETY: `dots_with` asks for 16 weights of `outputs * inputs`.
                [unsafe { load(address) }]
            });
        }

        #[target_feature(enable = $feature)]
        pub(super) fn bf16_dots(weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
            dots_with(weights.len() / inputs, $straight, rows, inputs, out, move |at, ahead| {
                let address = place(weights, at, ahead);
                // SAFETY: likewise.
                [unsafe { widen_bf16(address) }]
            });
        }

        #[target_feature(enable = $feature)]
        pub(super) fn f16_dots(weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
            dots_with(weights.len() / inputs, $straight, rows, inputs, out, move |at, ahead| {
                let address = place(weights, at, ahead);
                // SAFETY: likewise.
                [unsafe { widen_f16(address) }]
            });
        }

        #[target_feature(enable = $feature)]
        pub(super) fn q4_dots(weights: Q4<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
            assert!(weights.codes.len() == GROUP_BYTES * weights.levels.len() && inputs % GROUP == 0);
            dots_with(weights.levels.len() * GROUP / inputs, $straight, rows, inputs, out, move |at, ahead| {
                let codes = place(weights.codes, at / 2, ahead / 2);
                let levels = place(weights.levels, at / GROUP, ahead / GROUP);
                // SAFETY: `dots_with` asks for a group of `outputs * inputs / GROUP`.
                unsafe { widen_q4(codes, &*levels) }
            });
        }

        #[target_feature(enable = $feature)]
        pub(super) fn q8_dots(weights: Q8<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
            assert!(weights.codes.len() == GROUP * weights.steps.len() && inputs % GROUP == 0);
            dots_with(weights.codes.len() / inputs, $straight, rows, inputs, out, move |at, ahead| {
                let codes = place(weights.codes, at, ahead);
                // SAFETY: `dots_with` asks for a group of `outputs * inputs / GROUP`.
                unsafe { widen_q8(codes, *weights.steps.as_ptr().add(at / GROUP)) }
            });
        }

        /// The weights as they are.
        #[target_feature(enable = $feature)]
        pub(super) fn q4_floats(weights: Q4<'_>, out: &mut [f32]) {
            let groups = weights.codes.as_chunks::<GROUP_BYTES>().0.iter().zip(weights.levels);
            for ((codes, levels), out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
                // SAFETY: there are 16 bytes of codes, and 32 values fit.
                unsafe {
                    let [low, high] = widen_q4(codes.as_ptr(), levels);
                    store(out.as_mut_ptr(), low);
                    store(out.as_mut_ptr().add(LANES), high);
                }
            }
        }

        /// The weights as they are.
        #[target_feature(enable = $feature)]
        pub(super) fn q8_floats(weights: Q8<'_>, out: &mut [f32]) {
            let groups = weights.codes.as_chunks::<GROUP>().0.iter().zip(weights.steps);
            for ((codes, step), out) in groups.zip(out.as_chunks_mut::<GROUP>().0) {
                // SAFETY: there are 32 bytes of codes, and 32 values fit.
                unsafe {
                    let [low, high] = widen_q8(codes.as_ptr(), *step);
                    store(out.as_mut_ptr(), low);
                    store(out.as_mut_ptr().add(LANES), high);
                }
            }
        }

        /// The address of weight `at`. Prefetches the weight that lies `ahead` of it.
        #[target_feature(enable = $feature)]
        #[inline]
        fn place<T>(weights: &[T], at: usize, ahead: usize) -> *const T {
            let address = weights.as_ptr().wrapping_add(at);
            prefetch(address.wrapping_add(ahead).cast());
            address
        }

        /// Reads the weights where they are for up to `straight` rows. For more rows, it widens those of some outputs
        /// once.
        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_with<const VECTORS: usize>(
            outputs: usize,
            straight: usize,
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS] + Copy,
        ) {
            let count = rows.len() / inputs;
            if count <= $rows {
                return dots_of_rows::<VECTORS, $outputs, $rows>(weights, rows, inputs, out, 0..outputs);
            }
            assert!(inputs % (VECTORS * LANES) == 0);
            let are_wide = count > straight;
            let most =
                (if are_wide { WIDE_VALUES } else { NEAR_VALUES } / inputs).max(1).next_multiple_of($many_outputs);
            let mut wide = Aligned::zeros(if are_wide { most.min(outputs) * inputs } else { 0 });
            for first in (0..outputs).step_by(most) {
                let some = first..outputs.min(first + most);
                if are_wide {
                    let wide = wide.get_mut(..some.len() * inputs).unwrap_or_default();
                    widen(weights, first * inputs, $many_outputs * inputs, wide);
                    // SAFETY: weights of these outputs are asked for, in vectors of which the inputs are a multiple.
                    let load = |at: usize, _| [unsafe { load(wide.as_ptr().add(at - first * inputs)) }];
                    dots_of_panels(load, rows, inputs, out, some);
                } else {
                    dots_of_panels(weights, rows, inputs, out, some);
                }
            }
        }

        /// Cuts rows into panels of nearly equal size, so that none has few rows.
        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_of_panels<const VECTORS: usize>(
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS] + Copy,
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            outputs: Range<usize>,
        ) {
            let count = rows.len() / inputs;
            let panel = count.div_ceil(count.div_ceil($many_rows));
            let all = out.len() / count;
            for (rows, out) in rows.chunks(panel * inputs).zip(out.chunks_mut(panel * all)) {
                dots_of_rows::<VECTORS, $many_outputs, $many_rows>(weights, rows, inputs, out, outputs.clone());
            }
        }

        /// Widens the weights from `first` on and prefetches those that lie `ahead`. A function of its own keeps
        /// addresses in registers.
        #[target_feature(enable = $feature)]
        #[inline(never)]
        fn widen<const VECTORS: usize>(
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS],
            first: usize,
            ahead: usize,
            out: &mut [f32],
        ) {
            for at in (0..out.len()).step_by(VECTORS * LANES) {
                for (number, vector) in weights(first + at, ahead).into_iter().enumerate() {
                    // SAFETY: the vectors are within `inputs`, of which `out` has a multiple.
                    unsafe { store(out.as_mut_ptr().add(at + number * LANES), vector) };
                }
            }
        }

        /// The products of at most `MOST` rows.
        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_of_rows<const VECTORS: usize, const OUTPUTS: usize, const MOST: usize>(
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS] + Copy,
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            outputs: Range<usize>,
        ) {
            match rows.len() / inputs {
                1 => dots_of_tiles::<VECTORS, 1, OUTPUTS>(weights, rows, inputs, out, outputs),
                2 => dots_of_tiles::<VECTORS, 2, OUTPUTS>(weights, rows, inputs, out, outputs),
                3 => dots_of_tiles::<VECTORS, 3, OUTPUTS>(weights, rows, inputs, out, outputs),
                4 => dots_of_tiles::<VECTORS, 4, OUTPUTS>(weights, rows, inputs, out, outputs),
                5 => dots_of_tiles::<VECTORS, 5, OUTPUTS>(weights, rows, inputs, out, outputs),
                6 => dots_of_tiles::<VECTORS, 6, OUTPUTS>(weights, rows, inputs, out, outputs),
                7 => dots_of_tiles::<VECTORS, 7, OUTPUTS>(weights, rows, inputs, out, outputs),
                _ => dots_of_tiles::<VECTORS, MOST, OUTPUTS>(weights, rows, inputs, out, outputs),
            }
        }

        /// Some outputs, `OUTPUTS` at a time, and what is left one by one.
        #[target_feature(enable = $feature)]
        #[inline(never)]
        fn dots_of_tiles<const VECTORS: usize, const ROWS: usize, const OUTPUTS: usize>(
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS] + Copy,
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            outputs: Range<usize>,
        ) {
            let all = out.len() / ROWS;
            let whole = outputs.end - outputs.len() % OUTPUTS;
            for output in (outputs.start..whole).step_by(OUTPUTS) {
                dots_of_tile::<VECTORS, ROWS, OUTPUTS>(weights, rows, inputs, out, (output, all));
            }
            for output in whole..outputs.end {
                dots_of_tile::<VECTORS, ROWS, 1>(weights, rows, inputs, out, (output, all));
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn dots_of_tile<const VECTORS: usize, const ROWS: usize, const OUTPUTS: usize>(
            weights: impl Fn(usize, usize) -> [Sixteen; VECTORS],
            rows: &[f32],
            inputs: usize,
            out: &mut [f32],
            (output, outputs): (usize, usize),
        ) {
            assert!(rows.len() == ROWS * inputs && inputs % (VECTORS * LANES) == 0 && output + OUTPUTS <= outputs);
            let mut sums = [[zeros(); OUTPUTS]; ROWS];
            for at in (0..inputs).step_by(VECTORS * LANES) {
                let mut tile = [[zeros(); VECTORS]; OUTPUTS];
                for (number, vectors) in tile.iter_mut().enumerate() {
                    *vectors = weights((output + number) * inputs + at, 2 * OUTPUTS * inputs);
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    for number in 0..VECTORS {
                        // SAFETY: `VECTORS` vectors from `at` on are within `inputs`, and there are `ROWS` such rows.
                        let values = unsafe { load(rows.as_ptr().add(row * inputs + at + number * LANES)) };
                        for (sum, vectors) in sums.iter_mut().zip(&tile) {
                            if let Some(vector) = vectors.get(number) {
                                *sum = multiply_add(*vector, values, *sum);
                            }
                        }
                    }
                }
            }
            add_up(sums, out, (output, outputs));
        }

        /// Writes what the lanes of each come to. By itself, so that sums are in registers as long as they grow.
        #[target_feature(enable = $feature)]
        #[inline(never)]
        fn add_up<const ROWS: usize, const OUTPUTS: usize>(
            sums: [[Sixteen; OUTPUTS]; ROWS],
            out: &mut [f32],
            (output, outputs): (usize, usize),
        ) {
            for (sums, out) in sums.iter().zip(out.chunks_exact_mut(outputs)) {
                let mut four = [zeros(); 4];
                four.iter_mut().zip(sums).for_each(|(place, sum)| *place = *sum);
                let place = out.get_mut(output..).and_then(<[f32]>::first_chunk_mut::<OUTPUTS>);
                if let (Some(place), Some(totals)) = (place, sums_of(four).first_chunk()) {
                    *place = *totals;
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
                    prefetch(values.as_ptr().wrapping_add(column + number * LANES + VALUES_AHEAD).cast());
                    // SAFETY: `column` and `VECTORS` vectors are within `width`, and a chunk has `width` values.
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
        pub(super) fn soften(scores: &mut [f32]) -> f32 {
            crate::blocks::scalar::soften(scores)
        }

        #[target_feature(enable = $feature)]
        pub(super) fn scaled(codes: &[i8], scales: &[f32], out: &mut [f32]) {
            crate::blocks::scalar::scaled(codes, scales, out);
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
