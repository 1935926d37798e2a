"""Judges a session's tokens by transformers in one process: exact, a near tie, or wrong (`tests/README.md`)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from llmnode.client.versions import CACHE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MEASURED_POSITIONS = 64
EPSILON_DEVIATIONS = 4


class Reference:
    """The whole model. To make one takes seconds (it is loaded, and its `epsilon` measured): do it in a thread."""

    def __init__(self, path: Path, **options: Any) -> None:  # Any: those of `from_pretrained`, such as `device_map`
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, **options).eval()
        self.vocabulary: int = self.model.config.vocab_size
        self._forced: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}
        self.epsilon = EPSILON_DEVIATIONS * self._deviation()
        """Two scores that are closer than this are tied. It is measured, never fitted to a failure."""

    def judge(self, tokens: Sequence[int], chosen: Iterable[int]) -> tuple[int, int]:
        """Count the positions `chosen` where transformers, teacher-forced, chooses otherwise: near ties, and errors."""
        return self.judge_choices(tokens, {position: tokens[position] for position in chosen})

    def judge_choices(self, tokens: Sequence[int], choices: Mapping[int, int]) -> tuple[int, int]:
        """The same for `choices` that are not part of `tokens`. Each came after the `tokens` before its position."""
        forced, leads = self._force(tuple(tokens))
        differing = [position for position, choice in choices.items() if forced[position - 1] != choice]
        ties = sum(leads[position - 1] < self.epsilon for position in differing)
        return ties, len(differing) - ties

    @torch.inference_mode()
    def _force(self, tokens: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """The model's choice after each position, and its lead. Results are kept, since many texts are the same."""
        if tokens not in self._forced:
            logits = self.model(torch.tensor([tokens], device=self.model.device)).logits[0]
            first, second = logits.topk(2).values.T
            self._forced[tokens] = logits.argmax(dim=-1).tolist(), (first - second).tolist()
        return self._forced[tokens]

    @torch.inference_mode()
    def _deviation(self) -> float:
        """The largest difference of a score between one forward over all positions and a forward for each."""
        tokens = torch.arange(1000, 1000 + MEASURED_POSITIONS, device=self.model.device)[None] % self.vocabulary
        whole = self.model(tokens).logits[0]
        cache = DynamicCache(config=self.model.config)
        single = [
            self.model(tokens[:, position : position + 1], use_cache=True, **{CACHE: cache}).logits[0, 0]
            for position in range(MEASURED_POSITIONS)
        ]
        return float((torch.stack(single) - whole).abs().max())


@cache
def reference_of(path: Path) -> Reference:
    """The one of a model in this process, for all benchmarks that a test runs here one after the other."""
    return Reference(path)


def judge_all(reference: Reference, texts: Iterable[tuple[int, ...]], start: int) -> tuple[int, int]:
    """The near ties and wrong choices of all `texts`. Each was generated from position `start` on."""
    judged = [reference.judge(text, range(start, len(text))) for text in sorted(texts)]
    return sum(ties for ties, _ in judged), sum(wrong for _, wrong in judged)
