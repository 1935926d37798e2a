"""Passes: whole sequences through blocks, or gradients back through them, for clients that train. No session is open.

The worker computes a pass in parts, so that decodes of others go between. A part has some of the sequences, and goes
through some blocks: those that there is time for. A backward keeps what goes into the blocks of each part. See Petals,
section 3.3.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Backward, Evaluate
from llmnode.core.priority import PRIORITIES, Priority
from llmnode.core.sequences import grouped, split_rows
from llmnode.core.serving.forward_cost import mixed
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused, RemoteProtocolError, WorkerLost
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Pass, Passed, RefusalCode, pack, unpack
from llmnode.wire.pass_deadline import deadline_s
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Buffer, Computed
    from llmnode.node.serve.adapter_store import AdapterInUse
    from llmnode.node.serve.link_requests import LinkRequests
    from llmnode.node.serve.served_span import ServedSpan

log = logging.getLogger(__name__)

REQUESTS = frozenset({FrameType.EVALUATE, FrameType.BACKWARD})
_ANSWERS = {FrameType.EVALUATE: FrameType.EVALUATED, FrameType.BACKWARD: FrameType.GRADIENT}
_OVERFLOW = "the blocks put out numbers that are not finite, or too large: of a smaller learning rate or loss scale?"
_KEPT_BYTES = 16 << 20
"""A backward takes fewer sequences at once if it would keep more than this between its parts."""


class LinkPasses:
    """The passes that one link asks for, as `requests`."""

    def __init__(
        self,
        requests: LinkRequests,
        peer: PeerId,
        served_for: Callable[[Pass], ServedSpan],
        count: Callable[[int], None],
    ) -> None:
        """`served_for` gives the blocks for a pass of `peer`, or raises PeerRefused. `count` is told of passes that
        begin and end, as 1 and -1.
        """
        self._requests = requests
        self._peer = peer
        self._served_for = served_for
        self._count = count

    def begin(self, frame: Frame) -> None:
        """Compute a pass and answer it, in a task. Raises RemoteProtocolError or PeerRefused for what cannot be."""
        request = unpack(Pass, frame.meta)
        if request.span_start >= request.span_end:
            raise RemoteProtocolError(f"[{request.span_start}, {request.span_end}) is no span")
        served, span = self._served_for(request), Span(request.span_start, request.span_end)
        positions, form = sum(request.lengths), _form(request, served)
        if len(frame.payload) != (expected := _halves(frame) * form.bytes_of(positions)):
            what = f"{frame.type.name}: {len(frame.payload)} bytes for {positions} positions, expected {expected}"
            raise RemoteProtocolError(what)
        priority = max(PRIORITIES.get(request.priority, Priority.TRAINING), Priority.TRAINING)
        with ExitStack() as refused:
            if (adapter := served.use(request.adapter, span)) is not None:
                refused.callback(adapter.release)
            parts = _Parts(served, span, request.lengths, self._peer, priority, adapter)
            work_bytes = form.work_bytes(positions) * (1 + _halves(frame)) + parts.kept_bytes(frame)

            def end() -> None:
                parts.release()
                self._count(-1)

            self._requests.begin(
                frame,
                len(frame.payload) + work_bytes,
                lambda: self._computed(frame, parts, form),
                end,
                min(deadline_s(request) or inf, served.policy.longest_pass_s),
            )
            refused.pop_all()
        self._count(1)
        served.tally.positions += positions

    def cancel(self, frame: Frame) -> None:
        """The client waits no more for the pass that it asked for in the step of this CLOSE. It has no answer."""
        self._requests.cancel(frame.step)

    async def _computed(self, frame: Frame, parts: _Parts, form: HiddenForm) -> Frame:
        """The answer to a pass, be it a refusal."""
        try:
            numbers = _decoded(frame, form, parts.positions)
            output = await (parts.gradients(*numbers) if len(numbers) > 1 else parts.outputs(*numbers))
            payload = form.encode(output)
            if not form.is_sound(payload, parts.positions):  # the client would take it for our fault
                return refusal_of(frame, RefusalCode.COMPUTE_FAILED, _OVERFLOW)
            if frame.type is FrameType.BACKWARD:
                payload = b"".join([payload, parts.adapter_gradient()])
        except RemoteProtocolError as error:
            return refusal_of(frame, RefusalCode.BAD_MESSAGE, error.message)
        except (WorkerLost, ConfigError) as error:  # the latter: the codec cannot carry what we computed
            return refusal_of(frame, RefusalCode.COMPUTE_FAILED, str(error))
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory and kernel errors
            log.exception("pass failed span=%s", parts.span)
            return refusal_of(frame, RefusalCode.COMPUTE_FAILED, str(error))
        meta = pack(Passed(parts.queue_us, parts.compute_us))
        return Frame(
            _ANSWERS[frame.type],
            frame.session,
            frame.epoch,
            frame.step,
            meta=meta,
            payload=payload,
            value_bytes=form.value_bytes,
        )


def _form(request: Pass, served: ServedSpan) -> HiddenForm:
    """The form of the payload. Raises PeerRefused for another codec, and for too many positions."""
    if request.codec not in list(Codec):
        raise PeerRefused(RefusalCode.UNKNOWN_CODEC, f"this server knows {', '.join(Codec)}")
    longest = min(served.model.context_tokens, served.policy.pass_sequence)
    positions = served.policy.pass_positions
    if max(request.lengths) > longest or sum(request.lengths) > positions:
        why = f"a pass has at most {positions} positions, and a sequence {longest}"
        raise PeerRefused(RefusalCode.NO_ROOM, why)
    return HiddenForm(served.model.hidden_size, Codec(request.codec))


def _halves(frame: Frame) -> int:
    return 2 if frame.type is FrameType.BACKWARD else 1


def _decoded(frame: Frame, form: HiddenForm, positions: int) -> list[Buffer]:
    """Hidden states, and gradients if there are any, in fp32."""
    values, size_bytes = positions * form.hidden_size, form.bytes_of(positions)
    halves = [memoryview(frame.payload)[at * size_bytes : (at + 1) * size_bytes] for at in range(_halves(frame))]
    if not all(form.is_sound(half, positions) for half in halves):
        raise RemoteProtocolError(f"{frame.type.name}: numbers that are not finite, or too large")
    return [decode_hidden(half, form.codec, values) for half in halves]


class _Parts:
    """One pass, given to the worker of `served` in parts."""

    def __init__(
        self,
        served: ServedSpan,
        span: Span,
        lengths: Sequence[int],
        client: PeerId,
        priority: Priority,
        adapter: AdapterInUse | None,
    ) -> None:
        self._adapter = adapter
        self._adapter_values = 0 if adapter is None else adapter.manifest.values(span)
        self._most_adapter_bytes = served.policy.adapter_gradient_bytes
        self._of_adapter: np.ndarray | None = None
        self.span = span
        self.positions = sum(lengths)
        self.queue_us = 0
        self.compute_us = 0
        self._worker = served.worker
        self._account = client, priority, None if adapter is None else adapter.digest
        self._kept_bytes = len(span) * served.model.row_bytes
        """A backward keeps this for each position that goes together."""
        self._groups = grouped(lengths, min(self._worker.pass_positions, _KEPT_BYTES // self._kept_bytes))
        self._sizes = [sum(group) for group in self._groups]
        self._block_s: dict[type, float] = {}  # the time of a position in a block, by the kind of operation

    def kept_bytes(self, frame: Frame) -> int:
        """The memory for what goes into the blocks of each part, and for the gradients of the adapter.

        Raises PeerRefused if those do not fit into an answer.
        """
        if frame.type is not FrameType.BACKWARD:
            return 0
        if (adapter_bytes := FP32_BYTES * self._adapter_values) > self._most_adapter_bytes:
            raise PeerRefused(RefusalCode.NO_ROOM, "the adapter's gradients are too large: ask for fewer blocks")
        return self._kept_bytes * max(self._sizes) + 3 * adapter_bytes  # as they come, their sum, and the answer

    def release(self) -> None:
        """The pass is over."""
        if self._adapter is not None:
            self._adapter.release()

    def adapter_gradient(self) -> Buffer:
        """The sums of the adapter's gradients over all sequences. Raises ConfigError if some are not finite."""
        if self._of_adapter is None:
            return b""
        import numpy as np

        if not np.isfinite(self._of_adapter).all():
            raise ConfigError("gradients of the adapter that are not finite")
        return self._of_adapter.data.cast("B")

    async def outputs(self, hidden: Buffer) -> Buffer:
        parts = zip(self._groups, split_rows(hidden, self._sizes), strict=True)
        return b"".join([await self._output(*part) for part in parts])

    async def gradients(self, hidden: Buffer, gradient: Buffer) -> Buffer:
        rows = (split_rows(each, self._sizes) for each in (hidden, gradient))
        return b"".join([await self._gradient(*part) for part in zip(self._groups, *rows, strict=True)])

    async def _output(self, lengths: tuple[int, ...], hidden: Buffer) -> Buffer:
        start = self.span.start
        while start < self.span.end:
            blocks = self._next(start, lengths, Evaluate)
            hidden = await self._do(Evaluate(blocks, lengths, hidden, *self._account, waited_s=self._waited_s))
            start = blocks.end
        return hidden

    async def _gradient(self, lengths: tuple[int, ...], hidden: Buffer, gradient: Buffer) -> Buffer:
        entering: list[tuple[Span, Buffer]] = []
        start = self.span.start
        while start < self.span.end:
            blocks = self._next(start, lengths, Backward)
            entering.append((blocks, hidden))
            if blocks.end < self.span.end:
                hidden = await self._do(Evaluate(blocks, lengths, hidden, *self._account, waited_s=self._waited_s))
            start = blocks.end
        while entering:
            blocks, hidden = entering.pop()
            values = 0 if self._adapter is None else self._adapter.manifest.values(blocks)
            backward = Backward(blocks, lengths, hidden, gradient, *self._account, values, self._waited_s)
            both = await self._do(backward)
            gradient_bytes = memoryview(gradient).nbytes
            gradient = memoryview(both)[:gradient_bytes]
            self._add(blocks, memoryview(both)[gradient_bytes:])
        return gradient

    def _add(self, blocks: Span, of_adapter: memoryview) -> None:
        """Add the gradients for the adapter in some blocks."""
        if self._adapter is None:
            return
        import numpy as np

        if self._of_adapter is None:
            self._of_adapter = np.zeros(self._adapter_values, np.float32)
        values = np.frombuffer(of_adapter, np.float32)
        first = self._adapter_values - self._adapter.manifest.values(Span(blocks.start, self.span.end))
        self._of_adapter[first : first + len(values)] += values

    @property
    def _waited_s(self) -> float:
        return self.queue_us / 1e6

    async def _do(self, operation: Evaluate | Backward) -> Buffer:
        computed: Computed = await self._worker.do(operation)
        self.queue_us += computed.queue_us
        self.compute_us += computed.compute_us
        took_s = 1e-6 * computed.compute_us / (operation.positions * len(operation.span))
        self._block_s[type(operation)] = mixed(self._block_s.get(type(operation), 0.0), took_s)
        return computed.hidden

    def _next(self, start: int, lengths: Sequence[int], kind: type) -> Span:
        """The blocks from `start` on that there is time for; one while it is not known how long it takes."""
        room_s, block_s = self._worker.pass_s, self._block_s.get(kind)
        most = 1 if room_s is None or not block_s else max(1, int(room_s / (block_s * sum(lengths))))
        return Span(start, min(start + most, self.span.end))
