"""What transformers passes on as its cache: sessions, one for each row of a batch.

The keys and values themselves are with the servers. Rows of unequal length need no padding there: what transformers
pads on the left is left out of the row's session.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import trio
from transformers import Cache

from llmnode.client.generate import run_blocks
from llmnode.core.beams import sessions_of_rows
from llmnode.core.beginnings import shared_beginnings
from llmnode.errors import ConfigError, LocalProtocolError, PeerRefused, SessionClosed, single_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llmnode.client.connect import Client, Resumed
    from llmnode.client.portal import Portal
    from llmnode.client.session import InferenceSession
    from llmnode.core.route import Route
    from llmnode.core.scheduling import Priority

POSITIONS_PER_HOP = 1024
"""Of a batch, so many are under way together: one chunk that a hop computes, and one that waits. With more, the last of
many long rows would only wait in a server's memory, until its step counts as lost."""


class SessionCache(Cache):
    """`rows` sessions of `max_length` positions, opened at once. A context manager; `close` frees the servers' KV.

    Columns are positions of the padded batch, as transformers counts them; `paddings` says for each row how many of the
    first ones are not in its session.
    """

    def __init__(
        self,
        portal: Portal,
        client: Client,
        rows: int,
        max_length: int,
        alike: int = 1,
        priority: Priority | None = None,
        beside: SessionCache | None = None,
        waits: bool = True,
    ) -> None:
        """Of `alike` rows that follow each other, copies will be made of one another; or of the rows of `beside`.

        If there is no room, it `waits` for some. Raises PeerRefused or NoRoute.
        """
        super().__init__(layers=[])
        self.columns = 0
        self.paddings: list[int] = [0] * rows
        self.token_ids: tuple[int, ...] = ()
        """Of a resumed one, those that it was exported with."""
        self._portal = portal
        self._client = client
        self._priority = priority
        self._sessions: list[InferenceSession] = []
        with ExitStack() as stack:
            for row in range(rows):
                original = self._sessions[row - row % alike] if row % alike else None
                original = beside._sessions[row] if beside is not None else original
                opening = client.inference_session(max_length, original, priority=priority, waits=waits and not row)
                with _told_of_rows(row, rows):
                    self._sessions.append(stack.enter_context(portal.enter(opening)))
            self._stack = stack.pop_all()

    @classmethod
    def resumed(cls, portal: Portal, resumed: Resumed) -> SessionCache:
        """Of a session that is open already, and ends with its client too."""
        cache = cls(portal, resumed.client, 0, 0)
        cache.columns = resumed.session.position
        cache.paddings = [0]
        cache.token_ids = resumed.token_ids
        cache._sessions = [resumed.session]
        cache._stack.callback(cache._end, resumed.session)
        return cache

    def open_beside(self, max_length: int) -> SessionCache:
        """An empty cache of as many rows, at the peers of ours where they have room. Raises PeerRefused or NoRoute.

        It does not wait for room, which may be what we hold.
        """
        return SessionCache(
            self._portal, self._client, self.rows, max_length, priority=self._priority, beside=self, waits=False
        )

    def become(self, source: SessionCache) -> None:
        """Go on from where `source`, of as many rows, stands: the servers copy its KV. Raises as `run_rows`."""
        forks = [(one, [copy]) for one, copy in zip(source._sessions, self._sessions, strict=True)]
        self._portal.call(lambda: self._fork(forks))
        self.columns, self.paddings = source.columns, list(source.paddings)

    def __enter__(self) -> SessionCache:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sessions. Safe to call twice."""
        self._stack.close()

    @property
    def rows(self) -> int:
        return len(self._sessions)

    @property
    def is_empty(self) -> bool:
        return not any(session.position for session in self._sessions)

    @property
    def routes(self) -> tuple[Route, ...]:
        """Of each row, the hops that it goes through now."""
        return tuple(session.route for session in self._sessions)

    @property
    def is_linear(self) -> list[bool]:
        """As if there were one layer of positions. With none, transformers would give whole texts at every step."""
        return [False]

    def positions(self, row: int) -> int:
        """Positions in the row's session."""
        return self._sessions[row].position

    def transcripts(self) -> list[dict[str, Any]]:  # Any: JSON
        """Of each row, what `Client.transcript` gives."""
        return [self._portal.call(partial(self._client.transcript, session)) for session in self._sessions]

    def run_rows(self, hidden: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run new hidden states (tokens, hidden_size) of each row through the blocks, all rows at once.

        A row of None has nothing new. Raises SessionLost.
        """
        return self._portal.call(lambda: self._run_rows(hidden))

    def run_first(
        self, hidden: Sequence[torch.Tensor | None], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor | None]:
        """As `run_rows`, of an empty cache whose rows are given these `tokens`.

        What rows of the same route begin with is run for one of them, and their servers copy its KV for the others.
        """
        runs = self._rows_alike([row for row, states in enumerate(hidden) if states is not None], tokens)
        if not runs:
            return self.run_rows(hidden)
        firsts = list(hidden)
        rests: list[torch.Tensor | None] = [None] * self.rows
        origins = list(range(self.rows))
        for (first, *copies), shared in runs:
            for row in (first, *copies):
                states = hidden[row]
                assert states is not None, "rows without are in no run"
                firsts[row], rests[row] = (states[:shared] if row == first else None), states[shared:]
                origins[row] = first
        begun = self.run_rows(firsts)
        sessions = self._sessions
        forks = [(sessions[first], [sessions[row] for row in copies]) for (first, *copies), _ in runs]
        self._portal.call(lambda: self._fork(forks))
        outputs: list[torch.Tensor | None] = []
        for origin, rest in zip(origins, self.run_rows(rests), strict=True):
            parts = [part for part in (begun[origin], rest) if part is not None]
            outputs.append(torch.cat(parts) if parts else None)
        return outputs

    def export(self, path: str | Path, token_ids: Sequence[int] = ()) -> float:
        """Save it in the file at `path`, for `llmnode.resume` in another process; see `InferenceSession.export`.

        Raises ConfigError for a batch, and if the file cannot be written.
        """
        if self.rows != 1:
            raise ConfigError(f"{self.rows} rows cannot be exported: export a cache of one row")
        (session,) = self._sessions
        return self._portal.call(lambda: session.export(Path(path), token_ids))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return min(session.max_length for session in self._sessions)

    def crop(self, max_length: int) -> None:
        """Forget the columns from `max_length` on; a negative one says how many to forget."""
        columns = self.columns + max_length if max_length < 0 else max_length
        if not 0 <= columns <= self.columns:
            raise LocalProtocolError(f"cannot crop {self.columns} columns to {columns}")
        self._portal.call(lambda: self._truncate(columns))
        self.columns = columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.reorder(beam_idx.tolist())

    def reorder(self, sources: Sequence[int]) -> None:
        """Have each row go on from what row `sources[row]` is now. Raises SessionLost or NoRoute."""
        if len(sources) != self.rows or not all(0 <= source < self.rows for source in sources):
            raise LocalProtocolError(f"cannot reorder {self.rows} rows by {sources}")
        before, sessions = self._sessions, sessions_of_rows(sources)
        forks: dict[int, list[InferenceSession]] = {}
        for source, session in zip(sources, sessions, strict=True):
            if session != source:
                forks.setdefault(source, []).append(before[session])
        self._sessions = [before[session] for session in sessions]
        self.paddings = [self.paddings[source] for source in sources]
        if forks:
            self._portal.call(lambda: self._fork([(before[source], targets) for source, targets in forks.items()]))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise ConfigError("a cache keeps its number of rows: open another one")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ConfigError("a cache keeps its number of rows: open it with as many as will be needed")

    def _rows_alike(self, rows: Iterable[int], tokens: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
        """Those of `rows` that go the same route and begin with the same tokens, and with how many."""
        by_route: dict[Route, list[int]] = {}
        for row in sorted(rows, key=lambda row: tuple(tokens[row])):
            by_route.setdefault(self._sessions[row].route, []).append(row)
        return [
            ([beside[text] for text in run.texts], run.tokens)
            for beside in by_route.values()
            for run in shared_beginnings([tokens[row] for row in beside])
            if run.tokens
        ]

    async def _fork(self, forks: Sequence[tuple[InferenceSession, list[InferenceSession]]]) -> None:
        with single_error():
            async with trio.open_nursery() as nursery:
                for source, targets in forks:
                    nursery.start_soon(source.fork, targets)

    def _end(self, session: InferenceSession) -> None:
        with suppress(SessionClosed):  # with its client
            self._portal.call(session.close)

    async def _run_rows(self, hidden: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        outputs: list[torch.Tensor | None] = [None] * self.rows
        longest = max((len(states) for states in hidden if states is not None), default=1)
        positions = POSITIONS_PER_HOP * max(len(session.route) for session in self._sessions)
        under_way = trio.CapacityLimiter(max(1, positions // longest))

        async def run_row(row: int, states: torch.Tensor) -> None:
            async with under_way:
                outputs[row] = await run_blocks(self._sessions[row], states)

        with single_error():
            async with trio.open_nursery() as nursery:
                for row, states in enumerate(hidden):
                    if states is not None:
                        nursery.start_soon(run_row, row, states)
        return outputs

    async def _truncate(self, columns: int) -> None:
        for session, padding in zip(self._sessions, self.paddings, strict=True):
            position = max(0, columns - padding)
            if position < session.position:
                await session.truncate(position)


@contextmanager
def _told_of_rows(row: int, rows: int) -> Iterator[None]:
    """A refusal that says for how many rows there was room."""
    try:
        yield
    except PeerRefused as error:
        if rows == 1:
            raise
        reason = f"{error.reason}; there was room for {row} of {rows} rows"
        raise PeerRefused(
            error.code, reason, retry_after_s=error.retry_after_s, peer=error.peer, span=error.span
        ) from error
