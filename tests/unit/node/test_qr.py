"""The lines of a QR code are its modules, two to a character."""

from __future__ import annotations

import pytest
import segno

from llmnode.node.qr import MOST_CHARS, QUIET_MODULES, qr_lines

MODULES = {" ": (0, 0), "▀": (1, 0), "▄": (0, 1), "█": (1, 1)}


@pytest.mark.parametrize("chars", [20, 21, 100, 300, MOST_CHARS])
def test_every_module_is_drawn_once_with_a_margin(chars: int) -> None:
    text = "llmnode-invite-" + "aB_-7" * (chars // 5)
    lines = qr_lines(text)
    drawn = [[MODULES[char][half] for char in line] for line in lines for half in (0, 1)]
    code = segno.make_qr(text, error="l", boost_error=False)
    expected = [list(row) for row in code.matrix_iter(border=QUIET_MODULES)]
    assert drawn[: len(expected)] == expected
    assert not any(map(any, drawn[len(expected) :])), "the half of a last line that is left over is light"
