"""The adapters that a server holds, where its worker fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode.core.budget import Budget
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.operations import Forget
from llmnode.core.policy import BudgetPolicy, ServePolicy
from llmnode.errors import WorkerLost
from llmnode.node.serve.adapter_store import AdapterStore

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
