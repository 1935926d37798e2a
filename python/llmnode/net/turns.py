"""Tasks wait for their turn where strangers ask for work: see `core/shared_rate.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.core.shared_rate import SharedRate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.policy import TurnPolicy


@dataclass(slots=True, eq=False)
class _Waiter:
    has_turn: bool = False
    news: trio.Event = field(default_factory=trio.Event)
    """It has its turn, or is to give the turns from now on."""


class Turns:
    """The turns of one kind of work. One of the tasks that wait gives the turns to all of them."""

    def __init__(self, policy: TurnPolicy) -> None:
        self._rate = SharedRate[_Waiter](policy)
        self._waiting: dict[_Waiter, None] = {}
        self._giver: _Waiter | None = None

    def take(self, path: Sequence[str], amount: float = 1.0) -> bool:
        """Whether the group that `path` begins with need not wait. Then its work counts, as this `amount`."""
        return self._rate.take(path, trio.current_time(), amount)

    def give_back(self, group: str, amount: float) -> None:
        """The group has done something useful: it may have this much more done at once."""
        self._rate.give_back(group, amount, trio.current_time())

    async def wait(self, path: Sequence[str], amount: float = 1.0) -> None:
        """Until the work of `path` may be done: while its group has some of its burst left, others only run before."""
        if self.take(path, amount):
            await trio.lowlevel.checkpoint()
            return
        waiter = _Waiter()
        self._rate.wait(path, waiter, amount)
        self._waiting[waiter] = None
        try:
            if self._giver is not None:
                await waiter.news.wait()
            if not waiter.has_turn:
                self._giver = waiter
                await self._give_until(waiter)
        finally:
            del self._waiting[waiter]
            if not waiter.has_turn:
                self._rate.give_up(path, waiter, amount)
            if self._giver is waiter:
                self._giver = next((each for each in self._waiting if not each.has_turn), None)
                if self._giver is not None:
                    self._giver.news.set()

    async def _give_until(self, last: _Waiter) -> None:
        """Give turns until `last` has had its own."""
        while not last.has_turn:
            await trio.sleep(self._rate.wait_s(trio.current_time()))
            if (waiter := self._rate.next(trio.current_time())) is not None:
                waiter.has_turn = True
                waiter.news.set()
