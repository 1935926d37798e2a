"""A worker in a process of its own, until it serves: what it says, how long it may take, and when it is given up."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

from llmnode.compute.child import SWITCH_S
from llmnode.compute.loading import Wanted
from llmnode.compute.process_loader import ProcessLoader
from llmnode.compute.worker_process import can_start
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Open
from llmnode.core.policy import WorkerPolicy
from llmnode.core.span import Span
from llmnode.errors import ConfigError, ModelError, WorkerLost
from llmnode.testing.exact_blocks import EXACT_MODEL
from unit.exact_child import (
    ABORT,
    ALONE,
    ENDLESS,
    FAILS,
    LASTING,
    LONG,
    LONG_S,
    SHORT,
    SHORT_BESIDE,
    STUCK,
    STUCK_BESIDE,
    SWITCHES,
    TOKENS_BESIDE_PID,
    TOO_LARGE,
    UNKNOWN,
)
from unit.started_worker import LENGTH, SPAN, Told, open_loader

if TYPE_CHECKING:
    from pathlib import Path


def test_it_says_what_it_opens_and_holds() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told) as loader:
            assert await loader.open_model() == EXACT_MODEL
            assert await loader.fitting_blocks() == 3
            worker = await loader.load(SPAN)
            assert worker.span == SPAN
            assert worker.kv_tokens_free == 10 * LENGTH
            assert loader.tensor_bytes == 12
        assert told == Told(["opening", "loading"])

    trio.run(main)


def test_what_is_loaded_beside_shares_the_process_and_has_kv_for_as_many_positions() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, kv_memory="20%") as loader:
            await loader.open_model()
            first, pid = await loader.load(SPAN), loader.pid
            second = await loader.load_beside(Span(0, 2))
            assert second is not None
            assert (second.span, second.kv_tokens, loader.pid) == (Span(0, 2), first.kv_tokens, pid)
            assert loader.tensor_bytes == 24
            await loader.drop_one(second)
            assert loader.tensor_bytes == 12, "the first one serves on"
        assert told == Told(["opening", "loading", "loading beside"])

    trio.run(main)


@pytest.mark.parametrize("model", [ALONE, SHORT_BESIDE])
def test_without_memory_for_two_there_is_no_second_worker_and_the_first_goes_on(model: str) -> None:
    async def main() -> None:
        async with open_loader(model=model) as loader:
            await loader.open_model()
            worker = await loader.load(SPAN)
            assert await loader.load_beside(Span(0, 2)) is None
            assert worker.kv_tokens_free == 10 * LENGTH

    trio.run(main)


def test_a_load_beside_that_fails_as_torch_does_costs_only_itself() -> None:
    async def main() -> None:
        async with open_loader(model=FAILS) as loader:
            await loader.open_model()
            worker = await loader.load(SPAN)
            with pytest.raises(ModelError, match=r"blocks \[0, 2\) cannot be loaded: as told"):
                await loader.load_beside(Span(0, 2))
            assert worker.kv_tokens_free == 10 * LENGTH

    trio.run(main)


def test_a_load_beside_that_nobody_waits_for_any_more_is_given_up_and_another_one_can_be_asked_for() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, ENDLESS) as loader:
            await loader.open_model()
            worker = await loader.load(SPAN)
            for number in range(1, 3):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(loader.load_beside, Span(0, 2))
                    await told.until("loading beside", 10 * number)
                    nursery.cancel_scope.cancel()
            assert worker.kv_tokens_free == 10 * LENGTH

    trio.run(main)


def test_a_load_beside_that_does_not_get_on_ends_the_process() -> None:
    async def main() -> None:
        async with open_loader(model=STUCK_BESIDE, look_s=0.05, stuck_s=0.2) as loader:
            await loader.open_model()
            worker = await loader.load(SPAN)
            with pytest.raises(WorkerLost, match=r"nor computed anything in 0\.2 s while it loaded"):
                await loader.load_beside(Span(0, 2))
            assert worker.kv_tokens_free == 0

    trio.run(main)


def test_an_executor_that_does_not_end_when_it_is_dropped_ends_the_process_and_holds_up_nobody() -> None:
    async def main() -> None:
        async with open_loader(model=LASTING, answer_s=0.5) as loader:
            await loader.open_model()
            first = await loader.load(SPAN)
            second = await loader.load_beside(Span(0, 2))
            assert second is not None
            await loader.drop_one(second)
            with pytest.raises(WorkerLost, match=r"not answered in 0\.5 s"):
                await first.do(Open(SessionId(bytes(16)), SPAN, 1, PeerId("client")))

    trio.run(main)


def test_a_thread_that_loads_gives_way_to_batches_often() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, SWITCHES) as loader:
            await loader.open_model()
            await loader.load(SPAN)
            assert await loader.load_beside(Span(0, 2)) is not None
        assert told.lines[-1] == f"{SWITCH_S:g}"
        assert SWITCH_S < 0.001

    trio.run(main)


def test_another_process_has_memory_for_as_many_whatever_is_free_by_then() -> None:
    async def main() -> None:
        async with open_loader(kv_memory="20%") as loader:
            await loader.open_model()
            kv_tokens = (await loader.load(SPAN)).kv_tokens_free
            assert kv_tokens == TOKENS_BESIDE_PID + loader.pid
            psutil.Process(loader.pid).kill()
            await loader.wait_lost()
            assert (await loader.load(SPAN)).kv_tokens_free == kv_tokens
            assert kv_tokens != TOKENS_BESIDE_PID + loader.pid

    trio.run(main)


def test_another_process_that_has_too_little_memory_is_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, f"{SHORT}:{tmp_path / 'once'}") as loader:
            await loader.open_model()
            await loader.load(SPAN)
            psutil.Process(loader.pid).kill()
            await loader.wait_lost()
            assert (await loader.load(SPAN)).kv_tokens_free == 10 * LENGTH
        killed, short = told.lost
        assert "SIGKILL" in killed
        assert "did not load its blocks again: blocks do not fit, as told; another is started" in short

    trio.run(main)


def test_one_that_never_has_enough_is_given_up() -> None:
    async def main() -> None:
        async with open_loader(model=SHORT, failed_starts=2) as loader:
            await loader.open_model()
            await loader.load(SPAN)
            loader.serves()
            psutil.Process(loader.pid).kill()
            await loader.wait_lost()
            with pytest.raises(WorkerLost, match=r"do not fit, as told, 2 times in a row"):
                await loader.load(SPAN)

    trio.run(main)


def test_a_process_that_never_comes_up_is_given_up() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, ABORT, failed_starts=3) as loader:
            with pytest.raises(WorkerLost, match=r"crashed \(SIGABRT\), 3 times in a row .* lower --kv-tokens"):
                await loader.open_model()
        assert [line.endswith("(SIGABRT); another is started in 0 s") for line in told.lost] == [True, True]

    trio.run(main)


def test_blocks_that_do_not_fit_are_told_so_though_a_process_was_lost_while_it_read_them(tmp_path: Path) -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, f"{TOO_LARGE}:{tmp_path / 'lost'}") as loader:
            await loader.open_model()
            with pytest.raises(ConfigError, match="blocks do not fit, as told"):
                await loader.load(SPAN)
        assert len(told.lost) == 1, "nothing was announced that might fit again"

    trio.run(main)


def test_a_process_that_the_system_does_not_start_is_tried_again_and_leaves_no_file_open() -> None:
    async def main() -> None:
        told: list[str] = []
        loader = ProcessLoader(
            Wanted(), print, told.append, ("/nowhere/python",), WorkerPolicy(pause_s=0.0, failed_starts=3)
        )
        files = psutil.Process().num_fds()
        with pytest.raises(WorkerLost, match=r"cannot be started: .*No such file.*, 3 times"):
            await loader.open_model()
        assert len(told) == 2
        assert psutil.Process().num_fds() == files

    trio.run(main)


def test_a_process_that_says_nothing_at_first_is_given_up() -> None:
    async def main() -> None:
        command = (sys.executable, "-c", "import time; time.sleep(1000)")
        loader = ProcessLoader(Wanted(), print, print, command, WorkerPolicy(hello_s=0.1, pause_s=0.0, failed_starts=2))
        with pytest.raises(WorkerLost, match=r"not started in 0\.1 s, 2 times"):
            await loader.open_model()
        await loader.end()

    trio.run(main)


def test_a_process_that_does_not_get_on_with_loading_is_given_up() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, STUCK, look_s=0.05, stuck_s=0.2, failed_starts=2) as loader:
            with pytest.raises(WorkerLost, match=r"nor computed anything in 0\.2 s while it loaded, 2 times"):
                await loader.open_model()
        assert len(told.lost) == 1

    trio.run(main)


def test_a_process_may_load_for_as_long_as_it_gets_on_and_is_told_of() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, LONG, look_s=LONG_S / 20, stuck_s=60.0) as loader:
            assert await loader.open_model() == EXACT_MODEL
        *still, last = told.lines
        assert still
        assert all("still at it" in line for line in still)
        assert last == "opening"

    trio.run(main)


def test_what_the_user_can_mend_is_told_as_it_is_and_tried_once() -> None:
    async def main() -> None:
        told = Told()
        async with open_loader(told, UNKNOWN) as loader:
            with pytest.raises(ConfigError, match="no such model, as told"):
                await loader.open_model()
        assert told == Told()

    trio.run(main)


@pytest.mark.parametrize(
    ("program", "is_python"),
    [("/venv/bin/python", True), ("python3.12", True), ("/usr/bin/uwsgi", False), ("", False), (None, False)],
)
def test_a_process_is_started_where_a_python_runs_the_program(
    program: str | None, is_python: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    assert can_start() == is_python
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not can_start()
