"""An invite and the key of a private swarm, both of which a command or a program may be given: neither is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import llmnode
from llmnode.errors import ConfigError
from llmnode.net.invite import KEY_BYTES, Invite, write_invite
from llmnode.net.swarm_key import entry, make_key
from llmnode.node import Node, cli
from llmnode.node.commands import serve
from llmnode.node.commands.joining import model_and_way_in, way_in
from llmnode.node.commands.options import access, worker_config
from llmnode.node.settings import parse
from unit.in_trio import in_trio

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

ID = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
PEER, OTHER = f"/ip4/127.0.0.1/tcp/1/p2p/{ID}", f"/ip4/127.0.0.1/tcp/2/p2p/{ID}"
KEY = bytes(range(KEY_BYTES))
OPEN, PRIVATE = write_invite(Invite((PEER,), None, "org/name")), write_invite(Invite((PEER,), KEY, "org/name"))
POSITIONAL = ["chat", "generate", "status", "relay"]
WITH_MODEL = ["serve", "doctor"]


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    make_key(path := tmp_path / "swarm.key")
    return path


def parsed(*argv: str, **environ: str) -> argparse.Namespace:
    return parse(*cli._parser(), argv, {"LLMNODE_CONFIG": "/dev/null", **environ})


def found(*argv: str, **environ: str) -> Invite:
    arguments = parsed(*argv, **environ)
    return model_and_way_in(arguments)[1] if argv[0] in WITH_MODEL else way_in(arguments)


@pytest.mark.parametrize("command", POSITIONAL + WITH_MODEL)
@pytest.mark.parametrize("invite", [OPEN, PRIVATE])
def test_an_invite_and_a_key_on_the_command_line_are_refused(command: str, invite: str, key_file: Path) -> None:
    with pytest.raises(ConfigError, match="--swarm-key: not allowed with argument INVITE"):
        found(command, invite, "--swarm-key", str(key_file))


@pytest.mark.parametrize("command", POSITIONAL + WITH_MODEL)
def test_an_invite_without_a_key_takes_that_of_the_settings(
    command: str, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = entry((), key_file).key
    assert kept is not None
    assert found(command, OPEN, LLMNODE_SWARM_KEY=str(key_file)) == Invite((PEER,), kept, "org/name")
    both = found(command, OPEN, LLMNODE_SWARM_KEY=write_invite(Invite((OTHER,), KEY)))
    assert both == Invite((PEER, OTHER), KEY, "org/name")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", POSITIONAL + WITH_MODEL)
def test_an_invite_with_a_key_goes_before_the_settings_and_says_so(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert found(command, PRIVATE, LLMNODE_SWARM_KEY="/nowhere") == Invite((PEER,), KEY, "org/name")
    told = capsys.readouterr().err
    assert told == "llmnode: the invite has the key of its swarm: swarm-key of the settings is not used\n"
    assert found(command, PRIVATE, LLMNODE_SWARM_KEY=PRIVATE).key == KEY
    assert capsys.readouterr().err == "", "they are the same"


@pytest.mark.parametrize(("command", "variable"), [("status", "LLMNODE_INVITE"), ("serve", "LLMNODE_MODEL")])
def test_a_key_on_the_command_line_goes_before_an_invite_of_the_settings(
    command: str, variable: str, key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = found(command, "--swarm-key", str(key_file), "--peers", OTHER, **{variable: PRIVATE})
    assert ours.key not in (None, KEY)
    assert ours.peers == (OTHER,)
    assert "--swarm-key has the key of its swarm: the invite of the settings is not used" in capsys.readouterr().err


@pytest.mark.parametrize("command", POSITIONAL + WITH_MODEL)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_file_with_an_invite_stands_for_it(command: str, encoding: str, tmp_path: Path) -> None:
    """`llmnode invite` says to give commands a file: a command line stands in the list of processes."""
    (file := tmp_path / "invite").write_bytes(f"{PRIVATE}\n".encode(encoding))
    file.chmod(0o600)
    assert found(command, str(file)) == Invite((PEER,), KEY, "org/name")
    if command in WITH_MODEL:
        assert model_and_way_in(parsed(command, str(file)))[0] == "hub:org/name"


@pytest.mark.parametrize("content", [b"GGUF" + bytes(100), b"x" * 200_000, b"", b"\xff\xfe\x00"])
def test_any_other_file_stays_the_name_of_a_model(content: bytes, tmp_path: Path) -> None:
    (file := tmp_path / "model.gguf").write_bytes(content)
    for name in (str(file), str(tmp_path), "org/name", "a" * 5000):
        assert model_and_way_in(parsed("serve", name)) == (name, Invite(()))


@pytest.mark.parametrize("text", ["nonsense", PRIVATE[1:], PRIVATE[1:] * 9], ids=["short", "cut", "long"])
def test_an_argument_that_is_no_invite_and_no_possible_name_of_a_file_is_told_so(text: str) -> None:
    with pytest.raises(ConfigError, match="INVITE is no invite, and no file with one") as caught:
        way_in(parsed("chat", text))
    assert text not in str(caught.value), "it may have a key"


def test_a_server_has_the_key_and_the_model_that_were_found(key_file: Path) -> None:
    config = worker_config(parsed("serve", OPEN, "--peers", OTHER, LLMNODE_SWARM_KEY=str(key_file)))
    joined = entry(config.peers, config.swarm_key)
    assert (joined.peers, joined.key) == ((OTHER, PEER), entry((), key_file).key)
    assert config.model == "hub:org/name", "never a folder of this machine"
    assert worker_config(parsed("serve", "FOLDER", "--swarm-key", PRIVATE)).model == "FOLDER", "it goes before"
    assert worker_config(parsed("speed", OPEN)).model == "hub:org/name", "which joins nothing"
    assert access(parsed("chat", OPEN)).model == "hub:org/name"
    assert model_and_way_in(parsed("doctor", OPEN))[0] == "hub:org/name"
    with pytest.raises(ConfigError, match="not allowed with argument INVITE"):
        serve.run(parsed("serve", OPEN, "--swarm-key", str(key_file)))


@in_trio
async def test_a_program_that_gives_an_invite_and_a_key_is_refused(key_file: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        async with Node(OPEN, swarm_key=key_file):
            pass
    for given in (OPEN, Invite((PEER,))):
        with pytest.raises(ConfigError, match="leave one of them out"):
            async with llmnode.aconnect(given, swarm_key=key_file):
                pass


def test_connect_drops_neither_an_invite_nor_a_key(key_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        llmnode.connect(OPEN, swarm_key=key_file)
    with pytest.raises(ConfigError, match="leave one of them out"):
        llmnode.resume(tmp_path, OPEN, swarm_key=key_file)
    with pytest.raises(ConfigError, match="leave one of them out"):
        llmnode.connect(OPEN, peers=PRIVATE)


def test_one_address_may_stand_for_the_peers() -> None:
    assert entry(PEER) == entry([PEER]) == Invite((PEER,))
    assert entry(PRIVATE) == entry((), PRIVATE) == entry(Invite((PEER,), KEY, "org/name"))
    with pytest.raises(ConfigError, match="'nonsense' is not the address of a peer"):
        llmnode.connect(peers="nonsense")
    for peers in ([], [PEER]):  # which would be those of `aconnect`: nobody else is looked for
        with pytest.raises(ConfigError, match="write peers="):
            llmnode.connect(peers)  # type: ignore[arg-type]  # that is the point
