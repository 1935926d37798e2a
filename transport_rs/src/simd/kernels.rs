//! The loops over blocks, written once for all instruction sets.

/// Makes `encode` and `decode` of the vector operations in scope, of which `$lanes` values fill one vector.
///
/// The operations are called inside closures because those take the target feature from the function they stand in, as
/// generic arguments otherwise would not.
macro_rules! kernels {
    ($feature:literal, $lanes:literal) => {
        #[target_feature(enable = $feature)]
        pub(super) fn encode(format: Format, run: EncodeRun<'_>) -> Result<(), NotFinite> {
            match (format.dtype(), format.code()) {
                (Dtype::F32, Code::Linear) => encode_with(format, run, |v| load_f32(v), |x| linear_codes(x)),
                (Dtype::F32, Code::Dynamic) => encode_with(format, run, |v| load_f32(v), |x| dynamic_codes(x)),
                (Dtype::F16, Code::Linear) => encode_with(format, run, |v| load_f16(v), |x| linear_codes(x)),
                (Dtype::F16, Code::Dynamic) => encode_with(format, run, |v| load_f16(v), |x| dynamic_codes(x)),
                (Dtype::Bf16, Code::Linear) => encode_with(format, run, |v| load_bf16(v), |x| linear_codes(x)),
                (Dtype::Bf16, Code::Dynamic) => encode_with(format, run, |v| load_bf16(v), |x| dynamic_codes(x)),
            }
        }

        #[target_feature(enable = $feature)]
        pub(super) fn decode(format: Format, run: DecodeRun<'_>) {
            match (format.dtype(), format.code()) {
                (Dtype::F32, Code::Linear) => decode_with(format, run, |c| linear_levels(c), |x, v| store_f32(x, v)),
                (Dtype::F32, Code::Dynamic) => decode_with(format, run, |c| dynamic_levels(c), |x, v| store_f32(x, v)),
                (Dtype::F16, Code::Linear) => decode_with(format, run, |c| linear_levels(c), |x, v| store_f16(x, v)),
                (Dtype::F16, Code::Dynamic) => decode_with(format, run, |c| dynamic_levels(c), |x, v| store_f16(x, v)),
                (Dtype::Bf16, Code::Linear) => decode_with(format, run, |c| linear_levels(c), |x, v| store_bf16(x, v)),
                (Dtype::Bf16, Code::Dynamic) => {
                    decode_with(format, run, |c| dynamic_levels(c), |x, v| store_bf16(x, v))
                }
            }
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn encode_with<const VECTOR_BYTES: usize>(
            format: Format,
            run: EncodeRun<'_>,
            load: impl Fn(&[u8; VECTOR_BYTES]) -> Floats,
            quantize: impl Fn(Floats) -> Ints,
        ) -> Result<(), NotFinite> {
            let blocks = run.values.chunks(format.block() * format.dtype().bytes());
            let outputs = run.scales.iter_mut().zip(run.codes.chunks_mut(format.block()));
            for (number, (values, (scale, codes))) in blocks.zip(outputs).enumerate() {
                let (vectors, rest) = values.as_chunks::<VECTOR_BYTES>();
                let mut most = splat_int(0);
                for vector in vectors {
                    prefetch(vector.as_ptr().wrapping_add(PREFETCH_BYTES));
                    most = larger_magnitude(most, load(vector));
                }
                let mut bits = largest(most);
                if !rest.is_empty() {
                    bits = bits.max(scalar::absmax_bits(format.dtype(), rest));
                }
                let absmax = scalar::finite(bits).ok_or_else(|| scalar::first_not_finite(format, number, values))?;
                *scale = absmax.to_le_bytes();

                let by = scalar::Normalization::new(format.code(), absmax);
                let (prescale, factor) = (splat(by.prescale), splat(by.factor));
                let (code_vectors, code_rest) = codes.as_chunks_mut::<$lanes>();
                for (vector, code_vector) in vectors.iter().zip(code_vectors) {
                    let normalized = multiply(multiply(load(vector), prescale), factor);
                    store_codes(quantize(normalized), code_vector);
                }
                if !rest.is_empty() {
                    scalar::encode_values(format, by, rest, code_rest);
                }
            }
            Ok(())
        }

        #[target_feature(enable = $feature)]
        #[inline]
        fn decode_with<const VECTOR_BYTES: usize>(
            format: Format,
            run: DecodeRun<'_>,
            levels: impl Fn(&[u8; $lanes]) -> Floats,
            store: impl Fn(Floats, &mut [u8; VECTOR_BYTES]),
        ) {
            let DecodeRun { values, scales, codes } = run;
            let blocks = values.chunks_mut(format.block() * format.dtype().bytes());
            for ((values, scale), codes) in blocks.zip(scales).zip(codes.chunks(format.block())) {
                let scale = f32::from_le_bytes(*scale);
                let (code_vectors, code_rest) = codes.as_chunks::<$lanes>();
                let (vectors, rest) = values.as_chunks_mut::<VECTOR_BYTES>();
                for (code_vector, vector) in code_vectors.iter().zip(vectors) {
                    store(multiply(levels(code_vector), splat(scale)), vector);
                }
                if !rest.is_empty() {
                    scalar::decode_values(format, scale, code_rest, rest);
                }
            }
        }
    };
}
