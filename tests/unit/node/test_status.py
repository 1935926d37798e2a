"""The output of `llmnode status` fits a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.clocks import judge_clocks
from llmnode.core.server_figures import ServerFigures
from llmnode.core.span import Span
from llmnode.node.asking import Look
from llmnode.node.cli import main
from llmnode.node.commands.fitted_table import FittedTable
from llmnode.node.commands.status import _drawn_by, _show
from llmnode.node.commands.status_tables import BESIDE_BAR, LEAST_BAR, figures_table, status_table, watch_table
from llmnode.node.forecasts import NO_FORECASTS
from llmnode.node.status import ModelStatus, ServerReport, as_json, by_model, figures_line
from llmnode.wire.messages import Description
from unit.streams import streams
from unit.terminal_emulator import Terminal

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def announcement(name: str, span: Span, state: PeerState) -> Announcement:
    offer = Offer(
        model=MODEL, profile=Profile(b"d" * 32, Precision()), blocks=30, span=span, state=state,
        block_us=3190, kv_tokens=32768, kv_tokens_free=32768,
    )  # fmt: skip
    return Announcement(PeerId(f"12D3KooW{name}"), ("/ip4/192.0.2.1/tcp/1",), 1, 1, "llmnode/1", offer)


@pytest.mark.parametrize("columns", [40, 50, 79, 80, 100, 200])
def test_a_table_of_busy_servers_is_not_cut_short(columns: int) -> None:
    busy = announcement("T5CStntA", Span(0, 12), PeerState.ONLINE)
    silent = announcement("T5CStntB", Span(15, 30), PeerState.DRAINING)
    positions = 12_345
    answer = Description(
        **dict.fromkeys(Description.__dataclass_fields__, 0)
        | {"steps": positions, "steps_given_directly": positions, "results_pushed": positions, "positions": positions}
        | {"received_bytes": 2304 * positions, "sent_bytes": 2304 * positions}
    )
    model = ModelStatus(MODEL, "d", "float32", 30, [busy, silent], {busy.peer: ServerReport(answer, True, 123_456)})
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(FittedTable(status_table(model, max(LEAST_BAR, columns - BESIDE_BAR))))
    printed = captured.get()
    assert "…" not in printed
    for shown in [
        "T5CStntA",
        "[15, 30)",
        "draining",
        "12345",
        "100/100 %",
        "2.3/2.3",
        "relay",
        "123",
        "none",
        "nobody",
    ]:
        assert shown in printed


def test_a_row_in_a_narrow_terminal_has_the_names_of_its_columns() -> None:
    model = ModelStatus(MODEL, "d", "float32", 30, [announcement("T5CStntA", Span(0, 15), PeerState.ONLINE)], {})
    console = Console(width=50, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(FittedTable(watch_table(model, None, LEAST_BAR)))
    assert captured.get().splitlines()[2:] == [
        "T5CStntA  blocks [0, 15)  ██··  state online",
        "  tokens/s -  queue -  sessions -  free KV 32768",
        "  RTT ms -  link none  version 1",
        "nobody  blocks [15, 30)  ··╳╳",
    ]


def test_the_words_of_servers_neither_steer_the_terminal_nor_style_the_table() -> None:
    words = "\x1b]0;x\x07[link=http://x]\u202e\nllmnode: ready"
    hostile = announcement(words, Span(0, 30), PeerState.ONLINE)
    model = ModelStatus(
        words,
        "d",
        words,
        30,
        [hostile],
        {},
    )
    with streams(out := io.StringIO(), io.StringIO()):
        _show([model], NO_FORECASTS)
    terminal = Terminal()
    terminal.feed(out.getvalue())
    assert terminal.obeyed == [] and "\u202e" not in terminal.shown
    assert "[link=http://x]" in terminal.shown.replace("\n", "")
    assert not any(line.startswith("llmnode: ready") for line in terminal.shown.split("\n"))


def test_the_prediction_for_a_server_is_shown_beside_what_it_does() -> None:
    busy, idle = (announcement(f"T5CStnt{name}", Span(0, 30), PeerState.ONLINE) for name in "AB")
    work = Description(**dict.fromkeys(Description.__dataclass_fields__, 0))
    figures = {
        busy.peer: ServerFigures(2.5, 44.0, 40.0, 900 << 20, 1000 << 20, 330.0, 300.0),
        idle.peer: ServerFigures(8.0, 120.0, 0.0, 0, 999 << 20),
    }
    answers = {peer: ServerReport(work, False, 1, each) for peer, each in figures.items()}
    model = ModelStatus(MODEL, "d", "float32", 30, [busy, idle], answers)
    console = Console(width=80, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(figures_table(model.figures))
    rows = [line.split() for line in captured.get().splitlines()[2:]]
    assert rows == [
        ["T5CStntA", "2.5", "44.0", "40.0", "+10%", "900", "1000", "-10%"],
        ["T5CStntB", "8.0", "120.0", "not", "yet", "-", "-", "999", "-"],
    ]
    assert model.figures == figures
    told = as_json([model], 0, 0)["models"][0]["servers"]
    assert [each["figures"]["tokens_per_s_error"] for each in told] == [pytest.approx(0.1), None]
    assert [each["figures"]["prefill_tokens_per_s_error"] for each in told] == [pytest.approx(0.1), None]
    assert [each["figures"]["memory_error"] for each in told] == [pytest.approx(-0.1), None]
    assert told[1]["figures"]["measured_tokens_per_s"] is None
    assert figures_line(figures[busy.peer]) == (
        "40.0 tokens/s (44.0 tokens/s predicted for 2.5 sessions at once, off by +10%), "
        "300 tokens/s of prompts (330 predicted, off by +10%), "
        "1000 MiB of memory (900 MiB predicted, off by -10%)"
    )
    assert figures_line(figures[idle.peer]).startswith(
        "no speed measured yet (120.0 tokens/s predicted for 8 sessions at once), "
    )
    assert "100.0 tokens/s predicted for 1 session at once" in figures_line(ServerFigures(1.0, 100.0, 0.0, 1, 2))


@pytest.mark.parametrize("blocks", [15, 31])
def test_a_server_that_claims_another_number_of_blocks_or_another_name_changes_no_other(blocks: int) -> None:
    """Whichever is heard of first."""
    honest = [announcement(name, span, PeerState.ONLINE) for name, span in (("B", Span(0, 15)), ("C", Span(15, 30)))]
    liar = announcement("A", Span(0, 15), PeerState.ONLINE)
    liar = replace(liar, offer=replace(liar.offer, blocks=blocks, model="another/name"))
    namer = announcement("D", Span(0, 15), PeerState.ONLINE)
    namer = replace(namer, offer=replace(namer.offer, model="a/name"))
    for heard in ([liar, namer, *honest], [*honest, namer, liar]):
        models = {each.blocks: each for each in by_model(heard, {})}
        assert (models[30].model, models[30].holes) == (MODEL, [])
        assert len({each.key for each in models.values()}) == 2
        assert models[blocks].servers == [liar] and models[blocks].model == "another/name"


def test_programs_are_told_how_many_announcements_cannot_be_read() -> None:
    assert as_json([], 3, 7) == {"at_ms": 7, "unread": 3, "models": []}


def looked_at(seconds: float, positions: dict[str, int | None], *spans: Span) -> ModelStatus:
    """A look at servers A, B, ... of these spans. Those without positions have not answered."""
    servers = [
        announcement(f"T5CStnt{name}", span, PeerState.ONLINE) for name, span in zip(positions, spans, strict=True)
    ]
    none = dict.fromkeys(Description.__dataclass_fields__, 0)
    answers = {
        each.peer: ServerReport(Description(**none | {"positions": done, "sessions": 3}), False, 1, at_s=seconds)
        for each, done in zip(servers, positions.values(), strict=True)
        if done is not None
    }
    return ModelStatus(MODEL, "d", "float32", 30, servers, answers)


SPANS = Span(0, 20), Span(10, 30), Span(0, 30)


@pytest.mark.parametrize(
    ("before", "now", "rates", "whole"),
    [
        ((0, 10, 100), (20, 40, 104), (10.0, 15.0, 2.0), 12.0),
        ((0, 10, 100), (20, 40, None), (10.0, 15.0, None), None),  # it does not answer now
        ((None, 10, 100), (20, 40, 104), (None, 15.0, 2.0), None),  # nor did this one before
        ((0, 10, 100), (20, 9, 104), (10.0, None, 2.0), None),  # it has started anew
    ],
)
def test_a_look_after_another_tells_what_servers_and_all_blocks_did_meanwhile(
    before: tuple[int | None, ...], now: tuple[int | None, ...], rates: tuple[float | None, ...], whole: float | None
) -> None:
    first, then = (
        looked_at(at_s, dict(zip("ABC", done, strict=True)), *SPANS) for at_s, done in ((5.0, before), (7.0, now))
    )
    assert [then.tokens_per_s(first).get(each.peer) for each in then.servers] == [*rates]
    assert then.whole_tokens_per_s(first) == whole
    told = as_json([then], 0, 0, [first])["models"][0]
    assert [each["tokens_per_s"] for each in told["servers"]] == [*rates]
    assert told["tokens_per_s"] == whole
    assert then.tokens_per_s(None) == {} and then.whole_tokens_per_s(None) is None, "nothing is known at first"


def test_blocks_that_nobody_serves_have_no_throughput() -> None:
    first, then = (looked_at(float(at_s), {"A": at_s, "B": at_s}, Span(0, 10), Span(20, 30)) for at_s in (1, 2))
    assert then.whole_tokens_per_s(first) is None


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_what_servers_do_now_is_not_cut_short(columns: int) -> None:
    first, then = (
        looked_at(float(at_s), {"A": 12_345 * at_s, "B": None}, Span(0, 12), Span(15, 30)) for at_s in (1, 2)
    )
    moving = replace(then.servers[1], offer=replace(then.servers[1].offer, moves_to=Span(12, 27), load=12.34))
    then = replace(then, servers=[then.servers[0], moving])
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(watch_table(then, first, max(LEAST_BAR, columns - BESIDE_BAR)))
    printed = captured.get()
    assert "…" not in printed
    rows = [[part for part in line.split() if not set(part) <= {*"█·╳"}] for line in printed.splitlines()[3:]]
    assert rows == [
        ["T5CStntA", "[0,", "12)", "online", "12345.0", "-", "3", "0", "0.0", "direct", "1"],
        ["T5CStntB", "[15,", "30)", "→", "[12,", "27)", "-", "12.3", "-", "32768", "-", "none", "1"],
        ["nobody", "[12,", "15)"],
    ]


@pytest.mark.parametrize(("encoding", "full", "hole"), [("utf-8", "██··", "··╳╳"), ("ascii", "##..", "..xx")])
def test_the_map_of_blocks_is_drawn_in_the_characters_that_stdout_has(encoding: str, full: str, hole: str) -> None:
    model = looked_at(1.0, {"A": 1}, Span(0, 15))
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with streams(stdout, io.StringIO()):
        _show([model], NO_FORECASTS)
        stdout.flush()
    assert isinstance(stdout.buffer, io.BytesIO)
    shown = stdout.buffer.getvalue().decode(encoding)
    assert f" {full} " in shown and f" {hole}" in shown
    assert "\\u" not in shown


def test_each_look_is_drawn_whole_where_stdout_is_no_terminal() -> None:
    first, then = (looked_at(float(at_s), dict.fromkeys("ABC", 10 * at_s), *SPANS) for at_s in (1, 2))
    console = Console(width=80, file=(out := io.StringIO()), color_system=None)
    draw, clocks = _drawn_by(console, None), judge_clocks({}, 1.0)
    draw(Look([first], clocks, 0), None)
    draw(Look([then], clocks, 0), Look([first], clocks, 0))
    draw(Look([], clocks, 2), Look([then], clocks, 0))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines.count("every block is served") == 2
    assert lines.count("20.0 tokens/s through all blocks, prompts among them") == 1
    assert "nobody serves anything: start with `llmnode serve`" in lines
    assert any(line.startswith("2 announcements cannot be read here") for line in lines)


@pytest.mark.parametrize(
    "options",
    [["--every", "1"], ["--watch", "--every", "0"], ["--watch", "--every", "nan"], ["--watch", "--every", "inf"]],
)
def test_a_wrong_interval_is_refused_before_anybody_is_asked(options: list[str]) -> None:
    with streams(io.StringIO(), err := io.StringIO()):
        assert main(["status", "--peers", "/ip4/203.0.113.7/tcp/1", *options]) == 2
    assert "--every" in err.getvalue()
