//! Noise as libp2p speaks it: `Noise_XX_25519_ChaChaPoly_SHA256`, then messages of a 16-bit length and a ciphertext.
//! Members of a private swarm mix its key into the handshake first (`XXpsk0`), which libp2p's own peers do not.
//!
//! The spec: <https://github.com/libp2p/specs/blob/master/noise/README.md>. The payloads of the handshake, in which
//! each side proves its identity key, are opaque here: the caller must verify the payload that `receive` returns
//! against `remote_static` before it uses the session.

use std::fmt;

use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

/// The bytes of an X25519 key, private or public.
pub const KEY_BYTES: usize = 32;

/// The longest ciphertext that a 16-bit length can announce.
pub const MESSAGE_BYTES_MAX: usize = u16::MAX as usize;

/// The most plaintext that one message holds.
pub const PLAINTEXT_BYTES_MAX: usize = MESSAGE_BYTES_MAX - TAG_BYTES;

const PATTERN: &str = "Noise_XX_25519_ChaChaPoly_SHA256";
const PRIVATE_PATTERN: &str = "Noise_XXpsk0_25519_ChaChaPoly_SHA256";
const LENGTH_BYTES: usize = 2;
const TAG_BYTES: usize = 16;

/// The two sides of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It dialled.
    Initiator,
    /// It was dialled.
    Responder,
}

/// Why a handshake or a session cannot go on. None of them can be recovered from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoiseError {
    /// A handshake message that is malformed, forged, or out of turn.
    Handshake(String),
    /// A message too short to hold its authentication tag.
    TooShort {
        /// The length that it announced.
        found: usize,
    },
    /// A message that was not encrypted by the other side, or not as the next one.
    Forged,
    /// 2^64 messages were sent or received.
    Exhausted,
}

/// The handshake of either side. It takes the bytes that arrive and makes the ones to send.
pub struct Handshake {
    state: snow::HandshakeState,
    arrived: Message,
    rest: Vec<u8>,
}

impl Handshake {
    /// `static_key`: the private X25519 key whose public half the identity key has signed. `swarm_key`: that of a
    /// private swarm. A peer with another key, or none, neither completes the handshake nor learns our identity.
    ///
    /// # Errors
    /// `Handshake` if the system gives no randomness.
    pub fn new(
        role: Role,
        static_key: &[u8; KEY_BYTES],
        swarm_key: Option<&[u8; KEY_BYTES]>,
    ) -> Result<Self, NoiseError> {
        let builder = match swarm_key {
            None => snow::Builder::new(PATTERN.parse()?),
            Some(key) => snow::Builder::new(PRIVATE_PATTERN.parse()?).psk(0, key)?,
        };
        let builder = builder.local_private_key(static_key)?;
        let state = match role {
            Role::Initiator => builder.build_initiator()?,
            Role::Responder => builder.build_responder()?,
        };
        Ok(Self { state, arrived: Message::default(), rest: Vec::new() })
    }

    /// Our next message with its length, to be sent as it is.
    ///
    /// # Errors
    /// `Handshake` if it is not our turn, or the payload does not fit a message.
    pub fn send(&mut self, payload: &[u8]) -> Result<Vec<u8>, NoiseError> {
        let mut message = vec![0; LENGTH_BYTES + MESSAGE_BYTES_MAX];
        let (length, body) = message.split_at_mut(LENGTH_BYTES);
        let len_bytes = self.state.write_message(payload, body)?;
        length.copy_from_slice(&prefix(len_bytes));
        message.truncate(LENGTH_BYTES + len_bytes);
        Ok(message)
    }

    /// Takes bytes of any length; the payload once the other side's next message is complete.
    ///
    /// # Errors
    /// `Handshake` for a message that is malformed, forged or out of turn.
    pub fn receive(&mut self, bytes: &[u8]) -> Result<Option<Vec<u8>>, NoiseError> {
        self.rest.extend_from_slice(bytes);
        let mut bytes = self.rest.as_slice();
        let complete = self.arrived.fill(&mut bytes, 0)?;
        let rest = bytes.to_vec();
        let payload = if complete {
            let mut payload = vec![0; MESSAGE_BYTES_MAX];
            let len_bytes = self.state.read_message(self.arrived.body(), &mut payload)?;
            self.arrived.clear();
            payload.truncate(len_bytes);
            Some(payload)
        } else {
            None
        };
        self.rest = rest;
        Ok(payload)
    }

    /// The other side's public X25519 key, which its payload must be a proof of.
    #[must_use]
    pub fn remote_static(&self) -> Option<[u8; KEY_BYTES]> {
        self.state.get_remote_static()?.try_into().ok()
    }

    /// The session that the handshake agreed on, and the bytes that came after it.
    ///
    /// # Errors
    /// `Handshake` if a message is missing.
    pub fn finish(mut self) -> Result<(Session, Vec<u8>), NoiseError> {
        if !self.state.is_handshake_finished() {
            return Err(NoiseError::Handshake("a message is missing".to_owned()));
        }
        let (from_initiator, from_responder) = self.state.dangerously_get_raw_split();
        let (ours, theirs) =
            if self.state.is_initiator() { (from_initiator, from_responder) } else { (from_responder, from_initiator) };
        Ok((Session::new(&ours, &theirs)?, self.rest))
    }
}

/// Both directions of a connection after its handshake.
pub struct Session {
    ours: Cipher,
    theirs: Cipher,
    arrived: Message,
}

impl Session {
    /// From the keys that each side encrypts with.
    ///
    /// # Errors
    /// None: the keys have the right length.
    pub fn new(ours: &[u8; KEY_BYTES], theirs: &[u8; KEY_BYTES]) -> Result<Self, NoiseError> {
        Ok(Self { ours: Cipher::new(ours)?, theirs: Cipher::new(theirs)?, arrived: Message::default() })
    }

    /// The length of `len_bytes` of plaintext once sealed.
    #[must_use]
    pub fn sealed_bytes(len_bytes: usize) -> usize {
        len_bytes + len_bytes.div_ceil(PLAINTEXT_BYTES_MAX) * (LENGTH_BYTES + TAG_BYTES)
    }

    /// Encrypts `plaintext`, of any length, as messages to be sent in this order.
    ///
    /// # Errors
    /// `Exhausted`.
    ///
    /// # Panics
    /// Never: an `out` that is not `sealed_bytes(plaintext.len())` long is left in part as it was.
    pub fn seal(&mut self, plaintext: &[u8], out: &mut [u8]) -> Result<(), NoiseError> {
        let messages = out.chunks_mut(LENGTH_BYTES + MESSAGE_BYTES_MAX);
        for (part, message) in plaintext.chunks(PLAINTEXT_BYTES_MAX).zip(messages) {
            let Some((length, body)) = message.split_at_mut_checked(LENGTH_BYTES) else { break };
            length.copy_from_slice(&prefix(part.len() + TAG_BYTES));
            let Some((body, tag)) = body.split_at_mut_checked(part.len()) else { break };
            body.copy_from_slice(part);
            let made = self.ours.seal(body)?;
            tag.iter_mut().zip(made.as_ref()).for_each(|(to, from)| *to = *from);
        }
        Ok(())
    }

    /// Takes bytes of any length, and gives `sink` the plaintext of each message that they complete.
    ///
    /// # Errors
    /// `TooShort`, `Forged`, `Exhausted`, and whatever `sink` returns. The session is of no use afterwards.
    pub fn open<E: From<NoiseError>>(
        &mut self,
        mut bytes: &[u8],
        mut sink: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        while self.arrived.fill(&mut bytes, TAG_BYTES)? {
            sink(self.theirs.open(self.arrived.body_mut())?)?;
            self.arrived.clear();
        }
        Ok(())
    }
}

/// One direction: a key, and how many messages it has been used for.
struct Cipher {
    key: LessSafeKey,
    used: u64,
}

impl Cipher {
    fn new(key: &[u8; KEY_BYTES]) -> Result<Self, NoiseError> {
        let key = UnboundKey::new(&CHACHA20_POLY1305, key).map_err(|_| NoiseError::Forged)?;
        Ok(Self { key: LessSafeKey::new(key), used: 0 })
    }

    fn seal(&mut self, text: &mut [u8]) -> Result<ring::aead::Tag, NoiseError> {
        let nonce = self.nonce()?;
        self.key.seal_in_place_separate_tag(nonce, Aad::empty(), text).map_err(|_| NoiseError::Exhausted)
    }

    fn open<'a>(&mut self, text: &'a mut [u8]) -> Result<&'a [u8], NoiseError> {
        let nonce = self.nonce()?;
        let plaintext = self.key.open_in_place(nonce, Aad::empty(), text).map_err(|_| NoiseError::Forged)?;
        Ok(plaintext)
    }

    /// The Noise spec, section 12.3: 32 bits of zeros, then a little-endian counter. 2^64 - 1 is reserved.
    fn nonce(&mut self) -> Result<Nonce, NoiseError> {
        let counter = u128::from(self.used) << 32;
        self.used = self.used.checked_add(1).ok_or(NoiseError::Exhausted)?;
        let nonce = counter.to_le_bytes().first_chunk().copied().unwrap_or_default();
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// A message on its way in: at most `LENGTH_BYTES + MESSAGE_BYTES_MAX` bytes.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// Moves bytes from the front of `bytes` until the message is complete; false if they do not suffice.
    fn fill(&mut self, bytes: &mut &[u8], at_least: usize) -> Result<bool, NoiseError> {
        if !self.fill_to(bytes, LENGTH_BYTES) {
            return Ok(false);
        }
        let found = self.body_bytes();
        if found < at_least {
            return Err(NoiseError::TooShort { found });
        }
        Ok(self.fill_to(bytes, LENGTH_BYTES + found))
    }

    fn fill_to(&mut self, bytes: &mut &[u8], len_bytes: usize) -> bool {
        let missing = len_bytes.saturating_sub(self.0.len());
        let (now, later) = bytes.split_at_checked(missing).unwrap_or((bytes, &[]));
        self.0.extend_from_slice(now);
        *bytes = later;
        now.len() == missing
    }

    fn body_bytes(&self) -> usize {
        self.0.first_chunk().map_or(0, |length| usize::from(u16::from_be_bytes(*length)))
    }

    fn body(&self) -> &[u8] {
        self.0.get(LENGTH_BYTES..).unwrap_or_default()
    }

    fn body_mut(&mut self) -> &mut [u8] {
        self.0.get_mut(LENGTH_BYTES..).unwrap_or_default()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

/// A message is never longer than 16 bits say: `snow` and `chunks` see to that.
fn prefix(len_bytes: usize) -> [u8; LENGTH_BYTES] {
    u16::try_from(len_bytes).unwrap_or(u16::MAX).to_be_bytes()
}

impl From<snow::Error> for NoiseError {
    fn from(error: snow::Error) -> Self {
        Self::Handshake(error.to_string())
    }
}

impl fmt::Display for NoiseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handshake(why) => write!(f, "Noise handshake: {why}"),
            Self::TooShort { found } => write!(f, "a Noise message of {found} bytes is shorter than its tag"),
            Self::Forged => write!(f, "a Noise message fails its authentication"),
            Self::Exhausted => write!(f, "2^64 Noise messages are the most that one key may encrypt"),
        }
    }
}

impl std::error::Error for NoiseError {}
