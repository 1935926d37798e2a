"""The powers of two by which gradients are scaled while they cross the wire in a lossy codec.

`core/gradient_size.py` has the reason. The client sends a gradient scaled, and divides the answer. Servers know nothing
of it. With raw nothing is scaled.

The answer may be larger than the gradient was. If it overflows at the server, the client asks with a smaller scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from llmnode.core.gradient_size import exponent_for
from llmnode.errors import PeerRefused
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer
    from llmnode.session.pass_answer import PassAnswer

_STEP = 6
"""The second scale is 2^6 times smaller: an answer eight million times larger does not overflow. fp16 then rounds to
2^-16 of the largest number. Smaller scales would cost what spot checks can tell apart."""


@dataclass(frozen=True, slots=True)
class GradientScale:
    """A gradient is 2^`exponent` times larger on the wire, and so is the answer."""

    exponent: int = 0

    def up(self, gradient: Buffer) -> Buffer:
        """fp32 `gradient` as it is sent."""
        return _times(np.frombuffer(gradient, "<f4"), self.exponent).data.cast("B") if self.exponent else gradient

    def down(self, answer: PassAnswer) -> PassAnswer:
        """The gradients that the answer stands for. If they overflow, raises PeerRefused, as the server would have."""
        if not self.exponent:
            return answer
        rows = np.frombuffer(answer.rows, "<f4")
        found = [_times(each, -self.exponent) for each in (rows, answer.of_adapter, answer.of_prompts)]
        if self.exponent < 0 and not all(np.isfinite(each).all() for each in found):
            raise PeerRefused(RefusalCode.OVERFLOW, "gradients that are not finite when they are not scaled any more")
        return replace(answer, rows=found[0].data.cast("B"), of_adapter=found[1], of_prompts=found[2])


UNSCALED = GradientScale()


def scales_of(gradient: Buffer, codec: Codec) -> Sequence[GradientScale]:
    """The scales for a finite fp32 `gradient`, of which the next is tried if numbers overflow with one."""
    values = np.frombuffer(gradient, "<f4")
    if codec is Codec.RAW or not (largest := max(values.max(), -values.min())):
        return [UNSCALED]
    return [GradientScale(exponent_for(float(largest), less)) for less in (0, _STEP)]


def _times(values: np.ndarray, exponent: int) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(values * np.float32(2.0**exponent))
