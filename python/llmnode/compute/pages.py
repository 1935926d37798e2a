"""KV of all sequences in pages of one pool, and attention of a whole row over it at once: for blocks on a GPU.

There a kernel takes less time than its launch, so a step should have few kernels, whatever the row. With a slab for
each sequence every block launches three kernels for each sequence. With pages (Kwon et al. 2023, arXiv 2309.06180) it
launches three for all of them. Numbers in the GPU's memory tell these what to do, so that a step can be recorded and
replayed (`cuda_graphs.py`).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llmnode.compute.kv import KVPair

PAGE = 256
"""The positions of a page: flash attention does not read smaller pages."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)

PagedSegment = tuple["PagedKV", int, int]
"""The positions of one sequence in a row: its KV, the first position, and their number."""


class PagePool:
    """KV for `tokens` positions, in whole pages, and one spare page for values that nobody wants.

    The memory of each block is taken when the block first has keys and values. With `flash` all sequences of a row
    attend by flash attention, which needs a GPU, pages of `PAGE` positions and one of `FLASH_DTYPES`.
    """

    def __init__(self, tokens: int, device: torch.device, *, flash: bool = False, page: int = PAGE) -> None:
        self.device = device
        self.flash = flash
        self.page = page
        pages = in_pages(tokens, page)
        self.tokens = pages * page
        self._free = list(range(pages, 0, -1))
        self._blocks: dict[int, KVPair] = {}

    def takes_whole(self, shape: RowShape) -> bool:
        """Whether the sequences of such a row attend at once: by flash attention, or over copies of their pages.

        The copies take no more memory than the pool. Each sequence has copies up to the length of the longest.
        """
        return self.flash or (shape.longest == 1 and shape.sequences * shape.pages * self.page <= self.tokens)

    def take(self, tokens: int) -> PagedKV:
        """Pages for a sequence. The caller knows that there are enough."""
        return PagedKV(self, self.take_pages(in_pages(tokens, self.page)))

    def take_pages(self, count: int) -> list[int]:
        """At least one page."""
        pages = self._free[-count:]
        del self._free[-count:]
        return pages

    def give_pages_back(self, pages: Sequence[int]) -> None:
        self._free += pages

    def give_back(self, kv: PagedKV) -> None:
        self.give_pages_back(kv.pages)

    def states(self, layer: int, like: torch.Tensor) -> KVPair:
        """Keys and values of a block, (pages, positions, heads, head_dim); `like` is (1, heads, any, head_dim)."""
        states = self._blocks.get(layer)
        if states is None:
            shape = (self.tokens // self.page + 1, self.page, like.shape[1], like.shape[3])
            keys, values = (torch.empty(shape, dtype=like.dtype, device=self.device) for _ in range(2))
            states = self._blocks[layer] = keys, values
        return states

    def blocks(self) -> Sequence[KVPair]:
        """The keys and values of each block that has any."""
        return list(self._blocks.values())


class PagedKV:
    """The `KV` protocol in pages of a pool."""

    def __init__(self, pool: PagePool, pages: list[int]) -> None:
        self.pages = pages
        self.page = pool.page
        self.capacity = len(pages) * pool.page
        self.length = 0
        self._pool = pool
        self._table = torch.tensor(pages, device=pool.device)

    def resize(self, capacity: int) -> None:
        """The caller knows that there are enough pages."""
        pages = in_pages(capacity, self.page)
        if pages > len(self.pages):
            self.pages += self._pool.take_pages(pages - len(self.pages))
        elif pages < len(self.pages):
            self._pool.give_pages_back(self.pages[pages:])
            del self.pages[pages:]
        self.capacity = pages * self.page
        self._table = torch.tensor(self.pages, device=self._pool.device)

    def slots(self, start: int, end: int) -> list[int]:
        """The places of the positions in the pool, counted in positions."""
        return [self.pages[at // self.page] * self.page + at % self.page for at in range(start, end)]

    def extend(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor, seen_from: int = 0) -> KVPair:
        """Returns copies."""
        end = start + keys.shape[2]
        pair = self._pool.states(layer, keys)
        for states, new in zip(pair, (keys, values), strict=True):
            for page, within, at in self._stretches(start, end):
                states[page, within] = new[0, :, at].transpose(0, 1)
        first, last = seen_from // self.page, in_pages(end, self.page)
        read = (states[self._table[first:last]].flatten(0, 1)[seen_from - first * self.page :] for states in pair)
        seen_keys, seen_values = (each[: end - seen_from].transpose(0, 1)[None] for each in read)
        return seen_keys, seen_values

    def copy(self, other: PagedKV, start: int, end: int) -> None:
        device = self._pool.device
        to, of = (torch.tensor(each.slots(start, end), dtype=torch.long, device=device) for each in (self, other))
        for pair in self._pool.blocks():
            for states in pair:
                positions = states.flatten(0, 1)
                positions.index_copy_(0, to, positions[of])
        self.length = end

    def _stretches(self, start: int, end: int) -> Iterator[tuple[int, slice, slice]]:
        """Each page, with the slice of it, and the slice of the positions from `start` on."""
        at = start
        while at < end:
            until = min(end, (at // self.page + 1) * self.page)
            within = at % self.page
            yield self.pages[at // self.page], slice(within, within + until - at), slice(at - start, until - start)
            at = until


@dataclass(frozen=True, slots=True)
class RowShape:
    """The sizes of a row: the `longest` sequence has that many tokens, and each has at most `pages` pages."""

    tokens: int
    sequences: int
    longest: int
    pages: int


def lay_out(segments: Sequence[PagedSegment], steps: RowShape | None = None) -> tuple[RowShape, torch.Tensor]:
    """The shape of a row, and all numbers that describe it, on the CPU: they cross to the GPU together.

    Segments of one token each can be put into a larger row, `steps`. Its other tokens go to the spare page.
    """
    shape = steps or RowShape(
        sum(length for _, _, length in segments),
        len(segments),
        max(length for _, _, length in segments),
        max(in_pages(start + length, kv.page) for kv, start, length in segments),
    )
    positions = [at for _, start, length in segments for at in range(start, start + length)]
    slots = [slot for kv, start, length in segments for slot in kv.slots(start, start + length)]
    begins, seen, tables = [0], [], []
    for kv, start, length in segments:
        begins.append(begins[-1] + length)
        seen.append(start + length)
        own = kv.pages[: in_pages(start + length, kv.page)]
        tables += own + [0] * (shape.pages - len(own))
    spare = shape.sequences - len(segments)
    positions, slots, seen = positions + [0] * spare, slots + [0] * spare, seen + [1] * spare
    begins += range(begins[-1] + 1, begins[-1] + 1 + spare)
    tables += [0] * (spare * shape.pages)
    return shape, torch.tensor([*positions, *slots, *begins, *seen, *tables], dtype=torch.int32)


class PagedRow:
    """The row of a forward, as kernels read it. It `is_whole` if all sequences can attend at once."""

    def __init__(self, pool: PagePool, shape: RowShape, numbers: torch.Tensor) -> None:
        """`numbers` are those of `lay_out`, on the pool's device."""
        self.is_whole = pool.takes_whole(shape)
        sizes = [shape.tokens, shape.tokens, shape.sequences + 1, shape.sequences, shape.sequences * shape.pages]
        self.positions, slots, self._begins, self._seen, tables = numbers.split(sizes)
        self._tables = tables.unflatten(0, (shape.sequences, shape.pages))
        self._slots = slots.long()
        self._pool, self._shape = pool, shape
        self._masks: dict[int | None, torch.Tensor] = {}  # by window: blocks of one kind share it

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Store keys and values, then attend; all three are (1, heads, tokens, head_dim).

        Returns (1, tokens, heads, head_dim).
        """
        keys, values = self._pool.states(layer, key)
        for states, new in ((keys, key), (values, value)):
            states.flatten(0, 1).index_copy_(0, self._slots, new[0].transpose(0, 1))
        attend = self._attend_by_flash if self._pool.flash else self._attend_gathered
        return attend(query[0].transpose(0, 1), keys, values, scaling, window)[None]

    def _attend_by_flash(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """query: (tokens, heads, head_dim).

        The kernel does not read where keys begin, but wants it. It must not split the keys of one sequence: it puts the
        result in wrong places (pytorch#194167). It may where heads share keys, which are queries of one head then. In
        that case it takes no window, and one token sees everything.
        """
        from torch.nn.attention.varlen import varlen_attn

        shape, shared = self._shape, query.shape[1] != keys.shape[2]
        may_split = shape.longest == 1 and window is None and shared
        seen = (-1, -1) if may_split else (-1 if window is None else window - 1, 0)
        attended = varlen_attn(
            query, keys, values, self._begins, self._begins, shape.longest, shape.pages * self._pool.page,
            scale=scaling, window_size=seen, enable_gqa=shared, seqused_k=self._seen, block_table=self._tables,
            num_splits=None if may_split else 1,
        )  # fmt: skip
        assert isinstance(attended, torch.Tensor)
        return attended

    def _attend_gathered(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None, window: int | None
    ) -> torch.Tensor:
        """One token of each sequence, over copies of their pages. query: (sequences, heads, head_dim)."""
        mask = self._mask(window)
        unseen = ~mask[:, :, None, None]  # the former owner of the page may have left NaN
        seen_keys, seen_values = (
            states[self._tables].flatten(1, 2).masked_fill(unseen, 0).transpose(1, 2) for states in (keys, values)
        )
        grouped = query.unflatten(1, (keys.shape[2], -1))  # heads that share keys and values, as queries of one
        mask = mask[:, None, None]
        attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=mask, scale=scaling)
        return attended.flatten(1, 2)

    def _mask(self, window: int | None) -> torch.Tensor:
        """(sequences, positions of pages), True where the token of each may look."""
        mask = self._masks.get(window)
        if mask is None:
            at, seen = torch.arange(self._shape.pages * self._pool.page, device=self._pool.device), self._seen[:, None]
            mask = at < seen if window is None else (at < seen) & (at >= seen - window)
            self._masks[window] = mask
        return mask


row_of_forward: ContextVar[PagedRow | None] = ContextVar("row_of_forward", default=None)
"""The counterpart of `segments_of_forward` for KV in pages."""


def in_pages(tokens: int, page: int) -> int:
    return -(-tokens // page)
