"""KV in 8 bits, and KV by position as it is on another device: near what it was, and independent of chunks and company.

KV elsewhere than the blocks takes a GPU; without one both devices are the CPU, and all but the way there is the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmnode.compute.kv import KVForm, SequenceKV
from llmnode.compute.load_executor import load_executor
from llmnode.compute.paged_executor import PagedExecutor
from llmnode.core.operations import Fork, Open, Slice
from llmnode.core.span import Span
from llmnode.models.size import measure_size
from llmnode.models.tensors import to_bytes
from reference.small import (
    BLOCKS,
    CPU,
    OF_EACH_KIND,
    OTHER_KV,
    SESSION_TOKENS,
    VOCABULARY,
    Cut,
    cut,
    kv_bytes,
    open_saved,
    save_model,
    session,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llmnode.core.ids import SessionId

pytestmark = pytest.mark.reference

TOKENS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
CHUNKINGS = ((40,), (13, 1, 1, 9, 16), (1,) * 40)
"""Beyond a window of eight positions, and not by whole windows."""
COMPANY = session(9)
SMALLEST = torch.finfo(torch.float32).tiny


@given(st.integers(0, 2**32), st.floats(-30, 30), st.sampled_from([None, CPU]))
def test_a_number_is_off_by_half_a_step_of_its_own_position_and_head(
    seed: int, magnitude: float, device: torch.device | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = 10 ** (magnitude + 3 * torch.randn(1, 3, 5, 1, generator=generator, dtype=torch.float64))
    keys, values = (torch.randn(2, 3, 5, 8, generator=generator) * heads).float().nan_to_num(0, 0, 0).split(1)
    kv = SequenceKV(5, KVForm("int8", device))
    kv.extend(0, 0, keys[:, :, :2], values[:, :, :2])
    read = kv.extend(0, 2, keys[:, :, 2:], values[:, :, 2:])
    assert all(map(torch.equal, read, SequenceKV(5, KVForm("int8", device)).extend(0, 0, keys, values)))
    for kept, given_ in zip(read, (keys, values), strict=True):
        largest = given_.abs().amax(3, keepdim=True)
        assert ((kept - given_).abs() <= largest / 254 * (1 + 1e-5) + SMALLEST).all()


def test_what_is_no_number_stays_in_its_position_and_head() -> None:
    states = torch.randn(1, 2, 3, 8, generator=torch.Generator().manual_seed(0))
    kv, odd = SequenceKV(3, KVForm("int8")), SequenceKV(3, KVForm("int8"))
    expected, _ = kv.extend(0, 0, states, states)
    states[0, 0, 1, 4], states[0, 1, 2, 0] = float("inf"), float("nan")
    keys, _ = odd.extend(0, 0, states, states)
    others = torch.ones(2, 3, dtype=torch.bool)
    others[0, 1] = others[1, 2] = False
    assert torch.equal(keys[0][others], expected[0][others])
    assert keys[0][~others].isnan().any(dim=1).all()


@pytest.mark.parametrize("form", OTHER_KV, ids=str)
def test_only_what_is_looked_at_is_read(form: KVForm) -> None:
    keys, values = torch.randn(2, 1, 3, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    whole, cut_off = SequenceKV(20, form), SequenceKV(20, form)
    all_seen, seen = whole.extend(0, 0, keys, values), cut_off.extend(0, 0, keys, values, seen_from=13)
    assert all(torch.equal(one[:, :, 13:], other) for one, other in zip(all_seen, seen, strict=True))


@pytest.mark.parametrize("is_lazy", [True, False], ids=["on a CPU", "on another device"])
@pytest.mark.parametrize("form", [KVForm(), *OTHER_KV], ids=str)
def test_memory_that_is_given_back_and_comes_later_changes_nothing(
    form: KVForm, is_lazy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_lazy:
        monkeypatch.setattr(SequenceKV, "_slab_positions", lambda _self, _like, capacity: capacity)
    keys, values = torch.randn(2, 1, 3, 20, 8, generator=torch.Generator().manual_seed(0)).unbind()
    expected = SequenceKV(20, form).extend(0, 0, keys, values)
    resized = SequenceKV(20, form)
    for start, end in ((0, 4), (4, 11), (11, 20)):
        resized.resize(end)
        assert resized.capacity == end
        seen = resized.extend(0, start, keys[:, :, start:end], values[:, :, start:end])
        resized.length = end
        resized.resize(20)
        resized.resize(end)
        assert all(torch.equal(one[:, :, :end], other) for one, other in zip(expected, seen, strict=True))


@pytest.mark.parametrize("case", OF_EACH_KIND)
@torch.inference_mode()
def test_tokens_do_not_depend_on_chunks_company_and_history(case: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    exact = cut(folder, (0, BLOCKS)).forward({session(0): TOKENS})[session(0)]
    for form in OTHER_KV:
        through = cut(folder, (0, 1, BLOCKS), kv=form)
        first, *others = (_run(through, session(number), chunking) for number, chunking in enumerate(CHUNKINGS))
        # A number half-way between two steps of 8 bits goes to either by the last bit of a sum.
        most, off = (0.01 if form.dtype == "int8" else 1e-5), _apart(first, exact).max()
        for each in others:
            assert _apart(each, first).max() < most
            assert torch.equal(through.ends.logits(each).argmax(1), through.ends.logits(first).argmax(1))
        assert 1e-3 < off < 0.1 if form.dtype == "int8" else off < 1e-5
        through.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_a_position_in_8_bits_takes_what_was_measured_in_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    save_model(tmp_path, "llama", tied=True)
    folder = open_saved(tmp_path)
    taken = []
    for form in (KVForm("int8"), KVForm("int8", CPU)):
        through = cut(folder, (0, BLOCKS), dtype, kv=form)
        outputs = through.forward({session(0): TOKENS[:7]})[session(0)]
        exact = cut(folder, (0, BLOCKS), dtype).forward({session(0): TOKENS[:7]})[session(0)]
        assert _apart(outputs, exact).max() < 0.1
        taken.append(kv_bytes(through.executors[0], session(0)))
        through.close()
    size, plain = measure_size(folder, dtype, kv_dtype="int8"), measure_size(folder)
    assert taken == [BLOCKS * SESSION_TOKENS * size.kv_token_bytes] * 2
    assert size.kv_token_bytes == plain.kv_token_bytes * (16 + 4) / (16 * 4)  # heads of 16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="KV on the CPU for blocks on a GPU takes a GPU")
@pytest.mark.parametrize("dtype", ["same", "int8"])
@pytest.mark.parametrize("case", ["llama", "gemma3_text"])
@torch.inference_mode()
def test_blocks_on_a_gpu_compute_the_same_with_kv_on_the_cpu(case: str, dtype: str, tmp_path: Path) -> None:
    save_model(tmp_path, case, tied=True)
    folder = open_saved(tmp_path)
    rows = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    made = []
    for form in (KVForm(dtype), KVForm(dtype, CPU)):
        executor = load_executor(folder, Span(0, BLOCKS), 2000, device="cuda", kv=form)
        for name in (0, 1):
            assert executor.apply(Open(session(name), executor.span, 40))
        pieces = [Slice(session(0), at, end - at, to_bytes(rows[at:end])) for at, end in ((0, 9), (9, 10), (10, 20))]
        outputs = [bytes(executor.forward([piece])[0]) for piece in pieces]
        executor.forward([Slice(session(1), 0, 3, to_bytes(rows[:3]))])
        executor.apply(Fork(session(1), session(0), 0, 15))
        outputs.append(bytes(executor.forward([Slice(session(1), 15, 5, to_bytes(rows[15:]))])[0]))
        made.append(torch.frombuffer(bytearray(b"".join(outputs)), dtype=torch.float32).reshape(-1, 64))
        assert isinstance(executor, PagedExecutor) == (form == KVForm())
        if not isinstance(executor, PagedExecutor):
            slab = executor._sequences[session(0)].kv._blocks[0].slabs[0].states
            assert (slab.device.type, slab.is_pinned()) == (("cuda", False) if form.device is None else ("cpu", True))
    assert _apart(*made).max() < 1e-4


def _run(through: Cut, name: SessionId, chunking: Sequence[int]) -> torch.Tensor:
    """The output for `TOKENS`, beside another session, and after other tokens that were rolled back each time."""
    made, at = [], 0
    for length in chunking:
        through.forward({name: [3, 1, 4], COMPANY: [2]})
        through.truncate(name, at)
        made.append(through.forward({COMPANY: [7], name: TOKENS[at : at + length]})[name])
        through.truncate(COMPANY, 1)
        at += length
    return torch.cat(made)


def _apart(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
