"""The log of a hop: whatever was appended and cut off, a replay gives the positions that remain, and nothing is kept of
the others; and the hop that writes it takes no answer that could not be given again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmnode import _native
from llmnode.core.ids import Epoch, PeerId, Step
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import RemoteProtocolError
from llmnode.session.chunk_run import run_chunk
from llmnode.session.hop import SessionHop
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import open_internet
from llmnode.wire.chunk import Chunk
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.log import PayloadLog
from llmnode.wire.messages import Result, pack
from llmnode.wire.payload import Codec, HiddenForm, payload_bytes
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from llmnode.testing import MemoryNetwork

Change: TypeAlias = tuple[str, int]

codecs = st.sampled_from(list(Codec))
exact_sizes = {codec: st.sampled_from([64, 128] if codec is Codec.INT8 else [1, 3, 64]) for codec in Codec}
"""Hidden sizes of which payloads can be cut and joined without a loss."""
changes = st.lists(st.tuples(st.sampled_from(["append", "append", "truncate"]), st.integers(1, 7)), max_size=12)


@st.composite
def exact_forms(draw: st.DrawFn) -> HiddenForm:
    codec = draw(codecs)
    return HiddenForm(draw(exact_sizes[codec]), codec)


def written(form: HiddenForm, history: list[Change]) -> tuple[PayloadLog, np.ndarray, list[int]]:
    """A log with this history, the hidden states that should be in it, and how long each piece appended was."""
    log, rng = PayloadLog(form), np.random.default_rng(1)
    expected = np.empty((0, form.hidden_size), "<f4")
    lengths = []
    for change, positions in history:
        if change == "append":
            hidden = rng.standard_normal((positions, form.hidden_size)).astype("<f4")
            log.append(form.encode(hidden.tobytes()), positions)
            expected = np.concatenate([expected, hidden])
            lengths.append(positions)
        else:
            keep = max(0, len(expected) - positions)
            log.truncate(keep)
            expected = expected[:keep]
    return log, expected, lengths


@given(exact_forms(), changes, st.integers(1, 9))
def test_the_chunks_are_the_payload_of_the_positions_that_remain(
    form: HiddenForm, history: list[Change], most: int
) -> None:
    log, expected, _ = written(form, history)
    chunks = list(log.chunks(most))
    assert sum(length for _, length in chunks) == log.positions == len(expected)
    at = 0
    for payload, length in chunks:
        assert bytes(payload) == bytes(form.encode(expected[at : at + length].tobytes()))
        at += length


@given(exact_forms(), changes, changes, st.integers(1, 9))
def test_a_copy_has_the_same_positions_and_a_future_of_its_own(
    form: HiddenForm, history: list[Change], future: list[Change], most: int
) -> None:
    log, expected, _ = written(form, history)
    copy = log.copy()
    assert copy.shared_with(log) == len(expected)
    for change, positions in future:
        if change == "append":
            copy.append(bytes(payload_bytes(form.codec, positions * form.hidden_size)), positions)
        else:
            copy.truncate(max(0, copy.positions - positions))
    assert log.positions == len(expected)
    assert copy.shared_with(log) == log.shared_with(copy) <= min(copy.positions, log.positions)
    whole = form.join(list(log.chunks(most))) if log.positions else b""
    assert bytes(whole) == bytes(form.encode(expected.tobytes()))


def test_shared_are_the_pieces_that_are_the_very_same_from_the_start() -> None:
    form = HiddenForm(1, Codec.RAW)
    one, other = PayloadLog(form), PayloadLog(form)
    first, second = bytes([1] * 8), bytes([2] * 4)
    for log in (one, other):
        log.append(first, 2)
    one.append(second, 1)
    other.append(bytes(bytearray(second)), 1)  # equal, and computed by another
    for log in (one, other):
        log.append(first, 2)
    assert one.shared_with(other) == 2
    other.truncate(1)
    assert one.shared_with(other) == 0, "a piece that was cut is another"


@given(exact_forms(), changes, st.integers(1, 9))
def test_a_chunk_is_longer_than_the_most_only_if_one_piece_was(
    form: HiddenForm, history: list[Change], most: int
) -> None:
    log, _, lengths = written(form, history)
    longest = max([most, *lengths])
    chunks = [length for _, length in log.chunks(most)]
    assert all(0 < length <= longest for length in chunks)


@given(exact_forms(), changes)
def test_pieces_of_one_position_fill_every_chunk_but_the_last(form: HiddenForm, history: list[Change]) -> None:
    log, _, _ = written(form, [(change, 1) for change, _ in history])
    chunks = [length for _, length in log.chunks(3)]
    assert chunks == [3] * (log.positions // 3) + [log.positions % 3] * (log.positions % 3 > 0)


@given(st.integers(1, 200), codecs, changes, st.integers(1, 9))
def test_chunks_of_any_hidden_size_pass_for_what_they_are(
    hidden_size: int, codec: Codec, history: list[Change], most: int
) -> None:
    form = HiddenForm(hidden_size, codec)
    log, expected, _ = written(form, history)
    at = 0
    for payload, length in log.chunks(most):
        frame = Frame(FrameType.STEP, length=length, payload=payload)
        form.check(frame)
        decoded = np.frombuffer(form.decode(frame), "<f4").reshape(length, hidden_size)
        wanted = expected[at : at + length]
        # Every cut may quantize anew where rows share blocks; each time by half the widest gap at most.
        bound = 0 if codec is Codec.RAW else 0.04 * (1 + len(history)) * max(1.0, np.abs(expected).max())
        assert (np.abs(decoded - wanted) <= bound).all()
        at += length
    assert at == len(expected)


@given(st.sampled_from([1, 3, 48, 64]), codecs, changes)
def test_only_the_positions_that_remain_are_kept_in_memory(
    hidden_size: int, codec: Codec, history: list[Change]
) -> None:
    log, _, _ = written(HiddenForm(hidden_size, codec), history)
    for payload, length in log._pieces:
        whole = memoryview(payload).obj
        assert memoryview(whole).nbytes == payload_bytes(codec, length * hidden_size)


@given(exact_forms(), changes, st.data())
def test_any_positions_that_remain_can_be_read(form: HiddenForm, history: list[Change], data: st.DataObject) -> None:
    log, expected, _ = written(form, history)
    if not len(expected):
        return
    start = data.draw(st.integers(0, len(expected) - 1))
    length = data.draw(st.integers(1, len(expected) - start))
    assert bytes(log.read(start, length)) == bytes(form.encode(expected[start : start + length].tobytes()))


HOP = Hop(PeerId("peer-far"), Span(2, 4))
MODEL = ModelInfo("exact", b"d" * 32, blocks=6, hidden_size=48, context_tokens=100)


async def _answer_every_step_with(payload: bytes, network: MemoryNetwork) -> None:
    async with network.accept() as link:
        while True:
            frame = await link.receive()
            digest = _native.blake3_digest(frame.payload)
            output_digest = _native.blake3_digest(payload)
            result = pack(Result(0, 0, digest, output_digest, bytes(64), False, b"", b""))
            await link.send(
                Frame(
                    FrameType.RESULT, frame.session, frame.epoch, frame.step, frame.start, frame.length, result, payload
                )
            )


@pytest.mark.parametrize("scale", ["nan", "inf", "-1"])
def test_a_peer_is_blamed_for_its_own_int8_that_means_nothing(scale: str) -> None:
    terms = SessionTerms(MODEL, 1, Codec.INT8, ClientPolicy())
    good = bytes(terms.form.encode(bytes(MODEL.row_bytes)))
    bad = np.float32(scale).tobytes() + good[4:]

    async def main() -> None:
        async with open_internet() as internet, trio.open_nursery() as nursery:
            network = internet.network("far")
            nursery.start_soon(_answer_every_step_with, bad, network)
            link = await internet.network("near").dial(network.addresses[0])
            async with open_connection(link) as connection:
                hop = SessionHop(HOP, connection, terms)
                with pytest.raises(RemoteProtocolError) as raised:
                    await run_chunk([hop], Chunk(Epoch(0), Step(0), 0, 1), good, terms.policy)
                assert (raised.value.peer, raised.value.span) == (HOP.peer, HOP.span)
                assert hop.failure is raised.value
            nursery.cancel_scope.cancel()

    trio.run(main)
