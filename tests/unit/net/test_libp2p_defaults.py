"""The settings of py-libp2p that decide what a node says, keeps and accepts, read back from a running host."""

from __future__ import annotations

from typing import Any

import pytest
from libp2p.exceptions import BaseLibp2pError
from multiaddr import Multiaddr

from llmnode.core.policy import BudgetPolicy, LinkPolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.host import open_network
from llmnode.net.libp2p_host import NEWCOMERS
from llmnode.net.pings import PING, answer_pings
from unit.circuits import until
from unit.in_trio import in_trio
from unit.links import POLICY


@in_trio
async def test_the_limits_of_connections_are_ours() -> None:
    few = BudgetPolicy(connections=40, connections_per_peer=5)
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy(dial_timeout_s=7.0, budget=few)) as network:
        swarm: Any = network.host.get_network()
        assert swarm._resource_manager is None, "its own limits would hold beside ours"
        assert swarm._stream_semaphore is None
        config = swarm.connection_config
        most = few.connections + NEWCOMERS
        assert (config.max_connections, config.high_watermark, config.low_watermark) == (most, most, 0)
        assert (config.min_connections, config.max_connections_per_peer) == (0, few.connections_per_peer)
        assert (config.inbound_upgrade_timeout, config.outbound_upgrade_timeout) == (7.0, 7.0)
        assert swarm._inbound_limiter.total_tokens == most
        assert swarm.retry_config.max_retries == 0
        assert swarm._negative_peer_cache._ttl == 0
        assert not swarm.auto_connector._started
        assert not config.enable_health_monitoring


@in_trio
async def test_nobody_else_says_where_a_node_is() -> None:
    """Four peers at four addresses are enough for py-libp2p to announce what they say."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        host: Any = network.host
        assert host._observed_addr_manager is None
        assert host.get_addrs() == [Multiaddr(each) for each in network.listening]
        assert network.addresses == network.listening


@in_trio
async def test_no_list_grows_with_the_peers_that_have_been_there() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        swarm: Any = network.host.get_network()
        for _ in range(3):
            async with open_network([], POLICY) as stranger:
                stranger.vouch(network.addresses)
                await stranger.host.connect(parse_peer(network.addresses[0]))
            await until(lambda: not swarm.get_connections())
        with pytest.raises(BaseLibp2pError):
            await network.host.connect(parse_peer(f"/ip4/10.0.0.1/tcp/1/p2p/{stranger.peer}"))
        connector = swarm.auto_connector
        for each in (connector._recent_disconnects, connector._last_connect_attempt, connector._failure_counts):
            assert not each
        assert not swarm._round_robin_index
        assert len(swarm._negative_peer_cache._cache) <= 1
        assert not network.host._identified_peers  # type: ignore[attr-defined]


@in_trio
async def test_services_that_were_not_chosen_are_off() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        host: Any = network.host
        assert (host.mDNS, host.bootstrap, host.upnp) == (None, None, None)
        protocols = {str(each) for each in host.get_mux().get_protocols()}
        assert protocols == {
            "/ipfs/id/1.0.0",
            "/ipfs/ping/1.0.0",
            "/libp2p/autonat/1.0.0",
            "/libp2p/dcutr",
            "/llmnode/link/1",
            "/llmnode/link/2",
        }
        ping: Any = host.get_mux().handlers[PING]
        assert ping.func is answer_pings, "py-libp2p's own answers as fast as they come"
