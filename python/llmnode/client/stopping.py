"""When a text ends: at a token, a stop string, a length or a time. transformers' own criteria decide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.stopping_criteria import StopStringCriteria

from llmnode.client.sampling import refusing
from llmnode.core.texts.stop_strings import StopText
from llmnode.models.text.streaming import TextStream

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.models.text.tokenizer import Tokenizer

NO_SCORES: Any = None  # Any: these criteria look at no scores


class FinishReason(StrEnum):
    """Why a text ended."""

    END = "end"
    """The model chose a token that ends an answer."""
    STOP = "stop"
    """A stop string was completed."""
    LENGTH = "length"
    """All the tokens that were asked for are there."""
    CONTEXT = "context"
    """The model's context is full, or the session that the caller gave."""
    TIME = "time"
    """The `max_time` of the settings has passed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a text. With `fills_context` its `max_new_tokens` are all that fit the context or session."""

    max_new_tokens: int
    fills_context: bool
    end_tokens: Collection[int]
    stop_strings: Sequence[str]
    max_time_s: float | None


class Stopping:
    """Follows one text, token by token, and says when it ends."""

    def __init__(self, limits: Limits, prompt: Sequence[int], tokenizer: Tokenizer) -> None:
        """Looks through the vocabulary if there are stop strings, which may take a second.

        Raises ConfigError if transformers refuses them, ModelError if there are some and no tokenizer.
        """
        self._limits = limits
        self._new = 0
        self._criteria: StopStringCriteria | None = None
        self._last: list[int] = []
        if limits.stop_strings:
            with refusing(), tokenizer.panics_as_errors():
                self._criteria = StopStringCriteria(tokenizer.loaded, list(limits.stop_strings))
            self._last = list(prompt[-self._criteria.maximum_token_len :])

    def reason(self, token: int, after_s: float) -> FinishReason | None:
        """Whether the text ends with this token, which came `after_s` its beginning. Called with each one."""
        self._new += 1
        limits = self._limits
        if token in limits.end_tokens:
            return FinishReason.END
        if self._criteria is not None:
            self._last = [*self._last, token][-self._criteria.maximum_token_len :]
            ids: Any = torch.tensor([self._last])
            if bool(self._criteria(ids, NO_SCORES)):
                return FinishReason.STOP
        if self._new >= limits.max_new_tokens:
            return FinishReason.CONTEXT if limits.fills_context else FinishReason.LENGTH
        if limits.max_time_s is not None and after_s > limits.max_time_s:
            return FinishReason.TIME
        return None


class AnswerText:
    """The tokens of an answer in, its text out, in pieces. Without a tokenizer all pieces are empty."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop_strings: Sequence[str]) -> None:
        self._stream = TextStream(tokenizer, prompt) if tokenizer.is_there else None
        self._stops = StopText(stop_strings, tokenizer.decode(prompt)) if stop_strings else None

    def add(self, token: int, reason: FinishReason | None) -> str:
        """The text that is settled with this token; all that is left if the text ends with it, for this `reason`."""
        if self._stream is None:
            return ""
        piece = self._stream.add(token)
        if reason is not None:
            piece += self._stream.finish()
        if self._stops is None:
            return piece
        if reason is None:
            return self._stops.add(piece)
        return self._stops.finish(piece, stopped=reason is FinishReason.STOP)
