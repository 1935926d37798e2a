"""A QR code as lines of text. It knows no terminal."""

from __future__ import annotations

from itertools import zip_longest

MOST_CHARS = 1000
"""A code of more characters has more modules than a phone reads off a screen."""
QUIET_MODULES = 2
"""The light margin. The standard asks for 4; phones read 2."""
_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
"""Two modules, one above the other, by whether each is dark."""


def can_show(encoding: str) -> bool:
    """Whether the lines of a code can be written in this encoding."""
    try:
        "".join(_HALVES.values()).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def qr_lines(text: str) -> list[str]:
    """Dark modules are drawn: print the lines dark on light. Each character is two modules, one above the other."""
    import segno

    # The lowest level of error correction makes the smallest code: a screen has no stains.
    code = segno.make_qr(text, error="l", boost_error=False)
    rows = [[bool(module) for module in row] for row in code.matrix_iter(border=QUIET_MODULES)]
    light = [False] * len(rows[0])
    pairs = zip_longest(rows[::2], rows[1::2], fillvalue=light)
    return ["".join(_HALVES[pair] for pair in zip(upper, lower, strict=True)) for upper, lower in pairs]
