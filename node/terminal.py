"""The one way to stdin, stdout and stderr, whatever they are: closed, full, of another encoding, a broken pipe.

Everything that is written here passes `core/texts/visible.py`: text of models and peers, names of files, log lines,
tracebacks, and what libraries print. rich alone may steer the terminal, and only by what it makes itself of styles and
pictures. Text that an encoding has no characters for is printed as escapes. An error is one line on stderr, which never
continues a line that was begun. Stderr may fail: it is nobody's result. If stdout does, the command ends.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import threading
import traceback
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO, cast

from llmnode.core.texts.visible import Visible, printable, quoted, visible
from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import TracebackType

    from rich.console import Console
    from rich.segment import Segment

LEAST_COLUMNS = 40
"""Below which nothing is laid out: a terminal of 0 columns, as some say that they have, would show nothing."""
_IN_ASCII = str.maketrans("█·╳→…⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "#.x>~" + "|/-\\" * 2 + "|/")
"""The characters of our drawings, and of rich's turning sign, each with one for a terminal that has only ASCII."""
_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[78]")


class CannotPrint(LlmnodeError):
    """Stdout takes no more."""


class _Nowhere(io.StringIO):
    """Takes everything and keeps nothing."""

    def write(self, text: str) -> int:
        return len(text)


class _Output:
    """Stands for stdout or stderr, and shows every text as `visible` does. All but writing is the stream's own."""

    def __init__(self, stream: TextIO | None, name: str, *, matters: bool) -> None:
        """Without a `stream`, as after `>&-`, what is written is lost."""
        self.is_closed = stream is None
        self.is_line_begun = False
        self.stream: TextIO = stream or _Nowhere()
        self._name = name
        self._matters = matters
        self._visible = Visible()

    def __getattr__(self, name: str) -> Any:  # Any: whatever the stream has
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Raises BrokenPipeError or CannotPrint, if it matters."""
        self.write_steering(self._visible.show(text))
        return len(text)

    def write_steering(self, text: str) -> None:
        """For rich: `text` may steer the terminal. Raises as `write` does."""
        if shown := _STEERING.sub("", text):
            self.is_line_begun = not shown.endswith("\n")
        with self._failing():
            try:
                self.stream.write(text)
            except UnicodeEncodeError:
                encoding = self.stream.encoding
                self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

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


class _Steered:
    """The file that rich writes to: stdout or stderr, whatever that is by then."""

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def _stream(self) -> Any:  # Any: a stream of any kind
        stream = getattr(sys, self._name)
        return getattr(stream, "rich_proxied_file", stream)  # rich puts its own in the place while a picture stands

    def __getattr__(self, name: str) -> Any:  # Any: as the stream has it
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        stream = self._stream
        if isinstance(stream, _Output):
            stream.write_steering(text)
        else:
            stream.write(text)
        return len(text)


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


def show(text: str, end: str = "\n") -> None:
    """Write a result to stdout."""
    print(visible(text), end=end, flush=True)


class Pieces:
    """A text that comes in pieces, on stdout or, `beside` another result, on stderr. No piece ends a line of itself."""

    def __init__(self, *, beside: bool = False) -> None:
        self._beside = beside
        self._visible = Visible()

    def write(self, piece: str) -> None:
        print(self._visible.show(piece), end="", file=sys.stderr if self._beside else sys.stdout, flush=True)


def show_json(value: Any, default: Callable[[Any], Any] | None = None) -> None:  # Any: JSON
    """Write a result for programs, in a line of stdout: exact, and in characters that no terminal obeys."""
    print(json.dumps(value, default=default).replace("\x7f", "\\u007f"), flush=True)


def note(text: str = "", end: str = "\n") -> None:
    """Write what is beside the result to stderr."""
    print(visible(text), end=end, file=sys.stderr, flush=True)


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
    note(f"llmnode: {printable(text)}")


def tell_trace(text: str, trace: str) -> None:
    """A line, and below it a traceback: what an exception says may be a peer's words, so its lines stand apart."""
    tell(text)
    note(quoted(trace))


def catch_uncaught() -> None:
    """From now on this process shows uncaught errors and warnings in this way. Python itself would write them raw."""

    def show_uncaught(_kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        with prepared():
            tell_trace("a bug, please report it:", "".join(traceback.format_exception(error)))

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        tell(f"{filename}:{lineno}: {category.__name__}: {message}")

    def show_of_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_value is not None:
            show_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)

    def show_unraisable(caught: sys.UnraisableHookArgs) -> None:
        if caught.exc_value is not None:
            show_uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)

    sys.excepthook = show_uncaught
    threading.excepthook = show_of_thread
    sys.unraisablehook = show_unraisable
    warnings.showwarning = show_warning


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
    """rich's console of stdout or stderr, as wide as is of use. It steers the terminal by styles and pictures alone."""
    from rich.console import Console

    class Screen(Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            return super()._render_buffer(_cleaned(each, self.encoding) for each in buffer)

    file: Any = _Steered("stderr" if stderr else "stdout")  # Any: rich uses this much of a file
    console = Screen(file=file, stderr=stderr, **options)
    if console.width < LEAST_COLUMNS:
        console.width = LEAST_COLUMNS
    return console


def _cleaned(segment: Segment, encoding: str) -> Segment:
    """A part of a picture, with text that is `visible` and without a link: the address of one is not shown.

    Where the `encoding` has no characters for a drawing, others stand for them.
    """
    if segment.control:
        return segment
    style = segment.style.update_link(None) if segment.style is not None else None
    text = visible(segment.text)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_IN_ASCII)
    return segment._replace(text=text, style=style)


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
