"""Low-rank adapters over frozen blocks, several in one batch, against PEFT over the whole model in one process."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch

from llmnode.client.absent_blocks import absent_blocks
from llmnode.client.block_adapters import BlockAdapters
from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import Backward, Close, Evaluate, Open, Slice
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.families import family_of
from llmnode.models.load import load_ends
from llmnode.models.lora import Lora, matrices, values_of
from llmnode.models.meta_model import run_embedded
from llmnode.models.tensors import from_bytes, to_bytes
from reference.lora import FURTHEST, adopt, digest, error
from reference.small import BLOCKS, HIDDEN_SIZE, KV_TOKENS, VOCABULARY, make_model, open_saved, session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.core.ids import AdapterId
    from llmnode.models.lora import Part
    from llmnode.wire.adapter import Adapter


pytestmark = pytest.mark.reference

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
            Evaluate(executor.span, (len(row),), to_bytes(row), adapter=found.adapter(executor, name))
            for (name, _), row in zip(ROWS, rows, strict=True)
        ]
        return torch.cat([from_bytes(each, HIDDEN_SIZE) for each in executor.run(passes)])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (hidden,), executor, found = ctx.saved_tensors, ctx.executor, ctx.found
        lengths = [length for _, length in ROWS]
        passes = []
        for (name, length), row, wanted in zip(ROWS, hidden.split(lengths), gradient.split(lengths), strict=True):
            values = sum(values_of(part) for part in found.here(executor, name).values())
            adapter = found.adapter(executor, name)
            passes.append(
                Backward(
                    executor.span, (length,), to_bytes(row), to_bytes(wanted), adapter=adapter, adapter_values=values
                )
            )
        gradients = []
        for each, (name, length), output in zip(passes, ROWS, executor.run(passes), strict=True):
            rows = length * HIDDEN_SIZE * 4
            gradients.append(from_bytes(memoryview(output)[:rows], HIDDEN_SIZE))
            of_adapter = torch.frombuffer(bytearray(memoryview(output)[rows:]) or bytearray(4), dtype=torch.float32)
            assert len(of_adapter) == max(1, each.adapter_values)
            found.add(executor, name, of_adapter)
        return torch.cat(gradients), None, None


class Found:
    """The parts of all adapters, and the gradients that executors have given for their matrices."""

    def __init__(self, parts: Mapping[str, Mapping[int, Part]]) -> None:
        self.parts = parts
        self.gradients = {
            name: {block: [torch.zeros_like(each) for each in matrices(part)] for block, part in of_name.items()}
            for name, of_name in parts.items()
        }

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


@pytest.mark.parametrize("case", TARGETS)
def test_outputs_and_gradients_of_a_batch_are_those_of_peft_for_each_sequence(case: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    model = with_adapters(case, whole)
    prefix = family_of(folder.config).block_prefix
    found = Found({name: parts_of(model, name, prefix) for name in ("one", "two")})
    ends = load_ends(folder)
    generator = torch.Generator().manual_seed(1)
    embedding = whole.get_input_embeddings()
    tokens = [torch.randint(VOCABULARY, (length,), generator=generator) for _, length in ROWS]
    embedded = [embedding(each).detach().requires_grad_() for each in tokens]
    weights = [torch.randn(length, VOCABULARY, generator=generator) for _, length in ROWS]

    scores = []
    for (name, _), each in zip(ROWS, embedded, strict=True):
        if name is None:
            with model.disable_adapter():
                scores.append(model(inputs_embeds=each[None]).logits[0])
        else:
            model.set_adapter(name)
            scores.append(model(inputs_embeds=each[None]).logits[0])
    named = [(name, block) for name, of_name in found.parts.items() for block in of_name]
    leaves = [each for name, block in named for each in matrices(found.parts[name][block])]
    for each in leaves:
        each.requires_grad_()
    losses = [(a * b).sum() for a, b in zip(scores, weights, strict=True)]
    theirs = torch.autograd.grad(losses, [*embedded, *leaves])

    hidden = torch.cat(
        [
            ends.embedding(
                inputs_embeds=each[None], position_ids=torch.arange(len(each))[None], use_cache=False
            ).last_hidden_state[0]
            for each in embedded
        ]
    )
    for edge in pairwise(EDGES):
        executor = load_executor(folder, Span(*edge), KV_TOKENS)
        for name, parts in found.parts.items():
            adopt(executor, digest(name), parts)
        hidden = Remote.apply(hidden, executor, found)
    ours_scores = [run_embedded(ends.scoring, each).logits[0] for each in hidden.split([len(e) for e in embedded])]
    ours = torch.autograd.grad([(a * b).sum() for a, b in zip(ours_scores, weights, strict=True)], embedded)
    for one, other in zip(ours_scores, scores, strict=True):
        assert error(one, other) < FURTHEST
    for one, other in zip(ours, theirs, strict=False):
        assert error(one, other) < FURTHEST
    gradients = [each for name, block in named for each in found.gradients[name][block]]
    for one, other in zip(gradients, theirs[len(embedded) :], strict=True):
        assert other.norm() > 0
        assert error(one, other) < FURTHEST


def _sizes(parts: Mapping[int, Part]) -> dict[int, dict[str, Any]]:
    return {
        block: {name: (lora.a.shape, lora.b.shape, lora.scale) for name, lora in part.items()}
        for block, part in parts.items()
    }


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("case", TARGETS)
def test_a_client_without_weights_has_the_layers_that_peft_finds_in_the_whole_model(
    case: str, number: int, tmp_path: Path
) -> None:
    whole = make_model(case, tied=True)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    config = peft.LoraConfig(r=3, target_modules=TARGETS[case][number])
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    assert adapters.adapter(adapters.parts()) is None
    peft.inject_adapter_in_model(config, torch.nn.ModuleList(adapters.blocks))
    theirs = parts_of(peft.get_peft_model(whole, config), "default", family_of(folder.config).block_prefix)
    assert _sizes(adapters.parts()) == _sizes(theirs)


def test_an_adapter_is_made_anew_only_when_a_matrix_has_changed(tmp_path: Path) -> None:
    make_model("llama", tied=True).save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    adapters = BlockAdapters(folder.info.digest, absent_blocks(folder))
    blocks = torch.nn.ModuleList(adapters.blocks)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj"]), blocks)

    def now() -> Adapter:
        adapter = adapters.adapter(adapters.parts())
        assert adapter is not None
        return adapter

    first = now()
    assert now() is first
    trained = [each for each in blocks[2].parameters() if each.requires_grad]
    for each in trained:
        each.grad = torch.ones_like(each)
    torch.optim.SGD(trained, lr=0.1).step()
    second = now()
    assert second.digest != first.digest
    assert [block for block in second.parts if second.parts[block] is not first.parts[block]] == [2]
    with torch.no_grad():
        trained[0].fill_(float("nan"))
    with pytest.raises(ConfigError, match="not finite"):
        now()


@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom", "mixtral"])
def test_sessions_with_different_adapters_share_prefills_and_decodes(case: str, tmp_path: Path) -> None:
    whole = make_model(case, tied=False)
    whole.save_pretrained(tmp_path)
    folder = open_saved(tmp_path)
    model = with_adapters(case, whole)
    parts = {name: parts_of(model, name, family_of(folder.config).block_prefix) for name in ("one", "two")}
    executor, ends = load_executor(folder, Span(0, BLOCKS), KV_TOKENS), load_ends(folder)
    for name, own in parts.items():
        adopt(executor, digest(name), own)
    names = ("one", None, "two", "one")
    texts = torch.randint(VOCABULARY, (len(names), 14), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = []
        for name, text in zip(names, texts, strict=True):
            if name is None:
                with model.disable_adapter():
                    expected.append(model(text[None]).logits[0])
            else:
                model.set_adapter(name)
                expected.append(model(text[None]).logits[0])
    for number, name in enumerate(names):
        adapter = None if name is None else digest(name)
        assert executor.apply(Open(session(number), executor.span, 20, adapter=adapter))
    scores: list[list[torch.Tensor]] = [[] for _ in names]
    for start, end in pairwise((0, 7, 8, 9, 12, 13, 14)):
        slices = [
            Slice(session(number), start, end - start, to_bytes(ends.embed(text[start:end].tolist(), start)))
            for number, text in enumerate(texts)
        ]
        for own_scores, output in zip(scores, executor.forward(slices), strict=True):
            own_scores.append(ends.logits(from_bytes(output, HIDDEN_SIZE)))
    for own_scores, theirs in zip(scores, expected, strict=True):
        assert error(torch.cat(own_scores), theirs) < FURTHEST
    for number in range(len(names)):
        executor.apply(Close(session(number)))
