"""A server's KV as memory: amounts as people write them, how many positions they are for, and on which device."""

from __future__ import annotations

import pytest

from llmnode.compute.loading import Wanted, _kv_device
from llmnode.core.serving.kv_memory import Memory, parse_memory
from llmnode.core.span import Span
from llmnode.errors import ConfigError
from llmnode.models.size import GRAPH_BYTES, KV, LOG, MEMORY_SHARE, PEERS_BYTES, WEIGHTS, ModelSize, Place, find_places

MIB = 1 << 20
SIZE = ModelSize([10 * MIB] * 30, ends_bytes=100 * MIB, kv_token_bytes=1024)
LOGGING = ModelSize([10 * MIB] * 30, ends_bytes=0, kv_token_bytes=1024, log_token_bytes=2048)
ALL = Span(0, 30)


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
    assert SIZE.kv_tokens(30 * MIB, blocks=30) == 1024
    assert SIZE.kv_tokens(30 * MIB, blocks=15) == 2048
    assert SIZE.kv_tokens(30 * 1024, blocks=30) == 1
    assert SIZE.kv_tokens(30 * 1024 - 1, blocks=30) == 0


def test_what_is_logged_of_each_position_counts() -> None:
    assert LOGGING.kv_tokens(32 * MIB, blocks=30) == 1024
    assert LOGGING.kv_tokens(3 * MIB, blocks=1) == 1024
    assert LOGGING.fits(here(332), ALL, 1024) and not LOGGING.fits(here(331), ALL, 1024)
    free = int(332 * MIB / MEMORY_SHARE) + 1
    assert LOGGING.fitting_blocks([Place(free)], lambda _blocks: 1024) == 30
    assert LOGGING.fitting_blocks([Place(free - 2 * MIB)], lambda _blocks: 1024) == 29


def here(free_mib: int) -> list[Place]:
    return [Place(free_mib * MIB)]


def on_gpu(free_mib: int, free_here_mib: int) -> list[Place]:
    return [
        Place(free_mib * MIB, "cuda", frozenset((WEIGHTS, KV))),
        Place(free_here_mib * MIB, "cpu", frozenset((LOG,))),
    ]


def kv_apart(free_mib: int, free_here_mib: int) -> list[Place]:
    return [
        Place(free_mib * MIB, "cuda", frozenset((WEIGHTS,))),
        Place(free_here_mib * MIB, "cpu", frozenset((KV, LOG))),
    ]


@pytest.mark.parametrize(
    ("enough", "short", "numbers"),
    [
        (
            here(332),
            here(331),
            r"331 MiB are free; their weights take 300, KV for 1024 positions 30, the log of those 2: ",
        ),
        (
            on_gpu(330, 2),
            on_gpu(329, 2),
            r"329 MiB are free on cuda; their weights take 300, KV for 1024 positions 30: ",
        ),
        (on_gpu(330, 2), on_gpu(330, 1), r"1 MiB are free; the log of those 2: "),
        (kv_apart(300, 32), kv_apart(299, 32), r"299 MiB are free on cuda; their weights take 300: "),
        (kv_apart(300, 32), kv_apart(300, 31), r"31 MiB are free; KV for 1024 positions 30, the log of those 2: "),
    ],
    ids=["on a CPU", "on a GPU", "a log that is not there", "KV apart, weights", "KV apart, KV"],
)
def test_what_is_more_than_is_free_where_it_is_to_be_is_refused_with_numbers(
    enough: list[Place], short: list[Place], numbers: str
) -> None:
    assert LOGGING.fits(enough, ALL, 1024)
    LOGGING.check_memory(enough, ALL, 1024, "small")
    assert not LOGGING.fits(short, ALL, 1024)
    with pytest.raises(ConfigError, match=rf"^blocks \[0, 30\) of small do not fit: {numbers}"):
        LOGGING.check_memory(short, ALL, 1024, "small")


@pytest.mark.parametrize(
    ("places", "span", "fix"),
    [
        (here(331), ALL, "serve fewer --blocks, lower --kv-tokens or --kv-memory, raise the container's limit or end"),
        (here(299), ALL, "serve fewer --blocks, raise the container's limit or end"),
        (here(12), Span(3, 4), "lower --kv-tokens or --kv-memory, raise the container's limit or end"),
        (on_gpu(329, 2), ALL, "serve fewer --blocks, lower --kv-tokens or --kv-memory, end other programs$"),
    ],
    ids=["KV is too much", "weights are too much", "one block", "on a GPU"],
)
def test_only_what_helps_is_told(places: list[Place], span: Span, fix: str) -> None:
    with pytest.raises(ConfigError, match=f": {fix}"):
        LOGGING.check_memory(places, span, 1024, "small")


def test_blocks_that_are_not_alike_are_counted_as_they_are() -> None:
    size = ModelSize([10 * MIB, 90 * MIB, 10 * MIB], ends_bytes=0, kv_token_bytes=1024)
    assert size.fits(here(21), Span(2, 3), 1024) and not size.fits(here(21), Span(1, 2), 1024)
    assert size.fits(here(112), Span(1, 3), 6 * 1024)
    assert size.fitting_blocks(here(250), lambda _blocks: 1024) == 2, "of the largest: those are chosen that are needed"


def test_blocks_are_chosen_for_what_the_kv_leaves() -> None:
    places = [Place(int(200 * MIB / MEMORY_SHARE) + 1)]

    def beside(kv_bytes: int) -> int:
        return SIZE.fitting_blocks(places, lambda blocks: SIZE.kv_tokens(kv_bytes, blocks))

    assert [beside(kv) for kv in (0, 100 * MIB, 191 * MIB, 300 * MIB)] == [20, 10, 0, 0]


def test_kv_on_another_device_leaves_the_blocks_theirs() -> None:
    def fitting(places: list[Place]) -> int:
        return SIZE.fitting_blocks(places, lambda _blocks: 1024)

    assert fitting(kv_apart(251, 251)) == 20
    assert fitting(kv_apart(251, 13)) == 10
    assert fitting(kv_apart(13, 251)) == 1
    assert fitting(here(251)) == 18


@pytest.mark.parametrize(
    ("device", "kv_device", "held"),
    [
        ("cpu", None, {"cpu": {WEIGHTS, KV, LOG}}),
        ("cuda", None, {"cuda": {WEIGHTS, KV}, "cpu": {LOG}}),
        ("cuda:1", "cpu", {"cuda:1": {WEIGHTS}, "cpu": {KV, LOG}}),
    ],
)
def test_a_server_has_its_parts_where_it_was_told(
    device: str, kv_device: str | None, held: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmnode.models.size.free_bytes", lambda each: PEERS_BYTES + len(each))
    kept = {device: GRAPH_BYTES} | {"cpu": PEERS_BYTES}
    assert find_places(device, kv_device) == [
        Place(PEERS_BYTES + len(each) - kept.get(each, 0), each, frozenset(what)) for each, what in held.items()
    ]


def test_memory_that_peers_may_take_is_free_for_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for free, left in ((PEERS_BYTES + 7, 7), (PEERS_BYTES - 7, 0)):
        monkeypatch.setattr("llmnode.models.size.free_bytes", lambda _each, free=free: free)
        assert [each.free_bytes for each in find_places("cpu")] == [left]
        on_gpu = [each.free_bytes for each in find_places("cuda")]
        assert on_gpu == [free - GRAPH_BYTES, left], "but for graphs, it is this machine's memory"


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
