"""How frames cross a link. Limits and deadlines, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmnode.core.policy.budget import BudgetPolicy
from llmnode.core.policy.reaching import DialPolicy


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
class PeerstorePolicy:
    """The limits for what a host keeps of peers that it hears of, see `net/peerstore.py` and `net/identify.py`."""

    peers: int = 1000
    """More than there are connections, unless the budget is small: then fewer have a place (`memory_share`)."""
    memory_share: float = 1 / 32
    """The list takes at most this share of `BudgetPolicy.memory_bytes`."""
    peer_bytes: int = 4 << 10
    """The largest entry of a peer takes this much memory, without its protocols."""
    protocols_bytes: int = 8 << 10
    """The protocols of a connected peer take this much more."""
    addresses: int = 8
    """Those of one peer, at IP addresses."""
    address_bytes: int = 256
    protocols: int = 64
    """A peer that is connected says which protocols it speaks; go-libp2p's say some 15."""
    protocol_chars: int = 64
    identify_bytes: int = 64 << 10
    """The most bytes of a peer's description of itself; go-libp2p's has at most 8 kB."""
    identify_s: float = 10.0
    looked_at: int = 64
    """The addresses that are looked at for some at IP addresses."""
    said_s: int = 7200
    """A host tells others for this long what a peer says of itself."""
    heard_s: int = 600
    """Likewise for what others say of that peer."""


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """One stream of frames between two peers, and the budget of all of them."""

    heartbeat_s: float = 2.0
    """An idle link sends a heartbeat this often."""
    heartbeats_burst: int = 64
    """Heartbeats that the other side may send at once, beside one for each `PackPolicy.rate_bytes` that we send. A
    further one ends the link."""
    heartbeats_each: float = 16.0
    """Then it may send this many in each `heartbeat_s`."""
    silence_s: float = 6.0
    """A link that brought no byte for this long is dead: libp2p reports nothing when a peer is frozen or cut off."""
    write_timeout_s: float = 10.0
    """One write may take this long before the link is given up. A large frame is written in pieces, each with this
    limit."""
    pace_grace_s: float = 10.0
    """A frame that has begun to arrive, and one that waits to be read by the other side, may fall behind
    `pace_bytes_per_s` by this much, and by twice that if it was faster before. It is `write_timeout_s`: the other
    side's reader may wait that long."""
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
    queue_bytes: int = 32 << 20
    """When frames of this size wait, in either direction, the next one has to wait. It is some chunks of prefills."""
    max_payload_bytes: int = 64 << 20
    """The largest tensor in a frame: 8192 positions of 2048 fp32 values."""
    max_meta_bytes: int = 64 << 10
    piece_bytes: int = 128 << 10
    """Larger frames are sent in pieces, so that a step of another session waits for one piece only. On a slow link the
    pieces are smaller, but not below 8 KiB: receivers refuse that (`core/links/write_size.py`)."""
    packing: PackPolicy = field(default_factory=PackPolicy)
    budget: BudgetPolicy = field(default_factory=BudgetPolicy)
    dials: DialPolicy = field(default_factory=DialPolicy)
    peerstore: PeerstorePolicy = field(default_factory=PeerstorePolicy)

    @property
    def most_queued_bytes(self) -> int:
        """`queue_bytes`, or less: frames that wait, and one more of the largest, stay within the share of a peer."""
        return min(self.queue_bytes, int(self.budget.peer_share * self.budget.memory_bytes / 4))
