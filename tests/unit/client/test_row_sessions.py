"""The sessions of a batch's rows open several at a time, over a client that says when each may."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.client.cache_terms import CacheTerms
from llmnode.client.portal import open_portal
from llmnode.client.row_sessions import AT_ONCE, SessionOpener
from llmnode.errors import ConfigError, PeerRefused
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATIENCE_S = 20.0


@dataclass(eq=False)
class Session:
    number: int
    beside: Session | None
    rows: str
    adapter: Any


class Opening:
    """A client. Each session opens when `together` are under way, or all that there will be."""

    def __init__(self, together: int, most: int = 1000, error: Exception | None = None) -> None:
        """The sessions after `most` do not open: they raise `error`."""
        self.waits: list[bool] = []
        self.open: set[int] = set()
        self.most_under_way = 0
        self._together, self._most, self._error = together, most, error
        self._under_way = 0
        self._changed = trio.Event()

    @asynccontextmanager
    async def inference_session(self, _length: int, beside: Session | None, **terms: Any) -> AsyncIterator[Session]:
        number = len(self.waits)
        self.waits.append(terms["waits"])
        self._under_way += 1
        self.most_under_way = max(self.most_under_way, self._under_way)
        self._change()
        with trio.fail_after(PATIENCE_S):
            while number and self.most_under_way < self._together:
                await self._changed.wait()
        self._under_way -= 1
        if number >= self._most:
            assert self._error is not None
            raise self._error
        self.open.add(number)
        try:
            yield Session(number, beside, terms["rows"] or "those of the first", terms["adapter"])
        finally:
            self.open.remove(number)

    def _change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def test_the_first_row_opens_alone_and_waits_for_kv_and_the_others_open_together() -> None:
    client: Any = Opening(together=AT_ONCE)
    with open_portal() as portal:
        opened: dict[Any, Any] = {}
        opener = SessionOpener(portal, client, CacheTerms(8), opened)
        sessions: Any = opener.open_rows(range(AT_ONCE + 4))
        assert client.open == {each.number for each in sessions} == set(range(AT_ONCE + 4))
        assert client.waits == [True] + [False] * (AT_ONCE + 3)
        assert client.most_under_way == AT_ONCE, "and no more"
        assert {each.rows for each in sessions} == {"those of the first"}
        for entered in opened.values():
            entered.close()
        assert not client.open


def test_rows_that_begin_alike_open_beside_their_first_and_beside_other_rows_if_there_are_any() -> None:
    client: Any = Opening(together=2)
    with open_portal() as portal:
        adapters: Any = "abcde"
        sessions: Any = SessionOpener(portal, client, CacheTerms(8, adapters=adapters), {}).open_rows([0, 0, 2, 2, 2])
        assert [each.adapter for each in sessions] == list(adapters)
        first, *_ = sessions
        assert [each.beside for each in sessions] == [None, first, None, sessions[2], sessions[2]]
        besides: Any = SessionOpener(portal, client, CacheTerms(8), {}).open_rows(range(5), sessions)
        assert [each.beside for each in besides] == sessions
        assert [each.adapter for each in besides] == list(adapters)


def test_a_refusal_says_how_many_rows_fit_and_leaves_none_under_way() -> None:
    refusal = PeerRefused(RefusalCode.BUSY, "64 sessions are open")
    client: Any = Opening(together=4, most=3, error=refusal)
    with open_portal() as portal:
        opened: dict[Any, Any] = {}
        opener = SessionOpener(portal, client, CacheTerms(8), opened)
        with pytest.raises(PeerRefused, match="64 sessions are open; only 3 of 5 rows fit"):
            opener.open_rows(range(5))
        assert client.open == {0, 1, 2} == {each.number for each in opened}


def test_after_another_error_those_under_way_are_given_up() -> None:
    client: Any = Opening(together=4, most=1, error=ConfigError("no prompts"))
    with open_portal() as portal:
        opened: dict[Any, Any] = {}
        opener = SessionOpener(portal, client, CacheTerms(8), opened)
        with pytest.raises(ConfigError, match="no prompts"):
            opener.open_rows(range(5))
        assert client.open == {0} == {each.number for each in opened}
