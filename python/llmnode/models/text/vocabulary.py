"""The tokens that a model has: one per row of its embedding, whatever its tokenizer knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def check_tokens(
    token_ids: Sequence[int], size: int, written: Callable[[int], str | None] = lambda _token: None
) -> None:
    """Raises ConfigError for the first id that a model of `size` tokens does not have.

    `written` is how the tokenizer writes a token, None if it does not know it either.
    """
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < size):
        return
    outside = next(token_id for token_id in token_ids if not 0 <= token_id < size)
    name = written(outside)
    if name is None:
        raise ConfigError(f"token {outside} is not one of the model's {size}: give ids from 0 to {size - 1}")
    raise ConfigError(
        f"token {outside}, {name!r}, is not one of the model's {size}: its tokenizer has more tokens than it was made "
        "for; leave this one out of the text"
    )
