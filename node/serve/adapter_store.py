"""The adapters that a server holds, of clients and its own: checked, kept within a budget, and dropped when unused.

To name an adapter by its digest is the right to use it: the digest is that of its numbers. The parts are in the worker,
which checks that they fit the blocks. This module decides what the worker holds.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.model import FP32_BYTES
from llmnode.core.operations import Adopt, Forget
from llmnode.core.serving.adapter_shelf import ENTRY_BYTES, AdapterShelf
from llmnode.errors import AdapterError, PeerRefused, RemoteProtocolError, WorkerLost
from llmnode.node.serve import long_work
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.budget import Budget
    from llmnode.core.ids import AdapterId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import ServePolicy
    from llmnode.core.serving.adapter_shelf import Shelved
    from llmnode.core.span import Span
    from llmnode.ports import Link, Worker
    from llmnode.wire.adapter import Adapter, Manifest
    from llmnode.wire.frame import Buffer

MOST_HEADER_BYTES = 1 << 17
"""The most that a part has besides its numbers."""
_RETRY_S = 1.0


class AdaptersTooLarge(AdapterError):
    """There is no memory for the node's own adapters, at least while a second worker has them too."""


class AdapterInUse:
    """An adapter that a session or a pass uses: it stays until that calls `release`. Made by `AdapterStore.use`."""

    def __init__(self, store: AdapterStore, shelved: Shelved, manifest: Manifest) -> None:
        self.manifest = manifest
        self._store = store
        self._shelved: Shelved | None = shelved

    @property
    def digest(self) -> AdapterId:
        return self.manifest.digest

    def release(self) -> None:
        """Safe to call twice."""
        if self._shelved is not None:
            self._store.release(self._shelved)
            self._shelved = None


class AdapterStore:
    """The adapters that one worker holds, from when its blocks are loaded until it is lost."""

    def __init__(self, worker: Worker, model: ModelInfo, policy: ServePolicy, budget: Budget) -> None:
        self._worker = worker
        self._model = model
        self._policy = policy
        self._budget = budget
        self._shelf = AdapterShelf(policy.adapter_idle_s)
        self._manifests: dict[AdapterId, Manifest] = {}
        self._one_change = trio.Lock()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._shelf)

    def use(self, adapter: AdapterId, span: Span) -> AdapterInUse | None:
        """Have an adapter stay, with its parts in the blocks of `span`. None if it has none there.

        Raises PeerRefused if some are not here: the client is to bring them.
        """
        shelved, manifest = self._shelf.find(adapter), self._manifests.get(adapter)
        if shelved is None or manifest is None or not {each.block for each in manifest.within(span)} <= shelved.blocks:
            raise PeerRefused(RefusalCode.UNKNOWN_ADAPTER, "this server does not hold this adapter: bring it first")
        if not manifest.within(span):
            self._shelf.touch(shelved, trio.current_time())
            return None
        self._shelf.use(shelved, trio.current_time())
        return AdapterInUse(self, shelved, manifest)

    async def hold(self, adapter: Adapter) -> None:
        """Hold an adapter of this node's own for as long as the worker lives.

        Raises AdapterError if it does not fit the blocks, AdaptersTooLarge for want of memory, and WorkerLost.
        """
        manifest = adapter.manifest
        shelved = self._shelf.put(adapter.digest, self._budget.process, trio.current_time())
        self._shelf.use(shelved, trio.current_time())  # it is never dropped, and never makes way
        self._manifests[adapter.digest] = manifest
        try:
            await self._free_memory(shelved, ENTRY_BYTES + len(manifest.packed))
            for part in manifest.within(self._worker.span):
                await self._free_memory(shelved, FP32_BYTES * part.values)
                await self._worker.do(Adopt(adapter.digest, part.block, part.values, adapter.parts[part.block]))
                shelved.blocks.add(part.block)
        except PeerRefused as error:
            raise AdaptersTooLarge("the node's adapters need more memory than it has for them: serve fewer") from error
        except (RuntimeError, MemoryError) as error:
            raise AdaptersTooLarge(f"cannot be loaded: {error}") from error

    def release(self, shelved: Shelved) -> None:
        self._shelf.release(shelved, trio.current_time())

    async def lacking(self, link: Link, manifest: Manifest, span: Span) -> Sequence[int]:
        """The blocks of `span` whose parts a client is to bring. Raises PeerRefused if we do not take the adapter."""
        if manifest.model_digest != self._model.digest:
            raise PeerRefused(RefusalCode.WRONG_MODEL, f"the adapter is for another model than {self._model.name}")
        if manifest.parts[-1].block >= self._model.blocks:
            raise PeerRefused(RefusalCode.BAD_ADAPTER, f"{self._model.name} has {self._model.blocks} blocks")
        most_bytes = self._policy.adapter_part_bytes
        if (largest := FP32_BYTES * max(each.values for each in manifest.parts)) > most_bytes:
            why = f"a part of an adapter takes {largest >> 20} MiB here, and {most_bytes >> 20} are allowed"
            raise PeerRefused(RefusalCode.NO_ROOM, why)
        shelved = self._shelf.find(manifest.digest)
        if shelved is None:
            async with self._one_change:
                shelved = await self._put(link, manifest)
        self._shelf.touch(shelved, trio.current_time())
        return [each.block for each in manifest.within(span) if each.block not in shelved.blocks]

    async def bring(self, adapter: AdapterId, block: int, part: Buffer) -> bool:
        """Take the part of one block that we hold. Whether the worker did not have it yet.

        Raises PeerRefused, and RemoteProtocolError for any other bytes.
        """
        shelved, manifest = self._shelf.find(adapter), self._manifests.get(adapter)
        if shelved is None or manifest is None or (name := manifest.part(block)) is None:
            raise PeerRefused(RefusalCode.UNKNOWN_ADAPTER, "no such part is expected: send the manifest first")
        self._shelf.use(shelved, trio.current_time())  # it is not dropped meanwhile
        try:
            is_larger = len(part) > FP32_BYTES * name.values + MOST_HEADER_BYTES
            if is_larger or await long_work.run(partial(_native.blake3_digest, part), len(part)) != name.digest:
                raise RemoteProtocolError(f"{len(part)} bytes that are not the part of block {block}")
            async with self._one_change:
                if is_new := block not in shelved.blocks:
                    await self._adopt(shelved, Adopt(adapter, block, name.values, part))
                return is_new
        finally:
            self.release(shelved)

    async def drop_idle(self) -> None:
        """Forget the adapters that nothing has used for long."""
        async with self._one_change:
            await self._drop(self._shelf.remove_idle(trio.current_time()))

    def close(self) -> None:
        """The worker is gone, and all adapters with it."""
        self._is_closed = True
        for adapter in list(self._manifests):
            if (shelved := self._shelf.find(adapter)) is not None:
                self._shelf.remove(shelved)
        self._manifests.clear()

    async def _put(self, link: Link, manifest: Manifest) -> Shelved:
        if (shelved := self._shelf.find(manifest.digest)) is not None:  # another task was faster
            return shelved
        if self._is_closed:
            raise PeerRefused(RefusalCode.BUSY, "this server has just lost its worker", retry_after_s=_RETRY_S)
        shelved = self._shelf.put(manifest.digest, self._budget.of_peer(link.scope), trio.current_time())
        self._manifests[manifest.digest] = manifest
        try:
            await self._free_memory(shelved, ENTRY_BYTES + len(manifest.packed))
        except PeerRefused:
            await self._drop([shelved])
            raise
        return shelved

    async def _adopt(self, shelved: Shelved, operation: Adopt) -> None:
        size_bytes = FP32_BYTES * operation.values
        await self._free_memory(shelved, size_bytes)
        try:
            with trio.CancelScope(shield=True):  # or nobody would know whether the worker has it
                await self._worker.do(operation)
        except (AdapterError, WorkerLost, RuntimeError, MemoryError) as error:
            self._shelf.give_back(shelved, size_bytes)
            if isinstance(error, AdapterError):
                if shelved.users == 1:  # we ourselves: nothing is kept of it
                    await self._drop([shelved])
                raise PeerRefused(RefusalCode.BAD_ADAPTER, str(error)) from error
            why = f"the adapter was not taken: {error}"
            raise PeerRefused(RefusalCode.BUSY, why, retry_after_s=_RETRY_S) from error
        shelved.blocks.add(operation.block)

    async def _free_memory(self, shelved: Shelved, size_bytes: int) -> None:
        is_free, gone = self._shelf.free_memory(shelved, size_bytes)
        await self._drop(gone)
        if not is_free:
            why = "no memory is left for this adapter: use one of lower rank, or one at a time"
            raise PeerRefused(RefusalCode.NO_ROOM, why, retry_after_s=_RETRY_S)

    async def _drop(self, gone: Sequence[Shelved]) -> None:
        """Have the worker forget them. They are off the shelf before it hears of that, so nobody uses them."""
        for each in gone:
            self._shelf.remove(each)
            self._manifests.pop(each.adapter, None)
        with trio.CancelScope(shield=True):
            for each in gone:
                if each.blocks:
                    with suppress(WorkerLost, RuntimeError, MemoryError):  # of its batch: the others are next
                        await self._worker.do(Forget(each.adapter))
