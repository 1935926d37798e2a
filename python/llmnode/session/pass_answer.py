"""The numbers that one server answers to a pass, as they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmnode.errors import RemoteProtocolError
from llmnode.wire.messages import unpack
from llmnode.wire.pass_messages import Passed
from llmnode.wire.payload import decode_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer
    from llmnode.wire.frame import Frame
    from llmnode.wire.payload import HiddenForm


@dataclass(frozen=True, slots=True, eq=False)
class PassAnswer:
    """One server's numbers: hidden states or gradients for them, and gradients for adapters and prompts."""

    rows: Buffer
    of_adapter: np.ndarray
    of_prompts: np.ndarray
    adapter_sizes: Sequence[int] = ()
    """How many of the adapter's numbers are those of each block."""


def read_answer(
    answer: Frame, form: HiddenForm, positions: int, adapter_sizes: Sequence[int], expected_bytes: int
) -> PassAnswer:
    """Raises RemoteProtocolError for a wrong answer, of which `expected_bytes` is the right size."""
    unpack(Passed, answer.meta)
    if len(answer.payload) != expected_bytes:
        what = f"{len(answer.payload)} bytes for {positions} positions, expected {expected_bytes}"
        raise RemoteProtocolError(what)
    rows_bytes, values = form.bytes_of(positions), sum(adapter_sizes)
    rows, of_trained = answer.payload[:rows_bytes], np.frombuffer(answer.payload[rows_bytes:], np.float32)
    if not form.is_sound(rows, positions) or not np.isfinite(of_trained).all():
        raise RemoteProtocolError("answers a pass with numbers that are not finite, or too large")
    hidden = decode_hidden(rows, form.codec, positions * form.hidden_size)
    return PassAnswer(hidden, of_trained[:values], of_trained[values:], adapter_sizes)
