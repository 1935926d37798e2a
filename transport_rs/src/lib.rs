//! The hot and pure part of llmnode: codecs, checksums, sans-I/O protocol machines and forwards of a few positions.
//!
//! Bytes go in, bytes and values come out. Nothing here opens a socket, reads a clock, keeps a global or panics on any
//! input. Python knows this crate as `llmnode._native`; of this crate only `python.rs` knows Python.

// No panic on any input. Here and not in Cargo.toml, because a test may panic.
#![warn(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

pub mod blocks;
pub mod checksum;
pub mod codec;
pub mod connection;
pub mod digest;
pub mod noise;
pub mod packing;
mod simd;
pub mod within;
pub mod yamux;

#[cfg(feature = "python")]
pub mod python;
