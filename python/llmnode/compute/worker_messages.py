"""The messages between a node and its worker process: msgpack for small values, shared memory for hidden states.

A message is a list that begins with a word. Both ends are of one version and trust each other, so a wrong message is a
bug; from a peer come only numbers in shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgpack

from llmnode.compute.packed_fields import pack_fields, unpack_fields
from llmnode.compute.work import Done, Work
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Adopt, Backward, Control, Open, Pass, Slice
from llmnode.errors import AdapterError, ConfigError, EmbeddedModelMissing, LocalProtocolError, ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmnode.core.operations import Buffer

Message = list[Any]  # Any: what msgpack can hold

HELLO = "hello"
"""The child's first: it has started, and has imported nothing large."""
SAID = "said"
"""The child's, with a line about something that takes long. The answer is still to come."""
ANSWER, FAILED = "answer", "failed"
OPEN_MODEL, FITTING_BLOCKS, CANDIDATES = "open-model", "fitting-blocks", "candidates"
LOAD, WORK, DROP = "load", "work", "drop"
"""The node's messages. Each has one answer. LOAD, WORK and DROP name an executor by a number."""
LOAD_BESIDE = "load-beside"
"""The node's over a socket of its own, with the number of the new executor, that of the one that works meanwhile, the
span, and the positions of KV. Each answer begins with that number."""

ERROR_CHARACTERS = 4000

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        EmbeddedModelMissing,  # before ConfigError, which it is, too
        AdapterError,
        ConfigError,
        ModelError,
        LocalProtocolError,
        MemoryError,
        RuntimeError,
    )
}
_CONTROLS: dict[str, type[Control]] = {kind.__name__: kind for kind in get_args(Control)}
_PASSES: dict[str, type[Pass]] = {kind.__name__: kind for kind in get_args(Pass)}


def pack_message(*message: Any) -> bytes:  # Any: what msgpack can hold
    packed = msgpack.packb(message)
    assert isinstance(packed, bytes)
    return packed


class Messages:
    """Reads messages out of bytes, however they were cut."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker()

    def feed(self, data: bytes) -> None:
        self._unpacker.feed(data)

    def __iter__(self) -> Iterator[Message]:
        """Those that are whole by now, each once."""
        yield from self._unpacker


def pack_error(error: Exception) -> Message:
    """An error that the other end has no class for is a RuntimeError there, as torch's errors are."""
    kind = next((name for name, each in _ERRORS.items() if isinstance(error, each)), None)
    text = str(error) if kind is not None else f"{type(error).__name__}: {error}"
    return [kind or RuntimeError.__name__, text[:ERROR_CHARACTERS].encode(errors="replace")]


def unpack_error(message: Message) -> Exception:
    kind, text = message
    return _ERRORS[kind](text.decode())


def input_bytes(work: Work) -> int:
    """The size of the numbers that go to the process."""
    numbers = [each.hidden for each in (*work.slices, *work.passes)]
    if work.operations or work.passes:  # most work is decodes alone
        numbers += [each.gradient for each in work.passes if isinstance(each, Backward)]
        numbers += [each.weights for each in work.operations if isinstance(each, Adopt)]
        opened = [each for each in work.operations if isinstance(each, Open)]
        numbers += [each.prompts.values for each in (*opened, *work.passes)]
    return sum(memoryview(each).nbytes for each in numbers)


def output_bytes(work: Work, row_bytes: int) -> int:
    """The size of the numbers that come back; `row_bytes` is that of one position."""
    positions = sum(each.length for each in work.slices if each.end is None)
    if not work.passes:
        return row_bytes * positions
    backwards = [each for each in work.passes if isinstance(each, Backward)]
    trained_bytes = sum(FP32_BYTES * each.adapter_values + each.prompts.size_bytes for each in backwards)
    return row_bytes * (positions + sum(each.positions for each in work.passes)) + trained_bytes


def put_work(work: Work, memory: memoryview) -> Message:
    """Copies hidden states to `memory`, which has the size `input_bytes`."""
    put = _Writer(memory).put
    return [
        [[type(each).__name__, pack_fields(each, put)] for each in work.operations],
        [pack_fields(each, put) for each in work.slices],
        [[type(each).__name__, pack_fields(each, put)] for each in work.passes],
    ]


def take_work(packed: Message, memory: memoryview) -> Work:
    """Copies nothing: hidden states stay in `memory`."""
    operations, slices, passes = packed
    take = _Reader(memory).take
    return Work(
        [unpack_fields(_CONTROLS[kind], fields, take) for kind, fields in operations],
        [unpack_fields(Slice, fields, take) for fields in slices],
        [unpack_fields(_PASSES[kind], fields, take) for kind, fields in passes],
    )


def put_done(done: Done, memory: memoryview) -> Message:
    """Copies hidden states to `memory`."""
    put = _Writer(memory).put
    return [
        [pack_error(each) if isinstance(each, Exception) else each for each in done.results],
        [pack_error(each) if isinstance(each, Exception) else put(each) for each in done.outputs],
        [pack_error(each) if isinstance(each, Exception) else put(each) for each in done.passed],
    ]


def take_done(packed: Message, memory: memoryview) -> Done:
    """Copies hidden states out of `memory`, which is for the next results then."""
    results, outputs, passed = packed
    take = _Reader(memory).take
    return Done(
        [unpack_error(each) if isinstance(each, list) else each for each in results],
        [unpack_error(each) if isinstance(each, list) else bytes(take(each)) for each in outputs],
        [unpack_error(each) if isinstance(each, list) else bytes(take(each)) for each in passed],
    )


class _Writer:
    """Puts buffers into memory, one after the other."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._offset = 0

    def put(self, buffer: Buffer) -> int:
        """Returns its size."""
        view = memoryview(buffer).cast("B")
        end = self._offset + len(view)
        self._memory[self._offset : end] = view
        self._offset = end
        return len(view)


class _Reader:
    """Takes them out in the same order."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._offset = 0

    def take(self, size: int) -> memoryview:
        start, self._offset = self._offset, self._offset + size
        if self._offset > len(self._memory):
            raise LocalProtocolError(f"{self._offset} bytes in a shared memory of {len(self._memory)}")
        return self._memory[start : self._offset]
