"""The metadata of passes: whole sequences through the blocks of a span, and gradients back, outside of any session."""

from __future__ import annotations

from dataclasses import dataclass

from llmnode.wire.fields import (
    U32,
    Count,
    Digest,
    ExtensionNames,
    Extensions,
    Lengths,
    Microseconds,
    Name,
    OptionalDigest,
)

FROZEN_ADAPTER = "frozen_adapter"
"""The client wants no gradients for the numbers of the adapter, which it need not have."""
ALONE = "alone"
"""The bits of the answer are not to depend on the server's speed, nor on what else it computes."""
DROPOUT = "dropout"
"""Some of the numbers that go into the adapter's matrices are to be 0 (`dropout.py`)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Put whole sequences of these `lengths` through the blocks of a span, or gradients back through them.

    The payload of EVALUATE is their hidden states in `codec`. That of BACKWARD has gradients for the output after them,
    likewise. Nothing is kept. With an `adapter`, GRADIENT also has fp32 gradients for its matrices in the span. Deep
    prompts are an extension (`deep_prompts.py`).
    """

    model_digest: Digest
    span_start: U32
    span_end: Count
    dtype: Name
    codec: Name
    priority: Name
    lengths: Lengths
    adapter: OptionalDigest = None
    extensions: Extensions = None
    required: ExtensionNames = None


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a pass. The payload is the output of the blocks, or gradients for their input, in its codec."""

    queue_us: Microseconds
    compute_us: Microseconds
