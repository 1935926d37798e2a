"""Limits and deadlines, each with its reason. Code takes a policy; it never invents a number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """One stream of frames between two peers."""

    heartbeat_s: float = 2.0
    """An idle link says that it lives this often."""
    silence_s: float = 6.0
    """A link that brought no byte for this long is dead: libp2p reports nothing when a peer is frozen or cut off."""
    write_timeout_s: float = 10.0
    """A single write may take this long. A write that is cancelled ruins the connection, so after this it is closed."""
    farewell_s: float = 0.5
    """What a closing link allows its last write."""
    dial_timeout_s: float = 10.0
    connections: int = 512
    """With all peers together, half open ones too. Many systems allow a process 1,024 files."""
    links_per_peer: int = 4
    """One is enough for any number of sessions; without a limit one peer could take a server's every link."""
    queue_frames: int = 256
    """Frames waiting in either direction. A peer that overruns it breaks the protocol: sessions bound their steps."""
    queue_bytes: int = 256 << 20
    """Frames that wait in either direction may be this large together: four of the largest, or many small ones."""
    max_payload_bytes: int = 64 << 20
    """The largest tensor in a frame: 8192 positions of 2048 fp32 values."""
    max_meta_bytes: int = 64 << 10


@dataclass(frozen=True, slots=True)
class ServePolicy:
    """What a server grants its clients."""

    kv_tokens: int = 32_768
    """KV positions reserved by all sessions together."""
    sessions_per_link: int = 64
    links: int = 256
    steps_ahead: int = 4
    """Steps a client may send before the one that is due has arrived."""
    replay_bytes: int = 64 << 20
    """Logged results that one frame may ask for."""
    connect_timeout_s: float = 3.0
    """To a next hop. The session waits meanwhile, and its client can stand between the two."""
    redial_s: float = 60.0
    """A next hop that we could not reach, as behind a NAT, is not dialled again for this long."""
    session_idle_s: float = 600.0
    """A session without a step for this long is closed and its KV freed."""
    lease_s: float = 60.0
    """How long a session may outlive its link, if its client asks for it: until another process has read the file of a
    session and loaded its model. 0 grants nobody anything."""
    leased_share: float = 0.25
    """Of `kv_tokens`, what sessions without a link may hold together: nobody may ever come for them."""


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What a client expects of its servers."""

    connect_timeout_s: float = 4.0
    """Some round trips to a peer of a route. Whoever is frozen must not keep a session from others for longer."""
    open_timeout_s: float = 10.0
    open_patience_s: float = 10.0
    """How long a session that cannot open tries again, while the view says that its peers are there."""
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
    """Share of the chunks that are computed again by another peer. 0.01 costs servers a prefill in 100 tokens."""
    spot_check_positions: int = 2048
    """Chunks that end further on are not checked: a check is a prefill of all positions, and their transfer."""
    spot_check_timeout_s: float = 60.0
    """What a peer may take to compute a chunk again; then others are asked, or the check is given up."""
    spot_check_tolerance: float | None = None
    """Relative L2 error of a position that honest peers may differ by. None: as measured (`client/spot.py`)."""


@dataclass(frozen=True, slots=True)
class SwarmPolicy:
    """How nodes hear of each other."""

    announce_every_s: float = 15.0
    """A third of the lifetime: two may get lost before a peer that lives is forgotten."""
    lifetime_s: float = 45.0
    """Of an announcement. A peer that died without a word is out of every view after this."""
    clock_skew_s: float = 30.0
    """An announcement from further in the future than this is refused: it would outlive its peer."""
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
