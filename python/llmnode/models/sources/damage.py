"""Explains by its first bytes and its size why a file cannot be read, with advice.

It may be an unfinished download, a web page instead of a file, or a pointer of git-lfs. It knows no model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

_LOOKED_BYTES = 1024
_MOST_JSON_BYTES = 1 << 28
"""No config or index is as large. More would only fill the memory."""
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, in this many bytes."""
_AGAIN = "download it again"
_POINTER = b"version https://git-lfs.github.com/spec/v1"
_OTHERS = (
    (b"PK\x03\x04", "a zip file, perhaps a PyTorch pickle under another name"),
    (b"\x80\x02", "a PyTorch pickle under another name"),
    (b"GGUF", "a GGUF file under another name"),
    (b"\x1f\x8b", "a gzip file"),
    (b"<?xml", "an XML answer of some server"),
    (b"<!doctype html", "a web page"),
    (b"<html", "a web page"),
)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a `file` of a model. Raises ModelError with advice, in one line, if there is none."""
    found = _read_object(file)
    if isinstance(found, str):
        raise ModelError(f"{file.parent} is not a model folder: {file.name} {found}")
    return found


def what_is_wrong_in_json(file: Path) -> str | None:
    """The fault as the end of a sentence that begins with the file's name. None if it holds an object."""
    found = _read_object(file)
    return found if isinstance(found, str) else None


def what_is_instead(file: Path) -> str | None:
    """The content that stands in the place of a file, as the end of a sentence. None if it is not known."""
    try:
        return _in_place(_beginning(file))
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _read_object(file: Path) -> dict[str, Any] | str:
    """The object, or the reason why there is none."""
    try:
        if (why := _not_there(file)) is not None:
            return why
        content = read_whole(file)
        found = json.loads(content.decode("utf-8"))
        if isinstance(found, dict):
            return found
        return f"holds a {type(found).__name__} where an object must be: {_AGAIN}"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except (ValueError, RecursionError) as error:  # also if it is not UTF-8
        return _in_place(content) or _other_encoding(content) or f"is no JSON ({one_line(error)}): {_AGAIN}"


def what_is_wrong(file: Path) -> str | None:
    """With a safetensors file, as the end of a sentence that begins with its name. None if nothing is to be seen."""
    try:
        if missing := _not_there(file):
            return missing
        beginning, size = _beginning(file), file.stat().st_size
        if wrong := _in_place(beginning):
            return wrong
        return _cut_off(file, beginning, size)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def one_line(error: BaseException) -> str:
    """A library's message, which may be a page long, for a message of ours."""
    return " ".join(str(error).split())


def _not_there(file: Path) -> str | None:
    if file.is_file():
        return None
    if file.is_symlink():
        return f"is a link to a file that is gone ({file.readlink()}): {_AGAIN}"
    return f"is no file: {_AGAIN}" if file.exists() else f"is missing: {_AGAIN}"


def read_whole(file: Path) -> bytes:
    """The content of a JSON file. Raises OSError, also if it is larger than any that models have."""
    if (size := file.stat().st_size) > _MOST_JSON_BYTES:
        raise OSError(f"it has {size} bytes, more than any file of its kind")
    return file.read_bytes()


def _in_place(content: bytes) -> str | None:
    """The content that stands in the place of a file."""
    beginning = content[:_LOOKED_BYTES].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not content:
        return f"is empty: {_AGAIN}"
    if beginning.startswith(_POINTER):
        return "is a pointer of git-lfs, and not the file itself: run `git lfs pull` in its folder"
    for magic, name in _OTHERS:
        if beginning[: len(magic)].lower() == magic.lower():
            return f"is {name}: {_AGAIN}"
    return None


def _other_encoding(content: bytes) -> str | None:
    if content.startswith(b"\xef\xbb\xbf"):
        return "begins with a byte order mark, which transformers does not read: save it as UTF-8 without one"
    return "is of UTF-16: save it as UTF-8" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else None


def _cut_off(file: Path, beginning: bytes, size: int) -> str | None:
    """The fault if a file of safetensors is shorter than its header says."""
    header_bytes = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES or header_bytes > _MOST_JSON_BYTES:
        return f"is not of safetensors, or damaged: {_AGAIN}"
    expected = _LENGTH_BYTES + header_bytes
    if expected <= size:
        with file.open("rb") as opened:
            opened.seek(_LENGTH_BYTES)
            try:
                tensors = json.loads(opened.read(header_bytes))
                ends = [int(each["data_offsets"][1]) for name, each in tensors.items() if name != "__metadata__"]
            except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError):
                return f"is not of safetensors, or damaged: {_AGAIN}"
        expected += max(ends, default=0)
    if size < expected:
        return f"is cut off, with {size} of at least {expected} bytes: {_AGAIN}"
    return f"has {size} bytes where its header says {expected}: {_AGAIN}" if size > expected else None


def _beginning(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_LOOKED_BYTES)
