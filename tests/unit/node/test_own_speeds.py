"""A server takes its speeds of former runs from the cache, and leaves there what its sessions have seen."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.compute.thread_worker import ThreadWorker
from llmnode.core.ids import SessionId
from llmnode.core.model import EXACT, PRECISIONS
from llmnode.core.operations import Forward, Open
from llmnode.core.span import Span
from llmnode.core.speed import LEAST_FORWARDS, ComputeSpeed
from llmnode.machine.cache_folder import cache_folder
from llmnode.node import app
from llmnode.node.app import NodeConfig
from llmnode.node.serve.speed_cache import FILE, SpeedCache
from llmnode.testing import ExactExecutor
from llmnode.testing.exact_blocks import EXACT_MODEL
from unit.exact_nodes import ExactLoader, exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.core.model import ModelInfo
    from llmnode.ports import Worker

ROUNDED = PRECISIONS["bfloat16"]


@pytest.fixture(autouse=True)
def _own_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader without torch counts as the one whose speeds are those of this machine."""
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path))
    monkeypatch.setattr(app, "SpanLoader", ExactLoader)


@pytest.mark.parametrize(("rate", "dtype"), [(1.0, "float32"), (100.0, "bfloat16")])
@in_trio
async def test_a_server_that_chooses_its_precision_goes_by_the_speeds_in_its_cache(rate: float, dtype: str) -> None:
    speeds = NodeConfig(worker="thread", make_loader=ExactLoader).speed_cache
    assert speeds is not None
    for precision, each in ((EXACT, 10.0), (ROUNDED, 10.0 * rate)):
        model = replace(EXACT_MODEL, precision=precision)
        speeds.keep(speeds.key(model, f"0:{model.blocks}"), ComputeSpeed(each, each, each))
    async with (
        exact_node() as first,
        exact_node(dtype="bfloat16", peers=first.addresses) as second,
        exact_node(dtype="auto", peers=[*first.addresses, *second.addresses]) as newcomer,
    ):
        assert newcomer.model.precision.dtype == dtype


@in_trio
async def test_a_server_that_ends_keeps_what_its_sessions_have_seen() -> None:
    async with exact_node() as node:
        worker, session = node.server.served.worker, SessionId(bytes(16))
        assert await worker.do(Open(session, node.span, LEAST_FORWARDS))
        for step in range(LEAST_FORWARDS):
            await worker.do(Forward(session, step, 1, bytes(node.model.row_bytes)))
    (latest,) = json.loads(cache_folder(FILE).read_text())["speeds"].values()
    assert [each["observed"] for each in latest] == [True, False]


@pytest.mark.parametrize(("kv_tokens", "context", "is_enough"), [(127, 4096, False), (128, 4096, True), (32, 16, True)])
def test_a_speed_with_too_little_kv_for_the_measurement_is_that_of_its_run_alone(
    kv_tokens: int, context: int, is_enough: bool, tmp_path: Path
) -> None:
    """A short prompt, or few sessions at once, are slower. With more KV the machine would announce that for a day."""
    measured: list[int] = []

    async def measure(worker: Worker, _model: ModelInfo) -> ComputeSpeed:
        measured.append(worker.kv_tokens)
        return ComputeSpeed(float(worker.kv_tokens), 2.0, 3.0)

    async def measure_in_turn() -> None:
        cache, model = SpeedCache(path=tmp_path / "speeds.json"), replace(EXACT_MODEL, context_tokens=context)
        for tokens in (kv_tokens, kv_tokens, 4096, kv_tokens):
            await cache.measured_once(measure)(ThreadWorker(ExactExecutor(Span(0, 6), model.row_bytes, tokens)), model)

    trio.run(measure_in_turn)
    assert measured == ([kv_tokens] if is_enough else [kv_tokens, kv_tokens, 4096, kv_tokens])
