"""The order in which steps, or passes, get memory to be computed in, when there is not enough for all.

Turns are fair among address groups, and within a group among peers, by bytes. The step whose turn it is waits for
enough of them, and nobody passes it: each step before it ends within a batch or two. A step waits for as long as others
end: many steps of one client may come to a server together. Passes have turns of their own (`request_memory.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Kind
from llmnode.core.fair_turns import FairTurns

if TYPE_CHECKING:
    from llmnode.core.account import Account
    from llmnode.core.budget import Scope


@dataclass(slots=True, eq=False)
class _Waiting:
    account: Account
    more_bytes: int
    path: tuple[str, str]
    has_it: bool = False
    over: trio.Event = field(default_factory=trio.Event)


class WorkTurns:
    """The turns at one server. `pass_on` is called when memory for work is given back."""

    def __init__(self) -> None:
        self._fair: FairTurns[_Waiting] = FairTurns()
        self._first: _Waiting | None = None
        """It has its turn, and waits for memory."""
        self._ended_s = -inf
        """The time at which a step last gave its memory back while others waited."""

    def take_now(self, account: Account, more_bytes: int) -> bool:
        """Let `account` grow if nobody waits and there is memory."""
        return not self._is_waited_for and account.resize(account.amount + more_bytes)

    async def take(self, account: Account, more_bytes: int, patience_s: float, longest_s: float) -> bool:
        """Let `account` grow, when it is its turn.

        False if no step has ended for `patience_s`, or if its turn has not come after `longest_s`.
        """
        waiting = _Waiting(account, more_bytes, _path(account.scope))
        self._fair.wait(waiting.path, waiting)
        self.pass_on()
        began_s = trio.current_time()
        try:
            while not waiting.over.is_set():
                until_s = min(began_s + longest_s, max(began_s, self._ended_s) + patience_s)
                if until_s <= trio.current_time():
                    break
                with trio.move_on_at(until_s):
                    await waiting.over.wait()
        finally:
            if not waiting.over.is_set():
                self._give_up(waiting)
        return waiting.has_it

    def give_back(self, account: Account) -> None:
        """The step of `account` has ended."""
        had_memory = account.amount > 0
        account.resize(0)
        if self._is_waited_for:
            if had_memory:
                self._ended_s = trio.current_time()
            self.pass_on()

    def pass_on(self) -> None:
        """Memory may have been given back: those whose turn it is get it."""
        while (first := self._first or self._fair.next()) is not None:
            self._first = None
            account = first.account
            if not account.scope.is_closed:
                if not account.resize(account.amount + first.more_bytes):
                    self._first = first
                    return
                first.has_it = True
                self._fair.note(first.path, first.more_bytes)
            first.over.set()

    @property
    def _is_waited_for(self) -> bool:
        return self._first is not None or len(self._fair) > 0

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting is self._first:
            self._first = None
            self.pass_on()
        else:
            self._fair.give_up(waiting.path, waiting)


def _path(scope: Scope) -> tuple[str, str]:
    group, peer = (scope.of_kind(kind) for kind in (Kind.GROUP, Kind.PEER))
    return group.name if group is not None else "", peer.name if peer is not None else ""
