"""How tokens are chosen, as flags say it. Loads torch only when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. A `temperature` of 0 takes the likeliest; `seed` makes a run repeatable."""

    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int | None

    def options(self) -> dict[str, Any]:  # Any: keyword arguments of transformers' `generate`
        """For transformers' `generate`. Sets torch's seed, if there is one."""
        import torch

        if self.seed is not None:
            torch.manual_seed(self.seed)
        if self.temperature == 0:
            return {"max_new_tokens": self.max_new_tokens, "do_sample": False}
        return {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
