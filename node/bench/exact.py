"""What transformers in one process says of a session's tokens: exact, a near tie, or wrong (`tests/README.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

MEASURED_POSITIONS = 64
EPSILON_DEVIATIONS = 4


class Reference:
    """The whole model. Made in a thread: it is loaded, and its `epsilon` measured, for seconds."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()  # Any: untyped
        self._scores: dict[tuple[int, ...], torch.Tensor] = {}
        self.epsilon = EPSILON_DEVIATIONS * self._deviation()
        """Two scores are tied that are closer than this: never fitted to a failure."""

    def judge(self, tokens: Sequence[int], chosen: Iterable[int]) -> tuple[int, int]:
        """Of the positions `chosen` of `tokens`, teacher-forced: those decided otherwise, as near ties and wrongly."""
        return self.judge_choices(tokens, {position: tokens[position] for position in chosen})

    def judge_choices(self, tokens: Sequence[int], choices: Mapping[int, int]) -> tuple[int, int]:
        """As `judge`, of what was chosen for each position, given the `tokens` before it, instead of what is there."""
        scores = self._forced(tuple(tokens))
        ties = wrong = 0
        for position, choice in choices.items():
            row = scores[position - 1]
            if int(row.argmax()) != choice:
                first, second = row.topk(2).values
                is_tie = bool(first - second < self.epsilon)
                ties += is_tie
                wrong += not is_tie
        return ties, wrong

    @torch.inference_mode()
    def _forced(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Most dialogues are the same: each is scored once."""
        if tokens not in self._scores:
            self._scores[tokens] = self._model(torch.tensor([tokens])).logits[0]
        return self._scores[tokens]

    @torch.inference_mode()
    def _deviation(self) -> float:
        """The largest of a score between one forward over all positions and one a position."""
        tokens = torch.arange(1000, 1000 + MEASURED_POSITIONS)[None]
        whole = self._model(tokens).logits[0]
        cache = DynamicCache(config=self._model.config)
        single = [
            self._model(tokens[:, position : position + 1], past_key_values=cache, use_cache=True).logits[0, 0]
            for position in range(MEASURED_POSITIONS)
        ]
        return float((torch.stack(single) - whole).abs().max())
