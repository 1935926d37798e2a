//! Numbers in fewer bytes without loss: the exponents of hidden states go through zstd, the rest stays as it is.
//!
//! Some 3 of the 8 bits of an exponent are information; all bits of sign and mantissa are (`DFloat11`,
//! arXiv:2504.11651; `ZipNN`, arXiv:2411.05239). So each byte of a value goes to a lane of its own. The first lane has
//! the exponents, the second the signs and the tops of the mantissas; two more have the rest of float32. `bfloat16` is
//! the upper half of float32, so they are one case. For float16 the first lane has the 5 bits of the exponent and the
//! upper 3 of the mantissa.
//!
//! ```text
//! [bytes of a value: u8][which lanes are zstd, a bit each: u8][bytes in all: u32][lengths of those lanes: u32 each]
//! [lanes][bytes at the end that fill no value]
//! ```
//!
//! Numbers are little-endian. The second lane is never compressed. So nothing unpacks to more than four times its
//! length, which bounds the memory for bytes of any sender.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

/// Measured (README.md): lower levels leave out what gains most, the entropy coding; of the higher ones, which look for
/// repetitions where there are none, only 19 is better, a hundred times slower.
const LEVEL: i32 = 1;

/// The further lanes are compressed only if this much of them compresses: those of true float32 do not, and those of
/// numbers that had 16 bits once are full of zeros.
const SAMPLE_BYTES: usize = 4096;

const LENGTH_BYTES: usize = 4;
const LANES_MAX: usize = 4;
const NEVER_PACKED: usize = 1;

/// Why packed bytes, or what was to be packed, were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackError {
    /// Values of another number of bytes than 2 or 4.
    Width(usize),
    /// More than a length of 32 bits can say.
    TooLong(usize),
    /// A header that is cut short, or says what cannot be.
    Header,
    /// Lanes of other lengths than the header says.
    Lengths,
    /// A lane that is not zstd, or has another number of bytes than there are values.
    Lane,
}

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Width(width) => write!(f, "values of {width} bytes: only those of 2 or 4 are packed"),
            Self::TooLong(length) => write!(f, "{length} bytes are more than can be packed at once"),
            Self::Header => f.write_str("packed values with a header that cannot be"),
            Self::Lengths => f.write_str("packed values of other lengths than their header says"),
            Self::Lane => f.write_str("packed values with a lane that does not unpack"),
        }
    }
}

impl Error for PackError {}

/// `data` packed as little-endian values of `width` bytes, 2 or 4. It may come out some bytes longer.
///
/// # Errors
///
/// [`PackError::Width`], and [`PackError::TooLong`] from 4 GiB on.
pub fn pack(data: &[u8], width: usize) -> Result<Vec<u8>, PackError> {
    let (width_byte, size) = match (width, u32::try_from(data.len())) {
        (2, Ok(size)) => (2, size),
        (4, Ok(size)) => (4, size),
        (2 | 4, Err(_)) => return Err(PackError::TooLong(data.len())),
        _ => return Err(PackError::Width(width)),
    };
    let count = data.len() / width;
    let (values, tail) = data.split_at(count * width);
    let mut split = vec![0; values.len()];
    if width == 2 {
        split_2(values, &mut split, count);
    } else {
        split_4(values, &mut split, count);
    }

    let mut out = vec![width_byte, 0];
    out.extend(size.to_le_bytes());
    let mut zstd_lanes = 0;
    let mut lanes: [Cow<'_, [u8]>; LANES_MAX] = Default::default();
    for (index, (lane, plain)) in lanes.iter_mut().zip(split.chunks(count.max(1))).enumerate() {
        *lane = Cow::Borrowed(plain);
        if index == NEVER_PACKED || (index > NEVER_PACKED && !seems_packable(plain)) {
            continue;
        }
        if let Some((packed, length)) = compressed(plain) {
            *lane = Cow::Owned(packed);
            zstd_lanes |= 1 << index;
            out.extend(length.to_le_bytes());
        }
    }
    if let Some(byte) = out.get_mut(1) {
        *byte = zstd_lanes;
    }
    out.reserve_exact(lanes.iter().map(|lane| lane.len()).sum::<usize>() + tail.len());
    for lane in &lanes {
        out.extend_from_slice(lane);
    }
    out.extend_from_slice(tail);
    Ok(out)
}

/// How many bytes `packed` unpacks to, if nothing is wrong with its lanes: at most four times its length.
///
/// # Errors
///
/// [`PackError::Header`] and [`PackError::Lengths`].
pub fn unpacked_bytes(packed: &[u8]) -> Result<usize, PackError> {
    Packed::parse(packed).map(|packed| packed.size)
}

/// Unpacks into `out`, which is of the length that [`unpacked_bytes`] says.
///
/// # Errors
///
/// [`PackError::Header`], [`PackError::Lengths`] and [`PackError::Lane`]; what is in `out` then is not specified.
pub fn unpack(packed: &[u8], out: &mut [u8]) -> Result<(), PackError> {
    let packed = Packed::parse(packed)?;
    if out.len() != packed.size {
        return Err(PackError::Lengths);
    }
    let mut lanes: [Cow<'_, [u8]>; LANES_MAX] = Default::default();
    for (index, (lane, bytes)) in lanes.iter_mut().zip(packed.lanes).enumerate() {
        *lane = if packed.zstd_lanes & (1 << index) == 0 {
            Cow::Borrowed(bytes)
        } else {
            Cow::Owned(decompressed(bytes, packed.count)?)
        };
    }
    let (values, tail) = out.split_at_mut(packed.size - packed.tail.len());
    let [exponents, signs, middles, lows] = &lanes;
    if packed.width == 2 {
        join_2(values, exponents, signs);
    } else {
        join_4(values, exponents, signs, middles, lows);
    }
    tail.copy_from_slice(packed.tail);
    Ok(())
}

/// Packed values with a header that fits what follows it.
struct Packed<'a> {
    width: usize,
    size: usize,
    count: usize,
    zstd_lanes: u8,
    lanes: [&'a [u8]; LANES_MAX],
    tail: &'a [u8],
}

impl<'a> Packed<'a> {
    fn parse(packed: &'a [u8]) -> Result<Self, PackError> {
        let (&[width, zstd_lanes], rest) = packed.split_first_chunk().ok_or(PackError::Header)?;
        let (size, mut rest) = length(rest)?;
        let known = match width {
            2 => 0b01,
            4 => 0b1101,
            _ => return Err(PackError::Header),
        };
        if zstd_lanes & !known != 0 {
            return Err(PackError::Header);
        }
        let width = usize::from(width);
        let count = size / width;
        let mut lengths = [0; LANES_MAX];
        for (index, lane_bytes) in lengths.iter_mut().take(width).enumerate() {
            *lane_bytes = count;
            if zstd_lanes & (1 << index) != 0 {
                (*lane_bytes, rest) = length(rest)?;
            }
        }
        let mut lanes: [&[u8]; LANES_MAX] = Default::default();
        for (lane, lane_bytes) in lanes.iter_mut().zip(lengths) {
            (*lane, rest) = rest.split_at_checked(lane_bytes).ok_or(PackError::Lengths)?;
        }
        if rest.len() != size % width {
            return Err(PackError::Lengths);
        }
        Ok(Self { width, size, count, zstd_lanes, lanes, tail: rest })
    }
}

/// A length that stands first in `bytes`, and what follows it.
fn length(bytes: &[u8]) -> Result<(usize, &[u8]), PackError> {
    let (number, rest) = bytes.split_first_chunk().ok_or(PackError::Header)?;
    let number = usize::try_from(u32::from_le_bytes(*number)).map_err(|_| PackError::Header)?;
    Ok((number, rest))
}

/// The lane by zstd and its length, if both are less than the lane.
fn compressed(lane: &[u8]) -> Option<(Vec<u8>, u32)> {
    let packed = zstd::bulk::compress(lane, LEVEL).ok()?;
    let length = u32::try_from(packed.len()).ok()?;
    (packed.len() + LENGTH_BYTES < lane.len()).then_some((packed, length))
}

fn seems_packable(lane: &[u8]) -> bool {
    let sample = lane.get(..SAMPLE_BYTES).unwrap_or(lane);
    compressed(sample).is_some_and(|(packed, _)| packed.len() < sample.len() - sample.len() / 8)
}

/// `count` is below the length of what it came in, so nobody can have us reserve much.
fn decompressed(lane: &[u8], count: usize) -> Result<Vec<u8>, PackError> {
    let mut values = vec![0; count];
    match zstd::bulk::decompress_to_buffer(lane, values.as_mut_slice()) {
        Ok(written) if written == count => Ok(values),
        _ => Err(PackError::Lane),
    }
}

fn split_2(values: &[u8], split: &mut [u8], count: usize) {
    let (exponents, signs) = split.split_at_mut(count);
    let values = values.as_chunks().0;
    for ((value, exponent), sign) in values.iter().zip(exponents).zip(signs) {
        [*sign, *exponent] = u16::from_le_bytes(*value).rotate_left(1).to_le_bytes();
    }
}

fn join_2(values: &mut [u8], exponents: &[u8], signs: &[u8]) {
    let values = values.as_chunks_mut().0;
    for ((value, exponent), sign) in values.iter_mut().zip(exponents).zip(signs) {
        *value = u16::from_le_bytes([*sign, *exponent]).rotate_right(1).to_le_bytes();
    }
}

/// The upper halves as those of `split_2`, the lower ones as they are.
fn split_4(values: &[u8], split: &mut [u8], count: usize) {
    let (upper, lower) = split.split_at_mut(2 * count);
    let ((exponents, signs), (middles, lows)) = (upper.split_at_mut(count), lower.split_at_mut(count));
    let values = values.as_chunks().0;
    for ((((value, exponent), sign), middle), low) in values.iter().zip(exponents).zip(signs).zip(middles).zip(lows) {
        let upper: u16;
        ([*low, *middle], upper) = halves(*value);
        [*sign, *exponent] = upper.rotate_left(1).to_le_bytes();
    }
}

fn halves([low, middle, a, b]: [u8; 4]) -> ([u8; 2], u16) {
    ([low, middle], u16::from_le_bytes([a, b]))
}

fn join_4(values: &mut [u8], exponents: &[u8], signs: &[u8], middles: &[u8], lows: &[u8]) {
    let values = values.as_chunks_mut().0;
    for ((((value, exponent), sign), middle), low) in values.iter_mut().zip(exponents).zip(signs).zip(middles).zip(lows)
    {
        let [a, b] = u16::from_le_bytes([*sign, *exponent]).rotate_right(1).to_le_bytes();
        *value = [*low, *middle, a, b];
    }
}
