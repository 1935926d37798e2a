"""How tokens are chosen, as flags say it. Loads torch only when used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SEED_STEP = 1_000_003
"""From one text to the next: a prime, so that seeds that are near each other share none of their texts' seeds soon."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. A `temperature` of 0 takes the likeliest; `seed` makes a run repeatable."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None

    def options(self, number: int = 0) -> dict[str, Any]:  # Any: keyword arguments of transformers' `generate`
        """For transformers' `generate`, of text `number`: each has a generator of its own, however many are at once."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        if self.temperature:
            options["logits_processor"] = self._drawn_at_random(number)
        return options

    def _drawn_at_random(self, number: int) -> Any:  # Any: torch is loaded only now
        import torch
        from transformers import LogitsProcessorList

        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed((self.seed + SEED_STEP * number) % 2**63)
        return LogitsProcessorList([_Draws(self.temperature, self.top_p, generator)])


@dataclass(frozen=True, slots=True)
class _Draws:
    """A logits processor. No function, whose signature transformers would look up for 0.1 ms at each token."""

    temperature: float
    top_p: float
    generator: torch.Generator

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: (rows, vocabulary). `generate` takes the highest of each row: that is made the one that is drawn."""
        import torch

        warm = scores / self.temperature
        drawn = [[draw(shares, self.top_p, self.generator)] for shares in warm.softmax(-1)]
        return warm.scatter_(1, torch.tensor(drawn), math.inf)


def draw(shares: torch.Tensor, top_p: float, generator: torch.Generator) -> int:
    """One of the likeliest tokens that together have `top_p`, of a softmax (vocabulary), in proportion to their shares.

    Nothing is sorted: one is drawn of all tokens. If it is none of those, it is one of what is likelier that is drawn
    next, and so on: the first that may stay is distributed as if those that may not had never been there.
    """
    import torch

    sums = shares.cumsum(0, dtype=torch.float64)
    total = sums[-1].item()
    if not total > 0:  # there is no softmax of scores that are infinite or no numbers
        return 0
    while True:
        part = 1 - torch.rand((), dtype=torch.float64, generator=generator).item()  # never 0, where shares of 0 may be
        token = int(torch.searchsorted(sums, part * sums[-1].item()))
        if shares[token] > 1 - top_p:  # as mostly: it does not depend on the others whether it stays
            return token
        likelier = likelier_than(token, shares)
        if stays(total - likelier.sum(dtype=torch.float64).item(), total, top_p):
            return token
        sums = likelier.cumsum(0, dtype=torch.float64)


def likelier_than(token: int, shares: torch.Tensor) -> torch.Tensor:
    """The shares of those tokens, and 0 for others. Of equal ones the last counts as the likeliest."""
    import torch
    from torch.nn.functional import threshold

    share = shares[token]
    just_below = share.nextafter(torch.zeros_like(share))
    before, after = shares[: token + 1], shares[token + 1 :]
    return torch.cat([threshold(before, share.item(), 0.0), threshold(after, just_below.item(), 0.0)])


def stays(share: float, total: float, top_p: float) -> bool:
    """If a token does that has this `share` of `total` together with all that are less likely.

    As transformers' warper says it, to the rounding: what has no more than 1 - top_p goes, the likeliest token never.
    """
    import torch

    return share == total or bool(torch.tensor(share, dtype=torch.float32) > 1 - top_p)
