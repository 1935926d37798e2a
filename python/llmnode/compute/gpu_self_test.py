"""Tests on a GPU, when blocks are loaded, whether the fast ways compute the same as the plain one.

Torch offers them on GPUs where they put numbers in wrong places, so nothing is believed before it is tried.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from llmnode.compute.cuda_graphs import CANNOT, WORTH
from llmnode.compute.pages import in_pages

if TYPE_CHECKING:
    from llmnode.compute.cuda_graphs import RecordedForwards
    from llmnode.compute.pages import PagePool
    from llmnode.core.span import Span

log = logging.getLogger(__name__)

MOST_OFF = 0.2
"""The relative error allowed. In bfloat16 two right ways to compute differ by hundredths, a wrong one by more."""
STEPS = 4 * WORTH
"""Half of them are on one page more. So steps on either number of pages are recorded and replayed."""


def use_what_works(forwards: RecordedForwards, pool: PagePool, span: Span, hidden_size: int) -> None:
    """Leave flash attention and recordings on only if, on this GPU, they give the same numbers as the plain way.

    A way that is left out is logged, with the reason. Nothing of the pool is taken afterwards.
    """
    flash, record = pool.flash, forwards.record
    pool.flash, forwards.record = False, None
    if pool.tokens < sum(in_pages(each + STEPS, pool.page) * pool.page for each in _lengths(pool)):
        log.warning("so little KV does not suffice to try flash attention and recorded steps in: they are not used")
        return
    expected = _try_out(forwards, pool, span, hidden_size)

    def works(what: str) -> bool:
        try:
            found = _try_out(forwards, pool, span, hidden_size)
        except CANNOT as error:
            log.warning("without %s, which cannot be used here: %s", what, error)
            return False
        off = ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()
        if off <= MOST_OFF:  # NaN is not
            return True
        log.warning("without %s, which computed something else here, off by %.0f%%", what, 100 * off)
        return False

    if flash:
        pool.flash = True
        pool.flash = works("flash attention")
    if record is not None:
        forwards.record = record
        if not works("recorded steps"):
            forwards.forget()


def _lengths(pool: PagePool) -> list[int]:
    return [1, 2 * pool.page - STEPS // 2, 5]


def _try_out(forwards: RecordedForwards, pool: PagePool, span: Span, hidden_size: int) -> torch.Tensor:
    """The output of three sequences that are prefilled together, the second to the end of a page, and then decoded."""
    generator = torch.Generator().manual_seed(0)
    lengths = _lengths(pool)
    kvs = [pool.take(length + STEPS) for length in lengths]
    outputs = []
    try:
        for _ in range(1 + STEPS):
            parts = [(kv, kv.length, length) for kv, length in zip(kvs, lengths, strict=True)]
            hidden = torch.randn(sum(lengths), hidden_size, generator=generator, dtype=torch.float32)
            outputs.append(forwards.run(span, parts, hidden))
            for kv, length in zip(kvs, lengths, strict=True):
                kv.length += length
            lengths = [1] * len(kvs)
    finally:
        for kv in kvs:
            pool.give_back(kv)
    return torch.cat(outputs)
