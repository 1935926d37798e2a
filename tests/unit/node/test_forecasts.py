"""A forecast of `llmnode plan` is remembered, and `llmnode status` shows it beside what was measured since."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.forecast import ClientPlace
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo, Precision
from llmnode.core.server_figures import ServerFigures
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed, ComputeSpeed, NetworkSpeed
from llmnode.machine.cache_folder import cache_folder
from llmnode.node import forecasts
from llmnode.node.commands.status import _show
from llmnode.node.commands.status_tables import forecast_table
from llmnode.node.forecasts import FILE, LEAST_TOKENS, MOST, NO_FORECASTS, Compared, Forecasts
from llmnode.node.plan import OwnNode, Plan
from llmnode.node.status import ModelStatus, ServerReport, as_json
from llmnode.wire.messages import Description
from unit.hanging import hanging

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelInfo("m", b"d" * 32, 4, hidden_size=64, context_tokens=4096)
NODE = OwnNode(Span(0, 4), ComputeSpeed(100.0, 200.0, 400.0), NetworkSpeed(1e6, {}), 8 << 20, 100, 1000, 2 << 20)
PLAN = Plan(MODEL, [], NODE, ClientPlace({}), 16)
OWN = PeerId("own")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path))


def keep_forecast(plan: Plan) -> None:
    trio.run(forecasts.keep_forecast, plan)


def note_text(*told: Any) -> None:  # Any: as its parameters
    trio.run(forecasts.note_text, *told)


def note_texts(*told: Any) -> None:  # Any: as its parameters
    trio.run(forecasts.note_texts, *told)


def status(model: ModelInfo = MODEL, span: Span = NODE.span, measured_bytes: int = 11 << 20) -> ModelStatus:
    """One server on this machine that holds 40 positions of KV, and has a figure for its memory."""
    offer = Offer(
        model.name, model.profile, model.blocks, span, PeerState.ONLINE, 1, 100, 60, AnnouncedSpeed(upload_kb_per_s=500)
    )
    figures = ServerFigures(1.0, 1.0, 0.0, 1, measured_bytes)
    report = ServerReport(Description(**dict.fromkeys(Description.__dataclass_fields__, 0)), False, 1, figures)
    server = Announcement(OWN, (), 1, 1, "", offer)
    return ModelStatus(model.name, model.digest.hex(), model.precision.name, model.blocks, [server], {OWN: report})


def forecasts_of(*own: PeerId) -> Forecasts:
    """Those that are kept. `own` are the servers on this machine."""
    return replace(trio.run(forecasts.read_forecasts, None), own=dict.fromkeys(own, 0.0))


def is_known(model: ModelStatus) -> bool:
    return model.compared(forecasts_of()) is not None


def figures_of(model: ModelStatus, *own: PeerId) -> dict[str, Compared]:
    found = model.compared(forecasts_of(*own))
    assert found is not None
    return {each.name: each for each in found[1]}


def test_each_figure_of_a_forecast_is_shown_beside_what_was_measured_since() -> None:
    assert not is_known(status())
    keep_forecast(PLAN)
    session = PLAN.with_it.session
    assert session is not None
    before = figures_of(status())
    assert list(before) == ["one session", "first token of 16", "8 sessions", "memory", "upload"]
    assert [each.measured for each in before.values()] == [None] * 5
    assert before["one session"].predicted == pytest.approx(session.tokens_per_s)
    assert before["8 sessions"].predicted == pytest.approx(PLAN.with_it.tokens_per_s)
    note_text(MODEL, LEAST_TOKENS, session.tokens_per_s / 2, 2 * session.first_token_s, 20)
    note_texts(MODEL, 8 * LEAST_TOKENS, PLAN.with_it.tokens_per_s, 8)
    after = figures_of(status(), OWN)
    assert after["one session"].error == pytest.approx(1.0), "it promised twice what came"
    assert after["first token of 16"].error == pytest.approx(-0.5)
    assert after["8 sessions"].error == pytest.approx(0.0)
    assert after["memory"].predicted == (10 << 20) + 40 * 10
    assert after["memory"].measured == 11 << 20
    assert (after["upload"].predicted, after["upload"].measured) == (1e6, 5e5)


def test_what_cannot_be_compared_has_no_error_and_says_why() -> None:
    keep_forecast(PLAN)
    note_text(MODEL, LEAST_TOKENS - 1, 5.0, 1.0, 100)
    note_texts(MODEL, 100 * LEAST_TOKENS, 50.0, 2)
    found = figures_of(status(span=Span(0, 3)), OWN)
    assert found["one session"].measured is None, "the text was too short"
    for name, beside in [("first token of 16", "for 100 tokens"), ("8 sessions", "for 2 sessions")]:
        assert (found[name].beside, found[name].error) == (beside, None)
        assert found[name].measured
    assert found["memory"].measured is None, "it serves other blocks"


def test_of_two_own_servers_the_one_that_was_started_after_the_forecast_has_its_memory_compared() -> None:
    keep_forecast(PLAN)
    kept = forecasts_of()
    ((forecast, _),) = kept.entries.values()
    model, made_s = status(), forecast.at_ms / 1000
    (announced,), report = model.servers, model.answers[OWN]
    assert report.figures is not None
    names = [PeerId(name) for name in ("long before", "before", "after", "later")]
    servers = [replace(announced, peer=peer) for peer in names]
    answers = {
        peer: replace(report, figures=replace(report.figures, measured_bytes=number << 20))
        for number, peer in enumerate(names, 1)
    }
    began = dict(zip(names, (made_s - 100, made_s - 10, made_s + 20, made_s + 200), strict=True))

    def measured_mib(*own: str) -> float | None:
        here = replace(kept, own={peer: began[peer] for peer in names if peer in own})
        found = replace(model, servers=servers, answers=answers).compared(here)
        assert found is not None
        (memory,) = (each.measured for each in found[1] if each.name == "memory")
        return memory and memory / (1 << 20)

    assert measured_mib(*names) == measured_mib("after", "later") == 3
    assert measured_mib("long before", "before") == 2
    assert measured_mib("long before", "later") == 4
    answers.pop(names[2])
    assert measured_mib(*names) == 4, "one that was killed tells nothing"
    assert measured_mib() is None


def test_a_new_forecast_begins_anew_and_other_models_have_none() -> None:
    other = replace(MODEL, precision=Precision("bfloat16"))
    keep_forecast(PLAN)
    note_text(other, 100, 9.0, 1.0, 16)
    note_text(MODEL, 100, 9.0, 1.0, 16)
    assert figures_of(status())["one session"].measured == 9.0
    assert not is_known(status(other))
    keep_forecast(PLAN)
    assert figures_of(status())["one session"].measured is None
    for number in range(MOST + 1):
        keep_forecast(replace(PLAN, model=replace(MODEL, digest=bytes([number]) * 32)))
    assert not is_known(status()), "the oldest one goes"


def test_a_forecast_is_shown_for_the_model_with_its_number_of_blocks_alone() -> None:
    """Servers that claim another number of blocks under the same digest are those of another model."""
    keep_forecast(PLAN)
    assert is_known(status())
    assert not is_known(status(replace(MODEL, blocks=MODEL.blocks + 1)))
    kept = json.loads(cache_folder(FILE).read_text())
    del next(iter(kept["forecasts"].values()))[0]["model_blocks"]
    cache_folder(FILE).write_text(json.dumps(kept))
    assert is_known(status()), "an earlier version has not written it"


@pytest.mark.parametrize(
    ("part", "other"), [("{", "["), ("1", "2"), ("tokens_per_s", "tokens"), ("1000000.0", "NaN"), ("16", "-16")]
)
def test_a_damaged_file_counts_as_none(part: str, other: str) -> None:
    keep_forecast(PLAN)
    file = cache_folder(FILE)
    text = file.read_text()
    assert part in text
    file.write_text(text.replace(part, other))
    assert not is_known(status())
    keep_forecast(PLAN)
    assert is_known(status())


def test_the_table_and_the_json_say_what_is_not_measured_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json([status()], 0, 0, (), forecasts_of())["models"][0]["forecast"] is None
    keep_forecast(PLAN)
    note_text(MODEL, 100, 9.0, 1.0, 100)
    _show([status()], forecasts_of(OWN))
    lines = capsys.readouterr().out.splitlines()
    for name, shown in [("one session", "9.0 tokens/s"), ("8 sessions", "not measured yet"), ("memory", "11 MiB")]:
        assert any(line.startswith(name) and shown in line for line in lines)
    assert any(line.startswith("first token of 16") and "1.00 s for 100 tokens" in line for line in lines)
    forecast = as_json([status()], 0, 0, (), forecasts_of(OWN))["models"][0]["forecast"]
    one, first, several, *_ = forecast["figures"]
    assert one["measured"] == 9.0
    assert one["error"] == pytest.approx(one["predicted"] / 9.0 - 1)
    assert (first["measured_for"], first["error"]) == ("for 100 tokens", None)
    assert (several["measured"], several["unit"]) == (None, "tokens/s")


def test_a_disk_that_hangs_holds_up_neither_the_end_of_a_text_nor_a_plan_nor_a_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keep_forecast(PLAN)
    caplog.set_level("INFO", "llmnode")
    with hanging(monkeypatch, forecasts, "write_in_cache") as hung:
        note_text(MODEL, 100, 9.0, 1.0, 16)
        note_texts(MODEL, 100, 9.0, 4)
        keep_forecast(PLAN)
        assert hung.count == 1, "it still hangs, and the others wait for the file"
    assert caplog.text.count("beside a forecast: the cache has not answered") == 3
    with hanging(monkeypatch, forecasts, "read_file"):
        assert trio.run(forecasts.read_forecasts, None) == NO_FORECASTS


def test_two_programs_that_note_texts_at_once_lose_none() -> None:
    models = [replace(MODEL, digest=bytes([number]) * 32) for number in range(8)]
    for model in models:
        keep_forecast(replace(PLAN, model=model))
    with ThreadPoolExecutor(len(models)) as pool:  # a lock of a file keeps threads apart as it does programs
        list(pool.map(lambda model: note_text(model, 100, 9.0, 1.0, 16), models))
    assert [figures_of(status(model))["one session"].measured for model in models] == [9.0] * len(models)


def test_an_entry_that_is_not_finite_is_dropped_alone_and_is_not_written() -> None:
    damaged = replace(MODEL, digest=b"e" * 32)
    for model in (MODEL, damaged):
        keep_forecast(replace(PLAN, model=model))
    text = cache_folder(FILE).read_text()
    before, after = text.split(damaged.digest.hex())
    for value in ("NaN", "Infinity", "1" + 400 * "0"):
        cache_folder(FILE).write_text(before + damaged.digest.hex() + after.replace("1000000.0", value, 1))
        assert not is_known(status(damaged))
        assert is_known(status())
    note_text(MODEL, 100, float("inf"), 1.0, 16)
    assert figures_of(status())["one session"].measured is None
    assert "Infinity" not in cache_folder(FILE).read_text()


@pytest.mark.parametrize(("days", "shown"), [(0.001, "1 min"), (0.05, "72 min"), (1, "24 hours"), (30, "30 days")])
def test_the_age_of_a_forecast_is_in_days_after_some(days: float, shown: str) -> None:
    assert forecast_table([], days * 86_400).title == f"forecast of `llmnode plan` here, {shown} ago"
