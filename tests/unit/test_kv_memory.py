"""A server's KV as memory: amounts as people write them, how many positions they are for, and on which device."""

from __future__ import annotations

import pytest

from llmnode.compute.loading import Wanted, _kv_device
from llmnode.core.memory import Memory, parse_memory
from llmnode.errors import ConfigError
from llmnode.models.size import MEMORY_SHARE, ModelSize

MIB = 1 << 20
SIZE = ModelSize(blocks=30, block_bytes=10 * MIB, ends_bytes=100 * MIB, kv_token_bytes=1024)


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("20%", Memory(share=0.2)),
        ("12.5 %", Memory(share=0.125)),
        ("100%", Memory(share=1.0)),
        ("2GiB", Memory(size_bytes=2 << 30)),
        (" 1.5 GiB ", Memory(size_bytes=3 << 29)),
        ("500MB", Memory(size_bytes=500_000_000)),
        ("64MiB", Memory(size_bytes=64 << 20)),
    ],
)
def test_amounts_are_read_as_people_write_them(text: str, memory: Memory) -> None:
    assert parse_memory(text) == memory


@pytest.mark.parametrize("text", ["", "20", "0%", "101%", "-1GiB", "2 gib", "2TiB", "1e3MB", "0MiB", "nan%", "٢GiB"])
def test_what_is_no_amount_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-memory {text!r}: write a share of what is free, as 20%"):
        parse_memory(text, "--kv-memory")


def test_a_share_is_of_what_is_free_and_an_amount_is_itself() -> None:
    assert Memory(share=0.25).of(1000) == 250
    assert Memory(size_bytes=2000).of(1000) == 2000


def test_memory_is_for_as_many_positions_as_fit_into_it_in_all_blocks() -> None:
    assert SIZE.kv_tokens(1000 * MIB, 30 * MIB, blocks=30) == 1024
    assert SIZE.kv_tokens(1000 * MIB, 30 * MIB, blocks=15) == 2048
    assert SIZE.kv_tokens(1000 * MIB, 30 * 1024, blocks=30) == 1


def test_what_is_logged_of_each_position_counts() -> None:
    size = ModelSize(blocks=30, block_bytes=10 * MIB, ends_bytes=0, kv_token_bytes=1024, log_token_bytes=2048)
    assert size.kv_tokens(1000 * MIB, 32 * MIB, blocks=30) == 1024
    assert size.kv_tokens(1000 * MIB, 3 * MIB, blocks=1) == 1024


def test_more_than_is_free_beside_the_blocks_is_refused_with_numbers() -> None:
    assert SIZE.kv_tokens(330 * MIB, 30 * MIB, blocks=30)
    with pytest.raises(ConfigError, match=r"30 MiB of KV do not fit: 329 MiB are free, of which 30 blocks take 300"):
        SIZE.kv_tokens(329 * MIB, 30 * MIB, blocks=30)
    with pytest.raises(ConfigError, match=r"30719 bytes of KV hold no position of 30 blocks, which takes 30720"):
        SIZE.kv_tokens(1000 * MIB, 30 * 1024 - 1, blocks=30)


def test_blocks_are_chosen_for_what_the_kv_leaves() -> None:
    free = int(200 * MIB / MEMORY_SHARE) + 1
    assert SIZE.fitting_blocks_beside(free, 0) == 20
    assert SIZE.fitting_blocks_beside(free, 100 * MIB) == 10
    assert SIZE.fitting_blocks_beside(free, 191 * MIB) == 0
    assert SIZE.fitting_blocks_beside(free, 300 * MIB) == 0


def test_kv_on_another_device_leaves_the_blocks_theirs() -> None:
    free = int(200 * MIB / MEMORY_SHARE) + 1
    assert SIZE.kv_tokens(30 * MIB, 30 * MIB, blocks=30, apart=True) == 1024
    with pytest.raises(ConfigError, match=r"30 MiB of KV do not fit: 29 MiB are free: lower --kv-memory"):
        SIZE.kv_tokens(29 * MIB, 30 * MIB, blocks=30, apart=True)
    assert SIZE.fitting_blocks_apart(free, free, kv_tokens=1024) == 20
    assert SIZE.fitting_blocks_apart(free, free // 20, kv_tokens=1024) == 10
    assert SIZE.fitting_blocks_apart(free // 20, free, kv_tokens=1024) == 1
    assert SIZE.fitting_blocks(free, kv_tokens=1024) == 18


@pytest.mark.parametrize(
    ("asked", "blocks", "device"),
    [
        (None, "cuda", None),
        ("cpu", "cpu", None),
        ("cpu", "cuda:1", "cpu"),
        ("cuda", "cuda:1", None),
        ("cuda:1", "cuda:1", None),
    ],
)
def test_kv_is_where_the_blocks_are_or_on_the_cpu(asked: str | None, blocks: str, device: str | None) -> None:
    assert _kv_device(Wanted(kv_device=asked, device=blocks)) == device


@pytest.mark.parametrize(
    ("asked", "blocks", "fix"),
    [
        ("cuda", "cpu", "here cpu, or on the CPU: leave it out, write cpu, or give --device cuda$"),
        ("cuda:0", "cuda:1", "or give --device cuda:0$"),
        ("disk", "cpu", "leave it out, write cpu$"),
    ],
)
def test_no_other_device_holds_kv(asked: str, blocks: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"^--kv-device {asked}: KV is kept where the blocks are, .*{fix}"):
        _kv_device(Wanted(kv_device=asked, device=blocks))
