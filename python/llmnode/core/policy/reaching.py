"""How peers reach each other: dials, hole punching, relays. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class DialPolicy:
    """How often a node dials what strangers name (`core/peers/dial_gate.py`). Dials that reach a peer are free."""

    burst: int = 64
    """Dials to all addresses together, at once."""
    per_s: float = 8.0
    place_burst: int = 4
    """Dials to one address and port, at once. A node has two pools, and a peer may move from a relay."""
    place_per_s: float = 0.5
    host_failures: int = 24
    """Dials to one host that failed, at any port: many nodes may be behind one address, and have just gone."""
    host_failures_per_s: float = 0.5
    pause_s: float = 1.0
    """An address that could not be reached is left alone for this long, and for twice the time after each failure."""
    longest_pause_s: float = 30.0
    """A server that comes back is found again within this time."""
    stagger_s: float = 0.25
    """The next IP address of a name is tried this long after the one before, beside it, as in RFC 8305."""
    contact_burst: int = 64
    """Dials to an address that the user has named, at once."""
    contact_per_s: float = 4.0


@dataclass(frozen=True, slots=True)
class PunchPolicy:
    """How two peers that are connected through a relay try to be connected directly."""

    tries: int = 3
    """Attempts in a row; the specification says 3. With 0 the dialled peer does not try."""
    again_s: float = 15.0
    """The pause after a failed round of `tries`; each further pause lasts twice the last one.
    The side that dialled accepts `tries` attempts per connection within this time."""
    longest_again_s: float = 960.0
    talk_s: float = 10.0
    """All messages through the relay before an attempt must arrive within this time."""
    dial_s: float = 4.0
    """Both sides dial for this long. A packet that reached a NAT too early is sent again after 1 and 3 s."""
    redial_s: float = 0.1
    """The pause after a dial that was refused at once, for example because the other system does not dial yet. It
    doubles each time."""
    longest_redial_s: float = 0.8
    addresses: int = 8
    """At most this many of the addresses that the other side names are dialled: they may belong to anybody."""
    at_once: int = 32
    """Peers with which a node punches at the same time; others stay relayed."""
    grace_s: float = 5.0
    """Links have this long to move to a new direct connection. Then the connection without links is closed."""

    def pauses_s(self) -> Iterator[float]:
        """The pause after each failed round."""
        pause_s = self.again_s
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, self.longest_again_s)


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """A node's side of circuits through relays: its reservations, and the circuits that others open through them."""

    handshake_s: float = 10.0
    """A relay that opened a stream must say within this time what the stream is for."""
    renew_share: float = 0.5
    """A reservation is renewed after this share of its life, so that a renewal may fail once and be tried again."""
    renew_within_s: float = 600.0
    """A renewal happens at least this often, whatever lifetime and clock the relay announces."""
    renew_least_s: float = 1.0
    """No relay can make a node renew more often than this."""
    retry_s: float = 1.0
    """The pause after a reservation is lost or refused; it doubles each time."""
    longest_retry_s: float = 30.0
    """The longest such pause: a relay that is back is used again within this time."""
    punch: PunchPolicy = field(default_factory=PunchPolicy)


@dataclass(frozen=True, slots=True)
class ReachPolicy:
    """How a node finds out whether others can dial it, and what it does for others that ask for the same."""

    peers: int = 3
    """A node asks this many peers: one may be wrong."""
    look_s: float = 12.0
    """A peer has this long to say how it sees the node, and to dial it."""
    answer_s: float = 10.0
    """The time from the first byte of a question to its answer."""
    dial_s: float = 5.0
    """All addresses that a peer names are dialled within this time."""
    addresses: int = 8
    requests_per_minute: int = 30
    """The limit of go-libp2p: each request costs the answering node a few dials."""
    group_requests_per_minute: int = 12
    """Requests from one address group: a stranger with five addresses would take all."""
    host_requests_per_minute: int = 6
    """Requests from one IPv4 address or IPv6 /56. Several nodes may be behind it."""


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """The limits of a relay for unknown peers. They are generous: our circuits carry whole sessions, and a hop behind a
    NAT has no other way.
    """

    reservation_s: float = 3600.0
    reservations: int = 384
    """Each one is a connection, and a peer has one. The rest of `BudgetPolicy.connections` is for those that dial. When
    all are taken, the address group that holds most gives one to another group."""
    reservations_per_host: int = 32
    """Peer ids cost nothing, addresses do; many nodes may share one behind a NAT."""
    reservations_per_group: int = 96
    """A quarter of all: twelve addresses of two groups would else have all of them."""
    circuits: int = 2048
    circuits_per_peer: int = 128
    """This limits the circuits of a peer that dials and those of a peer that is dialled. A dialled peer accepts no more
    from one relay either (`BudgetPolicy.connections_per_host`). The address group that has asked for most of its
    circuits gives one to another group."""
    circuits_per_group: int = 1024
    """Circuits that peers of one address group have asked for: half of all."""
    circuit_idle_s: float = 120.0
    """A circuit over which nothing moves for this long is closed. Links have heartbeats."""
    circuit_s: float = 24 * 3600.0
    """After this time the two ends have to open another circuit."""
    circuit_bytes: int = 1 << 40
    """The limit in each direction: a day at 100 Mbit/s."""
    handshake_s: float = 10.0
    """The time from the first byte of a request to its answer, including the answer of the other peer."""


@dataclass(frozen=True, slots=True)
class RelayedPolicy:
    """How much of a session may go through relays, see `core/peers/relaying.py`."""

    prefill: str = "wait"
    """A prefill above `prefill_bytes` is held for `patience_s`, until there are direct connections. After that, "wait"
    sends it through the relay unless that would cut the circuit, and "refuse" fails it. "allow" does not hold it."""
    prefill_bytes: int = 256 << 10
    """The bytes of one session within `window_s`: about a hundred positions of a small model. Where a relay has a limit
    of its own, it is often 128 KiB."""
    window_s: float = 60.0
    step_positions: int = 8
    """At most this many positions count as a decode step, whatever their size: a user may be reading along."""
    patience_s: float = 4.0
    """The time for hole punching. Most attempts that succeed do so at once."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """When a direct connection replaces a relayed one, among the connections that a node has opened."""

    idle_s: float = 30.0
    """The relayed connection ends when nothing was sent for this long. Even a large frame through a slow relay has
    arrived by then."""
    retry_s: float = 5.0
    """The pause after a direct connection could not be opened, or has ended."""
    stagger_s: float = 0.2
    """The next address of a peer is tried this long after the one before, beside it. RFC 8305 has 250 ms."""
    relay_stagger_s: float = 1.0
    """The same pause before a relay's address, which would otherwise win against a direct one far away."""
