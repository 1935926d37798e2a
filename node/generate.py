"""`llmnode generate`: one text as it comes, or several at once, through the servers at given addresses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmnode.core.user_input import decode, read_file, split_lines
from llmnode.errors import ConfigError
from llmnode.node.outcome import describe_empty
from llmnode.node.terminal import Pieces, end_line, note, say, show, show_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llmnode.client.beginnings import Beginning
    from llmnode.client.connect import Client
    from llmnode.client.generate import Finish, Token
    from llmnode.client.sampling import Sampler, Sampling
    from llmnode.core.traffic import Traffic
    from llmnode.node.batch_generate import Meter
    from llmnode.node.connect_options import Access, OpenClient

    _Event = tuple[int, "Token | _Answer | None"]
    """By the number of its text: it has begun (None), a token has come, it has ended."""

DEFAULT_NEW_TOKENS = 64
STDIN = Path("-")
MOST_BYTES = 64 << 20
"""The largest file of prompts."""
MOST_TEXTS = 100_000
"""The most texts of one command: each takes memory from the beginning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on from, and where the user wrote it."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """The options of `llmnode generate`: `samples` texts for each of `prompts`, `at_once` of them at a time.

    A text has at most `max_new_tokens`; without, `DEFAULT_NEW_TOKENS`, or fewer if only they fit.
    """

    access: Access
    prompts: Sequence[Prompt]
    sampling: Sampling
    max_new_tokens: int | None
    chat: bool
    json: bool
    samples: int = 1
    at_once: int | None = None
    receipts: Path | None = None
    """Where the transcript of the one prompt's session goes."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt in tokens, and how many are to follow."""

    prompt: Prompt
    token_ids: list[int]
    max_new_tokens: int

    @property
    def length(self) -> int:
        return len(self.token_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class WireUse:
    """The bytes of one session's hidden states on this client's links, without those from server to server."""

    traffic: Traffic
    positions: int

    def line(self) -> str:
        sent, received = self._per_token(self.traffic.sent_bytes), self._per_token(self.traffic.received_bytes)
        return f"{sent / 1000:.1f} kB out and {received / 1000:.1f} kB in a token"

    def as_json(self) -> dict[str, int | float]:
        return {
            "positions": self.positions,
            **asdict(self.traffic),
            "sent_bytes_per_token": self._per_token(self.traffic.sent_bytes),
            "received_bytes_per_token": self._per_token(self.traffic.received_bytes),
        }

    def _per_token(self, size_bytes: int) -> float:
        return size_bytes / max(1, self.positions)


def generate(config: GenerateConfig) -> None:
    """Connect, generate, print. Raises ConfigError, PeerError, NoRoute or SessionLost."""
    if config.samples > 1 and config.sampling.temperature is None:  # told before the time that connecting takes
        _check_samples(config, config.sampling.of(config.access.generation_config()))
    with config.access.open() as opened:
        sampler = config.sampling.of(opened.client.generation_config)
        _check_samples(config, sampler)
        encoded = [_encode(opened.client, config, prompt) for prompt in config.prompts]
        if not sampler.is_greedy:
            say(sampler.line())
        if len(encoded) * config.samples == 1:
            _generate_one(opened, config, sampler, encoded[0])
        else:
            _generate_several(opened, config, sampler, encoded)


def _check_samples(config: GenerateConfig, sampler: Sampler) -> None:
    if config.samples > 1 and sampler.is_greedy:
        raise ConfigError(f"--samples {config.samples} would all be the same: give a --temperature, as 0.8, too")


def read_prompts(path: Path) -> list[Prompt]:
    """A prompt a line; empty lines are left out; `-` is stdin. Raises ConfigError if there is none to read."""
    name = f"--prompts {path}"
    if path == STDIN and sys.stdin is None:
        raise ConfigError(f"{name}: stdin is closed: name a file, or pipe prompts into it")
    content = read_file(Path("/dev/stdin") if path == STDIN else path, name, MOST_BYTES)
    numbered = enumerate(split_lines(decode(content, name)), start=1)
    prompts = [Prompt(line, f"{name}, line {number}") for number, line in numbered if line.strip()]
    if not prompts:
        raise ConfigError(f"{name}: holds no prompt; write one a line")
    return prompts


def _encode(client: Client, config: GenerateConfig, prompt: Prompt) -> Encoded:
    """Raises ConfigError, which names the prompt's source, if the model cannot go on from it."""
    from llmnode.client.generate import check_length, most_new_tokens

    tokenizer = client.tokenizer
    try:
        token_ids = tokenizer.encode_dialogue([("user", prompt.text)]) if config.chat else tokenizer.encode(prompt.text)
        if (asked := config.max_new_tokens) is None:
            asked = min(DEFAULT_NEW_TOKENS, most_new_tokens(len(token_ids), client.model))
        check_length(len(token_ids), asked, client.model)
        client.ends.check(token_ids)
    except ConfigError as error:
        raise ConfigError(f"{prompt.source}: {error}") from error
    return Encoded(prompt, token_ids, asked)


@dataclass(slots=True)
class _SessionUse:
    """Figures of a text's session, known when the text has ended."""

    wire: WireUse
    transcript: dict[str, Any] | None = None  # Any: JSON


def _generate_one(opened: OpenClient, config: GenerateConfig, sampler: Sampler, encoded: Encoded) -> None:
    from llmnode.node.forecasts import note_text
    from llmnode.node.text import ScreenText

    client, use = opened.client, _SessionUse(WireUse(opened.client.traffic, 0))

    async def run(give: Callable[[Token], None]) -> None:
        before = client.traffic
        async with (
            client.inference_session(encoded.length) as session,
            client.generate(
                encoded.token_ids, encoded.max_new_tokens, sampling=config.sampling, session=session
            ) as answer,
        ):
            async for token in answer:
                give(token)
            use.wire = WireUse(client.traffic.since(before), session.position)
            if config.receipts is not None:
                use.transcript = await client.transcript(session)

    screen = ScreenText(Pieces(beside=config.json))
    if not config.chat:
        screen.screen.write(encoded.prompt.text)
    for token in opened.portal.stream(run):
        screen.show(token)
    end_line()
    note(f"{screen.speed_line()}; {use.wire.line()}; {client.model.precision.name}")
    count, rate, prompt_tokens = len(screen.token_ids), screen.tokens_per_s, len(encoded.token_ids)
    opened.portal.call(lambda: note_text(client.model, count, rate, screen.first_s, prompt_tokens))
    answer = _Answer(screen.token_ids, screen.text, screen.finish)
    _tell_empty(config, sampler, answer, "the text")
    if config.json:
        shown = _as_json(client, sampler, encoded, answer)
        show_json({**shown, "wire": use.wire.as_json()})
    if config.receipts is not None:  # last: an answer is shown though its receipts cannot be written
        _write(config.receipts, json.dumps(use.transcript))


@dataclass(frozen=True, slots=True)
class _Answer:
    token_ids: Sequence[int]
    text: str
    finish: Finish | None


def _generate_several(opened: OpenClient, config: GenerateConfig, sampler: Sampler, encoded: Sequence[Encoded]) -> None:
    from llmnode.client.beginnings import beginnings
    from llmnode.node.batch_generate import default_at_once, in_order, metered, run_at_once
    from llmnode.node.forecasts import note_texts

    client, texts = opened.client, len(encoded) * config.samples
    at_once = config.at_once or default_at_once(len(client.route))

    def name(number: int) -> str:
        index, sample = divmod(number, config.samples)
        return f"prompt {index + 1}" + (f", sample {sample + 1}" if config.samples > 1 else "")

    async def run_text(number: int, begun: Sequence[Beginning], give: Callable[[_Event], None]) -> None:
        asked = encoded[number // config.samples]
        give((number, None))
        async with (
            begun[number // config.samples].session(asked.length) as session,
            client.generate(
                asked.token_ids, asked.max_new_tokens, sampling=config.sampling, number=number, session=session
            ) as answer,
        ):
            tokens = []
            async for token in answer:
                tokens.append(token)
                give((number, token))
        ids, text = [token.id for token in tokens], "".join(token.text for token in tokens)
        give((number, _Answer(ids, text, tokens[-1].finish)))

    async def run(give: Callable[[_Event], None]) -> None:
        async with beginnings(client, [each.token_ids for each in encoded], config.samples) as begun:
            work = [partial(run_text, number, begun, give) for number in range(texts)]
            await run_at_once(work, at_once)

    def answers(meter: Meter) -> Iterator[tuple[int, _Answer]]:
        for number, event in opened.portal.stream(run):
            if event is None:
                meter.begin(number, name(number), encoded[number // config.samples].max_new_tokens)
            elif isinstance(event, _Answer):
                meter.end(number, name(number), len(event.token_ids))
                yield number, event
            else:
                meter.count(number)

    with metered(texts) as meter:
        for number, answer in in_order(answers(meter)):
            index, sample = divmod(number, config.samples)
            if config.json:
                shown = _as_json(client, sampler, encoded[index], answer)
                show_json({**shown, "sample": sample})
            else:
                show(f"{'' if config.chat else encoded[index].prompt.text}{answer.text}\n")
            _tell_empty(config, sampler, answer, name(number))
    opened.portal.call(lambda: note_texts(client.model, meter.tokens, meter.tokens_per_s, min(at_once, texts)))


def _as_json(client: Client, sampler: Sampler, encoded: Encoded, answer: _Answer) -> dict[str, Any]:  # Any: JSON
    return {
        "model": client.model.name,
        "dtype": client.model.precision.name,
        "prompt": encoded.prompt.text,
        "prompt_token_ids": encoded.token_ids,
        "token_ids": answer.token_ids,
        "text": answer.text,
        "finish_reason": None if answer.finish is None else answer.finish.reason,
        "sampling": sampler.as_json(),
    }


def _tell_empty(config: GenerateConfig, sampler: Sampler, answer: _Answer, name: str) -> None:
    if why := describe_empty(answer.token_ids, answer.text, sampler.end_tokens):
        other = "give another prompt" + ("" if config.chat else ", or --chat if the model was made for dialogues")
        say(f"{name} is empty: {why}; {other}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): name another file") from error
