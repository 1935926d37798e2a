"""Our Noise and yamux over real sockets, against py-libp2p's own.

The protocol machines without sockets are tested in Rust (`transport_rs/tests/`).
"""

from __future__ import annotations

import os
import random

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.stream_muxer.yamux.yamux import YamuxStream as StockStream

from llmnode.net.yamux_stream import YamuxStream
from unit.hosts import ECHO, LOOPBACK, host, hosts, read_exactly
from unit.in_trio import in_trio

PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("ours", "stock with RSA"), ("stock with RSA", "ours")]


@pytest.mark.parametrize(("dialler", "listener"), PAIRS)
@in_trio
async def test_ten_megabytes_go_both_ways_at_once(dialler: str, listener: str) -> None:
    async with hosts(dialler, listener) as (ours, theirs), trio.open_nursery() as nursery:
        stream = await ours.new_stream(theirs.get_id(), [ECHO])
        assert stream.muxed_conn.peer_id == theirs.get_id()
        assert isinstance(stream.muxed_stream, YamuxStream if dialler == "ours" else StockStream)
        sent = os.urandom(10_000_000)
        nursery.start_soon(stream.write, sent)
        assert await read_exactly(stream, len(sent)) == sent
        assert [each.to_base58() for each in theirs.get_connected_peers()] == [ours.get_id().to_base58()]


@pytest.mark.parametrize(("dialler", "listener"), PAIRS[:3])
@in_trio
async def test_many_streams_at_once_keep_their_bytes_apart(dialler: str, listener: str) -> None:
    async with hosts(dialler, listener) as (ours, theirs), trio.open_nursery() as nursery:

        async def use(number: int) -> None:
            stream = await ours.new_stream(theirs.get_id(), [ECHO])
            sent = random.Random(number).randbytes(3000 * number)
            await stream.write(sent)
            assert await read_exactly(stream, len(sent)) == sent
            await stream.close()

        for number in range(60):
            nursery.start_soon(use, number)


@pytest.mark.parametrize("dialler", ["ours", "stock"])
@in_trio
async def test_who_answers_under_another_name_is_refused(dialler: str) -> None:
    ours, theirs = host(dialler), host("ours")
    another = ID.from_pubkey(create_new_key_pair().public_key)
    async with ours.run(listen_addrs=[]), theirs.run(listen_addrs=[LOOPBACK]):
        with pytest.raises(SwarmException):
            await ours.connect(PeerInfo(another, [info_from_p2p_addr(theirs.get_addrs()[0]).addrs[0]]))
        assert not ours.get_connected_peers()
