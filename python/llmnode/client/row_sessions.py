"""Opens the sessions of a batch's rows, several at a time: each takes a round trip to its servers."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from llmnode.errors import LlmnodeError, PeerRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.client.cache_terms import CacheTerms
    from llmnode.client.connect import Client
    from llmnode.client.portal import Entered, Portal
    from llmnode.session.rows import Rows
    from llmnode.session.session import InferenceSession
    from llmnode.wire.adapter import Adapter

AT_ONCE = 16
"""Sessions that are being opened at a time. With more, a server would queue them, and others would wait for it."""


class SessionOpener:
    """Opens sessions of one client, on the same `terms`."""

    def __init__(
        self,
        portal: Portal,
        client: Client,
        terms: CacheTerms,
        opened: dict[InferenceSession, Entered[InferenceSession]],
    ) -> None:
        """Those that have opened are put into `opened`. `Entered` closes them."""
        self._opened = opened
        self._portal = portal
        self._client = client
        self._terms = terms
        self._begun: deque[tuple[int, Entered[InferenceSession]]] = deque()
        self._rows: dict[int, InferenceSession] = {}

    def open(
        self, adapter: Adapter | None, beside: InferenceSession | None, rows: Rows | None, *, waits: bool
    ) -> InferenceSession:
        """One session, as `Client.inference_session` opens it. Raises as that does."""
        entered = self._begin(adapter, beside, rows, waits=waits)
        session = self._portal.wait(entered.opened, entered.scope)
        self._opened[session] = entered
        return session

    def open_rows(
        self, firsts: Sequence[int], beside: Sequence[InferenceSession] | None = None
    ) -> list[InferenceSession]:
        """Sessions that wait for each other, the first one before the others. It alone waits for KV, if the terms say
        so: the others would wait for what these themselves hold. A row beside one of `beside` has its adapter.

        `firsts` has for each row the first one that begins with the same tokens. It opens beside that row, or
        beside its own of `beside`. Raises the error of one of them, and then some may have `opened`. PeerRefused says
        how many rows fit.
        """
        self._rows = {}
        try:
            self._open_all(firsts, beside)
        except PeerRefused as error:
            self._begun.popleft()
            while self._begun:
                with suppress(LlmnodeError):
                    self._settle()
                    continue
                self._begun.popleft()
            raise _with_count(error, len(self._rows), len(firsts)) from error
        finally:
            for _, each in self._begun:
                each.cancel()
        return [self._rows[row] for row in range(len(firsts))]

    def _open_all(self, firsts: Sequence[int], beside: Sequence[InferenceSession] | None) -> None:
        for row in sorted(range(len(firsts)), key=lambda row: firsts[row] != row):  # else copies wait one by one
            first = firsts[row]
            while self._begun and (
                len(self._begun) == AT_ONCE or not self._rows or (first != row and first not in self._rows)
            ):
                self._settle()
            neighbour = beside[row] if beside is not None else self._rows.get(first)
            adapter = beside[row].adapter if beside is not None else self._terms.adapter_of(row)
            rows = self._rows[0].rows if self._rows else None
            self._begun.append((row, self._begin(adapter, neighbour, rows, waits=self._terms.waits and not row)))
        while self._begun:
            self._settle()

    def _settle(self) -> None:
        """Wait for the one that was begun first."""
        row, entered = self._begun[0]
        session = self._portal.wait(entered.opened, entered.scope)
        self._begun.popleft()
        self._rows[row] = session
        self._opened[session] = entered

    def _begin(
        self, adapter: Adapter | None, beside: InferenceSession | None, rows: Rows | None, *, waits: bool
    ) -> Entered[InferenceSession]:
        terms = self._terms
        opening = self._client.inference_session(
            terms.max_length,
            beside,
            priority=terms.priority,
            waits=waits,
            adapter=adapter,
            prompts=terms.prompts,
            rows=rows,
        )
        return self._portal.begin(opening)


def _with_count(error: PeerRefused, opened: int, rows: int) -> PeerRefused:
    if rows == 1:
        return error
    reason = f"{error.reason}; only {opened} of {rows} rows fit"
    return PeerRefused(error.code, reason, retry_after_s=error.retry_after_s, peer=error.peer, span=error.span)
