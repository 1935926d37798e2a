//! Noise and yamux as one: what arrives on the socket goes in, what is to be sent comes out.
//!
//! Together because a plaintext then lives only from one message to the next, and one call does the work of both.

use std::fmt;

use crate::noise::{NoiseError, Session};
use crate::yamux::{Events, Yamux, YamuxError};

/// The fault of the other side that ends the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// Against Noise.
    Noise(NoiseError),
    /// Against yamux.
    Yamux(YamuxError),
}

/// One side of an encrypted connection with streams.
pub struct Connection {
    session: Session,
    /// The streams. Any call on them may add to the bytes that `seal_output` finds.
    pub streams: Yamux,
}

impl Connection {
    /// From a session in which nothing of yamux has been said yet.
    #[must_use]
    pub fn new(session: Session, streams: Yamux) -> Self {
        Self { session, streams }
    }

    /// Takes bytes of any length as they come from the socket.
    ///
    /// # Errors
    /// What the other side did wrong. The connection is then of no use but for its last output.
    pub fn receive(&mut self, bytes: &[u8], events: &mut Events) -> Result<(), ConnectionError> {
        let streams = &mut self.streams;
        self.session.open(bytes, |plaintext| Ok(streams.receive(plaintext, events)?))
    }

    /// Takes plaintext that was decrypted before the session came here.
    ///
    /// # Errors
    /// As `receive`.
    pub fn receive_plaintext(&mut self, bytes: &[u8], events: &mut Events) -> Result<(), ConnectionError> {
        Ok(self.streams.receive(bytes, events)?)
    }

    /// How many bytes `seal_output` makes now.
    #[must_use]
    pub fn sealed_bytes(&self) -> usize {
        Session::sealed_bytes(self.streams.output().len())
    }

    /// Encrypts all that is to be sent into `out`, which is `sealed_bytes` long.
    ///
    /// # Errors
    /// `NoiseError::Exhausted`.
    pub fn seal_output(&mut self, out: &mut [u8]) -> Result<(), NoiseError> {
        self.session.seal(self.streams.output(), out)?;
        self.streams.clear_output();
        Ok(())
    }
}

impl From<NoiseError> for ConnectionError {
    fn from(error: NoiseError) -> Self {
        Self::Noise(error)
    }
}

impl From<YamuxError> for ConnectionError {
    fn from(error: YamuxError) -> Self {
        Self::Yamux(error)
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noise(error) => error.fmt(f),
            Self::Yamux(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConnectionError {}
