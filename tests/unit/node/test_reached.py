"""Commands say at once that they cannot reach a peer that was named, or that nobody can reach them."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.errors import PeerError
from llmnode.net.invite import Invite
from llmnode.node.app import NodeConfig
from llmnode.node.commands import relay, speed
from unit.exact_nodes import ExactLoader, exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from llmnode.core.span import Span
    from llmnode.ports import Loaded

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.parametrize("answers", [False, True])
@in_trio
async def test_speed_asks_its_peers_before_minutes_of_measuring(answers: bool) -> None:
    loaded: list[Span] = []

    class Loader(ExactLoader):
        def load(self, span: Span) -> Loaded:
            loaded.append(span)
            return super().load(span)

    config = NodeConfig(worker="thread", make_loader=Loader)
    async with exact_node() as node:
        measure = partial(speed._measure, config, rounds=1, report=lambda _line: None)
        if answers:
            assert (await measure(Invite(tuple(node.addresses)))).network is not None
        else:
            with pytest.raises(PeerError):
                await measure(Invite((NOBODY,)))
    assert bool(loaded) is answers


@pytest.mark.parametrize("key", [None, "swarm.key"], ids=["public", "private"])
def test_a_relay_that_nobody_can_dial_says_so_and_prints_no_invite(
    key: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    network: Any = SimpleNamespace(peer="12D3", addresses=[], listening=["/ip4/0.0.0.0/tcp/4001"])
    arguments = Namespace(json=False, identity="node.key", swarm_key=key)
    relay._ready(network, arguments, is_private=key is not None)
    said = capsys.readouterr()
    assert "invite" not in said.out
    (line,) = said.err.splitlines()
    assert "nobody can dial this relay, so there is no invite" in line and "--announce ADDRESS" in line
