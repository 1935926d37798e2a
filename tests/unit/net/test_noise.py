"""Noise handshakes over a real socket: other identities, proofs for other keys, and garbage."""

from __future__ import annotations

from contextlib import suppress

import pytest
import trio
import trio.testing
from Crypto.Math.Numbers import Integer
from Crypto.PublicKey.RSA import RsaKey
from Crypto.Util.asn1 import DerSequence
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.pb.crypto_pb2 import KeyType, PublicKey
from libp2p.crypto.rsa import RSAPublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.security.noise.exceptions import InvalidSignature, NoiseFailure, PeerIDMismatchesPubkey
from libp2p.security.noise.pb.noise_pb2 import NoiseHandshakePayload

from llmnode._native import NoiseHandshake, NoiseSession
from llmnode.net.secure import MOST_KEY_BYTES, NoiseTransport
from unit.hosts import new_transport, secured, tcp_pair
from unit.in_trio import in_trio


@in_trio
async def test_a_dialler_refuses_another_identity() -> None:
    (transport, _), (_, another) = new_transport(), new_transport()
    async with tcp_pair() as raw:
        with pytest.RaisesGroup(PeerIDMismatchesPubkey, flatten_subgroups=True):
            await secured(raw, transport, transport, another)


@pytest.mark.parametrize("impostor_dials", [True, False])
@in_trio
async def test_a_proof_for_another_noise_key_is_refused(impostor_dials: bool) -> None:
    """A peer that has seen a proof cannot use it: the proof names its owner's Noise key."""
    (honest, honest_id), (victim, victim_id) = new_transport(), new_transport()
    noise_key = create_noise_key_pair().private_key.to_bytes()
    impostor = NoiseTransport(create_new_key_pair(), noise_key, victim._proof, None)
    sides = (impostor, honest, honest_id) if impostor_dials else (honest, impostor, victim_id)
    async with tcp_pair() as raw:
        with pytest.RaisesGroup(InvalidSignature, flatten_subgroups=True):
            await secured(raw, *sides)


@pytest.mark.parametrize("liar_dials", [True, False])
@in_trio
async def test_a_huge_key_is_refused_unread(liar_dials: bool) -> None:
    """Libraries take half a minute for this one, since they look whether it is a good one. Nothing else runs then."""
    honest, honest_id = new_transport()
    key = PublicKey(key_type=KeyType.RSA, data=bytes(DerSequence([(1 << 479_999) + 1, 65537]).encode()))
    proof = NoiseHandshakePayload(identity_key=key.SerializeToString(), identity_sig=bytes(64)).SerializeToString()
    liar = NoiseTransport(create_new_key_pair(), create_noise_key_pair().private_key.to_bytes(), proof, None)
    sides = (liar, honest, honest_id) if liar_dials else (honest, liar, honest_id)
    async with tcp_pair() as raw:
        with pytest.RaisesGroup(pytest.RaisesExc(NoiseFailure, match="a key of 600.. bytes"), flatten_subgroups=True):
            await secured(raw, *sides)


def test_the_largest_key_of_libp2p_is_taken() -> None:
    key = RsaKey(n=Integer((1 << 4095) + 1), e=Integer(65537))
    assert 500 < len(RSAPublicKey(key).serialize()) <= MOST_KEY_BYTES


@pytest.mark.parametrize("garbage", [b"", b"\x00\x00", b"\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n" * 5000])
@in_trio
async def test_what_is_no_handshake_is_a_typed_failure(garbage: bytes) -> None:
    transport, _ = new_transport()
    async with tcp_pair() as (raw, accepted), trio.open_nursery() as nursery:

        async def attack() -> None:
            with suppress(Exception):
                await raw.write(garbage)
            await raw.close()

        nursery.start_soon(attack)
        with pytest.raises(NoiseFailure):
            await transport.secure_inbound(accepted)


def test_a_session_is_handed_over_once() -> None:
    initiator, responder = (NoiseHandshake(bytes([1]) * 32, initiator=initiator) for initiator in (True, False))
    assert responder.receive(initiator.send(b"")) == b""
    assert initiator.receive(responder.send(b"proof")) == b"proof"
    assert responder.receive(initiator.send(b"mine")) == b"mine"
    (ours, rest), (theirs, _) = initiator.finish(), responder.finish()
    assert isinstance(ours, NoiseSession)
    assert rest == b""
    assert theirs.open(ours.seal(bytes(200_000))) == bytes(200_000)
    with pytest.raises(RuntimeError, match="handed over"):
        initiator.finish()
    with pytest.raises(ValueError, match="authentication"):
        theirs.open(theirs.seal(b"mine"))
