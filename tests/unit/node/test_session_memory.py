"""The memory of sessions at a server: within the budget of their clients, whatever these do, and all given back."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from llmnode.core.account import Account
from llmnode.core.budget import Budget, Kind, Resource, Worth
from llmnode.core.ids import Epoch, PeerId, Step
from llmnode.core.operations import Close, Operation
from llmnode.core.policy import BudgetPolicy, LinkPolicy, ServePolicy
from llmnode.errors import PeerRefused, PeerUnreachable
from llmnode.net.host import open_network
from llmnode.node.serve.freed_memory import LEAST_S
from llmnode.node.serve.session_memory import OTHER_FRAMES_BYTES, SessionMemory
from llmnode.node.serve.work_turns import WorkTurns
from llmnode.testing import simulated
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Lease, RefusalCode, Replay, pack
from unit.in_trio import in_trio
from unit.links import POLICY, ROW, answer_to, open_frame, refusal_to, served, session_id, step_frame

MIB = 1 << 20
SMALL = BudgetPolicy(memory_bytes=8 * MIB)
PATIENCE_S = 0.2
IMPATIENT = ServePolicy(memory_patience_s=PATIENCE_S)
PATIENT = ServePolicy(memory_patience_s=1000.0, longest_work_wait_s=1000.0)


def session_memory(policy: BudgetPolicy = SMALL, address: str = "8.8.8.8") -> tuple[Budget, SessionMemory]:
    budget = Budget(policy)
    link = budget.connection(address, PeerId("somebody")).open(Kind.LINK, "a link")
    return budget, SessionMemory(link, 16 * MIB, IMPATIENT, WorkTurns())


@in_trio
async def test_frames_that_wait_take_no_more_than_the_share_of_a_peer() -> None:
    budget, memory = session_memory()
    for _ in range(2):
        await memory.queue(MIB)
    with pytest.raises(PeerRefused) as caught:
        await memory.queue(1)
    assert caught.value.code == RefusalCode.BUSY and caught.value.retry_after_s
    memory.settle(MIB, 0, 0)
    assert budget.process.held[Resource.MEMORY] == MIB
    memory.close()
    assert not any(budget.process.held.values())


@in_trio
async def test_a_frame_waits_for_memory_that_is_given_back() -> None:
    _, memory = session_memory()
    await memory.queue(2 * MIB)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(memory.queue, MIB)
        await trio.testing.wait_all_tasks_blocked()
        memory.settle(2 * MIB, 0, 0)


@simulated
async def test_a_frame_waits_for_what_is_given_back_and_not_by_a_timer() -> None:
    budget = Budget(SMALL)
    memory = SessionMemory(budget.connection("8.8.8.8", PeerId("somebody")), 16 * MIB, PATIENT, WorkTurns())
    other = budget.process.open(Kind.SESSION, "another")
    assert other.take(Resource.MEMORY, budget.process.limit(Resource.MEMORY) or 0)
    tries = 0
    resize = Account.resize

    def counted(self: Account, amount: int) -> bool:
        nonlocal tries
        tries += 1
        return resize(self, amount)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Account, "resize", counted)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(memory.queue, MIB)
            await trio.sleep(100)
            assert tries == 1
            other.release(Resource.MEMORY, MIB)
            await trio.sleep(LEAST_S)
            assert tries == 2
            assert memory._waiting.amount == MIB
    assert not budget.process._watchers


@in_trio
async def test_a_session_queues_no_more_than_its_own_positions_take_several_times() -> None:
    budget = Budget(BudgetPolicy())
    memory = SessionMemory(budget.connection("8.8.8.8"), 1000, IMPATIENT, WorkTurns())
    await memory.queue(4 * 1000 + OTHER_FRAMES_BYTES)
    with pytest.raises(PeerRefused) as caught:
        await memory.queue(1)
    assert caught.value.code == RefusalCode.TOO_FAR_AHEAD


@in_trio
async def test_a_step_that_could_never_be_computed_is_refused_at_once() -> None:
    _, memory = session_memory()
    await memory.begin_work(2 * MIB)
    memory.end_work()
    began_s = trio.current_time()
    with pytest.raises(PeerRefused) as caught:
        await memory.begin_work(2 * MIB + 1)
    assert caught.value.code == RefusalCode.NO_ROOM
    assert trio.current_time() - began_s < PATIENCE_S / 2


@in_trio
async def test_frames_that_wait_take_no_memory_from_steps_that_are_computed() -> None:
    _, memory = session_memory()
    await memory.queue(2 * MIB)
    await memory.begin_work(2 * MIB)


@simulated
async def test_steps_that_wait_to_be_computed_take_turns_among_groups_and_their_peers() -> None:
    """One peer has many sessions and large steps. Each step is computed for a second, and they go on for ever."""
    budget, turns, done = Budget(SMALL), WorkTurns(), Counter[str]()

    async def compute(address: str, peer: str, size_bytes: int) -> None:
        link = budget.connection(address, PeerId(peer)).open(Kind.LINK, "a link")
        memory = SessionMemory(link, 16 * MIB, PATIENT, turns)
        while True:
            await memory.begin_work(size_bytes)
            await trio.sleep(1)
            done[peer] += size_bytes
            memory.end_work()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(compute, "8.8.8.8", "greedy", MIB)
        for _ in range(20):
            nursery.start_soon(compute, "8.8.8.8", "beside it", MIB // 4)
        for _ in range(4):
            nursery.start_soon(compute, "9.9.9.9", "elsewhere", MIB // 2)
        await trio.sleep(1000)
        nursery.cancel_scope.cancel()
    assert sum(done.values()) > 0.9 * 1000 * 2 * MIB, "there is always a step that is computed"
    assert done["greedy"] == pytest.approx(done["beside it"], rel=0.05)
    assert done["elsewhere"] == pytest.approx(done["greedy"] + done["beside it"], rel=0.05)


@simulated
async def test_a_step_that_gives_up_its_turn_leaves_it_to_the_next() -> None:
    budget, turns = Budget(SMALL), WorkTurns()
    holder, large, small = (
        SessionMemory(budget.connection("8.8.8.8", PeerId(peer)), 16 * MIB, ServePolicy(memory_patience_s=3.0), turns)
        for peer in ("holder", "large", "small")
    )
    await holder.begin_work(MIB)
    async with trio.open_nursery() as nursery:

        async def wait_in_vain() -> None:
            with pytest.raises(PeerRefused, match="no memory is left"):
                await large.begin_work(2 * MIB)

        nursery.start_soon(wait_in_vain)
        await trio.sleep(1)
        began_s = trio.current_time()
        await small.begin_work(MIB)
        assert trio.current_time() - began_s == pytest.approx(2.0), "nobody passes the one whose turn it is"


@simulated
async def test_a_step_waits_for_its_turn_while_others_end_but_not_for_ever() -> None:
    """Each takes a second, and one more comes every second: a queue that is longer than the patience."""
    policy, turns, budget = ServePolicy(memory_patience_s=5.0, longest_work_wait_s=20.0), WorkTurns(), Budget(SMALL)
    waits_s: list[float] = []
    refused_s: list[float] = []

    async def compute() -> None:
        began_s = trio.current_time()
        memory = SessionMemory(budget.connection("8.8.8.8", PeerId("somebody")), 16 * MIB, policy, turns)
        try:
            await memory.begin_work(2 * MIB)
        except PeerRefused:
            refused_s.append(trio.current_time() - began_s)
            return
        waits_s.append(trio.current_time() - began_s)
        await trio.sleep(1)
        memory.end_work()

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(compute)
    assert sorted(waits_s)[:20] == pytest.approx(range(20))
    assert len(waits_s) <= 21 and refused_s == pytest.approx([20.0] * len(refused_s))


@in_trio
async def test_a_session_that_outlives_its_link_keeps_its_memory_within_the_share_of_its_client() -> None:
    budget, memory = session_memory()
    link = next(budget.process.within(Kind.LINK))
    budget.process.set_limit(Resource.LOGS, MIB)
    await memory.queue(MIB)
    memory.log(1000)
    for scope in list(link.around)[:2]:
        scope.close()  # the connection too
    assert not any(budget.process.held.values())
    memory.move(budget.of_peer(link))
    assert budget.process.held == {Resource.MEMORY: MIB, Resource.WORK: 0, Resource.LOGS: 1000}
    assert [each.name for each in budget.process.within(Kind.PEER)] == ["somebody"]
    again = budget.connection("8.8.8.8", PeerId("somebody"))
    memory.move(again)
    again.worth = Worth.LINK
    assert again.use is Worth.USED and again.held[Resource.MEMORY] == MIB
    again.close()
    memory.close()
    assert not any(budget.process.held.values())
    assert not list(budget.process.within(Kind.GROUP))


@in_trio
async def test_a_session_that_does_not_fit_where_it_moves_holds_nothing() -> None:
    budget, memory = session_memory()
    await memory.queue(2 * MIB)
    full = budget.connection("9.9.9.9", PeerId("another"))
    assert full.take(Resource.MEMORY, 2 * MIB)
    with pytest.raises(PeerRefused):
        memory.move(full)
    assert budget.process.held[Resource.MEMORY] == 2 * MIB


@in_trio
async def test_a_session_that_has_ended_moves_nowhere() -> None:
    budget, memory = session_memory()
    await memory.queue(MIB)
    memory.close()
    with pytest.raises(PeerRefused) as caught:
        memory.move(budget.connection("9.9.9.9"))
    assert caught.value.code == RefusalCode.UNKNOWN_SESSION
    assert not any(budget.process.held.values())


# At a server


@in_trio
async def test_a_session_counts_though_nothing_of_it_waits_and_none_is_opened_beyond_the_budget(
    exact_worker: Any,
) -> None:
    """A client may open thousands, of one position each."""
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        link = await network.dial(swarm.address)
        process = swarm.network.budget.process
        await answer_to(link, open_frame(session_id()))
        await until(lambda: sum(each.held[Resource.MEMORY] for each in process.within(Kind.SESSION)) > 0)
        (session,) = process.within(Kind.SESSION)
        assert session.held[Resource.MEMORY] == ServePolicy().session_bytes
        await until(lambda: process.held[Resource.STREAMS] == 1)  # that of the link: nothing else is given back later
        process.set_limit(Resource.MEMORY, process.held[Resource.MEMORY] + ServePolicy().session_bytes // 2)
        assert (await refusal_to(link, open_frame(session_id()))).code == RefusalCode.BUSY
        assert [*process.within(Kind.SESSION)] == [session]


@in_trio
async def test_steps_that_wait_are_in_the_budget_until_they_are_computed(exact_worker: Any) -> None:
    exact_worker.gate = trio.Event()
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        held = swarm.network.budget.process.held
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session, keep_outputs=True))
        steps = [step_frame(session, number, number) for number in range(6)]

        def held_by_sessions() -> int:
            """Besides the session itself."""
            sessions = swarm.network.budget.process.within(Kind.SESSION)
            return sum(each.held[Resource.MEMORY] for each in sessions) - ServePolicy().session_bytes

        for each in steps:
            await link.send(each)
        await until(lambda: held_by_sessions() == sum(each.size_bytes for each in steps))
        await until(lambda: held[Resource.WORK] == ROW)
        exact_worker.gate.set()
        for _ in steps:
            await link.receive()
        await until(lambda: not held_by_sessions())
        assert (held[Resource.WORK], held[Resource.LOGS]) == (0, 6 * ROW)
        await answer_to(link, Frame(FrameType.TRUNCATE, session, Epoch(1), Step(6), start=2))
        await until(lambda: held[Resource.LOGS] == 2 * ROW)
        await link.end("done")
        await swarm.check_serves_and_is_empty()
        await until(lambda: not held[Resource.LOGS])


@in_trio
async def test_results_that_there_is_no_memory_to_log_are_refused_and_the_session_lives(exact_worker: Any) -> None:
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process
        assert process.limit(Resource.LOGS) == exact_worker.kv_tokens * ROW, "a result for each position of KV"
        process.set_limit(Resource.LOGS, 2 * ROW)
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session, keep_outputs=True))
        await answer_to(link, step_frame(session, 0, 0, length=2))
        assert (await refusal_to(link, step_frame(session, 1, 2))).code == RefusalCode.BUSY
        process.set_limit(Resource.LOGS, 3 * ROW)
        assert (await answer_to(link, step_frame(session, 1, 2))).type is FrameType.RESULT
        await link.end("done")
        await swarm.check_serves_and_is_empty()


@in_trio
async def test_a_leased_session_is_in_the_budget_without_its_link_and_with_the_next_one(exact_worker: Any) -> None:
    generous = ServePolicy(leased_share=1.0)
    async with served(exact_worker, serve=generous) as swarm, open_network([], POLICY) as network:
        held = swarm.network.budget.process.held
        link = await network.dial(swarm.address)
        session = session_id()
        await answer_to(link, open_frame(session, keep_outputs=True))
        await answer_to(link, step_frame(session, 0, 0, length=3))
        await answer_to(link, Frame(FrameType.LEASE, session, meta=pack(Lease(lease_ms=30_000, leaves=False))))
        await link.end("for now")
        await until(lambda: not held[Resource.LINKS] and held[Resource.LOGS] == 3 * ROW)  # its results move then
        again = await network.dial(swarm.address)
        assert (await answer_to(again, Frame(FrameType.RESUME, session))).type is FrameType.RESUMED
        assert held[Resource.LOGS] == 3 * ROW
        await again.send(Frame(FrameType.CLOSE, session))
        await swarm.check_serves_and_is_empty()
        await until(lambda: not held[Resource.LOGS])


@in_trio
async def test_a_session_that_is_resumed_while_its_kv_is_freed_leaves_nothing_behind(
    exact_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeing, free = trio.Event(), trio.Event()
    do = exact_worker.do

    async def slow_to_close(operation: Operation[Any]) -> Any:
        if isinstance(operation, Close):
            freeing.set()
            await free.wait()
        return await do(operation)

    monkeypatch.setattr(exact_worker, "do", slow_to_close)
    async with served(exact_worker) as swarm, open_network([], POLICY) as network:
        held, session = swarm.network.budget.process.held, session_id()
        first, again = await network.dial(swarm.address), await network.dial(swarm.address)
        await answer_to(first, open_frame(session, keep_outputs=True))
        await answer_to(first, step_frame(session, 0, 0))
        assert held[Resource.LOGS] == ROW
        await first.send(Frame(FrameType.CLOSE, session))
        await freeing.wait()
        refusal = await refusal_to(again, Frame(FrameType.RESUME, session))
        assert refusal.code == RefusalCode.UNKNOWN_SESSION
        free.set()
        await swarm.check_serves_and_is_empty()
        assert not held[Resource.LOGS]


@in_trio
async def test_results_that_are_asked_for_again_and_not_read_stay_within_the_share_of_a_peer(exact_worker: Any) -> None:
    """Many sessions of one link, each with an answer that waits."""
    small = LinkPolicy(budget=replace(SMALL, memory_bytes=2 * MIB, stream_bytes=0, connection_bytes=0))
    share = small.budget.memory_bytes // 4
    async with served(exact_worker, link=small) as swarm, open_network([], POLICY) as network:
        process = swarm.network.budget.process
        link = await network.dial(swarm.address)
        sessions = [session_id() for _ in range(4)]
        for each in sessions:
            await answer_to(link, open_frame(each, keep_outputs=True))
            await answer_to(link, step_frame(each, 0, 0, length=16))
        (near,) = swarm.network._links

        reads_again = trio.Event()

        async def stall(_data: bytes) -> None:
            await reads_again.wait()

        near._stream.write = stall  # type: ignore[method-assign]
        near._stream.write_at_once = lambda _data: 0  # type: ignore[method-assign]
        most = 0
        with suppress(trio.TooSlowError, PeerUnreachable), trio.fail_after(2):
            for number in range(20_000):
                replay = Frame(
                    FrameType.REPLAY, sessions[number % 4], Epoch(0), Step(number), 0, 16, pack(Replay(push=False))
                )
                await link.send(replay)
                if number % 8 == 0:
                    await trio.lowlevel.checkpoint()
                    most = max(most, *(each.held[Resource.MEMORY] for each in process.within(Kind.PEER)))
        assert 0 < most <= share
        reads_again.set()


async def until(is_so: Any) -> None:
    with trio.fail_after(5):
        while not is_so():  # noqa: ASYNC110  the server has no event for it
            await trio.sleep(0.01)
