"""The dial gate: what a stranger names is dialled only where the node is, and seldom, under whatever identities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import DialGate, scope_of
from llmnode.core.policy import DialPolicy
from llmnode.core.rates import KEYS

POLICY = DialPolicy()
HOUR_S = 3600


@pytest.mark.parametrize(
    ("host", "scope"),
    [
        ("8.8.8.8", "public"),
        ("2606:4700::1111", "public"),
        ("127.0.0.2", "machine"),
        ("::1", "machine"),
        ("169.254.169.254", "link"),
        ("fe80::1%eth0", "link"),
        ("10.1.2.3", "10.0.0.0/8"),
        ("192.168.0.9", "192.168.0.0/16"),
        ("100.64.0.1", "100.64.0.0/10"),
        ("fd00::1", "fc00::/7"),
        ("203.0.113.7", "other"),
        ("224.0.0.1", None),
        ("0.0.0.0", None),
        ("::ffff:127.0.0.1", None),
        ("64:ff9b::8.8.8.8", "public"),
        ("64:ff9b::192.168.1.1", None),
        ("64:ff9b::169.254.169.254", None),
        ("64:ff9b:1::8.8.8.8", None),
        ("2002:808:808::1", "public"),
        ("2002:c0a8:101::1", None),
        ("::192.168.1.1", None),
        ("::ffff:0:192.168.1.1", None),
        ("fec0::1", "fec0::/10"),
        ("4000::1", None),
        ("5f00::1", None),
        ("3fff::1", "other"),
        ("192.0.0.192", "other"),
        ("2001:0:808:808::1", "other"),
        ("localhost", None),
        ("node.example", None),
        ("", None),
    ],
)
def test_an_address_means_something_in_one_network(host: str, scope: str | None) -> None:
    assert scope_of(host) == scope


def test_a_public_node_dials_nothing_private_for_strangers() -> None:
    gate = DialGate(POLICY)
    gate.live_at(["8.8.8.8", "10.0.0.7", "127.0.0.1"])
    for host in ("10.0.0.1", "127.0.0.1", "192.168.1.1", "169.254.169.254", "fe80::1", "metadata.internal"):
        assert gate.why_not(host, 80, 0.0) is not None
    assert gate.why_not("9.9.9.9", 4001, 0.0) is None
    assert gate.why_not("9.9.9.9", 0, 0.0) is not None


def test_a_node_of_a_private_network_dials_within_it() -> None:
    gate = DialGate(POLICY)
    gate.live_at(["192.168.1.7"])
    assert gate.why_not("192.168.1.8", 4001, 0.0) is None
    assert gate.why_not("10.0.0.1", 4001, 0.0) is not None
    assert gate.why_not("127.0.0.1", 4001, 0.0) is not None


@pytest.mark.parametrize(
    ("lives_at", "host", "is_dialled"),
    [
        (["192.168.1.7", "2a00:1450:4001:8aa::1"], "192.168.1.8", True),
        (["192.168.1.7", "2a00:1450:4001:8aa::1"], "10.0.0.1", False),
        (["192.168.1.7", "2a00:1450:4001:8aa::1"], "2a00:1450:4001:8aa::2", True),
        (["192.168.1.7", "2a00:1450:4001:8aa::1", "fd00::1"], "fd00::2", False),
        (["192.168.1.7", "fd00::1"], "fd00::2", True),
        (["8.8.8.8", "192.168.1.7", "fd00::1"], "192.168.1.8", False),
        (["8.8.8.8", "192.168.1.7", "fd00::1"], "fd00::2", False),
        (["127.0.0.1", "2a00:1450:4001:8aa::1"], "127.0.0.1", False),
    ],
)
def test_behind_a_nat_of_ipv4_it_dials_in_its_network_whatever_it_is_at_over_ipv6(
    lives_at: list[str], host: str, is_dialled: bool
) -> None:
    gate = DialGate(POLICY)
    gate.live_at(lives_at)
    assert (gate.why_not(host, 4001, 0.0) is None) == is_dialled


def test_the_users_word_opens_a_network_and_permits_names() -> None:
    gate = DialGate(POLICY)
    assert gate.why_not("127.0.0.1", 4001, 0.0) is not None
    gate.vouch("127.0.0.1", 4001)
    gate.vouch("node.example", 4001)
    assert gate.why_not("127.0.0.1", 4001, 0.0) is None
    assert gate.why_not("127.0.0.1", 4002, 0.0) is None
    assert gate.why_not("node.example", 4001, 0.0) is None
    assert gate.why_not("node.example", 4002, 0.0) is not None


def test_many_identities_at_one_address_are_few_dials() -> None:
    gate = DialGate(POLICY)
    allowed = sum(gate.why_not("8.8.8.8", 22, 0.0) is None for _ in range(1000))
    assert allowed == POLICY.place_burst


def test_one_that_was_not_reached_is_left_alone_for_longer_and_longer() -> None:
    gate, now_s, dials = DialGate(POLICY), 0.0, 0
    while now_s < HOUR_S:
        if gate.why_not("8.8.8.8", 22, now_s) is None:
            dials += 1
            gate.report("8.8.8.8", 22, now_s, reached=False)
        now_s += 0.1
    assert dials <= HOUR_S / POLICY.longest_pause_s + 10


def test_a_peer_does_not_pay_for_dials_to_others_that_strangers_announce_at_its_address() -> None:
    gate, now_s, dials, honest = DialGate(POLICY), 0.0, 0, PeerId("honest")
    for number in range(1000):
        if gate.why_not("8.8.8.8", 4001, now_s, PeerId(f"sybil {number}")) is None:
            dials += 1
            gate.report("8.8.8.8", 4001, now_s, reached=False, found=honest)
        assert gate.why_not("8.8.8.8", 4001, now_s, honest) is None, f"after {number} others"
        gate.report("8.8.8.8", 4001, now_s, reached=True, peer=honest)
        now_s += 0.1
    assert dials <= 1 + now_s / POLICY.longest_pause_s


def test_another_peer_that_has_come_to_an_address_is_found_there() -> None:
    gate = DialGate(POLICY)
    before, now = PeerId("before"), PeerId("now")
    assert gate.why_not("8.8.8.8", 4001, 0.0, before) is None
    gate.report("8.8.8.8", 4001, 0.0, reached=False, found=now)
    assert gate.why_not("8.8.8.8", 4001, 1.0, before) is not None
    assert gate.why_not("8.8.8.8", 4001, 1.0, now) is None
    assert gate.why_not("8.8.8.8", 4001, POLICY.longest_pause_s, before) is None


def test_the_peers_that_were_found_in_place_of_others_are_bounded() -> None:
    gate = DialGate(POLICY)
    for port in range(1, KEYS + 2):
        gate.report("8.8.8.8", port, 0.0, reached=False, found=PeerId("honest"))
    assert gate.why_not("8.8.8.8", 1, 1.0, PeerId("another")) is None, "it was found the longest time ago"
    assert gate.why_not("8.8.8.8", KEYS + 1, 1.0, PeerId("another")) is not None


def test_the_ports_of_one_host_are_not_tried_one_after_the_other() -> None:
    gate, dials = DialGate(POLICY), 0
    for port in range(1, 5000):
        now_s = port / 100
        if gate.why_not("8.8.8.8", port, now_s) is None:
            dials += 1
            gate.report("8.8.8.8", port, now_s, reached=False)
    assert dials <= POLICY.host_failures + 50 * POLICY.host_failures_per_s + 1


def test_all_addresses_together_have_a_rate() -> None:
    gate = DialGate(POLICY)
    allowed = sum(gate.why_not(f"8.{number // 250}.{number % 250}.1", 4001, 0.0) is None for number in range(5000))
    assert allowed == POLICY.burst


def test_a_peer_that_is_reached_may_be_reached_again_and_again() -> None:
    gate = DialGate(POLICY)
    for _ in range(500):
        assert gate.why_not("8.8.8.8", 4001, 0.0) is None
        gate.report("8.8.8.8", 4001, 0.0, reached=True)


def test_the_users_contacts_are_dialled_though_all_else_is_not() -> None:
    gate = DialGate(POLICY)
    gate.vouch("9.9.9.9", 4001)
    for number in range(5000):
        gate.why_not(f"8.{number // 250}.{number % 250}.1", 4001, 0.0)
    assert gate.why_not("9.9.9.9", 4001, 0.0) is None


def spend_host(gate: DialGate, host: str) -> None:
    """A stranger announces dead ports at this host until none of its ports is dialled."""
    for port in range(1, 2 * POLICY.host_failures):
        if gate.why_not(host, port, 0.0, PeerId(f"sybil {port}")) is None:
            gate.report(host, port, 0.0, reached=False)
    assert gate.why_not(host, 22, 0.0) is not None


def test_a_peer_that_was_met_does_not_wait_for_what_other_ports_of_its_host_have_cost() -> None:
    gate, honest = DialGate(POLICY), PeerId("honest")
    assert gate.why_not("8.8.8.8", 4001, 0.0, honest) is None
    gate.report("8.8.8.8", 4001, 0.0, reached=True, peer=honest)
    spend_host(gate, "8.8.8.8")
    assert gate.why_not("8.8.8.8", 4001, 0.0, PeerId("another")) is not None
    assert gate.why_not("8.8.8.8", 4001, 0.0, honest) is None


def test_a_peer_that_was_met_does_not_wait_for_dials_to_others() -> None:
    """Nor for those to other names at its own address, which are under way at the same moment."""
    gate, honest = DialGate(POLICY), PeerId("honest")
    gate.report("8.8.8.8", 4001, 0.0, reached=False, peer=PeerId("another"), found=honest)
    gate.report("9.9.9.9", 4001, 0.0, reached=True, peer=honest)
    for number in range(POLICY.place_burst):
        assert gate.why_not("9.9.9.9", 4001, 0.0, PeerId(f"sybil {number}")) is None
    for number in range(5000):
        gate.why_not(f"8.{number // 250}.{number % 250}.1", 4001, 0.0)
    assert gate.why_not("9.9.9.9", 4001, 0.0, honest) is None
    assert gate.why_not("8.8.8.8", 4001, 0.0, honest) is None


def test_a_peer_that_was_met_and_does_not_answer_has_the_pauses_and_rates_of_strangers() -> None:
    gate, now_s, dials, honest = DialGate(POLICY), 0.0, 0, PeerId("honest")
    gate.report("8.8.8.8", 4001, 0.0, reached=True, peer=honest)
    while now_s < HOUR_S:
        if gate.why_not("8.8.8.8", 4001, now_s, honest) is None:
            dials += 1
            gate.report("8.8.8.8", 4001, now_s, reached=False, peer=honest)
        now_s += 0.1
    assert dials <= HOUR_S / POLICY.longest_pause_s + 10
    for number in range(5000):
        gate.report(f"8.0.{number // 250}.{number % 250}", 4001, now_s, reached=True, peer=honest)
    dialled = [
        gate.why_not(f"8.0.{number // 250}.{number % 250}", 4001, now_s, honest) is None for number in range(5000)
    ]
    assert sum(dialled) <= 2 * POLICY.burst


def test_one_stranger_has_no_peers_forgotten_that_were_met_elsewhere() -> None:
    gate, honest = DialGate(POLICY), PeerId("honest")
    gate.report("8.8.8.8", 4001, 0.0, reached=True, peer=honest)
    for port in range(1, 5000):
        gate.report("9.9.9.9", port, 0.0, reached=True, peer=PeerId("stranger"))
    spend_host(gate, "8.8.8.8")
    assert gate.why_not("8.8.8.8", 4001, 0.0, honest) is None


def test_others_that_strangers_announce_at_a_contact_cost_it_no_dials() -> None:
    gate, contact = DialGate(POLICY), PeerId("contact")
    gate.vouch("9.9.9.9", 4001, contact)
    dials = 0
    for number in range(1000):
        sybil = PeerId(f"sybil {number}")
        dials += gate.why_not("9.9.9.9", 4001, 0.0, sybil) is None
        assert not gate.is_vouched("9.9.9.9", 4001, sybil)
    assert dials <= POLICY.place_burst
    assert gate.why_not("9.9.9.9", 4001, 0.0, contact) is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 3), st.floats(0, 5), st.booleans()),
        max_size=200,
    )
)
def test_no_address_is_dialled_more_often_than_its_rate(steps: list[tuple[int, int, float, bool]]) -> None:
    """This holds for any mixture of successes and failures: only dials that reached a peer are free."""
    gate, now_s = DialGate(POLICY), 0.0
    unanswered: dict[tuple[str, int], int] = {}
    for number, port, passed_s, reached in steps:
        now_s += passed_s
        host = f"8.8.8.{number}"
        if gate.why_not(host, port, now_s) is None:
            gate.report(host, port, now_s, reached=reached)
            if not reached:
                unanswered[host, port] = unanswered.get((host, port), 0) + 1
    for count in unanswered.values():
        assert count <= POLICY.place_burst + now_s * POLICY.place_per_s + 1e-6


def test_a_peer_that_said_that_it_is_near_is_dialled_there_alone_and_as_a_stranger() -> None:
    gate = DialGate(POLICY)
    assert gate.why_not("192.168.1.8", 4001, 0.0) is not None
    gate.note_near("192.168.1.8", 4001)
    assert gate.why_not("192.168.1.8", 4001, 0.0) is None
    assert gate.why_not("192.168.1.8", 22, 0.0) is not None, "another port"
    assert gate.why_not("192.168.1.9", 4001, 0.0) is not None, "another host of its network"
    assert not gate.is_vouched("192.168.1.8", 4001)
    assert sum(gate.why_not("192.168.1.8", 4001, 0.0) is None for _ in range(1000)) == POLICY.place_burst - 1
    gate.note_near("node.example", 4001)
    assert gate.why_not("node.example", 4001, 0.0) is not None, "a name"


def test_a_crowd_of_peers_that_are_near_is_bounded() -> None:
    gate = DialGate(POLICY)
    gate.note_near("10.0.0.1", 1)
    for port in range(2, KEYS + 2):
        gate.note_near("10.0.0.1", port)
    assert gate.why_not("10.0.0.1", 1, 0.0) is not None, "it was named the longest time ago"
    assert gate.why_not("10.0.0.1", KEYS + 1, 0.0) is None
