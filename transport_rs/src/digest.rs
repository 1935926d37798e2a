//! BLAKE3, the name of contents: weights, configurations, whatever a stranger claims to have.
//!
//! One thread: the other cores belong to the model.

/// The length of a digest in bytes.
pub const DIGEST_BYTES: usize = blake3::OUT_LEN;

/// The BLAKE3 digest of `data`.
#[must_use]
pub fn blake3_digest(data: &[u8]) -> [u8; DIGEST_BYTES] {
    blake3::hash(data).into()
}

/// The BLAKE3 digest of `parts` as if they were joined, without joining them.
#[must_use]
pub fn blake3_digest_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; DIGEST_BYTES] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(part);
    }
    hasher.finalize().into()
}
