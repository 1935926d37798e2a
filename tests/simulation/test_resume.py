"""Sessions that another process goes on with: exact to the bit, whatever has gone meanwhile."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, RecoveryPolicy, RoutePolicy, ServePolicy, SpotCheckPolicy
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerRefused
from llmnode.session.saved import read
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import Conditions, open_world, peer_named, seeds
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from simulation.world import (
    ALL_BLOCKS,
    DELAY_S,
    SPANS,
    Dialogue,
    World,
    kv_is_free,
    pairs_of_servers,
    simulated,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.session.saved import SavedSession
    from llmnode.session.session import InferenceSession

MAX_LENGTH = 120
LEASE_S = ServePolicy().lease_s
POLICY = ClientPolicy(chunk_tokens=8)
ME = peer_named("client")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "session"


@asynccontextmanager
async def opened(swarm: World) -> AsyncIterator[tuple[InferenceSession, Dialogue]]:
    async with swarm.client(POLICY) as (router, _), router.open_session(MAX_LENGTH, Codec.RAW) as session:
        yield session, Dialogue(session, random.Random(1), policy=POLICY)


@asynccontextmanager
async def resumed(swarm: World, file: Path, dialogue: Dialogue) -> AsyncIterator[InferenceSession]:
    """In a new process of the same client, which goes on with the dialogue that the file is of."""
    async with swarm.client(POLICY) as (router, _), router.resume_session(read(file)) as session:
        dialogue.session = session
        yield session


async def save(swarm: World, file: Path, *, positions: int = 20) -> tuple[Dialogue, list[str]]:
    """A session that is exported, and its client gone. Returns what was said in it, and the names of its servers."""
    async with opened(swarm) as (session, dialogue):
        await dialogue.step(positions)
        assert await session.export(file) == LEASE_S
        return dialogue, [name_of(hop.peer) for hop in session.route]


def held(swarm: World, span: int) -> bool:
    return any(f"{span}{twin}" in swarm.nodes for twin in "ab")


def name_of(peer: str) -> str:
    return peer.removeprefix("peer-")


def forwards(swarm: World) -> int:
    return sum(node.worker.executor.forwards for node in swarm.nodes.values())


@simulated
async def test_who_resumes_goes_on_with_the_kv_that_is_there(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        dialogue, _ = await save(swarm, file)
        before = forwards(swarm)
        async with resumed(swarm, file, dialogue) as session:
            assert session.position == 20
            assert forwards(swarm) == before, "nothing is computed again"
            await dialogue.step(3)
            await dialogue.go_back(5)
            await dialogue.step(9)
            assert not session.recoveries
            assert session.receipts is not None
            await session.verify()
        await kv_is_free(swarm)


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)], ids=str)
@simulated
async def test_what_is_gone_is_replayed_by_what_is_left(lost: tuple[int, ...], file: Path) -> None:
    async with pairs_of_servers() as swarm:
        dialogue, servers = await save(swarm, file)
        for index in lost:
            swarm.kill(servers[index])
        async with resumed(swarm, file, dialogue) as session:
            gaps = [each.span for each in session.recoveries]
            joined = {(0, 1): [Span(0, 4)], (1, 2): [Span(2, 6)], (0, 1, 2): [ALL_BLOCKS]}
            assert gaps == joined.get(lost, [SPANS[index] for index in lost]), "one replay for all that follow"
            await dialogue.step(3)
            await dialogue.go_back(10)
            await dialogue.step(1)
        await kv_is_free(swarm)


@simulated
async def test_a_server_that_the_client_was_told_to_leave_out_has_no_part_though_it_has_the_session(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        dialogue, servers = await save(swarm, file)
        blocked = frozenset({peer_named(servers[1])})
        policy = replace(POLICY, route=RoutePolicy(blocked=blocked))
        async with swarm.client(policy) as (router, _), router.resume_session(read(file)) as session:
            dialogue.session = session
            await dialogue.step(3)
            assert not blocked & {hop.peer for hop in session.route}
            assert [each.span for each in session.recoveries] == [SPANS[1]]


@simulated
async def test_a_lease_outlives_a_client_that_died_without_a_word_and_then_its_kv_is_free(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        async with opened(swarm) as (session, dialogue):
            await dialogue.step(20)
            await session.export(file)
            swarm.internet.kill(ME)
            await trio.sleep(LEASE_S - 5)
            assert sum(node.worker.reserved for node in swarm.nodes.values()) == 3 * MAX_LENGTH
            await trio.sleep(6)
            assert sum(node.worker.reserved for node in swarm.nodes.values()) == 0
            assert not any(node.server.sessions for node in swarm.nodes.values())
        async with resumed(swarm, file, dialogue) as session:
            assert len(session.recoveries) == 1, "all is replayed"
            await dialogue.step(3)
        await kv_is_free(swarm)


@simulated
async def test_the_lease_of_a_session_that_its_client_has_closed_runs_out_though_the_client_stays(file: Path) -> None:
    async with pairs_of_servers() as swarm, swarm.client(POLICY) as (router, _):
        async with router.open_session(MAX_LENGTH, Codec.RAW) as session:
            await Dialogue(session, random.Random(1)).step(20)
            await session.export(file)
        await trio.sleep(LEASE_S - 5)
        assert sum(node.worker.reserved for node in swarm.nodes.values()) == 3 * MAX_LENGTH
        await trio.sleep(6)
        assert not any(node.server.sessions or node.worker.reserved for node in swarm.nodes.values())


@simulated
async def test_a_session_that_was_not_exported_ends_with_its_link() -> None:
    async with pairs_of_servers() as swarm, opened(swarm) as (_, dialogue):
        await dialogue.step(20)
        swarm.internet.kill(ME)
        await trio.sleep(1)
        assert not any(node.server.sessions or node.worker.reserved for node in swarm.nodes.values())


@simulated
async def test_a_resumed_session_ends_with_its_link_unless_it_is_exported_again(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        dialogue, _ = await save(swarm, file)
        async with resumed(swarm, file, dialogue) as session:
            await dialogue.step(1)
            swarm.internet.kill(ME)
            await trio.sleep(1)
            assert not any(node.server.sessions for node in swarm.nodes.values()), session


@simulated
async def test_another_peer_cannot_take_a_session_over(file: Path) -> None:
    async with pairs_of_servers() as swarm, opened(swarm) as (session, dialogue):
        await dialogue.step(20)
        await session.export(file)
        saved = read(file)
        thief = swarm.internet.network("thief")
        for hop in saved.hops:
            assert hop.session is not None
            link = await thief.dial(swarm.node(hop.peer).network.addresses[0])
            async with open_connection(link) as connection:
                question = Frame(FrameType.RESUME, hop.session, step=dialogue.session._hops.state.step)
                with pytest.raises(PeerRefused) as refused:
                    await connection.ask(question, FrameType.RESUMED, 5)
                assert refused.value.code == RefusalCode.UNKNOWN_SESSION
        await dialogue.step(3)
        assert not session.recoveries


@simulated
async def test_the_process_that_exported_loses_the_hops_to_the_one_that_resumes_and_neither_errs(file: Path) -> None:
    async with pairs_of_servers() as swarm, opened(swarm) as (session, old):
        await old.step(20)
        await session.export(file)
        new = Dialogue(session, random.Random(2), policy=POLICY)
        new._said = old._said
        await old.step(4)  # beyond what was exported
        async with resumed(swarm, file, new) as taken, trio.open_nursery() as nursery:
            assert not taken.recoveries, "only appended to since"
            nursery.start_soon(old.step, 3)
            nursery.start_soon(new.step, 5)
        assert session.recoveries, "its hops were gone"


@simulated
async def test_a_session_that_went_back_since_it_was_exported_is_replayed(file: Path) -> None:
    async with pairs_of_servers() as swarm, opened(swarm) as (session, old):
        await old.step(20)
        await session.export(file)
        new = Dialogue(session, random.Random(2), policy=POLICY)
        new._said = old._said
        await old.go_back(10)
        await old.step(15)  # as far as before, and further, with other content
        async with resumed(swarm, file, new) as taken:
            assert [each.span for each in taken.recoveries] == [ALL_BLOCKS]
            await new.step(5)


@simulated
async def test_an_export_at_position_zero_is_resumed(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        async with opened(swarm) as (session, dialogue):
            await session.export(file)
        async with resumed(swarm, file, dialogue):
            await dialogue.step(20)


@simulated
async def test_what_waits_for_clients_may_hold_a_share_of_the_kv_alone(file: Path) -> None:
    policy = ServePolicy()  # a quarter of the KV is less than one session's
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=policy) as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        await trio.sleep(10)
        async with opened(swarm) as (session, dialogue):
            await dialogue.step(20)
            await session.export(file)
        await trio.sleep(1)
        assert not swarm.nodes["whole"].server.sessions
        async with resumed(swarm, file, dialogue):
            await dialogue.step(1)


@simulated
async def test_servers_that_grant_no_lease_are_replayed(file: Path) -> None:
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=ServePolicy(lease_s=0)) as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        await trio.sleep(10)
        async with opened(swarm) as (session, dialogue):
            await dialogue.step(20)
            assert await session.export(file) == 0
        await kv_is_free(swarm)
        began_s = trio.current_time()
        async with resumed(swarm, file, dialogue) as session:
            assert len(session.recoveries) == 1
            assert trio.current_time() - began_s < 1, "the same server takes its place at once"
            await dialogue.step(1)


@simulated
async def test_a_session_that_lost_its_servers_can_be_exported_and_resumed_when_there_are_others(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        async with opened(swarm) as (session, dialogue):
            await dialogue.step(20)
            for name in list(swarm.nodes):
                swarm.kill(name)
            with pytest.raises(NoRoute):
                await session.step(bytes(8))
            assert await session.export(file) == 0
        await swarm.start("whole", ALL_BLOCKS)
        await trio.sleep(10)
        async with resumed(swarm, file, dialogue):
            await dialogue.step(3)


@simulated
async def test_a_client_that_logs_all_itself_resumes_by_a_replay(file: Path) -> None:
    policy = replace(POLICY, recovery=RecoveryPolicy(upstream_logs=False))
    async with pairs_of_servers() as swarm:
        async with swarm.client(policy) as (router, _), router.open_session(MAX_LENGTH, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            assert await session.export(file) == 0
        async with swarm.client(policy) as (router, _), router.resume_session(read(file)) as session:
            dialogue.session = session
            await dialogue.step(3)
            swarm.kill(name_of(session.route[1].peer))
            await dialogue.step(3)
        await kv_is_free(swarm)


@simulated
async def test_a_resumed_session_is_spot_checked(file: Path) -> None:
    policy = replace(POLICY, spot_checks=SpotCheckPolicy(1.0))
    async with pairs_of_servers() as swarm:
        dialogue, _ = await save(swarm, file)
        async with swarm.client(policy) as (router, _), router.resume_session(read(file)) as session:
            dialogue.session = session
            assert session.spot_checks is not None
            for _ in range(5):
                await dialogue.step(3)
                await session.spot_checks.finish()
            assert session.spot_checks.passed == 5
        await kv_is_free(swarm)


@simulated
async def test_a_resumed_session_is_copied_at_its_servers(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        dialogue, _ = await save(swarm, file)
        async with (
            swarm.client(POLICY) as (router, _),
            router.resume_session(read(file)) as session,
            router.open_session(MAX_LENGTH, Codec.RAW, session) as copied,
        ):
            await session.fork([copied])
            assert copied.position == 20
            dialogue.session = copied
            await dialogue.step(3)
            assert not copied.recoveries
            await copied.rows.let_go()
            assert [len(each._hops.hops) for each in (session, copied) if each._state.lost is not None] == [3, 3], (
                "both"
            )
        await kv_is_free(swarm)


@simulated
async def test_a_file_names_peers_and_the_key(file: Path) -> None:
    async with pairs_of_servers() as swarm:
        _, servers = await save(swarm, file)
        saved: SavedSession = read(file)
        assert saved.key == swarm.internet.network("client").key
        addresses = [swarm.nodes[name].network.addresses[0] for name in servers]
        assert list(saved.contacts[:3]) == addresses
        assert [name_of(hop.peer) for hop in saved.hops] == servers


# The last that takes a new branch is 26.
@pytest.mark.parametrize("seed", seeds(30, long_run=40), ids=lambda seed: f"seed-{seed}-")
@simulated
async def test_processes_that_take_over_from_each_other_go_on_to_the_bit(seed: int, tmp_path: Path) -> None:
    """Each dies or leaves at a random moment, and before the next one comes servers die, come back, or forget."""
    rng = random.Random(seed)
    file = tmp_path / "session"
    async with pairs_of_servers(seed, Conditions(delay_s=DELAY_S, duplication=rng.choice([0, 0.2]))) as swarm:
        dialogue: Dialogue | None = None
        for _ in range(4):
            async with swarm.client(POLICY) as (router, _):
                if dialogue is None:
                    opening = router.open_session(MAX_LENGTH, Codec.RAW)
                else:
                    opening = router.resume_session(read(file))
                async with opening as session:
                    dialogue = dialogue or Dialogue(session, rng, policy=POLICY)
                    dialogue.session = session
                    for _ in range(rng.randrange(4)):
                        await dialogue.step(rng.choice([1, 2, 10]))
                        if rng.random() < 0.2:
                            await dialogue.go_back(rng.randrange(session.position))
                    if rng.random() < 0.2:
                        swarm.kill(name_of(rng.choice(session.route).peer))
                    await session.export(file)
                    said = dialogue._said
                    all_held = all(held(swarm, index) for index in range(len(SPANS)))
                    if rng.random() < 0.3 and all_held:  # what is not in the file
                        await dialogue.step(rng.choice([1, 5]))
                    if rng.random() < 0.2:
                        await dialogue.go_back(rng.randrange(session.position + 1))
                    if rng.random() < 0.3:
                        swarm.internet.kill(ME)
                    dialogue._said = said
            await trio.sleep(rng.choice([0, 0, 1, 20, LEASE_S + 1]))
            for index, span in enumerate(SPANS):
                twins = [f"{index}{twin}" for twin in "ab"]
                if rng.random() < 0.2 and all(name in swarm.nodes for name in twins):
                    swarm.kill(rng.choice(twins))
                for name in twins:
                    if name not in swarm.nodes and rng.random() < 0.8:
                        await swarm.start(name, span)
                if not held(swarm, index):
                    await swarm.start(twins[0], span)
        await trio.sleep(LEASE_S)
        await kv_is_free(swarm)
