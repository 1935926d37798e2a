"""When packing what crosses a link pays (`_native.pack`): how fast the link is, what packing gains and what it costs.

It holds values alone; `net/packer.py` packs, and looks at the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.policy import PackPolicy

U32_MAX = 2**32 - 1
KEEPS = 0.75
"""The share that the older measurements of packing's gain keep at each new one."""
RISES = 1.25
"""A new measurement raises the cost by at most this factor."""
PACKED_SHARES = {"float32": (0.85, 0.87), "float16": (0.45, 0.49), "bfloat16": (0.35, 0.39)}
"""The share of its bytes that packing leaves of a prompt's hidden states, and of one token's, by the model's dtype.
They cross a link in 32 bits. SmolLM2-135M after each of four blocks: all are within 0.01
(`tests/reference/test_packed_shares.py`).
"""
PACKS_BELOW = (30e6, 2e6)
"""A prompt, and a token, are usually packed on links that are slower than this, in bytes/s. `tests/bench/codec` found
34e6 and 2.4e6 for float32.
"""


def usual_share(dtype: str, positions: int, bytes_per_s: float) -> float:
    """The share of their bytes that these `positions` of hidden states usually take on a link of this speed."""
    part = 0 if positions > 1 else 1
    return PACKED_SHARES.get(dtype, (1.0, 1.0))[part] if bytes_per_s < PACKS_BELOW[part] else 1.0


class ArrivalRate:
    """How fast a link brings large frames, by when their parts come.

    Only the receiver can tell: a write returns when windows, proxies and kernels have free buffers, megabytes before
    its bytes are through. It says so to the sender.
    """

    def __init__(self, policy: PackPolicy) -> None:
        self._policy = policy
        self._bytes = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None  # when a part of the coming frame came last, or a measured part ended
        self._run_bytes = 0  # since then
        self._told: float | None = None

    @property
    def bytes_per_s(self) -> float | None:
        """None as long as no frame was large enough."""
        return self._bytes / self._seconds if self._seconds else None

    def note(self, size_bytes: int, now_s: float, *, inside: bool) -> None:
        """`size_bytes` came now. `inside` says whether they begin a frame or a frame goes on after them."""
        if self._since_s is None:
            self._since_s, self._run_bytes = (now_s, 0) if inside else (None, 0)
            return
        self._run_bytes += size_bytes
        if self._run_bytes >= self._policy.rate_bytes and now_s > self._since_s:
            self._bytes = self._policy.rate_keeps * self._bytes + self._run_bytes
            self._seconds = self._policy.rate_keeps * self._seconds + now_s - self._since_s
            self._since_s, self._run_bytes = now_s, 0
        if not inside:
            self._since_s = None

    @property
    def has_news(self) -> bool:
        """Whether it is worth telling the sender now."""
        rate, told = self.bytes_per_s, self._told
        return rate is not None and (told is None or abs(rate - told) > self._policy.tell_change * told)

    def tell_kilobytes_per_s(self) -> int:
        """The rate for the sender. It is never 0, which says that nothing is known."""
        self._told = self.bytes_per_s
        return 0 if self._told is None else min(max(1, round(self._told / 1000)), U32_MAX)


@dataclass(slots=True)
class _Measured:
    """The results for payloads of one kind and size."""

    ratio: float
    pack_s_per_byte: float
    left: int = 0
    """Payloads that went unpacked since the last sample."""


class PackChoice:
    """The sending side's choice for a link: to pack a payload or not. Payloads count as alike if their sizes have the
    same number of bits.
    """

    def __init__(self, policy: PackPolicy) -> None:
        self._policy = policy
        self.bytes_per_s: float | None = None
        """The rate of the link, told by its receiver. Only a receiver that can unpack tells it."""
        self._measured: dict[tuple[int, int], _Measured] = {}
        self._unpack_s_per_byte: float | None = None

    def wants_sample(self, value_bytes: int, size_bytes: int) -> bool:
        """Whether a part of this payload is to be packed, for `note` alone, before `pays` is asked."""
        if not value_bytes or size_bytes < self._policy.least_bytes or self.bytes_per_s is None:
            return False
        measured = self._measured.get(_alike(value_bytes, size_bytes))
        if measured is None:
            return True
        measured.left += 1
        return measured.left >= self._policy.sample_every

    def pays(self, value_bytes: int, size_bytes: int) -> bool:
        """Whether the payload is through sooner if it is packed: by enough, and as far as is known."""
        measured = self._measured.get(_alike(value_bytes, size_bytes))
        if measured is None or self.bytes_per_s is None:
            return False
        saved_s = size_bytes * (1 - measured.ratio) / self.bytes_per_s
        unpack_s_per_byte = self._unpack_s_per_byte
        if unpack_s_per_byte is None:
            unpack_s_per_byte = measured.pack_s_per_byte  # it is faster, in fact
        return saved_s > self._policy.margin * size_bytes * (measured.pack_s_per_byte + unpack_s_per_byte)

    def note(self, value_bytes: int, size_bytes: int, tried_bytes: int, packed_bytes: int, took_s: float) -> None:
        """The first `tried_bytes` of a payload of `size_bytes`, perhaps all, were packed."""
        ratio, s_per_byte = packed_bytes / tried_bytes, took_s / tried_bytes
        before = self._measured.get(_alike(value_bytes, size_bytes))
        if before is not None:
            ratio = KEEPS * before.ratio + (1 - KEEPS) * ratio
            s_per_byte = _steady(before.pack_s_per_byte, s_per_byte)
        self._measured[_alike(value_bytes, size_bytes)] = _Measured(ratio, s_per_byte)

    def note_unpacked(self, size_bytes: int, took_s: float) -> None:
        """A payload from the other side was unpacked. Its machine is taken to be as fast as ours."""
        if size_bytes >= self._policy.least_bytes:
            before = self._unpack_s_per_byte
            s_per_byte = took_s / size_bytes
            self._unpack_s_per_byte = s_per_byte if before is None else _steady(before, s_per_byte)


def _steady(before: float, now: float) -> float:
    """A cost that falls at once and rises slowly: a call takes longer for many reasons that are over with it."""
    return min(now, RISES * before)


def _alike(value_bytes: int, size_bytes: int) -> tuple[int, int]:
    return value_bytes, size_bytes.bit_length()
