"""Passes through the swarm: whole sequences through blocks, and gradients back through them, for training.

No session is open, and no server keeps anything. The client keeps what went into the blocks of each hop. So a backward
whose server is gone runs on another one (Petals, section 3.3). Large batches go as microbatches, several at once.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_DROPOUT, NO_PROMPTS, DeepPrompts, Dropout
from llmnode.core.peers.pass_loads import pass_weight
from llmnode.core.peers.pass_patience import PassSize
from llmnode.core.priority import Priority
from llmnode.core.sequences import grouped, microbatch_positions, split_rows
from llmnode.core.serving.pass_queue import BACKWARD_COST
from llmnode.core.span import Span
from llmnode.errors import (
    ConfigError,
    NumericOverflow,
    PeerError,
    PeerRefused,
    single_error,
)
from llmnode.session.adapter_ahead import bring_ahead
from llmnode.session.gradient_scale import UNSCALED, scales_of
from llmnode.session.overflow import Given, not_sent
from llmnode.session.pass_answer import read_answer
from llmnode.session.pass_batch import Batch, Crossed, check_repeatable
from llmnode.session.pass_checks import PassChecks
from llmnode.session.pass_strangers import held_to_others
from llmnode.session.pass_tries import PassTries
from llmnode.session.pass_turns import PassTurns, Turn
from llmnode.wire.deep_prompts import are_sound, most_prompts
from llmnode.wire.fields import MOST_SEQUENCES
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode, pack
from llmnode.wire.pass_deadline import deadline_extension
from llmnode.wire.pass_messages import DROPOUT, FROZEN_ADAPTER, Pass
from llmnode.wire.payload import Codec, HiddenForm
from llmnode.wire.profile import profile_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Buffer
    from llmnode.session.gradient_scale import GradientScale
    from llmnode.session.pass_answer import PassAnswer
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.adapter import Adapter
    from llmnode.wire.frame import Frame

MOST_POSITIONS = 1024
"""The most positions of a microbatch, unless one sequence has more."""
MOST_BYTES = 4 << 20
"""Hidden states of a microbatch, unless one sequence has more: a server keeps some multiples of it."""
LONGEST_BYTES = 24 << 20
"""Hidden states of one sequence. With its gradients it has to fit into a frame."""
_NAN = struct.pack("<f", float("nan"))
MOST_UNDER_WAY = 64
"""Microbatches that are under way through all hops, or wait for a turn at the next one."""


@dataclass(frozen=True, slots=True)
class PassGradients:
    """Gradients for the hidden states that went in, and for adapters and prompts in blocks."""

    hidden: Buffer
    adapter: np.ndarray
    """Those of its matrices, (values,) in fp32, in the order of blocks and of `models/lora.py: matrices`."""
    prompts: np.ndarray
    """(blocks, rows, positions times hidden_size), in fp32."""


class SwarmPasses:
    """Passes of one client. Hidden states and gradients are fp32 here, and cross the wire in `codec`."""

    def __init__(self, finder: PeerFinder, codec: Codec, priority: Priority = Priority.TRAINING) -> None:
        self.model = finder.model
        self._finder = finder
        self._form = HiddenForm(finder.model.hidden_size, codec)
        self._priority = priority
        self._under_way = trio.CapacityLimiter(MOST_UNDER_WAY)
        self._turns = PassTurns(finder)
        self._patience = self._turns.routes.patience
        self.checks = PassChecks(finder, codec)

    async def outputs(
        self,
        span: Span,
        lengths: Sequence[int],
        hidden: Buffer,
        adapter: Adapter | None = None,
        prompts: DeepPrompts = NO_PROMPTS,
        dropout: Dropout = NO_DROPOUT,
        *,
        deterministic: bool = False,
    ) -> tuple[Buffer, Sequence[Crossed]]:
        """Put whole sequences, which lie end to end in `hidden`, through the blocks of `span`, which have `adapter`.

        `prompts` are those of the blocks of `span`, and the sequences are longer than they. `dropout` is that of the
        adapter: the same seeds always give the same result. If it is `deterministic`,
        here or by the client's policy, the bits of outputs and gradients do not depend on the servers' speed, on what
        else they compute, nor on which of several alike computes. `gradients` needs the second result.

        Raises ConfigError for what no server can take, or what is not repeatable in a lossy codec, NumericOverflow if
        numbers overflow in the blocks, NoRoute if nobody holds some of the blocks, and SessionLost if peers failed for
        too long.
        """
        if adapter is not None and self.model.adapter is not None:
            raise ConfigError("blocks compute one adapter: this client names another one that servers hold")
        alone = deterministic or self._finder.policy.deterministic
        check_repeatable(self._form.codec, deterministic=alone)
        row_bytes = self.model.row_bytes
        if (longest := max(lengths)) * row_bytes > LONGEST_BYTES:
            raise ConfigError(f"{longest} positions in a row: a pass has at most {LONGEST_BYTES // row_bytes}")
        adapter_bytes = 0 if adapter is None else FP32_BYTES * adapter.manifest.values(span)
        together = microbatch_positions(sum(lengths), row_bytes, adapter_bytes)
        most_positions = min(together, MOST_POSITIONS, MOST_BYTES // row_bytes)
        groups = grouped(lengths, most_positions, self._most_sequences(lengths, prompts))
        parts = split_rows(hidden, [sum(group) for group in groups])
        found: list[tuple[Buffer, Crossed] | None] = [None] * len(groups)

        async def cross(number: int, first: int) -> None:
            end = first + len(groups[number])
            own = prompts.of_sequences(first, end), first if prompts.rows > 1 else 0
            batch = Batch(span, groups[number], adapter, *own, alone, dropout.of_sequences(first, end))
            borders, output = await self._cross(batch, parts[number])
            found[number] = output, Crossed(batch, tuple(borders))

        firsts = [*accumulate(map(len, groups), initial=0)]
        with single_error():
            async with trio.open_nursery() as beside:
                if adapter is not None:
                    weight = pass_weight(max(map(sum, groups)), is_backward=False)
                    given = Given(adapter, prompts, [], self._form.codec)
                    unfit = PassTries(self._turns.routes, given, has_dropout=bool(dropout)).unfit
                    beside.start_soon(bring_ahead, self._turns.routes, adapter, span, weight, unfit)
                await self._all([partial(cross, number, firsts[number]) for number in range(len(groups))])
                beside.cancel_scope.cancel()
        done = [each for each in found if each is not None]
        return b"".join(output for output, _ in done), [crossed for _, crossed in done]

    def _most_sequences(self, lengths: Sequence[int], prompts: DeepPrompts) -> int:
        """The sequences that go together, so that the prompts of one block fit. Raises ConfigError if none do."""
        if not prompts:
            return MOST_SEQUENCES
        if prompts.positions > min(lengths):
            raise ConfigError(f"{prompts.positions} prompts for a sequence of {min(lengths)} positions")
        if not are_sound(prompts.values, self.model.hidden_size):
            raise not_sent("prompts")
        if (most := most_prompts(self.model.row_bytes)) < prompts.positions:
            raise ConfigError(f"{prompts.positions} prompts before a block: servers take {most} of this model")
        return min(MOST_SEQUENCES, most // prompts.positions) if prompts.rows > 1 else MOST_SEQUENCES

    async def gradients(self, crossed: Sequence[Crossed], gradient: Buffer) -> Buffer:
        """Gradients for what went in, from those for what came out. Raises as `outputs`.

        If some of those are not finite, or above 2^56, as a scaler of losses tries out, all that is returned are NaNs;
        likewise if servers say so of those that they compute (`overflow.py`).
        """
        return (await self.all_gradients(crossed, gradient)).hidden

    async def all_gradients(self, crossed: Sequence[Crossed], gradient: Buffer) -> PassGradients:
        """Like `gradients`, and those for the adapter's matrices and for prompts, summed over microbatches."""
        batches = [each.batch for each in crossed]
        span, adapter, prompts = batches[0].span, batches[0].adapter, batches[0].prompts
        values = 0 if adapter is None else adapter.manifest.values(span)
        rows = max(each.first_prompt + each.prompts.rows for each in batches)
        shape = prompts.blocks, rows, prompts.positions * self.model.hidden_size

        def overflow() -> PassGradients:
            nans = _NAN * (memoryview(gradient).nbytes // len(_NAN))
            return PassGradients(nans, np.full(values, np.nan, np.float32), np.full(shape, np.nan, np.float32))

        if not replace(self._form, codec=Codec.RAW).can_carry(gradient):  # in other codecs it is scaled
            return overflow()
        parts = split_rows(gradient, [each.positions for each in batches])
        found: list[tuple[Buffer, Mapping[int, PassAnswer]] | None] = [None] * len(crossed)

        async def go_back(number: int) -> None:
            with suppress(NumericOverflow):
                found[number] = await self._go_back(crossed[number], parts[number])

        await self._all([partial(go_back, number) for number in range(len(crossed))])
        done = [each for each in found if each is not None]
        if len(done) < len(found):
            return overflow()
        of_adapter, of_prompts = np.zeros(values, np.float32), np.zeros(shape, np.float32)
        for batch, (_, answers) in zip(batches, done, strict=True):
            in_order = [answers[block] for block in sorted(answers)]
            of_adapter += np.concatenate([each.of_adapter for each in in_order])
            if prompts:
                place = of_prompts[:, batch.first_prompt : batch.first_prompt + batch.prompts.rows]
                place += np.concatenate([each.of_prompts for each in in_order]).reshape(place.shape)
        return PassGradients(b"".join(hidden for hidden, _ in done), of_adapter, of_prompts)

    async def _all(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        async def run(call: Callable[[], Awaitable[None]]) -> None:
            async with self._under_way:
                await call()

        with single_error():
            async with trio.open_nursery() as nursery:
                for call in calls:
                    nursery.start_soon(run, call)

    async def _cross(self, batch: Batch, hidden: Buffer) -> tuple[list[tuple[Span, Buffer]], Buffer]:
        """Through the blocks, hop by hop. Returns what went into each, and what came out."""
        given = Given(batch.adapter, batch.prompts, [hidden], self._form.codec)
        tries = PassTries(self._turns.routes, given, has_dropout=bool(batch.dropout))
        borders: list[tuple[Span, Buffer]] = []
        start, end = batch.span.start, batch.span.end
        while start < end:
            rest, weight = batch.first_of(Span(start, end)), pass_weight(batch.positions, is_backward=False)
            async with self._turns.turn(tries, rest, weight) as turn:
                blocks, connection, _ = turn
                began_s = trio.current_time()
                try:
                    answer = await self._checked(FrameType.EVALUATE, blocks, batch, [hidden], turn, tries)
                except PeerError as error:
                    if not self._turns.has_fewer(connection, error):
                        tries.failed(error.blame(connection.peer, blocks), trio.current_time() - began_s)
                    continue
                tries.worked()
                self._turns.worked(connection)
            borders.append((blocks, hidden))
            hidden, start = answer.rows, blocks.end
        return borders, hidden

    async def _go_back(self, crossed: Crossed, gradient: Buffer) -> tuple[Buffer, Mapping[int, PassAnswer]]:
        """The second result has the answers by the first block that they are of."""
        borders, batch = list(crossed.borders), crossed.batch
        codec, numbers = self._form.codec, [borders[0][1]]
        if codec is Codec.RAW:  # else it is scaled, and never large
            numbers.append(gradient)
        given = Given(batch.adapter, batch.prompts, numbers, codec)
        tries = PassTries(self._turns.routes, given, is_backward=True, has_dropout=bool(batch.dropout))
        answers: dict[int, PassAnswer] = {}
        while borders:
            span, hidden = borders.pop()
            weight = pass_weight(batch.positions, is_backward=True)
            async with self._turns.turn(tries, span, weight) as turn:
                blocks, connection, _ = turn
                began_s = trio.current_time()
                try:
                    if blocks != span:  # nobody holds all of these blocks any more
                        answer = await self._checked(FrameType.EVALUATE, blocks, batch, [hidden], turn, tries)
                        borders += [(blocks, hidden), (Span(blocks.end, span.end), answer.rows)]
                    else:
                        both = [hidden, gradient]
                        answer = await self._checked(FrameType.BACKWARD, span, batch, both, turn, tries)
                        gradient, answers[span.start] = answer.rows, answer
                except PeerError as error:
                    borders.append((span, hidden))
                    if not self._turns.has_fewer(connection, error):
                        tries.failed(error.blame(connection.peer, blocks), trio.current_time() - began_s)
                    continue
                tries.worked()
                self._turns.worked(connection)
        return gradient, answers

    async def _checked(
        self,
        question: FrameType,
        blocks: Span,
        batch: Batch,
        numbers: Sequence[Buffer],
        turn: Turn,
        tries: PassTries,
    ) -> PassAnswer:
        """Have one server do a pass, and now and then another one too. Raises PeerError of the first one."""
        is_gradient = question is FrameType.BACKWARD
        scales = scales_of(numbers[-1], self._form.codec) if is_gradient else [UNSCALED]
        for scale in scales:
            ask, began_s = partial(self._ask, question, blocks, batch, numbers, scale), trio.current_time()
            try:
                answer = await ask(turn.connection, partial(tries.measured_others, turn.connection.peer, blocks))
                break
            except PeerRefused as refusal:
                if refusal.code != RefusalCode.OVERFLOW or scale is scales[-1]:
                    raise
        if not self.checks.is_due():
            return answer
        self._turns.answered(turn)
        check = partial(self.checks.checked, is_gradient=is_gradient, unfit=tries.unfit)
        return await check(answer, turn.connection, blocks, trio.current_time() - began_s, ask)  # with the same scale

    async def _ask(
        self,
        question: FrameType,
        blocks: Span,
        batch: Batch,
        numbers: Sequence[Buffer],
        scale: GradientScale,
        connection: PeerConnection,
        others: Callable[[], Sequence[PeerId]] = tuple,
    ) -> PassAnswer:
        """Have one server do a pass, with the last of the `numbers` scaled. Raises PeerError.

        If it is a stranger, it is held to what the `others` take. They could take its place.
        """
        form = self._form
        adapter, prompts = batch.adapter_within(blocks), batch.prompts_of(blocks)
        is_forward, positions = question is FrameType.EVALUATE, batch.positions
        by_block = [] if adapter is None or is_forward else [each.values for each in adapter.manifest.within(blocks)]
        rows_bytes = form.bytes_of(positions)
        answer_bytes = rows_bytes + FP32_BYTES * sum(by_block) + (0 if is_forward else prompts.size_bytes)
        halves = [form.encode(each) for each in (*numbers[:-1], scale.up(numbers[-1]))]
        if not all(form.is_sound(half, positions) for half in halves):
            raise not_sent("hidden states")
        cost = (1 if is_forward else BACKWARD_COST) * positions * len(blocks)
        size = PassSize(cost, len(halves) * rows_bytes + prompts.size_bytes + answer_bytes)
        timeout_s = self._patience.timeout_s(connection.peer, size)
        profile = self.model.profile if adapter is None else replace(self.model.profile, adapter=adapter.digest)
        needed = batch.extensions(blocks)
        if self.model.adapter is not None and not is_forward:
            needed[FROZEN_ADAPTER] = True  # we have not its numbers
        meta = pack(
            Pass(
                **profile_fields(profile),
                span_start=blocks.start,
                span_end=blocks.end,
                codec=form.codec,
                priority=self._priority.name.lower(),
                lengths=list(batch.lengths),
                extensions=deadline_extension(timeout_s) | needed,
                required=[*needed] or None,  # a server that does not know them is not to ignore them
            )
        )
        payload = b"".join([*halves, prompts.values])
        began_s = trio.current_time()

        def begin() -> None:
            """The question is sent: until then it waited for others, and the peer had nothing to do for it."""
            nonlocal began_s
            began_s = trio.current_time()

        async def ask() -> Frame:
            expected = FrameType.EVALUATED if is_forward else FrameType.GRADIENT
            try:
                answer = await connection.ask_pass(
                    question, expected, timeout_s, meta, payload, form.value_bytes, begin
                )
            except PeerRefused as refusal:
                if refusal.code == RefusalCode.UNKNOWN_EXTENSION:
                    if DROPOUT in needed:  # the newest of them
                        connection.knows_dropout = False
                    elif prompts and not batch.alone:
                        connection.knows_prompts = False
                raise
            took_s = trio.current_time() - began_s
            self._patience.note(connection.peer, size, took_s, connection.adapters.took)
            return answer

        using = ask() if adapter is None else connection.adapters.using(adapter, blocks, timeout_s, ask)
        async with held_to_others(self._patience, connection, size, others, adapter):
            answer = await using
        took_until_s = trio.current_time()
        try:
            found = scale.down(read_answer(answer, form, positions, by_block, answer_bytes))
        except PeerError as error:
            raise error.blame(connection.peer, blocks) from None
        cost = pass_weight(positions, is_backward=not is_forward) * len(blocks)
        self._turns.routes.loads.note(connection.peer, cost, began_s, took_until_s)
        return found
