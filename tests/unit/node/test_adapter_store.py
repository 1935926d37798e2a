"""The adapters that a server holds: where its worker fails, and what would stop its event loop."""

from __future__ import annotations

import threading
from types import SimpleNamespace
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
from llmnode.core.serving.adapter_shelf import ENTRY_BYTES
from llmnode.core.span import Span
from llmnode.errors import AdapterError, WorkerLost
from llmnode.node.serve.adapter_store import AdaptersTooLarge, AdapterStore
from llmnode.node.serve.long_work import IN_THREAD_BYTES
from llmnode.testing import EXACT_MODEL
from llmnode.wire.adapter import make_adapter

if TYPE_CHECKING:
    from llmnode.core.serving.adapter_shelf import Shelved

IDLE_S = ServePolicy().adapter_idle_s


class FailingWorker:
    """Takes and forgets nothing, and says why."""

    def __init__(self, error: Exception) -> None:
        self.span = Span(0, EXACT_MODEL.blocks)
        self.error = error
        self.asked: list[AdapterId] = []

    async def do(self, operation: Adopt | Forget) -> None:
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
        self.span = Span(0, EXACT_MODEL.blocks)
        self.blocks: list[int] = []
        self.forgotten: list[AdapterId] = []

    async def do(self, operation: Adopt | Forget) -> None:
        await trio.lowlevel.checkpoint()
        if isinstance(operation, Adopt):
            self.blocks.append(operation.block)
        else:
            self.forgotten.append(operation.adapter)


def test_an_adapter_of_the_node_stays_however_long_it_is_unused_and_makes_way_for_no_stranger() -> None:
    worker: Any = WillingWorker()
    budget = Budget(BudgetPolicy(adapter_bytes=4 * ENTRY_BYTES, group_share=1.0, peer_share=1.0))
    store = AdapterStore(worker, EXACT_MODEL, ServePolicy(), budget)
    own, *others = (make_adapter(EXACT_MODEL.digest, {0: (bytes([each]) * 4, 1)}) for each in range(8))
    link: Any = SimpleNamespace(scope=budget.connection("8.8.8.8", PeerId("stranger")))

    async def main() -> None:
        await store.hold(own)
        await trio.sleep(2 * IDLE_S)
        await store.drop_idle()
        assert store.use(own.digest, worker.span) is not None
        for each in others:
            assert list(await store.lacking(link, each.manifest, worker.span)) == [0]
            await store.bring(each.digest, 0, each.parts[0])
            used = store.use(own.digest, worker.span)
            assert used is not None
            used.release()
        assert worker.forgotten, "strangers make way for each other"
        assert own.digest not in worker.forgotten

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_an_adapter_that_does_not_fit_the_memory_is_told_from_one_that_does_not_fit_the_blocks() -> None:
    failing: Any = FailingWorker(AdapterError("other shapes"))
    willing: Any = WillingWorker()
    adapter = make_adapter(EXACT_MODEL.digest, {0: (bytes(4), 1)})

    async def main() -> None:
        small = AdapterStore(willing, EXACT_MODEL, ServePolicy(), Budget(BudgetPolicy(adapter_bytes=ENTRY_BYTES)))
        with pytest.raises(AdaptersTooLarge, match="serve fewer"):
            await small.hold(adapter)
        with pytest.raises(AdapterError, match="other shapes") as refused:
            await AdapterStore(failing, EXACT_MODEL, ServePolicy(), Budget(BudgetPolicy())).hold(adapter)
        assert not isinstance(refused.value, AdaptersTooLarge)

    trio.run(main)


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
