"""Each law about hostile peers fails as soon as the part of a node that upholds it is taken away."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.operations import DeepPrompts
from llmnode.core.peers import dial_gate
from llmnode.core.peers.dial_gate import PUBLIC, DialGate
from llmnode.core.rates import Rates
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.session_memory import SessionMemory
from llmnode.testing import simulate
from llmnode.testing.hostile import DialBait, HostilePlan, QueueStuffer, SlowReader
from llmnode.testing.hostile.laws import held_bytes
from llmnode.testing.link import MemoryLink
from llmnode.wire.payload import Codec
from simulation.test_hostile import survive
from simulation.world import ALL_BLOCKS, MODEL, ROW, simulated, world

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.testing.hostile import HostileRole

    Mutate = Callable[[pytest.MonkeyPatch], None]


def without(owner: Any, name: str, instead: Any) -> Mutate:  # Any: a class or a module, and what replaces a part
    return lambda monkeypatch: monkeypatch.setattr(owner, name, instead)


def without_turns_and(owner: Any, name: str, instead: Any) -> Mutate:  # Any: as above
    """Floods do not come as far as memory where requests take turns."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Conduct, "wait_turn", nothing)
        monkeypatch.setattr(Conduct, "wait_want", nothing)
        monkeypatch.setattr(owner, name, instead)

    return mutate


async def nothing(*_: object) -> None:
    """In place of what waits for memory."""


def repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rates nor failures hold a dial back."""
    monkeypatch.setattr(Rates, "wait_s", lambda *_: 0.0)
    monkeypatch.setattr(DialGate, "report", lambda *_, **__: None)


BAIT, READER, STUFFER = DialBait(2, 1), SlowReader(16, 4), QueueStuffer(3, 3)
MUTATIONS: dict[str, tuple[HostileRole, Mutate, str]] = {
    "no gate": (BAIT, without(DialGate, "why_not", lambda *_, **__: None), "private network|dials in"),
    "private addresses": (BAIT, without(dial_gate, "scope_of", lambda _: PUBLIC), "private network"),
    "as often as named": (BAIT, repeated, "dials in"),
    "links without a charge": (READER, without_turns_and(MemoryLink, "_hold", lambda *_: True), "are its budget"),
    "queues without a charge": (STUFFER, without_turns_and(SessionMemory, "_grow", nothing), "are its budget"),
}


def run(role: HostileRole) -> None:
    simulate(functools.partial(survive, HostilePlan((role,)), 0), seed=0)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_law_fails_without_what_upholds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    role, mutate, complaint = MUTATIONS[name]
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=complaint):
        run(role)


@pytest.mark.parametrize("role", [BAIT, READER, STUFFER], ids=lambda role: type(role).__name__)
def test_the_same_laws_hold_with_it(role: HostileRole) -> None:
    run(role)


@simulated
async def test_the_law_of_memory_counts_prompts() -> None:
    prompts = DeepPrompts(MODEL.blocks, 1, 4, bytes(MODEL.blocks * 4 * ROW))
    async with world() as swarm:
        node = await swarm.start("one", ALL_BLOCKS)
        async with swarm.client() as (router, _), router.open_session(16, Codec.RAW, prompts=prompts):
            await trio.sleep(1)
            assert held_bytes(node) == 2 * prompts.size_bytes
