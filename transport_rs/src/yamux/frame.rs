//! The 12 bytes before every yamux frame.

/// version, type, flags, stream, length: all big-endian.
pub const HEADER_BYTES: usize = 12;

/// Opens a stream, or asks for an answer to a ping.
pub const SYN: u16 = 1;
/// Accepts a stream, or answers a ping.
pub const ACK: u16 = 2;
/// The sender will send no more data.
pub const FIN: u16 = 4;
/// The stream is gone in both directions.
pub const RST: u16 = 8;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `length` bytes of the stream follow.
    Data,
    /// The receiver may send `length` bytes more.
    WindowUpdate,
    /// The answer must repeat `length`.
    Ping,
    /// No new streams, for the reason `length`.
    GoAway,
}

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Decides what the other fields mean.
    pub kind: Kind,
    /// `SYN` and the like. Unknown flags are ignored, as in go-yamux.
    pub flags: u16,
    /// 0 means the connection itself.
    pub stream: u32,
    /// The length of the body for `Data`; a number for every other kind.
    pub length: u32,
}

impl Header {
    /// None for another version or an unknown kind.
    #[must_use]
    pub fn decode(bytes: [u8; HEADER_BYTES]) -> Option<Self> {
        let [version, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3] = bytes;
        let kind = match (version, kind) {
            (0, 0) => Kind::Data,
            (0, 1) => Kind::WindowUpdate,
            (0, 2) => Kind::Ping,
            (0, 3) => Kind::GoAway,
            _ => return None,
        };
        let flags = u16::from_be_bytes([f0, f1]);
        let stream = u32::from_be_bytes([s0, s1, s2, s3]);
        Some(Self { kind, flags, stream, length: u32::from_be_bytes([l0, l1, l2, l3]) })
    }

    /// The header's bytes on the wire.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        let kind = match self.kind {
            Kind::Data => 0,
            Kind::WindowUpdate => 1,
            Kind::Ping => 2,
            Kind::GoAway => 3,
        };
        let [f0, f1] = self.flags.to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        let [l0, l1, l2, l3] = self.length.to_be_bytes();
        [0, kind, f0, f1, s0, s1, s2, s3, l0, l1, l2, l3]
    }

    pub(super) fn has(self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}
