//! The module `llmnode._native`: the only file of this crate that knows Python.
//!
//! It borrows buffers, calls a pure function and returns a value. What is promised to Python is in `_native.pyi`.
//!
//! # The contract on mutation
//!
//! Buffers are not copied, and long calls release the GIL. The caller must not write to a buffer during a call, nor read
//! one that the call writes to: Rust calls that a data race, which no checksum can make defined. What bounds the harm is
//! that Python holds the memory in place (a `bytearray` refuses to be resized) and that no index or length depends on its
//! contents: the result is then that of bytes which never stood there together.

#![allow(clippy::needless_pass_by_value, reason = "PyO3 hands extracted arguments over by value")]

use std::slice;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PySequence};

use crate::codec::{self, Code, CodecError, Dtype, Format};
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
    module.add_function(wrap_pyfunction!(self::dequantize_blockwise_into, module)?)
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

/// Runs `work` on `len_bytes` of input, without the GIL if that is worth its price.
fn detach_if_long<T: Send>(py: Python<'_>, len_bytes: usize, work: impl FnOnce() -> T + Send) -> T {
    if len_bytes >= DETACH_FROM_BYTES { py.detach(work) } else { work() }
}

/// The memory of one Python buffer, seen as bytes whatever its element type. Python keeps it in place until this is
/// dropped.
struct ByteView(PyUntypedBuffer);

impl ByteView {
    #[expect(
        unsafe_code,
        reason = "PyO3 has no safe view of a buffer as bytes that outlives the GIL and does not copy"
    )]
    fn bytes(&self) -> &[u8] {
        let len_bytes = self.0.len_bytes();
        if len_bytes == 0 {
            return &[]; // An exporter may then give a null pointer, which a slice must not have.
        }
        // SAFETY: the exporter vouches for `len_bytes` readable bytes at `buf_ptr` until the buffer is released, which
        // needs `self` to go; they have no gaps, as `extract` checked; every bit pattern is a `u8`, which needs no
        // alignment. That nobody writes meanwhile is the caller's part of the contract, see the top of this file.
        unsafe { slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), len_bytes) }
    }
}

impl<'py> FromPyObject<'_, 'py> for ByteView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(&object)?;
        if buffer.is_c_contiguous() {
            Ok(Self(buffer))
        } else {
            Err(PyBufferError::new_err("the buffer is not C-contiguous: make a contiguous copy of it first"))
        }
    }
}

/// The memory of one Python buffer that this call writes to.
struct WritableView(ByteView);

impl WritableView {
    /// A buffer may be given twice, and two objects may share memory. Rust must not see it as both read and written.
    fn refuse_overlap(&self, read: &ByteView) -> PyResult<()> {
        let (written, read) = (self.0.bytes().as_ptr_range(), read.bytes().as_ptr_range());
        if written.start < read.end && read.start < written.end {
            Err(PyValueError::new_err("out overlaps the input"))
        } else {
            Ok(())
        }
    }

    #[expect(unsafe_code, reason = "PyO3 has no safe view of a buffer as bytes that outlives the GIL")]
    fn bytes(&mut self) -> &mut [u8] {
        let len_bytes = self.0.0.len_bytes();
        if len_bytes == 0 {
            return &mut []; // see ByteView
        }
        // SAFETY: as in `ByteView::bytes`, and the buffer is writable, as `extract` checked. No other Rust code sees this
        // memory while the slice lives: it borrows `self`, and `refuse_overlap` is called with every other view of the
        // same call. That no other thread reads or writes it is the caller's part of the contract.
        unsafe { slice::from_raw_parts_mut(self.0.0.buf_ptr().cast::<u8>(), len_bytes) }
    }
}

impl<'py> FromPyObject<'_, 'py> for WritableView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: ByteView = object.extract()?;
        if view.0.readonly() {
            return Err(PyBufferError::new_err("the buffer to write to is read-only"));
        }
        Ok(Self(view))
    }
}

/// The buffers of a Python sequence, in order.
struct ByteViews(Vec<ByteView>);

impl ByteViews {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(ByteView::bytes)
    }

    fn len_bytes(&self) -> usize {
        // Saturating: the same buffer may come many times, and this only chooses whether to release the GIL.
        self.iter().map(<[u8]>::len).fold(0, usize::saturating_add)
    }
}

impl<'py> FromPyObject<'_, 'py> for ByteViews {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        // Not PyO3's Vec<T>: that one reserves what `__len__` claims, and dies of a claim that is too large.
        let sequence = object.cast::<PySequence>()?;
        let views = sequence.try_iter()?.map(|item| item?.extract());
        Ok(Self(views.collect::<PyResult<_>>()?))
    }
}
