"""Invites: they say what was put in, older ones are read, and damaged ones are refused."""

from __future__ import annotations

import base64
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode import _native
from llmnode.errors import ConfigError
from llmnode.net.invite import INVITE, INVITED_PEERS, KEY_BYTES, MODEL_CHARS, Invite, read_invite, write_invite

KEY = bytes(range(KEY_BYTES))
ID = "12D3KooWKpvmGGLEexnXcwVTK1arfQUgcW9Zz8iWam5sDLFREniY"
PEER = f"/ip4/127.0.0.1/tcp/4001/p2p/{ID}"
FORMS = [PEER, f"/dns/node.example/tcp/4001/p2p/{ID}", f"/ip6/2001:db8::7/tcp/1/p2p/{ID}",
         f"/ip4/203.0.113.7/tcp/4001/p2p/{ID}/p2p-circuit/p2p/{ID}"]  # fmt: skip
OLD = (
    "llmnode-invite-VidebZLEIAABAgMEBQYHCAkKCwwNDg8QERITFBUWFxgZGhscHR4fkdlQL2lwNC8xMjcuMC4wLjEvdGNwLzQwMDEvcDJwLzEyRDNL"
    "b29XS3B2bUdHTEVleG5YY3dWVEsxYXJmUVVnY1c5Wno4aVdhbTVzRExGUkVuaVk"
)
"""An invite of the first form, as llmnode 0.1.0 has printed it."""


def sealed(content: Any) -> str:  # Any: what msgpack can hold
    packed = msgpack.packb(content)
    data = _native.crc32c(packed).to_bytes(4, "big") + packed
    return INVITE + base64.urlsafe_b64encode(data).decode().rstrip("=")


@given(
    st.none() | st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    st.lists(st.sampled_from(FORMS) | st.text(max_size=20), max_size=INVITED_PEERS),
    st.none() | st.from_regex(r"[a-z]{1,9}/[a-z]{1,9}(@[0-9a-f]{40})?", fullmatch=True),
)
def test_an_invite_says_what_was_put_in(key: bytes | None, peers: list[str], model: str | None) -> None:
    invite = Invite(tuple(peers), key, model)
    assert read_invite(write_invite(invite)) == invite
    assert read_invite(f" {write_invite(invite)}\n") == invite


def test_an_invite_of_before_is_read_and_a_key_with_peers_is_written_as_then() -> None:
    assert read_invite(OLD) == Invite((PEER,), KEY)
    assert write_invite(Invite((PEER,), KEY)) == OLD


@pytest.mark.parametrize("model", [None, "org/name"])
@given(st.integers(0, 10_000), st.sampled_from("aZ_-=+/ \n\0é"))
def test_a_damaged_invite_is_refused(model: str | None, at: int, instead: str) -> None:
    invite = write_invite(Invite((PEER,), KEY, model))
    at %= len(invite)
    for damaged in (invite[:at], invite[:at] + instead + invite[at + 1 :], invite + instead):
        if damaged.strip() != invite:
            with pytest.raises(ConfigError, match="damaged"):
                read_invite(damaged)


@given(st.binary(max_size=200))
def test_an_invite_of_any_bytes_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        read_invite(INVITE + base64.urlsafe_b64encode(data).decode())


@pytest.mark.parametrize(
    "content",
    [7, [], [KEY], [KEY[1:], []], [1, [], {}], [None, PEER, {}], [None, [7], {}], [None, [b"\xff" * 9], {}],
     [None, [b"x" * 400], {}], [None, ["x" * 400], {}], [None, [PEER] * 17, {}], [None, [], []], [None, [], {1: 2}],
     [None, [], {"model": 7}], [None, [], {"model": ""}], [None, [], {"model": "a\x1b[31m"}],
     [None, [], {"model": "a" * (MODEL_CHARS + 1)}]],
)  # fmt: skip
def test_a_whole_invite_with_the_wrong_things_in_it_is_refused(content: Any) -> None:
    with pytest.raises(ConfigError, match="damaged"):
        read_invite(sealed(content))


def test_what_a_newer_llmnode_adds_is_ignored_or_named() -> None:
    assert read_invite(sealed([None, [PEER], {"model": "org/name", "colour": [1]}])) == Invite(
        (PEER,), None, "org/name"
    )
    with pytest.raises(ConfigError, match="newer llmnode"):
        read_invite(sealed([None, [PEER], {}, "more"]))


def test_an_invite_names_a_few_peers_and_no_novel() -> None:
    with pytest.raises(ConfigError, match="at most"):
        write_invite(Invite((PEER,) * (INVITED_PEERS + 1)))
    with pytest.raises(ConfigError, match="at most"):
        write_invite(Invite((), None, "a" * (MODEL_CHARS + 1)))


@pytest.mark.parametrize(
    "model",
    ["~/finetune", "/srv/finetune", "finetune", "./org/name", "../org/name", "org/../name", "org/name/more",
     "org/name.gguf", "C:\\finetune", "hub:org/name", "org/name@", "$HOME/x", "org/name\n"],
)  # fmt: skip
def test_a_model_that_may_be_a_path_on_the_readers_machine_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"a model on the Hugging Face hub \(org/name or org/name@revision\), and"):
        write_invite(Invite((PEER,), None, model))
    with pytest.raises(ConfigError, match=r"which is not a model on the Hugging Face|damaged"):
        read_invite(sealed([None, [PEER], {"model": model}]))


def test_the_embedded_model_and_commits_are_named() -> None:
    for model in ("HuggingFaceTB/SmolLM2-135M-Instruct", f"org/name@{'a' * 40}", "org/name@refs/pr/1"):
        assert read_invite(write_invite(Invite((PEER,), KEY, model))).hub_model == f"hub:{model}"
    assert Invite((PEER,)).hub_model is None


def test_the_key_of_an_invite_is_not_printed_with_it() -> None:
    assert repr(KEY) not in repr(Invite((PEER,), KEY)) and KEY.hex() not in repr(Invite((PEER,), KEY))
