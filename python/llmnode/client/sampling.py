"""How tokens are chosen: as the caller says it, and where the caller says nothing, as the model's generation config.

transformers' own processors change the scores, in its own order. Only the draw is ours: it sorts nothing. Loads torch
only when used.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from transformers import GenerationConfig

SEED_STEP = 1_000_003
"""From one text to the next: a prime, so that near seeds do not soon share their texts' seeds."""
LOWEST, HIGHEST = 1e-3, 1e3
"""Temperatures other than 0. Beyond them scores of fp32 have no softmax, or all the same one."""
TEMPERATURE, TOP_P = 1.0, 0.9
"""For a model whose generation config does not sample, if the caller does."""
WARPERS = ("temperature", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that transformers applies to scores only if it samples."""
PENALTIES = ("repetition_penalty", "no_repeat_ngram_size", "min_new_tokens", "guidance_scale")
"""Settings that it applies in any case, and that a user is told of."""
_OTHER_LOOPS = ("constraints", "force_words_ids", "dola_layers", "token_healing")
"""Settings that need another loop than one token of one text at a time."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a caller wants tokens to be chosen. None, or a missing setting, leaves it to the model's generation config.

    - `temperature`: 0 takes the likeliest token; else 0.001 to 1000.
    - `top_p`: above 0, up to 1. Draw one of the likeliest tokens that together have this probability.
    - `seed`: the same seed, prompt and settings give the same text. Without one each text differs.
    - `settings`: any others that transformers' `GenerationConfig` has, under their names there, such as `top_k`,
      `min_p`, `repetition_penalty`, `stop_strings` or `max_time` (seconds).
    - `otherwise`: the temperature if neither the caller nor the model says one: 0, or one for dialogues.

    Raises ConfigError for a `temperature` or `top_p` beyond these limits. Example:
    `Sampling(temperature=0.8, seed=1, settings={"top_k": 40, "stop_strings": ["\\n"]})`.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    otherwise: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: as a generation config has them

    def __post_init__(self) -> None:
        if self.temperature and not LOWEST <= self.temperature <= HIGHEST:
            limits = "0 or more" if self.temperature < 0 else f"0, or {LOWEST:g} to {HIGHEST:g}"
            raise ConfigError(f"temperature {self.temperature:g}: give {limits}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p:g}: give more than 0 and at most 1")

    def of(self, config: GenerationConfig) -> Sampler:
        """These settings, together with the generation `config` of a model.

        Raises ConfigError for settings that transformers refuses.
        """
        from transformers import GenerationConfig

        if self.settings:
            config = copy.deepcopy(config)
            with refusing(TypeError):
                unknown = config.update(**self.settings)
            if unknown:
                raise ConfigError(f"transformers has no such settings: {', '.join(unknown)}")
        # If the caller turns sampling on, the settings are the model's, if it has some.
        asked = bool(self.temperature) if self.temperature is not None else None if self.top_p is None else True
        by_model = config.do_sample is True
        draws = asked if asked is not None else by_model or (config.do_sample is None and self.otherwise > 0)
        if not draws:
            return Sampler(config, None, self.seed)
        theirs = GenerationConfig._get_default_generation_params()
        ours = {"temperature": self.otherwise or TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        settings = {name: theirs.get(name) for name in WARPERS} | ({} if by_model else ours)
        settings |= {name: value for name in WARPERS if (value := getattr(config, name)) is not None}
        given = {"temperature": self.temperature, "top_p": self.top_p}
        settings |= {name: value for name, value in given.items() if value is not None}
        return Sampler(config, settings, self.seed)


@dataclass(frozen=True, slots=True)
class ChoiceTerms:
    """The terms of one text, which its chooser needs besides the settings.

    `vocabulary` says how many tokens the model has. `number` tells texts of one seed apart. `logprobs` is how many of
    the likeliest tokens are told with each token, None for no log probability at all. A text that does not end
    (`ends`) goes on after the tokens that end an answer.
    """

    vocabulary: int
    number: int = 0
    logprobs: int | None = None
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Sampler:
    """How the tokens of texts are chosen. `settings` are those of `WARPERS`, None for the likeliest token.

    `config` is the model's generation config, with the caller's settings. How many beams and answers it asks for is
    ignored: one text is generated at a time.
    """

    config: GenerationConfig
    settings: dict[str, Any] | None  # Any: as a generation config has it
    seed: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.settings is None

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that end an answer."""
        found = self.config.eos_token_id
        return frozenset() if found is None else frozenset([found] if isinstance(found, int) else found)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        found = self.config.stop_strings or ()
        return (found,) if isinstance(found, str) else tuple(found)

    def chooser(self, prompt: Sequence[int], max_new_tokens: int, terms: ChoiceTerms) -> Chooser:
        """A chooser for one text. Raises ConfigError if transformers refuses a setting, or if it needs another loop."""
        self._check_loop()
        with refusing(TypeError, AttributeError):
            processors = self._processors(prompt, max_new_tokens, terms)
        draws = None if self.settings is None else _Draws(_taken_top_p(processors), self._generator(terms.number))
        return Chooser(processors, draws, prompt, max_new_tokens, terms.logprobs)

    def as_json(self) -> dict[str, Any]:
        return {"do_sample": not self.is_greedy, **self._told(), "seed": self.seed}

    def line(self) -> str:
        how = "the likeliest tokens are taken" if self.is_greedy else "tokens are drawn"
        told = ", ".join(f"{name} {value}" for name, value in self._told().items())
        return f"{how} ({told})" if told else how

    def _told(self) -> dict[str, Any]:
        """Without settings that change nothing: 0 and 1 do not, except as a temperature."""
        settings = {**(self.settings or {}), **{name: getattr(self.config, name) for name in PENALTIES}}
        return {name: value for name, value in settings.items() if name == "temperature" or value not in (None, 0, 1)}

    def _check_loop(self) -> None:
        config = self.config
        wanted = [name for name in _OTHER_LOOPS if getattr(config, name, None)]
        if config.guidance_scale not in (None, 1):
            wanted.append("guidance_scale")
        if config.penalty_alpha and (config.top_k or 0) > 1 and self.is_greedy:
            wanted.append("penalty_alpha")
        if wanted:
            raise ConfigError(
                f"the model's generation config asks for {', '.join(wanted)}, which is not done token by token: use "
                "the `generate` of llmnode.connect, or change generation_config.json"
            )

    def _processors(self, prompt: Sequence[int], max_new_tokens: int, terms: ChoiceTerms) -> list[Any]:
        """transformers' own: which there are, and in which order, is for its `generate` to say."""
        import torch
        from transformers import GenerationConfig, GenerationMixin

        ids = torch.tensor([prompt], dtype=torch.long)
        config = copy.deepcopy(self.config)
        config.do_sample = self.settings is not None
        if self.settings is not None:
            for name, value in {**self.settings, "temperature": float(self.settings["temperature"])}.items():
                setattr(config, name, value)
        if not terms.ends:
            config.eos_token_id = None
        config.num_beams = config.num_return_sequences = 1
        config.max_new_tokens, config.max_length = max_new_tokens, None
        has_min_length = config.min_length is not None
        config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
        mixin: Any = GenerationMixin()  # Any: its methods are asked, without a model
        mixin.config = _ConfigOfText(terms.vocabulary)
        mixin._prepare_special_tokens(config, True, device="cpu", batch_size=1)
        config = mixin._prepare_generated_length(
            generation_config=config,
            has_default_max_length=True,
            has_default_min_length=not has_min_length,
            model_input_name="input_ids",
            input_ids_length=len(prompt),
            inputs_tensor=ids,
        )
        return list(mixin._get_logits_processor(config, len(prompt), encoder_input_ids=ids, device="cpu"))

    def _generator(self, number: int) -> torch.Generator:
        import torch

        generator = torch.Generator()
        if self.seed is None:
            generator.seed()
        else:
            generator.manual_seed((self.seed + SEED_STEP * number) % 2**63)
        return generator


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, by its id. Its log probability, and those of the likeliest tokens, are the model's own.

    They are of the scores before temperature, penalties and all else.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Chooser:
    """Chooses the tokens of one text, one after another."""

    def __init__(
        self,
        processors: Sequence[Any],  # Any: transformers' processors
        draws: _Draws | None,
        prompt: Sequence[int],
        max_new_tokens: int,
        logprobs: int | None,
    ) -> None:
        import torch

        self.processors = processors
        self._draws = draws
        self._logprobs = logprobs
        self._length = len(prompt)
        self._text = torch.zeros(1, len(prompt) + max_new_tokens, dtype=torch.long)
        self._text[0, : len(prompt)] = torch.tensor(prompt, dtype=torch.long)

    def __call__(self, scores: torch.Tensor) -> Choice:
        """scores: (vocabulary), fp32, of the token that comes next."""
        import torch

        with torch.inference_mode():
            left = scores[None]
            if self.processors:
                left, text = left.clone(), self._text[:, : self._length]
                for processor in self.processors:
                    left = processor(text, left)
            token = int(left[0].argmax()) if self._draws is None else self._draws(left[0])
            if self._length < self._text.shape[1]:
                self._text[0, self._length] = token
                self._length += 1
            return _told(token, scores, self._logprobs)


def likeliest(scores: torch.Tensor) -> Choice:
    """The likeliest token. scores: (vocabulary)."""
    return Choice(int(scores.argmax()))


def _told(token: int, scores: torch.Tensor, logprobs: int | None) -> Choice:
    if logprobs is None:
        return Choice(token)
    shares = scores.log_softmax(-1)
    values, ids = shares.topk(min(logprobs, len(shares)))
    return Choice(token, shares[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _taken_top_p(processors: list[Any]) -> float:
    """Takes the last processor away if it is top_p's, which sorts the vocabulary: `draw` does not."""
    from transformers.generation.logits_process import TopPLogitsWarper

    if processors and isinstance(processors[-1], TopPLogitsWarper):
        return float(processors.pop().top_p)
    return 1.0


class _ConfigOfText:
    """The part of a model's config that transformers makes processors by."""

    is_encoder_decoder = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def get_text_config(self) -> _ConfigOfText:
        return self


@contextmanager
def refusing(*more: type[Exception]) -> Iterator[None]:
    """Turns transformers' refusal of a caller's settings, or of a model's generation config, into a ConfigError."""
    kinds: tuple[type[Exception], ...] = (ValueError, *more)
    try:
        yield
    except kinds as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"transformers refuses the model's generation_config.json, or the flags: {why}") from error


@dataclass(frozen=True, slots=True)
class _Draws:
    """Draws tokens at random, with a generator of its own."""

    top_p: float
    generator: torch.Generator

    def __call__(self, scores: torch.Tensor) -> int:
        """scores: (vocabulary), as the processors left them."""
        return draw(scores.softmax(-1), self.top_p, self.generator)


def draw(shares: torch.Tensor, top_p: float, generator: torch.Generator) -> int:
    """One of the likeliest tokens that together have `top_p`, of a softmax (vocabulary), in proportion to their shares.

    Nothing is sorted: one is drawn of all tokens. If it is none of those, the next is drawn of the likelier tokens, and
    so on. The first that may stay is distributed as if those that may not had never been there.
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
    """The shares of those tokens, and 0 for others. The last of equal ones counts as the likeliest."""
    import torch
    from torch.nn.functional import threshold

    share = shares[token]
    just_below = share.nextafter(torch.zeros_like(share))
    before, after = shares[: token + 1], shares[token + 1 :]
    return torch.cat([threshold(before, share.item(), 0.0), threshold(after, just_below.item(), 0.0)])


def stays(share: float, total: float, top_p: float) -> bool:
    """Whether a token stays that has this `share` of `total` together with all less likely tokens.

    This is transformers' warper, to the rounding: a share of 1 - top_p or less goes, the likeliest token never does.
    """
    import torch

    return share == total or bool(torch.tensor(share, dtype=torch.float32) > 1 - top_p)
