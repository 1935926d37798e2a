"""Who signed what, told by the peer id alone, whatever a peer says that its id is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto import ed25519, secp256k1
from libp2p.peer.id import ID

from llmnode.core.ids import PeerId
from llmnode.net.identity import is_signed

KEYS = ed25519.create_new_key_pair(b"k" * 32)
PEER = PeerId(ID.from_pubkey(KEYS.public_key).to_base58())
SIGNATURE = KEYS.private_key.sign(b"message")


def test_what_the_holder_of_the_key_signed_is_signed_and_nothing_else() -> None:
    other = ed25519.create_new_key_pair(b"o" * 32)
    assert is_signed(PEER, b"message", SIGNATURE)
    assert not is_signed(PEER, b"massage", SIGNATURE)
    assert not is_signed(PEER, b"message", other.private_key.sign(b"message"))
    assert not is_signed(PeerId(ID.from_pubkey(other.public_key).to_base58()), b"message", SIGNATURE)


@pytest.mark.parametrize("size", [0, 1, 63, 65, 1000])
def test_a_signature_of_another_size_is_none(size: int) -> None:
    assert not is_signed(PEER, b"message", (SIGNATURE * 16)[:size])


@pytest.mark.parametrize("spelling", [f"{PEER} ", f"{PEER}\n", f" {PEER}", f"1{PEER}", PEER.lower(), "", "é", "\ud800"])
def test_a_key_has_one_id(spelling: str) -> None:
    """Else who is banned would come back under another spelling, with the same key."""
    assert not is_signed(PeerId(spelling), b"message", SIGNATURE)


def test_keys_of_other_kinds_are_not_taken_even_if_they_fit_into_an_id() -> None:
    """No peer of ours has one, and three more libraries would read what strangers send."""
    keys = secp256k1.create_new_key_pair(b"k" * 32)
    peer = PeerId(ID.from_pubkey(keys.public_key).to_base58())
    assert ID.from_base58(peer).extract_public_key() is not None
    assert not is_signed(peer, b"message", keys.private_key.sign(b"message"))
    assert not is_signed(peer, b"message", SIGNATURE)


@given(st.binary(max_size=60), st.text(max_size=60))
def test_noise_is_no_id(noise: bytes, text: str) -> None:
    assert not is_signed(PeerId(ID(noise).to_base58()), b"message", SIGNATURE)
    assert not is_signed(PeerId(text), b"message", SIGNATURE)
