"""Limits and deadlines, each with its reason.

A number is a field of a policy if a caller or a test may want another value, or if two modules must agree on it. A
number that only one module knows, such as a size of a table or a bound on what a peer may send, is a constant there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class PackPolicy:
    """The limits for packing hidden states on a link, see `core/links/packing.py`."""

    least_bytes: int = 1024
    """A smaller payload is never packed: there is too little to gain. A row of hidden states is larger."""
    sample_bytes: int = 64 << 10
    """This much of a payload is packed as a sample, to see whether packing pays. The sample is thrown away."""
    sample_every: int = 16
    """If payloads of a size go unpacked, one in this many is sampled again."""
    margin: float = 3.0
    """Packing must save this many times what it costs. Both are estimates, and a processor that is so busy that it
    slows the link would be slowed further by packing."""
    rate_bytes: int = 128 << 10
    """A run of this many bytes of one frame, without a break, is enough to measure how fast the link is."""
    rate_keeps: float = 0.94
    """Older measurements keep this share of their weight at each new one. About two megabytes then count, so that a
    short pause of the receiver does not make a fast link look slow."""
    tell_change: float = 0.2
    """The receiver tells the sender the rate again when it has changed by this share."""
    in_thread_bytes: int = 1 << 20
    """A payload from this size on is packed in a thread: packing takes milliseconds, and other links should not
    wait."""


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """The limits of a process for all peers together, and the shares that one of them may have (`core/budget.py`)."""

    memory_bytes: int = 512 << 20
    """Everything that peers make a process keep, except KV and the results that are kept for replay. Those have a size
    for each position of KV."""
    work_share: float = 0.25
    """The share of it for the steps that are being computed: their hidden states in fp32, in and out."""
    window_share: float = 0.25
    """The share of it that others may send ahead of our reading, beyond `stream_bytes` for each stream."""
    group_share: float = 0.5
    """One address group may hold this share. On one machine, or behind one relay, all peers may be one group."""
    peer_share: float = 0.25
    """One peer at one address may hold this share of the memory: two of the largest frames."""
    connections: int = 512
    """All connections together, half-open ones included. Many systems allow a process 1,024 files."""
    connections_per_host: int = 128
    """Connections from one IPv4 address, IPv6 /56 or relay. Half-open ones name no peer, and peer ids are free."""
    connections_per_peer: int = 16
    """Two links each way need no more; those that are ending count."""
    connection_bytes: int = 256 << 10
    """The memory of a connection and its link without frames, as measured."""
    idle_s: float = 15.0
    """A connection that nothing uses ends after this time: it may just have been opened for something."""
    crowded_share: float = 0.75
    """With more than this share of the connections taken, one that nothing uses ends after `crowded_idle_s`."""
    crowded_idle_s: float = 3.0
    links: int = 256
    """Links that others have opened, as `ServePolicy.links`."""
    streams: int = 2048
    streams_per_peer: int = 256
    stream_bytes: int = 256 << 10
    """The memory of a stream: it may receive this much before it is read."""
    dials: int = 32
    """Dials under way at the same time, as in go-libp2p."""
    heavy_answers: int = 16
    """Answers that are being made at the same time and take more than a millisecond, such as views and DHT lookups."""
    heavy_answers_per_peer: int = 4


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
    contact_burst: int = 64
    """Dials to an address that the user has named, at once."""
    contact_per_s: float = 4.0


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """One stream of frames between two peers, and the budget of all of them."""

    heartbeat_s: float = 2.0
    """An idle link sends a heartbeat this often."""
    silence_s: float = 6.0
    """A link that brought no byte for this long is dead: libp2p reports nothing when a peer is frozen or cut off."""
    write_timeout_s: float = 10.0
    """One write may take this long before the link is given up. A large frame is written in pieces, each with this
    limit."""
    pace_grace_s: float = 10.0
    """A frame that has begun to arrive, and one that waits to be read by the other side, may take this long, plus its
    bytes at `pace_bytes_per_s`."""
    pace_bytes_per_s: float = 16 << 10
    """Slower links than this are of no use for hidden states."""
    memory_patience_s: float = 4.0
    """A link waits this long for memory (`BudgetPolicy`). Then it ends."""
    farewell_s: float = 0.5
    """A closing link gives its last write this long."""
    dial_timeout_s: float = 10.0
    links_per_peer: int = 8
    """One each way is enough for any number of sessions, and two while a direct one replaces a relayed one. A few more
    may be open because one side has not noticed their end. Without a limit one peer could take all links of a
    server."""
    queue_frames: int = 256
    """Frames waiting in either direction. A peer that overruns it breaks the protocol: sessions bound their steps."""
    queue_bytes: int = 256 << 20
    """The total size of the frames that wait in either direction: four of the largest, or many small ones."""
    max_payload_bytes: int = 64 << 20
    """The largest tensor in a frame: 8192 positions of 2048 fp32 values."""
    max_meta_bytes: int = 64 << 10
    piece_bytes: int = 128 << 10
    """Larger frames are sent in pieces, so that a step of another session waits for one piece only. On a slow link the
    pieces are smaller (`core/links/write_size.py`)."""
    packing: PackPolicy = field(default_factory=PackPolicy)
    budget: BudgetPolicy = field(default_factory=BudgetPolicy)
    dials: DialPolicy = field(default_factory=DialPolicy)


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
    host_requests_per_minute: int = 6
    """Requests from one IP address. Several nodes may be behind it."""


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """The limits of a relay for unknown peers. They are generous: our circuits carry whole sessions, and a hop behind a
    NAT has no other way.
    """

    reservation_s: float = 3600.0
    reservations: int = 384
    """Each one is a connection, and a peer has one. The rest of `BudgetPolicy.connections` is for those that dial."""
    reservations_per_host: int = 32
    """Peer ids cost nothing, addresses do; many nodes may share one behind a NAT."""
    circuits: int = 2048
    circuits_per_peer: int = 128
    """This limits the circuits of a peer that dials and those of a peer that is dialled. A dialled peer accepts no more
    from one relay either (`BudgetPolicy.connections_per_host`)."""
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
class BatchPolicy:
    """The limits that decide which slices of sessions are computed together, see `core/serving/scheduling.py`."""

    decode_positions: int = 8
    """A step of at most this many positions counts as a decode: a user may be reading along, and it hardly lengthens a
    forward."""
    decodes: int = 64
    """The most positions of decodes in one forward."""
    stretch: float = 1.75
    """With prefills added, a forward of decodes may take this many times as long as without them. Prefills through a
    few blocks between two forwards count too. A user who reads along keeps more than half of the speed, and a prefill
    takes 2.3 times as long as alone."""
    prefill_s: float = 0.5
    """Prefills may take this much of a forward while nobody decodes. A decode that arrives meanwhile waits for all of
    it. On our CPU prefills get no faster with more."""
    decoding_s: float = 1.0
    """A session whose last decode is at most this long ago counts as decoding: its next step may arrive at any time."""
    least_prefill: int = 8
    """A forward through all blocks takes at least this many prefill positions, however slow it is. With fewer, prefills
    would hardly advance."""
    unmeasured_prefill: int = 64
    """The prefill positions in a forward until their cost has been measured."""
    fast_prefill: int = 128
    """From this many positions on, the cost per position hardly falls. If a forward has no time for this many through
    all blocks, but has it for half of them through one block, prefills go through a few blocks at a time. This happens
    beside decodes on a CPU."""
    most_prefill: int = 512
    """More positions gain nothing on any device that we know, and need memory."""
    pass_positions: int = 256
    """Sequences of a pass go together up to this many positions. More gain nothing on a CPU, and decodes would wait."""
    gather_share: float = 0.85
    """Sessions that decode in step wait for each other if their absence is shorter than this share of the fixed cost of
    a forward, which a shared forward saves. The fixed cost is what a forward of decodes takes without the part that
    each decode adds. At a share of 1 waiting would neither gain nor lose."""
    ageing_s: float = 2.0
    """Each time a request has waited this long without a turn, it counts as one priority higher."""

    def rank(self, priority: Priority, since_s: float, now_s: float) -> int:
        """The rank, at `now_s`, of a request of this `priority` that waits since `since_s`. A lower one comes first."""
        return max(0, priority - int((now_s - since_s) / self.ageing_s))


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """The deadlines of a worker process, and when it is started again."""

    hello_s: float = 60.0
    """A new process must have started Python within this time, even on a busy machine."""
    look_s: float = 30.0
    """Loading a model has no deadline. The node checks and reports its progress this often."""
    stuck_s: float = 300.0
    """A worker whose loading makes no progress for this long counts as crashed. A slow disk or a download resumes
    sooner."""
    answer_s: float = 60.0
    """A batch that takes longer counts as a crash: clients wait no longer either (`ClientPolicy.step_timeout_s`)."""
    end_s: float = 5.0
    """The system has this long to clean up after a dying process, which may write its memory to disk."""
    pause_s: float = 1.0
    """The pause before the first restart after a crash; it doubles before each further one."""
    longest_pause_s: float = 60.0
    steady_s: float = 300.0
    """A worker that has served this long before it crashes is restarted as if it had never crashed before."""
    failed_starts: int = 4
    """After this many failed starts in a row the node gives up: this machine cannot hold what it was asked to."""


@dataclass(frozen=True, slots=True)
class LifePolicy:
    """How a node goes from one span to another, see `core/serving/node_life.py`."""

    drain_s: float = 10.0
    """Sessions have this long to end before the blocks are dropped: as at `llmnode serve --drain-s`."""


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


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Limits of the queue for KV memory, see `core/serving/admission_queue.py`."""

    wait_s: float = 4.0
    """A session waits at most this long for KV memory. Clients wait longer for an answer
    (`ClientPolicy.open_timeout_s`)."""
    line: int = 256
    """The most sessions that wait: each is a task and some kilobytes."""
    line_per_client: int = 64
    passed_over: int = 8
    """This many smaller sessions may overtake a large one that does not fit yet. Then memory is kept free until it
    fits."""
    ageing_s: float = 1.0
    """Each time a session has waited this long, it counts as one priority higher."""
    stays_kept: int = 64
    """The durations of this many recent sessions are kept, to estimate how long one stays."""
    least_retry_s: float = 1.0
    """No client is told to ask again sooner than this."""
    longest_retry_s: float = 60.0
    """No client is told to ask again later than this: the estimate is rough."""


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
class ServePolicy:
    """The limits of a server for its clients."""

    sessions_per_link: int = 64
    links: int = 256
    malformed_burst: int = 16
    """An address group may send this many malformed frames at once. A further one costs the link that it came over."""
    malformed_per_s: float = 0.1
    """Then one is allowed this often."""
    steps_ahead: int = 4
    """Steps a client may send before the one that is due has arrived."""
    passes_per_link: int = 4
    """Passes, which train, that a client may ask for at the same time."""
    pass_positions: int = 8192
    """The most positions of one pass: a frame has room for that many of a small model."""
    replay_bytes: int = 64 << 20
    """The most bytes of logged results that one frame may ask for."""
    memory_patience_s: float = 10.0
    """A step waits this long for memory (`BudgetPolicy`). Meanwhile no other frame is read from its link."""
    connect_timeout_s: float = 3.0
    """The time for a connection to a next hop and for its first answer."""
    dial_patience_s: float = 0.5
    """A session waits this long, some round trips, for the connection to its next hop. Until the connection is there,
    the client passes results between the two hops."""
    redial_s: float = 2.0
    """A next hop that could not be reached, for example behind a NAT, is not dialled again for this long. The pause
    doubles each time."""
    longest_redial_s: float = 60.0
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    """Larger prefills are not pushed through relays, if the client is reached directly."""
    session_idle_s: float = 600.0
    """A session without a step for this long is closed and its KV freed."""
    lease_s: float = 60.0
    """A session may outlive its link by this much if its client asks for it. Within this time another process must read
    the file of the session and load the model. 0 grants no lease."""
    leased_share: float = 0.25
    """Sessions without a link may hold this share of the server's KV together: their clients may never return."""
    leased_client_share: float = 0.5
    """The sessions of one client may hold this share of `leased_share`."""
    room: AdmissionPolicy = field(default_factory=AdmissionPolicy)


@dataclass(frozen=True, slots=True)
class RoutePolicy:
    """How a client chooses the peers of a route, and connects to them."""

    connect_timeout_s: float = 4.0
    """The time for some round trips to a peer of a route. A frozen peer must not keep a session from other peers for
    longer."""
    connect_moment_s: float = 0.1
    """After the first failed connection of a route, the client waits this long for the others. Further peers that
    cannot be reached are then found at the same time."""
    open_patience_s: float = 10.0
    """A session that cannot open tries again for this long, while the view says that its peers are there."""
    room_patience_s: float = 60.0
    """A session tries for this long while servers have no KV memory for it, and say when they may."""
    room_cost_s: float = 4.0
    """This is added to the cost of a peer that has no KV memory for the session: the wait for admission
    (`AdmissionPolicy`)."""
    retry_s: float = 1.0
    """The pause between two looks for peers, unless the swarm changes before."""
    longest_pause_s: float = 5.0
    """The same pause is not longer than this, whatever time peers name until they have room."""
    ban_s: float = 2.0
    """The first ban of a peer that failed; each further ban lasts twice the one before."""
    longest_ban_s: float = 30.0
    standbys: bool = True
    """The client keeps connections to peers that could take the place of a lost one."""


@dataclass(frozen=True, slots=True)
class PushPolicy:
    """When hops push their results to each other, and not by way of the client."""

    enabled: bool = True
    """Hops give their results to the next one directly, where they can reach it."""
    patience_s: float = 2.0
    """A hop that was given a step directly has this long to answer, plus a multiple of what a similar step took."""
    retry_s: float = 2.0
    """A hop that could not push, or whose push was lost, is asked again between two steps after this time. The pause
    doubles each time, because asking takes a round trip."""
    longest_retry_s: float = 60.0


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """How a session outlives the peers that it loses, and the process that it began in."""

    upstream_logs: bool = True
    """Each hop logs its results for a peer that takes the next hop's place. The client sees only digests of what hops
    give each other. Without it all results come to the client too and are logged there (Petals' cache at the
    client)."""
    replay_patience_s: float = 15.0
    """The time for logged results, as `PushPolicy.patience_s` is for a step. They are pushed over a fresh connection,
    are hardly ever lost, and are a prefill."""
    timeout_s: float = 30.0
    """A session that lost a peer looks this long for a replacement: a server may be starting again."""
    lease_s: float = 60.0
    """Servers are asked to keep a session that `InferenceSession.export` has saved for this long."""


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """How a client checks receipts, and treats peers that may have lied."""

    strict: bool = False
    """The signatures of a step's receipts are checked before the step ends. Otherwise they are checked beside a later
    step."""
    unverified_steps: int = 4
    """Steps whose signatures are checked together, beside the next one."""
    receipts_kept: int = 16_384
    """The receipts kept per session, some 7 MB: 5,461 tokens through three hops. Older receipts are forgotten."""
    conviction_s: float = 3600.0
    """A peer that is proved to have lied is not used for this long. No bug does that, so waiting seconds would not
    help."""
    suspicion_cost: float = 0.5
    """Each break without proof adds this share to the cost of each peer that may have caused it. Equal peers are then
    preferred, but a peer that is twice as fast stays in use: half of the suspected peers are honest."""
    suspicion_half_life_s: float = 300.0
    """Suspicion halves in this time, so that an honest peer is cleared of its neighbours' breaks. A peer that keeps
    lying is suspected faster than this forgets."""
    most_suspicion: float = 16.0
    """The most breaks that count, so that a peer that alone holds some blocks is forgiven within an hour."""


@dataclass(frozen=True, slots=True)
class StandingPolicy:
    """How far a client believes what peers say about their speed, see `core/peers/standing.py`."""

    proven_positions: int = 16
    """A peer has proved itself when it has computed this many positions for us."""
    keeps_s: float = 600.0
    """A peer that has not served us for this long has to prove itself anew: it may be busier now, or faster."""
    short_step: int = 8
    """Steps of at most this many positions count for the speed. More positions would look faster than they are."""
    believed_times: float = 4.0
    """A peer that has not proved itself counts at most this many times as fast as others."""
    unproven_cost: float = 1.25
    """Next to peers that have proved themselves, another one costs at least this many times what they cost."""
    way_s: float = 0.1
    """A peer that takes this much longer than `believed_times` what it says is far away, busy or a liar. Others are not
    compared to it."""
    explored_share: float = 1 / 16
    """In this share of new sessions only `believed_times` limits the newcomers."""
    unproven_sessions: int = 1
    """A peer that has not proved itself gets this many sessions at a time. A further one costs `entrusted_cost`."""
    entrusted_cost: float = 4.0
    most_refusals: int = 4
    """The cost of a peer doubles with each session that it took and did not serve, this many times at most."""


@dataclass(frozen=True, slots=True)
class SpotCheckPolicy:
    """The chunks that another peer computes again, see `session/spot_checks.py`."""

    share: float = 0.0
    """The share of announced chunks that another peer computes again. 0.01 costs servers a prefill in 100 tokens."""
    positions: int = 2048
    """Chunks that end further on are not checked: a check is a prefill of all positions, and their transfer."""
    timeout_s: float = 60.0
    """A peer has this long to compute a chunk again. Then others are asked, or the check is given up."""
    tolerance: float | None = None
    """Relative L2 error of a position that honest peers may differ by. None: as measured (`session/spot_checks.py`)."""


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """The limits and deadlines of a client."""

    priority: Priority = Priority.INTERACTIVE
    """The priority that the client's sessions claim. Servers cannot check it; they also share fairly among clients."""
    open_timeout_s: float = 10.0
    step_timeout_s: float = 60.0
    """This is long enough for a long prefill on a slow peer. The link notices a dead peer within
    `LinkPolicy.silence_s`."""
    step_patience_s: float = 15.0
    step_patience_times: float = 20.0
    """A step at a known hop may take this many times what a similar step took before, plus `step_patience_s`. The hop's
    link lives, so it may be busy with others; but a hop that hangs is given up before `step_timeout_s`."""
    chunk_tokens: int = 512
    """A prefill is sent in chunks of this many positions, so that no frame and no forward grows with the prompt."""
    chunks_ahead: int = 3
    """Chunks of one session that are under way together. It is less than servers accept, `ServePolicy.steps_ahead`."""
    route: RoutePolicy = field(default_factory=RoutePolicy)
    push: PushPolicy = field(default_factory=PushPolicy)
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    recovery: RecoveryPolicy = field(default_factory=RecoveryPolicy)
    trust: TrustPolicy = field(default_factory=TrustPolicy)
    standing: StandingPolicy = field(default_factory=StandingPolicy)
    spot_checks: SpotCheckPolicy = field(default_factory=SpotCheckPolicy)


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
    message_bytes: int = 128 << 10
    """An answer with 20 peers and their addresses is smaller."""
    peers_told: int = 20
    streams: int = 64
    """Streams over which others ask, all together."""
    streams_per_group: int = 32
    streams_per_peer: int = 4
    request_s: float = 10.0
    """A stream without a whole request for this long is reset."""
    answer_s: float = 10.0
    requests_burst: int = 200
    requests_per_s: float = 50.0
    """Requests of one address group. A request takes about a millisecond."""


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
    fanout: int = 3
    """News is passed on to this many peers; a quiet exchange goes to one."""
    neighbours: int = 4
    """Links that a node keeps open for exchanges."""
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
    announcement_bytes: int = 4096
    addresses: int = 8
    dht: DhtPolicy = field(default_factory=DhtPolicy)
    exchange_bytes: int = 4 << 20
    """The largest list of announcements in one frame. A view of 4096 announcements of a kilobyte each fits in."""
