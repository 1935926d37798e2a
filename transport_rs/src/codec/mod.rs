//! Blockwise 8-bit codec of activations: a byte for each value, and for each block of values one scale.
//!
//! # Format
//!
//! `n` values in blocks of `b` (the last one may be short) become `4 * ceil(n / b) + n` bytes:
//!
//! ```text
//! [scale of block 0: f32, little-endian] ... [scale of the last block] [code of value 0: u8] ... [code of value n - 1]
//! ```
//!
//! The scale of a block is its largest magnitude, and a value is `level(code) * scale`; [`Code`] says which levels
//! there are. Element type, block size and code map are not in the bytes: the caller's framing carries them.
//!
//! # Promises
//!
//! - Encoding refuses NaN and infinity and names the first one: activations that are not finite are a fault upstream.
//! - Decoding takes any bytes: it returns an error, or values that are finite in the element type asked for.
//! - A block of zeros comes back as zeros. Denormals are values like any other, unless the caller's thread flushes them.
//! - The result depends on neither the instruction set nor the number of threads: [`scalar`] is the specification, and
//!   the code in `simd/` gives the same bits.

pub mod levels;
pub mod numbers;
pub mod scalar;

use std::error::Error;
use std::sync::{Mutex, PoisonError};
use std::{fmt, iter, panic, thread};

pub use crate::simd::Isa;

/// The length of a block's scale in bytes.
pub const SCALE_BYTES: usize = size_of::<f32>();

/// The block sizes that the codec takes: powers of two from the first to the last of these.
pub const BLOCK_SIZES: (usize, usize) = (64, 4096);

/// Each thread must have at least this many bytes of values to work on. Starting one costs 25 us if a core is idle, and
/// more if none is, while this work takes 200 to 1200 us (README.md).
const MIN_BYTES_PER_THREAD: usize = 4 * 1024 * 1024;

/// The element type of the values, in the byte order of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of an `F32`.
    Bf16,
}

impl Dtype {
    /// The length of one value.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The largest finite value.
    #[must_use]
    pub const fn max(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::F16 => 65504.0,
            Self::Bf16 => f32::from_bits(0x7F7F_0000),
        }
    }
}

/// The levels that the 256 codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// `code / 127` of a signed byte: evenly spaced, rounded half to even. The encoder never writes -128, which is read
    /// as -127.
    Linear,
    /// The signed dynamic map of Dettmers et al. (8-bit Optimizers via Block-wise Quantization, section 2.1), see
    /// [`levels`]: seven decades, each with twice the levels of the one below.
    Dynamic,
}

/// The parameters that both sides must agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    dtype: Dtype,
    code: Code,
    block: usize,
}

impl Format {
    /// # Errors
    ///
    /// [`CodecError::BlockSize`] unless `block` is a power of two within [`BLOCK_SIZES`].
    pub fn new(dtype: Dtype, code: Code, block: usize) -> Result<Self, CodecError> {
        if block.is_power_of_two() && (BLOCK_SIZES.0..=BLOCK_SIZES.1).contains(&block) {
            Ok(Self { dtype, code, block })
        } else {
            Err(CodecError::BlockSize { block })
        }
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(self) -> Dtype {
        self.dtype
    }

    /// The code map.
    #[must_use]
    pub const fn code(self) -> Code {
        self.code
    }

    /// The number of values in a block.
    #[must_use]
    pub const fn block(self) -> usize {
        self.block
    }

    /// The length of `values` encoded values; `None` if no memory could hold them.
    #[must_use]
    pub fn encoded_bytes(self, values: usize) -> Option<usize> {
        values.div_ceil(self.block).checked_mul(SCALE_BYTES)?.checked_add(values)
    }

    /// The length of `values` decoded values; `None` if no memory could hold them.
    #[must_use]
    pub fn decoded_bytes(self, values: usize) -> Option<usize> {
        values.checked_mul(self.dtype.bytes())
    }
}

/// Why nothing was encoded or decoded. The content of the output is then not specified.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum CodecError {
    /// The block size is not one of ours.
    BlockSize {
        /// The block size asked for.
        block: usize,
    },
    /// The values are no whole number of elements.
    PartialValue {
        /// The length of the values.
        len_bytes: usize,
    },
    /// The encoded side is not as long as that many values make it.
    EncodedLength {
        /// The length that is there.
        found: usize,
        /// How many values were said to be in it.
        values: usize,
    },
    /// A NaN or an infinity among the values.
    NotFinite {
        /// The first such value.
        index: usize,
    },
    /// A scale that no encoder of this format writes: negative, not finite, or too large for the element type.
    BadScale {
        /// The first such block.
        block: usize,
        /// Its scale.
        scale: f32,
    },
}

impl fmt::Display for CodecError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::BlockSize { block } => {
                let (least, most) = BLOCK_SIZES;
                write!(formatter, "block {block}: take a power of two from {least} to {most}")
            }
            Self::PartialValue { len_bytes } => write!(formatter, "{len_bytes} bytes are no whole number of values"),
            Self::EncodedLength { found, values } => {
                write!(formatter, "{found} bytes are not what {values} values are encoded in")
            }
            Self::NotFinite { index } => write!(formatter, "value {index} is not finite"),
            Self::BadScale { block, scale } => {
                write!(formatter, "the scale of block {block} is {scale}: negative, not finite, or too large")
            }
        }
    }
}

impl Error for CodecError {}

/// Encodes `values` into `out`, which must have their [`Format::encoded_bytes`], on up to `threads` threads.
///
/// # Errors
///
/// [`CodecError::PartialValue`], [`CodecError::EncodedLength`] or [`CodecError::NotFinite`].
pub fn encode(format: Format, values: &[u8], out: &mut [u8], threads: usize) -> Result<(), CodecError> {
    encode_on(Isa::best(), format, values, out, threads)
}

/// Decodes `encoded` into `out`, whose length says how many values there are, on up to `threads` threads.
///
/// # Errors
///
/// [`CodecError::PartialValue`], [`CodecError::EncodedLength`] or [`CodecError::BadScale`].
pub fn decode(format: Format, encoded: &[u8], out: &mut [u8], threads: usize) -> Result<(), CodecError> {
    decode_on(Isa::best(), format, encoded, out, threads)
}

/// [`encode`] with a given instruction set: for tests and measurements.
///
/// # Errors
///
/// Those of [`encode`].
pub fn encode_on(isa: Isa, format: Format, values: &[u8], out: &mut [u8], threads: usize) -> Result<(), CodecError> {
    let count = value_count(format, values)?;
    let (scales, codes) = split_mut(format, out, count)?;
    let part = blocks_per_thread(format, count, threads);
    let parts = values
        .chunks(part * format.block * format.dtype.bytes())
        .zip(scales.chunks_mut(part))
        .zip(codes.chunks_mut(part * format.block))
        .map(|((values, scales), codes)| EncodeRun { values, scales, codes });
    first_error(parts, |run| isa.encode(format, run))
        .map_err(|(number, NotFinite { index })| CodecError::NotFinite { index: number * part * format.block + index })
}

/// [`decode`] with a given instruction set: for tests and measurements.
///
/// # Errors
///
/// Those of [`decode`].
pub fn decode_on(isa: Isa, format: Format, encoded: &[u8], out: &mut [u8], threads: usize) -> Result<(), CodecError> {
    let count = value_count(format, out)?;
    let (scales, codes) = split(format, encoded, count)?;
    for (block, bytes) in scales.iter().enumerate() {
        let scale = f32::from_le_bytes(*bytes);
        if !(scale >= 0.0 && scale <= format.dtype.max()) {
            return Err(CodecError::BadScale { block, scale });
        }
    }
    let part = blocks_per_thread(format, count, threads);
    let parts = out
        .chunks_mut(part * format.block * format.dtype.bytes())
        .zip(scales.chunks(part))
        .zip(codes.chunks(part * format.block))
        .map(|((values, scales), codes)| DecodeRun { values, scales, codes });
    let _: Result<(), (usize, NotFinite)> = first_error(parts, |run| {
        isa.decode(format, run);
        Ok(())
    });
    Ok(())
}

/// Consecutive blocks to encode: `values` fill `codes`, with a scale for each block.
#[derive(Debug)]
pub(crate) struct EncodeRun<'a> {
    pub values: &'a [u8],
    pub scales: &'a mut [[u8; SCALE_BYTES]],
    pub codes: &'a mut [u8],
}

/// Consecutive blocks to decode, the scales of which have been looked at.
#[derive(Debug)]
pub(crate) struct DecodeRun<'a> {
    pub values: &'a mut [u8],
    pub scales: &'a [[u8; SCALE_BYTES]],
    pub codes: &'a [u8],
}

/// The first value of a run that is NaN or infinite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NotFinite {
    pub index: usize,
}

fn value_count(format: Format, values: &[u8]) -> Result<usize, CodecError> {
    if values.len().is_multiple_of(format.dtype.bytes()) {
        Ok(values.len() / format.dtype.bytes())
    } else {
        Err(CodecError::PartialValue { len_bytes: values.len() })
    }
}

fn split(format: Format, encoded: &[u8], values: usize) -> Result<(&[[u8; SCALE_BYTES]], &[u8]), CodecError> {
    let wrong = CodecError::EncodedLength { found: encoded.len(), values };
    if format.encoded_bytes(values) != Some(encoded.len()) {
        return Err(wrong);
    }
    let (scales, codes) = encoded.split_at_checked(encoded.len() - values).ok_or(wrong)?;
    Ok((scales.as_chunks().0, codes))
}

fn split_mut(
    format: Format,
    encoded: &mut [u8],
    values: usize,
) -> Result<(&mut [[u8; SCALE_BYTES]], &mut [u8]), CodecError> {
    let wrong = CodecError::EncodedLength { found: encoded.len(), values };
    if format.encoded_bytes(values) != Some(encoded.len()) {
        return Err(wrong);
    }
    let (scales, codes) = encoded.split_at_mut_checked(encoded.len() - values).ok_or(wrong)?;
    Ok((scales.as_chunks_mut().0, codes))
}

/// The number of blocks for each thread: at least one, so that no piece has the length 0.
fn blocks_per_thread(format: Format, values: usize, threads: usize) -> usize {
    let worthwhile = values.saturating_mul(format.dtype.bytes()) / MIN_BYTES_PER_THREAD;
    values.div_ceil(format.block).div_ceil(threads.min(worthwhile).max(1)).max(1)
}

/// Does `work` on every part, with one thread for each: this one does its share. Returns the first error in the order
/// of the parts, with the number of its part. If no more threads can be started, those that run do it all.
fn first_error<Part: Send, E: Send>(
    parts: impl ExactSizeIterator<Item = Part> + Send,
    work: impl Fn(Part) -> Result<(), E> + Sync,
) -> Result<(), (usize, E)> {
    let others = parts.len().saturating_sub(1);
    let queue = Mutex::new(parts.enumerate());
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work_until_empty = || -> Vec<(usize, E)> {
        iter::from_fn(next).filter_map(|(number, part)| work(part).err().map(|error| (number, error))).collect()
    };
    let errors = thread::scope(|scope| {
        let started: Vec<_> =
            (0..others).map_while(|_| thread::Builder::new().spawn_scoped(scope, work_until_empty).ok()).collect();
        let mut errors = work_until_empty();
        for thread in started {
            errors.extend(thread.join().unwrap_or_else(|payload| panic::resume_unwind(payload)));
        }
        errors
    });
    errors.into_iter().min_by_key(|(number, _)| *number).map_or(Ok(()), Err)
}
