//! The codec with vector instructions, and the choice among them at run time. All `unsafe` of the crate's pure part is here.
//!
//! A module for each instruction set gives some twenty operations on one vector; [`kernels`] makes the loops out of them.
//! Every operation rounds as [`crate::codec::scalar`] does, in the same order, so the results are the same bits. Nothing
//! is fused: a multiply-add rounds once where the specification rounds twice.

#![expect(unsafe_code, reason = "vector instructions; each use has its SAFETY comment")]

use crate::codec::{DecodeRun, EncodeRun, Format, NotFinite, scalar};

/// So far ahead of the encoder the values are called for: a short block's second pass leaves the processor no room to look
/// that far by itself.
const PREFETCH_BYTES: usize = 2048;

#[macro_use]
mod kernels;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;

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

impl Isa {
    /// One value at a time: the specification, and what is left where nothing else is available.
    pub const SCALAR: Self = Self(Kind::Scalar);

    /// What this processor has, the fastest first. The standard library remembers what it asked the processor.
    pub fn available() -> impl Iterator<Item = Self> {
        let candidates: &[(Kind, bool)] = &[
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx512, is_x86_feature_detected!("avx512f")),
            #[cfg(target_arch = "x86_64")]
            (Kind::Avx2, is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")),
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
        match self.0 {
            Kind::Scalar => scalar::encode(format, run),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX2 and F16C.
            Kind::Avx2 => unsafe { avx2::encode(format, run) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX-512F.
            Kind::Avx512 => unsafe { avx512::encode(format, run) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: `available` made this `Isa`, so the processor has NEON.
            Kind::Neon => unsafe { neon::encode(format, run) },
        }
    }

    pub(crate) fn decode(self, format: Format, run: DecodeRun<'_>) {
        match self.0 {
            Kind::Scalar => scalar::decode(format, run),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX2 and F16C.
            Kind::Avx2 => unsafe { avx2::decode(format, run) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `available` made this `Isa`, so the processor has AVX-512F.
            Kind::Avx512 => unsafe { avx512::decode(format, run) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: `available` made this `Isa`, so the processor has NEON.
            Kind::Neon => unsafe { neon::decode(format, run) },
        }
    }
}
