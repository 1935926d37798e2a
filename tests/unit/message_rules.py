"""The values that each field of each message may have and may not, written down a second time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgpack
import pytest
from hypothesis import strategies as st

from llmnode.errors import PeerRefused, RemoteProtocolError
from llmnode.wire.messages import (
    Description,
    ForkRequest,
    Lease,
    Leased,
    Neighbours,
    Opened,
    OpenRequest,
    Refusal,
    Replay,
    Replayed,
    Result,
    Resumed,
    pack,
    unpack,
)
from llmnode.wire.pass_messages import Pass, Passed
from llmnode.wire.push_messages import Pushed, PushLimit

Kind: TypeAlias = Any  # one of KINDS: the union of their types says no more
Value: TypeAlias = Any  # anything that msgpack can carry
MOST = 2**32 - 1
LONGEST_REASON = 250
"""The most characters of an error, whatever the peer sent, since errors go into our log."""


@dataclass(frozen=True)
class Rule:
    """The values of one field, written down a second time. `edges` are allowed, `wrong` is not."""

    allowed: st.SearchStrategy[Value]
    edges: list[Value]
    wrong: list[Value] = field(default_factory=list)
    is_optional: bool = False


NO_SCALAR: list[Value] = [None, [], [1], {}, {"a": 1}, [[[]]]]
NO_INT: list[Value] = [True, False, 1.0, math.nan, math.inf, "1", b"1", "", *NO_SCALAR]
NO_TEXT: list[Value] = [b"name", b"", 1, True, 1.0, *NO_SCALAR]
NO_BYTES: list[Value] = ["x" * 32, 32, True, 32.0, [0] * 32, *NO_SCALAR]


def number(low: int, high: int) -> Rule:
    return Rule(st.integers(low, high), [low, high], [low - 1, high + 1, -(2**63), 2**64 - 1, *NO_INT])


def text(low: int, high: int) -> Rule:
    wrong = ["x" * (high + 1), "x" * 15_000, *NO_TEXT]
    edges = ["x" * low, "x" * high, "\N{GRINNING FACE}" * high]
    return Rule(st.text(min_size=low, max_size=min(high, 300)), edges, wrong + [""] * (low > 0))


def octets(low: int, high: int) -> Rule:
    wrong = [bytes(high + 1), bytes(15_000), *NO_BYTES]
    short = [b"", bytes(low - 1)] if low else []
    return Rule(st.binary(min_size=low, max_size=high), [bytes(low), b"\xff" * high], wrong + short)


U32 = number(0, MOST)
COUNT = number(1, MOST)
MICROSECONDS = number(0, 2**48)
TOTAL = number(0, 2**63 - 1)
DIGEST, SESSION, SIGNATURE = octets(32, 32), octets(16, 16), octets(64, 64)
FLAG = Rule(st.booleans(), [False, True], [0, 1, 2, "true", b"\x01", 1.0, *NO_SCALAR])
NAME = text(1, 200)
LENGTHS = Rule(
    st.lists(st.integers(1, MOST), min_size=1, max_size=32),
    [[1], [MOST] * 32],
    [[], [0], [MOST + 1], [1] * 33, [1.0], [True], ["1"], [None], [[1]], 1, "1", b"1", None, {"a": 1}, True],
)
OPTIONAL_DIGEST = replace(DIGEST, is_optional=True)
DEEP: Value = [[[[1]]]]
EXTENSIONS = Rule(
    st.dictionaries(st.text(min_size=1, max_size=64), st.integers(0, 9) | st.just(DEEP), max_size=16),
    [{}, {"x" * 64: DEEP}, {f"name {number}": b"value" for number in range(16)}],
    [
        *({f"name {number}": 1 for number in range(size)} for size in (17, 40)),
        *({name: 1} for name in ("", "x" * 65, b"name")),
        *({"name": value} for value in ([DEEP], {"a": DEEP}, [[1], {"a": {"a": {"a": [1]}}}])),
        *(value for value in NO_SCALAR if not isinstance(value, dict)),
    ],
    is_optional=True,
)
REQUIRED_NAMES = Rule(
    st.just([]),
    [[]],
    [[""], ["x" * 65], [b"name"], [1], [["name"]], ["name"] * 17, "name", {"name": 1}, 1, True, None],
    is_optional=True,
)
KINDS: dict[Kind, dict[str, Rule]] = {
    Description: {
        "software": NAME,
        "model": NAME,
        "model_digest": DIGEST,
        "blocks": COUNT,
        "hidden_size": COUNT,
        "context_tokens": COUNT,
        "dtype": NAME,
        "span_start": U32,
        "span_end": COUNT,
        "kv_tokens_free": U32,
        "sessions": U32,
        "steps": TOTAL,
        "steps_given_directly": TOTAL,
        "results_pushed": TOTAL,
        "positions": TOTAL,
        "busy_us": TOTAL,
        "sent_bytes": TOTAL,
        "sent_plain_bytes": TOTAL,
        "received_bytes": TOTAL,
        "received_plain_bytes": TOTAL,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    OpenRequest: {
        "model_digest": DIGEST,
        "span_start": U32,
        "span_end": COUNT,
        "max_length": COUNT,
        "dtype": NAME,
        "codec": NAME,
        "priority": NAME,
        "keep_outputs": FLAG,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    Result: {
        "queue_us": MICROSECONDS,
        "compute_us": MICROSECONDS,
        "input_digest": DIGEST,
        "output_digest": DIGEST,
        "signature": SIGNATURE,
        "pushed": FLAG,
        "shown_input": octets(0, 32),
        "shown_signature": octets(0, 64),
    },
    Pass: {
        "model_digest": DIGEST,
        "span_start": U32,
        "span_end": COUNT,
        "dtype": NAME,
        "codec": NAME,
        "priority": NAME,
        "lengths": LENGTHS,
        "adapter": OPTIONAL_DIGEST,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    Passed: {"queue_us": MICROSECONDS, "compute_us": MICROSECONDS},
    Pushed: {"input_digest": DIGEST, "signature": SIGNATURE},
    PushLimit: {"limit_bytes": TOTAL},
    Replay: {"push": FLAG},
    Replayed: {"output_digest": DIGEST, "pushed": FLAG},
    Lease: {"lease_ms": U32, "leaves": FLAG},
    Leased: {"lease_ms": U32},
    Opened: {"nonce": octets(16, 16)},
    Resumed: {"epoch": U32, "position": U32},
    Neighbours: {
        "sender": text(0, 200),
        "receiver": text(0, 200),
        "receiver_session": SESSION,
        "quiet": FLAG,
        "again": FLAG,
        "extensions": EXTENSIONS,
        "required": REQUIRED_NAMES,
    },
    ForkRequest: {"source": SESSION, "shared": U32},
    Refusal: {"code": NAME, "message": text(0, 2000), "retry_after_ms": U32},
}
FIELDS = [(kind, name) for kind, rules in KINDS.items() for name in rules]
VALID: dict[Kind, dict[str, Value]] = {
    kind: {name: rule.edges[0] for name, rule in rules.items()} for kind, rules in KINDS.items()
}
REQUIRED = [(kind, name) for kind, name in FIELDS if not KINDS[kind][name].is_optional]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
every_field = pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=[f"{kind.__name__}.{name}" for kind, name in FIELDS]
)
every_required_field = pytest.mark.parametrize(
    ("kind", "name"), REQUIRED, ids=[f"{kind.__name__}.{name}" for kind, name in REQUIRED]
)
messages = st.one_of(
    [st.builds(kind, **{name: rule.allowed for name, rule in rules.items()}) for kind, rules in KINDS.items()]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4))
)
names = st.sampled_from(sorted({name for _, name in FIELDS}))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | scalars, inner, max_size=4),
    max_leaves=8,
)


def refused(kind: Kind, meta: bytes) -> str:
    """The reason why `meta` is not a `kind`."""
    with pytest.raises(RemoteProtocolError) as caught:
        unpack(kind, meta)
    assert caught.value.message.startswith(kind.__name__)
    assert len(caught.value.message) <= LONGEST_REASON
    return caught.value.message


def unpack_or_refuse(kind: Kind, meta: bytes) -> None:
    """Any `meta` is either a message that means the same when it is sent on, or the one short error."""
    try:
        message = unpack(kind, meta)
    except RemoteProtocolError as error:
        reason = error.message
    except PeerRefused as refusal:
        reason = f"{kind.__name__} {refusal.code}"
    else:
        assert unpack(kind, pack(message)) == message
        return
    assert reason.startswith(kind.__name__)
    assert len(reason) <= LONGEST_REASON
