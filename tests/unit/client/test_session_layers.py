"""The layers of a cache whose keys and values are with the servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import Cache

from llmnode.client import cache
from llmnode.client.cache import SessionCache

if TYPE_CHECKING:
    import pytest


def test_none_is_made_to_say_that_none_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at every token, and a model may have a hundred of them."""
    made: list[int] = []
    monkeypatch.setattr(cache, "session_layers", lambda _sessions, blocks: made.append(blocks))
    one: Cache = SessionCache.__new__(SessionCache)
    assert not one.is_compileable
    assert made == []
