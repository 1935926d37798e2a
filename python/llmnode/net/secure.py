"""Noise (`/noise`) for py-libp2p, with the cipher and its framing in Rust.

It does the same handshake as py-libp2p's own transport, with the same proofs of identity. But a read takes all bytes
that the socket has, and a cancelled read or write before the muxer takes over leaves nothing half done. It knows no
streams: `yamux.py` takes the session over once a muxer is agreed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from libp2p.abc import IRawConnection, ISecureConn, ISecureTransport
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.peer.id import ID
from libp2p.security.noise.exceptions import (
    HandshakeHasNotFinished,
    InvalidSignature,
    NoiseFailure,
    PeerIDMismatchesPubkey,
)
from libp2p.security.noise.messages import (
    NoiseExtensions,
    NoiseHandshakePayload,
    make_handshake_payload_sig,
    verify_handshake_payload_sig,
)
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload as NoisePayload
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE

from llmnode._native import NoiseHandshake, NoiseSession
from llmnode.net.explain import name_stranger
from llmnode.net.select import proposal
from llmnode.net.sockets import remote_address

if TYPE_CHECKING:
    from libp2p.connection_types import ConnectionType
    from libp2p.crypto.keys import KeyPair, PrivateKey, PublicKey
    from multiaddr import Multiaddr

READ_BYTES = 1 << 16
MOST_KEY_BYTES = 600
"""The largest public key of a peer: RSA with 4096 bits, the most that libp2p allows, takes 556."""
YAMUX = TProtocol("/yamux/1.0.0")
"""The only muxer that we have. We say so within the handshake: a peer that says the same needs not be asked again."""


def noise_transport(key_pair: KeyPair, swarm_key: bytes | None = None) -> NoiseTransport:
    """The transport under `/noise` in the `sec_opt` of a host with the identity `key_pair`, of any key type.

    With the `swarm_key` of a private swarm only its members can connect, either way.
    """
    noise_keys = create_noise_key_pair()
    signature = make_handshake_payload_sig(key_pair.private_key, noise_keys.public_key)
    extensions = NoiseExtensions(stream_muxers=[YAMUX])
    proof = NoiseHandshakePayload(key_pair.public_key, signature, extensions).serialize()
    return NoiseTransport(key_pair, noise_keys.private_key.to_bytes(), proof, swarm_key)


class AnotherPeer(PeerIDMismatchesPubkey):
    """A peer has proved its identity, and it is not the one that was dialled."""

    def __init__(self, found: ID, wanted: ID) -> None:
        super().__init__(f"{found} answers, not {wanted}")
        self.found = found


class NoiseTransport(ISecureTransport):
    """Made by `noise_transport`. One Noise key for all connections of a host, signed once."""

    def __init__(self, key_pair: KeyPair, noise_key: bytes, proof: bytes, swarm_key: bytes | None) -> None:
        self._key_pair = key_pair
        self._noise_key = noise_key
        self._proof = proof
        self._swarm_key = swarm_key

    async def secure_inbound(self, conn: IRawConnection) -> NoiseConnection:
        """Raises NoiseFailure if the other side does not prove its identity."""
        handshake = NoiseHandshake(self._noise_key, initiator=False, swarm_key=self._swarm_key)
        try:
            await _receive(conn, handshake)
            await conn.write(handshake.send(self._proof))
            proof = _proved(handshake, await _receive(conn, handshake))
            return self._secured(conn, handshake, proof, initiator=False)
        except (ValueError, IOException) as error:
            raise NoiseFailure(str(error)) from error

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> NoiseConnection:
        """Raises AnotherPeer if another peer answers, NoiseFailure if it does not prove its identity."""
        return await self._initiate(conn, peer_id, b"")

    async def propose_outbound(self, conn: IRawConnection, peer_id: ID) -> NoiseConnection:
        """Like `secure_outbound`, for a connection on which Noise is still to be agreed on: in the same round trip."""
        return await self._initiate(conn, peer_id, proposal(NOISE))

    async def _initiate(self, conn: IRawConnection, peer_id: ID, asked: bytes) -> NoiseConnection:
        """`asked` is sent first, and answered with the same."""
        handshake = NoiseHandshake(self._noise_key, initiator=True, swarm_key=self._swarm_key)
        answer = await _ask(conn, asked, handshake.send(b""))
        try:
            proof = _proved(handshake, await _receive(conn, handshake, answer))
            if (found := ID.from_pubkey(proof.id_pubkey)) != peer_id:
                raise AnotherPeer(found, peer_id)
            await conn.write(handshake.send(self._proof))
            return self._secured(conn, handshake, proof, initiator=True)
        except (ValueError, IOException, HandshakeHasNotFinished) as error:
            another = "another swarm key, or none" if self._swarm_key else "a swarm key, and you gave none"
            fix = "ask whoever runs it for an invite, and give that as --swarm-key"
            raise NoiseFailure(f"no handshake: {error}; perhaps it has {another}: {fix}") from error

    def _secured(
        self, conn: IRawConnection, handshake: NoiseHandshake, proof: NoiseHandshakePayload, *, initiator: bool
    ) -> NoiseConnection:
        session, rest = handshake.finish()
        muxers = [] if proof.extensions is None else proof.extensions.stream_muxers
        return NoiseConnection(
            conn,
            session,
            session.open(rest),
            self._key_pair,
            proof.id_pubkey,
            initiator=initiator,
            has_agreed_on_yamux=YAMUX in muxers,
        )


async def _ask(conn: IRawConnection, asked: bytes, opening: bytes) -> bytes:
    """Agree on the protocol `asked`, and begin. Returns the bytes after the answer. Raises NoiseFailure."""
    data = b""
    try:
        await conn.write(asked + opening)
        while len(data) < len(asked) and asked.startswith(data):
            read = await conn.read(READ_BYTES)
            if not read:
                raise NoiseFailure("it hung up before it agreed to Noise: it is full, or no peer of libp2p")
            data += read
    except IOException as error:
        raise NoiseFailure("it cut us off before it agreed to Noise: it is full, or no peer of libp2p") from error
    if not data.startswith(asked):
        raise NoiseFailure(f"it does not agree to Noise: {name_stranger(data)}")
    return data[len(asked) :]


async def _receive(conn: IRawConnection, handshake: NoiseHandshake, data: bytes = b"") -> bytes:
    """The payload of the next message. `data` has its first bytes."""
    while (payload := handshake.receive(data)) is None:
        data = await conn.read(READ_BYTES)
        if not data:
            raise HandshakeHasNotFinished("the connection closed during the handshake")
    return payload


def _proved(handshake: NoiseHandshake, payload: bytes) -> NoiseHandshakePayload:
    """With the identity key of the other side, which has signed the Noise key that this handshake was made with.

    Raises ValueError, or NoiseFailure.
    """
    _check_key_size(payload)
    proof = NoiseHandshakePayload.deserialize(payload)
    noise_key = handshake.remote_static_key
    assert noise_key is not None
    if not verify_handshake_payload_sig(proof, X25519PublicKey.from_bytes(noise_key)):
        raise InvalidSignature("the other side has not signed its Noise key")
    return proof


def _check_key_size(payload: bytes) -> None:
    """Raises NoiseFailure for a key that no peer needs: to read an RSA key of 60 kB takes half a minute."""
    try:
        key = NoisePayload.FromString(payload).identity_key
    except DecodeError as error:
        raise NoiseFailure(f"no proof of an identity: {error}") from error
    if len(key) > MOST_KEY_BYTES:
        raise NoiseFailure(f"a key of {len(key)} bytes, at most {MOST_KEY_BYTES} allowed")


class NoiseConnection(ISecureConn):
    """An encrypted connection. It is for one task at a time, the one that negotiates the muxer."""

    def __init__(
        self,
        raw: IRawConnection,
        session: NoiseSession,
        early: bytes,
        key_pair: KeyPair,
        remote_key: PublicKey,
        *,
        initiator: bool,
        has_agreed_on_yamux: bool,
    ) -> None:
        self.raw = raw
        self.session = session
        self.is_initiator = initiator
        self.negotiated_security_protocol = NOISE
        self.has_agreed_on_yamux = has_agreed_on_yamux
        self._unread = bytearray(early)
        self._key_pair = key_pair
        self._remote_key = remote_key

    async def read(self, n: int | None = None) -> bytes:
        """The same as py-libp2p's sessions: `n` bytes, fewer only at the end; or all that are there if `n` is None.

        Raises ConnectionClosedError at the end, and for bytes that the other side did not encrypt.
        """
        while not self._unread or (n is not None and len(self._unread) < n):
            data = await self.raw.read(READ_BYTES)
            if not data and not self._unread:
                raise ConnectionClosedError("closed by the other side", transport="noise")
            if not data:
                break
            try:
                self._unread += self.session.open(data)
            except ValueError as error:
                raise ConnectionClosedError(str(error), transport="noise") from error
        taken = bytes(self._unread[:n])
        del self._unread[:n]
        return taken

    def take_unread(self) -> bytes:
        """The bytes that were decrypted and not read, for the muxer that takes over `raw` and `session`."""
        unread = bytes(self._unread)
        self._unread.clear()
        return unread

    async def write(self, data: bytes) -> None:
        await self.raw.write(self.session.seal(data))

    async def close(self) -> None:
        await self.raw.close()

    def get_local_peer(self) -> ID:
        return ID.from_pubkey(self._key_pair.public_key)

    def get_local_private_key(self) -> PrivateKey:
        return self._key_pair.private_key

    def get_remote_peer(self) -> ID:
        return ID.from_pubkey(self._remote_key)

    def get_remote_public_key(self) -> PublicKey:
        return self._remote_key

    def get_remote_address(self) -> tuple[str, int] | None:
        return remote_address(self.raw)

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.raw.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.raw.get_connection_type()
