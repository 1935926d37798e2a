"""What the doctor makes of what it sees. That it sees it is tested with real nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llmnode.core.model import ModelInfo
from llmnode.models.size import ModelSize
from llmnode.node.doctor import (
    BLOCKER,
    OK,
    WARNING,
    Finding,
    PeerAnswer,
    blocker_of,
    check_coverage,
    check_disk,
    check_memory,
)
from llmnode.wire.messages import Description

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelInfo("ours", b"o" * 32, blocks=10, hidden_size=8, context_tokens=64, dtype="float32")
MIB = 1 << 20


def _answer(start: int, end: int, model: str = "ours", dtype: str = "float32") -> PeerAnswer:
    digest = model[:1].encode() * 32
    description = Description("llmnode", model, digest, 10, 8, 64, dtype, start, end, 100)
    return PeerAnswer(f"/ip4/127.0.0.1/tcp/{start}", description, dial_s=0.1, answer_s=0.1)


def test_the_first_blocker_is_the_one() -> None:
    findings = [Finding("a", OK, ""), Finding("b", WARNING, ""), Finding("c", BLOCKER, ""), Finding("d", BLOCKER, "")]
    assert blocker_of(findings) == findings[2]
    assert blocker_of(findings[:2]) is None


@pytest.mark.parametrize(
    ("available_mib", "verdict", "words"),
    [
        (1000, OK, "10 of 10 blocks fit"),
        (45, OK, "3 of 10 blocks fit"),
        (14, BLOCKER, "no block fits"),
    ],
)
def test_memory_is_for_blocks_with_their_kv(available_mib: int, verdict: str, words: str) -> None:
    size = ModelSize(blocks=10, block_bytes=5 * MIB, ends_bytes=7 * MIB, kv_token_bytes=1024)
    found = check_memory(available_mib * MIB, "memory", size, kv_tokens=10_240)
    assert (found.verdict, bool(found.fix)) == (verdict, verdict == BLOCKER)
    assert words in found.text


def test_peers_that_hold_all_are_well() -> None:
    (found,) = check_coverage([_answer(5, 10), _answer(0, 6)], MODEL)
    assert found.verdict == OK


def test_blocks_that_no_peer_holds_are_named() -> None:
    (found,) = check_coverage([_answer(0, 3), _answer(5, 9)], MODEL)
    assert found.verdict == WARNING
    assert "none of these peers has blocks [3, 5), [9, 10) of ours" in found.text


def test_a_peer_of_another_model_does_not_count() -> None:
    other, missing = check_coverage([_answer(0, 3), _answer(3, 10, "theirs")], MODEL)
    assert "/ip4/127.0.0.1/tcp/3 serves theirs" in other.text
    assert other.fix == "give the MODEL that it serves"
    assert "blocks [3, 10)" in missing.text


def test_a_peer_of_another_dtype_does_not_count() -> None:
    other, missing = check_coverage([_answer(0, 3), _answer(3, 10, dtype="bfloat16")], MODEL)
    assert "/ip4/127.0.0.1/tcp/3 computes in bfloat16, not in float32" in other.text
    assert other.fix == "give --dtype bfloat16"
    assert "blocks [3, 10)" in missing.text


def test_the_cache_need_not_be_there_but_must_be_possible(tmp_path: Path) -> None:
    assert check_disk(tmp_path / "new" / "cache").verdict != BLOCKER
    (tmp_path / "file").touch()
    found = check_disk(tmp_path / "file" / "cache")
    assert (found.verdict, "LLMNODE_CACHE" in found.fix) == (BLOCKER, True)
