"""A span that is loaded beside another one: both compute as if alone, and the blocks of both are in memory once."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.compute import load_executor
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.loading import SpanLoader, Wanted
from llmnode.core.ids import PeerId
from llmnode.core.operations import Close, Evaluate, Forget, Open, Slice
from llmnode.core.span import Span
from llmnode.models.size import MEMORY_SHARE, PEERS_BYTES
from llmnode.models.tensors import from_bytes, to_bytes
from reference.lora import adopt, digest
from reference.small import HIDDEN_SIZE, KV_TOKENS, save_model, session
from reference.test_lora import made_part

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.models.size import ModelSize
    from llmnode.ports import Loaded

pytestmark = pytest.mark.reference

HELD, SPAN = Span(0, 3), Span(1, 4)
SHARED = (1, 2)
FORMS = [{}, {"quant": "int8"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}]
NEAR = 1e-5
"""Products of one block may have been chosen in another form: the sums are in another order."""


def opened(path: Path, case: str, **wanted: Any) -> SpanLoader:  # Any: its own
    save_model(path, case, tied=True)
    loader = SpanLoader(Wanted(str(path), kv_tokens=KV_TOKENS, device="cpu", **wanted), print)
    loader.open_model()
    return loader


def executor(loaded: Loaded | None) -> SpanExecutor:
    assert loaded is not None
    assert isinstance(loaded.executor, SpanExecutor)
    return loaded.executor


def decoded(held: SpanExecutor, name: int, steps: int, seed: int) -> torch.Tensor:
    """A prefill and decodes of a session, (positions, hidden_size)."""
    rows = torch.randn(5 + steps, HIDDEN_SIZE, generator=torch.Generator().manual_seed(seed))
    assert held.apply(Open(session(name), held.span, 5 + steps, PeerId("client")))
    outputs, start = [], 0
    for length in (5, *[1] * steps):
        (output,) = held.forward([Slice(session(name), start, length, to_bytes(rows[start : start + length]))])
        outputs.append(from_bytes(output, HIDDEN_SIZE))
        start += length
    held.apply(Close(session(name)))
    return torch.cat(outputs)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("case", ["llama", "gpt2", "bloom"])
def test_both_compute_as_if_alone_and_share_their_blocks(case: str, form: dict[str, str], tmp_path: Path) -> None:
    loader = opened(tmp_path, case, **form)
    held = executor(loader.load(HELD))
    before = decoded(held, 1, 3, seed=1)
    beside = loader.load_beside(SPAN, held, KV_TOKENS)
    if form.get("dtype") == "bfloat16" and case != "llama":
        assert beside is None, "transformers sets the dtype of the whole process while it makes blocks"
        return
    second = executor(beside)
    assert second.kv_tokens_free() == held.kv_tokens_free() == KV_TOKENS
    for block in SHARED:
        assert second.model.blocks[block - SPAN.start] is held.model.blocks[block - HELD.start]
    alone = executor(loader.load(SPAN))
    expected = decoded(alone, 1, 3, seed=2)
    results: dict[str, torch.Tensor] = {}
    for name, each, seed in (("held", held, 1), ("second", second, 2)):
        results[name] = decoded(each, 2, 3, seed)
    assert torch.allclose(results["held"], before, atol=NEAR)
    assert torch.allclose(results["second"], expected, atol=1e-2 if "dtype" in form else NEAR)
    del held
    assert torch.allclose(decoded(second, 3, 3, seed=2), results["second"], atol=NEAR)


def test_an_executor_computes_while_another_span_is_loaded_beside_it(tmp_path: Path) -> None:
    loader = opened(tmp_path, "llama")
    held = executor(loader.load(HELD))
    before, loaded = decoded(held, 1, 3, seed=1), list[SpanExecutor]()
    thread = threading.Thread(target=lambda: loaded.append(executor(loader.load_beside(SPAN, held, KV_TOKENS))))
    thread.start()
    rounds = 0
    while thread.is_alive() or not rounds:
        assert torch.allclose(decoded(held, 1, 3, seed=1), before, atol=NEAR)
        rounds += 1
    thread.join()
    assert loaded


@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_an_adapter_is_added_once_in_a_block_that_both_have(case: str, tmp_path: Path) -> None:
    loader = opened(tmp_path, case)
    held = executor(loader.load(HELD))
    names = ["self_attn.k_proj", "mlp.gate_proj"] if case == "llama" else ["attn.c_attn", "mlp.c_fc"]
    part = made_part(held, 2, names)
    alone = executor(loader.load(SPAN))
    adopt(alone, digest("x"), {2: part})
    adopt(held, digest("y"), {2: part})
    second = executor(loader.load_beside(SPAN, held, KV_TOKENS))
    adopt(second, digest("x"), {2: part})
    hidden = to_bytes(torch.randn(9, HIDDEN_SIZE, generator=torch.Generator().manual_seed(2)))
    for span, ours, adapter in ((Span(1, 4), second, "x"), (Span(1, 3), held, "y"), (Span(1, 4), second, None)):
        named = None if adapter is None else digest(adapter)
        theirs = None if adapter is None else digest("x")
        (output,) = ours.run([Evaluate(span, (9,), hidden, adapter=named)])
        (expected,) = alone.run([Evaluate(span, (9,), hidden, adapter=theirs)])
        found, wanted = from_bytes(output, HIDDEN_SIZE), from_bytes(expected, HIDDEN_SIZE)
        assert torch.allclose(found, wanted, atol=NEAR)
    second.apply(Forget(digest("x")))


def test_both_must_fit_into_what_a_server_alone_may_take_with_all_kv_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = opened(tmp_path, "llama")
    held = executor(loader.load(HELD))
    size: ModelSize = loader._size()
    kv_bytes = 2 * KV_TOKENS * (3 * size.kv_token_bytes + size.log_token_bytes)
    needed = 4 * size.block_bytes + kv_bytes
    free = int(needed / MEMORY_SHARE) + 1 - 3 * size.block_bytes
    for short in (0, 2):
        monkeypatch.setattr("llmnode.models.size.free_bytes", lambda _device, short=short: free + PEERS_BYTES - short)
        assert (loader.load_beside(SPAN, held, KV_TOKENS) is None) == bool(short)


def test_kv_that_was_asked_for_as_memory_is_not_exceeded_by_more_blocks(tmp_path: Path) -> None:
    loader = opened(tmp_path, "llama", kv_memory="1MiB")
    held = executor(loader.load(HELD))
    kv_tokens = held.kv_tokens_free()
    assert loader.load_beside(Span(0, 4), held, kv_tokens) is None
    assert executor(loader.load_beside(SPAN, held, kv_tokens)).kv_tokens_free() == kv_tokens


def test_the_process_after_a_lost_one_has_the_kv_that_was_announced_and_keeps_to_its_memory_too(tmp_path: Path) -> None:
    loader = opened(tmp_path, "llama", kv_memory="1MiB", is_announced=True)
    held = executor(loader.load(HELD))
    assert held.kv_tokens_free() == KV_TOKENS
    assert loader.load_beside(Span(0, 4), held, KV_TOKENS) is None


def test_garbage_of_sessions_is_collected_while_blocks_are_loaded_beside_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = opened(tmp_path, "llama")
    held = executor(loader.load(HELD))
    load, seen = load_executor.load_executor, list[bool]()

    def watched(*asked: Any) -> SpanExecutor:  # Any: its own
        seen.append(gc.isenabled())
        return load(*asked)

    monkeypatch.setattr(load_executor, "load_executor", watched)
    frozen = gc.get_freeze_count()
    assert loader.load_beside(SPAN, held, KV_TOKENS) is not None
    assert seen == [True]
    assert gc.get_freeze_count() <= frozen, "garbage is not kept for ever"
