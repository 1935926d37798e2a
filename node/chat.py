"""`llmnode chat`: a dialogue in the terminal. The KV of what was said stays with the servers between turns."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmnode.errors import ConfigError, SessionLost

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import torch

    from llmnode.client.cache import SessionCache
    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.node.access import Access
    from llmnode.node.sampling import Sampling

HELP = "/reset forgets the dialogue, /quit leaves; a line that ends in \\ goes on in the next; Ctrl-C stops an answer"
WARNING = "whoever runs these servers can read this dialogue: use your own for what is private"


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """What `llmnode chat` was asked for. A dialogue has room for `max_length` tokens."""

    access: Access
    sampling: Sampling
    max_length: int


def chat(config: ChatConfig) -> None:
    """Talk until /quit or the end of the input. Raises ConfigError, PeerError or NoRoute."""
    with config.access.connect() as model:
        model.tokenizer.encode_dialogue([("user", "hello")])  # raises what no message can change, before one is typed
        print(f"{model.info.name}\n{HELP}\nwarning: {WARNING}", file=sys.stderr)
        dialogue = Dialogue(model, config.sampling, config.max_length)
        while (message := _read_message()) is not None:
            if message == "/quit":
                return
            if message == "/reset":
                dialogue.reset()
                print("forgotten", file=sys.stderr)
            elif message.startswith("/"):
                print(HELP, file=sys.stderr)
            elif message:
                _answer(dialogue, message)


class MessageRefused(ConfigError):
    """The chat template makes no prompt of the dialogue with this message, or the model does not have its tokens."""


@dataclass
class Dialogue:
    """What was said, and the servers' memory of it. Only what is new since the last turn is run."""

    model: DistributedModelForCausalLM
    sampling: Sampling
    max_length: int
    turns: list[tuple[str, str]] = field(default_factory=list)
    _cache: SessionCache | None = None
    _cached_ids: list[int] = field(default_factory=list)

    def answer(self, message: str, stop: StopFlag) -> None:
        """Stream the answer to `message` to stdout.

        Raises SessionLost, after which the next turn starts afresh, or MessageRefused. After either it is as if that
        message had not been said.
        """
        import torch
        from transformers import StoppingCriteriaList

        from llmnode.node.text import ScreenStreamer

        prompt = self._prompt(message)
        room = self.max_length - len(prompt)
        if room < 1:
            print(
                f"the dialogue is full ({self.max_length} tokens): /reset, or start with --max-length", file=sys.stderr
            )
            return
        streamer = ScreenStreamer(self.model.tokenizer, sys.stdout)
        options = self.sampling.options()
        options["max_new_tokens"] = min(options["max_new_tokens"], room)
        inputs = torch.tensor([prompt])
        try:
            cache = self._cache_up_to(prompt)
            output = self.model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                cache=cache,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([stop]),
                **options,
            )
        except BaseException:
            self._forget_cache()
            raise
        self._cached_ids = output[0, : cache.get_seq_length()].tolist()
        self.turns += [("user", message), ("assistant", streamer.text)]
        sys.stdout.write("\n")
        print(streamer.speed_line(), file=sys.stderr)

    def _prompt(self, message: str) -> list[int]:
        try:
            prompt = self.model.tokenizer.encode_dialogue([*self.turns, ("user", message)])
            self.model.check_tokens(prompt)
        except ConfigError as error:
            raise MessageRefused(str(error)) from error
        return prompt

    def reset(self) -> None:
        self.turns.clear()
        self._forget_cache()

    def _cache_up_to(self, prompt: list[int]) -> SessionCache:
        """A cache that holds a beginning of `prompt`: all that the last turn left of it, but never all of it."""
        if self._cache is None:
            self._cache = self.model.open_cache(self.max_length)
        kept = 0
        for cached, token in zip(self._cached_ids, prompt[:-1], strict=False):
            if cached != token:
                break
            kept += 1
        if kept < self._cache.get_seq_length():
            self._cache.truncate(kept)
        return self._cache

    def _forget_cache(self) -> None:
        if self._cache is not None:
            self._cache.close()
        self._cache, self._cached_ids = None, []


class StopFlag:
    """A stopping criterion of transformers that Ctrl-C sets: the session stays whole, unlike after an interrupt."""

    def __init__(self) -> None:
        self._stopped = False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_kwargs: Any) -> torch.Tensor:  # Any: not used
        import torch

        return torch.full((input_ids.shape[0],), self._stopped)

    @contextmanager
    def set_by_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C sets the flag, a second one interrupts."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._stopped:
                signal.default_int_handler(number, frame)
            self._stopped = True

        former = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)


def _answer(dialogue: Dialogue, message: str) -> None:
    stop = StopFlag()
    try:
        with stop.set_by_ctrl_c():
            dialogue.answer(message, stop)
    except MessageRefused as error:
        print(f"{error}; this message is not part of the dialogue: say it otherwise, or /reset", file=sys.stderr)
    except SessionLost as error:
        print(f"\n{error}; the dialogue is kept: ask again, which needs every server to be there", file=sys.stderr)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)


def _read_message() -> str | None:
    """The user's next message, of one line or several; None at the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    lines: list[str] = []
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return "\n".join(lines) or None
        except KeyboardInterrupt:
            print("\n/quit leaves", file=sys.stderr)
            return ""
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(lines).strip()
        prompt = prompt and "| "
