"""An adapter goes to the servers of a route ahead of the pass: to a few at once, and to all in the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import trio
import trio.testing

from llmnode.core.ids import PeerId
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerUnreachable
from llmnode.session.adapter_ahead import SERVERS_AT_ONCE, bring_ahead
from llmnode.session.pass_routes import PassRoutes

if TYPE_CHECKING:
    from collections.abc import Mapping

HOPS = 12
SPAN = Span(0, HOPS)
PASS: Any = SimpleNamespace(base_s=60.0)
FINDER: Any = SimpleNamespace(policy=SimpleNamespace(passes=PASS))


class Server:
    """It takes 10 s for the adapter, or fails then."""

    def __init__(self, under_way: set[Span], brought: list[Span], *, fails: bool) -> None:
        self.adapters = self
        self._under_way, self._brought, self._fails = under_way, brought, fails

    async def bring(self, _adapter: Any, span: Span, _timeout_s: float) -> None:
        self._under_way.add(span)
        assert len(self._under_way) <= SERVERS_AT_ONCE
        await trio.sleep(10)
        self._under_way.remove(span)
        if self._fails:
            raise PeerUnreachable("gone")
        self._brought.append(span)


class Routes(PassRoutes):
    """The route has a server for each block."""

    def __init__(self, servers: Mapping[PeerId, Any]) -> None:
        super().__init__(FINDER)
        self._servers = servers
        self.loads = SimpleNamespace(take_back=lambda _load: None)  # type: ignore[assignment]  # none is given

    async def find(self, *_: Any, **_options: Any) -> Any:
        return [Hop(peer, Span(block, block + 1)) for block, peer in enumerate(self._servers)], self._servers, None


def test_an_adapter_goes_to_a_few_servers_at_once_and_to_all_but_the_first() -> None:
    """On an uplink of 1 Mbit/s, ten at once would have less than the pace of a link each."""
    brought: list[Span] = []
    under_way: set[Span] = set()
    servers = {PeerId(f"{block}"): Server(under_way, brought, fails=block == 3) for block in range(HOPS)}
    adapter: Any = None

    async def bring() -> float:
        await bring_ahead(Routes(servers), adapter, SPAN, 1)
        return trio.current_time()

    took_s = trio.run(bring, clock=trio.testing.MockClock(autojump_threshold=0))
    assert sorted(each.start for each in brought) == [1, 2, *range(4, HOPS)]
    assert took_s == 10 * -(-(HOPS - 1) // SERVERS_AT_ONCE), "as many as may go at once do so"
