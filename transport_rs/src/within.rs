//! Whether numbers of floating point are within a limit, judged by their bits.
//!
//! Without their sign, the bits of such numbers are in the order of the numbers, and those of infinities and NaNs come last.

/// The size of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// binary16 and bfloat16.
    Two,
    /// binary32.
    Four,
}

impl Width {
    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Width::Two => 2,
            Width::Four => 4,
        }
    }
}

/// Whether the bits of all little-endian numbers in `data` are at most `largest`; with `signed`, those without the sign.
///
/// Bytes at the end that are no whole number are left out.
#[must_use]
pub fn are_within(data: &[u8], width: Width, largest: u32, signed: bool) -> bool {
    match width {
        Width::Two => {
            let mask = if signed { u16::MAX >> 1 } else { u16::MAX };
            let (numbers, _) = data.as_chunks::<2>();
            let largest_found = numbers.iter().map(|each| u16::from_le_bytes(*each) & mask).max();
            u32::from(largest_found.unwrap_or(0)) <= largest
        }
        Width::Four => {
            let mask = if signed { u32::MAX >> 1 } else { u32::MAX };
            let (numbers, _) = data.as_chunks::<4>();
            numbers.iter().map(|each| u32::from_le_bytes(*each) & mask).max().unwrap_or(0) <= largest
        }
    }
}
