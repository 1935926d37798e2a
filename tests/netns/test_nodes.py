"""Real nodes across an internet: clients behind NATs, far away, renumbered and bereft of a server generate exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from netns.nat import MASQUERADE, SYMMETRIC
from netns.nodes import (
    CLIENT,
    IN_MID_SESSION,
    LLMNODE,
    PROMPT,
    Child,
    Client,
    children,
    crossing,
    relay_command,
    serve_command,
)
from process import forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from netns.internet import Internet, Place
    from netns.nodes import Crossing, Question, Session

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(300)]

FEW_TOKENS = 8
FAR_S = 0.05
"""The delay of each link: 100 ms from one place to another."""
TWIN_BLOCKS = "15:30"


@dataclass
class World:
    """A client behind a NAT; a relay, and servers of which two are twins, at public addresses."""

    internet: Internet
    client: Client
    relay: Child
    first: Child
    twins: Sequence[Child]
    question: Question

    @property
    def servers(self) -> list[Child]:
        return [self.first, *self.twins]

    @property
    def places(self) -> list[Place]:
        return [self.client.place, self.relay.place, *(server.place for server in self.servers)]

    def generate(self, **disturbed: Any) -> Session:
        """Through the servers that the relay knows; it must be exact."""
        return self.client.generate([self.relay.address], self.question, **disturbed)

    def crossing(self, scenario: str, session: Session) -> Crossing:
        made = crossing(scenario, session, self.client.place, self.first.place, [twin.place for twin in self.twins])
        assert (made.to_servers, made.between_servers) == ("direct", "direct")
        return made


@pytest.fixture(scope="module")
def world(internet: Internet, question: Question) -> Iterator[World]:
    home, hub = internet.add("home", MASQUERADE), internet.add("hub")
    places = [internet.add(name) for name in ("first", "second", "twin")]
    with children() as start:
        relay = start(hub, *relay_command(hub))
        client = start(home, *CLIENT)
        spans = ("0:15", TWIN_BLOCKS, TWIN_BLOCKS)
        first, *twins = [
            start(place, *serve_command(place, blocks, "--peers", relay.address))
            for place, blocks in zip(places, spans, strict=True)
        ]
        for child in (client, first, *twins):
            child.ready  # noqa: B018 - so that all are there
        yield World(internet, Client(client, internet), relay, first, twins, question)


@pytest.fixture(autouse=True)
def calm(world: World) -> Iterator[None]:
    """Each test finds the internet as it was."""
    yield
    for place in world.places:
        place.delay_s = 0.0
        place.is_cut = False
    world.internet.renumber(world.client.place, MASQUERADE)


def test_the_command_line_generates_from_behind_masquerade(world: World) -> None:
    command = [*LLMNODE, "generate", "--json", "--peers", world.relay.address]
    command += ["--prompt", PROMPT, "--max-new-tokens", str(FEW_TOKENS)]
    done = forked.run(world.client.place.command(*command))
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt_token_ids"] == world.question.prompt
    assert answer["token_ids"] == world.question.expected[:FEW_TOKENS]


@pytest.mark.parametrize(
    ("kind", "says"),
    [(MASQUERADE, "keeps one port"), (SYMMETRIC, "another port for each peer")],
    ids=["steady", "symmetric"],
)
def test_the_doctor_names_the_kind_of_nat(kind: Any, says: str, world: World) -> None:
    world.internet.renumber(world.client.place, kind)
    found = reach_seen_from(world.client.place, world)
    assert found["verdict"] == "warning"
    assert f"at {world.client.place.address}, behind" in found["text"]
    assert says in found["text"] and "cannot dial" in found["text"]
    assert "--relay" in found["fix"]


def test_the_doctor_knows_who_needs_no_relay(world: World) -> None:
    found = reach_seen_from(world.first.place, world)
    assert found["verdict"] == "ok"
    assert "its own address, and can dial it" in found["text"]


def reach_seen_from(place: Place, world: World) -> dict[str, str]:
    command = [*LLMNODE, "doctor", "--json", "--peers", world.relay.address, world.twins[0].address]
    done = forked.run(place.command(*command))
    assert done.returncode == 0, done.stderr
    (found,) = [each for each in json.loads(done.stdout)["findings"] if each["check"] == "reach"]
    return dict(found)


@pytest.mark.parametrize("kind", [MASQUERADE, SYMMETRIC], ids=str)
def test_a_client_behind_a_nat(kind: Any, world: World, note: Callable[[Crossing], None]) -> None:
    world.internet.renumber(world.client.place, kind)
    session = world.generate()
    assert not session.recoveries
    note(world.crossing("at rest", session))


def test_all_are_100_ms_apart(world: World, note: Callable[[Crossing], None]) -> None:
    for place in world.places:
        place.delay_s = FAR_S
    session = world.generate(new_tokens=FEW_TOKENS)
    note(world.crossing("100 ms from each to each", session))


@pytest.mark.parametrize("adopts", [True, False], ids=["and servers reset its links", "in silence"])
def test_the_clients_address_changes_in_mid_session(
    adopts: bool, world: World, note: Callable[[Crossing], None]
) -> None:
    old = world.client.place.address

    def renumber(_peers: list[str]) -> None:
        world.internet.renumber(world.client.place, MASQUERADE, adopts=adopts)

    session = world.generate(after=IN_MID_SESSION, do=renumber)
    assert world.client.place.address != old
    assert session.recoveries
    note(world.crossing(f"the client's address changes, {'resets' if adopts else 'silence'}", session))


def test_a_server_is_cut_off_in_mid_session_and_its_twin_takes_over(
    world: World, note: Callable[[Crossing], None]
) -> None:
    lost: list[Child] = []

    def cut(peers: list[str]) -> None:
        lost.extend(twin for twin in world.twins if twin.peer in peers)
        for server in lost:
            server.place.is_cut = True

    session = world.generate(after=IN_MID_SESSION, do=cut)
    (server,) = lost
    assert server.peer in {each["lost"] for each in session.recoveries}
    note(world.crossing("a server is cut off", session))
