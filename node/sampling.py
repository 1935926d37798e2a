"""How tokens are chosen, as flags say it. Loads torch only when used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        """The likeliest after noise of Gumbel's distribution is drawn from the softmax (the Gumbel-max trick)."""
        import torch
        from transformers import LogitsProcessorList
        from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed((self.seed + SEED_STEP * number) % 2**63)

        def add_noise(_input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores - torch.empty_like(scores).exponential_(generator=generator).log()

        warpers = [TemperatureLogitsWarper(float(self.temperature)), TopPLogitsWarper(self.top_p)]
        return LogitsProcessorList([*warpers, add_noise])
