"""The tables of `llmnode status`: a model's servers and their blocks, what they have done, and what they do now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.texts.visible import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.server_figures import ServerFigures
    from llmnode.node.forecasts import Compared
    from llmnode.node.status import ModelStatus, ServerReport

BESIDE_BAR = 76
"""Columns of the terminal that the rest of a row takes."""
LEAST_BAR = 4
MIB = 1 << 20
HOUR_MIN, DAY_MIN = 60, 1440
STYLES = {"online": "green", "joining": "yellow"}


def status_table(model: ModelStatus, bar_columns: int) -> Table:
    """The table shows what the servers hold, and have done since they started."""
    table = _begun(model)
    measured = ("ms per\nblock", "free\nKV", "steps", "direct\nin/out", "kB/token\nin/out", "link", "RTT\nms")
    for column in measured:
        table.add_column(column, no_wrap=True)
    for each in model.servers:
        offer = each.offer
        table.add_row(
            *_place(each, model, bar_columns, str(offer.state)),
            f"{offer.block_us / 1000:.2f}" if offer.block_us else "-",
            str(offer.kv_tokens_free),
            *_work(model.answers.get(each.peer)),
        )
    _add_holes(table, model, bar_columns)
    return table


def watch_table(model: ModelStatus, before: ModelStatus | None, bar_columns: int) -> Table:
    """The table shows what the servers do now. `before` is an earlier look at the same model; None if there is none."""
    from rich.markup import escape

    table, rates = _begun(model), model.tokens_per_s(before)
    for name in ("tokens\n/s", "queue", "sess-\nions", "free\nKV", "RTT\nms"):
        table.add_column(name, no_wrap=True, justify="right")
    for name in ("link", "version"):
        table.add_column(name, no_wrap=True)
    for each in model.servers:
        offer, answer, rate = each.offer, model.answers.get(each.peer), rates.get(each.peer)
        state = str(offer.state) if offer.moves_to is None else f"→ {offer.moves_to}"
        table.add_row(
            *_place(each, model, bar_columns, state),
            "-" if rate is None else f"{rate:.1f}",
            "-" if offer.load is None else f"{offer.load:.1f}",
            str(answer.description.sessions) if answer else "-",
            str(answer.description.kv_tokens_free if answer else offer.kv_tokens_free),
            _round_trip(answer) if answer else "-",
            _link(answer),
            escape(printable(each.software).removeprefix("llmnode/")),
        )
    _add_holes(table, model, bar_columns)
    return table


def figures_table(figures: Mapping[PeerId, ServerFigures]) -> Table:
    """The predictions for servers, made when they had loaded their blocks, beside their measurements."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    names = ("sessions\nat once", "tokens/s\npredicted", "\nmeasured", "\noff", "MiB\npredicted", "\nmeasured", "\noff")
    table.add_column("peer", no_wrap=True)
    for name in names:
        table.add_column(name, no_wrap=True, justify="right")
    for peer, each in figures.items():
        rates = (each.predicted_tokens_per_s, each.measured_tokens_per_s)
        sizes = (each.predicted_bytes / MIB, each.measured_bytes / MIB)
        table.add_row(
            escape(peer[-8:]),
            f"{each.sessions:.1f}",
            *(f"{rate:.1f}" if rate else "not yet" for rate in rates),
            _off(each.speed_error),
            *(f"{size:.0f}" if size else "-" for size in sizes),
            _off(each.memory_error),
        )
    return table


def forecast_table(figures: Sequence[Compared], age_s: float) -> Table:
    """The figures of `llmnode plan` on this machine, made `age_s` ago, beside those that were measured since."""
    from rich.markup import escape
    from rich.table import Table

    title = f"forecast of `llmnode plan` here, {_age(age_s)} ago"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("predicted", "measured", "off"):
        table.add_column(name, no_wrap=True, justify="right")
    for each in figures:
        predicted = "not known" if each.predicted is None else _with_unit(each.predicted, each.unit)
        measured = "not measured yet" if each.measured is None else _with_unit(each.measured, each.unit)
        table.add_row(escape(each.name), predicted, f"{measured} {each.beside}".rstrip(), _off(each.error))
    return table


def _age(age_s: float) -> str:
    minutes = max(0, round(age_s / 60))
    if minutes < 2 * HOUR_MIN:
        return f"{minutes} min"
    return f"{minutes // HOUR_MIN} hours" if minutes < 2 * DAY_MIN else f"{minutes // DAY_MIN} days"


def _with_unit(value: float, unit: str) -> str:
    match unit:
        case "bytes":
            return f"{value / MIB:.0f} MiB"
        case "bytes/s":
            return f"{value / 1e6:.2f} MB/s"
        case "s":
            return f"{value:.2f} s"
    return f"{value:.1f} {unit}"


def _off(error: float | None) -> str:
    return "-" if error is None else f"{error:+.0%}"


def _begun(model: ModelStatus) -> Table:
    """A table without rows, and with the first four columns: peer, blocks, their place, state."""
    from rich.markup import escape
    from rich.table import Table

    title = escape(printable(f"{model.model}, {model.dtype}, {model.blocks} blocks"))
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("peer", "blocks", "", "state"):
        table.add_column(column, no_wrap=True)
    return table


def _place(each: Announcement, model: ModelStatus, bar_columns: int, state: str) -> Sequence[str]:
    """The first four columns of a server."""
    from rich.markup import escape

    from llmnode.node.status import bar

    offer, style = each.offer, STYLES.get(each.offer.state, "default")
    drawn = bar(offer.span, model.blocks, bar_columns)
    return escape(each.peer[-8:]), escape(str(offer.span)), f"[{style}]{drawn}[/]", f"[{style}]{escape(state)}[/]"


def _add_holes(table: Table, model: ModelStatus, bar_columns: int) -> None:
    from rich.markup import escape

    from llmnode.node.status import bar

    for hole in model.holes:
        table.add_row(
            "[red]nobody[/]", f"[red]{escape(str(hole))}[/]", f"[red]{bar(hole, model.blocks, bar_columns, '╳')}[/]"
        )


def _work(answer: ServerReport | None) -> list[str]:
    """The last five columns: steps; the share that came straight from a server, and went to one; kB; link and RTT."""
    if answer is None:
        return ["", "", "", _link(None), ""]
    work = answer.description
    per_cent = 100 / max(work.steps, 1)
    given, pushed = work.steps_given_directly * per_cent, work.results_pushed * per_cent
    tokens = max(work.positions, 1)
    crossed = f"{work.received_bytes / tokens / 1000:.1f}/{work.sent_bytes / tokens / 1000:.1f}"
    return [str(work.steps), f"{given:.0f}/{pushed:.0f} %", crossed, _link(answer), _round_trip(answer)]


def _link(answer: ServerReport | None) -> str:
    if answer is None:
        return "[yellow]none[/]"
    return "relay" if answer.is_relayed else "direct"


def _round_trip(answer: ServerReport) -> str:
    rtt_ms = answer.round_trip_us / 1000
    return f"{rtt_ms:.1f}" if rtt_ms < 10 else f"{rtt_ms:.0f}"
