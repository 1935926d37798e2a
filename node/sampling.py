"""How tokens are chosen: as flags say it, and where they do not, as the model's generation config does.

Loads torch only when used.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from transformers import GenerationConfig

SEED_STEP = 1_000_003
"""From one text to the next: a prime, so that seeds that are near each other share none of their texts' seeds soon."""
LOWEST, HIGHEST = 1e-3, 1e3
"""Temperatures other than 0: beyond them scores of fp32 have no softmax, or all the same."""
TEMPERATURE, TOP_P = 1.0, 0.9
"""Of a model whose generation config does not say that it is sampled, if a flag does."""
WARPERS = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""What transformers applies to scores only if it samples."""
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "guidance_scale")
"""What it applies in any case. Flags say nothing of these."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What flags say of it; None where they say nothing. A `temperature` of 0 takes the likeliest token.

    `otherwise` is the temperature if the model says nothing either: 0, or what dialogues are drawn with.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    otherwise: float = 0.0

    def of(self, config: GenerationConfig) -> Sampler:
        """Together with the generation config of a model."""
        from transformers import GenerationConfig

        # What a flag turns on is drawn with the settings of the model, if that has some.
        asked = bool(self.temperature) if self.temperature is not None else None if self.top_p is None else True
        by_model = config.do_sample is True
        draws = asked if asked is not None else by_model or (config.do_sample is None and self.otherwise > 0)
        penalties = {name: getattr(config, name) for name in PENALTIES}
        if not draws:
            return Sampler(None, self.seed, penalties)
        theirs = GenerationConfig._get_default_generation_params()
        ours = {"temperature": self.otherwise or TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        settings = {name: theirs.get(name) for name in WARPERS} | ({} if by_model else ours)
        settings |= {name: value for name in WARPERS if (value := getattr(config, name)) is not None}
        flags = {"temperature": self.temperature, "top_p": self.top_p}
        settings |= {name: value for name, value in flags.items() if value is not None}
        return Sampler(settings, self.seed, penalties)


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of texts are chosen: `settings` are those of `WARPERS`, None for the likeliest token."""

    settings: dict[str, Any] | None  # Any: as a generation config has it
    seed: int | None = None
    penalties: dict[str, Any] = field(default_factory=dict)

    @property
    def is_greedy(self) -> bool:
        return self.settings is None

    def options(self, number: int = 0) -> dict[str, Any]:  # Any: keyword arguments of transformers' `generate`
        """For transformers' `generate`, of text `number`: each has a generator of its own, however many are at once.

        One token of one text at a time, whatever the generation config says: that is what is streamed.
        """
        alone = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
        options = {**alone, "prompt_lookup_num_tokens": None, "do_sample": False}
        if self.settings is not None:
            options["logits_processor"] = self._drawn_at_random(number)
        return options

    def as_json(self) -> dict[str, Any]:
        return {"do_sample": not self.is_greedy, **self._told(), "seed": self.seed}

    def line(self) -> str:
        how = "the likeliest tokens are taken" if self.is_greedy else "tokens are drawn"
        told = ", ".join(f"{name} {value}" for name, value in self._told().items())
        return f"{how} ({told})" if told else how

    def _told(self) -> dict[str, Any]:
        """Without what changes nothing: 0 and 1 do not, but as a temperature."""
        settings = {**(self.settings or {}), **self.penalties}
        return {name: value for name, value in settings.items() if name == "temperature" or value not in (None, 0, 1)}

    def _drawn_at_random(self, number: int) -> Any:  # Any: torch is loaded only now
        import torch
        from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList
        from transformers.generation.logits_process import TopPLogitsWarper

        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed((self.seed + SEED_STEP * number) % 2**63)
        settings = dict(self.settings or {})
        with refusing(TypeError):
            settings["temperature"] = float(settings["temperature"])
            # Which warpers there are, in which order, is transformers' to say: these settings make no other processor.
            config = GenerationConfig(do_sample=True, **settings)
            of_no_model: Any = GenerationMixin()  # Any: other processors would look at a model, these do not
            warpers = of_no_model._get_logits_processor(config)
        top_p = 1.0
        if warpers and isinstance(warpers[-1], TopPLogitsWarper):  # which sorts the vocabulary, and `draw` does not
            top_p = warpers.pop().top_p
        return LogitsProcessorList([*warpers, _Draws(top_p, generator)])


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """What transformers refuses, of flags or of a model's generation config, is a ConfigError."""
    kinds: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except kinds as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses the model's generation_config.json, or the flags: {why}") from error


@dataclass(frozen=True, slots=True)
class _Draws:
    """A logits processor. No function, whose signature transformers would look up for 0.1 ms at each token."""

    top_p: float
    generator: torch.Generator

    def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """scores: (rows, vocabulary). `generate` takes the highest of each row: that is made the one that is drawn."""
        import torch

        drawn = [[draw(shares, self.top_p, self.generator)] for shares in scores.softmax(-1)]
        return scores.scatter(1, torch.tensor(drawn), math.inf)


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
