"""The token loop: embed, step, score, choose; one text of one session.

It is async and holds no thread. Texts of one client that run beside each other are scored together (`ends.py`).
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import trio

from llmnode.client.sampling import likeliest
from llmnode.client.stopping import AnswerText, Stopping
from llmnode.errors import ConfigError
from llmnode.models.tensors import from_bytes, to_bytes
from llmnode.models.text.streaming import answer_text

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Sequence
    from contextlib import AbstractAsyncContextManager

    import torch

    from llmnode.client.ends import SharedEnds
    from llmnode.client.sampling import Choice, Chooser
    from llmnode.client.stopping import FinishReason, Limits
    from llmnode.core.model import ModelInfo
    from llmnode.models.text.tokenizer import Tokenizer
    from llmnode.session.session import InferenceSession
    from llmnode.wire.chunk import HopTiming


@dataclass(frozen=True, slots=True)
class TokenTiming:
    """One token's time, in seconds: the whole and its parts. `hops` has the parts of the session's step."""

    total_s: float
    embed_s: float
    step_s: float
    head_s: float
    hops: tuple[HopTiming, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a text: tokens of the prompt and of the answer, and seconds until the first and the last of these.

    The tokens of the answer include those that end it. The seconds begin with the loop, before the session opens.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a text: its `reason`, and the `usage` of the whole text."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a text, as it comes.

    `text` is the text that is settled with this token. It is "" while later tokens may change it, or while it may begin
    a stop string, and comes with a later token then. The pieces of all tokens, joined, are the answer: it ends before a
    stop string. `logprob` is the token's log probability in nats, by the model's own scores, before temperature and
    penalties. `top` has the likeliest token ids and theirs, likeliest first. Both are there if they were asked for. The
    last token has a `finish`.
    """

    id: int
    text: str
    timing: TokenTiming
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole text: its tokens, and their text. `timings[0]` covers the prefill; the others one decode each."""

    tokens: tuple[Token, ...]
    text: str

    @property
    def token_ids(self) -> tuple[int, ...]:
        """A token that ends the answer is one of them, as are those of a stop string."""
        return tuple(token.id for token in self.tokens)

    @property
    def timings(self) -> tuple[TokenTiming, ...]:
        return tuple(token.timing for token in self.tokens)

    @property
    def finish(self) -> Finish:
        found = self.tokens[-1].finish
        assert found is not None, "the last token has one"
        return found

    @property
    def time_to_first_token_s(self) -> float:
        return self.timings[0].total_s

    @property
    def tokens_per_s(self) -> float | None:
        """The speed of the decodes, without the prefill; None if there is no decode."""
        decodes = self.timings[1:]
        return len(decodes) / sum(timing.total_s for timing in decodes) if decodes else None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A text to be generated, checked. `chooser` chooses its tokens until one of the `limits` ends it.

    `open` gives a session that holds the first `session.position` tokens of `prompt`.
    """

    prompt: Sequence[int]
    chooser: Chooser
    limits: Limits
    open: Callable[[], AbstractAsyncContextManager[InferenceSession]]


class Answer:
    """One text: `async for token in answer` as it comes, or `await answer` for all of it. Made by `Client.generate`.

    Its session opens with the first token and ends with the last one. To leave the loop earlier, put it within
    `async with answer:`, which ends the session at once; else Python ends it when it collects the iterator. An answer
    is generated once: RuntimeError for a second loop or `await`. Raises PeerError, NoRoute or SessionLost if the swarm
    fails.
    """

    def __init__(self, request: TextRequest, ends: SharedEnds, tokenizer: Tokenizer) -> None:
        self._request = request
        self._ends = ends
        self._tokenizer = tokenizer
        self._has_begun = False
        self._tokens = self._run(streams=True)

    def __aiter__(self) -> AsyncGenerator[Token]:
        return self._tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        await self._tokens.aclose()

    def __await__(self) -> Generator[Any, Any, Generation]:  # Any: trio's own types
        return self._whole().__await__()

    async def _whole(self) -> Generation:
        """The text is decoded once, at the end, unless it has stop strings."""
        strings = self._request.limits.stop_strings
        async with aclosing(self._run(streams=bool(strings))) as run:
            tokens = tuple([token async for token in run])
        if strings:
            return Generation(tokens, "".join(token.text for token in tokens))
        ids = [token.id for token in tokens]
        has_text = self._tokenizer.is_there
        return Generation(tokens, answer_text(self._tokenizer, self._request.prompt, ids) if has_text else "")

    async def _run(self, *, streams: bool) -> AsyncGenerator[Token]:
        """No cancel scope is open at a `yield`, so that any task may close it."""
        if self._has_begun:
            raise RuntimeError("this answer has been generated: call Client.generate for another one")
        self._has_begun = True
        request, began_s = self._request, trio.current_time()
        prompt, limits = request.prompt, request.limits
        if limits.stop_strings:  # transformers looks through the vocabulary
            stopping = await trio.to_thread.run_sync(Stopping, limits, prompt, self._tokenizer)
        else:
            stopping = Stopping(limits, prompt, self._tokenizer)
        text = AnswerText(self._tokenizer, prompt, limits.stop_strings) if streams else None
        async with request.open() as session:
            fresh: Sequence[int] = prompt[session.position :]
            new, first_token_s = 0, 0.0
            while True:
                choice, timing = await next_token(session, self._ends, fresh, request.chooser)
                now_s, new = trio.current_time(), new + 1
                first_token_s = first_token_s or now_s - began_s
                reason = stopping.reason(choice.id, now_s - began_s)
                usage = Usage(len(prompt), new, first_token_s, now_s - began_s)
                finish = None if reason is None else Finish(reason, usage)
                piece = "" if text is None else text.add(choice.id, reason)
                yield Token(choice.id, piece, timing, choice.logprob, choice.top, finish)
                if finish is not None:
                    return
                fresh = [choice.id]


def check_length(prompt_tokens: int, max_new_tokens: int, model: ModelInfo) -> int:
    """The session length for this generation. Raises ConfigError before any work is done."""
    most = most_new_tokens(prompt_tokens, model)
    if max_new_tokens < 1:
        raise ConfigError(f"{max_new_tokens} new tokens asked for: at least 1 is needed")
    if max_new_tokens > most:
        raise ConfigError(
            f"{prompt_tokens} prompt tokens and {max_new_tokens} new ones exceed the model's context of "
            f"{model.context_text}: shorten the prompt or ask for at most {most}"
        )
    return prompt_tokens + max_new_tokens


def most_new_tokens(prompt_tokens: int, model: ModelInfo) -> int:
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


async def run_blocks(session: InferenceSession, hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states (tokens, hidden_size) through all blocks; returns the same shape. Raises as `session.step` does."""
    return from_bytes(await session.step(to_bytes(hidden)), hidden.shape[1])


async def next_token(
    session: InferenceSession,
    ends: SharedEnds,
    fresh: Sequence[int],
    choose: Callable[[torch.Tensor], Choice] = likeliest,
) -> tuple[Choice, TokenTiming]:
    """Append the tokens `fresh` to `session`, and choose the one that follows. It is not appended yet.

    `choose` is given the scores (vocabulary) in fp32, in another thread. Raises as `session.step` does.
    """
    started_s = trio.current_time()
    hidden = await ends.embed_beside(fresh, session.position)
    embedded_s = trio.current_time()
    output = await run_blocks(session, hidden)
    stepped_s = trio.current_time()
    choice = await ends.choose(output[-1:], choose)
    done_s = trio.current_time()
    timing = TokenTiming(
        done_s - started_s,
        embedded_s - started_s,
        stepped_s - embedded_s,
        done_s - stepped_s,
        hops=tuple(session.timings),
    )
    return choice, timing
