"""The metadata of probes, by which a peer measures how fast it sends to another one."""

from __future__ import annotations

from dataclasses import dataclass

from llmnode.wire.fields import Digest


@dataclass(frozen=True, slots=True)
class Probed:
    """The answer to a PROBE: the digest of its payload, so that nobody answers before all of that has come."""

    digest: Digest
