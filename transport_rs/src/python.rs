//! The module `llmnode._native`: with the files in `python/`, the only one of this crate that knows Python.
//!
//! It borrows buffers, calls a pure function and returns a value. The interface for Python is in `_native.pyi`.
//!
//! # The contract on mutation
//!
//! Buffers are not copied, and long calls release the GIL. The caller must not write to a buffer during a call, nor
//! read one that the call writes to: Rust calls that a data race, which no checksum can make defined. Two things bound
//! the harm: Python holds the memory in place (a `bytearray` refuses to be resized), and no index or length depends on
//! its contents. The result is then that of a mix of old and new bytes.

#![allow(clippy::needless_pass_by_value, reason = "PyO3 hands extracted arguments over by value")]

mod blocks;
mod buffers;
mod transport;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes};

use buffers::{ByteView, ByteViews, WritableView};

use crate::codec::{self, Code, CodecError, Dtype, Format};
use crate::packing::{self, PackError};
use crate::within::{self, Width};
use crate::{checksum, digest};

/// From this many bytes on, a call releases the GIL.
///
/// So large because the price is in taking it back: beside one busy Python thread that lasts up to a switch interval,
/// 5 ms (README.md has the measurement), while a shorter call keeps the GIL for some 0.1 ms, or 1 ms without SIMD.
const DETACH_FROM_BYTES: usize = 1024 * 1024;

/// The module `llmnode._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_function(wrap_pyfunction!(self::crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(self::frame_crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(self::blake3_digest, module)?)?;
    module.add_function(wrap_pyfunction!(self::blake3_digest_parts, module)?)?;
    module.add_function(wrap_pyfunction!(self::quantized_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(self::quantize_blockwise, module)?)?;
    module.add_function(wrap_pyfunction!(self::quantize_blockwise_into, module)?)?;
    module.add_function(wrap_pyfunction!(self::dequantize_blockwise, module)?)?;
    module.add_function(wrap_pyfunction!(self::dequantize_blockwise_into, module)?)?;
    module.add_function(wrap_pyfunction!(self::are_within, module)?)?;
    module.add_function(wrap_pyfunction!(self::pack, module)?)?;
    module.add_function(wrap_pyfunction!(self::unpack, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::pack_q4, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::widen, module)?)?;
    module.add_function(wrap_pyfunction!(blocks::pack_q8, module)?)?;
    module.add_class::<blocks::Product>()?;
    module.add_class::<blocks::LlamaAdapter>()?;
    module.add_class::<blocks::LlamaBlocks>()?;
    module.add_class::<blocks::SequenceSlabs>()?;
    module.add_class::<transport::NoiseHandshake>()?;
    module.add_class::<transport::NoiseSession>()?;
    module.add_class::<transport::Connection>()
}

#[pyfunction]
#[pyo3(signature = (data, seed = 0))]
fn crc32c(py: Python<'_>, data: ByteView, seed: u32) -> u32 {
    let bytes = data.bytes();
    detach_if_long(py, bytes.len(), || checksum::crc32c(bytes, seed))
}

#[pyfunction]
fn frame_crc32c(py: Python<'_>, parts: ByteViews) -> u32 {
    detach_if_long(py, parts.len_bytes(), || checksum::frame_crc32c(parts.iter()))
}

#[pyfunction]
fn blake3_digest(py: Python<'_>, data: ByteView) -> [u8; digest::DIGEST_BYTES] {
    let bytes = data.bytes();
    detach_if_long(py, bytes.len(), || digest::blake3_digest(bytes))
}

#[pyfunction]
fn blake3_digest_parts(py: Python<'_>, parts: ByteViews) -> [u8; digest::DIGEST_BYTES] {
    detach_if_long(py, parts.len_bytes(), || digest::blake3_digest_parts(parts.iter()))
}

#[pyfunction]
#[pyo3(signature = (data, width, largest, *, signed = true))]
fn are_within(py: Python<'_>, data: ByteView, width: usize, largest: u32, signed: bool) -> PyResult<bool> {
    let width = match width {
        2 => Width::Two,
        4 => Width::Four,
        _ => return Err(PyValueError::new_err(format!("numbers have 2 or 4 bytes, not {width}"))),
    };
    let bytes = data.bytes();
    if !bytes.len().is_multiple_of(width.bytes()) {
        return Err(PyValueError::new_err(format!("{} bytes are no whole number of values", bytes.len())));
    }
    Ok(detach_if_long(py, bytes.len(), || within::are_within(bytes, width, largest, signed)))
}

#[pyfunction]
#[pyo3(signature = (count, block = 64))]
fn quantized_bytes(count: usize, block: usize) -> PyResult<usize> {
    let format = Format::new(Dtype::F32, Code::Linear, block)?; // the length depends on neither of those
    format.encoded_bytes(count).ok_or_else(|| too_many(count))
}

#[pyfunction]
#[pyo3(signature = (data, dtype, *, block = 64, code = "dynamic", threads = 1))]
fn quantize_blockwise<'py>(
    py: Python<'py>,
    data: ByteView,
    dtype: &str,
    block: usize,
    code: &str,
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    let format = format(dtype, code, block)?;
    let values = data.bytes();
    let count = values.len() / format.dtype().bytes();
    let len_bytes = format.encoded_bytes(count).ok_or_else(|| too_many(count))?;
    PyBytes::new_with(py, len_bytes, |out| {
        Ok(detach_if_long(py, values.len(), || codec::encode(format, values, out, threads))?)
    })
}

#[pyfunction]
#[pyo3(signature = (data, dtype, out, *, block = 64, code = "dynamic", threads = 1))]
fn quantize_blockwise_into(
    py: Python<'_>,
    data: ByteView,
    dtype: &str,
    mut out: WritableView,
    block: usize,
    code: &str,
    threads: usize,
) -> PyResult<()> {
    let format = format(dtype, code, block)?;
    out.refuse_overlap(&data)?;
    let (values, out) = (data.bytes(), out.bytes());
    Ok(detach_if_long(py, values.len(), || codec::encode(format, values, out, threads))?)
}

#[pyfunction]
#[pyo3(signature = (data, dtype, count, *, block = 64, code = "dynamic", threads = 1))]
fn dequantize_blockwise<'py>(
    py: Python<'py>,
    data: ByteView,
    dtype: &str,
    count: usize,
    block: usize,
    code: &str,
    threads: usize,
) -> PyResult<Bound<'py, PyByteArray>> {
    let format = format(dtype, code, block)?;
    let encoded = data.bytes();
    if format.encoded_bytes(count) != Some(encoded.len()) {
        // Now and not by the decoder: a count that somebody made up must not reserve memory.
        return Err(CodecError::EncodedLength { found: encoded.len(), values: count }.into());
    }
    let len_bytes = format.decoded_bytes(count).ok_or_else(|| too_many(count))?;
    PyByteArray::new_with(py, len_bytes, |out| {
        Ok(detach_if_long(py, len_bytes, || codec::decode(format, encoded, out, threads))?)
    })
}

#[pyfunction]
#[pyo3(signature = (data, dtype, out, *, block = 64, code = "dynamic", threads = 1))]
fn dequantize_blockwise_into(
    py: Python<'_>,
    data: ByteView,
    dtype: &str,
    mut out: WritableView,
    block: usize,
    code: &str,
    threads: usize,
) -> PyResult<()> {
    let format = format(dtype, code, block)?;
    out.refuse_overlap(&data)?;
    let (encoded, out) = (data.bytes(), out.bytes());
    Ok(detach_if_long(py, out.len(), || codec::decode(format, encoded, out, threads))?)
}

#[pyfunction]
fn pack(py: Python<'_>, data: ByteView, width: usize) -> PyResult<Bound<'_, PyBytes>> {
    let values = data.bytes();
    let packed = detach_if_long(py, values.len(), || packing::pack(values, width))?;
    Ok(PyBytes::new(py, &packed))
}

#[pyfunction]
fn unpack(py: Python<'_>, packed: ByteView, bytes_max: usize) -> PyResult<Bound<'_, PyByteArray>> {
    let packed = packed.bytes();
    let len_bytes = packing::unpacked_bytes(packed)?;
    if len_bytes > bytes_max {
        return Err(PyValueError::new_err(format!("{len_bytes} bytes are packed, at most {bytes_max} allowed")));
    }
    PyByteArray::new_with(py, len_bytes, |out| Ok(detach_if_long(py, len_bytes, || packing::unpack(packed, out))?))
}

fn format(dtype: &str, code: &str, block: usize) -> PyResult<Format> {
    let dtype = match dtype {
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::Bf16,
        _ => return Err(PyValueError::new_err(format!("dtype {dtype:?}: take float32, float16 or bfloat16"))),
    };
    let code = match code {
        "linear" => Code::Linear,
        "dynamic" => Code::Dynamic,
        _ => return Err(PyValueError::new_err(format!("code {code:?}: take linear or dynamic"))),
    };
    Ok(Format::new(dtype, code, block)?)
}

fn too_many(count: usize) -> PyErr {
    PyValueError::new_err(format!("{count} values are more than any memory holds"))
}

impl From<CodecError> for PyErr {
    fn from(error: CodecError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

impl From<PackError> for PyErr {
    fn from(error: PackError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

/// Runs `work` on `len_bytes` of input, without the GIL if that is worth its price.
fn detach_if_long<T: Send>(py: Python<'_>, len_bytes: usize, work: impl FnOnce() -> T + Send) -> T {
    if len_bytes >= DETACH_FROM_BYTES { py.detach(work) } else { work() }
}
