"""Sessions with adapters go through blocks in Rust like others, with the results of torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from llmnode.core.operations import Adopt, Forget
from llmnode.errors import LocalProtocolError
from llmnode.models.lora import Lora, pack_part, read_part, targets_of, values_of
from llmnode.models.native import _array
from reference.lora import FURTHEST, adopt, digest, error
from reference.small import BLOCKS, FUSED, KV_TOKENS, Cut, cut, open_saved, save_model, session
from reference.test_native_blocks import counted, outputs, schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.lora import Part

pytestmark = pytest.mark.reference

RANKS = {"one": 16, "two": 3}
OF_SESSIONS = {session(0): digest("one"), session(1): digest("two"), session(2): digest("one")}
"""The fourth session has none."""


def parts_of(executor: SpanExecutor, name: str) -> Mapping[int, Part]:
    """An adapter for all layers, or for some in some of the blocks."""
    generator = torch.Generator().manual_seed(RANKS[name])
    parts: dict[int, dict[str, Lora]] = {}
    for index, block in enumerate(executor.model.blocks, executor.span.start):
        for at, (path, target) in enumerate(sorted(targets_of(block).items())):
            a = 0.2 * torch.randn(RANKS[name], target.inputs, generator=generator)
            b = 0.2 * torch.randn(target.outputs, RANKS[name], generator=generator)
            if name == "one" or (index != 2 and at % 3):
                parts.setdefault(index, {})[path] = Lora(a, b, 0.7)
    return parts


def adopted(path: Path, edges: Sequence[int], quant: str = "none") -> Cut:
    model = cut(open_saved(path), edges, quant=quant)
    for executor in model.executors:
        for name in RANKS:
            adopt(executor, digest(name), parts_of(executor, name))
    model.adapters.update(OF_SESSIONS)
    return model


@pytest.mark.parametrize("case", FUSED)
def test_few_positions_with_adapters_and_many_agree(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, case, tied=False)
    forwards = schedule(len(case))
    model = adopted(tmp_path, (0, 2, BLOCKS))
    taken = counted(model, monkeypatch)
    ours = outputs(model, forwards)
    assert taken == [len(each) for each in forwards for _ in model.executors], "one forward for all"
    monkeypatch.setattr("llmnode.compute.executor.are_few", lambda _lengths: False)
    by_torch = outputs(adopted(tmp_path, (0, 2, BLOCKS)), forwards)
    plain = outputs(cut(open_saved(tmp_path), (0, 2, BLOCKS)), forwards)
    for one, other in zip(ours, by_torch, strict=True):
        assert error(one, other) < FURTHEST
    assert error(torch.cat(ours), torch.cat(plain)) > 0.01


def test_weights_in_8_bits_have_adapters_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for inputs that the last bit of a sum takes to another step."""
    save_model(tmp_path, "qwen2", tied=False)
    forwards = schedule(5)
    model = adopted(tmp_path, (0, BLOCKS), quant="int8")
    taken = counted(model, monkeypatch)
    ours = torch.cat(outputs(model, forwards))
    assert len(taken) == len(forwards)
    monkeypatch.setattr("llmnode.compute.executor.are_few", lambda _lengths: False)
    difference = (ours - torch.cat(outputs(adopted(tmp_path, (0, BLOCKS), quant="int8"), forwards))).abs()
    assert difference.median() < 2e-5
    assert difference.max() < 0.3


def test_a_decode_does_not_depend_on_the_adapters_of_its_mates_by_a_bit(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    together, alone = adopted(tmp_path, (0, BLOCKS)), adopted(tmp_path, (0, BLOCKS))
    plain = cut(open_saved(tmp_path), (0, BLOCKS))
    chunks = {session(name): [name + 3, 5, name] for name in (3, 0, 1, 2)}
    for _ in range(3):
        found = together.forward(chunks)
        for name, output in found.items():
            assert torch.equal(alone.forward({name: chunks[name]})[name], output)
        assert torch.equal(plain.forward({session(3): chunks[session(3)]})[session(3)], found[session(3)])


def test_a_part_that_was_sent_is_read_by_blocks_in_rust_where_it_is(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    (executor,) = cut(open_saved(tmp_path), (0, BLOCKS)).executors
    part = read_part(pack_part(parts_of(executor, "one")[1]), targets_of(executor.model.blocks[1]), torch.device("cpu"))
    for lora in part.values():
        for matrix in (lora.a, lora.b.t()):
            assert np.shares_memory(_array(matrix), matrix.numpy()), "the adapter is in memory once"


def test_a_part_that_comes_later_counts_and_a_forgotten_adapter_does_not(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    model = cut(open_saved(tmp_path), (0, BLOCKS))
    (executor,) = model.executors
    model.adapters.update({session(number): digest("one") for number in range(4)})
    parts = parts_of(executor, "one")
    adopt(executor, digest("one"), {1: parts[1]})
    first = model.forward({session(0): [3, 1, 4]})[session(0)]
    adopt(executor, digest("one"), {3: parts[3]})
    second = model.forward({session(1): [3, 1, 4]})[session(1)]
    assert not torch.equal(first, second)
    assert executor.apply(Forget(digest("one")))
    with pytest.raises(LocalProtocolError, match="is not here"):
        model.forward({session(2): [3, 1, 4]})
    other = {name: replace(lora, scale=2 * lora.scale) for name, lora in parts[1].items()}
    assert executor.apply(Adopt(digest("one"), 1, values_of(other), pack_part(other)))
    third = model.forward({session(3): [3, 1, 4]})[session(3)]
    assert not torch.equal(first, third)
    model.close()
    assert executor.kv_tokens_free() == KV_TOKENS
