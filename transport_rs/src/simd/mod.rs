//! Loops with vector instructions, of the codec and of blocks, and the choice among them at run time. All `unsafe` of the
//! crate's pure part is here.
//!
//! A module for each instruction set gives some operations on one vector; [`kernels`] makes the codec's loops out of them,
//! [`rows`] and [`codes`] those of blocks. Every operation rounds as [`crate::codec::scalar`] and
//! [`crate::blocks::scalar`] do, in the same order, so the results are the same bits: the codec has no multiply-adds, which
//! round once, and blocks have no other.

#![expect(unsafe_code, reason = "vector instructions; each use has its SAFETY comment")]

use crate::blocks::groups::{Q4, Q8};
use crate::blocks::scalar as blocks;
use crate::codec::{DecodeRun, EncodeRun, Format, NotFinite, scalar};

/// The encoder prefetches values this far ahead: a short block's second pass leaves the processor no time to look that
/// far by itself.
const PREFETCH_BYTES: usize = 2048;

/// Attention prefetches the values that it adds up this far ahead: the processor looks no further than a page by
/// itself.
const VALUES_AHEAD: usize = 512;
/// This many weights stay in a near cache while they are multiplied with one row after another.
const NEAR_VALUES: usize = 1 << 14;
/// The same for widened weights: 256 KiB.
const WIDE_VALUES: usize = 1 << 16;

#[macro_use]
mod kernels;
#[macro_use]
mod codes;
#[macro_use]
mod rows;

/// Values that the products of a few rows add up at a time, each kind of processor in its own number of vectors.
pub(crate) const LANES: usize = 16;

mod aligned;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;

pub(crate) use aligned::Aligned;

/// An instruction set that this processor has: only [`Isa::available`] makes one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon,
}

/// Calls the function of the instruction set's own module, or of the scalar one that is named.
macro_rules! run_on {
    ($isa:expr, $scalar:ident::$function:ident($($argument:expr),*)) => {
        match $isa.0 {
            Kind::Scalar => $scalar::$function($($argument),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX2, F16C and FMA.
            Kind::Avx2 => unsafe { avx2::$function($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX-512F.
            Kind::Avx512 => unsafe { avx512::$function($($argument),*) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: `available` made this `Isa`, so the processor has NEON.
            Kind::Neon => unsafe { neon::$function($($argument),*) },
        }
    };
}

impl Isa {
    /// One value at a time: the specification, and what is left where nothing else is available.
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// The instruction sets of this processor, the fastest first. The standard library remembers what it asked the
    /// processor.
    pub fn available() -> impl Iterator<Item = Self> {
        let candidates: &[(Kind, bool)] = &[
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, is_x86_feature_detected!("avx512f")),
            #[cfg(target_arch = "x86_64")]
            (
                Kind::Avx2,
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma"),
            ),
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            (Kind::Neon, std::arch::is_aarch64_feature_detected!("neon")),
            (Kind::Scalar, true),
        ];
        let there: Vec<Self> = candidates.iter().filter(|(_, there)| *there).map(|(kind, _)| Self(*kind)).collect();
        there.into_iter()
    }

    /// The fastest that this processor has.
    #[must_use]
    pub fn best() -> Self {
        Self::available().next().unwrap_or(Self::SCALAR)
    }

    pub(crate) fn encode(self, format: Format, run: EncodeRun<'_>) -> Result<(), NotFinite> {
        run_on!(self, scalar::encode(format, run))
    }

    pub(crate) fn decode(self, format: Format, run: DecodeRun<'_>) {
        run_on!(self, scalar::decode(format, run));
    }

    /// The products of `rows`, `(rows, inputs)`, with `weights`, `(outputs, inputs)`: `out` is `(rows, outputs)`.
    pub(crate) fn dots(self, weights: &[f32], rows: &[f32], inputs: usize, out: &mut [f32]) {
        run_on!(self, blocks::dots(weights, rows, inputs, out));
    }

    /// [`Isa::dots`] for weights in `bfloat16`, which are widened to `f32` exactly.
    pub(crate) fn bf16_dots(self, weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
        run_on!(self, blocks::bf16_dots(weights, rows, inputs, out));
    }

    /// [`Isa::bf16_dots`] for weights in `binary16`.
    pub(crate) fn f16_dots(self, weights: &[u16], rows: &[f32], inputs: usize, out: &mut [f32]) {
        run_on!(self, blocks::f16_dots(weights, rows, inputs, out));
    }

    /// [`Isa::dots`] for weights in 4 bits, which are widened as [`Q4`] says.
    pub(crate) fn q4_dots(self, weights: Q4<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
        run_on!(self, blocks::q4_dots(weights, rows, inputs, out));
    }

    /// The weights themselves.
    pub(crate) fn q4_floats(self, weights: Q4<'_>, out: &mut [f32]) {
        run_on!(self, blocks::q4_floats(weights, out));
    }

    /// [`Isa::q4_floats`] for 8 bits.
    pub(crate) fn q8_floats(self, weights: Q8<'_>, out: &mut [f32]) {
        run_on!(self, blocks::q8_floats(weights, out));
    }

    /// [`Isa::q4_dots`] for weights in 8 bits.
    pub(crate) fn q8_dots(self, weights: Q8<'_>, rows: &[f32], inputs: usize, out: &mut [f32]) {
        run_on!(self, blocks::q8_dots(weights, rows, inputs, out));
    }

    /// Widens numbers in 8 bits; each row has a scale.
    pub(crate) fn scaled(self, codes: &[i8], scales: &[f32], out: &mut [f32]) {
        run_on!(self, blocks::scaled(codes, scales, out));
    }

    /// Sums of `values`, `(positions, width)`, as `weights`, `(group, positions)`, has them: `out` is `(group, width)`.
    pub(crate) fn weighted(self, values: &[f32], weights: &[f32], width: usize, out: &mut [f32]) {
        run_on!(self, blocks::weighted(values, weights, width, out));
    }

    /// [`Isa::dots`] for whole numbers from -127 to 127.
    pub(crate) fn code_dots(self, codes: &[i8], rows: &[i16], inputs: usize, out: &mut [i32]) {
        run_on!(self, blocks::code_dots(codes, rows, inputs, out));
    }

    /// Divides each value by `scale` and rounds to the nearest whole number, half to even: from -127 to 127.
    pub(crate) fn round(self, values: &[f32], scale: f32, codes: &mut [i16]) {
        run_on!(self, blocks::round(values, scale, codes));
    }

    /// `e^(x - largest)` of each, in place. Returns what all come to.
    pub(crate) fn soften(self, scores: &mut [f32]) -> f32 {
        run_on!(self, blocks::soften(scores))
    }

    /// `SiLU` of each of `gates` times its one of `values`, in place.
    pub(crate) fn gated(self, gates: &mut [f32], values: &[f32]) {
        run_on!(self, blocks::gated(gates, values));
    }
}
