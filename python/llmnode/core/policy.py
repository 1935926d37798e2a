"""Limits and deadlines, each with its reason. Code takes a policy; it never invents a number."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.priority import Priority

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class PackPolicy:
    """When hidden states are packed for a link, see `core/links/packing.py`."""

    least_bytes: int = 1024
    """Of less there is too little to gain: a row of hidden states is larger."""
    sample_bytes: int = 64 << 10
    """What is packed, and thrown away, to see whether it would pay."""
    sample_every: int = 16
    """Payloads of a size, between two samples of those that are not packed."""
    margin: float = 3.0
    """Packing must save so many times what it costs: both are estimates, and where the processor is so busy that it
    slows the link, packing would slow it more."""
    rate_bytes: int = 128 << 10
    """From so many on, a part of a frame that came without a break tells how fast the link is."""
    rate_keeps: float = 0.94
    """Of what such parts told before, at each new one: two megabytes count, so that a receiver that paused for a moment
    makes no fast link slow."""
    tell_change: float = 0.2
    """A sender is told of a rate that has changed by this share."""
    in_thread_bytes: int = 1 << 20
    """From so many on, a payload is packed in a thread: it takes milliseconds, which other links need not wait."""


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """One stream of frames between two peers."""

    heartbeat_s: float = 2.0
    """An idle link says that it lives this often."""
    silence_s: float = 6.0
    """A link that brought no byte for this long is dead: libp2p reports nothing when a peer is frozen or cut off."""
    write_timeout_s: float = 10.0
    """A single write, of a piece of a frame if that is large, may take this long before the link is given up."""
    farewell_s: float = 0.5
    """What a closing link allows its last write."""
    dial_timeout_s: float = 10.0
    connections: int = 512
    """With all peers together, half open ones too. Many systems allow a process 1,024 files."""
    connections_per_host: int = 128
    """Of those, from one IPv4 address, IPv6 network or relay: half open ones name no peer, and peer ids are free."""
    links_per_peer: int = 8
    """One each way is enough for any number of sessions, two while a direct one takes the place of a relayed one; there
    may be some whose end one side has not noticed. Without a limit one peer could take a server's every link."""
    queue_frames: int = 256
    """Frames waiting in either direction. A peer that overruns it breaks the protocol: sessions bound their steps."""
    queue_bytes: int = 256 << 20
    """Frames that wait in either direction may be this large together: four of the largest, or many small ones."""
    max_payload_bytes: int = 64 << 20
    """The largest tensor in a frame: 8192 positions of 2048 fp32 values."""
    max_meta_bytes: int = 64 << 10
    piece_bytes: int = 128 << 10
    """Larger frames cross in pieces: a step of another session waits for one of them. On a slow link they are smaller
    (`core/links/write_size.py`)."""
    packing: PackPolicy = field(default_factory=PackPolicy)


@dataclass(frozen=True, slots=True)
class PunchPolicy:
    """How two peers that are connected through a relay try to be connected directly."""

    tries: int = 3
    """As the specification has it; with 0 who is dialled does not try."""
    again_s: float = 15.0
    """After so many in vain, the next as many, and each time twice as long. Who dialled takes part in as many of one
    connection within this time."""
    longest_again_s: float = 960.0
    talk_s: float = 10.0
    """For all messages before a try, through the relay."""
    dial_s: float = 4.0
    """Both dial for so long: what came too early for a NAT is sent again after 1 and 3 s."""
    redial_s: float = 0.1
    """After an attempt that was refused at once, as by a system that does not dial yet."""
    addresses: int = 8
    """Of those that the other side names, no more are dialled: they may be anybody's."""
    at_once: int = 32
    """Peers that we try with; others stay relayed."""
    grace_s: float = 5.0
    """For links to be opened over a new direct connection; then it goes, or the relayed one, if it has none."""

    def pauses_s(self) -> Iterator[float]:
        """Between tries in vain and the next."""
        pause_s = self.again_s
        while True:
            yield pause_s
            pause_s = min(2 * pause_s, self.longest_again_s)


@dataclass(frozen=True, slots=True)
class CircuitPolicy:
    """A node's side of circuits through relays: its reservations, and the circuits that come of them."""

    handshake_s: float = 10.0
    """Until a relay has said what it is about to send over a stream that it opened."""
    renew_share: float = 0.5
    """Of a reservation's life: a renewal may fail and be tried again before it is over."""
    renew_within_s: float = 600.0
    """However long it lives, and whatever the relay's clock says."""
    renew_least_s: float = 1.0
    """No relay has us ask more often."""
    retry_s: float = 1.0
    """After a reservation is lost or refused; twice as long each time."""
    longest_retry_s: float = 30.0
    """A relay that is back is used again within this."""
    punch: PunchPolicy = field(default_factory=PunchPolicy)


@dataclass(frozen=True, slots=True)
class ReachPolicy:
    """How a node finds out whether others can dial it, and what it does for others that ask for the same."""

    peers: int = 3
    """That we ask: one may be wrong."""
    look_s: float = 12.0
    """For a peer to say how it sees us, and to dial us."""
    answer_s: float = 10.0
    """From the first byte of a question to the answer."""
    dial_s: float = 5.0
    """For all addresses that a peer names."""
    addresses: int = 8
    requests_per_minute: int = 30
    """As go-libp2p: whoever asks costs us dials."""
    host_requests_per_minute: int = 6
    """Of one IP address, behind which there may be several nodes."""


@dataclass(frozen=True, slots=True)
class RelayPolicy:
    """What a relay grants strangers. Generous: ours carry whole sessions, and a hop through one has no other way."""

    reservation_s: float = 3600.0
    reservations: int = 384
    """Each is a connection; the rest of `LinkPolicy.connections` is for those who dial. A peer has one."""
    reservations_per_host: int = 32
    """Peer ids cost nothing, addresses do; many nodes may share one behind a NAT."""
    circuits: int = 2048
    circuits_per_peer: int = 128
    """Of one that dials as of one that is dialled, which takes no more from one relay: `connections_per_host`."""
    circuit_s: float = 24 * 3600.0
    """Then its ends have to make another."""
    circuit_bytes: int = 1 << 40
    """In each direction: a day at 100 Mbit/s."""
    handshake_s: float = 10.0
    """From the first byte of a request to its answer, with what the other peer has to say about it."""


@dataclass(frozen=True, slots=True)
class BatchPolicy:
    """Which pieces of sessions are computed together, see `core/serving/scheduling.py`."""

    decode_positions: int = 8
    """A piece of no more counts as a decode: somebody may be reading along, and it hardly lengthens a forward."""
    decodes: int = 64
    """Positions of decodes in one forward."""
    stretch: float = 1.75
    """With prefills, or with those between that go through a few blocks, a forward of decodes may take so many times as
    long as without: who reads along sees more than half of the speed, and a prefill takes 2.3 times its time alone."""
    prefill_s: float = 0.5
    """What prefills may add to a forward while nobody decodes. A decode that comes then waits for all of it; on our
    CPU they get no faster with more."""
    decoding_s: float = 1.0
    """Whose latest decode is no longer ago may come with the next at any time."""
    least_prefill: int = 8
    """Positions in a forward through all blocks, however slow: with fewer, prefills would hardly go on."""
    unmeasured_prefill: int = 64
    """Until it has been seen how long they take."""
    fast_prefill: int = 128
    """So many are nearly as fast, each, as more are. If there is no time for them in one forward, as beside decodes on
    a CPU, but for half of them through one block, they go through a few blocks at a time."""
    most_prefill: int = 512
    """More gain nothing on any device that we know, and need memory."""
    gather_share: float = 0.85
    """Who decode in step wait for each other if they are away for less than this share of what one forward less saves:
    what a forward of decodes takes beside what each of them adds. At all of it nothing is gained, nor lost."""
    ageing_s: float = 2.0
    """After every so many seconds without a turn, a lower priority counts as the next higher one."""


@dataclass(frozen=True, slots=True)
class WorkerPolicy:
    """A worker in a process of its own, and when that is started again."""

    hello_s: float = 60.0
    """Until a new process has started python on a busy machine."""
    look_s: float = 30.0
    """While a model is loaded, which has no deadline: whether it gets on is looked at so often, and told."""
    stuck_s: float = 300.0
    """Who does not get on with loading for so long counts as crashed: other disks, and downloads, come back sooner."""
    answer_s: float = 60.0
    """A batch that takes longer counts as a crash: clients wait no longer either (`ClientPolicy.step_timeout_s`)."""
    end_s: float = 5.0
    """For the system to clean up after a process that is dying: it may write its memory to disk."""
    pause_s: float = 1.0
    """Before the first start after a crash; twice as long before each further one."""
    longest_pause_s: float = 60.0
    steady_s: float = 300.0
    """Who has served for so long before it crashed is started again as if it never had before."""
    failed_starts: int = 4
    """In a row, after which the node gives up: this machine cannot hold what it was asked to."""


@dataclass(frozen=True, slots=True)
class LifePolicy:
    """How a node goes from one span to another, see `core/serving/node_life.py`."""

    drain_s: float = 10.0
    """Sessions have this long to end before the blocks are dropped: as at `llmnode serve --drain-s`."""


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """The connections that a node has opened to others, when a direct one takes the place of one through a relay."""

    idle_s: float = 30.0
    """The relayed one ends when nothing was sent for so long: even a large frame through a slow relay has arrived."""
    retry_s: float = 5.0
    """After a direct one that could not be opened, or has ended."""
    stagger_s: float = 0.2
    """Until the next address of a peer is tried beside the one before: RFC 8305 has 250 ms."""
    relay_stagger_s: float = 1.0
    """The same if the next one is a relay's, which would win against a direct one far away."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Which sessions get KV, and how long others wait for it, see `core/serving/admission_queue.py`."""

    wait_s: float = 4.0
    """A session waits so long for room, well within what clients wait for an answer (`ClientPolicy.open_timeout_s`)."""
    line: int = 256
    """Sessions that wait: each is a task and some kilobytes."""
    line_per_client: int = 64
    passed_over: int = 8
    """So often smaller sessions may go before a large one that does not fit yet; then room is kept until it does."""
    ageing_s: float = 1.0
    """After every so many seconds in line, a lower priority counts as the next higher one."""
    stays_kept: int = 64
    """The latest sessions tell how long one stays."""
    least_retry_s: float = 1.0
    """No client is told to ask again sooner."""
    longest_retry_s: float = 60.0
    """Nor later: the estimate is rough."""


@dataclass(frozen=True, slots=True)
class RelayedPolicy:
    """What of a session goes through relays, see `core/peers/relaying.py`."""

    prefill: str = "wait"
    """A larger one is held for `patience_s`, until there are direct ways: with "wait" it then goes through the relay
    all the same, unless that would cut it; with "refuse" it fails. "allow" does not hold it."""
    prefill_bytes: int = 256 << 10
    """Of a session, within `window_s`: as many as a hundred positions of a small model. A relay's own limit, where it
    has one, is often 128 KiB."""
    window_s: float = 60.0
    step_positions: int = 8
    """With no more it is a step, whatever its size: somebody may be reading along."""
    patience_s: float = 4.0
    """For punching through, of which most tries succeed at once."""


@dataclass(frozen=True, slots=True)
class ServePolicy:
    """What a server grants its clients."""

    sessions_per_link: int = 64
    links: int = 256
    steps_ahead: int = 4
    """Steps a client may send before the one that is due has arrived."""
    replay_bytes: int = 64 << 20
    """Logged results that one frame may ask for."""
    connect_timeout_s: float = 3.0
    """To a next hop, and for its first answer."""
    dial_patience_s: float = 0.5
    """A session waits so long for that, some round trips; then its client stands between the two until it is known."""
    redial_s: float = 2.0
    """A next hop that we could not reach, as behind a NAT, is left alone for this long; the next time twice as long."""
    longest_redial_s: float = 60.0
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    """Larger prefills are not pushed through relays, if the client is reached directly."""
    session_idle_s: float = 600.0
    """A session without a step for this long is closed and its KV freed."""
    lease_s: float = 60.0
    """How long a session may outlive its link, if its client asks for it: until another process has read the file of a
    session and loaded its model. 0 grants nobody anything."""
    leased_share: float = 0.25
    """Of all KV of the server, what sessions without a link may hold together: nobody may ever come for them."""
    leased_client_share: float = 0.5
    """Of that, what those of one client may hold."""
    room: AdmissionPolicy = field(default_factory=AdmissionPolicy)


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What a client expects of its servers."""

    priority: Priority = Priority.INTERACTIVE
    """What its sessions are for, as it tells servers. They cannot check it, and share fairly among clients besides."""

    connect_timeout_s: float = 4.0
    """Some round trips to a peer of a route. Whoever is frozen must not keep a session from others for longer."""
    connect_moment_s: float = 0.1
    """Who cannot be reached within so long of the first such peer of a route is found out with it."""
    open_timeout_s: float = 10.0
    open_patience_s: float = 10.0
    """How long a session that cannot open tries again, while the view says that its peers are there."""
    room_patience_s: float = 60.0
    """The same while servers have no room for it, and say when they may."""
    room_cost_s: float = 4.0
    """Added to the cost of a peer that has no room for the session: the wait for admission (`AdmissionPolicy`)."""
    step_timeout_s: float = 60.0
    """Generous: a long prefill on a slow peer. A peer that died is noticed by its link in `LinkPolicy.silence_s`."""
    step_patience_s: float = 15.0
    step_patience_times: float = 20.0
    """Of a hop that we know: a step may take this many times what the like took before, and `step_patience_s`. Its link
    lives, so it may be busy with others; but a hop that hangs is given up before `step_timeout_s`."""
    chunk_tokens: int = 512
    """A prefill is sent in chunks of this many positions, so that no frame and no forward grows with the prompt."""
    chunks_ahead: int = 3
    """Chunks of one session that are under way together; below what servers hold, `ServePolicy.steps_ahead`."""
    push: bool = True
    """Hops give their results to the next one directly, where they can reach it."""
    upstream_logs: bool = True
    """Each hop logs its results, for who takes the next one's place; we see digests alone of what hops give each other.
    Without it all results come here too and are logged here (Petals' cache at the client)."""
    push_patience_s: float = 2.0
    """A hop that was given a step directly has this long, and some times what the like took, to answer."""
    replay_patience_s: float = 15.0
    """The same for logged results, pushed over a fresh connection: it is hardly ever lost, and is a prefill."""
    push_retry_s: float = 2.0
    """A hop that could not push, or whose push got lost, is asked to again between two steps after so long, each time
    twice as long: asking takes a round trip."""
    longest_push_retry_s: float = 60.0
    relayed: RelayedPolicy = field(default_factory=RelayedPolicy)
    recovery_timeout_s: float = 30.0
    """A session that lost a peer looks this long for others to take its place: a server may be starting again."""
    standbys: bool = True
    """Connections are kept to who could take the place of a lost peer."""
    lease_s: float = 60.0
    """How long servers are asked to keep what `InferenceSession.export` has saved."""
    retry_s: float = 1.0
    """Between two looks, unless the swarm changes before."""
    ban_s: float = 2.0
    """The first ban of a peer that failed; the next is twice as long."""
    longest_ban_s: float = 30.0
    strict: bool = False
    """No step is over before the signatures of its receipts are checked; else that is done beside a later step."""
    unverified_steps: int = 4
    """Steps whose signatures are checked together, beside the next one."""
    receipts_kept: int = 16_384
    """Of one session, some 7 MB: 5,461 tokens through three hops. Of what is older the book knows nothing any more."""
    conviction_s: float = 3600.0
    """Who is proved a liar is not used for so long: no bug does that, so waiting seconds would not mend it."""
    suspicion_cost: float = 0.5
    """What a break without proof adds to the cost of each peer that may have caused it, as a share: of equal peers
    others are taken, but one that is twice as fast stays, for half of those who come under suspicion are honest."""
    suspicion_half_life_s: float = 300.0
    """An honest peer has to live down its neighbours; who lies on is suspected faster than this forgets."""
    most_suspicion: float = 16.0
    """Breaks that count at most, so that who holds blocks alone is forgiven within an hour."""
    spot_check: float = 0.0
    """Announced of the chunks that are computed again by another peer. 0.01 costs servers a prefill in 100 tokens."""
    spot_check_positions: int = 2048
    """Chunks that end further on are not checked: a check is a prefill of all positions, and their transfer."""
    spot_check_timeout_s: float = 60.0
    """What a peer may take to compute a chunk again; then others are asked, or the check is given up."""
    spot_check_tolerance: float | None = None
    """Relative L2 error of a position that honest peers may differ by. None: as measured (`session/spot_checks.py`)."""


@dataclass(frozen=True, slots=True)
class SwarmPolicy:
    """How nodes hear of each other."""

    announce_every_s: float = 15.0
    """A third of the lifetime: two may get lost before a peer that lives is forgotten."""
    lifetime_s: float = 45.0
    """Of an announcement. A peer that died without a word is out of every view after this."""
    clock_skew_s: float = 30.0
    """An announcement from further in the future than this is refused: it would outlive its peer."""
    clocks: int = 64
    """Of that many peers it is known what their clocks say: most of them decide whose is wrong."""
    clock_keeps_s: float = 120.0
    """What a peer said of its clock counts for this long: either clock may have been set since."""
    exchange_every_s: float = 3.0
    news_every_s: float = 0.2
    """News is passed on at once, but no faster than this."""
    fanout: int = 3
    """Peers that news is passed on to; a quiet exchange goes to one."""
    neighbours: int = 4
    """Links that a node keeps open for exchanges."""
    exchange_timeout_s: float = 5.0
    farewell_s: float = 1.0
    """What a node that stops allows itself to say so."""
    directory_every_s: float = 30.0
    """A publication in the DHT is tenths of seconds and many messages, but must come before the last one expires."""
    find_timeout_s: float = 10.0
    view_peers: int = 4096
    announcement_bytes: int = 4096
    addresses: int = 8
    exchange_bytes: int = 4 << 20
    """The largest list of announcements in one frame: more than a view of 4096 that has a kilobyte each."""
