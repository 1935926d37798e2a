"""The cache that transformers passes on: sessions, one for each row of a batch.

The keys and values themselves are with the servers. Rows of unequal length need no padding there: the padding that
transformers puts on the left is not part of the row's session.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import DynamicCache

from llmnode.client.batch import Past
from llmnode.client.cache_terms import CacheTerms
from llmnode.client.row_sessions import SessionOpener
from llmnode.client.rows import adapter_id, fork_rows, rows_alike, run_rows, split_runs, truncate_rows
from llmnode.client.session_layers import session_layers
from llmnode.core.texts.beams import sessions_of_rows
from llmnode.errors import ConfigError, LocalProtocolError, PeerRefused, SessionClosed

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from llmnode.client.connect import Client, ResumedSession
    from llmnode.client.portal import Entered, Portal
    from llmnode.client.session_layers import Layers
    from llmnode.core.route import Route
    from llmnode.session.session import InferenceSession
    from llmnode.wire.adapter import Adapter


class SessionCache(DynamicCache):
    """The cache of a distributed model: a session for each row of a batch. A context manager; `close` frees its KV.

    A column is a position of the padded batch, as transformers counts them. `real` (rows, columns) says which columns
    are in the row's session; the others are padding. `offsets` says by how much the row's position ids exceed the
    positions of its session; None before there are any.
    """

    def __init__(
        self,
        portal: Portal,
        client: Client,
        rows: int,
        terms: CacheTerms,
        alike: Sequence[int] | None = None,
        beside: SessionCache | None = None,
    ) -> None:
        """Open the sessions. `alike` names for each row the first row that begins with the same tokens. The session
        opens at the peers of that row, since a copy costs nothing there, or at those of the rows of `beside`.

        Raises PeerRefused or NoRoute.
        """
        super().__init__()
        self.real = torch.ones(rows, 0, dtype=torch.bool)
        self.offsets: list[int | None] = [None] * rows
        self.token_ids: tuple[int, ...] = ()
        """The tokens that a resumed cache was exported with."""
        self.prefix = 0
        """Positions of each session before those of the columns: trainable prompts."""
        self._portal = portal
        self._client = client
        self._terms = terms
        self._sessions: list[InferenceSession] = []
        self._is_copying = False
        self._resumed: InferenceSession | None = None
        self._entered: dict[InferenceSession, Entered[InferenceSession]] = {}
        # A caller may drop a cache without closing it. The finalizer does not block: it may run in any thread.
        weakref.finalize(self, _drop, self._entered).atexit = False
        with ExitStack() as stack:
            stack.callback(self.close)
            opener = SessionOpener(portal, client, terms, self._entered)
            neighbours = None if beside is None else beside._sessions
            self._sessions = opener.open_rows(range(rows) if alike is None else alike, neighbours)
            stack.pop_all()

    @classmethod
    def resumed(cls, portal: Portal, resumed: ResumedSession) -> SessionCache:
        """A cache of a session that is open already. It closes with the client."""
        cache = cls(portal, resumed.client, 0, CacheTerms(resumed.session.max_length))
        cache.real = torch.ones(1, resumed.session.position, dtype=torch.bool)
        cache.offsets = [0]
        cache.token_ids = resumed.token_ids
        cache._sessions, cache._resumed = [resumed.session], resumed.session
        return cache

    def open_beside(self, max_length: int) -> SessionCache:
        """An empty cache with the same number of rows, at our own peers if they have space. Raises PeerRefused or
        NoRoute.

        It does not wait for space, since we ourselves may hold it.
        """
        terms = replace(self._terms, max_length=max_length, waits=False)
        return SessionCache(self._portal, self._client, self.rows, terms, beside=self)

    def become(self, source: SessionCache) -> None:
        """Go on from the position of `source`, which has the same number of rows: the servers copy its KV. Raises as
        `run_rows`.
        """
        self._copy(list(zip(source._sessions, self._sessions, strict=True)))
        self.real, self.offsets, self.prefix = source.real, list(source.offsets), source.prefix

    def __enter__(self) -> SessionCache:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def __bool__(self) -> bool:
        return True  # whatever it holds; `len` counts the layers of transformers' caches

    @property
    def layers(self) -> Layers:
        """Made when they are asked for: a cache that kept them would be in a cycle, and outlive its last user."""
        return session_layers(self, self._client.model.blocks)

    @layers.setter
    def layers(self, _none: Layers) -> None:
        """transformers sets it to none at first."""

    @property
    def is_compileable(self) -> bool:
        """No layer is. transformers, which asks at every token, would have all of them made for that."""
        return False

    def __copy__(self) -> NoReturn:
        raise ConfigError("caches cannot share sessions: use copy.deepcopy, which has the servers copy the KV")

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionCache:  # Any: as copy has it
        """A cache that goes on by itself: the servers copy the KV. Raises as `open_beside` and `run_rows`."""
        made = self.open_beside(self._terms.max_length)
        with ExitStack() as stack:
            stack.callback(made.close)
            made._terms = self._terms
            made.become(self)
            made.token_ids = self.token_ids
            stack.pop_all()
        memo[id(self)] = made
        return made

    def close(self) -> None:
        """End the sessions. Safe to call twice."""
        for session in self._sessions:
            self._end(session)
        while self._entered:
            self._entered.popitem()[1].close()

    @property
    def rows(self) -> int:
        return len(self._sessions)

    @property
    def kinds(self) -> list[Hashable]:
        """The adapter of each row: rows of the same one can become copies of each other."""
        return [adapter_id(session) for session in self._sessions]

    @property
    def columns(self) -> int:
        return int(self.real.shape[1])

    @property
    def is_empty(self) -> bool:
        return not any(session.position > self.prefix for session in self._sessions)

    @property
    def hidden_size(self) -> int:
        return self._client.model.hidden_size

    def settled(self) -> Past:
        """The tokens in the cache. A row that got ahead because another failed or was interrupted goes back first.

        Raises SessionClosed if a copy of rows has failed: it is unknown then which tokens they hold.
        """
        positions: list[int] = self.real.sum(dim=1).tolist()
        ends = [self.prefix + position for position in positions]
        ahead = [session.position - end for session, end in zip(self._sessions, ends, strict=True)]
        if self._is_copying or min(ahead, default=0) < 0:
            raise SessionClosed("the rows of this cache were being changed when that failed: open another one")
        if any(ahead):
            self._portal.call(partial(truncate_rows, self._sessions, ends))
        return Past(self.real, positions, self.offsets, self._terms.prefix_positions)

    @property
    def routes(self) -> tuple[Route, ...]:
        """The hops that each row goes through now."""
        return tuple(session.route for session in self._sessions)

    def positions(self, row: int) -> int:
        """Positions in the row's session."""
        return self._sessions[row].position

    def transcripts(self) -> list[dict[str, Any]]:  # Any: JSON
        """The transcript of each row, as of `Client.transcript`."""
        return [self._portal.call(partial(self._client.transcript, session)) for session in self._sessions]

    @property
    def prefix_due(self) -> torch.Tensor | None:
        """The prompts, (positions, embedding size), that `begin` is still to run before the first column."""
        return None if self.columns or self.prefix else self._terms.prefix

    def begin(self, prefix: torch.Tensor) -> None:
        """Run the prompts, as hidden states (positions, hidden_size), in each row. Raises as `run_first`."""
        self.run_first([prefix] * self.rows, [range(len(prefix))] * self.rows)
        self.prefix = len(prefix)

    def run_rows(self, hidden: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run new hidden states (tokens, hidden_size) of each row through the blocks, all rows at once.

        A row of None has nothing new. Raises SessionLost.
        """
        return self._portal.call(partial(run_rows, self._sessions, hidden))

    def run_first(
        self, hidden: Sequence[torch.Tensor | None], tokens: Sequence[Sequence[int]]
    ) -> list[torch.Tensor | None]:
        """Run the first `tokens` of each row of an empty cache, like `run_rows`.

        A shared prefix of rows on the same route is run once, and the servers copy its KV for the other rows.
        """
        runs = rows_alike(self._sessions, [row for row, states in enumerate(hidden) if states is not None], tokens)
        if not runs:
            return self.run_rows(hidden)
        firsts, rests, origins = split_runs(runs, hidden)
        begun = self.run_rows(firsts)
        self._copy([(self._sessions[first], self._sessions[row]) for (first, *copies), _ in runs for row in copies])
        outputs: list[torch.Tensor | None] = []
        for origin, rest in zip(origins, self.run_rows(rests), strict=True):
            parts = [part for part in (begun[origin], rest) if part is not None]
            outputs.append(torch.cat(parts) if parts else None)
        return outputs

    def export(self, path: str | Path, token_ids: Sequence[int] = ()) -> float:
        """Save it in the file at `path`, for `llmnode.resume` in another process; see `InferenceSession.export`.

        Raises ConfigError for a batch, and if the file cannot be written.
        """
        if self.prefix:
            raise ConfigError("a cache that begins with trainable prompts cannot be exported")
        if self.rows != 1:
            raise ConfigError(f"{self.rows} rows cannot be exported: export a cache of one row")
        (session,) = self._sessions
        return self._portal.call(lambda: session.export(Path(path), token_ids))

    def grow_to(self, positions: int) -> None:
        """See to it that each row may have this many positions; called before they are run.

        Raises ConfigError beyond the greatest length, and the errors of `open_beside` and `run_rows` if longer sessions
        are needed and cannot be had.
        """
        prefix, model = self._terms.prefix_positions, self._client.model
        if prefix + positions > model.context_tokens:
            after = f", after {prefix} prompts" if prefix else ""
            raise ConfigError(f"{positions} positions do not fit the model's context of {model.context_text}{after}")
        if positions <= (most := self._terms.max_length - prefix):
            return
        if not self._terms.grows:
            raise ConfigError(
                f"{positions} positions do not fit the cache, which holds {most}: open it with max_length={positions}"
            )
        self._grow(min(2 * (prefix + positions), model.context_tokens))

    def add_columns(self, real: torch.Tensor, offsets: Sequence[int | None] | None = None) -> None:
        """Record a forward: which of the new columns are real in each row, (rows, new), and the row's offset."""
        self.real = torch.cat((self.real, real), dim=1)
        self.offsets = list(offsets) if offsets is not None else [0] * self.rows

    @property
    def batch_size(self) -> int:
        return self.rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1 if self._terms.grows else self._terms.max_length - self._terms.prefix_positions

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget columns: -n the last n, 0 none.

        A positive number says how many to keep, as it did in transformers before 5.24.
        """
        kept = self.columns + tokens_to_remove if tokens_to_remove <= 0 else tokens_to_remove
        self.truncate(max(0, min(kept, self.columns)))

    def truncate(self, columns: int) -> None:
        """Forget all columns from `columns` on. Raises SessionLost, and LocalProtocolError for a column that is not
        there.
        """
        if not 0 <= columns <= self.columns:
            raise LocalProtocolError(f"cannot go back to column {columns} from {self.columns}")
        if columns == self.columns:
            return
        real = self.real[:, :columns]
        positions = real.sum(dim=1).tolist()
        self._portal.call(partial(truncate_rows, self._sessions, [self.prefix + each for each in positions]))
        self.real = real
        self.offsets = [offset if left else None for offset, left in zip(self.offsets, positions, strict=True)]

    def reset(self) -> None:
        self.truncate(0)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.reorder(beam_idx.tolist())

    def reorder(self, sources: Sequence[int]) -> None:
        """Let each row go on from the present state of row `sources[row]`. The number of rows may change.

        Raises SessionLost or NoRoute, and PeerRefused without space for more.
        """
        if not sources or not all(0 <= source < self.rows for source in sources):
            raise ConfigError(f"{list(sources)} cannot be the rows of a cache that has {self.rows} of them")
        if list(sources) == list(range(self.rows)):
            return
        before = list(self._sessions)
        sessions = sessions_of_rows(sources, self.kinds)
        with ExitStack() as failed:  # else a caller that keeps the exception would keep the new sessions open
            for source, own in zip(sources, sessions, strict=True):
                if own == len(before):
                    before.append(self._open(self._terms, before[source].adapter, before[source], waits=False))
                    failed.callback(self._end, before[-1])
            self._copy([(before[source], before[own]) for source, own in zip(sources, sessions, strict=True)])
            failed.pop_all()
        self._sessions = [before[own] for own in sessions]
        self.real = self.real[list(sources)]
        self.offsets = [self.offsets[source] for source in sources]
        for session in set(before).difference(self._sessions):
            self._end(session)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.reorder(torch.arange(self.rows)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder(torch.arange(self.rows).repeat_interleave(repeats).tolist())

    def _end(self, session: InferenceSession) -> None:
        if (entered := self._entered.pop(session, None)) is not None:
            entered.close()
            return
        if session is self._resumed:
            self._resumed = None
            with suppress(SessionClosed):  # with its client
                self._portal.call(session.close)

    def _open(
        self, terms: CacheTerms, adapter: Adapter | None, beside: InferenceSession | None, *, waits: bool
    ) -> InferenceSession:
        opener = SessionOpener(self._portal, self._client, terms, self._entered)
        return opener.open(adapter, beside, self._sessions[0].rows if self._sessions else None, waits=waits)

    def _grow(self, max_length: int) -> None:
        """Move to sessions of `max_length`: the servers copy the KV, row by row, so that little is there twice."""
        terms = replace(self._terms, max_length=max_length)
        self._sessions[0].rows.lengths_are_guesses = True
        for row, session in enumerate(self._sessions):
            try:
                longer = self._open(terms, session.adapter, session, waits=False)
            except PeerRefused:  # elsewhere, then
                longer = self._open(terms, session.adapter, None, waits=True)
            with ExitStack() as failed:
                failed.callback(self._end, longer)
                self._copy([(session, longer)])
                failed.pop_all()
            self._sessions[row] = longer
            self._end(session)
        self._terms = terms

    def _copy(self, pairs: Sequence[tuple[InferenceSession, InferenceSession]]) -> None:
        """Make the second of each pair a copy of the first, unless it is the same. Raises SessionLost or NoRoute."""
        forks: dict[InferenceSession, list[InferenceSession]] = {}
        for source, target in pairs:
            if target is not source:
                forks.setdefault(source, []).append(target)
        if forks:
            self._is_copying = True
            self._portal.call(partial(fork_rows, forks))
            self._is_copying = False


def _drop(entered: dict[InferenceSession, Entered[InferenceSession]]) -> None:
    for each in entered.values():
        each.leave_soon()
