"""The client's half of a session joined with the server's, under Hypothesis: whatever happens on the way, both agree.

The frames arrive in any order that connections allow. Peers and connections are lost, steps come twice or changed,
servers refuse. LLMNODE_SEEDS=20000 draws more.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from unit.paired_client import World
from unit.paired_session import PairedSession

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = ModelInfo("exact", b"d" * 32, blocks=3, hidden_size=1, context_tokens=100)
PEERS = [PeerId(f"peer {number}") for number in range(4)]
MAX_LENGTH = 24
POLICY = replace(ClientPolicy(), chunk_tokens=3)
LINKS = LinkPolicy()
DRAWS = int(os.environ.get("LLMNODE_SEEDS", "400"))
FAULTS = {
    "peer lost": 2,
    "wire cut": 3,
    "no answer in time": 5,
    "step twice": 4,
    "push changed": 4,
    "push denied": 2,
    "push ahead": 1,
    "no space": 2,
    "no memory": 2,
    "cannot push": 3,
    "is dialling": 2,
}
OPERATIONS = ["step", "step", "step", "truncate", "copy", "look", "go on elsewhere", "move", "wait"]


def terms(choose: Callable[[int], int]) -> SessionTerms:
    push = replace(POLICY.push, enabled=choose(4) != 3)
    recovery = replace(POLICY.recovery, upstream_logs=choose(4) != 3)
    return SessionTerms(MODEL, MAX_LENGTH, Codec.RAW, replace(POLICY, push=push, recovery=recovery))


def run(choose: Callable[[int], int]) -> Counter[str]:
    """A client with two sessions does what is chosen. Returns what happened, and how often."""
    faults = {name: choose(most + 1) for name, most in FAULTS.items()}
    world = World(choose, PEERS, terms(choose), LINKS, faults)
    sessions = [PairedSession(world), PairedSession(world)]
    for session in sessions:
        session.open()
    for _ in range(1 + choose(8)):
        number = choose(2)
        do(OPERATIONS[choose(len(OPERATIONS))], number, sessions, world)
        for session in sessions:
            session.check()
    world.spare()
    for session in sessions:
        check_all_is_well_in_the_end(session, world)
        session.close()
    world.settle_down()
    for peer in world.peers.values():
        peer.expire()
        assert not peer.sessions
        assert not peer.executor.reserved
    return world.met


def check_all_is_well_in_the_end(session: PairedSession, world: World) -> None:
    session.truncate(0)
    session.step(bytes(MODEL.row_bytes))  # notices the last faults
    world.now_s += POLICY.push.longest_retry_s
    lost = world.met["answer lost"]
    session.step(bytes(MODEL.row_bytes))
    assert world.met["answer lost"] == lost
    session.check_pushes()
    world.settle_down()
    session.check(is_quiet=True)


def do(operation: str, number: int, sessions: list[PairedSession], world: World) -> None:
    session, choose = sessions[number], world.choose
    position = session.state.position
    world.met[operation] += 1
    match operation:
        case "step" if position < MAX_LENGTH:
            length = 1 + choose(min(MAX_LENGTH - position, 8))
            session.step(bytes([1 + choose(3)] * MODEL.row_bytes * length))
        case "truncate":
            session.truncate(choose(position + 1))
        case "copy":
            session.become_copy(sessions[1 - number])
        case "look" if position:
            start = choose(position)
            session.look_into_logs(start, 1 + choose(position - start))
        case "go on elsewhere":
            saved = session.save()
            meanwhile = ["wait", "step", "truncate"][choose(3)]
            do(meanwhile, number, sessions, world)
            session.close()
            sessions[number] = PairedSession(world)
            sessions[number].take_over(saved)
        case "move":
            session.move()
        case "wait":
            world.now_s += 5


@settings(max_examples=DRAWS)
@given(st.data())
def test_both_halves_agree_whatever_happens_on_the_way(data: st.DataObject) -> None:
    draw = data.conjecture_data.draw_integer  # a strategy checks more than each number is worth
    run(lambda number: draw(0, number - 1))
