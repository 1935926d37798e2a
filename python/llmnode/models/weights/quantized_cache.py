"""Quantized blocks on disk: a block is quantized once on a machine, and read as it came out from then on.

A file a block, in a folder of its model and precision. Each says all that its numbers follow from, so that none is read
for another, and has a checksum: one that is damaged, or of another time, is made anew. Files are of safetensors, which
hold numbers alone. If the disk is full, or where nothing may be written, nodes serve all the same.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from llmnode._native import crc32c
from llmnode.errors import ModelError
from llmnode.machine.cache_folder import cache_folder, make_in_cache, show_bytes
from llmnode.models.sources.damage import one_line
from llmnode.models.sources.folder import read_tensors
from llmnode.models.weights.disk_eviction import CachedFile, EvictionPolicy, files_to_remove
from llmnode.models.weights.quantized import fill_block, quantized_state

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llmnode.core.span import Span
    from llmnode.models.sources.folder import ModelFolder

log = logging.getLogger(__name__)

_FORMAT = 1
"""The version of the files' format: to be raised when their content changes, or blocks are joined or quantized
otherwise."""
_LIBRARIES = {"int8": ("torch", "transformers"), "nf4": ("torch", "transformers", "bitsandbytes")}
"""The libraries that quantize, or that map stored tensors to a block's."""
_FOLDER = re.compile(r".+-[0-9a-f]{16}")
_FILE = re.compile(r"[0-9]+\.safetensors(\.[0-9a-f]{16})?|\.tmp\w{6}")
"""Also files that are being written, or were by a process that was killed: by us, or by safetensors."""
_SHOWN = 50
_STORED = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""The names of dtypes in safetensors."""
_MADE_FROM, _CHECKSUM = "made_from", "checksum"
"""The metadata of a file beside its tensors."""


class KeptBlocks:
    """The kept blocks of `span` in one precision, for one load of it. With a `quant` of none there are none."""

    def __init__(
        self,
        folder: ModelFolder,
        span: Span,
        dtype: torch.dtype,
        quant: str,
        device: str,
        policy: EvictionPolicy = EvictionPolicy(),  # noqa: B008 - frozen
    ) -> None:
        self._model, self._span, self._quant, self._policy = folder.name, span, quant, policy
        self._place: Path | None = None
        if quant in _LIBRARIES:
            precision = [_STORED[dtype], quant, torch.device(device).type]  # a GPU may round otherwise than a CPU
            self._place = _place_of(folder, precision)
            self._made_from = _made_from(folder, precision)
        self._has_space: bool | None = None  # until it is asked

    def fill(self, index: int, block: torch.nn.Module) -> bool:
        """Give `block`, which is without storage, its quantized weights, if they are kept; else leave it as it is."""
        if self._place is None:
            return False
        file = self._place / _name_of(index)
        try:
            if not file.is_file():
                return False
            if (state := self._read(file, index, block)) is None:
                return False
        except (OSError, SafetensorError, ModelError) as error:
            why = one_line(error)
            log.warning(
                "block %d of %s is quantized anew, as what is kept of it is no good: %s", index, self._model, why
            )
            return False
        fill_block(block, self._quant, state)
        with suppress(OSError):  # a folder that may only be read
            os.utime(self._place)
        return True

    def keep(self, index: int, block: torch.nn.Module) -> None:
        """`block` is quantized. It is kept whole or not at all, even if another process keeps it too."""
        if self._place is None or self._has_space is False:
            return
        state = {name: each.detach().cpu().contiguous() for name, each in block.state_dict().items()}
        partly = self._place / f"{_name_of(index)}.{secrets.token_hex(8)}"
        try:
            make_in_cache(self._place)
            if self._has_space is None:
                self._free_space(self._place, index, sum(each.nbytes for each in state.values()))
            try:
                save_file(state, partly, {_MADE_FROM: self._made_from_block(index), _CHECKSUM: _checksum(state)})
                partly.chmod(0o644)
                partly.replace(self._place / _name_of(index))
            finally:
                partly.unlink(missing_ok=True)
        except (OSError, SafetensorError) as error:
            self._has_space = False
            log.info("quantized blocks of %s are not kept: %s", self._model, one_line(error))

    def _free_space(self, place: Path, index: int, block_bytes: int) -> None:
        """Make space for the rest of the span, once. If the span is too large, nothing is removed and nothing kept.

        Raises OSError then.
        """
        left = [place / _name_of(each) for each in range(index, self._span.end)]
        needed_bytes = sum(block_bytes - (each.stat().st_size if each.exists() else 0) for each in left)
        free_bytes = shutil.disk_usage(place).free
        going = files_to_remove(needed_bytes, place.name, _kept_in(place.parent), free_bytes, time.time(), self._policy)
        if going is None:
            raise OSError(
                f"{show_bytes(needed_bytes)} are too much for {place.parent}, which is to take no more than "
                f"{self._policy.disk_share:.0%} of what is free: free some space, or set LLMNODE_CACHE to another disk"
            )
        for each in going:
            log.info("quantized blocks in %s are removed, to free space for others", place.parent / each.name)
            _remove(place.parent / each.name)
        self._has_space = True
        log.info("quantized blocks of %s are kept in %s", self._model, place)

    def _read(self, file: Path, index: int, block: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """None if it was made from something else."""
        with safe_open(file, framework="pt") as opened:
            said = opened.metadata() or {}
            views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
            described = {name: (view.get_dtype(), view.get_shape()) for name, view in views.items()}
        if said.get(_MADE_FROM) != self._made_from_block(index):
            return None
        expected = quantized_state(block, self._quant)
        if described != {name: (_STORED[each.dtype], list(each.shape)) for name, each in expected.items()}:
            raise ModelError(f"{file} does not hold what the block has")
        state = read_tensors(file, {name: each.dtype for name, each in expected.items()})
        if said.get(_CHECKSUM) != _checksum(state):
            raise ModelError(f"{file} is damaged")
        return state

    def _made_from_block(self, index: int) -> str:
        return json.dumps({"block": index, **self._made_from})


def _place_of(folder: ModelFolder, precision: list[str]) -> Path:
    digest = hashlib.sha256(json.dumps([folder.digest.hex(), *precision]).encode()).hexdigest()[:16]
    return cache_folder("quantized", f"{folder.name.replace('/', '--')[:_SHOWN]}-{digest}")


def _name_of(index: int) -> str:
    return f"{index}.safetensors"


def _made_from(folder: ModelFolder, precision: list[str]) -> dict[str, object]:
    """All that numbers follow from. The model's digest covers all of its weights."""
    return {
        "format": _FORMAT,
        "model": folder.digest.hex(),
        "precision": precision,
        "by": {name: importlib.metadata.version(name) for name in _LIBRARIES[precision[1]]},
    }


def _checksum(state: Mapping[str, torch.Tensor]) -> str:
    """A checksum against accidents: a program that may write into the cache may write models, too."""
    checksum = 0
    for name in sorted(state):
        checksum = crc32c(state[name].reshape(-1).view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def _kept_in(place: Path) -> list[CachedFile]:
    """The files that we have written there, and nothing else."""
    kept = []
    for each in place.iterdir():
        with suppress(OSError):  # another node has removed it
            if _FOLDER.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
                size_bytes = sum(file.stat().st_size for file in each.iterdir() if _FILE.fullmatch(file.name))
                kept.append(CachedFile(each.name, size_bytes, each.stat().st_mtime))
    return kept


def _remove(folder: Path) -> None:
    with suppress(OSError):  # another node is at it, or writes into it again
        for file in folder.iterdir():
            if _FILE.fullmatch(file.name):
                file.unlink(missing_ok=True)
        folder.rmdir()
