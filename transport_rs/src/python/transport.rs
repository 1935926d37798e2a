//! Noise and yamux as Python classes. The interface for Python is in `_native.pyi`.

use pyo3::exceptions::{PyEOFError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::buffers::ByteView;
use super::detach_if_long;
use crate::connection::{self, ConnectionError};
use crate::noise::{self, KEY_BYTES, NoiseError, Role};
use crate::yamux::{Events, GO_AWAY_NORMAL, Limits, OpenError, ReadResult, Yamux};

/// Streams opened, readable, writable, reset.
type EventLists = (Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>);

#[pyclass(module = "llmnode._native")]
pub(super) struct NoiseHandshake(Option<noise::Handshake>);

#[pymethods]
impl NoiseHandshake {
    #[new]
    #[pyo3(signature = (static_key, *, initiator, swarm_key=None))]
    fn new(static_key: [u8; KEY_BYTES], initiator: bool, swarm_key: Option<[u8; KEY_BYTES]>) -> PyResult<Self> {
        Ok(Self(Some(noise::Handshake::new(role(initiator), &static_key, swarm_key.as_ref())?)))
    }

    fn send<'py>(&mut self, py: Python<'py>, payload: ByteView) -> PyResult<Bound<'py, PyBytes>> {
        let message = self.handshake()?.send(payload.bytes())?;
        Ok(PyBytes::new(py, &message))
    }

    fn receive<'py>(&mut self, py: Python<'py>, data: ByteView) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let payload = self.handshake()?.receive(data.bytes())?;
        Ok(payload.map(|payload| PyBytes::new(py, &payload)))
    }

    #[getter]
    fn remote_static_key<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        Ok(self.handshake()?.remote_static().map(|key| PyBytes::new(py, &key)))
    }

    fn finish<'py>(&mut self, py: Python<'py>) -> PyResult<(NoiseSession, Bound<'py, PyBytes>)> {
        let (session, rest) = self.0.take().ok_or_else(taken)?.finish()?;
        Ok((NoiseSession(Some(session)), PyBytes::new(py, &rest)))
    }
}

impl NoiseHandshake {
    fn handshake(&mut self) -> PyResult<&mut noise::Handshake> {
        self.0.as_mut().ok_or_else(taken)
    }
}

#[pyclass(module = "llmnode._native")]
pub(super) struct NoiseSession(Option<noise::Session>);

#[pymethods]
impl NoiseSession {
    fn seal<'py>(&mut self, py: Python<'py>, data: ByteView) -> PyResult<Bound<'py, PyBytes>> {
        let session = self.0.as_mut().ok_or_else(taken)?;
        let plaintext = data.bytes();
        PyBytes::new_with(py, noise::Session::sealed_bytes(plaintext.len()), |out| {
            Ok(detach_if_long(py, plaintext.len(), || session.seal(plaintext, out))?)
        })
    }

    fn open<'py>(&mut self, py: Python<'py>, data: ByteView) -> PyResult<Bound<'py, PyBytes>> {
        let session = self.0.as_mut().ok_or_else(taken)?;
        let bytes = data.bytes();
        let mut plaintext = Vec::new();
        detach_if_long(py, bytes.len(), || {
            session.open(bytes, |message| {
                plaintext.extend_from_slice(message);
                Ok::<_, NoiseError>(())
            })
        })?;
        Ok(PyBytes::new(py, &plaintext))
    }
}

#[pyclass(module = "llmnode._native")]
pub(super) struct Connection(connection::Connection);

#[pymethods]
impl Connection {
    #[new]
    #[pyo3(signature = (session, *, initiator))]
    fn new(mut session: PyRefMut<'_, NoiseSession>, initiator: bool) -> PyResult<Self> {
        let session = session.0.take().ok_or_else(taken)?;
        let streams = Yamux::new(role(initiator), Limits::default());
        Ok(Self(connection::Connection::new(session, streams)))
    }

    fn receive(&mut self, py: Python<'_>, data: ByteView, now_s: f64) -> PyResult<EventLists> {
        let bytes = data.bytes();
        let mut events = Events::default();
        self.0.streams.tell_time(now_s);
        detach_if_long(py, bytes.len(), || self.0.receive(bytes, &mut events))?;
        Ok(lists(events))
    }

    fn receive_plaintext(&mut self, data: ByteView, now_s: f64) -> PyResult<EventLists> {
        let mut events = Events::default();
        self.0.streams.tell_time(now_s);
        self.0.receive_plaintext(data.bytes(), &mut events)?;
        Ok(lists(events))
    }

    fn open_stream(&mut self) -> PyResult<Option<u32>> {
        match self.0.streams.open() {
            Ok(stream) => Ok(Some(stream)),
            Err(OpenError::TryLater) => Ok(None),
            Err(OpenError::GoingAway) => Err(PyEOFError::new_err("one side closes the connection")),
            Err(OpenError::NoNumbersLeft) => Err(PyEOFError::new_err("the connection has had all its streams")),
        }
    }

    fn has_stream(&self, stream: u32) -> bool {
        self.0.streams.has(stream)
    }

    #[pyo3(signature = (stream, data, *, gently=false))]
    fn write(&mut self, stream: u32, data: ByteView, gently: bool) -> Option<usize> {
        self.0.streams.write(stream, data.bytes(), gently)
    }

    fn read<'py>(
        &mut self,
        py: Python<'py>,
        stream: u32,
        bytes_max: usize,
        now_s: f64,
        window_bytes: u32,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let streams = &mut self.0.streams;
        let len_bytes = streams.buffered_bytes(stream).min(bytes_max);
        if len_bytes == 0 {
            return Ok(match streams.read(stream, &mut [], now_s, window_bytes) {
                ReadResult::End => Some(PyBytes::new(py, &[])),
                ReadResult::Wait | ReadResult::Data(_) => None,
            });
        }
        let read = PyBytes::new_with(py, len_bytes, |out| {
            streams.read(stream, out, now_s, window_bytes);
            Ok(())
        })?;
        Ok(Some(read))
    }

    fn close_stream(&mut self, stream: u32) {
        self.0.streams.close(stream);
    }

    fn reset_stream(&mut self, stream: u32) {
        self.0.streams.reset(stream);
    }

    fn go_away(&mut self) {
        self.0.streams.go_away(GO_AWAY_NORMAL);
    }

    fn seal_output<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.0.sealed_bytes(), |out| Ok(self.0.seal_output(out)?))
    }
}

fn role(initiator: bool) -> Role {
    if initiator { Role::Initiator } else { Role::Responder }
}

fn lists(events: Events) -> EventLists {
    (events.opened, events.readable, events.writable, events.reset)
}

fn taken() -> PyErr {
    PyRuntimeError::new_err("this object was handed over and is of no use any more")
}

impl From<NoiseError> for PyErr {
    fn from(error: NoiseError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

impl From<ConnectionError> for PyErr {
    fn from(error: ConnectionError) -> Self {
        PyValueError::new_err(error.to_string())
    }
}
