"""Lines that a user types, or a program pipes, into stdin, of any bytes."""

from __future__ import annotations

import io
import sys
from contextlib import suppress

from llmnode.core.user_input import find_mark, find_no_text
from llmnode.errors import ConfigError
from llmnode.node.terminal import line_ended, note, say

MOST_CHARS = 1 << 20
"""The longest line, in characters."""
MOST_MARK_BYTES = 4
TERMINAL_LINE_BYTES = 4096
"""A terminal cuts lines there, its end included, if nothing reads its keys one by one."""


class NoLine(ConfigError):
    """One line was no text, or not all of it came. The next one can be read all the same."""


class TypedLines:
    """The lines of stdin, one after another. In a terminal they are edited with the `readline` library."""

    def __init__(self) -> None:
        """Raises ConfigError if the program was started without stdin."""
        if sys.stdin is None:  # mypy: typed as if that could not be
            raise ConfigError("cannot read stdin (it is closed): type in a terminal, or pipe lines into it")
        self._is_terminal = sys.stdin.isatty()
        self._is_edited = self._is_terminal and sys.stdout.isatty() and _has_editing()
        self._is_decoded = False

    def read(self, prompt: str) -> str | None:
        """The next line without its end; None at the end of all. `prompt` is shown in a terminal.

        Raises NoLine, or KeyboardInterrupt.
        """
        is_first = not self._is_decoded
        self._decode_bytes()
        try:
            line = self._read(prompt).removeprefix("\ufeff" if is_first else "")
        except EOFError:
            if self._is_terminal:
                note()  # what it shows next stands on a line of its own
            return None
        except OSError as error:
            say(f"cannot read stdin ({error.strerror})")
            return None
        if what := find_no_text(line) or ("\0" in line and "it has a NUL"):
            raise NoLine(f"this line was no text ({what}): it is left out; send UTF-8")
        return line

    def _read(self, prompt: str) -> str:
        """Raises EOFError at the end, OSError or NoLine."""
        if self._is_edited:
            line = f"{input(prompt)}\n"
        else:
            if self._is_terminal:
                note(prompt, end="")
            line = sys.stdin.readline(MOST_CHARS + 1)
            if self._is_terminal:
                line_ended()  # with the user's key
        if not line:
            raise EOFError
        if len(line) > MOST_CHARS:
            while line and not line.endswith("\n"):
                line = sys.stdin.readline(MOST_CHARS)
            raise NoLine(f"this line had more than {MOST_CHARS} characters, which is the most: it is left out")
        if self._is_terminal and not self._is_edited and len(line.encode(errors="replace")) >= TERMINAL_LINE_BYTES:
            raise NoLine(
                f"the terminal cut this line at {TERMINAL_LINE_BYTES} bytes: it is left out; write it as several, of"
                " which all but the last end in \\"
            )
        return line.removesuffix("\n")

    def _decode_bytes(self) -> None:
        """Before the first line: what is no text is kept as such, and told line by line."""
        if self._is_decoded:
            return
        self._is_decoded = True
        if not isinstance(sys.stdin, io.TextIOWrapper):  # of another program, as a notebook's
            return
        encoding, errors = sys.stdin.encoding, "surrogateescape"
        if encoding.lower().replace("_", "-") in ("ascii", "us-ascii", "ansi-x3.4-1968"):  # what was meant has more
            encoding = "utf-8"
        if not self._is_terminal and isinstance(sys.stdin.buffer, io.BufferedReader):
            with suppress(OSError):  # the next read raises it
                start = sys.stdin.buffer.peek(MOST_MARK_BYTES)
                mark, marked = find_mark(start)
                if mark:
                    encoding, errors = marked, "surrogateescape" if marked == "utf-8" else "replace"
        sys.stdin.reconfigure(encoding=encoding, errors=errors, newline=None)


def _has_editing() -> bool:
    try:
        import readline  # noqa: F401 - `input` uses it once it is there
    except ImportError:
        return False
    return True
