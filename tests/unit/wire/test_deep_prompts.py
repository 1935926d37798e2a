"""Deep prompts of a pass: an extension that says their form, and numbers at the end of the payload."""

from __future__ import annotations

import struct

import pytest

from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import RemoteProtocolError
from llmnode.wire.deep_prompts import PromptsForm, prompts_extension
from llmnode.wire.messages import EXTENSIONS, PROMPTS, pack, unpack
from llmnode.wire.pass_messages import Pass

SIZE = 3
"""The numbers of a hidden state."""


def asked(extensions: dict[str, object] | None, *lengths: int) -> Pass:
    message = Pass(bytes(32), 2, 4, "float32", "raw", "training", list(lengths), extensions=extensions)
    return unpack(Pass, pack(message))


def drawn(rows: int, positions: int, blocks: int = 2) -> DeepPrompts:
    count = blocks * rows * positions * SIZE
    return DeepPrompts(blocks, rows, positions, struct.pack(f"<{count}f", *range(count)))


@pytest.mark.parametrize("prompts", [drawn(1, 4), drawn(3, 1), NO_PROMPTS], ids=["one for all", "each", "none"])
def test_prompts_come_as_they_were_sent(prompts: DeepPrompts) -> None:
    form = PromptsForm.of(asked(prompts_extension(prompts), 4, 9, 5), SIZE)
    assert form.size_bytes == prompts.size_bytes
    assert form.read(b"hidden states" + bytes(prompts.values)) == prompts
    assert PROMPTS in EXTENSIONS[Pass]


@pytest.mark.parametrize(
    "value",
    [0, "1", [], [1], [1, 1, 1], [2, 1], [4, 1], [0, 1], [1, 0], [1, 5], [1, -1], [1, 1.0], [True, 1], [[1], 1], {}],
    ids=repr,
)
def test_another_form_is_refused(value: object) -> None:
    with pytest.raises(RemoteProtocolError, match="prompts"):
        PromptsForm.of(asked({PROMPTS: value}, 4, 9, 5), SIZE)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 2.0**57], ids=str)
def test_numbers_that_blocks_cannot_compute_with_are_refused(number: float) -> None:
    form = PromptsForm.of(asked({PROMPTS: [1, 1]}, 4), SIZE)
    with pytest.raises(RemoteProtocolError, match="not finite"):
        form.read(bytes(20) + struct.pack("<f", number))


def test_parts_of_prompts_are_those_of_some_blocks_and_sequences() -> None:
    each = drawn(3, 2)
    numbers = struct.unpack(f"<{2 * 3 * 2 * SIZE}f", each.values)
    row = 2 * SIZE
    second = each.of_blocks(1, 2)
    assert (second.blocks, second.rows) == (1, 3)
    assert struct.unpack(f"<{3 * row}f", second.values) == numbers[3 * row :]
    last = each.of_sequences(1, 3)
    assert (last.blocks, last.rows) == (2, 2)
    assert struct.unpack(f"<{4 * row}f", last.values) == numbers[row : 3 * row] + numbers[4 * row :]
    assert drawn(1, 2).of_sequences(1, 2) == drawn(1, 2)
    assert not NO_PROMPTS.of_blocks(1, 2).of_sequences(0, 1)
