"""Stdin, stdout and stderr, whatever they are: closed, full, of another encoding, a pipe that nobody reads any more.

Text that an encoding has no characters for is printed as escapes. An error is one line on stderr, which never continues
a line that was begun. Stderr may fail: it is nobody's result. If stdout does, the command ends.
"""

from __future__ import annotations

import io
import os
import re
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

MOST_SHOWN = 2000
"""Characters of one line of ours: an error may quote what a user gave."""
LEAST_COLUMNS = 40
"""Below which nothing is laid out: a terminal of 0 columns, as some say that they have, would show nothing."""
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78]")


class CannotPrint(LlmnodeError):
    """Stdout takes no more."""


class _Nowhere(io.StringIO):
    """Takes everything and keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


class _Output:
    """Stands for stdout or stderr. Everything that is not about writing is the stream's own."""

    def __init__(self, stream: TextIO | None, name: str, *, matters: bool) -> None:
        """Without a `stream`, as after `>&-`, what is written is lost."""
        self.is_closed = stream is None
        self.is_line_begun = False
        self.stream: TextIO = stream or _Nowhere()
        self._name = name
        self._matters = matters

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Raises BrokenPipeError or CannotPrint, if it matters."""
        if shown := _STEERING.sub("", text):
            self.is_line_begun = not shown.endswith("\n")
        with self._failing():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Any) -> None:  # Any: as a stream has it
        self.write("".join(lines))

    def flush(self) -> None:
        with self._failing():
            self.stream.flush()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            if self._matters:
                raise
        except OSError as error:
            if self._matters:
                raise CannotPrint(f"cannot write to {self._name} ({error.strerror})") from error


@contextmanager
def prepared() -> Iterator[None]:
    """Within it stdout and stderr are there, and fail as this module says."""
    _occupy_closed_descriptors()
    before = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", _Output(sys.stdout, "stdout", matters=True))
    sys.stderr = cast("TextIO", _Output(sys.stderr, "stderr", matters=False))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def require_stdout() -> None:
    """Raises CannotPrint if the program was started without one: told now rather than when there is a result."""
    if isinstance(sys.stdout, _Output) and sys.stdout.is_closed:
        raise CannotPrint("cannot write to stdout (it is closed): send it to a file, or to /dev/null")


def say(text: str) -> None:
    """Tell the user one line, on stderr. A line of stdout that was begun is ended first."""
    end_line()
    tell(text)


def tell(text: str) -> None:
    """The same while others may be writing to stdout: if that is elsewhere, it is left alone."""
    if _are_one_place(sys.stdout, sys.stderr):
        end_line()
    elif _is_begun(sys.stderr):
        sys.stderr.write("\n")
    print(f"llmnode: {printable(text)}", file=sys.stderr, flush=True)


def end_line() -> None:
    """End what was begun, on either stream, so that what comes next stands on a line of its own."""
    for stream in (sys.stdout, sys.stderr):
        if _is_begun(stream):
            with suppress(BrokenPipeError, CannotPrint):
                stream.write("\n")
                stream.flush()
            if _are_one_place(sys.stdout, sys.stderr):
                return


def line_ended() -> None:
    """Nothing is begun on a terminal whose user has ended the line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Output):
            stream.is_line_begun = False


def open_console(*, stderr: bool, **options: Any) -> Console:  # Any: rich's own
    """rich's console of stdout or stderr, as wide as is of use."""
    from rich.console import Console

    console = Console(stderr=stderr, **options)
    if console.width < LEAST_COLUMNS:
        console.width = LEAST_COLUMNS
    return console


def printable(text: str) -> str:
    """One line, not too long. A peer's words may be in it: nothing of theirs may steer the terminal."""
    shown = text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN // 2]} ... {text[-MOST_SHOWN // 2 :]}"
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in shown)


def _is_begun(stream: TextIO) -> bool:
    return isinstance(stream, _Output) and stream.is_line_begun


def _are_one_place(one: TextIO, other: TextIO) -> bool:
    """A terminal, or a file or pipe that both were sent to."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError, AttributeError):  # no file at all, as in a test or a notebook
        return False


def _occupy_closed_descriptors() -> None:
    """Else the next file or socket that is opened would get the number of stdin, stdout or stderr, and what they do."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
