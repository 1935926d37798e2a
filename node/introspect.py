"""The open sessions, connections and memory of a serving node at a moment: `kill -USR1 PID` has it printed. It helps to
find a leak. And what it was predicted to do, beside what it does.
"""

from __future__ import annotations

import signal
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import psutil
import trio

from llmnode.core.budget import Resource
from llmnode.node.status import figures_json, figures_line
from llmnode.node.terminal import show_json, tell

if TYPE_CHECKING:
    from llmnode.node.running_node import RunningNode

SIGNAL = getattr(signal, "SIGUSR1", None)
"""None where the system has no such signal."""


@dataclass(frozen=True, slots=True)
class Readout:
    """Counts of what is open. `tasks` are trio's; `relayed` are the links that go through a relay; `peers` are those
    known to serve, ourselves among them. `adapter_bytes` are those of the adapters that workers keep.
    """

    sessions: int
    kv_tokens_reserved: int
    adapter_bytes: int
    links: int
    relayed: int
    connections: int
    streams: int
    tasks: int
    files: int
    peers: int


def introspect(node: RunningNode) -> Readout:
    held = [each.worker for each in (node.server.served, node.server.former) if each is not None]
    opened = node.network.count_open()
    return Readout(
        sessions=len(node.server.sessions),
        kv_tokens_reserved=sum(worker.kv_tokens - worker.kv_tokens_free for worker in held),
        adapter_bytes=node.network.budget.process.held[Resource.ADAPTERS],
        links=opened.links,
        relayed=opened.relayed,
        connections=opened.connections,
        streams=opened.streams,
        tasks=trio.lowlevel.current_statistics().tasks_living,
        files=psutil.Process().num_fds(),
        peers=len(node.swarm.view.announcements()),
    )


async def introspect_when_signalled(
    node: RunningNode, *, as_json: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Print a readout for each `SIGNAL`, until cancelled; started once signals are taken."""
    if SIGNAL is None:
        task_status.started()
        return
    with trio.open_signal_receiver(SIGNAL) as signals:
        task_status.started()
        async for _signal in signals:
            counts = asdict(introspect(node))
            if as_json:
                show_json({"event": "readout", **counts})
            else:
                tell(", ".join(f"{name} {count}" for name, count in counts.items()))
            tell_figures(node, as_json=as_json)


def tell_figures(node: RunningNode, *, as_json: bool) -> None:
    """Print what the node was predicted to do when it joined, beside what it does."""
    if (figures := node.figures.now()) is not None:
        if as_json:
            show_json({"event": "figures", **figures_json(figures), "text": figures_line(figures)})
        else:
            tell(figures_line(figures))
