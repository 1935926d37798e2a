"""Forwards over pages. Steps of one token each are recorded once on a GPU, and then replayed as one (CUDA graphs).

A recording says which kernels run on which memory. So a step's hidden states and numbers are put where those of the
recorded step were. There is one recording for each number of sequences and of pages, up to the next power of two.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

import torch

from llmnode.compute.adapted import has_adapters
from llmnode.compute.attention import Segment, segments_of_forward
from llmnode.compute.pages import PagedRow, RowShape, in_pages, lay_out, row_of_forward
from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.pages import PagedSegment, PagePool
    from llmnode.core.span import Span

    Forward = Callable[[Span, torch.Tensor, torch.Tensor], torch.Tensor]
    """Runs hidden states (tokens, hidden_size) at positions (tokens) through the blocks of a span."""
    Replay = Callable[[], torch.Tensor]
    Record = Callable[[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor], Replay]
    """Runs a function of hidden states and numbers. Returns a function that repeats all its work on the GPU."""
    Key = tuple[Span, RowShape]

log = logging.getLogger(__name__)

MOST_STEPS = 32
"""The most steps in a recording. With more of them, the time of their launches does not matter."""
MOST_RECORDINGS = 64
MOST_SEEN = 1000
"""The most kinds of steps that are counted before they are recorded."""
WORTH = 4
"""A step is recorded when it comes for the fourth time: a recording takes as long as about a hundred steps."""
CANNOT = (ImportError, TypeError, ValueError, RuntimeError, ModelError)
"""The errors of torch for something that it cannot do here, or that an older version does not have."""


class RecordedForwards:
    """Runs rows through blocks whose KV is in the pages of `pool`.

    It records if there is something to `record` with, until a recording fails, which is logged.
    """

    def __init__(self, forward: Forward, pool: PagePool, record: Record | None = None) -> None:
        self.record = record
        self._forward = forward
        self._pool = pool
        self._recorded: OrderedDict[Key, _Recording] = OrderedDict()
        self._seen: Counter[Key] = Counter()

    def run(self, span: Span, segments: Sequence[PagedSegment], hidden: torch.Tensor) -> torch.Tensor:
        """Run `hidden`, (tokens, hidden_size) of all segments, end to end. It and the result are on the CPU."""
        can_record = self.record is not None and not has_adapters()  # which come and go
        if can_record and len(segments) <= MOST_STEPS and all(length == 1 for _, _, length in segments):
            steps = _steps(segments)
            if self._pool.takes_whole(steps) and (recording := self._recording((span, steps), hidden.shape[1])):
                _, numbers = lay_out(segments, steps)
                return recording.replay(hidden, numbers)
        shape, numbers = lay_out(segments)
        attended = [Segment(*each) for each in segments]
        device = self._pool.device
        return self._run(span, shape, attended, hidden.to(device), numbers.to(device)).cpu()

    def forget(self) -> None:
        """Nothing is recorded from now on, nor replayed."""
        self.record = None
        self._recorded.clear()

    def _recording(self, key: Key, hidden_size: int) -> _Recording | None:
        """The recording of a kind of step, made when it is due. It replaces the one that was unused for longest."""
        if (recording := self._recorded.get(key)) is not None:
            self._recorded.move_to_end(key)
            return recording
        if len(self._seen) > MOST_SEEN:  # clients choose spans
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] < WORTH:
            return None
        del self._seen[key]
        if len(self._recorded) >= MOST_RECORDINGS:
            self._recorded.popitem(last=False)
        try:
            recording = self._recorded[key] = self._make(key, hidden_size)
        except CANNOT as error:
            log.warning("without recorded steps, which cannot be made here: %s", error)
            self.forget()
        return recording

    def _make(self, key: Key, hidden_size: int) -> _Recording:
        assert self.record is not None
        span, shape = key
        _, nothing = lay_out([], shape)
        numbers = nothing.to(self._pool.device)
        hidden = torch.zeros((shape.tokens, hidden_size), dtype=torch.float32, device=self._pool.device)

        def step(hidden: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return self._run(span, shape, (), hidden, numbers)

        return _Recording(hidden, numbers, self.record(step, hidden, numbers))

    def _run(
        self, span: Span, shape: RowShape, segments: Sequence[Segment], hidden: torch.Tensor, numbers: torch.Tensor
    ) -> torch.Tensor:
        row = PagedRow(self._pool, shape, numbers)
        tokens = row_of_forward.set(row), segments_of_forward.set(segments)
        try:
            return self._forward(span, hidden, row.positions)
        finally:
            row_of_forward.reset(tokens[0])
            segments_of_forward.reset(tokens[1])


class _Recording:
    """`hidden` and `numbers` are where the recorded step has them."""

    def __init__(self, hidden: torch.Tensor, numbers: torch.Tensor, replay: Replay) -> None:
        self._hidden, self._numbers, self._replay = hidden, numbers, replay

    def replay(self, hidden: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Repeat the recorded step with these values. They and the result are on the CPU."""
        self._hidden[: len(hidden)].copy_(hidden)
        self._numbers.copy_(numbers)
        return self._replay()[: len(hidden)].cpu()


class CudaGraphs:
    """The `Record` of a GPU. All graphs work in the same memory: one is replayed, and its output read, at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()

    def __call__(
        self,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        numbers: torch.Tensor,
    ) -> Replay:
        """Raises RuntimeError if it cannot be recorded: a number in the GPU's memory decides on a kernel."""
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):  # libraries take their memory at their first call
            for _ in range(2):
                function(hidden, numbers)
        torch.cuda.current_stream(self._device).wait_stream(self._beside)
        graph = torch.cuda.CUDAGraph()
        recording = torch.cuda.graph(graph, self._memory, self._beside, capture_error_mode="thread_local")
        with torch.cuda.device(self._device), recording:
            output = function(hidden, numbers)

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def _steps(segments: Sequence[PagedSegment]) -> RowShape:
    """The shape of a recording that holds them."""
    sequences = _power_of_two(len(segments))
    pages = _power_of_two(max(in_pages(start + 1, kv.page) for kv, start, _ in segments))
    return RowShape(sequences, sequences, 1, pages)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
