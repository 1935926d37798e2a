"""The power of two that brings the largest number of a gradient to a size which 16 bits carry well.

The gradients of a mean over thousands of positions lie near 1e-8, where fp16 has no numbers any more. A backward is
linear in the gradient, so it may be computed with a larger one, and the result divided. In fp32 a power of two changes
no bit of the result.
"""

from __future__ import annotations

from math import frexp, inf

LARGEST_EXPONENT = -1
"""The largest number becomes 1/4 to 1/2. In fp16 one 2^22 times smaller is not zero, and one 130,000 times larger is
finite.

Through all blocks of SmolLM2 at one server, the largest number of the gradient of a loss becomes 400 to 900 times
larger, and that of noise 3,000 to 11,000 times. With the largest number sent as 2^-7 to 8, the errors were the same.
"""
MOST_EXPONENT = 126
"""2^126 and its inverse are normal numbers of fp32."""


def exponent_for(largest: float, less: int = 0) -> int:
    """The exponent for a gradient with this `largest` number, `less` than the best. Zero and NaN have 0."""
    if not 0.0 < largest < inf:
        return 0
    exponent = LARGEST_EXPONENT - frexp(largest)[1] - less
    return max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT))
