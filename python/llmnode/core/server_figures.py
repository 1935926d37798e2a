"""The prediction for a server, made when it had loaded its blocks, beside what it does. Its DESCRIPTION has both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.speed import LEAST_FORWARDS

if TYPE_CHECKING:
    from llmnode.core.speed import ComputeSpeed, ForwardsSeen


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Rates are in tokens/s through all blocks of the server. 0 stands for what is not known, or not yet."""

    sessions: float
    """Both rates are those of this number of sessions that decode at once."""
    predicted_tokens_per_s: float
    """By the measurement before it had sessions."""
    measured_tokens_per_s: float
    """The rate that sessions have got lately; 0 until there were enough forwards."""
    predicted_bytes: int
    """The memory of its processes before it had any blocks, its weights, and the KV that sessions hold now."""
    measured_bytes: int
    """The memory of its processes that is resident."""
    predicted_prefill_tokens_per_s: float = 0.0
    """Positions a second of a prompt of `PROMPT_POSITIONS` that is alone, by the same measurement."""
    measured_prefill_tokens_per_s: float = 0.0
    """The same by what positions of prompts have added to forwards of sessions."""

    @property
    def speed_error(self) -> float | None:
        """By which share of the measured rate the predicted one is off. None until both are known."""
        return error_of(self.predicted_tokens_per_s, self.measured_tokens_per_s)

    @property
    def prefill_error(self) -> float | None:
        """The same for prompts."""
        return error_of(self.predicted_prefill_tokens_per_s, self.measured_prefill_tokens_per_s)

    @property
    def memory_error(self) -> float | None:
        """The same for the memory."""
        return error_of(self.predicted_bytes, self.measured_bytes)


def server_figures(
    predicted: ComputeSpeed, forwards: ForwardsSeen, blocks: int, predicted_bytes: int, measured_bytes: int
) -> ServerFigures:
    """The figures of a server with this number of `blocks`. `forwards` are those since it was measured for `predicted`.

    Without enough of them the rate is the one that is announced, of many sessions. `predicted_bytes` and
    `measured_bytes` are as in `ServerFigures`.
    """
    sessions, measured = float(predicted.shared_sessions), 0.0
    if forwards.decodes >= LEAST_FORWARDS and forwards.forward_s:
        sessions, measured = forwards.at_once, forwards.at_once / (forwards.forward_s * blocks)
    prefill = forwards.prefill_tokens_per_s(blocks) if forwards.decodes >= LEAST_FORWARDS else 0.0
    return ServerFigures(
        sessions,
        predicted.of_sessions(sessions),
        measured,
        predicted_bytes,
        measured_bytes,
        predicted.prefill_tokens_per_s,
        prefill,
    )


def error_of(predicted: float, measured: float) -> float | None:
    """By which share of the measured value the predicted one is off; None if one of them is not known (0)."""
    return predicted / measured - 1 if predicted and measured else None
