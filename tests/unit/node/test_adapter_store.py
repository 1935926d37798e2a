"""The adapters that a server holds: where its worker fails, and what would stop its event loop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode import _native
from llmnode.core.budget import Budget
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Adopt, Forget
from llmnode.core.policy import BudgetPolicy, ServePolicy
from llmnode.errors import WorkerLost
from llmnode.node.serve.adapter_store import IN_THREAD_BYTES, AdapterStore
from llmnode.wire.adapter import make_adapter

if TYPE_CHECKING:
    from llmnode.core.serving.adapter_shelf import Shelved

IDLE_S = ServePolicy().adapter_idle_s


class FailingWorker:
    """Forgets nothing, and says why."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.asked: list[AdapterId] = []

    async def do(self, operation: Forget) -> None:
        await trio.lowlevel.checkpoint()
        self.asked.append(operation.adapter)
        raise self.error


@pytest.mark.parametrize("error", [WorkerLost("gone"), MemoryError("no shared memory"), RuntimeError("no")])
def test_adapters_go_when_the_worker_fails_to_forget_them_and_others_are_still_told(error: Exception) -> None:
    worker: Any = FailingWorker(error)
    budget = Budget(BudgetPolicy())
    store = AdapterStore(worker, None, ServePolicy(), budget)  # type: ignore[arg-type]
    around = budget.connection("8.8.8.8", PeerId("client"))

    async def main() -> None:
        names = [AdapterId(bytes([number]) * 32) for number in range(4)]
        shelved: list[Shelved] = [store._shelf.put(name, around, trio.current_time()) for name in names]
        for each in shelved[:3]:
            each.blocks.add(0)
        await trio.sleep(IDLE_S)
        await store.drop_idle()
        assert worker.asked == names[:3], "the worker holds nothing of the fourth"
        assert not len(store)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


class WillingWorker:
    """Takes every part."""

    def __init__(self) -> None:
        self.blocks: list[int] = []

    async def do(self, operation: Adopt) -> None:
        await trio.lowlevel.checkpoint()
        self.blocks.append(operation.block)


def test_the_digest_of_a_large_part_is_made_in_a_thread_and_its_adapter_stays_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker: Any = WillingWorker()
    budget = Budget(BudgetPolicy())
    store = AdapterStore(worker, None, ServePolicy(), budget)  # type: ignore[arg-type]
    sizes = {0: IN_THREAD_BYTES, 1: FP32_BYTES}
    adapter = make_adapter(bytes(32), {block: (bytes(size), size // FP32_BYTES) for block, size in sizes.items()})
    around = budget.connection("8.8.8.8", PeerId("client"))
    digest, began, go_on = _native.blake3_digest, threading.Event(), threading.Event()
    in_threads: list[bool] = []

    def slow(part: bytes) -> bytes:
        in_threads.append(is_thread := threading.current_thread() is not threading.main_thread())
        if is_thread:
            began.set()
            assert go_on.wait(10)
        return digest(part)

    async def main() -> None:
        store._manifests[adapter.digest] = adapter.manifest
        shelved = store._shelf.put(adapter.digest, around, trio.current_time() - 2 * IDLE_S)
        monkeypatch.setattr(_native, "blake3_digest", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.bring, adapter.digest, 0, adapter.parts[0])
            await trio.to_thread.run_sync(began.wait, 10)
            assert shelved.users == 1
            await store.drop_idle()
            assert len(store) == 1, "it is in use"
            go_on.set()
        await store.bring(adapter.digest, 1, adapter.parts[1])
        assert in_threads == [True, False], "a thread costs more than the digest of a small one"
        assert worker.blocks == [0, 1] and not shelved.users

    trio.run(main)
