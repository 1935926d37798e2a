//! How long a round trip is, as pings find it.

/// The first pings follow each other without a pause: the earliest meet a side that is still busy with the handshake.
const FIRST_PINGS: u32 = 4;
/// Later pings are at least this far apart. An unanswered one is given up then.
const PING_EVERY_S: f64 = 1.0;
/// A longer round trip moves the shortest one up by this share of the difference. One slow answer, behind much data,
/// says little; but a connection that has become slower is believed in time.
const CREEP: f64 = 1.0 / 64.0;

/// The shortest round trip of late.
#[derive(Default)]
pub(super) struct RoundTrip {
    shortest_s: Option<f64>,
    pings: u32,
    asked_at_s: f64,
    is_waiting: bool,
}

impl RoundTrip {
    pub fn shortest_s(&self) -> Option<f64> {
        self.shortest_s
    }

    /// The number of the ping to send now, if one is due.
    pub fn ping(&mut self, now_s: f64) -> Option<u32> {
        let is_soon = self.pings > 0 && now_s - self.asked_at_s < PING_EVERY_S;
        if is_soon && (self.is_waiting || self.pings >= FIRST_PINGS) {
            return None;
        }
        self.pings = self.pings.wrapping_add(1).max(1);
        self.asked_at_s = now_s;
        self.is_waiting = true;
        Some(self.pings)
    }

    /// The other side has answered a ping.
    pub fn pong(&mut self, number: u32, now_s: f64) {
        if !self.is_waiting || number != self.pings {
            return;
        }
        self.is_waiting = false;
        let took_s = (now_s - self.asked_at_s).max(0.0);
        self.shortest_s = Some(match self.shortest_s {
            Some(shortest_s) if shortest_s < took_s => shortest_s + CREEP * (took_s - shortest_s),
            _ => took_s,
        });
    }
}
