"""How a text ended: by the model, by its length, or by something else; and why there may be none."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    Ends = int | Sequence[int] | None  # as a generation config has the tokens that end a text

END, LENGTH, STOP = "end", "length", "stop"


def finish_reason(token_ids: Sequence[int], max_new_tokens: int, ends: Ends) -> str:
    """END: the model ended the text. LENGTH: it has the number of tokens that was asked for. STOP: a stop string, a
    time, Ctrl-C.
    """
    if token_ids and token_ids[-1] in _as_list(ends):
        return END
    return LENGTH if len(token_ids) >= max_new_tokens else STOP


def describe_empty(token_ids: Sequence[int], text: str, ends: Ends) -> str:
    """Why nothing can be seen of a text; "" if something can."""
    if text.strip():
        return ""
    if not token_ids:
        return "it was stopped before its first token"
    if token_ids[0] in _as_list(ends):
        return f"the model ended it at once, with token {token_ids[0]}"
    return f"its {len(token_ids)} tokens are spaces, or special ones that are not shown"


def _as_list(ends: Ends) -> Sequence[int]:
    return [] if ends is None else [ends] if isinstance(ends, int) else ends
