"""Receipts: signed statements of a stage about one step that it has computed.

No key is here: `llmnode.ports.Network` signs and verifies.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llmnode import _native
from llmnode.core.ids import SESSION_ID_BYTES
from llmnode.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.ids import Epoch, PeerId, SessionId, Step
    from llmnode.core.model import Profile
    from llmnode.core.span import Span

    Sign: TypeAlias = Callable[[bytes], bytes]
    Verify: TypeAlias = Callable[[PeerId, bytes, bytes], bool]
    StepKey: TypeAlias = tuple[PeerId, PeerId, SessionId, bytes, Epoch, Step]

SIGNING_CONTEXT = b"llmnode-receipt-2:"
"""It precedes the statement under the signature: see `announcement.SIGNING_CONTEXT`."""
CONTEXT_1 = b"llmnode-receipt-1:"
"""The same for a receipt without a nonce. Servers give those to clients that speak protocol 1."""

PROFILE_CONTEXT = b"llmnode-profile-1:"

DIGEST_BYTES = 32
NONCE_BYTES = 16
SIGNATURE_BYTES = 64

_STATEMENT = struct.Struct(f"<{SESSION_ID_BYTES}s32sIIIIII32s32s32s")
_PROFILE = struct.Struct("<32sHH")


@dataclass(frozen=True, slots=True)
class Receipt:
    """`signer` says: for `client`, in its session `session`, I computed this step, and got these bytes out of those.

    `session` is the name that the client gave. `nonce` is the signer's: it draws one for each session, so no two of
    its sessions are one, whatever their names. It is empty in protocol 1. `start` and `length` are positions, `profile`
    is a `profile_digest`, and the digests are BLAKE3 of the payloads as they cross the wire. The signature may be
    empty. Raises ValueError for values that no statement can have.
    """

    signer: PeerId
    client: PeerId
    session: SessionId
    epoch: Epoch
    step: Step
    start: int
    length: int
    span: Span
    profile: bytes
    input_digest: bytes
    output_digest: bytes
    signature: bytes = b""
    nonce: bytes = b""

    def __post_init__(self) -> None:
        if not len(self.profile) == len(self.input_digest) == len(self.output_digest) == DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")
        if len(self.nonce) not in (0, NONCE_BYTES):
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        if len(self.session) != SESSION_ID_BYTES or len(self.signature) not in (0, SIGNATURE_BYTES):
            raise ValueError(f"a session has {SESSION_ID_BYTES} bytes, a signature {SIGNATURE_BYTES}")
        if min(self.epoch, self.step, self.start) < 0 or self.length < 1:
            raise ValueError("a step counts from 0, and has at least one position")
        if max(self.epoch, self.step, self.start + self.length, self.span.end) >= 2**32:
            raise ValueError("a number is beyond 32 bits")


@dataclass(frozen=True, slots=True)
class Conviction:
    """Two receipts that prove that their signer lies: it told the client one thing, and showed another to `by`."""

    told: Receipt
    shown: Receipt
    by: PeerId

    def error(self) -> Convicted:
        return Convicted(self)


class Convicted(IntegrityError):
    """Its `proof` convicts `peer` of a lie."""

    def __init__(self, proof: Conviction) -> None:
        self.proof = proof
        told = proof.told
        super().__init__(f"signed two different receipts for step {told.step}", peer=told.signer, span=told.span)


def profile_digest(profile: Profile, codec: str) -> bytes:
    """32 bytes: two stages of one profile and codec that are given the same bytes have the same answer."""
    names = profile.precision.name.encode(), codec.encode()
    lengths = _PROFILE.pack(profile.model_digest, len(names[0]), len(names[1]))
    return _native.blake3_digest_parts([PROFILE_CONTEXT, lengths, *names, profile.adapter or b""])


def statement(receipt: Receipt) -> bytes:
    """The bytes under the signature. They are equal for two receipts of one signer if both say the same."""
    context = SIGNING_CONTEXT + receipt.nonce if receipt.nonce else CONTEXT_1
    return context + _STATEMENT.pack(
        receipt.session,
        _native.blake3_digest(receipt.client.encode()),
        receipt.epoch,
        receipt.step,
        receipt.start,
        receipt.length,
        receipt.span.start,
        receipt.span.end,
        receipt.profile,
        receipt.input_digest,
        receipt.output_digest,
    )


def signature_of(receipt: Receipt, sign: Sign) -> bytes:
    """The signature that `sign` makes for a receipt, which need not have one.

    A stage signs a step once, after all that can fail. A repeated request for the step gets the same receipt.
    """
    return sign(statement(receipt))


def is_valid(receipt: Receipt, verify: Verify) -> bool:
    """Whether `signer` has signed it. This takes about 60 microseconds."""
    return verify(receipt.signer, statement(receipt), receipt.signature)


def is_proof(one: Receipt, other: Receipt, verify: Verify) -> bool:
    """Whether two receipts prove that their signer lies.

    They do if it has signed both, for the same step of the same epoch of the same session of the same client, and they
    say different things. An honest stage never does that, whatever happens to it:

    - A step that is asked for again gets the receipt that it got before; with other content it is refused.
    - A step that failed was not signed, so it may then be asked for with other content.
    - Hidden states that are sent again out of a log, in other pieces, are not computed: they get no receipt.
    - A rollback or a fork raises the epoch. Positions and numbers of steps come again, but in a new epoch.
    - A peer that replaces a lost stage computes all again, and may get other bits. It may be the same peer, started
      again. Those receipts are of another session.
    - A name may be used twice, by the client or by others that know it: the two sessions have different nonces.

    So this is proof for anybody, if `is_public`. Without a nonce the client alone could have an honest stage contradict
    itself, by using a name twice. Then this is proof for the client, whose names are random, and for nobody else.
    """
    differ = step_key(one) == step_key(other) and statement(one) != statement(other)
    return differ and is_valid(one, verify) and is_valid(other, verify)


def is_public(receipt: Receipt) -> bool:
    """Whether a receipt that contradicts it convicts its signer, also for a reader that does not trust its client."""
    return receipt.nonce != b""


def step_key(receipt: Receipt) -> StepKey:
    """The key of a step. An honest signer signs only one receipt for each key."""
    return receipt.signer, receipt.client, receipt.session, receipt.nonce, receipt.epoch, receipt.step
