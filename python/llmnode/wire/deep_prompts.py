"""The deep prompts of a pass or a session: an extension that its client requires, and numbers in the payload.

The extension says how many rows of prompts there are, and how many positions; a session has one row. The numbers are
the last part of the payload: (blocks of the span, rows, positions, hidden_size) in fp32, whatever the codec is, since
they are parameters. Their gradients are the last part of GRADIENT's, in the same form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire.fields import U32, check_of
from llmnode.wire.messages import PROMPTS, OpenRequest, RefusalCode
from llmnode.wire.payload import Codec, HiddenForm

if TYPE_CHECKING:
    from llmnode.core.operations import Buffer
    from llmnode.wire.frame import Frame
    from llmnode.wire.pass_messages import Pass

_is_number = check_of(U32)

MOST_PASS_BYTES = 8 << 20
"""Deep prompts of one pass: servers take this much."""
MOST_SESSION_BYTES = 32 << 20
"""Those of one hop of a session: servers take this much for their blocks."""


def most_prompts(row_bytes: int) -> int:
    """The most prompts of a sequence before one block that passes carry, for hidden states of `row_bytes`."""
    return MOST_PASS_BYTES // row_bytes


def prompts_extension(prompts: DeepPrompts) -> dict[str, Any]:  # Any: each extension has its own values
    """The extension of a pass with these prompts, for servers to require."""
    return {PROMPTS: [prompts.rows, prompts.positions]} if prompts else {}


@dataclass(frozen=True, slots=True)
class PromptsForm:
    """The form of the prompts of one pass. All is 0 if it has none."""

    blocks: int
    rows: int
    positions: int
    hidden_size: int

    @classmethod
    def of(cls, request: Pass | OpenRequest, hidden_size: int) -> PromptsForm:
        """Raises RemoteProtocolError for another number of rows than one or that of the sequences, and for prompts
        that are longer than a sequence.
        """
        if (asked := (request.extensions or {}).get(PROMPTS)) is None:
            return cls(0, 0, 0, hidden_size)
        if type(asked) is not list or len(asked) != 2 or not all(map(_is_number, asked)):
            raise RemoteProtocolError(f"{type(request).__name__}.extensions: {PROMPTS} are no rows and positions")
        lengths = [request.max_length] if isinstance(request, OpenRequest) else request.lengths
        (rows, positions), sequences, shortest = asked, len(lengths), min(lengths)
        if rows not in {1, sequences} or not 1 <= positions <= shortest:
            what = f"{rows} rows of {positions} prompts for {sequences} sequences, the shortest of {shortest} positions"
            raise RemoteProtocolError(what)
        return cls(request.span_end - request.span_start, rows, positions, hidden_size)

    @property
    def size_bytes(self) -> int:
        """The size of the numbers, and of their gradients."""
        return FP32_BYTES * self.hidden_size * self.blocks * self.rows * self.positions

    def read(self, payload: Buffer) -> DeepPrompts:
        """The prompts at the end of `payload`, copied. Raises RemoteProtocolError for numbers that are not sound."""
        if not self.blocks:
            return NO_PROMPTS
        values = bytes(memoryview(payload)[-self.size_bytes :])
        if not are_sound(values, self.hidden_size):
            raise RemoteProtocolError("prompts that are not finite, or too large")
        return DeepPrompts(self.blocks, self.rows, self.positions, values)


def prompts_of_session(frame: Frame, request: OpenRequest, hidden_size: int, most_bytes: int) -> PromptsForm:
    """The form of those of an OPEN. Raises RemoteProtocolError for a payload of another size, and PeerRefused for more
    than `most_bytes`. The numbers are not looked at.
    """
    form = PromptsForm.of(request, hidden_size)
    if len(frame.payload) != form.size_bytes:
        raise RemoteProtocolError(f"OPEN: {len(frame.payload)} bytes of prompts, expected {form.size_bytes}")
    if form.size_bytes > most_bytes:
        raise PeerRefused(RefusalCode.NO_ROOM, f"deep prompts of a session have at most {most_bytes >> 20} MiB")
    return form


def are_sound(values: Buffer, hidden_size: int) -> bool:
    """Whether the numbers of prompts, or gradients for them, are finite, and as large as hidden states may be."""
    form = HiddenForm(hidden_size, Codec.RAW)
    return form.is_sound(values, memoryview(values).nbytes // form.bytes_of(1))
