"""A forecast adds up what was measured, along the route that a client takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.forecast import ClientPlace, forecast, forecast_session
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo, Precision
from llmnode.core.policy import ClientPolicy
from llmnode.core.span import Span
from llmnode.core.speed import PROMPT_POSITIONS, AnnouncedSpeed
from llmnode.errors import NoRoute

BLOCKS, PROMPT = 10, 100
MODEL = ModelInfo("m", b"d" * 32, BLOCKS, hidden_size=250, context_tokens=4096)
ROW_BYTES = 1000
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def server(
    peer: PeerId, span: Span, block_us: int = 2000, tokens_per_s: float = 50.0, upload_kb: int = 100, **ways_ms: int
) -> Announcement:
    """A position of a prompt takes a tenth of a decode."""
    round_trips = tuple((PeerId(each), 2000 * ms) for each, ms in ways_ms.items())
    speed = AnnouncedSpeed(round(1000 * tokens_per_s), 100 * block_us, upload_kb, round_trips)
    offer = Offer("m", MODEL.profile, BLOCKS, span, PeerState.ONLINE, block_us, 9, 9, speed)
    return Announcement(peer, (), 1, 2, "llmnode/1", offer)


CHAIN = [server(A, Span(0, 4), b=30), server(B, Span(4, 10))]
HERE = ClientPlace({A: 0.02, B: 0.08}, token_s=0.003, upload_bytes_per_s=1e6)


def test_a_step_goes_there_from_hop_to_hop_and_back() -> None:
    session = forecast_session(MODEL, CHAIN, HERE, PROMPT)
    first, second = session.hops
    assert (first.way_s, second.way_s) == (0.01, 0.03)
    assert (first.compute_s, second.compute_s) == pytest.approx((0.008, 0.012))
    packed = 0.87 * 0.001, 0.87 * 0.01
    assert (first.send_s, second.send_s) == pytest.approx(packed), "of the client, and of the first server"
    assert session.back_s == pytest.approx(0.04 + packed[1])
    assert session.step_s == pytest.approx(0.01 + 0.03 + 0.04 + 0.02 + sum(packed) + packed[1] + 0.003)
    assert session.tokens_per_s == pytest.approx(1 / session.step_s)
    marginal_s = 0.0002 - 0.002 / PROMPT_POSITIONS
    opening, prompt, sending = 0.08, 10 * (0.002 + PROMPT * marginal_s), 0.85 * PROMPT * 0.021
    assert session.first_token_s == pytest.approx(opening + prompt + sending + 0.08 + packed[1] + 0.003)


def test_links_pack_what_they_send_if_that_pays() -> None:
    fast = ClientPlace({A: 0.02, B: 0.08}, upload_bytes_per_s=100e6)
    slow = ClientPlace({A: 0.02, B: 0.08}, upload_bytes_per_s=1e6)
    for dtype, token, prompt in (("float32", 0.87, 0.85), ("bfloat16", 0.39, 0.35)):
        model = replace(MODEL, precision=Precision(dtype))
        (hop, _), (unpacked, _) = (forecast_session(model, CHAIN, place, PROMPT).hops for place in (slow, fast))
        assert (hop.send_s, hop.prompt_send_s) == pytest.approx((token * 0.001, prompt * PROMPT * 0.001))
        assert (unpacked.send_s, unpacked.prompt_send_s) == pytest.approx((1e-5, PROMPT * 1e-5))


def test_chunks_of_a_long_prompt_are_at_several_hops_at_the_same_time() -> None:
    long = 4 * ClientPolicy().chunk_tokens
    short, whole = (forecast_session(MODEL, CHAIN, HERE, tokens) for tokens in (long // 4, long))
    rest_s = whole.open_s + whole.ways_s + whole.client_s
    one_s, slowest_s = short.first_token_s - rest_s, short.hops[1].prompt_send_s
    assert slowest_s == short.prompt_back_s > short.hops[1].prompt_s
    assert whole.first_token_s == pytest.approx(rest_s + one_s + 3 * slowest_s, rel=0.01)


def test_a_prompt_of_the_length_that_is_measured_takes_what_was_measured() -> None:
    session = forecast_session(MODEL, CHAIN, HERE, PROMPT_POSITIONS)
    assert [each.prompt_s for each in session.hops] == pytest.approx([PROMPT_POSITIONS * n * 0.0002 for n in (4, 6)])


def test_without_a_way_between_two_servers_a_step_goes_by_way_of_the_client() -> None:
    session = forecast_session(MODEL, [server(A, Span(0, 4)), server(B, Span(4, 10))], HERE, PROMPT)
    assert session.hops[1].way_s == pytest.approx(0.01 + 0.04)


def test_a_nearer_client_has_shorter_ways_and_nothing_else_changes() -> None:
    here, nearer = (forecast_session(MODEL, CHAIN, place, PROMPT) for place in (HERE, HERE.nearer(0.5)))
    assert nearer.ways_s == pytest.approx(here.ways_s - 0.005 - 0.02)
    assert (nearer.compute_s, nearer.send_s, nearer.client_s) == (here.compute_s, here.send_s, here.client_s)


def test_many_sessions_have_what_the_slowest_server_has_for_them_and_a_gap_has_none() -> None:
    near, far = (ClientPlace({A: trip_s, B: trip_s}) for trip_s in (0.001, 2.0))
    slow = [server(A, Span(0, 4), 30_000, 20.0), server(B, Span(4, 10))]
    for_eight, away = (forecast(MODEL, slow, place, PROMPT) for place in (near, far))
    assert for_eight.sessions == 16
    assert 15 < for_eight.tokens_per_s < 25, "it was measured with eight at once"
    assert away.session is not None
    assert away.tokens_per_s < 16 / away.session.step_s, "sessions are on their way for most of the time"
    twice = forecast(MODEL, [*slow, server(C, Span(0, 4), 30_000, 20.0)], near, PROMPT)
    assert 1.5 < twice.tokens_per_s / for_eight.tokens_per_s < 2.5
    gap = forecast(MODEL, CHAIN[:1], HERE, PROMPT)
    assert (gap.tokens_per_s, gap.session) == (0.0, None)
    assert forecast(MODEL, [], HERE, PROMPT).session is None


def test_sessions_that_servers_have_now_do_not_count() -> None:
    """They will have ended when what is planned comes."""
    servers = [*CHAIN, server(C, Span(0, 4), b=30)]
    busy = [replace(each, offer=replace(each.offer, load=load)) for each, load in zip(servers, (5, 0, 1), strict=True)]
    assert forecast(MODEL, busy, HERE, PROMPT) == forecast(MODEL, servers, HERE, PROMPT)


def test_a_server_that_has_measured_nothing_adds_nothing_for_many_sessions() -> None:
    nothing = server(A, Span(0, 4), block_us=0, tokens_per_s=0.0)
    assert forecast(MODEL, [*CHAIN, replace(nothing, peer=C)], HERE, PROMPT).tokens_per_s > 0
    assert forecast(MODEL, [nothing, CHAIN[1]], HERE, PROMPT).tokens_per_s == 0.0
    with pytest.raises(NoRoute):
        forecast_session(MODEL, CHAIN[:1], HERE, PROMPT)


@given(st.floats(0.001, 1), st.integers(1, 10_000), st.integers(0, 1000), st.integers(1, 2000))
def test_one_more_server_never_makes_the_forecast_of_the_swarm_worse(
    round_trip_s: float, block_us: int, upload_kb: int, prompt_tokens: int
) -> None:
    more = server(C, Span(4, 10), block_us, upload_kb=upload_kb)
    place = ClientPlace({**HERE.round_trips_s, C: round_trip_s}, HERE.token_s, HERE.upload_bytes_per_s)
    before, after = (forecast(MODEL, servers, place, prompt_tokens) for servers in (CHAIN, [*CHAIN, more]))
    assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-9)
    assert after.session is not None
    assert after.session.first_token_s > after.session.step_s - after.session.send_s > 0
