"""Spot checks of passes: a share of the answers is computed again by another peer before it is used, and compared.

The client has all that went into the blocks, so the second peer gets the very question of the first one, and neither
knows that it is a check. If their answers differ, more peers are asked until two agree, from different address groups
if there are such. The answer of these two is kept, and the others are not used any more. Two of one group do not
convict a peer of another one. If nobody decides, but another peer of the blocks is known, the check waits for it for a
while. Without a decision all that differ are suspected, and the first answer is kept. Answers
that were not checked are not taken back: a warning names their peer. Blocks that only one peer holds whole are not
checked.

A pass has no receipts, so nobody else has to believe the verdict. `spot_checks.py` does the same for sessions.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.errors import NoRoute, PeerError
from llmnode.session.recompute import deviations, tolerance

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.session.pass_answer import PassAnswer
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.wire.payload import Codec

log = logging.getLogger(__name__)

_MOST_ASKED = 4
"""Peers that are asked for one opinion."""
_MOST_OPINIONS = 5
"""The peers that compute one pass, until two of them agree. Two liars that differ may be the first."""
_TIMES_SLOWER = 3.0
"""A second peer may take this many times as long as the first one, if that is more than the policy's time."""
_TIMES_ALL = 2.0
"""All peers that are asked in one check may take this many times as long as the second one: training waits for it."""
_SILENT_S = 600.0
"""A peer that was asked in a check and did not answer is not asked in others for this long."""
_MOST_SILENT = 256
"""The last ones of these peers are remembered."""
_AWAY_S = 10.0
"""If nobody decides between answers that differ, other peers of the blocks that are known may be back in this time: one
restarts, or is banned for some seconds. Training waits for it."""
GRADIENT_TIMES = 4.0
"""Gradients may differ by four times the tolerance of outputs, since they cross the blocks twice.

Measured between one batch and its sequences alone, and between one thread and two, over SmolLM2 in float32: outputs
2.6e-6, gradients 8.4e-6. 4e-4 is allowed. With noise for a gradient, LoRA and deep prompts in all blocks: positions
4.3e-5, those of prompts 5.1e-5, blocks of the adapter 3.7e-5. With weights in int8: 0.32, 0.03 and 0.10 of 0.5.
"""
MOST_APART = 0.45
"""Gradients may differ by no more, or by the tolerance of outputs if that is more: halved ones are 0.5 apart, and
zeros 1."""
_LEAST_SIZE = 0.1
"""A position whose gradient is small counts with this share of the root mean square of all positions: the parts of a
sum that cancel leave an error of the size of the parts. The same holds for a block of an adapter among its blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Opinion:
    peer: PeerId
    group: str
    answer: PassAnswer


@dataclass(frozen=True, slots=True)
class _Patience:
    """One peer may take `each_s`, and all peers of one check together until `until_s`."""

    each_s: float
    until_s: float

    @classmethod
    def beginning_now(cls, each_s: float) -> _Patience:
        return cls(each_s, trio.current_time() + _TIMES_ALL * each_s)


class PassChecks:
    """The checks of one client's passes."""

    def __init__(self, finder: PeerFinder, codec: Codec) -> None:
        self.passed = 0
        self.undecided = 0
        """Checks that found a difference, but not the peer at fault."""
        self.given_up = 0
        """Checks for which no peer could be asked."""
        self.found: list[PeerId] = []
        """The peers that were outvoted."""
        self.largest_deviation = 0.0
        """The largest deviation of two peers that count as agreeing, as a share of what is allowed."""
        self._finder = finder
        self._policy = finder.policy.spot_checks
        asked_for = self._policy.tolerance
        self._tolerance = tolerance(finder.model.precision, codec) if asked_for is None else asked_for
        self._silent_until_s: dict[PeerId, float] = {}

    def is_due(self) -> bool:
        """Whether the next answer is to be checked. That is drawn for each one."""
        share = self._policy.share
        return bool(share) and self._finder.rng.random() < share

    async def checked(
        self,
        answer: PassAnswer,
        connection: PeerConnection,
        span: Span,
        took_s: float,
        ask: Callable[[PeerConnection], Awaitable[PassAnswer]],
        *,
        is_gradient: bool,
        unfit: Collection[PeerId] = (),
    ) -> PassAnswer:
        """`answer`, which the peer at `connection` gave for the blocks of `span` in `took_s`, or that of two others.

        `ask` puts the same question to another peer. Peers that are `unfit`, or were silent in a check lately, are not
        asked. Raises no PeerError.
        """
        own = _Opinion(connection.peer, connection.source.group, answer)
        asked = {own.peer, *unfit, *self._silent_now()}
        patience = _Patience.beginning_now(max(self._policy.timeout_s, _TIMES_SLOWER * took_s))
        opinions = [own]
        while len(opinions) < _MOST_OPINIONS:
            another = await self._another(span, asked, opinions, patience, ask)
            if another is None and len(opinions) > 1:
                another = await self._back_in_time(span, unfit, opinions, patience, ask)
            if another is None:
                break
            alike = [each for each in opinions if await self._agree(each, another, is_gradient=is_gradient)]
            others = [each for each in opinions if each not in alike]
            if not others:
                self.passed += 1
                return answer
            opinions.append(another)
            log.warning("%s do not compute the same, span=%s", _names(opinions), span)
            if alike and not _are_one_voice([*alike, another], others):
                self.passed += own in alike
                self._outvote(others, [*alike, another])
                return alike[0].answer
        if len(opinions) == 1:
            log.info("no spot check of a pass, span=%s: nobody else computes it now", span)
            self.given_up += 1
        else:
            self._suspect(opinions)
        return answer

    async def _another(
        self,
        span: Span,
        asked: set[PeerId],
        others: Sequence[_Opinion],
        patience: _Patience,
        ask: Callable[[PeerConnection], Awaitable[PassAnswer]],
    ) -> _Opinion | None:
        """The answer of a peer that is not in `asked`, if possible of another group than `others`. None if none does.

        A peer that refuses, fails or is slow is passed over.
        """
        groups = {each.group for each in others}
        for _ in range(_MOST_ASKED):
            began_s = trio.current_time()
            peer: PeerId | None = None
            uploading_s: Callable[[], float] = float
            with trio.move_on_at(min(began_s + patience.each_s, patience.until_s)):
                try:
                    hop, connection = await self._finder.find_twin(span, asked, groups)
                    asked.add(peer := hop.peer)
                    uploading_s = connection.lane.stopwatch()
                    return _Opinion(peer, connection.source.group, await ask(connection))
                except NoRoute:
                    return None
                except PeerError as error:
                    if (peer := error.peer) is not None:
                        asked.add(peer)
            if peer is not None and trio.current_time() - began_s - uploading_s() >= patience.each_s / 2:
                self._note_silent(peer)
            if trio.current_time() >= patience.until_s:
                return None
        return None

    async def _back_in_time(
        self,
        span: Span,
        unfit: Collection[PeerId],
        opinions: Sequence[_Opinion],
        patience: _Patience,
        ask: Callable[[PeerConnection], Awaitable[PassAnswer]],
    ) -> _Opinion | None:
        """The answer of a further peer, if one that is known, and was away or silent, is there again in time."""
        until_s = trio.current_time() + _AWAY_S
        apart = {*unfit, *(each.peer for each in opinions)}
        while trio.current_time() < until_s and self._is_another_known(span, apart):
            with trio.move_on_after(self._finder.policy.route.retry_s):
                await self._finder.wait_changed()
            another = await self._another(span, {*apart}, opinions, _Patience(patience.each_s, until_s), ask)
            if another is not None:
                return another
        return None

    def _is_another_known(self, span: Span, apart: Collection[PeerId]) -> bool:
        return any(each.offer.span.covers(span) and each.peer not in apart for each in self._finder.holders())

    def _silent_now(self) -> list[PeerId]:
        now_s = trio.current_time()
        return [peer for peer, until_s in self._silent_until_s.items() if until_s > now_s]

    def _note_silent(self, peer: PeerId) -> None:
        silent = {each: self._silent_until_s[each] for each in self._silent_now()[1 - _MOST_SILENT :]}
        self._silent_until_s = {**silent, peer: trio.current_time() + _SILENT_S}

    async def _agree(self, one: _Opinion, other: _Opinion, *, is_gradient: bool) -> bool:
        allowed = allowed_for_gradients(self._tolerance) if is_gradient else self._tolerance
        measure, size = _gradient_deviation if is_gradient else _output_deviation, self._finder.model.hidden_size
        apart: float = await self._finder.run(measure, one.answer, other.answer, size)
        log.debug("spot check of a pass: %s and %s are %.2g apart", one.peer, other.peer, apart)
        if apart > allowed:
            return False
        self.largest_deviation = max(self.largest_deviation, apart / allowed if allowed else 0.0)
        return True

    def _outvote(self, liars: Sequence[_Opinion], others: Sequence[_Opinion]) -> None:
        for liar in liars:
            log.warning(
                "peer=%s is not used any more: %s compute otherwise. Its earlier answers may be wrong too: "
                "go back to weights from before it was used",
                liar.peer,
                _names(others),
            )
            self.found.append(liar.peer)
            self._finder.distrust(liar.peer)

    def _suspect(self, opinions: Sequence[_Opinion]) -> None:
        log.warning("one of %s computes wrongly, and nobody decides who: all are suspected", _names(opinions))
        self.undecided += 1
        self._finder.suspect([each.peer for each in opinions])


def allowed_for_gradients(allowed: float) -> float:
    """The deviation that gradients may have, where outputs may have `allowed`: both are shares."""
    return max(allowed, min(GRADIENT_TIMES * allowed, MOST_APART))


def _are_one_voice(alike: Sequence[_Opinion], others: Sequence[_Opinion]) -> bool:
    """Whether those that agree may be one stranger: they are in one address group, and one of `others` is not."""
    groups = {each.group for each in alike}
    return len(groups) == 1 and any(each.group not in groups for each in others)


def _names(opinions: Sequence[_Opinion]) -> str:
    return " and ".join(each.peer for each in opinions)


def _output_deviation(one: PassAnswer, other: PassAnswer, hidden_size: int) -> float:
    """The largest relative L2 error of a position."""
    return max(deviations(one.rows, other.rows, hidden_size))


def _gradient_deviation(one: PassAnswer, other: PassAnswer, hidden_size: int) -> float:
    """The largest relative L2 error: of a position, of a block of the adapter, and of a position of a prompt."""
    rows, prompts, blocks = zip(*(_parts(each, hidden_size) for each in (one, other)), strict=True)
    return max(_apart(*rows), _apart(*prompts), _apart(*blocks))


def _parts(answer: PassAnswer, hidden_size: int) -> tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]:
    """The gradients of each position, of each position of a prompt, and of each block of the adapter."""
    ends = np.cumsum(answer.adapter_sizes, dtype=int)
    by_block = np.split(answer.of_adapter, ends[:-1]) if answer.adapter_sizes else [answer.of_adapter]
    rows = np.frombuffer(answer.rows, "<f4")
    return rows.reshape(-1, hidden_size), answer.of_prompts.reshape(-1, hidden_size), by_block


def _apart(one: Sequence[np.ndarray] | np.ndarray, other: Sequence[np.ndarray] | np.ndarray) -> float:
    """The largest relative error of a row, where a small row counts as larger than it is. Infinite for no number."""
    if all(map(np.array_equal, one, other)):
        return 0.0
    with np.errstate(all="ignore"):
        wide = [[row.astype(np.float64) for row in each] for each in (one, other)]
        sizes = [[np.linalg.norm(row) for row in rows] for rows in wide]
        size = np.maximum(sizes[0], sizes[1])
        least = _LEAST_SIZE * np.sqrt(np.mean(size**2))
        error = np.array([np.linalg.norm(mine - theirs) for mine, theirs in zip(*wide, strict=True)])
        share = error / np.maximum(size, least)
    return float(np.nan_to_num(share, nan=np.inf, posinf=np.inf).max())
