"""`llmnode chat`: a dialogue in the terminal. Between turns the servers keep its KV."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from llmnode.client.sampling import ChoiceTerms
from llmnode.core.texts.visible import printable
from llmnode.errors import ConfigError, SessionLost
from llmnode.node.outcome import describe_empty
from llmnode.node.terminal import Pieces, note, say, show
from llmnode.node.typed import NoLine, TypedLines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from llmnode.client.generate import Token
    from llmnode.client.portal import Entered
    from llmnode.client.sampling import Sampling
    from llmnode.core.model import ModelInfo
    from llmnode.node.connect_options import Access, OpenClient
    from llmnode.session.session import InferenceSession

HELP = (
    "/reset forgets the dialogue, /quit or /exit leaves; a line that ends in \\ goes on in the next; "
    "Ctrl-C stops an answer"
)
WARNING = "whoever runs these servers can read this dialogue: use your own for what is private"
DEFAULT_NEW_TOKENS = 512
DEFAULT_LENGTH = 4096
DEFAULT_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """The options of `llmnode chat`. A dialogue may have `max_length` tokens; None for as many as the model takes."""

    access: Access
    sampling: Sampling
    max_new_tokens: int
    max_length: int | None


def chat(config: ChatConfig) -> None:
    """Talk until /quit or the end of the input. Raises ConfigError, PeerError or NoRoute."""
    lines = TypedLines()
    with config.access.open() as opened:
        client = opened.client
        client.tokenizer.encode_dialogue([("user", "hello")])  # raises errors that no message can change
        sampler = config.sampling.of(client.generation_config)
        sampler.chooser([0], 1, ChoiceTerms(client.ends.vocabulary))  # raises errors of the settings
        dialogue = Chat(opened, config.sampling, config.max_new_tokens, _length(config.max_length, client.model))
        name = f"{printable(client.model.name)}, {client.model.precision.name}"
        note(f"{name}; {sampler.line()}\n{HELP}\nwarning: {WARNING}")
        while (message := _read_message(lines)) is not None:
            match command_in(message):
                case Command.LEAVE:
                    return
                case Command.RESET:
                    dialogue.reset()
                    note("forgotten")
                case Command.HELP:
                    note(HELP)
                case None if message:
                    _answer(dialogue, message)


class Command(Enum):
    """A message that is for this program, and not for the model."""

    LEAVE = auto()
    RESET = auto()
    HELP = auto()


def command_in(message: str) -> Command | None:
    """The command that a message is; None for one to the model. An unknown command asks for help."""
    if message in ("/quit", "/exit", "exit"):
        return Command.LEAVE
    if message == "/reset":
        return Command.RESET
    return Command.HELP if message.startswith("/") else None


def _length(asked: int | None, model: ModelInfo) -> int:
    """Raises ConfigError for more than the model's context."""
    context_tokens = model.context_tokens
    if asked is None:
        return min(DEFAULT_LENGTH, context_tokens)
    if asked > context_tokens:
        raise ConfigError(f"--max-length {asked}: the model's context has {context_tokens} tokens: give at most those")
    return asked


@dataclass
class Chat:
    """A dialogue, and the servers' memory of it. Only tokens that are new since the last turn are run."""

    opened: OpenClient
    sampling: Sampling
    max_new_tokens: int
    max_length: int
    turns: list[tuple[str, str]] = field(default_factory=list)
    _entered: Entered[InferenceSession] | None = None
    _held_ids: list[int] = field(default_factory=list)
    """The tokens that the session holds."""

    def answer(self, message: str, stop: StopFlag) -> None:
        """Stream the answer to `message` to stdout.

        Raises SessionLost, after which the next turn starts afresh, and ConfigError for a message that cannot be
        answered. After either it is as if that message had not been said.
        """
        from llmnode.node.forecasts import note_text
        from llmnode.node.text import ScreenText

        client = self.opened.client
        prompt = client.tokenizer.encode_dialogue([*self.turns, ("user", message)])
        client.ends.check(prompt)
        left = self.max_length - len(prompt)
        if left < 1:
            raise ConfigError(self._full(len(prompt)))
        screen = ScreenText(Pieces())
        try:
            session = self._session_up_to(prompt)
            entered = len(prompt) - session.position

            async def run(give: Callable[[Token], None]) -> None:
                asked = min(self.max_new_tokens, left)
                async with client.generate(prompt, asked, sampling=self.sampling, session=session) as answer:
                    async for token in answer:
                        give(token)
                        if stop.is_set:
                            break

            for token in self.opened.portal.stream(run):
                screen.show(token)
        except BaseException:
            self._forget_session()
            raise
        self._held_ids = [*prompt, *screen.token_ids][: session.position]
        self.turns += [("user", message), ("assistant", screen.text)]
        show("")
        note(screen.speed_line())
        count, rate = len(screen.token_ids), screen.tokens_per_s
        self.opened.portal.call(lambda: note_text(client.model, count, rate, screen.first_s, entered))
        ends = self.sampling.of(client.generation_config).end_tokens
        if why := describe_empty(screen.token_ids, screen.text, ends):
            say(f"the answer is empty: {why}; ask otherwise, or /reset")

    def _full(self, prompt_tokens: int) -> str:
        most = self.opened.client.model.context_tokens
        longer = " or start with a longer --max-length" if self.max_length < most else ""
        if self.turns:
            return f"the dialogue is full ({self.max_length} tokens): /reset{longer}"
        return f"this message takes {prompt_tokens} tokens, of {self.max_length} for a dialogue: shorten it{longer}"

    def reset(self) -> None:
        self.turns.clear()
        self._forget_session()

    def _session_up_to(self, prompt: list[int]) -> InferenceSession:
        """A session that holds a beginning of `prompt`: all that the last turn left of it, but never all of it."""
        if self._entered is None:
            self._entered = self.opened.portal.enter(self.opened.client.inference_session(self.max_length))
        session = self._entered.opened.result()
        kept = 0
        for held, token in zip(self._held_ids, prompt[:-1], strict=False):
            if held != token:
                break
            kept += 1
        if kept < session.position:
            self.opened.portal.call(lambda: session.truncate(kept))
        return session

    def _forget_session(self) -> None:
        entered, self._entered, self._held_ids = self._entered, None, []
        if entered is not None:
            entered.close()


class StopFlag:
    """Ctrl-C sets it. An answer then ends with its next token, and its session stays whole, unlike after a break."""

    def __init__(self) -> None:
        self.is_set = False

    @contextmanager
    def set_by_ctrl_c(self) -> Iterator[None]:
        """The first Ctrl-C sets the flag, a second one interrupts."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self.is_set:
                signal.default_int_handler(number, frame)
            self.is_set = True

        former = signal.signal(signal.SIGINT, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, former)


def _answer(dialogue: Chat, message: str) -> None:
    """The dialogue goes on, also after an error or a Ctrl-C."""
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
