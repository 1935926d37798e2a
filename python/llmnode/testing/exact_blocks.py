"""The arithmetic of `ExactExecutor`'s blocks: whole numbers, so that a result is right to the bit, or wrong."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from llmnode.core.model import FP32_BYTES, ModelInfo
from llmnode.core.span import Span

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from llmnode.core.operations import DeepPrompts, Dropout

EXACT_MODEL = ModelInfo("exact", b"d" * 32, blocks=6, hidden_size=2, context_tokens=200)
"""Small, and right to the bit."""

_FINITE = np.uint8(0x3F)
"""The bits of a number's last byte that are left: it is finite then, and below 2."""


def exact_output(
    hidden: bytes, span: Span, adapter: Mapping[int, bytes] | None = None, prompts: Sequence[bytes] = ()
) -> bytes:
    """The output of the blocks of `span`, each an `ExactExecutor`'s, for the hidden states of a whole session.

    `adapter` has the parts of an adapter by block. `prompts` has what is added before each block of `span`.
    """
    values = np.frombuffer(hidden, np.uint8)
    for index, block in enumerate(range(span.start, span.end)):
        if prompts:
            values = values.copy()
            values[: len(prompts[index])] += np.frombuffer(prompts[index], np.uint8)
        shift = (block + _key(adapter, block)) % 256
        values = np.add.accumulate(values, dtype=np.uint8)  # a copy
        values += np.uint8(shift)
        values[3::4] &= _FINITE
    return values.tobytes()


def exact_gradient(gradient: bytes, span: Span, adapter: Mapping[int, bytes] | None = None) -> bytes:
    """The gradients that an `ExactExecutor` gives for one sequence: sums from its end, made small likewise."""
    values = np.frombuffer(gradient, np.uint8)
    for block in reversed(range(span.start, span.end)):
        values = _small(np.cumsum(values[::-1], dtype=np.uint8)[::-1] + np.uint8(_key(adapter, block)))
    return values.tobytes()


def exact_prompts(prompts: DeepPrompts, sequences: int) -> list[list[bytes]]:
    """The bytes that are added to each sequence before each block, if there are any."""
    if not prompts:
        return [[] for _ in range(sequences)]
    rows = [sequence if prompts.rows > 1 else 0 for sequence in range(sequences)]
    one_by_one = [prompts.of_sequences(row, row + 1) for row in rows]
    return [[bytes(own.of_blocks(at, at + 1).values) for at in range(own.blocks)] for own in one_by_one]


def exact_adapters(adapter: Mapping[int, bytes], dropout: Dropout, sequences: int) -> list[Mapping[int, bytes]]:
    """The adapter as each sequence has it: with dropout, a part of another one for each probability and seed."""
    if not dropout:
        return [adapter] * sequences
    asked = [f"{dropout.probability} {seed}".encode() for seed in dropout.seeds]
    assert len(asked) == sequences
    return [
        {block: zlib.crc32(part + each).to_bytes(FP32_BYTES) + part[FP32_BYTES:] for block, part in adapter.items()}
        for each in asked
    ]


def exact_prompt_gradient(
    gradients: Sequence[bytes], span: Span, prompts: DeepPrompts, adapters: Sequence[Mapping[int, bytes]] = ()
) -> bytes:
    """The gradients for `prompts`, likewise: the bytes of each number of the gradient for what a prompt is added to.

    `adapters` has that of each sequence, if there are any.
    """
    if not prompts:
        return b""
    size = prompts.size_bytes // (prompts.blocks * prompts.rows)
    found = []
    pairs = list(zip(gradients, adapters or [{}] * len(gradients), strict=True))
    for block in range(span.start, span.end):
        entering = [exact_gradient(each, Span(block, span.end), own)[:size] for each, own in pairs]
        numbers = np.frombuffer(b"".join(entering), np.uint8).reshape(len(gradients), -1, FP32_BYTES).sum(2)
        found.append(numbers.sum(0) if prompts.rows == 1 else numbers)
    return np.stack(found).astype(np.float32).tobytes()


def exact_adapter_gradient(
    sequences: Sequence[tuple[bytes, bytes]],
    span: Span,
    adapters: Sequence[Mapping[int, bytes]],
    prompts: Sequence[Sequence[bytes]] = (),
) -> bytes:
    """The gradients for the numbers of an adapter in `span`: sums over sequences, whole numbers that fp32 holds
    exactly.

    A sequence is what goes into the blocks, and the gradient for what comes out. It has its own of the `adapters`, and
    its own `prompts`, if any.
    """
    found = []
    for block in [block for block in range(span.start, span.end) if block in adapters[0]]:
        total = np.zeros(len(adapters[0][block]) // FP32_BYTES, np.float32)
        for index, (hidden, gradient) in enumerate(sequences):
            adapter, own = adapters[index], prompts[index] if prompts else ()
            before = Span(span.start, block) if block > span.start else None
            after = Span(block + 1, span.end) if block + 1 < span.end else None
            entering = hidden if before is None else exact_output(hidden, before, adapter, own)
            coming = gradient if after is None else exact_gradient(gradient, after, adapter)
            seed = sum(entering) + sum(coming) + _key(adapter, block)
            total += (seed + np.arange(len(total))) % 1000
        found.append(total.tobytes())
    return b"".join(found)


def _key(adapter: Mapping[int, bytes] | None, block: int) -> int:
    """A number that depends on all of a block's part; 0 without one."""
    return zlib.crc32(adapter[block]) % 256 if adapter and block in adapter else 0


def exact_input(rng: random.Random, positions: int, model: ModelInfo = EXACT_MODEL) -> bytes:
    """Random hidden states, as they leave an embedding."""
    return _small(np.frombuffer(rng.randbytes(positions * model.row_bytes), np.uint8)).tobytes()


def _small(values: np.ndarray) -> np.ndarray:
    """The same bytes, but for two bits of each number, so that it is a finite number below 2."""
    values = values.copy()
    values[3::4] &= _FINITE
    return values
