"""The blueprint of a model of the Llama kind, computed by transformers from the config and kept: a server that finds it
starts without transformers.

These families use nothing of transformers but what follows from the config: shapes, some numbers, and the frequencies
of rotary embeddings. To import it for that takes half of the CPU time of a start, and 350 MB.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from llmnode.errors import ModelError
from llmnode.models.context import Context, context_of
from llmnode.models.families import family_of
from llmnode.models.fused import ACTIVATIONS, LAYERS, Rotary
from llmnode.models.meta_model import check_transparent, remove_blocks, remove_entry, remove_exit, without_weights
from llmnode.models.sources.cache_folder import cache_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.models.families import Family
    from llmnode.models.sources.folder import ModelFolder

log = logging.getLogger(__name__)

_FORMAT = 2
"""The version of the file's format: to be raised when its content changes."""
_TRIED_POSITIONS = 1000
_TURNS_APART = 1e-4
"""fp32 leaves this much open in the cosine of an angle of up to 1000 radians."""


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


def blueprint_of(folder: ModelFolder) -> Blueprint | None:
    """That of its config, drawn with transformers if this machine has none yet. None for models of other kinds.

    Raises ModelError as `load_span`.
    """
    if (kept := kept_blueprint(folder.config_file)) is not None:
        return kept
    family = family_of(folder.config)
    if not family.fused or getattr(folder.config, "hidden_act", None) not in ACTIVATIONS:
        return None
    drawn = _draw(folder, family)
    _keep(folder.config_file, drawn)
    return drawn


def kept_blueprint(config: Path) -> Blueprint | None:
    """The blueprint for the file `config`, if one was kept by these versions of llmnode and transformers."""
    try:
        described = json.loads(_file_of(config).read_text())
        blocks = tuple(BlockPlan(**{**block, "shapes": _shapes(block["shapes"])}) for block in described.pop("blocks"))
        frequencies = tuple(map(float, described.pop("frequencies")))
        context = Context(**described.pop("context"))
        return Blueprint(**described, context=context, frequencies=frequencies, blocks=blocks)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):  # RuntimeError: nobody's home
        return None


def plan_of(block: Any) -> BlockPlan:  # Any: each family's block is a class of its own
    """The plan of a block of transformers. Raises ModelError if it is not as we know it."""
    unknown = {name.rpartition(".")[0] for name, _ in block.named_parameters()} - LAYERS
    if unknown:
        raise ModelError(
            f"a {type(block).__name__} has {', '.join(sorted(unknown))} in this version of transformers, "
            "which we do not know: use another version of transformers"
        )
    own = block.self_attn
    return BlockPlan(
        shapes={name: tuple(parameter.shape) for name, parameter in block.named_parameters()},
        head_dim=own.head_dim,
        scaling=own.scaling,
        window=_window(own),
        is_rotated=bool(getattr(own, "use_rope", True)),
        epsilon=block.input_layernorm.variance_epsilon,
    )


@torch.inference_mode()
def _draw(folder: ModelFolder, family: Family) -> Blueprint:
    model = without_weights(folder, family, "eager", torch.float32)
    ends = [each for name, each in model.named_parameters() if not name.startswith(family.block_prefix)]
    decoder = model.get_submodule(family.decoder)
    blocks = tuple(map(plan_of, getattr(decoder, family.blocks)))
    remove_entry(decoder, family)
    remove_exit(decoder, family)
    remove_blocks(decoder, family)
    check_transparent(folder, decoder, torch.float32)
    theirs = decoder.rotary_emb
    drawn = Blueprint(
        hidden_size=folder.info.hidden_size,
        context=context_of(folder.config, family),
        ends=sum(each.numel() for each in ends),
        activation=folder.config.hidden_act,
        frequencies=tuple(theirs.inv_freq.tolist()),
        rotary_scaling=float(theirs.attention_scaling),
        blocks=blocks,
    )
    positions, like = torch.arange(min(_TRIED_POSITIONS, drawn.context.tokens))[None], torch.zeros(1)
    ours = Rotary(drawn.frequencies, drawn.rotary_scaling)(positions, like.dtype)
    pairs = zip(ours, theirs(like, positions), strict=True)
    if not all(torch.allclose(one, other, rtol=0, atol=_TURNS_APART) for one, other in pairs):
        raise ModelError(
            f"the family {folder.config.model_type!r} in this version of transformers turns heads in a way that we do "
            "not know: use another version of transformers"
        )
    return drawn


def _keep(config: Path, drawn: Blueprint) -> None:
    """Whole or not at all. Without room for it, the next start draws it again."""
    try:
        file = _file_of(config)
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            written = Path(folder) / file.name
            written.write_text(json.dumps(asdict(drawn)))
            os.replace(written, file)
    except (OSError, RuntimeError) as error:
        log.info("no blueprint is kept of %s: %s", config, error)


def _file_of(config: Path) -> Path:
    """By all that it follows from. Raises OSError if there is no such config."""
    identity = hashlib.sha256(config.read_bytes())
    identity.update(f"{_FORMAT} {importlib.metadata.version('transformers')}".encode())
    return cache_folder() / "blueprints" / f"{identity.hexdigest()}.json"


def _shapes(described: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(map(int, shape)) for name, shape in described.items()}


def _window(attention: Any) -> int | None:  # Any: likewise
    """Mistral's attention reads it from its config at each call."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window
