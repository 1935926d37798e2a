"""Signs receipts for one session of a client: see `wire/receipt.py`."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from llmnode import _native
from llmnode.wire import version_1
from llmnode.wire.receipt import NONCE_BYTES, Receipt, signature_of

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.span import Span
    from llmnode.ports import Link, Network
    from llmnode.wire.frame import Buffer, Frame


class ReceiptSigner:
    """The client of a session gives it a name, perhaps one that it has used before. The `nonce` is never used again."""

    def __init__(self, network: Network, link: Link, span: Span, profile: bytes) -> None:
        """`link` is the one that the session is opened over: peers of protocol 1 know no nonce."""
        self.nonce = b"" if link.version == version_1.VERSION else secrets.token_bytes(NONCE_BYTES)
        self._network = network
        self._client: PeerId = link.peer
        self._span = span
        self._profile = profile

    def receipt(self, frame: Frame, payload: Buffer) -> tuple[Receipt, bytes]:
        """The receipt without its signature, and the signature, which binds us to this step.

        It is made once, after all that can fail (see `receipt.is_proof`).
        """
        receipt = Receipt(
            signer=self._network.peer,
            client=self._client,
            session=frame.session,
            epoch=frame.epoch,
            step=frame.step,
            start=frame.start,
            length=frame.length,
            span=self._span,
            profile=self._profile,
            input_digest=_native.blake3_digest(frame.payload),
            output_digest=_native.blake3_digest(payload),
            nonce=self.nonce,
        )
        return receipt, signature_of(receipt, self._network.sign)
