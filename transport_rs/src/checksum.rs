//! CRC-32C, the checksum of frames. It finds accidents on the way, not lies: for those see [`crate::digest`].

/// The CRC-32C (Castagnoli, RFC 3720 appendix B.4) of `data`, going on from `seed`, the CRC of what came before it.
///
/// A `seed` of 0 begins anew, and `crc32c(b, crc32c(a, 0))` is the CRC of `a` followed by `b`.
#[must_use]
pub fn crc32c(data: &[u8], seed: u32) -> u32 {
    crc32c::crc32c_append(seed, data)
}

/// The CRC-32C of `parts` as if they were joined, without joining them.
#[must_use]
pub fn frame_crc32c<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    parts.into_iter().fold(0, |crc, part| crc32c(part, crc))
}
