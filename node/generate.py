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
from llmnode.node.outcome import describe_empty, finish_reason
from llmnode.node.sampling import refusing
from llmnode.node.terminal import end_line, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.core.traffic import Traffic
    from llmnode.node.connect_options import Access
    from llmnode.node.sampling import Sampler, Sampling

DEFAULT_NEW_TOKENS = 64
STDIN = Path("-")
MOST_BYTES = 64 << 20
"""Of a file of prompts."""
MOST_TEXTS = 100_000
"""Of one command: each takes memory from the beginning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and where that was said."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What `llmnode generate` was asked for: `samples` texts of each of `prompts`, `at_once` of them under way.

    A text has `max_new_tokens`; without, `DEFAULT_NEW_TOKENS`, or as many as fit.
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
    """What the hidden states of one session took of this client's links; what servers give each other is not in it."""

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
    with config.access.connect() as model:
        sampler = config.sampling.of(model.generation_config)
        _check_samples(config, sampler)
        encoded = [_encode(model, config, prompt) for prompt in config.prompts]
        if not sampler.is_greedy:
            say(sampler.line())
        if len(encoded) * config.samples == 1:
            _generate_one(model, config, sampler, encoded[0])
        else:
            _generate_several(model, config, sampler, encoded)


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


def _encode(model: DistributedModelForCausalLM, config: GenerateConfig, prompt: Prompt) -> Encoded:
    """Raises ConfigError, which names the prompt's source, if the model cannot go on from it."""
    from llmnode.client.generate import check_length, room_for

    tokenizer = model.tokenizer
    try:
        token_ids = tokenizer.encode_dialogue([("user", prompt.text)]) if config.chat else tokenizer.encode(prompt.text)
        if (asked := config.max_new_tokens) is None:
            asked = min(DEFAULT_NEW_TOKENS, room_for(len(token_ids), model.info))
        check_length(len(token_ids), asked, model.info)
        model.check_tokens(token_ids)
    except ConfigError as error:
        raise ConfigError(f"{prompt.source}: {error}") from error
    return Encoded(prompt, token_ids, asked)


def run_generate(
    model: DistributedModelForCausalLM, token_ids: Sequence[int], options: dict[str, Any], **more: Any
) -> Any:  # Any: transformers' own arguments, and what it returns
    """transformers' `generate` of one text. Raises ConfigError for what it refuses."""
    import torch

    inputs = torch.tensor([token_ids])
    if model.generation_config.stop_strings:
        more["tokenizer"] = model.tokenizer._tokenizer  # generate looks the strings up in its vocabulary
    with refusing():
        return model.generate(inputs, attention_mask=torch.ones_like(inputs), **options, **more)


def _generate_one(
    model: DistributedModelForCausalLM, config: GenerateConfig, sampler: Sampler, encoded: Encoded
) -> None:
    from llmnode.node.text import ScreenStreamer

    screen = sys.stderr if config.json else sys.stdout
    if not config.chat:
        screen.write(encoded.prompt.text)
    streamer = ScreenStreamer(model.tokenizer, screen)
    before = model.traffic
    with model.open_cache(encoded.length) as cache:
        options = {**sampler.options(), "max_new_tokens": encoded.max_new_tokens}
        run_generate(model, encoded.token_ids, options, streamer=streamer, cache=cache)
        wire = WireUse(model.traffic.since(before), cache.positions(0))
        end_line()
        if config.receipts is not None:
            (transcript,) = cache.transcripts()
            _write(config.receipts, json.dumps(transcript))
    print(f"{streamer.speed_line()}; {wire.line()}", file=sys.stderr)
    answer = _answer(model, sampler, encoded, streamer.token_ids, streamer.text)
    _tell_empty(model, config, answer, "the text")
    if config.json:
        print(json.dumps({**answer, "wire": wire.as_json()}), flush=True)


def _generate_several(
    model: DistributedModelForCausalLM, config: GenerateConfig, sampler: Sampler, encoded: Sequence[Encoded]
) -> None:
    from llmnode.models.text.streaming import answer_text
    from llmnode.node.batch_generate import all_at_once, beginnings, metered

    begun = beginnings(model, [each.token_ids for each in encoded], config.samples)

    def name(number: int) -> str:
        index, sample = divmod(number, config.samples)
        return f"prompt {index + 1}" + (f", sample {sample + 1}" if config.samples > 1 else "")

    def generate_text(number: int) -> dict[str, Any]:
        index, sample = divmod(number, config.samples)
        asked = encoded[index]
        with (
            meter.text(name(number), asked.max_new_tokens) as counter,
            begun[index].cache(asked.length) as cache,
        ):
            options = {**sampler.options(number), "max_new_tokens": asked.max_new_tokens}
            output = run_generate(model, asked.token_ids, options, streamer=counter, cache=cache)
        token_ids = output[0, len(asked.token_ids) :].tolist()
        answer = _answer(model, sampler, asked, token_ids, answer_text(model.tokenizer, asked.token_ids, token_ids))
        return {**answer, "sample": sample}

    with metered(len(encoded) * config.samples) as meter:
        work = [partial(generate_text, number) for number in range(meter.texts)]
        for number, answer in enumerate(all_at_once(model, work, config.at_once)):
            if config.json:
                print(json.dumps(answer), flush=True)
            else:
                print(f"{'' if config.chat else answer['prompt']}{answer['text']}\n", flush=True)
            _tell_empty(model, config, answer, name(number))


def _answer(
    model: DistributedModelForCausalLM, sampler: Sampler, encoded: Encoded, token_ids: list[int], text: str
) -> dict[str, Any]:  # Any: JSON
    return {
        "model": model.info.name,
        "prompt": encoded.prompt.text,
        "prompt_token_ids": encoded.token_ids,
        "token_ids": token_ids,
        "text": text,
        "finish_reason": finish_reason(token_ids, encoded.max_new_tokens, model.generation_config.eos_token_id),
        "sampling": sampler.as_json(),
    }


def _tell_empty(model: DistributedModelForCausalLM, config: GenerateConfig, answer: dict[str, Any], name: str) -> None:
    if why := describe_empty(answer["token_ids"], answer["text"], model.generation_config.eos_token_id):
        other = "give another prompt" + ("" if config.chat else ", or --chat if the model was made for dialogues")
        say(f"{name} is empty: {why}; {other}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): name another file") from error
