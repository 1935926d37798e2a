"""A GGUF file's header and tensor table, read within limits. A damaged file, or one without a model, gives one line.

The package `gguf` parses it. It believes each count and offset of the file, so these are checked before they are used.
`gguf/config.py` and `gguf/tokenizer.py` know the meaning of the metadata.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from llmnode.errors import ModelError
from llmnode.models.sources.damage import one_line

if TYPE_CHECKING:
    from pathlib import Path

    from gguf import ReaderField

    from llmnode.models.gguf.metadata import Metadata

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_MOST_KEYS = 1 << 16
_MOST_TENSORS = 1 << 20
_MOST_ENTRIES = 1 << 24
"""The most entries of one list. The largest vocabularies have less than a million tokens."""
_LONGEST_TEXT_BYTES = 64 << 20
"""The longest is a whole `tokenizer.json`, in files that have one."""
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS
_VALUE_TYPES = frozenset(map(int, GGUFValueType))
_STRANGERS = {
    b"version https://git-lfs": "is a git-lfs pointer and not the model: run `git lfs pull` in its folder",
    b"lmgg": "is of a format before GGUF: get the model as GGUF",
    b"fmgg": "is of a format before GGUF: get the model as GGUF",
    b"tjgg": "is of a format before GGUF: get the model as GGUF",
    b"PK\x03\x04": "is a zip archive: unpack it",
}
_PAGES = (b"<!doctype", b"<html", b"<?xml")


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file, with all of its header. The bytes of tensors are mapped, not read."""

    path: Path
    reader: gguf.GGUFReader
    metadata: Metadata

    @property
    def tensors(self) -> dict[str, gguf.ReaderTensor]:
        return {tensor.name: tensor for tensor in self.reader.tensors}

    @property
    def elements(self) -> int:
        return sum(int(tensor.n_elements) for tensor in self.reader.tensors)


class Damaged(ModelError):
    """It cannot be read, or contradicts itself. The message is that of `ModelError`, for its user."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(
            f"cannot convert {path} ({what}): if it is damaged, get it again; else use the model in safetensors"
        )


class _Damage(Exception):
    """A fault of the file, found while parsing."""


def open_file(path: Path) -> GgufFile:
    """Raises ModelError if it is no GGUF file, not whole, or one that we cannot read. Nothing is taken on trust."""
    from llmnode.models.gguf.metadata import Metadata

    _check_beginning(path)
    try:
        reader = _Reader(str(path))
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except (_Damage, ValueError, KeyError, IndexError, TypeError, OverflowError, OSError) as error:
        raise Damaged(path, one_line(error)) from error
    file = GgufFile(path, reader, Metadata(path, values))
    _check_kind(file)
    _check_types(file)
    return file


class _Reader(gguf.GGUFReader):
    """The package's reader reads on behind the end of a file, and makes lists of any length that it claims; this one
    does not.
    """

    def __setattr__(self, name: str, value: object) -> None:
        # A slice of a memmap takes several times as long as one of the array that it is.
        super().__setattr__(name, np.asarray(value) if name == "data" else value)

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:  # Any: as numpy's
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise _Damage(f"it is cut short: it has {len(self.data)} bytes, and goes on to {end}")
        return super()._get(offset, dtype, count, override_order)

    def _get_str(self, offset: int) -> Any:  # Any: likewise
        if (length := int(self._get(offset, np.uint64)[0])) > _LONGEST_TEXT_BYTES:
            raise _Damage(f"a text of {length} bytes")
        return super()._get_str(offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:  # Any: likewise
        if raw_type not in _VALUE_TYPES:
            raise _Damage(f"a value of the type {int(raw_type)}, which is not known")
        if raw_type == GGUFValueType.ARRAY:
            kind, entries = int(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
            if entries > _MOST_ENTRIES:
                raise _Damage(f"a list of {entries} entries")
            if kind == GGUFValueType.ARRAY:
                raise _Damage("a list of lists")
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: int) -> int:
        if count > _MOST_KEYS:
            raise _Damage(f"{count} keys of metadata")
        return super()._build_fields(offs, int(count))

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        if not field.name.isprintable():
            raise _Damage(f"a key of the name {field.name[:40]!r}")
        if field.name in self.fields:
            raise _Damage(f"the key {field.name!r} twice")
        return super()._push_field(field, skip_sum)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[ReaderField]]:
        if count > _MOST_TENSORS:
            raise _Damage(f"{count} tensors")
        return super()._build_tensor_info(offs, int(count))

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        expected, names = 0, set()
        for field in fields:
            _length, name_data, _dimensions, shape, raw_type, offset = field.parts
            name = str(bytes(name_data), encoding="utf-8")
            if not name.isprintable():
                raise _Damage(f"a tensor of the name {name[:40]!r}")
            if name in names:
                raise _Damage(f"the tensor {name!r} twice")
            names.add(name)
            size = _size_bytes(name, shape.tolist(), int(raw_type[0]))
            # ggml lays tensors one after the other, and refuses a file in which they are not.
            if int(offset[0]) != expected:
                raise _Damage(f"the tensor {name!r} is at {int(offset[0])} and should be at {expected}")
            if (end := start_offs + expected + size) > len(self.data):
                raise _Damage(f"it is cut short: it has {len(self.data)} bytes, and the tensor {name!r} ends at {end}")
            expected += -(-size // self.alignment) * self.alignment
        super()._build_tensors(start_offs, fields)


def _size_bytes(name: str, shape: list[int], raw_type: int) -> int:
    """The size of a tensor. `shape` has the length of a row first."""
    if not 1 <= len(shape) <= _MOST_DIMENSIONS or not all(shape):
        raise _Damage(f"the tensor {name!r} is of the shape {shape[: _MOST_DIMENSIONS + 1]}")
    if raw_type not in set(GGMLQuantizationType):
        raise _Damage(f"the tensor {name!r} is of the type {raw_type}, which is not known")
    kind = GGMLQuantizationType(raw_type)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[0] % block_elements:
        raise _Damage(
            f"the tensor {name!r} has rows of {shape[0]}, and {kind.name} takes multiples of {block_elements}"
        )
    return math.prod(shape) // block_elements * block_bytes


def _check_beginning(path: Path) -> None:
    """Refuse other files with this name, which a browser or git may leave in its place."""
    with path.open("rb") as opened:
        beginning = opened.read(512)
    stranger = next((said for first, said in _STRANGERS.items() if beginning.startswith(first)), None)
    if stranger is not None:
        raise ModelError(f"{path} {stranger}")
    if beginning.lstrip().lower().startswith(_PAGES):
        raise ModelError(f"{path} is a web page and not the model: download the file itself")
    if not beginning:
        raise Damaged(path, "it is empty")
    if not beginning.startswith(MAGIC):
        raise Damaged(path, "it does not begin as a GGUF file does")
    if len(beginning) < 24:
        raise Damaged(path, f"it is cut short: it has {len(beginning)} bytes")
    little, big = (int.from_bytes(beginning[4:8], order) for order in ("little", "big"))
    if little not in _VERSIONS and big in _VERSIONS:
        raise ModelError(f"{path} is big-endian: convert it with `gguf-convert-endian`, or get the little-endian file")
    if little not in _VERSIONS:
        raise Damaged(path, f"GGUF version {little}, and versions 2 and 3 can be read")


def _check_kind(file: GgufFile) -> None:
    """Raises ModelError if it is not a whole language model."""
    path, metadata = file.path, file.metadata
    if (parts := metadata.whole("split.count", 1)) > 1:
        raise ModelError(
            f"{path} is one of {parts} parts of a model: merge them with `llama-gguf-split --merge FIRST_PART MERGED`, "
            "and give the merged file"
        )
    kind = metadata.text("general.type", "model")
    architecture = metadata.text("general.architecture", "")
    if kind == "adapter":
        raise ModelError(f"{path} is an adapter (LoRA) and not a model: give the GGUF of a whole model")
    if kind == "mmproj" or architecture == "clip":
        raise ModelError(f"{path} is the part of a model that sees or hears (mmproj): give the GGUF of its text model")
    if kind != "model":
        raise ModelError(f"{path} is a GGUF file of the type {kind!r} and not a model: give the GGUF of a model")
    if not architecture or not architecture.isprintable():
        raise Damaged(path, f"its general.architecture is {architecture[:40]!r}")
    if not file.reader.tensors:
        raise ModelError(f"{path} has a vocabulary and no tensors (vocab-only): give the GGUF of a whole model")


def _check_types(file: GgufFile) -> None:
    """Raises ModelError if a tensor is of a type that `gguf` cannot dequantize."""
    kinds = {tensor.tensor_type: tensor.name for tensor in file.reader.tensors}
    unknown = [kind for kind in sorted(kinds) if not _is_readable(kind)]
    for kind in unknown:
        raise ModelError(
            f"{file.path} has tensors of the type {kind.name} ({kinds[kind]}), which cannot be dequantized: "
            f"use one of {', '.join(readable_types())}, or the model in safetensors"
        )


def readable_types() -> list[str]:
    """The names of all types of tensors that can be read."""
    return [kind.name for kind in GGMLQuantizationType if _is_readable(kind)]


def _is_readable(kind: GGMLQuantizationType) -> bool:
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
