"""The parts of a model that a node runs: a span of blocks, or the ends.

A part is cut out of the transformers model itself: the model is built without weights, the tensors that the part needs
are read, and everything else is removed. The differences between families are rows in `families.py`. The blocks of the
Llama kind are those of `fused.py` instead, made as `blueprint.py` says.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from llmnode.core.span import Span
from llmnode.models.decoder_parts import entry_of, exit_of, replace_decoder, shallow_copy
from llmnode.models.draw_blueprint import blueprint_of
from llmnode.models.families import Family, family_of
from llmnode.models.fused import FusedEnds, FusedSpan
from llmnode.models.layers import Rotary, join_products, make_block
from llmnode.models.meta_model import (
    ATTENTIONS,
    check_transparent,
    remove_blocks,
    remove_entry,
    remove_exit,
    run_embedded,
    without_weights,
)
from llmnode.models.native import native_blocks, takes_narrow
from llmnode.models.packed_ends import keep_ends_narrow
from llmnode.models.sources.missing import check_complete
from llmnode.models.text.vocabulary import check_tokens
from llmnode.models.weights.matmul_choice import use_fastest
from llmnode.models.weights.packed_linear import Narrow, found_narrow, keep_narrow
from llmnode.models.weights.quantized import check_quantizable, has_experts, quantize_block
from llmnode.models.weights.quantized_cache import KeptBlocks
from llmnode.models.weights.read_block import block_dtypes, read_block, read_parameters
from llmnode.models.weights.read_progress import Reading, say_nothing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from llmnode.models.blueprint import Blueprint
    from llmnode.models.sources.folder import ModelFolder

_NO_ATTENTION = "llmnode-none"
"""For the ends, which have no block: transformers then makes no attention mask."""


class SpanModel(torch.nn.Module):
    """A transformers decoder cut to the blocks of `span`. Hidden states are fp32 outside, of the weights' dtype inside.

    One thread at a time may use it: a forward through a part of the span moves the cut.
    """

    def __init__(self, decoder: Any, family: Family, span: Span, dtype: torch.dtype) -> None:  # Any: transformers' own
        super().__init__()
        self.span = span
        self.native = None  # of no family that is not fused
        self.decoder = decoder
        self.blocks = getattr(decoder, family.blocks)
        self._family = family
        self._layer_types = getattr(decoder.config, "layer_types", None)
        self.dtype = dtype
        self._cut_to: Span | None = None

    def forward(self, span: Span, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`hidden` (tokens, hidden_size) at `positions` (tokens), through the blocks of `span`, a part of ours."""
        self._cut(span)
        states = hidden[None].to(self.dtype)
        output = self.decoder(inputs_embeds=states, position_ids=positions[None], use_cache=False)
        last: torch.Tensor = output.last_hidden_state[0].float()
        return last

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
    """A client's part: from token ids to hidden states, and from hidden states to logits.

    Both are the transformers model without its blocks. `embedding` has the modules before them, `scoring` those after.
    So each scaled embedding, learned position and softcap is applied once, where the family has it.
    """

    embedding: torch.nn.Module
    scoring: torch.nn.Module
    dtype: torch.dtype
    vocabulary: int
    """Tokens that can go in: rows of the embedding."""
    fused: FusedEnds | None
    decoder: str
    """The path to the decoder in `scoring`."""
    whole: Any  # Any: as transformers types a causal LM
    """The causal LM without its blocks. Both parts are copies of it, and share its modules."""

    def embed(self, token_ids: list[int], start: int) -> torch.Tensor:
        """Hidden states (tokens, hidden_size), in fp32, of tokens at the positions `start` and on.

        Raises ConfigError as `check_tokens`.
        """
        check_tokens(token_ids, self.vocabulary)
        return self.embed_at(torch.tensor(token_ids), torch.arange(start, start + len(token_ids)))

    @torch.inference_mode()
    def embed_at(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Like `embed`, for tokens (tokens,) at `positions` (tokens,), which are tokens of the model."""
        if self.fused is not None:
            return self.fused.embed(tokens).float()
        return self._entered(positions, input_ids=tokens[None])

    @torch.inference_mode()
    def enter(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Like `embed_at`, for `embeddings` (tokens, size): the output of the input embeddings, before anything
        else.
        """
        return self._entered(positions, inputs_embeds=embeddings[None].to(self.dtype))

    def _entered(self, positions: torch.Tensor, **given: torch.Tensor) -> torch.Tensor:
        output = self.embedding(position_ids=positions[None], use_cache=False, **given)
        hidden: torch.Tensor = output.last_hidden_state[0].float()
        return hidden

    @torch.inference_mode()
    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of the head, (tokens, size) in fp32, for `hidden` (tokens, hidden_size) after the last block."""
        decoder = self.scoring.get_submodule(self.decoder)
        states: torch.Tensor = run_embedded(decoder, hidden.to(self.dtype)).last_hidden_state[0].float()
        return states

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (tokens, vocabulary), in fp32, of the next token after each of `hidden` (tokens, hidden_size)."""
        hidden = hidden.to(self.dtype)
        if self.fused is not None:
            return self.fused.score(hidden).float()
        scores: torch.Tensor = run_embedded(self.scoring, hidden).logits[0].float()
        return scores


_shared_blocks: ContextVar[Mapping[int, torch.nn.Module]] = ContextVar("_shared_blocks", default=MappingProxyType({}))


@contextmanager
def sharing_blocks(model: SpanModel | FusedSpan) -> Iterator[None]:
    """In this context `load_span` takes blocks that `model` has from there. It must load in the same way as `model` was
    loaded, which may be in use meanwhile.
    """
    numbers = range(model.span.start, model.span.end)
    token = _shared_blocks.set(dict(zip(numbers, model.blocks, strict=True)))
    try:
        yield
    finally:
        _shared_blocks.reset(token)


def load_span(
    folder: ModelFolder,
    span: Span,
    attention: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quant: str = "none",
    *,
    in_rust: bool = False,
    report: Callable[[str], None] = say_nothing,
) -> SpanModel | FusedSpan:
    """Read the tensors of the blocks of `span`, and of no other: not of those that are shared, see `sharing_blocks`.

    `attention` names an attention function registered with transformers, or one of `ATTENTIONS`. Blocks are read,
    fused, quantized and moved to torch's `device` one by one: never more than one is there twice. `report` is told in a
    line, every few seconds, how many are read. If `in_rust`, there is `native` too, for blocks that it can be, whose
    matrices are then in as few bits as they need (`weights/packed_linear.py`).

    Raises ModelError for an unsupported model or an incomplete folder.
    """
    if (blueprint := blueprint_of(folder)) is not None:
        form = _Form(dtype, device, quant, attention, in_rust)
        return _load_fused(folder, blueprint, span, form, report)
    family = family_of(folder.config)
    model = without_weights(folder, family, attention, dtype)
    decoder = model.get_submodule(family.decoder)
    blocks = getattr(decoder, family.blocks)
    if quant != "none":
        check_quantizable(blocks)
    reading, kept = Reading(span, quant, report), KeptBlocks(folder, span, dtype, quant, device)
    shared = _shared_blocks.get()
    for block in reading.blocks():
        if block in shared:
            blocks[block] = shared[block]
            continue
        if not kept.fill(block, blocks[block]):
            _load(folder, model, _of_blocks(model, family, Span(block, block + 1)), dtype)
            if quant != "none":
                with reading.rounding():
                    quantize_block(blocks[block], quant, device)
                kept.keep(block, blocks[block])
        blocks[block].requires_grad_(False).to(device)
    remove_entry(decoder, family)
    remove_exit(decoder, family)
    remove_blocks(decoder, family)
    check_transparent(folder, decoder, dtype)
    setattr(decoder, family.blocks, blocks[span.start : span.end])
    decoder.requires_grad_(False).to(device)
    use_fastest(torch.nn.ModuleList(blocks[each] for each in range(span.start, span.end) if each not in shared))
    return SpanModel(decoder, family, span, dtype)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form in which blocks are held, and where, and how they compute: see `load_span`."""

    dtype: torch.dtype
    device: str
    quant: str
    attention: str
    in_rust: bool


def _load_fused(
    folder: ModelFolder,
    blueprint: Blueprint,
    span: Span,
    form: _Form,
    report: Callable[[str], None],
) -> FusedSpan:
    """The same as `load_span`, without transformers."""
    dtype, device, quant, shared = form.dtype, form.device, form.quant, _shared_blocks.get()
    blocks, fresh = torch.nn.ModuleList(), torch.nn.ModuleList()
    is_narrow = form.in_rust and takes_narrow(blueprint, dtype, device, quant)
    reading, kept = Reading(span, quant, report), KeptBlocks(folder, span, dtype, quant, device)
    for index in reading.blocks():
        if index in shared:
            blocks.append(shared[index])
            continue
        block = _joined_block(blueprint, index, dtype)
        if not kept.fill(index, block):
            block = _load_block(folder, blueprint, index, dtype, is_narrow=is_narrow)
            if quant != "none":
                with reading.rounding():
                    quantize_block(block, quant, device)
                kept.keep(index, block)
        blocks.append(block.requires_grad_(False).to(device))
        fresh.append(block)
    rotary = Rotary(blueprint.frequencies, blueprint.rotary_scaling)
    native = native_blocks(blocks, rotary) if form.in_rust else None
    if native is None:
        use_fastest(fresh)
    return FusedSpan(blocks, rotary.to(device), span, dtype, form.attention, native)


def _joined_block(blueprint: Blueprint, index: int, dtype: torch.dtype) -> Any:  # Any: as transformers types one
    """A block in fewer operations, without storage."""
    plan = blueprint.blocks[index]
    block = make_block(plan, index, blueprint.activation, dict.fromkeys(plan.shapes, dtype))
    join_products(block)
    return block


def _load_block(
    folder: ModelFolder, blueprint: Blueprint, index: int, dtype: torch.dtype, *, is_narrow: bool
) -> Any:  # Any: as transformers types one
    plan = blueprint.blocks[index]
    block = make_block(plan, index, blueprint.activation, block_dtypes(folder, index, plan, dtype, halves=is_narrow))
    block.load_state_dict(read_block(folder, index, block.state_dict()), assign=True)
    join_products(block)
    if is_narrow:
        keep_narrow(block)
    return block


def can_quantize(folder: ModelFolder) -> bool:
    """Whether its blocks can be quantized, by its config alone. Raises ModelError as `load_span`."""
    if blueprint_of(folder) is not None:
        return True
    family = family_of(folder.config)
    decoder = without_weights(folder, family, "eager", torch.float32).get_submodule(family.decoder)
    return not has_experts(getattr(decoder, family.blocks))


def found_block_bytes(folder: ModelFolder) -> int | None:
    """The size of a block in fp32 on a CPU, if files have it in 32 bits and it needs no more than 8; else None.

    The first block decides, and then the largest of it, the last and one between. It reads these, but not of a folder
    that would have to obtain them, such as one of the hub. Raises ModelError as `load_span`.
    """
    blueprint = blueprint_of(folder)
    if blueprint is None or not folder.is_local or not takes_narrow(blueprint, torch.float32, "cpu", "none"):
        return None
    if set(block_dtypes(folder, 0, blueprint.blocks[0], torch.float32, halves=True).values()) != {torch.float32}:
        return None
    name = "self_attn.k_proj.weight"  # a small one tells most models that need all their bits
    outputs, inputs = blueprint.blocks[0].shapes[name]
    layer = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float32, device="meta").requires_grad_(False)
    layer.load_state_dict({"weight": read_block(folder, 0, {name: layer.weight})[name]}, assign=True)
    if found_narrow(layer) is None:
        return None
    last = len(blueprint.blocks) - 1
    found_bytes = []
    for index in dict.fromkeys((0, last // 2, last)):
        block = _load_block(folder, blueprint, index, torch.float32, is_narrow=True)
        if any(isinstance(each, torch.nn.Linear) for each in block.modules()):
            return None
        found_bytes.append(tensor_bytes(block))
    return max(found_bytes)


def load_ends(folder: ModelFolder, dtype: torch.dtype = torch.float32) -> Ends:
    """Embeddings, final norm and head. Tied embeddings are read once. Raises ModelError as `load_span`.

    In a fused family, parts that are computed in fp32 are kept in the fewest bits that they need.
    """
    family = family_of(folder.config)
    ATTENTIONS[_NO_ATTENTION] = _no_attention
    model = without_weights(folder, family, _NO_ATTENTION, dtype)
    names = {name for name in model.state_dict() if not name.startswith(family.block_prefix)}
    _load(folder, model, names, dtype)
    model.requires_grad_(False)
    if family.fused and dtype == torch.float32:
        keep_ends_narrow(model, model.get_submodule(family.decoder), family.tokens)
    decoder = model.get_submodule(family.decoder)
    remove_blocks(decoder, family)
    check_transparent(folder, entry_of(exit_of(decoder, family), family), dtype)
    vocabulary: int = getattr(decoder, family.tokens).num_embeddings
    return cut_ends(model, family, dtype, vocabulary, FusedEnds(model, family) if family.fused else None)


def load_head(
    folder: ModelFolder, ends: Ends, kind: Any, options: Mapping[str, object]
) -> Any:  # Any: as transformers types models with heads
    """A model of transformers without blocks, whose decoder is that of `ends`, and whose head is drawn anew.

    `kind` is AutoModelForSequenceClassification or the like, and `options` change its config. Raises ModelError as
    `load_span`.
    """
    family = family_of(folder.config)
    model = without_weights(folder, family, _NO_ATTENTION, ends.dtype, kind, options)
    for name, module in model.named_children():
        if name != family.decoder.partition(".")[0]:
            module.to_empty(device="cpu")
            module.apply(model._init_weights)
    return replace_decoder(model, family, ends.whole.get_submodule(family.decoder))


def cut_ends(
    whole: Any, family: Family, dtype: torch.dtype, vocabulary: int, fused: FusedEnds | None = None
) -> Ends:  # Any: as transformers types a causal LM
    """The ends of a causal LM without blocks. `fused` is the same in fewer operations."""
    decoder = whole.get_submodule(family.decoder)
    scoring = shallow_copy(whole, family.decoder)
    remove_entry(scoring.get_submodule(family.decoder), family)
    return Ends(entry_of(decoder, family), scoring, dtype, vocabulary, fused, family.decoder, whole)


def tensor_bytes(module: torch.nn.Module) -> int:
    """The memory of the parameters of `module`, and of its weights in fewer bits, which are buffers."""
    packed = (each for part in module.modules() if isinstance(part, Narrow) for each in part.buffers(recurse=False))
    # A stand-in for a weight in fewer bits (`packed_ends.py`) has no numbers.
    plain = (each for each in module.parameters() if each.untyped_storage().nbytes() >= each.nbytes)
    return sum(each.nbytes for each in (*plain, *packed))


def _of_blocks(model: Any, family: Family, span: Span) -> set[str]:
    prefixes = tuple(f"{family.block_prefix}{block}." for block in range(span.start, span.end))
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def _load(folder: ModelFolder, model: Any, names: set[str], dtype: torch.dtype) -> None:
    tensors = read_parameters(folder, model, names, dtype)
    model.load_state_dict(tensors, assign=True, strict=False)
    if names & model.all_tied_weights_keys.keys():
        # The same as from_pretrained: a tied head is stored once, and one that is stored and differs is not tied after
        # all.
        model.tie_weights(missing_keys=set(model.state_dict()) - tensors.keys(), recompute_mapping=False)
    left = [name for name, tensor in model.state_dict().items() if name in names and tensor.is_meta]
    check_complete(folder, left)


def _no_attention(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise AssertionError("the ends have no blocks")
