"""Sessions that want more KV than there is: each waits, at the server and then at its client, and is served."""

from __future__ import annotations

import math
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Open
from llmnode.core.policy import AdmissionPolicy, ClientPolicy, ServePolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.kv_shares import KvClaim
from llmnode.core.span import Span
from llmnode.errors import NoRoute, PeerError, PeerRefused
from llmnode.node.serve.admission import Admission
from llmnode.node.serve.server import Server
from llmnode.session.session import open_session
from llmnode.testing import (
    Conditions,
    Dialogue,
    ExactWorker,
    check_kv_is_free,
    open_world,
    peer_named,
    simulate,
    simulated,
)
from llmnode.testing.hostile.clients import open_frame
from llmnode.testing.simulate import seeds
from llmnode.testing.world import GENEROUS
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Lease, RefusalCode, pack
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from simulation.scarce import FIFTH, IMPATIENT, PATIENT, fill, world
from simulation.world import ALL_BLOCKS, DELAY_S, KV_TOKENS, ROW

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.testing.world import SimulatedClient

HALVES = [Span(0, 3), Span(3, 6)]
WAIT_S = AdmissionPolicy().wait_s


@simulated
async def test_a_session_beside_another_may_be_told_to_wait_at_the_server_alone() -> None:
    async with world() as swarm:
        await swarm.start("0", ALL_BLOCKS)
        async with swarm.client(PATIENT) as client, AsyncExitStack() as stack:
            first, *_ = await fill(stack, client)
            with trio.fail_after(WAIT_S + 1), pytest.raises(PeerRefused, match="not free"):
                async with client.router.open_session(FIFTH, Codec.RAW, beside=first, policy=IMPATIENT):
                    pass


@pytest.mark.parametrize("seed", seeds(16, long_run=20))  # the last that takes a new branch is 14
def test_thirty_sessions_for_the_kv_of_five_are_all_served(seed: int) -> None:
    simulate(partial(crowd, seed), seed=seed)


async def crowd(seed: int) -> None:
    """Six clients use two servers: a session may have KV at one and wait at the other."""
    rng = random.Random(seed)
    served: list[int] = []
    async with world(seed) as swarm:
        for number, span in enumerate(HALVES):
            await swarm.start(f"{number}", span)

        async def use(client: SimulatedClient, number: int) -> None:
            await trio.sleep(rng.uniform(0, 1))
            async with client.router.open_session(FIFTH, Codec.RAW) as session:
                dialogue = Dialogue(session, random.Random(number))
                for _ in range(rng.randint(2, 10)):
                    await dialogue.step(rng.randint(1, 5))
                    await trio.sleep(rng.uniform(0, 2))
                served.append(number)

        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(swarm.client(PATIENT, name=f"c{each}")) for each in range(6)]
            with trio.fail_after(600):
                async with trio.open_nursery() as nursery:
                    for number in range(30):
                        nursery.start_soon(use, clients[number % 6], number)
            assert sorted(served) == list(range(30))
            await check_kv_is_free(swarm)


@simulated
async def test_a_session_that_does_not_fit_is_opened_as_soon_as_another_ends() -> None:
    async with world() as swarm:
        await swarm.start("0", ALL_BLOCKS)
        async with swarm.client() as client, AsyncExitStack() as stack:
            first, *_ = await fill(stack, client)
            async with swarm.client(IMPATIENT, name="other") as other, trio.open_nursery() as nursery:
                opened = trio.Event()

                async def wait_for_kv() -> None:
                    async with other.router.open_session(FIFTH, Codec.RAW) as session:
                        opened.set()
                        await Dialogue(session, random.Random(1)).step(3)

                nursery.start_soon(wait_for_kv)
                await trio.sleep(WAIT_S / 2)
                assert not opened.is_set()
                await first.close()
                with trio.fail_after(5 * DELAY_S):
                    await opened.wait()
        await check_kv_is_free(swarm)


@simulated
async def test_who_has_waited_in_vain_is_told_when_to_come_again_and_comes_no_sooner() -> None:
    """No ban either: with free KV it is served by the same peer. Here nobody has to go for others."""
    kept = replace(GENEROUS, admission=AdmissionPolicy(idle_s=math.inf, unused_s=math.inf, keeps_s=math.inf))
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=kept) as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        asked_s: list[float] = []
        enter = node.server.served.admission.enter

        async def noted_enter(*arguments: object) -> None:
            asked_s.append(trio.current_time())
            await enter(*arguments)  # type: ignore[arg-type]  # whatever it takes

        async with swarm.client() as client, AsyncExitStack() as stack:
            held = await fill(stack, client)
            await trio.sleep(100)
            node.server.served.admission.enter = noted_enter  # type: ignore[method-assign]  # to see it
            async with swarm.client(IMPATIENT, name="hasty") as hasty:
                with pytest.raises(PeerRefused, match="80 positions asked for, 0 free: not free within 4 s") as caught:
                    async with hasty.router.open_session(FIFTH, Codec.RAW):
                        pass
                assert caught.value.code == RefusalCode.NO_ROOM
                assert caught.value.retry_after_s == 60, "five that have been here for 100 s: 100 s, which is too rough"
            asked_s.clear()
            async with swarm.client(PATIENT, name="patient") as patient, trio.open_nursery() as nursery:

                async def use() -> None:
                    async with patient.router.open_session(FIFTH, Codec.RAW) as session:
                        assert session.route[0].peer == node.peer

                nursery.start_soon(use)
                await trio.sleep(50)
                assert len(asked_s) == 1
                for session in held:
                    await session.close()
            assert len(asked_s) == 2
            assert WAIT_S + 60 <= asked_s[1] - asked_s[0] <= WAIT_S + 1.5 * 60 + 1
        await check_kv_is_free(swarm)


@simulated
async def test_a_session_longer_than_all_kv_is_refused_before_it_is_asked_for() -> None:
    async with world() as swarm:
        swarm.model = replace(swarm.model, context_tokens=2 * KV_TOKENS)
        await swarm.start("0", HALVES[0])
        node = await swarm.start("1", HALVES[1])
        async with swarm.client(PATIENT) as (router, _):
            began_s = trio.current_time()
            with pytest.raises(NoRoute, match=r"\[0, 6\); 401 positions.*400 at most: ask for fewer") as caught:
                async with router.open_session(KV_TOKENS + 1, Codec.RAW):
                    pass
            assert caught.value.missing == (ALL_BLOCKS,)
            assert trio.current_time() == began_s
        assert not node.worker.priorities


@simulated
async def test_a_server_refuses_at_once_what_it_will_never_have_kv_for() -> None:
    """A client that has not read its announcement may ask."""
    async with world() as swarm:
        swarm.model = replace(swarm.model, context_tokens=2 * KV_TOKENS)
        node = await swarm.start("0", ALL_BLOCKS)
        async with swarm.client(PATIENT) as client, AsyncExitStack() as stack:
            first, *_ = await fill(stack, client, 1)
            route, connections, model = first.route, first.connections, swarm.model
            with trio.fail_after(1), pytest.raises(PeerRefused, match=r"401 positions.*400 in all") as caught:
                async with open_session(route, connections, SessionTerms(model, KV_TOKENS + 1, Codec.RAW, PATIENT)):
                    pass
            assert caught.value.code == RefusalCode.NO_ROOM
            assert caught.value.retry_after_s is None
            assert len(node.worker.priorities) == 1


@simulated
async def test_a_client_that_gives_up_waiting_is_not_waited_for() -> None:
    async with world() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        async with swarm.client() as client, AsyncExitStack() as stack:
            await fill(stack, client)
            async with swarm.client(name="other") as other:
                with trio.move_on_after(1) as scope:
                    async with other.router.open_session(KV_TOKENS // 2, Codec.RAW):
                        pass
                assert scope.cancelled_caught
                await trio.sleep(3 * DELAY_S)
                assert len(node.server.sessions) == 5
        await check_kv_is_free(swarm)


@simulated
async def test_those_that_wait_at_a_server_that_drains_are_told_at_once() -> None:
    async with world() as swarm:
        await swarm.start("0", ALL_BLOCKS)
        async with swarm.client() as client, swarm.client(name="other") as other, AsyncExitStack() as stack:
            await fill(stack, client)

            async def wait_for_kv() -> None:
                with trio.fail_after(2), pytest.raises(PeerRefused, match="draining"):
                    async with other.router.open_session(FIFTH, Codec.RAW):
                        pass
                await stack.aclose()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_kv)
                await trio.sleep(1)
                await swarm.drain("0", 100)


def claim_of(peer: str, positions: int) -> KvClaim:
    return KvClaim(PeerId(peer), "group", Priority.INTERACTIVE, positions)


def let_it_be(_refusal: PeerRefused) -> None:
    """For a session that does not go."""


@pytest.mark.parametrize("why", ["it drains", "too long", "cancelled"])
@simulated
async def test_who_has_stopped_waiting_is_let_in_no_more_though_it_has_not_left_yet(why: str) -> None:
    worker = ExactWorker(ALL_BLOCKS, ROW, KV_TOKENS)
    admission, whole, other = Admission(worker, AdmissionPolicy()), SessionId(b"w" * 16), SessionId(b"o" * 16)
    claim = replace(claim_of("client", KV_TOKENS), at_once=KV_TOKENS)
    await admission.enter(Open(whole, ALL_BLOCKS, KV_TOKENS), claim, let_it_be)

    async def wait_in_vain() -> None:
        with suppress(PeerRefused):
            await admission.enter(Open(other, ALL_BLOCKS, FIFTH), claim_of("other", FIFTH), let_it_be)
            raise AssertionError("it came in")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait_in_vain)
        await trio.sleep(2 * WAIT_S if why == "too long" else 1)
        if why == "cancelled":
            nursery.cancel_scope.cancel()
        if why == "it drains":
            admission.close("it drains")
    await admission.leave(whole)
    await admission.leave(other)
    assert worker.kv_tokens_free == KV_TOKENS


class Steps(trio.abc.Instrument):
    """Counts the steps of all tasks."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@simulated
async def test_of_many_sessions_that_wait_one_looks_for_all() -> None:
    """Strangers may have a hundred wait. Each looked for itself, five times a second."""
    worker, steps = ExactWorker(ALL_BLOCKS, ROW, KV_TOKENS), Steps()
    admission = Admission(worker, AdmissionPolicy())
    whole = SessionId(b"w" * 16)
    await admission.enter(Open(whole, ALL_BLOCKS, KV_TOKENS), replace(claim_of("0", 1), at_once=KV_TOKENS), let_it_be)
    admission.use(whole)

    async def wait(number: int) -> None:
        opening = Open(SessionId(number.to_bytes(16, "big")), ALL_BLOCKS, KV_TOKENS)
        await admission.enter(opening, claim_of(str(number), KV_TOKENS), let_it_be)

    async with trio.open_nursery() as nursery:
        for number in range(1, 61):
            nursery.start_soon(wait, number)
        await trio.sleep(WAIT_S / 4)
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(WAIT_S / 2)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.count <= 2 * WAIT_S / AdmissionPolicy().look_every_s


@pytest.mark.parametrize("why", ["cancelled", "it is let in"])
@simulated
async def test_another_session_looks_when_the_one_that_looked_waits_no_longer(why: str) -> None:
    worker = ExactWorker(ALL_BLOCKS, ROW, KV_TOKENS)
    admission, entered_s = Admission(worker, AdmissionPolicy()), dict[int, float]()
    scopes: dict[int, trio.CancelScope] = {}

    async with trio.open_nursery() as nursery:

        async def come(number: int, positions: int) -> None:
            """Hold KV that is not used, until others need it."""
            session, goes = SessionId(number.to_bytes(16, "big")), trio.Event()
            claim = replace(claim_of(str(number), positions), group=str(number), at_once=positions)
            try:
                with trio.CancelScope() as scopes[number]:
                    await admission.enter(Open(session, ALL_BLOCKS, positions), claim, lambda _why: goes.set())
                    entered_s[number] = trio.current_time()
                    await goes.wait()
            finally:
                with trio.CancelScope(shield=True):
                    await admission.leave(session)

        began_s = trio.current_time()
        for number, positions in enumerate([3 * FIFTH, 2 * FIFTH, 2 * FIFTH, 3 * FIFTH]):
            nursery.start_soon(come, number, positions)
            await trio.sleep(0.05)
        await trio.sleep(1)
        scopes[2 if why == "cancelled" else 1].cancel()
        await trio.sleep(AdmissionPolicy().unused_s + 1)
        assert (2 in entered_s) is (why == "it is let in")
        assert entered_s[3] < began_s + AdmissionPolicy().unused_s + 1
        nursery.cancel_scope.cancel()
    assert worker.kv_tokens_free == KV_TOKENS


@simulated
async def test_another_session_looks_though_the_next_to_look_has_ended_with_the_one_that_looked() -> None:
    """A link ends over which several sessions wait."""
    worker = ExactWorker(ALL_BLOCKS, ROW, KV_TOKENS)
    admission, holder = Admission(worker, AdmissionPolicy()), SessionId(bytes(16))
    claim, goes = replace(claim_of("holder", KV_TOKENS), at_once=KV_TOKENS), trio.Event()
    await admission.enter(Open(holder, ALL_BLOCKS, KV_TOKENS), claim, lambda _why: goes.set())

    async def come(number: int, group: str) -> None:
        opening = Open(SessionId(number.to_bytes(16, "big")), ALL_BLOCKS, FIFTH)
        await admission.enter(opening, replace(claim_of(str(number), FIFTH), group=group), let_it_be)

    async def go() -> None:
        await goes.wait()
        await admission.leave(holder)

    async with trio.open_nursery() as nursery, trio.open_nursery() as of_link:
        nursery.start_soon(go)
        for number in (1, 2, 3):
            of_link.start_soon(come, number, "of one link")
            await trio.sleep(0.01)
        nursery.start_soon(come, 4, "another")
        await trio.sleep(0.5)
        of_link.cancel_scope.cancel()


@pytest.mark.parametrize("seed", seeds(20))
def test_sessions_that_come_wait_give_up_and_end_while_a_server_drains_leave_nothing(seed: int) -> None:
    simulate(partial(hurry, seed), seed=seed)


async def hurry(seed: int) -> None:
    rng = random.Random(seed)
    async with world(seed) as swarm:
        node = await swarm.start("0", ALL_BLOCKS)

        async def use(client: SimulatedClient) -> None:
            await trio.sleep(rng.uniform(0, 3))
            with suppress(PeerError, NoRoute), trio.move_on_after(rng.choice([0.1, 2, WAIT_S, 100])):
                async with client.router.open_session(rng.choice([1, 2, 3]) * FIFTH, Codec.RAW) as session:
                    await Dialogue(session, random.Random(seed)).step(3)
                    await trio.sleep(rng.uniform(0, 2))

        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(swarm.client(IMPATIENT, name=f"c{each}")) for each in range(6)]
            async with trio.open_nursery() as nursery:
                for number in range(30):
                    nursery.start_soon(use, clients[number % 6])
                await trio.sleep(rng.uniform(1, 4))
                await node.role.drain(100)
            await check_kv_is_free(swarm)


@simulated
async def test_a_peer_that_has_no_kv_free_is_not_the_first_choice() -> None:
    """Its announcement decides that, and after a refusal the time that the peer named."""
    async with world() as swarm:
        await swarm.start("a", ALL_BLOCKS)
        async with swarm.client() as client, AsyncExitStack() as stack:
            await fill(stack, client)
            for number, span in enumerate(HALVES):
                await swarm.start(f"{number}", span)
            await trio.sleep(20)  # it has announced that it is full
            for number in range(5):
                async with swarm.client(name=f"c{number}") as (router, _):
                    with trio.fail_after(1):
                        async with router.open_session(FIFTH, Codec.RAW) as session:
                            assert len(session.route) == 2


@simulated
async def test_a_server_that_has_refused_for_full_kv_is_asked_last_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "with_load", lambda _server, described, *_, **__: described)  # it does not say before
    async with world() as swarm:
        full, other = await swarm.start("full", ALL_BLOCKS), await swarm.start("other", ALL_BLOCKS)
        async with swarm.client(replace(PATIENT, route=replace(PATIENT.route, near=0.0))) as (router, _):
            full.worker.executor.occupy(KV_TOKENS)  # which it has not announced
            asked_s: list[float] = []
            for _ in range(40):
                before = full.worker.executor.refused
                async with router.open_session(FIFTH, Codec.RAW) as session:
                    assert session.route[0].peer == other.peer
                asked_s += [trio.current_time()] * (full.worker.executor.refused - before)
            assert asked_s, "it is one of two, and so was asked before long"
            assert all(later - sooner > AdmissionPolicy().least_retry_s for sooner, later in pairwise(asked_s))


@simulated
async def test_what_somebody_waits_for_is_computed_before_what_came_earlier_and_nobody_waits_for() -> None:
    policy = ClientPolicy(chunk_tokens=20)
    async with world() as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        answered: list[Priority] = []

        async def use(number: int, priority: Priority) -> None:
            async with swarm.client(name=f"client {number}") as (router, _):
                its_own = replace(policy, priority=priority)
                async with router.open_session(KV_TOKENS // 10, Codec.RAW, policy=its_own) as session:
                    await Dialogue(session, random.Random(1)).step(20)
                    answered.append(priority)

        node.worker.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            for number, priority in enumerate([Priority.BATCH] * 7 + [Priority.TRAINING, Priority.INTERACTIVE]):
                nursery.start_soon(use, number, priority)
                await node.worker.executor.forward_began.wait()
                await trio.sleep(5 * DELAY_S)
            node.worker.gate.set()
            node.worker.gate = None
        assert Priority.INTERACTIVE in answered[:4], "a forward was under way, and the next has three such pieces"
        assert Priority.TRAINING in answered[-4:]


@simulated
async def test_clients_share_what_may_be_leased(tmp_path: Path) -> None:
    policy = ServePolicy(leased_share=2 * FIFTH / KV_TOKENS)
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=policy) as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        for client in ("greedy", "other", "late"):
            async with swarm.client(name=client) as (router, _), AsyncExitStack() as stack:
                for number in range(2):
                    session = await stack.enter_async_context(router.open_session(FIFTH, Codec.RAW))
                    await session.export(tmp_path / f"{client} {number}")
            await trio.sleep(1)
            assert len(node.server.sessions) == 2
        assert sorted(each.client for each in node.server.sessions.values()) == sorted(
            [peer_named("greedy"), peer_named("other")]
        )


@simulated
async def test_many_identities_of_one_address_group_leave_leases_to_others(tmp_path: Path) -> None:
    policy = ServePolicy(leased_share=4 * FIFTH / KV_TOKENS)
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=policy) as swarm:
        node = await swarm.start("0", ALL_BLOCKS)
        for number in range(4):
            sybil = swarm.internet.network(f"sybil {number}", "10.6.6.6")
            link = await sybil.dial(node.network.addresses[0])
            name = SessionId(bytes([1 + number]) * 16)
            await link.send(open_frame(swarm, node, name, FIFTH))
            await link.send(Frame(FrameType.LEASE, name, meta=pack(Lease(lease_ms=60_000, leaves=True))))
        await trio.sleep(1)
        assert len(node.server.sessions) == 4
        async with swarm.client(name="honest") as (router, _), router.open_session(FIFTH, Codec.RAW) as session:
            await session.export(tmp_path / "honest")
        await trio.sleep(1)
        assert peer_named("honest") in {each.client for each in node.server.sessions.values()}
        assert len(node.server.sessions) == 4
