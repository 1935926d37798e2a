//! Errors: the other side broke the protocol, or a stream cannot be opened.

use std::fmt;

/// How the other side broke the protocol. The session cannot be used afterwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum YamuxError {
    /// Another version, or an unknown kind of frame.
    BadHeader,
    /// Data or a window for stream 0.
    BadStream,
    /// A new stream with a number that is in use or that is ours to give.
    BadOpen,
    /// More data than the window allows.
    WindowExceeded,
    /// Windows that add up to 4 GiB or more.
    WindowOverflow,
    /// Data after the end of its stream.
    DataAfterEnd,
    /// More questions than answers were read.
    AnswersUnread,
}

impl fmt::Display for YamuxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BadHeader => "a frame that is not yamux",
            Self::BadStream => "a yamux frame with data or a window for no stream",
            Self::BadOpen => "a yamux stream opened under a number that was not free",
            Self::WindowExceeded => "more yamux data than its window allows",
            Self::WindowOverflow => "yamux windows of 4 GiB or more",
            Self::DataAfterEnd => "yamux data after the end of its stream",
            Self::AnswersUnread => "yamux questions whose answers are not read",
        })
    }
}

impl std::error::Error for YamuxError {}

/// Why a stream cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// One side is going away.
    GoingAway,
    /// The limit of open streams is reached, or too much data waits to be sent.
    TryLater,
    /// All 2^31 numbers are used up.
    NoNumbersLeft,
}
