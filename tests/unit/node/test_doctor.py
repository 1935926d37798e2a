"""The doctor draws the right conclusions, and sees enough in a swarm without models. The rest takes real nodes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import DOUBLE, Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo, PrecisionWish, Profile, precision_named, wish_named
from llmnode.core.policy import LinkPolicy, ServePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.models.size import ModelSize, Place
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.net.invite import Invite
from llmnode.node.doctor import Doctor, DoctorConfig, check_cache, check_disk, check_memory, check_peers
from llmnode.node.findings import (
    BLOCKER,
    OK,
    WARNING,
    Finding,
    blocker_of,
    check_clocks,
    check_coverage,
    check_identities,
    check_named,
    check_unread,
)
from llmnode.node.serve.conduct import Conduct
from llmnode.node.serve.links import accept_links, answer_as_relay
from llmnode.swarm.membership import Swarm, wall_clock_ms
from llmnode.swarm.pool import open_pool
from llmnode.wire.messages import Description

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

MODEL = ModelInfo("ours", b"o" * 32, blocks=10, hidden_size=8, context_tokens=64)
MIB = 1 << 20
SKEW_S = SwarmPolicy().clock_skew_s
DEADLINE_S = 30.0


def _offer(start: int, end: int, model: str = "ours", dtype: str = "float32") -> Offer:
    profile = Profile(model[:1].encode() * 32, precision_named(dtype))
    return Offer(model, profile, 10, Span(start, end), PeerState.ONLINE, 1000, 64, 64)


def _announced(*offers: Offer) -> list[Announcement]:
    return [Announcement(PeerId(f"peer{n}"), (), 0, 1, "llmnode", offer) for n, offer in enumerate(offers)]


def test_the_first_blocker_is_the_one() -> None:
    findings = [Finding("a", OK, ""), Finding("b", WARNING, ""), Finding("c", BLOCKER, ""), Finding("d", BLOCKER, "")]
    assert blocker_of(findings) == findings[2]
    assert blocker_of(findings[:2]) is None


@pytest.mark.parametrize(
    ("available_mib", "verdict", "words"),
    [
        (1000, OK, "10 of 10 blocks fit"),
        (57, OK, "3 of 10 blocks fit"),  # 15 MiB each, of 80 % of what is free
        (18, BLOCKER, "no block fits"),
    ],
)
def test_memory_is_for_blocks_with_their_kv(available_mib: int, verdict: str, words: str) -> None:
    size = ModelSize([5 * MIB] * 10, ends_bytes=7 * MIB, kv_token_bytes=1024)
    found = check_memory([Place(available_mib * MIB)], "memory", size, kv_tokens=10_240)
    assert (found.verdict, bool(found.fix)) == (verdict, verdict == BLOCKER)
    assert words in found.text


def test_a_swarm_that_holds_all_is_well() -> None:
    found = check_coverage(_announced(_offer(5, 10), _offer(0, 6), _offer(0, 10, "theirs")), MODEL, PrecisionWish(), {})
    assert (found.verdict, found.text) == (OK, "the swarm has all 10 blocks in float32, at 2 servers")


def test_two_halves_in_two_precisions_are_no_whole() -> None:
    halves = _announced(_offer(0, 5), _offer(4, 10, dtype="float32+int8"))
    found = check_coverage(halves, MODEL, PrecisionWish(), {})
    assert found.verdict == WARNING
    assert found.text.startswith("float32+int8 lacks blocks [0, 4); float32 lacks blocks [5, 10), and")


@pytest.mark.parametrize(
    ("others", "missing", "fix"),
    [
        ([_offer(5, 9)], "[3, 5), [9, 10)", "start servers"),
        ([replace(_offer(3, 10), state=PeerState.JOINING)], "[3, 10)", "try again in a moment"),
        ([_offer(3, 10, "theirs")], "[3, 10)", "give the MODEL that it serves"),
        ([_offer(3, 10, "theirs"), _offer(3, 10, dtype="bfloat16")], "[3, 10)", "give --dtype bfloat16 --quant none"),
        ([_offer(3, 10, dtype="float32+int8")], "[3, 10)", "give --dtype float32 --quant int8 --kv-dtype same"),
        ([_offer(3, 10, dtype="float32+kv-int8")], "[3, 10)", "give --dtype float32 --quant none --kv-dtype int8"),
        ([_offer(3, 10, dtype="float32; rm -r")], "[3, 10)", "get a newer llmnode"),
    ],
    ids=[
        "held by nobody",
        "not loaded yet",
        "of another model",
        "of another dtype",
        "quantized",
        "of KV in 8 bits",
        "unknown",
    ],
)
def test_blocks_that_no_server_has_are_named_and_what_it_has_instead(
    others: list[Offer], missing: str, fix: str
) -> None:
    found = check_coverage(_announced(_offer(0, 3), *others), MODEL, wish_named("float32"), {})
    assert found.verdict == WARNING
    assert f"has blocks {missing} of ours in float32" in found.text
    assert found.fix.startswith(fix)


def test_models_of_a_swarm_of_strangers_are_not_all_listed() -> None:
    found = check_coverage(_announced(*(_offer(0, 10, f"theirs{n}") for n in range(1000))), MODEL, PrecisionWish(), {})
    assert len(found.text) < 300


def test_clocks_that_are_near_enough_are_well_with_the_figure() -> None:
    (found,) = check_clocks({PeerId("a"): -120, PeerId("b"): 40}, SKEW_S)
    assert found.verdict == OK
    assert found.text == "within 120 ms of the clocks of 2 of 2 peers; announcements tolerate 30 s"


@pytest.mark.parametrize(("offset_ms", "words"), [(30_001, "30.0 s behind"), (-95_000, "95.0 s ahead of")])
def test_our_clock_is_wrong_if_most_say_so(offset_ms: int, words: str) -> None:
    (found,) = check_clocks({PeerId("a"): 0, PeerId("b"): offset_ms, PeerId("c"): offset_ms}, SKEW_S)
    assert (found.verdict, "NTP" in found.fix) == (BLOCKER, True)
    assert f"this machine's clock is {words} that of peer b, and too far off for 2 of 3" in found.text


def test_a_single_clock_that_is_off_is_the_peers() -> None:
    warning, well = check_clocks({PeerId("a"): 0, PeerId("b"): 95_000}, SKEW_S)
    assert (warning.verdict, well.verdict) == (WARNING, OK)
    assert "peer b is off by +95.0 s" in warning.text and "within 0 ms of the clocks of 1 of 2" in well.text


def test_announcements_that_cannot_be_read_are_told_with_the_fix() -> None:
    assert check_unread(0) == []
    (found,) = check_unread(3)
    assert (found.verdict, found.fix) == (WARNING, "get a newer llmnode")
    assert found.text.startswith("3 announcements cannot be read here")


def _described(model: str, start: int, end: int) -> Description:
    values = dict.fromkeys(Description.__dataclass_fields__, 0)
    return Description(**values | {"model_digest": model.encode(), "span_start": start, "span_end": end})


def test_two_nodes_that_answer_by_one_identity_are_a_double_and_one_at_two_addresses_is_none() -> None:
    one, same, other = (f"/ip4/192.0.2.{n}/tcp/1/p2p/peer" for n in range(3))
    answers = {one: _described("ours", 0, 5), same: _described("ours", 0, 5), "/p2p/b": _described("ours", 5, 10)}
    assert check_named(answers) == []
    for answer in (_described("ours", 5, 10), _described("theirs", 0, 5)):
        (found,) = check_named({**answers, other: answer})
        assert (found.verdict, found.text) == (WARNING, f"two nodes use one identity: {one} and {other}")
        assert "--identity" in found.fix


def test_doubles_that_servers_have_noticed_are_told() -> None:
    offers = _announced(_offer(0, 5), _offer(5, 10))
    assert check_identities(offers) == []
    (found,) = check_identities([offers[0], replace(offers[1], software=f"llmnode/1 ({DOUBLE})")])
    assert (found.verdict, "identity of peer peer1" in found.text) == (WARNING, True)


@asynccontextmanager
async def _relay(now_ms: Callable[[], int] = wall_clock_ms) -> AsyncIterator[tuple[str, Swarm]]:
    """Its address, and its view."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network,
        open_pool(network) as pool,
        trio.open_nursery() as nursery,
    ):
        swarm = Swarm(network, pool, SwarmPolicy(), now_ms=now_ms)
        nursery.start_soon(accept_links, network, 8, partial(answer_as_relay, swarm, Conduct(ServePolicy())))
        yield network.addresses[0], swarm
        nursery.cancel_scope.cancel()


async def _examined(*peers: str) -> dict[str, Finding]:
    """The finding of each check, by its name."""
    doctor = Doctor(
        DoctorConfig(None, Invite(peers), [], 64, PrecisionWish()), lambda _finding: None, lambda _text: None
    )
    with trio.fail_after(DEADLINE_S):
        await check_peers(doctor, MODEL)
    return {finding.check: finding for finding in doctor.findings}


def test_servers_that_the_named_peer_knows_count() -> None:
    async def main() -> None:
        async with _relay() as (address, relay), _relay() as (theirs, server):
            server.say(_offer(0, 10))
            await relay.meet(theirs)
            found = await _examined(address)
        assert "has no blocks (this is a relay" in found["peer"].text
        assert found["peers"].text == "the swarm has all 10 blocks in float32, at 1 server"
        assert found["clock"].verdict == OK

    trio.run(main)


def test_a_clock_that_is_off_is_seen_in_a_real_exchange() -> None:
    async def main() -> None:
        async with _relay(lambda: wall_clock_ms() + 95_000) as (address, relay):
            relay.say(_offer(0, 10))
            found = await _examined(address)
        assert found["clock"].verdict == BLOCKER
        assert "clock is 95.0 s behind" in found["clock"].text
        assert "peers" not in found, "what nobody can see with such a clock"

    trio.run(main)


def test_the_cache_need_not_be_there_but_must_be_possible(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "new" / "cache").verdict != BLOCKER
    (tmp_path / "file").touch()
    found = check_disk(tmp_path / "file" / "cache")
    assert (found.verdict, "LLMNODE_CACHE" in found.fix) == (BLOCKER, True)


def test_a_cache_that_others_may_write_is_a_blocker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("LLMNODE_CACHE", str(tmp_path))
    found = check_cache()
    assert found.verdict == BLOCKER
    assert "may be written by everybody; set LLMNODE_CACHE to a folder that only you may write" in found.text


def test_a_cache_that_can_only_be_read_is_no_blocker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda _path, _mode: False)  # the tests' user may be root, which may write it
    found = check_disk(tmp_path)
    assert (found.verdict, "LLMNODE_CACHE" in found.fix) == (WARNING, True)
    assert "known peers are not kept" in found.text
