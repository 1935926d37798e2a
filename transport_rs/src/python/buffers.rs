//! Python buffers as slices, with the only `unsafe` outside `simd/`. See the contract on mutation in `python.rs`.

use std::slice;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PySequence;

/// The memory of one Python buffer, seen as bytes whatever its element type. Python keeps it in place until this is
/// dropped.
pub(super) struct ByteView(PyUntypedBuffer);

impl ByteView {
    #[expect(
        unsafe_code,
        reason = "PyO3 has no safe view of a buffer as bytes that outlives the GIL and does not copy"
    )]
    pub(super) fn bytes(&self) -> &[u8] {
        let len_bytes = self.0.len_bytes();
        if len_bytes == 0 {
            return &[]; // An exporter may then give a null pointer, which a slice must not have.
        }
        // SAFETY: the exporter vouches for `len_bytes` readable bytes at `buf_ptr` until the buffer is released, which
        // needs `self` to go; they have no gaps, as `extract` checked; every bit pattern is a `u8`, which needs no
        // alignment. That nobody writes meanwhile is the caller's part of the contract, see `python.rs`.
        unsafe { slice::from_raw_parts(self.0.buf_ptr().cast::<u8>(), len_bytes) }
    }

    fn check_floats(&self) -> PyResult<()> {
        if self.0.format().to_bytes() == b"f" && self.0.buf_ptr().cast::<f32>().is_aligned() {
            Ok(())
        } else {
            Err(PyBufferError::new_err("the buffer is not one of aligned float32"))
        }
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
pub(super) struct WritableView(ByteView);

impl WritableView {
    /// A buffer may be given twice, and two objects may share memory. Rust must not see it as both read and written.
    pub(super) fn refuse_overlap(&self, read: &ByteView) -> PyResult<()> {
        let (written, read) = (self.0.bytes().as_ptr_range(), read.bytes().as_ptr_range());
        if written.start < read.end && read.start < written.end {
            Err(PyValueError::new_err("out overlaps the input"))
        } else {
            Ok(())
        }
    }

    #[expect(unsafe_code, reason = "PyO3 has no safe view of a buffer as bytes that outlives the GIL")]
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        let len_bytes = self.0.0.len_bytes();
        if len_bytes == 0 {
            return &mut []; // see ByteView
        }
        // SAFETY: as in `ByteView::bytes`, and the buffer is writable, as `extract` checked. No other Rust code sees this
        // memory while the slice lives: it borrows `self`, and `refuse_overlap` is called with every other view of the
        // same call; that slabs of different sequences are apart, and apart from weights and hidden states, and that no
        // other thread reads or writes it, is the caller's part of the contract.
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

/// The memory of one Python buffer of `float32`, in this machine's byte order.
pub(super) struct FloatView(ByteView);

impl FloatView {
    #[expect(unsafe_code, reason = "see `ByteView::bytes`")]
    pub(super) fn floats(&self) -> &[f32] {
        // SAFETY: every bit pattern is an `f32`.
        let (_, floats, _) = unsafe { self.0.bytes().align_to() }; // all of it, as `extract` checked
        floats
    }
}

impl<'py> FromPyObject<'_, 'py> for FloatView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: ByteView = object.extract()?;
        view.check_floats()?;
        Ok(Self(view))
    }
}

/// The memory of one Python buffer of `int8`.
pub(super) struct CodeView(ByteView);

impl CodeView {
    #[expect(unsafe_code, reason = "see `ByteView::bytes`")]
    pub(super) fn codes(&self) -> &[i8] {
        // SAFETY: every bit pattern is an `i8`, which needs no alignment.
        let (_, codes, _) = unsafe { self.0.bytes().align_to() };
        codes
    }
}

impl<'py> FromPyObject<'_, 'py> for CodeView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: ByteView = object.extract()?;
        if view.0.format().to_bytes() == b"b" {
            Ok(Self(view))
        } else {
            Err(PyBufferError::new_err("the buffer is not one of int8"))
        }
    }
}

/// The memory of one Python buffer of `float32` that calls write to.
pub(super) struct WritableFloats(WritableView);

impl WritableFloats {
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        self.0.refuse_overlap(&other.0.0).is_err()
    }

    #[expect(unsafe_code, reason = "see `WritableView::bytes`")]
    pub(super) fn floats(&mut self) -> &mut [f32] {
        // SAFETY: every bit pattern is an `f32`.
        let (_, floats, _) = unsafe { self.0.bytes().align_to_mut() }; // all of it, as `extract` checked
        floats
    }
}

impl<'py> FromPyObject<'_, 'py> for WritableFloats {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: WritableView = object.extract()?;
        view.0.check_floats()?;
        Ok(Self(view))
    }
}

/// The buffers of a Python sequence, in order.
pub(super) struct ByteViews(Vec<ByteView>);

impl ByteViews {
    pub(super) fn iter(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(ByteView::bytes)
    }

    pub(super) fn len_bytes(&self) -> usize {
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
