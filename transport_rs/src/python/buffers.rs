//! Python buffers as slices, with the only `unsafe` outside `simd/`. See the contract on mutation in `python.rs`.

use std::ops::Range;
use std::slice;

use pyo3::buffer::{Element, PyBuffer, PyUntypedBuffer};
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
}

impl<'py> FromPyObject<'_, 'py> for ByteView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(&object)?;
        if buffer.is_c_contiguous() { Ok(Self(buffer)) } else { Err(has_gaps()) }
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
        // same call. That no other thread reads or writes it is the caller's part of the contract.
        unsafe { slice::from_raw_parts_mut(self.0.0.buf_ptr().cast::<u8>(), len_bytes) }
    }
}

impl<'py> FromPyObject<'_, 'py> for WritableView {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: ByteView = object.extract()?;
        if view.0.readonly() {
            return Err(read_only());
        }
        Ok(Self(view))
    }
}

/// The memory of one Python buffer of `T`, aligned and in this machine's byte order.
pub(super) struct View<T>(PyBuffer<T>);

impl<T: Element> View<T> {
    #[expect(unsafe_code, reason = "PyO3's slice is one of cells")]
    pub(super) fn values(&self) -> &[T] {
        let count = self.0.item_count();
        if count == 0 {
            return &[]; // see ByteView
        }
        // SAFETY: as in `ByteView::bytes`: there are `count` elements, of which PyO3 says that any bits will do.
        unsafe { slice::from_raw_parts(self.0.buf_ptr().cast::<T>(), count) }
    }
}

impl<'py, T: Element> FromPyObject<'_, 'py> for View<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::get(&object)?;
        if buffer.is_c_contiguous() { Ok(Self(buffer)) } else { Err(has_gaps()) }
    }
}

/// Where a slice lies.
pub(super) fn range<T>(values: &[T]) -> Range<usize> {
    let Range { start, end } = values.as_ptr_range();
    start.addr()..end.addr()
}

/// Refuses memory that would be written while it is read, or twice. An empty range overlaps nothing.
pub(super) fn refuse_overlaps(written: &[Range<usize>], read: &[Range<usize>]) -> PyResult<()> {
    let overlap = |one: &Range<usize>, other: &Range<usize>| one.start < other.end && other.start < one.end;
    let twice =
        written.iter().enumerate().any(|(at, one)| written.iter().skip(at + 1).any(|other| overlap(one, other)));
    if twice || written.iter().any(|one| read.iter().any(|other| overlap(one, other))) {
        Err(PyValueError::new_err("what is written overlaps the input, or itself"))
    } else {
        Ok(())
    }
}

/// The memory of one Python buffer of `T` that several calls write to.
pub(super) struct Slab<T>(View<T>);

impl<T: Element> Slab<T> {
    pub(super) fn range(&self) -> Range<usize> {
        range(self.0.values())
    }

    #[expect(unsafe_code, reason = "PyO3's slice is one of cells")]
    pub(super) fn values(&mut self) -> &mut [T] {
        let count = self.0.0.item_count();
        if count == 0 {
            return &mut []; // see ByteView
        }
        // SAFETY: as in `View::values`, and the buffer is writable, as `extract` checked. No other Rust code sees this
        // memory while the slice lives: it borrows `self`. That no other slab, weight or hidden state is there too, and
        // that no other thread reads or writes it, is the caller's part of the contract.
        unsafe { slice::from_raw_parts_mut(self.0.0.buf_ptr().cast::<T>(), count) }
    }
}

impl<'py, T: Element> FromPyObject<'_, 'py> for Slab<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let view: View<T> = object.extract()?;
        if view.0.readonly() { Err(read_only()) } else { Ok(Self(view)) }
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

fn has_gaps() -> PyErr {
    PyBufferError::new_err("the buffer is not C-contiguous: make a contiguous copy of it first")
}

fn read_only() -> PyErr {
    PyBufferError::new_err("the buffer to write to is read-only")
}
