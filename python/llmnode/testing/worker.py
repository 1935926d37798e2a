"""The `Worker` port in exact arithmetic, without torch."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, TypeVar, assert_never

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.work import do, failed
from llmnode.core.ids import SESSION_ID_BYTES, AdapterId, SessionId
from llmnode.core.model import FP32_BYTES, ModelInfo
from llmnode.core.operations import Adopt, Backward, Close, Forget, Fork, Open, Resize, Truncate
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.span import Span
from llmnode.errors import AdapterError, ConfigError, WorkerLost
from llmnode.testing.exact_blocks import (
    exact_adapter_gradient,
    exact_adapters,
    exact_gradient,
    exact_output,
    exact_prompt_gradient,
    exact_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.compute.work import Done, Work
    from llmnode.core.model import Precision
    from llmnode.core.operations import Buffer, Control, Operation, Pass, Slice
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.priority import Priority
    from llmnode.ports import Worker

Result = TypeVar("Result")

_STRANGER = SessionId(b"s" * SESSION_ID_BYTES)


class ExactWorker(BatchingWorker):
    """The `Worker` port over an `ExactExecutor`, without a thread, and by the clock that trio has.

    A batch with a forward takes `forward_s`, `slower_by_s` more, and `further_s` for each slice but one; `gate`, when
    set, holds every one back until it is opened, and like a torch call a batch that runs cannot be cancelled.
    """

    def __init__(
        self,
        span: Span,
        row_bytes: int,
        kv_tokens: int,
        *,
        forward_s: float = 0.0,
        policy: BatchPolicy | None = None,
    ) -> None:
        self.executor = ExactExecutor(span, row_bytes, kv_tokens)
        self.forward_s = forward_s
        self.slower_by_s = self.further_s = 0.0
        self.gate: trio.Event | None = None
        self.lost = trio.Event()
        """When set, all that runs or comes is lost: see `lose`."""
        self.priorities: list[Priority] = []
        """The priorities of the sessions that were opened, in order."""
        self._closing = 0
        self._closed_one = trio.Event()
        super().__init__(self.executor, self._run_inline, trio.current_time, policy)

    @property
    def reserved(self) -> int:
        """KV positions that sessions hold."""
        return 0 if self.lost.is_set() else self.executor.reserved

    def lose(self) -> None:
        """Like a process that is killed: no task waits for its computation."""
        self.lost.set()
        self.open_gate()

    def open_gate(self) -> None:
        if self.gate is not None:
            self.gate.set()
            self.gate = None

    async def until_empty(self) -> None:
        while self.executor.reserved or self._closing:
            await self._closed_one.wait()

    async def do(self, operation: Operation[Result]) -> Result:
        if isinstance(operation, Open):
            self.priorities.append(operation.priority)
        is_close = isinstance(operation, Close)
        self._closing += is_close
        result = await super().do(operation)
        if is_close:
            self._closing -= 1
            self._closed_one.set()
            self._closed_one = trio.Event()
        return result

    async def _run_inline(self, work: Work) -> tuple[Done, float, float]:
        began_s, forwards = trio.current_time(), self.executor.forwards
        done = do(self.executor, work)
        with trio.CancelScope(shield=True):
            if slices := self.executor.forwards - forwards:
                await trio.sleep(self.forward_s + self.slower_by_s + (slices - 1) * self.further_s)
                if self.gate is not None and not self.lost.is_set():
                    await self.gate.wait()
            else:
                await trio.lowlevel.checkpoint()
        if self.lost.is_set():
            done = failed(work, WorkerLost("as told"))
        return done, began_s, trio.current_time()


class ExactSource:
    """The `WorkerSource` port over `ExactWorker`s, which are lost as they are told.

    A load takes `load_s`, and waits for `gate` if that is set. To give up a load beside another worker, and
    to drop one of two workers, takes `drop_s`. The spans of `too_large` do not fit, and two workers only if it
    `holds_two`.
    """

    tensor_bytes = position_bytes = 0
    holds_two = False

    def __init__(self, model: ModelInfo, kv_tokens: int, forward_s: float) -> None:
        self.worker: ExactWorker | None = None
        """The latest, even if it is lost."""
        self.load_s = self.drop_s = 0.0
        self.gate: trio.Event | None = None
        self.too_large: set[Span] = set()
        self.fitting = model.blocks
        self.paces: dict[Precision, float] = {}
        """See `Candidate.pace`. It is 1 in others."""
        self._model = model
        self._kv_tokens = kv_tokens
        self._forward_s = forward_s
        self._workers: list[ExactWorker] = []
        self._lost = trio.Event()

    async def open_model(self) -> ModelInfo:
        return self._model

    async def fitting_blocks(self) -> int:
        return self.fitting

    async def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return [Candidate(each, self.fitting, self.paces.get(each, 1.0)) for each in precisions]

    async def load(self, span: Span) -> ExactWorker:
        assert not self._workers, "the one before is lost or dropped"
        return self._has(await self._loaded(span))

    async def load_beside(self, span: Span) -> ExactWorker | None:
        (beside,) = self._workers
        if not self.holds_two:
            return None
        try:
            worker = await self._loaded(span)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.drop_s)
            raise
        if beside.lost.is_set():
            raise WorkerLost("as told")
        return self._has(worker)

    async def _loaded(self, span: Span) -> ExactWorker:
        await trio.sleep(self.load_s)
        if self.gate is not None:
            await self.gate.wait()
        if span in self.too_large:
            raise ConfigError("the blocks do not fit, as told")
        return ExactWorker(span, self._model.row_bytes, self._kv_tokens, forward_s=self._forward_s)

    def _has(self, worker: ExactWorker) -> ExactWorker:
        self.worker = worker
        self._workers.append(worker)
        return worker

    def serves(self) -> None:
        """Nothing depends on it."""

    def lose(self) -> None:
        """The workers end, as by SIGKILL of the process that has them."""
        for worker in self._workers:
            worker.lose()
            self._lost.set()

    async def wait_lost(self) -> None:
        await self._lost.wait()
        self._workers, self._lost = [], trio.Event()

    async def drop_one(self, worker: Worker) -> None:
        assert isinstance(worker, ExactWorker)
        await trio.sleep(self.drop_s)
        worker.lose()
        self._workers = [each for each in self._workers if each is not worker]
        self.worker = next(iter(self._workers), self.worker)

    async def drop(self) -> None:
        self.lose()
        self._workers, self._lost = [], trio.Event()

    def kill(self) -> None:
        """A simulated node that ends takes its forwards with it."""

    async def end(self) -> None:
        """There is nothing that would be left."""


class ExactExecutor:
    """The `Executor` port in exact arithmetic: bytes in, bytes out, bit for bit the same through any cut into spans.

    Each byte that a block puts out is the sum (modulo 256) of all bytes that came in, up to it, and the block's number.
    Two bits of every fourth byte are left out, so that hidden states are finite numbers. So an answer is right only if
    the KV holds exactly what came before, and every block was passed once. `forwards` counts slices. The next `fails`
    of them, or of forks or growths, end as if memory had run out, and so does a forward of several slices while any is
    to fail. `forks` has the positions that each fork copied, from and to.
    """

    passes_beside = True

    def __init__(self, span: Span, row_bytes: int, kv_tokens: int) -> None:
        self.span = span
        self.fails = 0
        self.forwards = 0
        self.batches: list[list[SessionId]] = []
        """The sessions of the slices that went through the blocks together."""
        self.refused = 0
        """Sessions that did not fit its KV."""
        self.forks: list[tuple[int, int]] = []
        self.forward_began = trio.Event()
        self._row_bytes = row_bytes
        self.kv_page = 1
        self._kv_tokens = kv_tokens
        self._reserved: dict[SessionId, int] = {}
        self._spans: dict[SessionId, Span] = {}
        self._adapters: dict[AdapterId, dict[int, bytes]] = {}
        self._adapter_of: dict[SessionId, AdapterId | None] = {}
        self._prompts: dict[SessionId, list[bytes]] = {}  # before each block
        self._kept: dict[SessionId, bytes] = {}
        self._half_way: dict[SessionId, tuple[int, bytes]] = {}  # blocks that were passed, and what came in

    @property
    def reserved(self) -> int:
        """KV positions that sessions hold."""
        return sum(self._reserved.values()) - self._reserved.get(_STRANGER, 0)

    def kv_tokens_free(self) -> int:
        return self._kv_tokens - sum(self._reserved.values())

    def apply(self, operation: Control) -> bool:
        match operation:
            case Open():
                return self._open(operation)
            case Resize(session, positions):
                return self._resize(session, positions)
            case Truncate(session, length):
                self._half_way.pop(session, None)
                self._kept[session] = self._kept[session][: length * self._row_bytes]
            case Fork():
                self._fork(operation)
            case Close(session):
                for of_session in (
                    self._reserved,
                    self._spans,
                    self._kept,
                    self._half_way,
                    self._adapter_of,
                    self._prompts,
                ):
                    of_session.pop(session, None)
            case Adopt():
                self._adopt(operation)
            case Forget(adapter):
                assert adapter not in self._adapter_of.values()
                self._adapters.pop(adapter, None)
            case _:
                assert_never(operation)
        return True

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        if self.fails and len(slices) > 1:
            raise RuntimeError("out of memory, as told, in one of them")
        self.forwards += len(slices)
        self.forward_began.set()
        self._fail_if_told()
        for each in slices:
            assert len(self._kept[each.session]) == each.start * self._row_bytes
            passed, came_in = self._half_way.get(each.session, (0, each.hidden))
            assert each.first == passed
            assert len(came_in) == each.length * self._row_bytes
            assert bool(each.hidden) == (not each.first)
            assert each.start + each.length <= self._reserved[each.session], "positions without KV"
        self.batches.append([each.session for each in slices])
        return [self._output(each) for each in slices]

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        if self.fails and len(passes) > 1:
            raise RuntimeError("out of memory, as told, in one of them")
        self.forwards += len(passes)
        self.forward_began.set()
        self._fail_if_told()
        assert all(type(each) is type(passes[0]) and each.span == passes[0].span for each in passes)
        assert self.span.covers(passes[0].span)
        return [self._passed(each) for each in passes]

    @property
    def adapters(self) -> Mapping[AdapterId, Mapping[int, bytes]]:
        """The parts that are held, by adapter and block."""
        return self._adapters

    def _adopt(self, adopt: Adopt) -> None:
        """Here the numbers of a part are its bytes, and it is damaged if there are not as many as it says."""
        assert self.span.start <= adopt.block < self.span.end
        weights = bytes(adopt.weights)
        if len(weights) != FP32_BYTES * adopt.values:
            raise AdapterError(f"{len(weights)} bytes for {adopt.values} numbers")
        self._adapters.setdefault(adopt.adapter, {})[adopt.block] = weights

    def _parts(self, adapter: AdapterId | None) -> Mapping[int, bytes]:
        return {} if adapter is None else self._adapters[adapter]

    def _passed(self, each: Pass) -> bytes:
        edges = [0, *itertools.accumulate(length * self._row_bytes for length in each.lengths)]
        parts = [slice(*edge) for edge in itertools.pairwise(edges)]
        adapters = exact_adapters(self._parts(each.adapter), each.dropout, len(parts))
        prompts = exact_prompts(each.prompts, len(parts))
        if isinstance(each, Backward):
            assert len(each.gradient) == len(each.hidden) == edges[-1]
            pairs = [(bytes(each.hidden[part]), bytes(each.gradient[part])) for part in parts]
            of_adapter = exact_adapter_gradient(pairs, each.span, adapters, prompts)
            assert len(of_adapter) == FP32_BYTES * each.adapter_values
            coming = [gradient for _, gradient in pairs]
            of_prompts = exact_prompt_gradient(coming, each.span, each.prompts, adapters)
            of_hidden = map(exact_gradient, coming, [each.span] * len(coming), adapters)
            return b"".join([*of_hidden, of_adapter, of_prompts])
        assert len(each.hidden) == edges[-1]
        entering = [bytes(each.hidden[part]) for part in parts]
        return b"".join(map(exact_output, entering, [each.span] * len(parts), adapters, prompts))

    def _open(self, opened: Open) -> bool:
        session = opened.session
        assert self.span.covers(opened.span)
        assert session not in self._reserved
        if opened.first_positions > self.kv_tokens_free():
            self.refused += 1
            return False
        self._reserved[session] = opened.first_positions
        self._spans[session] = opened.span
        self._adapter_of[session] = opened.adapter
        self._prompts[session] = exact_prompts(opened.prompts, 1)[0]
        self._kept[session] = b""
        return True

    def _resize(self, session: SessionId, positions: int) -> bool:
        assert positions * self._row_bytes >= len(self._kept[session]), "positions without KV"
        self._fail_if_told()
        if positions - self._reserved[session] > self.kv_tokens_free():
            self.refused += 1
            return False
        self._reserved[session] = positions
        return True

    def _fork(self, fork: Fork) -> None:
        self._fail_if_told()
        self.forks.append((fork.shared, fork.length))
        own, other = self._kept[fork.session], self._kept[fork.source]
        assert self._spans[fork.session] == self._spans[fork.source]
        assert self._adapter_of[fork.session] == self._adapter_of[fork.source]
        assert self._prompts[fork.session] == self._prompts[fork.source]
        edge, end = fork.shared * self._row_bytes, fork.length * self._row_bytes
        assert edge <= len(own)
        assert end <= len(other)
        assert fork.length <= self._reserved[fork.session], "positions without KV"
        self._kept[fork.session] = own[:edge] + other[edge:end]

    def occupy(self, kv_tokens: int) -> None:
        """Take KV, like another client's session, until it is called with 0."""
        self._reserved.pop(_STRANGER, None)
        if kv_tokens:
            self._reserved[_STRANGER] = kv_tokens

    def _output(self, each: Slice) -> Buffer:
        _, came_in = self._half_way.pop(each.session, (0, bytes(each.hidden)))
        if each.end is not None and each.end < len(self._spans[each.session]):
            assert each.end > each.first
            self._half_way[each.session] = each.end, came_in
            return b""
        kept = self._kept[each.session] + came_in
        self._kept[each.session] = kept
        adapter = self._parts(self._adapter_of[each.session])
        prompts = [prompt[: len(kept)] for prompt in self._prompts[each.session]]
        return exact_output(kept, self._spans[each.session], adapter, prompts)[each.start * self._row_bytes :]

    def _fail_if_told(self) -> None:
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("out of memory, as told")
