"""`llmnode generate`: one prompt, or a file of them, through the servers at given addresses."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.model import DistributedModelForCausalLM
    from llmnode.node.access import Access
    from llmnode.node.sampling import Sampling


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What `llmnode generate` was asked for. `prompts` are generated one after another."""

    access: Access
    prompts: Sequence[str]
    sampling: Sampling
    chat: bool
    json: bool
    receipts: Path | None = None
    """Where the transcript of the one prompt's session goes."""


def generate(config: GenerateConfig) -> None:
    """Connect, generate, print. Raises ConfigError, PeerError, NoRoute or SessionLost."""
    with config.access.connect() as model:
        for number, prompt in enumerate(config.prompts, start=1):
            if len(config.prompts) > 1:
                print(f"prompt {number} of {len(config.prompts)}", file=sys.stderr)
            _generate_one(model, config, prompt)


def read_prompts(path: str) -> list[str]:
    """A prompt a line; empty lines are left out. Raises ConfigError if there is none to read."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read as text ({error})") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {path}: holds no prompt; write one a line")
    return prompts


def _generate_one(model: DistributedModelForCausalLM, config: GenerateConfig, prompt: str) -> None:
    import torch

    from llmnode.client.generate import check_length
    from llmnode.node.text import ScreenStreamer

    screen = sys.stderr if config.json else sys.stdout
    tokenizer = model.tokenizer
    token_ids = tokenizer.encode_dialogue([("user", prompt)]) if config.chat else tokenizer.encode(prompt)
    check_length(len(token_ids), config.sampling.max_new_tokens, model.info)
    if not config.chat:
        screen.write(prompt)
    streamer = ScreenStreamer(tokenizer, screen)
    inputs = torch.tensor([token_ids])
    with model.open_cache(len(token_ids) + config.sampling.max_new_tokens) as cache:
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            streamer=streamer,
            past_key_values=cache,
            **config.sampling.options(),
        )
        if config.receipts is not None:
            (transcript,) = cache.transcripts()
            config.receipts.write_text(json.dumps(transcript), encoding="utf-8")
    print(f"\n{streamer.speed_line()}", file=screen if config.json else sys.stderr)
    if not config.json:
        print()
        return
    answer = {
        "model": model.info.name,
        "prompt": prompt,
        "prompt_token_ids": token_ids,
        "token_ids": streamer.token_ids,
        "text": streamer.text,
    }
    print(json.dumps(answer), flush=True)
