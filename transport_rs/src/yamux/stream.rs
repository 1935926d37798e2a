//! One stream: what has arrived and was not read, and how much either side may still send.

use std::collections::VecDeque;
use std::io::Read;

use super::{INITIAL_WINDOW_BYTES, YamuxError};

/// A stream that is open in at least one direction, or holds bytes that nobody has read.
///
/// The window has three parts: credit that the other side has not used yet, bytes that wait here, and bytes that were
/// read but not given back yet. `credit + inbox.len() <= window`, always.
pub(super) struct Stream {
    pub opened_by_remote: bool,
    pub local_closed: bool,
    pub remote_closed: bool,
    /// The bytes that we may still send.
    pub send_credit: u32,
    inbox: VecDeque<u8>,
    window: u32,
    credit: u32,
    updated_at_s: Option<f64>,
}

impl Stream {
    pub fn new(opened_by_remote: bool) -> Self {
        Self {
            opened_by_remote,
            local_closed: false,
            remote_closed: false,
            send_credit: INITIAL_WINDOW_BYTES,
            inbox: VecDeque::new(),
            window: INITIAL_WINDOW_BYTES,
            credit: INITIAL_WINDOW_BYTES,
            updated_at_s: None,
        }
    }

    pub fn buffered_bytes(&self) -> usize {
        self.inbox.len()
    }

    pub fn is_done(&self) -> bool {
        self.local_closed && self.remote_closed && self.inbox.is_empty()
    }

    /// How far the window has grown beyond the initial window.
    pub fn grown_bytes(&self) -> u64 {
        u64::from(self.window.saturating_sub(INITIAL_WINDOW_BYTES))
    }

    /// A frame announces `length` bytes of data; they may come in pieces.
    pub fn announce(&mut self, length: u32) -> Result<(), YamuxError> {
        if self.remote_closed && length > 0 {
            return Err(YamuxError::DataAfterEnd);
        }
        self.credit = self.credit.checked_sub(length).ok_or(YamuxError::WindowExceeded)?;
        Ok(())
    }

    pub fn deliver(&mut self, bytes: &[u8]) {
        self.inbox.extend(bytes);
    }

    pub fn take(&mut self, out: &mut [u8]) -> usize {
        let mut taken = 0;
        while let Some(rest) = out.get_mut(taken..).filter(|rest| !rest.is_empty()) {
            match self.inbox.read(rest) {
                Ok(more) if more > 0 => taken += more,
                _ => break,
            }
        }
        if self.inbox.is_empty() && self.inbox.capacity() > INITIAL_WINDOW_BYTES as usize {
            self.inbox = VecDeque::new(); // a burst must not hold its memory for as long as the stream is idle
        }
        taken
    }

    /// The credit to give back now, or 0: at most two updates a window, however small the reads are.
    ///
    /// A window grows to four times its size, while `growth_left` lasts, if half of it was used in less than `within_s`. The
    /// first update always grows it: a stream with that much data then ramps up a round trip sooner.
    pub fn window_update(&mut self, now_s: f64, within_s: f64, window_max: u32, growth_left: u64) -> u32 {
        let unread = u32::try_from(self.inbox.len()).unwrap_or(u32::MAX);
        let mut update = self.window.saturating_sub(self.credit.saturating_add(unread));
        if self.remote_closed || update < self.window / 2 {
            return 0;
        }
        if self.updated_at_s.is_none_or(|before_s| now_s - before_s < within_s) {
            let more = self.window.saturating_mul(3).min(window_max.saturating_sub(self.window));
            let more = more.min(u32::try_from(growth_left).unwrap_or(u32::MAX));
            self.window += more;
            update += more;
        }
        self.updated_at_s = Some(now_s);
        self.credit += update;
        update
    }

    #[cfg(test)]
    pub fn is_conserved(&self) -> bool {
        self.credit as usize + self.inbox.len() <= self.window as usize
    }
}
