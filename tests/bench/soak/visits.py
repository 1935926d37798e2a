"""Sessions as people use them, for `soak`: some end as intended, some are cancelled, and some are abandoned."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import trio

from llmnode.client.generate import next_token
from llmnode.errors import LlmnodeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.connect import Client, ClientParts
    from llmnode.core.ids import PeerId
    from llmnode.session.session import InferenceSession

SCRIPTS = 24
"""With this small number most visits repeat a script, so transformers judges each text only once."""
SAID = ("\n\nIn other words,", " However, the", " For example:\n", "\n\nThe reason is that")
CANCELLED_WITHIN_S = 4.0
PAUSE_S = 1.0


class Fate(StrEnum):
    WHOLE = "whole"
    CANCELLED = "cancelled"
    """It is cancelled at any moment, also while it opens."""
    LEFT = "left"
    """It is abandoned after its first turn."""


FATES = {Fate.WHOLE: 6, Fate.CANCELLED: 3, Fate.LEFT: 1}


@dataclass(frozen=True, slots=True)
class Turn:
    """Take back some positions, add the tokens `said`, and have `chosen` tokens generated."""

    taken_back: int
    said: tuple[int, ...]
    chosen: int


@dataclass(frozen=True, slots=True)
class Script:
    turns: tuple[Turn, ...]

    @property
    def length(self) -> int:
        return sum(len(turn.said) + turn.chosen for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids as bytes, since there will be many. Those from `start` to `stop` were generated."""

    packed: bytes
    start: int
    stop: int

    @property
    def tokens(self) -> list[int]:
        return array("I", self.packed).tolist()


@dataclass(frozen=True, slots=True)
class Loss:
    """A session has replaced a peer. It noticed the loss at `noticed_s` at the latest."""

    peer: PeerId
    noticed_s: float
    cause: str


@dataclass(slots=True)
class Visit:
    """One session, from before it opens until it is closed."""

    fate: Fate
    began_s: float
    ended_s: float = 0.0
    error: str = ""
    chosen: int = 0
    peers: set[PeerId] = field(default_factory=set)
    """All peers that it used."""
    losses: list[Loss] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    def note(self, session: InferenceSession, text: Sequence[int], start: int) -> None:
        """Record a turn. It generated the tokens from `start` on."""
        self.peers.update(hop.peer for hop in session.route)
        for recovery in session.recoveries[len(self.losses) :]:
            self.peers.add(recovery.lost)
            self.losses.append(Loss(recovery.lost, trio.current_time(), recovery.cause))
        if len(text) > start:
            self.chosen += len(text) - start
            self.texts.append(Text(array("I", text).tobytes(), start, len(text)))


def make_scripts(parts: ClientParts, seed: int) -> list[Script]:
    rng = random.Random(f"{seed} scripts")
    words = parts.tokenizer.encode(topics["types"])
    said = [tuple(parts.tokenizer.encode(each)) for each in SAID]

    def prompt() -> tuple[int, ...]:
        start = rng.randrange(len(words) // 2)
        return tuple(words[start : start + rng.randint(8, 96)])

    def turn() -> Turn:
        return Turn(rng.randint(0, 3), rng.choice(said), rng.randint(4, 10))

    return [
        Script((Turn(0, prompt(), rng.randint(4, 10)), *(turn() for _ in range(rng.randint(1, 3)))))
        for _ in range(SCRIPTS)
    ]


class Visitor:
    """The user of one client. It appends each visit to `visits`, which other visitors may share."""

    def __init__(self, client: Client, scripts: Sequence[Script], rng: random.Random, visits: list[Visit]) -> None:
        self._client = client
        self._scripts = scripts
        self._rng = rng
        self._visits = visits

    async def visit_until(self, until_s: float) -> None:
        """Hold one session after the other. The last one is not cut short."""
        while trio.current_time() < until_s:
            await self._visit()
            await trio.sleep(self._rng.uniform(0, PAUSE_S))

    async def _visit(self) -> None:
        (fate,) = self._rng.choices(list(FATES), list(FATES.values()))
        turns = self._rng.choice(self._scripts).turns
        visit = Visit(fate, began_s=trio.current_time())
        patience_s = self._rng.uniform(0, CANCELLED_WITHIN_S) if fate is Fate.CANCELLED else float("inf")
        try:
            with trio.move_on_after(patience_s):
                await self._converse(Script(turns[:1] if fate is Fate.LEFT else turns), visit)
        except LlmnodeError as error:
            visit.error = str(error)
        visit.ended_s = trio.current_time()
        self._visits.append(visit)

    async def _converse(self, script: Script, visit: Visit) -> None:
        text: list[int] = []
        async with self._client.inference_session(script.length) as session:
            for turn in script.turns:
                kept = session.position - turn.taken_back
                if turn.taken_back:
                    await session.truncate(kept)
                text[kept:] = turn.said
                start = len(text)
                try:
                    await self._choose(session, turn, text)
                finally:
                    visit.note(session, text, start)
                await trio.sleep(self._rng.uniform(0, PAUSE_S))

    async def _choose(self, session: InferenceSession, turn: Turn, text: list[int]) -> None:
        """Append the generated tokens to `text`."""
        fresh: Sequence[int] = turn.said
        for _ in range(turn.chosen):
            choice, _ = await next_token(session, self._client.ends, fresh)
            text.append(choice.id)
            fresh = [choice.id]
