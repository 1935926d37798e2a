"""The command line's own part: help, exit statuses, errors that name the fix. Other tests cover the commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.errors import AdapterError, ConfigError, LlmnodeError, ModelError, PeerError, SwarmError, WorkerLost
from llmnode.machine.threads import usable_cores
from llmnode.node.cli import main, status_of
from llmnode.node.commands import bench
from llmnode.node.commands.options import threads
from llmnode.node.settings import NO_OPTIONS, variable_of

if TYPE_CHECKING:
    from pathlib import Path

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
FAR_PEER = PEER.replace("127.0.0.1", "203.0.113.7")
COMMANDS = [
    "demo", "serve", "relay", "generate", "chat", "status", "layout", "doctor", "invite", "verify", "config", "bench",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings file and the variables of the tests' user."""
    for name in os.environ:
        if name.startswith("LLMNODE_") and name not in NO_OPTIONS:
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLMNODE_CONFIG", os.devnull)


INTERRUPTED_IMPORT = """
import runpy, signal, sys

class Interrupting:
    def find_spec(name, *_):
        if name == "llmnode.node.cli":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting)
runpy.run_module("llmnode.node", run_name="__main__")
"""


def test_ctrl_c_ends_the_program_without_a_traceback_before_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"examples:\n  llmnode {command}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = capsys.readouterr().out
    assert all(f"\n    {command} " in listed for command in COMMANDS)


def test_commands_without_a_model_need_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Others may write this one, so that nothing is read from it."""
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o777)
    monkeypatch.setenv("LLMNODE_CACHE", str(cache))
    machines = tmp_path / "machines.csv"
    machines.write_text("host,blocks,tokens_per_s\na,4,1\n")
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert main(["layout", str(machines), "--model-blocks", "4"]) == 0
    capsys.readouterr()
    assert main(["config"]) == 2
    assert f"the cache {cache} is not safe" in capsys.readouterr().err


def test_a_benchmark_gets_every_word_after_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(words: list[str]) -> None:
        raise SystemExit(" ".join(words))

    monkeypatch.setattr(bench, "start", start)
    with pytest.raises(SystemExit, match=r"^memory --thin --json$"):
        main(["bench", "memory", "--thin", "--json"])


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ([], "are required: COMMAND (see `llmnode --help`)"),
        (["sing"], "invalid choice: 'sing'"),
        (["status", "--no-mdns"], "no peers are named: give an INVITE, or --peers ADDRESS"),
        (["chat", "--peers", PEER, "--swarm-key", "/nowhere"], "there is no swarm key /nowhere: `llmnode invite"),
        (["serve", "--mdns", "--listen", "/ip4/127.0.0.1/tcp/0"], "--mdns: nobody else reaches /ip4/127.0.0.1/tcp/0"),
        (["serve", "--swarm-key", "/dev/null"], "/dev/null is no swarm key: name another file"),
        (["relay", "--swarm-key", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["chat", "--no-mdns"], "no peers are named: give an INVITE, or --peers ADDRESS"),
        (["invite", "--peers", PEER, "--model", "/nowhere"], "is neither HuggingFaceTB/"),
        (["chat", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["generate", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["status", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["serve", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["doctor", "llmnode-invite-AAAA"], "this invite is damaged: copy the whole line"),
        (["chat", "llmnode-invit-AAAA"], "INVITE is no invite, and no file with one"),
        (["status", PEER], "addresses go after --peers"),
        (["chat", "llmnode-invite-AAAA", "--swarm-key", "FILE"], "not allowed with argument"),
        (["invite", "--swarm-key", "/proc/none/swarm.key"], "cannot write the swarm key /proc/none/swarm.key"),
        (["invite", "--swarm-key", "/nowhere", "--peers", "nonsense"], "is not the address of a peer"),
        (["serve", "--blocks", "0:5", "--kv-tokens", "many"], "argument --kv-tokens: invalid int value: 'many'"),
        (["generate", "--peers", PEER, "--prompt", "A", "--prompts", "B"], "not allowed with argument --prompt"),
        (["serve", "--blocks", "five"], "write START:END (as 0:10), a number of blocks, or auto"),
        (["serve", "--blocks", "5:5"], "write START:END"),
        (["serve", "--blocks", "0:5", "--quant", "int3"], "argument --quant: invalid choice: 'int3'"),
        (["serve", "--blocks", "0:5", "--kv-dtype", "int4"], "argument --kv-dtype: invalid choice: 'int4'"),
        (["chat", "--peers", PEER, "--kv-device", "cpu"], "unrecognized arguments: --kv-device"),
        (["generate", "--peers", PEER, "--quant", "int4"], "argument --quant: invalid choice: 'int4'"),
        (["serve", "--blocks", "0:5", "--threads", "0"], "--threads 0: give at least 1"),
        (["serve", "--blocks", "0:5", "--kv-tokens", "-1"], "--kv-tokens -1: give at least 1"),
        (["serve", "--blocks", "0:5", "--paper-rule"], "--paper-rule says when this server moves"),
        (["serve", "--blocks", "5", "--paper-rule", "nan"], "--paper-rule nan: give 0 to 1000 percent"),
        (["serve", "--blocks", "0:5", "--rebalance"], "--rebalance: a server with --blocks 0:5 stays there; give"),
        (["serve", "--blocks", "0:5", "--announce", "here"], "write where others reach you, as /ip4/ADDRESS/tcp/PORT"),
        (["relay", "--announce", "/ip4/0.0.0.0/tcp/4001"], "nobody can dial 0.0.0.0; write where others reach you"),
        (["relay", "--peers", FAR_PEER, "--announce", "here"], "write where others reach you, as /ip4/ADDRESS"),
        (["serve", "--peers", FAR_PEER, "--listen", "here"], "--listen 'here' is not a multiaddr"),
        (["demo", "--servers", "0"], "--servers 0: give at least 1"),
        (["demo", "--servers", "31"], "choose 1 to 30"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens 0: give at least 1"),
        (["generate", "--peers", "nonsense"], "is not the address of a peer"),
        (["generate", "--peers", PEER, "--temperature", "-1"], "temperature -1: give 0 or more"),
        (["generate", "--peers", PEER, "--prompts", "/nowhere"], "--prompts /nowhere: cannot be read"),
        (["generate", "--peers", PEER, "--prompts", "/dev/null"], "--prompts /dev/null: holds no prompt"),
        (["generate", "--peers", PEER, "--samples", "2"], "would all be the same: give a --temperature"),
        (["generate", "--peers", PEER, "--samples", "0"], "--samples 0: give at least 1"),
        (["generate", "--peers", PEER, "--at-once", "0"], "--at-once 0: give at least 1"),
        (["generate", "--peers", PEER, "--samples", "2", "--receipts", "/x"], "--receipts is of one session"),
        (["generate", "--peers", PEER, "--receipts", "/nowhere/x"], "make the folder /nowhere, or name another"),
        (["generate", "--peers", PEER, "--model", "/nowhere"], "is neither HuggingFaceTB/"),
        (["chat", "--peers", PEER, "--only-peers", "4ESy"], "argument --only-peers: '4ESy' is no peer id: give those"),
        (["generate", "--peers", PEER, "--not-peers", "/ip4/10.0.0.1"], "argument --not-peers: '/ip4/10.0.0.1' is not"),
        (["chat", "--peers", PEER, "--only-peers", PEER, "--not-peers", PEER[-52:]], "leave it out of one of them"),
        (["status", "--peers", PEER, "--not-peers", PEER], "unrecognized arguments: --not-peers"),
        (["plan", "MODEL", "llmnode-invite-AAAA"], "beside another argument goes after --swarm-key (see `llmnode plan"),
        (["serve", "MODEL", PEER], f"unrecognized arguments: {PEER}; addresses go after --peers (see `llmnode serve"),
        (["serve", "--bloks", "3"], "unrecognized arguments: --bloks; did you mean --blocks? (see `llmnode serve"),
        (["chat", "--peers", PEER, "--top-p", "0"], "top_p 0: give more than 0"),
        (["chat", "--peers", PEER, "--max-length", "0"], "--max-length 0: give at least 1"),
        (["config", "sing"], "there is no command 'sing': choose from demo"),
        (["doctor", "--kv-tokens", "0"], "--kv-tokens 0: give at least 1"),
        (["layout", "/nowhere", "--model-blocks", "4"], "/nowhere: cannot be read (No such file or directory)"),
        (["layout", "/nowhere", "--model-blocks", "0"], "--model-blocks 0: give at least 1"),
        (["layout", "/nowhere"], "are required: --model-blocks (see `llmnode layout --help`)"),
        (["layout", "/nowhere", "--modelblocks", "4"], "arguments: --modelblocks 4; did you mean --model-blocks?"),
        (["layout", "/nowhere", "--model_blocks=4"], "arguments: --model_blocks=4; did you mean --model-blocks?"),
        (["layout", "--blocks", "4"], "unrecognized arguments: --blocks; did you mean --model-blocks?"),
        (["layout"], "are required: FILE, --model-blocks (see `llmnode layout --help`)"),
        (["layout", "/nowhere", "--model-blocks", "eighty"], "argument --model-blocks: invalid int value: 'eighty'"),
        (["layout", "/nowhere", "--model-blocks"], "argument --model-blocks: expected one argument"),
        (["verify", "--jsn"], "unrecognized arguments: --jsn; did you mean --json? (see `llmnode verify --help`)"),
        (["verify"], "are required: FILE (see `llmnode verify --help`)"),
        (["verify", "/nowhere"], "/nowhere: cannot be read (No such file or directory): name a file that `llmnode"),
        (["verify", "/"], "/: cannot be read (Is a directory)"),
        (["verify", "/dev/null"], "name a file that `llmnode generate --receipts FILE` or a session has written"),
        (
            ["verify", "/dev/zero"],
            "/dev/zero: has more than 16777216 bytes, which is the most: name a file that `llmnode generate",
        ),
    ],
)
def test_a_wrong_argument_is_one_line_that_names_the_fix(
    arguments: list[str], fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    *notes, line = capsys.readouterr().err.splitlines()
    assert line.startswith("llmnode: ")
    assert fix in line
    assert all(note.startswith("llmnode: converting ") for note in notes), "which is done once on a machine"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("no such flag"), 2),
        (ModelError("a folder without config.json"), 2),
        (AdapterError("an adapter for another model"), 2),
        (PeerError("it is silent"), 1),
        (SwarmError("nobody has block 3"), 1),
        (WorkerLost("out of memory"), 1),
    ],
)
def test_an_error_that_the_user_can_fix_has_a_status_of_its_own(error: LlmnodeError, status: int) -> None:
    def fail() -> int:
        raise error

    assert status_of(fail) == status


@pytest.mark.parametrize("content", [{}, {"config.json": "{}"}, {"config.json": "no JSON"}])
def test_a_folder_that_is_no_model_is_for_the_user_to_fix(
    content: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    for arguments in (["speed", str(tmp_path)], ["generate", "--peers", PEER, "--model", str(tmp_path)]):
        assert main(arguments) == 2
        assert str(tmp_path) in capsys.readouterr().err.splitlines()[-1]


def test_more_threads_than_cores_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    cores = usable_cores()
    for asked in (None, cores):
        assert threads(Namespace(threads=asked)) == asked
    assert capsys.readouterr().err == ""
    assert threads(Namespace(threads=cores + 1)) == cores + 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--threads {cores + 1} is more than the cores that this process may use ({cores})" in line


def test_a_warning_is_told_once_whatever_libraries_log() -> None:
    program = (
        "import logging; from llmnode.node.commands.options import log_to_stderr\n"
        "log_to_stderr(logging.WARNING, '%(message)s')\n"
        "logging.debug('as py-libp2p does')\n"
        "logging.getLogger('llmnode.session.session').warning('waiting')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "llmnode: waiting\n"


def _config(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:  # Any: JSON
    assert main(["config", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_no_option_has_the_variable_of_something_else(capsys: pytest.CaptureFixture[str]) -> None:
    options = {name for of in _config(capsys)["commands"].values() for name in of}
    assert {"kv-tokens", "model", "peers", "listen", "json"} <= options
    assert not NO_OPTIONS & {variable_of(name) for name in options}


def test_config_tells_where_each_option_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("threads = 3\n[serve]\nlisten = ['/ip4/0.0.0.0/tcp/4001']\n")
    monkeypatch.setenv("LLMNODE_CONFIG", str(file))
    monkeypatch.setenv("LLMNODE_CACHE", "/the/cache")
    monkeypatch.setenv("LLMNODE_KV_TOKENS", "7")
    monkeypatch.setenv("LLMNODE_KVTOKENS", "8")
    shown = _config(capsys, "serve")
    assert shown["file"] == {"path": str(file), "exists": True}
    assert shown["cache"] == "/the/cache"
    assert shown["unknown_variables"] == ["LLMNODE_KVTOKENS"]
    assert list(shown["commands"]) == ["serve"]
    serve = shown["commands"]["serve"]
    assert serve["listen"] == {"value": ["/ip4/0.0.0.0/tcp/4001"], "source": "file", "place": str(file)}
    assert serve["threads"] == {"value": 3, "source": "file", "place": str(file)}
    assert serve["kv-tokens"] == {"value": 7, "source": "environment", "place": "LLMNODE_KV_TOKENS"}
    assert serve["verbose"] == {"value": False, "source": "default", "place": None}

    assert main(["config", "serve"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"file {file}" in lines
    assert f"listen /ip4/0.0.0.0/tcp/4001 file {file}" in lines
    assert "kv-tokens 7 environment LLMNODE_KV_TOKENS" in lines
    assert "warning: no option is set by LLMNODE_KVTOKENS" in lines


def test_an_invite_is_not_shown_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invite", "--swarm-key", str(tmp_path / "swarm.key"), "--peers", PEER]) == 0
    invite = capsys.readouterr().out.strip()
    monkeypatch.setenv("LLMNODE_SWARM_KEY", invite)
    assert _config(capsys, "serve")["commands"]["serve"]["swarm-key"]["value"] == "llmnode-invite-..."
    assert main(["config", "serve"]) == 0
    assert invite not in capsys.readouterr().out


def test_a_command_is_run_with_its_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMNODE_PEERS", "nonsense")
    assert main(["chat"]) == 2
    assert "'nonsense' is not the address of a peer" in capsys.readouterr().err


def test_an_error_in_the_file_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my.toml"
    file.write_text("kv-tokenz = 3\n")
    monkeypatch.setenv("LLMNODE_CONFIG", str(file))
    assert main(["serve", "--blocks", "0:1"]) == 2
    expected = f"llmnode: {file}: no command has the option 'kv-tokenz'; did you mean 'kv-tokens'?"
    assert capsys.readouterr().err.splitlines() == [expected]
