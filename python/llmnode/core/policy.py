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
    links_per_peer: int = 4
    """One is enough for any number of sessions; without a limit one peer could take a server's every link."""
    queue_frames: int = 256
    """Frames waiting in either direction. A peer that overruns it breaks the protocol: sessions bound their steps."""
    queue_bytes: int = 256 << 20
    """Received frames that wait may be this large together: four of the largest, or many small ones."""
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
    session_idle_s: float = 600.0
    """A session without a step for this long is closed and its KV freed."""


@dataclass(frozen=True, slots=True)
class ClientPolicy:
    """What a client expects of its servers."""

    open_timeout_s: float = 10.0
    step_timeout_s: float = 60.0
    """Generous: a long prefill on a slow peer. A peer that died is noticed by its link in `LinkPolicy.silence_s`."""
    chunk_tokens: int = 512
    """A prefill is sent in chunks of this many positions, so that no frame and no forward grows with the prompt."""
