"""A batch with two adapters of PEFT, that learns in one process, and through a cut model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import peft
import torch

from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import NO_DROPOUT, Backward, Evaluate
from llmnode.core.span import Span
from llmnode.models.load import load_ends
from llmnode.models.lora import Lora, matrices, values_of
from llmnode.models.meta_model import run_embedded
from llmnode.models.tensors import from_bytes, to_bytes
from reference.lora import adopt, digest
from reference.small import BLOCKS, HIDDEN_SIZE, KV_TOKENS, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.compute.executor import SpanExecutor
    from llmnode.core.ids import AdapterId
    from llmnode.core.operations import Dropout
    from llmnode.models.lora import Part
    from llmnode.models.sources.folder import ModelFolder

EDGES = (0, 1, 4, BLOCKS)
ROWS = (("one", 23), (None, 4), ("two", 9), ("one", 1), ("two", 14), (None, 2))
"""The sequences of a batch: the adapter of each, and its length."""
_GATED = (["q_proj", "v_proj", "o_proj", "up_proj"], ["q_proj", "k_proj", "gate_proj", "down_proj"])
_FUSED_QKV = (["query_key_value", "dense_h_to_4h"], ["query_key_value", "dense", "dense_4h_to_h"])
TARGETS = {
    "llama": _GATED,
    "gpt2": (["c_attn", "c_fc"], ["c_attn", "c_proj"]),
    "bloom": _FUSED_QKV,
    "falcon-new": _FUSED_QKV,
    "gemma": _GATED,
    "mixtral": (["q_proj", "v_proj"], ["q_proj", "k_proj", "o_proj"]),
}
"""The layers that each of two adapters has, by the names that PEFT takes."""


def with_adapters(case: str, whole: Any) -> Any:  # Any: as PEFT types it
    """The model with two adapters of PEFT, of several ranks and scales, whose numbers matter."""
    one, two = TARGETS[case]
    first = peft.LoraConfig(r=4, lora_alpha=6, target_modules=one, rank_pattern={one[0]: 7})
    second = peft.LoraConfig(r=3, lora_alpha=5, target_modules=two, use_rslora=True, layers_to_transform=[1, 3, 4])
    model = peft.get_peft_model(whole, first, adapter_name="one")
    model.add_adapter("two", second)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def parts_of(model: Any, name: str, blocks: str) -> dict[int, Part]:
    """The parts of an adapter of PEFT, by block. `blocks` is what the names of all blocks' modules begin with."""
    parts: dict[int, dict[str, Lora]] = {}
    for path, module in model.base_model.model.named_modules():
        if name in getattr(module, "lora_A", {}):
            block, _, own_name = path.removeprefix(blocks).partition(".")
            a, b = module.lora_A[name].weight, module.lora_B[name].weight
            parts.setdefault(int(block), {})[own_name] = Lora(a, b, module.scaling[name])
    return dict(parts)


class Remote(torch.autograd.Function):
    """A span of blocks as autograd sees it, and the adapters of its rows: (tokens, hidden_size)."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, executor: SpanExecutor, found: Found) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.executor, ctx.found = executor, found
        rows = hidden.split([length for _, length in ROWS])
        passes = [
            Evaluate(executor.span, (len(row),), to_bytes(row), adapter=found.adapter(executor, name), dropout=dropout)
            for (name, _), row, dropout in zip(ROWS, rows, found.dropouts, strict=True)
        ]
        return torch.cat([from_bytes(each, HIDDEN_SIZE) for each in executor.run(passes)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (hidden,), executor, found = ctx.saved_tensors, ctx.executor, ctx.found
        lengths = [length for _, length in ROWS]
        passes = []
        numbers = zip(ROWS, hidden.split(lengths), gradient.split(lengths), found.dropouts, strict=True)
        for (name, length), row, wanted, dropout in numbers:
            values = sum(values_of(part) for part in found.here(executor, name).values())
            both = to_bytes(row), to_bytes(wanted)
            more: dict[str, Any] = {"adapter": found.adapter(executor, name), "dropout": dropout}
            passes.append(Backward(executor.span, (length,), *both, adapter_values=values, **more))
        gradients = []
        for each, (name, length), output in zip(passes, ROWS, executor.run(passes), strict=True):
            rows = length * HIDDEN_SIZE * 4
            gradients.append(from_bytes(memoryview(output)[:rows], HIDDEN_SIZE))
            of_adapter = torch.frombuffer(bytearray(memoryview(output)[rows:]) or bytearray(4), dtype=torch.float32)
            assert len(of_adapter) == max(1, each.adapter_values)
            found.add(executor, name, of_adapter)
        return torch.cat(gradients), None, None


class Found:
    """The parts of all adapters, their dropout, and the gradients that executors have given for their matrices."""

    def __init__(self, parts: Mapping[str, Mapping[int, Part]], dropouts: Sequence[Dropout] | None = None) -> None:
        """`dropouts` has that of each of `ROWS`."""
        self.parts = parts
        self.dropouts = dropouts or [NO_DROPOUT] * len(ROWS)
        self.row = 0
        """The one that goes through the whole model now."""
        self.gradients = {
            name: {block: [torch.zeros_like(each) for each in matrices(part)] for block, part in of_name.items()}
            for name, of_name in parts.items()
        }

    @property
    def blocks(self) -> list[tuple[str, int]]:
        """The blocks of each adapter, by its name."""
        return [(name, block) for name, of_name in self.parts.items() for block in of_name]

    def here(self, executor: SpanExecutor, name: str | None) -> Mapping[int, Part]:
        span = executor.span
        of_name = {} if name is None else self.parts[name]
        return {block: part for block, part in of_name.items() if span.start <= block < span.end}

    def adapter(self, executor: SpanExecutor, name: str | None) -> AdapterId | None:
        return digest(name) if name is not None and self.here(executor, name) else None

    def add(self, executor: SpanExecutor, name: str | None, values: torch.Tensor) -> None:
        at = 0
        for block in sorted(self.here(executor, name)):
            for gradient in self.gradients[name or ""][block]:
                gradient += values[at : at + gradient.numel()].view(gradient.shape)
                at += gradient.numel()


@dataclass(frozen=True)
class Batch:
    """Sequences as `ROWS` has them. The loss is the sum of the scores, weighted."""

    embedded: list[torch.Tensor]  # each (tokens, hidden_size)
    weights: list[torch.Tensor]  # each (tokens, vocabulary)


@dataclass(frozen=True)
class Learned:
    """Scores, and the gradients of what goes in and of the matrices of all adapters."""

    scores: list[torch.Tensor]
    of_inputs: Sequence[torch.Tensor]
    of_matrices: Sequence[torch.Tensor]


def batch_for(whole: Any) -> Batch:
    """Drawn tokens and weights."""
    generator = torch.Generator().manual_seed(1)
    embedding = whole.get_input_embeddings()
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for _, length in ROWS]
    embedded = [embedding(each).detach().requires_grad_() for each in tokens]
    return Batch(embedded, [torch.randn(length, VOCABULARY, generator=generator) for _, length in ROWS])


def learn_whole(model: Any, found: Found, batch: Batch) -> Learned:
    """By PEFT, over the whole model of transformers."""
    scores = []
    for (name, _), each in zip(ROWS, batch.embedded, strict=True):
        found.row = len(scores)
        if name is None:
            with model.disable_adapter():
                scores.append(model(inputs_embeds=each[None]).logits[0])
        else:
            model.set_adapter(name)
            scores.append(model(inputs_embeds=each[None]).logits[0])
    leaves = [each for name, block in found.blocks for each in matrices(found.parts[name][block])]
    for each in leaves:
        each.requires_grad_()
    losses = [(a * b).sum() for a, b in zip(scores, batch.weights, strict=True)]
    gradients = torch.autograd.grad(losses, [*batch.embedded, *leaves])
    return Learned(scores, gradients[: len(ROWS)], gradients[len(ROWS) :])


def learn_cut(folder: ModelFolder, found: Found, batch: Batch, **held: Any) -> Learned:
    """Through executors, which hold their blocks as `held` says."""
    ends, lengths = load_ends(folder), [length for _, length in ROWS]
    hidden = torch.cat(
        [
            ends.embedding(
                inputs_embeds=each[None], position_ids=torch.arange(len(each))[None], use_cache=False
            ).last_hidden_state[0]
            for each in batch.embedded
        ]
    )
    for edge in pairwise(EDGES):
        executor = load_executor(folder, Span(*edge), KV_TOKENS, **held)
        for name, parts in found.parts.items():
            adopt(executor, digest(name), parts)
        hidden = Remote.apply(hidden, executor, found)
    scores = [run_embedded(ends.scoring, each).logits[0] for each in hidden.split(lengths)]
    losses = [(a * b).sum() for a, b in zip(scores, batch.weights, strict=True)]
    of_inputs = torch.autograd.grad(losses, batch.embedded)
    return Learned(scores, of_inputs, [each for name, block in found.blocks for each in found.gradients[name][block]])
