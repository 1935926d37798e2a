"""The values of `llmnode status`, and their JSON: servers, their blocks of each model, missing blocks."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from llmnode.core.route import uncovered
from llmnode.core.view import online
from llmnode.machine.cache_folder import show_bytes
from llmnode.node.forecasts import NO_FORECASTS, compared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import Profile
    from llmnode.core.server_figures import ServerFigures
    from llmnode.core.span import Span
    from llmnode.node.forecasts import Compared, Forecasts
    from llmnode.wire.messages import Description


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The answer of a server that could be reached."""

    description: Description
    is_relayed: bool
    """Whether it was reached through a relay."""
    round_trip_us: int
    """The time from a question to its answer, once connected."""
    figures: ServerFigures | None = None
    """The prediction for the server, beside what it does, if it tells them."""
    at_s: float = 0.0
    """When it came, by the clock of the one who asked."""


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model in one dtype, and its servers in the order of their blocks."""

    model: str
    digest: str
    dtype: str
    blocks: int
    servers: Sequence[Announcement]
    answers: Mapping[PeerId, ServerReport]

    @property
    def key(self) -> tuple[str, str, int]:
        """It names the model in every look."""
        return self.digest, self.dtype, self.blocks

    @property
    def holes(self) -> list[Span]:
        """Blocks that no server computes now."""
        return uncovered(self.blocks, [each.offer.span for each in online(self.servers)])

    @property
    def figures(self) -> dict[PeerId, ServerFigures]:
        """Those of the servers that told some."""
        answers = {each.peer: self.answers.get(each.peer) for each in self.servers}
        return {peer: each.figures for peer, each in answers.items() if each is not None and each.figures is not None}

    def compared(self, forecasts: Forecasts) -> tuple[int, list[Compared]] | None:
        """The forecast of `llmnode plan` on this machine: see `forecasts.compared`."""
        return compared(forecasts, self.key, self.servers, self.figures)

    def tokens_per_s(self, before: ModelStatus | None) -> dict[PeerId, float]:
        """The positions a second that servers have computed since an earlier look, prompts among them.

        It has those that answered both times, and have not started anew meanwhile.
        """
        if before is None:
            return {}
        found = {}
        for peer, answer in self.answers.items():
            earlier = before.answers.get(peer)
            if earlier is None or answer.at_s <= earlier.at_s:
                continue
            positions = answer.description.positions - earlier.description.positions
            if positions >= 0:
                found[peer] = positions / (answer.at_s - earlier.at_s)
        return found

    def whole_tokens_per_s(self, before: ModelStatus | None) -> float | None:
        """Those that went through all blocks: the sum over the servers of the block that has the least.

        None if a block has no server, or a server did not answer both times.
        """
        servers, rates = online(self.servers), self.tokens_per_s(before)
        if self.holes or any(each.peer not in rates for each in servers):
            return None
        changes: defaultdict[int, float] = defaultdict(float)  # of the sum, from this block on
        for each in servers:
            changes[each.offer.span.start] += rates[each.peer]
            changes[each.offer.span.end] -= rates[each.peer]
        return min(accumulate(changes[block] for block in sorted(changes) if block < self.blocks))


def by_model(announcements: Sequence[Announcement], answers: Mapping[PeerId, ServerReport]) -> list[ModelStatus]:
    """The models, with their servers. Those that claim another number of blocks are servers of another model."""
    groups: dict[tuple[Profile, int], list[Announcement]] = {}
    for each in announcements:
        groups.setdefault((each.offer.profile, each.offer.blocks), []).append(each)
    return [
        ModelStatus(
            model=_name_of(servers, answers),
            digest=profile.model_digest.hex(),
            dtype=profile.precision.name,
            blocks=blocks,
            servers=sorted(servers, key=lambda each: (each.offer.span, each.peer)),
            answers=answers,
        )
        for (profile, blocks), servers in sorted(groups.items(), key=lambda group: (group[0][0].key, group[0][1]))
    ]


def _name_of(servers: Sequence[Announcement], answers: Mapping[PeerId, ServerReport]) -> str:
    """The name of a model that most of its servers say: of those that answered, if any did."""
    names = Counter(each.offer.model for each in servers if each.peer in answers)
    names = names or Counter(each.offer.model for each in servers)
    return min(names, key=lambda name: (-names[name], name))


def as_json(
    models: Sequence[ModelStatus],
    unread: int,
    now_ms: int,
    before: Sequence[ModelStatus] = (),
    forecasts: Forecasts = NO_FORECASTS,
) -> dict[str, Any]:  # Any: JSON
    """The JSON has what `llmnode status` shows. `before` is an earlier look, for the work of servers since then."""
    earlier = {each.key: each for each in before}
    rates = {model.key: model.tokens_per_s(earlier.get(model.key)) for model in models}
    return {
        "at_ms": now_ms,
        "unread": unread,
        "models": [
            {
                "model": model.model,
                "digest": model.digest,
                "dtype": model.dtype,
                "blocks": model.blocks,
                "holes": [[hole.start, hole.end] for hole in model.holes],
                "tokens_per_s": model.whole_tokens_per_s(earlier.get(model.key)),
                "forecast": _forecast_json(model, forecasts),
                "servers": [
                    _server_json(each, model, now_ms) | {"tokens_per_s": rates[model.key].get(each.peer)}
                    for each in model.servers
                ],
            }
            for model in models
        ],
    }


def bar(span: Span, blocks: int, columns: int, filled: str = "█") -> str:
    """The span's place among `blocks`, in at most `columns` characters; a block of it is never invisible."""
    columns = min(blocks, columns)
    first = span.start * columns // blocks
    last = max(first + 1, -(-span.end * columns // blocks))
    return "·" * first + filled * (last - first) + "·" * (columns - last)


def _forecast_json(model: ModelStatus, forecasts: Forecasts) -> dict[str, Any] | None:  # Any: JSON
    """The figures of `llmnode plan` on this machine beside those measured since; null where there is none (yet)."""
    if (found := model.compared(forecasts)) is None:
        return None
    at_ms, figures = found
    return {
        "at_ms": at_ms,
        "figures": [
            {
                "name": each.name,
                "unit": each.unit,
                "predicted": each.predicted,
                "measured": each.measured,
                "measured_for": each.beside or None,
                "error": each.error,
            }
            for each in figures
        ],
    }


def _server_json(each: Announcement, model: ModelStatus, now_ms: int) -> dict[str, Any]:  # Any: JSON
    offer, answer = each.offer, model.answers.get(each.peer)
    work = answer and answer.description
    return {
        "peer": each.peer,
        "addresses": list(each.addresses),
        "blocks": [offer.span.start, offer.span.end],
        "state": str(offer.state),
        "moves_to": None if offer.moves_to is None else [offer.moves_to.start, offer.moves_to.end],
        "block_us": offer.block_us,
        "stays": offer.stays,
        "announced_tokens_per_s": offer.speed.tokens_per_s or None,
        "kv_tokens": offer.kv_tokens,
        "kv_tokens_free": offer.kv_tokens_free,
        "load": offer.load,
        "software": each.software,
        "identity_used_twice": each.has_double,
        "age_s": round((now_ms - each.sequence) / 1000, 1),
        "reached": answer is not None,
        "relayed": answer and answer.is_relayed,
        "round_trip_us": answer and answer.round_trip_us,
        "sessions": work and work.sessions,
        "steps": work and work.steps,
        "steps_given_directly": work and work.steps_given_directly,
        "results_pushed": work and work.results_pushed,
        "positions": work and work.positions,
        "busy_us": work and work.busy_us,
        "sent_bytes": work and work.sent_bytes,
        "sent_plain_bytes": work and work.sent_plain_bytes,
        "received_bytes": work and work.received_bytes,
        "received_plain_bytes": work and work.received_plain_bytes,
        "figures": answer and answer.figures and figures_json(answer.figures),
    }


def figures_json(figures: ServerFigures) -> dict[str, Any]:  # Any: JSON
    """The prediction for a server, beside what it does, and the relative errors. Null stands for what is not known."""
    return {
        "sessions_at_once": figures.sessions,
        "predicted_tokens_per_s": figures.predicted_tokens_per_s or None,
        "measured_tokens_per_s": figures.measured_tokens_per_s or None,
        "tokens_per_s_error": figures.speed_error,
        "predicted_prefill_tokens_per_s": figures.predicted_prefill_tokens_per_s or None,
        "measured_prefill_tokens_per_s": figures.measured_prefill_tokens_per_s or None,
        "prefill_tokens_per_s_error": figures.prefill_error,
        "predicted_memory_bytes": figures.predicted_bytes or None,
        "measured_memory_bytes": figures.measured_bytes or None,
        "memory_error": figures.memory_error,
    }


def figures_line(figures: ServerFigures) -> str:
    """The same in words."""
    measured, taken = figures.measured_tokens_per_s, show_bytes(figures.measured_bytes)
    rate = f"{measured:.1f} tokens/s" if measured else "no speed measured yet"
    number = f"{figures.sessions:.1f}".removesuffix(".0")
    sessions = "1 session" if number == "1" else f"{number} sessions"
    wanted = f"{figures.predicted_tokens_per_s:.1f} tokens/s predicted for {sessions} at once"
    memory = f"{show_bytes(figures.predicted_bytes)} predicted" if figures.predicted_bytes else "not known before"
    prompts = ""
    if (prefill := figures.measured_prefill_tokens_per_s) and figures.predicted_prefill_tokens_per_s:
        predicted = f"{figures.predicted_prefill_tokens_per_s:.0f} predicted{_off_by(figures.prefill_error)}"
        prompts = f"{prefill:.0f} tokens/s of prompts ({predicted}), "
    speed = f"{rate} ({wanted}{_off_by(figures.speed_error)}), {prompts}"
    return f"{speed}{taken} of memory ({memory}{_off_by(figures.memory_error)})"


def _off_by(error: float | None) -> str:
    return "" if error is None else f", off by {error:+.0%}"
