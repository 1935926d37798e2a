"""The prediction for this node, made when it had loaded its blocks, beside what it does: its speed, and its memory.

The speed is that of its worker, as it was measured before it had sessions and as they have seen it since. The memory is
looked at now and then, since that takes milliseconds. While the node has the blocks of two spans, it takes more than is
predicted for one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import trio

from llmnode.core.server_figures import ServerFigures, server_figures
from llmnode.machine.resident import resident_bytes

if TYPE_CHECKING:
    from llmnode.node.serve.role import Role
    from llmnode.node.serve.server import Server
    from llmnode.ports import WorkerSource


class OwnFigures:
    """The figures of one node. `look` before `now`."""

    def __init__(self, role: Role, server: Server, source: WorkerSource, base_bytes: int) -> None:
        """`base_bytes` were resident before there were any blocks."""
        self._role = role
        self._server = server
        self._source = source
        self._base_bytes = base_bytes
        self._predicted_bytes = self._measured_bytes = 0

    async def look(self) -> None:
        """Look how much memory is resident."""
        self._measured_bytes = await trio.to_thread.run_sync(resident_bytes)
        held = [each.worker for each in (self._server.served, self._server.former) if each is not None]
        positions = sum(worker.kv_tokens - worker.kv_tokens_free for worker in held)
        position_bytes = self._source.position_bytes
        weights_bytes = self._source.tensor_bytes if held else 0
        predicted_bytes = self._base_bytes + weights_bytes + positions * position_bytes
        self._predicted_bytes = predicted_bytes if position_bytes else 0

    async def keep_looking(self) -> NoReturn:
        """Until cancelled."""
        while True:
            await trio.sleep(self._server.policy.look_s)
            await self.look()

    def now(self) -> ServerFigures | None:
        """None while no worker has served."""
        speed = self._role.speed
        if speed is None:
            return None
        return server_figures(speed.measured, speed.since, speed.blocks, self._predicted_bytes, self._measured_bytes)
