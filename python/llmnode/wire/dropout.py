"""The dropout of a pass's adapter: an extension that its client requires.

It has the probability with which a number is dropped, and a seed for each sequence. A server that does not know it
refuses the pass, since a forward without dropout would be another one.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Annotated, Any

from llmnode.core.operations import NO_DROPOUT, Dropout
from llmnode.errors import RemoteProtocolError
from llmnode.wire.fields import MOST_SEQUENCES, Numbers, check_of
from llmnode.wire.pass_messages import DROPOUT

if TYPE_CHECKING:
    from llmnode.wire.pass_messages import Pass

SEEDS = 2**63
"""Seeds are below this number."""
_are_seeds = check_of(Annotated[list[int], Numbers(MOST_SEQUENCES, 0, SEEDS - 1)])


def dropout_extension(dropout: Dropout) -> dict[str, Any]:  # Any: each extension has its own values
    """The extension of a pass with this dropout, for servers to require."""
    return {DROPOUT: [dropout.probability, [*dropout.seeds]]} if dropout else {}


def dropout_of(request: Pass) -> Dropout:
    """Raises RemoteProtocolError for a probability outside of [0, 1), for anything but a seed for each sequence, and
    for dropout without an adapter.
    """
    if DROPOUT not in (extensions := request.extensions or {}):
        return NO_DROPOUT
    match extensions[DROPOUT]:
        case [float(probability), seeds] if 0 <= probability < 1 and _are_seeds(seeds):
            if len(seeds) == len(request.lengths) and request.adapter is not None:
                return Dropout(probability, tuple(seeds))
    where = "without an adapter" if request.adapter is None else f"for {len(request.lengths)} sequences"
    raise RemoteProtocolError(f"Pass.extensions: {DROPOUT} of {reprlib.repr(extensions[DROPOUT])} {where}")
