"""Passes through the swarm: whole sequences through blocks, and gradients back through them, for training.

No session is open, and no server keeps anything. The client keeps what went into the blocks of each hop. So a backward
whose server is gone runs on another one (Petals, section 3.3). Large batches go as microbatches, several at once.
"""

from __future__ import annotations

import logging
import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.core.model import FP32_BYTES
from llmnode.core.peers.pass_patience import PassPatience, PassSize
from llmnode.core.priority import Priority
from llmnode.core.sequences import grouped, split_rows
from llmnode.core.serving.pass_queue import BACKWARD_COST
from llmnode.core.span import Span
from llmnode.errors import (
    ConfigError,
    NoRoute,
    PeerError,
    PeerRefused,
    RemoteProtocolError,
    SessionLost,
    single_error,
)
from llmnode.session.failures import StepFailures
from llmnode.wire.fields import MOST_SEQUENCES
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import Pass, Passed, RefusalCode, pack, unpack
from llmnode.wire.pass_deadline import deadline_extension
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden
from llmnode.wire.profile import profile_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Buffer
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Frame

log = logging.getLogger(__name__)

MOST_POSITIONS = 1024
"""Positions of a microbatch, unless one sequence has more."""
MOST_BYTES = 4 << 20
"""Hidden states of a microbatch, unless one sequence has more: a server keeps some multiples of it."""
LONGEST_BYTES = 24 << 20
"""Hidden states of one sequence. With its gradients it has to fit into a frame."""
MOST_ADAPTER_BYTES = 32 << 20
"""Gradients for an adapter in one answer, unless one block has more: servers allow this much."""
_NAN = struct.pack("<f", float("nan"))
AT_ONCE = 4
"""Microbatches that are under way together. A server takes this number of passes over one link."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """A microbatch after its way through blocks: its `lengths`, and what went into the blocks of each hop."""

    lengths: tuple[int, ...]
    borders: tuple[tuple[Span, Buffer], ...]
    adapter: Adapter | None = None


class SwarmPasses:
    """Passes of one client. Hidden states and gradients are fp32 here, and cross the wire in `codec`."""

    def __init__(self, finder: PeerFinder, codec: Codec, priority: Priority = Priority.TRAINING) -> None:
        self.model = finder.model
        self._finder = finder
        self._form = HiddenForm(finder.model.hidden_size, codec)
        self._priority = priority
        self._patience = PassPatience(finder.policy.passes)
        self._slots = trio.CapacityLimiter(AT_ONCE)

    async def outputs(
        self, span: Span, lengths: Sequence[int], hidden: Buffer, adapter: Adapter | None = None
    ) -> tuple[Buffer, Sequence[Crossed]]:
        """Put whole sequences, which lie end to end in `hidden`, through the blocks of `span`, which have `adapter`.

        `gradients` needs the second result. Raises NoRoute if nobody holds some of the blocks, and SessionLost if peers
        failed for too long.
        """
        row_bytes = self.model.row_bytes
        if (longest := max(lengths)) * row_bytes > LONGEST_BYTES:
            raise ConfigError(f"{longest} positions in a row: a pass has at most {LONGEST_BYTES // row_bytes}")
        groups = grouped(lengths, min(MOST_POSITIONS, MOST_BYTES // row_bytes), MOST_SEQUENCES)
        parts = split_rows(hidden, [sum(group) for group in groups])
        found: list[tuple[Buffer, Crossed] | None] = [None] * len(groups)

        async def cross(number: int) -> None:
            borders, output = await self._cross(span, groups[number], parts[number], adapter)
            found[number] = output, Crossed(groups[number], tuple(borders), adapter)

        await self._all([partial(cross, number) for number in range(len(groups))])
        done = [each for each in found if each is not None]
        return b"".join(output for output, _ in done), [crossed for _, crossed in done]

    async def gradients(self, crossed: Sequence[Crossed], gradient: Buffer) -> Buffer:
        """Gradients for what went in, from those for what came out. Raises as `outputs`.

        If some of those are not finite, as a scaler of losses tries out, all that is returned are NaNs.
        """
        found, _ = await self.all_gradients(crossed, gradient)
        return found

    async def all_gradients(self, crossed: Sequence[Crossed], gradient: Buffer) -> tuple[Buffer, np.ndarray]:
        """Like `gradients`, and the gradients for the adapter's matrices in these blocks, summed over microbatches.

        Those are in fp32, and in the order of blocks and of `models/lora.py: matrices`.
        """
        adapter = crossed[0].adapter
        spans = [border for border, _ in crossed[0].borders]
        values = 0 if adapter is None else adapter.manifest.values(Span(spans[0].start, spans[-1].end))
        positions = [sum(each.lengths) for each in crossed]
        if not HiddenForm(self.model.hidden_size, Codec.RAW).is_sound(gradient, sum(positions)):
            return _NAN * (memoryview(gradient).nbytes // len(_NAN)), np.full(values, np.nan, np.float32)
        parts = split_rows(gradient, positions)
        found: list[Buffer] = [b""] * len(crossed)
        of_adapter: list[Mapping[int, np.ndarray]] = [{}] * len(crossed)

        async def go_back(number: int) -> None:
            found[number], of_adapter[number] = await self._go_back(crossed[number], parts[number])

        await self._all([partial(go_back, number) for number in range(len(crossed))])
        total = np.zeros(values, np.float32)
        for each in of_adapter:
            total += np.concatenate([total[:0], *(each[block] for block in sorted(each))])
        return b"".join(found), total

    async def _all(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        async def run(call: Callable[[], Awaitable[None]]) -> None:
            async with self._slots:
                await call()

        with single_error():
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(run, call)

    async def _cross(
        self, span: Span, lengths: tuple[int, ...], hidden: Buffer, adapter: Adapter | None
    ) -> tuple[list[tuple[Span, Buffer]], Buffer]:
        """Through the blocks of `span`, hop by hop. Returns what went into each, and what came out."""
        tries = _Tries(self._finder, adapter)
        borders: list[tuple[Span, Buffer]] = []
        start = span.start
        while start < span.end:
            blocks, connection = await tries.next_hop(_first_of(Span(start, span.end), adapter))
            began_s = trio.current_time()
            try:
                output, _ = await self._ask(FrameType.EVALUATE, blocks, lengths, [hidden], connection, adapter)
            except PeerError as error:
                tries.failed(error.blame(connection.peer), trio.current_time() - began_s)
                continue
            tries.worked()
            borders.append((blocks, hidden))
            hidden, start = output, blocks.end
        return borders, hidden

    async def _go_back(self, crossed: Crossed, gradient: Buffer) -> tuple[Buffer, Mapping[int, np.ndarray]]:
        """The second result has the gradients for the adapter, by the first block that they are of."""
        borders, lengths, adapter = list(crossed.borders), crossed.lengths, crossed.adapter
        tries = _Tries(self._finder, adapter)
        of_adapter: dict[int, np.ndarray] = {}
        while borders:
            span, hidden = borders.pop()
            blocks, connection = await tries.next_hop(span)
            began_s = trio.current_time()
            try:
                if blocks != span:  # nobody holds all of these blocks any more
                    output, _ = await self._ask(FrameType.EVALUATE, blocks, lengths, [hidden], connection, adapter)
                    borders += [(blocks, hidden), (Span(blocks.end, span.end), output)]
                else:
                    numbers = [hidden, gradient]
                    gradient, of_adapter[span.start] = await self._ask(
                        FrameType.BACKWARD, span, lengths, numbers, connection, adapter
                    )
            except PeerError as error:
                borders.append((span, hidden))
                tries.failed(error.blame(connection.peer), trio.current_time() - began_s)
            else:
                tries.worked()
        return gradient, of_adapter

    async def _ask(
        self,
        question: FrameType,
        blocks: Span,
        lengths: tuple[int, ...],
        numbers: Sequence[Buffer],
        connection: PeerConnection,
        adapter: Adapter | None,
    ) -> tuple[Buffer, np.ndarray]:
        """Have one server do a pass. A backward gives gradients for the adapter's matrices too. Raises PeerError."""
        form = self._form
        if adapter is not None and not adapter.manifest.within(blocks):
            adapter = None
        digest = None if adapter is None else adapter.digest
        is_forward, positions = question is FrameType.EVALUATE, sum(lengths)
        values = 0 if adapter is None or is_forward else adapter.manifest.values(blocks)
        rows_bytes = form.bytes_of(positions)
        answer_bytes = rows_bytes + FP32_BYTES * values
        halves = [form.encode(each) for each in numbers]
        if not all(form.is_sound(half, positions) for half in halves):
            raise ConfigError("hidden states that are not finite, or too large: they are not sent")
        cost = (1 if is_forward else BACKWARD_COST) * positions * len(blocks)
        size = PassSize(cost, len(halves) * rows_bytes + answer_bytes)
        timeout_s = self._patience.timeout_s(connection.peer, size)
        meta = pack(
            Pass(
                **profile_fields(replace(self.model.profile, adapter=digest)),
                span_start=blocks.start,
                span_end=blocks.end,
                codec=form.codec,
                priority=self._priority.name.lower(),
                lengths=list(lengths),
                extensions=deadline_extension(timeout_s),
            )
        )
        payload = b"".join(halves)

        async def ask() -> Frame:
            expected = FrameType.EVALUATED if is_forward else FrameType.GRADIENT
            began_s = trio.current_time()
            answer = await connection.ask_pass(question, expected, timeout_s, meta, payload, form.value_bytes)
            self._patience.note(connection.peer, size, trio.current_time() - began_s)
            return answer

        using = ask() if adapter is None else connection.adapters.using(adapter, blocks, timeout_s, ask)
        answer = await using
        try:
            return self._read(answer, positions, answer_bytes)
        except RemoteProtocolError as error:
            raise error.blame(connection.peer, blocks) from None

    def _read(self, answer: Frame, positions: int, answer_bytes: int) -> tuple[Buffer, np.ndarray]:
        """Raises RemoteProtocolError for an answer that is not what it should be."""
        form = self._form
        unpack(Passed, answer.meta)
        if len(answer.payload) != answer_bytes:
            what = f"{len(answer.payload)} bytes for {positions} positions, expected {answer_bytes}"
            raise RemoteProtocolError(what)
        rows_bytes = form.bytes_of(positions)
        rows, of_adapter = answer.payload[:rows_bytes], np.frombuffer(answer.payload[rows_bytes:], np.float32)
        if not form.is_sound(rows, positions) or not np.isfinite(of_adapter).all():
            raise RemoteProtocolError("answers a pass with numbers that are not finite, or too large")
        return decode_hidden(rows, form.codec, positions * form.hidden_size), of_adapter


class _Tries:
    """Finds the next hop of one way through the swarm. Peers that have failed are asked again after all others.

    A peer that never has memory for a pass is asked once for each hop.
    """

    def __init__(self, finder: PeerFinder, adapter: Adapter | None = None) -> None:
        self._finder = finder
        self._needs_adapters = adapter is not None
        self._policy = finder.policy
        self._failures = StepFailures(finder.policy.recovery)
        self._too_small: set[PeerId] = set()

    async def next_hop(self, span: Span) -> tuple[Span, PeerConnection]:
        """The first hop of the best route through `span`. Raises NoRoute or SessionLost after too long."""
        hurry = False
        while True:
            try:
                avoided = self._failures.avoided(hurry=hurry) | self._too_small
                if self._needs_adapters:
                    avoided = avoided | {each.peer for each in self._finder.pool.living() if each.adapters.is_unable}
                route, connections = await self._finder.find(span, 0, avoided, hurry=hurry)
            except NoRoute as absence:
                self._begin_deadline()
                if hurry:  # every peer has been asked
                    self._failures.check_agreement()
                    await self._wait_changed(absence)
                hurry = not hurry
            except PeerError as error:
                self.failed(error)
            else:
                return route[0].span, connections[route[0].peer]

    def failed(self, error: PeerError, took_s: float = 0.0) -> None:
        """A peer has failed, after this time: others are asked. Raises SessionLost after too long."""
        log.info("a pass failed: %s", error)
        self._failures.note(error, self._finder)
        if error.peer is not None and _never_fits(error):
            self._too_small.add(error.peer)
        self._failures.add_try(took_s, failed=True)
        self._begin_deadline()
        if trio.current_time() >= self._failures.deadline_s:
            raise SessionLost(self._failures.causes) from error

    def worked(self) -> None:
        """A server has answered."""
        self._failures = StepFailures(self._policy.recovery)
        self._too_small.clear()

    def _begin_deadline(self) -> None:
        latest_s = trio.current_time() + self._policy.recovery.timeout_s
        self._failures.deadline_s = min(self._failures.deadline_s, latest_s)

    async def _wait_changed(self, absence: NoRoute) -> None:
        """Those that have failed may be back in a moment, or others."""
        if trio.current_time() >= self._failures.deadline_s:
            raise SessionLost(self._failures.causes) if self._failures.causes else absence
        with trio.move_on_after(max(self._policy.route.retry_s, self._failures.room_in_s)):
            await self._finder.wait_changed()
        self._failures.ask_all_again()


def _never_fits(error: PeerError) -> bool:
    """Whether a peer says that it never has memory for the pass."""
    return isinstance(error, PeerRefused) and error.code == RefusalCode.NO_ROOM and error.retry_after_s is None


def _first_of(span: Span, adapter: Adapter | None) -> Span:
    """The first of these blocks, so that gradients for the adapter in them fit into one answer."""
    if adapter is None:
        return span
    end = span.start + 1
    while end < span.end and FP32_BYTES * adapter.manifest.values(Span(span.start, end + 1)) <= MOST_ADAPTER_BYTES:
        end += 1
    return Span(span.start, end)
