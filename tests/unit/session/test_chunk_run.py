"""A chunk through hops: whose time is whose."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from llmnode.core.ids import Epoch, Step
from llmnode.core.peers.company import Company
from llmnode.core.policy import ClientPolicy, StandingPolicy
from llmnode.errors import PeerTimeout
from llmnode.session import chunk_run
from llmnode.wire.chunk import Chunk
from llmnode.wire.chunk_path import Receive, Send
from llmnode.wire.frame import Frame, FrameType

if TYPE_CHECKING:
    from collections.abc import Iterator

SLOW_S, OWN_S, LIMIT_S = 59.0, 5.0, 10.0
TRIED_S = 3.0
"""It takes this long to find out whether others compute."""


class SlowHop:
    """Answers after some time."""

    def __init__(self, name: str, answers_in_s: float) -> None:
        self.session, self.answers_in_s = name, answers_in_s
        self.one_by_one = trio.Lock()
        self.connection = SimpleNamespace(company=Company(), tell=self._tell)
        self.is_blamed = self.others_compute = False

    async def _tell(self, _frame: Frame) -> None:
        pass

    def blame(self, error: PeerTimeout) -> PeerTimeout:
        self.is_blamed = True
        return error

    @contextmanager
    def expect(self, _chunk: Any) -> Iterator[SlowHop]:
        yield self

    async def receive(self, answer: FrameType, timeout_s: float) -> Frame:
        with trio.move_on_after(timeout_s):
            await trio.sleep(self.answers_in_s)
            return Frame(answer)
        raise PeerTimeout(f"no answer in {timeout_s:g} s").after(timeout_s)

    async def is_replaceable(self, _since_s: float) -> bool:
        await trio.sleep(TRIED_S)
        return self.others_compute


def chunk(positions: int) -> Chunk:
    return Chunk(Epoch(0), Step(0), 0, positions)


@pytest.mark.parametrize(("own_s", "is_in_time"), [(OWN_S, True), (LIMIT_S + 1, False)])
def test_the_waits_for_the_hop_before_do_not_count_against_a_new_one(
    own_s: float, is_in_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin, hop = SlowHop("before", SLOW_S), SlowHop("new", own_s)

    def path(*_arguments: Any) -> Iterator[Any]:
        for asked in (origin, origin):
            yield Receive(asked, FrameType.REPLAYED, 60.0)
        outcome = yield Receive(hop, FrameType.RESULT, 60.0)
        return outcome

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        outcome = await run(
            [hop], chunk(1), origin, ClientPolicy(), limit=chunk_run.Limit(trio.current_time() + LIMIT_S)
        )
        assert (outcome.error is None) is is_in_time

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))


def test_steps_at_one_peer_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chunk counts as the positions that a server computes of it beside decodes."""
    quick, slow = SlowHop("quick", OWN_S), SlowHop("slow", 4 * OWN_S)
    slow.connection = quick.connection
    beside: dict[str, float] = {}

    def path(hops: list[SlowHop], *_arguments: Any) -> Iterator[Any]:
        outcome = yield Receive(hops[0], FrameType.RESULT, 60.0)
        beside[hops[0].session] = outcome.beside

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, [quick], chunk(1), b"", ClientPolicy())
            nursery.start_soon(run, [slow], chunk(500), b"", ClientPolicy())

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))
    assert beside == pytest.approx({"quick": StandingPolicy().short_step, "slow": 1 / 4})


def test_a_step_that_was_not_answered_is_beside_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    silent, next_one = SlowHop("silent", SLOW_S), SlowHop("next", OWN_S)
    next_one.connection = silent.connection
    outcomes = []

    def path(hops: list[SlowHop], *_arguments: Any) -> Iterator[Any]:
        outcomes.append((yield Receive(hops[0], FrameType.RESULT, LIMIT_S)))

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        for hop in (silent, next_one):
            await run([hop], chunk(1), b"", ClientPolicy())

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))
    assert isinstance(outcomes[0].error, PeerTimeout)
    assert (outcomes[1].error, outcomes[1].beside) == (None, 0.0)


def test_of_several_new_hops_the_one_that_took_most_of_the_time_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = SlowHop("slow", LIMIT_S - 1), SlowHop("quick", OWN_S)

    def path(hops: list[SlowHop], *_arguments: Any) -> Iterator[Any]:
        yield Send(hops[0], Frame(FrameType.STEP))
        for hop in hops:
            outcome = yield Receive(hop, FrameType.RESULT, 60.0)
            outcome.frame()

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        limit = chunk_run.Limit(trio.current_time() + LIMIT_S)
        with pytest.raises(PeerTimeout, match="took 9 s of the time that all new hops had together") as raised:
            await run([slow, quick], chunk(1), b"", ClientPolicy(), limit=limit)
        assert raised.value.waited_s == LIMIT_S - 1
        assert slow.is_blamed
        assert not quick.is_blamed

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("others_compute", [True, False])
def test_an_error_counts_all_the_time_since_the_step_was_given(
    others_compute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late decode is waited for a second time, while others are tried."""
    hop = SlowHop("known", SLOW_S)
    hop.others_compute = others_compute
    outcomes = []

    def path(hops: list[SlowHop], *_arguments: Any) -> Iterator[Any]:
        outcomes.append((yield Receive(hops[0], FrameType.RESULT, LIMIT_S, OWN_S)))

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        await run([hop], chunk(1), b"", ClientPolicy())

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))
    assert isinstance(outcomes[0].error, PeerTimeout)
    assert outcomes[0].error.waited_s == (OWN_S + TRIED_S if others_compute else LIMIT_S)


def test_a_push_that_does_not_come_takes_nothing_from_the_time_of_new_hops(monkeypatch: pytest.MonkeyPatch) -> None:
    hop, origin = SlowHop("new", OWN_S), SlowHop("before", 0.0)

    def path(*_arguments: Any) -> Iterator[Any]:
        yield Receive(origin, FrameType.REPLAYED, 60.0)
        for _ in range(3):
            yield Receive(hop, FrameType.RESULT, OWN_S - 1, is_pushed=True)
        outcome = yield Receive(hop, FrameType.RESULT, 60.0)
        return outcome

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        limit = chunk_run.Limit(trio.current_time() + LIMIT_S)
        outcome = await run([hop], chunk(1), origin, ClientPolicy(), limit=limit)
        assert outcome.error is None

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_hop_is_waited_for_a_chunk_once_it_has_answered_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk has to be asked for again, elsewhere. The second one has all its time after that."""
    before, hop = SlowHop("before", SLOW_S), SlowHop("after", OWN_S)
    began_s, answered_s = {}, {}

    def path(_hops: Any, given: Chunk, *_arguments: Any) -> Iterator[Any]:
        if given.start == 0:
            yield Receive(hop, FrameType.RESULT, 1.0)  # for a push
            yield Receive(before, FrameType.REPLAYED, 60.0)
        outcome = yield Receive(hop, FrameType.RESULT, 60.0)
        began_s[given.start], answered_s[given.start] = outcome.since_s, outcome.now_s

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunk
        async with trio.open_nursery() as nursery:
            for number in range(2):
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(run, [before, hop], Chunk(Epoch(0), Step(number), number, 1), b"", ClientPolicy())

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))
    assert began_s[1] == answered_s[0] > SLOW_S


def test_a_hop_that_has_logged_chunks_may_not_give_them_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the second one ready at once. The new hop is asked for that after the first one all the same."""
    origin, hop = SlowHop("before", 0.0), SlowHop("new", OWN_S)
    asked: list[int] = []

    def path(_hops: Any, given: Chunk, *_arguments: Any) -> Iterator[Any]:
        yield Send(origin, Frame(FrameType.REPLAY))
        origin.answers_in_s = 0.0 if given.start else SLOW_S
        yield Receive(origin, FrameType.REPLAYED, 60.0)
        outcome = yield Receive(hop, FrameType.RESULT, 60.0)
        outcome.frame()
        asked.append(given.start)

    async def commit(_result: Any) -> None:
        pass

    async def check() -> None:
        monkeypatch.setattr(chunk_run, "chunk_path", path)
        monkeypatch.setattr(chunk_run, "SessionHop", SlowHop)
        run: Any = chunk_run.run_chunks
        chunks = [(Chunk(Epoch(0), Step(number), number, 1), origin) for number in range(2)]
        await run([hop], chunks, ClientPolicy(), commit)

    trio.run(check, clock=trio.testing.MockClock(autojump_threshold=0))
    assert asked == [0, 1]
