"""Passes: whole sequences through blocks, or gradients back through them, for clients that train. No session is open.

See Petals, section 3.3. The worker computes a pass in parts (`pass_parts.py`).
"""

from __future__ import annotations

import itertools
import logging
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.model import FP32_BYTES
from llmnode.core.priority import PRIORITIES, Priority
from llmnode.core.span import Span
from llmnode.errors import ConfigError, PeerRefused, RemoteProtocolError, WorkerLost
from llmnode.node.serve import long_work
from llmnode.node.serve.pass_parts import PassParts, PassTerms
from llmnode.wire.deep_prompts import PromptsForm
from llmnode.wire.dropout import dropout_of
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, pack, unpack
from llmnode.wire.pass_deadline import deadline_s
from llmnode.wire.pass_messages import ALONE, FROZEN_ADAPTER, Pass, Passed
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.operations import Buffer
    from llmnode.core.serving.client_counters import Client
    from llmnode.node.serve.link_requests import LinkRequests
    from llmnode.node.serve.served_span import ServedSpan

log = logging.getLogger(__name__)

REQUESTS = frozenset({FrameType.EVALUATE, FrameType.BACKWARD})
_ANSWERS = {FrameType.EVALUATE: FrameType.EVALUATED, FrameType.BACKWARD: FrameType.GRADIENT}
_OVERFLOW = "the blocks put out numbers that are not finite, or too large: try a smaller learning rate or loss scale"


class LinkPasses:
    """The passes that one link asks for, as `requests`."""

    def __init__(
        self,
        requests: LinkRequests,
        client: Client,
        served_for: Callable[[Pass], ServedSpan],
        note_begin: Callable[[ServedSpan, str], None],
        note_end: Callable[[ServedSpan, str], None],
    ) -> None:
        """`served_for` gives the blocks for a pass of `client`, or raises PeerRefused. The others are told of passes
        that begin and end there, and of their address group.
        """
        self._requests = requests
        self._client = client
        self._served_for = served_for
        self._note_begin, self._note_end = note_begin, note_end
        self._numbers = itertools.count()

    def begin(self, frame: Frame) -> None:
        """Compute a pass and answer it, in a task. Raises RemoteProtocolError or PeerRefused for what cannot be."""
        request = unpack(Pass, frame.meta)
        if request.span_start >= request.span_end:
            raise RemoteProtocolError(f"[{request.span_start}, {request.span_end}) is no span")
        served, span = self._served_for(request), Span(request.span_start, request.span_end)
        positions, form = sum(request.lengths), _form(request, served)
        prompts, dropout = PromptsForm.of(request, form.hidden_size), dropout_of(request)
        if len(frame.payload) != (expected := _halves(frame) * form.bytes_of(positions) + prompts.size_bytes):
            what = f"{frame.type.name}: {len(frame.payload)} bytes for {positions} positions, expected {expected}"
            raise RemoteProtocolError(what)
        if prompts.size_bytes > served.policy.pass_prompt_bytes:
            why = f"deep prompts have at most {served.policy.pass_prompt_bytes >> 20} MiB: ask for fewer blocks"
            raise PeerRefused(RefusalCode.NO_ROOM, why)
        priority = max(PRIORITIES.get(request.priority, Priority.TRAINING), Priority.TRAINING)
        with ExitStack() as refused:
            if (adapter := served.use(request.adapter, span)) is not None:
                refused.callback(adapter.release)
            trains_adapter, alone = not _says(request, FROZEN_ADAPTER), _says(request, ALONE)
            terms = PassTerms(priority, next(self._numbers), trains_adapter, alone, dropout)
            parts = PassParts(served, span, request.lengths, self._client, adapter, terms)
            work_bytes = form.pass_work_bytes(positions, _halves(frame))
            # Prompts are held as they came, and by part; their gradients as they come, summed, and in the answer.
            work_bytes += prompts.size_bytes * (5 if frame.type is FrameType.BACKWARD else 2)
            if frame.type is FrameType.BACKWARD:
                work_bytes += parts.kept_bytes

            def end() -> None:
                parts.release()
                self._note_end(served, self._client.group)

            self._requests.begin(
                frame,
                lambda: self._computed(frame, parts, form, prompts),
                work_bytes,
                end,
                min(deadline_s(request) or inf, served.policy.longest_pass_s),
            )
            refused.pop_all()
        self._note_begin(served, self._client.group)
        served.tally.positions += positions

    def cancel(self, frame: Frame) -> None:
        """The client waits no more for the pass that it asked for in the step of this CLOSE. It has no answer."""
        self._requests.cancel(frame.step)

    async def _computed(self, frame: Frame, parts: PassParts, form: HiddenForm, of_prompts: PromptsForm) -> Frame:
        """The answer to a pass, be it a refusal. Raises RemoteProtocolError for numbers that are not finite."""
        try:
            size_bytes = FP32_BYTES * parts.positions * form.hidden_size
            numbers = await long_work.run(partial(_decoded, frame, form, parts.positions), size_bytes)
            parts.prompts = await long_work.run(partial(of_prompts.read, frame.payload), of_prompts.size_bytes)
            output = await (parts.gradients(*numbers) if len(numbers) > 1 else parts.outputs(*numbers))
            payload = await long_work.run(partial(form.encode, output), size_bytes)
            if not await long_work.run(partial(form.is_sound, payload, parts.positions), size_bytes):
                return refusal_of(frame, RefusalCode.OVERFLOW, _OVERFLOW)  # the client would take it for our fault
            if frame.type is FrameType.BACKWARD:
                payload = b"".join([payload, *parts.trained_gradients()])
        except ConfigError as error:  # the codec cannot carry what we computed
            return refusal_of(frame, RefusalCode.OVERFLOW, str(error))
        except WorkerLost as error:
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


def _says(request: Pass, name: str) -> bool:
    """Whether the client says the extension `name`. Raises RemoteProtocolError for anything but a yes."""
    if name not in (extensions := request.extensions or {}):
        return False
    if extensions[name] is not True:
        raise RemoteProtocolError(f"Pass.extensions: {name} is true or left out")
    return True


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
