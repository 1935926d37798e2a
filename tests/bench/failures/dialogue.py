"""The dialogue that `tests/bench/run failures` holds in every cell. The cell's fault strikes in the middle of it."""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import trio

from bench.failures.cells import ALL, Fault, Moment
from bench.failures.replicas import start_all
from llmnode.client.generate import next_token
from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from bench.failures.cells import Cell
    from bench.failures.replicas import Replica
    from bench.failures.rig import Rig
    from llmnode.session.failures import Recovery
    from llmnode.session.session import InferenceSession

    T = TypeVar("T")

DECODES = 4
"""Decodes before the rollback, and after it."""
TAKEN_BACK = 3
MAX_LENGTH = 320
CUT_OFF_S = 7.0
"""It is longer than `LinkPolicy.silence_s`, so that each peer gives the others up."""


@dataclass(frozen=True, slots=True)
class Act:
    """One call of the session, and its result."""

    name: str
    began_s: float
    ended_s: float
    recoveries: Sequence[Recovery]


class Dialogue:
    """A session and a fork of it, the tokens of both, and the fault of `cell`, if there is one.

    It does not restore its servers. `undisturbed_s` has the usual time of each act.
    """

    def __init__(self, rig: Rig, cell: Cell | None = None, undisturbed_s: Mapping[str, float] | None = None) -> None:
        self.acts: list[Act] = []
        self.texts: list[tuple[list[int], range]] = []
        """Token ids, and the range of those that were generated."""
        self.sessions: list[InferenceSession] = []
        self.returned_s = 0.0
        """When the lost spans had servers again, if they were lost during another recovery; or the links were back."""
        self.error = ""
        self._rig = rig
        self._cell = cell
        self._undisturbed_s = undisturbed_s or {}
        self._struck: list[Replica] = []
        self._restarted = trio.Event()
        self._twins_struck = trio.Event()

    @property
    def recoveries(self) -> list[Recovery]:
        return [each for session in self.sessions for each in session.recoveries]

    async def hold(self) -> None:
        await self._rig.client.router.find_any()
        async with trio.open_nursery() as self._nursery:
            try:
                async with AsyncExitStack() as stack:
                    await self._converse(stack)
            except LlmnodeError as error:
                self.error = self.error or str(error)
        self.error = self.error or self._what_is_missing()

    async def _converse(self, stack: AsyncExitStack) -> None:
        rig = self._rig
        opening = rig.client.inference_session(MAX_LENGTH)
        session = await self._act("open", lambda: stack.enter_async_context(opening))
        self.sessions.append(session)
        text = list(rig.prompt)
        await self._act("prefill", lambda: self._choose(session, text, text))
        for number in range(DECODES):
            await self._act(f"decode {number + 1}", lambda: self._choose(session, text, text[-1:]))
        self._note(text, DECODES + 1)
        kept = session.position - TAKEN_BACK
        await self._act("rollback", lambda: session.truncate(kept))
        text[kept:] = rig.edit
        await self._act("edit", lambda: self._choose(session, text, rig.edit))
        for number in range(DECODES, 2 * DECODES):
            await self._act(f"decode {number + 1}", lambda: self._choose(session, text, text[-1:]))
        opening = rig.client.inference_session(MAX_LENGTH, session)
        copy = await self._act("open a copy", lambda: stack.enter_async_context(opening))
        self.sessions.append(copy)
        await self._act("reorder", lambda: session.fork([copy]))
        other = text + rig.branch
        await self._act("branch", lambda: self._choose(copy, other, other[len(text) - 1 :]))
        await self._act("decode of the copy", lambda: self._choose(copy, other, other[-1:]))
        await self._act("decode at last", lambda: self._choose(session, text, text[-1:]))
        self._note(other, 2)
        self._note(text, DECODES + 2)

    def _note(self, text: Sequence[int], chosen: int) -> None:
        """Record the last tokens of `text`."""
        self.texts.append((list(text), range(len(text) - chosen, len(text))))

    async def _choose(self, session: InferenceSession, text: list[int], fresh: list[int]) -> None:
        """Append the likeliest token to `text`. Its end, `fresh`, has not been given to the session yet."""
        choice, _ = await next_token(session, self._rig.client.ends, fresh)
        text.append(choice.id)

    async def _act(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        await self._between(name)
        known = self.recoveries
        began_s, ended = trio.current_time(), trio.Event()
        if self._cell and name == self._cell.moment.value[1]:
            if delay_s := self._cell.delay_s(self._undisturbed_s[name]):
                self._nursery.start_soon(self._strike_later, delay_s, ended)
            else:
                self._strike()
        try:
            result = await call()
        except LlmnodeError as error:
            self.error = f"{name}: {error}"
            raise
        ended.set()
        fresh = [each for each in self.recoveries if each not in known]
        self.acts.append(Act(name, began_s, trio.current_time(), fresh))
        return result

    async def _between(self, name: str) -> None:
        """The part of the fault that comes after a failover."""
        if self._cell is None or not self.sessions or not self._struck:
            return
        if self._cell.moment is Moment.RECOVERY:  # a new session does not wait for servers as a recovery does
            await self._twins_struck.wait()
        route = [hop.peer for hop in self.sessions[0].route]
        match self._cell.fault:
            case Fault.WAKE:
                for server in self._struck:
                    if server.is_frozen and server.peer not in route:
                        server.heal()
            case Fault.RESTART if name == self._cell.moment.comes_back:
                await self._restarted.wait()
                await self._rig.until_known(self._struck)
                for server in self._struck:
                    self._rig.twin(server).kill()
            case Fault.LEAVE if name == self._cell.moment.comes_back:
                for server in self._struck:
                    if status := await server.end():
                        self.error = f"SIGTERM: exit status {status}"

    async def _strike_later(self, delay_s: float, ended: trio.Event) -> None:
        """Strike after the delay, or when the act has ended: it may be faster than the undisturbed one."""
        with trio.move_on_after(delay_s):
            await ended.wait()
        self._strike()

    def _strike(self) -> None:
        """Strike at once, without a checkpoint: when the act goes on, no task has noticed yet."""
        assert self._cell is not None
        route = self.sessions[0].route if self.sessions else self._rig.client.route
        self._struck = [self._rig.server(route[span].peer) for span in self._cell.spans]
        if self._cell.moment is Moment.RECOVERY:
            for server in self._struck:
                server.kill()
            self._nursery.start_soon(self._strike_twins, self._struck)
        else:
            self._apply(self._struck)

    async def _strike_twins(self, killed: Sequence[Replica]) -> None:
        """Strike when the first of them replays. The killed servers are started again, since no others are left."""
        twins = [self._rig.twin(server) for server in killed]
        await self._rig.until_kv(twins[0], taken=True)
        self._struck = twins
        self._apply(twins)
        self._twins_struck.set()
        await start_all(killed, self._rig.servers)
        self.returned_s = self.returned_s or trio.current_time()

    def _apply(self, servers: Sequence[Replica]) -> None:
        assert self._cell is not None
        for server in servers:
            match self._cell.fault:
                case Fault.KILL | Fault.RESTART:
                    server.kill()
                case Fault.FREEZE | Fault.WAKE:
                    server.signal(signal.SIGSTOP)
                case Fault.LEAVE:
                    server.signal(signal.SIGTERM)
                case Fault.STARVE:
                    server.starve()
                case Fault.CUT:
                    server.cut()
        if self._cell.fault is Fault.RESTART:
            self._nursery.start_soon(self._restart, servers)
        if self._cell.fault is Fault.CUT_OFF:
            for server in self._rig.servers:
                server.cut()
            self._nursery.start_soon(self._join_again)

    async def _restart(self, servers: Sequence[Replica]) -> None:
        await start_all(servers, self._rig.servers)
        self._restarted.set()

    async def _join_again(self) -> None:
        await trio.sleep(CUT_OFF_S)
        for server in self._rig.servers:
            server.heal()
        self.returned_s = trio.current_time()

    def _what_is_missing(self) -> str:
        """The reason why a cell proves nothing: nothing was lost in it."""
        if self._cell is None:
            return ""
        moved = (self._cell.moment is not Moment.OPEN) + (self._cell.fault is Fault.RESTART)
        recoveries = len(self.recoveries)
        at_least = moved * (1 if self._cell.spans == ALL else len(self._cell.spans))
        return f"only {recoveries} recoveries" if recoveries < at_least else ""
