"""The laws that hold whatever hostile peers do, while there are honest ones. Each raises AssertionError."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Resource
from llmnode.core.peers.dial_gate import PUBLIC, scope_of
from llmnode.errors import LlmnodeError
from llmnode.testing.checks import Dialogue
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import DialPolicy
    from llmnode.testing.network import Dial
    from llmnode.testing.watched_finder import WatchedFinder
    from llmnode.testing.world import ServingNode, SimulatedClient, World

SESSION_WITHIN_S = 120.0
"""A session of `STEPS` steps ends well within this time, while honest peers hold all blocks. A hop that never answers
its first step is given up after 60 s (`ClientPolicy.step_timeout_s`)."""
OPENS_WITHIN_S = 45.0
"""A session opens within this time while others hold all KV, and want more, from one address group. Those that are in
use keep it for 20 s (`AdmissionPolicy.keeps_s`), and a client that was refused comes up to half as late again as it was
told."""
STEPS = 4
POSITIONS = 64
LOOK_EVERY_S = 0.5


async def check_sessions_end_well(
    client: SimulatedClient, sessions: int, seed: int, opens_within_s: float = SESSION_WITHIN_S
) -> None:
    """Sessions one after the other, each with the right answers, and in its time."""
    rng = random.Random(f"said {seed}")
    for number in range(sessions):
        dialogue: Dialogue | None = None
        began_s = trio.current_time()
        try:
            with trio.fail_after(SESSION_WITHIN_S):
                async with client.router.open_session(POSITIONS, Codec.RAW) as session:
                    opened_s = trio.current_time() - began_s
                    assert opened_s <= opens_within_s, f"session {number} was opened after {opened_s:.1f} s"
                    dialogue = Dialogue(session, rng)
                    await dialogue.step(rng.choice((1, 9)))
                    for _ in range(STEPS - 1):
                        await dialogue.step(1)
        except (LlmnodeError, trio.TooSlowError) as error:
            recoveries = dialogue.session.recoveries if dialogue is not None else []
            raise AssertionError(f"session {number} failed, after {recoveries}: {error!r}") from error


def check_no_wrong_ban(finder: WatchedFinder, honest: Collection[PeerId]) -> None:
    """No honest peer is banned or convicted. Some may be suspected."""
    wrong = {str(error) for _, error in finder.banned if error.peer in honest}
    assert not wrong, f"honest peers are banned: {wrong}"


async def check_memory(world: World, honest: Collection[str]) -> None:
    """Until cancelled: no honest node holds more for others than its budget allows."""
    while True:
        for name in honest:
            held, most = held_bytes(node := world.nodes[name]), node.network.budget.process.limit(Resource.MEMORY)
            assert most is not None
            assert held <= most, f"{name} holds {held} bytes for others, {most} are its budget"
        await trio.sleep(LOOK_EVERY_S)


def held_bytes(node: ServingNode) -> int:
    """The bytes of all frames and deep prompts that a node holds for others, counted one by one."""
    links, sessions = sum(link.held_bytes for link in node.network.links), node.server.sessions.values()
    waiting = [frame for each in sessions for frame in [*each.inbox._frames._state.data, *each.stage.held]]
    prompts = sum(2 * each.terms.prompts.size_bytes for each in sessions)  # at the worker too
    return links + sum(frame.size_bytes for frame in waiting) + prompts


def check_dials(dials: Collection[Dial], hostile: Collection[PeerId], policy: DialPolicy) -> None:
    """No honest peer dials a private address, or one address more often than its gate allows."""
    places: dict[tuple[PeerId, str, int], list[float]] = defaultdict(list)
    for dial in dials:
        if dial.dialler not in hostile:
            assert scope_of(dial.host) == PUBLIC, f"{dial} is to a private network"
            places[dial.dialler, dial.host, dial.port].append(dial.at_s)
    for place, times in places.items():
        for first, began_s in enumerate(times):
            for number, at_s in enumerate(times[first:], 1):
                allowed = policy.place_burst + policy.place_per_s * (at_s - began_s)
                assert number <= allowed + 1e-6, f"{place}: {number} dials in {at_s - began_s:.1f} s"
