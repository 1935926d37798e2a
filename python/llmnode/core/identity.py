"""Decides whether two models are the same one to the swarm, and tells what differs if they are not.

A model's digest has parts: where its weights come from, a hash of its tensors' names and shapes, a hash of its config,
and which weights these are. Peers compare digests whole; a message that explains a difference compares the parts. A
name is no part of it: the same files in another folder are the same model. Knows no file: hashes are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

LAYOUT_BYTES = 5
CONFIG_BYTES = 6
WEIGHTS_BYTES = 20
"""The length of a commit on the hub, which stands there as it is, so that a message can name it."""


class Origin(IntEnum):
    """How weights are known. Digests of other kinds of software begin with other bytes, almost always."""

    FOLDER = 0xF1
    """By a digest of all numbers in a folder's files."""
    HUB = 0xF2
    """By a commit: what is on the hub is known before it is downloaded."""
    GGUF = 0xF3
    """By the SHA-256 of the GGUF file that they were converted from."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Identifies the weights of a model."""

    origin: Origin
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Identity:
    """A model's digest, in its parts. `layout` is of names and shapes of tensors."""

    weights: Weights
    layout: bytes
    config: bytes

    @property
    def digest(self) -> bytes:
        parts = self.layout[:LAYOUT_BYTES], self.config[:CONFIG_BYTES], self.weights.fingerprint[:WEIGHTS_BYTES]
        return bytes([self.weights.origin, *b"".join(parts)])


def read_digest(digest: bytes) -> Identity | None:
    """None for a digest that was not made in this way."""
    if len(digest) != 1 + LAYOUT_BYTES + CONFIG_BYTES + WEIGHTS_BYTES or digest[0] not in list(Origin):
        return None
    layout, rest = digest[1 : 1 + LAYOUT_BYTES], digest[1 + LAYOUT_BYTES :]
    weights = Weights(Origin(digest[0]), rest[CONFIG_BYTES:])
    return Identity(weights, layout, rest[:CONFIG_BYTES])


def commit_of(digest: bytes) -> str | None:
    """The commit on the hub that a model of this digest is; None if it comes from elsewhere."""
    identity = read_digest(digest)
    return identity.weights.fingerprint.hex() if identity and identity.weights.origin is Origin.HUB else None


def is_commit(text: str) -> bool:
    """Whether a revision is a commit of the hub, and no branch or tag."""
    return len(text) == 2 * WEIGHTS_BYTES and set(text) <= set("0123456789abcdef")


def is_variant(one: bytes, other: bytes) -> bool:
    """Whether two models of these digests have tensors of the same names and shapes."""
    ours, theirs = read_digest(one), read_digest(other)
    return ours is not None and theirs is not None and ours.layout == theirs.layout


def how_other(ours: bytes, theirs: bytes, their_name: str) -> str:
    """How the model of the digest `theirs` differs, in a few words after its name."""
    if not is_variant(ours, theirs):
        return "of other weights"
    text, _ = explain_difference(ours, theirs, their_name)
    return text


def explain_difference(ours: bytes, theirs: bytes, their_name: str) -> tuple[str, str]:
    """Tells how their model, a variant of ours, differs, and what to do about it.

    The first is for after "the peers serve NAME": "in revision ..., and ours is ...".
    """
    here, there = read_digest(ours), read_digest(theirs)
    assert here is not None, "variants have digests that can be read"
    assert there is not None, "likewise"
    config = "" if here.config == there.config else ", with another config.json"
    if here.weights == there.weights:
        return (
            "of the same weights, with another config.json than ours",
            "compare config.json here with that of a server, and give both the same",
        )
    match here.weights.origin, there.weights.origin:
        case Origin.HUB, Origin.HUB:
            theirs_at, ours_at = (each.weights.fingerprint.hex() for each in (there, here))
            return (
                f"in revision {theirs_at}, and ours is {ours_at}{config}",
                f"name the model {their_name}@{theirs_at}, or start the servers with @{ours_at}",
            )
        case _, Origin.HUB:
            commit = there.weights.fingerprint.hex()
            return (
                f"as the hub has it in revision {commit}, and ours is {_WHAT[here.weights.origin]}{config}",
                f"name the model {their_name}@{commit}, or start the servers with a copy of ours",
            )
        case one, other if one is other:
            return (
                f"of the same shape as ours and with other numbers: {_SAME[one]}{config}",
                "copy the very files of a server here, or ours to the servers",
            )
        case _:
            return (
                f"as {_WHAT[there.weights.origin]}, and ours is {_WHAT[here.weights.origin]}{config}",
                "give both the same files",
            )


_WHAT = {
    Origin.FOLDER: "a folder of safetensors",
    Origin.HUB: "the hub's",
    Origin.GGUF: "a GGUF file",
}
_SAME = {
    Origin.FOLDER: "trained further, stored in another dtype, or identified by an older llmnode",
    Origin.GGUF: "another GGUF file",
}
