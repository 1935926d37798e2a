"""The shares that peers have of a process. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """How often address groups may have one kind of work done (`core/shared_rate.py`)."""

    burst: float
    """A group may have this much done at once."""
    per_s: float
    """Its burst comes back at this rate."""
    shared_per_s: float
    """Beyond their bursts, all groups together have this many turns a second."""


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The limits of a process for all peers together, and the shares that one of them may have (`core/budget.py`)."""

    memory_bytes: int = 512 << 20
    """Everything that peers make a process keep, except KV and the results that are kept for replay. Those have a size
    for each position of KV."""
    work_share: float = 0.25
    """The share of it for the steps that are being computed: their hidden states in fp32, in and out."""
    pass_share: float = 0.125
    """The share of it for passes, which train: their frames from their arrival on, and their work."""
    adapter_bytes: int = 512 << 20
    """Adapters of clients, which a worker holds beside its KV. One of rank 16 for all layers of a model of 7 billion
    weights takes 160 MB, a third of which a server of ten blocks holds."""
    graph_bytes: int = 128 << 20
    """A worker keeps this much of the graphs of blocks while it computes a backward, beside `memory_bytes`. The graphs
    of 15 blocks of SmolLM2-135M for 128 positions take 69 MiB, and 98 with LoRA in all layers. Blocks whose graphs are
    not kept are computed twice."""
    beside_bytes: int = 64 << 20
    """On a CPU a worker computes forwards beside such a backward, with this much for what lies between their products.
    512 positions of SmolLM2-135M take some 30 MiB, and those of a model of 7 billion weights 120."""
    tables_bytes: int = 36 << 20
    """The tables of how often somebody did something, which forget all but the latest (`core/rates.py`), take this much
    if all are full. No peer is charged for them."""
    window_share: float = 0.25
    """The share of it that others may send ahead of our reading, beyond `stream_bytes` for each stream."""
    push_share: float = 0.375
    """The share of it that servers may push to each other: what was granted, whether it has come or not. A prefill's
    chunk of the largest models takes 8 MiB."""
    group_share: float = 0.5
    """One address group may hold this share. On one machine, or behind one relay, all peers may be one group."""
    peer_share: float = 0.25
    """One peer at one address may hold this share of the memory: two of the largest frames."""
    connections: int = 512
    """All connections together, half-open ones included. Many systems allow a process 1,024 files."""
    connections_per_host: int = 128
    """Connections from one IPv4 address, IPv6 /56 or relay. Half-open ones name no peer, and peer ids are free."""
    half_open_per_host: int = 24
    """Connections of one address whose peer has not proved its identity yet. A handshake takes a few round trips."""
    connections_per_peer: int = 16
    """Two links each way need no more; those that are ending count."""
    accepted_burst: int = 128
    """The connections of one IPv4 address or IPv6 /56 that are accepted at once. Further ones are closed unread: each
    would take a millisecond of the event loop. It is `connections_per_host`: all nodes behind one NAT connect at once
    when a server is back, and one that is closed unread avoids the server for a while. The burst takes 0.13 s."""
    accepted_per_s: float = 4.0
    """Then one is accepted this often."""
    group_accepted_burst: int = 256
    """Those of one address group, which may have `group_share` of the connections. Beyond these, each is half a
    millisecond's search for one that makes way: a stranger with a /24 would take the whole event loop."""
    group_accepted_per_s: float = 16.0
    handshakes: TurnPolicy = TurnPolicy(burst=64, per_s=1, shared_per_s=16)
    """The connections of an address group whose handshake begins. With the link that follows, it takes some
    milliseconds of the event loop."""
    connection_bytes: int = 256 << 10
    """The memory of a connection and its link without frames, as measured."""
    idle_s: float = 15.0
    """A connection that nothing uses ends after this time: it may just have been opened for something."""
    crowded_share: float = 0.75
    """With more than this share of the connections taken, one that nothing uses ends after `crowded_idle_s`."""
    crowded_idle_s: float = 3.0
    idle_link_s: float = 60.0
    """With more than that share of the connections or links taken, of the process or of an address, a link counts as
    nothing if it has no session and has brought only heartbeats for this time. Nodes exchange views with each peer that
    they have a link to, within some `SwarmPolicy.announce_every_s`."""
    links: int = 256
    """Links that others have opened, as `ServePolicy.links`."""
    streams: int = 2048
    streams_per_peer: int = 256
    stream_bytes: int = 256 << 10
    """The memory of a stream: it may receive this much before it is read."""
    stream_turns: TurnPolicy = TurnPolicy(burst=512, per_s=16, shared_per_s=128)
    """The streams of address groups that are handled, whatever their protocol: each takes about a millisecond of the
    event loop. A connection begins with two or three, and all nodes behind one NAT may connect at once. A DHT opens one
    for each question."""
    stream_patience_s: float = 10.0
    """A stream waits this long for its turn. Then it is reset."""
    pings_per_stream: float = 16.0
    """This number of pings of libp2p counts as one stream. A circuit has one ping every `LinkPolicy.heartbeat_s`."""
    free_pings_burst: float = 4.0
    """A connection has this many pings answered at once without a turn: its other side waits `LinkPolicy.silence_s` for
    an answer, and then ends the connection."""
    free_pings_per_s: float = 1.0
    """Then it has one more this often."""
    refused_streams_burst: int = 64
    """A peer may open this many streams at once that are not handled. A further one costs the connection. On one with a
    session, a reservation or a circuit, a stream does not count if it has only waited too long for its turn. It counts
    if its peer has reset it meanwhile."""
    refused_streams_per_s: float = 1.0
    """Then one is allowed this often."""
    dials: int = 32
    """Dials under way at the same time, as in go-libp2p."""
    heavy_answers: int = 16
    """Answers that are being made at the same time and take more than a millisecond, such as views and DHT lookups."""
    heavy_answers_per_peer: int = 4
