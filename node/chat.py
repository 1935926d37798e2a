"""`llmnode chat`: a dialogue in the terminal. The KV of what was said stays with the servers between turns."""

from __future__ import annotations

import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmnode.errors import ConfigError, SessionLost
from llmnode.node.generate import run_generate
from llmnode.node.outcome import describe_empty
from llmnode.node.terminal import say
from llmnode.node.typed import NoLine, TypedLines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    import torch

    from llmnode.client.cache import SessionCache
    from llmnode.client.causal_lm import DistributedModelForCausalLM
    from llmnode.node.connect_options import Access
    from llmnode.node.sampling import Sampler, Sampling

HELP = "/reset forgets the dialogue, /quit leaves; a line that ends in \\ goes on in the next; Ctrl-C stops an answer"
WARNING = "whoever runs these servers can read this dialogue: use your own for what is private"
DEFAULT_NEW_TOKENS = 512
DEFAULT_LENGTH = 4096
DEFAULT_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """What `llmnode chat` was asked for. A dialogue has room for `max_length` tokens; None for what fits the model."""

    access: Access
    sampling: Sampling
    max_new_tokens: int
    max_length: int | None


def chat(config: ChatConfig) -> None:
    """Talk until /quit or the end of the input. Raises ConfigError, PeerError or NoRoute."""
    lines = TypedLines()
    with config.access.connect() as model:
        model.tokenizer.encode_dialogue([("user", "hello")])  # raises what no message can change, before one is typed
        sampler = config.sampling.of(model.generation_config)
        sampler.options()  # likewise
        dialogue = Dialogue(model, sampler, config.max_new_tokens, _length(config.max_length, model))
        print(f"{model.info.name}; {sampler.line()}\n{HELP}\nwarning: {WARNING}", file=sys.stderr)
        while (message := _read_message(lines)) is not None:
            if message == "/quit":
                return
            if message == "/reset":
                dialogue.reset()
                print("forgotten", file=sys.stderr)
            elif message.startswith("/"):
                print(HELP, file=sys.stderr)
            elif message:
                _answer(dialogue, message)


def _length(asked: int | None, model: DistributedModelForCausalLM) -> int:
    """Raises ConfigError for more than the model's context."""
    context_tokens = model.info.context_tokens
    if asked is None:
        return min(DEFAULT_LENGTH, context_tokens)
    if asked > context_tokens:
        raise ConfigError(f"--max-length {asked}: the model's context has {context_tokens} tokens: give at most those")
    return asked


@dataclass
class Dialogue:
    """What was said, and the servers' memory of it. Only what is new since the last turn is run."""

    model: DistributedModelForCausalLM
    sampler: Sampler
    max_new_tokens: int
    max_length: int
    turns: list[tuple[str, str]] = field(default_factory=list)
    _cache: SessionCache | None = None
    _cached_ids: list[int] = field(default_factory=list)

    def answer(self, message: str, stop: StopFlag) -> None:
        """Stream the answer to `message` to stdout.

        Raises SessionLost, after which the next turn starts afresh, and ConfigError for a message that cannot be
        answered. After either it is as if that message had not been said.
        """
        from transformers import StoppingCriteriaList

        from llmnode.node.text import ScreenStreamer

        prompt = self.model.tokenizer.encode_dialogue([*self.turns, ("user", message)])
        self.model.check_tokens(prompt)
        room = self.max_length - len(prompt)
        if room < 1:
            raise ConfigError(self._full(len(prompt)))
        streamer = ScreenStreamer(self.model.tokenizer, sys.stdout)
        options = {**self.sampler.options(), "max_new_tokens": min(self.max_new_tokens, room)}
        try:
            cache = self._cache_up_to(prompt)
            output = run_generate(
                self.model,
                prompt,
                options,
                cache=cache,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        except BaseException:
            self._forget_cache()
            raise
        self._cached_ids = output[0, : cache.get_seq_length()].tolist()
        self.turns += [("user", message), ("assistant", streamer.text)]
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(streamer.speed_line(), file=sys.stderr)
        ends = self.model.generation_config.eos_token_id
        if why := describe_empty(streamer.token_ids, streamer.text, ends):
            say(f"the answer is empty: {why}; ask otherwise, or /reset")

    def _full(self, prompt_tokens: int) -> str:
        longer = " or start with a longer --max-length" if self.max_length < self.model.info.context_tokens else ""
        if self.turns:
            return f"the dialogue is full ({self.max_length} tokens): /reset{longer}"
        return f"this message takes {prompt_tokens} tokens, of {self.max_length} for a dialogue: shorten it{longer}"

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
    """Whatever comes of it, the dialogue goes on."""
    stop = StopFlag()
    try:
        with stop.set_by_ctrl_c():
            dialogue.answer(message, stop)
    except ConfigError as error:
        say(f"{error}; this message is not part of the dialogue")
    except SessionLost as error:
        say(f"{error}; the dialogue is kept: ask again, which needs every server to be there")
    except KeyboardInterrupt:
        say("stopped")


def _read_message(lines: TypedLines) -> str | None:
    """The user's next message, of one line or several; None at the end of the input."""
    prompt = "> "
    message: list[str] = []
    while True:
        try:
            line = lines.read(prompt)
        except NoLine as error:
            say(f"{error}")
            return ""
        except KeyboardInterrupt:
            say("/quit leaves")
            return ""
        if line is None:
            return "\n".join(message).strip() or None
        message.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            return "\n".join(message).strip()
        prompt = "| "
