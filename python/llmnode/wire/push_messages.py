"""The metadata of frames between two servers of a session, one of which pushes its results to the other."""

from __future__ import annotations

from dataclasses import dataclass

from llmnode.wire.fields import Digest, Signature, Total

PUSHED_BYTES = 256
"""A step that is pushed has less than this besides its hidden states."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """A hop sends this with the result that it pushes: the digest of its input, and its receipt for the client.

    The receiver cannot check it, and hands it on: if the client was told something else, it convicts its signer.
    """

    input_digest: Digest
    signature: Signature


@dataclass(frozen=True, slots=True)
class PushLimit:
    """The bytes of frames that may be pushed to the session in the frame's epoch, from its beginning.

    In WANT it is the limit that the sender asks for, 0 if any will do. In GRANT it is the limit from now on. There 0
    takes the right away.
    """

    limit_bytes: Total
