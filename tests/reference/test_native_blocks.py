"""In Llama-like models, few positions go through `models/native.py` and many through torch, over the same KV, with
equal results.
"""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from llmnode.compute.kv import KVForm
from llmnode.core.operations import Open, Slice
from llmnode.errors import LocalProtocolError
from llmnode.models.fused import FusedSpan
from llmnode.models.native import MOST_POSITIONS, NativeBlocks, are_few, native_blocks
from llmnode.models.tensors import to_bytes
from reference.small import (
    BLOCKS,
    FUSED,
    HIDDEN_SIZE,
    VOCABULARY,
    Cut,
    cut,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode._native import LlamaBlocks
    from llmnode.core.ids import SessionId

pytestmark = pytest.mark.reference


def schedule(seed: int) -> list[dict[SessionId, list[int]]]:
    """The sequences of each forward: decodes, and short and long chunks."""
    random = Random(seed)
    forwards = []
    for _ in range(8):
        who = random.sample(range(4), random.randint(1, 4))
        lengths = {name: random.choice([1, 1, 1, 2, 7]) for name in who}
        forwards.append({session(name): random.choices(range(VOCABULARY), k=lengths[name]) for name in who})
    return forwards


def outputs(model: Cut, forwards: list[dict[SessionId, list[int]]]) -> list[torch.Tensor]:
    return [each for chunks in forwards for each in model.forward(chunks).values()]


def counted(model: Cut, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sequences of each forward in Rust."""
    taken: list[int] = []
    for executor in model.executors:
        native = executor.model.native
        assert native is not None

        def forward(
            first: int, end: int, pieces: Any, adapters: Any = None, blocks: LlamaBlocks = native.blocks
        ) -> list[bytes]:
            taken.append(len(pieces))
            return blocks.forward(first, end, pieces, adapters)

        counting = NativeBlocks(cast("LlamaBlocks", SimpleNamespace(forward=forward)), native.no_kv)
        monkeypatch.setattr(executor.model, "native", counting)
    return taken


@pytest.mark.parametrize("case", FUSED)
def test_few_positions_and_many_agree(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(tmp_path, case, tied=False)
    folder, forwards = open_saved(tmp_path), schedule(len(case))
    model = cut(folder, (0, 2, BLOCKS))
    taken = counted(model, monkeypatch)
    monkeypatch.setattr("llmnode.models.native.MOST_POSITIONS", 7)
    mixed = outputs(model, forwards)
    few = [len(each) for each in forwards if are_few([len(tokens) for tokens in each.values()])]
    assert taken == [sequences for sequences in few for _ in model.executors], "and no other"
    assert 0 < len(few) < len(forwards)
    monkeypatch.setattr("llmnode.compute.executor.are_few", lambda _lengths: False)
    for ours, by_torch in zip(mixed, outputs(cut(folder, (0, 2, BLOCKS)), forwards), strict=True):
        torch.testing.assert_close(ours, by_torch, atol=2e-5, rtol=1e-4)


def test_a_few_positions_go_through_a_few_blocks_in_rust_and_come_to_the_same_by_a_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama", tied=False)
    model = cut(open_saved(tmp_path), (0, BLOCKS))
    (executor,), states = model.executors, to_bytes(torch.randn(9, HIDDEN_SIZE))
    taken = counted(model, monkeypatch)
    for number in range(2):
        assert executor.apply(Open(session(number), executor.span, 9))
    (whole,) = executor.forward([Slice(session(0), 0, 9, states)])
    slices = [Slice(session(1), 0, 9, b"" if first else states, first, first + 1) for first in range(BLOCKS)]
    assert [executor.forward([each]) for each in slices] == [[b""]] * (BLOCKS - 1) + [[whole]]
    assert len(taken) == 1 + BLOCKS


def test_weights_in_8_bits_agree_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for inputs that the last bit of a sum takes to another step."""
    save_model(tmp_path, "qwen2", tied=False)
    folder, forwards = open_saved(tmp_path), schedule(5)
    model = cut(folder, (0, BLOCKS), quant="int8")
    taken = counted(model, monkeypatch)
    ours = torch.cat(outputs(model, forwards))
    assert taken
    monkeypatch.setattr("llmnode.compute.executor.are_few", lambda _lengths: False)
    difference = (ours - torch.cat(outputs(cut(folder, (0, BLOCKS), quant="int8"), forwards))).abs()
    assert difference.median() < 1e-5
    assert difference.max() < 0.3


def test_keys_and_values_in_8_bits_agree_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads what the other has written, in turn; but for numbers in which the last bit of a sum grew."""
    save_model(tmp_path, "qwen3", tied=False)
    folder, forwards, kv = open_saved(tmp_path), schedule(6), KVForm("int8")
    model = cut(folder, (0, BLOCKS), kv=kv)
    taken = counted(model, monkeypatch)
    monkeypatch.setattr("llmnode.models.native.MOST_POSITIONS", 7)
    mixed = torch.cat(outputs(model, forwards))
    assert 0 < len(taken) < len(forwards)
    monkeypatch.setattr("llmnode.compute.executor.are_few", lambda _lengths: False)
    by_torch, plain = (torch.cat(outputs(cut(folder, (0, BLOCKS), kv=each), forwards)) for each in (kv, KVForm()))
    difference = (mixed - by_torch).abs()
    assert difference.median() < 1e-5 < 10 * 1e-5 < (mixed - plain).abs().median(), "far nearer than what 8 bits cost"
    assert difference.max() < 0.1


@pytest.mark.parametrize("kv", [KVForm(), KVForm("int8")], ids=["as it is", "KV in int8"])
def test_a_decode_does_not_depend_on_its_mates_by_a_bit(kv: KVForm, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    folder = open_saved(tmp_path)
    together, alone = cut(folder, (0, BLOCKS), kv=kv), cut(folder, (0, BLOCKS), kv=kv)
    chunks = {session(name): [name + 3, 5, name] for name in range(12)}
    for _ in range(3):
        for name, output in together.forward(chunks).items():
            assert torch.equal(alone.forward({name: chunks[name]})[name], output)


@pytest.mark.parametrize(
    ("changes", "dtype", "quant", "kv"),
    [
        ({"hidden_act": "gelu"}, torch.float32, "none", KVForm()),
        ({"head_dim": 24}, torch.float32, "none", KVForm()),
        ({}, torch.bfloat16, "none", KVForm()),
        ({}, torch.float32, "nf4", KVForm()),
        ({}, torch.float32, "none", KVForm(device=torch.device("cpu"))),
    ],
    ids=["another activation", "heads that vectors do not fit", "bf16", "nf4", "KV on a device of its own"],
)
def test_what_it_is_not_made_for_goes_through_torch(
    changes: dict[str, object],
    dtype: torch.dtype,
    quant: str,
    kv: KVForm,
    tmp_path: Path,
) -> None:
    save_model(tmp_path, "llama", tied=False, **changes)
    model = cut(open_saved(tmp_path), (0, BLOCKS), dtype, quant=quant, kv=kv)
    assert model.executors[0].model.native is None
    assert torch.isfinite(model.forward({session(0): [3, 1, 4]})[session(0)]).all()


def test_blocks_that_differ_and_processors_without_vectors_are_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tmp_path, "llama", tied=False)
    span = cut(open_saved(tmp_path), (0, BLOCKS)).executors[0].model
    assert isinstance(span, FusedSpan)
    first: Any = span.blocks[0]
    assert native_blocks(span.blocks, span.rotary) is not None
    with monkeypatch.context() as patched:
        patched.setattr(first.input_layernorm, "variance_epsilon", 0.5)
        assert native_blocks(span.blocks, span.rotary) is None
    with monkeypatch.context() as patched:
        patched.setattr(first.self_attn, "sliding_window", 0)
        assert native_blocks(span.blocks, span.rotary) is None
    monkeypatch.setattr("llmnode.models.native.LlamaBlocks", SimpleNamespace(is_fast=lambda: False))
    assert native_blocks(span.blocks, span.rotary) is None


def test_decodes_alone_are_few_however_many() -> None:
    assert are_few([1] * 64) and are_few([MOST_POSITIONS]) and are_few([1, MOST_POSITIONS - 1])
    assert not are_few([MOST_POSITIONS + 1]) and not are_few([1, MOST_POSITIONS])


def test_a_piece_of_other_hidden_states_than_it_says_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=False)
    (executor,) = cut(open_saved(tmp_path), (0, BLOCKS)).executors
    assert executor.apply(Open(session(0), executor.span, 8))
    with pytest.raises(LocalProtocolError, match="another number of positions"):
        executor.forward([Slice(session(0), 0, 1, bytes(2 * 4 * HIDDEN_SIZE))])
