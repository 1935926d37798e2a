"""Tokens that several texts of one client begin with: they are run once, and each text goes on from a copy.

The copies are the servers' (`InferenceSession.fork`). Knows no text: it is given token ids.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.client.generate import run_blocks
from llmnode.core.priority import PRIORITIES
from llmnode.core.texts.shared_prefix import shared_beginnings
from llmnode.errors import PeerRefused, single_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.client.connect import Client
    from llmnode.core.route import Route
    from llmnode.session.session import InferenceSession


class Beginning:
    """Tokens that several texts begin with. They are run once for all texts of a route, whose servers copy their KV.

    The session that holds that KV takes memory beside the texts. If none is free, each text runs all of it.
    """

    def __init__(self, client: Client, token_ids: Sequence[int], takers: int, within: Beginning | None = None) -> None:
        """`takers` is the number of texts that begin so. This beginning goes on from `within`, as one of its takers."""
        self._client = client
        self._token_ids = token_ids
        self._takers = takers
        self._within = within
        self._is_shared = takers > 1 and len(token_ids) > 0
        self._sources: dict[Route, tuple[InferenceSession, AsyncExitStack]] = {}
        self._lock = trio.Lock()

    @asynccontextmanager
    async def session(self, max_length: int) -> AsyncIterator[InferenceSession]:
        """For one of the takers: it holds these tokens, or a beginning of them. Others wait while they are run.

        Raises as `Client.inference_session`, and SessionLost.
        """
        async with AsyncExitStack() as stack:
            try:
                session = await self._open(stack, max_length, waits=not self._holds_kv())
            except PeerRefused:
                await self._give_up()
                session = await self._open(stack, max_length, waits=True)
            await self._fill(session)
            await self._count_taker()
            yield session

    async def close(self) -> None:
        """End the sessions that hold the tokens. Safe to call twice."""
        while self._sources:
            _, stack = self._sources.popitem()[1]
            await stack.aclose()

    async def _open(
        self, stack: AsyncExitStack, max_length: int, *, waits: bool, beside: InferenceSession | None = None
    ) -> InferenceSession:
        opening = self._client.inference_session(max_length, beside, priority=PRIORITIES["batch"], waits=waits)
        with single_error():
            return await stack.enter_async_context(opening)

    async def _fill(self, session: InferenceSession) -> None:
        """Have an empty session hold these tokens; or those of `within`, if these are not shared."""
        async with self._lock:
            source = await self._source_for(session) if self._is_shared else None
            if source is not None:
                await source.fork([session])
            elif self._within is not None:
                await self._within._fill(session)

    async def _source_for(self, session: InferenceSession) -> InferenceSession | None:
        """The session that holds them at the peers of `session`. The first one there runs them; None without KV."""
        route = session.route
        if route in self._sources:
            return self._sources[route][0]
        async with AsyncExitStack() as stack:
            try:
                source = await self._open(stack, len(self._token_ids), waits=False, beside=session)
            except PeerRefused:
                self._is_shared = False
                await self.close()
                return None
            if self._within is not None:
                await self._within._fill(source)
            if rest := self._token_ids[source.position :]:
                await run_blocks(source, await self._client.ends.embed_beside(rest, source.position))
            self._sources[route] = source, stack.pop_all()
        return source

    def _holds_kv(self) -> bool:
        return bool(self._sources) or (self._within is not None and self._within._holds_kv())

    async def _give_up(self) -> None:
        async with self._lock:
            self._is_shared = False
            await self.close()
        if self._within is not None:
            await self._within._give_up()

    async def _count_taker(self) -> None:
        async with self._lock:
            self._takers -= 1
            if self._takers:
                return
            await self.close()
        if self._within is not None:
            await self._within._count_taker()


@asynccontextmanager
async def beginnings(
    client: Client, prompts: Sequence[Sequence[int]], samples: int
) -> AsyncIterator[Sequence[Beginning]]:
    """For each prompt, the beginning of its `samples` texts: all but its last token, which each text runs itself."""
    found: list[Beginning] = []
    shared: list[Beginning] = []
    for run in shared_beginnings(prompts):
        together = Beginning(client, prompts[run.texts.start][: run.tokens], len(run.texts))
        shared.append(together)
        found += [Beginning(client, prompts[text][:-1], samples, together) for text in run.texts]
    try:
        yield found
    finally:
        for each in [*found, *shared]:
            await each.close()
