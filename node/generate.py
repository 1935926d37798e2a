"""`llmnode generate`: one text as it comes, or several at once, through the servers at given addresses."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.core.traffic import Traffic
    from llmnode.node.access import Access
    from llmnode.node.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to go on from, and where that was said."""

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What `llmnode generate` was asked for: `samples` texts of each of `prompts`, `at_once` of them under way."""

    access: Access
    prompts: Sequence[Prompt]
    sampling: Sampling
    chat: bool
    json: bool
    samples: int = 1
    at_once: int | None = None
    receipts: Path | None = None
    """Where the transcript of the one prompt's session goes."""


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
    with config.access.connect() as model:
        encoded = [_encode(model, config, prompt) for prompt in config.prompts]
        if len(encoded) * config.samples == 1:
            _generate_one(model, config, config.prompts[0].text, encoded[0])
        else:
            _generate_several(model, config, encoded)


def read_prompts(path: str) -> list[Prompt]:
    """A prompt a line; empty lines are left out. Raises ConfigError if there is none to read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as text ({error})") from error
    numbered = enumerate(lines, start=1)
    prompts = [Prompt(line, f"--prompts {path}, line {number}") for number, line in numbered if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: holds no prompt; write one a line")
    return prompts


def _encode(model: DistributedModelForCausalLM, config: GenerateConfig, prompt: Prompt) -> list[int]:
    """Raises ConfigError, which names the prompt's source, if the model cannot go on from it."""
    from llmnode.client.generate import check_length

    tokenizer = model.tokenizer
    try:
        token_ids = tokenizer.encode_dialogue([("user", prompt.text)]) if config.chat else tokenizer.encode(prompt.text)
        check_length(len(token_ids), config.sampling.max_new_tokens, model.info)
        model.check_tokens(token_ids)
    except ConfigError as error:
        raise ConfigError(f"{prompt.source}: {error}") from error
    return token_ids


def _generate_one(
    model: DistributedModelForCausalLM, config: GenerateConfig, prompt: str, token_ids: list[int]
) -> None:
    import torch

    from llmnode.node.text import ScreenStreamer

    screen = sys.stderr if config.json else sys.stdout
    if not config.chat:
        screen.write(prompt)
    streamer = ScreenStreamer(model.tokenizer, screen)
    inputs = torch.tensor([token_ids])
    before = model.traffic
    with model.open_cache(len(token_ids) + config.sampling.max_new_tokens) as cache:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=streamer,
            cache=cache,
            **config.sampling.options(),
        )
        wire = WireUse(model.traffic.since(before), cache.positions(0))
        if config.receipts is not None:
            (transcript,) = cache.transcripts()
            config.receipts.write_text(json.dumps(transcript), encoding="utf-8")
    print(f"\n{streamer.speed_line()}; {wire.line()}", file=screen if config.json else sys.stderr)
    if not config.json:
        print()
        return
    answer = {
        "model": model.info.name,
        "prompt": prompt,
        "prompt_token_ids": token_ids,
        "token_ids": streamer.token_ids,
        "text": streamer.text,
        "wire": wire.as_json(),
    }
    print(json.dumps(answer), flush=True)


def _generate_several(model: DistributedModelForCausalLM, config: GenerateConfig, encoded: Sequence[list[int]]) -> None:
    import torch

    from llmnode.models.streaming import answer_text
    from llmnode.node.several import all_at_once, beginnings, metered

    begun = beginnings(model, encoded, config.samples)

    def generate_text(number: int) -> dict[str, object]:
        index, sample = divmod(number, config.samples)
        inputs = torch.tensor([encoded[index]])
        name = f"prompt {index + 1}" + (f", sample {sample + 1}" if config.samples > 1 else "")
        length = inputs.shape[1] + config.sampling.max_new_tokens
        with (
            meter.text(name, config.sampling.max_new_tokens) as counter,
            begun[index].cache(length) as cache,
        ):
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                streamer=counter,
                cache=cache,
                **config.sampling.options(number),
            )
        token_ids = output[0, inputs.shape[1] :].tolist()
        return {
            "model": model.info.name,
            "prompt": config.prompts[index].text,
            "sample": sample,
            "prompt_token_ids": encoded[index],
            "token_ids": token_ids,
            "text": answer_text(model.tokenizer, encoded[index], token_ids),
        }

    with metered(len(encoded) * config.samples) as meter:
        work = [partial(generate_text, number) for number in range(meter.texts)]
        for answer in all_at_once(model, work, config.at_once):
            if config.json:
                print(json.dumps(answer), flush=True)
            else:
                print(f"{'' if config.chat else answer['prompt']}{answer['text']}\n", flush=True)
