//! How long a round trip is, as pings find it.

/// The first pings follow each other without a pause: the earliest meet a side that is still busy with the handshake.
const FIRST_PINGS: u32 = 4;
/// Later pings are at least this far apart: often enough that some fall into the pauses between large messages.
const PING_EVERY_S: f64 = 0.5;
/// An unanswered one is given up then.
const PATIENCE_S: f64 = 1.0;
/// A longer round trip moves the shortest one up by this share of the difference. One slow answer, behind much data,
/// says little; but a connection that has become slower is believed in time.
const CREEP: f64 = 1.0 / 64.0;
/// An answer was behind little data if no more than this was sent and received in the meantime, and shortly before.
const QUIET_BYTES: u64 = 16 << 10;
const BEFORE_S: f64 = 0.2;
/// If this many such answers in a row all took longer, the shortest of them is believed at once.
const BELIEVED: u32 = 3;

/// How much was sent and received in the last `BEFORE_S`, or in up to twice that.
#[derive(Default)]
struct Lately {
    /// When it was last asked, and all bytes until then.
    last: (f64, u64),
    /// The same of an earlier time, after which the next `before_bytes` are taken.
    marked: (f64, u64),
    before_bytes: u64,
}

impl Lately {
    fn bytes(&mut self, now_s: f64, moved_bytes: u64) -> u64 {
        if now_s - self.last.0 >= BEFORE_S {
            self.before_bytes = self.last.1; // since then we may have sent something, nobody knows when
            self.marked = (now_s, moved_bytes);
        } else if now_s - self.marked.0 >= BEFORE_S {
            self.before_bytes = self.marked.1;
            self.marked = (now_s, moved_bytes);
        }
        self.last = (now_s, moved_bytes);
        moved_bytes.saturating_sub(self.before_bytes)
    }
}

/// The shortest round trip of late.
#[derive(Default)]
pub(super) struct RoundTrip {
    shortest_s: Option<f64>,
    pings: u32,
    asked_at_s: f64,
    /// The bytes that had been sent and received when the last ping was sent. None if many of them were new.
    asked_at_bytes: Option<u64>,
    is_waiting: bool,
    lately: Lately,
    /// The answers in a row, each behind little data, that took longer than the shortest one, and the shortest of them.
    longer: u32,
    shortest_of_longer_s: f64,
}

impl RoundTrip {
    pub fn shortest_s(&self) -> Option<f64> {
        self.shortest_s
    }

    /// The number of the ping to send now, if one is due. `moved_bytes` were sent and received until now.
    pub fn ping(&mut self, now_s: f64, moved_bytes: u64) -> Option<u32> {
        let lately_bytes = self.lately.bytes(now_s, moved_bytes);
        let pause_s = if self.is_waiting { PATIENCE_S } else { PING_EVERY_S };
        let is_soon = self.pings > 0 && now_s - self.asked_at_s < pause_s;
        if is_soon && (self.is_waiting || self.pings >= FIRST_PINGS) {
            return None;
        }
        self.pings = self.pings.wrapping_add(1).max(1);
        self.asked_at_s = now_s;
        self.asked_at_bytes = (lately_bytes <= QUIET_BYTES).then_some(moved_bytes);
        self.is_waiting = true;
        Some(self.pings)
    }

    /// The other side has answered a ping. `moved_bytes` were sent and received until now.
    pub fn pong(&mut self, number: u32, now_s: f64, moved_bytes: u64) {
        if !self.is_waiting || number != self.pings {
            return;
        }
        self.is_waiting = false;
        let took_s = (now_s - self.asked_at_s).max(0.0);
        let Some(shortest_s) = self.shortest_s.filter(|shortest_s| *shortest_s < took_s) else {
            self.believe(took_s);
            return;
        };
        self.shortest_s = Some(shortest_s + CREEP * (took_s - shortest_s));
        if self.asked_at_bytes.is_some_and(|asked_at_bytes| moved_bytes - asked_at_bytes <= QUIET_BYTES) {
            self.shortest_of_longer_s = if self.longer > 0 { self.shortest_of_longer_s.min(took_s) } else { took_s };
            self.longer += 1;
            if self.longer == BELIEVED {
                self.believe(self.shortest_of_longer_s);
            }
        }
    }

    fn believe(&mut self, round_trip_s: f64) {
        self.shortest_s = Some(round_trip_s);
        self.longer = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MUCH: u64 = 1 << 20;

    /// Answers that took these times, one in two seconds, each with this much data in the meantime.
    fn found(all_took_s: &[f64], bytes: u64) -> f64 {
        let (mut round_trip, mut now_s, mut moved_bytes) = (RoundTrip::default(), 0.0, 0);
        for took_s in all_took_s {
            now_s += 2.0;
            if let Some(number) = round_trip.ping(now_s, moved_bytes) {
                moved_bytes += bytes;
                round_trip.pong(number, now_s + took_s, moved_bytes);
            }
        }
        round_trip.shortest_s().unwrap_or_default()
    }

    fn near(found_s: f64, expected_s: f64) -> bool {
        (found_s - expected_s).abs() < 1e-9
    }

    #[test]
    fn a_way_that_gets_shorter_is_believed_at_once() {
        for bytes in [0, MUCH] {
            assert!(near(found(&[0.5, 0.1], bytes), 0.1));
        }
    }

    #[test]
    fn a_way_that_gets_longer_is_believed_after_a_few_answers_behind_little_data() {
        assert!(found(&[0.01, 0.1, 0.1], 0) < 0.02);
        assert!(near(found(&[0.01, 0.13, 0.1, 0.12], 0), 0.1));
        assert!(near(found(&[0.01, 0.1, 0.1, 0.1, 0.2, 0.2, 0.2], 0), 0.2));
    }

    #[test]
    fn what_was_sent_just_before_a_ping_counts() {
        let mut lately = Lately::default();
        assert_eq!(lately.bytes(10.0, 0), 0);
        assert_eq!(lately.bytes(10.05, MUCH), MUCH);
        assert_eq!(lately.bytes(10.1, MUCH), MUCH);
        assert_eq!(lately.bytes(10.4, MUCH), 0);
        assert_eq!(lately.bytes(11.0, 2 * MUCH), MUCH, "it may have been written in this moment");
        for tenth in 0..20_u32 {
            let found = lately.bytes(11.0 + f64::from(tenth) / 10.0, (2 + u64::from(tenth)) * MUCH);
            assert!(tenth < 2 || (2 * MUCH..=6 * MUCH).contains(&found), "{found} after {tenth}");
        }
    }

    #[test]
    fn slow_answers_behind_much_data_and_single_ones_are_hardly_believed() {
        assert!(found(&[0.01, 0.1, 0.1, 0.1, 0.1], MUCH) < 0.02);
        assert!(near(found(&[0.01, 0.1, 0.1, 0.01, 0.1, 0.1, 0.01], 0), 0.01));
    }
}
