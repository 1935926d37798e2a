"""The peer id alone names the signer, whatever id a peer claims; and the file of a node's own key."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto import ed25519, secp256k1
from libp2p.peer.id import ID

from llmnode.core.ids import PeerId
from llmnode.errors import ConfigError
from llmnode.net.identity import is_signed, open_identity

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
    """Else a banned peer would come back under another spelling, with the same key."""
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


def test_a_file_is_for_one_node_at_a_time_and_free_after_it(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with open_identity(path) as first:
        with (
            pytest.raises(ConfigError, match=r"is in use by this program .* another --identity FILE"),
            open_identity(path),
        ):
            pass
        copy = shutil.copy2(path, tmp_path / "copy.key")
        with open_identity(Path(copy)) as second:
            assert second == first, "of a copy only the swarm can tell"
    with open_identity(path) as again:
        assert again == first


def test_a_new_identity_is_told_with_its_path_and_one_that_was_there_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "no" / "such" / "node.key"
    with open_identity(path):
        (told,) = caplog.records
        assert f"made a new identity, kept in {path}" in told.getMessage()
    with open_identity(path):
        assert len(caplog.records) == 1


def test_who_else_uses_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    code = (
        "import sys; from pathlib import Path; from llmnode.net.identity import open_identity\n"
        "with open_identity(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-P", "-c", code, str(path)], text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        named = f"process {other.pid}" if sys.platform == "linux" else "another process"
        with pytest.raises(ConfigError, match=f"is in use by {named} on this machine"), open_identity(path):
            pass
        other.kill()
    with open_identity(path):
        pass


def test_a_folder_that_is_only_read_will_do(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    with open_identity(path):
        pass
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    with open_identity(path):
        assert list(tmp_path.iterdir()) == [path], "nothing is left beside a key"


def test_where_the_file_system_has_no_locks_a_node_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with open_identity(tmp_path / "node.key") as one, open_identity(tmp_path / "node.key") as other:
        assert one == other


def test_what_cannot_be_an_identity_is_told_and_how_to_mend_it(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 31)
    (tmp_path / "short").chmod(0o600)
    (tmp_path / "open").write_bytes(b"x" * 32)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "file").touch()
    for path, words in {
        tmp_path / "short": "is no identity: name another file, or remove it",
        tmp_path / "open": "can be read by others: `chmod 600",
        tmp_path / "file" / "node.key": "Not a directory",
        tmp_path: "Is a directory",
    }.items():
        with pytest.raises(ConfigError, match=words), open_identity(path):
            pass


def test_a_disk_that_is_full_leaves_no_half_of_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.key"

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("llmnode.net.identity.create_new_key_pair", fail)
        with pytest.raises(ConfigError, match="No space left on device"), open_identity(path):
            pass
    with open_identity(path):
        pass
