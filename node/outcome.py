"""Why a text may show nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


def describe_empty(token_ids: Sequence[int], text: str, ends: Collection[int]) -> str:
    """Why nothing can be seen of a text; "" if something can. `ends` are the tokens that end an answer."""
    if text.strip():
        return ""
    if not token_ids:
        return "it was stopped before its first token"
    if token_ids[0] in ends:
        return f"the model ended it at once, with token {token_ids[0]}"
    return f"its {len(token_ids)} tokens are spaces, special ones that are not shown, or a stop string"
