"""The parts of a model that a node runs: a span of blocks, or the ends.

A part is cut out of the transformers model itself: the model is built without weights, the tensors that the part needs
are read, and everything else is removed. What differs between families is a row in `families.py`. Those of the Llama
kind have all that remains run by `fused.py`, and none of transformers' own forwards.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from llmnode.core.span import Span
from llmnode.errors import ModelError
from llmnode.models.families import Family, family_of
from llmnode.models.fused import FusedBlock, FusedEnds, join_products
from llmnode.models.products import use_fastest
from llmnode.models.quantized import check_quantizable, quantize_block
from llmnode.models.stored import read_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.models.folder import ModelFolder

_NO_ATTENTION = "llmnode-none"
"""For the ends, which have no block: transformers then makes no attention mask."""


class SpanModel(torch.nn.Module):
    """A transformers decoder cut to the blocks of `span`. Hidden states are fp32 outside, of the weights' dtype inside.

    Not for several threads: a forward through a part of the span moves the cut.
    """

    def __init__(
        self, decoder: Any, family: Family, span: Span, dtype: torch.dtype, attention: str
    ) -> None:  # Any: transformers' own
        super().__init__()
        self.span = span
        self.decoder = decoder
        self.blocks = getattr(decoder, family.blocks)
        self._fused = [FusedBlock(block, attention) for block in self.blocks] if family.fused else None
        self._family = family
        self._layer_types = getattr(decoder.config, "layer_types", None)
        self._dtype = dtype
        self._cut_to: Span | None = None

    def forward(self, span: Span, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`hidden` (tokens, hidden_size) at `positions` (tokens), through the blocks of `span`, a part of ours."""
        states = hidden[None].to(self._dtype)
        if self._fused is None:
            self._cut(span)
            states = self.decoder(inputs_embeds=states, position_ids=positions[None], use_cache=False).last_hidden_state
        else:
            cos, sin = (each[:, None] for each in self.decoder.rotary_emb(states, positions[None]))
            for block in self._fused[span.start - self.span.start : span.end - self.span.start]:
                states = block(states, cos, sin)
        return states[0].float()

    def _cut(self, span: Span) -> None:
        if span == self._cut_to:
            return
        first, last = span.start - self.span.start, span.end - self.span.start
        setattr(self.decoder, self._family.blocks, self.blocks[first:last])
        config = self.decoder.config
        config.num_hidden_layers = len(span)
        if self._layer_types is not None:  # the loop over the blocks reads them by their place in it
            config.layer_types = self._layer_types[span.start : span.end]
        self._cut_to = span


@dataclass(frozen=True, slots=True)
class Ends:
    """What a client keeps: from token ids to hidden states, and from hidden states to logits.

    Both are the transformers model without its blocks: `embedding` without what follows them, `scoring` without what
    comes before. So scaled embeddings, learned positions and softcaps are where the family has them, and once.
    """

    embedding: torch.nn.Module
    scoring: torch.nn.Module
    dtype: torch.dtype
    fused: FusedEnds | None

    @torch.inference_mode()
    def embed(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Hidden states (tokens, hidden_size), in fp32, of tokens at the positions `start` and on."""
        tokens = torch.tensor(token_ids)
        if self.fused is not None:
            return self.fused.embed(tokens).float()
        positions = torch.arange(start, start + len(token_ids))
        output = self.embedding(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output.last_hidden_state[0].float()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (tokens, vocabulary), in fp32, of the next token after each of `hidden` (tokens, hidden_size)."""
        hidden = hidden.to(self.dtype)
        if self.fused is not None:
            return self.fused.score(hidden).float()
        scores: torch.Tensor = _run_embedded(self.scoring, hidden).logits[0].float()
        return scores


def load_span(
    folder: ModelFolder,
    span: Span,
    attention: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quant: str = "none",
) -> SpanModel:
    """Read the tensors of the blocks of `span`, and of no other, whatever their dtype on disk.

    `attention` names an attention function registered with transformers. Blocks are read, fused and quantized (on
    torch's `device`) one by one: never more than one is there twice.
    Raises ModelError for an unsupported model or an incomplete folder.
    """
    family = family_of(folder.config)
    model = _without_weights(folder, family, attention, dtype)
    decoder = model.get_submodule(family.decoder)
    blocks = getattr(decoder, family.blocks)
    if quant != "none":
        check_quantizable(blocks)
    for block in range(span.start, span.end):
        _load(folder, model, _of_blocks(model, family, Span(block, block + 1)), dtype)
        if family.fused:
            join_products(blocks[block])
        if quant != "none":
            quantize_block(blocks[block], quant, device)
    _remove_entry(decoder, family)
    _remove_exit(decoder, family)
    _remove_blocks(decoder, family)
    _check_transparent(folder, decoder, dtype)
    setattr(decoder, family.blocks, blocks[span.start : span.end])
    decoder.requires_grad_(False).to(device)
    use_fastest(decoder)
    return SpanModel(decoder, family, span, dtype, attention)


def load_ends(folder: ModelFolder, dtype: torch.dtype = torch.float32) -> Ends:
    """Embeddings, final norm and head. Tied embeddings are read once. Raises ModelError as `load_span`."""
    family = family_of(folder.config)
    _register_no_attention()
    model = _without_weights(folder, family, _NO_ATTENTION, dtype)
    names = {name for name in model.state_dict() if not name.startswith(family.block_prefix)}
    _load(folder, model, names, dtype)
    model.requires_grad_(False)
    _remove_blocks(model.get_submodule(family.decoder), family)
    embedding = _shallow_copy(model, family.decoder).get_submodule(family.decoder)
    _remove_exit(embedding, family)
    scoring = _shallow_copy(model, family.decoder)
    _remove_entry(scoring.get_submodule(family.decoder), family)
    bare = _shallow_copy(scoring, family.decoder).get_submodule(family.decoder)
    _remove_exit(bare, family)
    _check_transparent(folder, bare, dtype)
    return Ends(embedding, scoring, dtype, FusedEnds(model, family) if family.fused else None)


def tensor_bytes(module: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class _NoPositions(torch.nn.Module):
    """In the place of learned position embeddings, which the ends have added already."""

    def forward(self, *_args: Any, **_kwargs: Any) -> torch.Tensor:  # Any: each family's own signature
        return torch.zeros(())


def _without_weights(
    folder: ModelFolder, family: Family, attention: str, dtype: torch.dtype
) -> Any:  # Any: as transformers types them
    """The causal LM with parameters of no storage; buffers, which no file holds, are computed."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(folder.config)  # transformers writes into it
    with init_empty_weights(include_buffers=False):
        known = "eager" if family.own_attention else attention
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=known, trust_remote_code=False
        )
    model.config._attn_implementation = attention  # by which the decoder knows whether to make a mask
    return model.eval()  # dropout is for training


def _of_blocks(model: Any, family: Family, span: Span) -> set[str]:
    prefixes = tuple(f"{family.block_prefix}{block}." for block in range(span.start, span.end))
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def _load(folder: ModelFolder, model: Any, names: set[str], dtype: torch.dtype) -> None:
    tensors = read_parameters(folder, model, names, dtype)
    model.load_state_dict(tensors, assign=True, strict=False)
    if names & model.all_tied_weights_keys.keys():
        # As from_pretrained: a tied head is stored once, and one that is stored and differs is not tied after all.
        model.tie_weights(missing_keys=set(model.state_dict()) - tensors.keys(), recompute_mapping=False)
    left = [name for name, tensor in model.state_dict().items() if name in names and tensor.is_meta]
    if left:
        raise ModelError(f"{folder.path} has no tensors for {_some(left)}: the folder is incomplete")


def _remove_entry(decoder: Any, family: Family) -> None:
    setattr(decoder, family.tokens, None)
    for name in family.enter:
        setattr(decoder, name, torch.nn.Identity())
    if family.positions is not None:
        setattr(decoder, family.positions, _NoPositions())
    if family.multiplier is not None:
        setattr(decoder, family.multiplier, 1.0)


def _remove_exit(decoder: Any, family: Family) -> None:
    for name in family.leave:
        setattr(decoder, name, torch.nn.Identity())


def _remove_blocks(decoder: Any, family: Family) -> None:
    setattr(decoder, family.blocks, torch.nn.ModuleList())
    # The blocks keep the whole model's config; the loop over them reads this one.
    decoder.config = copy.deepcopy(decoder.config)
    decoder.config.num_hidden_layers = 0


@torch.inference_mode()
def _check_transparent(folder: ModelFolder, decoder: Any, dtype: torch.dtype) -> None:
    """Without entry, blocks and exit nothing may happen to what comes in, else every span would do it once more."""
    hidden = torch.linspace(-2, 2, 3 * folder.info.hidden_size, dtype=dtype).view(3, -1)
    if not torch.equal(_run_embedded(decoder, hidden).last_hidden_state[0], hidden):
        raise ModelError(
            f"the family {folder.config.model_type!r} in this version of transformers changes hidden states "
            "before or after the blocks in a way that we do not know: use another version of transformers"
        )


def _run_embedded(module: torch.nn.Module, hidden: torch.Tensor) -> Any:  # Any: transformers' output
    """Run a model without blocks; the positions do not matter."""
    positions = torch.arange(len(hidden))
    return module(inputs_embeds=hidden[None], position_ids=positions[None], use_cache=False)


def _shallow_copy(model: Any, path: str) -> Any:
    """`model` with copies of itself and of the modules along `path`, which may be changed; all others are shared."""
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    name, _, rest = path.partition(".")
    if name:
        setattr(copied, name, _shallow_copy(getattr(model, name), rest))
    return copied


def _register_no_attention() -> None:
    from transformers import AttentionInterface

    def attend(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("the ends have no blocks")

    AttentionInterface.register(_NO_ATTENTION, attend)


def _some(names: Iterable[str], shown: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
