"""The blueprint of a model of the Llama kind: a server that finds it kept starts without transformers.

These families use nothing of transformers but what follows from the config: shapes, some numbers, and the frequencies
of rotary embeddings. To import it for that takes half of the CPU time of a start, and 350 MB.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmnode.machine.cache_folder import cache_folder, write_in_cache
from llmnode.models.context import Context

if TYPE_CHECKING:
    from collections.abc import Mapping

log = logging.getLogger(__name__)

_FORMAT = 2
"""The version of the file's format: to be raised when its content changes."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block. `shapes` are of its parameters, by their names in it; `window` is that of its attention, if any."""

    shapes: Mapping[str, tuple[int, ...]]
    head_dim: int
    scaling: float
    window: int | None
    is_rotated: bool
    epsilon: float


@dataclass(frozen=True, slots=True)
class Blueprint:
    """All that its blocks are made from but weights, and how large it is: `ends` are the parameters in no block."""

    hidden_size: int
    context: Context
    ends: int
    activation: str
    frequencies: tuple[float, ...]
    rotary_scaling: float
    blocks: tuple[BlockPlan, ...]


def kept_blueprint(config: Path) -> Blueprint | None:
    """The blueprint for the file `config`, if one was kept by these versions of llmnode and transformers."""
    try:
        described = json.loads(_file_of(config).read_text())
        blocks = tuple(BlockPlan(**{**block, "shapes": _shapes(block["shapes"])}) for block in described.pop("blocks"))
        frequencies = tuple(map(float, described.pop("frequencies")))
        context = Context(**described.pop("context"))
        return Blueprint(**described, context=context, frequencies=frequencies, blocks=blocks)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is damaged
        return None


def keep_blueprint(config: Path, drawn: Blueprint) -> None:
    """Keep `drawn` for the file `config`, whole or not at all. If the disk is full, the next start draws it again."""
    try:
        write_in_cache(_file_of(config), json.dumps(asdict(drawn)))
    except OSError as error:
        log.info("no blueprint is kept of %s: %s", config, error)


def _file_of(config: Path) -> Path:
    """The file's name says everything that the blueprint follows from. Raises OSError if there is no such config."""
    identity = hashlib.sha256(config.read_bytes())
    identity.update(f"{_FORMAT} {_transformers_version()}".encode())
    return cache_folder("blueprints", f"{identity.hexdigest()}.json")


@cache
def _transformers_version() -> str:
    """It is read once, since it takes milliseconds: its file has the whole description of transformers."""
    return importlib.metadata.version("transformers")


def _shapes(described: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, shape)) for name, shape in described.items()}
