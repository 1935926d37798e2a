"""Draws the blueprint of a model with transformers, once on each machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from llmnode.errors import ModelError
from llmnode.models.blueprint import BlockPlan, Blueprint, keep_blueprint, kept_blueprint
from llmnode.models.context import context_of
from llmnode.models.families import family_of
from llmnode.models.layers import ACTIVATIONS, LAYERS, Rotary
from llmnode.models.meta_model import check_transparent, remove_blocks, remove_entry, remove_exit, without_weights

if TYPE_CHECKING:
    from llmnode.models.families import Family
    from llmnode.models.sources.folder import ModelFolder

_TRIED_POSITIONS = 1000
_TURNS_APART = 1e-4
"""fp32 leaves this much open in the cosine of an angle of up to 1000 radians."""


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
    keep_blueprint(folder.config_file, drawn)
    return drawn


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
    positions = torch.arange(min(_TRIED_POSITIONS, drawn.context.tokens))[None]
    like = torch.zeros(1, dtype=torch.float32)
    ours = Rotary(drawn.frequencies, drawn.rotary_scaling)(positions, like.dtype)
    pairs = zip(ours, theirs(like, positions), strict=True)
    if not all(torch.allclose(one, other, rtol=0, atol=_TURNS_APART) for one, other in pairs):
        raise ModelError(
            f"the family {folder.config.model_type!r} in this version of transformers turns heads in a way that we do "
            "not know: use another version of transformers"
        )
    return drawn


def _window(attention: Any) -> int | None:  # Any: likewise
    """Mistral's attention reads it from its config at each call."""
    holder = attention.config if attention.config.model_type == "mistral" else attention
    window: int | None = getattr(holder, "sliding_window", None)
    return window
