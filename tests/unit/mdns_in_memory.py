"""mDNS without a network: its datagrams are in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from llmnode.core.policy import MdnsPolicy
from llmnode.net.mdns_messages import Heard

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = "127.0.0.1"
POLICY = MdnsPolicy()


class Datagrams:
    """It stands for an `Mdns`: it hears the messages of `say`, and notes when it asked, and what it answered."""

    def __init__(self) -> None:
        self.policy = POLICY
        self.say, self._said = trio.open_memory_channel[Heard](math.inf)
        self.asked_s: list[float] = []
        self.answers: list[tuple[float, int | None]] = []
        self.answered = trio.Event()

    async def ask(self) -> None:
        self.asked_s.append(trio.current_time())

    async def answer(self, _listening: Sequence[str], lifetime_s: int | None = None) -> None:
        self.answers.append((trio.current_time(), lifetime_s))
        self.answered.set()

    async def hear(self) -> Heard:
        return await self._said.receive()

    def name(self, *peers: str, host: str = HERE) -> None:
        self.say.send_nowait(Heard(host, False, {each: (f"/ip4/{host}/tcp/1/p2p/{each}",) for each in peers}))
