"""A node's role in its swarm: it carries out the decisions of `core/serving/node_life.py`.

A node makes a worker for its span, and makes another one if that is lost. For another span it makes a second worker
beside the first, or drops the first, and lives on under the same identity. Torch-free: workers come from a
`WorkerSource`.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import Offer
from llmnode.core.policy import LifePolicy, ProbePolicy
from llmnode.core.serving.node_life import (
    AbandonLoad,
    Announce,
    AwaitSessions,
    Drained,
    Draining,
    DropWorker,
    EndSessions,
    GaveUp,
    Joining,
    JoinsAt,
    LeaveFormer,
    LeaveWanted,
    Left,
    Load,
    LoadBeside,
    Lost,
    Moving,
    NoSpace,
    Online,
    Ready,
    RefuseSessions,
    SayFarewell,
    Settling,
    SpanUnwanted,
    SpanWanted,
    Stopped,
    TakeSessions,
    announced,
    join,
    moves_to,
    transition,
)
from llmnode.core.speed import ComputeSpeed, NetworkSpeed, announced_speed
from llmnode.errors import AdapterError, ConfigError, ModelError, WorkerLost
from llmnode.node.serve.adapter_store import AdaptersTooLarge
from llmnode.node.serve.speed import WorkerSpeed, measure_compute

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.model import ModelInfo
    from llmnode.core.serving.node_life import Action, Event, State
    from llmnode.core.span import Span
    from llmnode.node.serve.server import Server
    from llmnode.node.serve.speed_cache import Measure
    from llmnode.ports import Worker, WorkerSource
    from llmnode.swarm.membership import Swarm

log = logging.getLogger(__name__)


class Role:
    """The life of a node in its swarm. `run` it; the other methods are requests, and return when they are met."""

    def __init__(
        self,
        source: WorkerSource,
        model: ModelInfo,
        span: Span,
        server: Server,
        swarm: Swarm,
        *,
        report_worker: Callable[[str, bool], None] = lambda _line, _serves: None,
        measure: Measure = measure_compute,
        measure_beside: Measure | None = None,
    ) -> None:
        """`report_worker` is told in a line when a worker serves that is not the first. `measure_beside` is `measure`
        for a worker beside one that has sessions.
        """
        self.state: State = Joining(span)
        self._source = source
        self.model = model
        self._server = server
        self._swarm = swarm
        self._report_worker = report_worker
        self._measure = measure
        self._measure_beside = measure_beside or measure
        self._policy = LifePolicy()
        self._worker: Worker | None = None
        self._former: Worker | None = None
        """The worker before, of another span."""
        self._served: Span | None = None
        """The span of the worker before."""
        self.speed: WorkerSpeed | None = None
        """That of the latest worker."""
        self.learns = True
        """The times of sessions replace the first measurement. False for a simulated liar."""
        self.stays = False
        """The swarm is told that the node moves to no other blocks."""
        self.network = NetworkSpeed()
        """The latest measurement."""
        self._error: Exception | None = None
        """Why blocks could not be loaded, the last time."""
        self._changed = trio.Event()
        self._has_left = trio.Event()
        self._one_change = trio.Lock()
        self._confirm: Callable[[], Awaitable[bool]] = _at_once
        self._one_load = trio.Lock()
        """A second worker is loaded, or one that is of no use is dropped."""
        self._life_of_worker = self._load_of_second = trio.CancelScope()
        self._wait_for_sessions = self._life_of_former = trio.CancelScope()
        self._report_sessions: Callable[[int], None] = lambda _sessions: None
        self._nursery: trio.Nursery | None = None

    @property
    def span(self) -> Span:
        """The blocks that the node serves, or that it is loading."""
        return self.state.span

    @property
    def is_leaving(self) -> bool:
        """It leaves the swarm, or has left it."""
        return isinstance(self.state, Left) or (isinstance(self.state, Draining) and self.state.then is None)

    @property
    def compute(self) -> ComputeSpeed:
        """The speed of the worker with its span: as sessions have seen it lately, else as it was measured."""
        if self.speed is None:
            return ComputeSpeed()
        return self.speed.now if self.learns else self.speed.measured

    def offer(self) -> Offer:
        """The offer that the node announces."""
        worker, served, compute, blocks = self._worker, self._server.served, self.compute, len(self.span)
        return Offer(
            model=self.model.name,
            profile=self.model.profile,
            blocks=self.model.blocks,
            span=self.span,
            state=announced(self.state),
            block_us=compute.block_us(blocks),
            kv_tokens=0 if worker is None else worker.kv_tokens,
            kv_tokens_free=0 if served is None else served.admission.free,
            kv_page=1 if worker is None else worker.kv_page,
            load=None if worker is None else worker.load,
            speed=announced_speed(compute, self.network, blocks, self.model.row_bytes, ProbePolicy().next_peers),
            moves_to=moves_to(self.state),
            stays=self.stays,
            adapters=tuple(self._server.own_adapters),
        )

    def note_network(self, network: NetworkSpeed) -> None:
        """The network was measured (anew): the swarm is told."""
        self.network = network
        self.announce()

    def announce(self) -> None:
        """Tell the swarm now, and not only when it is time."""
        self._swarm.say(self.offer())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled. It has started once the node is online. Raises why the blocks cannot be loaded."""
        async with trio.open_nursery() as self._nursery:
            try:
                self._nursery.start_soon(self._swarm.announce, self.offer)
                self.state, actions = join(self.span)
                self._do(actions)
                await self._until(Online)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._source.kill()  # neither a load nor sessions need to wait for what it computes: they end too

    async def change_span(
        self,
        span: Span,
        patience_s: float | None = None,
        *,
        in_haste: bool = False,
        confirm: Callable[[], Awaitable[bool]] | None = None,
    ) -> bool:
        """Serve the blocks of `span` from now on; returns when the node is online with them, or stays where it is.

        Where memory allows it, the blocks are loaded while the node serves its former ones. `confirm` is asked then:
        if it says no, or `stay` is called before, the node stays, and the result is False. Where it does not, sessions
        have `patience_s` to end first, or the policy's time, and none if it is `in_haste`. Afterwards they go on at
        other peers, as after a lost worker.

        Raises ConfigError, ModelError or WorkerLost if the blocks cannot be loaded, and AdapterError if the node's own
        adapters do not fit them. The node serves its former blocks then.
        """
        if span.end > self.model.blocks:
            raise ConfigError(f"cannot serve blocks {span}: {self.model.name} has {self.model.blocks} blocks")
        async with self._one_change:
            await self._until(Online, Draining, Left)
            self._check_stays()
            self._error, self._confirm = None, confirm or _at_once
            self._happen(SpanWanted(span, patience_s, in_haste))
            while not isinstance(self.state, (Online, Settling, Left)):
                self._check_stays()
                await self._changed.wait()
            if self._error is not None:
                raise self._error
            self._check_stays()
            return self.state.span == span

    def join_instead(self, span: Span) -> bool:
        """Load the blocks of `span`, and not the node's first ones. Whether it does: it may serve these by now."""
        if not isinstance(self.state, Joining) or self._served is not None:
            return False
        self._happen(JoinsAt(span))
        return True

    def stay(self) -> None:
        """Load no blocks beside those that are served: the node goes on with its span. Does nothing at other times."""
        if isinstance(self.state, Moving):
            self._happen(SpanUnwanted())

    async def drain(self, patience_s: float, report: Callable[[int], None] = lambda _sessions: None) -> None:
        """Take no new sessions, say so, wait at most `patience_s` until those that there are have ended, and leave.

        `report` is told how many are left, at first and whenever one has ended; never 0.
        """
        self._report_sessions = report
        self._happen(LeaveWanted(patience_s))
        await self._has_left.wait()

    async def leave(self) -> None:
        """Leave now, if the node has not left already. Sessions are not waited for."""
        if not isinstance(self.state, Left):
            self._happen(Stopped())
        await self._has_left.wait()

    def _check_stays(self) -> None:
        if self.is_leaving:
            raise ConfigError("this node is leaving the swarm: start it again to serve other blocks")

    async def _until(self, *kinds: type[State]) -> None:
        while not isinstance(self.state, kinds):
            await self._changed.wait()

    def _happen(self, event: Event) -> None:
        """Raises LocalProtocolError for what cannot happen now."""
        before = self.state
        self.state, actions = transition(before, event, trio.current_time(), self._policy)
        if self.state != before:
            log.info("node state=%s span=%s", announced(self.state), self.span)
        self._do(actions)
        self._changed.set()
        self._changed = trio.Event()

    def _do(self, actions: Sequence[Action]) -> None:
        """Quick actions are done at once, and slow ones in a task, each kind in order."""
        assert self._nursery is not None, "the node's role runs"
        slow: list[Action] = []
        for action in actions:
            match action:
                case Announce():
                    self.announce()
                case TakeSessions():
                    assert self._worker is not None
                    self._server.serve(self._worker)
                case RefuseSessions():
                    self._server.refuse_sessions()
                case EndSessions():
                    self._life_of_former.cancel()
                    self._server.end_worker(self.span)
                    self._worker = None
                case LoadBeside(span):
                    self._load_of_second = scope = trio.CancelScope()
                    self._nursery.start_soon(self._load_beside, span, scope)
                case AbandonLoad():
                    self._load_of_second.cancel()
                case AwaitSessions():
                    self._wait_for_sessions.cancel()  # this drain takes the place of the one before
                    self._life_of_former.cancel()
                    slow.append(action)
                case LeaveFormer(until_s):
                    self._life_of_former = scope = trio.CancelScope()
                    self._nursery.start_soon(self._leave_former, until_s, scope)
                case DropWorker():
                    self._life_of_worker.cancel()  # it is not lost
                    slow.append(action)
                case Load() | SayFarewell():
                    slow.append(action)
        if slow:
            self._nursery.start_soon(self._do_slow, slow)

    async def _do_slow(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case DropWorker():
                    await self._source.drop()
                case Load(span):
                    with trio.CancelScope() as self._life_of_worker:
                        await self._load(span, self._life_of_worker)
                case AwaitSessions(until_s):
                    with trio.CancelScope() as self._wait_for_sessions:
                        await self._await_sessions(until_s, self._wait_for_sessions)
                case SayFarewell():
                    await self._swarm.leave(self.offer())
                    self._has_left.set()

    def _report(self, event: Event, scope: trio.CancelScope) -> None:
        """An event that a task of ours has waited for. It is of no interest once that is cancelled, or we have left."""
        if not scope.cancel_called and not isinstance(self.state, Left):
            self._happen(event)

    async def _load(self, span: Span, scope: trio.CancelScope) -> None:
        """And wait until the worker is lost."""
        try:
            worker = await self._source.load(span)
            try:
                measured = await self._measure(worker, self.model)
                await self._server.prepare(worker)
            except WorkerLost:  # mostly in its first forward, which takes most memory
                await self._source.wait_lost()
                self._report(Lost(), scope)
                return
        except (AdapterError, ConfigError, ModelError, WorkerLost) as error:
            await self._give_up(error, scope)
            return
        self._source.serves()
        self._worker, self.speed = worker, WorkerSpeed(worker, measured)
        self._report(Ready(span), scope)
        if self._served is not None and isinstance(self.state, Online):
            self._report_worker(f"the worker serves blocks {span}{' again' * (span == self._served)}", True)
        self._served = span
        await self._source.wait_lost()
        if isinstance(self.state, Moving):
            self._error = WorkerLost(f"the worker was lost while it loaded blocks {self.state.then}")
        self._report(Lost(), scope)

    async def _give_up(self, error: Exception, scope: trio.CancelScope) -> None:
        self._error, had_left = error, isinstance(self.state, Left)
        self._report(GaveUp(), scope)
        if isinstance(self.state, Left) and not had_left:
            await self._has_left.wait()
            raise error
        log.info("blocks were not loaded: %s", error)

    async def _load_beside(self, span: Span, scope: trio.CancelScope) -> None:
        """A second worker for `span`, to serve with once that is confirmed."""
        scope.deadline = trio.current_time() + self._policy.load_beside_s
        with scope:
            async with self._one_load:
                await trio.lowlevel.checkpoint_if_cancelled()
                try:
                    worker = await self._source.load_beside(span)
                    if worker is None:
                        self._report(NoSpace(), scope)
                    else:
                        await self._move_to(worker, scope)
                except AdaptersTooLarge:
                    self._report(NoSpace(), scope)  # the first worker has them too, until it ends
                except (AdapterError, ConfigError, ModelError) as error:
                    self._error = error
                    self._report(GaveUp(), scope)
                except WorkerLost as error:  # both are, and `_load` hears of it
                    self._error = error
        if scope.cancel_called and scope is self._load_of_second and isinstance(self.state, Moving):
            self._error = ConfigError(f"blocks {span} were not loaded within {self._policy.load_beside_s:g} s")
            self._happen(GaveUp())

    async def _move_to(self, worker: Worker, scope: trio.CancelScope) -> None:
        """Serve with the second worker, if that is confirmed."""
        is_wanted = False
        try:
            measured = await self._measure_beside(worker, self.model)
            await self._server.prepare(worker)
            is_wanted = await self._confirm()
            await trio.lowlevel.checkpoint_if_cancelled()
            scope.deadline = math.inf  # it is decided
        finally:
            if not is_wanted or scope.cancel_called:
                self._server.drop_prepared()
                with trio.CancelScope(shield=True):
                    await self._source.drop_one(worker)
        if not is_wanted:
            self._report(SpanUnwanted(), scope)
            return
        self._former, self._worker, self.speed = self._worker, worker, WorkerSpeed(worker, measured)
        self._report(Ready(worker.span), scope)
        self._served = worker.span
        self._report_worker(f"the worker serves blocks {worker.span}", True)

    async def _leave_former(self, until_s: float, scope: trio.CancelScope) -> None:
        former, held = self._former, self._server.former
        assert former is not None, "it settles"
        with scope:
            with trio.move_on_at(until_s):
                await self._server.drain(held=held)
            left = self._server.awaited(held)
            self._server.end_former()
            with trio.CancelScope(shield=True):
                await self._source.drop_one(former)
            self._report(Drained(left), scope)

    async def _await_sessions(self, until_s: float, scope: trio.CancelScope) -> None:
        with trio.move_on_at(until_s):
            await self._server.drain(self._report_sessions)
        self._report(Drained(self._server.awaited()), scope)


async def _at_once() -> bool:
    return True
