"""The input of users made into text: the bytes of their files, lines, and paths. An error is one sentence.

Every file that a user writes or names is read here. Editors save text in several ways: UTF-8 with a byte order mark or
without, UTF-16 with one (Windows' Notepad, PowerShell's `>`), and lines that end in LF, CRLF or CR.
"""

from __future__ import annotations

import codecs
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FIX = "save it as UTF-8"
_MARKS = (  # the longer ones first: UTF-16's is how UTF-32's begins
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LINE_END = re.compile(r"\r\n|\r|\n")
_SURROGATE = re.compile("[\ud800-\udfff]")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


class Unreadable(ConfigError):
    """A file cannot be opened or read. `is_missing` if there is none of that name."""

    def __init__(self, message: str, *, is_missing: bool) -> None:
        self.is_missing = is_missing
        super().__init__(message)


def read_file(
    path: Path,
    name: str,
    most_bytes: int,
    *,
    fix: str = "name another file",
    is_secret: Callable[[bytes], bool] | None = None,
    magic: bytes = b"",
) -> bytes:
    """The content of a file, a pipe or a device, which is called `name` in errors.

    No more of a file that does not begin with `magic` is returned than its beginning. Others must not read a file whose
    content `is_secret`. Raises Unreadable, or ConfigError if they can, or if the file has more than `most_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(len(magic))
            if content == magic:
                content += file.read(most_bytes + 1 - len(magic))
            can_others_read = bool(os.fstat(file.fileno()).st_mode & 0o077)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        raise Unreadable(f"{name}: cannot be read ({why}): {fix}", is_missing=is_missing) from error
    if can_others_read and is_secret is not None and is_secret(content):
        raise ConfigError(f"{name} can be read by others: `chmod 600 {path}`")
    if len(content) > most_bytes:
        raise ConfigError(f"{name}: has more than {most_bytes} bytes, which is the most: {fix}")
    return content


def find_mark(content: bytes) -> tuple[bytes, str]:
    """The byte order mark that these bytes begin with, and the encoding that it stands for; b"" and UTF-8 without."""
    return next(((mark, encoding) for mark, encoding in _MARKS if content.startswith(mark)), (b"", "utf-8"))


def decode(content: bytes, name: str = "") -> str:
    """The text that these bytes are. Raises ConfigError, which names the line and the byte, if they are none."""
    mark, encoding = find_mark(content)
    body = content[len(mark) :]
    try:
        text = body.decode(encoding)
    except UnicodeDecodeError as error:
        before = body[: error.start].decode(encoding)
        what = f"0x{body[error.start]:02x} is no {encoding.upper()}"
    else:
        if "\0" not in text:
            return text
        before, what = text[: text.index("\0")], "a NUL, which no text has"
    *ended, begun = _LINE_END.split(before)
    place = f"line {len(ended) + 1}, byte {len(begun.encode(encoding)) + 1}"
    raise ConfigError(f"{f'{name}, ' if name else ''}{place}: {what}: {FIX}")


def split_lines(text: str) -> list[str]:
    """The lines of a text. LF, CRLF and CR end one, and nothing else: U+2028 or a form feed is part of a line."""
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def recover_text(text: str) -> str:
    """`text`, of a command line or an environment, as UTF-8 has it: Python may have read it by an ASCII locale."""
    try:
        return text.encode(errors="surrogateescape").decode()
    except UnicodeError:  # it was not
        return text


def find_no_text(text: str) -> str:
    """The first byte that is no UTF-8, of a text that a command line or an environment has; "" if all of it is text."""
    if (found := _SURROGATE.search(text)) is None:
        return ""
    byte = ord(found[0]) - 0xDC00  # as Python keeps what it could not decode
    what = f"0x{byte:02x}" if 0x80 <= byte <= 0xFF else ascii(found[0])
    return f"{what} after {found.start()} characters is no UTF-8"


def expand_path(text: str, variables: Mapping[str, str] | None = None) -> Path:
    """The path that a shell would make of `text`: `~` and `~user`, and `$NAME` if `variables` are given.

    Raises ConfigError for a text that is empty or has a NUL, and if there is no such home folder or variable.
    """
    if not text or "\0" in text:
        raise ConfigError("give the path of a file or folder")

    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if variables is not None and name in variables:
            return variables[name]
        raise ConfigError(f"the variable {name} is not set: write the whole path")

    named = text if variables is None else _VARIABLE.sub(value, text)
    path = os.path.expanduser(named)  # and not pathlib's: "~nobody" stays what it is, as in a shell
    if path == "~" or path.startswith("~/"):
        raise ConfigError("no home folder is known: set HOME, or write the whole path")
    return Path(path)


def path_from(environ: Mapping[str, str], variable: str) -> Path | None:
    """The path in a variable of the environment; None if it is not set or empty. Raises ConfigError, which names it."""
    if not (text := environ.get(variable)):
        return None
    try:
        return expand_path(text, environ)
    except ConfigError as error:
        raise ConfigError(f"{variable}={text}: {error}") from error


def home_folder(environ: Mapping[str, str], variable: str, folder: str) -> Path:
    """The folder that `variable` names (as XDG_CACHE_HOME), else `folder` in the user's home. Raises ConfigError."""
    return path_from(environ, variable) or expand_path(f"~/{folder}")


def is_yes(text: str | None) -> bool:
    """Whether a variable of the environment is set to what means yes, as huggingface_hub reads its own."""
    return text is not None and text.upper() in {"1", "ON", "YES", "TRUE"}
