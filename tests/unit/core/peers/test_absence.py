"""Why nobody computes some blocks: the cause that there is, and a fix for it, and not the next best guess."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import DOUBLE, Announcement, Offer, PeerState
from llmnode.core.identity import Identity, Origin, Weights, explain_difference, is_variant, read_digest
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo, Profile, precision_named
from llmnode.core.peers.absence import MOST_TOLD, TOLD_AGAIN_S, ToldReasons, explain_absence
from llmnode.core.peers.clocks import OF_GROUP, Clocks, judge_clocks
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

MISSING = [Span(4, 8)]
COMMITS = "a" * 40, "b" * 40


def digest(origin: Origin, weights: str = "0" * 40, layout: bytes = b"layout", config: bytes = b"config") -> bytes:
    return Identity(Weights(origin, bytes.fromhex(weights)), layout, config).digest


OURS = ModelInfo("org/ours", digest(Origin.HUB, COMMITS[0]), blocks=8, hidden_size=8, context_tokens=64)


def announced(
    name: str = "server", span: Span = MISSING[0], *, software: str = "llmnode/1", model: str = OURS.name,
    model_digest: bytes = OURS.digest, dtype: str = "float32", state: PeerState = PeerState.ONLINE, kv: int = 64,
) -> Announcement:  # fmt: skip
    offer = Offer(model, Profile(model_digest, precision_named(dtype)), 8, span, state, 1000, kv, kv)
    return Announcement(PeerId(name), ("/memory",), 0, 1, software, offer)


CLOCK_OFF = judge_clocks({PeerId("a"): 95_000, PeerId("b"): 95_000, PeerId("c"): 0}, 30)
PEERS_CLOCK_OFF = judge_clocks({PeerId("a"): -95_000, PeerId("b"): 0, PeerId("c"): 0}, 30)
THEIRS = {"model": "theirs", "model_digest": digest(Origin.FOLDER, layout=b"other")}
CAUSES = {
    "our clock": ([], {"clocks": CLOCK_OFF}, "this machine's clock is 95.0 s behind that of peer a", "NTP"),
    "KV": ([announced(kv=50)], {"positions": 51}, "51 positions are asked for, and the KV .* for 50 at most", "fewer"),
    "suspected": ([announced()], {"excluded": ["server"]}, "peer server would have some, but gave results", "trust"),
    "failed": ([announced()], {"failed": ["server"]}, "peer server announces some, and has failed", "can be reached"),
    "joining": ([announced(state=PeerState.JOINING)], {}, "peer server still loads them", "try again in a moment"),
    "draining": ([announced(state=PeerState.DRAINING)], {}, "has some, but is about to stop", "start another"),
    "precision": ([announced(dtype="bfloat16+int8")], {}, "in bfloat16.int8, and float32 is asked", "--quant int8"),
    "a newer one": ([announced(dtype="float4")], {}, "are held in float4", "get a newer llmnode"),
    "a double": (
        [announced(span=Span(0, 4), software=f"llmnode/1 ({DOUBLE})")], {}, "identity of peer server", "--identity",
    ),
    "a revision": (
        [announced(model_digest=digest(Origin.HUB, COMMITS[1]))],
        {},
        f"the peers serve org/ours in revision {COMMITS[1]}, and ours is {COMMITS[0]}$",
        f"name the model org/ours@{COMMITS[1]}, or start the servers with @{COMMITS[0]}",
    ),
    "from the hub": (
        [announced(model="ours", model_digest=digest(Origin.FOLDER))],
        {},
        "the peers serve ours as a folder of safetensors, and ours is the hub's$",
        "give both the same files",
    ),
    "others": ([announced(**THEIRS)], {}, "the swarm serves theirs, of other weights", "give the MODEL that it serves"),
    "a peer's clock": (
        [announced(span=Span(0, 4))], {"clocks": PEERS_CLOCK_OFF}, "clock of peer a is off by -95.0 s", "tell who",
    ),
    "nobody": ([], {}, "the peers that answer know of no server at all", "name other peers"),
    "nobody for these": ([announced(span=Span(0, 4))], {}, "^$", "start a server for them"),
}  # fmt: skip


@pytest.mark.parametrize(("known", "more", "text", "fix"), CAUSES.values(), ids=CAUSES.keys())
def test_the_cause_is_named_and_the_fix(
    known: Sequence[Announcement], more: dict[str, object], text: str, fix: str
) -> None:
    why = explain_absence(OURS, MISSING, known, **more)  # type: ignore[arg-type]  # each has its own
    assert re.search(text, why.text), why.text
    assert fix in why.fix
    assert str(why) == (f"{why.text}: {why.fix}" if why.text else why.fix)


def several(**fields: object) -> list[Announcement]:
    return [announced(name, **fields) for name in ("one", "two")]  # type: ignore[arg-type]  # as `announced` has them


TWO_CLOCKS_OFF = judge_clocks({PeerId("a"): -95_000, PeerId("b"): -95_000, PeerId("c"): 0, PeerId("d"): 0}, 30)
OF_SEVERAL: dict[str, tuple[list[Announcement], dict[str, object], str]] = {
    "suspected": (several(), {"excluded": ["one", "two"]}, "peers one, two would have some"),
    "failed": (
        several(), {"failed": ["one", "two"]}, "peers one, two announce some, and have failed: see that they run and",
    ),
    "joining": (
        several(state=PeerState.JOINING), {}, "peers one, two still load them: try again in a moment, when they are",
    ),
    "draining": (several(state=PeerState.DRAINING), {}, "peers one, two have some, but are about to stop"),
    "unknown": (several(state=PeerState.UNKNOWN), {}, "peers one, two have some, in a state"),
    "doubles": (
        several(span=Span(0, 4), software=f"llmnode/1 ({DOUBLE})"), {}, "the identity of each of peers one, two, and",
    ),
    "clocks": (
        [announced(span=Span(0, 4))],
        {"clocks": TWO_CLOCKS_OFF},
        "the clocks of peers a, b are off by -95.0 s, so what they announce is not believed: tell who runs them",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("known", "more", "text"), OF_SEVERAL.values(), ids=OF_SEVERAL.keys())
def test_of_several_peers_the_plural_is_said(known: Sequence[Announcement], more: dict[str, object], text: str) -> None:
    assert text in str(explain_absence(OURS, MISSING, known, **more))  # type: ignore[arg-type]  # each has its own


def test_a_reason_is_told_once_and_again_after_a_while_and_another_one_at_once() -> None:
    told, later_s = ToldReasons(), TOLD_AGAIN_S - 1
    assert [told.is_news("nobody", now_s) for now_s in (0, 1, later_s)] == [True, False, False]
    assert told.is_news("all are suspected", later_s)
    assert not told.is_news("nobody", later_s), "it has only come back"
    assert [told.is_news("nobody", now_s) for now_s in (TOLD_AGAIN_S, TOLD_AGAIN_S + 1)] == [True, False]


def test_of_reasons_that_are_new_at_every_look_few_are_told() -> None:
    told = ToldReasons()
    assert sum(told.is_news(f"the clock is off by {now_s} s", now_s) for now_s in range(int(TOLD_AGAIN_S))) == MOST_TOLD


@given(st.lists(st.sampled_from([each for known, *_ in CAUSES.values() for each in known]), max_size=6))
def test_there_is_always_a_fix_in_one_short_line(known: list[Announcement]) -> None:
    why = str(explain_absence(OURS, MISSING, known))
    assert 10 < len(why) < 400
    assert "\n" not in why


def test_of_several_models_one_of_our_shape_and_name_is_spoken_of() -> None:
    variant = announced(model="another", model_digest=digest(Origin.FOLDER))
    revision = announced(model_digest=digest(Origin.HUB, COMMITS[1]))
    others = [announced(**THEIRS), variant]
    assert "the peers serve another as a folder" in str(explain_absence(OURS, MISSING, others))
    assert f"org/ours in revision {COMMITS[1]}" in str(explain_absence(OURS, MISSING, [*others, revision]))


def test_of_strangers_names_few_are_repeated() -> None:
    known = [announced(f"peer{n}", model=f"model{n}", model_digest=bytes([n]) * 32) for n in range(200)]
    assert len(str(explain_absence(OURS, MISSING, known))) < 300
    loading = [announced(f"peer{n}", state=PeerState.JOINING) for n in range(200)]
    assert len(str(explain_absence(OURS, MISSING, loading))) < 300


@pytest.mark.parametrize("ours", Origin)
@pytest.mark.parametrize("theirs", Origin)
@pytest.mark.parametrize("config", [b"config", b"another"])
def test_every_pair_of_variants_is_explained(ours: Origin, theirs: Origin, config: bytes) -> None:
    one, other = digest(ours, "1" * 40), digest(theirs, "2" * 40, config=config)
    assert is_variant(one, other)
    text, fix = explain_difference(one, other, "org/name")
    assert ("config.json" in text) == (config == b"another")
    assert fix
    if theirs is Origin.HUB:
        assert f"org/name@{'2' * 40}" in fix, "what can be given to --model"


@given(st.binary(max_size=40))
def test_digests_that_others_make_otherwise_are_not_read_as_ours(noise: bytes) -> None:
    identity = read_digest(noise)
    assert identity is None or identity.digest == noise
    assert not is_variant(noise, OURS.digest) or noise[1:6] == OURS.digest[1:6]


@given(st.sampled_from(Origin), *[st.binary(min_size=20, max_size=20)] * 3)
def test_a_digest_has_its_parts(origin: Origin, weights: bytes, layout: bytes, config: bytes) -> None:
    identity = read_digest(Identity(Weights(origin, weights), layout, config).digest)
    assert identity is not None
    assert identity.weights == Weights(origin, weights)
    assert layout.startswith(identity.layout)
    assert config.startswith(identity.config)


def test_what_was_asked_counts_more_than_what_was_told_and_both_for_a_while() -> None:
    policy = SwarmPolicy()
    clocks, peer = Clocks(policy), PeerId("a")
    clocks.note(peer, 700, 0, "group", asked=False)
    clocks.note(peer, 20, 1, "group", asked=True)
    clocks.note(peer, 900, 2, "group", asked=False)
    assert clocks.offsets_ms(3) == {peer: 20}
    assert clocks.offsets_ms(1 + policy.clock_keeps_s) == {}
    clocks.note(peer, 900, 1 + policy.clock_keeps_s, "group", asked=False)
    assert clocks.offsets_ms(1 + policy.clock_keeps_s) == {peer: 900}


def test_of_many_clocks_the_last_ones_told_are_kept() -> None:
    policy = replace(SwarmPolicy(), clocks=3)
    clocks = Clocks(policy)
    for number in range(5):
        clocks.note(PeerId("first"), number, number, "first", asked=False)
        clocks.note(PeerId(f"peer{number}"), number, number, f"group {number}", asked=False)
    assert set(clocks.offsets_ms(5)) == {"first", "peer3", "peer4"}
    assert not clocks.judge(5).wrong


def test_many_identities_of_one_address_group_do_not_outvote_three_others() -> None:
    clocks, skew_ms = Clocks(policy := SwarmPolicy()), 3_600_000
    for number in range(3):
        clocks.note(PeerId(f"honest {number}"), 5, 0, f"group {number}", asked=False)
    for number in range(2 * policy.clocks):
        clocks.note(PeerId(f"sybil {number}"), skew_ms, 1, "stranger", asked=False)
    verdict = clocks.judge(2)
    assert len(verdict.wrong) == OF_GROUP and not verdict.is_ours


def test_a_peer_that_was_asked_makes_no_way_for_strangers_of_its_address_group() -> None:
    clocks, asked = Clocks(SwarmPolicy()), [PeerId(str(number)) for number in range(OF_GROUP)]
    for peer in asked:
        clocks.note(peer, 5, 0, "group", asked=True)
    for number in range(10):
        clocks.note(PeerId(f"sybil {number}"), 3_600_000, 1, "group", asked=False)
    assert set(clocks.offsets_ms(2)) == {*asked}
