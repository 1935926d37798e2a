"""Stdin, stdout and stderr of every kind: closed, full, broken, of another encoding, a terminal."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from rich.table import Table
from rich.text import Text

from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError
from llmnode.node import terminal
from llmnode.node.settings import without_settings
from llmnode.node.terminal import (
    CannotPrint,
    Pieces,
    note,
    open_console,
    require_stdout,
    say,
    show,
    show_json,
    tell,
)
from llmnode.node.typed import MOST_CHARS, NoLine, TypedLines
from unit.streams import streams
from unit.terminal_emulator import Terminal

if TYPE_CHECKING:
    pass

LLMNODE = [sys.executable, "-P", "-m", "llmnode.node"]


class Failing(io.StringIO):
    """A stream that takes nothing."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))

    def write(self, _text: str) -> int:
        raise self._error


def written(encoding: str, text: str) -> str:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding=encoding)
    with streams(stdout, io.StringIO()):
        sys.stdout.write(text)
        sys.stdout.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", "é好\\u2028\\udcff"), ("ascii", "\\xe9\\u597d\\u2028\\udcff"), ("cp1252", "é\\u597d\\u2028\\udcff")],
)
def test_what_an_encoding_has_not_is_escaped(encoding: str, shown: str) -> None:
    assert written(encoding, "é好\u2028\udcff") == shown


def test_an_error_begins_a_line() -> None:
    out, err = io.StringIO(), io.StringIO()
    with streams(out, err):
        print("Once upon", end="")
        say("it failed")
        print("text", end="", file=sys.stderr)
        say("again")
        print("whole")
        say("and again")
    assert out.getvalue() == "Once upon\nwhole\n"
    assert err.getvalue() == "llmnode: it failed\ntext\nllmnode: again\nllmnode: and again\n"


def test_what_only_moves_the_cursor_begins_no_line() -> None:
    err = io.StringIO()
    with streams(io.StringIO(), err):
        console = open_console(stderr=True, force_terminal=True)
        console.print("a table")
        console.show_cursor()
        say("it failed")
    assert err.getvalue() == "a table\n\x1b[?25hllmnode: it failed\n"


def test_a_warning_leaves_an_answer_alone_that_goes_elsewhere() -> None:
    out, err = io.StringIO(), io.StringIO()
    with streams(out, err):
        print("Once upon", end="")
        tell("waiting")
        print(" a time")
    assert out.getvalue() == "Once upon a time\n"
    with patch.object(terminal, "_are_one_place", lambda *_streams: True), streams(both := io.StringIO(), both):
        print("Once upon", end="")
        tell("waiting")
    assert both.getvalue() == "Once upon\nllmnode: waiting\n"


def test_stderr_may_fail_and_stdout_may_not() -> None:
    with streams(Failing(errno.ENOSPC), Failing(errno.EPIPE)):
        say("nobody hears this")
        with pytest.raises(CannotPrint, match=r"cannot write to stdout \(No space left on device\)"):
            print("x")
    with streams(Failing(errno.EPIPE), None), pytest.raises(BrokenPipeError):
        print("x")


def test_a_stdout_that_is_closed_is_told_at_once() -> None:
    err = io.StringIO()
    with streams(None, err):
        with pytest.raises(CannotPrint, match="it is closed"):
            require_stdout()
        print("lost")
        print("seen", file=sys.stderr)
    assert err.getvalue() == "seen\n"
    with streams(io.StringIO(), None):
        require_stdout()
        print("nowhere", file=sys.stderr)


HOSTILE = "a\x1b]0;OWNED\x07\x1b[31m\x9b2J\r\x1b]52;c;eA==\x1b\\\u202e\nllmnode: ready"


def test_nothing_that_is_written_steers_the_terminal() -> None:
    with streams(out := io.StringIO(), err := io.StringIO()):
        show(HOSTILE)
        note(HOSTILE)
        tell(HOSTILE)
        for stream in (sys.stdout, sys.stderr):
            print(HOSTILE, file=stream)  # as a library does
        answer = Pieces()
        for piece in (*HOSTILE, *"👨\u200d👩\n"):
            answer.write(piece)
    terminal = Terminal()
    terminal.feed(out.getvalue() + err.getvalue())
    assert terminal.obeyed == [] and "\u202e" not in terminal.shown
    assert out.getvalue().endswith("llmnode: ready👨\u200d👩\n"), "a joiner may begin a piece"
    assert f"llmnode: {printable(HOSTILE)}\n" in err.getvalue()


def test_json_is_exact_and_obeyed_by_no_terminal() -> None:
    every = "".join(map(chr, [*range(0x100), 0x202E, 0x200D, 0xD800, 0x1F468, 0xE0041]))
    with streams(out := io.StringIO(), io.StringIO()):
        show_json({"text": every})
    assert out.getvalue().isprintable() is False and out.getvalue()[:-1].isprintable()
    assert json.loads(out.getvalue()) == {"text": every}


def test_rich_steers_by_its_own_styles_alone() -> None:
    hostile = HOSTILE.replace("[", "(")
    with streams(io.StringIO(), err := io.StringIO()):
        console = open_console(stderr=True, force_terminal=True, width=200)
        table = Table(title=hostile)
        table.add_row(Text(HOSTILE, style="red link http://example.com"))
        with console.status(hostile):
            console.print(table, Text(HOSTILE))
            print(hostile, file=sys.stderr)
    written = err.getvalue()
    own = re.compile(r"\x1b\[(\d+(;\d+)*m|\?25[hl]|[12]?[AK])|\r")
    assert own.search(written), "it is coloured"
    terminal = Terminal()
    terminal.feed(own.sub("", written))
    assert terminal.obeyed == []
    assert "OWNED" in terminal.shown and "example.com" not in terminal.shown


def test_an_uncaught_error_and_a_warning_are_shown_like_all_else() -> None:
    program = (
        "import sys, threading, warnings\n"
        "from llmnode.node.cli import run\n"
        f"words = {HOSTILE!r}\n"
        "def fail(): raise ValueError(words)\n"
        "def act():\n"
        "    warnings.warn(words)\n"
        "    thread = threading.Thread(target=fail); thread.start(); thread.join()\n"
        "    fail()\n"
        "run(act)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 1
    lines = done.stderr.decode().splitlines()
    assert sum("ValueError" in line for line in lines) == 2 and sum("UserWarning" in line for line in lines) == 1
    assert all(line.startswith(("llmnode: ", "  | ")) for line in lines)
    assert "llmnode: ready" not in lines
    terminal = Terminal()
    terminal.feed("\n".join(lines))
    assert terminal.obeyed == []


# Typed lines


def lines_of(content: bytes, encoding: str = "utf-8") -> list[str]:
    """The lines that TypedLines reads; "!" for one that is refused."""
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(content)), encoding=encoding)  # type: ignore[arg-type]  # in memory
    found: list[str] = []
    with patch.object(sys, "stdin", stdin):
        typed = TypedLines()
        while True:
            try:
                if (line := typed.read("> ")) is None:
                    return found
                found.append(line)
            except NoLine:
                found.append("!")


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"hi", ["hi"]),
        (b"a\nb\r\nc\rd\n", ["a", "b", "c", "d"]),
        ("a\u2028b\x0cc\n\nd".encode(), ["a\u2028b\x0cc", "", "d"]),
        (b"a\n\xff\nb\n", ["a", "!", "b"]),
        (b"a\n\xc3" + b"x" * 20_000 + b"\nb\n", ["a", "!", "b"]),
        (b"a\n\0\nb\n", ["a", "!", "b"]),
        (b"a\n" + b"x" * (2 * MOST_CHARS + 5) + b"\nb\n", ["a", "!", "b"]),
        (b"x" * (MOST_CHARS - 1) + b"\nb", ["x" * (MOST_CHARS - 1), "b"]),
        (b"x" * (2 * MOST_CHARS), ["!"]),
        ("é\r\nb\r\n".encode("utf-8-sig"), ["é", "b"]),
        ("é\r\nb\r\n".encode("utf-16"), ["é", "b"]),
        (b"\xfe\xff" + "é\nb".encode("utf-16-be"), ["é", "b"]),
    ],
)
def test_what_is_piped_is_read_line_by_line(content: bytes, lines: list[str]) -> None:
    assert lines_of(content) == lines


def test_an_encoding_of_ascii_is_taken_for_utf8_and_others_as_they_are() -> None:
    assert lines_of("é\n".encode(), "ascii") == ["é"]
    assert lines_of(b"\xe9\n", "latin-1") == ["é"]


def test_without_stdin_there_is_nobody_to_talk_to() -> None:
    with patch.object(sys, "stdin", None), pytest.raises(ConfigError, match=r"cannot read stdin \(it is closed\)"):
        TypedLines()


def test_a_stdin_that_fails_ends_like_one_that_ends(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone(io.StringIO):
        def readline(self, _size: int = -1, /) -> str:
            raise OSError(errno.EIO, "Input/output error")

    with patch.object(sys, "stdin", Gone()):
        assert TypedLines().read("> ") is None
    assert capsys.readouterr().err == "llmnode: cannot read stdin (Input/output error)\n"


@pytest.mark.parametrize(("length", "line"), [(4094, "x" * 4094), (5000, "!")])
def test_a_line_that_the_terminal_cut_is_refused(length: int, line: str) -> None:
    master, slave = pty.openpty()
    writer = threading.Thread(target=lambda: os.write(master, b"x" * length + b"\nnext\n"))
    with (
        os.fdopen(slave, encoding="utf-8") as stdin,
        streams(io.StringIO(), err := io.StringIO()),
        patch.object(sys, "stdin", stdin),
    ):
        typed = TypedLines()
        writer.start()
        try:
            found = typed.read("> ")
        except NoLine:
            found = "!"
        assert found == line
        say("an error")
        assert typed.read("| ") == "next"
    assert err.getvalue() == "> llmnode: an error\n| ", "the user's key has ended the line"
    writer.join()
    os.close(master)


# The program


@pytest.mark.parametrize(
    ("redirected", "status", "said"),
    [
        (">/dev/full", 1, "llmnode: cannot write to stdout (No space left on device)\n"),
        (">&-", 1, "llmnode: cannot write to stdout (it is closed): send it to a file, or to /dev/null\n"),
        ("2>&-", 0, ""),
        ("<&- 2>&-", 0, ""),
        ("| true", 1, ""),
    ],
)
def test_a_program_whose_streams_fail_ends_with_a_line_at_most(redirected: str, status: int, said: str) -> None:
    command = f'"$@" {redirected}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command, "bash", *LLMNODE, "config"],
        capture_output=True,
        text=True,
        check=False,
        env=without_settings(os.environ),
    )
    assert (done.returncode, done.stderr) == (status, said)
    assert done.stdout.startswith("file ") == (status == 0)


def test_help_into_a_pipe_that_nobody_reads_is_quiet() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" --help | true', "bash", *LLMNODE], capture_output=True, check=True, env={**os.environ}
    )
    assert done.stderr == b""


def test_signals_are_as_they_were() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
