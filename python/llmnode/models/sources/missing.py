"""Why a tensor that a model needs is not in its files, as far as the folder tells: a sentence with the fix."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING

from llmnode.errors import ModelError
from llmnode.models.sources.checkpoint import is_index, promised, weights_file
from llmnode.models.sources.damage import read_json
from llmnode.models.sources.folder import read_header

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.models.sources.folder import ModelFolder

_SHOWN = 4
_MOST_FILES = 1000
_NUMBERED = re.compile(r"(\D*\.)(\d{1,6})(\..*)", re.ASCII)
"""The name of a tensor of a block: the first number is the block's."""
_HEADS = ("lm_head.", "embed_out.")


def check_blocks(folder: ModelFolder) -> None:
    """Raises ModelError if a block that the config counts has no tensor: a server of others would announce the model.

    Blocks whose tensors have no number in their names are not checked, nor is each tensor: a load does that.
    """
    of_blocks: dict[int, list[str]] = {}
    for name in folder.files:
        if (numbered := _NUMBERED.match(name)) is not None:
            of_blocks.setdefault(int(numbered[2]), []).append(name)
    absent = [block for block in range(folder.info.blocks) if block not in of_blocks]
    if of_blocks and absent:
        alike = of_blocks[min(of_blocks)]
        missing = [_NUMBERED.sub(rf"\g<1>{absent[0]}\g<3>", name) for name in alike]
        check_complete(folder, missing, blocks=len(absent))


def check_complete(folder: ModelFolder, missing: Sequence[str], blocks: int = 1) -> None:
    """Raises ModelError if any of a model's parameters is `missing`, or those of the first of several `blocks` are."""
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        more += f" ({blocks} blocks have none)" if blocks > 1 else ""
        names = ", ".join(missing[:_SHOWN])
        raise ModelError(f"{folder.path} has no tensors for {names}{more}: {_reason(folder, missing)}")


def _reason(folder: ModelFolder, missing: Sequence[str]) -> str:
    index = _index(folder)
    if broken := _broken_promise(folder, index, missing):
        return broken
    if elsewhere := _elsewhere(folder, missing):
        listed = f"{index} does not list it" if index else "another file is taken for the model"
        return (
            f"{elsewhere} has some, but {listed}: get the index and all files of one download, or save the model again"
        )
    if len(missing) == 1 and missing[0].startswith(_HEADS):
        return "the model was saved without its head, as a base model or a classifier: get the causal language model"
    return "the folder is incomplete: download the model again"


def _index(folder: ModelFolder) -> str | None:
    try:
        file = weights_file(read_json(folder.config_file), lambda name: (folder.path / name).is_file())
    except ModelError:
        return None
    return file if file is not None and is_index(file) else None


def _broken_promise(folder: ModelFolder, index: str | None, missing: Sequence[str]) -> str | None:
    """The fault if the index says that a file has a tensor that it has not."""
    if index is None:
        return None
    try:
        broken = {name: file for name, file in promised(folder.path, index).items() if name not in folder.files}
    except ModelError:
        return None
    if not broken:
        return None
    name = next((name for name in _stored_as(missing) if name in broken), next(iter(broken)))
    return f"{broken[name]} lacks {name}, which {index} says it has: it is of another download, get it again"


def _elsewhere(folder: ModelFolder, missing: Sequence[str]) -> str | None:
    """A file of the folder that has some of it and is no part of the model."""
    ours, names = set(folder.files.values()), set(_stored_as(missing))
    for file in islice(folder.path.glob("**/*.safetensors"), _MOST_FILES):
        if file not in ours and names & _names_of(file):
            return file.relative_to(folder.path).as_posix()
    return None


def _names_of(file: Path) -> set[str]:
    try:
        return {*read_header(file)}
    except ModelError:
        return set()


def _stored_as(missing: Sequence[str]) -> list[str]:
    """Their own names, or those without the part before the first dot, which a base model has."""
    return [*missing, *(name.partition(".")[2] for name in missing)]
