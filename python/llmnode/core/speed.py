"""How fast a server is: what it has measured of itself, and the figure that it announces (Petals, appendix D).

The throughput of a server is the smaller one of two rates in tokens/s: those that its device computes, and those whose
hidden states its network carries away. A server that did not measure one of them announces none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import median_high, median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.ids import PeerId

U32_MAX = 2**32 - 1
KB = 1000
PROMPT_POSITIONS = 128
"""The rate of prompts is that of one of this number of positions. A forward has a fixed cost, too."""
SHARED_SESSIONS = 8
"""The throughput of a server is that of this number of sessions at once, if it has KV for them."""
LEAST_FORWARDS = 64
"""After this many forwards of decodes, what they took replaces what was measured before there were sessions."""
OBSERVED_TIMES = 2.0
"""The upload that sessions see counts for at most this many times that of the probes, and for at least this part."""
SEEN_FASTER, SEEN_SLOWER = 4.0, 16.0
"""Sessions make a device seem faster, and slower, than it was measured by these factors at most.

Clients choose the lengths of their contexts and the decodes that are together, and so what the times are fitted to. A
device may have been measured while it was busy. Long contexts and other work make it much slower in truth.
"""
LATEST = 3
"""The latest measurements by which the speed of a machine is believed."""
DOUBTED_SHARE = 0.75
"""A newest figure below this share of the believed one says that the machine may have become slower."""


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """The rates at which a device puts tokens through a whole span, in tokens/s; 0 where one is not known."""

    decode_tokens_per_s: float = 0.0
    """One session alone, token by token."""
    shared_tokens_per_s: float = 0.0
    """The sum of several sessions that decode at once."""
    prefill_tokens_per_s: float = 0.0
    """Positions of a prompt of `PROMPT_POSITIONS` positions, which is alone."""
    shared_sessions: int = 1
    """The number of sessions whose sum that is."""

    def of_sessions(self, sessions: float) -> float:
        """The sum of this number of `sessions` that decode at once: a further one adds the same time to a forward.

        0 if it is not known.
        """
        if not self.decode_tokens_per_s:
            return 0.0
        alone_s, shared_s = 1 / self.decode_tokens_per_s, self.shared_sessions / self.shared_tokens_per_s
        further = self.shared_sessions - 1
        further_s = max(0.0, shared_s - alone_s) / further if further else alone_s
        return sessions / (alone_s + (sessions - 1) * further_s)

    def block_us(self, blocks: int) -> int:
        """The time of one token through one of the span's `blocks`; 0 if it is not known."""
        rate = self.decode_tokens_per_s
        return min(U32_MAX, max(1, round(1e6 / (rate * blocks)))) if rate else 0

    def prefill_ns(self, blocks: int) -> int:
        """The time of one position of a prompt through one of the span's `blocks`; 0 if it is not known."""
        rate = self.prefill_tokens_per_s
        return min(U32_MAX, max(1, round(1e9 / (rate * blocks)))) if rate else 0


@dataclass(frozen=True, slots=True)
class ForwardsSeen:
    """The times of forwards at one worker, for one block, and 0 until they are known."""

    decodes: int = 0
    """The forwards of decodes alone until now."""
    decode_s: float = 0.0
    """The time of a forward with one decode."""
    prefill_s: float = 0.0
    """The time that one position of a prompt adds to a forward."""
    at_once: float = 0.0
    """The average number of decodes in a forward of the latest ones."""
    forward_s: float = 0.0
    """The average time of these forwards."""

    def prefill_tokens_per_s(self, blocks: int) -> float:
        """Positions a second of a prompt of `PROMPT_POSITIONS` through this number of `blocks`; 0 if not known."""
        if not self.prefill_s or not self.decode_s:
            return 0.0
        return PROMPT_POSITIONS / ((self.decode_s + PROMPT_POSITIONS * self.prefill_s) * blocks)


@dataclass(frozen=True, slots=True)
class NetworkSpeed:
    """A node's measurements between itself and other peers of the swarm."""

    upload_bytes_per_s: float = 0.0
    """0 while no peer has taken a probe."""
    round_trips_s: Mapping[PeerId, float] | None = None


@dataclass(frozen=True, slots=True)
class AnnouncedSpeed:
    """The measured part of an offer, in the units of the wire. 0 stands for what is not known."""

    tokens_per_1000_s: int = 0
    """The throughput: see `throughput`."""
    prefill_ns: int = 0
    """The time of one position of a prompt of `PROMPT_POSITIONS` positions through one block."""
    upload_kb_per_s: int = 0
    round_trips_us: tuple[tuple[PeerId, int], ...] = ()
    """Round trips to peers that may be the next hop."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_1000_s / 1000

    @property
    def upload_bytes_per_s(self) -> float:
        return float(KB * self.upload_kb_per_s)

    @property
    def prefill_s(self) -> float:
        """Seconds for one position and block."""
        return self.prefill_ns / 1e9


UNMEASURED = AnnouncedSpeed()


def throughput(compute: ComputeSpeed, network: NetworkSpeed, row_bytes: int) -> float:
    """Tokens a second that a server puts through its span for many sessions; 0 if one of the two is not measured.

    `row_bytes` is the size of one position's hidden state, which leaves the server for each token.
    """
    return min(compute.shared_tokens_per_s, network.upload_bytes_per_s / row_bytes)


def announced_speed(
    compute: ComputeSpeed, network: NetworkSpeed, blocks: int, row_bytes: int, most_peers: int
) -> AnnouncedSpeed:
    """The measured part of the offer of a server with `blocks` blocks: of its `compute`, and of its `network`.

    It names the `most_peers` that are nearest. `row_bytes` is as in `throughput`.
    """
    nearest = sorted((network.round_trips_s or {}).items(), key=lambda each: (each[1], each[0]))[:most_peers]
    rate = throughput(compute, network, row_bytes)
    return AnnouncedSpeed(
        _whole(1000 * rate),
        compute.prefill_ns(blocks),
        _whole(network.upload_bytes_per_s / KB),
        tuple((peer, _whole(1e6 * round_trip_s)) for peer, round_trip_s in nearest),
    )


def seen(measured: ComputeSpeed, forwards: ForwardsSeen, blocks: int) -> ComputeSpeed:
    """`measured`, replaced by the times of `forwards` since then, once there were `LEAST_FORWARDS` of them.

    Several sessions at once are taken to be slower or faster by the same factor as one. `blocks` is the span's length.
    No rate leaves `measured` by more than `SEEN_FASTER` and `SEEN_SLOWER`. A rate of prompts that there was no time to
    measure is as that of decodes: it has a limit by the decodes alone.
    """
    if forwards.decodes < LEAST_FORWARDS or not forwards.decode_s or not measured.decode_tokens_per_s:
        return measured
    decode = _bounded(1 / (forwards.decode_s * blocks), measured.decode_tokens_per_s)
    prefill = replace(forwards, decode_s=1 / (decode * blocks)).prefill_tokens_per_s(blocks)
    prefill = prefill or measured.prefill_tokens_per_s
    if measured.prefill_tokens_per_s > measured.decode_tokens_per_s:
        prefill = _bounded(prefill, measured.prefill_tokens_per_s)
    shared = measured.shared_tokens_per_s * decode / measured.decode_tokens_per_s
    return replace(measured, decode_tokens_per_s=decode, shared_tokens_per_s=shared, prefill_tokens_per_s=prefill)


def _bounded(rate: float, measured: float) -> float:
    return min(max(rate, measured / SEEN_SLOWER), SEEN_FASTER * measured)


def believed(latest: Sequence[ComputeSpeed]) -> ComputeSpeed:
    """The speed of a machine, by its latest measurements. The newest comes first.

    Other work on the machine only ever makes it seem slower. So the newest counts if it is the fastest, else the
    median of three, and the faster one of two. One slow figure changes nothing, and a slowness that lasts is believed
    with the second one.
    """
    by_rate = sorted(latest[:LATEST], key=attrgetter("decode_tokens_per_s"))
    return max(latest[0], by_rate[len(by_rate) // 2], key=attrgetter("decode_tokens_per_s"))


def is_doubtful(latest: Sequence[ComputeSpeed], observed: ComputeSpeed | None = None) -> bool:
    """Whether the machine should be measured again: its newest measurement is much slower than the believed one.

    The same is true if sessions have `observed` since that it is much slower or faster. That changes no figure itself:
    clients shape what sessions observe.
    """
    counts, newest = believed(latest).decode_tokens_per_s, latest[0].decode_tokens_per_s
    seen_since = observed.decode_tokens_per_s if observed else newest
    return min(newest, seen_since) < DOUBTED_SHARE * counts or counts < DOUBTED_SHARE * seen_since


def usual_rate(by_group: Mapping[str, Iterable[float]]) -> float:
    """One rate out of those that peers of several address groups have shown; 0 without any.

    A peer can make a rate seem at most twice as high as it is, but much lower. So the best of each group counts, and of
    these the median.
    """
    best = [max(rates) for rates in by_group.values() if rates]
    return median_low(best) if best else 0.0


def observed_upload(probed_bytes_per_s: float, by_group: Mapping[str, Iterable[float]]) -> float:
    """The upload of a node, by its latest probes and by the rates that peers of sessions have told since (`SendRates`).

    It is the median of the probes' rate and the best rate of each address group. The higher one of two middle rates
    counts, as a single peer may have a slow line itself. Peers can shift it to half of the probes' rate and to
    twice at most. 0 without probes.
    """
    best = [max(rates) for rates in by_group.values()]
    usual = median_high([probed_bytes_per_s, *best])
    return min(max(usual, probed_bytes_per_s / OBSERVED_TIMES), OBSERVED_TIMES * probed_bytes_per_s)


def _whole(value: float) -> int:
    """At least 1 of what is there at all."""
    return min(U32_MAX, max(1, round(value))) if value > 0 else 0
