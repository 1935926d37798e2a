"""A serving node inside another program."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from llmnode.client.portal import open_portal
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.net.listeners import listenable_ips
from llmnode.node.app import NodeConfig, check, open_node
from llmnode.node.listening import choose_listening, is_on_this_machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.client.portal import Portal
    from llmnode.node.running_node import RunningNode

log = logging.getLogger(__name__)


class Node:
    """Serves blocks for as long as its context lasts: `with Node(blocks="0:10") as node: print(node.addresses)`.

    Takes the fields of `NodeConfig`; an invite may stand for `model`, and is enough to join a swarm. In a trio program
    use `async with`; everywhere else `with`, which runs the node in a thread of its own. Errors are raised on entering:
    see `llmnode.node.app.open_node`.

    Unless `listen` says where, it listens where its peers and relays reach it: at every interface if one is named
    beyond the private networks of this machine, in these if some are named there, else on this machine alone.
    With `mdns=True` it listens in the private networks at least, and without `peers` joins the swarm that mDNS finds
    there. Where other machines reach it, anybody there may use it: a logged warning says so.
    """

    def __init__(
        self, model: str | None = None, *, report: Callable[[str], None] = lambda _line: None, **config: Any
    ) -> None:  # Any: NodeConfig's own fields
        self._config = NodeConfig(model, **config)
        self._is_told_where = "listen" in config
        self._report = report
        self._running: RunningNode | None = None
        self._portal: Portal | None = None
        self._stack: ExitStack | None = None
        self._async_stack: AsyncExitStack | None = None

    @property
    def running(self) -> RunningNode:
        """Peer id, addresses, span, view; only inside the context."""
        assert self._running is not None, "enter the node's context first"
        return self._running

    @property
    def addresses(self) -> list[str]:
        """Where clients and other nodes reach it: multiaddrs."""
        return list(self.running.addresses)

    @property
    def blocks(self) -> tuple[int, int]:
        """First block served, and the one after the last."""
        return self.running.span.start, self.running.span.end

    def change_span(self, start: int, end: int, drain_s: float | None = None) -> None:
        """Serve blocks `start` up to, not including, `end` instead; returns when they are served.

        If memory allows it, the node serves its former blocks until then, and afterwards goes on with the sessions that
        it has. Else these end first. They have `drain_s` for it; if that is None, a minute in the first case and ten
        seconds in the second. Then they go on at other servers. A trio program awaits `running.change_span` instead.

        Raises ConfigError for blocks that do not fit or that the model does not have, ModelError for damaged weights,
        AdapterError if the node's own adapters do not fit the blocks, and WorkerLost. The node serves its former blocks
        then.
        """
        if not 0 <= start < end:
            raise ConfigError(f"blocks {start}:{end} are no range: give the first block, and the one after the last")
        if drain_s is not None and not drain_s >= 0:
            raise ConfigError(f"drain_s is {drain_s}: give seconds, 0 or more")
        if self._portal is None:
            raise ConfigError("no node runs here: call this within `with Node(...) as node:`")
        self._portal.call(partial(self.running.change_span, Span(start, end), drain_s))

    def _placed(self) -> NodeConfig:
        """With the addresses to listen at; a warning is logged if others reach it there. Raises ConfigError."""
        config = self._config
        check(config)
        if self._is_told_where:
            return config
        to = config.way_in()
        mdns = config.mdns and to.key is None
        contacts = [*to.peers, *config.relays]
        named = [each for each in contacts if not (mdns and is_on_this_machine(each))]
        found = choose_listening(
            [],
            named,
            listenable_ips(),
            is_private=to.key is not None,
            mdns=None if mdns else False,
            in_program=True,
        )
        if found.warning:
            log.warning(found.warning)
        return replace(config, listen=found.listen, mdns=found.mdns)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = portal = stack.enter_context(open_portal())
            self._running = stack.enter_context(portal.enter(open_node(self._placed(), self._report)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_exc_info: object) -> None:
        assert self._stack is not None, "entered before"
        self._stack.close()
        self._running = self._portal = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            self._running = await stack.enter_async_context(open_node(self._placed(), self._report))
            self._async_stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:  # Any: as the protocol has it
        assert self._async_stack is not None, "entered before"
        await self._async_stack.__aexit__(*exc_info)
        self._running = None
