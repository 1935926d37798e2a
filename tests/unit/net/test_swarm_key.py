"""Keys of private swarms: in files and invites, right and wrong; and that strangers cannot link with members."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import LinkPolicy
from llmnode.errors import ConfigError, PeerUnreachable, single_error
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.net.invite import KEY_BYTES, Invite, write_invite
from llmnode.net.swarm_key import entry, make_key, read_key

if TYPE_CHECKING:
    from pathlib import Path

KEY, OTHER = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
PEER = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWKpvmGGLEexnXcwVTK1arfQUgcW9Zz8iWam5sDLFREniY"


def test_a_key_is_made_once_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "swarm.key"
    key = make_key(path)
    assert read_key(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="cannot write the swarm key"):
        make_key(path)
    assert read_key(path) == key


def test_the_key_files_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.write_bytes(b"/key/swarm/psk/1.0.0/\n/base16/\n" + KEY.hex().upper().encode())
    path.chmod(0o600)
    assert read_key(path) == KEY


@pytest.mark.parametrize(
    "content",
    [b"", b"/key/swarm/psk/1.0.0/\n/base16/\n", b"x" * 5000, KEY, b"/key/swarm/psk/1.0.0/\n/base64/\n" + b"0" * 64,
     b"/key/swarm/psk/1.0.0/\n/base16/\n" + b"0" * 62, b"/key/swarm/psk/1.0.0/\n/base16/\n" + b"\xff" * 64],
)  # fmt: skip
def test_a_file_that_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "swarm.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is no swarm key"):
        read_key(path)


def test_a_file_that_is_not_there_open_to_others_or_a_folder_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    with pytest.raises(ConfigError, match="makes one"):
        entry([], path)
    make_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        entry([], str(path))
    os.chmod(tmp_path, 0o700)
    with pytest.raises(ConfigError, match=r"the swarm key .*: cannot be read \(Is a directory\)"):
        entry([], tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\xff\xfe\x00", b"x" * 100_000])
def test_a_file_that_others_may_read_and_that_is_no_key_is_called_so_first(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    path.chmod(0o644)
    with pytest.raises(ConfigError) as refused:
        read_key(path)
    assert "chmod" not in str(refused.value)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_key_that_others_may_read_is_refused_also_in_an_invite_and_an_invite_without_one_is_not(
    tmp_path: Path, encoding: str
) -> None:
    path, open_one = tmp_path / "invite", Invite((PEER,))
    path.write_text(write_invite(open_one), encoding)
    path.chmod(0o644)
    assert entry([], path) == open_one
    key = f"/key/swarm/psk/1.0.0/\n/base16/\n{KEY.hex()}"
    for text in (write_invite(Invite((PEER,), KEY)), key, key[:-1]):
        path.write_text(text, encoding)
        with pytest.raises(ConfigError, match="chmod 600"):
            entry([], path)


def test_an_invite_adds_its_peers() -> None:
    invited = entry([PEER, "a"], write_invite(Invite(("b", PEER), KEY)))
    assert (invited.peers, invited.key) == ((PEER, "a", "b"), KEY)
    assert entry([PEER], None) == entry((PEER,), None)
    assert KEY.hex() not in repr(invited)
    assert repr(KEY) not in repr(invited)


@pytest.mark.parametrize(("theirs", "ours"), [(KEY, OTHER), (KEY, None), (None, KEY)], ids=["other", "none", "public"])
def test_who_has_another_key_or_none_cannot_link(theirs: bytes | None, ours: bytes | None) -> None:
    async def main() -> None:
        async with (
            open_network([LISTEN_ANY_LOOPBACK], LinkPolicy(), swarm_key=theirs) as member,
            open_network([], LinkPolicy(), swarm_key=ours) as stranger,
            open_network([], LinkPolicy(), swarm_key=theirs) as other,
        ):
            with pytest.raises(PeerUnreachable, match="swarm key"):
                await stranger.dial(member.addresses[0])
            link = await other.dial(member.addresses[0])  # the member goes on
            assert link.peer == member.peer

    async def alone() -> None:
        with single_error(), trio.fail_after(20):
            await main()

    trio.run(alone)
