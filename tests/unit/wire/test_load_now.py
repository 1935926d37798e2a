"""The load of a server crosses the wire as an extension of its description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from llmnode.core.peers.asked_loads import LoadNow
from llmnode.errors import RemoteProtocolError
from llmnode.wire.load_now import load_extension, load_of
from llmnode.wire.messages import pack, unpack
from unit.wire.test_server_figures import DESCRIPTION

LOAD = LoadNow(2.5, 0.25, 3, 4096)
VALUES = load_extension(LOAD)["load_now"]


def described(extensions: dict[str, Any] | None) -> LoadNow | None:
    return load_of(unpack(type(DESCRIPTION), pack(replace(DESCRIPTION, extensions=extensions))))


def test_a_load_arrives_as_it_was() -> None:
    assert described(load_extension(LOAD)) == LOAD
    assert described(load_extension(LoadNow(1e12, 0.0, 0, 0))) == LoadNow((2**32 - 1) / 100, 0.0, 0, 0)
    assert described(None) is None and described({"figures": {}}) is None


@pytest.mark.parametrize("wrong", [-1, 2**32, 1.5, "1", None, True, [1]])
@pytest.mark.parametrize("name", VALUES)
def test_what_is_no_number_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="load_now is no map of numbers"):
        load_of(replace(DESCRIPTION, extensions={"load_now": VALUES | {name: wrong}}))
    with pytest.raises(RemoteProtocolError, match="load_now is no map of numbers"):
        load_of(replace(DESCRIPTION, extensions={"load_now": [VALUES]}))
