"""Passes that are computed in another thread while sessions are: neither changes a bit of the other."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llmnode.core.ids import SessionId
from llmnode.core.operations import Backward, Close, Evaluate, Forget, Open, Slice
from llmnode.models.lora import Lora, targets_of, values_of
from llmnode.models.tensors import FLOAT_BYTES, to_bytes
from reference.lora import adopt, digest
from reference.small import HIDDEN_SIZE
from reference.test_kept_graphs import FOUR_BITS, HALF, LENGTHS, SPAN, drawn, load

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor
    from llmnode.core.ids import AdapterId
    from llmnode.models.lora import Part

pytestmark = pytest.mark.reference

SESSION = SessionId(bytes(16))
PREFILL, MOST_IN_RUST, POSITIONS = 20, 4, 40
ROUNDS = 4
"""Passes are computed 4 times beside sessions."""
ROW_BYTES = HIDDEN_SIZE * FLOAT_BYTES


@pytest.mark.parametrize("held", [{}, HALF, FOUR_BITS, {"quant": "int8"}], ids=str)
def test_passes_and_sessions_at_the_same_time_have_the_bits_that_they_have_alone(
    held: dict[str, Any] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions prefill by torch and decode in Rust. Adapters come and go, the first one in the middle of passes."""
    monkeypatch.setattr("llmnode.models.native.MOST_POSITIONS", MOST_IN_RUST)
    executor = load("llama", held, tmp_path)
    assert executor.passes_beside
    hidden = to_bytes(drawn(POSITIONS, HIDDEN_SIZE))

    def decode() -> bytes:
        return life(executor, hidden)

    alone = decode()
    for adapter in (None, digest("own")):
        if adapter is not None:
            adopt(executor, adapter, parts_of(executor))
        passes = passes_with(executor, adapter)
        expected = [bytes(*executor.run([each])) for each in passes]

        def train(passes: Sequence[Evaluate | Backward] = passes) -> list[bytes]:
            return [bytes(*executor.run([each])) for each in passes]

        lives, trained = at_once(decode, train)
        assert lives == {alone}
        assert trained == [expected] * len(trained)


def at_once(decode: Callable[[], bytes], train: Callable[[], list[bytes]]) -> tuple[set[bytes], list[list[bytes]]]:
    """The results of both, each again and again, until passes have been computed `ROUNDS` times."""
    lives: set[bytes] = set()
    trained: list[list[bytes]] = []
    begins, has_ended = threading.Barrier(2), threading.Event()

    def keep_training() -> None:
        try:
            begins.wait()
            for _ in range(ROUNDS):
                trained.append(train())
        finally:
            has_ended.set()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(keep_training)
        begins.wait()
        lives.add(decode())
        while not has_ended.is_set():
            lives.add(decode())
        running.result()
    return lives, trained


def life(executor: SpanExecutor, hidden: bytes) -> bytes:
    """Returns the outputs of a session. Another adapter comes and goes meanwhile."""
    assert executor.apply(Open(SESSION, SPAN, POSITIONS))
    outputs = [*executor.forward([Slice(SESSION, 0, PREFILL, hidden[: PREFILL * ROW_BYTES])])]
    adopt(executor, digest("another"), parts_of(executor))
    for start in range(PREFILL, POSITIONS):
        outputs += executor.forward([Slice(SESSION, start, 1, hidden[start * ROW_BYTES : (start + 1) * ROW_BYTES])])
    executor.apply(Forget(digest("another")))
    executor.apply(Close(SESSION))
    return b"".join(outputs)


def passes_with(executor: SpanExecutor, adapter: AdapterId | None) -> list[Evaluate | Backward]:
    hidden, gradient = (to_bytes(drawn(sum(LENGTHS), HIDDEN_SIZE, seed=seed)) for seed in (1, 2))
    values = 0 if adapter is None else sum(values_of(part) for part in parts_of(executor).values())
    evaluate = Evaluate(SPAN, LENGTHS, hidden, adapter=adapter)
    return [evaluate, Backward(SPAN, LENGTHS, hidden, gradient, adapter=adapter, adapter_values=values)]


def parts_of(executor: SpanExecutor) -> dict[int, Part]:
    return {
        SPAN.start + index: {
            name: Lora(0.2 * drawn(2, each.inputs), 0.2 * drawn(each.outputs, 2, seed=1), 1.5)
            for name, each in targets_of(block).items()
        }
        for index, block in enumerate(executor.model.blocks)
    }


@pytest.mark.parametrize(("case", "held"), [("gpt2", {}), ("llama", {"dtype": torch.bfloat16})], ids=str)
def test_blocks_that_keep_something_or_are_not_in_rust_take_turns(
    case: str, held: dict[str, Any], tmp_path: Path
) -> None:
    assert not load(case, held, tmp_path).passes_beside
