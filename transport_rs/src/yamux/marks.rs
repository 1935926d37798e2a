//! How much data the other side has not taken in yet. Pings between the data are the marks: they are answered in turn.

use std::collections::VecDeque;

/// A mark goes out after each of these.
const MARK_EVERY_BYTES: f64 = 32.0 * 1024.0;
/// This much may be under way even if the round trip is short: the other side answers several marks at a time.
const LEAST_BYTES: f64 = 128.0 * 1024.0;
/// Otherwise the data of this many round trips may be under way. One fills the connection, the other evens out its
/// changes.
const ROUND_TRIPS: f64 = 2.0;
/// The highest rate seen decays by this factor at each mark.
const RATE_KEEPS: f64 = 0.98;
/// The most marks that wait for answers. A side that answers no pings tells us nothing, and is not waited for.
const MARKS_MAX: usize = 4096;
/// Marks have these numbers, other pings lower ones.
const FIRST_NUMBER: u32 = 1 << 31;

struct Mark {
    number: u32,
    /// The bytes sent before it.
    sent: f64,
    /// The bytes known to have arrived when it was sent.
    passed: f64,
    at_s: f64,
}

/// The marks of one connection, over all its streams. Bytes are counted as `f64`, which is exact up to petabytes.
#[derive(Default)]
pub(super) struct Marks {
    sent: f64,
    passed: f64,
    waiting: VecDeque<Mark>,
    count: u32,
    bytes_per_s: f64,
}

impl Marks {
    /// How much more may be sent, if what comes after it is not to wait for long.
    pub fn sendable_bytes(&self, round_trip_s: Option<f64>) -> usize {
        let Some(round_trip_s) = round_trip_s else { return usize::MAX };
        let most = LEAST_BYTES.max(ROUND_TRIPS * round_trip_s * self.bytes_per_s);
        let under_way = if self.waiting.is_empty() { 0.0 } else { self.sent - self.passed };
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it saturates, at both ends")]
        let left = (most - under_way) as usize;
        left
    }

    /// Counts bytes that are sent now. Returns the number of the ping that is to follow, if a mark is due.
    pub fn send(&mut self, len_bytes: u32, now_s: f64) -> Option<u32> {
        if self.waiting.is_empty() {
            self.passed = self.sent; // as far as is known
        }
        self.sent += f64::from(len_bytes);
        let marked = self.waiting.back().map_or(0.0, |mark| mark.sent);
        let is_soon = !self.waiting.is_empty() && self.sent < marked + MARK_EVERY_BYTES;
        if is_soon || self.waiting.len() >= MARKS_MAX {
            return None;
        }
        let number = FIRST_NUMBER | self.count;
        self.count = (self.count + 1) % FIRST_NUMBER;
        self.waiting.push_back(Mark { number, sent: self.sent, passed: self.passed, at_s: now_s });
        Some(number)
    }

    /// A ping was answered. Whether that was a mark, and more may be sent.
    pub fn pong(&mut self, number: u32, now_s: f64) -> bool {
        let Some(place) = self.waiting.iter().position(|mark| mark.number == number) else { return false };
        let Some(mark) = self.waiting.drain(..=place).next_back() else { return false };
        self.passed = mark.sent;
        self.bytes_per_s *= RATE_KEEPS;
        if now_s > mark.at_s {
            self.bytes_per_s = self.bytes_per_s.max((self.passed - mark.passed) / (now_s - mark.at_s));
        }
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    const PART: u32 = 16 << 10;

    /// Sends all the time over a way of this rate and length; returns how much is under way at last, and how much passed.
    fn flow(bytes_per_s: f64, round_trip_s: f64, seconds: f64) -> (f64, f64) {
        let mut marks = Marks::default();
        let mut answers: VecDeque<(f64, u32)> = VecDeque::new();
        let (mut now_s, mut through_s, mut sent, mut most) = (0.0, 0.0_f64, 0.0, 0.0_f64);
        while now_s < seconds {
            if marks.sendable_bytes(Some(round_trip_s)) >= PART as usize {
                through_s = through_s.max(now_s) + f64::from(PART) / bytes_per_s;
                sent += f64::from(PART);
                if let Some(number) = marks.send(PART, now_s) {
                    answers.push_back((through_s + round_trip_s, number));
                }
                most = most.max((through_s - now_s) * bytes_per_s);
            } else {
                let (at_s, number) = answers.pop_front().unwrap();
                now_s = at_s;
                assert!(marks.pong(number, now_s));
            }
        }
        (most, sent)
    }

    #[test]
    fn a_way_is_filled_and_little_more_waits() {
        for (bytes_per_s, round_trip_s) in [(1e9, 1e-4), (1e8, 1e-3), (1e7, 0.02), (5e7, 0.1), (1e5, 0.3)] {
            let (waits, sent) = flow(bytes_per_s, round_trip_s, 10.0);
            assert!(sent > 0.8 * 10.0 * bytes_per_s, "{sent} at {bytes_per_s}, {round_trip_s}");
            assert!(waits < 1.5 * (LEAST_BYTES + bytes_per_s * round_trip_s), "{waits} at {bytes_per_s}");
        }
    }

    #[test]
    fn who_answers_no_pings_is_not_waited_for_and_has_us_keep_little() {
        let mut marks = Marks::default();
        for _ in 0..3 * MARKS_MAX {
            assert_eq!(marks.sendable_bytes(None), usize::MAX);
            marks.send(PART, 1.0);
        }
        assert_eq!(marks.waiting.len(), MARKS_MAX);
    }

    #[test]
    fn an_answer_to_another_ping_is_none_to_a_mark() {
        let mut marks = Marks::default();
        assert!(!marks.pong(0, 1.0));
        let number = marks.send(PART, 1.0).unwrap();
        assert!(!marks.pong(number + 1, 2.0));
        assert!(marks.pong(number, 2.0));
        assert!(!marks.pong(number, 2.0));
    }
}
