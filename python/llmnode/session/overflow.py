"""Servers that say that numbers overflow, and when the client believes them.

An adapter or prompts that have diverged, or a scaled loss, make blocks put out numbers that are not finite. An honest
server says so (OVERFLOW), and so would all others: the client's own numbers are at fault. But it is a stranger's word,
and a liar can say it of any numbers. So it is believed

- if the client's own numbers are so large that it may well be true (`Given.excess`), or
- if all servers that can be asked say the same, and nobody has failed in another way. They are of several address
  groups, or some seconds have passed in which nobody else came.

Then the step or pass ends with NumericOverflow, and nobody is blamed. Otherwise the next server is asked, as after any
refusal. When one has computed the step, those that said that it overflows are reported.

Gradients that overflow end nothing: a scaler of losses goes on with a smaller scale. So there two servers of different
address groups are believed, or all that can be asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import NO_PROMPTS, DeepPrompts
from llmnode.errors import NumericOverflow, PeerRefused
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.operations import Buffer
    from llmnode.core.span import Span
    from llmnode.errors import PeerError
    from llmnode.wire.adapter import Adapter

AGREEING_GROUPS = 2
"""A session ends if peers of this many address groups blame it: identities are free, and one peer may lie."""

LARGEST = 2.0**20
"""Numbers of a client that are larger have diverged. Adapters and prompts that work have numbers below some hundreds,
and the outliers of hidden states are in the thousands (Sun et al. 2024, *Massive activations*)."""
_LARGEST_BITS = (127 + 20) << 23
"""The same number, as the bits of fp32."""

_WHAT_TO_DO = (
    "Has training diverged? Go back to the adapter, prompts or weights of before, and use a smaller learning rate or "
    "clipped gradients"
)
_MAY_SAY_SO = {RefusalCode.OVERFLOW, RefusalCode.COMPUTE_FAILED}
"""Servers of before said the second of steps and forwards. They may mean something else by it."""


@dataclass(frozen=True, slots=True)
class Given:
    """All numbers of the client's own that blocks compute with in one step or pass."""

    adapter: Adapter | None = None
    prompts: DeepPrompts = NO_PROMPTS
    numbers: Sequence[Buffer] = ()
    """Hidden states and gradients, in fp32."""
    codec: Codec = Codec.RAW

    def excess(self) -> str:
        """Says which of them are larger than any that work; empty if none are. It looks at each number."""
        if self.adapter is not None and not self.adapter.largest <= LARGEST:
            return f"the adapter has numbers up to {self.adapter.largest:.1e}"
        if self.prompts and not _are_usual(self.prompts.values):
            return f"the prompts have numbers above {LARGEST:.1e}"
        if not all(map(_are_usual, self.numbers)):
            return f"the hidden states or gradients have numbers above {LARGEST:.1e}"
        return ""

    def error(self, span: Span | None, why: str) -> NumericOverflow:
        """The error for a step or pass that overflows in the blocks of `span`."""
        where = "remote blocks" if span is None else f"blocks [{span.start}, {span.end})"
        codec = ". The codec fp16 carries numbers up to 65504: raw and bf16 carry more"
        return NumericOverflow(f"numbers overflow in {where}: {why}. {_WHAT_TO_DO}{codec * (self.codec is Codec.FP16)}")


def not_sent(what: str) -> NumericOverflow:
    """The error for numbers of the client with which no server can compute."""
    return NumericOverflow(f"{what} that are not finite, or too large: they are not sent. {_WHAT_TO_DO}")


@dataclass(frozen=True, slots=True)
class _Claim:
    error: PeerRefused
    group: str | None
    since_s: float
    """When the peer said so first."""

    def is_of(self, span: Span | None) -> bool:
        """Whether it is about some of the blocks of `span`."""
        own = self.error.span
        return own is None or span is None or (own.start < span.end and span.start < own.end)


@dataclass(slots=True)
class OverflowClaims:
    """The servers that say that one step or pass overflows, until somebody has computed it. Knows no clock."""

    given: Given = field(default_factory=Given)
    ends_nothing: bool = False
    """It is a backward."""
    _claims: dict[PeerId, _Claim] = field(default_factory=dict)

    def note(self, error: PeerError, group: str | None, now_s: float) -> bool:
        """A peer of the address `group` has not computed it. Returns whether it says that numbers overflow.

        Raises NumericOverflow if that is believed at once.
        """
        before = None if error.peer is None else self._claims.pop(error.peer, None)
        may_say_so = {RefusalCode.OVERFLOW} if self.ends_nothing else _MAY_SAY_SO
        if not isinstance(error, PeerRefused) or error.code not in may_say_so:
            return False
        if excess := self.given.excess():
            raise self.given.error(error.span, excess) from error
        if error.peer is None or error.code != RefusalCode.OVERFLOW:
            return False
        claim = _Claim(error, group, now_s if before is None else before.since_s)
        self._claims[error.peer] = claim
        if self.ends_nothing and _groups(alike := self._like(claim)) >= AGREEING_GROUPS:
            raise self._believed(alike)
        return True

    def check_alone(self, failed: Collection[PeerId], now_s: float, patience_s: float) -> None:
        """Nobody else can be asked now; `failed` are all peers that have failed. Raises NumericOverflow if those that
        say that numbers overflow are believed.
        """
        if not self._claims:
            return
        alike = self._like(list(self._claims.values())[-1])
        is_old = now_s - min(each.since_s for each in alike) >= patience_s
        all_agree = set(failed) <= self._claims.keys()
        if self.ends_nothing or (all_agree and (is_old or _groups(alike) >= AGREEING_GROUPS)):
            raise self._believed(alike)

    def refuted(self) -> Iterator[PeerRefused]:
        """The claims that are wrong, now that somebody has computed it."""
        return (each.error for each in self._claims.values())

    def _like(self, claim: _Claim) -> list[_Claim]:
        return [each for each in self._claims.values() if each.is_of(claim.error.span)]

    def _believed(self, alike: Sequence[_Claim]) -> NumericOverflow:
        error, number = alike[-1].error, len(alike)
        who = f"{number} servers say so, and no other" if number > 1 else "a server says so, and no other one"
        believed = self.given.error(error.span, f"{who} can be asked")
        believed.__cause__ = error
        return believed


def _are_usual(numbers: Buffer) -> bool:
    return _native.are_within(numbers, FP32_BYTES, _LARGEST_BITS)


def _groups(claims: Sequence[_Claim]) -> int:
    return len({each.group for each in claims} - {None})
