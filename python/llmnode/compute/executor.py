"""The executor of a span: one ragged forward for any number of sessions, and the budget of their KV."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, assert_never

import torch

from llmnode._native import SequenceSlabs
from llmnode.compute.adapted import adapted
from llmnode.compute.attention import Segment, segments_of_forward
from llmnode.compute.deep_prompts import PromptedSequences, prompted, read_prompts
from llmnode.compute.dropout import DroppedRows
from llmnode.compute.gradients import gradients_of, outputs_of
from llmnode.compute.half_gradients import scaled, scales_for
from llmnode.compute.held_adapters import HeldAdapters
from llmnode.compute.kv import KVForm, SequenceKV
from llmnode.compute.pages import in_pages
from llmnode.core.ids import AdapterId, SessionId
from llmnode.core.operations import Adopt, Backward, Close, Forget, Fork, Open, Resize, Slice, Truncate
from llmnode.core.span import Span
from llmnode.errors import LocalProtocolError
from llmnode.machine.malloc import give_back
from llmnode.models.load import tensor_bytes
from llmnode.models.native import are_few
from llmnode.models.tensors import FLOAT_BYTES, from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.compute.kv import KV
    from llmnode.core.operations import Buffer, Control, Pass
    from llmnode.models.fused import FusedSpan
    from llmnode.models.load import SpanModel

_LARGE_TOKENS = 256
"""From this many positions on, a forward works with tens of MiB. Giving them back takes a hundredth of its time."""
_OF_BACKWARD = 4
"""A backward works with this many times the memory: it keeps the graphs of blocks."""


@dataclass(slots=True)
class _Sequence:
    kv: KV
    span: Span
    adapter: AdapterId | None = None
    prompts: torch.Tensor | None = None  # (blocks, 1, positions, hidden_size)
    slabs: SequenceSlabs | None = None  # of its `kv`, once a few positions have come
    half_way: Buffer = b""  # of the forward that has been through `passed` of its blocks
    passed: int = 0


class SpanExecutor:
    """The `Executor` port over a cut transformers model. Owns the KV of its sessions.

    A session runs through the blocks that it opened; those that opened the same share a forward.
    """

    def __init__(
        self,
        model: SpanModel | FusedSpan,
        hidden_size: int,
        kv_tokens: int,
        device: str = "cpu",
        kv: KVForm | None = None,
    ) -> None:
        """`model` has blocks in Rust only for KV beside them."""
        self.span = model.span
        self.model = model
        self._device = torch.device(device)
        self._hidden_size = hidden_size
        self.kv_page = 1
        self.passes_beside = model.native is not None
        """Models with blocks in Rust are on a CPU, and keep nothing from one forward to the next."""
        self._kv_tokens_free = kv_tokens
        self._kv = kv or KVForm()
        self._sequences: dict[SessionId, _Sequence] = {}
        self._adapters = HeldAdapters(model, self._device)

    @property
    def tensor_bytes(self) -> int:
        """The size of the span's weights in memory."""
        return tensor_bytes(self.model)

    def kv_tokens_free(self) -> int:
        return self._kv_tokens_free

    def apply(self, operation: Control) -> bool:
        match operation:
            case Open():
                return self._open(operation)
            case Resize(session, positions):
                return self._resize(session, positions)
            case Truncate(session, length):
                self._truncate(session, length)
            case Fork():
                self._fork(operation)
            case Close(session):
                self._close(session)
            case Adopt():
                self._adapters.adopt(operation)
            case Forget(adapter):
                self._adapters.forget(adapter)
                give_back()  # each step of a client that trains brings another version
            case _:
                assert_never(operation)
        return True

    def _open(self, opened: Open) -> bool:
        if opened.session in self._sequences:
            raise LocalProtocolError("this session is open already")
        first = opened.first_positions
        if in_pages(first, self.kv_page) * self.kv_page > self._kv_tokens_free:
            return False
        give_back()
        kv = self._take_kv(opened.session, first, opened.max_length)
        self._kv_tokens_free -= kv.capacity
        prompts = read_prompts(opened.prompts, self._hidden_size, torch.device("cpu")) if opened.prompts else None
        self._sequences[opened.session] = _Sequence(kv, opened.span, opened.adapter, prompts)
        return True

    @torch.inference_mode()
    def _resize(self, session: SessionId, positions: int) -> bool:
        kv = self._sequences[session].kv
        if positions < kv.length:
            raise LocalProtocolError(f"KV for {positions} positions cannot keep {kv.length}")
        more = in_pages(positions, self.kv_page) * self.kv_page - kv.capacity
        if more > self._kv_tokens_free:
            return False
        if more:
            kv.resize(positions)
            self._kv_tokens_free -= more
        return True

    @torch.inference_mode()
    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        slices = [self._checked(each) for each in slices]
        few = self.model.native is not None and are_few([each.length for each in slices])
        together: dict[tuple[Span, bool], list[int]] = {}
        for index in sorted(range(len(slices)), key=lambda index: self._adapter_of(slices[index]) or b""):
            each = slices[index]
            in_rust = few and not self._is_prompted(each)  # Rust knows no prompts
            together.setdefault((each.blocks(self._sequences[each.session].span), in_rust), []).append(index)
        computed: dict[int, Buffer] = {}
        for (span, _), indices in together.items():
            outputs = self._run(span, [slices[index] for index in indices])
            computed.update(zip(indices, outputs, strict=True))
        put_out = [self._settle(each, computed[index]) for index, each in enumerate(slices)]
        if sum(each.length for each, output in zip(slices, put_out, strict=True) if output) >= _LARGE_TOKENS:
            give_back()
        return put_out

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        span = passes[0].span
        if not self.span.covers(span) or any(each.span != span for each in passes):
            raise LocalProtocolError("passes go together through the same blocks of this span")
        order = sorted(range(len(passes)), key=lambda index: passes[index].adapter or b"")
        computed = self._run_in_order(span, [passes[index] for index in order])
        return [output for _, output in sorted(zip(order, computed, strict=True))]

    def _run_in_order(self, span: Span, passes: Sequence[Pass]) -> Sequence[Buffer]:
        """Passes whose rows with one adapter lie together."""
        lengths = [length for each in passes for length in each.lengths]
        hidden = self._sequences_of([each.hidden for each in passes], lengths)
        gradients = [each.gradient for each in passes if isinstance(each, Backward)]
        adapters = [(each.adapter, each.positions, self._dropped(each)) for each in passes]
        prompts = self._prompts_of(passes)
        of_adapters: Sequence[torch.Tensor] = ()
        of_prompts: Sequence[torch.Tensor] = ()
        scales: Sequence[float] = ()
        if gradients:
            rows, wanted = self._adapters.rows(adapters, together=False), self._sequences_of(gradients, lengths)
            scales = scales_for(self.model.dtype, wanted, [each.positions for each in passes])
            of_sequences = [scale for scale, each in zip(scales, passes, strict=True) for _ in each.lengths]
            wanted = scaled(wanted, of_sequences)
            computed, of_adapters, of_prompts = gradients_of(self.model, span, hidden, wanted, rows, prompts)
            computed = scaled(computed, [1 / scale for scale in of_sequences])
        else:
            computed = outputs_of(self.model, span, hidden, self._adapters.rows(adapters, together=True), prompts)
        row = torch.cat(computed).cpu()
        if (_OF_BACKWARD if gradients else 1) * len(row) >= _LARGE_TOKENS:
            give_back()
        outputs = [[to_bytes(part)] for part in row.split([each.positions for each in passes])]
        having_adapter = [index for index, each in enumerate(passes) if each.adapter is not None]
        having_prompts = [index for index, each in enumerate(passes) if each.prompts]
        for indices, found in ((having_adapter, of_adapters), (having_prompts, of_prompts)):
            for index, each in zip(indices, found, strict=bool(gradients)):
                (own,) = scaled([each], [1 / scales[index]])
                outputs[index].append(to_bytes(own.cpu()))
        return [parts[0] if len(parts) == 1 else b"".join(parts) for parts in outputs]

    def _dropped(self, each: Pass) -> DroppedRows | None:
        return DroppedRows(each.dropout, each.lengths, self._device) if each.dropout else None

    def _prompts_of(self, passes: Sequence[Pass]) -> Sequence[PromptedSequences]:
        """The deep prompts of those passes that have some, whose sequences lie end to end."""
        found, start = [], 0
        for each in passes:
            if each.prompts:
                starts = [*accumulate(each.lengths[:-1], initial=start)]
                values = read_prompts(each.prompts, self._hidden_size, self._device)
                found.append(PromptedSequences(values, each.span.start, starts))
            start += each.positions
        return found

    def _sequences_of(self, buffers: Sequence[Buffer], lengths: Sequence[int]) -> Sequence[torch.Tensor]:
        row = torch.cat([from_bytes(each, self._hidden_size) for each in buffers])
        if len(row) != sum(lengths):
            raise LocalProtocolError(f"numbers of {len(row)} positions, where there are {sum(lengths)}")
        return [*row.to(self._device).split([*lengths])]

    def _truncate(self, session: SessionId, length: int) -> None:
        sequence = self._sequences[session]
        if length > sequence.kv.length:
            raise LocalProtocolError(f"cannot keep {length} positions of {sequence.kv.length}")
        sequence.kv.length, sequence.half_way, sequence.passed = length, b"", 0

    @torch.inference_mode()
    def _fork(self, fork: Fork) -> None:
        own, other = self._sequences[fork.session], self._sequences[fork.source]
        shared, length = fork.shared, fork.length
        if own.span != other.span or not shared <= min(length, own.kv.length) or length > other.kv.length:
            raise LocalProtocolError(f"cannot copy [{shared}, {length}) of {other.kv.length} positions")
        own.kv.copy(other.kv, shared, length)

    def _close(self, session: SessionId) -> None:
        sequence = self._sequences.pop(session, None)
        if sequence is not None:
            self._kv_tokens_free += sequence.kv.capacity
            del sequence
            self._give_kv_back(session)
            give_back()

    def _take_kv(self, _session: SessionId, tokens: int, most: int) -> KV:
        """KV for this number of tokens at first, and for `most` of them later."""
        return SequenceKV(tokens, self._kv, most=most)

    def _give_kv_back(self, session: SessionId) -> None:
        """It is used no more."""

    def _checked(self, asked: Slice) -> Slice:
        """The slice with its hidden states, wherever they are."""
        sequence = self._sequences[asked.session]
        kv, start, length, first, end = sequence.kv, asked.start, asked.length, asked.first, asked.end
        if start != kv.length or start + length > kv.capacity:
            raise LocalProtocolError(f"positions [{start}, +{length}) do not continue a KV of {kv.length}")
        if first != sequence.passed:
            raise LocalProtocolError(f"a slice at block {first} of a session that is at {sequence.passed}")
        if end is not None and not first < end <= len(sequence.span):
            raise LocalProtocolError(f"a slice through blocks [{first}, {end}) of {len(sequence.span)}")
        if first:
            asked = replace(asked, hidden=sequence.half_way)
        if memoryview(asked.hidden).nbytes != length * self._hidden_size * FLOAT_BYTES:
            raise LocalProtocolError(f"hidden states of another number of positions than {length}")
        return asked

    def _settle(self, computed: Slice, output: Buffer) -> Buffer:
        """Record a computed slice. Returns its output, which is empty while it has blocks left."""
        sequence = self._sequences[computed.session]
        if computed.end is not None and computed.end < len(sequence.span):
            sequence.half_way, sequence.passed = output, computed.end
            return b""
        sequence.half_way, sequence.passed = b"", 0
        sequence.kv.length = computed.start + computed.length
        return output

    def _run(self, span: Span, slices: Sequence[Slice]) -> Sequence[Buffer]:
        """Run the slices through the blocks of `span`, which are all those of their sessions, or some."""
        native, prompts = self.model.native, self._prompts_in(slices)
        if native is not None and not prompts and are_few([each.length for each in slices]):
            few = [(self._slabs(each.session, native.no_kv), each.first, each.start, each.hidden) for each in slices]
            blocks = span.start - self.span.start, span.end - self.span.start
            adapters = [self._adapters.in_rust(self._adapter_of(each)) for each in slices]
            return native.blocks.forward(*blocks, few, *([adapters] if any(adapters) else []))
        rows = self._adapters.rows(((self._adapter_of(each), each.length, None) for each in slices), together=True)
        row = torch.cat([from_bytes(each.hidden, self._hidden_size) for each in slices])
        with adapted(rows):
            if not prompts:
                row = self._compute(span, slices, row)
            else:
                for block in range(span.start, span.end):
                    row = self._compute(Span(block, block + 1), slices, prompted(prompts, block, row))
        return [to_bytes(part) for part in row.split([each.length for each in slices])]

    def _compute(self, span: Span, slices: Sequence[Slice], row: torch.Tensor) -> torch.Tensor:
        """Compute by torch. `row` and the result have the states of all slices end to end, (tokens, hidden_size)."""
        segments = [Segment(self._sequences[each.session].kv, each.start, each.length) for each in slices]
        positions = torch.cat([torch.arange(s.start, s.start + s.length) for s in segments])
        token = segments_of_forward.set(segments)
        try:
            hidden: torch.Tensor = self.model(span, row.to(self._device), positions.to(self._device)).cpu()
            return hidden
        finally:
            segments_of_forward.reset(token)

    def _is_prompted(self, each: Slice) -> bool:
        """Whether the session has deep prompts for some of its positions."""
        prompts = self._sequences[each.session].prompts
        return prompts is not None and each.start < prompts.shape[2]

    def _prompts_in(self, slices: Sequence[Slice]) -> Sequence[PromptedSequences]:
        """The deep prompts of those slices that have some, which lie end to end."""
        found, row = [], 0
        for each in slices:
            sequence = self._sequences[each.session]
            if sequence.prompts is not None and self._is_prompted(each):
                values = sequence.prompts[:, :, each.start : each.start + each.length]
                found.append(PromptedSequences(values, sequence.span.start, [row]))
            row += each.length
        return found

    def _adapter_of(self, each: Slice) -> AdapterId | None:
        return self._sequences[each.session].adapter

    def _slabs(self, session: SessionId, no_kv: torch.Tensor) -> SequenceSlabs:
        sequence = self._sequences[session]
        if sequence.slabs is None:
            assert isinstance(sequence.kv, SequenceKV), "blocks are in Rust over slabs alone"
            pairs = sequence.kv.slabs(range(sequence.span.start, sequence.span.end), no_kv)
            arrays = [(first.numpy(), second.numpy()) for first, second in pairs]
            sequence.slabs = SequenceSlabs(arrays, sequence.kv.most)
        return sequence.slabs
