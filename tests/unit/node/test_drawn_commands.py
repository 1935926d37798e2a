"""Drawn command lines, settings, files and terminals: for all of them the program ends with a status and a sentence.

`LLMNODE_SEEDS=20000` draws more. Code that needs a swarm is replaced at the edge: by a client that says the same few
tokens (`canned.py`), and by a network that cannot be joined.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from llmnode.errors import ConfigError, PeerUnreachable
from llmnode.node import app, cli, connect_options, doctor
from llmnode.node.commands import bench
from llmnode.node.settings import options_of, variable_of, without_settings
from llmnode.testing import seeds
from unit.canned import FAIL, INTERRUPT, REFUSED, CannedClient, canned_tokenizer, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from llmnode.models.text.tokenizer import Tokenizer

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
OPTIONS = {command: options_of(parser) for command, parser in cli._parser()[1].items()}
NAMES = sorted({name for of in OPTIONS.values() for name in of})
CHOICES = {name: option.action.choices or () for of in OPTIONS.values() for name, option in of.items()}
GOOD = {
    "prompt": ["hi", FAIL, INTERRUPT, REFUSED, "", "é\u2028"],
    "prompts": ["prompts.txt", "utf16.txt", "latin1.txt", "nul.txt"],
    "temperature": ["0", "0.8"], "top-p": ["0.5"], "seed": ["3"],
    "samples": ["2"], "at-once": ["3"], "max-length": ["40"],
    "max-new-tokens": ["3", "1", "70"], "receipts": ["receipts.json"], "peers": [PEER], "blocks": ["0:2", "auto", "2"],
    "swarm-key": ["key"], "identity": ["identity", "new"], "kv-tokens": ["64"], "drain-s": ["1"], "threads": ["1"],
    "listen": ["/ip4/127.0.0.1/tcp/0"], "hub": ["org/name", "hub:org/name"],
    "only-peers": [PEER[-52:], PEER], "not-peers": [PEER[-52:]],
}  # fmt: skip
SWITCHES = ["json", "chat", "verbose"]

# Files with all kinds of content, by name. Each option that takes a file may be given any of them.
TOML = b"kv-tokens = 5\n[chat]\ntemperature = 0.5\n"
FILES = {
    "prompts.txt": "one\r\ntwo\u2028too\r\n\r\n".encode(),
    "utf16.txt": "één\n".encode("utf-16"),
    "latin1.txt": "één\n".encode("latin-1"),
    "nul.txt": b"a\0b\n",
    "empty": b"",
    "key": b"/key/swarm/psk/1.0.0/\r\n/base16/\r\n" + b"ab" * 32,
    "identity": b"i" * 32,
    "deep.json": b"[" * 100_000,
    "long.txt": b"x" * 200_000,
}
PATHS = [
    *FILES, ".", "missing", "missing/file", "/dev/null", "~", "~/x", "~nobody-here/x", "$HOME/x", "$NOT_SET/x", "-", "",
    " ", "a" * 5000, "caf\udce9", "é\u2028好", "./a b", "/proc/self/mem", "/", "llmnode-invite-AAAA", "org/name",
]  # fmt: skip
WORDS = [
    "", "0", "1", "-1", "2", "5:5", "0:2", "9" * 5000, "1" + "0" * 30, "1e400", "nan", "inf", "-inf", "0.5", "1e-300",
    "٣", "1_000", "true", "auto", "cpu", "cuda:99", "no such device", "20%", "2GiB", "int8", "\udcff", "é好", "\u2028",
    "a\nb", "-", "--", "-h", "--help", "@file", "%s", "{}", "\x1b[31m", PEER, "nonsense", "/ip4/0.0.0.0/tcp/99999",
    FAIL, INTERRUPT, REFUSED, "x" * 100, "/dns/" + "a" * 300,
]  # fmt: skip
RIGHT = {
    "demo": [], "serve": ["--blocks", "0:2"], "relay": [], "generate": ["--peers", PEER], "chat": ["--peers", PEER],
    "status": ["--peers", PEER], "doctor": [], "invite": ["--swarm-key", "key"], "verify": ["empty"], "config": [],
    "bench": ["swarm"], "speed": ["--blocks", "0:2"], "plan": ["--peers", PEER], "adapters": ["--peers", PEER],
    "layout": ["empty", "--model-blocks", "8"],
}  # fmt: skip


LITERALS = [
    "1", "-1", "0.5", "nan", "inf", "true", "'text'", "''", "'~/x'", "'$HOME/x'", "'$NOT_SET'", '"\\u0000"', "[]",
    "['a', 'b']", "[1]", "[[1], ['a']]", "{a = 1}", "1979-05-27", "07:32:00", "0x" + "f" * 5000, "1" + "0" * 400,
    "'''\na\nb'''", "'é\u2028好'", "[" * 3000, "'cpu'", "'float32'", f"['{PEER}']", "= =", "",
]  # fmt: skip
ENCODINGS: list[Callable[[str], bytes]] = [
    str.encode,
    lambda text: text.encode("utf-8-sig"),
    lambda text: text.encode("utf-16"),
    lambda text: text.replace("\n", "\r\n").encode(),
    lambda text: text.replace("\n", "\r").encode(),
    lambda text: text.encode("utf-16-le"),
    lambda text: text.encode("latin-1", "replace"),
]


VARIABLES = ["LLMNODE_CACHE", "LLMNODE_OFFLINE", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "COLUMNS", "TERM", "HOME"]
STDINS = [
    None, b"", b"hi\n", b"hi", b"\xff\nhi\n", b"a\0b\nhi\n", "hi\n".encode("utf-16"), b"one\rtwo\r",
    b"hi\\\nyou\r\n/reset\n/x\n/quit\nno\n", f"{FAIL}\n{INTERRUPT}\n{REFUSED}\nhi\n".encode(), b"x" * 9000 + b"\n",
    b"x" * 2_000_000 + b"\nhi\n",
]  # fmt: skip
CONFIGS: list[dict[str, Any]] = [
    {}, {"do_sample": True, "temperature": 0.6, "top_k": 3}, {"do_sample": True, "temperature": 2}, {"top_p": 0.5},
    {"do_sample": True, "temperature": 0}, {"eos_token_id": [0, 5]}, {"eos_token_id": None}, {"num_beams": 4},
    {"repetition_penalty": 1.1, "min_p": 0.1}, {"do_sample": "perhaps"}, {"stop_strings": ["x"]},
    {"do_sample": True, "temperature": "hot"}, {"do_sample": True, "top_k": -1}, {"do_sample": True, "top_p": [1]},
]  # fmt: skip


class Drawn(random.Random):
    """Draws the actions of a user from a seed."""

    def often(self) -> bool:
        return self.random() < 0.85

    def seldom(self) -> bool:
        return self.random() < 0.06

    def value(self, name: str) -> str:
        """Mostly a value that the option accepts."""
        right = GOOD.get(name, []) + [str(each) for each in CHOICES.get(name, ())]
        if right and self.random() < 0.6:
            return self.choice(right)
        kinds = [WORDS, PATHS, [str(self.randint(-5, 5000))], ["".join(map(chr, self.choices(range(1, 0xD800), k=6)))]]
        return self.choice(self.choice(kinds))

    def command_line(self) -> list[str]:
        """Mostly a command that would work, with some options of its own or of other commands."""
        if self.seldom():
            return [self.value("") for _ in range(self.randrange(4))]
        command = self.choice([*OPTIONS, *4 * ["generate", "chat"]])
        line = [command, *(RIGHT[command] if self.often() else [])]
        for _ in range(self.randrange(4)):
            name = self.choice([*OPTIONS[command]] if OPTIONS[command] and self.often() else NAMES)
            flag = f"--no-{name}" if self.seldom() else f"--{name}"
            if self.seldom():
                line.append(f"{flag}={self.value(name)}")
            elif (name in SWITCHES and self.often()) or self.seldom():
                line.append(flag)
            else:
                line += [flag, self.value(name)]
        if self.seldom():
            line.insert(self.randrange(len(line) + 1), self.value(""))
        return line

    def toml(self) -> bytes:
        if self.often():
            return self.choice([TOML, b""])
        lines = [f"[{self.choice([*OPTIONS, 'nonsense', '[serve]', ''])}]"] if self.seldom() else []
        for _ in range(self.randrange(1, 4)):
            name = self.choice(NAMES) if self.often() else self.choice(["nonsense", "", "a.b", "serve"])
            lines.append(f"{name.replace('-', self.choice('-_'))} = {self.choice(LITERALS)}")
        content = self.choice(ENCODINGS)("\n".join(lines))
        return content if self.often() else content + self.choice([b"\xff", b"\0"])

    def environment(self) -> dict[str, str]:
        named = [self.choice([*NAMES, *3 * SWITCHES]) for _ in range(self.randrange(3))] if self.seldom() else []
        drawn = {variable_of(name): self.value(name) for name in named}
        if self.seldom():
            drawn[self.choice(VARIABLES)] = self.value("")
        return {name: value.replace("\0", "") for name, value in drawn.items()}


def nobody_near(*_args: Any, **_kwargs: Any) -> Any:
    raise ConfigError("nobody is near")


def unreachable(*_args: Any, **_kwargs: Any) -> Any:
    raise PeerUnreachable("there is no network here")


@asynccontextmanager
async def no_network(*_args: Any, **_kwargs: Any) -> AsyncIterator[Any]:
    unreachable()
    yield


@asynccontextmanager
async def no_blocks(*_args: Any, **_kwargs: Any) -> AsyncIterator[Any]:
    raise ConfigError("there are no blocks here")
    yield


async def diagnose_nothing(_doctor: Any) -> None:
    """Loading torch and the model would take seconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, with the files; nothing leads out of this process."""
    folder = tmp_path_factory.mktemp("drawn")
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(
            patch.dict(os.environ, {**without_settings(os.environ), "HOME": str(folder), "NO_COLOR": "1"}, clear=True)
        )
        enter(patch.object(app, "_joined", no_network))
        enter(patch.object(app, "open_source", no_blocks))
        enter(patch("llmnode.swarm.join.join_swarm", no_network))
        enter(patch("llmnode.node.nearby.find_swarm", nobody_near))
        enter(patch("llmnode.node.inviting.find_nearby", nobody_near))
        enter(patch("llmnode.models.sources.hub_list.adapters_on_hub", nobody_near))
        enter(patch("llmnode.node.demo.private_swarm", no_network))
        enter(patch("llmnode.node.demo._load_parts", lambda _threads: None))
        enter(patch.object(doctor, "diagnose", diagnose_nothing))
        enter(patch.object(bench, "start", unreachable))
        yield folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return canned_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def put_files(folder: Path, config: bytes) -> None:
    for name, content in {**FILES, "config.toml": config}.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)


def found_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


class Ended:
    """The results of a run of the program: its status, its output, and new files on the disk."""

    def __init__(self, line: list[str], encoding: str, stdin: bytes | None, model: Any) -> None:
        out, err = io.BytesIO(), io.BytesIO()
        given = None if stdin is None else io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin)), encoding=encoding)
        before = found_in(Path.cwd())
        with (
            patch.object(sys, "stdin", given),
            patch.object(sys, "stdout", io.TextIOWrapper(out, encoding=encoding)),
            patch.object(sys, "stderr", io.TextIOWrapper(err, encoding=encoding, errors="backslashreplace")),
            patch.object(connect_options.Access, "open", lambda _self: opened(model())),
            patch.object(connect_options.Access, "generation_config", lambda _self: model().generation_config),
        ):
            try:
                self.status: Any = cli.main(line)
            except SystemExit as ended:
                self.status = ended.code
            sys.stdout.flush()
            sys.stderr.flush()
            self.out, self.err = out.getvalue().decode(encoding), err.getvalue().decode(encoding)
        self.made = found_in(Path.cwd()) - before


@pytest.mark.parametrize("seed", seeds(250))
def test_whatever_is_given_the_program_ends_with_a_sentence(seed: int, place: Path, tokenizer: Tokenizer) -> None:
    drawn = Drawn(seed)
    line, config, environment = drawn.command_line(), drawn.toml(), drawn.environment()
    encoding, stdin = drawn.choice(["utf-8", "utf-8", "ascii", "cp1252"]), drawn.choice(STDINS)
    model = partial(CannedClient, tokenizer, **drawn.choice(CONFIGS))
    print(f"{line} {config!r} {environment} {encoding} {stdin and stdin[:99]!r}")
    threads = set(threading.enumerate())
    with tempfile.TemporaryDirectory(dir=place) as temporary, pytest.MonkeyPatch.context() as patched:
        patched.chdir(temporary)
        put_files(Path(temporary), config)
        for name, value in {"LLMNODE_CONFIG": "config.toml", **environment}.items():
            patched.setenv(name, value)
        ended = Ended(line, encoding, stdin, model)
    assert ended.status in (0, 1, 2, 130)
    assert "Traceback" not in ended.err
    last = (ended.err.split("\n")[:-1] or [""])[-1]
    assert ended.err == "" or ended.err.endswith("\n")
    if ended.status:
        assert last.startswith("llmnode: ") or (ended.status == 1 and line[0] in ("status", "verify", "doctor"))
    else:
        assert ended.out or line[0] in ("chat",)
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith("Trio thread"):  # it is idle: trio keeps it for later
            continue
        thread.join(timeout=5)  # a spinner's thread ends soon after its spinner
        assert not thread.is_alive()
    made = ended.made if ended.status else {each for each in ended.made if line[0] not in ("invite", "generate")}
    assert not made


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ([b"--help"], 0),
        ([b"generate", b"--prompt", b"\xff"], 2),
        ([b"generate", b"--prompts", b"\xff"], 2),
        ([b"verify", b"\xff"], 2),
        ([b"config", b"--", b"--help"], 2),
    ],
)
def test_so_does_a_process(line: list[bytes], status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "llmnode.node", *line],
        capture_output=True,
        check=False,
        env=without_settings(os.environ),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == status
    assert done.stderr.startswith(b"llmnode: ") == bool(status)
    assert done.stderr.count(b"\n") == bool(status)
