//! A yamux session: many streams over one connection. Bytes in; bytes and events out.
//!
//! The spec: <https://github.com/hashicorp/yamux/blob/master/spec.md>. It owns no socket and reads no clock. Its memory
//! is bounded, whatever the other side sends: [`Limits`] has the bounds.

mod errors;
mod frame;
mod incoming;
mod marks;
mod round_trip;
mod stream;

use std::collections::HashMap;

pub use errors::{OpenError, YamuxError};
pub use frame::{ACK, FIN, HEADER_BYTES, Header, Kind, RST, SYN};
use incoming::Body;
use marks::Marks;
use round_trip::RoundTrip;
use stream::Stream;

pub use crate::noise::Role;

/// The window that the spec gives every stream to begin with.
pub const INITIAL_WINDOW_BYTES: u32 = 256 * 1024;

/// The most data of one frame: with its header it fills one Noise message.
pub const DATA_BYTES_MAX: usize = crate::noise::PLAINTEXT_BYTES_MAX - HEADER_BYTES;

/// A window is too small if half of it is used up within this many round trips: its stream waits for it.
const GROW_WITHIN_ROUND_TRIPS: f64 = 1.5;
/// The same in seconds, until a round trip has been measured.
const GROW_WITHIN_S: f64 = 1.0;

/// The reason in a `GoAway` when nothing is wrong.
pub const GO_AWAY_NORMAL: u32 = 0;
const GO_AWAY_PROTOCOL_ERROR: u32 = 1;

/// How much one connection may hold.
///
/// Received and unread: at most `INITIAL_WINDOW_BYTES` for each of the streams, and `grown_windows_bytes` more over all.
/// To be sent: `out_data_bytes + out_control_bytes`.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Streams at a time that the other side has opened; more are reset. go-yamux lets the same number wait.
    pub streams_inbound: usize,
    /// Streams at a time that we have opened.
    pub streams_outbound: usize,
    /// The window of one stream. 16 MiB fill 1 Gbit/s over 130 ms.
    pub window_bytes: u32,
    /// The growth of the windows of all streams together, above their initial size.
    pub grown_windows_bytes: u64,
    /// Data that waits to be sent: enough for one system call, and little for a small message to wait behind.
    pub out_data_bytes: usize,
    /// Answers that wait to be sent. Only a side that asks and does not read the answers gets there.
    pub out_control_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            streams_inbound: 256,
            streams_outbound: 256,
            window_bytes: 16 << 20,
            grown_windows_bytes: 64 << 20,
            out_data_bytes: 256 << 10,
            out_control_bytes: 64 << 10,
        }
    }
}

/// The streams to which something happened while bytes came in. Each list names a stream at most once.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// The other side opened them.
    pub opened: Vec<u32>,
    /// There is data to read, or the end.
    pub readable: Vec<u32>,
    /// We may send again.
    pub writable: Vec<u32>,
    /// The other side reset them: they are gone, with what was not read.
    pub reset: Vec<u32>,
}

/// The result of `read`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadResult {
    /// The number of bytes; never 0.
    Data(usize),
    /// Nothing yet.
    Wait,
    /// The end, or no such stream.
    End,
}

/// One side of a session.
pub struct Yamux {
    role: Role,
    limits: Limits,
    streams: HashMap<u32, Stream>,
    streams_inbound: usize,
    grown_bytes: u64,
    next_stream: u32,
    round_trip: RoundTrip,
    marks: Marks,
    /// The bytes that were written and received.
    moved_bytes: u64,
    /// Streams that wait for an answer to a mark.
    held: Vec<u32>,
    now_s: f64,
    going_away: bool,
    failed: Option<YamuxError>,
    header: Vec<u8>,
    body: Option<Body>,
    out: Vec<u8>,
}

impl Yamux {
    /// A session in which nothing has been said yet.
    #[must_use]
    pub fn new(role: Role, limits: Limits) -> Self {
        Self {
            role,
            limits,
            streams: HashMap::new(),
            streams_inbound: 0,
            grown_bytes: 0,
            next_stream: if role == Role::Initiator { 1 } else { 2 },
            round_trip: RoundTrip::default(),
            marks: Marks::default(),
            moved_bytes: 0,
            held: Vec::new(),
            now_s: 0.0,
            going_away: false,
            failed: None,
            header: Vec::with_capacity(HEADER_BYTES),
            body: None,
            out: Vec::new(),
        }
    }

    /// Sets the time, counted from any moment. Call it before bytes are received. Now and then it sends a ping, which
    /// measures the round trip: windows grow with that. Without these calls no pings are sent.
    pub fn tell_time(&mut self, now_s: f64) {
        self.now_s = now_s;
        if self.out.len() < self.limits.out_data_bytes
            && let Some(number) = self.round_trip.ping(now_s, self.moved_bytes)
        {
            self.push(Kind::Ping, SYN, 0, number);
        }
    }

    /// Takes bytes of any length from the other side.
    ///
    /// # Errors
    /// What it did against the protocol, again at each later call. `output` then ends with a farewell that says so.
    pub fn receive(&mut self, bytes: &[u8], events: &mut Events) -> Result<(), YamuxError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        self.moved_bytes += bytes.len() as u64;
        self.take_frames(bytes, events).inspect_err(|error| {
            self.failed = Some(*error);
            self.go_away(GO_AWAY_PROTOCOL_ERROR);
        })
    }

    /// Opens a stream. It may be written to at once.
    ///
    /// # Errors
    /// See `OpenError`.
    pub fn open(&mut self) -> Result<u32, OpenError> {
        if self.going_away {
            return Err(OpenError::GoingAway);
        }
        let ours = self.streams.len() - self.streams_inbound;
        if ours >= self.limits.streams_outbound || self.free_bytes() == 0 {
            return Err(OpenError::TryLater);
        }
        let stream = self.next_stream;
        self.next_stream = stream.checked_add(2).ok_or(OpenError::NoNumbersLeft)?;
        self.streams.insert(stream, Stream::new(false));
        self.push(Kind::WindowUpdate, SYN, stream, 0);
        Ok(stream)
    }

    /// Puts the beginning of `bytes` among what is to be sent: as much as the window and `Limits::out_data_bytes` allow.
    /// If `gently`, no more than the other side takes in soon: what is written next is not to wait for long. The stream
    /// is writable again when some of it has been. None if the stream is gone or its end was sent.
    pub fn write(&mut self, stream: u32, bytes: &[u8], gently: bool) -> Option<usize> {
        let mut most = self.free_bytes();
        if gently {
            most = most.min(self.marks.sendable_bytes(self.round_trip.shortest_s()));
        }
        let state = self.streams.get_mut(&stream).filter(|state| !state.local_closed)?;
        let len_bytes = bytes.len().min(most).min(state.send_credit as usize);
        let (now, _) = bytes.split_at_checked(len_bytes)?;
        state.send_credit -= u32::try_from(len_bytes).ok()?;
        self.moved_bytes += len_bytes as u64;
        for part in now.chunks(DATA_BYTES_MAX) {
            let len_bytes = u32::try_from(part.len()).ok()?;
            self.push(Kind::Data, 0, stream, len_bytes);
            self.out.extend_from_slice(part);
            if gently && let Some(number) = self.marks.send(len_bytes, self.now_s) {
                self.push(Kind::Ping, SYN, 0, number);
            }
        }
        if gently && len_bytes < bytes.len() && !self.held.contains(&stream) {
            self.held.push(stream);
        }
        Some(len_bytes)
    }

    /// Moves what has arrived into `out`, and gives the other side credit for it. `now_s` counts from any moment.
    ///
    /// The window of the stream may grow up to `window_bytes` now, and never beyond `Limits::window_bytes`.
    pub fn read(&mut self, stream: u32, out: &mut [u8], now_s: f64, window_bytes: u32) -> ReadResult {
        let Some(state) = self.streams.get_mut(&stream) else { return ReadResult::End };
        let taken = state.take(out);
        if taken == 0 {
            return if state.remote_closed && state.buffered_bytes() == 0 { ReadResult::End } else { ReadResult::Wait };
        }
        let before = state.grown_bytes();
        let growth_left = self.limits.grown_windows_bytes.saturating_sub(self.grown_bytes);
        let within_s = self.round_trip.shortest_s().map_or(GROW_WITHIN_S, |rtt_s| GROW_WITHIN_ROUND_TRIPS * rtt_s);
        let update = state.window_update(now_s, within_s, self.limits.window_bytes.min(window_bytes), growth_left);
        self.grown_bytes += state.grown_bytes() - before;
        if update > 0 {
            self.push(Kind::WindowUpdate, 0, stream, update);
        }
        self.forget_if_done(stream);
        ReadResult::Data(taken)
    }

    /// The bytes that `read` would find.
    #[must_use]
    pub fn buffered_bytes(&self, stream: u32) -> usize {
        self.streams.get(&stream).map_or(0, Stream::buffered_bytes)
    }

    /// Says that we send no more. Data from the other side can still be read.
    pub fn close(&mut self, stream: u32) {
        let Some(state) = self.streams.get_mut(&stream).filter(|state| !state.local_closed) else { return };
        state.local_closed = true;
        self.push(Kind::WindowUpdate, FIN, stream, 0);
        self.forget_if_done(stream);
    }

    /// Ends the stream in both directions and forgets it.
    pub fn reset(&mut self, stream: u32) {
        if self.forget(stream) {
            self.push(Kind::WindowUpdate, RST, stream, 0);
        }
    }

    /// Says that the connection ends: neither side opens streams any more.
    pub fn go_away(&mut self, reason: u32) {
        self.going_away = true;
        self.push(Kind::GoAway, 0, 0, reason);
    }

    /// The bytes to send, in order.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.out
    }

    /// The output was taken.
    pub fn clear_output(&mut self) {
        self.out.clear();
    }

    /// Whether the stream is open in at least one direction, or unread.
    #[must_use]
    pub fn has(&self, stream: u32) -> bool {
        self.streams.contains_key(&stream)
    }

    /// How many streams are open in at least one direction, or unread.
    #[must_use]
    pub fn streams(&self) -> usize {
        self.streams.len()
    }

    fn forget_if_done(&mut self, stream: u32) {
        if self.streams.get(&stream).is_some_and(Stream::is_done) {
            self.forget(stream);
        }
    }

    fn forget(&mut self, stream: u32) -> bool {
        let Some(state) = self.streams.remove(&stream) else { return false };
        self.streams_inbound -= usize::from(state.opened_by_remote);
        self.grown_bytes -= state.grown_bytes();
        true
    }

    fn free_bytes(&self) -> usize {
        self.limits.out_data_bytes.saturating_sub(self.out.len())
    }

    /// Like `push`, for frames that the other side can make us send: these are limited.
    fn answer(&mut self, kind: Kind, flags: u16, stream: u32, length: u32) -> Result<(), YamuxError> {
        if self.out.len() + HEADER_BYTES > self.limits.out_data_bytes + self.limits.out_control_bytes {
            return Err(YamuxError::AnswersUnread);
        }
        self.push(kind, flags, stream, length);
        Ok(())
    }

    fn push(&mut self, kind: Kind, flags: u16, stream: u32, length: u32) {
        self.out.extend_from_slice(&Header { kind, flags, stream, length }.encode());
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn reads_of_any_size_conserve_the_window() {
        let mut yamux = Yamux::new(Role::Responder, Limits::default());
        let mut events = Events::default();
        let open = Header { kind: Kind::WindowUpdate, flags: SYN, stream: 1, length: 0 };
        yamux.receive(&open.encode(), &mut events).unwrap();
        let mut may_send = INITIAL_WINDOW_BYTES as usize;
        let mut out = vec![0; 100_000];
        for round in 1_usize..2000 {
            let length = may_send.min(round * 7919 % 90_000);
            let data = Header { kind: Kind::Data, flags: 0, stream: 1, length: u32::try_from(length).unwrap() };
            yamux.receive(&data.encode(), &mut events).unwrap();
            yamux.receive(&vec![0; length], &mut events).unwrap();
            may_send -= length;
            yamux.clear_output();
            let now_s = 0.01 * f64::from(u32::try_from(round).unwrap());
            yamux.read(1, &mut out[..round * 104_729 % 100_000], now_s, u32::MAX);
            for frame in yamux.output().chunks(HEADER_BYTES) {
                may_send += Header::decode(frame.try_into().unwrap()).unwrap().length as usize;
            }
            assert!(yamux.streams[&1].is_conserved());
            assert!(may_send + yamux.buffered_bytes(1) <= yamux.limits.window_bytes as usize);
            assert_eq!(yamux.grown_bytes, yamux.streams[&1].grown_bytes());
        }
    }
}
