"""Nobody but relays can be dialled: servers and client behind NATs generate exactly, through circuits.

Where their NATs let them in, sessions go on directly, and no recovery comes of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from netns.nat import MASQUERADE, PORT_RESTRICTED, SYMMETRIC
from netns.nodes import (
    CLIENT,
    IN_MID_SESSION,
    MANY_TOKENS,
    Child,
    Client,
    children,
    crossing,
    kind_of,
    relay_command,
    serve_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netns.internet import Internet, Place
    from netns.nat import Kind
    from netns.nodes import Crossing, Question, Session

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class World:
    """Two relays, and a client and two servers, each behind a NAT of its own."""

    internet: Internet
    client: Client
    relays: Sequence[Child]
    servers: Sequence[Child]
    question: Question

    @property
    def hidden(self) -> list[Place]:
        return [self.client.place, *(server.place for server in self.servers)]

    def generate(self, **disturbed: Any) -> Session:
        """Through the servers that relays know; it must be exact."""
        return self.client.generate([relay.address for relay in self.relays], self.question, **disturbed)

    def check_all_went_through_relays(self, session: Session) -> None:
        for one in self.hidden:
            assert not any(session.carried[one.name, other.name] for other in self.hidden)

    def crossing(self, scenario: str, session: Session) -> Crossing:
        first, second = (server.place for server in self.servers)
        return crossing(scenario, session, self.client.place, first, [second], [relay.place for relay in self.relays])


@pytest.fixture(scope="module")
def world(internet: Internet, question: Question) -> Iterator[World]:
    hubs = [internet.add(name) for name in ("hub", "spare")]
    homes = [internet.add(name, MASQUERADE) for name in ("home", "first", "second")]
    with children() as start:
        client = start(homes[0], *CLIENT)
        relays = [start(hub, *relay_command(hub)) for hub in hubs]
        addresses = [relay.address for relay in relays]
        options = ["--peers", *addresses, "--relay", *addresses]
        servers = [
            start(place, *serve_command(place, blocks, *options))
            for place, blocks in zip(homes[1:], ("0:15", "15:30"), strict=True)
        ]
        for child in (client, *servers):
            child.ready  # noqa: B018 - so that all are there
        yield World(internet, Client(client, internet), relays, servers, question)


def check_becomes_direct(world: World, note: Callable[[Crossing], None]) -> None:
    """Sooner or later: on a busy machine two may dial too far apart, and try again after a while."""
    is_direct = False
    while not is_direct:
        session = world.generate(new_tokens=MANY_TOKENS)
        assert not session.recoveries
        crossing = world.crossing("at rest", session)
        is_direct = crossing.to_servers.endswith("direct") and crossing.between_servers.endswith("direct")
    note(crossing)


def check_all_move(world: World, kind: Kind, note: Callable[[Crossing], None]) -> None:
    former = kind_of(world.client.place)

    def move(_peers: list[str]) -> None:
        for place in world.hidden:
            world.internet.renumber(place, kind)

    session = world.generate(after=IN_MID_SESSION, do=move)
    assert session.recoveries
    note(world.crossing(f"all addresses change, from {former}", session))


def test_all_behind_masquerade(world: World, note: Callable[[Crossing], None]) -> None:
    check_becomes_direct(world, note)


def test_all_move_behind_port_restricted_nats_in_mid_session(world: World, note: Callable[[Crossing], None]) -> None:
    check_all_move(world, PORT_RESTRICTED, note)


def test_all_behind_port_restricted_nats(world: World, note: Callable[[Crossing], None]) -> None:
    check_becomes_direct(world, note)


def test_all_move_behind_symmetric_nats_in_mid_session(world: World, note: Callable[[Crossing], None]) -> None:
    check_all_move(world, SYMMETRIC, note)


def test_all_behind_symmetric_nats(world: World, note: Callable[[Crossing], None]) -> None:
    session = world.generate()
    assert not session.recoveries
    world.check_all_went_through_relays(session)
    note(world.crossing("at rest", session))


def test_a_relay_dies_in_mid_session(world: World, note: Callable[[Crossing], None]) -> None:
    home, before = world.client.place.name, world.internet.carried.copy()

    def carried(relay: Child) -> int:
        road = (home, relay.place.name)
        return world.internet.carried[road] - before[road]

    def kill(_peers: list[str]) -> None:
        """The one that carries the session."""
        max(world.relays, key=carried).process.kill()

    session = world.generate(after=IN_MID_SESSION, do=kill)
    assert session.recoveries
    world.check_all_went_through_relays(session)
    note(world.crossing("a relay dies, another is left", session))
