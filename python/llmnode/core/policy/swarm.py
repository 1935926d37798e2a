"""How nodes hear of each other. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmnode.core.policy.budget import TurnPolicy


@dataclass(frozen=True, slots=True)
class DhtPolicy:
    """The part of a node in the DHT: the records that it keeps for others, and its answers."""

    lifetime_s: float = 120.0
    """A record is kept for this long. Nodes publish anew every `SwarmPolicy.directory_every_s`."""
    value_bytes: int = 4 << 20
    """All announcements: some 3,000."""
    provider_bytes: int = 4 << 20
    """All records that name the servers of a model."""
    record_bytes: int = 8 << 10
    providers_per_key: int = 64
    providers_told: int = 20
    addresses: int = 8
    """Addresses of one peer."""
    address_bytes: int = 256
    key_bytes: int = 128
    looked_at: int = 32
    """The addresses of a peer that are looked at for those at IP addresses."""
    message_bytes: int = 64 << 10
    """An answer with 20 peers and their addresses is smaller. Twice this number takes 5 ms to parse at worst."""
    peers_told: int = 20
    buckets: int = 32
    """The routing table has at most 20 peers in each. It takes a microsecond for each of its peers to find some."""
    streams: int = 64
    """Streams over which others ask, all together."""
    streams_per_group: int = 32
    streams_per_peer: int = 4
    request_s: float = 10.0
    """A stream without a whole request for this long is reset."""
    answer_s: float = 10.0
    requests: TurnPolicy = TurnPolicy(burst=200, per_s=2, shared_per_s=32)
    """Requests of address groups. Each takes about a millisecond of the event loop. A node publishes two records every
    `SwarmPolicy.directory_every_s`."""


@dataclass(frozen=True, slots=True)
class JoinPolicy:
    """How a node gets into a swarm, see `swarm/entering.py` and `swarm/former_peers.py`."""

    moment_s: float = 2.0
    """After the first peer has answered, the others have this long, plus the time that the first one took. They may
    know servers that it does not."""
    former_after_s: float = 1.0
    """If none of the named peers has answered by then, peers of former runs are asked beside them."""
    former_moment_s: float = 0.5
    """After a former peer has answered, the others have this long: the named ones are silent anyway."""
    former_at_once: int = 8
    """This many more of those are asked each `former_after_s`: some may be gone by now."""
    former_peers: int = 32
    """The peers of one swarm that a node remembers."""
    former_addresses: int = 4
    """The addresses of each."""
    former_swarms: int = 64
    """The contacts by which swarms are remembered. The one that was used longest ago is forgotten first."""
    forget_after_s: float = 30 * 86400.0
    """Peers are not remembered for longer than this after the last run."""
    remember_every_s: float = 60.0
    """A node that runs on looks this often whether it has new peers to remember: it may be killed."""
    rewrite_after_s: float = 86400.0
    """Peers that have not changed are written again after this time."""


@dataclass(frozen=True, slots=True)
class MdnsPolicy:
    """How nodes of one local network find each other, see `net/mdns.py`. Anybody there may send anything."""

    find_s: float = 2.0
    """A node that looks for others waits this long for the first answer."""
    more_s: float = 0.5
    """After the first answer, others have this long."""
    ask_again_s: tuple[float, ...] = (0.0, 0.5, 1.0)
    """A node that looks asks after these times: a datagram may be lost."""
    look_every_s: float = 60.0
    """A server asks and answers again this often, for nodes and networks that came later."""
    look_again_s: float = 5.0
    """If a peer could not be met, a server asks again after this time. Each further failure doubles it."""
    meet_s: float = 3.0
    """A node that begins waits this long for the peers that it has found. Attempts to meet them go on."""
    answer_delay_s: float = 0.1
    """Answers wait for a part of this, so that they do not all come at once (RFC 6762, section 6)."""
    answer_every_s: float = 1.0
    """An answer is sent this often at most (likewise)."""
    lifetime_s: int = 120
    """Others may keep an answer for this long."""
    datagram_bytes: int = 1500
    """A longer one is not read."""
    burst: int = 100
    """Datagrams that are read at once."""
    per_s: float = 100.0
    """Those that come faster stay in the kernel's buffer, which drops what is too much."""
    host_burst: int = 10
    """Datagrams about llmnode that are parsed of one host, at once. Each takes a tenth of a millisecond."""
    host_per_s: float = 2.0
    peers_per_host: int = 8
    """The peers that one host may have, as a machine with several GPUs, of those that are found or wait to be met."""
    peers: int = 32
    """The peers that wait to be met."""
    addresses: int = 4
    """The addresses of each."""
    at_once: int = 4
    """Peers that are met at the same time."""


@dataclass(frozen=True, slots=True)
class ProbePolicy:
    """How a node measures the way to other peers, see `swarm/probing.py`."""

    round_trips: int = 5
    """The median of this number of round trips counts: both ends are as busy as they usually are."""
    sizes_bytes: tuple[int, ...] = (1 << 16, 1 << 18, 1 << 18)
    """The probes that one peer gets, while they take less than `long_s`. The first ones open TCP's window."""
    long_s: float = 0.25
    least_s: float = 0.0005
    """The shortest time that is believed for a probe: clocks and tasks are no finer."""
    answer_s: float = 4.0
    """A peer that takes longer has shown nothing."""
    connect_s: float = 4.0
    upload_peers: int = 3
    """A node sends probes until this number of peers have taken them. It tries twice that number at most, of different
    address groups if there are such."""
    next_peers: int = 8
    """A server measures, and announces, round trips to this many peers that may be the next hop."""
    again_s: float = 300.0
    """A server measures its network again after this time."""
    tell_change: float = 0.2
    """A server announces an upload that sessions see once it has changed by this share."""
    soon_s: float = 5.0
    """It does so after this time if it has measured nothing yet, or if other peers may be the next hop now. The time
    doubles when that was in vain."""


@dataclass(frozen=True, slots=True)
class SwarmPolicy:
    """How nodes hear of each other."""

    announce_every_s: float = 15.0
    """A third of the lifetime: two announcements may get lost before a living peer is forgotten."""
    lifetime_s: float = 45.0
    """An announcement is valid for this long. A peer that died without a farewell is out of every view after this
    time."""
    clock_skew_s: float = 30.0
    """An announcement from further in the future than this is refused: it would outlive its peer."""
    clocks: int = 64
    """A node keeps what this many peers say about their clocks. The majority decides whose clock is wrong."""
    clock_keeps_s: float = 120.0
    """A peer's clock reading counts for this long: either clock may have been set since."""
    exchange_every_s: float = 3.0
    news_every_s: float = 0.2
    """News is passed on at once, but no faster than this."""
    news_peers: int = 128
    """With more peers than this in its view, a node waits longer between two exchanges, in proportion to their number.
    An exchange costs both sides time and bytes for each peer, and in a crowd there is always news."""
    exchanges: int = 8
    """If a node has many connections, it exchanges with this many of them at once, so that each has its turn within
    `announce_every_s`."""
    silent_wait_s: float = 30.0
    """A peer that did not answer is not asked again for this long, if others are connected."""
    fanout: int = 3
    """News is passed on to this many peers; a quiet exchange goes to one."""
    neighbours: int = 4
    """Links that a node keeps open for exchanges."""
    connections: int = 64
    """A node that serves or relays keeps this many connections to others that it has opened, besides those to next
    hops: an eighth of `BudgetPolicy.connections`. Nobody else has a place of these."""
    exchange_timeout_s: float = 5.0
    farewell_s: float = 1.0
    """A stopping node takes at most this long to say farewell."""
    directory_every_s: float = 30.0
    """A publication in the DHT takes tenths of seconds and many messages, but must come before the last one expires."""
    find_timeout_s: float = 10.0
    view_peers: int = 4096
    met_share: float = 0.5
    """The share of these places that only peers have that we have exchanged with ourselves."""
    changes_at_once: int = 8
    """A peer may announce this often in a row: it joins, is online, drains and leaves."""
    change_every_s: float = 5.0
    """Then it may do so this often. Announcements that come sooner are not taken, and cost nobody anything."""
    newcomers_per_s: float = 16.0
    """An address group may tell a node, unasked, of `view_peers` peers that the node does not know, and then of this
    number a second. Others are neither verified nor passed on. An exchange brings them if they are real."""
    newcomers_told_per_s: float = 64.0
    """The same for what it tells when it is asked. Larger views than ours are told in part, every few seconds."""
    announcement_bytes: int = 4096
    addresses: int = 8
    dht: DhtPolicy = field(default_factory=DhtPolicy)
    digest_peers: int = 64
    """A node that knows this many peers sends digests of its view: 2 kB. The sequence numbers of fewer peers are hardly
    larger, and spare a round trip."""
    exchange_bytes: int = 4 << 20
    """The largest list of announcements in one frame. A view of 4096 announcements of a kilobyte each fits in."""
