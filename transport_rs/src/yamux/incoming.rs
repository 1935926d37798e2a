//! Frames of the other side: what each does to its stream, and which of them are against the protocol.

use super::stream::Stream;
use super::{ACK, Events, FIN, HEADER_BYTES, Header, Kind, RST, Role, SYN, Yamux, YamuxError};

/// A frame of data that is on its way in.
#[derive(Clone, Copy)]
pub(super) struct Body {
    header: Header,
    missing: usize,
}

impl Yamux {
    pub(super) fn take_frames(&mut self, mut bytes: &[u8], events: &mut Events) -> Result<(), YamuxError> {
        while !bytes.is_empty() {
            if let Some(body) = self.body.take() {
                bytes = self.take_body(body, bytes, events);
                continue;
            }
            let missing = HEADER_BYTES.saturating_sub(self.header.len());
            let (now, later) = bytes.split_at_checked(missing).unwrap_or((bytes, &[]));
            self.header.extend_from_slice(now);
            bytes = later;
            if let Ok(header) = <[u8; HEADER_BYTES]>::try_from(self.header.as_slice()) {
                self.header.clear();
                self.take_header(Header::decode(header).ok_or(YamuxError::BadHeader)?, events)?;
            }
        }
        Ok(())
    }

    /// Data goes to its stream as it comes: a frame is never held back until it is complete.
    fn take_body<'a>(&mut self, body: Body, bytes: &'a [u8], events: &mut Events) -> &'a [u8] {
        let Body { header, missing } = body;
        let (now, later) = bytes.split_at_checked(missing).unwrap_or((bytes, &[]));
        if let Some(state) = self.streams.get_mut(&header.stream) {
            state.deliver(now);
            note(&mut events.readable, header.stream);
        }
        if now.len() < missing {
            self.body = Some(Body { header, missing: missing - now.len() });
        } else {
            self.take_end(header, events);
        }
        later
    }

    fn take_header(&mut self, header: Header, events: &mut Events) -> Result<(), YamuxError> {
        match header.kind {
            Kind::Ping if header.has(SYN) => return self.answer(Kind::Ping, ACK, 0, header.length),
            Kind::Ping => {
                self.round_trip.pong(header.length, self.now_s, self.moved_bytes);
                if self.marks.pong(header.length, self.now_s) {
                    for stream in self.held.drain(..) {
                        note(&mut events.writable, stream);
                    }
                }
                return Ok(());
            }
            Kind::GoAway => {
                self.going_away = true;
                return Ok(());
            }
            Kind::Data | Kind::WindowUpdate if header.stream == 0 => return Err(YamuxError::BadStream),
            Kind::Data | Kind::WindowUpdate => {}
        }
        if header.has(SYN) {
            self.take_open(header.stream, events)?;
        }
        if header.kind == Kind::Data {
            if let Some(state) = self.streams.get_mut(&header.stream) {
                state.announce(header.length)?;
            } // else it is for a stream that we have reset, and is dropped
            let missing = header.length as usize;
            if missing > 0 {
                self.body = Some(Body { header, missing });
                return Ok(());
            }
        } else if let Some(state) = self.streams.get_mut(&header.stream) {
            state.send_credit = state.send_credit.checked_add(header.length).ok_or(YamuxError::WindowOverflow)?;
            if header.length > 0 {
                note(&mut events.writable, header.stream);
            }
        }
        self.take_end(header, events);
        Ok(())
    }

    fn take_open(&mut self, stream: u32, events: &mut Events) -> Result<(), YamuxError> {
        let ours = (stream % 2 == 1) == (self.role == Role::Initiator);
        if ours || self.streams.contains_key(&stream) {
            return Err(YamuxError::BadOpen);
        }
        if self.going_away || self.streams_inbound >= self.limits.streams_inbound {
            return self.answer(Kind::WindowUpdate, RST, stream, 0);
        }
        self.streams.insert(stream, Stream::new(true));
        self.streams_inbound += 1;
        events.opened.push(stream);
        self.answer(Kind::WindowUpdate, ACK, stream, 0)
    }

    /// FIN and RST hold from the end of their frame on.
    fn take_end(&mut self, header: Header, events: &mut Events) {
        let stream = header.stream;
        if header.has(RST) {
            if self.forget(stream) {
                events.reset.push(stream);
            }
        } else if header.has(FIN)
            && let Some(state) = self.streams.get_mut(&stream)
        {
            state.remote_closed = true;
            note(&mut events.readable, stream);
            self.forget_if_done(stream);
        }
    }
}

/// Frames of one stream mostly come together, so a look at the last entry finds nearly every repetition. A reader that
/// is woken twice finds nothing the second time.
fn note(streams: &mut Vec<u32>, stream: u32) {
    if streams.last() != Some(&stream) {
        streams.push(stream);
    }
}
