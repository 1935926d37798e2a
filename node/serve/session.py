"""One session of a client, served: drives the `Stage` and does what it decides.

A result goes straight to the next hop where the client has asked for it, and its digest to the client, which gets the
result itself only if it was not pushed. It is logged, for a peer that takes the next hop's place.

A session belongs to the peer that opened it, and answers over one link, which may end before it does.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.links.push_grants import ReplayBudget
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Fork, Forward, Open, Truncate
from llmnode.core.serving.kv_shares import KvClaim
from llmnode.errors import ConfigError, PeerError, PeerRefused, RemoteProtocolError, WorkerLost
from llmnode.node.serve import long_work
from llmnode.node.serve.long_work import IN_THREAD_BYTES, in_thread
from llmnode.node.serve.opened_terms import OpenedTerms
from llmnode.node.serve.receipt_signer import ReceiptSigner
from llmnode.node.serve.receiver import Receiver
from llmnode.node.serve.session_inbox import SessionInbox
from llmnode.node.serve.session_link import SessionLink
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.log import PayloadLog
from llmnode.wire.messages import (
    ForkRequest,
    Neighbours,
    Opened,
    RefusalCode,
    Replay,
    Replayed,
    Result,
    Resumed,
    pack,
    unpack,
)
from llmnode.wire.push_messages import PUSHED_BYTES, Pushed
from llmnode.wire.receipt import profile_digest
from llmnode.wire.refusal import refusal_for, refusal_of
from llmnode.wire.stage import Compute, Copy, Do, Refuse, Repeat, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.node.serve.served_span import ServedSpan
    from llmnode.ports import Link
    from llmnode.wire.frame import Buffer
    from llmnode.wire.stage import Action, Stage

log = logging.getLogger(__name__)

FAREWELL_S = 5.0
"""A link that is too slow for it is not waited for."""

REQUESTS = {FrameType.NEIGHBOURS: Neighbours, FrameType.REPLAY: Replay, FrameType.FORK: ForkRequest}
"""The frames with metadata that a session takes, and what the metadata is."""
WORK = Compute, Do, Copy
"""The actions that the worker has a part in."""


class ServerSession:
    """Its task (`run`) owns the stage; the link's loop only puts frames in its `inbox`, and moves it between links."""

    def __init__(
        self,
        stage: Stage,
        terms: OpenedTerms,
        link: Link,
        served: ServedSpan,
        beside: Mapping[SessionId, ServerSession],
    ) -> None:
        """`beside` are all sessions of the server, this one too. Raises PeerRefused if its adapter is not here."""
        self.stage = stage
        self.client, self.group = link.peer, link.group
        self.has_kv = False
        """Since it was opened, until it ends."""
        self.terms = terms
        self._span, self._form = terms.span, terms.form
        self.served = served
        """Its KV, if it has any, is there."""
        self._adapter = served.use(terms.profile.adapter, terms.span)
        self._beside = beside
        self._evicted_because: PeerRefused | None = None
        """Why others need its KV."""
        self._worker = served.worker
        profile = profile_digest(terms.profile, terms.form.codec)
        self._signer = ReceiptSigner(served.network, link, terms.span, profile)
        self._outputs = PayloadLog(terms.form) if terms.keep_outputs else None
        """The results of all positions in the KV."""
        self._receiver = Receiver(served, link.group)
        self._quiet = False
        self._large_positions = IN_THREAD_BYTES // (FP32_BYTES * terms.form.hidden_size)
        opened = pack(Opened(self._signer.nonce)) if self._signer.nonce else b""
        # The client waits for an answer to this.
        self._doing = Frame(FrameType.OPENED, stage.session, stage.epoch, meta=opened)
        self.inbox = SessionInbox(stage, terms.form, link.scope, served)
        self._memory = self.inbox.memory
        self.way = SessionLink(stage.session, link, self._memory, served, lambda each: beside[each].way.scope.cancel())
        self._replays = ReplayBudget(served.policy.replayed_times, served.policy.replayed_every_s)

    def close(self) -> None:
        """End the session after the frames that are queued; at once if it waits for KV."""
        self.inbox.close()
        if not self.has_kv:
            self.way.scope.cancel()

    def evict(self, why: PeerRefused) -> None:
        """End now, since others need the KV. `say_farewell` tells the client."""
        self._evicted_because = why
        self.way.scope.cancel()

    async def say_farewell(self, link: Link | None) -> None:
        """Tell the client why the session had to end, if it had to, in answer to its last frame and those that wait."""
        if self._evicted_because is None or link is None:
            return
        with trio.move_on_after(FAREWELL_S), suppress(PeerError):
            for frame in [self._doing, *self.inbox.rest()]:
                await link.send(refusal_for(frame, self._evicted_because))

    def end(self) -> None:
        """Called when `run` is over: nothing of it is left for anybody."""
        self.has_kv = False
        self.way.end()
        self.inbox.end()
        self._receiver.close()

    def release(self) -> None:
        """Its KV is freed: nothing computes for it any more."""
        if self._adapter is not None:
            self._adapter.release()

    async def move(self, link: Link, frame: Frame) -> None:
        """Answer over another link of the same client from now on; `frame` is its RESUME. Raises as `put`.

        Frames that were queued before are done first. The lease is over.
        """
        self.way.move(link)
        await self.inbox.put(frame)

    async def run(self) -> None:
        """Wait for KV, and serve steps until the client or the server closes it, or the client is gone for too long."""
        with self.way.scope:
            try:
                await self._serve()
            except Exception as error:  # a bug: the client hears of it, and the caller of `run` handles it
                reason = f"this server failed in a way that nobody foresaw: {type(error).__name__}"
                await self.way.send(refusal_of(self._doing, RefusalCode.COMPUTE_FAILED, reason))
                raise

    async def _serve(self) -> None:
        try:
            terms, stage = self.terms, self.stage
            adapter = None if self._adapter is None else self._adapter.digest
            claim = KvClaim(self.client, self.group, terms.priority, stage.max_length, terms.at_once)
            account = stage.max_length, self.client, terms.priority
            opening = Open(stage.session, self._span, *account, adapter, terms.prompts, self.group)
            await self.served.admission.enter(opening, claim, self.evict)
        except PeerRefused as refusal:
            return await self.way.send(refusal_for(self._doing, refusal))
        self.has_kv = True
        if self.way.now is None:
            self.way.note_kv()
        await self.way.send(self._doing)
        while True:
            try:
                frame = self._doing = await self.inbox.take()
            except trio.EndOfChannel:
                return
            try:
                await self._handle(frame)
            except (PeerRefused, RemoteProtocolError) as error:
                await self.way.send(refusal_for(frame, error))
                if isinstance(error, RemoteProtocolError):
                    await self._note_malformed(frame)
            self.inbox.done(frame, self._logged_bytes)
            if self.way.now is None:
                self.way.note_kv()

    async def _handle(self, frame: Frame) -> None:
        """Raises RemoteProtocolError or PeerRefused for a frame that has changed nothing."""
        match frame.type:
            case FrameType.RESUME:
                meta = pack(Resumed(self.stage.epoch, self.stage.position))
                await self.way.send(Frame(FrameType.RESUMED, frame.session, frame.epoch, frame.step, meta=meta))
            case FrameType.NEIGHBOURS:
                await self._stand_between(frame)
            case FrameType.REPLAY:
                await self._replay(frame)
            case _:
                await self._follow(frame)

    @property
    def _logged_bytes(self) -> int:
        """The results that are kept: all of them, or the last one for a step that is repeated."""
        return self.stage.answered_bytes if self._outputs is None else self._outputs.size_bytes

    async def _follow(self, frame: Frame) -> None:
        """Do what the stage says to a STEP, TRUNCATE or FORK, and to what has waited for it."""
        try:
            action = await self._fork(frame) if frame.type is FrameType.FORK else self.stage.receive(frame)
        except WorkerLost as error:
            return await self.way.send(refusal_of(frame, RefusalCode.COMPUTE_FAILED, str(error)))
        if not (isinstance(action, WORK) or self._holds_push(frame)):
            await self._wait_turn(frame, action.frame.size_bytes if isinstance(action, Repeat) else 0)
        while not isinstance(action, Wait):
            try:
                await self._act(action)
            except WorkerLost as error:  # the session is of no use any more, but for what it has logged
                if not isinstance(action, Do):
                    self.stage.failed()
                await self.way.send(refusal_of(action.frame, RefusalCode.COMPUTE_FAILED, str(error)))
            action = self.stage.next_held()

    async def _act(self, action: Repeat | Compute | Copy | Do | Refuse) -> None:
        self._doing = action.frame
        match action:
            case Compute(frame):
                await self._compute(frame)
            case Do(frame, operation, answer):
                await self._worker.do(operation)
                if self._outputs is not None:
                    self._outputs.truncate(self.stage.position)
                await self.way.send(self._done(answer, frame))
            case Copy(frame, source, operation):
                await self._copy(frame, self._beside[source], operation)
            case Repeat(frame):
                await self.way.send(frame)
            case Refuse(frame, code, reason):
                await self.way.send(refusal_of(frame, code, reason))

    async def _compute(self, frame: Frame) -> None:
        is_large = frame.length >= self._large_positions
        try:
            check = partial(self._form.check_values, frame)
            await in_thread(check) if is_large else check()
            self.served.admission.use(frame.session)
            try:
                await self.served.admission.reserve(frame.session, frame.start + frame.length)
                logged_bytes, more_bytes = self._logged_bytes, self._form.bytes_of(frame.length)
                await self._receiver.prepare(frame.epoch, more_bytes + PUSHED_BYTES)
                await self._memory.begin_work(self._form.work_bytes(frame.length))
                # Either all results are kept, or this one replaces the last one.
                self._memory.log(max(logged_bytes, more_bytes) if self._outputs is None else logged_bytes + more_bytes)
                decode = partial(self._form.decode, frame)
                hidden = await in_thread(decode) if is_large else decode()
                computed = await self._worker.do(Forward(frame.session, frame.start, frame.length, hidden))
                encode = partial(self._encoded, computed.hidden, frame.length)
                payload = await in_thread(encode) if is_large else encode()
            finally:
                self._memory.end_work()
                self.served.admission.use(frame.session, ends=True)
        except PeerRefused as refusal:
            await self._refuse_step(frame, refusal.code, refusal.reason, refusal.retry_after_s)
        except RemoteProtocolError as error:
            await self._refuse_step(frame, RefusalCode.BAD_MESSAGE, error.message)
            await self._note_malformed(frame)
        except ConfigError as error:  # the codec cannot carry what we computed, or nobody can use it
            await self._worker.do(Truncate(frame.session, frame.start))
            await self._refuse_step(frame, RefusalCode.OVERFLOW, str(error))
        except (RuntimeError, MemoryError) as error:  # torch's out-of-memory and kernel errors
            log.exception("step failed span=%s", self._worker.span)
            await self._refuse_step(frame, RefusalCode.COMPUTE_FAILED, str(error))
        else:
            if self._outputs is not None:
                self._outputs.append(payload, frame.length)
            sign = partial(self._signer.receipt, frame, payload)
            receipt, signature = await in_thread(sign) if is_large else sign()
            pushed = await self._push(frame, payload, pack(Pushed(receipt.input_digest, signature)))
            self.served.tally.steps += 1
            self.served.tally.positions += frame.length
            self.served.tally.pushed += pushed
            self.served.conduct.note_step(self.group)
            shown = unpack(Pushed, frame.meta) if frame.meta else None
            own = receipt.input_digest, receipt.output_digest, signature
            of_pusher = (shown.input_digest, shown.signature) if shown else (b"", b"")
            result = Result(computed.queue_us, computed.compute_us, *own, pushed, *of_pusher)
            wanted = not self._quiet and not (pushed and self._outputs is not None)
            answer = self._answer(FrameType.RESULT, frame, pack(result), payload if wanted else b"")
            self.stage.computed(answer, receipt.input_digest)
            await self.way.send(answer)

    def _encoded(self, hidden: Buffer, positions: int) -> Buffer:
        """Raises ConfigError for numbers that the codec cannot carry, or that the next hop would refuse."""
        payload = self._form.encode(hidden)
        if not self._form.is_sound(payload, positions):
            raise ConfigError(f"blocks {self._span} put out numbers that are not finite")
        return payload

    async def _fork(self, frame: Frame) -> Action:
        """Decide about a FORK, when there is KV for it. The source may have changed or gone meanwhile."""
        if not isinstance(action := self._decide_fork(frame), Copy):
            return action
        self.stage.failed()
        for session in (action.source, frame.session):  # neither is computing
            self.served.admission.use(session, ends=True)
        await self.served.admission.reserve(frame.session, frame.start, copies=isinstance(action.operation, Fork))
        return self._decide_fork(frame)

    def _decide_fork(self, frame: Frame) -> Action:
        try:
            request = unpack(ForkRequest, frame.meta)
        except RemoteProtocolError as error:
            return Refuse(frame, RefusalCode.BAD_MESSAGE, error.message)
        source = self._beside.get(SessionId(request.source))
        if source is not None and (source.client != self.client or not source.has_kv):
            source = None
        if source is not None and source.terms.kind != self.terms.kind:
            what = "blocks, adapter, codec, logs or prompts"
            return Refuse(frame, RefusalCode.CONFLICT, f"the session to be copied has other {what}")
        return self.stage.fork(frame, source.stage if source is not None else None, request.shared)

    async def _copy(self, frame: Frame, source: ServerSession, operation: Fork | Truncate) -> None:
        outputs = source._outputs.copy() if source._outputs is not None else None  # as they are now, and the KV is
        try:
            self._memory.log(0 if outputs is None else outputs.size_bytes)
        except PeerRefused as refusal:
            await self._refuse_step(frame, refusal.code, refusal.reason, refusal.retry_after_s)
            return
        if isinstance(operation, Fork) and source.served is not self.served:
            raise WorkerLost("the session to be copied has lost its worker")
        try:
            await self._worker.do(operation)
        except (RuntimeError, MemoryError) as error:
            log.exception("fork failed span=%s", self._worker.span)
            await self._refuse_step(frame, RefusalCode.COMPUTE_FAILED, str(error))
        else:
            if outputs is not None:
                outputs.truncate(frame.start)
                self._outputs = outputs
            self.stage.copied()
            await self.way.send(self._done(FrameType.FORKED, frame))

    async def _replay(self, frame: Frame) -> None:
        """Push or send logged results. Changes nothing, so that it may be asked for at any time.

        Raises as `_handle`, for positions that are not there, or too many for a frame.
        """
        size_bytes, outputs = self._form.bytes_of(frame.length), self._outputs
        request, asked = unpack(Replay, frame.meta), f"results of {frame.length} positions from {frame.start} asked for"
        positions = 0 if outputs is None else outputs.positions
        if outputs is None or frame.length < 1 or frame.start + frame.length > positions:
            raise RemoteProtocolError(f"{asked}, {positions} logged")
        if size_bytes > self.served.policy.replay_bytes:
            raise RemoteProtocolError(f"{asked}, more than {self.served.policy.replay_bytes} bytes")
        await self._memory.queue(size_bytes)
        self.served.admission.use(frame.session, ends=True)
        payload = await long_work.run(partial(outputs.read, frame.start, frame.length), size_bytes)
        self.inbox.settle(size_bytes, self._logged_bytes)  # from here on the link holds it
        may_push = request.push and self._replays.allows(size_bytes, self._logged_bytes, trio.current_time())
        pushed = may_push and await self._push(frame, payload, b"")
        digest = await long_work.run(partial(_native.blake3_digest, payload), size_bytes)
        meta = pack(Replayed(digest, pushed))
        await self.way.send(self._answer(FrameType.REPLAYED, frame, meta, b"" if pushed else payload))

    async def _stand_between(self, frame: Frame) -> None:
        """Take steps from the peer that the client names, and push results to the one that it names.

        Raises as `_handle`.
        """
        request = unpack(Neighbours, frame.meta)
        self.inbox.pushes.expect(PeerId(request.sender) if request.sender else None)
        self._quiet = request.quiet
        await self._receiver.find(request, frame.epoch)
        await self.way.send(Frame(FrameType.FORWARDED, frame.session, frame.epoch, frame.step))

    async def _push(self, frame: Frame, payload: Buffer, meta: bytes) -> bool:
        """To the next hop, as its step of the same number."""
        return await self._receiver.push(self._answer(FrameType.STEP, frame, meta, payload), self.way.now)

    def _done(self, kind: FrameType, frame: Frame) -> Frame:
        """The answer to a frame that changed the KV: where it stands now."""
        return Frame(kind, frame.session, frame.epoch, frame.step, start=self.stage.position)

    def _answer(self, kind: FrameType, frame: Frame, meta: bytes, payload: Buffer) -> Frame:
        """With hidden states for the positions of `frame`."""
        at = frame.session, frame.epoch, frame.step, frame.start, frame.length
        return Frame(kind, *at, meta, payload, self._form.value_bytes)

    async def _wait_turn(self, frame: Frame, answer_bytes: int = 0) -> None:
        """Until the turn of a frame that the worker does nothing for: it is a request as any other.

        It counts for the peer that has sent it.
        """
        pushes = self.inbox.pushes
        if (link := pushes.link if pushes.has_pushed(frame) else self.way.now) is not None:
            with suppress(PeerRefused):
                await self.served.conduct.wait_turn(link, Frame(frame.type, frame.session), answer_bytes)

    def _holds_push(self, frame: Frame) -> bool:
        """Whether the frame was pushed and waits in the stage. It is computed later, which gives the client turns."""
        return any(each is frame for each in self.stage.held) and self.inbox.pushes.has_pushed(frame)

    async def _note_malformed(self, frame: Frame) -> None:
        """It costs the client's link, unless another peer has pushed it."""
        if (link := self.way.now) is not None and not self.inbox.pushes.has_pushed(frame):
            await self.served.conduct.note_malformed(link)

    async def _refuse_step(self, frame: Frame, code: str, reason: str, retry_after_s: float | None = None) -> None:
        with trio.move_on_after(self.served.policy.refusal_patience_s):  # the client waits to hear of it
            await self._wait_turn(frame)
        self.stage.failed()
        await self.way.send(refusal_of(frame, code, reason, retry_after_s))
