"""Greedy generation through a session: embed, step, score, choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from llmnode.errors import ConfigError
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from llmnode.client.ends import SharedEnds
    from llmnode.core.model import ModelInfo
    from llmnode.session.session import InferenceSession
    from llmnode.wire.chunk import HopTiming


@dataclass(frozen=True, slots=True)
class TokenTiming:
    """One token's time, in seconds: all of it, and its parts. `hops` are the parts of the session's step."""

    total_s: float
    embed_s: float
    step_s: float
    head_s: float
    hops: tuple[HopTiming, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` chose, and when. `timings[0]` covers the prefill; the others one decode each."""

    token_ids: tuple[int, ...]
    timings: tuple[TokenTiming, ...]

    @property
    def time_to_first_token_s(self) -> float:
        return self.timings[0].total_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of the decodes, without the prefill; None if there is no decode."""
        decodes = self.timings[1:]
        return len(decodes) / sum(timing.total_s for timing in decodes) if decodes else None


def check_length(prompt_tokens: int, max_new_tokens: int, model: ModelInfo) -> int:
    """The session length for this generation. Raises ConfigError before any work is done."""
    room = room_for(prompt_tokens, model)
    if max_new_tokens < 1:
        raise ConfigError(f"{max_new_tokens} new tokens asked for: at least 1 is needed")
    if max_new_tokens > room:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{model.context_text}: shorten the prompt or ask for at most {room}"
        )
    return prompt_tokens + max_new_tokens


def room_for(prompt_tokens: int, model: ModelInfo) -> int:
    """How many new tokens fit the model's context after the prompt, at least one. Raises ConfigError."""
    if prompt_tokens < 1:
        raise ConfigError(
            "the prompt is empty, and this model's tokenizer puts no token before it: give at least one token to go "
            "on from"
        )
    if prompt_tokens >= model.context_tokens:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and a new one exceed the model's context of {model.context_tokens}: "
            f"shorten the prompt to at most {model.context_tokens - 1}"
        )
    return model.context_tokens - prompt_tokens


async def generate_greedy(
    session: InferenceSession,
    ends: SharedEnds,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    stop_token_ids: Collection[int],
    on_token: Callable[[int], None],
) -> Generation:
    """Append `prompt`, then choose the likeliest token until one of `stop_token_ids` or `max_new_tokens`.

    `on_token` is called with each token as it is chosen, a stop token included. Raises SessionLost.
    """
    chosen: list[int] = []
    timings: list[TokenTiming] = []
    fresh = list(prompt)
    while True:
        token, timing = await _next_token(session, ends, fresh)
        chosen.append(token)
        timings.append(timing)
        on_token(token)
        if token in stop_token_ids or len(chosen) == max_new_tokens:
            return Generation(tuple(chosen), tuple(timings))
        fresh = [token]


async def run_blocks(session: InferenceSession, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states (tokens, hidden_size) through all blocks; returns the same shape. Raises as `session.step` does."""
    return from_bytes(await session.step(to_bytes(hidden)), hidden.shape[1])


async def _next_token(session: InferenceSession, ends: SharedEnds, fresh: list[int]) -> tuple[int, TokenTiming]:
    started = trio.current_time()
    hidden = await ends.embed_beside(fresh, session.position)
    embedded = trio.current_time()
    output = await run_blocks(session, hidden)
    stepped = trio.current_time()
    token = await ends.likeliest(output[-1:])
    done = trio.current_time()
    timing = TokenTiming(
        done - started, embedded - started, stepped - embedded, done - stepped, hops=tuple(session.timings)
    )
    return token, timing
